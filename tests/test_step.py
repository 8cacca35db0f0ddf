"""The forward pass and `loss_step`, on tiny real models, against plain transformers and autograd."""

import dataclasses
import logging
import math
import re

import pytest
import torch
from builders import (
    BOS,
    EOS,
    PAD,
    VOCABULARY,
    RecordingSGD,
    assert_identical,
    character_tokenizer,
    gpt2_with_dropout,
    llama,
    make_rollout,
    snapshot,
    tiny_policy,
)
from tolerances import BFLOAT16, BFLOAT16_MODEL, CLOSE, EXACT, FLOAT32, FLOAT64, FLOAT64_SUM, GRADIENT, MODEL_GRADIENT
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import rlkit as rl
import rlkit.logps
from rlkit.losses import importance_ratio
from rlkit.types import SamplingParams

LENGTHS = (3, 1, 2, 5, 4, 2, 6, 3)
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.25, 2.0, 0.75, -1.5, 0.3])
NAN = math.nan


def plain_logps(model, rollout, temperature=None):
    """(B,T) log-probabilities and entropies from the model's own logits, row by row and without any padding."""
    temperature = temperature or rollout.sampling.temperature
    logp, entropy = [], []
    for row in range(len(rollout)):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
        completion = rollout.completion_ids[row][rollout.completion_mask[row]]
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0].float() / temperature
        every = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        pad = rollout.completion_ids.shape[1] - len(completion)
        logp.append(torch.nn.functional.pad(every.gather(-1, completion[:, None])[:, 0], (0, pad)))
        entropy.append(torch.nn.functional.pad(-(every.exp() * every).sum(-1), (0, pad)))
    return torch.stack(logp), torch.stack(entropy)


def gradients_of(policy, value):
    return torch.autograd.grad(value, policy.trainable_parameters())


def step(policy, rollout, advantages, *, lr=0.0, **options):
    """One loss_step; the update, and the gradient of every parameter as the optimizer got it."""
    optimizer = RecordingSGD(policy.trainable_parameters(), lr=lr)
    update = rl.loss_step(policy, optimizer, rollout, advantages, **({"max_grad_norm": None} | options))
    return update, getattr(optimizer, "gradients", None)


def assert_same_gradients(got, want, **tolerance):
    assert max(float(gradient.abs().max()) for gradient in want) > 1e-2, "the test would compare zeros"
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def token_mean(x):
    """A user's loss: REINFORCE, averaged over tokens."""
    return -x.logp * x.advantages[:, None]


def off_policy(rollout, policy, *, scale=0.05):
    """Log-probabilities near the policy's own, so that ratios differ from 1."""
    noise = torch.randn(rollout.completion_ids.shape, generator=torch.Generator().manual_seed(9))
    return rl.compute_logps(policy, rollout) + scale * noise


# --- the forward pass ---


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_logps_are_log_softmax_of_tempered_logits(policy, temperature):
    """T=0.7 from the model's own logits, row by row without padding."""
    rollout = make_rollout(LENGTHS, sampling=SamplingParams(temperature=temperature))
    with torch.no_grad():
        want, entropy = plain_logps(policy.model, rollout)
        got = policy.score_tokens(rollout)
    torch.testing.assert_close(got.logp, want, **FLOAT32)
    torch.testing.assert_close(got.entropy, entropy, **FLOAT32)
    torch.testing.assert_close(rl.compute_logps(policy, rollout), want, **FLOAT32)


def test_the_temperature_is_seen_at_all(policy):
    """Another temperature gives other numbers."""
    cold = rl.compute_logps(policy, make_rollout(LENGTHS, sampling=SamplingParams(temperature=0.7)))
    assert float((cold - rl.compute_logps(policy, make_rollout(LENGTHS))).abs().max()) > 0.1


def test_a_temperature_of_zero_is_refused():
    """No division by zero."""
    with pytest.raises(
        ValueError, match=r"sample: temperature must be a finite number > 0 .*got 0\.0\. Temperature 0 \(greedy\)"
    ):
        SamplingParams(temperature=0.0)


def test_masked_slots_are_exactly_zero_and_their_tokens_do_not_matter(policy):
    """Masks come from lengths; what stands behind them is not looked at."""
    rollout = make_rollout(LENGTHS)
    mask = rollout.completion_mask
    dirty = dataclasses.replace(
        rollout,
        completion_ids=rollout.completion_ids.masked_fill(~mask, 7),
        prompt_ids=rollout.prompt_ids.masked_fill(~rollout.prompt_mask, 9),
    )
    clean = policy.score_tokens(rollout)
    assert not bool(clean.logp[~mask].any()) and not bool(clean.entropy[~mask].any())
    torch.testing.assert_close(policy.score_tokens(dirty).logp, clean.logp, **EXACT)


def test_padding_width_and_neighbours_do_not_matter(policy):
    rollout = make_rollout(LENGTHS)
    wide = rl.compute_logps(policy, make_rollout(LENGTHS, width=9))
    torch.testing.assert_close(wide[:, :6], rl.compute_logps(policy, rollout), **EXACT)
    for row in range(len(LENGTHS)):
        alone = rl.compute_logps(policy, rollout.select([row]))
        torch.testing.assert_close(alone, rl.compute_logps(policy, rollout)[[row]], **FLOAT32)
    torch.testing.assert_close(
        rl.compute_logps(policy, rollout, micro_batch_size=3), rl.compute_logps(policy, rollout), **FLOAT32
    )


def test_the_end_token_counts_although_it_is_the_padding_token():
    """Pad == eos, completion [7,8,eos] padded to 5: the log-probability of eos is there."""
    policy = tiny_policy(tokenizer=character_tokenizer(pad_token="<eos>"))
    rollout = make_rollout([3], width=5)
    rollout = dataclasses.replace(rollout, completion_ids=torch.tensor([[7, 8, EOS, EOS, EOS]]))
    assert policy.pad_id == EOS
    with torch.no_grad():
        want, _ = plain_logps(policy.model, rollout)
    got = rl.compute_logps(policy, rollout)
    torch.testing.assert_close(got, want, **FLOAT32)
    assert got[0, 2] < -0.1 and got[0, 3:].tolist() == [0, 0]


def test_chunks_of_the_head_give_the_same_numbers_and_gradients(policy, monkeypatch):
    """The logits of three tokens at a time: 26 tokens, 9 calls of the head, and as many again in the backward pass."""
    policy.model.double()
    rollout = make_rollout(LENGTHS)
    whole = policy.score_tokens(rollout, entropy="grad")
    want = gradients_of(policy, (whole.logp * ADVANTAGES[:, None] + whole.entropy).sum())
    monkeypatch.setattr(rlkit.token_scorer, "MAX_CHUNK_ELEMENTS", 3 * policy.model.config.vocab_size)
    sizes = []
    policy.model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(output.numel()))
    chunked = policy.score_tokens(rollout, entropy="grad")
    assert len(sizes) == 9
    got = gradients_of(policy, (chunked.logp * ADVANTAGES[:, None] + chunked.entropy).sum())
    assert len(sizes) == 18 and max(sizes) <= rlkit.token_scorer.MAX_CHUNK_ELEMENTS
    torch.testing.assert_close(chunked.logp, whole.logp, **FLOAT64)
    torch.testing.assert_close(chunked.entropy, whole.entropy, **FLOAT64)
    assert_same_gradients(got, want, **FLOAT64_SUM)
    sizes.clear()
    torch.testing.assert_close(rl.compute_logps(policy, rollout), whole.logp.detach(), **FLOAT64)
    assert len(sizes) == 9


SMALL = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {
    "soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=3.0)),
    "multiplied": lambda: Cohere2ForCausalLM(Cohere2Config(**SMALL, logit_scale=0.25)),
    "divided": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_that_scale_or_cap_their_logits_are_followed(kind):
    """The model's own logits are the oracle."""
    torch.manual_seed(0)
    policy = tiny_policy(HEADS[kind]())
    rollout = make_rollout(LENGTHS, sampling=SamplingParams(temperature=0.7))
    with torch.no_grad():
        want, entropy = plain_logps(policy.model.eval(), rollout)
    got = policy.score_tokens(rollout)
    torch.testing.assert_close(got.logp.detach(), want, **FLOAT32)
    torch.testing.assert_close(got.entropy, entropy, **FLOAT32)


def test_pack_puts_prompt_and_completion_side_by_side():
    """By hand: [_, 7] + [8, 9, _] and [5, 6] + [4, _, _]."""
    packed = rlkit.token_scorer.pack(
        torch.tensor([[0, 7], [5, 6]]),
        torch.tensor([[False, True], [True, True]]),
        torch.tensor([[8, 9, 1], [4, 1, 1]]),
        torch.tensor([[True, True, False], [True, False, False]]),
    )
    assert packed.input_ids.tolist() == [[7, 8, 9], [5, 6, 4]]
    assert packed.attention_mask.all()
    assert packed.prompt_length.tolist() == [1, 2]


# --- dropout ---


def kl_from_reference(policy, rollout):
    mine, theirs = rl.compute_logps(policy, rollout), rl.compute_logps(policy.reference(), rollout)
    return rl.compute_kl(mine, theirs, mask=rollout.completion_mask)


def test_dropout_is_off_in_every_pass_and_modes_are_restored():
    """Dropout modules of 0.1 and model.train(): two forwards equal, KL at step 0 exactly 0."""
    model = gpt2_with_dropout()
    policy, rollout = tiny_policy(model), make_rollout(LENGTHS)
    model.train()
    model.transformer.h[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    first, second = policy.score_tokens(rollout), policy.score_tokens(rollout)
    torch.testing.assert_close(first.logp, second.logp, **EXACT)
    assert kl_from_reference(policy, rollout).tolist() == [0.0] * len(LENGTHS)
    update, _ = step(policy, rollout, ADVANTAGES)
    torch.testing.assert_close(update.logp, first.logp.detach(), **EXACT)
    assert {name: module.training for name, module in model.named_modules()} == modes
    with torch.no_grad():  # the dropout is real: plain calls in this mode differ
        assert not torch.equal(plain_logps(model, rollout)[0], plain_logps(model, rollout)[0])


def test_modes_are_restored_after_an_error(policy):
    policy.model.train()
    with pytest.raises(RuntimeError, match="stop"), policy.inference_settings():
        assert not policy.model.training
        raise RuntimeError("stop")
    assert all(module.training for module in policy.model.modules())


def opt(**rates):
    """OPT's layers call dropout as a function with a rate of their own, in the checkpointed layer itself."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    ids = {"vocab_size": len(VOCABULARY), "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    return OPTForCausalLM(OPTConfig(**sizes, **ids, max_position_embeddings=64, init_std=0.3, **rates))


FUNCTIONAL_DROPOUT = {
    "llama": lambda: llama(attention_dropout=0.5),
    "opt": lambda: opt(dropout=0.5, attention_dropout=0.5),
    "opt layerdrop": lambda: opt(layerdrop=0.5),
}


@pytest.mark.parametrize("kind", FUNCTIONAL_DROPOUT)
def test_functional_dropout_is_off_with_gradient_checkpointing(kind):
    """Checkpointed layers stay in training mode, so their own rates are set to 0 and put back."""
    model = FUNCTIONAL_DROPOUT[kind]()
    policy, rollout = tiny_policy(model), make_rollout(LENGTHS)

    def rates():
        return [[(k, v) for k, v in vars(m).items() if "drop" in k and isinstance(v, float)] for m in model.modules()]

    want, before = rl.compute_logps(policy, rollout), rates()
    model.train()
    model.gradient_checkpointing_enable()
    for _ in range(4):
        torch.testing.assert_close(policy.score_tokens(rollout).logp.detach(), want, **FLOAT32)
        update, _ = step(policy, rollout, ADVANTAGES)
        torch.testing.assert_close(update.logp, want, **FLOAT32)
    assert rates() == before
    assert all(module.training for module in model.modules())


def test_gradient_checkpointing_gives_the_same_gradients_and_is_really_active():
    """Each layer runs twice: once forward, once again for the backward pass."""
    rollout = make_rollout(LENGTHS)
    _, want = step(tiny_policy(), rollout, ADVANTAGES)
    policy = tiny_policy(llama().eval())  # transformers itself would not checkpoint in this mode
    policy.model.gradient_checkpointing_enable()
    calls = []
    for layer in policy.model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    rl.compute_logps(policy, rollout)  # the head is found in this pass
    calls.clear()
    _, got = step(policy, rollout, ADVANTAGES)
    assert len(calls) == 4
    assert_same_gradients(got, want, **GRADIENT)


def lora(dropout):
    """A Llama with a LoRA adapter that is not zero; peft leaves its dropout modules in training mode."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(llama().eval(), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=dropout))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize(
    "make", [lambda: gpt2_with_dropout(dropout=0.3).train(), lambda: lora(0.3)], ids=["gpt2", "lora"]
)
def test_dropout_stays_off_where_a_checkpointed_layer_is_recomputed(make):
    """The second forward pass of gradient checkpointing runs inside backward(); dropout must be off there too."""
    rollout = make_rollout(LENGTHS)
    _, want = step(tiny_policy(make()), rollout, ADVANTAGES)
    policy = tiny_policy(make())
    causal_lm = policy.model.get_base_model() if hasattr(policy.model, "get_base_model") else policy.model
    causal_lm.gradient_checkpointing_enable()
    if hasattr(policy.model, "enable_input_require_grads"):
        policy.model.enable_input_require_grads()
    update, got = step(policy, rollout, ADVANTAGES)
    assert update.skipped is None
    assert_same_gradients(got, want, **GRADIENT)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_reference_of_a_trained_adapter_is_that_adapter(dropout):
    """KL at step 0 is 0 for an adapter that is not zero; lora_dropout is off too."""
    model = lora(dropout)
    policy, rollout = tiny_policy(model), make_rollout(LENGTHS)
    model.train()
    assert kl_from_reference(policy, rollout).tolist() == [0.0] * len(LENGTHS)
    with model.disable_adapter():
        assert (
            float((rl.compute_logps(policy, rollout) - rl.compute_logps(policy.reference(), rollout)).abs().max()) == 0
        )
    base = rl.compute_logps(tiny_policy(), rollout)
    assert float((rl.compute_logps(policy, rollout) - base).abs().max()) > 0.01, "the adapter does nothing"


# --- the gradient ---


def rloo_by_hand(logp, old, mask, advantages):
    ratio = ((logp - old) * mask).sum(-1).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def test_rloo_gradient_is_that_of_the_plain_model(policy):
    """Formula 6 of RLOO written out, on logits from the model itself; every parameter."""
    rollout = make_rollout(LENGTHS)
    old = off_policy(rollout, policy, scale=0.2)
    update, got = step(policy, rollout, ADVANTAGES, old_logps=old)
    logp, _ = plain_logps(policy.model, rollout)
    loss = rloo_by_hand(logp, old, rollout.completion_mask, ADVANTAGES)
    assert_same_gradients(got, gradients_of(policy, loss), **MODEL_GRADIENT)
    torch.testing.assert_close(update.loss, loss.item(), **FLOAT32)


def test_a2po_gradient_is_that_of_the_plain_model(policy):
    """Formula 2 of A*-PO written out."""
    rollout, beta2 = make_rollout(LENGTHS), 0.3
    ref = off_policy(rollout, policy, scale=0.5)
    update, got = step(policy, rollout, ADVANTAGES, loss=rl.AStarPO(beta2=beta2), ref_logps=ref)
    logp, _ = plain_logps(policy.model, rollout)
    implicit = beta2 * ((logp - ref) * rollout.completion_mask).sum(-1)
    loss = (implicit - ADVANTAGES).square().mean()
    assert_same_gradients(got, gradients_of(policy, loss), **MODEL_GRADIENT)
    torch.testing.assert_close(update.loss, loss.item(), **FLOAT32)
    torch.testing.assert_close(update.metrics["implicit_reward"], implicit.mean().item(), **FLOAT32)


def test_on_policy_gradient_is_reinforce(policy):
    """Formula 7 of RLOO, through the model."""
    rollout = make_rollout(LENGTHS)
    _, got = step(policy, rollout, ADVANTAGES)
    logp, _ = plain_logps(policy.model, rollout)
    want = gradients_of(policy, -(logp.sum(-1) * ADVANTAGES).mean())
    assert_same_gradients(got, want, **MODEL_GRADIENT)


LOSSES = {"RLOO": rl.RLOO(), "AStarPO": rl.AStarPO(beta2=0.3), "token mean": token_mean}


@pytest.mark.parametrize("size", [1, 2, 4, 8, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_into_micro_batches_gives_the_same_update(name, size):
    """8 sequences of different lengths as 1x8, 2x4, 4x2, 8x1 (and 3+3+2); one row masked, one no target."""
    rollout = make_rollout(LENGTHS, truncated=[row == 6 for row in range(8)])
    advantages = ADVANTAGES.clone()
    advantages[3] = NAN

    def run(micro_batch_size):
        policy = tiny_policy()
        other = off_policy(rollout, policy, scale=0.2)
        options = {"loss": LOSSES[name], "old_logps": other, "ref_logps": other, "mask_truncated": True}
        return step(policy, rollout, advantages, micro_batch_size=micro_batch_size, **options)

    (update, got), (whole, want) = run(size), run(None)
    assert_same_gradients(got, want, **GRADIENT)
    torch.testing.assert_close(update.loss, whole.loss, **FLOAT32)
    torch.testing.assert_close(update.logp, whole.logp, **FLOAT32)
    torch.testing.assert_close(update.entropy, whole.entropy, **FLOAT32)
    assert update.metrics.keys() == whole.metrics.keys()
    for metric, value in whole.metrics.items():
        torch.testing.assert_close(update.metrics[metric], value, **FLOAT32, msg=metric)


@pytest.mark.parametrize("size", [1, 2])
def test_a_token_mean_is_over_all_tokens_of_the_update(policy, size):
    """Token counts 2 and 8, losses 1 and 0: 2/10 = 0.2; a mean of means would be 0.5."""
    rollout = make_rollout([2, 8])
    update, _ = step(
        policy,
        rollout,
        torch.tensor([1.0, 0.0]),
        micro_batch_size=size,
        loss=lambda x: x.advantages[:, None] + x.logp - x.logp.detach(),
    )
    assert update.loss == pytest.approx(0.2, rel=CLOSE)


def test_a_sequence_mean_is_over_rows_with_a_loss_token(policy):
    """Formula 6: a row with advantage 0 counts, a row without a target does not. -(1 + 0)/2 of three rows."""
    update, _ = step(policy, make_rollout([2, 3, 1]), torch.tensor([1.0, 0.0, NAN]))
    assert update.loss == pytest.approx(-0.5, rel=CLOSE)
    assert update.metrics["frac_masked"] == pytest.approx(1 / 3)


def test_rows_without_a_target_are_as_if_they_were_not_there():
    """A*-PO on a batch with a NaN advantage, and on the batch without that row."""
    rollout, advantages = make_rollout(LENGTHS), ADVANTAGES.clone()
    advantages[2] = NAN
    kept = [0, 1, 3, 4, 5, 6, 7]
    ref = off_policy(rollout, tiny_policy())
    options = {"loss": rl.AStarPO(beta2=0.3)}
    update, got = step(tiny_policy(), rollout, advantages, ref_logps=ref, **options)
    without, want = step(tiny_policy(), rollout.select(kept), ADVANTAGES[kept], ref_logps=ref[kept], **options)
    assert_same_gradients(got, want, **GRADIENT)
    torch.testing.assert_close(update.loss, without.loss, **FLOAT32)
    assert not bool(update.loss_mask[2].any())


def test_a_masked_completion_keeps_its_place_in_the_baseline():
    """Reward [1,0,1], third row masked: advantages .5, -1, .5 of three rows; loss -(.5 - 1)/2 = .25."""
    rollout = make_rollout([2, 3, 4], group_id=[0, 0, 0], truncated=[False, False, True])
    advantages = rl.compute_loo_advantage(torch.tensor([1.0, 0.0, 1.0]), group_id=rollout.group_id)
    update, got = step(tiny_policy(), rollout, advantages, mask_truncated=True)
    assert update.loss == pytest.approx(0.25, rel=CLOSE)
    assert update.loss_mask.sum(-1).tolist() == [2, 3, 0]
    _, want = step(tiny_policy(), rollout.select([0, 1]), advantages[:2])
    assert_same_gradients(got, want, **GRADIENT)
    kept, _ = step(tiny_policy(), rollout, advantages)
    assert kept.loss == pytest.approx(0.0, abs=1e-7)  # -(.5 - 1 + .5)/3
    assert kept.metrics["frac_masked"] == 0


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, -1e10])
def test_masked_slots_of_every_input_may_hold_anything(garbage):
    """NaN, inf, -1e10 in masked slots: update and gradient bit for bit those of the clean batch."""
    rollout = make_rollout(LENGTHS, truncated=[row == 5 for row in range(8)])
    counts = rollout.completion_mask & ~rollout.truncated[:, None]
    other = off_policy(rollout, tiny_policy())

    def run(fill):
        spoiled = other.masked_fill(~counts, fill)
        dirty = dataclasses.replace(rollout, sampler_logp=torch.zeros(8, 6).masked_fill(~counts, fill))
        options = {"ref_logps": spoiled, "old_logps": spoiled, "mask_truncated": True}
        return [step(tiny_policy(), dirty, ADVANTAGES, loss=loss, **options) for loss in LOSSES.values()]

    for (dirty, got), (clean, want) in zip(run(garbage), run(0.0), strict=True):
        assert_identical(got, want)
        assert_identical(dict(dirty.metrics), dict(clean.metrics))


class Entropy:
    needs_entropy_grad = True

    def __call__(self, x):
        return -x.entropy


def test_a_user_loss_may_have_an_entropy_bonus_with_gradient(policy):
    """Gradient of the brute-force entropy; without the flag the entropy is a constant and that is said."""
    rollout = make_rollout(LENGTHS)

    update, got = step(policy, rollout, ADVANTAGES, loss=Entropy())
    _, entropy = plain_logps(policy.model, rollout)
    loss = -entropy.sum() / rollout.completion_mask.sum()
    assert update.loss == pytest.approx(loss.item(), rel=CLOSE)
    assert_same_gradients(got, gradients_of(policy, loss), **MODEL_GRADIENT)
    with pytest.raises(ValueError, match=r"loss_step: the loss does not depend on the policy's parameters.*x\.logp"):
        step(policy, rollout, ADVANTAGES, loss=lambda x: -x.entropy)


def test_an_entropy_bonus_works_with_a_masked_vocabulary():
    """A head whose bias rules a token out (-inf): 0 * -inf must not get into the gradient."""
    torch.manual_seed(0)
    config = {**SMALL, "num_hidden_layers": 2}
    policy = tiny_policy(PhiForCausalLM(PhiConfig(**config, partial_rotary_factor=0.5)))
    rollout = make_rollout(LENGTHS)
    with torch.no_grad():
        policy.model.lm_head.bias[0] = -math.inf

    update, gradients = step(policy, rollout, ADVANTAGES, loss=Entropy())
    assert update.skipped is None
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


# --- one step, two steps ---


@pytest.mark.parametrize("size", [None, 3])
def test_the_ratio_of_the_first_update_is_exactly_one(policy, size):
    """Formula 7 of RLOO: bit for bit, and nothing clips."""
    seen = []

    def spy(x):
        seen.append(importance_ratio(x.logp, x.old_logp, x.mask))
        return -seen[-1] * x.advantages

    step(policy, make_rollout(LENGTHS), ADVANTAGES, loss=spy, micro_batch_size=size)
    assert torch.cat(seen).tolist() == [1.0] * 8
    update, _ = step(policy, make_rollout(LENGTHS), ADVANTAGES, micro_batch_size=size)
    assert [v for name, v in update.metrics.items() if name.startswith("clip_ratio")] == [0.0] * 5


def test_a_loss_gets_clean_inputs_and_only_the_policy_has_a_gradient(policy):
    """As `LossInputs` documents it, also if the given tensors have NaN behind the mask, or a gradient."""
    rollout = make_rollout(LENGTHS, truncated=[row == 5 for row in range(8)])
    counts = rollout.completion_mask & ~rollout.truncated[:, None]
    other = off_policy(rollout, policy).masked_fill(~counts, NAN).requires_grad_()
    seen = []

    def spy(x):
        seen.append(x)
        return -(x.logp - x.old_logp).sum(-1) * x.advantages

    for old in (None, other):
        step(policy, rollout, ADVANTAGES, loss=spy, old_logps=old, ref_logps=other, mask_truncated=True)
    for x, old in zip(seen, (rl.compute_logps(policy, rollout), other), strict=True):
        torch.testing.assert_close(x.mask, counts, **EXACT)
        values = {"logp": x.logp, "old": x.old_logp, "ref": x.ref_logp, "sampler": x.sampler_logp, "entropy": x.entropy}
        assert {name: value.requires_grad for name, value in values.items()} == {
            name: name == "logp" for name in values
        }
        assert not any(bool(value[~counts].any()) for value in values.values())
        torch.testing.assert_close(x.old_logp, old.detach().masked_fill(~counts, 0.0), **FLOAT32)
        assert x.advantages[5] == 0 and not x.advantages.requires_grad


def test_the_second_update_on_a_rollout_clips(policy):
    """old_logps=first.logp; clip ratios against a brute-force count."""
    rollout = make_rollout(LENGTHS)
    before = rl.compute_logps(policy, rollout)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.02)
    first = rl.loss_step(policy, optimizer, rollout, ADVANTAGES, max_grad_norm=None)
    torch.testing.assert_close(first.logp, before, **EXACT)
    ratio = (rl.compute_logps(policy, rollout) - before).sum(-1).exp()
    high, low = (ratio > 1.2) & (ADVANTAGES > 0), (ratio < 0.8) & (ADVANTAGES < 0)
    assert bool(high.any()) and bool(low.any()), "the step was too small to clip anything"
    second = rl.loss_step(policy, optimizer, rollout, ADVANTAGES, old_logps=first.logp, micro_batch_size=3)
    assert second.metrics["clip_ratio/high_mean"] == pytest.approx(high.float().mean().item())
    assert second.metrics["clip_ratio/low_mean"] == pytest.approx(low.float().mean().item())
    assert second.metrics["clip_ratio/region_mean"] == pytest.approx((high | low).float().mean().item())
    # Row by row too, whatever the micro-batches: the token lens shows which rows were clipped.
    assert second.ratio is not None and second.old_logp is not None
    torch.testing.assert_close(second.ratio, ratio, **FLOAT32)
    assert second.clipped.tolist() == [int(up) - int(down) for up, down in zip(high, low, strict=True)]
    torch.testing.assert_close(second.old_logp, before, **EXACT)
    assert (second.epsilon, second.epsilon_high) == (0.2, 0.2)
    torch.testing.assert_close(first.logp, before, **EXACT)  # a frozen copy
    assert not first.logp.requires_grad and policy.version == 2


def test_an_update_says_what_its_ratio_was_measured_against(policy):
    """The first update's is 1 by construction; a loss without a clip range has no clipped rows; also when skipped."""
    rollout = make_rollout(LENGTHS)
    first, _ = step(policy, rollout, ADVANTAGES, loss=rl.RLOO(epsilon=0.1, epsilon_high=0.3))
    assert first.ratio.tolist() == [1.0] * 8 and first.clipped.tolist() == [0] * 8 and first.old_logp is first.logp
    assert (first.epsilon, first.epsilon_high) == (0.1, 0.3)
    plain, _ = step(policy, rollout, ADVANTAGES, loss=lambda x: -x.logp.sum(-1) * x.advantages)
    assert plain.ratio.tolist() == [1.0] * 8 and plain.clipped is None
    assert (plain.epsilon, plain.epsilon_high) == (None, None)
    nothing, _ = step(policy, rollout, torch.zeros(8), old_logps=first.logp)
    assert nothing.skipped and nothing.clipped is None and nothing.ratio.shape == (8,)
    torch.testing.assert_close(nothing.old_logp, first.logp, **EXACT)


def test_a_step_moves_the_policy_towards_the_better_completion(policy):
    rollout = make_rollout([3, 3], group_id=[0, 0])
    before = rl.compute_logps(policy, rollout).sum(-1)
    step(policy, rollout, torch.tensor([1.0, -1.0]), lr=1e-2)
    after = rl.compute_logps(policy, rollout).sum(-1)
    assert after[0] > before[0] and after[1] < before[1]


def test_metrics_of_a_step_by_hand(policy):
    rollout = make_rollout(LENGTHS, sampler_logp=torch.full((8, 6), -1.0))
    update, gradients = step(policy, rollout, ADVANTAGES, lr=0.125)
    mask = rollout.completion_mask
    with torch.no_grad():
        policy_now = tiny_policy()
        logp, entropy = plain_logps(policy_now.model, rollout)
    assert update.metrics["learning_rate"] == 0.125
    assert update.metrics["loss"] == pytest.approx(-ADVANTAGES.mean().item(), rel=CLOSE)
    assert update.metrics["entropy"] == pytest.approx(entropy[mask].mean().item(), rel=CLOSE)
    assert update.metrics["sampler_gap/mean"] == pytest.approx((logp[mask] + 1).abs().mean().item(), rel=CLOSE)
    assert update.metrics["sampler_gap/max"] == pytest.approx((logp[mask] + 1).abs().max().item(), rel=CLOSE)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    assert update.metrics["grad_norm"] == pytest.approx(norm, rel=CLOSE)
    assert update.metrics["skipped"] == 0 and update.skipped is None
    assert update.loss_mask.tolist() == mask.tolist()


def test_the_gradient_is_clipped_to_its_norm_and_measured_before():
    rollout = make_rollout(LENGTHS)
    _, full = step(tiny_policy(), rollout, ADVANTAGES)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in full))
    assert norm > 0.1
    update, clipped = step(tiny_policy(), rollout, ADVANTAGES, max_grad_norm=0.05)
    assert update.metrics["grad_norm"] == pytest.approx(norm, rel=CLOSE)
    assert_same_gradients([g * norm / 0.05 for g in clipped], full, **MODEL_GRADIENT)


def test_gradients_from_before_are_dropped():
    rollout = make_rollout(LENGTHS)
    _, want = step(tiny_policy(), rollout, ADVANTAGES)
    policy = tiny_policy()
    for parameter in policy.trainable_parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    _, got = step(policy, rollout, ADVANTAGES)
    assert_identical(got, want)
    assert all(parameter.grad is None for parameter in policy.trainable_parameters())


def test_the_scheduler_moves_once_per_step_and_the_version_counts(policy):
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rates = []
    for _ in range(3):
        update = rl.loss_step(
            policy, optimizer, make_rollout(LENGTHS), ADVANTAGES, scheduler=scheduler, micro_batch_size=2
        )
        rates.append(update.metrics["learning_rate"])
    assert rates == [0.8, 0.4, 0.2] and policy.version == 3


def test_the_same_step_twice_is_bit_for_bit_the_same():
    states = []
    for _ in range(2):
        policy = tiny_policy()
        step(policy, make_rollout(LENGTHS), ADVANTAGES, lr=0.1)
        states.append(policy.model.state_dict())
    assert_identical(dict(states[0]), dict(states[1]))


def test_a_step_on_sampled_completions_has_no_sampler_gap(policy):
    """Sampler and trainer see the same model at the same temperature."""
    rollout = rl.sample(policy, ["1+2=", "7="], num_generations=4, max_completion_length=6, temperature=0.7, seed=3)
    update, _ = step(policy, rollout, torch.linspace(-1, 1, 8))
    assert update.metrics["sampler_gap/max"] < 1e-5


def test_the_sampler_gap_of_a_later_update_is_that_of_the_policy_that_sampled(policy):
    """By hand: |old - sampler| at the tokens in the loss, although the policy has moved on from `old` meanwhile."""
    rollout = make_rollout(LENGTHS, truncated=[row == 5 for row in range(8)], sampler_logp=torch.full((8, 6), -1.0))
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.02)
    first = rl.loss_step(policy, optimizer, rollout, ADVANTAGES, max_grad_norm=None, mask_truncated=True)
    moved = (rl.compute_logps(policy, rollout) - first.logp).abs()[first.loss_mask]
    assert float(moved.mean()) > 0.1, "the update was too small to show a difference"
    gap = (first.logp + 1).abs()[first.loss_mask]
    for size in (None, 3):
        options = {"old_logps": first.logp, "mask_truncated": True, "micro_batch_size": size}
        later, _ = step(policy, rollout, ADVANTAGES, **options)
        assert later.metrics["sampler_gap/mean"] == pytest.approx(gap.mean().item(), rel=CLOSE)
        assert later.metrics["sampler_gap/max"] == pytest.approx(gap.max().item(), rel=CLOSE)


def test_truncated_sampling_is_not_reported_as_off_policy(policy):
    """Log-probabilities are over the whole vocabulary, so top_p does not show in the ratio or the gap."""
    with pytest.warns(UserWarning, match="not on-policy"):
        rollout = rl.sample(policy, ["1+2="], num_generations=4, max_completion_length=6, top_p=0.8, seed=3)
    update, _ = step(policy, rollout, torch.tensor([1.0, -1.0, 1.0, -1.0]))
    assert update.metrics["sampler_gap/max"] < 1e-5
    assert update.metrics["clip_ratio/region_mean"] == 0


# --- precision ---


def test_autocast_keeps_float32_weights_and_log_probabilities():
    """Mixed precision: finite, near the float32 result, ratio exactly 1, small updates not lost."""
    rollout = make_rollout(LENGTHS)
    want = rl.compute_logps(tiny_policy(), rollout)
    policy = tiny_policy(autocast=torch.bfloat16)
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-5)
    update = rl.loss_step(policy, optimizer, rollout, ADVANTAGES, micro_batch_size=3)
    assert update.skipped is None and math.isfinite(update.loss)
    assert update.logp.dtype == torch.float32
    assert not torch.equal(update.logp, want)  # autocast is really on
    torch.testing.assert_close(update.logp, want, **BFLOAT16_MODEL)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    assert update.loss == pytest.approx(-ADVANTAGES.mean().item(), rel=CLOSE)  # ratio 1 exactly
    changed = [
        not torch.equal(a, b) for a, b in zip(policy.model.parameters(), tiny_policy().model.parameters(), strict=True)
    ]
    assert all(changed)


def test_autocast_with_chunks_gives_the_gradients_of_one_piece(monkeypatch):
    """Chunks are recomputed in the backward pass, which must be under the same autocast."""
    rollout = make_rollout(LENGTHS)
    _, want = step(tiny_policy(autocast=torch.bfloat16), rollout, ADVANTAGES)
    policy = tiny_policy(autocast=torch.bfloat16)
    monkeypatch.setattr(rlkit.token_scorer, "MAX_CHUNK_ELEMENTS", 5 * policy.model.config.vocab_size)
    _, got = step(policy, rollout, ADVANTAGES)
    assert_same_gradients(got, want, **BFLOAT16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_weight_dtypes_give_float32_or_better(dtype):
    policy = tiny_policy(llama().to(dtype))
    update, gradients = step(policy, make_rollout(LENGTHS), ADVANTAGES)
    assert update.logp.dtype == torch.promote_types(dtype, torch.float32)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    want = rl.compute_logps(tiny_policy(), make_rollout(LENGTHS))
    torch.testing.assert_close(update.logp.float(), want, **BFLOAT16_MODEL)


def two_steps(dtype, lr=1e-6):
    policy = tiny_policy(llama().to(dtype))
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=lr)
    first = rl.loss_step(policy, optimizer, make_rollout(LENGTHS), ADVANTAGES)
    rl.loss_step(policy, optimizer, make_rollout(LENGTHS), ADVANTAGES, old_logps=first.logp)
    return policy


def test_16_bit_weights_are_warned_of_once_and_float32_ones_never(caplog):
    """Most updates of 1e-6 are below half the distance of neighbouring bfloat16 numbers; the remedy is named."""
    two_steps(torch.float32)
    assert "loss_step" not in caplog.text
    policy = two_steps(torch.bfloat16)
    pairs = zip(policy.model.parameters(), llama().to(torch.bfloat16).parameters(), strict=True)
    moved = [float((now != before).double().mean()) for now, before in pairs]
    assert sum(moved) / len(moved) < 0.5, "the warning would be wrong"
    assert caplog.text.count("in bfloat16, where small updates round to nothing") == 1
    assert "rl.load_policy(..., dtype=torch.float32, autocast=torch.bfloat16)" in caplog.text
    remedy = tiny_policy(llama().to(torch.bfloat16).float(), autocast=torch.bfloat16)  # a model object keeps its dtype
    caplog.clear()
    step(remedy, make_rollout(LENGTHS), ADVANTAGES)
    assert caplog.text == ""


def test_mixed_precision_in_float16_is_refused():
    """Without loss scaling, advantages of 1e-6 gave a gradient whose error was 1.6 times the right one."""
    with pytest.raises(ValueError, match=r"load_policy: autocast must be torch\.bfloat16 or None.*loss scaling"):
        tiny_policy(autocast=torch.float16)


def test_a_float32_adapter_on_16_bit_weights_is_no_reason_to_warn(caplog):
    model = lora(0.0)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    policy = tiny_policy(model, autocast=torch.bfloat16)
    update, _ = step(policy, make_rollout(LENGTHS), ADVANTAGES, lr=0.1)
    assert update.skipped is None and caplog.text == ""


def test_a_step_that_makes_weights_not_finite_names_them(policy):
    """float16: AdamW's eps of 1e-8 is 0, so 0 / 0 where a token never occurs. float32: a learning rate of 3e38."""
    with pytest.raises(FloatingPointError) as error:
        two_steps(torch.float16)
    found = re.search(r"in (\d+) parameter\(s\), the first is '(.*)' with (\d+) such values", str(error.value))
    assert found and found[2] == "model.embed_tokens.weight" and int(found[3]) > 0
    assert "The weights are float16. Keep float32 weights" in str(error.value)
    optimizer = torch.optim.SGD([policy.model.model.norm.weight], lr=3e38)
    with pytest.raises(FloatingPointError, match=r"in 1 parameter\(s\), the first is 'model\.norm\.weight' .*eps"):
        rl.loss_step(policy, optimizer, make_rollout(LENGTHS), ADVANTAGES * 1e3, max_grad_norm=None)
    assert policy.version == 1  # an engine must not keep the weights from before


def test_a_bias_of_minus_infinity_is_no_accident():
    """It rules a token out of the vocabulary, and was there before the first update; one more is an accident."""
    torch.manual_seed(0)
    config = {**SMALL, "num_hidden_layers": 2}
    policy = tiny_policy(PhiForCausalLM(PhiConfig(**config, partial_rotary_factor=0.5)))
    bias = policy.model.lm_head.bias
    with torch.no_grad():
        bias[0] = -math.inf
    for _ in range(2):
        update, _ = step(policy, make_rollout(LENGTHS), ADVANTAGES, lr=0.1)
        assert update.skipped is None
    with torch.no_grad():
        bias[PAD + 3] = -math.inf
    with pytest.raises(FloatingPointError, match=r"'lm_head\.bias' with 2 such values"):
        step(policy, make_rollout([1, 1]), torch.tensor([1.0, -1.0]), lr=0.1)


# --- nothing to learn ---


def after_one_step(policy):
    """AdamW with a state, a scheduler, and gradients left over: what a skipped step must leave alone."""
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rl.loss_step(policy, optimizer, make_rollout(LENGTHS), ADVANTAGES, scheduler=scheduler)
    return optimizer, scheduler


def everything_is_masked():
    return make_rollout(LENGTHS, truncated=[True] * 8), ADVANTAGES, {"mask_truncated": True}


def no_row_has_a_target():
    ref = torch.zeros(8, 6)
    return make_rollout(LENGTHS), torch.full((8,), NAN), {"loss": rl.AStarPO(), "ref_logps": ref}


def no_signal():
    return make_rollout(LENGTHS), torch.zeros(8), {}


def no_signal_for_a_loss_of_ones_own():
    return make_rollout(LENGTHS), torch.zeros(8), {"loss": token_mean}


def every_row_is_clipped():
    return make_rollout(LENGTHS), torch.ones(8), {"old_logps": torch.full((8, 6), -50.0)}


def gradient_overflows():
    return make_rollout(LENGTHS), ADVANTAGES, {"loss": lambda x: 1e38 * (x.logp - x.logp.detach())}


def gradient_is_nan():
    return make_rollout(LENGTHS), ADVANTAGES, {"loss": lambda x: (x.logp - x.logp.detach()).abs().sqrt()}


SKIPS = {
    everything_is_masked: "no token counts in the loss: every completion is masked or has no reward",
    no_row_has_a_target: "no token counts in the loss",
    no_signal: "every advantage is 0: all completions of each prompt got the same reward",
    no_signal_for_a_loss_of_ones_own: "the gradient is 0 everywhere, as with advantages that are all 0",
    every_row_is_clipped: "the gradient is 0 everywhere",
    gradient_overflows: "the gradient norm is inf",
    gradient_is_nan: "the gradient norm is nan",
}


@pytest.mark.parametrize("case", SKIPS, ids=[case.__name__ for case in SKIPS])
@pytest.mark.parametrize("size", [None, 3])
def test_a_step_without_anything_to_learn_changes_nothing_and_says_so(policy, case, size, caplog):
    """Parameters, optimizer, scheduler and version are bit for bit as before; the reason is said and logged.

    AdamW would move weights by its momentum and weight decay where the gradient is 0.
    """
    optimizer, scheduler = after_one_step(policy)
    before, version = snapshot(policy.model, optimizer, scheduler), policy.version
    rollout, advantages, options = case()
    logp = rl.compute_logps(policy, rollout)
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        update = rl.loss_step(
            policy, optimizer, rollout, advantages, scheduler=scheduler, micro_batch_size=size, **options
        )
    assert SKIPS[case] in update.skipped and SKIPS[case] in caplog.text
    assert_identical(snapshot(policy.model, optimizer, scheduler), before)
    assert policy.version == version
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert update.metrics["skipped"] == 1
    torch.testing.assert_close(update.logp, logp, **FLOAT32)
    assert "skipped" in repr(update)


@pytest.mark.parametrize("case", SKIPS, ids=[case.__name__ for case in SKIPS])
def test_the_loss_of_a_skipped_update_is_nan(policy, case):
    """As `Update` documents it."""
    rollout, advantages, options = case()
    update, gradients = step(policy, rollout, advantages, **options)
    assert math.isnan(update.loss) and gradients is None


def test_rewards_that_are_all_none_warn_and_skip_the_update(policy, caplog):
    """From the reward function to the step."""
    rollout = make_rollout(LENGTHS)
    before = snapshot(policy.model)
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        scores = rl.score(rollout, lambda completions, **_: [None] * len(completions))
        update, _ = step(policy, rollout, rl.compute_loo_advantage(scores), lr=1.0)
    assert "every reward function returned None for ALL of 8 completions" in caplog.text
    assert update.skipped and "update skipped" in caplog.text
    assert_identical(snapshot(policy.model), before)


def test_a_zero_advantage_is_a_signal_for_a_regression(policy):
    """A*-PO pulls towards the reference even where the advantage is 0."""
    rollout = make_rollout(LENGTHS)
    ref = off_policy(rollout, policy, scale=0.5)
    update, gradients = step(policy, rollout, torch.zeros(8), loss=rl.AStarPO(beta2=0.3), ref_logps=ref)
    assert update.skipped is None and any(bool(gradient.any()) for gradient in gradients)


@pytest.mark.parametrize("size", [None, 2])
def test_a_nan_loss_raises_and_leaves_the_policy_unchanged(policy, size):
    """Also where the first micro-batches are fine: row 7 holds the NaN."""
    optimizer, scheduler = after_one_step(policy)
    before, version = snapshot(policy.model, optimizer, scheduler), policy.version
    rollout = make_rollout(LENGTHS)
    ref = torch.zeros(8, 6)
    ref[7, 0] = NAN
    with pytest.raises(
        FloatingPointError,
        match=r"loss_step: the loss is nan; the policy is unchanged\. Look for NaN .* the weights as loaded",
    ):
        rl.loss_step(
            policy,
            optimizer,
            rollout,
            ADVANTAGES,
            loss=rl.AStarPO(),
            ref_logps=ref,
            scheduler=scheduler,
            micro_batch_size=size,
        )
    assert_identical(snapshot(policy.model, optimizer, scheduler), before)
    assert policy.version == version
    assert all(parameter.grad is None for parameter in policy.model.parameters())


# --- inputs ---


def test_steps_never_change_their_inputs(policy):
    """Bitwise copies compared: rollout, advantages, old and reference log-probabilities."""
    rollout = make_rollout(LENGTHS, truncated=[row == 5 for row in range(8)])
    advantages, other = ADVANTAGES.clone(), off_policy(rollout, policy)
    advantages[3] = NAN
    given = [*(v for v in vars(rollout).values() if isinstance(v, torch.Tensor)), advantages, other]
    before = [tensor.clone() for tensor in given]
    for loss in LOSSES.values():
        step(policy, rollout, advantages, loss=loss, old_logps=other, ref_logps=other, mask_truncated=True, lr=0.1)
    rl.compute_logps(policy, rollout, micro_batch_size=3)
    rl.compute_kl(rollout, other)
    rl.score(rollout, lambda completions, **_: [1.0] * len(completions))
    assert_identical(given, before)


BAD_STEPS = {
    "advantages of another batch": (
        ValueError,
        {"advantages": torch.ones(7)},
        r"loss_step: expected one advantage per completion \(8,\), got \(7,\)",
    ),
    "advantages (B,1)": (
        ValueError,
        {"advantages": torch.ones(8, 1)},
        r"loss_step: expected one advantage per completion \(8,\), got \(8, 1\)",
    ),
    "infinite advantage": (
        FloatingPointError,
        {"advantages": torch.full((8,), math.inf)},
        r"loss_step: an advantage is infinite; check the rewards and the KL",
    ),
    "loss is no function": (
        TypeError,
        {"loss": 0.2},
        r"loss_step: loss must be RLOO\(\), AStarPO\(\) or a function of LossInputs, got float",
    ),
    "no reference": (
        ValueError,
        {"loss": rl.AStarPO()},
        r"loss_step: AStarPO needs ref_logps=rl\.compute_logps\(reference, rollout\); got None",
    ),
    "reference of another rollout": (
        ValueError,
        {"loss": rl.AStarPO(), "ref_logps": torch.zeros(8, 5)},
        r"loss_step: ref_logps must have the rollout's \(B,T\) shape \(8, 6\), got \(8, 5\): was it computed",
    ),
    "old of another rollout": (
        ValueError,
        {"old_logps": torch.zeros(7, 6)},
        r"loss_step: old_logps must have .* \(8, 6\), got \(7, 6\)",
    ),
    "micro_batch_size 0": (
        ValueError,
        {"micro_batch_size": 0},
        r"loss_step: micro_batch_size must be at least 1 or None, got 0",
    ),
    "max_grad_norm 0": (ValueError, {"max_grad_norm": 0.0}, r"loss_step: max_grad_norm must be > 0 or None, got 0\.0"),
    "max_grad_norm nan": (ValueError, {"max_grad_norm": NAN}, r"loss_step: max_grad_norm must be > 0 or None, got nan"),
    "loss took the mean": (
        ValueError,
        {"loss": lambda x: x.logp.mean()},
        r"loss_step: the loss '<lambda>' must return a tensor of shape \(B,\) = \(8,\).*or \(B,T\) = \(8, "
        r"6\).*got shape \(\)\. loss_step takes the mean itself",
    ),
    "loss returned a number": (ValueError, {"loss": lambda x: 0.0}, r"must return a tensor of shape .* got float"),
    "constant loss": (
        ValueError,
        {"loss": lambda x: x.advantages},
        r"loss_step: the loss does not depend on the policy's parameters",
    ),
}


@pytest.mark.parametrize(("kind", "changes", "message"), BAD_STEPS.values(), ids=BAD_STEPS.keys())
def test_bad_input_is_named_with_expected_got_and_advice(unchecked, policy, kind, changes, message):
    options = {"advantages": ADVANTAGES} | changes
    before = snapshot(policy.model)
    with pytest.raises(kind, match=message):
        step(policy, make_rollout(LENGTHS), options.pop("advantages"), lr=1.0, **options)
    assert_identical(snapshot(policy.model), before)


def test_a_reference_cannot_be_trained(policy):
    reference = policy.reference()
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"a reference \(policy\.reference\(\)\) is frozen and cannot be trained"):
        rl.loss_step(reference, optimizer, make_rollout(LENGTHS), ADVANTAGES)


def test_a_scheduler_of_another_optimizer_is_refused(policy):
    """It would change the rate of an optimizer that nobody steps."""
    other = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(other, step_size=1)
    with pytest.raises(ValueError, match="loss_step: the scheduler was made for another optimizer"):
        step(policy, make_rollout(LENGTHS), ADVANTAGES, scheduler=scheduler)


def test_an_empty_rollout_is_skipped_as_an_empty_share_is(policy, caplog):
    """After a filter there may be no group left; one process and many do the same."""
    before = snapshot(policy.model)
    update = step(policy, make_rollout([1]).select(slice(0, 0)), torch.ones(0))[0]
    assert "no token counts in the loss" in update.skipped and "no token counts" in caplog.text
    assert update.logp.shape == (0, 1)
    assert_identical(snapshot(policy.model), before)


def test_a_bad_micro_batch_size_of_compute_logps_is_named(policy):
    with pytest.raises(ValueError, match=r"compute_logps: micro_batch_size must be at least 1 or None, got 0"):
        rl.compute_logps(policy, make_rollout(LENGTHS), micro_batch_size=0)
