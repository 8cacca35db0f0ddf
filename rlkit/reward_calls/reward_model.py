"""A sequence-classification model as a reward function: prompt and completion in, one number out.

As in TRL: a conversation is written out by the reward model's own chat template, plain text is prompt + completion;
both without further special tokens, padded on the right. Unlike TRL the texts are scored in batches, one that is too
long for the model is an error instead of an index out of range or a guess, an untrained head is refused, and
neither the user's tokenizer nor the model's config stays changed.
"""

import contextlib
import datetime
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlkit.types import text_of


class RewardModel:
    """A reward function that asks a sequence-classification model with one label.

    `score` makes one from a name, folder or model; make it yourself to choose a tokenizer or a batch size. Its name is
    the last part of the model's path.

    Args:
        model: a hub name, a folder, or a model (`AutoModelForSequenceClassification`).
        tokenizer: its tokenizer; None takes `model.tokenizer`, or loads that of the model's name.
        batch_size: texts that are scored at once, at least 1.
        chat_template_kwargs: passed to the chat template. If it writes today's date, that is the day when this object
            was made; {"strftime_now": datetime.date(2026, 1, 31).strftime} sets another.
        device: where a model loaded by name goes; None takes the GPU if there is one. A model object stays where it is.

    Raises:
        ValueError: more than one label, a head that was never trained, no tokenizer.
        TypeError: not a sequence-classification model.
        OSError: no such model.

    Example: `rl.score(rollout, [rl.rewards.RewardModel("my/reward-model", batch_size=64), length])`
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        tokenizer: Any = None,
        *,
        batch_size: int = 16,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"RewardModel: batch_size must be at least 1, got {batch_size}.")
        source = "" if isinstance(model, nn.Module) else os.fspath(model)
        self.model: Any = model if isinstance(model, nn.Module) else _load(source, device)
        config = getattr(self.model, "config", None)
        if config is None or not hasattr(config, "num_labels"):
            raise TypeError(
                "RewardModel: expected a sequence-classification model of transformers (with a config and one label), "
                f"got {type(self.model).__name__}. Wrap any other module in a function: lambda completions: ..."
            )
        source = source or str(getattr(config, "_name_or_path", "") or "")
        self.__name__ = Path(source).name or type(self.model).__name__
        if config.num_labels != 1:
            raise ValueError(
                f"RewardModel: {self.__name__} has {config.num_labels} labels; a reward model has one. Load it with "
                "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1) if its head is meant to be one "
                "number, or call it in a function of your own that picks the label."
            )
        self.tokenizer = _find_tokenizer(self.model, tokenizer, source, self.__name__)
        self.batch_size = batch_size
        today = {"strftime_now": datetime.date.today().strftime}  # for templates that write the date: one for all calls
        self.chat_template_kwargs = today | dict(chat_template_kwargs or {})

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """One reward per completion.

        Raises:
            ValueError: a text is empty or longer than the model reads; a conversation, and no chat template.
        """
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        rewards: list[float] = []
        with _scoring(self.model) as own_pad:
            for start in range(0, len(texts), self.batch_size):
                rewards += self._score(texts[start : start + self.batch_size], start, own_pad)
        return rewards

    def __repr__(self) -> str:
        return f"<RewardModel {self.__name__}>"

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + text_of(completion)
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                f"RewardModel: the prompts are conversations, and the tokenizer of {self.__name__} has no chat "
                "template; set tokenizer.chat_template, or use plain prompts."
            )
        messages = list(prompt)
        reply = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
        if messages and reply and messages[-1]["role"] == reply[0]["role"] == "assistant":  # it continues a prefill
            start = messages.pop()
            reply[0] = {**start, "content": text_of([start]) + text_of(reply[:1])}
        messages += reply
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **self.chat_template_kwargs)

    def _score(self, texts: list[str], first: int, own_pad: int | None) -> list[float]:
        batch = self.tokenizer(text=texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        lengths = [len(ids) for ids in batch["input_ids"]]
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        for row, length in enumerate(lengths, first):
            if length == 0:
                raise ValueError(f"RewardModel: prompt and completion {row} are empty for {self.__name__}.")
            if limit is not None and length > limit:
                raise ValueError(
                    f"RewardModel: prompt and completion {row} have {length} tokens, and {self.__name__} reads {limit}."
                )
        width, device = max(lengths), next(self.model.parameters()).device
        config.pad_token_id = pad = _pad_id(own_pad, config, batch["input_ids"])
        rows = {
            name: [[*row, *[pad if name == "input_ids" else 0] * (width - len(row))] for row in values]
            for name, values in batch.items()
        }
        rows["attention_mask"] = [[1] * length + [0] * (width - length) for length in lengths]
        inputs = {name: torch.tensor(values, device=device) for name, values in rows.items()}
        return self.model(**inputs).logits[:, 0].float().cpu().tolist()


_by_name: dict[str, RewardModel] = {}
_tokenizers: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()


def as_reward_model(model: str | os.PathLike[str] | nn.Module) -> RewardModel:
    """A reward model from what stands in a list of reward functions. One given by name is loaded once per process."""
    if isinstance(model, nn.Module):
        reward = RewardModel(model, _tokenizers.get(model))
        _tokenizers[model] = reward.tokenizer
        return reward
    name = os.fspath(model)
    if name not in _by_name:
        _by_name[name] = RewardModel(name)
    return _by_name[name]


def _load(name: str, device: str | torch.device | None) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(name, output_loading_info=True)
    except OSError as error:
        raise OSError(
            "score: expected a reward function or the name or folder of a sequence-classification model, got "
            f"{name!r}, which cannot be loaded: {error}"
        ) from error
    if info["missing_keys"]:
        raise ValueError(
            f"RewardModel: {name} has no trained head ({sorted(info['missing_keys'])[0]} is missing): it is not a "
            "sequence-classification model, and its rewards would be noise."
        )
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _find_tokenizer(model: nn.Module, tokenizer: Any, source: str, name: str) -> Any:
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if tokenizer is not None:
        return tokenizer
    from transformers import AutoTokenizer

    if not source:
        raise ValueError(
            f"RewardModel: {name} does not say where its tokenizer is; pass RewardModel(model, tokenizer)."
        )
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"RewardModel: no tokenizer can be loaded from {source!r}; pass RewardModel(model, tokenizer)."
        ) from error


def _pad_id(own: int | None, config: Any, batch: list[list[int]]) -> int:
    """The id to pad with, such that the model reads a row as it reads the text alone, without padding.

    Heads read the last token that is not `config.pad_token_id`. If the config names one (`own`), alone and in a batch.
    If not, alone they read the last token of all; with an id that is in no text of the batch they do so here as well
    (in a tiny vocabulary: one that ends no text). The end token will not do: encoder-decoders look for it.
    """
    if own is not None and 0 <= own < config.vocab_size:
        return own
    ends = {config.eos_token_id} if isinstance(config.eos_token_id, int) else set(config.eos_token_id or ())
    used, last = {token for ids in batch for token in ids} | ends, {ids[-1] for ids in batch}
    return min(range(min(config.vocab_size, len(used) + 1)), key=lambda token: (token in last, token in used))


@contextlib.contextmanager
def _scoring(model: Any) -> Iterator[int | None]:
    """Evaluation mode and no gradient; gives the config's own pad id, which is afterwards as before."""
    config, training = model.config.get_text_config(), model.training
    before = config.pad_token_id
    model.eval()
    try:
        with torch.inference_mode():
            yield before
    finally:
        config.pad_token_id = before
        model.train(training)
