"""The text of single tokens, as a person wants to see it: special tokens visible, spaces where they are, halves of a
character as bytes.

A tokenizer's own forms do not serve: its vocabulary writes a space as Ġ or ▁, and decoding a token by itself drops a
leading space (sentencepiece) or gives U+FFFD for a part of a character. Each token of a vocabulary is looked at once.

Left out: the text of a character that several tokens make up together; the completion's own text has it.
"""

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor

_known: "WeakKeyDictionary[Any, dict[int, str]]" = WeakKeyDictionary()
SPACES = ("Ġ", "▁")


def pieces_of(tokenizer: Any, token_ids: Int[Tensor, " n"]) -> dict[int, str]:
    """The text of each token id that occurs.

    Args:
        tokenizer: of transformers.
        token_ids: (n,) ids, in any order, repeated or not.
    """
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
    if isinstance(raw, bytes):  # tokenizers of tiktoken's kind
        return raw.decode("utf-8") if _is_text(raw) else _as_hex(raw)
    if token in tokenizer.all_special_ids:
        return raw
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if "\ufffd" in text and "\ufffd" not in raw:
        found = _bytes_of(raw)
        return raw if found is None else _as_hex(found)
    if raw.startswith(SPACES) and not text.startswith(" ") and raw not in SPACES:
        return " " + text
    return text or raw.replace("▁", " ")


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _as_hex(data: bytes) -> str:
    return "".join(f"<0x{byte:02X}>" for byte in data)


def _bytes_of(raw: str) -> bytes | None:
    """The bytes that a token of a byte-level vocabulary stands for; None if it is not of that kind."""
    alphabet = _byte_alphabet()
    return bytes(alphabet[letter] for letter in raw) if all(letter in alphabet for letter in raw) else None


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others are numbered from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
