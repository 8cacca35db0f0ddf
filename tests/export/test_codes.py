"""One notebook for every error and warning: its code, cell and line, and nothing else."""

import pytest
from cells import cell, exported, problems, write

import rlkit as rl
from rlkit.export import ExportError, export_text

PARAMS = cell("lr = 1e-3  # step size\nsteps = 3", "parameters")
LOOP = "import rlkit as rl\nworld = rl.setup(seed=0)\npolicy = rl.load_policy('tiny-add')\n"

RL = "import rlkit as rl\n"
ONLY = cell("z = 1\ncount = 0\ndef h():\n    return 1", "notebook-only")
FUTURE = "from __future__ import annotations"
FUTURE_TOO = "from __future__ import (division,\n    annotations)"
ANNOTATED = "class A:\n    x: int = 1\nprint(A.__annotations__['x'] is int)"

ERRORS = [
    ("shell line", ["!pip install x"], ["E101 cell 1 line 1"]),
    ("line magic", ["x = 1\n%timeit x"], ["E101 cell 1 line 2"]),
    ("assigned shell line", ["v = !ls\nw = v"], ["E101 cell 1 line 1"]),
    ("assigned magic", ["t = %time 2+2"], ["E101 cell 1 line 1"]),
    (
        "continued line",
        ["a = 1\n!torchrun \\\n  --nproc 2 x.py\nb = a\n!ls"],
        ["E101 cell 1 line 2", "E101 cell 1 line 5"],
    ),
    (
        "only statement of a block",
        ["try:\n    import os\nexcept ImportError:\n    !pip install os"],
        ["E101 cell 1 line 4"],
    ),
    ("cell magic", ["%%bash\nls"], ["E101 cell 1 line 1"]),
    ("cell magic that binds a name", ["%%capture out\nx = 1", "x"], ["E101 cell 1 line 1"]),
    ("help", ["x = 1\nx?"], ["E101 cell 1 line 2"]),
    ("double help", ["len??"], ["E101 cell 1 line 1"]),
    ("input", ["name = input()"], ["E102 cell 1 line 1"]),
    ("getpass", ["import getpass\ntoken = getpass.getpass()"], ["E102 cell 1 line 2"]),
    ("breakpoint", ["def f():\n    breakpoint()"], ["E102 cell 1 line 2"]),
    ("exit", ["x = 1\nif x > 1:\n    exit()"], ["E102 cell 1 line 3"]),
    ("the kernel", ["get_ipython().run_line_magic('ls', '')"], ["E102 cell 1 line 1"]),
    ("the kernel by another name", ["from IPython import get_ipython as k\nk()"], ["E102 cell 1 line 2"]),
    ("a login in a widget", ["import huggingface_hub\nhuggingface_hub.notebook_login()"], ["E102 cell 1 line 2"]),
    ("a login that asks", ["from huggingface_hub import login\nlogin()"], ["E102 cell 1 line 2"]),
    ("exporting", ["import rlkit as rl\nrl.export('n.ipynb')"], ["E102 cell 1 line 2"]),
    ("not Python", ["x = 1", "y = = 2"], ["E103 cell 2 line 1"]),
    ("return in a cell", ["return 3"], ["E103 cell 1 line 1"]),
    ("async for", ["async for x in y():\n    pass"], ["E103 cell 1 line 1"]),
    ("async with", ["a = 1\nasync with y() as z:\n    pass"], ["E103 cell 1 line 2"]),
    ("async comprehension", ["[x async for x in y()]"], ["E103 cell 1 line 1"]),
    (
        "await before there is a loop",
        [cell("async def f():\n    return 1\nx = await f()", "setup")],
        ["E103 cell 1 line 3"],
    ),
    ("task between cells", ["import asyncio\nt = asyncio.create_task(f())"], ["E103 cell 1 line 2"]),
    ("computed default", [cell("a = 1\nb = a * 2", "parameters")], ["E104 cell 1 line 2"]),
    ("called default", [cell("a = int(3)", "parameters")], ["E104 cell 1 line 1"]),
    ("code among parameters", [cell("for i in range(3):\n    pass", "parameters")], ["E104 cell 1 line 1"]),
    ("None without type", [cell("a = None", "parameters")], ["E104 cell 1 line 1"]),
    ("type of no flag", [cell("import torch\na: torch.Tensor = 3", "parameters")], ["E104 cell 1 line 2"]),
    ("default of another type", [cell("a: int = 0.5", "parameters")], ["E104 cell 1 line 1"]),
    ("reserved name", [cell("config = 'x'", "parameters")], ["E105 cell 1 line 1"]),
    ("two parameters of one flag", [cell("kl = True\nno_kl = 3", "parameters")], ["E105 cell 1 line 2"]),
    ("a run flag's no", [cell("no_deterministic = 3", "parameters")], ["E105 cell 1 line 1"]),
    ("the script's name", ["rlkit_script = 1"], ["E105 cell 1 line 1"]),
    ("two parameters cells", [PARAMS, cell("b = 2", "parameters")], ["E106 cell 2 line 0"]),
    ("type without value", [cell("a: int", "parameters")], ["E106 cell 1 line 1"]),
    ("two values", [cell("a = 1\na = 2", "parameters")], ["E106 cell 1 line 2"]),
    ("papermill's cell", [PARAMS, cell("lr = 3", "injected-parameters")], ["E106 cell 2 line 0", "W202 cell 2 line 1"]),
    ("nothing left", [cell("x = 1", "notebook-only")], ["E107 cell 0 line 0"]),
    ("no setup", ["import rlkit as rl\nrl.loss_step(1, 2, 3, 4)"], ["E107 cell 1 line 2"]),
    ("sys.argv", ["import sys\nn = sys.argv[1]"], ["E108 cell 1 line 2"]),
    ("argparse", ["import argparse\np = argparse.ArgumentParser()"], ["E108 cell 1 line 2"]),
    ("arguments by another name", ["from sys import argv\nn = argv[1]"], ["E108 cell 1 line 2"]),
    ("a parser by another name", ["from transformers import HfArgumentParser as H\np = H(())"], ["E108 cell 1 line 2"]),
    ("TRL's parser", ["from trl import TrlParser\np = TrlParser(())"], ["E108 cell 1 line 2"]),
    ("hidden state", ["x = 1", "y = x + z"], ["E109 cell 2 line 1"]),
    ("counts itself", ["x += 1"], ["E109 cell 1 line 1"]),
    ("cells in another order", ["y = x", "x = 1"], ["E109 cell 1 line 1"]),
    ("from a notebook-only cell", [cell("def f():\n    pass", "notebook-only"), "f()"], ["E109 cell 2 line 1"]),
    ("deleted, from a notebook-only cell", [cell("z = 1", "notebook-only"), "del z"], ["E109 cell 2 line 1"]),
    ("counted, from a notebook-only cell", [ONLY, "for i in range(3):\n    count += i"], ["E109 cell 2 line 2"]),
    *(
        (f"surely called and needs a notebook-only helper, {how}", [ONLY, *sources], [f"E109 cell 2 line {line}"])
        for how, line, *sources in [
            ("a function", 2, "def f():\n    return h()", "print(f())"),
            ("global", 3, "def f():\n    global count\n    count += 1", "f()"),
            ("del of a global", 3, "def f():\n    global count\n    del count\nf()"),
            (
                "called by a function",
                2,
                "def g(x):\n    return h()\ndef f():\n    return [g(1)]",
                "for i in '12':\n    f()",
            ),
            ("lambda", 1, "f = lambda: h()", "f()"),
            ("an instance", 3, "class A:\n    def __init__(self):\n        h()", "A()"),
            ("a coroutine", 2, "async def f():\n    return h()", "await f()"),
            ("a reward", 3, "import rlkit as rl\ndef f(completions):\n    return [h()]", "rl.score(1, [f])"),
            ("a loop that is started", 4, "import rlkit as rl\nrun = rl.Run('x')\ndef f():\n    h()", "run.start(f)"),
            ("the main guard", 2, "def f():\n    h()", "if __name__ == '__main__':\n    f()"),
        ]
    ),
    ("annotations postponed too late", [ANNOTATED, FUTURE], ["E110 cell 2 line 0"]),
    ("annotations postponed too late, in brackets", [ANNOTATED, FUTURE_TOO], ["E110 cell 2 line 0"]),
    ("annotations of a function postponed too late", ["def f() -> int:\n    pass", FUTURE], ["E110 cell 2 line 0"]),
    ("annotations postponed by setup", [ANNOTATED, cell(FUTURE, "setup")], ["E110 cell 2 line 0"]),
    ("annotations postponed in the notebook only", [cell(FUTURE, "notebook-only"), ANNOTATED], ["E110 cell 1 line 0"]),
    ("the kernel's names", ["1 + 1", "x = _ + 1", "y = Out[1]"], ["E109 cell 2 line 1", "E109 cell 3 line 1"]),
]

WARNINGS = [
    (
        "worker misses a name",
        [
            "import rlkit as rl\nsize = len('ab' * 3)\nprint(size)",
            "def reward(c):\n    return size",
            "rl.score(1, reward)",
        ],
        ["W201 cell 3 line 1"],
    ),
    (
        "worker misses a function",
        ["import rlkit as rl\nf = 1\nprint(f)", "def f(c):\n    return 1", "rl.score(1, [f])"],
        ["W201 cell 3 line 1"],
    ),
    (
        "worker misses a function of a branch",
        ["import rlkit as rl\nif len('ab') > 1:\n    def f(c):\n        return 1", "rl.score(1, f)"],
        ["W201 cell 2 line 1"],
    ),
    *(
        (
            f"worker misses a name, {how}",
            [
                f"import rlkit as rl\nn = len('ab')\nprint(n)\n{define}\n        return n",
                f"{hold}\nrl.score(1, {given})",
            ],
            ["W201 cell 2 line 2"],
        )
        for how, define, hold, given in [
            ("another name", "if True:\n    def f(c):", "g = f", "g"),
            ("a list", "class A:\n    def f(c):", "g = [A]", "g"),
            ("a dict", "class A:\n    def f(c):", "g = dict(a=A)", "g"),
            ("an instance", "class A:\n    def __call__(self, c):", "g = A()", "g"),
            ("an instance made there", "class A:\n    def __call__(self, c):", "pass", "A()"),
            ("a choice", "class A:\n    def __call__(self, c):", "g = A() if n else None", "[g]"),
        ]
    ),
    (
        "worker misses a name, in a loop",
        ["import rlkit as rl\nn = len('ab')\nprint(n)", "def f(c):\n    return n\nfor g in [f]:\n    rl.score(1, g)"],
        ["W201 cell 2 line 4"],
    ),
    ("flag without effect", [PARAMS, "print(lr)", "lr = 3"], ["W202 cell 3 line 1"]),
    (".cuda()", ["x = 1\nx.cuda()"], ["W203 cell 1 line 2"]),
    ("cuda:0", ["import torch\nd = torch.device('cuda:0')"], ["W203 cell 1 line 2"]),
    (".to cuda", ["x = 1\nx.to('cuda')"], ["W203 cell 1 line 2"]),
    (
        "device_map",
        ["from transformers import AutoModel as M\nm = M.from_pretrained('x', device_map='auto')"],
        ["W203 cell 1 line 2"],
    ),
    (
        "seeded after prepare",
        [LOOP + "policy = world.prepare(policy)\nimport torch\ntorch.manual_seed(1)"],
        ["W204 cell 1 line 6"],
    ),
    ("hash", ["x = hash('a')"], ["W204 cell 1 line 1"]),
    ("order of a set", ["for x in set('ab'):\n    pass"], ["W204 cell 1 line 1"]),
    (
        "save on one process",
        ["import rlkit as rl\nrun = rl.Run('x')\nrank = 0\nif rank == 0:\n    run.save()"],
        ["W205 cell 1 line 5"],
    ),
    ("barrier on one process", [LOOP + "if world.main:\n    world.barrier()"], ["W205 cell 1 line 5"]),
    (".module", ["model = 1\nmodel.module(3)"], ["W206 cell 1 line 2"]),
    (".forward", ["model = 1\nmodel.forward(3)"], ["W206 cell 1 line 2"]),
    (".generate", ["model = 1\nmodel.generate(3)"], ["W206 cell 1 line 2"]),
    ("widgets", ["import ipywidgets"], ["W207 cell 1 line 1"]),
    ("tqdm.notebook", ["from tqdm.notebook import tqdm"], ["W207 cell 1 line 1"]),
    ("plt.show", ["import matplotlib.pyplot as plt\nplt.show()"], ["W207 cell 1 line 2"]),
    ("show by another name", ["from matplotlib.pyplot import show as s\ns()"], ["W207 cell 1 line 2"]),
    ("a figure", ["import plotly.graph_objects as go\nfig = go.Figure()\nfig.show()"], ["W207 cell 1 line 3"]),
    ("tqdm_notebook", ["from tqdm import tqdm_notebook"], ["W207 cell 1 line 1"]),
    ("Colab", ["from google.colab import drive"], ["W207 cell 1 line 1"]),
    ("save by another name", ["from torch import save\nsave(1, 'x')"], ["W208 cell 1 line 2"]),
    ("open to write", ["with open('x', 'w') as f:\n    f.write('a')"], ["W208 cell 1 line 1"]),
    ("torch.save", ["import torch\ntorch.save(1, 'x')"], ["W208 cell 1 line 2"]),
    ("wandb", ["import wandb\nwandb.init()"], ["W208 cell 1 line 2"]),
    ("name only in a function", ["def f():\n    return nowhere"], ["W209 cell 1 line 2"]),
    ("name that only a branch reads", ["x = 1\nif x > 1:\n    y = nowhere"], ["W209 cell 1 line 3"]),
    ("name that exec may make", ["exec('a = 1')", "b = a"], ["W209 cell 2 line 1"]),
    ("name put into globals()", ["globals()['a'] = 1", "b = a"], ["W209 cell 2 line 1"]),
    ("name that may be caught", ["try:\n    there\nexcept NameError:\n    there = 1"], []),
    ("name that is caught", ["try:\n    there\nexcept NameError:\n    pass"], ["W209 cell 1 line 2"]),
    *(
        (f"may need a notebook-only helper, {how}", [ONLY, *sources], [f"W209 cell 2 line {line}"])
        for how, line, *sources in [
            ("not called", 2, "def f():\n    return h()"),
            ("in a branch", 4, "def f(x):\n    if x:\n        return 1\n    return h()", "f(1)"),
            ("called in a branch", 2, "def f():\n    h()", "x = 1\nif x > 1:\n    f()"),
            ("caught", 2, "def f():\n    h()", "try:\n    f()\nexcept NameError:\n    pass"),
            ("suppressed", 3, "import contextlib\nwith contextlib.suppress(NameError):\n    h()"),
            ("a generator", 2, "def f():\n    yield h()", "x = f()"),
            ("a coroutine that nobody awaits", 2, "async def f():\n    h()", "x = f"),
            ("another function under its name", 2, "def f():\n    h()\ndef g(f):\n    f()", "g(print)"),
            ("an assertion's text", 1, "assert 1, z"),
            ("deleted in a branch", 3, "x = 1\nif x > 1:\n    del z"),
            (
                "a reward whose errors are scored",
                3,
                RL + "def f(completions):\n    return h()",
                "rl.score(1, f, on_error=0)",
            ),
        ]
    ),
    ("__file__", ["print(__file__)"], ["W209 cell 1 line 1"]),
    ("tag that is almost one", [cell("x = 1", "notebook_only")], ["W211 cell 1 line 0"]),
    ("two loops", [cell("x = 1", "loop"), cell("y = 1", "loop")], ["W211 cell 2 line 0"]),
]


@pytest.mark.parametrize(("cells", "expected"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS])
def test_errors(cells, expected, tmp_path):
    assert problems(tmp_path, *cells) == expected
    with pytest.raises(ExportError):
        exported(tmp_path, *cells)


@pytest.mark.parametrize(("cells", "expected"), [row[1:] for row in WARNINGS], ids=[row[0] for row in WARNINGS])
def test_warnings(cells, expected, tmp_path):
    """A script is written all the same; --strict makes errors of them."""
    assert problems(tmp_path, *cells) == expected
    assert exported(tmp_path, *cells).text
    if expected:
        with pytest.raises(ExportError):
            exported(tmp_path, *cells, strict=True)


def test_cells_run_out_of_order(tmp_path):
    """W210, which a fresh notebook cannot have."""
    first, second = cell("x = 1"), cell("y = 1")
    first["execution_count"], second["execution_count"] = 7, 2
    assert problems(tmp_path, first, second) == ["W210 cell 2 line 0"]


def test_all_problems_at_once_with_reason_and_fix(tmp_path):
    with pytest.raises(ExportError) as caught:
        exported(tmp_path, "!ls", "name = input()", "y = later", "later = 1", "y.cuda()")
    lines = str(caught.value).splitlines()
    assert lines[0] == "export: n.ipynb has 4 problems:"
    assert lines[1].startswith("n.ipynb cell 1 line 1: E101 `!ls` is notebook syntax. Fix: Tag the cell notebook-only")
    assert [line.split(": ")[1][:4] for line in lines[1:]] == ["E101", "E102", "E109", "W203"]
    assert "cell 4" in lines[3] and "Fix: Put the cells into the order" in lines[3]
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("default", "kind"), [("1 + 2j", "complex"), ("b'x'", "bytes"), ("...", "ellipsis")])
def test_a_default_of_no_flags_type_is_named(default, kind, tmp_path):
    with pytest.raises(ExportError, match=f"E104 no flag can have the type `{kind}` of 'a'"):
        exported(tmp_path, cell(f"a = {default}", "parameters"))


def test_a_name_of_a_notebook_only_cell_with_magics_is_traced(tmp_path):
    with pytest.raises(ExportError, match="`math` comes from cell 1, which is notebook-only"):
        exported(tmp_path, cell("!pip install x\nimport math", "notebook-only"), "x = math.pi")


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("!uv pip install x", "into your requirements"),
        ("%conda install x", "into your requirements"),
        ("%env A=1", r"Write `os\.environ"),
        ("%cd ..", r"Write `os\.chdir"),
        ("%time f()", "without it"),
        ("!pip list", "Tag the cell notebook-only"),
    ],
)
def test_a_magic_with_a_word_in_python_gets_it_as_fix(line, fix, tmp_path):
    with pytest.raises(ExportError, match=f"E101 .* is notebook syntax. Fix: .*{fix}"):
        exported(tmp_path, line)


def test_a_broken_cell_makes_no_false_alarms_in_others(tmp_path):
    """What it would have defined is taken as defined."""
    assert problems(tmp_path, "def f(:\n    pass", "f()", "%%bash\necho", "g()") == [
        "E103 cell 1 line 1",
        "E101 cell 3 line 1",
        "E109 cell 4 line 1",
    ]


@pytest.mark.parametrize("comment", ["# rlkit: ok W203", "# moved later  rlkit: ok W203, W208"])
def test_a_comment_silences_a_warning_on_its_line(comment, tmp_path):
    assert problems(tmp_path, f"x = 1\nx.cuda()  {comment}\nx.cuda()") == ["W203 cell 1 line 3"]


def test_a_comment_silences_no_error(tmp_path):
    assert problems(tmp_path, "y = x  # rlkit: ok E109") == ["E109 cell 1 line 1"]


@pytest.mark.parametrize(
    "cells",
    [
        ["with open('x') as f:\n    f.read()"],
        [LOOP + "if world.main:\n    open('x', 'w').close()"],
        ["import logging\nrank = 0\nif rank == 0:\n    logging.log(1, 'x')"],
        ["import torch.nn as nn\nclass M(nn.Module):\n    def forward(self, x):\n        return self.layer.forward(x)"],
        ["for x in sorted({1, 2}):\n    print(x)"],
        [PARAMS, "rate = lr * 2"],
        ["def f(x):\n    return x\nprint(f(1))"],
        ["display(3)"],
        ["from os.path import *\nprint(join('a', 'b'))"],
        ["if (n := 3) > 2:\n    print(n)"],
        ["squares = [x * x for x in range(3)]\nprint(squares)"],
        ["class A:\n    b = 1\n    c = b + 1"],
        [cell("x = 1", "figure", "hide-input")],
        ["class A:\n    name = __qualname__ + __module__"],
        ["def f(c):\n    return n\nn = len('ab')", "tests = [f]\nfor test in tests:\n    print(test(1))"],
        ["def f(c):\n    return n\nn = len('ab')", "pairs = [(f, 1)]\nfor test, x in pairs:\n    print(test(x))"],
        ["import asyncio, functools\nrank = 0\nif rank == 0:\n    functools.reduce(max, [1])\n    asyncio.gather()"],
        ["try:\n    from google.colab import drive\nexcept ImportError:\n    drive = None"],
        ["from huggingface_hub import login\nlogin(token='x')"],
        ["def argv():\n    return 1\nx = argv()"],
        ["x = 1", "del x"],
        ["count = 0", "def f():\n    global count\n    count += 1\nf()"],
        ["def f():\n    global count\n    count = 1\nf()", "def g():\n    return count\ng()"],
        [FUTURE, ANNOTATED],
        [cell("n: int = 1", "parameters"), FUTURE, "def f(x):\n    return x"],
        [ANNOTATED, cell(FUTURE, "notebook-only")],
    ],
)
def test_innocent_code_is_silent(cells, tmp_path):
    assert problems(tmp_path, *cells) == []


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("n.txt", "x", "expected one of .ipynb, .py, .md"),
        ("n.ipynb", "{", "not a notebook"),
        (
            "n.ipynb",
            '{"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": {"language": "R"}}, "cells": []}',
            "language is R",
        ),
        (
            "n.ipynb",
            '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "code", "metadata": {}}]}',
            "not a cell of a notebook: source must be text.* Fix: Open it in Jupyter",
        ),
    ],
)
def test_what_is_no_notebook_is_named(name, content, reason, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ExportError, match=f"E100 .*{reason}"):
        export_text(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="export: there is no file"):
        export_text(tmp_path / "missing.ipynb")


def test_from_python(tmp_path, capsys, monkeypatch):
    path = write(tmp_path, "x = 1\nx.cuda()")
    assert rl.export(path) == tmp_path / "n.py"
    assert "W203" in capsys.readouterr().out
    assert rl.export(path, tmp_path / "other.py").name == "other.py"
    (tmp_path / "mine.py").write_text("print('mine')\n")
    with pytest.raises(FileExistsError, match=r"mine\.py was not written by `rlkit export`"):
        rl.export(path, tmp_path / "mine.py")
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    with pytest.raises(RuntimeError, match=r"rl\.export: the front end does not say which notebook this is"):
        rl.export()
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    assert rl.export() == tmp_path / "n.py"
