"""Mixture-of-experts balance, the model card, and compiling."""

import pytest
import torch
from builders import make_rollout, tiny_policy
from tolerances import FLOAT32
from transformers import MixtralConfig, MixtralForCausalLM

import rlkit as rl


def moe_policy():
    torch.manual_seed(0)
    config = tiny_policy().model.config
    small = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    model = MixtralForCausalLM(
        MixtralConfig(
            **small,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            eos_token_id=config.eos_token_id,
        )
    )
    return tiny_policy(model)


def test_the_balance_loss_is_the_models_own_and_reaches_the_router():
    """`aux_loss` as transformers computes it for the same tokens, and its gradient times the coefficient."""
    policy, rollout = moe_policy(), make_rollout()
    scores = policy.score_tokens(rollout, balance=True)
    packed = rl.token_scorer.pack(
        rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask
    )
    own = policy.model(packed.input_ids, attention_mask=packed.attention_mask.long(), output_router_logits=True)
    torch.testing.assert_close(scores.balance_loss, own.aux_loss, **FLOAT32)

    gradients = []
    for coefficient in (0.0, 0.5):
        optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.0)
        kept = {}
        for name, parameter in policy.model.named_parameters():
            parameter.register_hook(lambda grad, name=name, kept=kept: kept.__setitem__(name, grad.clone()))
        advantages = torch.linspace(-1, 1, len(rollout))
        update = rl.loss_step(policy, optimizer, rollout, advantages, router_aux_loss_coef=coefficient)
        assert ("aux_loss" in update.metrics) is (coefficient > 0)
        gradients.append(dict(kept))
    torch.testing.assert_close(torch.tensor(update.metrics["aux_loss"]), own.aux_loss.detach(), **FLOAT32)
    names = [name for name, parameter in policy.model.named_parameters() if "gate" in name and parameter.ndim == 2]
    assert any(not torch.allclose(gradients[0][name], gradients[1][name]) for name in names if name in gradients[0])


def test_the_balance_alone_is_a_step():
    """Equal rewards give the policy's loss no gradient; that of the experts' load is there all the same."""
    policy, rollout = moe_policy(), make_rollout()
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in policy.trainable_parameters()]
    nothing = rl.loss_step(policy, optimizer, rollout, torch.zeros(len(rollout)))
    assert nothing.skipped and policy.version == 0
    update = rl.loss_step(policy, optimizer, rollout, torch.zeros(len(rollout)), router_aux_loss_coef=0.5)
    assert update.skipped is None and policy.version == 1 and update.metrics["aux_loss"] > 0
    assert any(not torch.equal(old, new) for old, new in zip(before, policy.trainable_parameters(), strict=True))


def test_a_balance_without_a_router_is_refused():
    policy, rollout = tiny_policy(), make_rollout()
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    advantages = torch.linspace(-1, 1, len(rollout))
    with pytest.raises((ValueError, TypeError), match="router"):
        rl.loss_step(policy, optimizer, rollout, advantages, router_aux_loss_coef=0.1)
    with pytest.raises(ValueError, match="router_aux_loss_coef must be at least 0"):
        rl.loss_step(policy, optimizer, rollout, advantages, router_aux_loss_coef=-0.1)


def test_the_model_card_names_method_settings_versions_and_the_last_step(tmp_path):
    policy = tiny_policy()
    run = rl.Run(tmp_path / "run", config={"learning_rate": 3e-4, "task": "a|b"})
    run.log(0, reward=0.25)
    run.log(1, reward=0.75)
    card = rl.model_card(policy, method="RLOO", run=run)
    for text in (
        "trained with RLOO",
        "arXiv 2402.14740",
        "learning_rate | 0.0003",
        r"a\|b",
        "reward | 0.75",
        "torch |",
    ):
        assert text in card, text
    assert rl.model_card(policy, method="RLOO", run=run.path) == card


@pytest.mark.slow
def test_a_compiled_policy_gives_the_same_log_probabilities():
    policy, rollout = tiny_policy(), make_rollout()
    before = rl.compute_logps(policy, rollout)
    policy.compile()
    torch.testing.assert_close(rl.compute_logps(policy, rollout), before, **FLOAT32)
