"""A schema says what an operation takes: each argument's access, dtype and shape, the weights, and the parameters.

A schema is declared once, by the decorator `operation` over the reference that means the operation, as a table:

    read    q                 compute  [B * R, H, D]
    read    k_cache, v_cache  compute  [P, G, block, D]
    read    row_live          uint8    flat [B * R]
    weight  sinks             float    [H]
    write   out               compute  [B * R, H * D]    dead rows zero

A line is an access, one or more names, a dtype, a shape, and words on its meaning.

access  `read`; `write`; `update`, which is read and written, or written in part; `weight`, a canonical weight
dtypes  a torch dtype by name; `compute`, bfloat16 or float32, one within the operation; `cache`, that one, or uint8 for
        codes; `float`, either, each argument its own; `any`, one within the operation
shapes  extents are expressions over symbols, see `extents`; `flat` counts elements alone; `*rest` stands for all
        further extents, the same wherever it stands
names   `source{F}` declares `source0`, `source1` and so on, F of them

Which arguments are optional, and the types and defaults of parameters, are the signature's.
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
    """The use that an operation makes of an argument."""

    READ = "read"
    WRITE = "write"
    UPDATE = "update"
    WEIGHT = "weight"


@dataclass(frozen=True)
class Argument:
    """One array of an operation.

    dtype     "compute", "cache", "float", "any", or a torch dtype's name
    extents   of the shape; the number of elements alone where it is flat
    rest      the symbol of all further extents, if any
    count     the symbol that counts name0, name1, ..., or None for a single array
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
        """The extents that are a symbol by themselves: place and symbol."""
        return tuple((place, each.id) for place, each in enumerate(self.extents) if isinstance(each, ast.Name))

    @cached_property
    def composed(self) -> tuple[tuple[int, ast.expr], ...]:
        """All other extents: place and expression."""
        return tuple((place, each) for place, each in enumerate(self.extents) if not isinstance(each, ast.Name))

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of a shape that are compared with the declared extents."""
        return (math.prod(shape),) if self.flat else shape

    def __str__(self) -> str:
        inner = [ast.unparse(extent) for extent in self.extents] + ([f"*{self.rest}"] if self.rest else [])
        return f"{self.dtype} {'flat ' if self.flat else ''}[{', '.join(inner)}]"


@dataclass(frozen=True)
class Parameter:
    """A host constant of an operation: its types, and its default, `inspect.Parameter.empty` for none."""

    name: str
    types: tuple[type, ...]
    default: object

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is inspect.Parameter.empty

    def accepts(self, value: object) -> bool:
        """Whether a value has one of the types; an integer is a float, a truth value is no integer."""
        kind = type(value)
        return kind in self.types or (kind is int and float in self.types)


@dataclass(frozen=True, eq=False)
class OperationSchema:
    """The arguments and parameters of an operation, by name, in the order of declaration.

    forms  sets of weights of which an operation takes exactly one, such as plain weights or blocks with scales
    """

    arguments: Mapping[str, Argument]
    parameters: Mapping[str, Parameter]
    forms: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def updated(self) -> frozenset[str]:
        """The arguments that the operation updates."""
        return frozenset(name for name, each in self.arguments.items() if each.access is Access.UPDATE)

    def argument(self, name: str) -> Argument:
        """The declaration of an argument, `source` for `source3`. Raises ConfigError for a name that has none."""
        found = self.arguments.get(name) or self.arguments.get(name.rstrip("0123456789"))
        if found is None or (found.count is None) != (found.name == name):
            raise ConfigError(f"has no argument {name}; it has {', '.join(self.arguments)}")
        return found


@dataclass(frozen=True)
class Operation:
    """An operation: its kind, the function that means it, and its schema. Calling it calls the function."""

    kind: str
    function: Callable[..., None]
    schema: OperationSchema

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the reference."""
        self.function(*args, **kwargs)


def operation(table: str, *, forms: tuple[tuple[str, ...], ...] = ()) -> Callable[[Reference], Reference]:
    """Declare the function below as the reference of the operation of its name; the function stays as it is.

    table  the schema of its arrays, see the module's docstring
    forms  sets of weights of which exactly one is given
    Raises ValueError for a table that cannot be read, or that does not fit the function's signature.
    """

    def declare(function: Reference) -> Reference:
        schema = _make_schema(function, table, forms)
        _DECLARED.setdefault(function.__module__, []).append(Operation(function.__name__, function, schema))
        return function

    return declare


def operation_of(function: Callable[..., None]) -> Operation:
    """The operation that a function is the reference of. Raises ValueError for another function."""
    for each in _DECLARED.get(function.__module__, ()):
        if each.function is function:
            return each
    raise ValueError(f"{function.__name__} is no reference of an operation")


def operations_of(*modules: Any) -> Mapping[str, Operation]:
    """The operations that modules declare, by kind. Raises ValueError where two are of one kind."""
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
