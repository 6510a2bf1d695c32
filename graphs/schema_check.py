"""This module checks an operation's arguments against its schema: names, parameters, dtypes, and shapes.

Shapes unify if every symbol of the schema stands for one number. An extent that consists of one symbol binds it. A
composed extent is compared, or solved for its only symbol that is not bound yet.
"""

import ast
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lowlat.errors import ConfigError, ShapeError
from lowlat.graphs.extents import evaluate, solve, symbols
from lowlat.graphs.schema import Access, Argument, Operation, OperationSchema, operation_of

__all__ = ["ArrayType", "Fit", "check_arguments", "check_operation", "fit_arguments"]

ArrayType = tuple[tuple[int, ...], torch.dtype]  # a shape and a dtype

FLOATS = (torch.bfloat16, torch.float32)


class Fit(NamedTuple):
    """Arguments that fit an operation's schema.

    symbols  the value of each symbol of the schema
    arrays   the names of the given arrays, in the order of the schema
    """

    symbols: Mapping[str, int]
    arrays: tuple[str, ...]


def check_operation(
    schema: OperationSchema,
    reads: Mapping[str, ArrayType],
    writes: Mapping[str, ArrayType],
    weights: Mapping[str, ArrayType | None],
    params: Mapping[str, object],
) -> Mapping[str, int]:
    """Check an operation's arrays by their types, and its parameters by value. Updated arrays are among `writes`.

    A weight's type may be None, for unknown: then only its name is checked. Returns the values of the schema's symbols
    that the arguments determine. Raises ConfigError for an argument or a parameter that is missing, unknown, or of
    another access, dtype or type, and for shapes that do not unify.
    """
    known = dict(_check_names(schema, tuple(reads), tuple(writes), tuple(weights)))
    _check_parameters(schema, params)
    known.update((name, value) for name, value in params.items() if type(value) is int)
    arrays = {**reads, **writes, **{name: array for name, array in weights.items() if array is not None}}
    _Unifier(schema, arrays, known).run()
    return known


def check_arguments(reference: Callable[..., None], arguments: Mapping[str, Any]) -> Mapping[str, int]:
    """Check tensors and parameters by name against the schema of a reference function.

    Returns the values of the schema's symbols. Raises ShapeError for arguments that do not fit.
    """
    return fit_arguments(operation_of(reference), arguments).symbols


def fit_arguments(operation: Operation, arguments: Mapping[str, Any]) -> Fit:
    """Check tensors and parameters of an operation by name, as `check_arguments` does; absent ones may be None."""
    types = [
        (name, (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value)
        for name, value in arguments.items()
        if value is not None
    ]
    return _fit(operation, tuple(types))


@lru_cache(maxsize=4096)
def _fit(operation: Operation, given: tuple[tuple[str, Any], ...]) -> Fit:
    schema, params = operation.schema, {name: value for name, value in given if name in operation.schema.parameters}
    try:
        arrays = {name: (schema.argument(name).access, array) for name, array in given if name not in params}
        reads, writes, weights = (
            {name: array for name, (access, array) in arrays.items() if access in kinds}
            for kinds in ((Access.READ,), (Access.WRITE, Access.UPDATE), (Access.WEIGHT,))
        )
        symbols = check_operation(schema, reads, writes, weights, params)
    except ConfigError as error:
        raise ShapeError(f"{operation.kind}: {error}") from error
    places = {id(argument): place for place, argument in enumerate(schema.arguments.values())}
    return Fit(symbols, tuple(sorted(arrays, key=lambda name: places[id(schema.argument(name))])))


@lru_cache(maxsize=1024)
def _check_names(
    schema: OperationSchema, reads: tuple[str, ...], writes: tuple[str, ...], weights: tuple[str, ...]
) -> Mapping[str, int]:
    """Check the names of an operation's arguments; returns the symbols that the names alone bind.

    These are the numbers of counted arguments, and zero for a symbol that binds in absent arguments only.
    """
    groups = (
        ("reads", reads, (Access.READ,)),
        ("writes", writes, (Access.WRITE, Access.UPDATE)),
        ("takes as a weight", weights, (Access.WEIGHT,)),
    )
    for verb, names, accesses in groups:
        for name in names:
            argument = schema.argument(name)
            if argument.access not in accesses:
                raise ConfigError(f"{verb} {name}, which is declared as: {argument.access} {name} {argument}")
    given = (*reads, *writes, *weights)
    known = _check_presence(schema, given)
    _check_forms(schema, weights)
    present = {symbol for name in given for _, symbol in schema.argument(name).bare}
    absent = (each for name, each in schema.arguments.items() if each.optional and name not in given)
    zero = {symbol for each in absent for _, symbol in each.bare} - present - set(schema.parameters)
    return {**known, **dict.fromkeys(zero, 0)}


def _check_presence(schema: OperationSchema, given: Iterable[str]) -> dict[str, int]:
    """Check that no required argument is missing; returns the numbers of counted arguments."""
    counts = {}
    for name, argument in schema.arguments.items():
        if argument.count is not None:
            found = [each for each in given if schema.argument(each) is argument]
            missing = next((f"{name}{k}" for k in range(max(len(found), 1)) if f"{name}{k}" not in found), None)
            counts[argument.count] = len(found)
        else:
            missing = None if name in given or argument.optional else name
        if missing is not None:
            raise ConfigError(f"lacks argument {missing}, declared as: {argument.access} {missing} {argument}")
    return counts


def _check_forms(schema: OperationSchema, weights: Iterable[str]) -> None:
    chosen = set(weights) & {name for form in schema.forms for name in form}
    if schema.forms and chosen not in [set(form) for form in schema.forms]:
        expected = " or ".join(" with ".join(form) for form in schema.forms)
        raise ConfigError(f"takes weights {expected}, found {', '.join(sorted(chosen)) or 'none of them'}")


def _check_parameters(schema: OperationSchema, params: Mapping[str, object]) -> None:
    for name, value in params.items():
        parameter = schema.parameters.get(name)
        if parameter is None:
            raise ConfigError(f"has no parameter {name}; it has {', '.join(schema.parameters) or 'none'}")
        if not parameter.accepts(value):
            expected = " or ".join(kind.__name__ for kind in parameter.types)
            raise ConfigError(f"parameter {name} must be {expected}, got {value!r}")
    for name, parameter in schema.parameters.items():
        if parameter.required and name not in params:
            raise ConfigError(f"lacks parameter {name}")


class _Unifier:
    """Finds the values of a schema's symbols; the error names the first array that does not fit.

    arrays  types by argument name
    known   symbols that are bound already
    """

    def __init__(self, schema: OperationSchema, arrays: Mapping[str, ArrayType], known: dict[str, int]) -> None:
        self.known = known
        self.rests: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.arrays = arrays
        self.pairs = {name: schema.argument(name) for name in arrays}

    def run(self) -> None:
        """Unify all arrays. Raises ConfigError."""
        pending: list[tuple[str, ast.expr, int]] = []
        for name, argument in self.pairs.items():
            self._unify_dtype(name, argument)
            sizes = self._unify_bare(name, argument)
            pending += [(name, extent, sizes[place]) for place, extent in argument.composed]
        while pending:
            left = [entry for entry in pending if not self._settle(*entry)]
            if len(left) == len(pending):
                return self._compare(left)
            pending = left

    def _compare(self, left: Iterable[tuple[str, ast.expr, int]]) -> None:
        """Check that equal expressions have equal sizes, for expressions whose symbols stay unbound."""
        sizes: dict[str, int] = {}
        for name, extent, size in left:
            if sizes.setdefault(ast.unparse(extent), size) != size:
                self._refuse(name)

    def _unify_dtype(self, name: str, argument: Argument) -> None:
        found, wanted = self.arrays[name][1], argument.dtype
        if wanted == "cache":
            wanted = "uint8" if found == torch.uint8 else "compute"
        if wanted == "any" or (wanted == "compute" and found in FLOATS):
            fits = self.dtypes.setdefault(wanted, found) == found
        else:
            fits = found in FLOATS if wanted == "float" else found == getattr(torch, wanted, None)
        if not fits:
            self._refuse(name)

    def _unify_bare(self, name: str, argument: Argument) -> tuple[int, ...]:
        """Check the number of extents, and bind or compare those that consist of one symbol; returns the sizes."""
        sizes, count = argument.sizes(self.arrays[name][0]), len(argument.extents)
        if len(sizes) < count or (len(sizes) > count and argument.rest is None):
            self._refuse(name)
        if argument.rest is not None and self.rests.setdefault(argument.rest, sizes[count:]) != sizes[count:]:
            self._refuse(name)
        for place, symbol in argument.bare:
            if self.known.setdefault(symbol, sizes[place]) != sizes[place]:
                self._refuse(name)
        return sizes

    def _settle(self, name: str, extent: ast.expr, size: int) -> bool:
        """Compare an expression with its size, or solve it for its one unbound symbol; False if it must wait."""
        value = evaluate(extent, self.known)
        if value is None:
            found = solve(extent, size, self.known)
            if found is None:
                self._refuse(name)
            self.known.update(found or {})
            return bool(found)
        if value != size:
            self._refuse(name)
        return True

    def _refuse(self, name: str) -> None:
        argument, (shape, dtype) = self.pairs[name], self.arrays[name]
        names = dict.fromkeys(symbol for extent in argument.extents for symbol in symbols(extent))
        bound = [f"{symbol} = {self.known[symbol]}" for symbol in names if symbol in self.known]
        if argument.rest in self.rests:
            bound.append(f"{argument.rest} = {list(self.rests[argument.rest])}")
        if argument.dtype in self.dtypes:
            bound.append(f"{argument.dtype} = {_dtype_name(self.dtypes[argument.dtype])}")
        where = f" where {', '.join(bound)}" if bound else ""
        raise ConfigError(f"argument {name} must be {argument}{where}, found {_dtype_name(dtype)} {list(shape)}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
