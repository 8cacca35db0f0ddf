"""The stream of weights: names of the plain checkpoint, adapters merged on copies, the model untouched."""

import contextlib

import pytest
import torch
from builders import assert_identical, character_tokenizer, llama, lora_config, snapshot, tiny_policy, vllm_policy
from safetensors.torch import load_file
from tolerances import FLOAT32
from transformers import MixtralConfig, MixtralForCausalLM

import rlkit as rl
from rlkit.causal_lm import causal_lm_of
from rlkit.engines.weights import (
    check_manifest,
    finite,
    is_quantised,
    manifest,
    named_weights,
    save_adapter,
    weights_mark,
)


def stream(policy):
    with contextlib.closing(named_weights(policy)) as weights:
        return {name: tensor.clone() for name, tensor in weights}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_values_are_those_of_a_saved_checkpoint(kind, tied, tmp_path):
    policy = vllm_policy(kind, tied=tied)
    policy.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    ours = stream(policy)
    assert ours.keys() - saved.keys() == ({"lm_head.weight"} if tied else set())  # a tied head is written once
    assert all(torch.equal(ours[name], tensor) for name, tensor in saved.items())
    assert torch.equal(ours["lm_head.weight"], ours["model.embed_tokens.weight"]) == tied


@pytest.mark.parametrize("options", [None, {}])
def test_buffers_of_a_checkpoint_are_weights_too(options):
    """Those that a checkpoint does not hold (rotary frequencies) are not."""
    policy = tiny_policy() if options is None else adapted(**options)
    before = stream(policy).keys()
    norm = causal_lm_of(policy.model).model.norm
    norm.register_buffer("shift", torch.ones(3))
    norm.register_buffer("scratch", torch.ones(3), persistent=False)
    assert stream(policy).keys() - before == {"model.norm.shift"}


def test_fused_experts_have_the_names_of_their_checkpoint(tmp_path):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=46, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    policy = tiny_policy(MixtralForCausalLM(config))
    policy.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    ours = stream(policy)
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in saved.items())


def adapted(**options):
    model = llama()
    return rl.load_policy(model, tokenizer=character_tokenizer(), device="cpu", peft_config=lora_config(**options))


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"use_rslora": True}])
def test_merged_weights_give_the_adapted_models_logits(options):
    policy = adapted(**options)
    if "modules_to_save" in options:  # trained away from the original
        with torch.no_grad():
            policy.model.get_output_embeddings().weight.add_(0.1)
    before = snapshot(policy.model)
    weights = stream(policy)
    assert_identical(snapshot(policy.model), before)  # bit for bit: merging in place and back would round
    plain = llama(seed=5)
    plain.load_state_dict(weights)
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        # (W + BA) x and W x + BA x: a few roundings apart
        torch.testing.assert_close(plain(ids).logits, policy.model(input_ids=ids).logits, rtol=0, atol=1e-5)
        with policy.model.disable_adapter():
            assert not torch.allclose(plain(ids).logits, policy.model(input_ids=ids).logits, atol=1e-3)


def test_a_reference_gives_its_own_weights():
    policy = adapted()
    reference = policy.reference()  # the starting adapter, which changes something
    start = stream(policy)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.1)
    moved = stream(policy)
    assert_identical(stream(reference), start)
    assert any(not torch.equal(moved[name], start[name]) for name in start)
    assert_identical(stream(policy), moved)  # and the policy has its adapter back


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"use_dora": True}, {}])
def test_a_disabled_adapter_changes_nothing(options):
    """Neither the layers nor the modules that it brings in place of others."""
    policy, plain = adapted(**options), tiny_policy()
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.1)
    trained = stream(policy)
    with policy.model.disable_adapter():
        assert_identical(stream(policy), stream(plain))
    assert_identical(stream(policy), trained)
    changed = {name for name, tensor in trained.items() if not torch.equal(tensor, stream(plain)[name])}
    assert ("lm_head.weight" in changed) == ("modules_to_save" in options) and len(changed) >= 4


def with_a_buffer(policy):
    causal_lm_of(policy.model).model.norm.register_buffer("shift", torch.ones(3))
    return policy


@pytest.mark.parametrize("make", [tiny_policy, vllm_policy, adapted], ids=["plain", "tied", "adapter"])
def test_each_element_that_is_changed_in_place_changes_the_mark(make):
    """The first, the last and one between of each tensor of the stream; else the engine would draw with old weights."""
    policy = with_a_buffer(make())
    numbers, marks = torch.Generator().manual_seed(0), [weights_mark(policy)]
    tensors = [*policy.model.parameters(), causal_lm_of(policy.model).model.norm.shift]
    for tensor in tensors:
        for place in (0, int(torch.randint(tensor.numel(), (), generator=numbers)), -1):
            with torch.no_grad():
                tensor.flatten()[place] += 1  # a view, as of `weight[3, 4] += 1`
            marks.append(weights_mark(policy))
    assert len(set(marks)) == len(marks) == 1 + 3 * len(tensors)
    assert weights_mark(policy) == marks[-1]  # and nothing changes it but a change
    policy.model(input_ids=torch.tensor([[5, 6, 7]]))
    norm = causal_lm_of(policy.model).model.norm
    norm.register_buffer("scratch", torch.ones(3), persistent=False)  # what a forward pass may write
    norm.scratch += 1
    assert weights_mark(policy) == marks[-1]


def test_what_an_adapter_is_set_to_changes_the_mark():
    policy = adapted(modules_to_save=["lm_head"])
    before = weights_mark(policy)
    with policy.model.disable_adapter():
        assert weights_mark(policy) != before
    assert weights_mark(policy) == before
    layer = causal_lm_of(policy.model).model.layers[0].self_attn.q_proj
    layer.scaling["default"] *= 2
    assert weights_mark(policy) != before


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite_is_found_in_every_tensor(value, dtype):
    policy = with_a_buffer(tiny_policy())
    policy.model.to(dtype)
    numbers = torch.Generator().manual_seed(0)
    weights = [(name, tensor.clone()) for name, tensor in stream(policy).items()]
    assert list(finite(weights, "sync")) == weights
    for name, tensor in weights:
        place = int(torch.randint(tensor.numel(), (), generator=numbers))
        kept, tensor.view(-1)[place] = tensor.view(-1)[place].clone(), value
        with pytest.raises(
            ValueError, match=rf"sync: policy weights not finite in .*: {name} \(1 of {tensor.numel()} "
        ):
            list(finite(weights, "sync"))
        tensor.view(-1)[place] = kept


def test_a_number_too_large_for_the_engine_is_not_finite_there():
    weights = [("w", torch.tensor([1.0, -65504.0])), ("empty", torch.zeros(0)), ("ids", torch.tensor([10**6]))]
    assert len(list(finite(weights, "sync", torch.float16))) == 3
    weights[0][1][1] = -65536.0  # float16 ends at 65504
    assert len(list(finite(weights, "sync", torch.bfloat16))) == 3
    with pytest.raises(ValueError, match=r"not finite in float16: w \(1 of 2 values\); nothing was sent"):
        list(finite(weights, "sync", torch.float16))


def test_an_adapter_that_is_not_finite_is_not_written(tmp_path):
    policy = adapted()
    causal_lm_of(policy.model).model.layers[1].mlp.down_proj.lora_B["default"].weight.data[2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"not finite in float32: .*layers.1.mlp.down_proj.lora_B.weight \(1 of 64"):
        save_adapter(policy, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_that_unties_the_head_is_refused():
    policy = vllm_policy(tied=True, peft_config=lora_config(target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match="ties its head to the embedding"):
        stream(policy)


def test_the_manifest_says_shapes_and_dtypes():
    policy = tiny_policy()
    found = manifest(policy)
    assert found["lm_head.weight"] == ((46, 16), torch.float32)
    assert found.keys() == policy.model.state_dict().keys()
    check_manifest(found, found, "sync")
    half = {name: (shape, torch.bfloat16) for name, (shape, _) in found.items()}
    check_manifest(half, found, "sync")


def test_several_differences_are_told_together():
    ours = {"a": ((2,), torch.float32), "b": ((1,), torch.float32), "new": ((1,), torch.float32)}
    theirs = {"a": ((3,), torch.float32), "b": ((1,), torch.float32), "old": ((1,), torch.float32)}
    with pytest.raises(ValueError, match=r"1 shape differs.*lacks 1 name.*old.*not know 1 name.*new"):
        check_manifest(ours, theirs, "sync")


def test_an_adapter_alone_is_what_peft_reads(tmp_path):
    from peft import PeftModel

    policy = adapted()
    folder = save_adapter(policy, tmp_path / "adapter")
    again = PeftModel.from_pretrained(llama(), folder)
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, policy.model(input_ids=ids).logits, **FLOAT32)


def test_what_has_no_adapter_or_more_than_one_is_refused(tmp_path):
    with pytest.raises(TypeError, match="has no adapter"):
        save_adapter(tiny_policy(), tmp_path)
    with pytest.raises(ValueError, match=r"also trains \['lm_head'\]"):
        save_adapter(adapted(modules_to_save=["lm_head"]), tmp_path)


def test_quantised_weights_are_refused():
    policy = adapted()
    assert not is_quantised(policy.model)
    weight = policy.model.get_base_model().model.layers[0].mlp.up_proj
    packed = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    weight.weight = packed  # as bitsandbytes packs four bits; no GPU here to do so
    assert is_quantised(policy.model)
    with pytest.raises(ValueError, match="quantised weights, which cannot be transferred whole"):
        stream(policy)
