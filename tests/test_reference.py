"""References of policies with adapters, and references that follow the policy."""

import copy

import pytest
import torch
from builders import make_rollout, tiny_policy
from peft import LoraConfig, get_peft_model
from tolerances import FLOAT32
from transformers import LlamaConfig, LlamaForCausalLM

import rlkit as rl
from rlkit.policy import AdapterReference


def lora_policy(*, pretrained, tie=False):
    torch.manual_seed(0)
    config = tiny_policy().model.config.to_dict() | {"tie_word_embeddings": tie}
    model = get_peft_model(
        LlamaForCausalLM(LlamaConfig(**config)), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )
    if pretrained:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
    return tiny_policy(model)


def train(policy, rollout, steps=2):
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    for _ in range(steps):
        rl.loss_step(policy, optimizer, rollout, torch.linspace(-1, 1, len(rollout)))


@pytest.mark.parametrize("pretrained", [False, True])
def test_kl_is_0_at_step_0_and_the_reference_stays_while_the_policy_moves(pretrained):
    """Adapter off for a fresh adapter, a frozen copy for a pretrained one; no second model either way."""
    policy, rollout = lora_policy(pretrained=pretrained), make_rollout()
    trained = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    start = rl.compute_logps(policy, rollout)
    reference = policy.reference()
    assert isinstance(reference, AdapterReference) and reference.model is policy.model
    assert (reference.adapter is None) is not pretrained
    torch.testing.assert_close(rl.compute_logps(reference, rollout), start, rtol=0, atol=0)
    assert [name for name, p in policy.model.named_parameters() if p.requires_grad] == trained
    train(policy, rollout)
    moved = rl.compute_logps(policy, rollout)
    assert float((moved - start).abs().max()) > 1e-3
    torch.testing.assert_close(rl.compute_logps(reference, rollout), start, rtol=0, atol=0)
    torch.testing.assert_close(rl.compute_logps(policy, rollout), moved, rtol=0, atol=0)  # its adapter is back
    assert [name for name, p in policy.model.named_parameters() if p.requires_grad] == trained
    assert reference.trainable_parameters() == []


@pytest.mark.parametrize("pretrained", [False, True])
def test_the_reference_samples_its_own_completions(pretrained):
    """V* is the value of the reference, not of the policy that shares its weights."""
    policy = lora_policy(pretrained=pretrained)
    reference = policy.reference()
    drawn = rl.sample(reference, ["1+1="], num_generations=8, max_completion_length=6, seed=1)
    train(policy, make_rollout(), steps=4)
    again = rl.sample(reference, ["1+1="], num_generations=8, max_completion_length=6, seed=1)
    assert torch.equal(drawn.completion_ids, again.completion_ids)
    torch.testing.assert_close(rl.compute_logps(reference, again), again.sampler_logp, **FLOAT32)


def test_an_error_inside_leaves_the_policy_with_its_adapter():
    policy = lora_policy(pretrained=True)
    reference, rollout = policy.reference(), make_rollout()
    before = rl.compute_logps(policy, rollout)
    with pytest.raises(ZeroDivisionError), reference.inference_settings():
        raise ZeroDivisionError
    torch.testing.assert_close(rl.compute_logps(policy, rollout), before, rtol=0, atol=0)
    assert policy.trainable_parameters()


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_a_reference_moves_towards_the_policy(alpha):
    """TR-DPO: alpha * policy + (1 - alpha) * reference, for every parameter."""
    policy = tiny_policy()
    reference = policy.reference()
    train(policy, make_rollout())
    before = copy.deepcopy(dict(reference.model.named_parameters()))
    rl.update_reference(reference, policy, mixing_alpha=alpha)
    theirs = dict(policy.model.named_parameters())
    for name, parameter in reference.model.named_parameters():
        want = alpha * theirs[name] + (1 - alpha) * before[name]
        torch.testing.assert_close(parameter, want, **FLOAT32)
        assert not parameter.requires_grad
    if alpha == 1:
        rollout = make_rollout()
        torch.testing.assert_close(rl.compute_logps(reference, rollout), rl.compute_logps(policy, rollout), **FLOAT32)


def test_the_copy_of_an_adapter_moves_and_the_adapter_that_is_off_cannot():
    policy, rollout = lora_policy(pretrained=True), make_rollout()
    reference = policy.reference()
    train(policy, rollout)
    assert float((rl.compute_logps(reference, rollout) - rl.compute_logps(policy, rollout)).abs().max()) > 1e-3
    rl.update_reference(reference, policy, mixing_alpha=1.0)
    torch.testing.assert_close(rl.compute_logps(reference, rollout), rl.compute_logps(policy, rollout), **FLOAT32)
    fresh = lora_policy(pretrained=False)
    with pytest.raises(RuntimeError, match="the model without its adapter, which cannot follow the policy"):
        rl.update_reference(fresh.reference(), fresh)


@pytest.mark.parametrize("alpha", [0.0, -1.0, 1.5])
def test_mixing_alpha_is_checked(alpha):
    policy = tiny_policy()
    with pytest.raises(ValueError, match=r"mixing_alpha must be in \(0, 1\]"):
        rl.update_reference(policy.reference(), policy, mixing_alpha=alpha)


def test_a_policy_with_an_adapter_is_saved_and_loaded_with_it(tmp_path):
    base = tiny_policy()
    base.save_pretrained(tmp_path / "base")
    policy = rl.load_policy(tmp_path / "base", peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    assert all("lora" in name for name, p in policy.model.named_parameters() if p.requires_grad)
    rollout = make_rollout()
    train(policy, rollout)
    policy.save_pretrained(tmp_path / "adapter")
    again = rl.load_policy(tmp_path / "adapter")
    torch.testing.assert_close(rl.compute_logps(again, rollout), rl.compute_logps(policy, rollout), **FLOAT32)
    assert again.trainable_parameters()
    assert again.reference().adapter == "reference"  # it was pretrained: KL is measured from it
    with pytest.raises(ValueError, match="has an adapter already"):
        rl.load_policy(policy.model, tokenizer=policy.tokenizer, peft_config=LoraConfig(r=2))


def test_quantised_weights_without_bitsandbytes_say_what_is_missing(tmp_path):
    from transformers import BitsAndBytesConfig

    tiny_policy().save_pretrained(tmp_path)
    with pytest.raises(ImportError, match="bitsandbytes"):
        rl.load_policy(tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
