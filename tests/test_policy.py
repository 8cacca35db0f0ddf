import copy
import logging
import math
from pathlib import Path

import pytest
import torch
import transformers as hf
from builders import (
    CONTEXT,
    EOS,
    PAD,
    VOCABULARY,
    assert_identical,
    character_tokenizer,
    gpt2_with_dropout,
    llama,
    make_rollout,
    tiny_policy,
)
from tolerances import BFLOAT16, EXACT, FLOAT32

import rlkit as rl
from rlkit.loading import load_policy
from rlkit.policy import Policy


def saved(folder, model=None, tokenizer=None):
    """A checkpoint folder as transformers writes it."""
    (model or llama()).save_pretrained(folder)
    (tokenizer or character_tokenizer()).save_pretrained(folder)
    return folder


def logits_of(policy):
    with torch.no_grad(), policy.inference_settings():
        return policy.model(torch.tensor([[5, 9, 13, 20]])).logits


def tokenizer_state(tokenizer):
    return copy.deepcopy(
        (
            tokenizer.special_tokens_map,
            tokenizer.get_vocab(),
            tokenizer.padding_side,
            tokenizer.init_kwargs,
            tokenizer.backend_tokenizer.to_str(),
        )
    )


def tiny_t5():
    config = hf.T5Config(
        vocab_size=len(VOCABULARY), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=PAD
    )
    return hf.T5ForConditionalGeneration(config)


# Loading


def test_a_folder(tmp_path):
    model = llama(seed=4)
    policy = load_policy(saved(tmp_path, model), device="cpu")
    torch.testing.assert_close(logits_of(policy), model.eval()(torch.tensor([[5, 9, 13, 20]])).logits, **EXACT)
    assert policy.name == str(tmp_path) and policy.version == 0 and policy.engine is None
    assert policy.eos_ids == (EOS,) and policy.pad_id == PAD and policy.max_context == CONTEXT
    assert policy.device.type == "cpu" and policy.autocast is None
    assert len(policy.trainable_parameters()) == len(list(model.parameters()))
    assert load_policy(str(tmp_path), device="cpu").name == str(tmp_path)


def test_an_object_is_used_as_it_is():
    model, tokenizer = llama().to(torch.float64), character_tokenizer()
    model.model.embed_tokens.weight.requires_grad_(False)
    before, state = copy.deepcopy(model.state_dict()), tokenizer_state(tokenizer)
    configs = copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict()))
    policy = load_policy(model, tokenizer=tokenizer, device="cpu")
    assert policy.model is model and next(model.parameters()).dtype == torch.float64
    assert len(policy.trainable_parameters()) == len(list(model.parameters())) - 1
    assert_identical(dict(model.state_dict()), dict(before))
    assert (model.config.to_dict(), model.generation_config.to_dict()) == configs
    assert tokenizer_state(tokenizer) == state and policy.tokenizer is not tokenizer


def test_an_object_that_came_from_a_folder_finds_its_tokenizer(tmp_path):
    saved(tmp_path)
    policy = load_policy(hf.AutoModelForCausalLM.from_pretrained(tmp_path), device="cpu")
    assert policy.tokenizer.get_vocab() == VOCABULARY and policy.name == str(tmp_path)


def test_an_object_without_a_tokenizer_asks_for_one(monkeypatch):
    """A class name is no hub id: asking the hub for it takes half a minute, or finds a stranger's files."""
    asked = []

    def from_pretrained(name, *args, **kwargs):
        asked.append(name)
        raise OSError("not found")

    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(ValueError, match=r"found no tokenizer for this LlamaForCausalLM.*Pass tokenizer="):
        load_policy(llama())
    assert asked == []


def test_a_tokenizer_by_folder(tmp_path):
    character_tokenizer().save_pretrained(tmp_path)
    assert load_policy(llama(), tokenizer=str(tmp_path), device="cpu").tokenizer.get_vocab() == VOCABULARY
    model_folder = tmp_path / "model"
    llama().save_pretrained(model_folder)
    for tokenizer in (str(tmp_path), character_tokenizer()):
        policy = load_policy(model_folder, tokenizer=tokenizer, device="cpu")
        assert policy.tokenizer.get_vocab() == VOCABULARY


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"load_policy.*tokenizer"):
        load_policy(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tinyadd", "Did you mean 'tiny-add'"),
        ("smolm2", "Did you mean 'smollm2'"),
        ("no-such-folder/checkpoint", "Expected a folder with a saved model, a .gguf file, a hub id"),
        ("/no/such/folder", "could not load '/no/such/folder'"),
        ("./missing.gguf", r"could not load './missing.gguf'"),
    ],
)
def test_an_unknown_name(name, message):
    with pytest.raises(ValueError, match=message) as error:
        load_policy(name)
    assert "tiny-add, smollm2" in str(error.value) and "transformers says" in str(error.value)
    if "Did you mean" not in message:
        assert "Did you mean" not in str(error.value)


def test_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match="load_policy: could not load"):
        load_policy(tmp_path)


@pytest.mark.parametrize("thing", [3, None, torch.nn.Linear(2, 2), hf.LlamaConfig(), character_tokenizer()])
def test_what_is_no_model_is_refused(thing):
    with pytest.raises(TypeError, match=f"load_policy: expected .*{type(thing).__name__}"):
        load_policy(thing, tokenizer=character_tokenizer())


def test_sequence_to_sequence_models_are_refused(tmp_path):
    for model in (tiny_t5(), saved(tmp_path, tiny_t5())):
        with pytest.raises(ValueError, match=r"sequence-to-sequence model.*decoder-only"):
            load_policy(model, tokenizer=character_tokenizer())


@pytest.mark.parametrize(
    "make_model",
    [
        lambda: llama().model,
        lambda: gpt2_with_dropout().transformer,
        lambda: hf.LlamaForSequenceClassification(llama().config),
    ],
)
def test_a_model_without_a_head_is_refused(make_model):
    with pytest.raises(TypeError, match=r"no language-model head.*AutoModelForCausalLM"):
        load_policy(make_model(), tokenizer=character_tokenizer())


def test_a_model_that_sees_the_future_is_refused():
    """A masked language model has a head, but its logits are no probabilities of the next token."""
    config = hf.BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    with pytest.raises((TypeError, ValueError), match="causal"):
        load_policy(hf.BertForMaskedLM(config), tokenizer=character_tokenizer())


def test_model_kwargs_are_for_names_only(tmp_path):
    with pytest.raises(TypeError, match=r"attn_implementation.*loaded already"):
        load_policy(llama(), tokenizer=character_tokenizer(), attn_implementation="eager")
    policy = load_policy(saved(tmp_path), device="cpu", attn_implementation="eager")
    assert policy.model.config._attn_implementation == "eager"


def test_weights_are_float32_unless_asked(tmp_path):
    """Small updates vanish in bfloat16 weights."""
    saved(tmp_path, llama().to(torch.bfloat16))
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16  # what transformers would do
    for dtype, expected in ((None, torch.float32), (torch.bfloat16, torch.bfloat16), ("auto", torch.bfloat16)):
        policy = load_policy(tmp_path, device="cpu", **({} if dtype is None else {"dtype": dtype}))
        assert {p.dtype for p in policy.model.parameters()} == {expected}
    policy = load_policy(tmp_path, device="cpu")
    rollout = make_rollout()
    update = rl.loss_step(
        policy, torch.optim.SGD(policy.trainable_parameters(), lr=1e-6), rollout, torch.tensor([1.0, -1, 1, -1])
    )
    assert update.skipped is None
    assert_close_but_not_equal(policy.model.state_dict(), load_policy(tmp_path, device="cpu").model.state_dict())


def assert_close_but_not_equal(left, right):
    assert any(not torch.equal(left[name], right[name]) for name in left)
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-4)


# Tokens that end a completion, and padding


def test_end_ids_are_the_union():
    """Tokenizer, generation config (one id or several), model config, and the user's own."""
    model = llama()
    model.config.eos_token_id = 5
    model.generation_config.eos_token_id = [9, 7]
    assert load_policy(model, tokenizer=character_tokenizer(), eos_ids=[11, 9]).eos_ids == (EOS, 5, 7, 9, 11)
    model.generation_config.eos_token_id = 8
    assert load_policy(model, tokenizer=character_tokenizer()).eos_ids == (EOS, 5, 8)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    assert load_policy(model, tokenizer=character_tokenizer()).eos_ids == (EOS,)


def test_no_end_anywhere():
    def without_end():
        model, tokenizer = llama(), character_tokenizer()
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token = None
        return model, tokenizer

    model, tokenizer = without_end()
    with pytest.raises(ValueError, match=r"no completion could ever end.*eos_ids="):
        load_policy(model, tokenizer=tokenizer)
    assert load_policy(model, tokenizer=tokenizer, eos_ids=[10]).eos_ids == (10,)
    tokenizer.pad_token = None
    policy = load_policy(model, tokenizer=tokenizer, eos_ids=[10])
    assert policy.pad_id == 10 and tokenizer.pad_token is None


def test_ids_beyond_the_vocabulary_end_nothing():
    model = llama()
    model.generation_config.eos_token_id = [EOS, 128_009, -1]
    assert load_policy(model, tokenizer=character_tokenizer()).eos_ids == (EOS,)


def test_padding_is_added_to_our_copy_only(tmp_path):
    tokenizer = character_tokenizer(pad_token=None)
    state = tokenizer_state(tokenizer)
    policy = load_policy(llama(), tokenizer=tokenizer)
    assert policy.pad_id == EOS == policy.tokenizer.pad_token_id
    assert tokenizer.pad_token is None and tokenizer_state(tokenizer) == state
    assert len(policy.tokenizer) == len(tokenizer)  # no new token, no new embedding
    assert load_policy(llama(), tokenizer=character_tokenizer()).pad_id == PAD  # a deliberate value stays


def test_padding_of_a_loaded_model_is_in_step(tmp_path):
    model = llama()
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    saved(tmp_path, model, character_tokenizer(pad_token=None))
    policy = load_policy(tmp_path, device="cpu")
    ids = policy.pad_id, policy.model.config.pad_token_id, policy.model.generation_config.pad_token_id
    assert ids == (EOS, EOS, EOS)
    model.config.pad_token_id = 30
    saved(tmp_path / "deliberate", model)
    assert load_policy(tmp_path / "deliberate", device="cpu").model.config.pad_token_id == 30


def test_a_tokenizer_with_more_tokens_than_the_model():
    model, tokenizer = llama(), character_tokenizer()
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match=rf"{len(VOCABULARY) + 1} tokens, the model only {len(VOCABULARY)}"):
        load_policy(model, tokenizer=tokenizer)
    model.resize_token_embeddings(len(tokenizer))
    assert load_policy(model, tokenizer=tokenizer).max_context == CONTEXT
    padded = llama()
    padded.resize_token_embeddings(64)  # more embeddings than tokens are common, and fine
    assert load_policy(padded, tokenizer=character_tokenizer()).eos_ids == (EOS,)


# Saving


@pytest.mark.parametrize("extra", [(), (9, 11)], ids=["the checkpoint's ends", "ends of the user"])
def test_save_and_load_give_the_same_policy(tmp_path, extra):
    model = llama(seed=3)
    model.generation_config.eos_token_id = [EOS, 7]
    policy = load_policy(model, tokenizer=character_tokenizer(pad_token=None), device="cpu", eos_ids=extra)
    policy.save_pretrained(tmp_path)
    again = load_policy(tmp_path, device="cpu")
    torch.testing.assert_close(logits_of(again), logits_of(policy), **EXACT)
    assert again.pad_id == policy.pad_id
    assert again.tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert again.eos_ids == policy.eos_ids == tuple(sorted({EOS, 7, *extra}))
    settings = {"num_generations": 3, "max_completion_length": 8, "seed": 2}
    left, right = rl.sample(policy, ["1+2="], **settings), rl.sample(again, ["1+2="], **settings)
    assert_identical(left.completion_ids, right.completion_ids)
    # and transformers reads it
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "llama"
    assert hf.AutoTokenizer.from_pretrained(tmp_path).get_vocab() == VOCABULARY


def test_save_passes_its_arguments_on(tmp_path):
    policy = tiny_policy()
    policy.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1


def test_push_to_hub_uploads_model_tokenizer_and_card(monkeypatch):
    """No network: the two calls of the hub's client are looked at, with the folder as it would go up."""
    from huggingface_hub import HfApi

    policy, calls = tiny_policy(), []
    monkeypatch.setattr(HfApi, "create_repo", lambda self, *args, **kwargs: calls.append((self.token, args, kwargs)))

    def upload(self, *, repo_id, folder_path, **kwargs):
        names = {path.name for path in Path(folder_path).iterdir()}
        assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
        assert "trained with RLOO" in Path(folder_path, "README.md").read_text()
        calls.append((self.token, repo_id, kwargs))

    monkeypatch.setattr(HfApi, "upload_folder", upload)
    policy.push_to_hub("me/mine", method="RLOO", private=True, token="secret", revision="dev")
    assert calls == [
        ("secret", ("me/mine",), {"private": True, "exist_ok": True}),
        ("secret", "me/mine", {"revision": "dev"}),
    ]


# The reference


def test_the_reference_is_frozen_and_independent(policy):
    rollout = make_rollout()
    policy.version, policy.autocast = 3, None
    reference = policy.reference()
    before = rl.compute_logps(reference, rollout)
    torch.testing.assert_close(before, rl.compute_logps(policy, rollout), **EXACT)
    assert reference.trainable_parameters() == [] and policy.trainable_parameters()
    assert (reference.eos_ids, reference.pad_id, reference.version) == (policy.eos_ids, policy.pad_id, 3)
    assert not {p.data_ptr() for p in reference.model.parameters()} & {p.data_ptr() for p in policy.model.parameters()}
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    rl.loss_step(policy, optimizer, rollout, torch.tensor([1.0, -1.0, 1.0, -1.0]))
    assert float((rl.compute_logps(policy, rollout) - before).abs().max()) > 1e-3
    torch.testing.assert_close(rl.compute_logps(reference, rollout), before, **EXACT)
    assert reference.version == 3 and policy.version == 4
    assert "reference" in repr(reference)


def test_the_reference_keeps_extra_ends_autocast_and_the_users_modes():
    model = gpt2_with_dropout()
    model.train()
    policy = load_policy(model, tokenizer=character_tokenizer(), device="cpu", eos_ids=[9], autocast=torch.bfloat16)
    rollout = make_rollout()
    reference = policy.reference()
    assert reference.eos_ids == (EOS, 9) and reference.autocast == torch.bfloat16
    torch.testing.assert_close(rl.compute_logps(policy, rollout), rl.compute_logps(reference, rollout), **EXACT)
    assert all(module.training for module in model.modules())


def test_a_reference_made_after_sampling_has_its_own_engine(policy):
    rl.sample(policy, ["1"], num_generations=1, max_completion_length=2)
    reference = policy.reference()
    with torch.no_grad():
        policy.model.lm_head.weight.zero_()
    rollout = rl.sample(reference, ["1"], num_generations=2, max_completion_length=3)
    torch.testing.assert_close(rollout.sampler_logp, rl.compute_logps(reference, rollout), **FLOAT32)
    assert reference.engine is not policy.engine


# Passes


def test_dropout_is_off_in_every_pass():
    """Two passes agree, and the first ratio is exactly 1."""
    policy = tiny_policy(gpt2_with_dropout(dropout=0.5))
    policy.model.train()
    rollout = make_rollout()
    first, second = policy.score_tokens(rollout), policy.score_tokens(rollout)
    torch.testing.assert_close(first.logp, second.logp, **EXACT)
    assert first.logp.requires_grad
    assert all(module.training for module in policy.model.modules())
    expected = tiny_policy(gpt2_with_dropout(dropout=0.0)).score_tokens(rollout)
    torch.testing.assert_close(first.logp, expected.logp, **EXACT)


def test_modes_come_back_after_an_error():
    policy = tiny_policy(gpt2_with_dropout())
    policy.model.train()
    policy.model.transformer.h[0].eval()
    modes = [module.training for module in policy.model.modules()]
    with pytest.raises(RuntimeError, match="stop here"), policy.inference_settings():
        assert not any(module.training for module in policy.model.modules())
        raise RuntimeError("stop here")
    assert [module.training for module in policy.model.modules()] == modes


def test_autocast_applies_inside_only(policy):
    mixed = tiny_policy(autocast=torch.bfloat16)
    rollout = make_rollout()
    with mixed.inference_settings():
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")
    exact, got = policy.score_tokens(rollout).logp, mixed.score_tokens(rollout).logp
    assert got.dtype == torch.float32 and not torch.equal(exact, got)
    torch.testing.assert_close(exact, got, rtol=3 * BFLOAT16["rtol"], atol=3 * BFLOAT16["atol"])
    got.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in mixed.model.parameters())


def test_max_context_of_other_configs(policy):
    assert policy.max_context == CONTEXT
    assert tiny_policy(gpt2_with_dropout()).max_context == CONTEXT
    config = hf.MambaConfig(vocab_size=len(VOCABULARY), hidden_size=8, num_hidden_layers=1, eos_token_id=EOS)
    assert tiny_policy(hf.MambaForCausalLM(config)).max_context is None


def test_repr_says_what_it_is(policy):
    text = repr(policy)
    parameters = sum(p.numel() for p in policy.model.parameters())
    for part in ("LlamaForCausalLM", f"{parameters:,} parameters", "torch.float32", "cpu", f"({EOS},)", "version 0"):
        assert part in text


def test_loading_says_nothing_alarming(tmp_path, caplog, recwarn):
    saved(tmp_path)
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        load_policy(tmp_path, device="cpu")
    assert not [record for record in caplog.records if record.name.startswith("rlkit")]
    assert not [w for w in recwarn if "rlkit" in str(w.filename)]


def test_tiny_add_adds():
    """The offline model that ships with rlkit."""
    policy = load_policy("tiny-add", device="cpu")
    assert policy.name == "tiny-add" and isinstance(policy, Policy)
    rollout = rl.sample(policy, ["12+34="], num_generations=2, max_completion_length=8, seed=0)
    torch.testing.assert_close(rollout.sampler_logp, rl.compute_logps(policy, rollout), rtol=1e-4, atol=1e-4)
    assert math.isfinite(float(rollout.sampler_logp.sum()))


@pytest.mark.parametrize("no_engine", [None, "vllm", 3])
def test_only_an_engine_can_be_used(policy, no_engine, unchecked):
    with pytest.raises(TypeError, match=r"policy.use: expected an engine, got .*rl.TransformersEngine\(policy\)"):
        policy.use(no_engine)
