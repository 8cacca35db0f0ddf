"""A model that vLLM cannot run is named in a few lines; vLLM itself lists the hundreds that it knows."""

import importlib.util

import pytest
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import rlkit as rl

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]


@pytest.fixture(scope="module")
def policy():
    tokenizer = rl.load_policy("tiny-add").tokenizer
    config = GPTNeoConfig(
        vocab_size=128, hidden_size=32, num_layers=2, attention_types=[[["global"], 2]], num_heads=2, eos_token_id=1
    )
    return rl.Policy(GPTNeoForCausalLM(config), tokenizer)


def test_in_this_process(policy):
    with pytest.raises(ValueError, match=r"^VLLMColocate: vLLM \S+ cannot run GPTNeoForCausalLM") as caught:
        rl.VLLMColocate(policy, max_model_length=32)
    assert len(str(caught.value)) < 300 and "LlamaForCausalLM" not in str(caught.value)


def test_on_a_server(policy):
    with pytest.raises(RuntimeError, match="GPTNeoForCausalLM") as caught:
        rl.serve(policy, max_model_len=32)
    assert max(map(len, str(caught.value).splitlines())) <= 400
