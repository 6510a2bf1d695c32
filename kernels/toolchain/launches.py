"""This module makes an operation's launch function: it takes the arguments of the reference, and checks them.

Names, dtypes and shapes are checked by the operation's schema, which is written once, with the reference. The kernel's
module says what is launched for arguments that fit.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec

import torch

from lowlat.graphs.schema import operation_of
from lowlat.graphs.schema_check import fit_arguments
from lowlat.kernels.toolchain.kernel import Argument, KernelCall

__all__ = ["Given", "among", "fit", "launches", "launches_with"]

P = ParamSpec("P")
Calls = list[KernelCall]


@dataclass(frozen=True)
class Given:
    """The arguments of an operation, which fit its schema.

    arrays   by name, in the order of the schema; absent optional ones are left out
    params   the parameters by name; omitted ones have their defaults
    symbols  the sizes of the schema's symbols
    """

    arrays: Mapping[str, torch.Tensor]
    params: Mapping[str, Any]
    symbols: Mapping[str, int]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all arrays, in the order of the schema."""
        return tuple(self.arrays.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.arrays[name]

    def get(self, name: str) -> Argument:
        """Return an array as a kernel's argument; 0 if it is absent."""
        return self.arrays.get(name, 0)

    def take(self, *names: str) -> tuple[Argument, ...]:
        """Return arrays as a kernel's arguments; 0 for each absent one."""
        return tuple(map(self.get, names))

    def sizes(self, *symbols: str) -> tuple[int, ...]:
        """Return the sizes of symbols of the schema."""
        return tuple(self.symbols[symbol] for symbol in symbols)


def fit(reference: Callable[..., None], arguments: Mapping[str, Any]) -> Given:
    """Check an operation's arguments, given by name. Raises ShapeError for arrays that do not fit its schema."""
    operation = operation_of(reference)
    symbols, names = fit_arguments(operation, arguments)
    parameters = operation.schema.parameters
    params = {name: arguments.get(name, parameter.default) for name, parameter in parameters.items()}
    return Given({name: arguments[name] for name in names}, params, symbols)


def among(reference: Callable[..., None], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operation's arguments out of the arguments of several operations, by name."""
    schema = operation_of(reference).schema
    return {name: arguments[name] for name in (*schema.arguments, *schema.parameters) if name in arguments}


def launches(reference: Callable[P, None]) -> Callable[[Callable[[Given], Calls]], Callable[P, Calls]]:
    """Decorate a function of `Given`, so that it takes the parameters of the operation's reference.

    Calls of the result raise ShapeError for arrays that do not fit the operation's schema.
    """
    return lambda calls: _bound(reference, calls)


def launches_with(
    reference: Callable[..., None],
) -> Callable[[Callable[Concatenate[Given, ...], Calls]], Callable[..., Calls]]:
    """Do as `launches` does, for a function with keyword arguments that the operation lacks, such as workspaces."""
    return lambda calls: _bound(reference, calls)


def _bound(reference: Callable[..., None], calls: Callable[..., Calls]) -> Callable[..., Calls]:
    _, *further = inspect.signature(calls).parameters  # the first is Given

    @wraps(calls)
    def bound(*args: Any, **kwargs: Any) -> Calls:
        others = {name: kwargs.pop(name) for name in further if name in kwargs}
        return calls(fit(reference, _binder(reference)(args, kwargs)), **others)

    return bound


class _Binder:
    """Bind arguments to names, in the order of a function's signature.

    `inspect.Signature.bind` gives the same in ten times the time, and a load makes thousands of launches.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._signature = inspect.signature(function)
        parameters = self._signature.parameters.values()
        own = [each for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
        self._defaults = {each.name: each.default for each in own}
        self._required = {each.name for each in own if each.default is inspect.Parameter.empty}
        self._takes_others = len(own) < len(parameters)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Bind arguments. Raises TypeError, as a call of the function does."""
        given = self._by_name(args, kwargs) if args or not self._required <= kwargs.keys() else kwargs
        found = {name: given.get(name, default) for name, default in self._defaults.items()}
        others = {name: value for name, value in given.items() if name not in found}
        if others and not self._takes_others:
            self._signature.bind(**given)  # it raises, and names the wrong argument
        return found | others

    def _by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(self._signature.bind(*args, **kwargs).arguments)
        for name in found.keys() - self._defaults.keys():  # of all others together, where it takes others
            found |= found.pop(name)
        return found


@cache
def _binder(reference: Callable[..., None]) -> _Binder:
    return _Binder(reference)
