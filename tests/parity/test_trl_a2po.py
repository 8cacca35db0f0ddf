"""A*-PO against TRL's own A2POTrainer: the same tokens and rewards give the same numbers, and where they do not, the
difference is one that docs/parity.md names.

TRL's trainer estimates V*, filters and trains for real; only `model.generate` is replaced (parity/a2po.py). Each test
named `test_differs_*` shows one intended difference and that it is exactly what the document says.
"""

import math
from dataclasses import replace

import pytest
import torch
from builders import EOS, llama
from parity.a2po import A2POTrace, Script, Settings, make_table, train_rlkit_a2po, train_trl_a2po
from parity.harness import (
    assert_close,
    assert_gradients_agree,
    assert_metrics_agree,
    assert_parameters_agree,
    encode,
    left_padded_tokenizer,
    make_models,
    write_completions,
)
from tolerances import FLOAT32

import rlkit as rl

pytestmark = pytest.mark.integration

PROMPTS = ("1+2=", "what is 7?", "ab", "9-4=", "hi: 5", "a+b")
UNSOLVED = (1, 4)  # rows whose reference samples all earn 0
TRUNCATED = (3, 6, 11, 16, 21)
SHARED = ("loss", "grad_norm", "learning_rate", "reward", "v_star", "implicit_reward", "advantage")
CLOSE_TO_REFERENCE = 1e-6  # largest implicit reward of a policy that is the reference, in units of reward


def correct(completions, answer, **_):
    """1 where the completion is the row's answer."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def neat(completions, **_):
    """A quarter for completions of an even number of characters that are not empty."""
    return [0.25 * (len(text) % 2 == 0 and bool(text)) for text in completions]


def write_script(settings, *, reward_funcs=(correct,)):
    """Six prompts. Their reference samples are right in half of the solved rows' tries; training completions vary in
    length, some are cut off, one is empty.
    """
    samples = write_completions(len(PROMPTS) * settings.num_value_samples, seed=3, truncated=TRUNCATED)
    dataset, reference, training = [], [], []
    later = write_completions(len(PROMPTS) * settings.steps, seed=4, truncated=TRUNCATED, empty=0)
    for row, prompt in enumerate(PROMPTS):
        mine = samples[row * settings.num_value_samples : (row + 1) * settings.num_value_samples]
        answer = f"={row}"
        if row not in UNSOLVED:
            mine[: 1 + row % 3] = [encode(answer)] * (1 + row % 3)
        visits = later[row * settings.steps : (row + 1) * settings.steps]
        if row % 3 == 2:
            visits[0] = encode(answer)
        dataset.append({"prompt": prompt, "answer": answer})
        reference.append(tuple(mine))
        training.append(tuple(visits))
    return Script(tuple(dataset), tuple(reference), tuple(training), reward_funcs)


@pytest.fixture
def both(tmp_path):
    """Run both sides: (rlkit's trace, TRL's trace)."""

    def run(settings, script, *, model=None, tokenizer=None, **trl_options):
        make_model, _ = make_models(tmp_path / "model", model)
        theirs = train_trl_a2po(tmp_path, make_model(), script, settings, tokenizer=tokenizer, **trl_options)
        ours = train_rlkit_a2po(tmp_path, make_model(), script, settings, theirs, tokenizer=tokenizer)
        return ours, theirs

    return run


def joined(parts, settings, step):
    part = parts[step * settings.accumulation : (step + 1) * settings.accumulation]
    return torch.cat(part) if isinstance(part[0], torch.Tensor) else [item for piece in part for item in piece]


def assert_agree(ours, theirs, settings):
    """Everything: V*, the filter, tokens, advantages, loss, every gradient, every parameter, every shared metric."""
    assert [row["prompt"] for row in ours.kept] == [row["prompt"] for row in theirs.kept]
    values = dict(zip(ours.table.prompts, ours.table.values.tolist(), strict=True))
    assert list(values) == list(theirs.v_star)
    for prompt, value in theirs.v_star.items():
        assert_close(values[prompt], value, FLOAT32, f"V* of {prompt!r}")
    for name in ("gradients", "parameters", "logs"):
        assert len(getattr(ours, name)) == len(getattr(theirs, name)) == settings.steps
    for step in range(settings.steps):
        assert ours.prompt_ids[step] == joined(theirs.prompt_ids, settings, step)
        assert_close(ours.advantages[step], joined(theirs.advantages, settings, step), FLOAT32, "advantages")
        passes = theirs.losses[step * settings.accumulation : (step + 1) * settings.accumulation]
        assert_close(ours.losses[step], sum(passes) / settings.accumulation, FLOAT32, f"loss of step {step}")
        assert_gradients_agree(ours.gradients[step], theirs.gradients[step])
        assert_parameters_agree(ours.parameters[step], theirs.parameters[step])
        assert_metrics_agree(ours.logs[step], theirs.logs[step], SHARED)


CASES = {
    "plain": Settings(),
    "two steps, large beta2": Settings(steps=2, beta2=0.1, learning_rate=0.1),
    "small beta1, nothing filtered, AdamW": Settings(
        beta1=0.05, beta2=0.02, filter_unsolved=False, rows=6, steps=2, optimizer="adamw", learning_rate=3e-3
    ),
    "two micro-batches, two rewards": Settings(
        rows=6,
        steps=2,
        accumulation=2,
        beta1=2.0,
        beta2=0.02,
        weights=(1.0, 0.5),
        max_grad_norm=1e6,
        num_value_samples=5,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a2po_agrees_with_trl(both, name):
    settings = CASES[name]
    script = write_script(settings, reward_funcs=(correct, neat) if settings.weights else (correct,))
    ours, theirs = both(settings, script)
    assert_agree(ours, theirs, settings)
    rows = len(PROMPTS)
    if not settings.weights:
        assert len(ours.kept) == (rows - len(UNSOLVED) if settings.filter_unsolved else rows)
    if settings.steps > 1:  # otherwise the log-ratio was not tested
        assert abs(theirs.logs[1]["implicit_reward"]) > 1e-4
    lengths = torch.cat([rollout.lengths for rollout in ours.rollouts])
    assert len(lengths.unique()) > 2
    assert any(rollout.truncated.any() for rollout in ours.rollouts)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("filter_unsolved", [True, False])
@pytest.mark.parametrize("beta2", [1e-3, 0.1])
@pytest.mark.parametrize("beta1", [0.05, 0.5, 5.0])
def test_a2po_agrees_with_trl_everywhere(both, beta1, beta2, filter_unsolved, accumulation):
    settings = Settings(
        beta1=beta1,
        beta2=beta2,
        filter_unsolved=filter_unsolved,
        accumulation=accumulation,
        rows=4 if filter_unsolved else 6,
        steps=2,
    )
    ours, theirs = both(settings, write_script(settings))
    assert_agree(ours, theirs, settings)


# ------------------------------------------------------------------------------------------- the intended differences


def test_differs_temperature_in_log_probabilities(both):
    """TRL samples at the temperature but scores at temperature 1; rlkit scores the distribution that was sampled. The
    same rollout scored at temperature 1 gives TRL's numbers.
    """
    settings = Settings(temperature=0.7, beta2=0.1)
    script = write_script(settings)
    ours, theirs = both(settings, script)
    assert_close(ours.advantages[0], theirs.advantages[0], FLOAT32, "advantages: no log-probability in them")
    at_one = replace(settings, temperature=1.0)
    again, _ = both(at_one, script)
    assert_gradients_agree(again.gradients[0], theirs.gradients[0])
    assert_close(again.losses[0], theirs.losses[0], FLOAT32, "loss")
    errors = [float((ours.gradients[0][n] - g).abs().max() / g.abs().max()) for n, g in theirs.gradients[0].items()]
    assert max(errors) > 0.05


def test_differs_v_star_by_row_not_by_prompt_text(both):
    """Two rows with one prompt and different answers: TRL keeps the V* of the last, and drops both if one was never
    solved; rlkit keeps two V* and drops the row that was not solved.
    """
    right, wrong = encode("=x"), encode("no")
    dataset = (
        {"prompt": "ab", "answer": "=y"},
        {"prompt": "ab", "answer": "=x"},
        {"prompt": "cd", "answer": "=x"},
        {"prompt": "ef", "answer": "=x"},
    )
    reference = ((wrong, encode("nn")), (right, wrong), (right, wrong), (right, right))
    training = tuple((right,) for _ in dataset)
    script = Script(dataset, reference, training, (correct,))
    settings = Settings(num_value_samples=2, rows=2)
    ours, theirs = both(settings, script)
    half = 0.5 * math.log((math.exp(2) + 1) / 2)  # V* of [1, 0] at beta1 = 0.5
    assert ours.table.values.tolist() == pytest.approx([0, half, half, 1])
    assert theirs.v_star == pytest.approx({"ab": half, "cd": half, "ef": 1})
    assert ours.kept == list(dataset[1:])
    assert theirs.kept == list(dataset[2:])
    open_filter = replace(settings, filter_unsolved=False, rows=4)
    ours, theirs = both(open_filter, script)
    order = [dataset.index(row) for row in theirs.rows[0]]
    values = [[0, half, half, 1][row] for row in order]
    rewards = [[0.0, 1.0, 1.0, 1.0][row] for row in order]
    assert ours.advantages[0].tolist() == pytest.approx([r - v for r, v in zip(rewards, values, strict=True)])
    unsolved = order.index(0)
    assert float(theirs.advantages[0][unsolved]) == pytest.approx(-half)  # the other row's V*
    assert float(ours.advantages[0][unsolved]) == 0


def test_differs_filter_is_not_by_sum(both):
    """Sum of rewards == 0 is not "all incorrect": TRL drops [1, -1] and keeps [-1, -1], rlkit does the reverse."""

    def signed(completions, **_):
        return [{"up": 1.0, "down": -1.0, "": 0.0}[text] for text in completions]

    up, down, zero = encode("up"), encode("down"), encode("")
    dataset = tuple({"prompt": prompt} for prompt in ("ab", "cd", "ef", "gh"))
    reference = ((up, down), (down, down), (zero, zero), (up, up))
    script = Script(dataset, reference, tuple((up,) for _ in dataset), (signed,))
    ours, theirs = both(Settings(num_value_samples=2, rows=2), script)
    assert [row["prompt"] for row in theirs.kept] == ["cd", "gh"]
    assert [row["prompt"] for row in ours.kept] == ["ab", "gh"]
    values = dict(zip(ours.table.prompts, ours.table.values.tolist(), strict=True))
    assert values == pytest.approx(theirs.v_star)


def test_differs_abstaining_rewards(tmp_path):
    """A reward function that returns None stops TRL's A*-PO; rlkit takes V* over the scored samples and leaves a row
    without a reward out of the loss.
    """
    settings = Settings()
    plain = write_script(settings)

    def sometimes(completions, answer, **_):
        rewards = correct(completions, answer)
        return [None if text == "z" else reward for text, reward in zip(completions, rewards, strict=True)]

    samples = [list(rows) for rows in plain.reference]
    samples[2][0] = samples[3][0] = encode("z")
    script = replace(plain, reference=tuple(map(tuple, samples)), reward_funcs=(sometimes,))
    make_model, _ = make_models(tmp_path / "model")
    with pytest.raises(TypeError, match="NoneType"):
        train_trl_a2po(tmp_path, make_model(), script, settings)
    policy = rl.load_policy(make_model(), tokenizer=left_padded_tokenizer(), device="cpu")
    table = make_table(policy, script, settings)
    assert table.rewards.isnan().sum(-1).tolist() == [0, 0, 1, 1, 0, 0]
    assert not table.values.isnan().any()
    theirs = A2POTrace(
        rows=[list(plain.dataset)], completions=[[encode("=2"), encode("z"), *[encode(f"={n}") for n in range(2, 6)]]]
    )
    ours = train_rlkit_a2po(tmp_path, make_model(), script, settings, theirs)
    assert ours.advantages[0].isnan().tolist() == [False, True, False, False, False, False]
    assert ours.updates[0].loss_mask.any(-1).tolist() == [True, False, True, True, True, True]
    expected = ours.advantages[0][~ours.advantages[0].isnan()].square().mean()
    assert_close(ours.losses[0], expected, FLOAT32, "mean over five rows; the policy is the reference")


def test_differs_beginning_of_sequence(both):
    """A tokenizer that begins every text with a special token: TRL's A*-PO leaves it out (its RLOO does not), rlkit
    has it once, in stage 1, training and evaluation alike.
    """
    tokenizer = left_padded_tokenizer(adds_bos=True)
    settings = Settings()
    ours, theirs = both(settings, write_script(settings), tokenizer=tokenizer)
    assert [ids[1:] for ids in ours.prompt_ids[0]] == theirs.prompt_ids[0]
    assert {ids[0] for ids in ours.prompt_ids[0]} == {tokenizer.bos_token_id}
    assert tokenizer.bos_token_id not in [token for ids in theirs.prompt_ids[0] for token in ids]


def test_differs_long_prompts_are_not_cut(tmp_path):
    """TRL cuts prompts at max_prompt_length without a word and trains on what is left; rlkit names the rows."""
    settings = Settings(filter_unsolved=False, rows=6)
    script = write_script(settings)
    make_model, _ = make_models(tmp_path / "model")
    theirs = train_trl_a2po(tmp_path, make_model(), script, settings, max_prompt_length=3)
    whole = {row["prompt"]: list(encode(row["prompt"], end=False)) for row in script.dataset}
    kept = [whole[row["prompt"]] for row in theirs.rows[0]]
    assert theirs.prompt_ids[0] == [ids[:3] for ids in kept] != kept
    policy = rl.load_policy(make_model(), tokenizer=left_padded_tokenizer(), device="cpu")
    with pytest.raises(ValueError, match="longer than 3 tokens"):
        rl.PromptLoader(list(script.dataset), policy, batch_size=2, max_prompt_length=3)


def test_differs_dropout(both):
    """TRL's A*-PO trains with the checkpoint's dropout and scores the reference without: the implicit reward is not 0
    where the policy is the reference. rlkit runs without dropout; it is exactly the reference there.
    """
    settings = Settings(beta2=0.1)
    ours, theirs = both(settings, write_script(settings), model=llama(attention_dropout=0.3))
    assert ours.logs[0]["implicit_reward"] == 0
    assert abs(theirs.logs[0]["implicit_reward"]) > 1e3 * CLOSE_TO_REFERENCE
    ours, theirs = both(settings, write_script(settings))
    assert abs(theirs.logs[0]["implicit_reward"]) < CLOSE_TO_REFERENCE
    assert EOS in ours.rollouts[0].completion_ids
    assert_close(ours.logs[0]["loss"], theirs.logs[0]["loss"], FLOAT32, "loss")
