"""RLOO against TRL's own RLOOTrainer: the same tokens and rewards give the same numbers, and where they do not, the
difference is one that docs/parity.md names.

TRL's trainer trains for real; only the drawing of tokens is replaced (parity/harness.py). Each test named
`test_differs_*` shows one intended difference and that it is exactly what the document says.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from builders import EOS, PAD, VOCABULARY, character_tokenizer, gpt2_with_dropout
from parity.harness import (
    GENERATIONS,
    LIMIT,
    PROMPTS,
    Script,
    assert_close,
    assert_gradients_agree,
    assert_metrics_agree,
    assert_parameters_agree,
    encode,
    left_padded_tokenizer,
    make_models,
    reward_table,
    write_completions,
)
from parity.rloo import Settings, train_rlkit_rloo, train_trl_rloo
from tolerances import EXACT, FLOAT32
from transformers import MixtralConfig, MixtralForCausalLM

import rlkit as rl

pytestmark = pytest.mark.integration

ROWS = len(PROMPTS) * GENERATIONS
TRUNCATED = (1, 6, 7)
CLIPPING_RATE = 0.04  # of SGD: the first update moves some sequence ratios out of the clip range, and not all
NO_CLIP = 1e6  # of the gradient's norm

MIXED = (1.0, 0.0, 0.0, 1.0, 0.5, 1.0, 0.0, 0.0, 1.0, 0.5, 1.0, 0.0)
ONE_UNIFORM_GROUP = (1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.5, 1.0, 0.0)
# Partly None; row 3 has no reward at all; the second group has two scorable rows.
CORRECT = (1.0, None, 0.0, None, None, None, None, 1.0, 1.0, 0.0, None, 1.0)
SHORT = (0.2, 0.4, None, None, None, 0.3, None, None, None, 0.5, 0.1, None)
# The same, but only one row of the second group has a reward.
LONELY = (0.2, 0.4, None, None, None, None, None, None, None, 0.5, 0.1, None)

OF_THE_ROLLOUT = (
    "num_tokens",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "completions/clipped_ratio",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
)
OF_THE_UPDATE = (
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "clip_ratio/region_mean",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
)


def one_reward(values):
    return lambda generations: (reward_table("correct", generations, values),)


def three_rewards(generations):
    """Two functions that abstain here and there, and one that always does."""
    return (
        reward_table("correct", generations, CORRECT),
        reward_table("short", generations, SHORT),
        reward_table("silent", generations, (None,)),
    )


def write_script(settings, rewards, *, truncated=TRUNCATED, prompts=PROMPTS):
    """Random completions; one of them, in the first generation, is empty: reward tables are keyed by text."""
    rows = len(prompts) * GENERATIONS
    generations = tuple(
        tuple(write_completions(rows, seed=10 * step + 1, truncated=truncated, empty=None if step else 3))
        for step in range(settings.steps)
    )
    return Script(generations, rewards(generations), prompts=prompts)


@pytest.fixture
def both(tmp_path):
    """Run both sides: (rlkit's trace, TRL's trace)."""

    def run(settings, script, *, model=None, trl_settings=None, tokenizer=None, **trl_options):
        make_model, reference = make_models(tmp_path / "reference", model)
        theirs = train_trl_rloo(
            tmp_path, make_model(), script, trl_settings or settings, tokenizer=tokenizer, **trl_options
        )
        ours = train_rlkit_rloo(tmp_path, make_model(), reference, script, settings, tokenizer=tokenizer)
        return ours, theirs

    return run


def assert_agree(ours, theirs, settings, script, *, but=()):
    """Everything: tokens, advantages, loss, every gradient, every parameter, every shared metric but those named."""
    assert ours.prompt_ids == theirs.prompt_ids
    updates = settings.steps * settings.num_iterations
    for name in ("gradients", "parameters", "logs"):
        assert len(getattr(ours, name)) == len(getattr(theirs, name)) == updates
    assert len(ours.advantages) == len(theirs.advantages) == settings.steps
    for step in range(settings.steps):
        assert_close(ours.advantages[step], theirs.advantages[step], FLOAT32, f"advantages of step {step}")
        assert_close(ours.old_logps[step], theirs.old_logps[step], FLOAT32, f"log-probabilities of step {step}")
    for update in range(updates):
        passes = theirs.losses[update * settings.accumulation : (update + 1) * settings.accumulation]
        assert_close(ours.losses[update], sum(passes) / settings.accumulation, FLOAT32, f"loss of update {update}")
        assert_gradients_agree(ours.gradients[update], theirs.gradients[update])
        assert_parameters_agree(ours.parameters[update], theirs.parameters[update])
        names = list(OF_THE_UPDATE)
        if update % settings.num_iterations == 0:
            names += OF_THE_ROLLOUT
            names += [f"rewards/{f.__name__}/{part}" for f in script.reward_funcs for part in ("mean", "std")]
            names += ["kl"] if settings.beta else []
        assert_metrics_agree(ours.logs[update], theirs.logs[update], [name for name in names if name not in but])


CASES = {
    "plain": (Settings(), one_reward(ONE_UNIFORM_GROUP)),
    "cooler, KL, two steps": (Settings(temperature=0.7, beta=0.05, steps=2), one_reward(MIXED)),
    "second update clips": (
        Settings(num_iterations=2, learning_rate=CLIPPING_RATE, epsilon=0.1, epsilon_high=0.28),
        one_reward(MIXED),
    ),
    "abstaining rewards, weights, normalised": (
        Settings(beta=0.05, normalize=True, weights=(1.0, 0.5, 2.0)),
        three_rewards,
    ),
    "reward clipped to a range, AdamW": (
        Settings(clip_range=(0.25, 0.75), optimizer="adamw", learning_rate=1e-3, steps=2),
        one_reward(MIXED),
    ),
    "gradient norm not clipped": (Settings(max_grad_norm=NO_CLIP), one_reward(MIXED)),
    "two micro-batches": (Settings(accumulation=2, beta=0.05, num_iterations=2), one_reward(MIXED)),
}
BUT = {
    "reward clipped to a range, AdamW": ("reward", "reward_std"),  # test_differs_reward_metric_under_clip_range
    "two micro-batches": ("entropy",),  # test_differs_entropy_is_not_a_mean_of_means
}


@pytest.mark.parametrize("name", CASES)
def test_rloo_agrees_with_trl(both, name):
    settings, rewards = CASES[name]
    script = write_script(settings, rewards)
    ours, theirs = both(settings, script)
    assert_agree(ours, theirs, settings, script, but=BUT.get(name, ()))
    if settings.beta:  # otherwise the KL term was not tested
        assert abs(theirs.logs[0]["kl"]) > 1e-3
    if "clips" in name:  # both sides of the range, and not every row
        assert 0 < theirs.logs[1]["clip_ratio/low_mean"] and 0 < theirs.logs[1]["clip_ratio/high_mean"]
        assert theirs.logs[1]["clip_ratio/region_mean"] < 1
        assert theirs.logs[0]["clip_ratio/region_mean"] == 0


MATRIX = list(itertools.product((1.0, 0.7), (0.0, 0.05), (1, 2), (1, 2), (False, True)))


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "beta", "num_iterations", "accumulation", "many"), MATRIX)
def test_rloo_agrees_with_trl_everywhere(both, temperature, beta, num_iterations, accumulation, many):
    """The product of temperature, KL, updates per rollout, accumulation, and several abstaining rewards, normalised."""
    settings = Settings(
        temperature=temperature,
        beta=beta,
        num_iterations=num_iterations,
        accumulation=accumulation,
        learning_rate=CLIPPING_RATE,
        epsilon_high=0.28,
        normalize=many,
        weights=(1.0, 0.5, 2.0) if many else None,
    )
    script = write_script(settings, three_rewards if many else one_reward(MIXED))
    ours, theirs = both(settings, script)
    assert_agree(ours, theirs, settings, script, but=("entropy",) if accumulation > 1 else ())


# ------------------------------------------------------------------------------------------- the intended differences


@pytest.mark.parametrize("accumulation", [1, 2])
def test_differs_loss_mean_is_over_rows_that_count(both, accumulation):
    """TRL divides by all rows, rlkit by those with a loss token. At a learning rate larger by that share, TRL makes
    the same two updates. The value of TRL's loss holds a further constant: minus the advantages of the masked rows,
    whose ratio is an empty product.
    """
    settings = Settings(
        mask_truncated=True,
        num_iterations=2,
        accumulation=accumulation,
        learning_rate=CLIPPING_RATE / 5,  # the norm is about 5, and not clipped
        max_grad_norm=NO_CLIP,
    )
    share = (ROWS - len(TRUNCATED)) / ROWS
    masked = torch.zeros(ROWS, dtype=torch.bool)
    masked[list(TRUNCATED)] = True
    script = write_script(settings, one_reward(MIXED))
    ours, theirs = both(settings, script, trl_settings=replace(settings, learning_rate=settings.learning_rate / share))
    assert_close(ours.advantages[0], theirs.advantages[0], FLOAT32, "advantages: rewards of masked rows count")
    for update in range(2):
        passes = theirs.losses[update * accumulation : (update + 1) * accumulation]
        constant = -ours.advantages[0][masked].sum() / ROWS
        assert_close(ours.losses[update] * share + constant, sum(passes) / accumulation, FLOAT32, "loss")
        assert_gradients_agree(ours.gradients[update], {n: g / share for n, g in theirs.gradients[update].items()})
        assert_parameters_agree(ours.parameters[update], theirs.parameters[update])
        assert_close(ours.logs[update]["grad_norm"], theirs.logs[update]["grad_norm"] / share, FLOAT32, "grad_norm")
        for side in ("region_mean", "low_mean", "high_mean"):
            name = f"clip_ratio/{side}"
            assert_close(ours.logs[update][name], theirs.logs[update][name] / share, FLOAT32, name)
    assert ours.logs[0]["frac_masked"] == pytest.approx(1 - share)
    assert theirs.logs[1]["clip_ratio/region_mean"] > 0
    assert abs(ours.losses[0]) > 1e-2
    if accumulation == 1:  # entropy is over the loss tokens on both sides
        assert_metrics_agree(ours.logs[0], theirs.logs[0], ["entropy", *OF_THE_ROLLOUT])


def test_differs_kl_of_masked_truncated_rows(both):
    """TRL sets the KL of a masked row to 0 and leaves its tokens out of `kl`; rlkit penalises it as any other row."""
    settings = Settings(mask_truncated=True, beta=0.5)
    ours, theirs = both(settings, write_script(settings, one_reward(MIXED)))
    rollout, scores = ours.rollouts[0], ours.scores[0]
    assert rollout.truncated.nonzero().flatten().tolist() == list(TRUNCATED)
    kl = rl.compute_kl(rollout, ours.ref_logps[0])
    assert_close(ours.advantages[0], rl.compute_loo_advantage(scores, kl=kl, beta=0.5), EXACT, "rlkit's advantages")
    unmasked = torch.where(rollout.truncated, 0.0, kl)
    expected = rl.compute_loo_advantage(scores, kl=unmasked, beta=0.5)
    assert_close(expected, theirs.advantages[0], FLOAT32, "TRL's advantages")
    assert (ours.advantages[0] - theirs.advantages[0]).abs().max() > 1e-2
    tokens = rollout.lengths
    assert_close(ours.logs[0]["kl"], kl.sum() / tokens.sum(), FLOAT32, "rlkit's kl")
    assert_close(unmasked.sum() / tokens[~rollout.truncated].sum(), theirs.logs[0]["kl"], FLOAT32, "TRL's kl")


def test_differs_kl_is_of_the_sampler(both):
    """TRL charges the KL of the trainer's log-probabilities, rlkit that of the engine's, which drew the tokens. They
    are one with the transformers engine; the trainer's give TRL's number with any engine.
    """
    settings = Settings(beta=0.05)
    ours, theirs = both(settings, write_script(settings, one_reward(MIXED)))
    rollout, ref_logps, scores = ours.rollouts[0], ours.ref_logps[0], ours.scores[0]
    gap = torch.linspace(0, 0.1, ROWS)
    other_engine = replace(rollout, sampler_logp=rollout.sampler_logp + gap[:, None])
    kl = rl.compute_kl(rollout, ref_logps)
    assert_close(rl.compute_kl(other_engine, ref_logps), kl + gap * rollout.lengths, FLOAT32, "KL of the engine")
    again = rl.compute_kl(ours.updates[0].logp, ref_logps, mask=rollout.completion_mask)
    advantages = rl.compute_loo_advantage(scores, kl=again, beta=0.05)
    assert_close(advantages, theirs.advantages[0], FLOAT32, "advantages from the trainer's log-probabilities")


def test_differs_zero_std_is_of_raw_rewards(both):
    """A group with one reward for all has no signal. TRL does not see that once the KL is in the reward."""
    plain, with_kl = Settings(), Settings(beta=0.05)
    script = write_script(plain, one_reward(ONE_UNIFORM_GROUP))
    ours, theirs = both(plain, script)
    assert ours.logs[0]["frac_reward_zero_std"] == pytest.approx(1 / 3)
    assert theirs.logs[0]["frac_reward_zero_std"] == pytest.approx(1 / 3)
    ours, theirs = both(with_kl, script)
    assert ours.logs[0]["frac_reward_zero_std"] == pytest.approx(1 / 3)
    assert theirs.logs[0]["frac_reward_zero_std"] == 0


def test_differs_zero_std_counts_groups_without_a_peer(both):
    """One scorable completion has nothing to be compared with: its advantage is 0 on both sides, and only rlkit counts
    the group as one without signal (TRL's standard deviation of one number is NaN, and NaN is not 0).
    """
    settings = Settings()
    script = write_script(settings, one_reward(LONELY))
    ours, theirs = both(settings, script)
    assert_agree(ours, theirs, settings, script, but=("frac_reward_zero_std",))
    assert ours.advantages[0][4:8].tolist() == [0.0] * 4
    assert ours.logs[0]["frac_reward_zero_std"] == pytest.approx(1 / 3)
    assert theirs.logs[0]["frac_reward_zero_std"] == 0


def test_differs_update_without_signal_is_skipped(both):
    """Every advantage 0: TRL steps the optimizer with a gradient of 0, so momentum and weight decay move the weights;
    rlkit skips the update and says so.
    """
    settings = Settings(steps=2, optimizer="adamw", learning_rate=1e-3)
    script = write_script(
        settings, lambda generations: (reward_table("correct", generations, (*MIXED, *[1.0] * ROWS)),)
    )
    ours, theirs = both(settings, script)
    assert_parameters_agree(ours.parameters[0], theirs.parameters[0])
    assert len(ours.parameters) == 1 and len(theirs.parameters) == 2
    assert theirs.advantages[1].tolist() == ours.advantages[1].tolist() == [0.0] * ROWS
    assert all(not gradient.any() for gradient in theirs.gradients[1].values())
    assert "every advantage is 0" in ours.updates[1].skipped and ours.logs[1]["skipped"] == 1
    assert ours.policy.version == 1
    model = ours.policy.model
    assert_parameters_agree(dict(model.named_parameters()), theirs.parameters[0])  # rlkit's weights stay ...
    assert any((theirs.parameters[1][n] - value).abs().max() > 1e-4 for n, value in theirs.parameters[0].items())
    for parameter in model.parameters():  # ... and TRL's are where a step with a gradient of 0 takes them
        parameter.grad = torch.zeros_like(parameter)
    ours.optimizer.step()
    assert_parameters_agree(ours.parameters[1], theirs.parameters[1])


def test_differs_reward_metric_under_clip_range(both):
    """`reward` and `reward_std`: TRL's are of the sum before clipping, rlkit's of the reward that is learned from."""
    settings = Settings(clip_range=(0.25, 0.75))
    ours, theirs = both(settings, write_script(settings, one_reward(MIXED)))
    raw = torch.tensor(MIXED)
    for reward, log in ((raw, theirs.logs[0]), (raw.clamp(0.25, 0.75), ours.logs[0])):
        assert_close(reward.mean(), log["reward"], FLOAT32, "reward")
        assert_close(reward.std(), log["reward_std"], FLOAT32, "reward_std")
    assert_close(ours.advantages[0], theirs.advantages[0], FLOAT32, "advantages: both clip what they learn from")


def test_clip_ratio_extremes_are_over_rows(both):
    """`low_min` and `high_max` are extremes of what is 0 or 1 for each row."""
    settings, rewards = CASES["second update clips"]
    ours, theirs = both(settings, write_script(settings, rewards))
    ours, theirs = ours.logs[1], theirs.logs[1]
    for mean, extreme, of_rows in (("low_mean", "low_min", 0.0), ("high_mean", "high_max", 1.0)):
        assert 0 < ours[f"clip_ratio/{mean}"] < 1
        assert ours[f"clip_ratio/{extreme}"] == theirs[f"clip_ratio/{extreme}"] == of_rows


def test_differs_entropy_is_not_a_mean_of_means(both):
    """With two micro-batches TRL averages their token means; rlkit takes one mean over all tokens of the update."""
    settings = Settings(accumulation=2)
    ours, theirs = both(settings, write_script(settings, one_reward(MIXED)))
    rollout, update = ours.rollouts[0], ours.updates[0]
    rows = [
        rollout.prompt_ids[i][rollout.prompt_mask[i]].tolist()
        + rollout.completion_ids[i][: rollout.lengths[i]].tolist()
        for i in range(ROWS)
    ]
    parts = [[rows.index(tokens) for tokens in part] for part in theirs.micro_batches[0]]  # TRL shuffles the rows
    assert sorted(parts[0] + parts[1]) == list(range(ROWS))
    means = [update.entropy[part].sum() / rollout.lengths[part].sum() for part in parts]
    assert_close(sum(means) / 2, theirs.logs[0]["entropy"], FLOAT32, "mean of means")
    assert_close(ours.logs[0]["entropy"], update.entropy.sum() / rollout.lengths.sum(), FLOAT32, "mean")
    assert abs(ours.logs[0]["entropy"] - theirs.logs[0]["entropy"]) > 1e-3


def test_differs_positions_of_padded_rows(both):
    """TRL pads prompts on the left and gives no position ids. With rotary positions that changes nothing (all the
    tests above); a model with learned positions (GPT-2) sees a short prompt at the wrong place. rlkit's positions
    start at 0 in every row, so a row's numbers do not depend on its neighbours.
    """
    settings = Settings()
    ours, theirs = both(settings, write_script(settings, one_reward(MIXED)), model=gpt2_with_dropout(dropout=0.0))
    rollout, model = ours.rollouts[0], ours.policy.reference().model
    with torch.no_grad():  # back to the weights before the update
        for parameter, gradient in zip(model.parameters(), ours.gradients[0].values(), strict=True):
            parameter += settings.learning_rate * gradient
    longest = int(rollout.prompt_mask.sum(-1).max())
    for row, length in enumerate(rollout.prompt_mask.sum(-1).tolist()):
        tokens = torch.cat([rollout.prompt_ids[row, -length:], rollout.completion_ids[row, : rollout.lengths[row]]])
        right, shifted = (_sequence_logp(model, tokens, length, start) for start in (0, longest - length))
        assert_close(ours.old_logps[0][row], right, FLOAT32, "positions from 0")
        assert_close(shifted, theirs.old_logps[0][row], FLOAT32, "positions from the width of the padding")
        assert (length == longest) == (abs(float(right - shifted)) < 1e-3)


def _sequence_logp(model, tokens, prompt_length, first_position):
    positions = first_position + torch.arange(len(tokens))
    with torch.no_grad():
        logits = model(input_ids=tokens[None], position_ids=positions[None]).logits[0]
    logp = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
    return logp[prompt_length - 1 :].sum()


def test_differs_dropout(both):
    """TRL keeps the checkpoint's dropout while it trains, so its ratio is not 1 on the first update; rlkit runs without
    dropout. With disable_dropout=True TRL agrees.
    """
    settings = Settings()
    prompts = ("1+2=", "3+4=", "5+6=")  # of one length: positions are the same on both sides
    script = write_script(settings, one_reward(MIXED), prompts=prompts)
    ours, theirs = both(settings, script, model=gpt2_with_dropout(dropout=0.1), disable_dropout=True)
    assert_agree(ours, theirs, settings, script)
    assert abs(theirs.losses[0]) < 1e-6  # every ratio is 1, and advantages sum to 0
    ours, theirs = both(settings, script, model=gpt2_with_dropout(dropout=0.1))
    assert_close(ours.advantages[0], theirs.advantages[0], FLOAT32, "advantages")
    assert abs(ours.losses[0]) < 1e-6
    assert abs(theirs.losses[0]) > 1e-3


def test_differs_truncated_means_cut_by_the_limit(both):
    """A completion that the limit cut off right after a sampled padding token: TRL takes it for one that ended."""
    settings = Settings()
    script = write_script(settings, one_reward(MIXED))
    cut = (*encode("abcde"[: LIMIT - 1], end=False), 0)
    assert cut[-1] == PAD and PAD != EOS
    rows = list(script.generations[0])
    rows[1] = cut
    script = Script((tuple(rows),), one_reward(MIXED)((tuple(rows),)))
    ours, theirs = both(settings, script)
    assert ours.logs[0]["completions/clipped_ratio"] == pytest.approx(len(TRUNCATED) / ROWS)
    assert theirs.logs[0]["completions/clipped_ratio"] == pytest.approx((len(TRUNCATED) - 1) / ROWS)
    assert_gradients_agree(ours.gradients[0], theirs.gradients[0])


def test_differs_prompt_stays_open(both):
    """A tokenizer that closes every text with an end token: TRL leaves it behind the prompt, rlkit takes it away.
    The beginning-of-sequence token is there once on both sides.
    """
    settings = Settings()
    tokenizer = left_padded_tokenizer(adds_bos=True, adds_eos=True)
    ours, theirs = both(settings, write_script(settings, one_reward(MIXED)), tokenizer=tokenizer)
    assert [[*ids, EOS] for ids in ours.prompt_ids[0]] == theirs.prompt_ids[0]
    bos = tokenizer.bos_token_id
    assert all(ids[0] == bos and ids.count(bos) == 1 for ids in ours.prompt_ids[0])
    assert character_tokenizer().bos_token_id == bos


def test_differs_overflow_of_the_ratio(both):
    """A policy far from the one that sampled: exp(200) is infinite in float32, and infinity times an advantage of 0
    makes TRL's loss NaN. rlkit bounds the log-ratio before exp.
    """
    settings = Settings()
    ours, theirs = both(settings, write_script(settings, one_reward(ONE_UNIFORM_GROUP)))
    inputs = dict(theirs.trainer._buffered_inputs[0])
    inputs["old_logps"] = inputs["old_logps"] - 200
    theirs.trainer.model.train()
    assert torch.isnan(theirs.trainer._compute_loss(theirs.trainer.model, inputs))
    rollout, logp = ours.rollouts[0], ours.updates[0].logp
    per_token = 200 / rollout.lengths[:, None].float()
    update = rl.loss_step(ours.policy, ours.optimizer, rollout, ours.advantages[0], old_logps=logp - per_token)
    assert math.isfinite(update.metrics["loss"]) and math.isfinite(update.metrics["grad_norm"])


def test_differs_reward_functions_of_one_name(both):
    """Two functions of one name: TRL averages them in one metric, rlkit numbers them. The rewards are the same."""
    settings = Settings()

    def two(generations):
        return reward_table("same", generations, MIXED), reward_table("same", generations, ONE_UNIFORM_GROUP)

    ours, theirs = both(settings, write_script(settings, two))
    assert_close(ours.advantages[0], theirs.advantages[0], FLOAT32, "advantages")
    first, second = ours.logs[0]["rewards/same/mean"], ours.logs[0]["rewards/same_2/mean"]
    assert first == pytest.approx(sum(MIXED) / ROWS) and second == pytest.approx(sum(ONE_UNIFORM_GROUP) / ROWS)
    assert theirs.logs[0]["rewards/same/mean"] == pytest.approx((first + second) / 2)


def test_differs_no_auxiliary_loss(both):
    """TRL adds the load-balancing loss of a mixture of experts and logs `aux_loss`; rlkit does not. Without it the two
    agree on such a model too.
    """
    settings = Settings()
    script = write_script(settings, one_reward(MIXED))
    ours, theirs = both(settings, script, model=_mixtral(), router_aux_loss_coef=0.0)
    assert_agree(ours, theirs, settings, script)
    ours, theirs = both(settings, script, model=_mixtral(), router_aux_loss_coef=0.5)
    aux = theirs.logs[0]["aux_loss"]
    assert aux > 0.1 and "aux_loss" not in ours.logs[0]
    assert_close(ours.losses[0] + 0.5 * aux, theirs.losses[0], FLOAT32, "loss")


def _mixtral():
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    return MixtralForCausalLM(config)
