"""The shipped starting model: what its folder holds, what its tokenizer does, how often it is right."""

import json
import string
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import rlkit.tasks

FOLDER = Path(rlkit.tasks.__file__).parents[1] / "models" / "tiny_add"


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_the_folder_is_small_and_the_model_of_the_promised_size(model):
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 4 * 2**20
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.float32
    assert 0.5e6 <= sum(p.numel() for p in model.parameters()) <= 2e6
    assert model.config.max_position_embeddings in (64, 128)


def test_special_tokens_agree_and_sampling_is_neutral(model, tokenizer):
    assert tokenizer.bos_token is None
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert len(tokenizer) == model.config.vocab_size == 3 + 95
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    stored = json.loads((FOLDER / "generation_config.json").read_text())
    assert set(stored) == {"eos_token_id", "pad_token_id", "transformers_version"}


@pytest.mark.parametrize("text", ["12+34=", "What is 12+34? Answer with the number only.", " a  b ", "x,.?!'s n't"])
def test_text_survives_the_round_trip_one_token_per_character(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_printable_ascii_encodes_and_the_rest_is_unknown(tokenizer):
    printable = string.digits + string.ascii_letters + string.punctuation + " "
    ids = tokenizer(printable)["input_ids"]
    assert len(set(ids)) == 95 and tokenizer.unk_token_id not in ids
    unknown = tokenizer("é\n€")["input_ids"]
    assert unknown == [tokenizer.unk_token_id] * 3


def test_eos_in_text_is_one_token_and_can_be_skipped(tokenizer):
    ids = tokenizer("46<eos>")["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id and len(ids) == 3
    assert tokenizer.decode([*ids, tokenizer.pad_token_id], skip_special_tokens=True) == "46"


def test_batches_are_padded_on_the_left(tokenizer):
    batch = tokenizer(["1+2=", "12+34="], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["attention_mask"][0] == [0, 0, 1, 1, 1, 1]


def test_the_chat_template_gives_the_plain_prompt(tokenizer):
    plain = tokenizer("12+34=")["input_ids"]
    chat = [{"role": "user", "content": "12+34="}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == plain == tokenizer("12+34=", add_special_tokens=False)["input_ids"]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "12+34="


def test_the_chat_template_closes_or_continues_an_answer(tokenizer):
    chat = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "4"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "12+34=4<eos>"
    assert tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True) == "12+34=4"


def test_it_is_right_on_25_to_45_percent_of_held_out_sums(model, tokenizer):
    # Seed fixed, so this cannot flicker on one machine; another machine's rounding makes it a draw of 500 with
    # standard deviation 0.022 round 0.416: false alarm rate about 6 %, if every random number fell otherwise.
    task = rlkit.tasks.load("addition")
    prompts, answers = task.test["prompt"][:500], task.test["answer"][:500]
    inputs = tokenizer(prompts, return_tensors="pt")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        output = model.generate(**inputs, max_new_tokens=6, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert 0.25 <= sum(task.rewards[0](texts, answer=answers)) / 500 <= 0.45
    ends = (output[:, inputs["input_ids"].shape[1] :] == tokenizer.eos_token_id).any(dim=1)
    assert ends.float().mean() > 0.98  # it ends its answers by itself
