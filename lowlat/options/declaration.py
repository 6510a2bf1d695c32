"""This module declares options. An option's checks, flag, variable and TOML key all come from one declaration.

An option is a field of a frozen dataclass. Its annotation gives the kind of value, its metadata the help and the
limits. The dataclasses check themselves with `check_options`. `lowlat.cli.options` makes flags from the same fields,
and `lowlat.serving.config` makes variables and keys.
"""

import math
from collections.abc import Collection
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

__all__ = [
    "KINDS",
    "Option",
    "check_integer",
    "check_number",
    "check_options",
    "declare",
    "documented",
    "given_options",
    "options_of",
    "plain",
    "shown",
]

T = TypeVar("T")

# kinds of values, with their names in messages
KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "choice": "one of its choices",
    "path": "a path",
    "ints": "a list of integers",
    "texts": "a list of strings",
    "biases": "a table of numbers by token id",
}
_SCALARS = {int: "int", float: "float", bool: "bool", str: "str"}


@dataclass(frozen=True)
class Option:
    """One declared option.

    name         the name of its field
    key          its name on the command line, in the environment and in TOML; usually that of the field
    kind         one of KINDS, or "record" for an option that only Python has
    default      the field's default; None if the default depends on the model, as `otherwise` says
    nullable     whether None is allowed
    help         one or two sentences
    low, high    limits of a number, both included; with `above`, low is excluded
    choices      the allowed strings, if there are few
    aliases      further names of the key
    flags        short spellings on the command line
    metavar      the value's name in the help; None: that of the kind
    from_file    on the command line the value is a file that contains the text
    words        strings that are allowed in place of a number
    python_only  cannot be set on the command line, in the environment or in a file
    group        its section of the help; "": that of its record
    rare         set by --set NAME=VALUE on the command line; the help lists only its name
    """

    name: str
    key: str
    kind: str
    default: Any
    nullable: bool
    help: str = ""
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: Collection[str] = ()
    aliases: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    otherwise: str = ""
    from_file: bool = False
    words: tuple[str, ...] = ()
    python_only: bool = False
    group: str = ""
    rare: bool = False

    @property
    def flag(self) -> str:
        """Its first spelling on the command line."""
        return "--" + (self.aliases or (self.key,))[0].replace("_", "-")

    @property
    def said(self) -> str:
        """The spelling on the command line, for messages."""
        return f"--set {self.key}" if self.rare else self.flag

    @property
    def wanted(self) -> str:
        """The kind of value and the words that it accepts, for messages."""
        return " or ".join((KINDS[self.kind], *map(repr, self.words)))

    def offers(self, value: object) -> bool:
        """Return whether a value of any type is one of the choices."""
        return value in tuple(self.choices)

    def takes(self, value: object) -> bool:
        """Return whether a value is of the option's kind; limits are not checked."""
        if isinstance(value, str) and value in self.words:
            return True
        if self.kind == "ints":
            return isinstance(value, (list, tuple)) and all(type(item) is int for item in value)
        types: Any = {"int": int, "float": (int, float), "bool": bool, "path": (str, Path)}.get(self.kind, str)
        if isinstance(value, bool):
            return self.kind == "bool"
        return isinstance(value, types) and (not isinstance(value, (str, Path)) or bool(str(value)))


def declare(default: Any, help: str, low: float | None = None, high: float | None = None, **details: Any) -> Any:
    """Make a field of an options record, with its default, help, limits, and other attributes of Option."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, **details})


@cache
def options_of(record: Any) -> tuple[Option, ...]:
    """Return the options that a dataclass declares, in order."""
    found = []
    for item in fields(record):
        default = None if item.default is MISSING or "otherwise" in item.metadata else item.default
        details = {"key": item.name, "default": default, **_of_annotation(item.type), **item.metadata}
        found.append(Option(item.name, **details))
    return tuple(found)


def documented(record: type[T]) -> type[T]:
    """Append a line for each declared option to a record's docstring."""
    options: Any = record
    lines = [
        f"    {option.name}  {option.help}{f' ({option.otherwise})' if option.otherwise else ''}"
        for option in options_of(options)
    ]
    record.__doc__ = "\n".join([(record.__doc__ or "").rstrip(), "", *lines])
    return record


def given_options(record: Any) -> str:
    """Return a record's repr with the options that differ from their defaults."""
    given = [(item.name, getattr(record, item.name)) for item in fields(record)]
    defaults = {item.name: item.default for item in fields(record)}
    shown = [f"{name}={value!r}" for name, value in given if value != defaults[name]]
    return f"{type(record).__name__}({', '.join(shown)})"


def _of_annotation(annotation: Any) -> dict[str, Any]:
    """Read kind, choices and nullable from a field's annotation."""
    union = get_origin(annotation) in (Union, UnionType)
    parts = [part for part in (get_args(annotation) if union else (annotation,)) if part is not NoneType]
    found: dict[str, Any] = {"kind": "record", "nullable": union and NoneType in get_args(annotation)}
    first = parts[0]
    if get_origin(first) is Literal:
        return found | {"kind": "choice", "choices": get_args(first)}
    if Path in parts:
        return found | {"kind": "path"}
    if get_origin(first) is tuple:
        return found | {"kind": "ints" if get_args(first)[0] is int else "texts"}
    if len(get_args(first)) == 2:
        return found | {"kind": "biases"}
    return found | {"kind": _SCALARS.get(first, "record")}


def check_options(record: Any, error: type[Exception]) -> None:
    """Check the kinds and the limits of all values, and raise `error` for a wrong one."""
    kind: Any = type(record)
    for option in options_of(kind):
        value = getattr(record, option.name)
        if option.kind in ("int", "float", "bool") and (number := plain(value)) is not value:
            object.__setattr__(record, option.name, value := number)
        if (value is None and option.nullable) or (isinstance(value, str) and value in option.words):
            continue
        if option.words and not option.takes(value):
            raise error(f"{option.name} must be {option.wanted}, got {shown(value)}")
        if option.kind == "int":
            check_integer(option.name, value, option.low, option.high, error)
        elif option.kind == "float" and option.low is not None:
            check_number(option.name, value, option.low, option.high, error, above=option.above)
        elif option.kind == "bool" and not option.takes(value):
            raise error(f"{option.name} must be true or false, got {shown(value)}")
        elif option.kind == "choice" and not option.offers(value):
            allowed = tuple(option.choices)
            choices = " or ".join(", ".join(map(repr, part)) for part in (allowed[:-1], allowed[-1:]) if part)
            raise error(f"{option.name} must be {choices}, got {shown(value)}")


def plain(value: Any) -> Any:
    """Convert a scalar or an array of NumPy or torch to numbers or nested lists; return other values unchanged.

    Raises the library's error for an array without values, such as a tensor on torch's meta device.
    """
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, (type, memoryview)) else value


def check_integer(name: str, value: object, low: Any, high: Any, error: type[Exception]) -> None:
    """Refuse anything but an int in [low, high] with `error`, naming the option, the value and the limits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(f"{name} must be an integer, got {shown(value)}")
    if not low <= value <= high:
        raise error(f"{name} must be from {low} to {high}, got {shown(value)}")


def check_number(name: str, value: object, low: Any, high: Any, error: type[Exception], *, above: bool = False) -> None:
    """Refuse anything but a finite number in [low, high], or (low, high] where `above`, with `error`."""
    # isfinite converts a huge integer to a float, which overflows
    infinite = isinstance(value, float) and not math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or infinite:
        raise error(f"{name} must be a finite number, got {shown(value)}")
    if not low <= value <= high or (above and value == low):
        interval = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise error(f"{name} must be {interval}, got {shown(value)}")


def shown(value: object) -> str:
    """Return a short text of a value for a message; a huge integer by its bits, as Python refuses to print it."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.80}"
