"""A model card that says how a model was trained: method, settings, versions, results."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.run.folder import versions
from rlkit.run.line_files import read_json, read_lines

if TYPE_CHECKING:
    from rlkit.policy import Policy

PAPERS = {
    "RLOO": "Ahmadian et al. 2024, arXiv 2402.14740",
    "A*-PO": "Brantley et al. 2025, arXiv 2505.20686",
}


def model_card(policy: "Policy", *, method: str, run: Any = None) -> str:
    """The text of a model card (README.md with its metadata).

    Args:
        policy: the policy.
        method: "RLOO", "A*-PO", or the name of your own.
        run: the `Run` or its folder; its parameters, versions and last logged step are put in.

    Example: `print(rl.model_card(policy, method="RLOO", run=run))`
    """
    lines = [
        "---",
        "library_name: transformers",
        f"base_model: {json.dumps(policy.name)}",
        f"tags: [rlkit, reinforcement-learning, {json.dumps(method)}]",
        "---",
        "",
        f"# {policy.name.rstrip('/').rsplit('/', 1)[-1]}, trained with {method}",
        "",
        f"Trained by online reinforcement learning with rlkit: {method}"
        + (f" ({PAPERS[method]})." if method in PAPERS else "."),
        f"{policy.version} optimizer steps from `{policy.name}`.",
        "",
    ]
    found: dict[str, str] = versions()
    if run is not None:
        folder = Path(getattr(run, "path", run))
        config = read_json(folder / "config.json")
        if config is None:
            raise FileNotFoundError(f"model_card: {folder / 'config.json'} of the run is missing or not whole.")
        found = config.get("versions", found)
        if config.get("parameters"):
            lines += ["## Settings", "", *_table(config["parameters"]), ""]
        logged = read_lines(folder / "metrics.jsonl")
        if logged:
            shown = ("step", "reward", "kl", "entropy", "completions/mean_length", "reward_calls", "num_tokens")
            lines += ["## Last step", "", *_table({n: logged[-1][n] for n in shown if n in logged[-1]}), ""]
    return "\n".join([*lines, "## Versions", "", *_table(found), ""])


def _table(values: dict[str, Any]) -> list[str]:
    rows = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in values.items()]
    return ["| name | value |", "|---|---|", *rows]
