"""This module lowers a program to groups of calls, by the table of fusions and each operation's own kernel."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from lowlat.graphs.program import Op, Program, Stage
from lowlat.kernels.toolchain.kernel import H200, Gpu, KernelCall
from lowlat.lowering.binding import Binding, Call
from lowlat.lowering.covers import check_covered
from lowlat.lowering.fusion import cover
from lowlat.lowering.gemm_fusions import GEMM_FUSIONS
from lowlat.lowering.linear import LINEAR_FUSIONS
from lowlat.lowering.moe_fusions import MOE_FUSIONS
from lowlat.lowering.operations import early_reads, lower_alone, operation_layouts
from lowlat.lowering.prefill_fusions import PREFILL_FUSIONS
from lowlat.lowering.recurrent_fusions import RECURRENT_FUSIONS
from lowlat.lowering.row_fusions import ROW_FUSIONS
from lowlat.lowering.step_fusions import STEP_FUSIONS

__all__ = ["FUSIONS", "LoweredGroup", "lower", "weight_layouts"]

FUSIONS = (
    *STEP_FUSIONS,
    *MOE_FUSIONS,
    *GEMM_FUSIONS,
    *LINEAR_FUSIONS,
    *PREFILL_FUSIONS,
    *RECURRENT_FUSIONS,
    *ROW_FUSIONS,
)


@dataclass(frozen=True)
class LoweredGroup:
    """Consecutive operations, and the calls that compute them.

    name    the fusion's name, or the operation's kind
    hidden  buffers that the operations write, but the calls do not
    """

    name: str
    stage: Stage
    ops: tuple[Op, ...]
    calls: tuple[Call, ...]
    hidden: frozenset[str]

    @property
    def kernel_calls(self) -> tuple[KernelCall, ...]:
        """The calls that launch lowlat's kernels."""
        return tuple(call for call in self.calls if isinstance(call, KernelCall))

    @property
    def written(self) -> tuple[str, ...]:
        """The different buffers that the group has written, in order."""
        names = (name for op in self.ops for name in op.writes.values() if name not in self.hidden)
        return tuple(dict.fromkeys(names))


def lower(binding: Binding, *, fuse: bool = True) -> tuple[LoweredGroup, ...]:
    """Lower a whole program to groups of calls.

    fuse  whether to apply fusions; False: each operation has its own kernel
    Raises ConfigError for an unsupported operation, see `covers`; ShapeError for sizes that do not fit together.
    """
    check_covered(binding.program)
    groups: list[LoweredGroup] = []
    awaits, fresh = True, binding.fresh  # awaits: the next call is launched without PDL, after all others have ended
    fresh.clear()
    for fusion, run in cover(binding.program, binding.gpu, FUSIONS if fuse else (), binding.weights.permutation):
        known = binding.block_argmax
        if known is not None and any(known.logits in op.writes.values() for op in run.ops):
            binding.block_argmax = None
        calls = list(lower_alone(binding, run.ops[0]) if fusion is None else fusion.lower(binding, run))
        awaits = awaits and not (groups and _waits_first(calls[0]))
        if awaits or not fresh.keys().isdisjoint(name for op in run.ops for name in early_reads(op)):
            calls[0] = _awaits_all(calls[0])
            fresh.clear()
        # nearly every kernel after a step's start reads slots and lengths
        awaits = run.ops[-1].stage is Stage.ACTIVE_SLOTS
        if any(map(_waits_first, calls)):
            fresh.clear()
        for op in run.ops:
            binding.wrote(op)
        hidden = frozenset(() if fusion is None else fusion.hides(run))
        name = run.ops[0].kind if fusion is None else fusion.name
        groups.append(LoweredGroup(name, run.ops[0].stage, run.ops, tuple(calls), hidden))
    return tuple(groups)


def _waits_first(call: Call) -> bool:
    """Whether a call waits for all calls before it, and only then lets the next one start."""
    return isinstance(call, KernelCall) and call.kernel.waits_before_trigger


def _awaits_all(call: Call) -> Call:
    """The call without programmatic dependent launch: it starts only when all calls before it have ended."""
    return replace(call, dependent=False) if isinstance(call, KernelCall) else call


def weight_layouts(programs: Iterable[Program], gpu: Gpu = H200, *, fuse: bool = True) -> dict[str, torch.Tensor]:
    """The row permutations of packed weights that kernels and fusions of these programs need, by weight.

    The first program with a weight decides. A fusion that needs another permutation is then not applied.
    """
    layouts: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    for program in programs:
        weights = {name for op in program.ops for name in op.weights.values()}
        if weights <= seen:
            continue
        seen |= weights
        layouts = {**operation_layouts(program), **layouts}
        for fusion, run in cover(program, gpu, FUSIONS if fuse else ()):
            if fusion is not None:
                layouts = {**fusion.layouts(run), **layouts}
    return layouts
