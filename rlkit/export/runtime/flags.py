"""Flags of an exported script: its parameters and those of the run, with strict types.

Order: default of the notebook < config file < command line. An error for an unknown name suggests the nearest known
one. A parameter of the notebook that is named like a run flag (`max_steps`, `strategy`) replaces it, since the notebook
passes the value on itself. docs/decisions.md says why this is argparse and not a library on top of it.
"""

import argparse
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from rlkit.export.runtime.kinds import accept, from_text
from rlkit.support.text import did_you_mean, nearest

RESERVED = ("help", "config", "print_config", "print_all_ranks", "out", "resume")  # no parameter may have these names


@dataclass(frozen=True)
class Parameter:
    """A flag: name, kind (see `rlkit.export.runtime.kinds`), default and help."""

    name: str
    kind: str
    default: Any
    help: str = ""


def own_flags(name: str) -> list[str]:
    """The flags that set a parameter: `--max-steps` and `--max_steps`; `--_x` for `_x`."""
    dashed = name if name.startswith("_") else name.replace("_", "-")
    return list(dict.fromkeys([f"--{dashed}", f"--{name}"]))


def all_flags(name: str, kind: str) -> list[str]:
    """`own_flags`, and for a switch also their `--no-...`."""
    own = own_flags(name)
    return own + [f"--no-{flag[2:]}" for flag in own] if kind == "bool" else own


@dataclass(frozen=True)
class Resolved:
    """Values of all parameters, and of the run flags that a command line or a config file gives."""

    parameters: dict[str, Any]
    run: dict[str, Any]


def run_flags() -> list[Parameter]:
    """The flags that every script has."""
    from rlkit.world import Backend, Precision, Strategy

    strategy, precision, backend = (f"Literal{list(get_args(one))}" for one in (Strategy, Precision, Backend))
    return [
        Parameter("strategy", strategy, "auto", "how weights are laid out over processes"),
        Parameter("precision", f"{precision} | None", None, "bf16: autocast on float32 weights"),
        Parameter("out", "str | None", None, "folder of the run, instead of the notebook's"),
        Parameter("resume", "str", "none", "auto: resume from the newest checkpoint, if any; none; or a checkpoint"),
        Parameter("seed", "int | None", None, "of rl.setup and of the prompts' order, instead of the notebook's"),
        Parameter("max_steps", "int | None", None, "steps of the run, instead of the notebook's"),
        Parameter("save_every", "int | None", None, "steps between checkpoints"),
        Parameter("keep", "int | None", None, "checkpoints to keep"),
        Parameter("vllm_url", "str | None", None, "sample from vLLM servers: http://HOST:PORT, several with commas"),
        Parameter("vllm_folder", "str | None", None, "send weights to them through this shared folder"),
        Parameter("vllm_group_port", "int", 51216, "port for sending weights to them by NCCL"),
        Parameter("vllm_deadline", "float", 60.0, "seconds within which they must answer"),
        Parameter("dist_timeout", "float | None", None, "minutes that a process waits for the others (setup's)"),
        Parameter("backend", f"{backend} | None", None, "of torch.distributed (the device's)"),
        Parameter("deterministic", "bool", False, "use only deterministic algorithms of torch: slower, or an error"),
        Parameter("print_all_ranks", "bool", False, "every process prints, not only the main one"),
    ]


class _Switch(argparse.BooleanOptionalAction):
    """`--name` and `--no-name`. argparse's own action reads the `--no-kl` of a parameter `no_kl` as False."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert option_string is not None
        setattr(namespace, self.dest, option_string in own_flags(self.dest))


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line instead of the list of all flags."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nAll flags: {self.prog} --help\n")


def parse(parameters: Sequence[Parameter], arguments: Sequence[str], *, prog: str, description: str = "") -> Resolved:
    """Read a command line: the value of every parameter of the notebook, and of the run flags that were given.

    Raises:
        SystemExit: 2 with a one-line error for a wrong flag, name, value or file; 0 after --help and --print-config.

    Example:
        >>> parse([Parameter("max_steps", "int", 120)], ["--max-steps", "3"], prog="nb.py").parameters
        {'max_steps': 3}
    """
    own = {parameter.name: parameter for parameter in parameters}
    run = {parameter.name: parameter for parameter in run_flags() if parameter.name not in own}
    known = own | run
    parser = _parser(own, run, prog, description)
    given, left = parser.parse_known_args(_join_negative(arguments, known))
    if left:
        parser.error(_unexpected(left[0], known))
    values: dict[str, Any] = {}
    if given.config is not None:
        try:
            values = read_config(given.config, known)
        except (OSError, ValueError) as error:
            parser.error(f"--config {given.config}: {error}")
    values |= {name: value for name, value in vars(given).items() if name in known}
    resolved = Resolved(
        {name: values.get(name, parameter.default) for name, parameter in own.items()},
        {name: values[name] for name in run if name in values},
    )
    if given.print_config:
        everything = {name: parameter.default for name, parameter in run.items()} | resolved.run | resolved.parameters
        print(json.dumps(everything, indent=2, default=_plain))
        parser.exit()
    return resolved


def _parser(own: Mapping[str, Parameter], run: Mapping[str, Parameter], prog: str, description: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        description=description,
        usage="%(prog)s [flags]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title, group in {"parameters of the notebook": own, "the run": run}.items():
        section = parser.add_argument_group(title)
        for parameter in group.values():
            _add(section, parameter)
    section = parser.add_argument_group("files")
    section.add_argument("--config", metavar="FILE", default=None, help="JSON or YAML; the command line overrides it")
    section.add_argument("--print-config", action="store_true", default=False, help="print all values and stop")
    return parser


def _add(section: Any, parameter: Parameter) -> None:
    shown = "" if parameter.default is None else f" ({json.dumps(parameter.default, default=_plain)})"
    text = (parameter.help + shown).strip().replace("%", "%%")
    options: dict[str, Any] = {"action": _Switch}
    if parameter.kind != "bool":
        kind = parameter.kind.removesuffix(" | None")
        choices = kind.removeprefix("Literal[")
        metavar = kind.upper() if choices == kind else choices[:-1].replace("'", "").replace(", ", "|")
        options = {"type": functools.partial(_convert, parameter.kind), "metavar": metavar}
    for place, flag in enumerate(own_flags(parameter.name)):  # --max_steps works, and is not listed
        section.add_argument(flag, dest=parameter.name, help=argparse.SUPPRESS if place else text, **options)


def _convert(kind: str, text: str) -> Any:
    try:
        return from_text(text, kind)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _join_negative(arguments: Sequence[str], known: Mapping[str, Parameter]) -> list[str]:
    """Rewrite `--lr -1e-5` to `--lr=-1e-5`: argparse reads a negative number in this form as a flag."""
    takes_value = {name for p in known.values() if p.kind != "bool" for name in own_flags(p.name)}
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in takes_value and argument.startswith("-") and _is_number(argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unexpected(argument: str, known: Mapping[str, Parameter]) -> str:
    if not argument.startswith("-"):
        return f"unexpected {argument!r}. A switch takes no value: --name or --no-name."
    flag = argument.split("=")[0]
    near = nearest(flag.lstrip("-").replace("-", "_").removeprefix("no_"), known)
    return f"unknown flag {flag}." + (f" Did you mean {own_flags(near)[0]}?" if near else "")


def read_config(path: str, known: Mapping[str, Parameter]) -> dict[str, Any]:
    """Read a JSON or YAML file of names and values; ValueError for an unknown name, or a value of another type."""
    text = Path(path).read_text(encoding="utf-8")
    is_yaml = Path(path).suffix.lower() in (".yaml", ".yml")
    try:
        found = _yaml(text) if is_yaml else json.loads(text)
    except ValueError as error:
        raise ValueError(f"not {'YAML' if is_yaml else 'JSON'}: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"expected names and values, got {type(found).__name__}")
    values = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ValueError(f"unknown name {key!r}.{did_you_mean(name, known)}")
        kind = known[name].kind
        if is_yaml and isinstance(value, str) and "float" in kind and "str" not in kind and _is_number(value):
            value = float(value)  # YAML 1.1 reads 3e-4 as text
        try:
            values[name] = accept(value, kind)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return values


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _plain(value: Any) -> Any:
    return sorted(value, key=repr) if isinstance(value, set) else str(value)
