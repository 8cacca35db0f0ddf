"""Policy: a causal language model, its tokenizer, and the ids that end a completion.

The user's own objects are not changed: the tokenizer is copied before it gets a padding token. `loading.load_policy` is
how a policy is made.

Left out on purpose: the training mode. A policy always runs with dropout off (known_faults B23), so the first ratio
after sampling is exactly 1. Sequence-to-sequence models are refused.
"""

import contextlib
import copy
import datetime
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from rlkit.adapters import REFERENCE_ADAPTER, adapter_active, adapter_changes_nothing, add_reference_adapter
from rlkit.causal_lm import (
    causal_lm_of,
    check_is_causal_lm,
    decoder_of,
    end_of_completion_ids,
    ensure_pad_token,
    evaluation_mode,
    vocabulary_size,
)
from rlkit.distributed import collectives
from rlkit.distributed.sharding import broadcast_weights, fsdp_modules, gathered
from rlkit.engine import Engine
from rlkit.token_scorer import EntropyMode, TokenScorer, TokenScores, score_rollout
from rlkit.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
        date: what a chat template that writes today's date writes; the day when the policy was made. A resumed
            `PromptLoader` sets it to that of its checkpoint.
        engine: how `sample` draws completions from this policy; None means the transformers engine.
        marks: of each living engine, by identity, the weights that it was given last (`weights_mark`).
        not_finite: how many values of each trained parameter were NaN or infinite before the first update (a bias of
            -inf that rules a token out); None until then (`loss_step`).
        gradients_checked: the first update has found the gradients equal on every process (`loss_step`).
        strategy: how the weights lie on the processes: "single", "ddp", "fsdp2" or "zero3" (`world.prepare`).
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
        check_is_causal_lm(model)
        self.model: Any = model
        self.tokenizer = copy.deepcopy(tokenizer)
        self.name = name
        self.version = 0
        self.autocast = autocast
        self.date = datetime.date.today()
        self.engine: Engine | None = None
        self.marks: Any = WeakIdKeyDictionary()  # an id alone would pass from a dead engine to a new one
        self.eos_ids = end_of_completion_ids(model, tokenizer, extra=eos_ids)
        self.pad_id = ensure_pad_token(self.tokenizer, self.eos_ids)
        if len(tokenizer) > vocabulary_size(model):
            raise ValueError(
                f"Policy {name!r}: the tokenizer has {len(tokenizer)} tokens, the model only {vocabulary_size(model)} "
                "embeddings. Pass the tokenizer that belongs to the model, or call model.resize_token_embeddings first."
            )
        self.local_scorer = TokenScorer(model)
        self.scorer: nn.Module = self.local_scorer
        self.strategy = "single"
        self.gradients_checked = False
        self.not_finite: dict[str, int] | None = None

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

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""
        return vocabulary_size(self.model)

    @functools.cached_property
    def unused_ids(self) -> tuple[int, ...]:
        """Ids that the model has a logit for but the tokenizer no token (padding of the vocabulary); never sampled."""
        used = set(self.tokenizer.get_vocab().values())
        return tuple(i for i in range(self.vocab_size) if i not in used)

    def use(self, engine: "Engine") -> "Policy":
        """Draw completions with this engine from now on; `sample`, `evaluate` and `estimate_vstar` take it.

        Returns:
            The policy itself.

        Raises:
            TypeError: it is no engine.
            ValueError: the engine was made for another policy.

        Example: `policy.use(rl.VLLMColocate(policy, max_model_length=512))`
        """
        if not hasattr(engine, "generate") or not hasattr(engine, "policy"):
            raise TypeError(
                f"policy.use: expected an engine, got {engine!r}. Make one, such as rl.VLLMColocate(policy, ...); the "
                "default one is rl.TransformersEngine(policy)."
            )
        if engine.policy is not self:
            raise ValueError(
                f"policy.use: the engine {engine.name!r} was made for {engine.policy!r}, not for this policy. Make one "
                "with this policy as its first argument."
            )
        self.engine = engine
        return self

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that an optimizer should get."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def score_tokens(
        self, rollout: Rollout, *, entropy: EntropyMode = "detached", balance: bool = False
    ) -> TokenScores:
        """Log-probabilities and entropies of a rollout's tokens. All log-probabilities of rlkit come from here.

        Gradients flow if grad mode is on and parameters require them. The method sees whole rows with their group ids,
        so that a group's prompt can one day be computed once for all its completions. `balance` asks a
        mixture-of-experts model for its load-balancing loss as well.
        """
        scorer = self.scorer if torch.is_grad_enabled() else self.local_scorer
        with self.inference_settings():
            return score_rollout(scorer, rollout, entropy=entropy, balance=balance)

    @contextlib.contextmanager
    def inference_settings(self) -> Iterator[None]:
        """Dropout off and this policy's autocast, for a forward pass."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(evaluation_mode(self.model))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype=self.autocast))
            yield

    def adapter_in_place(self) -> contextlib.AbstractContextManager[None]:
        """Around a reading of the weights: a reference that shares the policy's model puts its own adapter in."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def without_gradient(self) -> Iterator[None]:
        """No gradient, and sharded weights gathered: processes may take different numbers of passes inside."""
        with torch.no_grad(), gathered(self.local_scorer):
            yield

    def reference(self) -> "Policy":
        """The policy as it is now, frozen: a copy, or with a PEFT adapter the same model (see `rlkit.adapters`).

        KL from it is 0 at this moment, also for a pretrained adapter (known_faults B22).

        Raises:
            RuntimeError: the policy has been prepared for several processes already.
        """
        if self.strategy != "single":
            raise RuntimeError(
                f"policy.reference: {self.name!r} is prepared as {self.strategy}. Take the reference before "
                "world.prepare, as the notebooks do; if it is too large for one device, prepare it too."
            )
        if collectives.is_many():
            broadcast_weights(self.model)  # `prepare` does too, but this reference may be a copy taken before it
        if hasattr(self.model, "peft_config"):
            with self.inference_settings():
                fresh = adapter_changes_nothing(self.model)
            return AdapterReference(self, None if fresh else add_reference_adapter(self.model))
        model = copy.deepcopy(self.model).requires_grad_(False)
        if hasattr(model, "gradient_checkpointing_disable"):
            model.gradient_checkpointing_disable()
        frozen = Policy(
            model, self.tokenizer, name=f"{self.name} (reference)", eos_ids=self.eos_ids, autocast=self.autocast
        )
        frozen.version, frozen.date = self.version, self.date
        return frozen

    def save_pretrained(self, folder: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save model and tokenizer so that `load_policy(folder)` and transformers can load them.

        Every process calls it: sharded weights are gathered, and the main process writes.
        """
        if fsdp_modules(self.local_scorer):  # also inside `gathered`, state_dict() gives shards
            from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            kwargs = {"state_dict": get_model_state_dict(self.model, options=options)} | kwargs
        with self.without_gradient():
            if collectives.rank() == 0:
                self._write_pretrained(folder, **kwargs)
        collectives.barrier()

    def _write_pretrained(self, folder: str | os.PathLike[str], **kwargs: Any) -> None:
        config = getattr(causal_lm_of(self.model), "generation_config", None)
        own = getattr(config, "eos_token_id", None)
        if config is not None:
            config.eos_token_id = list(self.eos_ids)  # also the ids that only load_policy(eos_ids=...) named
        if hasattr(self.model, "peft_config"):  # not the frozen adapter that is the policy's reference
            names = [name for name in self.model.peft_config if name != REFERENCE_ADAPTER]
            kwargs = {"selected_adapters": names} | kwargs
        try:
            self.model.save_pretrained(folder, **kwargs)
        finally:
            if config is not None:
                config.eos_token_id = own
        self.tokenizer.save_pretrained(folder)

    def push_to_hub(
        self, repo_id: str, *, method: str = "rlkit", run: Any = None, private: bool | None = None, **kwargs: Any
    ) -> None:
        """Upload model, tokenizer and a model card to the hub.

        Args:
            repo_id: name of the repository, made if needed.
            method: for the card: "RLOO", "A*-PO", or your own.
            run: the `Run`, whose settings and versions go into the card.
            private: of a repository that is made.
            **kwargs: for `HfApi.upload_folder` (commit_message, revision, token ...).
        """
        import tempfile

        from huggingface_hub import HfApi

        from rlkit.run.model_card import model_card

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            if collectives.rank() == 0:
                card = model_card(self, method=method, run=run)
                Path(folder, "README.md").write_text(card, encoding="utf-8")
                api = HfApi(token=kwargs.pop("token", None))
                api.create_repo(repo_id, private=private, exist_ok=True)
                api.upload_folder(repo_id=repo_id, folder_path=folder, **kwargs)

    def compile(self, **kwargs: Any) -> None:
        """Compile the model below its head with `torch.compile`, in place; keyword arguments are torch's.

        Off by default: the first passes take minutes, and it pays only for long runs on a GPU.
        """
        decoder_of(self.model).compile(**({"dynamic": True} | kwargs))

    def __repr__(self) -> str:
        # ZeRO-3 leaves empty tensors in place of shards; ds_numel is the number of elements of the whole.
        sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in self.model.parameters()]
        count, trainable = sum(n for n, _ in sizes), sum(n for n, learns in sizes if learns)
        return (
            f"Policy({self.name!r}, {type(self.model).__name__}, {count:,} parameters, {trainable:,} trainable, "
            f"{next(self.model.parameters()).dtype}, {self.device}, ends on {self.eos_ids}, version {self.version})"
        )


class AdapterReference(Policy):
    """The reference of a policy with an adapter: the policy's own model with other adapter settings.

    Attributes:
        adapter: name of the frozen adapter that is active inside, or None where the adapter is off.
    """

    def __init__(self, policy: Policy, adapter: str | None) -> None:
        self.__dict__.update(policy.__dict__)  # one model, one scorer, also after world.prepare has wrapped them
        self.name = f"{policy.name} (reference)"
        self.adapter = adapter
        self.engine = None
        self.strategy = "shared"
        self._trained = policy

    @contextlib.contextmanager
    def inference_settings(self) -> Iterator[None]:
        """The reference's adapter instead of the trained one, and everything else as the policy has it."""
        self.autocast = self._trained.autocast
        with self.adapter_in_place(), super().inference_settings():
            yield

    def adapter_in_place(self) -> contextlib.AbstractContextManager[None]:
        """The reference's adapter is the active one inside; what is trained stays as it was."""
        return adapter_active(self.model, self.adapter)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """None: a reference is frozen."""
        return []

    def reference(self) -> Policy:
        """The reference itself."""
        return self

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the weights are the policy's."""
        raise RuntimeError("A reference with an adapter shares the policy's weights; save the policy before training.")
