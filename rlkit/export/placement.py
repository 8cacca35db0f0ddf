"""Which statements stand at module level, where worker processes see them, and which in the guarded block.

At module level: imports and settings of the environment while nothing has run yet, the parameters, functions and
classes whose names are bound once and whose definition needs nothing from run cells, and the later imports of the
standard library and constants that these need. Everything else runs in order under `if __name__ == "__main__":`. A
block, not a function: names stay module globals, as in the notebook.

Each statement is put to `RULES` in turn; the first that applies decides, and says why. A rule is a pure function of the
statement and of what stands before it. `place` then sends back definitions that need a name of the block.
"""

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rlkit.export.analysis import Program, Unit, words
from rlkit.export.awaits import SCRIPT
from rlkit.export.functions import handed_on
from rlkit.export.movable import TIMED, Names
from rlkit.export.syntax import BUILTINS, Definition, is_setting, is_standard, roots, walk

PROVIDED = frozenset(
    {"__name__", "__doc__", "__file__", "__builtins__", "__annotations__", "display", "get_ipython"}
    | {"__module__", "__qualname__"}  # in the body of a class
)
LOOKS_UP = frozenset({"globals", "locals", "vars", "dir", "eval", "exec"})  # they read names that stand in a string


@dataclass(frozen=True)
class Decision:
    """Where a unit goes, and why."""

    level: Literal["module", "module if needed", "block"]
    reason: str


Decisions = Mapping[Unit, Decision]


@dataclass(frozen=True)
class Placement:
    """The decision for each unit, in the order of the notebook."""

    decisions: Decisions

    @property
    def module(self) -> frozenset[Unit]:
        """Units at module level."""
        return frozenset(unit for unit, decision in self.decisions.items() if decision.level != "block")

    @property
    def reasons(self) -> dict[str, str]:
        """For each function or class in the block: why it is there."""
        return {
            node.name: decision.reason
            for unit, decision in self.decisions.items()
            for node in unit.nodes
            if decision.level == "block" and isinstance(node, Definition)
        }


@dataclass(frozen=True)
class Before:
    """What stands before a unit."""

    known: Names
    fixed: frozenset[int]  # numbers of the cells that stand at module level in any case
    above: frozenset[str] = frozenset()  # names bound at module level
    below: frozenset[str] = frozenset()  # names bound in the block
    read: frozenset[str] = frozenset()  # names that statements of the block may have read
    later: dict[str, frozenset[str]] = field(default_factory=dict)  # what each name reads when it is called
    running: bool = False  # a statement of the block has run
    star: bool = False  # one of these was `from x import *`

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are not bound at module level."""
        return sorted(set(names) - self.above - BUILTINS - PROVIDED)

    def has_no_effect_on(self, unit: Unit) -> bool:
        """True if nothing has run that a unit might have to follow, and no function that it replaces is below."""
        return not (self.running or unit.binds & self.below or (unit.star and self.below))


def fixed_cell(unit: Unit, before: Before) -> Decision | None:
    """Cells tagged setup or parameters."""
    return Decision("module", "its cell is tagged setup or parameters") if unit.cell in before.fixed else None


def comment(unit: Unit, before: Before) -> Decision | None:
    """Comments without code."""
    if unit.nodes:
        return None
    return Decision("block" if before.running else "module", "a comment stays with what precedes it")


def imports(unit: Unit, before: Before) -> Decision | None:
    """Imports; after something has run, only those of the standard library."""
    if not unit.is_import:
        return None
    if before.has_no_effect_on(unit) or (all(map(is_standard, unit.nodes)) and not unit.star):
        return _movable(unit, before)
    return Decision("block", "an import whose effect may depend on what ran before it")


def definition(unit: Unit, before: Before) -> Decision | None:
    """Functions and classes."""
    node = unit.nodes[0]
    if not isinstance(node, Definition):
        return None
    missing = before.missing(unit.now - unit.binds)
    reason = ""
    if SCRIPT in missing:
        reason = "its definition awaits something"
    elif missing:
        reason = f"its definition reads {missing[0]!r}, which run cells make"
    elif before.known.bound[node.name] > 1:
        reason = "its name is bound more than once"
    elif before.running and (before.star or node.name in before.read | BUILTINS):
        reason = "what runs before it reads its name"
    elif before.running and not before.known.is_steady_definition(node):
        reason = "its definition calls something whose result depends on when it is called"
    return Decision("block", reason) if reason else Decision("module", "a definition that needs nothing of the block")


def constant(unit: Unit, before: Before) -> Decision | None:
    """Constants."""
    is_constant = all(map(before.known.is_constant, unit.nodes)) and not unit.binds & BUILTINS
    return _movable(unit, before) if is_constant else None


def setting(unit: Unit, before: Before) -> Decision | None:
    """Settings of the environment, before anything has run."""
    if before.running or before.missing(unit.now) or not all(map(is_setting, unit.nodes)):
        return None
    return Decision("module", "a setting that imports may read")


RULES: tuple[Callable[[Unit, Before], Decision | None], ...] = (
    fixed_cell,
    comment,
    imports,
    definition,
    constant,
    setting,
    lambda unit, before: Decision("block", "a statement that runs"),
)


def place(program: Program, parameters: int | None) -> Placement:
    """Decide for each unit; `parameters` is the number of the parameters cell."""
    fixed = {cell.number for cell in program.cells if "setup" in cell.cell.roles or cell.number == parameters}
    before = Before(Names(Counter(name for unit in program.units for name in unit.binds)), frozenset(fixed))
    decisions: dict[Unit, Decision] = {}
    for unit in program.units:
        decisions[unit] = next(found for rule in RULES if (found := rule(unit, before)))
        before = _after(before, unit, decisions[unit])
    return Placement(_without_unneeded(_sent_back(decisions, handed_on(program).keys())))


def _movable(unit: Unit, before: Before) -> Decision:
    if before.has_no_effect_on(unit):
        return Decision("module", "nothing has run before it")
    if before.star or any(before.known.bound[name] > 1 or name in before.read for name in unit.binds):
        return Decision("block", "its name is bound more than once, or read before it")
    if before.missing(unit.now):
        return Decision("block", "it reads a name that run cells make")
    return Decision("module if needed", "what stands at module level needs it")


def _after(before: Before, unit: Unit, decision: Decision) -> Before:
    """What stands before the next unit."""
    if not unit.nodes:
        return before
    known, node, is_above = before.known, unit.nodes[0], decision.level != "block"
    later = before.later | {name: before.later.get(name, frozenset()) | unit.later for name in unit.binds}
    is_steady = isinstance(node, Definition) and known.is_steady_definition(node)
    if unit.cell not in before.fixed:
        if isinstance(node, ast.ClassDef) and known.is_hooked(node):
            known = replace(known, hooked=known.hooked | {node.name})
        elif is_above and unit.is_import:
            known = replace(known, imported=known.imported | unit.binds)
            if all(is_standard(node) and TIMED.isdisjoint(roots(node)) for node in unit.nodes):
                known = replace(known, steady=known.steady | unit.binds)
    before = replace(before, known=known, later=later)
    if is_above:
        # What a function declares global, it binds when it is called.
        named = frozenset(node.name for node in unit.nodes if isinstance(node, Definition)) or unit.binds
        return replace(before, above=before.above | named)
    before = replace(before, below=before.below | unit.binds)
    if is_steady:
        return replace(before, read=before.read | unit.now)
    return replace(before, read=before.read | _reads(unit, later), running=True, star=before.star or unit.star)


def _reads(unit: Unit, later: Mapping[str, frozenset[str]]) -> set[str]:
    """Names that a unit, and the functions that it can call, may read when it runs."""
    found: set[str] = set()
    todo = set(unit.reads)
    if todo & LOOKS_UP:
        texts = (part.value for part in walk(unit.nodes) if isinstance(part, ast.Constant))
        todo |= {word for text in texts if isinstance(text, str) for word in words(text)}
    while todo:
        found |= todo
        todo = set().union(*(later.get(name, ()) for name in todo)) - found
    return found


def needs_the_block(unit: Unit, below: Collection[str], handed: Collection[str]) -> Decision | None:
    """Definitions that read a name of the block.

    A function that is handed on stays above if only calling it needs the name: a worker process then finds it and ends
    with a NameError; otherwise it would look for the function forever.
    """
    if any(isinstance(node, Definition) for node in unit.nodes):
        if now := unit.now.intersection(below):
            return Decision("block", f"its definition reads {min(now)!r}")
        if (called := unit.later.intersection(below)) and not unit.binds.intersection(handed):
            return Decision("block", f"it reads {min(called)!r}, which run cells make")
    return None


def _sent_back(decisions: Decisions, handed: Collection[str]) -> Decisions:
    while True:
        module = Placement(decisions).module
        below = {name for unit in decisions if unit not in module for name in unit.binds}
        below -= {name for unit in module for name in unit.binds}
        back = {unit: found for unit in module if (found := needs_the_block(unit, below, handed))}
        if not back:
            return decisions
        decisions = {**decisions, **back}


def _without_unneeded(decisions: Decisions) -> Decisions:
    """Without the constants and imports that nothing at module level needs."""
    optional = {unit for unit, decision in decisions.items() if decision.level == "module if needed"}
    kept = Placement(decisions).module - optional
    while True:
        needed = {name for unit in kept for name in unit.reads}
        more = {unit for unit in optional - kept if unit.binds & needed}
        if not more:
            break
        kept |= more
    return {**decisions, **dict.fromkeys(optional - kept, Decision("block", "nothing at module level needs it"))}
