"""What may go wrong on several processes or in workers: W codes. `# rlkit: ok W203` on the line silences one."""

import ast
import itertools
import sys
from collections.abc import Iterator

from rlkit.export.checks import Check, Facts, calls
from rlkit.export.handed import handed_on, is_definition, names_of_runs
from rlkit.export.problems import Problem
from rlkit.export.runtime.flags import own_flags
from rlkit.export.syntax import dotted, root
from rlkit.export.tags import near_miss

COLLECTIVE = {
    "barrier",
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
} | {
    "prepare",
    "loss_step",
    "evaluate",
    "estimate_vstar",
    "save_pretrained",
    "state_dict",
    "steps",
    "resume",
}
OF_RUN = {"log", "save", "start"}  # collective on a run, harmless on a file or a logger
SEEDING = {"manual_seed", "seed", "manual_seed_all"}
WRITING = {"savefig", "to_csv", "to_json", "to_parquet", "to_pickle", "write_text", "write_bytes", "to_html"}
WRITING_DOTTED = {"torch.save", "numpy.save", "numpy.savez", "wandb.init", "trackio.init", "pickle.dump"}
WIDGETS = {"ipywidgets", "tqdm.notebook", "tqdm.tqdm_notebook"}


def worker_cannot_see(facts: Facts) -> Iterator[Problem]:
    """W201: a function that is handed on, and would fail in a worker process."""
    units = facts.program.units
    above = {name for unit in facts.placement.module for name in unit.binds}
    below = {name: unit.cell for unit in units if unit not in facts.placement.module for name in unit.binds}
    reads = {name: unit.later for unit in facts.placement.module for name in unit.binds if is_definition(unit)}
    for name, (cell, line) in sorted(handed_on(facts.program).items(), key=lambda item: item[1]):
        if name in facts.placement.reasons or name not in above:
            why = facts.placement.reasons.get(name, "it is defined in a statement that runs")
            reason = f"a worker process cannot find `{name}`: {why}."
            yield Problem("W201", cell, line, reason, "Define it once, from names that imports or parameters give.")
            continue
        missing, todo, done = set(), [name], set()
        while todo:
            one = todo.pop()
            done.add(one)
            for other in reads.get(one, frozenset()):
                if other in below and other not in above:
                    missing.add(other)
                elif other not in done:
                    todo.append(other)
        if missing:
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
    fix = "Use world.device."
    for cell, node, name in calls(facts.program):
        last = name.rsplit(".", 1)[-1]
        reason = f"`.{last}()`" if last == "cuda" and "." in name else ""
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            text = value.value if isinstance(value, ast.Constant) else None
            if isinstance(text, str) and (text == "cuda" or text.startswith("cuda:")):
                reason = f'`"{text}"`'
        for keyword in node.keywords:
            if (
                keyword.arg == "device_map"
                and isinstance(keyword.value, ast.Constant)
                and keyword.value.value == "auto"
            ):
                reason = '`device_map="auto"`'
        if reason:
            yield Problem("W203", cell.number, node.lineno, f"{reason}: every process would use the same GPU.", fix)


def differs_between_processes(facts: Facts) -> Iterator[Problem]:
    """W204: seeding after prepare, hash() of a text, the order of a set."""
    prepared = False
    for cell, node, name in calls(facts.program):
        last = name.rsplit(".", 1)[-1]
        prepared |= last == "prepare"
        if prepared and last in SEEDING and "." in name:
            reason = f"`{name}` after `prepare`: sampling and data order then follow another seed than world.seed."
            yield Problem("W204", cell.number, node.lineno, reason, "Seed once, with rl.setup(seed=...).")
        if name == "hash":
            reason = "`hash()` of a text differs from process to process."
            yield Problem("W204", cell.number, node.lineno, reason, "Use hashlib, or a counter.")
    for cell, loop in facts.program.nodes((ast.For, ast.comprehension)):
        over = getattr(loop, "iter", None)
        if isinstance(over, ast.Set) or (isinstance(over, ast.Call) and dotted(over.func) in ("set", "frozenset")):
            reason = "the order of a set differs from process to process."
            yield Problem("W204", cell.number, over.lineno, reason, "Loop over sorted(...).")


def waits_for_nobody(facts: Facts) -> Iterator[Problem]:
    """W205: something that all processes must do together, done by one."""
    runs = names_of_runs(facts.program)
    for cell, branch in facts.program.nodes(ast.If):
        if not isinstance(branch, ast.If) or not is_main_test(branch.test):
            continue
        for node in (part for statement in branch.body for part in ast.walk(statement)):
            if isinstance(node, ast.Call):
                name = dotted(node.func)
                last = name.rsplit(".", 1)[-1]
                if facts.program.full_name(node.func).split(".")[0] in sys.stdlib_module_names:
                    continue  # asyncio.gather, functools.reduce
                if last in COLLECTIVE or (last in OF_RUN and root(node.func) in runs):
                    reason = f"`{name}` on one process only: it waits for the others for ever."
                    yield Problem("W205", cell.number, node.lineno, reason, "Call it on every process; one writes.")


def past_the_wrapper(facts: Facts) -> Iterator[Problem]:
    """W206: .module, .forward() and .generate() go past DDP and FSDP2."""
    fix = "Use rl.sample, rl.compute_logps and rl.loss_step with the policy."
    inside = {id(part) for _, node in facts.program.nodes(ast.ClassDef) for part in ast.walk(node) if part is not node}
    imported = facts.program.imported
    for cell, node in facts.program.nodes(ast.Attribute):
        if isinstance(node, ast.Attribute) and id(node) not in inside and root(node) not in imported:
            if node.attr == "module":
                reason = f"`{dotted(node) or '.module'}`: gradients would not be averaged, and nothing says so."
                yield Problem("W206", cell.number, node.lineno, reason, fix)
    for cell, call, name in calls(facts.program):
        last = name.rsplit(".", 1)[-1]
        if (
            last in ("forward", "generate")
            and "." in name
            and id(call) not in inside
            and root(call.func) not in imported
        ):
            yield Problem("W206", cell.number, call.lineno, f"`{name}()` goes past the prepared model.", fix)


def needs_a_screen(facts: Facts) -> Iterator[Problem]:
    """W207: ipywidgets, tqdm.notebook, Colab's own package, plt.show(), figure.show()."""
    fix = "Use run.dashboard and tqdm.auto, or tag the cell notebook-only."
    for cell, node in facts.program.nodes((ast.Import, ast.ImportFrom)):
        module = getattr(node, "module", None)
        names = [alias.name for alias in getattr(node, "names", [])]
        for name in [module, *(f"{module}.{name}" for name in names)] if module else names:
            if name in WIDGETS or name.split(".")[0] == "ipywidgets":
                yield Problem("W207", cell.number, getattr(node, "lineno", 0), f"`{name}` needs a notebook.", fix)
                break
    for unit in facts.program.units:  # at the level of a cell: in a `try` or an `if` it is provided for
        for node in unit.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom) and "google.colab" in ast.unparse(node):
                reason = "`google.colab` exists only on Colab."
                yield Problem("W207", unit.cell, node.lineno, reason, "Tag the cell notebook-only.")
    for cell, call, name in calls(facts.program):
        is_figure = name.endswith(".show") and name.lower().startswith("fig")
        if name in ("plt.show", "matplotlib.pyplot.show") or is_figure:
            reason = f"`{name}()` waits for a window."
            yield Problem("W207", cell.number, call.lineno, reason, "Save the figure, or tag the cell notebook-only.")


def many_writers(facts: Facts) -> Iterator[Problem]:
    """W208: a file that every process writes."""
    guarded: set[int] = set()
    for _, node in facts.program.nodes((ast.If, ast.With, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        if isinstance(node, ast.If) and not is_main_test(node.test):
            continue
        if isinstance(node, ast.With) and not any("only_main" in ast.dump(item.context_expr) for item in node.items):
            continue
        guarded |= {id(part) for part in ast.walk(node)}
    for cell, call, name in calls(facts.program):
        last = name.rsplit(".", 1)[-1]
        writes = name in WRITING_DOTTED or (last in WRITING and "." in name) or (name == "open" and _mode(call))
        if writes and id(call) not in guarded:
            reason = f"`{name}`: every process writes."
            yield Problem("W208", cell.number, call.lineno, reason, "Put it under `if world.main:`.")


def out_of_order(facts: Facts) -> Iterator[Problem]:
    """W210: the notebook was last run in another order than that of the script."""
    counts = [(cell.number, cell.executed) for cell in facts.program.notebook.cells if cell.executed]
    for (before, first), (number, second) in itertools.pairwise(counts):
        if second is not None and first is not None and second < first:
            reason = f"was last run before cell {before}; the script runs from top to bottom."
            yield Problem("W210", number, 0, reason, "Restart the kernel and run all cells.")


def near_tags(facts: Facts) -> Iterator[Problem]:
    """W211: a tag that is almost one of ours; and a second loop."""
    for cell in facts.program.notebook.cells:
        for tag in cell.tags:
            meant = near_miss(tag)
            if meant:
                yield Problem("W211", cell.number, 0, f"the tag {tag!r} is not known.", f"Did you mean {meant!r}?")
    loops = [cell.number for cell in facts.program.notebook.cells if "loop" in cell.roles]
    for number in loops[1:]:
        yield Problem("W211", number, 0, f"a second cell tagged loop, after cell {loops[0]}.", "Keep one.")


def is_main_test(test: ast.expr) -> bool:
    """True for `world.main`, `rank == 0`, `is_main_process` and the like as condition, alone or in an `and`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(is_main_test(value) for value in test.values)
    if isinstance(test, ast.Compare):
        zero = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value == 0
        return zero and isinstance(test.ops[0], ast.Eq) and "rank" in ast.unparse(test.left).lower()
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return "rank" in ast.unparse(test.operand).lower()
    return dotted(test).rsplit(".", 1)[-1] in ("main", "is_main", "is_main_process", "is_main_rank")


def _mode(call: ast.Call) -> bool:
    modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return any(isinstance(m, ast.Constant) and isinstance(m.value, str) and set(m.value) & set("wax+") for m in modes)


WARNINGS: tuple[Check, ...] = (
    worker_cannot_see,
    parameter_overwritten,
    one_gpu,
    differs_between_processes,
    waits_for_nobody,
    past_the_wrapper,
    needs_a_screen,
    many_writers,
    out_of_order,
    near_tags,
)
