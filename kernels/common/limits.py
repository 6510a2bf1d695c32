"""This module has the limits of kernels: the sizes and parameters that they take, each written once.

A `Limit` says which sizes a kernel takes, and the kernel refuses others by `check`. The `LIMITS` table in the `limits`
module of each package of kernels applies it to an operation's extent. By these tables a whole Program is refused before
a weight is read, see `lowlat.lowering.covers`. These modules load neither a compiler nor a driver.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from lowlat.errors import ShapeError
from lowlat.graphs.extents import evaluate, parse

__all__ = ["Asked", "Excess", "Limit", "OnlyParam", "Param", "Rule", "Size"]


@dataclass(frozen=True)
class Limit:
    """The sizes that a kernel takes: listed values, or multiples of a number within bounds.

    values    the only sizes that it takes; empty: all that the other fields allow
    multiple  a size must be a multiple of it
    least, most  inclusive bounds; most None: no upper bound
    words     text of the limit for messages; empty: made from the other fields
    """

    values: tuple[int, ...] = ()
    multiple: int = 1
    least: int = 1
    most: int | None = None
    words: str = ""

    def takes(self, size: int) -> bool:
        """Whether the kernel takes a size."""
        if self.values:
            return size in self.values
        return size % self.multiple == 0 and self.least <= size and (self.most is None or size <= self.most)

    def check(self, name: str, size: int) -> None:
        """Raise ShapeError, with the size and the limit, for a size that the kernel does not take."""
        if not self.takes(size):
            raise ShapeError(f"{name} must be {self}, got {size}")

    def __str__(self) -> str:
        if self.words:
            return self.words
        if self.values:
            *others, last = map(str, self.values)
            return f"{', '.join(others)} or {last}" if others else last
        most = [] if self.most is None else [f"at most {self.most}"]
        if self.multiple == 1:
            return " and ".join([f"at least {self.least}"] * (self.least > 1 or not most) + most)
        return ", ".join([f"a multiple of {self.multiple}", *most])


class Asked(NamedTuple):
    """An operation as limits see it.

    sizes    the sizes of its schema's symbols
    params   its parameters; omitted ones have their defaults
    weights  the names of its arguments that are weights
    """

    sizes: Mapping[str, int]
    params: Mapping[str, Any]
    weights: frozenset[str]


class Excess(NamedTuple):
    """A size or a parameter of an operation beyond its kernels' limits: its name, the limit, and its value."""

    name: str
    taken: str
    found: object


Rule: TypeAlias = Callable[[Asked], Excess | None]
_expression = lru_cache(maxsize=None)(parse)


@dataclass(frozen=True)
class Size:
    """The rule that an extent of an operation is within a limit; an unknown extent passes.

    extent  an expression over the symbols of the operation's schema
    name    its name in configs
    """

    extent: str
    limit: Limit
    name: str

    def __call__(self, asked: Asked) -> Excess | None:
        size = evaluate(_expression(self.extent), asked.sizes)
        if size is None or self.limit.takes(size):
            return None
        return Excess(self.name, str(self.limit), size)


@dataclass(frozen=True)
class Param:
    """The rule that a parameter is a size within a limit.

    param  its name in the operation
    name   its name in configs
    """

    param: str
    limit: Limit
    name: str

    def __call__(self, asked: Asked) -> Excess | None:
        size = asked.params[self.param]
        return None if self.limit.takes(size) else Excess(self.name, str(self.limit), size)


@dataclass(frozen=True)
class OnlyParam:
    """The rule that a parameter has one of the values that kernels compute.

    values  the values; a None among them stands for an absent parameter
    """

    name: str
    values: tuple[Any, ...] = field(default=(None,))

    def __call__(self, asked: Asked) -> Excess | None:
        found = asked.params.get(self.name, self.values[0])
        if found in self.values:
            return None
        return Excess(self.name, " or ".join("absent" if each is None else str(each) for each in self.values), found)
