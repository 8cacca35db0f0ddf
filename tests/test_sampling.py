import math
import sys
import warnings

import pytest
import torch
from builders import EOS, PAD, VOCABULARY, character_tokenizer, llama, tiny_policy
from engines.sampling_helpers import rows_of
from transformers import BloomConfig, BloomForCausalLM

import rlkit as rl
from rlkit.engine import Completion, PolicyModelEngine
from rlkit.prompts import make_batch


class EchoEngine(PolicyModelEngine):
    """An engine that answers with the first token of the prompt, g+1 times, and an end token."""

    name = "echo"

    def __init__(self, policy):
        self.policy = policy
        self.calls = []

    def generate(self, prompts, group_ids, *, num_generations, params, seed):
        self.calls.append((prompts, group_ids, num_generations, params, seed))
        return [[self.answer(prompt, g) for g in range(num_generations)] for prompt in prompts]

    def answer(self, prompt, g):
        tokens = [prompt[0]] * (g + 1)
        return Completion([*tokens, EOS], [-float(prompt[0])] * (g + 1) + [-0.5], "eos")


# From prompts to a rollout


def test_completions_stay_with_their_prompts(policy):
    """Rows, ids, texts, columns, lengths and log-probabilities of one prompt stay together."""
    rows = [{"prompt": f"{n}*2=", "n": n} for n in range(7)]
    batch = make_batch(policy, rows, first_group_id=30)
    engine = EchoEngine(policy)
    rollout = rl.sample(engine, batch, num_generations=3, max_completion_length=9, seed=4)
    assert len(rollout) == 21
    for row in range(21):
        n, g = row // 3, row % 3
        prompt, completion = rows_of(rollout)[row]
        token = VOCABULARY[str(n)]
        assert prompt == list(batch.token_ids[n])
        assert completion == [token] * (g + 1) + [EOS]
        assert rollout.completions[row] == str(n) * (g + 1)
        assert rollout.prompts[row] == f"{n}*2=" and rollout.columns["n"][row] == n
        assert rollout.group_id[row] == 30 + n and rollout.row_id[row] == batch.row_id[n]
        assert rollout.sampler_logp[row].tolist() == [-float(token)] * (g + 1) + [-0.5] + [0.0] * (2 - g)
    assert rollout.engine == "echo" and not rollout.truncated.any()
    prompts, group_ids, num_generations, params, seed = engine.calls[0]
    assert prompts == batch.token_ids and group_ids == list(range(30, 37)) and num_generations == 3 and seed == 4
    assert params == rollout.sampling == rl.SamplingParams(max_completion_length=9)


def test_a_policys_own_engine_is_used(policy):
    policy.engine = EchoEngine(policy)
    rollout = rl.sample(policy, ["1"], num_generations=2, max_completion_length=3)
    assert rollout.engine == "echo" and len(policy.engine.calls) == 1


def test_the_default_engine_is_made_once(policy):
    assert policy.engine is None
    rollout = rl.sample(policy, ["1"], num_generations=2, max_completion_length=3)
    engine = policy.engine
    rl.sample(policy, ["1"], num_generations=2, max_completion_length=3)
    assert policy.engine is engine and rollout.engine == engine.name == "transformers"


def test_shapes_masks_and_versions(policy):
    policy.version = 17
    rollout = rl.sample(policy, ["1+2=", "a"], num_generations=3, max_completion_length=4, seed=0)
    assert rollout.prompt_ids.shape == rollout.prompt_mask.shape == (6, 4)
    assert rollout.prompt_mask.tolist()[3:] == [[False, False, False, True]] * 3
    assert (rollout.prompt_ids[~rollout.prompt_mask] == PAD).all()
    assert rollout.completion_ids.shape == rollout.completion_mask.shape == rollout.sampler_logp.shape
    assert (rollout.sampler_logp[~rollout.completion_mask] == 0).all()
    assert (rollout.sampler_logp[rollout.completion_mask] < 0).all()
    assert rollout.policy_version == 17
    expected = policy.tokenizer.batch_decode([c for _, c in rows_of(rollout)], skip_special_tokens=True)
    assert list(rollout.completions) == expected


def test_the_batch_stays_unchanged(policy):
    rows = [{"prompt": "1+2=", "answer": ["3"]}]
    batch = make_batch(policy, rows)
    rl.sample(policy, batch, num_generations=2, max_completion_length=3)
    assert rows == [{"prompt": "1+2=", "answer": ["3"]}] == list(batch.rows)


# Settings


def test_every_setting_is_remembered(policy):
    settings = {
        "max_completion_length": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_completion_length": 2,
    }
    with pytest.warns(UserWarning, match="not on-policy"):
        rollout = rl.sample(policy, ["1"], num_generations=2, stop_strings=["="], **settings)
    assert rollout.sampling == rl.SamplingParams(**settings, stop_strings=("=",))


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("num_generations", 0, "num_generations must be a whole number of at least 1, got 0"),
        ("num_generations", -2, "num_generations must be a whole number of at least 1"),
        ("max_completion_length", 0, "max_completion_length must be at least 1"),
        ("temperature", 0.0, "greedy=True"),
        ("temperature", -1.0, "temperature must be a finite number > 0"),
        ("temperature", math.inf, "temperature must be a finite number > 0"),
        ("temperature", math.nan, "temperature must be a finite number > 0"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\]"),
        ("top_p", 1.1, r"top_p must be in \(0, 1\]"),
        ("top_k", -1, "top_k must be 0"),
        ("min_p", 1.5, "min_p must be in"),
        ("repetition_penalty", 0.0, "repetition_penalty must be > 0"),
        ("min_completion_length", 9, "min_completion_length must be between 0 and max_completion_length=8"),
        ("stop_strings", ["a", ""], "stop_strings must be texts that are not empty"),
    ],
)
def test_settings_out_of_range_are_refused(policy, setting, value, message):
    settings = {"num_generations": 2, "max_completion_length": 8, setting: value}
    with pytest.raises(ValueError, match=message) as error:
        rl.sample(policy, ["1"], **settings)
    assert str(error.value).startswith("sample: ")


@pytest.mark.parametrize(
    "setting", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.2}], ids=lambda s: next(iter(s))
)
def test_leaving_the_policys_distribution_is_warned_about(policy, setting):
    with pytest.warns(UserWarning, match="not on-policy"):
        rl.sample(policy, ["1"], num_generations=2, max_completion_length=2, **setting)


def test_neutral_settings_do_not_warn(policy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rl.sample(
            policy,
            ["1"],
            num_generations=2,
            max_completion_length=4,
            temperature=0.7,
            min_p=0.0,
            stop_strings=["="],
        )


# Prompts that cannot be used


def test_no_prompts(policy):
    with pytest.raises(ValueError, match="no prompts"):
        rl.sample(policy, [], num_generations=2, max_completion_length=2)


def test_one_string_is_not_a_list_of_prompts(policy):
    with pytest.raises(TypeError, match=r"write \[prompt\]"):
        rl.sample(policy, "1+2=", num_generations=2, max_completion_length=2)


def test_prompts_that_do_not_fit_name_themselves(policy):
    """The context is 64 tokens."""
    engine = policy.engine = EchoEngine(policy)
    prompts = ["1" * 5, "2" * 60, "3" * 59, "4" * 62]
    with pytest.raises(ValueError, match=r"prompt\(s\) \[1, 3\].* up to 62 prompt tokens .* 64 tokens.*<= 2"):
        rl.sample(policy, prompts, num_generations=2, max_completion_length=5)
    assert engine.calls == []
    assert len(rl.sample(policy, ["3" * 59], num_generations=2, max_completion_length=5)) == 2


def test_regex_without_xgrammar_names_the_extra_that_brings_it(policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ImportError, match=r"regex needs xgrammar.*pip install 'rlkit-llm\[regex\]'"):
        rl.sample(policy, ["1+2="], num_generations=2, max_completion_length=4, regex="[0-9]+")


def test_a_model_without_a_limit_takes_any_prompt():
    config = BloomConfig(vocab_size=len(VOCABULARY), hidden_size=8, n_layer=1, n_head=2, pad_token_id=PAD)
    policy = tiny_policy(BloomForCausalLM(config))
    assert policy.max_context is None
    assert len(rl.sample(policy, ["1" * 500], num_generations=1, max_completion_length=5)) == 1


# What an engine returns is checked


def engine_returning(policy, groups):
    engine = EchoEngine(policy)
    engine.generate = lambda *args, **kwargs: groups
    return engine


GOOD = Completion([5, EOS], [-1.0, -2.0], "eos")


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([[GOOD, GOOD]], RuntimeError, r"groups of \[2\], expected 2 groups of 2"),
        ([[GOOD, GOOD], [GOOD]], RuntimeError, r"groups of \[2, 1\]"),
        ([[GOOD, GOOD], [GOOD, Completion([], [], "length")]], RuntimeError, "0 tokens .* prompt 1"),
        ([[GOOD, Completion([5, 6], [-1.0], "length")], [GOOD, GOOD]], RuntimeError, "2 tokens with 1 log.* prompt 0"),
        ([[GOOD, GOOD], [GOOD, Completion([5], [math.nan], "length")]], FloatingPointError, "NaN .* prompt 1"),
    ],
)
def test_a_faulty_engine_is_named(policy, groups, error, message):
    with pytest.raises(error, match=f"'echo'.*{message}"):
        rl.sample(engine_returning(policy, groups), ["1", "2"], num_generations=2, max_completion_length=3)


def test_truncated_is_what_the_engine_says(policy):
    groups = [[GOOD, Completion([5, 6], [-1.0, -2.0], "length"), Completion([5], [-1.0], "stop")]]
    rollout = rl.sample(engine_returning(policy, groups), ["1"], num_generations=3, max_completion_length=2)
    assert rollout.truncated.tolist() == [False, True, False]
    assert rollout.completion_mask.tolist() == [[True, True], [True, True], [True, False]]


def test_an_end_token_equal_to_padding_counts():
    policy = tiny_policy(llama(), tokenizer=character_tokenizer(pad_token=None))
    groups = [[Completion([7, 8, EOS], [-1.0] * 3, "eos"), Completion([7, 8, 9, 10, 11], [-1.0] * 5, "length")]]
    rollout = rl.sample(engine_returning(policy, groups), ["1"], num_generations=2, max_completion_length=5)
    assert rollout.completion_ids[0].tolist() == [7, 8, EOS, EOS, EOS]
    assert rollout.completion_mask[0].tolist() == [True, True, True, False, False]


def test_scalar_seed_reaches_the_engine_and_none_draws_from_torch(policy):
    engine = EchoEngine(policy)
    torch.manual_seed(5)
    for seed in (0, 12, None, None):
        rl.sample(engine, ["1"], num_generations=1, max_completion_length=2, seed=seed)
    seeds = [call[-1] for call in engine.calls]
    torch.manual_seed(5)
    assert seeds == [0, 12, *(int(torch.randint(2**62, ())) for _ in range(2))]
