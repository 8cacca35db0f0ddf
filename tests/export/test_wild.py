"""Notebooks in the manner of other people's: a right script, or the exact list of what to change."""

import json

import pytest
from cells import plain, run_text

from rlkit.export import ExportError, export_text

KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
COLAB = KERNEL | {"colab": {"provenance": [], "gpuType": "T4"}, "accelerator": "GPU", "widgets": {}}


def code(*lines, **metadata):
    return {"cell_type": "code", "metadata": metadata, "execution_count": None, "outputs": [], "source": list(lines)}


def text(*lines, kind="markdown"):
    return {"cell_type": kind, "metadata": {}, "source": list(lines)}


def line(*parts):
    """Lines as nbformat keeps them."""
    return [part + "\n" for part in parts[:-1]] + [parts[-1]]


# Each: minor version, metadata, cells, then the problems, or the plain values that the script makes.
WILD = {
    "a Colab with installs in a try block": (
        0,
        COLAB,
        [
            text('<a href="https://colab.research.google.com/x"><img src="badge.svg"/></a>'),
            code(
                *line("try:", "    import google.colab", "    !pip install -q trl", "except ImportError:", "    pass"),
                id="Ab_1",
            ),
            code(*line("#@title Settings { run: 'auto' }", "lr = 3e-5 #@param {type:'number'}"), cellView="form"),
            code("steps = int(1 / lr)"),
        ],
        ["E101 cell 2 line 3"],
    ),
    "Colab's secrets and drive": (
        0,
        COLAB,
        [
            code(*line("%%capture", "!pip install unsloth")),
            code(*line("from google.colab import drive, userdata", "drive.mount('/content/drive')")),
            code(*line("import os", "os.environ['HF_TOKEN'] = userdata.get('HF_TOKEN')")),
            code("!nvidia-smi"),
        ],
        ["E101 cell 1 line 2", "N001 cell 1 line 1", "W207 cell 2 line 1", "E101 cell 4 line 1"],
    ),
    "captured installs, then plain code": (
        4,
        COLAB,
        [code(*line("%%capture", "import math", "root = math.sqrt(4)")), code("twice = root * 2"), text("The end")],
        {"root": 2.0, "twice": 4.0},
    ),
    "plots with inline magics and raw cells": (
        2,
        KERNEL,
        [
            text("---", "title: x", "---", kind="raw"),
            code(*line("%matplotlib inline", "%config InlineBackend.figure_format = 'retina'", "import json")),
            code(*line("data = json.loads('[1, 2]')", "data", "")),
            text("\\begin{equation}", kind="raw"),
        ],
        {"data": [1, 2]},
    ),
    "autoreload and a path to the sources": (
        4,
        KERNEL,
        [
            code(
                *line(
                    "%load_ext autoreload", "%autoreload 2", "", "import sys", "sys.path.insert(0, '..')", "import json"
                )
            ),
            code("%reload_ext tensorboard"),
            code("x = len(json.dumps([]))"),
        ],
        ["E101 cell 2 line 1"],
    ),
    "a notebook that was run in another order": (
        5,
        KERNEL,
        [
            code("model_size = base * 2", id="a1"),
            code("base = 3", id="a2"),
            code(*line("ans = Out[2] + _", "print(ans)"), id="a3"),
        ],
        ["E109 cell 1 line 1", "E109 cell 3 line 1", "E109 cell 3 line 1"],
    ),
    "timed and shell cells": (
        1,
        KERNEL,
        [
            code(*line("%%time", "total = 0", "for i in range(4):", "    total += i")),
            code(*line("%%writefile reward.py", "def reward(c): return 1")),
            code("%timeit total"),
            code("total = %time total + 1"),
            code("files = !ls *.ipynb"),
        ],
        ["E101 cell 2 line 1", "E101 cell 3 line 1", "E101 cell 4 line 1", "E101 cell 5 line 1", "N001 cell 1 line 1"],
    ),
    "a trainer with help marks and a login": (
        4,
        KERNEL,
        [
            code("from huggingface_hub import notebook_login"),
            code("dict?"),
            code("name = input('which model? ')"),
            code(*line("import argparse", "parser = argparse.ArgumentParser()", "args = parser.parse_args([])")),
        ],
        ["E101 cell 2 line 1", "E102 cell 3 line 1", "E108 cell 4 line 2"],
    ),
    "solutions with IPython's display": (
        3,
        KERNEL,
        [
            code(*line("from IPython.display import display, Markdown, clear_output", "display(Markdown('**x**'))")),
            code(
                *line("import random", "random.seed(0)", "picks = [random.randint(0, 9) for _ in range(3)]", "picks;")
            ),
            code(),
            code("# TODO: your code here"),
        ],
        {"picks": [6, 6, 0]},
    ),
    "papermill's parameters, with types": (
        5,
        KERNEL | {"papermill": {"duration": 3.1, "parameters": {"n": 5}}},
        [
            code(*line("n: int = 2  # how many", "label = None  # type: str"), id="p", tags=["parameters"]),
            code("n = 5", id="q", tags=["injected-parameters"]),
            code("values = list(range(n))", id="r"),
        ],
        ["E104 cell 1 line 2", "E106 cell 2 line 0", "W202 cell 2 line 1"],
    ),
    "asynchronous judge": (
        5,
        KERNEL,
        [
            code(
                *line("import asyncio", "", "async def judge(x):", "    await asyncio.sleep(0)", "    return x + 1"),
                id="j",
            ),
            code(*line("scores = await asyncio.gather(*[judge(i) for i in range(3)])", "scores"), id="k"),
        ],
        {"scores": [1, 2, 3]},
    ),
}


@pytest.mark.parametrize(("minor", "metadata", "cells", "expected"), WILD.values(), ids=WILD.keys())
def test_a_right_script_or_an_exact_list(minor, metadata, cells, expected, tmp_path):
    path = tmp_path / "wild.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": minor, "metadata": metadata, "cells": cells}))
    if isinstance(expected, dict):
        names = run_text(export_text(path).text)
        assert {name: names[name] for name in expected} == expected and plain(names)
    else:
        with pytest.raises(ExportError) as caught:
            export_text(path)
        found = [f"{p.code} cell {p.cell} line {p.line}" for p in caught.value.problems]
        assert sorted(found) == sorted(one for one in expected if not one.startswith("N"))
        assert all(p.fix for p in caught.value.problems)
