"""A schema says what an operation takes: each argument's access, dtype and shape, the weights, and the parameters.

The decorator `operation` declares it once, as a table above the operation's reference function:

    read    q                 compute  [B * R, H, D]
    read    k_cache, v_cache  compute  [P, G, block, D]
    read    row_live          uint8    flat [B * R]
    weight  sinks             float    [H]
    write   out               compute  [B * R, H * D]    dead rows zero

A line has an access, one or more names, a dtype, a shape, and a free text.

access  `read`; `write`; `update`: read and written, or written in part; `weight`: a canonical weight
dtypes  a torch dtype's name, or
        `compute`: bfloat16 or float32, the same for all such arguments of a call
        `cache`: the compute dtype, or uint8 for a quantised cache
        `float`: bfloat16 or float32, for each argument by itself
        `any`: any dtype, the same for all such arguments of a call
shapes  extents are expressions over symbols, see `extents`; `flat` compares only the number of elements; `*rest`
        stands for all further extents, the same in every argument that has it
names   `source{F}` declares F arguments: `source0`, `source1` and so on

The function's signature says which arguments are optional, and the types and defaults of parameters.
"""

import ast
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar, get_args

import torch

from lowlat.errors import ConfigError
from lowlat.graphs.extents import parse

__all__ = [
    "Access",
    "Argument",
    "Operation",
    "OperationSchema",
    "Parameter",
    "operation",
    "operation_of",
    "operations_of",
]

Reference = TypeVar("Reference", bound=Callable[..., None])

LINE = re.compile(r"(read|write|update|weight)\s+([\w{}, ]+?)\s\s+(\w+)\s+(flat )?\s*\[([^\]]*)\].*")
_DECLARED: dict[str, list["Operation"]] = {}


class Access(StrEnum):
    """How an operation uses an argument."""

    READ = "read"
    WRITE = "write"
    UPDATE = "update"
    WEIGHT = "weight"


@dataclass(frozen=True)
class Argument:
    """One array of an operation.

    dtype     "compute", "cache", "float", "any", or a torch dtype's name
    extents   the extents of the shape; the number of elements if `flat`
    rest      the symbol of all further extents; None: there are none
    count     the symbol that counts name0, name1, ...; None: a single array
    """

    name: str
    access: Access
    dtype: str
    extents: tuple[ast.expr, ...]
    rest: str | None
    flat: bool
    optional: bool
    count: str | None

    @cached_property
    def bare(self) -> tuple[tuple[int, str], ...]:
        """The extents that consist of one symbol: (index, symbol)."""
        return tuple((place, each.id) for place, each in enumerate(self.extents) if isinstance(each, ast.Name))

    @cached_property
    def composed(self) -> tuple[tuple[int, ast.expr], ...]:
        """All other extents: (index, expression)."""
        return tuple((place, each) for place, each in enumerate(self.extents) if not isinstance(each, ast.Name))

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of a shape, to be compared with the declared extents."""
        return (math.prod(shape),) if self.flat else shape

    def __str__(self) -> str:
        inner = [ast.unparse(extent) for extent in self.extents] + ([f"*{self.rest}"] if self.rest else [])
        return f"{self.dtype} {'flat ' if self.flat else ''}[{', '.join(inner)}]"


@dataclass(frozen=True)
class Parameter:
    """A host constant of an operation: its types, and its default (`inspect.Parameter.empty`: it has none)."""

    name: str
    types: tuple[type, ...]
    default: object

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is inspect.Parameter.empty

    def accepts(self, value: object) -> bool:
        """Whether a value has one of the types. An int passes as a float; a bool does not pass as an int."""
        kind = type(value)
        return kind in self.types or (kind is int and float in self.types)


@dataclass(frozen=True, eq=False)
class OperationSchema:
    """The arguments and parameters of an operation, by name, in the order of declaration.

    forms  alternative sets of weights, such as plain weights or blocks with scales; an operation takes exactly one set
    """

    arguments: Mapping[str, Argument]
    parameters: Mapping[str, Parameter]
    forms: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def updated(self) -> frozenset[str]:
        """The arguments that the operation updates."""
        return frozenset(name for name, each in self.arguments.items() if each.access is Access.UPDATE)

    def argument(self, name: str) -> Argument:
        """The declaration of an argument; that of `source3` is `source`. Raises ConfigError for an unknown name."""
        found = self.arguments.get(name) or self.arguments.get(name.rstrip("0123456789"))
        if found is None or (found.count is None) != (found.name == name):
            raise ConfigError(f"has no argument {name}; it has {', '.join(self.arguments)}")
        return found


@dataclass(frozen=True)
class Operation:
    """An operation: its kind, its reference function, and its schema. Calling it calls the function."""

    kind: str
    function: Callable[..., None]
    schema: OperationSchema

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the reference."""
        self.function(*args, **kwargs)


def operation(table: str, *, forms: tuple[tuple[str, ...], ...] = ()) -> Callable[[Reference], Reference]:
    """Declare the decorated function as the reference of the operation of its name; returns the function unchanged.

    table  the schema of its arrays, see the module's docstring
    forms  alternative sets of weights; exactly one set is given
    Raises ValueError for a table that cannot be read, or that does not fit the function's signature.
    """

    def declare(function: Reference) -> Reference:
        schema = _make_schema(function, table, forms)
        _DECLARED.setdefault(function.__module__, []).append(Operation(function.__name__, function, schema))
        return function

    return declare


def operation_of(function: Callable[..., None]) -> Operation:
    """The operation whose reference is this function. Raises ValueError if the function is no reference."""
    for each in _DECLARED.get(function.__module__, ()):
        if each.function is function:
            return each
    raise ValueError(f"{function.__name__} is no reference of an operation")


def operations_of(*modules: Any) -> Mapping[str, Operation]:
    """The operations that modules declare, by kind. Raises ValueError if two have the same kind."""
    found: dict[str, Operation] = {}
    for module in modules:
        for each in _DECLARED.get(module.__name__, ()):
            if found.setdefault(each.kind, each) is not each:
                raise ValueError(f"operation {each.kind} is declared twice")
    return MappingProxyType(found)


def _make_schema(function: Callable[..., None], table: str, forms: tuple[tuple[str, ...], ...]) -> OperationSchema:
    signature = inspect.signature(function).parameters
    arguments = {
        argument.name: argument
        for line in table.strip().splitlines()
        for argument in _read_line(line.strip(), signature, function.__name__)
    }
    parameters = {}
    for name, parameter in signature.items():
        many = parameter.kind is inspect.Parameter.VAR_KEYWORD
        if not many and name not in arguments:
            kinds = get_args(parameter.annotation) or (parameter.annotation,)
            if torch.Tensor in kinds:
                raise ValueError(f"{function.__name__}: {name} has no line in its table")
            parameters[name] = Parameter(name, kinds, parameter.default)
    return OperationSchema(MappingProxyType(arguments), MappingProxyType(parameters), forms)


def _read_line(line: str, signature: Mapping[str, inspect.Parameter], kind: str) -> list[Argument]:
    """The arguments of one line of a table."""
    match = LINE.fullmatch(line)
    if match is None:
        raise ValueError(f"{kind}: cannot read {line!r}; expected: access names  dtype  [shape]  meaning")
    access, names, dtype, flat, shape = match.groups()
    if dtype not in ("compute", "cache", "float", "any") and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"{kind}: {dtype} is no dtype, in {line!r}")
    extents = [extent.strip() for extent in shape.split(",") if extent.strip()]
    rest = extents.pop()[1:] if extents and extents[-1].startswith("*") else None
    parsed = tuple(parse(extent) for extent in extents)
    found = []
    for each in names.split(","):
        name, _, count = each.strip().rstrip("}").partition("{")
        parameter = signature.get(name)
        if parameter is None and not count:
            raise ValueError(f"{kind}: {name} is no parameter of the function")
        optional = parameter is not None and parameter.default is None
        made = Argument(name, Access(access), dtype, parsed, rest, bool(flat), optional, count or None)
        found.append(made)
    return found
