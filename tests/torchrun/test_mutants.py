"""One-line faults of several processes in a copy of rlkit: training on two ranks is no longer that on one.

Two of them run with the other tests. RLKIT_ALL_MUTANTS=1 runs all, a launch each:
RLKIT_ALL_MUTANTS=1 pytest -m torchrun -k mutant -rP tests/torchrun
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from comparing import assert_same_training
from launching import ROOT


@dataclass(frozen=True)
class Mutant:
    """`old`, which must stand exactly once in rlkit, becomes `new`; a scenario must come out otherwise."""

    name: str
    old: str
    new: str
    scenarios: tuple[str, ...]
    strategy: str = "ddp"
    always: bool = False


MUTANTS = [
    Mutant("per-rank mean", "collectives.sums(local).items()", "local.items()", ("uneven",), always=True),
    Mutant("no broadcast under FSDP2", "    broadcast_weights(policy.model)  # FSDP2 does not\n", "",
           ("unequal_start_alone",), strategy="fsdp2", always=True),
    Mutant("bypass", "self.scorer if torch.is_grad_enabled() else", "", ("uneven",)),
    Mutant("shares overlap", "start + each + (r < rest))", "start + each + 1)", ("adamw",)),
    Mutant("metrics of one rank", "collectives.gather_rows(rows)", "rows", ("uneven",)),
    Mutant("exchange in every pass", "contextlib.nullcontext() if last else scorer.no_sync()",
           "contextlib.nullcontext()", ("accumulation",)),
    Mutant("no exchange, DDP", "contextlib.nullcontext() if last else scorer.no_sync()",
           "scorer.no_sync()", ("accumulation",)),
    Mutant("no exchange, FSDP2", "set_requires_gradient_sync(last)",
           "set_requires_gradient_sync(False)", ("accumulation",), strategy="fsdp2"),
    Mutant("mean over ranks for the sum", "updater.backward(share * collectives.size())", "updater.backward(share)",
           ("uneven",)),
    Mutant("dummy pass with a weight", "policy.score_tokens(row).logp.sum() * 0.0",
           "policy.score_tokens(row).logp.sum() * 0.1", ("accumulation",)),
    Mutant("each rank its own number of passes",
           'collectives.maxima({"passes": float(math.ceil(rows / size))})["passes"]',
           "math.ceil(rows / size)", ("accumulation",), strategy="fsdp2"),
    Mutant("normalised per rank",
           'collectives.gather_rows({"known": advantage[scorable & (count > 1)]})["known"].to(advantage)',
           "advantage[scorable & (count > 1)]", ("adamw",)),
    Mutant("sampling noise by place in the share", "batch.group_id.tolist(), num_generations",
           "list(range(len(batch))), num_generations", ("uneven",)),
    Mutant("prefetch by the record of passes", "        module.set_modules_to_backward_prefetch([before])",
           "        pass", ("one_group",), strategy="fsdp2"),
]  # fmt: skip


def file_of(mutant: Mutant) -> Path:
    """The file under rlkit/ that holds the line."""
    counts = {file: file.read_text(encoding="utf-8").count(mutant.old) for file in (ROOT / "rlkit").rglob("*.py")}
    found = [file for file, count in counts.items() if count]
    assert [counts[file] for file in found] == [1], f"{mutant.old!r} stands in {found}"
    return found[0].relative_to(ROOT)


def test_every_mutant_has_its_line():
    for mutant in MUTANTS:
        file_of(mutant)


@pytest.mark.torchrun
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_noticed(launcher, tmp_path, mutant):
    if not mutant.always and os.environ.get("RLKIT_ALL_MUTANTS") != "1":
        pytest.skip("RLKIT_ALL_MUTANTS=1 runs it")
    shutil.copytree(ROOT / "rlkit", tmp_path / "rlkit", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / file_of(mutant)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    alone = launcher("equality_worker.py", ranks=1)
    together = launcher("equality_worker.py", *mutant.scenarios, ranks=2, strategy=mutant.strategy, package=tmp_path)
    with pytest.raises(AssertionError) as found:
        for name in mutant.scenarios:
            assert_same_training(alone, together, name, mutant.strategy)
    print(f"{mutant.name}: {str(found.value)[:150].splitlines()[:1]} {last_error(together.stderr)}")


def last_error(stderr: str) -> str:
    """The line that says why a launch failed, if it did."""
    lines = [line for line in stderr.splitlines() if "Error: " in line and "ChildFailed" not in line]
    return lines[0][:150] if lines else ""
