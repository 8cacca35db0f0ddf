"""vLLM in the process: the contract of every engine, and what only this one does. One engine lives at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import lora_config, vllm_policy
from engines.contract import LOGP_ATOL, PROMPTS, WeightsContract, draw, other_weights, step, tokens_of, without

import rlkit as rl
from rlkit.engine import EngineError
from rlkit.engines import ProbeError
from rlkit.engines.weights import named_weights

pytestmark = pytest.mark.vllm
GAP = 1e-4  # float32: engine and trainer after a transfer


def colocate(policy, **options):
    engine = rl.VLLMColocate(policy, **({"max_model_length": 480, "max_num_seqs": 32, "probe_every": 1} | options))
    policy.use(engine)
    return engine


@pytest.fixture
def make():
    """Engines that are closed after the test."""
    made = []

    def build(policy, **options):
        made.append(colocate(policy, **options))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def subject():
    engine = colocate(vllm_policy())
    yield engine
    engine.close()


class TestColocate(WeightsContract):
    def break_a_transfer(self, subject):
        def half():
            for place, (name, tensor) in enumerate(list(named_weights(subject.policy))):
                if place == 9:
                    raise OSError("the file ends here")
                yield name, tensor.clone()

        # past the check of names, as a failure inside vLLM would be
        with pytest.raises(EngineError, match="the file ends here"):
            subject._lifecycle.load(lambda: subject._llm.reload(half()), subject.policy.version)


NOT_FINITE = r"policy weights not finite in float32: {} \(1 of \d+ values\); nothing was sent"


def test_weights_that_are_not_finite_never_get_there(subject):
    before, version = tokens_of(draw(subject)), subject.version
    weight = subject.policy.model.model.layers[0].mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[3, 4] = torch.nan
    for _ in range(2):
        with pytest.raises(ValueError, match=NOT_FINITE.format("model.layers.0.mlp.up_proj.weight")):
            draw(subject)
    assert subject.version == version
    with torch.no_grad():
        weight.copy_(kept)
    assert tokens_of(draw(subject)) == before


@pytest.mark.parametrize("how", ["draw", "probe"])
def test_nan_that_it_drew_with_do_not_stay(subject, monkeypatch, how):
    """As if numbers in between had overflowed: with right weights vLLM alone would go on to draw NaN."""
    before, probe = tokens_of(draw(subject)), subject.probe
    weight = subject.policy.model.model.layers[0].mlp.up_proj.weight
    kept = weight.detach().clone()
    monkeypatch.setattr("rlkit.engines.vllm.colocate.finite", lambda weights, where, dtype: weights)
    monkeypatch.setattr(subject, "probe", probe if how == "probe" else None)
    with torch.no_grad():
        weight.fill_(torch.nan)
    for _ in range(2):
        with pytest.raises(EngineError, match="log-probabilities are NaN"):
            draw(subject)
        assert subject.version is None
    with torch.no_grad():
        weight.copy_(kept)
    assert tokens_of(draw(subject)) == before


def test_versions_are_read_back(subject):
    rollout = draw(subject)
    groups = subject.generate([[5, 6]], [0], num_generations=2, params=rollout.sampling, seed=0)
    assert [c.version for group in groups for c in group] == [subject.policy.version] * 2


def test_a_prompt_too_long_for_the_engine_alone_is_refused(subject):
    params = rl.SamplingParams(max_completion_length=8)
    for prompt in ([5] * 473, []):
        with pytest.raises(ValueError, match=r"prompt 0 has \d+ tokens"):
            subject.generate([prompt], [0], num_generations=1, params=params, seed=0)


def test_what_vllm_refuses_says_so_and_leaves_nothing_behind(subject):
    before = tokens_of(draw(subject))
    with pytest.raises(ValueError, match=r"vllm-colocate: vLLM refuses .*With regex=: vLLM's grammar does not know"):
        draw(subject, regex="([")
    with pytest.raises(ValueError, match=r"vllm-colocate: vLLM refuses these settings or prompts"):
        subject.generate([[5], [10**6]], [0, 1], num_generations=2, params=rl.SamplingParams(), seed=0)
    assert tokens_of(draw(subject)) == before


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_temperatures_that_vllm_would_change_are_refused(subject, temperature):
    with pytest.raises(ValueError, match=r"vLLM draws at temperatures from 0\.01 to 2"):
        draw(subject, temperature=temperature)


FAULTS = {
    "one layer forgotten": (without("layers.1.mlp"), "some weights did not arrive"),
    "half a layer forgotten": (without("layers.0.self_attn.q_proj"), "some weights did not arrive"),
    "tied head forgotten": (without("lm_head"), "stale head"),
    "nothing arrived": (without("model", "lm_head"), "stale weights.* as it did with version"),
    "another model": (other_weights, "some weights did not arrive"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_probe_catches_a_faulty_transfer(make, fault, monkeypatch):
    change, message = FAULTS[fault]
    engine = make(vllm_policy())
    step(engine, lr=1e-1)  # a good transfer came before
    reload = engine._llm.reload
    monkeypatch.setattr(engine._llm, "reload", lambda stream: reload(change(stream)))
    with pytest.raises(ProbeError, match=message):
        draw(engine)
    assert engine.version is None
    monkeypatch.undo()
    rollout = draw(engine)
    torch.testing.assert_close(rollout.sampler_logp, rl.compute_logps(engine.policy, rollout), rtol=0, atol=LOGP_ATOL)


def test_the_probe_catches_weights_of_one_step_before(make, monkeypatch):
    engine = make(vllm_policy())
    draw(engine)
    old = [(name, tensor.clone()) for name, tensor in named_weights(engine.policy)]
    step(engine)
    reload = engine._llm.reload
    monkeypatch.setattr(engine._llm, "reload", lambda stream: reload(old))
    with pytest.raises(ProbeError, match="stale weights, it answers as it did with version 0"):
        draw(engine)


def test_the_probe_catches_a_stale_prefix_cache(make, monkeypatch):
    engine = make(vllm_policy())
    step(engine)
    resets = []
    monkeypatch.setattr(engine._llm, "reset_cache", lambda: resets.append(1) or True)
    with pytest.raises(ProbeError, match="stale prefix cache"):
        draw(engine)
    assert resets == [1]


def test_the_probe_catches_a_wrong_model_at_once(make, monkeypatch):
    engine = make(vllm_policy())
    reload = engine._llm.reload
    monkeypatch.setattr(engine._llm, "reload", lambda stream: reload(other_weights(stream)))
    with pytest.raises(ProbeError, match="wrong model"):
        draw(engine)


def test_the_probe_catches_a_wrong_temperature(make, monkeypatch):
    from rlkit.engines.vllm import colocate as module

    original = module.llm_settings
    raw = {"logprobs_mode": "raw_logprobs"}
    monkeypatch.setattr(module, "llm_settings", lambda *a, **k: original(*a, **k) | raw)
    engine = make(vllm_policy())
    with pytest.raises(ProbeError, match="wrong temperature"):
        draw(engine)


def test_the_probe_comes_every_so_many_transfers(make):
    engine = make(vllm_policy(), probe_every=2)
    before = []
    for seed in range(4):
        step(engine, seed=seed)
        before.append(engine.probe.gap_max)
    assert before[0] is not None and before[0] == before[1] and before[1] != before[2] and before[2] == before[3]


@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("qwen2", True), ("qwen2", False)])
def test_other_models_follow_their_updates(make, kind, tied):
    engine = make(vllm_policy(kind, tied=tied))
    for seed in range(2):
        step(engine, seed=seed)
    rollout = draw(engine)
    gap = (rollout.sampler_logp - rl.compute_logps(engine.policy, rollout)).abs().max()
    assert float(gap) < GAP


def test_six_steps_of_rloo(make):
    policy = vllm_policy()
    make(policy)
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=3e-3)

    def digits(completions, **columns):
        return [sum(character.isdigit() for character in text) / 12 for text in completions]

    rewards = []
    for seed in range(6):
        rollout = rl.sample(policy, PROMPTS, num_generations=16, max_completion_length=12, seed=seed, temperature=0.9)
        scores = rl.score(rollout, digits)
        advantages = rl.compute_loo_advantage(scores)
        update = rl.loss_step(policy, optimizer, rollout, advantages)
        assert rollout.policy_version == seed
        assert update.metrics["sampler_gap/max"] < GAP
        rewards.append(float(scores.reward.mean()))
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.1  # it learns


def test_ids_without_a_token_are_never_drawn(make):
    policy = vllm_policy(vocab_size=96)  # the tokenizer has 46
    engine = make(policy)
    assert len(policy.unused_ids) == 50
    for drawer in (engine, rl.TransformersEngine(policy)):
        rollout = draw(drawer, num_generations=16)
        assert int(rollout.completion_ids.max()) < 46
        expected = rl.compute_logps(policy, rollout)
        torch.testing.assert_close(rollout.sampler_logp, expected, rtol=0, atol=LOGP_ATOL)


def test_bfloat16(make):
    engine = make(vllm_policy(), dtype=torch.bfloat16)
    step(engine)
    rollout = draw(engine)
    gap = (rollout.sampler_logp - rl.compute_logps(engine.policy, rollout)).abs()[rollout.completion_mask]
    assert GAP < float(gap.mean()) < 0.15  # it is another precision, and no more


def lora(**options):
    return lora_config(lora_alpha=16, **options)


@pytest.mark.parametrize("mode", ["merge", "adapter"])
def test_adapters_follow_their_updates_and_the_model_stays_bit_for_bit(make, mode):
    policy = vllm_policy(peft_config=lora())
    base = {name: tensor.clone() for name, tensor in policy.model.state_dict().items() if "lora" not in name}
    engine = make(policy, lora=mode)
    for seed in range(3):
        step(engine, seed=seed, lr=1e-1)
    rollout = draw(engine)
    torch.testing.assert_close(rollout.sampler_logp, rl.compute_logps(policy, rollout), rtol=0, atol=LOGP_ATOL)
    with policy.model.disable_adapter():
        off = rl.compute_logps(policy, rollout)
    assert float((off - rollout.sampler_logp).abs().max()) > 100 * LOGP_ATOL  # an adapter that is ignored shows
    now = policy.model.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in base.items())


@pytest.mark.parametrize("mode", ["merge", "adapter"])
def test_adapters_and_bases_that_are_not_finite_never_get_there(make, mode):
    policy = vllm_policy(peft_config=lora())
    engine = make(policy, lora=mode)
    layer = policy.model.get_base_model().model.layers[1].mlp.down_proj
    for weight, first in ((layer.base_layer.weight, True), (layer.lora_A["default"].weight, False)):
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[0, 0] = torch.inf
        with pytest.raises(ValueError, match=r"policy weights not finite in float32: .*layers.1.mlp.down_proj"):
            draw(engine)
        assert engine.version is None if first else engine.version == 0
        with torch.no_grad():
            weight.copy_(kept)
        rollout = draw(engine)
        expected = rl.compute_logps(policy, rollout)
        torch.testing.assert_close(rollout.sampler_logp, expected, rtol=0, atol=LOGP_ATOL)


def test_an_adapter_that_is_ignored_is_caught(make, monkeypatch):
    engine = make(vllm_policy(peft_config=lora()), lora="adapter")
    step(engine, lr=1e-1)
    monkeypatch.setattr(engine._llm, "add_adapter", lambda request: None)  # the file of before stays
    with pytest.raises(ProbeError, match=r"stale weights.* an adapter is ignored"):
        draw(engine)


def test_modules_to_save_go_over(make):
    policy = vllm_policy(tied=False, peft_config=lora(modules_to_save=["lm_head"]))
    engine = make(policy)
    before = policy.model.get_output_embeddings().weight.clone()
    step(engine, lr=1e-1)
    assert not torch.equal(before, policy.model.get_output_embeddings().weight)
    rollout = draw(engine)
    torch.testing.assert_close(rollout.sampler_logp, rl.compute_logps(policy, rollout), rtol=0, atol=LOGP_ATOL)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_around_the_update(make, level):
    """On a CPU vLLM keeps the memory; the order of its calls and the refusals are the same."""
    engine = make(vllm_policy())
    before = tokens_of(draw(engine))
    engine.sleep(level)
    if level == 2:
        with pytest.raises(EngineError, match="discarded by a level-2 sleep"):
            engine.generate([[5]], [0], num_generations=1, params=rl.SamplingParams(), seed=0)
    assert tokens_of(draw(engine)) == before
    engine.sleep(level)
    step(engine)
    rollout = draw(engine)
    torch.testing.assert_close(rollout.sampler_logp, rl.compute_logps(engine.policy, rollout), rtol=0, atol=LOGP_ATOL)


def test_it_can_sleep_after_every_rollout(make):
    engine = make(vllm_policy(), enable_sleep=True)
    first = tokens_of(draw(engine))
    assert engine.version is None
    assert tokens_of(draw(engine)) == first


def test_after_an_engine_that_could_not_be_made_the_next_one_can(make):
    """Too large a cache is noticed when vLLM has set up its groups already; Ctrl-C comes there as well."""
    with pytest.raises((RuntimeError, ValueError), match="memory"):
        make(vllm_policy(), kv_cache_memory_bytes=2**50)
    assert not torch.distributed.is_initialized()
    draw(make(vllm_policy()))


def test_an_engine_that_sleeps_wakes_before_its_end(make, monkeypatch):
    """Memory that sleeps must not be freed (csrc/cumem_allocator.cpp), and after each rollout it does."""
    engine = make(vllm_policy(), enable_sleep=True)
    draw(engine)
    llm = engine._llm._llm
    core, calls = llm.llm_engine.engine_core, []
    for owner, name in ((llm, "wake_up"), (core, "shutdown")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, name=name, real=real: (calls.append(name), real(*a)))
    engine.close()
    assert calls == ["wake_up", "shutdown"]


RANKS = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
import rlkit as rl
from builders import vllm_policy
world = rl.setup(seed=0)
policy, optimizer = world.prepare(vllm_policy(), lambda params: torch.optim.SGD(params, lr=0.1))
told = {{name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}}
rank = int(os.environ["RANK"])
drawn = []
for size in (1, 2):  # an engine for each process, then one that both share
    policy.use(
        rl.VLLMColocate(policy, max_model_length=128, max_num_seqs=8, probe_every=1, tensor_parallel_size=size)
    )
    assert told.items() <= os.environ.items()
    prompts = ["1+2=", str(rank)][: 1 + rank]  # unequal shares
    drawn.append(rl.sample(policy, prompts, num_generations=2, max_completion_length=6, seed=3).texts)
    for _ in range(2):
        rollout = rl.sample(policy, prompts, num_generations=2, max_completion_length=6, seed=3)
        gap = float((rollout.sampler_logp - rl.compute_logps(policy, rollout)).abs().max())
        assert not rollout.logp_recomputed and gap < 1e-4, gap
        if size == 2:
            rl.loss_step(policy, optimizer, rollout, torch.tensor([1.0, -1.0, 0.5, -0.5])[: len(rollout)])
    policy.engine.close()
assert drawn[0] == drawn[1]
assert torch.distributed.get_world_size() == 2
x = torch.ones(1); torch.distributed.all_reduce(x)
assert x.item() == 2
torch.distributed.destroy_process_group()
print("done", flush=True)
"""


def test_processes_of_torchrun_have_an_engine_each_or_share_one(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(tests=str(Path(__file__).parents[2])), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done" in done.stdout  # the first process speaks for all


def test_a_second_engine_closes_the_first(make):
    policy = vllm_policy()
    first = make(policy)
    before = tokens_of(draw(first))
    other = make(vllm_policy(seed=3))
    with pytest.raises(EngineError, match="closed because another engine was made"):
        draw(policy, PROMPTS)
    draw(other)
    again = make(policy)
    assert tokens_of(draw(again)) == before
    again.close()
    again.close()
    assert policy.engine is None
    with pytest.raises(EngineError, match="closed by close"):
        again.check()


def test_an_engine_belongs_to_one_policy(make):
    engine = make(vllm_policy())
    with pytest.raises(ValueError, match="made for"):
        vllm_policy().use(engine)


GUEST = """
import os, random, sys, warnings
sys.path.insert(0, {tests!r})
import numpy as np, torch
import torch.distributed as dist
import rlkit as rl
from builders import vllm_policy
torch.set_num_threads(1)
joined = {joined}
if joined:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    group = dist.group.WORLD
policy = vllm_policy()
states = lambda: (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes())
import vllm  # its import is not ours to guard
before = states()
environment = dict(os.environ)
engine = rl.VLLMColocate(policy, max_model_length=128, max_num_seqs=8)
assert states() == before, "making"
changed = {{k for k in set(environment) | set(os.environ) if environment.get(k) != os.environ.get(k)}}
print("environment changed:", sorted(changed))
rl.sample(engine, ["1+1="], num_generations=2, max_completion_length=4, seed=0)
assert states() == before, "drawing"
engine.close()
assert states() == before, "closing"
if joined:
    assert dist.is_initialized() and dist.group.WORLD is group
    x = torch.ones(1); dist.all_reduce(x)
torch.set_num_threads(2); assert torch.get_num_threads() == 2
print("a good guest")
"""


@pytest.mark.parametrize("joined", [False, True])
def test_it_is_a_guest_in_the_process(joined, tmp_path):
    """Without beartype, which draws from Python's random state itself. There is no C++ compiler."""
    script = tmp_path / "guest.py"
    tests = str(Path(__file__).parents[2])
    script.write_text(GUEST.format(tests=tests, joined=joined), encoding="utf-8")
    bare = os.environ | {"CXX": str(tmp_path / "no-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)], env=bare, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "a good guest" in done.stdout


@pytest.mark.smollm2
@pytest.mark.slow
def test_two_steps_with_smollm2(make):
    try:
        policy = rl.load_policy("smollm2", device="cpu")
    except ValueError:
        pytest.skip("SmolLM2-135M is not installed")
    make(policy, max_model_length=256, max_num_seqs=8)
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-5)
    for seed in range(2):
        rollout = rl.sample(
            policy, ["The capital of France is"], num_generations=4, max_completion_length=12, seed=seed
        )
        update = rl.loss_step(policy, optimizer, rollout, torch.tensor([1.0, -1.0, 0.5, -0.5]))
        assert update.metrics["sampler_gap/max"] < 5e-4
