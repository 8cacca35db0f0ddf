"""Other decoders than Llama: attention in all its forms, recurrent and hybrid models, adapters, unusual heads.

The oracle is always the model's own forward pass over one row, without padding, mask, cache or rlkit's head.
"""

import logging
import math

import builders
import peft
import pytest
import torch
import transformers as hf
from builders import BOS, EOS, PAD, VOCABULARY, character_tokenizer, llama, tiny_policy
from engines.sampling_helpers import (
    allowed_scores,
    forward_shapes,
    groups_of,
    own_logits,
    own_logps,
    p_value,
    replay,
    rows_of,
)
from tolerances import EXACT, FLOAT32, GRADIENT

import rlkit as rl
from rlkit import token_scorer
from rlkit.causal_lm import find_head
from rlkit.prompts import make_batch

pytestmark = pytest.mark.integration

PROMPTS = ["1+2=", "12+34=", "a", "99999+1=abc", "x9-7"]  # two of one length
FALSE_ALARM = 1e-6
ALLOW_TRUNCATION = pytest.mark.filterwarnings("ignore:sample. top_p, top_k:UserWarning")
V = len(VOCABULARY)
IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
LARGE = {"initializer_range": 0.3}  # far from uniform, and what stands before a token matters
SMALL = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
COMMON = {**SMALL, **IDS, **LARGE, "num_key_value_heads": 1, "max_position_embeddings": 64}
FULL_HEADS = {**COMMON, "num_key_value_heads": 2}

ATTENTION = {
    "llama": lambda: hf.LlamaConfig(**COMMON),
    "qwen2": lambda: hf.Qwen2Config(**COMMON),
    "gemma": lambda: hf.GemmaConfig(**COMMON, head_dim=8),
    # windows shorter than the prompts, and logits that the cap of 1 really bends
    "gemma2": lambda: hf.Gemma2Config(**COMMON, head_dim=8, sliding_window=4, final_logit_softcapping=1.0),
    "gemma3": lambda: hf.Gemma3TextConfig(**COMMON, head_dim=8, sliding_window=4),
    "gpt2": lambda: hf.GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=64, **IDS, **LARGE),
    "mistral": lambda: hf.MistralConfig(**COMMON, sliding_window=4),
    "cohere": lambda: hf.CohereConfig(**COMMON, logit_scale=0.25),
    "granite": lambda: hf.GraniteConfig(**COMMON, logits_scaling=3.0),
    "mixtral": lambda: hf.MixtralConfig(**COMMON, num_local_experts=4),
    "opt": lambda: hf.OPTConfig(
        vocab_size=V,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        max_position_embeddings=64,
        init_std=0.3,
        **IDS,
    ),
    "bloom": lambda: hf.BloomConfig(vocab_size=V, hidden_size=16, n_layer=2, n_head=2, **IDS, **LARGE),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**SMALL, **IDS, **LARGE, max_position_embeddings=64),
}
RECURRENT = {
    "mamba": lambda: hf.MambaConfig(vocab_size=V, hidden_size=16, num_hidden_layers=2, state_size=4, **IDS, **LARGE),
    "rwkv": lambda: hf.RwkvConfig(vocab_size=V, hidden_size=16, num_hidden_layers=2, **IDS),
    "lfm2": lambda: hf.Lfm2Config(**FULL_HEADS, layer_types=["conv", "full_attention"]),
    "falcon_h1": lambda: hf.FalconH1Config(
        **FULL_HEADS, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, lm_head_multiplier=1.7
    ),
    "recurrent_gemma": lambda: hf.RecurrentGemmaConfig(
        **FULL_HEADS, attention_window_size=4, block_types=["recurrent", "attention"]
    ),
}


def random_model(make_config, *, seed=0):
    torch.manual_seed(seed)
    return hf.AutoModelForCausalLM.from_config(make_config()).float()


def draw_some(policy, prompts=PROMPTS, **settings):
    return builders.draw(policy, prompts, **({"num_generations": 6, "max_completion_length": 9, "seed": 1} | settings))


def assert_log_probabilities(policy, rollout):
    """Sampler, policy and the model's own single rows agree; the gradient flows; what the oracle says is not dull."""
    own = own_logps(policy.model, rollout)
    scored = policy.score_tokens(rollout).logp
    torch.testing.assert_close(rollout.sampler_logp, own, rtol=0, atol=1e-5)
    torch.testing.assert_close(scored.detach(), own, rtol=0, atol=1e-5)
    assert scored.requires_grad == any(p.requires_grad for p in policy.model.parameters())
    assert float(own[rollout.completion_mask].std()) > 0.1


def assert_endings(policy, rollout):
    """Each completion ends with its first end id or stop string, or at the limit; nothing follows."""
    for row, (_, completion) in enumerate(rows_of(rollout)):
        texts = [policy.tokenizer.decode(completion[: n + 1]) for n in range(len(completion))]
        ends = [
            token in policy.eos_ids or any(text.endswith(stop) for stop in rollout.sampling.stop_strings)
            for token, text in zip(completion, texts, strict=True)
        ]
        assert not any(ends[:-1]), f"row {row} goes on after its end"
        assert ends[-1] or len(completion) == rollout.sampling.max_completion_length, f"row {row} stops too early"
        assert bool(rollout.truncated[row]) == (not ends[-1]), f"row {row}: truncated is wrong"


def greedy_alone(model, prompt, length, eos_ids):
    """The likeliest tokens, one row, everything recomputed for each token."""
    done = []
    while len(done) < length and not (done and done[-1] in eos_ids):
        done.append(int(own_logits(model, prompt, [*done, 0])[-1].argmax()))
    return done


# Attention


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_models(name, caplog):
    model = random_model(ATTENTION[name])
    policy = tiny_policy(model)
    with caplog.at_level(logging.WARNING, logger="rlkit"), forward_shapes(policy) as shapes:
        rollout = draw_some(policy, temperature=0.7)
    assert rollout.engine == "transformers" and not caplog.records
    assert (len(PROMPTS), 11) in shapes  # each prompt once, for all its completions
    assert_log_probabilities(policy, rollout)
    assert_endings(policy, rollout)
    assert int(rollout.lengths.max()) == 9
    # A prompt alone gets the same completions: left padding changes nothing.
    batch = make_batch(policy, PROMPTS[:1])
    assert groups_of(draw_some(policy, batch, temperature=0.7))[0] == groups_of(rollout)[0]
    greedy = draw_some(policy, num_generations=1, max_completion_length=12, top_k=1)
    for prompt, completion in rows_of(greedy):
        assert completion == greedy_alone(model, prompt, 12, policy.eos_ids)


@pytest.mark.parametrize("name", [*ATTENTION, *RECURRENT])
def test_what_stands_before_matters(name):
    """Were the models blind to their context, the tests of this file could not see a wrong mask or position."""
    make_config = {**ATTENTION, **RECURRENT}[name]
    model = random_model(make_config)
    ids = [5, 9, 13, 20, 7, 30, 11, 8]
    last = own_logits(model, ids, [0])[-1].log_softmax(-1)
    for place in (5, 6):
        other = list(ids)
        other[place] = 40
        assert float((own_logits(model, other, [0])[-1].log_softmax(-1) - last).abs().max()) > 0.01


def test_sliding_windows_are_kept():
    """The window is really shorter than the text: without it the log-probabilities would be others."""
    policy = tiny_policy(random_model(ATTENTION["mistral"]))
    rollout = draw_some(policy, temperature=0.7)
    unlimited = hf.MistralForCausalLM(hf.MistralConfig(**COMMON, sliding_window=None))
    unlimited.load_state_dict(policy.model.state_dict())
    assert float((own_logps(unlimited, rollout) - rollout.sampler_logp).abs().max()) > 0.01


# Recurrent and hybrid models


@pytest.fixture(scope="module", params=["mamba", "lfm2", "recurrent_gemma"])  # the others are slow on a CPU
def recurrent(request):
    return tiny_policy(random_model(RECURRENT[request.param]))


def test_recurrent_models_fall_back_and_say_so_once(recurrent, caplog):
    recurrent.engine = None
    with caplog.at_level(logging.WARNING, logger="rlkit.engines"):
        rollouts = [draw_some(recurrent, seed=seed) for seed in (1, 2)]
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("rlkit.engines")]
    assert len(messages) == 1 and "cache cannot be expanded" in messages[0]
    assert type(recurrent.model).__name__ in messages[0]
    assert [rollout.engine for rollout in rollouts] == ["transformers (generate)"] * 2


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_have_the_right_log_probabilities(name):
    policy = tiny_policy(random_model(RECURRENT[name]))
    rollout = draw_some(policy, temperature=0.7, num_generations=3)
    assert rollout.engine == "transformers (generate)"
    assert_log_probabilities(policy, rollout)
    replay(policy, rollout, seed=1)
    alone = draw_some(policy, PROMPTS[:1], temperature=0.7, num_generations=2)
    assert groups_of(alone)[0] == groups_of(rollout)[0][:2]  # completions do not depend on the batch
    assert rollout.group_id.tolist() == [group for group in range(5) for _ in range(3)]
    assert [p for p, _ in rows_of(rollout)][::3] == [list(ids) for ids in make_batch(policy, PROMPTS).token_ids]


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_read_neither_padding_nor_their_neighbours(name):
    """Greedy completions of a batch with prompts of several lengths are those of each prompt alone."""
    policy = tiny_policy(random_model(RECURRENT[name]))
    greedy = draw_some(policy, num_generations=1, max_completion_length=10, top_k=1)
    for prompt, completion in rows_of(greedy):
        assert completion == greedy_alone(policy.model, prompt, 10, policy.eos_ids)


@pytest.mark.parametrize(("name", "n"), [("mamba", 500), ("lfm2", 500), ("recurrent_gemma", 500), ("rwkv", 80)])
def test_recurrent_models_draw_from_the_right_distribution(name, n):
    """First and second tokens for prompts of three lengths; expected counts are summed over what stands before."""
    policy = tiny_policy(random_model(RECURRENT[name]))
    rollout = draw_some(
        policy, PROMPTS[:3], num_generations=n, max_completion_length=2, min_completion_length=1, temperature=1.2
    )
    rows = rows_of(rollout)
    for group in range(3):
        prompt = rows[group * n][0]
        drawn = [completion for _, completion in rows[group * n : (group + 1) * n]]
        scores = own_logits(policy.model, prompt, [0])[-1] / 1.2
        scores[EOS] = -math.inf  # min_completion_length
        first = torch.bincount(torch.tensor([c[0] for c in drawn]), minlength=V)
        possible = scores.isfinite()
        assert p_value(first[possible], n * scores.softmax(-1)[possible]) > FALSE_ALARM
        after = {token: own_logits(policy.model, prompt, [token, 0])[-1] / 1.2 for token in range(V)}
        second = torch.bincount(torch.tensor([c[1] for c in drawn]), minlength=V)
        assert p_value(second, sum(after[c[0]].softmax(-1) for c in drawn)) > FALSE_ALARM


@pytest.mark.parametrize(("name", "n"), [("mamba", 400), ("lfm2", 400), ("recurrent_gemma", 400), ("llama", 400)])
def test_ids_without_a_token_are_never_drawn(name, n):
    """A vocabulary padded from 46 to 64: what is drawn follows the other 46, the log-probabilities are the policy's."""
    config = {**ATTENTION, **RECURRENT}[name]()
    config.vocab_size = 64
    policy = tiny_policy(random_model(lambda: config))
    rollout = draw_some(policy, PROMPTS[:1], num_generations=n, max_completion_length=3, temperature=1.2)
    assert int(rollout.completion_ids.max()) < V
    assert_log_probabilities(policy, rollout)
    prompt = rows_of(rollout)[0][0]
    scores = own_logits(policy.model, prompt, [0])[-1] / 1.2
    assert float(scores.softmax(-1)[V:].sum()) > 0.1  # drawn about every tenth time if nothing ruled them out
    first = torch.bincount(torch.tensor([completion[0] for _, completion in rows_of(rollout)]), minlength=V)
    assert p_value(first, n * scores[:V].softmax(-1)) > FALSE_ALARM
    # Greedy: the likeliest token that there is, also where an id without one is likelier.
    dataset = [{"prompt": prompt} for prompt in PROMPTS]
    greedy = rl.evaluate(policy, dataset, lambda completions: [0.0] * 5, greedy=True, max_completion_length=8).rollout
    overruled = 0
    for prompt, completion in rows_of(greedy):
        logits = own_logits(policy.model, prompt, completion)
        assert completion == logits[:, :V].argmax(-1).tolist()
        overruled += int((logits.argmax(-1) >= V).sum())
    assert overruled


@ALLOW_TRUNCATION
def test_recurrent_models_honour_the_settings(recurrent):
    settings = {
        "top_k": 8,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.5,
        "min_completion_length": 3,
        "temperature": 0.8,
    }
    rollout = draw_some(recurrent, num_generations=10, stop_strings=["=", "5"], **settings)
    replay(recurrent, rollout, seed=1)
    assert_log_probabilities(recurrent, rollout)  # the policy's own, not the truncated ones
    for prompt, completion in rows_of(rollout):
        logits = own_logits(recurrent.model, prompt, completion).numpy()
        for step, token in enumerate(completion):
            scores = allowed_scores(logits[step], prompt + completion[:step], step, rollout.sampling, recurrent.eos_ids)
            assert math.isfinite(scores[token])
        assert not set(completion[:3]) & set(recurrent.eos_ids)


def test_recurrent_models_stop_at_stop_strings_and_ends(recurrent):
    several = rl.Policy(recurrent.model, character_tokenizer(), eos_ids=[7, 11])
    rollout = draw_some(several, num_generations=30, stop_strings=["=", "5", "ab"])
    assert_endings(several, rollout)
    assert_log_probabilities(several, rollout)
    last = {completion[-1] for _, completion in rows_of(rollout)}
    assert last >= {EOS, 7, 11, VOCABULARY["="], VOCABULARY["5"]} and rollout.truncated.any()


def test_padding_after_a_stop_string_is_no_end(recurrent):
    """Padding equals the end token here: a row that a stop string ended must not get an end token it never drew."""
    policy = rl.Policy(recurrent.model, character_tokenizer(pad_token=None))
    assert policy.pad_id in policy.eos_ids
    rollout = draw_some(policy, num_generations=20, stop_strings=["=", "5"])
    assert_endings(policy, rollout)
    stops = {VOCABULARY["="], VOCABULARY["5"]}
    assert any(c[-1] in stops and len(c) < 8 for _, c in rows_of(rollout))


def test_a_stop_string_begins_in_the_completion_not_in_the_prompt(recurrent):
    """The prompt ends with the first half of the stop string, which its completion may complete without stopping."""
    prompt = make_batch(recurrent, ["xa"]).token_ids[0]
    scores = own_logits(recurrent.model, list(prompt), [0])[-1]
    scores[:4] = -math.inf  # a character, not a special token
    likely = int(scores.argmax())
    stop = "a" + recurrent.tokenizer.decode([likely])
    rollout = draw_some(recurrent, ["xa"], num_generations=60, max_completion_length=4, stop_strings=[stop])
    assert_endings(recurrent, rollout)
    after_it = [completion[1:] for _, completion in rows_of(rollout) if completion[0] == likely]
    assert any(set(rest) - {recurrent.pad_id} for rest in after_it)  # real tokens follow, not padding


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
def test_recurrent_sampling_ignores_the_checkpoints_defaults_and_leaves_the_random_state(recurrent):
    expected = groups_of(draw_some(recurrent))
    assert groups_of(draw_some(recurrent, seed=2)) != expected
    assert all(len(set(completions)) >= 4 for completions in expected.values())
    own = recurrent.model.generation_config
    recurrent.model.generation_config = hf.GenerationConfig(
        top_k=1, top_p=0.33, temperature=0.1, suppress_tokens=list(range(5, 30)), max_new_tokens=2, eos_token_id=[9]
    )
    defaults = recurrent.model.generation_config.to_dict()
    try:
        torch.manual_seed(8)
        before = torch.get_rng_state()
        assert groups_of(draw_some(recurrent)) == expected  # padding changes nothing
        assert torch.equal(torch.get_rng_state(), before)
        assert recurrent.model.generation_config.to_dict() == defaults
    finally:
        recurrent.model.generation_config = own


def test_recurrent_weights_that_are_not_finite_are_named():
    policy = tiny_policy(random_model(RECURRENT["mamba"]))
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[3, 0] = math.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        draw_some(policy)


def test_an_adapter_on_a_hybrid_model():
    model = random_model(RECURRENT["lfm2"])
    defaults = model.generation_config.to_dict()
    policy = tiny_policy(with_lora(model))
    rollout = draw_some(policy, temperature=0.7)
    assert rollout.engine == "transformers (generate)"
    assert_log_probabilities(policy, rollout)
    assert model.generation_config.to_dict() == defaults  # the settings of one call do not stay in the user's model


# Adapters


def with_lora(model, *, zero=False, dropout=0.0, target_modules=("q_proj", "v_proj")):
    config = peft.LoraConfig(
        r=4, lora_alpha=32, lora_dropout=dropout, target_modules=list(target_modules), init_lora_weights=zero
    )
    torch.manual_seed(5)
    return peft.get_peft_model(model, config)


def test_lora_is_sampled_and_scored():
    policy = tiny_policy(with_lora(llama()))
    rollout = draw_some(policy, temperature=0.7)
    assert rollout.engine == "transformers"
    assert_log_probabilities(policy, rollout)
    base = own_logps(llama(), rollout)
    assert float((base - rollout.sampler_logp).abs().max()) > 0.05  # the adapter is in
    with policy.model.disable_adapter():
        torch.testing.assert_close(rl.compute_logps(policy, rollout), base, **FLOAT32)


def test_lora_reference_is_the_starting_adapter():
    """KL is 0 at the start, also where the adapter is not; dropout of the adapter included."""
    policy = tiny_policy(with_lora(llama(), dropout=0.3))
    policy.model.train()
    rollout = draw_some(policy)
    reference = policy.reference()
    start = rl.compute_logps(reference, rollout)
    assert float(rl.compute_kl(rollout, start).abs().max()) < 1e-5
    torch.testing.assert_close(start, rl.compute_logps(policy, rollout), **EXACT)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    frozen = {name: p.clone() for name, p in policy.model.named_parameters() if not p.requires_grad}
    advantages = torch.linspace(-1, 1, len(rollout))
    update = rl.loss_step(policy, optimizer, rollout, advantages)
    assert update.skipped is None
    assert float((rl.compute_logps(policy, rollout) - start).abs().max()) > 1e-3  # the policy moved,
    torch.testing.assert_close(rl.compute_logps(reference, rollout), start, **EXACT)  # its reference did not,
    for name, parameter in policy.model.named_parameters():  # nor did the base model
        assert name not in frozen or torch.equal(parameter, frozen[name])
    assert not reference.trainable_parameters()


def test_lora_gradients_are_those_of_the_models_own_logits():
    policy = tiny_policy(with_lora(llama()))
    rollout = draw_some(policy, ["1+2="])
    policy.score_tokens(rollout).logp.sum().backward()
    got = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    assert got and all("lora" in name for name in got)
    policy.model.zero_grad()
    total = torch.zeros(())
    for prompt, completion in rows_of(rollout):
        logits = policy.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        total = total + logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).sum()
    total.backward()
    for name, parameter in policy.model.named_parameters():
        if name in got:
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_prompt_tuning_is_refused():
    """Virtual tokens belong to the wrapper, not to the language model inside: never leave them out in silence."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(TypeError, match=r"load_policy: prompt tuning keeps virtual tokens .* rlkit does not support"):
        tiny_policy(peft.get_peft_model(llama(), config))


# Heads


class UnknownHead(hf.LlamaForCausalLM):
    """A model that does something of its own to its logits."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        output = super().forward(input_ids, attention_mask, position_ids, past_key_values, **kwargs)
        output.logits = 3 * torch.sin(output.logits)
        return output


def unknown_head():
    torch.manual_seed(0)
    return UnknownHead(hf.LlamaConfig(**COMMON))


def test_an_unknown_head_takes_full_logits_and_says_so(caplog):
    policy = tiny_policy(unknown_head())
    with caplog.at_level(logging.WARNING, logger="rlkit.logps"):
        rollout = draw_some(policy, temperature=0.7)
        assert_log_probabilities(policy, rollout)
        rl.compute_logps(policy, rollout)
    assert rollout.engine == "transformers"
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and "UnknownHead" in messages[0] and "full logits" in messages[0]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", lambda logits: torch.tanh(logits)),
        ("cohere", lambda logits: 0.25 * logits),
        ("granite", lambda logits: logits / 3),
        ("llama", lambda logits: logits),
        ("gpt_neox", lambda logits: logits),
    ],
)
def test_known_heads_are_found(name, change, caplog):
    model = random_model(ATTENTION[name])
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        head = find_head(model)
    hidden = torch.randn(7, 16)
    torch.testing.assert_close(head(hidden), change(model.get_output_embeddings()(hidden)), **FLOAT32)
    assert not caplog.records


@pytest.mark.parametrize("name", ["gemma2", "recurrent_gemma", "cohere", "granite"])
def test_a_head_that_is_nearly_linear_at_first_is_known_for_what_it_is(name):
    """A soft cap of 30 hardly shows on a fresh model's small logits; after training it does."""
    configs = {
        "gemma2": lambda: hf.Gemma2Config(**{**COMMON, "initializer_range": 0.02}, head_dim=8),
        "recurrent_gemma": lambda: hf.RecurrentGemmaConfig(
            **{**FULL_HEADS, "initializer_range": 0.02}, block_types=["recurrent", "attention"]
        ),
        "cohere": lambda: hf.CohereConfig(**{**COMMON, "initializer_range": 0.001}),
        "granite": lambda: hf.GraniteConfig(**{**COMMON, "initializer_range": 0.001}, logits_scaling=3.0),
    }
    model = random_model(configs[name])
    policy = tiny_policy(model)
    rollout = draw_some(policy, ["1+2="])
    policy.score_tokens(rollout)  # the head is looked up here, once
    with torch.no_grad():
        model.get_output_embeddings().weight *= 300
    with torch.no_grad():
        scored = policy.score_tokens(rollout).logp
    torch.testing.assert_close(scored, own_logps(model, rollout), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make_model", [llama, lambda: random_model(ATTENTION["gemma2"]), unknown_head])
@pytest.mark.parametrize("entropy", ["detached", "grad"])
def test_chunks_of_the_head_give_the_same_numbers_and_gradients(make_model, entropy, monkeypatch):
    def run(elements):
        monkeypatch.setattr(token_scorer, "MAX_CHUNK_ELEMENTS", elements)
        policy = tiny_policy(make_model())
        scores = policy.score_tokens(rollout, entropy=entropy)
        weights = torch.linspace(-1, 1, scores.logp.numel()).reshape(scores.logp.shape)
        objective = (weights * scores.logp).sum() + ((weights * scores.entropy).sum() if entropy == "grad" else 0)
        objective.backward()
        return scores, [p.grad for p in policy.model.parameters() if p.grad is not None]

    rollout = draw_some(tiny_policy(make_model()), temperature=0.7)
    whole, gradients = run(10**9)
    assert gradients and all(float(g.abs().max()) > 0 for g in gradients)
    assert whole.entropy.requires_grad == (entropy == "grad")
    for elements in (1, 7 * V):
        scores, other = run(elements)
        torch.testing.assert_close(scores.logp, whole.logp, **FLOAT32)
        torch.testing.assert_close(scores.entropy, whole.entropy, **FLOAT32)
        for left, right in zip(other, gradients, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=10 * GRADIENT["atol"])


@pytest.mark.parametrize("make_model", [llama, lambda: random_model(ATTENTION["gemma2"]), unknown_head])
def test_entropies_are_those_of_the_models_own_logits(make_model):
    policy = tiny_policy(make_model())
    rollout = draw_some(policy, temperature=0.7)
    entropy = policy.score_tokens(rollout).entropy
    for row, (prompt, completion) in enumerate(rows_of(rollout)):
        logp = (own_logits(policy.model, prompt, completion) / 0.7).log_softmax(-1)
        expected = -(logp.exp() * logp).sum(-1).float()
        torch.testing.assert_close(entropy[row, : len(completion)].detach(), expected, rtol=1e-4, atol=1e-5)
        assert (entropy[row, len(completion) :] == 0).all()
