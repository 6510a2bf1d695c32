"""An implementation lowers an operation by kernels or a library; it says which GPUs and sizes it supports.

The table of operations lists the implementations of an operation in order. The first one that supports the operation on
the runtime's GPU lowers it. A kernel for another capability is one more entry, before the entries that it replaces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowlat.errors import ConfigError
from lowlat.graphs.program import Op
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, Call

__all__ = ["Implementation", "Lower", "lower_by"]

Lower = Callable[[Binding, Op], Sequence[Call]]


def _on_all(_gpu: Gpu) -> bool:
    return True


def _always(_binding: Binding, _op: Op) -> bool:
    return True


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    name     tells implementations of an operation apart
    lower    returns the calls that compute an operation
    runs_on  whether a GPU has the instructions, by its capability
    covers   whether it supports the operation in a program: its stage, its sizes, the form of its weight
    plans    the kinds of its plans in tuning tables
    packs    arguments of weights that it reads packed in every format; quantised weights are always packed
    """

    name: str
    lower: Lower
    runs_on: Callable[[Gpu], bool] = _on_all
    covers: Callable[[Binding, Op], bool] = _always
    plans: tuple[str, ...] = ()
    packs: tuple[str, ...] = ()


def lower_by(implementations: Sequence[Implementation], binding: Binding, op: Op) -> Sequence[Call]:
    """The calls of the first implementation that covers an operation. Raises ConfigError if none does."""
    for each in implementations:
        if each.runs_on(binding.gpu) and each.covers(binding, op):
            return each.lower(binding, op)
    tried = ", ".join(each.name for each in implementations)
    raise ConfigError(
        f"{binding.program.name}: operation {op.kind} has no kernel for capability {binding.gpu.capability} and its "
        f"sizes (there are: {tried}); use executor='reference'"
    )
