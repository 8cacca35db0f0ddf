import itertools
import math

import builders
import pytest
import torch
from builders import (
    CHAT_TEMPLATE,
    EOS,
    LETTERS,
    VOCABULARY,
    character_tokenizer,
    gpt2_with_dropout,
    letter_policy,
    llama,
    tiny_policy,
)
from engines.sampling_helpers import (
    allowed_scores,
    forward_shapes,
    groups_of,
    own_logits,
    own_logps,
    p_value,
    pick,
    replay,
    rows_of,
    softmax,
)
from tolerances import BFLOAT16, EXACT, FLOAT32

import rlkit as rl
from rlkit.engines import transformers_engine
from rlkit.engines.transformers_engine import TransformersEngine
from rlkit.prompts import make_batch

PROMPTS = ["1+2=", "12+34=", "a", "99999+1=", "abc abc abc", "7"]
FALSE_ALARM = 1e-6  # of each chance test; the seeds are fixed, so a pass stays a pass
ALLOW_TRUNCATION = pytest.mark.filterwarnings("ignore:sample. top_p, top_k:UserWarning")
SETTINGS = {
    "neutral": {},
    "cold": {"temperature": 0.7},
    "hot": {"temperature": 1.9},
    "top_k": {"top_k": 3, "temperature": 0.7},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2, "temperature": 1.3},
    "penalty": {"repetition_penalty": 1.8},
    "inverse penalty": {"repetition_penalty": 0.6, "temperature": 0.7},
    "min length": {"min_completion_length": 5},
    "stop strings": {"stop_strings": ("1", "ab", " ", "-")},
    "all": {
        "temperature": 0.8,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "min_completion_length": 2,
        "stop_strings": ("=", "5"),
    },
}


@pytest.fixture(scope="module")
def several_ends():
    """A policy whose completions end on three ids: tokenizer, generation config, and one that the user adds."""
    model = llama(seed=1)
    model.generation_config.eos_token_id = [EOS, 7]
    return rl.load_policy(model, tokenizer=character_tokenizer(), device="cpu", eos_ids=[11])


def draw_some(policy, prompts=PROMPTS, **settings):
    return builders.draw(policy, prompts, **({"seed": 5, "num_generations": 4, "max_completion_length": 9} | settings))


# Every token, every ending and every log-probability, against the definition


@ALLOW_TRUNCATION
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_tokens_endings_and_log_probabilities_are_the_definition(several_ends, settings):
    rollout = draw_some(several_ends, num_generations=6, **settings)
    assert rollout.engine == "transformers"
    replay(several_ends, rollout, seed=5)
    # The policy's own log-probabilities, whatever the sampler cut off.
    torch.testing.assert_close(rollout.sampler_logp, own_logps(several_ends.model, rollout), **FLOAT32)
    with torch.no_grad():
        scored = several_ends.score_tokens(rollout).logp
    torch.testing.assert_close(rollout.sampler_logp, scored, **FLOAT32)
    assert len(set(rollout.lengths.tolist())) > 2  # not one dull case


@ALLOW_TRUNCATION
def test_the_settings_of_the_test_above_all_change_something(several_ends):
    """Each setting gives other completions than the neutral one, so the test above can see it."""
    neutral = groups_of(draw_some(several_ends, num_generations=6))
    for name, settings in SETTINGS.items():
        if name != "neutral":
            assert groups_of(draw_some(several_ends, num_generations=6, **settings)) != neutral, name


@ALLOW_TRUNCATION
def test_padding_is_neither_penalised_nor_an_end(several_ends):
    """The padding token is an ordinary, likely token here, so a penalty on padding would show."""
    for pad_token in ("<eos>", "e"):
        policy = tiny_policy(llama(seed=1), tokenizer=character_tokenizer(pad_token=pad_token))
        rollout = draw_some(policy, num_generations=12, repetition_penalty=4.0)
        replay(policy, rollout, seed=5)
        assert policy.pad_id in {token for _, completion in rows_of(rollout) for token in completion}


@ALLOW_TRUNCATION
def test_repetition_penalty_moves_frequencies_as_computed():
    policy = letter_policy()
    counts = {}
    for penalty in (1.0, 3.0, 0.5):
        rollout = draw_some(
            policy, ["ab"], num_generations=4000, max_completion_length=1, repetition_penalty=penalty, seed=1
        )
        counts[penalty] = torch.bincount(rollout.completion_ids[:, 0], minlength=len(LETTERS))
        logits = own_logits(policy.model, *rows_of(rollout)[0])[0].numpy()
        expected = softmax(allowed_scores(logits, [2, 3], 0, rollout.sampling, policy.eos_ids))
        assert p_value(counts[penalty], 4000 * torch.from_numpy(expected)) > FALSE_ALARM
    repeated = {penalty: int(count[2] + count[3]) for penalty, count in counts.items()}
    assert repeated[3.0] + 200 < repeated[1.0] < repeated[0.5] - 200


def test_completions_have_their_exact_probabilities():
    """All 85 completions of up to three tokens over a vocabulary of five, listed with their probabilities."""
    policy = letter_policy(seed=2)
    prompt, n, temperature = [2, 3, 4], 20_000, 1.4
    rollout = draw_some(policy, ["abc"], num_generations=n, max_completion_length=3, temperature=temperature, seed=11)
    others = [token for token in range(len(LETTERS)) if token not in policy.eos_ids]
    listed = [
        (*head, last)
        for length in (1, 2, 3)
        for head in itertools.product(others, repeat=length - 1)
        for last in (range(len(LETTERS)) if length == 3 else policy.eos_ids)
    ]
    assert len(listed) == 1 + 4 + 80
    probability = []
    for completion in listed:
        logits = own_logits(policy.model, prompt, list(completion))
        logp = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).sum()
        probability.append(math.exp(float(logp)))
    assert math.isclose(sum(probability), 1.0, rel_tol=1e-5)
    drawn = groups_of(rollout)[0]
    assert set(drawn) <= set(listed)
    observed = [drawn.count(completion) for completion in listed]
    assert p_value(observed, n * torch.tensor(probability)) > FALSE_ALARM
    assert p_value(observed, n * torch.tensor(probability[::-1])) < FALSE_ALARM  # the test can fail


# Batches


@pytest.fixture(scope="module")
def whole(several_ends):
    """A batch and what each of its groups gets when all are drawn together."""
    batch = make_batch(several_ends, PROMPTS, first_group_id=40)
    rollout = draw_some(several_ends, batch, num_generations=5)
    return batch, rollout, groups_of(rollout)


def assert_same_groups(rollout, whole, num_generations=5):
    _, reference, expected = whole
    for group, completions in groups_of(rollout).items():
        assert completions == expected[group][:num_generations]
        left = rollout.sampler_logp[rollout.group_id == group]
        right = reference.sampler_logp[reference.group_id == group][:num_generations]
        torch.testing.assert_close(left, right[:, : left.shape[1]], **FLOAT32)


@pytest.mark.parametrize(
    "places", [[5, 4, 3, 2, 1, 0], [2], [3], [0, 5], [4, 1]], ids=["reversed", "short", "long", "two", "swapped"]
)
def test_completions_do_not_depend_on_the_rest_of_the_batch(several_ends, whole, places):
    rollout = draw_some(several_ends, pick(whole[0], places), num_generations=5)
    assert_same_groups(rollout, whole)
    assert list(dict.fromkeys(rollout.group_id.tolist())) == [40 + place for place in places]


def test_fewer_generations_are_a_prefix(several_ends, whole):
    assert_same_groups(draw_some(several_ends, whole[0], num_generations=2), whole, num_generations=2)


def test_a_shorter_limit_cuts_the_same_completions(several_ends, whole):
    short = groups_of(draw_some(several_ends, whole[0], num_generations=5, max_completion_length=3))
    assert short == {group: [c[:3] for c in completions] for group, completions in whole[2].items()}


@pytest.mark.parametrize("threshold", [0, 0.5, 1])
def test_compaction_changes_nothing(several_ends, whole, threshold, monkeypatch):
    monkeypatch.setattr(transformers_engine, "COMPACT_WHEN_FINISHED", threshold)
    assert_same_groups(draw_some(several_ends, whole[0], num_generations=5), whole)


@pytest.mark.parametrize("max_rows", [1, 2, 5, 9, 10, 29, 30, 1000])
def test_max_rows_bounds_the_batch_and_changes_nothing(several_ends, whole, max_rows):
    engine = TransformersEngine(several_ends, max_rows=max_rows)
    with forward_shapes(several_ends) as shapes:
        rollout = draw_some(engine, whole[0], num_generations=5)
    assert_same_groups(rollout, whole)
    assert [40 + place for place in range(6) for _ in range(5)] == rollout.group_id.tolist()
    assert max(rows for rows, _ in shapes) <= max_rows


def test_max_rows_below_one_is_refused(policy):
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        TransformersEngine(policy, max_rows=0)


def test_one_prefill_per_prompt_and_finished_rows_leave(several_ends, monkeypatch):
    """Rows that the model really sees: P for the prompts, then those that are still unfinished."""
    draw_some(several_ends, ["1"])  # the probe of the cache is over
    monkeypatch.setattr(transformers_engine, "COMPACT_WHEN_FINISHED", 0)
    with forward_shapes(several_ends) as shapes:
        rollout = draw_some(several_ends, num_generations=5)
    assert shapes[0] == (len(PROMPTS), rollout.prompt_ids.shape[1])
    unfinished = [int((rollout.lengths > step).sum()) for step in range(1, int(rollout.lengths.max()))]
    assert shapes[1:] == [(rows, 1) for rows in unfinished]
    assert unfinished[-1] < unfinished[0]


def test_the_default_threshold_leaves_few_finished_rows(several_ends):
    draw_some(several_ends, ["1"])  # the probe of the cache is over
    with forward_shapes(several_ends) as shapes:
        rollout = draw_some(several_ends, num_generations=8, max_completion_length=20)
    for step, (rows, _) in enumerate(shapes[1:], start=1):
        unfinished = int((rollout.lengths > step).sum())
        assert unfinished <= rows < max(unfinished / (7 / 8), unfinished + 1)


def test_decoding_stops_with_the_last_row():
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token as likely as any other
    policy = rl.load_policy(model, tokenizer=character_tokenizer(), device="cpu", eos_ids=range(len(VOCABULARY)))
    draw_some(policy, ["1"])
    with forward_shapes(policy) as shapes:
        rollout = draw_some(policy, max_completion_length=30)
    assert len(shapes) == 1 and rollout.completion_ids.shape == (24, 1)
    assert not rollout.truncated.any()


# Ends


def test_every_end_id_ends_a_completion_and_is_kept(several_ends):
    assert several_ends.eos_ids == (EOS, 7, 11)
    rollout = draw_some(several_ends, num_generations=60)
    ends = set()
    for row, (_, completion) in enumerate(rows_of(rollout)):
        assert not set(completion[:-1]) & {EOS, 7, 11}
        if completion[-1] in (EOS, 7, 11):
            ends.add(completion[-1])
            assert not rollout.truncated[row]
        else:
            assert len(completion) == 9 and rollout.truncated[row]
    assert ends == {EOS, 7, 11}
    assert rollout.truncated.any()


def test_an_end_on_the_last_token_is_not_truncated(several_ends):
    rollout = draw_some(several_ends, num_generations=60, max_completion_length=2)
    on_last = [row for row, (_, c) in enumerate(rows_of(rollout)) if len(c) == 2 and c[-1] in several_ends.eos_ids]
    assert on_last and not rollout.truncated[on_last].any()
    assert rollout.truncated.any()


def test_a_stop_string_on_the_last_token_is_not_truncated(several_ends):
    rollout = draw_some(several_ends, num_generations=60, max_completion_length=2, stop_strings=["="])
    equals = VOCABULARY["="]
    on_last = [row for row, (_, c) in enumerate(rows_of(rollout)) if len(c) == 2 and c[-1] == equals]
    assert on_last and not rollout.truncated[on_last].any()


def test_a_stop_string_begins_in_the_completion_not_in_the_prompt(several_ends):
    """The prompt ends with the first half of the stop string."""
    rollout = draw_some(several_ends, ["xa"], num_generations=200, stop_strings=["ab"])
    replay(several_ends, rollout, seed=5)
    b = VOCABULARY["b"]
    assert any(completion[0] == b and len(completion) > 1 for _, completion in rows_of(rollout))


def test_padding_equal_to_the_end_token():
    policy = tiny_policy(llama(seed=1), tokenizer=character_tokenizer(pad_token=None))
    assert policy.pad_id == EOS
    rollout = draw_some(policy, num_generations=30)
    ended = ~rollout.truncated
    assert ended.any() and (rollout.lengths[ended] < rollout.completion_ids.shape[1]).any()
    last = rollout.completion_ids.gather(1, rollout.lengths[:, None] - 1)[:, 0]
    assert ((last == EOS) == ended).all()  # the end token itself counts
    assert (rollout.completion_ids[~rollout.completion_mask] == EOS).all()
    assert ((rollout.completion_ids == EOS) & rollout.completion_mask).sum() == ended.sum()
    replay(policy, rollout, seed=5)
    torch.testing.assert_close(rollout.sampler_logp, own_logps(policy.model, rollout), **FLOAT32)


# Randomness


def test_same_seed_same_completions_other_seed_other_completions(several_ends):
    first, again, other = (draw_some(several_ends, seed=seed) for seed in (1, 1, 2))
    assert groups_of(first) == groups_of(again) != groups_of(other)
    torch.testing.assert_close(first.sampler_logp, again.sampler_logp, **EXACT)


def test_completions_of_a_group_differ(several_ends):
    for completions in groups_of(draw_some(several_ends, num_generations=8)).values():
        assert len(set(completions)) >= 6


def test_equal_prompts_of_two_groups_differ(several_ends):
    one, other = groups_of(draw_some(several_ends, ["1+2=", "1+2="], num_generations=6)).values()
    assert one != other


def test_the_global_random_state_moves_only_without_a_seed(several_ends):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    draw_some(several_ends, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    first = groups_of(draw_some(several_ends, seed=None))
    assert not torch.equal(torch.get_rng_state(), before)
    second = groups_of(draw_some(several_ends, seed=None))
    torch.manual_seed(3)
    assert groups_of(draw_some(several_ends, seed=None)) == first != second


def test_generator_gives_the_seed(several_ends):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    draws = [
        groups_of(draw_some(several_ends, seed=None, generator=torch.Generator().manual_seed(state)))
        for state in (8, 8, 9)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
def test_a_checkpoints_sampling_defaults_are_ignored():
    """Only the explicit settings apply."""
    model = llama(seed=1)
    expected = groups_of(draw_some(tiny_policy(model), num_generations=16))
    defaults = {"top_k": 1, "top_p": 0.33, "temperature": 0.01, "min_p": 0.9, "repetition_penalty": 9.0}
    model.generation_config.update(**defaults, do_sample=False, max_new_tokens=1, num_beams=4)
    policy = tiny_policy(model)
    got = groups_of(draw_some(policy, num_generations=16))
    assert got == expected
    assert all(len(set(completions)) >= 12 for completions in got.values())
    assert model.generation_config.top_k == 1  # the user's object is as it was


# Context and numbers


def test_left_padding_does_not_change_log_probabilities(several_ends):
    """A short prompt beside long ones, and alone: the same numbers."""
    together = draw_some(several_ends, ["7", "abc abc abc abc abc abc"])
    alone = draw_some(several_ends, ["7"])
    assert together.prompt_mask[0].sum() == 1 and together.prompt_ids.shape[1] > 20
    assert groups_of(alone)[0] == groups_of(together)[0]
    width = alone.sampler_logp.shape[1]
    torch.testing.assert_close(alone.sampler_logp, together.sampler_logp[:4, :width], **FLOAT32)


def test_the_whole_context_can_be_used(several_ends):
    prompt = "1" * 55
    rollout = draw_some(several_ends, [prompt], num_generations=20, max_completion_length=9)
    assert int(rollout.lengths.max()) == 9
    torch.testing.assert_close(rollout.sampler_logp, own_logps(several_ends.model, rollout), **FLOAT32)


@pytest.mark.parametrize("where", ["head", "everywhere", "one token's embedding"])
def test_weights_that_are_not_finite_are_named(where):
    policy = tiny_policy()
    with torch.no_grad():
        if where == "head":
            policy.model.lm_head.weight[3, 0] = math.nan
        elif where == "everywhere":
            for parameter in policy.model.parameters():
                parameter.fill_(math.nan)
        else:
            policy.model.model.embed_tokens.weight[VOCABULARY["9"], 0] = math.inf
    policy.model.train()
    with pytest.raises(FloatingPointError, match="not finite"):
        draw_some(policy, ["1", "99"])
    assert all(module.training for module in policy.model.modules())


def test_dropout_is_off_and_each_modules_mode_comes_back():
    """Functional dropout (attention) included."""
    for model in (gpt2_with_dropout(dropout=0.4), llama(attention_dropout=0.4)):
        policy = tiny_policy(model)
        model.train()
        list(model.modules())[3].eval()  # a module that the user keeps in evaluation mode
        modes = [module.training for module in model.modules()]
        rollout = draw_some(policy)
        assert [module.training for module in model.modules()] == modes
        torch.testing.assert_close(rollout.sampler_logp, own_logps(model, rollout), **FLOAT32)
        torch.testing.assert_close(rollout.sampler_logp, policy.score_tokens(rollout).logp.detach(), **FLOAT32)
        assert [module.training for module in model.modules()] == modes
        model.eval()
        assert groups_of(draw_some(policy)) == groups_of(rollout)
        assert not any(module.training for module in model.modules())


def test_sampling_leaves_weights_and_gradients_alone(several_ends):
    before = {name: value.clone() for name, value in several_ends.model.state_dict().items()}
    rollout = draw_some(several_ends)
    for name, value in several_ends.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in several_ends.model.parameters())
    assert not rollout.sampler_logp.requires_grad
    assert torch.is_grad_enabled()


def test_bfloat16_weights():
    policy = tiny_policy(llama(seed=1).to(torch.bfloat16))
    rollout = draw_some(policy)
    assert rollout.sampler_logp.dtype == torch.float32
    scored = rl.compute_logps(policy, rollout)
    assert scored.dtype == torch.float32
    torch.testing.assert_close(rollout.sampler_logp, scored, rtol=4e-2, atol=4e-2)
    torch.testing.assert_close(rollout.sampler_logp, own_logps(policy.model, rollout), rtol=4e-2, atol=4e-2)


def test_autocast_is_the_same_in_sampler_and_scorer():
    full, mixed = tiny_policy(llama(seed=1)), tiny_policy(llama(seed=1), autocast=torch.bfloat16)
    rollout = draw_some(mixed)
    scored, exact = rl.compute_logps(mixed, rollout), rl.compute_logps(full, rollout)
    torch.testing.assert_close(rollout.sampler_logp, scored, **BFLOAT16)
    assert float((exact - scored).abs().max()) > 1e-4  # mixed precision did happen
    torch.testing.assert_close(exact, scored, rtol=5e-2, atol=5e-2)
    assert next(mixed.model.parameters()).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


# Greedy


def test_greedy_is_generate_token_by_token(several_ends):
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    evaluation = rl.evaluate(
        several_ends, rows, lambda completions, **_: [1.0] * len(completions), greedy=True, max_completion_length=12
    )
    for prompt, (ids, completion) in zip(PROMPTS, rows_of(evaluation.rollout), strict=True):
        assert several_ends.tokenizer.decode(ids) == prompt
        inputs = torch.tensor([ids])
        expected = (
            several_ends.model.eval()
            .generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=list(several_ends.eos_ids),
                pad_token_id=0,
            )[0, len(ids) :]
            .tolist()
        )
        assert completion == expected


def test_evaluate_bounds_its_batch_also_after_sample():
    """`batch_size` holds whether or not the policy has an engine already."""
    rows = [{"prompt": str(number)} for number in range(10)]
    for sampled_before in (False, True):
        policy = tiny_policy()
        if sampled_before:
            draw_some(policy)
        with forward_shapes(policy) as shapes:
            evaluation = rl.evaluate(
                policy,
                rows,
                lambda completions, **_: [1.0] * len(completions),
                num_generations=2,
                batch_size=6,
                max_completion_length=3,
            )
        assert len(evaluation.rollout) == 20
        assert max(count for count, _ in shapes) <= 6, f"sampled before: {sampled_before}"


# Conversations


def test_conversations_give_message_lists_and_one_bos():
    tokenizer = character_tokenizer(adds_bos=True, chat_template=CHAT_TEMPLATE)
    policy = tiny_policy(tokenizer=tokenizer)
    chat = [{"role": "user", "content": "1+2?"}]
    rollout = draw_some(policy, [{"prompt": chat, "answer": "3"}, {"prompt": "1+2="}])
    for row, (prompt, completion) in enumerate(rows_of(rollout)):
        assert prompt.count(tokenizer.bos_token_id) == 1 and prompt[0] == tokenizer.bos_token_id
        text = policy.tokenizer.decode(completion, skip_special_tokens=True)
        if row < 4:
            assert policy.tokenizer.decode(prompt) == "<bos>u:1+2? a:"
            assert rollout.prompts[row] == chat
            assert rollout.completions[row] == [{"role": "assistant", "content": text}]
        else:
            assert rollout.completions[row] == text
    assert rollout.columns["answer"] == ("3",) * 4 + (None,) * 4
    torch.testing.assert_close(rollout.sampler_logp, own_logps(policy.model, rollout), **FLOAT32)


@pytest.mark.parametrize("make", [rl.TransformersEngine, rl.ContinuousBatching])
def test_a_process_without_prompts_gathers_the_weights_too(make, monkeypatch):
    """With sharded weights the other processes wait for it."""
    policy = builders.vllm_policy()
    engine, gathered, inside = make(policy), [], policy.without_gradient
    monkeypatch.setattr(policy, "without_gradient", lambda: gathered.append(1) or inside())
    assert engine.generate([], [], num_generations=2, params=rl.SamplingParams(), seed=0) == [] and gathered
