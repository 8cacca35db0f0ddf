"""Continuous batching of transformers: the contract of every engine, and what only this one does.

The oracle is the transformers engine, which draws from the same noise: token by token the same completions.
"""

import pytest
import torch
from builders import VOCABULARY, character_tokenizer, vllm_policy
from engines.contract import LOGP_ATOL, PROMPTS, EngineContract, draw, step, tokens_of
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import RequestState

import rlkit as rl
from rlkit.engine import EngineError
from rlkit.engines.transformers_engine import TransformersEngine

pytestmark = pytest.mark.integration

GAP = 1e-4  # float32: sampler and trainer


@pytest.fixture(scope="module")
def subject():
    return rl.ContinuousBatching(vllm_policy(), max_requests_per_batch=8)  # fewer than the completions: some wait


class TestContinuousBatching(EngineContract):
    pass


def assert_same(ours, theirs):
    assert tokens_of(ours) == tokens_of(theirs)
    torch.testing.assert_close(ours.sampler_logp, theirs.sampler_logp, rtol=0, atol=LOGP_ATOL)
    assert torch.equal(ours.truncated, theirs.truncated)


SETTINGS = [
    {},
    {"temperature": 0.7},
    {"top_p": 0.7, "min_p": 0.05},
    {"repetition_penalty": 1.5, "min_completion_length": 5},
    {"stop_strings": ["1", "23"]},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_it_draws_what_the_transformers_engine_draws(subject, setting):
    assert_same(draw(subject, **setting), draw(TransformersEngine(subject.policy), **setting))


def test_ids_without_a_token_are_never_drawn():
    policy = vllm_policy(vocab_size=60)
    ours = draw(rl.ContinuousBatching(policy), temperature=2.0)
    assert_same(ours, draw(TransformersEngine(policy), temperature=2.0))
    assert int(ours.completion_ids.max()) < len(policy.tokenizer) == 46


@pytest.mark.parametrize("kind, tied", [("llama", False), ("qwen2", True)])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_models_and_attention_implementations(kind, tied, attention):
    policy = vllm_policy(kind, tied=tied)
    policy.model.set_attn_implementation(attention)
    assert_same(draw(rl.ContinuousBatching(policy)), draw(TransformersEngine(policy)))
    assert policy.model.config._attn_implementation == attention


CACHES = {
    "small pages, long prompts in pieces": {"page_size": 4, "max_batch_tokens": 7},
    "sequences lose their pages and come back": {"page_size": 4, "num_blocks": 20, "max_requests_per_batch": 8},
    "another order": {"scheduler_type": "prefill_first", "max_requests_per_batch": 3},
    "prompts share pages": {"page_size": 4, "max_requests_per_batch": 2},
    "nothing shared": {"page_size": 4, "allow_block_sharing": False},
}


@pytest.mark.parametrize("case", CACHES)
@pytest.mark.parametrize("setting", [{}, {"repetition_penalty": 1.5}], ids=str)
def test_the_cache_changes_no_completion(case, setting, monkeypatch):
    came_back = []
    again = RequestState.create_equivalent_initial_request
    monkeypatch.setattr(
        RequestState, "create_equivalent_initial_request", lambda state: came_back.append(1) or again(state)
    )
    policy = vllm_policy()
    engine = rl.ContinuousBatching(policy, **CACHES[case])
    prompts = [*PROMPTS, "what is the sum of 40 and 3 :"]
    options = {"max_completion_length": 40, **setting}
    assert_same(draw(engine, prompts, **options), draw(TransformersEngine(policy), prompts, **options))
    assert bool(came_back) == ("come back" in case)


def test_a_cache_too_small_for_a_sequence_is_refused():
    engine = rl.ContinuousBatching(vllm_policy(), page_size=4, num_blocks=8)
    with pytest.raises(ValueError, match=r"takes up to \d+ pages of 4 tokens, num_blocks=8 holds fewer"):
        draw(engine)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"page_size": 3}, "page_size is a whole number of at least 4"),
        ({"num_blocks": 0}, "num_blocks is a whole number of at least 1"),
        ({"max_batch_tokens": -1}, "max_batch_tokens is a whole number"),
        ({"max_requests_per_batch": 0}, "max_requests_per_batch is"),
        ({"max_memory_percent": 90.0}, r"max_memory_percent is a share in \(0, 1\], got 90"),
        ({"scheduler_type": "lifo"}, "scheduler_type is 'fifo' or 'prefill_first', got 'lifo'"),
    ],
)
def test_settings_are_checked(setting, message):
    with pytest.raises(ValueError, match=message):
        rl.ContinuousBatching(vllm_policy(), **setting)


def test_a_model_without_an_attention_cache_is_refused():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=len(VOCABULARY), hidden_size=16, num_hidden_layers=1, eos_token_id=1)
    policy = rl.load_policy(MambaForCausalLM(config), tokenizer=character_tokenizer(), device="cpu")
    with pytest.raises(TypeError, match="MambaForCausalLM cannot be batched continuously"):
        rl.ContinuousBatching(policy)


def test_a_failure_inside_is_an_error_and_the_next_draw_works(subject, monkeypatch):
    before = tokens_of(draw(subject))
    lm = subject.policy.model
    forward, calls = lm.forward, []

    def fail_at_third(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no memory left")
        return forward(*arguments, **options)

    monkeypatch.setattr(lm, "forward", fail_at_third)
    with pytest.raises(EngineError, match="no memory left"):
        draw(subject)
    monkeypatch.undo()
    assert tokens_of(draw(subject)) == before


def test_weights_that_are_not_finite_are_named(subject):
    policy = vllm_policy()
    with torch.no_grad():
        policy.model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        draw(rl.ContinuousBatching(policy))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_mixed_precision_reaches_the_passes(attention):
    policy = vllm_policy()
    policy.model.set_attn_implementation(attention)
    policy.autocast = torch.bfloat16
    ours = draw(rl.ContinuousBatching(policy))
    half = (ours.sampler_logp - rl.compute_logps(policy, ours)).abs()
    policy.autocast = None
    full = (ours.sampler_logp - rl.compute_logps(policy, ours)).abs()
    assert 1e-3 < float(full.mean()) < 0.1  # bfloat16, not float32
    assert float(half.mean()) < 1.5 * float(full.mean())


def test_an_adapter_is_the_policys():
    from peft import LoraConfig

    policy = vllm_policy(peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    engine = rl.ContinuousBatching(policy)
    step(engine, lr=1.0)
    assert_same(draw(engine), draw(TransformersEngine(policy)))


def test_a_second_interrupt_leaves_the_policys_attention(subject, monkeypatch):
    policy = vllm_policy()
    policy.model.set_attn_implementation("eager")  # which transformers replaces by a paged one
    engine = rl.ContinuousBatching(policy)

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(ContinuousBatchingManager, "get_result", interrupted)
    join = ContinuousBatchingManager.join
    monkeypatch.setattr(ContinuousBatchingManager, "join", lambda *arguments: join(*arguments) or interrupted())
    with pytest.raises(KeyboardInterrupt):
        draw(engine)
    monkeypatch.undo()
    assert policy.model.config._attn_implementation == "eager"
    assert_same(draw(engine), draw(TransformersEngine(policy)))


def test_the_training_pass_is_the_same_before_and_after(subject):
    rollout = draw(TransformersEngine(subject.policy))
    before = rl.compute_logps(subject.policy, rollout)
    draw(subject)
    assert torch.equal(rl.compute_logps(subject.policy, rollout), before)


def test_six_steps_of_rloo():
    def train(make):
        policy = vllm_policy()
        policy.use(make(policy))
        optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=3e-3)
        rewards, gaps = [], []
        for seed in range(6):
            rollout = draw(policy, seed=seed)
            gaps.append(float((rl.compute_logps(policy, rollout) - rollout.sampler_logp).abs().max()))
            scores = rl.score(rollout, lambda completions, **columns: [text.count("1") - 0.5 for text in completions])
            rewards.append(scores.reward.tolist())
            rl.loss_step(policy, optimizer, rollout, rl.compute_loo_advantage(scores))
        return rewards, gaps

    rewards, gaps = train(rl.ContinuousBatching)
    assert max(gaps) < GAP
    assert len({tuple(row) for row in rewards}) == 6
    assert rewards[0] == train(TransformersEngine)[0][0]  # of equal weights; later ones differ by rounding
