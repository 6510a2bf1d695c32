"""This module refuses operations that kernels do not support, by name, before lowering and before weights are read.

Each package of kernels has a table of its limits by operation, in its `limits` module; this module joins them. It loads
no compiler and no driver.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.graphs.program import Op, Program
from lowlat.graphs.schema import OperationSchema
from lowlat.graphs.schema_check import ArrayType, check_operation
from lowlat.kernels.attention import limits as attention
from lowlat.kernels.common.limits import Asked, Excess, Rule
from lowlat.kernels.elementwise import limits as elementwise
from lowlat.kernels.gemm import limits as gemm
from lowlat.kernels.moe import limits as moe
from lowlat.kernels.recurrent import limits as recurrent
from lowlat.kernels.sampling import limits as sampling
from lowlat.kernels.speculation import limits as speculation

__all__ = ["check_covered", "uncovered"]

Weights = Mapping[str, torch.Tensor]
LIMITS: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        kind: rules
        for package in (attention, elementwise, gemm, moe, recurrent, sampling, speculation)
        for kind, rules in package.LIMITS.items()
    }
)
COMPUTE = torch.bfloat16
NONE: Weights = MappingProxyType({})


def uncovered(programs: Iterable[Program], weights: Weights = NONE) -> str | None:
    """Why kernels cannot run programs: the first unsupported operation, and its size; None: they can.

    weights  by canonical name, with or without content; the extents of a missing weight are not checked
    """
    for program in programs:
        for op in program.ops:
            problem = _problem(program, op, weights)
            if problem is not None:
                return problem
    return None


def check_covered(program: Program, weights: Weights = NONE) -> None:
    """Raise ConfigError, naming the operation and the size, for a program that kernels cannot run; see `uncovered`."""
    problem = uncovered([program], weights)
    if problem is not None:
        raise ConfigError(f"{program.name}: {problem}; use executor 'reference'")


def _problem(program: Program, op: Op, weights: Weights) -> str | None:
    schema, buffers = program.operations[op.kind].schema, program.buffers
    reads, writes = (
        tuple((argument, (buffers[name].shape, buffers[name].dtype)) for argument, name in part.items())
        for part in (op.reads, op.writes)
    )
    known = tuple(
        (argument, tuple(weights[name].shape) if name in weights else None) for argument, name in op.weights.items()
    )
    found = _excess(op.kind, schema, reads, writes, known, tuple(op.params), *op.params.values())
    if found is None:
        return None
    if found.name == "dtype":
        return f"the kernels compute in {found.taken} and dtype is {found.found}"
    owner = "draft model" if op.stage.startswith("DRAFT") else "target"
    return f"the kernels of {op.kind} take {found.name} {found.taken}, and the {owner}'s is {found.found}"


@lru_cache(maxsize=4096, typed=True)  # layers and buckets are alike
def _excess(
    kind: str,
    schema: OperationSchema,
    reads: tuple[tuple[str, ArrayType], ...],
    writes: tuple[tuple[str, ArrayType], ...],
    weights: tuple[tuple[str, tuple[int, ...] | None], ...],
    params: tuple[str, ...],
    *values: Any,
) -> Excess | None:
    """The first limit that an operation exceeds, if any."""
    for name, (_, dtype) in (*reads, *writes):
        if schema.argument(name).dtype == "compute" and dtype != COMPUTE:
            return Excess("dtype", _dtype_name(COMPUTE), _dtype_name(dtype))
    rules = LIMITS.get(kind, ())
    if not rules:
        return None
    given = dict(zip(params, values, strict=True))
    sizes = dict(check_operation(schema, dict(reads), dict(writes), dict.fromkeys(name for name, _ in weights), given))
    for name, shape in weights:
        if shape is not None:
            for place, symbol in schema.argument(name).bare:
                sizes.setdefault(symbol, shape[place])
    asked = Asked(sizes, given, frozenset(name for name, _ in weights))
    return next((excess for rule in rules if (excess := rule(asked))), None)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
