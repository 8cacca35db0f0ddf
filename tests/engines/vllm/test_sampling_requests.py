"""Requests to vLLM and what comes back, without vLLM."""

import math

import numpy as np
import pytest
import torch
from builders import EOS, tiny_policy, vllm_policy

import rlkit as rl
from rlkit.engine import EngineError
from rlkit.engines.vllm.memory import kv_bytes_per_token, vllm_memory
from rlkit.engines.vllm.sampling_requests import completion_of, request_seed, truncates_in_vllm, vllm_request
from rlkit.sampling_params import SamplingParams as Params
from rlkit.sampling_params import from_generation_kwargs
from rlkit.types import SamplingParams


def test_nothing_is_left_to_a_default():
    policy = tiny_policy()
    request = vllm_request(policy, SamplingParams(), num_generations=3, seed=0, group_id=7)
    assert request["n"] == 3 and request["stop_token_ids"] == [EOS] and request["logprobs"] == 0
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
    assert {name: request[name] for name in neutral} == neutral
    assert "logit_bias" not in request and "structured_outputs" not in request


def test_every_setting_arrives():
    params = SamplingParams(
        max_completion_length=9, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, repetition_penalty=1.2,
        stop_strings=("a", "b"), regex="a+",
    )  # fmt: skip
    request = vllm_request(tiny_policy(), params, num_generations=1, seed=0, group_id=0)
    expected = {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2,
        "stop": ["a", "b"], "structured_outputs": {"regex": "a+"},
    }  # fmt: skip
    assert {name: request[name] for name in expected} == expected


def test_seeds_differ_in_the_bits_that_torch_looks_at():
    seeds = [request_seed(seed, group) for seed in range(20) for group in range(200)]
    low = {seed % 2**32 for seed in seeds}
    # 4000 draws of 2^32: a repeat has a probability of 0.2 %, and these numbers are fixed.
    assert len(low) == len(seeds)
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert request_seed(2**62, -5) != request_seed(2**62, 5)


def test_the_seeds_of_two_groups_do_not_overlap_in_a_large_step():
    low = np.sort([request_seed(3, group) % 2**32 for group in range(512)])
    assert int(np.diff(low).min()) >= 16  # G completions take G seeds in a row


def test_unused_ids_are_ruled_out():
    policy = vllm_policy(vocab_size=60)
    request = vllm_request(policy, SamplingParams(), num_generations=1, seed=0, group_id=0)
    assert request["logit_bias"] == dict.fromkeys(range(46, 60), -100.0)
    assert truncates_in_vllm(policy, SamplingParams())
    wide = vllm_policy(vocab_size=2000)
    assert vllm_request(wide, SamplingParams(), num_generations=1, seed=0, group_id=0)["allowed_token_ids"] == list(
        range(46)
    )


@pytest.mark.parametrize(
    ("setting", "truncates"),
    [({}, False), ({"temperature": 0.5}, False), ({"stop_strings": ("a",)}, False), ({"top_p": 0.9}, True),
     ({"top_k": 2}, True), ({"min_p": 0.1}, True), ({"repetition_penalty": 1.1}, True), ({"regex": "a"}, True),
     ({"min_completion_length": 2}, True)],
)  # fmt: skip
def test_which_settings_truncate(frozen_policy, setting, truncates):
    assert truncates_in_vllm(frozen_policy, SamplingParams(**setting)) is truncates


def test_completions_and_their_endings(frozen_policy):
    def of(ids, reason):
        return completion_of(frozen_policy, ids, [-1.0] * len(ids), reason, version=3, where="engine")

    assert of([5, EOS], "stop").finish_reason == "eos"
    assert of([5, EOS], "length").finish_reason == "eos"  # the end token as the last that fitted
    assert of([5, 6], "stop").finish_reason == "stop"
    assert of([5, 6], "length") == ([5, 6], [-1.0, -1.0], "length", 3)


@pytest.mark.parametrize(
    ("ids", "logp", "reason", "message"),
    [([5], [-1.0], "abort", "ended with 'abort'"), ([5], [-1.0], None, "ended with None"),
     ([5, 6], [-1.0], "stop", "2 tokens came with 1 log"), ([5], [None], "stop", "1 tokens came with 0 log"),
     ([5], [math.nan], "stop", "log-probabilities"), ([], [], "length", "without a single token"),
     ([46], [-1.0], "length", "beyond the policy's vocabulary of 46")],
)  # fmt: skip
def test_what_is_no_completion_is_refused(frozen_policy, ids, logp, reason, message):
    with pytest.raises(EngineError, match=message):
        completion_of(frozen_policy, ids, logp, reason, version=None, where="engine")


def test_generation_kwargs_are_the_same_settings_by_other_names(policy):
    by_name = rl.sample(policy, ["1+1="], num_generations=2, seed=0, max_completion_length=5, temperature=0.7)
    kwargs = {"max_new_tokens": 5, "temperature": 0.7, "do_sample": True, "top_k": -1}
    by_kwargs = rl.sample(policy, ["1+1="], num_generations=2, seed=0, generation_kwargs=kwargs)
    assert by_kwargs.sampling == by_name.sampling
    assert torch.equal(by_kwargs.completion_ids, by_name.completion_ids)
    assert from_generation_kwargs({"stop": ["x"], "guided_decoding_regex": "a"}) == {
        "stop_strings": ["x"],
        "regex": "a",
    }


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"presence_penalty": 0.5}, "presence_penalty=0.5, which rlkit does not have"), ({"typo": 1}, "typo=1"),
     ({"max_tokens": 3, "max_new_tokens": 3}, "sets max_completion_length twice")],
)  # fmt: skip
def test_unknown_generation_kwargs_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        from_generation_kwargs(kwargs)


@pytest.mark.parametrize("settings", [{"regex": ""}, {"regex": 3}, {"regex": "a", "min_completion_length": 1}])
def test_a_regex_that_cannot_be(settings, unchecked):
    with pytest.raises(ValueError, match="regex"):
        Params(**settings)


@pytest.mark.parametrize(("reason", "words"), [("error", "internal error.*regex"), ("abort", "cut off before it was")])
def test_a_completion_that_vllm_did_not_finish_is_none(reason, words):
    with pytest.raises(EngineError, match=words):
        completion_of(tiny_policy(), [5], [-1.0], reason, version=0, where="here")


def test_memory_by_hand():
    policy = vllm_policy()  # 2 layers, 1 key-value head of 32 numbers
    token = 2 * 2 * 1 * 32 * 4
    assert kv_bytes_per_token(policy.model.config, torch.float32) == token
    memory = vllm_memory(policy, max_model_length=200, num_sequences=10)
    assert memory.kv_cache == 10 * 256 * token and memory.kv_cache_minimum == 256 * token  # 200 tokens fill 2 blocks
    assert memory.weights == 4 * sum(p.numel() for p in policy.model.parameters())
    assert memory.gpu_memory_utilization is None
    half = vllm_memory(policy.model, max_model_length=200, num_sequences=10, dtype=torch.bfloat16)
    assert (half.kv_cache, half.weights) == (memory.kv_cache // 2, memory.weights // 2)


def test_the_share_of_a_gpu():
    memory = vllm_memory(vllm_policy(), max_model_length=128, num_sequences=1, device_total=80 * 2**30)
    assert memory.gpu_memory_utilization == 0.03  # 2 GiB of workspace and next to nothing else
    assert "gpu_memory_utilization=0.03" in repr(memory)
    with pytest.raises(ValueError, match="num_sequences must be at least 1"):
        vllm_memory(vllm_policy(), max_model_length=128, num_sequences=0)
