"""The script is the same program: language cases, placement, determinism, formats."""

import __future__

import ast
import json
import shutil
import statistics
import time

import nbformat
import pytest
from cells import ROOT, cell, exported, plain, problems, run_text, write
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.cli import main
from rlkit.export import export_text
from rlkit.export.analysis import analyse
from rlkit.export.placement import place as decide
from rlkit.export.reading import read_notebook


def in_cells(*sources):
    """The names after the cells ran in one namespace, top-level await as IPython does it."""
    import asyncio
    import inspect

    names: dict = {"__name__": "__main__"}
    loop = asyncio.new_event_loop()
    future = 0
    for source in sources:
        code = compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | future, dont_inherit=True)
        future |= code.co_flags & __future__.annotations.compiler_flag
        if code.co_flags & inspect.CO_COROUTINE:
            loop.run_until_complete(eval(code, names))
        else:
            exec(code, names)
    loop.close()
    return names


ASYNC = "import asyncio\nasync def double(x):\n    await asyncio.sleep(0)\n    return 2 * x\n"
SAME = {
    "strings over lines": [
        "if True:\n    a = '''x\n  y\n    z'''\nb = \"\"\"\n  %not magic\n!nor this\n\"\"\"",
        "c = len(a)",
    ],
    "f-strings over lines": ["n = 3\na = f'''x {n}\n  y {n + 1}\n'''\nprint(a)"],
    "a string continued by a backslash": ["print(1)\na = 'x\\\n  y'"],
    "quotes in quotes": ["print(0)\na = \"'''\" + '\"\"\"' + r'\\n' + \"\\u00e9\""],
    "decorators": [
        "import functools\nprint(1)",
        "@functools.lru_cache(\n    maxsize=None\n)\ndef f(x):\n    return x + 1",
        "y = f(2)",
    ],
    "semicolons": ["a = 1; b = a + 1; c = b", "d = c;"],
    "comments": ["# first\n\na = 1  # behind\n# between\nb = 2\n# last"],
    "only comments": ["# nothing here", "a = 1"],
    "blanks at the end of a line": ["print(1)\na = '''x   \n y  \n  '''  \nb = f'''{a}  \n'''"],
    "not ASCII": ["größe = 'ä\u2028b'\nμ = len(größe)", "α = f'{μ}é'"],
    "form feed": ["print(1)\na = 'x\x0cy'\nb = 2"],
    "line continued by an empty one": [
        "x = 1 \\\n\nprint(x)",
        "y = 2; \\\nz = 3\nprint(y) \\\n# said\nu = 4",
        "def f():\n    return 1 \\\n\nv = f() \\\n\n",
        "w = '''a \\\n\n'''  # not continued \\\nif w: \\\n\n    a = 5 \\\n  \\\n\nb = a",
        "print(1) \\\n\nimport json\nprint(2); \\\nimport math\nprint(3)",
        "def g():\n    return json.dumps(1)\n\nc = g()",
        "d = c \\\n\n",
    ],
    "as deep as a person writes": [
        "print(1)\nx = " + " + ".join(["1"] * 900),
        "y = 0\nif x == 0:\n    pass\n" + "\n".join(f"elif x == {i}:\n    y = {i}" for i in range(800, 1100)),
        "z = 'a'" + ".strip()" * 400,
    ],
    "del and global": ["x = 1\ny = 2\ndel x", "def f():\n    global y, z\n    y += 1\n    z = y\nf()"],
    "line continued": ["print(1)\na = 1 + \\\n  2\nb = [\n1,\n  2]"],
    "redefined function": ["def f():\n    return 1", "a = f()", "def f():\n    return 2", "b = f()"],
    "default from a run cell": ["import math\nm = math.sqrt(4)\nprint(m)", "def f(x=m):\n    return x", "y = f()"],
    "global counter": ["n = 0\ndef count():\n    global n\n    n += 1", "count()\ncount()"],
    "a default that a function may replace": [
        "n = len('ab')",
        "def reset():\n    global n\n    n = 0",
        "def f(x=n):\n    return x",
        "y = f()",
    ],
    "late import": ["print(1)", "import math", "def root(x):\n    return math.sqrt(x)", "y = root(9)"],
    "a builtin's name": ["a = len('abc')", "def len(x):\n    return 7", "b = len('abc')"],
    "a name that meant something else": [
        "x = 1\nprint(x)",
        "from math import *",
        "def sqrt(x):\n    return 7",
        "y = sqrt(4)",
    ],
    "an import instead of a function": ["def sqrt(x):\n    return 7", "from math import sqrt", "a = sqrt(4)"],
    "a star import instead of a function": [
        "def sqrt(x):\n    return 7\ndef sqrt(x):\n    return 8",
        "from math import *",
        "a = sqrt(4)",
    ],
    "a constant instead of a function": ["def f(x):\n    return 7\nf = 3", "a = f"],
    "star import after": ["print(1)", "def sqrt(x):\n    return 7", "a = sqrt(4)", "from math import *", "b = sqrt(4)"],
    "random default": [
        "import random\nrandom.seed(1)",
        "def f(x=random.random()):\n    return x",
        "a = random.random()\nb = f()",
    ],
    "class with state": [
        "print(1)",
        "class A:\n    made = []\n    def __init__(self):\n        self.made.append(1)",
        "A()\nA()\nn = A.made",
    ],
    "subclass of a run class": ["B = type('B', (), {'k': 3})\nprint(B)", "class C(B):\n    pass", "k = C.k"],
    "registry": [
        "found = {}\ndef register(f):\n    found[f.__name__] = 1\n    return f",
        "found['x'] = 0",
        "@register\ndef g():\n    pass",
        "names = list(found)",
    ],
    "a class that its base counts": [
        "made = []\nclass A:\n    def __init_subclass__(cls):\n        made.append(1)",
        "before = len(made)",
        "class B(A):\n    pass\nclass C(B):\n    pass",
        "after = len(made)",
    ],
    "a class that its metaclass counts": [
        "made = []\nclass M(type):\n    def __new__(*a):\n        made.append(1)\n        return type.__new__(*a)",
        "class A(metaclass=M):\n    pass\nbefore = len(made)",
        "class B(A):\n    pass",
        "after = len(made)",
    ],
    "a name that is looked for": ["print(1)", "found = 'f' in globals()", "def f():\n    return 1", "x = f()"],
    "a function that another one misses": [
        "print(1)\ndef g():\n    return f()",
        "try:\n    x = g()\nexcept NameError:\n    x = 'none'",
        "def f():\n    return 1",
        "y = g()",
    ],
    "deleted": ["x = 1\nprint(x)", "del x", "x = 2"],
    "in a loop": ["total = 0\nfor i in range(3):\n    total += i\nelse:\n    done = True"],
    "with and try": [
        "import contextlib\nwith contextlib.suppress(ValueError):\n    int('x')",
        "try:\n    a = 1 / 0\nexcept ZeroDivisionError as e:\n    a = 'none'",
    ],
    "comprehension scopes": ["x = 5\ny = [x for x in range(3)]\nz = {k: x for k in 'ab'}\nw = sum(x for x in y)"],
    "walrus": ["if (n := len('abc')) > 2:\n    m = n"],
    "match": ["match [1, 2]:\n    case [a, b]:\n        c = a + b"],
    "annotations": ["from __future__ import annotations\ndef f(x: Unknown) -> None:\n    return None\na: int = 3"],
    "future import under another name": ["from __future__ import annotations as later, division", "x = str(later)"],
    "future import late": ["a = 1", "from __future__ import annotations", "def f(x: Nope):\n    return a", "b = f(1)"],
    "bare expressions": ["1 + 1", "'text'", "a = 3\na"],
    "await": [ASYNC, "a = await double(3)"],
    "await in await": [ASYNC, "a = await double(await double(1)) + 1"],
    "await in a comprehension": [ASYNC, "a = [await double(i) for i in range(3)]"],
    "await in a call over lines": [ASYNC, "a = max(\n    await double(1),\n    await (\n        double(5)\n    ),\n)"],
    "await and power": [ASYNC, "a = await double(3) ** 2\nb = -await double(1)"],
    "await in control flow": [ASYNC, "for i in range(2):\n    if await double(i) > 1:\n        a = i"],
    "await in a nested def stays": [ASYNC, "async def g():\n    return await double(4)", "a = await g()"],
    "await in a default": [ASYNC, "def f(x=await double(2)):\n    return x", "a = f()"],
    "await in a setting": [ASYNC, "import os\nos.environ['A'] = str(await double(1))\na = os.environ['A']"],
    "gather": [ASYNC, "a = await asyncio.gather(double(1), double(2))"],
    "await with other letters": [ASYNC, "ü = 'äöü'; a = (ü, await double(1))"],
    "await below other letters": [ASYNC, "ü = 'äöü'\na = (ü, await double(1))"],
    "default that a module is given": [
        "import sys",
        "sys.mine = 5",
        "def f(x=sys.mine):\n    return x",
        "y = f()\ndel sys.mine",
    ],
    "one loop": [
        ASYNC + "e = asyncio.Event()\nasync def wait():\n    await asyncio.sleep(0)\n    e.set()",
        "await wait()",
        "await e.wait()\na = e.is_set()",
    ],
    "tabs": ["for i in range(2):\n\tif i:\n\t\ta = i"],
    "prefix guarded by try": ["try:\n    import json as j\nexcept ImportError:\n    j = None", "a = j.dumps(1)"],
    "dropped magics": [
        "%matplotlib inline\n%load_ext autoreload\n%autoreload 2\nx = 1",
        "if x:\n    %config A.b = 3\ny = 2",
    ],
    "timed cell": ["%%time\nx = 1\ny = x"],
}


@pytest.mark.parametrize("cells", SAME.values(), ids=SAME.keys())
def test_the_script_does_what_the_cells_do(cells, tmp_path, capsys):
    bare = (
        [
            "\n".join(
                "#"
                if line.strip().startswith("%%")
                else line.replace("    %config", "    pass  #").replace("%", "# %")
                if line.strip().startswith("%")
                else line
                for line in source.split("\n")
            )
            for source in cells
        ]
        if any("%config" in c or "%%time" in c for c in cells)
        else cells
    )
    text = exported(tmp_path, *cells).text
    ast.parse(text)
    expected, found = in_cells(*bare), run_text(text)
    assert plain(found) == plain(expected)
    assert set(expected) - set(found) <= {"__builtins__", "__annotations__", "annotations"}


def test_crlf_is_a_line_end(tmp_path):
    path = write(tmp_path, cell("a = '''x\r\ny'''\r\nprint(a)\r\nb = 2\r\n"))
    assert plain(run_text(export_text(path).text)) == {"a": "x\ny", "b": 2}


def place(text):
    """Names bound at module level, and names bound in the guarded block."""
    tree = ast.parse(text)
    guard = next(n for n in tree.body if isinstance(n, ast.If) and "rlkit_script.start" in ast.unparse(n))

    def bound(nodes):
        return {
            n.id for top in nodes for n in ast.walk(top) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        } | {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}

    return bound([node for node in tree.body if node is not guard]), bound(guard.body)


@pytest.mark.parametrize(
    ("cells", "above", "below"),
    [
        (["import os\nos.environ['A'] = '1'\nX = 3", "x = len('a')"], {"X"}, {"x"}),
        (["print(1)", "def f():\n    return 1"], {"f"}, set()),
        (["n = len('a')\nprint(n)", "def f():\n    return n"], set(), {"n", "f"}),
        (
            [
                "import rlkit as rl\nprint(1)",
                "import re\nP = re.compile('a')\nunused = 3\ndef f(c):\n    return P",
                "rl.score(1, f)",
            ],
            {"P", "f"},
            {"unused"},
        ),
        (["print(1)", "def g():\n    return f()\ndef f():\n    return 1"], {"f", "g"}, set()),
        (["n = len('a')\nprint(n)", "def f():\n    return n\ndef g():\n    return f()"], set(), {"n", "f", "g"}),
        (["x = 1\nprint(x)", "x = 2"], {"x"}, {"x"}),
        (["print(1)", "total = 0\ntotal += 1"], set(), {"total"}),
        ([cell("seed = 1", "parameters"), "print(1)", "def f(s=seed):\n    return s"], {"seed", "f"}, set()),
        (["print(1)", cell("Y = len('a')", "setup")], {"Y"}, set()),
        (
            [
                "from dataclasses import dataclass, field\nprint(1)",
                "@dataclass(frozen=True)\nclass A:\n    x: int = 3\n    y: list = field(default_factory=list)",
            ],
            {"A"},
            set(),
        ),
    ],
)
def test_placement(cells, above, below, tmp_path):
    top, guarded = place(exported(tmp_path, *cells).text)
    assert above <= top - {"x"} | above & top and below <= guarded
    assert not (above & guarded) - below and not (below & top) - above


def test_tags(tmp_path):
    cells = [
        cell("x = 1", "Parameters"),
        cell("raise RuntimeError", "Notebook-Only"),
        cell("raise RuntimeError", "active-ipynb"),
        cell("# rlkit: notebook-only\n!ls"),
        cell("raise RuntimeError", "remove-cell"),
        cell("y = x", "script-only", kind="raw"),
        cell("z = ", kind="raw"),
        cell("w = 2", "active-py", "loop"),
        cell('# LaTeX \\frac{a}{b} \\u """ and a \\', kind="markdown"),
    ]
    text = exported(tmp_path, *cells).text
    assert plain(run_text(text)) == {"x": 1, "y": 1, "w": 2}
    assert "# cell 2 is for the notebook only and left out" in text
    assert "# %% cell 8 [active-py, loop]" in text and "# %% cell 1 [Parameters]" in text
    assert '# # LaTeX \\frac{a}{b} \\u """ and a \\' in text


def test_metadata_may_be_missing_or_odd(tmp_path):
    """Nbformat 4.0 to 4.5 and 3 are read."""
    for minor in range(6):
        raw = {
            "nbformat": 4,
            "nbformat_minor": minor,
            "metadata": {"colab": {"provenance": []}, "kernelspec": {"name": "python3", "display_name": "x"}},
            "cells": [
                {
                    "cell_type": "code",
                    "metadata": {},
                    "execution_count": None,
                    "outputs": [],
                    "source": ["x = 1\n", "y = 2"],
                },
                {"cell_type": "code", "metadata": {"tags": []}, "execution_count": 3, "outputs": [], "source": ""},
            ],
        }
        path = tmp_path / f"v4{minor}.ipynb"
        path.write_text(json.dumps(raw))
        assert plain(run_text(export_text(path).text)) == {"x": 1, "y": 2}
    old = {
        "nbformat": 3,
        "nbformat_minor": 0,
        "metadata": {"name": ""},
        "worksheets": [
            {
                "cells": [
                    {"cell_type": "code", "language": "python", "collapsed": False, "outputs": [], "input": "x = 3"}
                ]
            }
        ],
    }
    (tmp_path / "v3.ipynb").write_text(json.dumps(old))
    assert plain(run_text(export_text(tmp_path / "v3.ipynb").text)) == {"x": 3}


def test_running_the_notebook_does_not_change_the_script(tmp_path):
    path = write(tmp_path, cell("k = 1  # a", "parameters"), "x = 1", cell("# Text", kind="markdown"), "print(x)\nx")
    first = export_text(path).text
    assert export_text(path).text == first
    notebook = nbformat.read(path, as_version=4)
    for count, one in enumerate(notebook.cells, start=40):
        one["id"] = f"other{count}"
        if one.cell_type == "code":
            one["execution_count"] = count
            one["outputs"] = [nbformat.v4.new_output("stream", text="1\n")]
            one["metadata"]["execution"] = {"iopub.status.busy": "2026"}
    notebook.metadata["language_info"] = {"name": "python", "version": "3.13"}
    nbformat.write(notebook, path)
    assert export_text(path).text == first


def test_check_says_what_is_stale(tmp_path, capsys):
    path = write(tmp_path, "x = 1")
    arguments = ["export", str(path), "-o", str(tmp_path / "s.py")]
    assert main([*arguments, "--check"]) == 1 and "s.py is missing. Write it: rlkit export" in capsys.readouterr().err
    assert main(arguments) == 0 and main([*arguments, "--check"]) == 0
    write(tmp_path, "x = 2")
    before = (tmp_path / "s.py").read_bytes()
    assert main([*arguments, "--check"]) == 1 and "is stale" in capsys.readouterr().err
    assert (tmp_path / "s.py").read_bytes() == before
    write(tmp_path, "x = 2\nx.cuda()")
    assert main([*arguments, "--strict"]) == 1 and "W203" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none.ipynb")]) == 1


def test_several_notebooks_go_into_a_folder(tmp_path, capsys):
    first, second = write(tmp_path, "x = 1", name="a.ipynb"), write(tmp_path, "y = (", name="b.ipynb")
    folder = str(tmp_path / "scripts")
    assert main(["export", str(first), str(second), "-o", folder]) == 1
    assert "b.ipynb cell 1 line 1: E103" in capsys.readouterr().err and (tmp_path / "scripts" / "a.py").exists()
    assert main(["export", str(first), str(second), "-o", str(first)]) == 1


def test_two_notebooks_do_not_share_a_script(tmp_path, capsys):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    first, second = write(tmp_path / "one", "x = 1"), write(tmp_path / "two", "x = 2")
    for flags in ([], ["--check"]):
        assert main(["export", str(first), str(second), "-o", str(tmp_path / "new"), *flags]) == 1
        assert "would both be" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_the_headers_commands_are_quoted(tmp_path):
    path = write(tmp_path, "x = 1", name="my $(touch x) run.ipynb")
    text = export_text(path).text
    assert "python 'my $(touch x) run.py' --help" in text and "rlkit export 'my $(touch x) run.ipynb'" in text


def test_the_scripts_in_the_repository_are_fresh(capsys):
    """What `make check` asks, here for a quick answer."""
    found = sorted([*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "tutorials").glob("*.ipynb")])
    assert main(["export", *map(str, found), "-o", str(ROOT / "notebooks" / "scripts"), "--check"]) == 0, (
        capsys.readouterr()
    )


def test_jupytext_notebooks(tmp_path):
    pytest.importorskip("jupytext")
    percent = tmp_path / "p.py"
    percent.write_text('# %% [markdown]\n# Text\n\n# %% tags=["parameters"]\nk = 2  # number\n\n# %%\nx = k + 1\n')
    assert plain(run_text(export_text(percent).text, "--k", "5")) == {"k": 5, "x": 6}
    assert problems_of(tmp_path / "q.py", "# %%\n# !ls\n") == ["E101"]
    myst = tmp_path / "m.md"
    myst.write_text(
        "---\nkernelspec:\n  name: python3\n  display_name: x\n---\n\nText\n\n"
        "```{code-cell}\n:tags: [parameters]\n\nk = 2\n```\n\n"
        "```{code-cell}\nx = k\n```\n"
    )
    assert plain(run_text(export_text(myst).text, "--k", "5")) == {"k": 5, "x": 5}
    light = tmp_path / "l.py"
    light.write_text('# Text\n\n# + tags=["parameters"]\nk = 2\n# -\n\nx = k\n')
    assert plain(run_text(export_text(light).text, "--k", "5")) == {"k": 5, "x": 5}
    assert "python l_run.py --help" in export_text(light).text  # l.py itself is the source
    (tmp_path / "latin.py").write_bytes(b"# %%\nx = '\xe9'\n")
    assert problems_of(tmp_path / "latin.py", None) == ["E100"]
    (tmp_path / "g.py").write_text(export_text(percent).text)
    assert problems_of(tmp_path / "g.py", None) == ["E100"]


def problems_of(path, content):
    from rlkit.export import ExportError

    if content is not None:
        path.write_text(content)
    with pytest.raises(ExportError) as caught:
        export_text(path)
    return [problem.code for problem in caught.value.problems]


NAMES = st.sampled_from("abcd")
NUMBERS = st.integers(0, 9)


@st.composite
def statements(draw, defined, functions):
    """One statement that reads only what is defined; updates both sets."""
    kinds = (
        ["assign", "def", "loop", "text", "tuple"]
        + (["add", "await"] if defined else [])
        + (["call"] if functions else [])
    )
    kind, name, number = draw(st.sampled_from(kinds)), draw(NAMES), draw(NUMBERS)
    known = draw(st.sampled_from(sorted(defined))) if defined else str(number)
    if kind == "def":
        name = draw(st.sampled_from(["f", "g"]))
        default = draw(st.sampled_from([str(number), known]))
        functions.add(name)
        return f"def {name}(x={default}):\n    '''doc\n  string'''\n    return x + {known} + {number}"
    text = {
        "assign": f"{name} = {number} + {known}",
        "loop": f"{name} = 0\nfor i in range({number}):\n    {name} += i * {known}",
        "text": f"{name} = len('''x\n  {number}''')",
        "tuple": f"{name}, z = {known}, {number}",
        "add": f"{name} = {known}\n{name} += {number}",
        "await": f"{name} = await double({known}) + await double({number})",
        "call": f"{name} = {draw(st.sampled_from(sorted(functions)))}() + 1" if functions else "",
    }[kind]
    defined.add(name)
    return text


@st.composite
def notebooks(draw):
    defined: set = set()
    functions: set = set()
    cells = [ASYNC]
    for _ in range(draw(st.integers(1, 6))):
        cells.append("\n".join(draw(statements(defined, functions)) for _ in range(draw(st.integers(1, 3)))))
    return cells


@given(notebooks())
@settings(max_examples=40)
def test_random_notebooks(tmp_path_factory, cells):
    """Cells run in one namespace == the script."""
    text = exported(tmp_path_factory.mktemp("random"), *cells).text
    assert plain(run_text(text)) == plain(in_cells(*cells))


def test_sixty_cells_export_quickly(tmp_path):
    """A large notebook costs less than sixty times the smallest one, and a fixed part: nothing is quadratic."""

    def seconds(count):
        path = write(
            tmp_path,
            *(f"def f{i}(x):\n    '''{i}'''\n    return x + {i}\n\nx{i} = f{i}({i})\nx{i}" for i in range(count)),
        )
        times = []
        for _ in range(3):
            start = time.process_time()
            export_text(path)
            times.append(time.process_time() - start)
        return statistics.median(times)

    seconds(1)
    assert seconds(60) < 60 * 3 * seconds(3)


def test_the_scripts_text_is_readable(tmp_path):
    """No exec, no encoded code, no functions around cells; every line of the notebook is there, once."""
    text = (ROOT / "notebooks" / "scripts" / "01_rloo.py").read_text(encoding="utf-8")
    assert "exec(" not in text and "base64" not in text
    for one in nbformat.read(ROOT / "notebooks" / "01_rloo.ipynb", as_version=4).cells:
        for line in one.source.split("\n"):
            assert not line.strip() or line.strip() in text
    shutil.copy(ROOT / "notebooks" / "01_rloo.ipynb", tmp_path / "01_rloo.ipynb")
    assert export_text(tmp_path / "01_rloo.ipynb").text == text


def test_importing_the_script_has_no_side_effects(tmp_path, monkeypatch):
    text = exported(
        tmp_path, "import os\nprint('x')", "open('made', 'w').close()  # rlkit: ok W208", "def f():\n    return 3"
    ).text
    monkeypatch.chdir(tmp_path)
    found = run_text(text, "--not-a-flag", name="nb")
    assert found["f"]() == 3 and not (tmp_path / "made").exists()
    assert problems(tmp_path, "x = 1") == []


def test_each_placement_has_a_reason(tmp_path):
    cells = [
        "import re\nprint(1)",
        "n = len('a')\nimport json\nk = 3\ndef f(x=n):\n    return x\ndef g():\n    return k",
    ]
    program = analyse(read_notebook(write(tmp_path, *cells)))
    decisions = decide(program, None).decisions
    assert [f"cell {unit.cell} line {unit.line}: {one.level}: {one.reason}" for unit, one in decisions.items()] == [
        "cell 1 line 1: module: nothing has run before it",
        "cell 1 line 2: block: a statement that runs",
        "cell 2 line 1: block: a statement that runs",
        "cell 2 line 2: block: nothing at module level needs it",
        "cell 2 line 3: module if needed: what stands at module level needs it",
        "cell 2 line 4: block: its definition reads 'n', which run cells make",
        "cell 2 line 6: module: a definition that needs nothing of the block",
    ]
