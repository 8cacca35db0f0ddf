"""Policy: a causal language model, its tokenizer, and the ids that end a completion. `loading.load_policy` makes one.

The user's own objects are not changed: the tokenizer is copied before it gets a padding token. There is no training
mode: dropout is always off, so the first ratio after sampling is exactly 1.
"""

import contextlib
import copy
import datetime
import functools
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from rlkit import saving
from rlkit.adapters import adapter_active, adapter_changes_nothing, add_reference_adapter
from rlkit.causal_lm import (
    check_is_causal_lm,
    context_limit,
    decoder_of,
    end_of_completion_ids,
    ensure_pad_token,
    evaluation_mode,
    vocabulary_size,
)
from rlkit.distributed import collectives
from rlkit.distributed.sharding import broadcast_weights, gathered
from rlkit.engine import Engine
from rlkit.token_scorer import EntropyMode, TokenScorer, TokenScores, score_rollout
from rlkit.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Policy:
    """A causal language model with its tokenizer.

    Attributes:
        model: the transformers model, possibly inside a PEFT wrapper.
        tokenizer: a copy of the user's, with a padding token.
        eos_ids: every token id that ends a completion, sorted.
        pad_id: token id for padding; masks come from lengths, never from this id.
        name: what it was loaded from.
        version: number of optimizer steps taken.
        autocast: torch.bfloat16 for mixed precision in every pass (sampling, policy, reference), or None.
        date: the date that chat templates write: the day when the policy was made, or that of the checkpoint.
        engine: the engine of `sample`; None means the transformers engine.
        marks: by engine, the weights that it was given last (`rlkit.engines.weights.weights_mark`).
        not_finite: by trained parameter, values that were NaN or infinite before the first `loss_step` (a bias of -inf
            that rules a token out); None until then.
        gradients_checked: the first `loss_step` has found the gradients equal on every process.
        strategy: "single", "ddp", "fsdp2" or "zero3", as set by `world.prepare`.
        local_scorer, scorer: the `TokenScorer` of this process, and the same inside the wrapper of several processes.
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
        if autocast == torch.float16:
            raise ValueError(
                "load_policy: autocast must be torch.bfloat16 or None. In float16, small gradients round to 0; it "
                "needs a loss scaling that rlkit does not have."
            )
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
        return context_limit(self.model)

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
        """Set the engine of `sample`, `evaluate` and `estimate_vstar`; returns the policy itself.

        Raises:
            TypeError: not an engine.
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
        """Log-probabilities and entropies of a rollout's tokens; all log-probabilities of rlkit come from here.

        Gradients flow if grad mode is on. `balance` adds the load-balancing loss of a mixture-of-experts model.
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
        """Inside, the model's weights are this policy's (an `AdapterReference` switches adapters)."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def without_gradient(self) -> Iterator[None]:
        """No gradient, and sharded weights gathered, so that processes may take different numbers of passes inside."""
        with torch.no_grad(), gathered(self.local_scorer):
            yield

    def reference(self) -> "Policy":
        """A frozen copy of the policy; with a PEFT adapter the same model (see `rlkit.adapters`).

        The KL from it starts at 0, also with a pretrained adapter.

        Raises:
            RuntimeError: the policy has been prepared for several processes already.
        """
        if self.strategy != "single":
            raise RuntimeError(
                f"policy.reference: {self.name!r} is prepared as {self.strategy}. Take the reference before "
                "world.prepare, as the notebooks do; if it is too large for one device, prepare it too."
            )
        if collectives.is_many():
            broadcast_weights(self.model)  # `prepare` does too, but this copy is taken before it
        if hasattr(self.model, "peft_config"):
            with self.inference_settings():
                fresh = adapter_changes_nothing(self.model)
            return AdapterReference(self, None if fresh else add_reference_adapter(self.model))
        model = copy.deepcopy(self.model).requires_grad_(False)
        model.gradient_checkpointing_disable()
        frozen = Policy(
            model, self.tokenizer, name=f"{self.name} (reference)", eos_ids=self.eos_ids, autocast=self.autocast
        )
        frozen.version, frozen.date = self.version, self.date
        return frozen

    def save_pretrained(self, folder: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save model and tokenizer for `load_policy(folder)` and transformers. Every process calls it."""
        saving.save_pretrained(self, folder, **kwargs)

    def push_to_hub(
        self, repo_id: str, *, method: str = "rlkit", run: Any = None, private: bool | None = None, **kwargs: Any
    ) -> None:
        """Upload model, tokenizer and a model card to the hub.

        Args:
            repo_id: name of the repository, made if needed.
            method: "RLOO", "A*-PO", or your own, for the card.
            run: the `Run` whose settings and versions the card lists.
            private: whether a new repository is private.
            **kwargs: for `HfApi.upload_folder` (commit_message, revision, token ...).
        """
        saving.push_to_hub(self, repo_id, method=method, run=run, private=private, **kwargs)

    def compile(self, **kwargs: Any) -> None:
        """Compile the model below its head in place, as `torch.compile` does. The first passes take minutes."""
        decoder_of(self.model).compile(**({"dynamic": True} | kwargs))

    def __repr__(self) -> str:
        # Under ZeRO-3 parameters are empty tensors, whose ds_numel is the full size.
        sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in self.model.parameters()]
        count, trainable = sum(n for n, _ in sizes), sum(n for n, learns in sizes if learns)
        return (
            f"Policy({self.name!r}, {type(self.model).__name__}, {count:,} parameters, {trainable:,} trainable, "
            f"{next(self.model.parameters()).dtype}, {self.device}, ends on {self.eos_ids}, version {self.version})"
        )


class AdapterReference(Policy):
    """The reference of a policy with an adapter: its model with the frozen adapter `adapter`, or (None) with none."""

    def __init__(self, policy: Policy, adapter: str | None) -> None:
        self.__dict__.update(policy.__dict__)  # one model, one scorer, also after world.prepare has wrapped them
        self.name = f"{policy.name} (reference)"
        self.adapter = adapter
        self.engine = None
        self.strategy = "shared"
        self._trained = policy

    @contextlib.contextmanager
    def inference_settings(self) -> Iterator[None]:
        """As the policy's, with the reference's adapter."""
        self.autocast = self._trained.autocast
        with self.adapter_in_place(), super().inference_settings():
            yield

    def adapter_in_place(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the reference's adapter is active."""
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
