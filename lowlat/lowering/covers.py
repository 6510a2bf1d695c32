"""Operations that the reference covers and kernels do not: refused by name before a program is lowered.

An operation's parameter may ask for more than its kernels, alone or in a fusion, compute. The values that they compute
stand here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lowlat.errors import ConfigError
from lowlat.graphs.program import Op
from lowlat.lowering.binding import Binding

__all__ = ["check_covered"]

COVERED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "embed": {"scale": None},
        "linear": {"softcap": None},
        "silu_mul": {"activation": "silu"},
    }
)


def check_covered(binding: Binding) -> None:
    """Raise ConfigError for the first operation of a program that no kernel computes, naming what it asks for."""
    for op in binding.program.ops:
        problem = _problem(op)
        if problem is not None:
            raise ConfigError(f"{binding.program.name}: {op.kind} {problem}; use executor 'reference'")


def _problem(op: Op) -> str | None:
    for name, covered in COVERED.get(op.kind, {}).items():
        asked = op.params.get(name, covered)
        if asked != covered:
            return f"with {name} {asked!r} has no kernel, which takes {covered!r} alone"
    return None
