"""Facts about a transformers causal language model: decoder, head, limits, end tokens, evaluation mode."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def causal_lm_of(model: Any) -> Any:
    """The causal language model inside an adapter wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: nn.Module) -> Any:
    """The part of a causal language model below its head."""
    return causal_lm_of(model).base_model


def vocabulary_size(model: nn.Module) -> int:
    """Number of logits per token."""
    return int(causal_lm_of(model).config.get_text_config().vocab_size)


def context_limit(model: nn.Module) -> int | None:
    """Most tokens of prompt and completion together, or None if the model has no limit."""
    config = causal_lm_of(model).config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(limit := getattr(config, name, None), int) and limit > 0:
            return limit
    return None


def find_head(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The function from hidden states to logits, checked against the model's logits on a probe; None if none fits."""
    lm = causal_lm_of(model)
    linear = lm.get_output_embeddings()
    decoder = getattr(lm, "base_model", None)
    if linear is None or decoder is None or decoder is lm:
        _report_no_head(lm)
        return None
    config = lm.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    multiply, divide = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    candidates: list[Callable[[Tensor], Tensor]] = []  # the config's first: a cap hardly changes small logits
    if cap:
        candidates.append(lambda hidden: cap * torch.tanh(linear(hidden) / cap))
    if multiply:
        candidates.append(lambda hidden: linear(hidden) * multiply)
    if divide:
        candidates.append(lambda hidden: linear(hidden) / divide)
    candidates.append(linear)
    probe = torch.arange(3, device=next(lm.parameters()).device)[None] % config.vocab_size
    inputs = {"input_ids": probe, "attention_mask": torch.ones_like(probe), "use_cache": False}
    with torch.no_grad():
        logits = lm(**inputs).logits
        expected = logits.float()
        # The same operations on the same numbers: a few roundings apart at most.
        tolerance = 4 * torch.finfo(logits.dtype).eps * max(1e-30, float(expected.abs().max()))
        hidden = decoder(**inputs).last_hidden_state
        for head in candidates:
            got = head(hidden).float()
            if got.shape == expected.shape and torch.allclose(got, expected, rtol=0, atol=tolerance, equal_nan=True):
                return head
    _report_no_head(lm)
    return None


def _report_no_head(lm: nn.Module) -> None:
    logger.warning(
        "%s: its logits are not a known function of its last hidden state, so rlkit uses the model's own full logits: "
        "more memory, same numbers.",
        type(lm).__name__,
    )


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off inside, each module's own mode restored afterwards. Gradient checkpointing keeps working.

    transformers checkpoints a layer only in training mode, so those layers (not their submodules) stay in it, with
    their own functional dropout and layerdrop set to 0.
    """
    was_training = [module for module in model.modules() if module.training]
    silenced: list[tuple[nn.Module, str, float]] = []
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and torch.is_grad_enabled():
            module.training = True
            for name, value in vars(module).items():
                if "drop" in name and isinstance(value, float) and value:  # OPT has layerdrop
                    silenced.append((module, name, value))
    for module, name, _ in silenced:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in silenced:
            setattr(module, name, value)
        model.eval()
        for module in was_training:
            module.training = True


def balance_loss(model: nn.Module, output: Any, attention_mask: Bool[Tensor, "B S"]) -> Float[Tensor, ""]:
    """Load-balancing loss of a mixture-of-experts model, by the model's own function of its router logits."""
    lm = causal_lm_of(model)
    function = getattr(sys.modules[type(lm).__module__], "load_balancing_loss_func", None)
    logits = getattr(output, "router_logits", None)
    if function is None or not logits:
        raise ValueError(
            f"loss_step: {type(lm).__name__} has no router whose load could be balanced; router_aux_loss_coef is for "
            "mixture-of-experts models such as Mixtral or Qwen-MoE. Leave it at 0."
        )
    return function(logits, lm.num_experts, lm.num_experts_per_tok, attention_mask.long())


def end_of_completion_ids(model: Any, tokenizer: Any, *, extra: Iterable[int] = ()) -> tuple[int, ...]:
    """Every id that ends a completion: of the tokenizer, the generation config, the model config, and extra ones."""
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


def ensure_pad_token(tokenizer: Any, eos_ids: tuple[int, ...]) -> int:
    """Padding id; the tokenizer (our copy) gets one if it has none. It may equal EOS: masks come from lengths."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(eos_ids[0])
    return int(tokenizer.pad_token_id)


SEQ2SEQ = (
    "load_policy: {name!r} ({kind}) is a sequence-to-sequence model; rlkit trains causal language models, whose "
    "completion continues the prompt. Choose a decoder-only model."
)


def check_is_causal_lm(model: Any) -> None:
    """Refuse anything but a causal language model with a head."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise TypeError(f"load_policy: expected a transformers causal language model, got {type(model).__name__}.")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(SEQ2SEQ.format(name=type(model).__name__, kind=config.model_type))
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
