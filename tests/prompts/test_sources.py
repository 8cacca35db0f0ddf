"""Every form of dataset gives the same prompts; streams repeat, skip and resume."""

import json

import pytest
from builders import character_tokenizer, tiny_policy

import rlkit as rl
from rlkit.prompts import content_id

ROWS = [{"prompt": f"{row}+1=", "answer": row + 1, "note": None if row % 2 else "odd"} for row in range(10)]


def texts(batch):
    return [row["prompt"] for row in batch.rows]


def as_list(folder):
    return ROWS


def as_dataset(folder):
    import datasets

    return datasets.Dataset.from_list(ROWS)


def as_frame(folder):
    import pandas as pd

    return pd.DataFrame(ROWS)


def as_json(folder):
    (folder / "rows.json").write_text(json.dumps(ROWS))
    return str(folder / "rows.json")


def as_jsonl(folder):
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return folder / "rows.jsonl"


def as_parquet(folder):
    as_dataset(folder).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def as_csv(folder):
    as_dataset(folder).to_csv(folder / "rows.csv")
    return folder / "rows.csv"


def as_folder(folder):
    as_dataset(folder).select(range(5)).to_parquet(folder / "a.parquet")
    as_dataset(folder).select(range(5, 10)).to_parquet(folder / "b.parquet")
    return folder


def as_saved(folder):
    as_dataset(folder).save_to_disk(str(folder / "saved"))
    return folder / "saved"


FORMS = [as_list, as_dataset, as_frame, as_json, as_jsonl, as_parquet, as_csv, as_folder, as_saved]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_every_form_gives_the_same_rows_with_the_same_ids(form, frozen_policy, tmp_path, monkeypatch):
    """A row is known by its content, whatever it came in."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    want = rl.PromptLoader(ROWS, frozen_policy, batch_size=10, seed=4).next_batch()
    got = rl.PromptLoader(form(folder), frozen_policy, batch_size=10, seed=4).next_batch()
    assert got.rows == want.rows and got.token_ids == want.token_ids
    assert got.row_id.tolist() == want.row_id.tolist()


def asks(arguments, **more):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", "tool_calls": [call]},
        {"role": "tool", "content": "3", **more},
    ]


# Every row has keys that the others lack, at several depths; a table gives each the keys of all, and None.
NESTED = [
    {"prompt": asks({"a": "1"}), "meta": {"x": 1}, "tests": [{"i": 1}, None, {"o": [None, {"p": 1}]}],
     "day": "2026-01-31"},
    {"prompt": asks({"b": "2"}, name="add"), "meta": {"y": {"z": [1]}}, "tests": [], "day": "2026-02-01"},
    {"prompt": asks({"c": {"d": "3"}}), "meta": {"y": {"w": 1}}, "tests": None, "day": None},
    {"prompt": [{"role": "user", "content": "4"}], "chat_template_kwargs": {"loud": True}, "meta": None, "tests": [{}]},
]  # fmt: skip
COLUMNS = {
    "meta": (*(row["meta"] for row in NESTED),),
    "tests": (*(row["tests"] for row in NESTED),),
    "day": ("2026-01-31", "2026-02-01", None, None),
    "chat_template_kwargs": (None, None, None, {"loud": True}),
}
WITH_CALLS = (
    "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}"
    "{{ c['function']['arguments'] | tojson }}{% endfor %}{{ m['name'] }}{% endfor %}{{ loud }}"
)


def table():
    import datasets

    return datasets.Dataset.from_list([dict.fromkeys(COLUMNS) | row for row in NESTED])


def written(folder, text, name):
    (folder / name).write_text(text)
    return folder / name


def frame_from_parquet(folder):
    import pandas as pd

    table().to_parquet(folder / "rows.parquet")
    return pd.read_parquet(folder / "rows.parquet")


def frame(folder):
    import pandas as pd

    return pd.DataFrame(NESTED)


NESTED_FORMS = {
    "list": lambda folder: NESTED,
    "tuple": lambda folder: tuple(NESTED),
    "Dataset": lambda folder: table(),
    "Parquet": lambda folder: table().to_parquet(folder / "a.parquet") and folder / "a.parquet",
    "JSON": lambda folder: written(folder, json.dumps(NESTED), "a.json"),
    "JSON Lines": lambda folder: written(folder, "\n".join(map(json.dumps, NESTED)), "a.jsonl"),
    "saved": lambda folder: table().save_to_disk(str(folder / "saved")) or folder / "saved",
    "frame": frame,
    "frame from Parquet": frame_from_parquet,
    "set to torch": lambda folder: table().with_format("torch"),
    "set to pandas": lambda folder: table().with_format("pandas"),
    "stream set to numpy": lambda folder: table().to_iterable_dataset().with_format("numpy"),
    "stream": lambda folder: table().to_iterable_dataset(),
    "function": lambda folder: lambda: iter(NESTED),
    "function of a table": lambda folder: lambda: iter(table()),
}


@pytest.mark.parametrize("form", NESTED_FORMS.values(), ids=NESTED_FORMS.keys())
def test_nested_keys_of_other_rows_are_not_there_whatever_the_source(form, tmp_path, monkeypatch):
    """Prompts, row ids, and what a reward function gets: written out by hand, the same from every source."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    policy = tiny_policy(tokenizer=character_tokenizer(chat_template=WITH_CALLS))
    loader = rl.PromptLoader(form(tmp_path), policy, batch_size=4, shuffle=False)
    batch = loader.next_batch()
    texts = ['12add{"a": "1"}3', '12add{"b": "2"}3add', '12add{"c": {"d": "3"}}3', "4True"]
    assert list(batch.token_ids) == [tuple(policy.tokenizer(text)["input_ids"]) for text in texts]
    assert batch.row_id.tolist() == [content_id(row) for row in NESTED]
    assert [row["prompt"] for row in batch.rows] == [row["prompt"] for row in NESTED]
    got = {}

    def reward(completions, meta, tests, day, chat_template_kwargs, **rest):
        got.update(meta=meta, tests=tests, day=day, chat_template_kwargs=chat_template_kwargs)
        return [0.0] * len(completions)

    rl.score(rl.sample(policy, batch, num_generations=1, max_completion_length=1, seed=0), reward)
    assert {name: tuple(values) for name, values in got.items()} == COLUMNS


def test_the_same_rows_have_the_same_v_star_whatever_the_source(tmp_path):
    """Estimated on a list, looked up with rows of a table."""
    policy = tiny_policy(tokenizer=character_tokenizer(chat_template=WITH_CALLS))
    settings = {"num_value_samples": 2, "max_completion_length": 2, "progress": False}
    values = rl.estimate_vstar(policy, NESTED, lambda completions: [1.0] * len(completions), **settings)
    batch = rl.PromptLoader(table(), policy, batch_size=4).next_batch()
    assert values(rl.sample(policy, batch, num_generations=1, max_completion_length=1)).tolist() == [1.0] * 4
    assert len(values.keep_solvable(table())) == len(values.keep_solvable(NESTED)) == 4


def test_numbers_that_a_table_widens_keep_their_ids(frozen_policy):
    """A column of 1 and 2.5 is one of 1.0 and 2.5 in a table."""
    import datasets

    rows = [{"prompt": "1", "answer": 1, "more": [1, 0.5]}, {"prompt": "2", "answer": 2.5, "more": []}]
    batches = [
        rl.PromptLoader(source, frozen_policy, batch_size=2, shuffle=False).next_batch()
        for source in (rows, datasets.Dataset.from_list(rows))
    ]
    assert batches[0].row_id.tolist() == batches[1].row_id.tolist()
    assert content_id({"answer": 1}) != content_id({"answer": "1"}) != content_id({"answer": True})


def test_a_transform_of_the_dataset_stays(frozen_policy):
    """`with_transform` is not a form of the rows: it makes them."""
    import datasets

    made = datasets.Dataset.from_list([{"n": 1}]).with_transform(lambda rows: {"prompt": [f"{n}+" for n in rows["n"]]})
    assert texts(rl.PromptLoader(made, frozen_policy, batch_size=1).next_batch()) == ["1+"]


def test_what_pandas_has_no_form_for_is_none(frozen_policy):
    """NaN is how it writes a missing number, alone or in a list of one; the row keeps its id."""
    import pandas as pd

    row = {"prompt": "1", "answer": None, "more": [1.5, None, 2.0]}
    frame = pd.DataFrame([{**row, "answer": float("nan"), "more": [1.5, float("nan"), 2.0]}])
    batch = rl.PromptLoader(frame, frozen_policy, batch_size=1).next_batch()
    assert batch.rows == (row,) and batch.row_id.tolist() == [content_id(row)]


def test_rows_that_lack_a_column_have_none(frozen_policy):
    """In every batch: a reward function that takes the column can be called on rows without it."""
    rows = [{"prompt": "1"}, {"prompt": "2", "answer": 2}]
    loader = rl.PromptLoader(rows, frozen_policy, batch_size=1, shuffle=False)
    assert [loader.next_batch().rows[0] for _ in rows] == [{"prompt": "1", "answer": None}, rows[1]]
    assert rows[0] == {"prompt": "1"}


def test_message_lists_in_a_frame_read_from_parquet_are_messages():
    """pandas reads lists back as arrays."""
    import numpy as np
    import pandas as pd

    from rlkit.prompts import as_rows

    message = {"role": "user", "content": "1+1="}
    frame = pd.DataFrame({"prompt": [np.array([message], dtype=object)], "answer": [np.int64(2)]})
    assert as_rows(frame, "test") == [{"prompt": [message], "answer": 2}]


BAD = {
    "missing": ("nowhere/at-all", FileNotFoundError, r"no file or folder 'nowhere/at-all'.*load_dataset"),
    "kind": ("rows.txt", ValueError, r"must be a \.json, \.jsonl, \.parquet, \.csv file"),
    "broken": ("broken.jsonl", ValueError, "could not be read"),
    "mixed": ("mixed", ValueError, r"files of one such kind.*found \['.csv', '.json'\]"),
    "splits": ("splits", ValueError, r"has the splits \['train', 'test'\]; load it with datasets and pass one"),
    "empty folder": ("empty", ValueError, "found no such file"),
}


@pytest.mark.parametrize(("name", "kind", "message"), BAD.values(), ids=BAD.keys())
def test_a_path_that_cannot_be_read_says_why(name, kind, message, frozen_policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.txt").write_text("1+1=")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1')
    for folder, files in {"mixed": ("a.csv", "b.json"), "splits": ("train.json", "test.json"), "empty": ()}.items():
        (tmp_path / folder).mkdir()
        for file in files:
            (tmp_path / folder / file).write_text(json.dumps(ROWS))
    with pytest.raises(kind, match=message):
        rl.PromptLoader(name, frozen_policy, batch_size=2)


# --- streams ---


def numbered():
    yield from ROWS


def stream_of(kind):
    import datasets

    return numbered if kind == "function" else datasets.IterableDataset.from_generator(numbered)


kinds = pytest.mark.parametrize("kind", ["function", "IterableDataset"])


@kinds
def test_a_stream_is_served_epoch_after_epoch(kind, frozen_policy):
    """Each row once an epoch, a smaller last batch, group ids that go on."""
    loader = rl.PromptLoader(stream_of(kind), frozen_policy, batch_size=4, shuffle=False)
    batches = [loader.next_batch() for _ in range(6)]
    assert [len(batch) for batch in batches] == [4, 4, 2] * 2
    assert [t for batch in batches for t in texts(batch)] == [row["prompt"] for row in ROWS] * 2
    assert [g for batch in batches for g in batch.group_id.tolist()] == list(range(20))
    assert loader.epoch == 2


@kinds
@pytest.mark.parametrize("size", [2, 3, 5, 10])
def test_the_epoch_ends_with_the_last_row_and_not_later(kind, size, frozen_policy):
    loader = rl.PromptLoader(stream_of(kind), frozen_policy, batch_size=size, shuffle=False)
    for _ in range(-(-10 // size)):
        assert loader.epoch == 0
        loader.next_batch()
    assert loader.epoch == 1


def test_a_shuffled_stream_has_another_order_each_epoch_and_the_same_with_the_same_seed(frozen_policy):
    def order(seed):
        loader = rl.PromptLoader(stream_of("IterableDataset"), frozen_policy, batch_size=10, seed=seed)
        return [tuple(texts(loader.next_batch())) for _ in range(3)]

    first = order(1)
    assert len(set(first)) == 3 and all(sorted(one) == sorted(first[0]) for one in first)
    assert order(1) == first and order(2) != first


@pytest.fixture(scope="module")
def streamed_file(tmp_path_factory):
    """As `load_dataset(..., streaming=True).shuffle(...)` gives it: a file in streaming form, shuffled by its user."""
    import datasets

    path = tmp_path_factory.mktemp("streamed") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return datasets.load_dataset("json", data_files=str(path), split="train", streaming=True).shuffle(7, buffer_size=3)


@pytest.mark.parametrize("kind", ["function", "shuffled", "skipping", "file"])
@pytest.mark.parametrize("done", [0, 1, 2, 3, 5])
def test_a_stream_goes_on_from_a_saved_position(kind, done, frozen_policy, streamed_file):
    """By skipping what was read, through JSON."""

    def fresh():
        options = {"max_prompt_length": 4, "on_long": "skip"} if kind == "skipping" else {}
        long = [{"prompt": "1" * (2 + row % 4)} for row in range(12)]
        known = {"shuffled": stream_of("IterableDataset"), "file": streamed_file}
        stream = {"function": numbered, "skipping": lambda: iter(long), **known}[kind]
        return rl.PromptLoader(stream, frozen_policy, batch_size=4, seed=3, shuffle=kind in known, **options)

    loader = fresh()
    for _ in range(done):
        loader.next_batch()
    state = json.loads(json.dumps(loader.state_dict()))
    other = fresh()
    other.load_state_dict(state)
    for _ in range(5):
        want, got = loader.next_batch(), other.next_batch()
        assert got.rows == want.rows and got.token_ids == want.token_ids
        assert got.row_id.tolist() == want.row_id.tolist() and got.group_id.tolist() == want.group_id.tolist()


def test_a_loop_that_is_left_goes_on_with_the_same_rows_of_a_stream(frozen_policy, tmp_path):
    """run.steps puts the position back when a step was not finished; the stream is then read again up to it."""
    loader = rl.PromptLoader(numbered, frozen_policy, batch_size=4, shuffle=False)
    run = rl.Run(tmp_path / "run")
    for step, batch in run.steps(loader, 3, progress=False):
        seen = texts(batch)
        if step == 1:
            break
    for _, batch in run.steps(loader, 3, progress=False):
        assert texts(batch) == seen
        break


def test_streams_say_what_they_cannot_do(frozen_policy):
    loader = rl.PromptLoader(numbered, frozen_policy, batch_size=4, shuffle=False)
    with pytest.raises(TypeError, match=r"a stream has no length; run\.steps"):
        len(loader)
    assert "a stream of prompts" in repr(loader)
    with pytest.raises(ValueError, match="a function's rows come in its own order; pass shuffle=False"):
        rl.PromptLoader(numbered, frozen_policy, batch_size=4)
    with pytest.raises(ValueError, match="the stream is empty"):
        rl.PromptLoader(lambda: iter(()), frozen_policy, batch_size=4, shuffle=False)
    with pytest.raises(TypeError, match="must return an iterator of rows, got NoneType"):
        rl.PromptLoader(lambda: None, frozen_policy, batch_size=4, shuffle=False)
    with pytest.raises(TypeError, match="expected rows that are dicts, got str"):
        rl.PromptLoader(lambda: iter(["1"]), frozen_policy, batch_size=4, shuffle=False)
    with pytest.raises(TypeError, match="can be read only once"):
        rl.PromptLoader(numbered(), frozen_policy, batch_size=4)
    with pytest.raises(TypeError, match=r"evaluate: .*Take the rows you need first"):
        rl.evaluate(frozen_policy, stream_of("IterableDataset"), lambda completions: [0.0] * len(completions))


def test_a_stream_without_a_batch_ends_with_an_error_and_not_never(frozen_policy):
    long = [{"prompt": "1" * 9}] * 3
    loader = rl.PromptLoader(
        lambda: iter(long), frozen_policy, batch_size=2, shuffle=False, max_prompt_length=8, on_long="skip"
    )
    with pytest.raises(ValueError, match="the stream has no batch to serve"):
        loader.next_batch()
    loader = rl.PromptLoader(lambda: iter(ROWS[:3]), frozen_policy, batch_size=4, shuffle=False, drop_last=True)
    with pytest.raises(ValueError, match="the stream has no batch to serve"):
        loader.next_batch()


def test_long_prompts_of_a_stream_are_named_by_their_row(frozen_policy):
    loader = rl.PromptLoader(
        lambda: iter([*ROWS, {"prompt": "1" * 9}]), frozen_policy, batch_size=4, shuffle=False, max_prompt_length=8
    )
    loader.next_batch(), loader.next_batch()
    with pytest.raises(ValueError, match=r"1 prompt\(s\) are longer than 8 tokens: row 10 \(9 tokens\)"):
        loader.next_batch()


def test_drop_last_of_a_stream_serves_whole_batches(frozen_policy):
    loader = rl.PromptLoader(numbered, frozen_policy, batch_size=4, shuffle=False, drop_last=True)
    assert [texts(loader.next_batch())[0] for _ in range(5)] == ["0+1=", "4+1=", "0+1=", "4+1=", "0+1="]


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", ""), ("a.json", "[]"), ("a.csv", "prompt,answer\n")])
def test_a_file_without_rows_is_named(name, text, tmp_path, policy):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}' could not be read: there is no row in it"):
        rl.PromptLoader(tmp_path / name, policy, batch_size=1)


@pytest.mark.parametrize("limit", [0, 2.5, "9"])
def test_a_length_that_is_no_whole_number_is_refused(limit, policy, unchecked):
    with pytest.raises(ValueError, match="max_prompt_length must be a whole number of at least 1"):
        rl.PromptLoader([{"prompt": "1+1="}], policy, batch_size=1, max_prompt_length=limit)
