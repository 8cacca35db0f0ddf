"""What every engine promises. A test module makes a subclass whose fixture `subject` gives the engine on a tiny policy.

    @pytest.fixture(scope="module")
    def subject(): ...                    # an engine on vllm_policy(), made once: engines are slow to start

    class TestMyEngine(EngineContract): ...        # WeightsContract if it holds a copy of the weights

The oracle is the policy's own model: `compute_logps` and the transformers engine.
"""

import re
import signal
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from builders import CHARACTERS, EOS, completion_tokens, vllm_policy
from waiting import interrupt_when, main_thread_is_in

import rlkit as rl
from rlkit.engine import Engine, EngineError
from rlkit.engines.transformers_engine import TransformersEngine
from rlkit.engines.weights import named_weights
from rlkit.prompts import make_batch
from rlkit.types import SamplingParams

PROMPTS = ["12+3=", "7", "what is the sum of 40 and 2 :", "a-b"]
LOGP_ATOL = 2e-4  # float32, two implementations of one model: measured 1e-4


def draw(subject, prompts=PROMPTS, **options):
    """A rollout; the warning about truncated distributions is not what these tests look at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rl.sample(subject, prompts, **({"num_generations": 4, "max_completion_length": 24, "seed": 1} | options))


def tokens_of(rollout):
    """The completions as lists of ids, by group."""
    groups = {}
    for group, tokens in zip(rollout.group_id.tolist(), completion_tokens(rollout), strict=True):
        groups.setdefault(group, []).append(tokens)
    return groups


def step(subject, *, lr=1e-2, seed=0):
    """One optimizer step on random advantages: large enough to move every log-probability."""
    torch.manual_seed(seed)
    rollout = draw(subject)
    optimizer = torch.optim.SGD(subject.policy.trainable_parameters(), lr=lr)
    update = rl.loss_step(subject.policy, optimizer, rollout, torch.randn(len(rollout)))
    assert not update.skipped
    return rollout, update


def without(*parts):
    """A stream of weights that lacks some names."""
    return lambda stream: [(name, tensor) for name, tensor in stream if not any(part in name for part in parts)]


def other_weights(stream):
    """The same names with the weights of another random model."""
    other = vllm_policy(seed=9).model.state_dict()
    return [(name, other[name]) for name, _ in stream]


def random_states():
    """The global random states of numpy and torch, comparable; Python's is beartype's here (see test_colocate)."""
    array = np.random.get_state()  # noqa: NPY002 - the global one is meant
    return array[0], array[1].tobytes(), array[2:], torch.get_rng_state().numpy().tobytes()


class EngineContract:
    """The tests of every engine."""

    def test_it_speaks_the_protocol(self, subject):
        assert isinstance(subject, Engine)
        assert draw(subject).engine == subject.name
        subject.check()

    def test_greedy_is_that_of_the_transformers_engine(self, subject):
        ours = draw(subject, top_k=1, num_generations=1, max_completion_length=32)
        theirs = draw(TransformersEngine(subject.policy), top_k=1, num_generations=1, max_completion_length=32)
        assert tokens_of(ours) == tokens_of(theirs)

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_log_probabilities_are_the_trainers(self, subject, temperature):
        rollout = draw(subject, temperature=temperature, max_completion_length=64)
        expected = rl.compute_logps(subject.policy, rollout)
        assert not rollout.logp_recomputed
        torch.testing.assert_close(rollout.sampler_logp, expected, rtol=0, atol=LOGP_ATOL)

    def test_the_end_token_is_kept_and_is_the_last(self, subject):
        rollout = draw(subject, num_generations=16, max_completion_length=40)
        ended = ~rollout.truncated
        assert 0 < int(ended.sum()) < len(rollout)
        rows = [row for group in tokens_of(rollout).values() for row in group]
        for row, has_ended in zip(rows, ended.tolist(), strict=True):
            assert (row[-1] == EOS) == has_ended
            assert EOS not in row[:-1]
            assert has_ended or len(row) == 40

    def test_each_prompt_gets_its_completions(self, subject):
        rollout = draw(subject, num_generations=3)
        groups = tokens_of(rollout)
        assert [len(group) for group in groups.values()] == [3] * len(PROMPTS)
        assert all(len({tuple(row) for row in group}) == 3 for group in groups.values())
        assert list(rollout.prompts) == [prompt for prompt in PROMPTS for _ in range(3)]

    def test_seeds_repeat_and_differ(self, subject):
        assert tokens_of(draw(subject)) == tokens_of(draw(subject))
        assert tokens_of(draw(subject)) != tokens_of(draw(subject, seed=2))

    def test_completions_do_not_depend_on_the_batch_or_its_order(self, subject):
        batch = make_batch(subject.policy, PROMPTS)
        whole = tokens_of(draw(subject, batch))
        for places in ([3, 1], [2], [0, 2, 1, 3]):
            assert tokens_of(draw(subject, batch.select(places))) == {place: whole[place] for place in places}

    def test_fewer_completions_are_the_first_of_more(self, subject):
        more, fewer = tokens_of(draw(subject)), tokens_of(draw(subject, num_generations=2))
        assert {group: rows[:2] for group, rows in more.items()} == fewer

    def test_two_groups_of_one_prompt_differ(self, subject):
        first, second = tokens_of(draw(subject, ["1+1=", "1+1="])).values()
        assert first != second

    def test_a_prompt_that_does_not_fit_is_refused_before_the_engine(self, subject):
        limit = subject.max_context or subject.policy.max_context
        long = "1" * (limit - 10)
        before = tokens_of(draw(subject))
        with pytest.raises(ValueError, match=r"prompt\(s\) \[1\] of the batch do not fit"):
            draw(subject, ["1", long], max_completion_length=11)
        fits = draw(subject, ["1", long], max_completion_length=10, num_generations=1)
        torch.testing.assert_close(fits.sampler_logp, rl.compute_logps(subject.policy, fits), rtol=0, atol=LOGP_ATOL)
        assert tokens_of(draw(subject)) == before

    def test_stop_strings_end_a_completion_and_are_kept(self, subject):
        stop = CHARACTERS[5]
        rollout = draw(subject, stop_strings=[stop], num_generations=16, max_completion_length=40)
        stopped = [text for text in rollout.texts if stop in text]
        assert stopped and all(text.index(stop) == len(text) - 1 for text in stopped)
        by_stop = [text.endswith(stop) for text in rollout.texts]
        assert not any(cut and stopped for cut, stopped in zip(rollout.truncated.tolist(), by_stop, strict=True))

    @pytest.mark.parametrize("setting", [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.3}, {"repetition_penalty": 2.0}])
    def test_truncated_sampling_keeps_the_policys_log_probabilities(self, subject, setting):
        rollout = draw(subject, temperature=0.8, **setting)
        expected = rl.compute_logps(subject.policy, rollout)
        torch.testing.assert_close(rollout.sampler_logp, expected, rtol=0, atol=LOGP_ATOL)
        assert tokens_of(rollout) != tokens_of(draw(subject, temperature=0.8))

    def test_top_k_draws_among_the_likeliest(self, subject):
        rollout = draw(subject, top_k=2, num_generations=8)
        packed = [
            rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
            + rollout.completion_ids[row][rollout.completion_mask[row]].tolist()
            for row in range(len(rollout))
        ]
        ranks = set()
        for row, ids in enumerate(packed):
            with torch.no_grad():
                logits = subject.policy.model(input_ids=torch.tensor([ids])).logits[0]
            for place in range(int(rollout.prompt_mask[row].sum()), len(ids)):
                ranks.add(int((logits[place - 1] > logits[place - 1, ids[place]]).sum()))
        assert ranks == {0, 1}

    def test_regular_expressions_are_matched(self, subject):
        pytest.importorskip("xgrammar")
        rollout = draw(subject, regex="[0-9]{2}(a|b)[xyz]", max_completion_length=8)
        assert all(re.fullmatch("[0-9]{2}(a|b)[xyz]", text) for text in rollout.texts)
        assert not bool(rollout.truncated.any())
        expected = rl.compute_logps(subject.policy, rollout)
        torch.testing.assert_close(rollout.sampler_logp, expected, rtol=0, atol=LOGP_ATOL)

    def test_a_regular_expression_that_leaves_no_token_is_an_error(self, subject):
        pytest.importorskip("xgrammar")
        before = tokens_of(draw(subject))
        with pytest.raises((ValueError, EngineError), match="regex"):
            draw(subject, regex="1\u6f22+")  # the tokenizer has no Chinese
        assert tokens_of(draw(subject)) == before

    def test_no_end_before_the_minimum(self, subject):
        rollout = draw(subject, min_completion_length=12, num_generations=16)
        assert int(rollout.lengths.min()) >= 12
        expected = rl.compute_logps(subject.policy, rollout)
        torch.testing.assert_close(rollout.sampler_logp, expected, rtol=0, atol=LOGP_ATOL)

    def test_an_interrupt_leaves_nothing_behind(self, subject):
        before = tokens_of(draw(subject))
        seen = []

        def in_the_middle():
            if main_thread_is_in("draw", "generate"):
                seen.append(time.monotonic())
                return seen[-1] - seen[0] > 0.3
            return False

        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                interrupt_when(in_the_middle)
                for seed in range(1000):
                    draw(subject, num_generations=16, max_completion_length=400, seed=seed)
        finally:
            signal.signal(signal.SIGINT, handler)
        assert signal.getsignal(signal.SIGINT) == handler
        assert tokens_of(draw(subject)) == before

    def test_it_draws_in_a_background_thread(self, subject):
        result = []
        thread = threading.Thread(target=lambda: result.append(tokens_of(draw(subject))))
        thread.start()
        thread.join()
        assert result == [tokens_of(draw(subject))]

    def test_random_states_and_threads_are_the_trainers(self, subject):
        torch.rand(()), np.random.rand()  # noqa: NPY002 - away from the state that an earlier draw may have seeded
        before, threads = random_states(), torch.get_num_threads()
        draw(subject)
        assert random_states() == before
        subject.sync(named_weights(subject.policy), subject.policy.version)
        assert random_states() == before
        torch.set_num_threads(threads + 1)
        assert torch.get_num_threads() == threads + 1
        torch.set_num_threads(threads)

    def test_an_empty_share_draws_nothing(self, subject):
        draw(subject)
        assert subject.generate([], [], num_generations=2, params=SamplingParams(), seed=0) == []

    def test_weights_go_over_before_the_next_token(self, subject):
        before = draw(subject)
        step(subject)
        after = draw(subject)
        assert after.policy_version == subject.version == subject.policy.version == before.policy_version + 1
        torch.testing.assert_close(after.sampler_logp, rl.compute_logps(subject.policy, after), rtol=0, atol=LOGP_ATOL)
        moved = rl.compute_logps(subject.policy, before) - before.sampler_logp
        assert (
            float(moved.abs().max()) > 50 * LOGP_ATOL
        )  # the step was large enough for the line above to mean something

    def test_evaluate_and_vstar_take_it(self, subject):
        rows = [{"prompt": prompt} for prompt in PROMPTS]

        def length(completions, **columns):
            return [float(len(text)) for text in completions]

        options = {"max_completion_length": 8, "seed": 5}
        evaluation = rl.evaluate(subject, rows, length, num_generations=2, **options)
        drawn = draw(subject, rows, num_generations=2, **options)
        assert evaluation.rollout.engine == subject.name
        assert tokens_of(evaluation.rollout) == tokens_of(drawn)
        table = rl.estimate_vstar(subject, rows, length, num_value_samples=3, progress=False, **options)
        lengths = torch.tensor([float(len(text)) for text in draw(subject, rows, num_generations=3, **options).texts])
        assert torch.equal(table.rewards, lengths.reshape(len(PROMPTS), 3))


class WeightsContract(EngineContract):
    """The tests of an engine that holds a copy of the weights.

    A subclass has a method `break_a_transfer(subject)`, which makes a transfer fail in its middle.
    """

    def test_a_bad_transfer_is_refused_and_changes_nothing(self, subject):
        before = tokens_of(draw(subject))
        good = list(named_weights(subject.policy))
        renamed = [(f"x.{name}" if place == 3 else name, tensor) for place, (name, tensor) in enumerate(good)]
        reshaped = [(name, tensor[:-1] if place == 3 else tensor) for place, (name, tensor) in enumerate(good)]
        for bad, message in ((renamed, "does not know 1 name"), (reshaped, "1 shape differs"), (good[:-1], "lacks 1")):
            with pytest.raises(ValueError, match=message):
                subject.sync(iter(bad), subject.policy.version)
            assert tokens_of(draw(subject)) == before

    def test_a_transfer_that_breaks_off_is_dirty_until_a_whole_one(self, subject):
        before = tokens_of(draw(subject))
        self.break_a_transfer(subject)
        assert subject.version is None
        with pytest.raises(EngineError, match="cannot generate"):
            subject.generate([[5]], [0], num_generations=1, params=SamplingParams(), seed=0)
        with pytest.raises(EngineError):
            subject.check()
        assert tokens_of(draw(subject)) == before  # sample transfers the weights again by itself
        subject.check()
