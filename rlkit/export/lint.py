"""What may go wrong on several processes or in workers: W codes. `# rlkit: ok W203` on the line silences one."""

import ast
import itertools
import sys
from collections.abc import Callable, Iterator

from rlkit.export.analysis import Call
from rlkit.export.checks import Check, Facts, line_of
from rlkit.export.functions import handed_on
from rlkit.export.problems import Problem
from rlkit.export.runtime.flags import own_flags
from rlkit.export.syntax import Definition, arguments, dotted, mentions, root, walk
from rlkit.export.tags import near_miss

COLLECTIVE = frozenset(
    {"barrier", "all_reduce", "all_gather", "all_gather_object", "broadcast", "reduce", "gather", "scatter"}
    | {"prepare", "loss_step", "evaluate", "estimate_vstar", "save_pretrained", "state_dict", "steps", "resume"}
)
OF_RUN = {"log", "save", "start"}  # collective on a run, harmless on a file or a logger
SEEDING = {"manual_seed", "seed", "manual_seed_all"}
WRITING = {"savefig", "to_csv", "to_json", "to_parquet", "to_pickle", "write_text", "write_bytes", "to_html"}
WRITING_DOTTED = {"torch.save", "numpy.save", "numpy.savez", "wandb.init", "trackio.init", "pickle.dump"}
WIDGETS = {"ipywidgets", "tqdm.notebook", "tqdm.tqdm_notebook"}


def worker_cannot_see(facts: Facts) -> Iterator[Problem]:
    """W201: a function that is handed on, and would fail in a worker process."""
    module, reasons = facts.placement.module, facts.placement.reasons
    above = {name for unit in module for name in unit.binds}
    below = {name: unit.cell for unit in facts.program.units if unit not in module for name in unit.binds - above}
    reads = {
        name: unit.later
        for unit in module
        if any(isinstance(node, Definition) for node in unit.nodes)
        for name in unit.binds
    }
    for name, (cell, line) in handed_on(facts.program).items():
        if name in reasons or name not in above:
            reason = f"a worker process cannot find `{name}`: "
            reason += f"{reasons.get(name, 'it is defined in a statement that runs')}."
            yield Problem("W201", cell, line, reason, "Define it once, from names that imports or parameters give.")
            continue
        done, todo = set[str](), {name}
        while todo:
            done |= todo
            todo = set().union(*(reads.get(one, ()) for one in todo)) - done
        if missing := done & below.keys():
            first = min(missing)
            reason = f"`{name}` reads `{first}`, which cell {below[first]} makes: a NameError in a worker process."
            yield Problem("W201", cell, line, reason, "Give it as an argument, or make it inside the function.")


def parameter_overwritten(facts: Facts) -> Iterator[Problem]:
    """W202: a flag that a later cell overwrites."""
    for unit in facts.program.units:
        if unit.cell != facts.parameters.cell:
            for name in sorted(unit.binds & facts.parameters.names):
                reason = f"{name!r} gets another value than the flag {own_flags(name)[0]} gave it."
                yield Problem("W202", unit.cell, unit.line, reason, "Use another name.")


def one_gpu(facts: Facts) -> Iterator[Problem]:
    """W203: .cuda(), "cuda:0", device_map="auto"."""
    for call in facts.program.calls:
        shown = "`.cuda()`" if call.last == "cuda" and call.is_attribute else ""
        for text in (getattr(value, "value", None) for value in arguments(call.node)):
            if isinstance(text, str) and (text == "cuda" or text.startswith("cuda:")):
                shown = f'`"{text}"`'
        if any(one.arg == "device_map" and getattr(one.value, "value", None) == "auto" for one in call.node.keywords):
            shown = '`device_map="auto"`'
        if shown:
            yield call.problem("W203", f"{shown}: every process would use the same GPU.", "Use world.device.")


def differs_between_processes(facts: Facts) -> Iterator[Problem]:
    """W204: seeding after prepare, hash() of a text, the order of a set."""
    prepared = False
    for call in facts.program.calls:
        prepared |= call.last == "prepare"
        if prepared and call.last in SEEDING and call.is_attribute:
            reason = f"`{call.name}` after `prepare`: sampling and data order then follow another seed than world.seed."
            yield call.problem("W204", reason, "Seed once, with rl.setup(seed=...).")
        if call.name == "hash":
            reason = "`hash()` of a text differs from process to process."
            yield call.problem("W204", reason, "Use hashlib, or a counter.")
    for cell, loop in facts.program.nodes(ast.For, ast.comprehension):
        over = loop.iter
        if isinstance(over, ast.Set) or (isinstance(over, ast.Call) and dotted(over.func) in ("set", "frozenset")):
            reason = "the order of a set differs from process to process."
            yield Problem("W204", cell, over.lineno, reason, "Loop over sorted(...).")


def only_one_joins(facts: Facts) -> Iterator[Problem]:
    """W205: a collective call that only one process makes."""
    guarded = _inside(facts, lambda node: isinstance(node, ast.If) and is_main_test(node.test))
    for call in facts.program.calls:
        name = dotted(call.node.func)
        together = call.last in COLLECTIVE or (call.last in OF_RUN and root(call.node.func) in facts.program.runs)
        is_standard = call.name.split(".")[0] in sys.stdlib_module_names  # asyncio.gather, functools.reduce
        if name and together and not is_standard and id(call.node) in guarded:
            reason = f"`{name}` on one process only: it waits for the others forever."
            yield call.problem("W205", reason, "Call it on every process; one writes.")


def past_the_wrapper(facts: Facts) -> Iterator[Problem]:
    """W206: .module, .forward() and .generate() go past DDP and FSDP2."""
    fix = "Use rl.sample, rl.compute_logps and rl.loss_step with the policy."
    inside = _inside(facts, lambda node: isinstance(node, ast.ClassDef))
    imported = facts.program.imported
    for cell, node in facts.program.nodes(ast.Attribute):
        if node.attr == "module" and id(node) not in inside and root(node) not in imported:
            reason = f"`{dotted(node) or '.module'}`: gradients would not be averaged, and nothing says so."
            yield Problem("W206", cell, node.lineno, reason, fix)
    for call in facts.program.calls:
        passes = call.last in ("forward", "generate") and call.is_attribute
        if passes and id(call.node) not in inside and root(call.node.func) not in imported:
            yield call.problem("W206", f"`{call.name}()` goes past the prepared model.", fix)


def needs_a_screen(facts: Facts) -> Iterator[Problem]:
    """W207: ipywidgets, tqdm.notebook, Colab's own package, plt.show(), figure.show()."""
    for cell, node in facts.program.nodes(ast.Import, ast.ImportFrom):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{name}" for name in names)]
        for name in names:
            if name in WIDGETS or name.split(".")[0] == "ipywidgets":
                fix = "Use run.dashboard and tqdm.auto, or tag the cell notebook-only."
                yield Problem("W207", cell, node.lineno, f"`{name}` needs a notebook.", fix)
                break
    for unit in facts.program.units:  # at the level of a cell: in a `try` or an `if` it is provided for
        for node in unit.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom) and "google.colab" in ast.unparse(node):
                reason = "`google.colab` exists only on Colab."
                yield Problem("W207", unit.cell, node.lineno, reason, "Tag the cell notebook-only.")
    for call in facts.program.calls:
        is_figure = call.name.endswith(".show") and call.name.lower().startswith("fig")
        if call.name in ("plt.show", "matplotlib.pyplot.show") or is_figure:
            fix = "Save the figure, or tag the cell notebook-only."
            yield call.problem("W207", f"`{call.name}()` waits for a window.", fix)


def many_writers(facts: Facts) -> Iterator[Problem]:
    """W208: a file that every process writes; not in functions, which one process may call."""

    def may_be_one(node: ast.AST) -> bool:
        if isinstance(node, ast.If):
            return is_main_test(node.test)
        if isinstance(node, ast.With):
            return any(mentions(item.context_expr, "only_main") for item in node.items)
        return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)

    guarded = _inside(facts, may_be_one)
    for call in facts.program.calls:
        writes = call.name in WRITING_DOTTED or (call.last in WRITING and call.is_attribute) or _opens_to_write(call)
        if writes and id(call.node) not in guarded:
            yield call.problem("W208", f"`{call.name}`: every process writes.", "Put it under `if world.main:`.")


def needs_its_path(facts: Facts) -> Iterator[Problem]:
    """W209: `__file__`."""
    for unit in facts.program.units:
        if "__file__" in unit.reads:
            reason, fix = "`__file__` does not exist in a notebook.", "Use a path from the parameters."
            yield Problem("W209", unit.cell, line_of(unit, "__file__"), reason, fix)


def out_of_order(facts: Facts) -> Iterator[Problem]:
    """W210: the notebook was last run in another order than that of the script."""
    counts = [(cell.number, cell.executed) for cell in facts.program.notebook.cells if cell.executed]
    for (before, first), (number, second) in itertools.pairwise(counts):
        if second < first:
            reason = f"was last run before cell {before}; the script runs from top to bottom."
            yield Problem("W210", number, 0, reason, "Restart the kernel and run all cells.")


def near_tags(facts: Facts) -> Iterator[Problem]:
    """W211: a tag that is almost one of ours; and a second loop."""
    for cell in facts.program.notebook.cells:
        for tag in cell.tags:
            if meant := near_miss(tag):
                yield Problem("W211", cell.number, 0, f"the tag {tag!r} is not known.", f"Did you mean {meant!r}?")
    loops = [cell.number for cell in facts.program.notebook.cells if "loop" in cell.roles]
    for number in loops[1:]:
        yield Problem("W211", number, 0, f"a second cell tagged loop, after cell {loops[0]}.", "Keep one.")


def _inside(facts: Facts, chosen: Callable[[ast.AST], bool]) -> set[int]:
    """Ids of the nodes inside the chosen ones; of an `if` only its body."""
    found: set[int] = set()
    for _, node in facts.program.nodes(ast.AST):
        if chosen(node):
            tops = node.body if isinstance(node, ast.If) else ast.iter_child_nodes(node)
            found |= {id(part) for part in walk(tops)}
    return found


def is_main_test(test: ast.expr) -> bool:
    """True for `world.main`, `rank == 0`, `is_main_process` and the like as condition, alone or in an `and`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(is_main_test, test.values))
    if isinstance(test, ast.Compare):
        zero = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value == 0
        return zero and isinstance(test.ops[0], ast.Eq) and mentions(test.left, "rank")
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return mentions(test.operand, "rank")
    return dotted(test).rsplit(".", 1)[-1] in ("main", "is_main", "is_main_process", "is_main_rank")


def _opens_to_write(call: Call) -> bool:
    modes = [*call.node.args[1:2], *(keyword.value for keyword in call.node.keywords if keyword.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
    return call.name == "open" and any(set(text) & set("wax+") for text in texts)


WARNINGS: tuple[Check, ...] = (
    worker_cannot_see,
    parameter_overwritten,
    one_gpu,
    differs_between_processes,
    only_one_joins,
    past_the_wrapper,
    needs_a_screen,
    many_writers,
    needs_its_path,
    out_of_order,
    near_tags,
)
