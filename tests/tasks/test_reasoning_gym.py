"""Tasks of reasoning-gym: sampled, scored by their own scorer, trained on."""

import pickle

import pytest
import torch
from builders import tiny_policy

import rlkit as rl
from rlkit.scoring import score

gym = pytest.importorskip("reasoning_gym")

# One of each category that has small prompts.
TEN = {
    "algebra": "simple_equations", "algorithmic": "spell_backward", "arithmetic": "chain_sum", "code": "bf",
    "cognition": "number_sequence", "games": "countdown", "geometry": "simple_geometry", "graphs": "course_schedule",
    "logic": "knights_knaves", "probability": "coin_flip",
}  # fmt: skip


@pytest.fixture(scope="module")
def policy():
    """A tiny model with a character vocabulary and a context that the longest question fits into."""
    from builders import CHAT_TEMPLATE, VOCABULARY, character_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=4096, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return tiny_policy(LlamaForCausalLM(config), tokenizer=character_tokenizer(chat_template=CHAT_TEMPLATE))


@pytest.mark.integration
@pytest.mark.parametrize(("category", "name"), TEN.items(), ids=TEN)
def test_ten_tasks_are_sampled_scored_and_trained(category, name, policy, tmp_path):
    task = rl.tasks.load(f"reasoning-gym/{name}", size=6, test_size=2)
    assert task.rewards[0].source().category == category and task.name == f"reasoning-gym/{name}"
    # The scorer is reasoning-gym's: full marks for its own answer, and what it says of any other.
    rows = [*task.train, *task.test]
    answers = [row["answer"] for row in rows]
    index = [row["index"] for row in rows]
    (reward,) = task.rewards
    source = gym.create_dataset(name, seed=0, size=8)
    for texts in (answers, ["nonsense"] * len(rows), [""] * len(rows), answers[::-1]):
        want = [source.score_answer(text, source[number]) for text, number in zip(texts, index, strict=True)]
        assert reward(texts, index=index) == want
    assert reward([f"<think>hm</think><answer>{a}</answer>" for a in answers], index=index) == [1.0] * len(rows)

    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.01)
    loader, run = rl.PromptLoader(task.train, policy, batch_size=2), rl.Run(tmp_path / "run")
    for step, batch in run.steps(loader, 2, progress=False):
        rollout = rl.sample(policy, batch, num_generations=3, max_completion_length=4)
        scores = score(rollout, task.rewards)
        noisy = rl.compute_loo_advantage(scores) + torch.linspace(-1, 1, 6)  # a random model earns nothing
        before = [parameter.detach().clone() for parameter in policy.trainable_parameters()]
        update = rl.loss_step(policy, optimizer, rollout, noisy)
        moved = [not torch.equal(*pair) for pair in zip(before, policy.trainable_parameters(), strict=True)]
        assert all(moved) and update.metrics["grad_norm"] > 0
        run.log(step, rollout, scores, update=update)
        assert update.skipped is None and scores.names == ("reasoning_gym",) and not scores.reward.isnan().any()
    assert run.step == 2


def test_questions_are_different_and_splits_do_not_leak():
    task = rl.tasks.load("reasoning-gym/chain_sum", size=40, test_size=10, min_terms=2, max_terms=2)
    prompts = [row["prompt"][0]["content"] for row in [*task.train, *task.test]]
    assert len(set(prompts)) == 50 == len(prompts)
    again = rl.tasks.load("reasoning-gym/chain_sum", size=40, test_size=10, min_terms=2, max_terms=2)
    assert again.train.to_list() == task.train.to_list()
    other = rl.tasks.load("reasoning-gym/chain_sum", size=40, test_size=10, min_terms=2, max_terms=2, seed=1)
    assert other.train.to_list() != task.train.to_list()


def test_forms_of_the_prompt():
    text = rl.tasks.load("reasoning-gym/gcd", size=2, test_size=1, conversational=False)
    assert isinstance(text.train[0]["prompt"], str)
    chat = rl.tasks.load("reasoning-gym/gcd", size=2, test_size=1, system="Think.")
    assert [message["role"] for message in chat.train[0]["prompt"]] == ["system", "user"]
    with pytest.raises(ValueError, match="a system message needs conversational=True"):
        rl.tasks.load("reasoning-gym/gcd", conversational=False, system="Think.")


def test_what_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"there is no task 'countdwn'\. Did you mean 'countdown'\? It has 1"):
        rl.tasks.load("reasoning-gym/countdwn")
    with pytest.raises(ValueError, match="'gcd' refuses the settings"):
        rl.tasks.load("reasoning-gym/gcd", colour="red")
    with pytest.raises(ValueError, match="must be at least 1"):
        rl.tasks.load("reasoning-gym/gcd", size=0)
    with pytest.raises(ValueError, match=r"Known tasks: addition, countdown, format, reasoning-gym/NAME"):
        rl.tasks.load("nothing")


def test_a_scorer_that_breaks_gives_0_and_says_so(caplog, monkeypatch):
    task = rl.tasks.load("reasoning-gym/gcd", size=2, test_size=1)
    (reward,) = task.rewards

    def broken(answer, entry):
        raise KeyError(answer)

    monkeypatch.setattr(reward.source(), "score_answer", broken)
    assert reward(["7", "8"], index=[0, 1]) == [0.0, 0.0]
    assert "the scorer of 'gcd' failed on 2 of 2 answers" in caplog.text


def test_a_reward_can_be_sent_to_another_process():
    (reward,) = rl.tasks.load("reasoning-gym/gcd", size=2, test_size=1).rewards
    assert pickle.loads(pickle.dumps(reward)) == reward


@pytest.mark.slow
def test_every_task_can_be_loaded():
    """All but those that need data of their own; scores are reasoning-gym's, and 0 where its scorer fails."""
    from rlkit.tasks.reasoning_gym import names

    failed = {}
    for name in names():
        if name in ("composite", "rearc", "arc_agi"):  # needs a list of tasks; minutes; files
            continue
        try:
            task = rl.tasks.load(f"reasoning-gym/{name}", size=2, test_size=1)
            row = task.train[0]
            (reward,) = task.rewards
            entry = reward.source()[row["index"]]
            for text in (row["answer"] or "", "nonsense"):
                got = reward([text], index=[row["index"]])[0]
                try:
                    want = reward.source().score_answer(text.strip(), entry)
                except ValueError:  # prime_factorization reads numbers and finds words
                    want = 0.0
                if got != pytest.approx(want):
                    failed[name] = f"{got} for {text[:40]!r}"
        except ValueError as error:
            failed[name] = str(error)[:100]
    assert not failed
