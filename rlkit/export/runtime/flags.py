"""Flags of an exported script: its parameters and those of the run, strict and typed.

Order: default of the notebook < config file < command line. Unknown names are errors that name the nearest known one.
A parameter of the notebook with the name of a run flag (`max_steps`, `strategy`) is the flag: the notebook passes it on
itself.
"""

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from rlkit.export.runtime.kinds import accept, from_text

RESERVED = ("help", "config", "print_config", "print_all_ranks", "out", "resume")  # no parameter may have these names


@dataclass(frozen=True)
class Parameter:
    """A flag: name, kind (see `rlkit.export.runtime.kinds`), default and help."""

    name: str
    kind: str
    default: Any
    help: str = ""

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return own_flags(self.name)[0]


def own_flags(name: str) -> list[str]:
    """What sets a parameter on a command line: `--max-steps`, `--max_steps`.

    Example:
        >>> own_flags("max_steps"), own_flags("lr"), own_flags("_x")
        (['--max-steps', '--max_steps'], ['--lr'], ['--_x'])
    """
    dashed = name if name.startswith("_") else name.replace("_", "-")
    return list(dict.fromkeys([f"--{dashed}", f"--{name}"]))


def all_flags(name: str, kind: str) -> list[str]:
    """Those of `own_flags`, and the `--no-...` of a switch."""
    own = own_flags(name)
    return own + [f"--no-{flag[2:]}" for flag in own] if kind == "bool" else own


@dataclass(frozen=True)
class Resolved:
    """What a command line and a config file say: values of the parameters, and the run flags that were given."""

    parameters: dict[str, Any]
    run: dict[str, Any]


def run_flags() -> list[Parameter]:
    """The flags that every script has."""
    from rlkit.world import Backend, Precision, Strategy

    return [
        Parameter("strategy", f"Literal{list(get_args(Strategy))}", "auto", "how weights lie on several processes"),
        Parameter("precision", f"Literal{list(get_args(Precision))} | None", None, "bf16: autocast on float32 weights"),
        Parameter("out", "str | None", None, "folder of the run, instead of the notebook's"),
        Parameter("resume", "str", "none", "auto: go on from the newest checkpoint, if any; none; or a checkpoint"),
        Parameter("seed", "int | None", None, "of rl.setup and of the prompts' order, instead of the notebook's"),
        Parameter("max_steps", "int | None", None, "steps of the run, instead of the notebook's"),
        Parameter("save_every", "int | None", None, "steps between two checkpoints"),
        Parameter("keep", "int | None", None, "checkpoints that stay"),
        Parameter("vllm_url", "str | None", None, "sample from vLLM servers: http://HOST:PORT, several with commas"),
        Parameter("vllm_folder", "str | None", None, "weights go to them through this folder, which both sides see"),
        Parameter("vllm_group_port", "int", 51216, "weights go to them by NCCL, over this port"),
        Parameter("vllm_deadline", "float", 60.0, "seconds in which they must answer"),
        Parameter("dist_timeout", "float | None", None, "minutes that a process waits for the others (setup's)"),
        Parameter("backend", f"Literal{list(get_args(Backend))} | None", None, "between processes; else by the device"),
        Parameter("deterministic", "bool", False, "torch's deterministic algorithms only; slower, or an error"),
        Parameter("print_all_ranks", "bool", False, "every process prints, not only the main one"),
    ]


class _Switch(argparse.BooleanOptionalAction):
    """`--name` and `--no-name`. argparse's own takes every flag that begins with `--no-` for a no: `--no-kl` of the
    parameter `no_kl` too.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert option_string is not None
        setattr(namespace, self.dest, option_string in own_flags(self.dest))


class _Parser(argparse.ArgumentParser):
    """Usage stays one line: the list of all flags is in --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nAll flags: {self.prog} --help\n")


def parse(parameters: Sequence[Parameter], arguments: Sequence[str], *, prog: str, description: str = "") -> Resolved:
    """Read a command line.

    Args:
        parameters: those of the notebook.
        arguments: without the program's name.
        prog: name of the script.
        description: first lines of --help.

    Returns:
        Every parameter's value, and those run flags that were given.

    Raises:
        SystemExit: 2 for a wrong flag, name, value or file, with one line that says what is wrong; 0 after --help and
            --print-config.

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


def _parser(
    own: Mapping[str, Parameter], run: Mapping[str, Parameter], prog: str, description: str
) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description=description,
        usage="%(prog)s [flags]",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    titles = {"parameters of the notebook": own, "the run": run}
    for title, group in titles.items():
        section = parser.add_argument_group(title)
        for parameter in group.values():
            _add(section, parameter)
    section = parser.add_argument_group("files")
    section.add_argument("--config", metavar="FILE", default=None, help="JSON or YAML; the command line is above it")
    section.add_argument("--print-config", action="store_true", default=False, help="print all values and stop")
    return parser


def _add(section: Any, parameter: Parameter) -> None:
    shown = "" if parameter.default is None else f" ({json.dumps(parameter.default, default=_plain)})"
    text = (parameter.help + shown).strip().replace("%", "%%")
    name, *also = own_flags(parameter.name)
    helps = {name: text, **dict.fromkeys(also, argparse.SUPPRESS)}  # --max_steps works, and is not listed
    if parameter.kind == "bool":
        for flag, shown_text in helps.items():
            section.add_argument(flag, dest=parameter.name, action=_Switch, help=shown_text)
        return

    def convert(value: str) -> Any:
        try:
            return from_text(value, parameter.kind)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    kind = parameter.kind.removesuffix(" | None")
    choices = kind.startswith("Literal[")
    metavar = kind[len("Literal[") : -1].replace("'", "").replace(", ", "|") if choices else kind.upper()
    for flag, shown_text in helps.items():
        section.add_argument(flag, dest=parameter.name, type=convert, metavar=metavar, help=shown_text)


def _join_negative(arguments: Sequence[str], known: Mapping[str, Parameter]) -> list[str]:
    """`--lr -1e-5` as `--lr=-1e-5`: argparse takes a negative number in this form for a flag."""
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
    name = argument.split("=")[0].lstrip("-").replace("-", "_")
    return f"unknown flag {argument.split('=')[0]}.{suggestion(name, known, as_flag=True)}"


def suggestion(name: str, known: Mapping[str, Parameter], *, as_flag: bool = False) -> str:
    """` Did you mean ...?`, or nothing."""
    close = difflib.get_close_matches(name.removeprefix("no_"), known, n=1)
    return f" Did you mean {known[close[0]].flag if as_flag else repr(close[0])}?" if close else ""


def read_config(path: str, known: Mapping[str, Parameter]) -> dict[str, Any]:
    """Read a JSON or YAML file of names and values.

    Raises:
        OSError: the file cannot be read.
        ValueError: not JSON or YAML, an unknown name, or a value of another kind.
    """
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
            raise ValueError(f"unknown name {key!r}.{suggestion(name, known)}")
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
