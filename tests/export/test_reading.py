"""Malformed notebooks: a documented error that names file and cell, or the right script; never a raw traceback."""

import copy
import json

import pytest
from cells import cell, problems, write
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.export import ExportError, export_text

CODE = {
    "cell_type": "code",
    "id": "a",
    "metadata": {"tags": ["x"]},
    "execution_count": 1,
    "outputs": [],
    "source": "x = 1",
}
TEXT = {"cell_type": "markdown", "id": "b", "metadata": {}, "source": ["# a\n", "b"]}
KERNEL = {"kernelspec": {"name": "python3", "language": "python"}, "language_info": {"name": "python"}}
NOTEBOOK = {
    "nbformat": 4,
    "nbformat_minor": 5,
    "metadata": KERNEL,
    "cells": [CODE, TEXT, CODE | {"source": ["y = x\n"]}],
}
DEEP = "[" * 100_000


def notebook(**changes):
    return NOTEBOOK | changes


def with_cell(**changes):
    return notebook(cells=[CODE, CODE | changes])


def without(key):
    return notebook(cells=[CODE, {name: value for name, value in CODE.items() if name != key}])


REFUSED = {
    "not JSON": ("{", 0),
    "empty": ("", 0),
    "a list": ([], 0),
    "a text": ("x", 0),
    "nesting that no parser takes": (DEEP, 0),
    "UTF-16": (json.dumps(NOTEBOOK).encode("utf-16"), 0),
    "not UTF-8": (json.dumps(NOTEBOOK).encode().replace(b"x = 1", b"x = '\xff'"), 0),
    "no cells": ({"nbformat": 4, "metadata": {}}, 0),
    "cells null": (notebook(cells=None), 0),
    "cells an object": (notebook(cells={"a": CODE}), 0),
    "a format of the future": (notebook(nbformat=9), 0),
    "a format that is no number": (notebook(nbformat="four"), 0),
    "format null": (notebook(nbformat=None), 0),
    "an old format without its sheets": ({"nbformat": 3, "nbformat_minor": 0, "metadata": {}}, 0),
    "another language": (notebook(metadata={"language_info": {"name": "julia"}}), 0),
    "a cell that is null": (notebook(cells=[CODE, None]), 2),
    "a cell that is text": (notebook(cells=[CODE, "x = 1"]), 2),
    "no source": (without("source"), 2),
    "no cell_type": (without("cell_type"), 2),
    "an unknown cell_type": (with_cell(cell_type="heading"), 2),
    "cell_type a list": (with_cell(cell_type=["code"]), 2),
    "source null": (with_cell(source=None), 2),
    "source a number": (with_cell(source=3), 2),
    "source a list of numbers": (with_cell(source=["x", 3]), 2),
    "source an object": (with_cell(source={"x": 1}), 2),
    "metadata a list": (with_cell(metadata=[]), 2),
    "tags an object": (with_cell(metadata={"tags": {"parameters": True}}), 2),
    "tags a number": (with_cell(metadata={"tags": 3}), 2),
}
READ = {
    "a byte order mark": b"\xef\xbb\xbf" + json.dumps(NOTEBOOK).encode(),
    "metadata null": notebook(metadata=None),
    "no metadata": {"nbformat": 4, "cells": NOTEBOOK["cells"]},
    "kernelspec null": notebook(metadata={"kernelspec": None, "language_info": None}),
    "kernelspec a text": notebook(metadata={"kernelspec": "python3"}),
    "a cell's metadata null": notebook(cells=[CODE | {"metadata": None}, CODE | {"source": "y = x"}]),
    "tags null": notebook(cells=[CODE | {"metadata": {"tags": None}}, CODE | {"source": "y = x"}]),
    "counts that are no numbers": notebook(cells=[CODE, CODE | {"source": "y = x", "execution_count": "*"}]),
    "half a surrogate pair and a NUL in a text": notebook(
        cells=[
            TEXT | {"source": "a \ud83d b \x00 c"},
            CODE,
            CODE | {"source": "y = x", "metadata": {"tags": ["\ud800"]}},
        ]
    ),
    "ten thousand lines": notebook(cells=[CODE | {"source": "\n" * 10_000 + "x = 1"}, CODE | {"source": "y = x"}]),
}


def put(folder, content):
    path = folder / "n.ipynb"
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(("content", "where"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_a_notebook_names_file_and_cell(content, where, tmp_path):
    with pytest.raises(ExportError, match=r"n\.ipynb") as caught:
        export_text(put(tmp_path, content))
    assert [(problem.code, problem.cell) for problem in caught.value.problems] == [("E100", where)]


@pytest.mark.parametrize("content", READ.values(), ids=READ.keys())
def test_what_runs_in_jupyter_is_exported(content, tmp_path):
    text = export_text(put(tmp_path, content)).text
    text.encode()
    assert compile(text, "n.py", "exec") and "x = 1" in text and "y = x" in text


def places(value, path=()):
    """Where something stands in JSON: a tuple of keys for each value."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(st.sampled_from([path for path in places(NOTEBOOK) if path]), JUNK, st.booleans())
@settings(max_examples=150)
def test_any_value_may_be_anything(tmp_path_factory, path, junk, is_dropped):
    """One value replaced or dropped: a script, or errors that name the cell in which it stands."""
    raw = copy.deepcopy(NOTEBOOK)
    holder = raw
    for key in path[:-1]:
        holder = holder[key]
    if is_dropped:
        del holder[path[-1]]
    else:
        holder[path[-1]] = junk
    try:
        text = export_text(put(tmp_path_factory.mktemp("fuzz"), raw)).text
    except ExportError as error:
        named = {problem.cell for problem in error.problems}
        assert str(error).startswith("export: n.ipynb has ")
        if path[:1] == ("cells",) and len(path) > 1 and not (is_dropped and len(path) == 2):
            assert named <= {path[1] + 1, 3}  # the third cell reads what the first one makes
        elif path != ("cells",):
            assert named <= {0, 2, 3}
    else:
        compile(text.encode(), "n.py", "exec")


@given(st.integers(1, 400))
@settings(max_examples=40)
def test_a_torn_file_is_an_error(tmp_path_factory, length):
    whole = json.dumps(NOTEBOOK).encode()
    with pytest.raises(ExportError, match=r"n\.ipynb: E100 not a notebook"):
        export_text(put(tmp_path_factory.mktemp("torn"), whole[: len(whole) * length // 401]))


@pytest.mark.parametrize(
    "source",
    [
        "+".join(["1"] * 4000),
        "[" * 300 + "]" * 300,
        "-" * 5000 + "1",
        "a" + ".b" * 4000,
        "x = '\ud800'",
        "x = 1\x00",
        "-" * 20000 + "1",
        "lambda: " * 9000 + "1",
        "%",
        "if 1:\n    %  \\\n",
        "x = 1\n%%\n%",
        "from __future__ import annotations; x = 1",
        "".join(" " * depth + "if 1:\n" for depth in range(99)) + " " * 99 + "pass",
        "\\",
        "'''",
        "if 1:\n\tx = 1\n        y = 2",
    ],
    ids=range(16),
)
def test_what_python_cannot_compile_names_the_cell(source, tmp_path):
    with pytest.raises(ExportError, match=r"n\.ipynb cell 2.*: E10[13]"):
        export_text(put(tmp_path, notebook(cells=[CODE, CODE | {"source": source}])))


@pytest.mark.parametrize(
    "line",
    [
        "a: 'int |' = 3",
        "a: Literal[f(x)] = 1",
        "a: tuple[()] = ()",
        "a: dict[int] = {1: 2}",
        "a: Optional[int, str] = 1",
        "a: list[...] = [1]",
        "a: list[int, str] = [1]",
        "a: dict[[]] = {}",
        "a = {[1]: 2}",
        "a = 1.5 << 2",
        "a = 1 << -1",
        "a = 1 / 0",
        "a = 10.0 ** 1000",
        "a: Literal[[]] = 1",
        "a: 3 = 1",
        "a: (yield) = 1",
    ],
)
def test_a_parameter_of_any_form_is_read_or_refused(line, tmp_path):
    """No flag can be made of these; the error names cell and line."""
    found = problems(tmp_path, "x = 1", cell(f"from typing import Literal, Optional\n{line}", "parameters"))
    assert found and found[0][:4] in ("E103", "E104") and {one[5:] for one in found} == {"cell 2 line 2"}


def test_a_files_name_may_be_no_text(tmp_path):
    """A name of bytes that are no UTF-8 stands in the script's header as it can be written."""
    path = write(tmp_path, "x = 1")
    odd = path.rename(path.with_name("n\udcff.ipynb"))
    assert "n\ufffd.ipynb" in export_text(odd).text.encode().decode()


@pytest.mark.parametrize(
    "last",
    [
        cell("a = " + "+".join(["1"] * 900), "parameters"),
        f"with open({'+'.join(['x'] * 2000)}):\n    pass",
        f"if {'+'.join(['x'] * 2000)} == 0:\n    pass",
        "if x == 0:\n    pass\n" + "\n".join(f"elif x == {i}:\n    y = {i}" for i in range(900)),
        f"def f(a=x):\n    return {'+'.join(['a'] * 2000)}\nf()",
    ],
    ids=["parameter", "with", "if", "elif", "function"],
)
def test_what_python_compiles_is_not_too_deep(last, tmp_path):
    """The statements are deeper than the recursion limit of 1,000."""
    assert problems(tmp_path, "x = 1", last) == []
