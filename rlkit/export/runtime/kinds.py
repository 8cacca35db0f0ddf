"""Kinds: types of parameters as text, `int | None` or `Literal['a', 'b']`, and strict checks of values against them.

The exporter checks defaults with them; the scripts check command lines and config files. A float is not accepted as an
int, 1 not as a bool, "False" not as a bool. An int is accepted as a float.
"""

import ast
import contextlib
import json
from typing import Any

SIMPLE = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "dict": dict, "tuple": tuple, "set": set}
ALIASES = {"List": "list", "Dict": "dict", "Tuple": "tuple", "Set": "set", "Sequence": "list", "Mapping": "dict"}
CONTAINERS = {"list": 1, "tuple": 1, "set": 1, "dict": 2}  # types in their brackets; a tuple may have more


def kind_of(value: Any) -> str | None:
    """The kind of a default without annotation; None for a value that does not tell its type, like None."""
    name = type(value).__name__
    return name if name in SIMPLE else None


def normalise(annotation: ast.expr) -> str | None:
    """An annotation as a kind; None for a type that no flag can have.

    Example:
        >>> normalise(ast.parse("typing.Optional[List[int]]", mode="eval").body)
        'list[int] | None'
    """
    if isinstance(annotation, ast.Constant):
        try:
            if annotation.value is None:
                return "None"
            return normalise(_expression(annotation.value)) if isinstance(annotation.value, str) else None
        except (SyntaxError, ValueError):
            return None
    if name := _name(annotation):
        name = ALIASES.get(name, name)
        return name if name in SIMPLE else None
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return _union([annotation.left, annotation.right])
    if not isinstance(annotation, ast.Subscript):
        return None
    outer, parts = _name(annotation.value), _parts(annotation)
    if outer == "Optional":
        return _union([*parts, ast.Constant(None)]) if len(parts) == 1 else None
    if outer == "Union":
        return _union(parts)
    if outer == "Literal":
        choices = [getattr(part, "value", part) for part in parts]
        return f"Literal{choices!r}" if all(isinstance(one, str | int | float | None) for one in choices) else None
    outer = ALIASES.get(outer, outer)
    endless = outer == "tuple" and _is_endless(parts)
    if len(parts) != CONTAINERS.get(outer, -1) and not (outer == "tuple" and parts):
        return None
    texts = [normalise(part) for part in parts[: 1 if endless else None]] + ["..."] * endless
    return None if None in texts else f"{outer}[{', '.join(text or '' for text in texts)}]"


def accept(value: Any, kind: str) -> Any:
    """A default, or a value of a config file, converted from an int or a list where allowed; ValueError if it is wrong.

    Example:
        >>> accept(1, "float | None"), accept([1, 2], "tuple[int, ...]")
        (1.0, (1, 2))
    """
    return _accept(value, _expression(kind))


def from_text(text: str, kind: str) -> Any:
    """Read a value of a command line; lists, dicts, tuples and sets are JSON. ValueError if it is of another kind.

    Example:
        >>> from_text("3", "int | None"), from_text("none", "int | None"), from_text("[1, 2]", "list[int]")
        (3, None, [1, 2])
    """
    node = _expression(kind)
    for part in sorted(_alternatives(node), key=lambda part: _name(part) == "str"):  # str last: it accepts anything
        with contextlib.suppress(ValueError):
            return _from_text(text, part)
    raise ValueError(f"expected {kind}, got {text!r}")


def _expression(kind: str) -> ast.expr:
    return ast.parse(kind, mode="eval").body


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _parts(node: ast.Subscript) -> list[ast.expr]:
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


def _is_endless(parts: list[ast.expr]) -> bool:
    """True for the brackets of `tuple[int, ...]`."""
    return len(parts) == 2 and isinstance(parts[1], ast.Constant) and parts[1].value is ...


def _union(parts: list[ast.expr]) -> str | None:
    texts = [normalise(part) for part in parts]
    return None if None in texts else " | ".join(dict.fromkeys(text or "" for text in texts))


def _alternatives(node: ast.expr) -> list[ast.expr]:
    return [*_alternatives(node.left), *_alternatives(node.right)] if isinstance(node, ast.BinOp) else [node]


def _choices(node: ast.Subscript) -> list[Any]:
    return [ast.literal_eval(part) for part in _parts(node)]


def _accept(value: Any, node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp):
        for part in _alternatives(node):
            with contextlib.suppress(ValueError):
                return _accept(value, part)
    elif isinstance(node, ast.Constant):
        if value is None:
            return None
    elif isinstance(node, ast.Name):
        if node.id in ("tuple", "set") and isinstance(value, list):
            return SIMPLE[node.id](value)
        if node.id == "float" and type(value) is int:
            return float(value)
        if type(value) is SIMPLE[node.id]:
            return value
    elif isinstance(node, ast.Subscript):
        outer, parts = _name(node.value), _parts(node)
        if outer != "Literal":
            whole = _accept(value, node.value)
            if outer == "dict":
                return {_accept(key, parts[0]): _accept(one, parts[1]) for key, one in whole.items()}
            if outer != "tuple" or _is_endless(parts):
                parts = parts[:1] * len(whole)
            if len(parts) != len(whole):
                raise ValueError(f"expected {len(parts)} values, got {value!r}")
            return SIMPLE[outer](map(_accept, whole, parts))
        if any(type(value) is type(choice) and value == choice for choice in _choices(node)):
            return value
    raise ValueError(f"expected {ast.unparse(node)}, got {value!r}")


def _from_text(text: str, node: ast.expr) -> Any:
    name = _name(node)
    words: dict[str, Any]
    if name in ("int", "float", "str"):
        return SIMPLE[name](text)
    if isinstance(node, ast.Constant):
        text, words = text.lower(), {"none": None, "null": None}
    elif name == "bool":
        text, words = text.lower(), {"true": True, "false": False}
    elif isinstance(node, ast.Subscript) and _name(node.value) == "Literal":
        words = {str(choice): choice for choice in reversed(_choices(node))}
    else:
        return _accept(json.loads(text), node)
    if text not in words:
        raise ValueError(text)
    return words[text]
