"""The readable text of single tokens: special tokens visible, spaces kept, partial characters as bytes.

A tokenizer's vocabulary writes a space as Ġ or ▁, and decoding a single token drops a leading space (sentencepiece) or
gives U+FFFD for a partial character. Each token's text is computed once for a tokenizer.

Left out: characters that consist of several tokens; the completion's text has them.
"""

import re
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor

_known: "WeakKeyDictionary[Any, dict[int, str]]" = WeakKeyDictionary()
SPACES = ("Ġ", "▁")
BYTE = re.compile("<0x[0-9A-F]{2}>")  # how sentencepiece writes a byte


def pieces_of(tokenizer: Any, token_ids: Int[Tensor, " n"]) -> dict[int, str]:
    """The text of each distinct token id."""
    known = _known.setdefault(tokenizer, {})
    found = {}
    for token in torch.unique(token_ids).tolist():
        if token not in known:
            known[token] = _piece(tokenizer, token)
        found[token] = known[token]
    return found


def _piece(tokenizer: Any, token: int) -> str:
    raw = tokenizer.convert_ids_to_tokens(token)
    if raw is None:  # an id beyond the vocabulary: models have more rows than tokenizers have tokens
        return f"<{token}>"
    if isinstance(raw, bytes):  # tiktoken tokenizers
        return _visible(raw)
    if token in tokenizer.all_special_ids:
        return raw
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if "\ufffd" in text and "\ufffd" not in raw:
        found = None if BYTE.fullmatch(raw) else _bytes_of(raw)
        return raw if found is None else _visible(found)
    if raw.startswith(SPACES) and not text.startswith(" ") and raw not in SPACES:
        return " " + text
    return text or raw.replace("▁", " ")


def _visible(data: bytes) -> str:
    text = data.decode("utf-8", "surrogateescape")
    return "".join(f"<0x{ord(letter) - 0xDC00:02X}>" if "\udc80" <= letter <= "\udcff" else letter for letter in text)


def _bytes_of(raw: str) -> bytes | None:
    """The bytes of a token of a byte-level vocabulary; None for other vocabularies."""
    alphabet = _byte_alphabet()
    return bytes(alphabet[letter] for letter in raw) if alphabet.keys() >= set(raw) else None


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
