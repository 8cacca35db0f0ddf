import math

import numpy as np
import pytest
import torch
from engines.sampling_helpers import allowed_scores, inverse_transform, p_value
from hypothesis import given
from hypothesis import strategies as st
from tolerances import EXACT

from rlkit.engines import token_sampler as draw_module
from rlkit.engines.token_sampler import BELOW_ONE, build_processors, draw, uniform_noise
from rlkit.types import SamplingParams

JUST_BELOW_ONE = math.nextafter(1.0, 0.0)
FALSE_ALARM = 1e-6  # of each chance test; the seeds are fixed, so a pass stays a pass
INF = math.inf


def test_inverse_transform_is_the_definition():
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(300, 17, generator=generator)
    scores[torch.rand(scores.shape, generator=generator) < 0.4] = -INF
    scores[:, 5] = 0.0  # at least one token stays
    uniform = torch.rand(300, generator=generator, dtype=torch.float64)
    expected = [inverse_transform(row.double().numpy(), float(u)) for row, u in zip(scores, uniform, strict=True)]
    assert draw(scores, uniform).tolist() == expected
    assert len(set(expected)) > 10


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.0, 1), (0.125, 1), (0.25, 3), (0.5, 3), (0.74, 3), (0.75, 4), (BELOW_ONE, 4), (JUST_BELOW_ONE, 4)],
)
def test_boundaries_belong_to_the_next_token_that_can_be_drawn(u, token):
    # probabilities 0, 1/4, 0, 1/2, 1/4, 0: exact in binary; the running sum is 0, 1/4, 1/4, 3/4, 1, 1
    scores = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).double().log()
    assert draw(scores, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize("only", [0, 3, 6])
@pytest.mark.parametrize("u", [0.0, 5e-324, 0.5, BELOW_ONE, JUST_BELOW_ONE])
def test_the_only_possible_token_is_drawn(only, u):
    scores = torch.full((1, 7), -INF)
    scores[0, only] = -40.0
    assert draw(scores, torch.tensor([u], dtype=torch.float64)).tolist() == [only]
    scores[0] = -2000.0  # finite, but exp(-2000) is 0
    scores[0, only] = 0.0
    assert draw(scores, torch.tensor([u], dtype=torch.float64)).tolist() == [only]


score_rows = st.lists(st.one_of(st.just(-INF), st.floats(-900, 900, width=32)), min_size=1, max_size=40).filter(
    lambda row: any(math.isfinite(value) for value in row)
)


@given(score_rows, st.floats(0, 1, exclude_max=True))
def test_never_a_token_of_probability_zero(row, u):
    scores = torch.tensor([row])
    token = int(draw(scores, torch.tensor([u], dtype=torch.float64)))
    assert 0 <= token < len(row)
    assert float(scores.double().softmax(-1)[0, token]) > 0


def test_never_out_of_range_just_below_one():
    """The running sum may end a rounding error away from 1."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20_000, 11, generator=generator)
    scores[:, -1] = -INF
    for u in (BELOW_ONE, JUST_BELOW_ONE):
        assert int(draw(scores, torch.full((20_000,), u, dtype=torch.float64)).max()) <= 9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_evenly_spaced_noise_gives_each_token_its_share(dtype):
    scores = torch.randn(1, 30, generator=torch.Generator().manual_seed(1)).to(dtype)
    n = 10_000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    counts = torch.bincount(draw(scores.expand(n, -1), uniform), minlength=30)
    expected = n * scores.double().softmax(-1)[0]
    assert float((counts - expected).abs().max()) <= 1  # an interval of length p holds n*p points, give or take one


def test_frequencies_fit_the_probabilities():
    scores = 1.5 * torch.randn(1, 40, generator=torch.Generator().manual_seed(2))
    scores[0, ::7] = -INF
    uniform = uniform_noise(3, range(100), 20, 50).flatten()
    counts = torch.bincount(draw(scores.expand(len(uniform), -1), uniform), minlength=40)
    possible = scores[0].isfinite()
    assert counts[~possible].sum() == 0
    expected = len(uniform) * scores.double().softmax(-1)[0]
    assert p_value(counts[possible], expected[possible]) > FALSE_ALARM
    assert p_value(counts[possible], expected[possible].flip(0)) < FALSE_ALARM  # the test can fail


@pytest.mark.parametrize("elements", [1, 30, 77, 10**9])
def test_chunks_change_nothing(elements, monkeypatch):
    scores = torch.randn(50, 30, generator=torch.Generator().manual_seed(3))
    uniform = uniform_noise(0, range(50), 1, 1)[:, 0]
    expected = draw(scores, uniform)
    monkeypatch.setattr(draw_module, "MAX_CHUNK_ELEMENTS", elements)
    assert torch.equal(draw(scores, uniform), expected)


def test_no_rows():
    assert draw(torch.zeros(0, 5), torch.zeros(0, dtype=torch.float64)).tolist() == []


def test_inputs_stay_unchanged():
    scores, uniform = torch.randn(4, 9), torch.rand(4).double()
    before = scores.clone(), uniform.clone()
    draw(scores, uniform)
    assert torch.equal(scores, before[0]) and torch.equal(uniform, before[1])


# Noise


def test_noise_is_float64_in_the_unit_interval():
    noise = uniform_noise(0, [3, 4], 5, 7)
    assert noise.shape == (10, 7) and noise.dtype == torch.float64
    assert float(noise.min()) >= 0 and float(noise.max()) < 1
    assert uniform_noise(0, [], 5, 7).shape == (0, 7)


def test_longer_completions_and_more_generations_extend_the_noise():
    small, large = uniform_noise(9, [3], 4, 6), uniform_noise(9, [3], 7, 20)
    torch.testing.assert_close(large[:4, :6], small, **EXACT)


def test_noise_of_a_group_does_not_depend_on_the_other_groups():
    together = uniform_noise(9, [7, -2, 2**40, 0], 3, 6).unflatten(0, (4, 3))
    for place, group in enumerate([7, -2, 2**40, 0]):
        torch.testing.assert_close(uniform_noise(9, [group], 3, 6), together[place], **EXACT)


def test_every_key_has_its_own_noise():
    """Seed, group and completion are told apart, also where the numbers need more than 32 bits."""
    low, high = 5, 7
    keys = [
        (seed, group)
        for seed in (0, low, high, low + high * 2**32, high + low * 2**32, 2**61, -1)
        for group in (0, 3, high, high + 3 * 2**32, low, -1, 2**62 + 1)
    ]
    first = {}
    for seed, group in keys:
        for g, value in enumerate(uniform_noise(seed, [group], 8, 1)[:, 0].tolist()):
            key = (seed, group, g)
            assert value not in first, f"(seed, group, completion) {key} and {first[value]} have the same noise"
            first[value] = key


def test_noise_is_uniform_and_neighbours_are_independent():
    noise = uniform_noise(0, range(200), 25, 20).unflatten(0, (200, 25))
    n = noise.numel()
    counts = torch.bincount((noise.flatten() * 100).long(), minlength=100)
    assert p_value(counts, torch.full((100,), n / 100)) > FALSE_ALARM
    other_seed = uniform_noise(1, range(200), 25, 20).unflatten(0, (200, 25))
    pairs = {
        "group": (noise[1:], noise[:-1]),
        "completion": (noise[:, 1:], noise[:, :-1]),
        "position": (noise[..., 1:], noise[..., :-1]),
        "seed": (noise, other_seed),
    }
    for name, (left, right) in pairs.items():
        correlation = float(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1])
        # n independent pairs: the correlation has standard deviation n**-0.5; beyond 5 of them by chance in 6e-7
        assert abs(correlation) < 5 / left.numel() ** 0.5, name


def test_noise_leaves_the_global_random_states_alone():
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = uniform_noise(0, [1], 2, 3)
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    torch.testing.assert_close(uniform_noise(0, [1], 2, 3), first, **EXACT)
    torch.set_rng_state(torch_before)
    uniform_noise(0, [1], 2, 3)
    assert torch.equal(torch.get_rng_state(), torch_before)
    np.random.seed(99)  # noqa: NPY002
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    uniform_noise(0, [1], 2, 3)
    assert (np.random.get_state()[1] == state).all() and not (state == numpy_before).all()  # noqa: NPY002


# Which tokens can be drawn


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 1000},
        {"top_p": 0.5},
        {"top_p": 0.001},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.1},
    ],
)
def test_kept_tokens_are_the_definition_and_those_of_generate(settings):
    """Three ways to one set: ours, a definition in numpy, and the processors that transformers' generate builds."""
    from builders import llama
    from transformers import GenerationConfig

    params = SamplingParams(temperature=0.7, **settings)
    logits = 2 * torch.randn(20, 46, generator=torch.Generator().manual_seed(4))
    ours = build_processors(params)(torch.zeros(20, 0, dtype=torch.int64), logits / params.temperature)
    defined = np.stack([allowed_scores(row.numpy(), [], 0, params, [2]) for row in logits])
    assert (ours.isfinite().numpy() == np.isfinite(defined)).all()
    model = llama()
    config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )
    theirs = model._get_logits_processor(generation_config=config, input_ids_seq_length=1)(
        torch.zeros(20, 1, dtype=torch.int64), logits
    )
    torch.testing.assert_close(ours, theirs, **EXACT)
    if settings and settings.get("top_k") != 1000:
        assert not ours.isfinite().all() and ours.isfinite().any(-1).all()


def test_neutral_settings_have_no_processor():
    assert len(build_processors(SamplingParams(min_p=0.0))) == 0
