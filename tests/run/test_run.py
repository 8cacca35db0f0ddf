"""Run: the loop's steps and their end, what is on disk, and that nothing is ever written over."""

import json
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from builders import make_rollout, make_scores

import rlkit as rl
from rlkit.run.folder import append_line
from rlkit.run.line_files import read_lines
from rlkit.run.lock import unlock
from rlkit.run.step_log import format_line


class Batches:
    """An endless stream with a position, as a PromptLoader has one."""

    def __init__(self):
        self.served = 0

    def __iter__(self):
        while True:
            self.served += 1
            yield self.served - 1

    def state_dict(self):
        return {"served": self.served}

    def load_state_dict(self, state):
        self.served = state["served"]


def interrupt():
    """A real SIGINT; the first one of a step must not stop it."""
    try:
        second_interrupt()
    except KeyboardInterrupt:
        pytest.fail("the first Ctrl-C stopped the step in the middle")


def second_interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)


def state_of(run):
    return json.loads((run.path / "state.json").read_text())


def place_of(run):
    """The part of the state that says how far the run is."""
    return {name: state_of(run)[name] for name in ("step", "max_steps", "stopped", "prompts")}


def steps(run, max_steps, prompts=None, **options):
    return run.steps(Batches() if prompts is None else prompts, max_steps, progress=False, **options)


@pytest.fixture
def run(tmp_path):
    return rl.Run(tmp_path / "run")


# --- the loop ---


def test_steps_are_numbered_from_zero_and_end(run):
    assert list(steps(run, 3)) == [(0, 0), (1, 1), (2, 2)]
    assert (run.step, run.stopped, run.max_steps) == (3, "done", 3)
    assert place_of(run) == {"step": 3, "max_steps": 3, "stopped": "done", "prompts": {"served": 3}}


def test_steps_count_on_over_several_loops(run):
    prompts = Batches()
    assert list(steps(run, 2, prompts)) == [(0, 0), (1, 1)]
    assert list(steps(run, 2, prompts)) == []
    assert list(steps(run, 4, prompts)) == [(2, 2), (3, 3)]
    assert run.stopped == "done"


def test_a_stream_that_ends_ends_the_loop(run):
    """Finite batches; what was done stays."""
    assert [step for step, _ in steps(run, 5, iter("ab"))] == [0, 1]
    assert run.stopped == "exhausted" and run.step == 2


def test_a_stream_of_exactly_max_steps_is_done(run):
    list(steps(run, 2, iter("ab")))
    assert run.stopped == "done"


def test_state_is_on_disk_after_every_step(run):
    """The position counts prompts that were consumed."""
    for step, _ in steps(run, 3):
        if step:
            assert state_of(run)["step"] == step and state_of(run)["stopped"] is None
            assert state_of(run)["prompts"] == {"served": step}


def test_leaving_a_finished_step_by_break_counts_it(run):
    for step, _ in steps(run, 5):
        run.log(step, loss=1.0)
        if step == 1:
            break
    assert (run.step, run.stopped) == (2, "left")
    assert state_of(run)["prompts"] == {"served": 2}
    assert [step for step, _ in steps(run, 3)] == [2]


def test_an_error_in_a_step_leaves_a_state_of_the_finished_steps(run):
    """Step 1 is not done, so its prompts are not consumed: one batch of finished steps, not two."""
    with pytest.raises(ZeroDivisionError):
        for step, _ in steps(run, 5):
            if step == 1:
                raise ZeroDivisionError
            run.log(step, loss=1.0)
    assert (run.step, run.stopped) == (1, "left")
    assert state_of(run)["step"] == 1 and state_of(run)["stopped"] == "left"
    assert state_of(run)["prompts"] == {"served": 1}


def test_a_step_that_failed_is_repeated_with_its_own_prompts(run, frozen_policy):
    """A bug in a reward function, mended, and the cell run again: no prompt is skipped."""
    rows = [{"prompt": str(i)} for i in range(6)]
    loader = rl.PromptLoader(rows, frozen_policy, batch_size=2, shuffle=False)
    served = []
    for attempt in range(2):
        try:
            for step, batch in steps(run, 3, loader):
                if step == 1 and attempt == 0:
                    raise ZeroDivisionError
                served += [row["prompt"] for row in batch.rows]
                run.log(step, loss=1.0)
        except ZeroDivisionError:
            continue
    assert run.step == 3 and served == [str(i) for i in range(6)]


def test_timings_stay_out_of_the_metrics(run):
    """Wall times never repeat; metrics.jsonl does, bit for bit."""
    for step, _ in steps(run, 2):
        run.log(step, loss=0.5)
    timings = read_lines(run.path / "timings.jsonl")
    assert [line["step"] for line in timings] == [0, 1] and all(line["step_time"] >= 0 for line in timings)
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 0, "loss": 0.5}\n{"step": 1, "loss": 0.5}\n'


def test_the_progress_bar_shows_and_goes(run, capsys):
    for step, _ in run.steps(Batches(), 2, progress=True):
        run.dashboard()
        run.log(step, loss=float(step))
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [0, -1])
def test_max_steps_is_checked(run, bad):
    with pytest.raises(ValueError, match=f"run.steps: max_steps must be at least 1, got {bad}"):
        list(steps(run, bad))


def test_every_of_the_dashboard_is_checked(run):
    with pytest.raises(ValueError, match=r"run\.dashboard: every must be at least 1, got 0"):
        run.dashboard(every=0)


# --- interrupts ---


def test_ctrl_c_lets_the_step_finish_and_the_loop_can_go_on(run, sigint_guard, capsys):
    """A real SIGINT in the body of step 2: the step is logged whole, the handler is put back, the cell runs again."""
    prompts, after = Batches(), []
    for step, _ in steps(run, 6, prompts):
        if step == 2:
            interrupt()
            after.append("the body went on")
        run.log(step, loss=float(step))
    assert after and (run.step, run.stopped) == (3, "interrupted")
    assert run.metrics["step"].tolist() == [0, 1, 2]
    assert place_of(run) == {"step": 3, "max_steps": 6, "stopped": "interrupted", "prompts": {"served": 3}}
    assert signal.getsignal(signal.SIGINT) is sigint_guard
    assert "stopping after this step" in capsys.readouterr().out
    for step, batch in steps(run, 6, prompts):
        assert batch == step
        run.log(step, loss=float(step))
    assert run.metrics["step"].tolist() == [0, 1, 2, 3, 4, 5] and run.stopped == "done"
    assert signal.getsignal(signal.SIGINT) is sigint_guard


def test_ctrl_c_in_the_last_step_is_simply_the_end(run, sigint_guard):
    for _ in steps(run, 1):
        interrupt()
    assert (run.step, run.stopped) == (1, "done")


def test_a_second_ctrl_c_in_a_step_stops_at_once(run, sigint_guard):
    reached = []
    with pytest.raises(KeyboardInterrupt):
        for step, _ in steps(run, 5):
            if step == 1:
                interrupt()
                reached.append("after the first")
                second_interrupt()
                reached.append("after the second")
            run.log(step, loss=0.0)
    assert reached == ["after the first"]
    assert (run.step, run.stopped) == (1, "left") and run.metrics["step"].tolist() == [0]
    assert signal.getsignal(signal.SIGINT) is sigint_guard
    assert [step for step, _ in steps(run, 2)] == [1]


def test_an_interrupt_does_not_outlive_its_loop(run, sigint_guard):
    for _ in steps(run, 3):
        interrupt()
    assert [step for step, _ in steps(run, 3)] == [1, 2]


@pytest.mark.parametrize("way", ["break", "error", "end"])
def test_the_handler_is_put_back_however_the_loop_ends(run, sigint_guard, way):
    try:
        for _ in steps(run, 2):
            assert signal.getsignal(signal.SIGINT) is not sigint_guard
            if way == "break":
                break
            if way == "error":
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert signal.getsignal(signal.SIGINT) is sigint_guard


def test_a_loop_in_another_thread_works_and_leaves_signals_alone(run, sigint_guard):
    seen = []

    def loop():
        for step, _ in steps(run, 2):
            seen.append((step, signal.getsignal(signal.SIGINT) is sigint_guard))

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert seen == [(0, True), (1, True)]


# --- the log ---


def test_a_step_is_logged_with_everything_by_hand(run):
    rollout = make_rollout((3, 1), prompt_lengths=[2, 3], sampler_logp=torch.full((2, 3), -1.0))
    update = rl.Update(
        loss=0.25,
        metrics={"loss": 0.25, "skipped": 0.0},
        logp=torch.zeros(2, 3),
        entropy=torch.zeros(2, 3),
        loss_mask=rollout.completion_mask,
    )
    line = run.log(
        0,
        rollout,
        make_scores([1, None]),
        torch.tensor([0.5, float("nan")]),
        update,
        ref_logps=torch.full((2, 3), -1.5),
        v_star=torch.tensor([0.5, float("nan")]),
        lucky=True,
        temperature=0.7,
    )
    want = {
        "step": 0,
        "num_tokens": 9,
        "completions/mean_length": 2,
        "kl": 0.5,
        "kl_sequence": 1.0,
        "reward": 1.0,
        "reward_std": None,
        "reward_calls": 2,
        "frac_no_reward": 0.5,
        "advantage": 0.5,
        "advantage_std": None,
        "loss": 0.25,
        "skipped": 0,
        "v_star": 0.5,
        "lucky": 1,
        "temperature": 0.7,
    }
    assert {name: line[name] for name in want} == want
    assert read_lines(run.path / "metrics.jsonl") == [line]


def test_a_reward_that_never_changes_is_reported_once(run, caplog):
    scores = make_scores([0.5, 0.5])
    for step in range(45):
        run.log(step, scores=scores)
    assert caplog.text.count("gave 0.5 to every completion of the last 20 steps") == 1


def test_counts_grow_over_the_steps(run):
    """Tokens and reward calls, stage 1 included."""
    run.count_reward_calls(100)
    rollout, scores = make_rollout((3, 1), prompt_lengths=[2, 3]), make_scores([1, 0])
    lines = [run.log(step, rollout, scores) for step in range(3)]
    assert [line["num_tokens"] for line in lines] == [9, 18, 27]
    assert [line["reward_calls"] for line in lines] == [102, 104, 106]


def test_numbers_that_are_not_finite_are_null_on_disk(run):
    """Valid JSON, a gap instead of NaN."""
    run.log(0, a=float("nan"), b=float("inf"), c=torch.full((3,), float("nan")), d=1)
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 0, "a": null, "b": null, "c": null, "d": 1.0}\n'


def test_the_metrics_are_a_table_with_gaps(run):
    run.log(0, loss=1.0)
    run.log(1, other=2.0)
    frame = run.metrics
    assert frame["step"].tolist() == [0, 1] and frame["loss"].isna().tolist() == [False, True]


BAD_LOGS = {
    "twice": ({"step": 1}, ValueError, r"run\.log: step 1 comes after step 1 was logged; log each step once"),
    "back": ({"step": 0}, ValueError, r"run\.log: step 0 comes after step 1 was logged"),
    "kl without rollout": (
        {"step": 2, "ref_logps": torch.zeros(1, 1)},
        ValueError,
        r"run\.log: ref_logps needs the rollout",
    ),
    "name taken": (
        {"step": 2, "scores": make_scores([1, 0]), "reward": 1.0},
        ValueError,
        r"run\.log: 'reward' is measured already; choose another name",
    ),
    "text": ({"step": 2, "note": "fine"}, TypeError, r"run\.log: 'note' must be a number, or None for none; got str"),
}


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD_LOGS.values(), ids=BAD_LOGS.keys())
def test_bad_logs_are_named_and_leave_no_trace(run, unchecked, arguments, kind, message):
    """Nothing written, nothing counted: the next good log has the right totals."""
    rollout, scores = make_rollout((3, 1), prompt_lengths=[2, 3]), make_scores([1, 0])
    run.log(1, rollout, scores)
    before = (run.path / "metrics.jsonl").read_text()
    with pytest.raises(kind, match=message):
        run.log(**({"rollout": rollout} if "ref_logps" not in arguments else {}) | arguments)
    assert (run.path / "metrics.jsonl").read_text() == before
    line = run.log(2, rollout, scores)
    assert (line["num_tokens"], line["reward_calls"]) == (18, 4)


def test_the_dashboard_prints_a_line_every_so_many_steps(run, capsys):
    run.dashboard(every=2)
    for step in range(3):
        run.log(step, entropy=0.5, kl=float("nan"), loss=1e-9)
    assert capsys.readouterr().out.splitlines() == ["step 0 | kl - | entropy 0.500", "step 2 | kl - | entropy 0.500"]


def test_a_line_shows_what_says_how_it_goes():
    line = {
        "step": 3,
        "reward": 0.5,
        "clip_ratio/region_mean": 0.25,
        "completions/mean_length": 4.0,
        "other": 1.0,
        "kl": None,
    }
    assert format_line(line) == "step 3 | reward 0.500 | kl - | clip_ratio 0.250 | mean_length 4.000"


def test_plots_show_what_was_logged(run):
    for step in range(3):
        run.log(step, reward=step / 2, loss=1.0)
    figure = run.plot("reward", "loss")
    assert list(figure.data[0].x) == [0, 1, 2] and list(figure.data[0].y) == [0, 0.5, 1]
    assert [trace.name for trace in figure.data] == ["reward", "loss"]
    with pytest.raises(
        KeyError, match=r"run\.plot: no metric 'lost' was logged; there are \['loss', 'reward', 'step'\]"
    ):
        run.plot("lost")


def test_logging_leaves_its_inputs_alone(run):
    rollout, ref = make_rollout((3, 1)), torch.zeros(2, 3)
    before = rollout.sampler_logp.clone(), ref.clone()
    run.log(0, rollout, ref_logps=ref)
    assert torch.equal(rollout.sampler_logp, before[0]) and torch.equal(ref, before[1])


# --- the folder ---


def test_a_run_is_never_written_over(tmp_path, capsys):
    first = rl.Run(tmp_path / "run", config={"lr": 1})
    first.log(0, loss=1.0)
    before = {file.name: file.read_bytes() for file in first.path.iterdir()}
    second, third = rl.Run(tmp_path / "run", config={"lr": 2}), rl.Run(tmp_path / "run")
    assert [run.path.name for run in (first, second, third)] == ["run", "run-2", "run-3"]
    second.log(0, loss=2.0)
    assert {file.name: file.read_bytes() for file in first.path.iterdir()} == before
    assert "is not empty, writing to" in capsys.readouterr().out


def test_an_empty_run_is_not_written_over_either(tmp_path):
    """Nothing logged yet: two notebooks with one name."""
    assert rl.Run(tmp_path / "run").path != rl.Run(tmp_path / "run").path


def test_a_folder_that_holds_other_files_keeps_them(tmp_path):
    """A model's folder has a config.json of its own; so has a run that died before its first line."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    run = rl.Run(folder)
    run.log(0, loss=1.0)
    assert (folder / "config.json").read_text() == '{"model_type": "llama"}'


def test_the_config_holds_parameters_and_versions(tmp_path):
    run = rl.Run(tmp_path / "a" / "b", config={"lr": 0.1, "dtype": torch.float32})
    config = json.loads((run.path / "config.json").read_text())
    assert config["parameters"] == {"lr": 0.1, "dtype": "torch.float32"}
    assert (
        config["versions"]["torch"] == torch.__version__.split("+")[0]
        or config["versions"]["torch"] == torch.__version__
    )
    assert {"python", "transformers", "datasets", "numpy"} <= config["versions"].keys()


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2', "{", '{"step": 2, "text": "é'])
def test_a_torn_last_line_is_left_out(run, torn):
    """What a crash in the middle of a write leaves; cut also inside a character."""
    run.log(0, loss=1.0)
    run.log(1, loss=2.0)
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(torn.encode()[:-1] if torn.endswith("é") else torn.encode())
    assert run.metrics["step"].tolist() == [0, 1]


def test_a_broken_line_costs_that_line_only_whoever_reads(run, tmp_path):
    """The run, the reader of its folder and the model card read one file: they say the same of it."""
    run.log(0, reward=0.25)
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(b"broken\n[1, 2]\n")
    run.log(1, reward=0.75)
    assert run.metrics["step"].tolist() == [0, 1] and run.metrics["reward"].tolist() == [0.25, 0.75]
    assert rl.Run.open(run.path).metrics["step"].tolist() == [0, 1]
    assert "| reward | 0.75 |" in rl.model_card(rl.load_policy("tiny-add"), method="RLOO", run=run)


def test_lines_come_back_as_they_were_written(tmp_path):
    lines = [{"step": 0, "a": 0.1 + 0.2, "b": None, "é": 1}, {"step": 1, "a": 1e-300}]
    for line in lines:
        append_line(tmp_path / "lines.jsonl", line)
    assert read_lines(tmp_path / "lines.jsonl") == lines
    assert read_lines(tmp_path / "none.jsonl") == []


def test_nan_never_gets_into_a_file(tmp_path):
    with pytest.raises(ValueError):
        append_line(tmp_path / "lines.jsonl", {"a": float("nan")})


def test_the_same_seed_writes_the_same_metrics_bit_for_bit(tmp_path):
    """The promise of the design page, for one process: a whole loop twice."""
    from builders import tiny_policy

    def loop(path):
        world = rl.setup(seed=3)
        policy, optimizer = world.prepare(tiny_policy(), lambda params: torch.optim.AdamW(params, lr=1e-2))
        prompts = rl.PromptLoader([{"prompt": f"{i}="} for i in range(5)], policy, batch_size=2, seed=3)
        run = rl.Run(path)
        for step, batch in steps(run, 3, prompts):
            rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=5)
            scores = rl.score(rollout, lambda completions: [float(len(text)) for text in completions])
            advantages = rl.compute_loo_advantage(scores)
            update = rl.loss_step(policy, optimizer, rollout, advantages)
            run.log(step, rollout, scores, advantages, update)
        return (run.path / "metrics.jsonl").read_bytes()

    one, two = loop(tmp_path / "one"), loop(tmp_path / "two")
    assert one == two and one.count(b"\n") == 3
    lines = [json.loads(line) for line in one.splitlines()]
    assert any(line["grad_norm"] for line in lines) and len({line["reward"] for line in lines}) > 1


def test_the_table_of_v_star_belongs_to_the_run(tmp_path, policy):
    """Saved once, read instead of sampled again, and another one is refused on resume."""
    table = rl.ValueTable(torch.tensor([1, 2]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]), ("a", "b"))
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    first = rl.Run(tmp_path / "run")
    first.track(policy, optimizer, vstar=table)
    list(first.steps([None] * 2, 2, progress=False))
    again = rl.ValueTable.load(tmp_path / "run" / "vstar.pt")
    assert again.digest == table.digest != replace(table, beta1=0.1).digest
    unlock(tmp_path / "run")
    for other, message in ((replace(table, beta1=0.1), r"V\* differs .*vstar\.pt"), (again, None)):
        run = rl.Run(tmp_path / "run")
        run.track(policy, optimizer, vstar=other)
        if message:
            with pytest.raises(RuntimeError, match=message):
                run.resume()
        else:
            assert run.resume() == 2


def test_a_restarted_job_finds_the_run_that_has_a_checkpoint(tmp_path, policy):
    """A job killed before its first checkpoint leaves a folder; the next writes beside it, the third goes on there."""
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)

    def job(steps):
        run = rl.Run(tmp_path / "run")
        run.track(policy, optimizer)
        done = run.resume("auto")
        list(run.steps([None] * steps, steps, progress=False))
        unlock(run.path)
        return done, run.path.name

    killed = rl.Run(tmp_path / "run")
    killed.log(0, loss=1.0)
    unlock(killed.path)
    assert [job(2), job(4)] == [(0, "run-2"), (2, "run-2")]


def test_of_several_runs_of_a_name_the_last_one_goes_on(tmp_path, policy):
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    for steps, name in ((1, "run"), (2, "run-2")):
        run = rl.Run(tmp_path / "run")
        run.track(policy, optimizer)
        list(run.steps([None] * steps, steps, progress=False))
        assert run.path.name == name
        unlock(run.path)
    run = rl.Run(tmp_path / "run")
    run.track(policy, optimizer)
    assert (run.resume("auto"), run.path.name) == (2, "run-2")
