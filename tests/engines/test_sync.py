"""`sample` transfers the weights, and the probe detects weights that did not arrive: on a copy in this process."""

import dataclasses
import gc

import pytest
import torch
from builders import lora_config, vllm_policy
from engines.contract import LOGP_ATOL, WeightsContract, draw, other_weights, step, tokens_of, without
from engines.copy_engine import CopyEngine

import rlkit as rl
from rlkit.causal_lm import causal_lm_of
from rlkit.engine import EngineError
from rlkit.engines import ProbeError
from rlkit.engines.weights import named_weights


@pytest.fixture(scope="module")
def subject():
    return CopyEngine(vllm_policy())


@pytest.fixture
def engine():
    engine = CopyEngine(vllm_policy())
    engine.policy.use(engine)
    return engine


class TestCopyEngine(WeightsContract):
    def break_a_transfer(self, subject):
        def fail(stream):
            raise EngineError("half-way")

        subject.change = fail
        with pytest.raises(EngineError, match="half-way"):
            subject.sync(named_weights(subject.policy), subject.policy.version)
        subject.change = lambda stream: stream


def test_weights_go_over_once_per_version(engine):
    for _ in range(3):
        draw(engine)
    assert engine.syncs == 1
    step(engine.policy.engine)
    draw(engine.policy)
    assert engine.syncs == 2


def by_hand(policy):
    for parameter in policy.model.parameters():
        parameter.data.add_(0.1)


def by_an_optimizer(policy):
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    policy.model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def by_loading(policy):
    policy.model.load_state_dict(vllm_policy(seed=4).model.state_dict())


def by_replacing_a_parameter(policy):
    lm = policy.model
    lm.model.norm.weight = torch.nn.Parameter(lm.model.norm.weight.detach() * 2)


@pytest.mark.parametrize("change", [by_hand, by_an_optimizer, by_loading, by_replacing_a_parameter])
def test_weights_that_were_changed_without_a_loss_step_go_over_too(engine, change):
    before = draw(engine)
    change(engine.policy)
    rollout = draw(engine)
    expected = rl.compute_logps(engine.policy, rollout)
    torch.testing.assert_close(rollout.sampler_logp, expected, rtol=0, atol=LOGP_ATOL)
    moved = rl.compute_logps(engine.policy, before) - before.sampler_logp
    assert float(moved.abs().max()) > 10 * LOGP_ATOL
    draw(engine)
    assert engine.syncs == 2


def test_another_adapter_goes_over_when_it_becomes_the_active_one():
    pytest.importorskip("peft")
    config = lora_config()
    policy = vllm_policy(peft_config=config)
    policy.model.add_adapter("other", config)
    engine = CopyEngine(policy)
    first = draw(engine)
    policy.model.set_adapter("other")
    rollout = draw(engine)
    expected = rl.compute_logps(policy, rollout)
    torch.testing.assert_close(rollout.sampler_logp, expected, rtol=0, atol=LOGP_ATOL)
    assert tokens_of(first) != tokens_of(rollout)


def test_an_engine_that_does_not_take_the_version_is_refused(engine, monkeypatch):
    monkeypatch.setattr(engine, "sync", lambda tensors, version: [None for _ in tensors])
    with pytest.raises(EngineError, match="has weights of version None after it was given version 0"):
        draw(engine)


def test_a_completion_of_other_weights_is_refused(engine, monkeypatch):
    draw(engine)
    generate = engine.generate

    def older(*args, **kwargs):
        return [[c._replace(version=-1) for c in group] for group in generate(*args, **kwargs)]

    monkeypatch.setattr(engine, "generate", older)
    with pytest.raises(EngineError, match="with weights of version -1; the policy is at 0"):
        draw(engine)


def test_the_engines_own_context_counts(engine, monkeypatch):
    monkeypatch.setattr(CopyEngine, "max_context", 30)
    with pytest.raises(ValueError, match=r"exceed max_model_length of engine 'copy', 30 tokens"):
        draw(engine, ["1" * 20], max_completion_length=11)


def test_truncated_log_probabilities_are_replaced_and_the_metrics_say_so(tmp_path):
    engine = CopyEngine(vllm_policy(), truncated=True)
    rollout = draw(engine, top_p=0.8)
    assert rollout.logp_recomputed
    expected = rl.compute_logps(engine.policy, rollout)
    torch.testing.assert_close(rollout.sampler_logp, expected, rtol=0, atol=LOGP_ATOL)
    plain = draw(engine)
    assert not plain.logp_recomputed
    run = rl.Run(tmp_path / "run")
    run.log(0, rollout)
    assert run.metrics.iloc[0]["sampler_logp/recomputed"] == 1.0
    run.log(1, plain)
    assert run.metrics.iloc[1].isna()["sampler_logp/recomputed"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layers.1"), "some weights did not arrive"),
        (without("lm_head"), "stale head"),
        (without("model", "lm_head"), "stale weights, it answers as it did with version 0"),
        (other_weights, "some weights did not arrive"),
    ],
)
def test_faulty_transfers_are_told_apart(engine, change, message):
    step(engine, lr=0.1)  # drawn and compared with version 0
    engine.change = change
    with pytest.raises(ProbeError, match=message):
        draw(engine)
    with pytest.raises(EngineError, match=message):  # it stays refused
        engine.check()
    engine.change = lambda stream: stream
    assert draw(engine).policy_version == 1


def test_a_small_step_that_never_arrived_is_told_by_the_same_answer(engine):
    """The log-probabilities are as close as two implementations are, but they are bit for bit those of before."""
    draw(engine)
    engine.change = without("model", "lm_head")
    with torch.no_grad():
        causal_lm_of(engine.policy.model).get_output_embeddings().weight.mul_(1 + 5e-5)
    engine.policy.version += 1
    with pytest.raises(ProbeError, match="stale weights, it answers as it did with version 0"):
        draw(engine)
    assert 1e-4 < engine.probe.gap_max < 5e-4


def test_stale_weights_are_told_though_the_engine_rounds_otherwise(engine, monkeypatch):
    """As a server does that is busy and draws in other batches."""
    step(engine, lr=0.1)
    engine.change, draw_probe = without("model", "lm_head"), engine.draw_probe

    def rounded(*arguments, **settings):
        groups = draw_probe(*arguments, **settings)
        return [[one._replace(logp=[value - 1e-6 for value in one.logp]) for one in group] for group in groups]

    monkeypatch.setattr(engine, "draw_probe", rounded)
    with pytest.raises(ProbeError, match="stale weights, it answers as it did with version 0"):
        draw(engine)


def test_a_stale_cache_is_told_apart(engine):
    step(engine, lr=0.1)
    engine.keeps_cache = True
    with pytest.raises(ProbeError, match="stale prefix cache"):
        draw(engine)


def test_a_wrong_model_is_told_at_once(engine):
    engine.change = other_weights
    with pytest.raises(ProbeError, match="wrong model"):
        draw(engine)


def test_raw_log_probabilities_are_told_apart():
    with pytest.raises(ProbeError, match="wrong temperature"):
        draw(CopyEngine(vllm_policy(), raw=True))


def test_a_step_too_small_for_the_probe_passes(engine):
    step(engine, lr=1e-7)
    draw(engine)
    assert engine.probe.gap_max < 1e-4


def test_prompts_too_long_for_the_engine_are_told_before_the_first_step(engine, monkeypatch):
    monkeypatch.setattr(CopyEngine, "max_context", 8)
    rows = [{"prompt": "1234567"}, {"prompt": "12345678"}]
    with pytest.raises(ValueError, match=r"1 prompt\(s\) are longer than 7 tokens: row 1 \(8 tokens\)"):
        rl.PromptLoader(rows, engine.policy, batch_size=1)
    assert len(rl.PromptLoader(rows, engine.policy, batch_size=1, on_long="skip")) == 1
    rl.PromptLoader(rows, vllm_policy(), batch_size=1)  # no engine in use, and the model has room


def test_an_engine_does_not_inherit_the_mark_of_a_dead_one():
    """Marks belong to the object: an id is given again, and a dataclass with fields to compare cannot be hashed."""

    @dataclasses.dataclass
    class Unhashable(CopyEngine):
        policy: rl.Policy

        def __post_init__(self):
            super().__init__(self.policy, probe_every=0)

    policy = vllm_policy()
    engine = Unhashable(policy)
    draw(engine)
    draw(engine)
    assert engine.syncs == 1 and len(policy.marks) == 1
    del engine
    gc.collect()
    assert len(policy.marks) == 0
