"""TRL's examples of custom reward functions (its RLOO page), unchanged, with the inputs and answers of that page."""

import asyncio
import re

import torch
from builders import make_rollout

import rlkit as rl


def rollout_of(prompts, completions, lengths=None, **columns):
    return make_rollout(
        lengths or [1] * len(completions),
        prompts=prompts,
        completions=completions,
        columns=columns,
        group_id=range(len(completions)),
    )


def test_longer_completions_by_tokens():
    def reward_func(completion_ids, **kwargs):
        """Reward function that assigns higher scores to longer completions (in terms of token count)."""
        return [float(len(ids)) for ids in completion_ids]

    rollout = rollout_of(["The sky is", "The sun is"], [" blue.", " in the sky."], lengths=(2, 4))
    assert rl.score(rollout, reward_func).reward.tolist() == [2.0, 4.0]


def test_longer_completions_by_characters():
    def reward_func(completions, **kwargs):
        """Reward function that assigns higher scores to longer completions (in terms of character count)."""
        return [float(len(completion)) for completion in completions]

    rollout = rollout_of(["The sky is", "The sun is"], [" blue.", " in the sky."])
    assert rl.score(rollout, reward_func).reward.tolist() == [6.0, 12.0]


def test_a_format_on_conversational_completions():
    def format_reward_func(completions, **kwargs):
        """Reward function that checks if the completion has a specific format."""
        pattern = r"^<think>.*?</think><answer>.*?</answer>$"
        completion_contents = [completion[0]["content"] for completion in completions]
        matches = [re.match(pattern, content) for content in completion_contents]
        return [1.0 if match else 0.0 for match in matches]

    prompts = [
        [{"role": "user", "content": "What is the result of (1 + 2) * 4?"}],
        [{"role": "user", "content": "What is the result of (3 + 1) * 2?"}],
    ]
    completions = [
        [
            {
                "role": "assistant",
                "content": "<think>1 + 2 is 3, times 4 is 12.</think><answer>(1 + 2) * 4 = 12</answer>",
            }
        ],
        [{"role": "assistant", "content": "3 + 1 is 4, times 2 is 8. So (3 + 1) * 2 = 8."}],
    ]
    scores = rl.score(rollout_of(prompts, completions), format_reward_func)
    assert scores.reward.tolist() == [1.0, 0.0] and scores.names == ("format_reward_func",)


def test_a_reference_in_the_dataset():
    def reward_func(completions, ground_truth, **kwargs):
        # Regular expression to capture content inside \boxed{}
        matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
        contents = [match.group(1) if match else "" for match in matches]
        # Reward 1 if the content is the same as the ground truth, 0 otherwise
        return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]  # noqa: B905

    rollout = rollout_of(
        ["Problem: Solve the equation $2x + 3 = 7$. Solution:", "Problem: Solve the equation $3x - 5 = 10$."],
        [r" The solution is \boxed{2}.", r" The solution is \boxed{6}."],
        ground_truth=("2", "5"),
    )
    assert rl.score(rollout, reward_func).reward.tolist() == [1.0, 0.0]


def test_several_tasks_with_none():
    def math_reward_func(prompts, completions, task, **kwargs):
        rewards = []
        for prompt, completion, t in zip(prompts, completions, task):  # noqa: B905
            if t == "math":
                correct = eval(prompt.removeprefix("What is ").removesuffix("?")) == int(completion)
                rewards.append(1.0 if correct else -1.0)
            else:
                # Return None for non-math tasks
                rewards.append(None)
        return rewards

    def coding_reward_func(prompts, completions, task, **kwargs):
        rewards = []
        for _prompt, completion, t in zip(prompts, completions, task):  # noqa: B905
            rewards.append((1.0 if "def " in completion else -1.0) if t == "coding" else None)
        return rewards

    rollout = rollout_of(
        ["What is 2+2?", "Write a function that sorts.", "What is 3*4?"],
        ["4", "def sort(x): return sorted(x)", "13"],
        task=("math", "coding", "math"),
    )
    scores = rl.score(rollout, [math_reward_func, coding_reward_func])
    assert scores.reward.tolist() == [1.0, 1.0, -1.0]
    nan = float("nan")
    torch.testing.assert_close(scores.parts, torch.tensor([[1, nan], [nan, 1], [-1, nan]]), equal_nan=True)
    assert rl.metrics.score_metrics(scores)["rewards/math_reward_func/mean"] == 0.0  # of 1 and -1
    assert rl.metrics.score_metrics(scores)["rewards/coding_reward_func/mean"] == 1.0


def test_an_async_function():
    async def async_reward_func(prompts, completions, **kwargs):
        # Simulate an async API call
        await asyncio.sleep(0.01)
        return [float(len(completion)) for completion in completions]

    rollout = rollout_of(["a", "b"], ["xx", "yyyy"])
    assert rl.score(rollout, async_reward_func).reward.tolist() == [2.0, 4.0]


def test_extra_columns_and_metrics():
    def reward_func(completions, answer, log_extra=None, log_metric=None, **kwargs):
        extracted = [completion.split()[-1] for completion in completions]
        rewards = [1.0 if e == a else 0.0 for e, a in zip(extracted, answer)]  # noqa: B905
        if log_extra:
            log_extra("golden_answer", list(answer))
            log_extra("extracted_answer", extracted)
        if log_metric:
            log_metric("accuracy", sum(rewards) / len(rewards))
        return rewards

    scores = rl.score(rollout_of(["a", "b"], ["it is 4", "it is 5"], answer=("4", "6")), reward_func)
    assert scores.extra == {"golden_answer": ("4", "6"), "extracted_answer": ("4", "5")}
    assert scores.metrics == {"accuracy": 0.5}
    assert scores.to_pandas()["extracted_answer"].tolist() == ["4", "5"]


def test_a_reward_that_follows_the_trainers_state():
    def shaped(completions, trainer_state, **kwargs):
        progress = trainer_state.global_step / trainer_state.max_steps
        return [progress * len(completion) for completion in completions]

    rollout = rollout_of(["a", "b"], ["xx", "yyyy"])
    assert rl.score(rollout, shaped, state=rl.rewards.StepState(5, 10)).reward.tolist() == [1.0, 2.0]

    def steps(completions, trainer_state):
        return [float(trainer_state.step)] * len(completions)

    for timeout in (None, 60.0):  # here, and in a process
        assert rl.score(rollout, steps, state=rl.rewards.StepState(5, 10), timeout=timeout).reward.tolist() == [5.0] * 2


def test_without_max_steps_the_error_says_how_to_give_it():
    def shaped(completions, trainer_state):
        return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

    try:
        rl.score(rollout_of(["a"], ["x"]), shaped)
    except RuntimeError as error:
        assert "pass state=rl.rewards.StepState(step, max_steps)" in str(error)
    else:
        raise AssertionError("max_steps is not known")


def test_inside_run_steps_max_steps_is_that_of_the_loop(tmp_path):
    seen = []

    def scheduled(completions, trainer_state):
        seen.append(trainer_state.max_steps)
        return [0.0] * len(completions)

    rollout = make_rollout((1, 1))
    for _ in rl.Run(tmp_path / "run").steps(iter(range(9)), 2, progress=False):
        rl.score(rollout, scheduled)
    rl.score(rollout, scheduled)
    assert seen == [2, 2, None]
