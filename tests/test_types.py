"""The records: frozen, documented shapes, a table for people, a file for later."""

import dataclasses
import math
import subprocess
import sys
import textwrap

import jaxtyping
import pandas as pd
import pytest
import torch
from builders import assert_identical, make_rollout, make_scores
from tolerances import EXACT
from waiting import LONG

import rlkit as rl
from rlkit.evaluation.compare import Evaluation
from rlkit.metrics import score_metrics
from rlkit.types import text_of

NAN = math.nan
SCRIPT = "<script>alert('x')</script>"


def batch():
    return rl.PromptBatch(
        rows=({"prompt": SCRIPT, "answer": [1, 2]}, {"prompt": [{"role": "user", "content": SCRIPT}], "answer": None}),
        token_ids=((5, 6), (7,)),
        row_id=torch.tensor([2**62, 3]),
        group_id=torch.tensor([0, 1]),
    )


def rollout():
    return make_rollout(
        (3, 1, 2, 3),
        prompts=[SCRIPT] * 4,
        completions=[SCRIPT, [{"role": "assistant", "content": SCRIPT}], "", "é\n"],
        columns={"answer": ([1], [2], None, {"a": 0.5}), "n": (1, 2.5, True, "x")},
        truncated=[True, False, False, True],
        sampler_logp=torch.tensor([[-1.0, -2.0, -0.5]] * 4),
        sampling=rl.SamplingParams(max_completion_length=3, temperature=0.7, min_p=0.1, stop_strings=("\n",)),
    )


def scores():
    return rl.Scores(
        parts=torch.tensor([[1.0, NAN], [NAN, NAN], [0.5, -1.0], [0.0, 2.0]]),
        names=("right", SCRIPT),
        weights=torch.tensor([1.0, 0.5]),
        reward=torch.tensor([1.0, NAN, 0.0, 1.0]),
        group_id=torch.tensor([0, 0, 1, 1]),
        extra={"note": (SCRIPT, None, 1, 2.5)},
        metrics={"judged": 3.0},
    )


def update():
    return rl.Update(
        loss=NAN,
        metrics={"entropy": 0.5, SCRIPT: NAN},
        logp=torch.tensor([[-0.1, 0.0]]),
        entropy=torch.tensor([[0.3, 0.0]]),
        loss_mask=torch.tensor([[True, False]]),
        skipped=SCRIPT,
        ratio=torch.tensor([1.5]),
        clipped=torch.tensor([1], dtype=torch.int8),
        epsilon=0.2,
    )


def value_table():
    return rl.ValueTable(
        row_id=torch.tensor([1, 2**62]),
        rewards=torch.tensor([[1.0, NAN], [0.0, 0.0]]),
        prompts=(SCRIPT, "b"),
        beta1=0.25,
    )


def evaluation():
    return Evaluation(rollout=rollout(), scores=scores(), metrics=score_metrics(scores()))


RECORDS = [batch, rollout, scores, update, value_table, evaluation]
every_record = pytest.mark.parametrize("make", RECORDS, ids=[make.__name__ for make in RECORDS])


def as_plain(record):
    """Nested dataclasses as dicts, for a comparison of every field bit for bit."""
    if dataclasses.is_dataclass(record):
        return {item.name: as_plain(getattr(record, item.name)) for item in dataclasses.fields(record)}
    return record


# --- what all records share ---


@every_record
def test_a_saved_record_comes_back_bit_for_bit(make, tmp_path):
    record = make()
    record.save(tmp_path / "record.pt")
    again = type(record).load(tmp_path / "record.pt")
    assert type(again) is type(record)
    assert_identical(as_plain(again), as_plain(record))
    assert list(tmp_path.iterdir()) == [tmp_path / "record.pt"]
    assert repr(again) == repr(record)
    pd.testing.assert_frame_equal(again.to_pandas(), record.to_pandas())


@pytest.mark.integration
def test_a_saved_rollout_is_read_without_a_model(tmp_path):
    """In a new process that never imports transformers."""
    rollout().save(tmp_path / "rollout.pt")
    code = f"""
        import sys, rlkit as rl
        rollout = rl.Rollout.load({str(tmp_path / "rollout.pt")!r})
        assert len(rollout) == 4 and rollout.sampling.temperature == 0.7 and rollout.texts[1].startswith("<script>")
        assert "transformers" not in sys.modules
        print(rollout.lengths.tolist())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=LONG)
    assert done.stdout.strip() == "[3, 1, 2, 3]", done.stderr


@every_record
def test_records_are_frozen(make):
    record = make()
    for item in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, item.name, None)


@every_record
def test_the_html_of_a_record_escapes_what_a_model_or_a_dataset_says(make):
    html = make()._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html or make is update


@every_record
def test_a_record_shows_itself_in_a_line_and_a_table(make):
    record = make()
    assert type(record).__name__ in repr(record) and "\n" not in repr(record)
    frame = record.to_pandas()
    assert isinstance(frame, pd.DataFrame) and len(frame)


def test_loading_another_kind_of_record_is_refused(tmp_path):
    update().save(tmp_path / "update.pt")
    with pytest.raises(ValueError, match=r"Rollout\.load: .*update\.pt holds a Update"):
        rl.Rollout.load(tmp_path / "update.pt")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"Rollout\.load: .*list\.pt holds a list"):
        rl.Rollout.load(tmp_path / "list.pt")


NO_RECORDS = {
    "nothing of a record": {},
    "no format": {"format": None},
    "a format in words": {"format": "1"},
    "no fields": {"fields": None},
    "fields in a list": {"fields": [1]},
    "none of the fields": {"fields": {}},
    "a kind that is a tensor": {"kind": torch.zeros(3)},
    "a kind that repaints the terminal": {"kind": "\x1b[2J" * 999},
    **{f"{name} is a number": {"fields": {name: 5}} for name in ("completion_ids", "columns", "sampling", "prompts")},
    "a field that there is not": {"fields": {"more": 1}},
    "a field without a name": {"fields": {1: 1}},
}


@pytest.mark.parametrize("changes", NO_RECORDS.values(), ids=NO_RECORDS.keys())
def test_a_file_that_holds_no_whole_record_is_named(changes, tmp_path):
    make_rollout((2,)).save(tmp_path / "rollout.pt")
    state = torch.load(tmp_path / "rollout.pt", weights_only=True)
    if changes.get("fields"):
        changes = {"fields": state["fields"] | changes["fields"] if isinstance(changes["fields"], dict) else [1]}
    torch.save(state | changes if changes else {}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match=r"^Rollout\.load: .*bad\.pt ") as caught:
        rl.Rollout.load(tmp_path / "bad.pt")
    assert len(str(caught.value)) < 600 and str(caught.value).isprintable()


def test_a_zip_of_another_make_is_named(tmp_path):
    """Flags of a zip's table of contents that make `zipfile` raise what is no sign of damage elsewhere."""
    make_rollout((2,)).save(tmp_path / "rollout.pt")
    whole = (tmp_path / "rollout.pt").read_bytes()
    entry = whole.find(b"PK\1\2")
    for place, byte in ((6, 99), (8, 99), (10, 99), (28, 255)):  # version, encryption, compression, length of its name
        damaged = bytearray(whole)
        damaged[entry + place] = byte
        (tmp_path / "bad.pt").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"Rollout\.load: .*bad\.pt was not written by"):
            rl.Rollout.load(tmp_path / "bad.pt")


def test_a_column_that_is_not_plain_data_is_refused_and_no_file_is_left(tmp_path):
    record = make_rollout((1,), columns={"answer": (object(),)})
    with pytest.raises(TypeError, match=r"Rollout\.save: expected plain data .* turn other objects into text"):
        record.save(tmp_path / "rollout.pt")
    assert list(tmp_path.iterdir()) == []


def test_saving_again_replaces_the_whole_file(tmp_path):
    rollout().save(tmp_path / "r.pt")
    make_rollout((1,)).save(tmp_path / "r.pt")
    assert len(rl.Rollout.load(tmp_path / "r.pt")) == 1


# --- rollouts ---


def test_lengths_come_from_the_mask():
    """Not from the ids."""
    assert make_rollout((3, 1, 2)).lengths.tolist() == [3, 1, 2]


@pytest.mark.parametrize("kind", ["list", "tensor", "mask", "slice"])
def test_selecting_rows_takes_everything_of_a_row_along(kind):
    """What belongs to a row stays with it."""
    whole = rollout()
    chosen = {
        "list": [3, 1],
        "tensor": torch.tensor([3, 1]),
        "mask": whole.truncated,
        "slice": slice(1, None, 2),
    }[kind]
    order = {"list": [3, 1], "tensor": [3, 1], "mask": [0, 3], "slice": [1, 3]}[kind]
    part = whole.select(chosen)
    for item in dataclasses.fields(whole):
        value, got = getattr(whole, item.name), getattr(part, item.name)
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(got, value[order], **EXACT)
        elif item.name == "columns":
            assert got == {name: tuple(cells[i] for i in order) for name, cells in value.items()}
        elif item.name in ("prompts", "completions"):
            assert got == tuple(value[i] for i in order)
        else:
            assert got == value


def test_selecting_nothing_gives_an_empty_rollout():
    whole = rollout()
    for nothing in (slice(0, 0), [], torch.zeros(0, dtype=torch.int64)):
        part = whole.select(nothing)
        assert len(part) == 0 and part.columns == {"answer": (), "n": ()} and part.completion_ids.shape == (0, 3)


def test_selecting_does_not_change_the_rollout():
    whole = rollout()
    before = as_plain(rollout())
    part = whole.select([2, 0])
    part.completion_ids.zero_()
    part.sampler_logp.zero_()
    assert_identical(as_plain(whole), before)


def test_texts_are_plain_whatever_the_form():
    assert rollout().texts == [SCRIPT, SCRIPT, "", "é\n"]


TEXTS = [
    ("2+2?", "2+2?"),
    ([{"role": "user", "content": "2+2?"}], "2+2?"),
    ([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "a\nb"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
    (
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}],
            }
        ],
        "ab",
    ),
    ([], ""),
]


@pytest.mark.parametrize(("value", "want"), TEXTS)
def test_the_text_of_a_conversation(value, want):
    """Content as text, as parts, or missing."""
    assert text_of(value) == want


def test_the_table_of_a_rollout():
    frame = rollout().to_pandas()
    assert frame["length"].tolist() == [3, 1, 2, 3] and frame["truncated"].tolist() == [True, False, False, True]
    assert frame["sampler_logp"].tolist() == pytest.approx([-3.5, -1, -3, -3.5])
    assert frame["group_id"].tolist() == [0, 0, 1, 1] and frame["answer"].tolist() == [[1], [2], None, {"a": 0.5}]


def test_a_dataset_column_does_not_hide_what_was_sampled():
    """Prompt/completion name clash: a dataset with a gold `completion` and a `length`."""
    record = make_rollout((3, 1), completions=["a", "b"], columns={"completion": ("gold", "gold"), "length": (0, 0)})
    frame = record.to_pandas()
    assert frame["completion"].tolist() == ["a", "b"] and frame["length"].tolist() == [3, 1]


def test_the_table_of_scores():
    frame = scores().to_pandas()
    assert frame["rewards/right"].tolist()[:1] == [1.0] and math.isnan(frame["rewards/right"][1])
    assert scores().scorable.tolist() == [True, False, True, True]
    assert "3 completions" not in repr(scores()) and "1 without a reward" in repr(scores())


def test_headlines_of_empty_and_unscored_records():
    assert "0 completions of 0 prompts" in repr(rollout().select(slice(0, 0)))
    assert "nan, 2 without a reward" in repr(make_scores([None, None]))


# --- shapes ---

BAD_ROLLOUTS = {
    "too few group ids": ({"group_id": torch.tensor([0])}, r"Rollout: expected 2 entries in group_id, got 1"),
    "too few prompts": ({"prompts": ("a",)}, r"Rollout: expected 2 entries in prompts, got 1"),
    "short column": ({"columns": {"answer": (1,)}}, r"Rollout: expected 2 entries in columns\['answer'\], got 1"),
    "mask of another width": (
        {"completion_mask": torch.ones(2, 2, dtype=torch.bool)},
        r"Rollout: completion_ids, completion_mask and sampler_logp must have one \(B,T\) shape",
    ),
    "logp of another width": (
        {"sampler_logp": torch.ones(2, 1)},
        r"Rollout: completion_ids, completion_mask and sampler_logp must have one",
    ),
    "prompt mask": (
        {"prompt_mask": torch.ones(2, 1, dtype=torch.bool)},
        r"Rollout: prompt_ids and prompt_mask must have one \(B,L\) shape",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD_ROLLOUTS.values(), ids=BAD_ROLLOUTS.keys())
def test_a_rollout_whose_parts_do_not_fit_is_refused(unchecked, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make_rollout((3, 1)), **changes)


def test_a_rollout_whose_parts_do_not_fit_is_refused_by_the_shape_check_too():
    with pytest.raises(jaxtyping.TypeCheckError):
        dataclasses.replace(make_rollout((3, 1)), sampler_logp=torch.ones(2, 1))


def test_scores_and_batches_check_their_lengths(unchecked):
    with pytest.raises(ValueError, match="Scores: expected 2 entries in weights, got 1"):
        dataclasses.replace(scores(), weights=torch.ones(1))
    with pytest.raises(ValueError, match=r"Scores: expected 4 entries in extra.*note.*, got 1"):
        dataclasses.replace(scores(), extra={"note": (1,)})
    with pytest.raises(ValueError, match="PromptBatch: expected 2 entries in token_ids, got 1"):
        dataclasses.replace(batch(), token_ids=((1,),))


# --- records that belong together ---


def paired(**changes):
    """A rollout with its scores, advantages, update and log-probabilities."""
    rollout = make_rollout((3, 1, 2, 3))
    update = rl.Update(0.0, {}, torch.zeros(4, 3), torch.zeros(4, 3), rollout.completion_mask)
    records = {"rollout": rollout, "scores": make_scores([1, 0, 0, 1], [0, 0, 1, 1]), "advantages": torch.zeros(4)}
    return records | {"update": update, "ref_logps": torch.zeros(4, 3), "new_logps": torch.zeros(4, 3)} | changes


def update_of(mask):
    return rl.Update(0.0, {}, torch.zeros(mask.shape), torch.zeros(mask.shape), mask)


WITHOUT = {"ref_logps": None, "new_logps": None}  # what a log without a rollout cannot have
OTHERS = {
    "scores of more rows": (
        {"scores": make_scores([1] * 6, [0, 0, 1, 1, 2, 2])},
        r"the scores \(6 rows\) are not those",
    ),
    "scores of other groups": ({"scores": make_scores([1] * 4, [4, 4, 5, 5])}, "their group ids differ"),
    "scores in another order": ({"scores": make_scores([1] * 4, [1, 1, 0, 0])}, "their group ids differ"),
    "advantages": ({"advantages": torch.zeros(6)}, r"one advantage per completion \(4,\), got \(6,\): were they"),
    "advantages of scores": ({"rollout": None, "advantages": torch.zeros(6)}, r"one advantage per completion \(4,\)"),
    "reference": ({"ref_logps": torch.zeros(4, 5)}, r"ref_logps must have .* shape \(4, 3\), got \(4, 5\)"),
    "new": ({"new_logps": torch.zeros(6, 3)}, r"new_logps must have .* shape \(4, 3\), got \(6, 3\)"),
    "update of more rows": ({"update": update_of(torch.ones(6, 3).bool())}, r"the update, .*\(6, 3\), is of another"),
    "update of another width": ({"update": update_of(torch.ones(2, 4).bool())}, r"the update, .*\(2, 4\), is of"),
    "update of a part of another": (
        {"update": update_of(torch.ones(3, 3).bool())},
        r"the update, .*\(3, 3\), is of another",
    ),
    "update of more rows than scores": (
        {"rollout": None, "update": update_of(torch.ones(6, 3).bool())},
        "the update is of 6 rows, the scores or advantages are of 4",
    ),
    "update of more rows than advantages": (
        {"rollout": None, "scores": None, "update": update_of(torch.ones(6, 3).bool())},
        "the update is of 6 rows, the scores or advantages are of 4",
    ),
    "reference of no rollout": ({"rollout": None, "ref_logps": torch.zeros(4, 3)}, "ref_logps needs the rollout"),
    "new of no rollout": ({"rollout": None, "new_logps": torch.zeros(4, 3)}, "new_logps needs the rollout"),
    "update of other lengths": ({"update": update_of(torch.ones(4, 3).bool())}, r"the update, .*\(4, 3\), is of"),
}


@pytest.mark.parametrize(("changes", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_a_run_does_not_pair_records_of_different_rollouts(unchecked, tmp_path, changes, message):
    """100.0 was logged as the reward of a rollout with other scores. Nothing is written, the step stays open."""
    run = rl.Run(tmp_path / "run")
    with pytest.raises(ValueError, match=rf"run\.log: .*{message}"):
        run.log(0, **paired(**((WITHOUT if "rollout" in changes else {}) | changes)))
    assert (run.path / "metrics.jsonl").read_text() == ""
    run.log(0, **paired())


def test_an_update_on_a_part_of_the_rollout_and_records_that_are_missing_are_welcome(tmp_path):
    run = rl.Run(tmp_path / "run")
    whole = paired()
    run.log(0, **paired(update=update_of(whole["rollout"].completion_mask[:2])))
    run.log(1, **paired(update=update_of(torch.zeros(4, 3).bool())))  # everything masked
    for step, name in enumerate(whole, start=2):
        run.log(step, **paired(**({name: None} | (WITHOUT if name == "rollout" else {}))))


def test_functions_of_a_rollout_and_its_scores_refuse_those_of_another():
    rollout, other = make_rollout((3, 1, 2, 3)), make_scores([1, 0, 0, 1], [4, 4, 5, 5])
    calls = {
        "drop_uninformative_groups": lambda: rl.drop_uninformative_groups(rollout, other),
        "accumulate": lambda: rl.accumulate(lambda batch: (rollout, other), batch(), groups=1),
        "Evaluation": lambda: rl.Evaluation(rollout, other, {}),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name}: the scores \(4 rows\) are not those of the rollout"):
            call()


def test_shares_of_different_scores_are_not_joined():
    """The second share's column would get the first one's name."""
    one = make_scores([1, 0])
    for other in ({"names": ("other",)}, {"weights": torch.tensor([2.0])}):
        with pytest.raises(ValueError, match=r"Scores.join: expected shares of one score, got .*\['r'\]"):
            rl.Scores.join([one, dataclasses.replace(one, **other)])


def test_logged_numbers_are_averaged_by_rows_and_only_where_they_were_logged():
    """By hand: 3 rows logged 1, 1 row logged 5, 4 rows logged nothing: (3 * 1 + 1 * 5) / 4 = 2."""
    shares = [
        dataclasses.replace(make_scores([0] * 3), metrics={"seconds": 1.0, "first": 7.0}),
        dataclasses.replace(make_scores([0]), metrics={"seconds": 5.0}),
        make_scores([0] * 4),
        dataclasses.replace(make_scores([]), metrics={"seconds": 9.0, "empty": 4.0}),  # a process without rows
    ]
    assert rl.Scores.join(shares).metrics == {"seconds": 2.0, "first": 7.0, "empty": 0.0}


# --- sampling settings ---

BAD_SETTINGS = {
    "temperature 0": (
        {"temperature": 0.0},
        r"temperature must be a finite number > 0 .*got 0\.0\. Temperature 0 \(greedy\).*evaluate\(\.\.\., "
        r"greedy=True\)",
    ),
    "temperature < 0": ({"temperature": -1.0}, r"temperature must be a finite number > 0 .*got -1\.0"),
    "temperature nan": ({"temperature": NAN}, "temperature must be a finite number > 0 .*got nan"),
    "temperature inf": ({"temperature": math.inf}, "temperature must be a finite number > 0 .*got inf"),
    "length 0": ({"max_completion_length": 0}, "max_completion_length must be at least 1, got 0"),
    "top_p 0": ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0\.0"),
    "top_p > 1": ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1\.1"),
    "top_k < 0": ({"top_k": -1}, r"top_k must be 0 \(off\) or a positive number, got -1"),
    "min_p": ({"min_p": 1.5}, r"min_p must be in \[0, 1\] or None, got 1\.5"),
    "penalty": ({"repetition_penalty": 0.0}, r"repetition_penalty must be > 0 \(1 is neutral\), got 0\.0"),
    "min length": (
        {"min_completion_length": 300},
        "min_completion_length must be between 0 and max_completion_length=256, got 300",
    ),
    "empty stop": ({"stop_strings": [""]}, "stop_strings must be texts that are not empty"),
}


TRUNCATING = {  # every setting, with a value that changes which token is drawn; None where no value does
    "max_completion_length": None,  # the completion ends, and its tokens are the policy's
    "temperature": None,  # the same in every pass: the policy is the tempered one
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 0.9,
    "min_completion_length": 1,
    "stop_strings": None,
    "regex": "a+",
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(rl.SamplingParams)])
def test_every_setting_that_changes_which_tokens_are_drawn_counts_as_truncating(name):
    """A new setting has to be entered above."""
    if TRUNCATING[name] is None:
        other = {"max_completion_length": 3, "temperature": 0.5, "stop_strings": ("a",)}[name]
        assert not rl.SamplingParams(**{name: other}).truncates
    else:
        assert rl.SamplingParams(**{name: TRUNCATING[name]}).truncates
    assert not rl.SamplingParams().truncates


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_bad_sampling_settings_are_named(unchecked, settings, message):
    with pytest.raises(ValueError, match=rf"sample: {message}"):
        rl.SamplingParams(**settings)


def test_the_default_settings_are_neutral():
    settings = rl.SamplingParams()
    assert (settings.temperature, settings.top_p, settings.top_k, settings.repetition_penalty) == (1, 1, 0, 1)
    assert not settings.truncates and not settings.is_greedy
    for changed in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1}):
        assert rl.SamplingParams(**changed).truncates
    assert not rl.SamplingParams(min_p=0.0, temperature=0.3).truncates
