"""The rollouts of a run: what is in a table, by hand; that texts stay as they are; that the folder stays bounded."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from builders import SPECIAL, assert_identical, make_rollout, make_scores, tiny_policy

import rlkit as rl
from rlkit.record import printable
from rlkit.run.line_files import read_lines
from rlkit.run.lock import unlock
from rlkit.run.reader import RunReader
from rlkit.run.rollout_rows import StepRecords, rows_of, table_of
from rlkit.run.rollouts import MOST_PARTS, RolloutWriter, Thinning, cut_parts, kept_steps, part_of, spare, write_part

HOSTILE = {
    "script": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "tags": "<think>a & b</think>",
    "maths": "$x$ \\(y\\) $$z$$",
    "ansi": "\x1b[31mred\x1b[0m\x07",
    "NUL": "before\x00after",
    "right-to-left": "a\u202eb\u200f\u2066c",
    "long": "a" * 2**20,
    "lines": "a\r\nb\u2028c\x85d\n",
    "emoji": "👩‍👩‍👧‍👦 e\u0301",
    "empty": "",
}


@pytest.fixture
def run(tmp_path):
    return rl.Run(tmp_path / "run")


def lists(column):
    return [None if cell is None else list(cell) for cell in column]


# --- what is in a table ---


def test_a_table_by_hand(run):
    """Two rows of three slots; padding, masked slots and rows without a reward come out as they should."""
    chat = [{"role": "user", "content": "é?"}]
    rollout = make_rollout(
        (3, 1),
        prompt_lengths=[2, 3],
        group_id=[7, 7],
        row_id=[2**62, -5],
        truncated=[True, False],
        prompts=["1+1=", chat],
        completions=["ab", [{"role": "assistant", "content": "c"}]],
        sampler_logp=torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 9.0, 9.0]]),
        columns={"answer": ("2", None), "level": (1, 2), "tags": (["x"], {"y": 1})},
    )
    rollout = rl.Rollout(**vars(rollout) | {"pieces": {token: f"<{token}>" for token in range(100)}})
    scores = rl.Scores(
        parts=torch.tensor([[1.0, math.nan], [math.nan, math.nan]]),
        names=("right", "short"),
        weights=torch.ones(2),
        reward=torch.tensor([1.0, math.nan]),
        group_id=rollout.group_id,
        extra={"parsed": ("2", None), "answer": ("mine", "too")},
    )
    update = rl.Update(
        loss=0.0,
        metrics={},
        logp=torch.full((2, 3), -1.5),
        entropy=torch.full((2, 3), 0.25),
        loss_mask=torch.tensor([[True, False, True], [False, False, False]]),
        old_logp=torch.full((2, 3), -1.75),
        ratio=torch.tensor([1.5, 1.0]),
        clipped=torch.tensor([1, 0], dtype=torch.int8),
        epsilon=0.2,
        epsilon_high=0.3,
    )
    ref_logps = torch.tensor([[-1.5, -1.5, -1.5], [-5.0, math.nan, math.inf]])
    run.log(4, rollout, scores, torch.tensor([0.5, math.nan]), update, ref_logps=ref_logps)
    table = run.rollouts(4)
    one, two = rollout.completion_ids[0].tolist(), rollout.completion_ids[1, :1].tolist()
    assert table["step"].tolist() == [4, 4] and table["row"].tolist() == [0, 1]
    assert table["group_id"].tolist() == [7, 7] and table["row_id"].tolist() == [2**62, -5]
    assert table["prompt"].tolist() == ["1+1=", "é?"] and table["completion"].tolist() == ["ab", "c"]
    assert table["prompt_messages"].isna().tolist() == [True, False]
    assert json.loads(table["prompt_messages"][1]) == chat
    assert json.loads(table["completion_messages"][1]) == [{"role": "assistant", "content": "c"}]
    assert table["truncated"].tolist() == [True, False] and table["length"].tolist() == [3, 1]
    assert table["prompt_length"].tolist() == [2, 3]
    assert lists(table["prompt_token_ids"]) == [rollout.prompt_ids[0, 1:].tolist(), rollout.prompt_ids[1].tolist()]
    assert lists(table["token_ids"]) == [one, two]
    assert lists(table["tokens"]) == [[f"<{token}>" for token in row] for row in (one, two)]
    assert lists(table["sampler_logp"]) == [[-1, -2, -3], [-4]]
    assert lists(table["logp"]) == [[-1.5] * 3, [-1.5]] and lists(table["old_logp"]) == [[-1.75] * 3, [-1.75]]
    assert lists(table["ref_logp"]) == [[-1.5] * 3, [-5]] and lists(table["entropy"]) == [[0.25] * 3, [0.25]]
    assert lists(table["new_logp"]) == [None, None]
    assert lists(table["loss_mask"]) == [[True, False, True], [False]]
    np.testing.assert_array_equal(table["reward"], [1, math.nan])
    np.testing.assert_array_equal(table["rewards/right"], [1, math.nan])
    np.testing.assert_array_equal(table["rewards/short"], [math.nan, math.nan])
    np.testing.assert_array_equal(table["advantage"], [0.5, math.nan])
    assert table["kl"].tolist() == [-1.5, 1.0]  # (-1 + 1.5) + (-2 + 1.5) + (-3 + 1.5), and -4 + 5
    assert table["ratio"].tolist() == [1.5, 1] and table["clipped"].tolist() == [1, 0]
    assert table["epsilon"].tolist() == [0.2, 0.2] and table["epsilon_high"].tolist() == [0.3, 0.3]
    assert table["answer"].tolist()[0] == "2" and table["answer"].isna().tolist() == [False, True]
    assert table["extra:answer"].tolist() == ["mine", "too"] and table["parsed"].tolist()[0] == "2"
    assert table["level"].tolist() == [1, 2]
    assert [json.loads(cell) for cell in table["tags"]] == [["x"], {"y": 1}]


def test_the_kl_of_a_row_is_that_of_compute_kl(run):
    rollout = make_rollout((3, 1, 2, 3), sampler_logp=-torch.rand(4, 3))
    ref_logps = -torch.rand(4, 3)
    run.log(0, rollout, ref_logps=ref_logps)
    torch.testing.assert_close(torch.tensor(run.rollouts(0)["kl"]), rl.compute_kl(rollout, ref_logps))


def test_what_a_step_does_not_have_is_null(run):
    """A rollout alone; and an update of a part of its rows, which would stand beside the wrong completions."""
    run.log(0, make_rollout())
    update = rl.Update(0.0, {}, *[torch.zeros(2, 3)] * 2, torch.ones(2, 3, dtype=torch.bool), ratio=torch.ones(2))
    run.log(1, make_rollout(), update=update)
    for step in (0, 1):
        table = run.rollouts(step)
        assert len(table) == 4
        for name in ("logp", "old_logp", "ref_logp", "entropy", "loss_mask", "reward", "advantage", "kl", "ratio"):
            assert table[name].isna().all(), name
    run.log(2, loss=1.0)
    assert run.reader.rollout_steps == [0, 1]


def test_a_share_without_rows_changes_nothing():
    """A process may have none, when there are fewer prompts than processes."""
    rollout, scores = make_rollout(), make_scores([1, 0, 1, 0], [0, 0, 1, 1])
    rows = rows_of(rollout, StepRecords(rollout, scores, torch.ones(4)))
    none = rows_of(rollout.select([]), StepRecords(None, make_scores([]), torch.ones(0)))
    assert table_of(3, [rows, none]).equals(table_of(3, [none, rows])) and table_of(3, [rows]).num_rows == 4
    assert table_of(3, [none]).num_rows == 0


@pytest.mark.parametrize(
    ("cells", "want"),
    [
        ((1, 2, None, 4), [1, 2, None, 4]),
        ((1.5, 2, None, math.inf), [1.5, 2, None, math.inf]),
        ((True, False, None, True), [True, False, None, True]),
        (("a", None, "", "b\x00"), ["a", None, "", "b\x00"]),
        ((np.float32(0.5), np.int64(2), 1, 0.25), [0.5, 2, 1, 0.25]),
        ((2**70, 1, 2, 3), [str(2**70), "1", "2", "3"]),
        ((1, "a", None, True), ["1", '"a"', None, "true"]),
        (([1, 2], {"a": "é"}, (), None), ["[1, 2]", '{"a": "é"}', "[]", None]),
        ((None,) * 4, [None] * 4),
        (({(1, 2): 3}, b"\x41", 1j, torch.float32), ["{(1, 2): 3}", "\"b'A'\"", '"1j"', '"torch.float32"']),
    ],
)
def test_columns_of_the_user_come_back(run, cells, want):
    run.log(0, make_rollout(columns={"mine": cells, "reward": cells}))
    for name in ("mine", "column:reward"):
        found = run.rollouts(0)[name]
        assert [None if missing else cell for cell, missing in zip(found, found.isna(), strict=True)] == want


def test_token_values_of_a_real_step_are_those_of_the_records(run, policy):
    world = rl.setup(seed=0)
    policy, optimizer = world.prepare(policy, lambda params: torch.optim.SGD(params, lr=0.5))
    prompts = rl.PromptLoader([{"prompt": f"{i}="} for i in range(4)], policy, batch_size=4, seed=0)
    _, batch = next(iter(run.steps(prompts, 1, progress=False)))
    rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=6)
    scores = rl.score(rollout, lambda completions: [float(len(text)) for text in completions])
    advantages = rl.compute_loo_advantage(scores)
    first = rl.loss_step(policy, optimizer, rollout, advantages)
    update = rl.loss_step(policy, optimizer, rollout, advantages, old_logps=first.logp, micro_batch_size=3)
    new_logps = rl.compute_logps(policy, rollout)
    run.log(0, rollout, scores, advantages, update, new_logps=new_logps)
    table = run.rollouts(0)
    want = {"sampler_logp": rollout.sampler_logp, "logp": update.logp, "old_logp": first.logp, "new_logp": new_logps}
    for name, values in (want | {"entropy": update.entropy}).items():
        for row in range(16):
            kept = values[row][rollout.completion_mask[row]].numpy()
            np.testing.assert_array_equal(table[name][row], kept, err_msg=f"{name} of row {row}")
    # The text of the tokens is the completion, but for the token that ends it.
    for tokens, text, truncated in zip(table["tokens"], table["completion"], table["truncated"], strict=True):
        assert "".join(token for token in tokens if token not in SPECIAL) == text
        assert (tokens[-1] == "<eos>") != truncated
    # The ratio of each row is that of its sums, and the clipped rows are TRL's.
    ratio = np.exp([np.sum(now - before) for now, before in zip(table["logp"], table["old_logp"], strict=True)])
    np.testing.assert_allclose(table["ratio"], ratio, rtol=1e-5)
    low = (ratio < 0.8) & (table["advantage"] < 0)
    high = (ratio > 1.2) & (table["advantage"] > 0)
    assert table["clipped"].tolist() == (high.astype(int) - low.astype(int)).tolist() and (low.any() or high.any())


def test_logging_with_rollouts_changes_no_record_and_no_metric(tmp_path):
    rollout, scores = make_rollout(sampler_logp=-torch.rand(4, 3)), make_scores([1, 0, 0.5, None], [0, 0, 1, 1])
    ref_logps, advantages = -torch.rand(4, 3), torch.ones(4)
    before = rollout.select(range(4)), ref_logps.clone(), advantages.clone()
    lines = []
    for every in (1, None):
        run = rl.Run(tmp_path / str(every), rollouts_every=every)
        run.log(0, rollout, scores, advantages, ref_logps=ref_logps, new_logps=ref_logps)
        lines.append((run.path / "metrics.jsonl").read_bytes())
        assert (run.path / "rollouts").exists() == (every is not None)
    assert lines[0] == lines[1]
    for name, value in vars(rollout).items():
        if isinstance(value, torch.Tensor):
            assert_identical(value, getattr(before[0], name))
    assert_identical(ref_logps, before[1])
    assert_identical(advantages, before[2])


# --- texts ---


def test_hostile_texts_come_back_byte_for_byte(run):
    texts = list(HOSTILE.values())
    rows = len(texts)
    columns = {"answer": tuple(texts), "nested": tuple([text] for text in texts)}
    rollout = make_rollout([1] * rows, prompts=texts, completions=texts, columns=columns)
    pieces = {int(token): text for token, text in zip(rollout.completion_ids[:, 0], texts, strict=True)}
    run.log(0, rl.Rollout(**vars(rollout) | {"pieces": pieces}))
    table = run.rollouts(0)
    for name in ("prompt", "completion", "answer"):
        assert table[name].tolist() == texts
    assert [json.loads(cell)[0] for cell in table["nested"]] == texts
    want = [[pieces[int(token)]] for token in rollout.completion_ids[:, 0]]
    assert lists(table["tokens"]) == want


@pytest.mark.parametrize(
    ("text", "want"),
    [("a\ud800b", "a\ufffdb"), ("\udcff", "\ufffd"), ("\ud83d\ude00", "😀"), ("\ude00\ud83d", "\ufffd\ufffd")],
)
def test_halves_of_surrogate_pairs_are_replaced_everywhere(run, text, want):
    """UTF-8 cannot hold them; nothing else of the table changes."""
    assert printable(text) == want
    columns = {"mine": (text, "x"), "nested": ([text], "x"), text: ("x", "y")}
    rollout = make_rollout((1, 1), prompts=[text, "é\x00"], completions=[text, "é\x00"], columns=columns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.log(
            0, rl.Rollout(**vars(rollout) | {"pieces": dict.fromkeys(rollout.completion_ids.flatten().tolist(), text)})
        )
    table = run.rollouts(0)
    assert table["prompt"].tolist() == table["completion"].tolist() == [want, "é\x00"]
    assert table["mine"].tolist() == [want, "x"] and table[want].tolist() == ["x", "y"]
    assert json.loads(table["nested"][0]) == [want] and lists(table["tokens"]) == [[want], [want]]


# --- bounded ---


def tables(run, steps, limit=2**30):
    """Steps written one after the other, with the sizes of their files."""
    run.mkdir(parents=True, exist_ok=True)
    thinning = Thinning(run, limit)
    for step in steps:
        write_part(run, step, table_of(step, [rows_of(make_rollout(seed=step), StepRecords())]))
        thinning.added(step)
    return {step: part_of(run, step).stat().st_size for step in kept_steps(run)}


def test_the_folder_stays_within_its_limit_with_the_first_the_last_and_evenly_spread_steps(tmp_path):
    one = max(tables(tmp_path / "one", range(3)).values())
    limit = 10 * one + one // 2
    for last in (15, 40, 99):
        sizes = tables(tmp_path / f"to{last}", range(last + 1), limit)
        steps = list(sizes)
        gaps = np.diff(steps)
        assert sum(sizes.values()) <= limit and steps[0] == 0 and steps[-1] == last
        assert len(steps) >= 9  # as many as there is room for
        assert max(gaps) <= 2.5 * (last / (len(steps) - 1))  # an even spread would have gaps of last / (n - 1)


def test_a_run_that_goes_on_counts_the_files_that_are_there(tmp_path):
    one = max(tables(tmp_path, range(8)).values())
    assert len(tables(tmp_path, range(8, 12), 5 * one)) <= 5


def test_the_last_two_steps_stay_however_small_the_limit(tmp_path):
    assert list(tables(tmp_path, range(5), 0)) == [0, 4]


def test_a_step_is_dropped_from_the_densest_place():
    brute = [0, 3, 5, 9, 14, 15, 20]
    gaps = {step: brute[i + 2] - brute[i] for i, step in enumerate(brute[1:-1])}
    assert spare(brute) == min(gaps, key=lambda step: (gaps[step], step))


def test_the_number_of_files_is_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr("rlkit.run.rollouts.MOST_PARTS", 6)
    assert MOST_PARTS > 6 and len(tables(tmp_path, range(20))) == 6


def test_every_so_many_steps_are_kept(tmp_path):
    run = rl.Run(tmp_path / "run", rollouts_every=3)
    for step in range(8):
        run.log(step, make_rollout())
    assert run.reader.rollout_steps == [0, 3, 6]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"rollouts_every": 0}, "rollouts_every must be at least 1"), ({"rollouts_limit": -1}, "cannot be negative")],
)
def test_bad_settings_are_named(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        rl.Run(tmp_path / "run", **settings)


# --- faults ---


def test_a_rollout_that_cannot_be_written_warns_once_and_the_training_goes_on(run):
    (run.path / "rollouts").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match=r"the rollout of step 0 was not written, the training goes on\. \w+Error"):
        run.log(0, make_rollout())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.log(1, make_rollout())
    assert [line["step"] for line in read_lines(run.path / "metrics.jsonl")] == [0, 1]
    (run.path / "rollouts").unlink()
    run.log(2, make_rollout())
    assert run.reader.rollout_steps == [2]


def test_a_process_that_cannot_send_its_rows_says_so_and_keeps_nobody_waiting(tmp_path, monkeypatch):
    """Of several processes one has a column that cannot be pickled: all of them still take part in the exchange."""
    sent = []
    monkeypatch.setattr("rlkit.distributed.collectives.is_many", lambda: True)
    monkeypatch.setattr("rlkit.distributed.collectives.rank", lambda: 0)
    monkeypatch.setattr("rlkit.distributed.collectives.to_main", lambda value: sent.append(value) or [value])
    writer = RolloutWriter(1, 2**20)
    rollout = make_rollout(columns={"mine": (lambda: 0,) * 4})
    with pytest.warns(UserWarning, match="was not written, the training goes on.*pickle"):
        assert writer.write(tmp_path, 0, StepRecords(rollout)) is None
    assert len(sent) == 1 and isinstance(sent[0], str)
    assert writer.write(tmp_path, 1, StepRecords(make_rollout())).num_rows == 4
    assert kept_steps(tmp_path) == [1]


def test_a_full_disk_leaves_nothing_half_written(run, monkeypatch):
    import pyarrow.parquet as pq

    def full(table, file, **options):
        file.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", full)
        with pytest.warns(UserWarning, match="No space left on device"):
            run.log(0, make_rollout())
    assert list((run.path / "rollouts").iterdir()) == []


def test_what_a_killed_process_left_is_no_rollout(run):
    run.log(0, make_rollout())
    partial = part_of(run.path, 1).with_name("step-00000001.parquet.partial")
    partial.write_bytes(b"PAR1 torn")
    (run.path / "rollouts" / "step-notes.parquet").touch()
    assert RunReader(run.path).rollout_steps == [0]
    cut_parts(run.path, 1)
    assert not partial.exists() and kept_steps(run.path) == [0]


def test_a_resumed_run_drops_the_rollouts_after_its_checkpoint(tmp_path):
    """As it cuts the lines: the repeated steps are the ones that count."""

    def train(max_steps, resume):
        world = rl.setup(seed=3)
        policy, optimizer = world.prepare(tiny_policy(), lambda params: torch.optim.AdamW(params, lr=1e-2))
        prompts = rl.PromptLoader([{"prompt": f"{i}="} for i in range(5)], policy, batch_size=2, seed=3)
        run = rl.Run(tmp_path / "run")
        run.track(policy, optimizer, prompts=prompts)
        if resume:
            assert run.resume() == 2
            assert kept_steps(run.path) == [0, 1]
        for step, batch in run.steps(prompts, max_steps, progress=False):
            rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=5)
            scores = rl.score(rollout, lambda completions: [float(len(text)) for text in completions])
            advantages = rl.compute_loo_advantage(scores)
            update = rl.loss_step(policy, optimizer, rollout, advantages)
            run.log(step, rollout, scores, advantages, update)
        return run

    run = train(2, resume=False)
    run.log(2, make_rollout())  # steps after the checkpoint, of a process that died
    run.log(3, make_rollout())
    assert kept_steps(run.path) == [0, 1, 2, 3]
    first = run.rollouts(0)["completion"].tolist()
    unlock(run.path)
    again = train(3, resume=True)
    assert again.path == run.path and kept_steps(run.path) == [0, 1, 2]
    assert again.rollouts(0)["completion"].tolist() == first and len(again.rollouts(2)) == 4
