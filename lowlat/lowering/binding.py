"""A binding is the memory that a program is lowered onto; this module also has the kinds of calls that it becomes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from lowlat.errors import ConfigError, ShapeError
from lowlat.graphs.program import Op, Program, Stage
from lowlat.kernels.collectives.all_reduce import Channel
from lowlat.kernels.collectives.peers.rows import PeerRows
from lowlat.kernels.collectives.shares import RowShares
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.step.publish import LoopControl
from lowlat.kernels.toolchain.kernel import Gpu, KernelCall, Workspace
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.options.runtime import FEW_SLOTS

__all__ = [
    "AllReduces", "Binding", "BlockArgmax", "Call", "LibraryCall", "decodes", "in_parts", "sum_in_parts",
    "triggers_first",
]  # fmt: skip


@dataclass(frozen=True)
class LibraryCall:
    """A call of torch's operations on the current stream; a capture records it as it records a kernel's launch.

    function     called with `arguments`; it must not wait for the device, and nothing in it may depend on the contents
                 of tensors
    is_fallback  a kernel of ours would do it for another GPU, other sizes or plain weights
    """

    name: str
    function: Callable[..., None]
    arguments: Mapping[str, Any]
    is_fallback: bool = False

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [each for each in self.arguments.values() if isinstance(each, torch.Tensor)]


Call = KernelCall | LibraryCall


class AllReduces(Protocol):
    """The memory by which a rank adds up rows with the others; see `PeerMemory`."""

    def channel(self, width: int, whole: bool) -> Channel:
        """The memory of launches that all-reduce rows of a width; whole: each row is one block's, as norms need it."""

    def rows(self, width: int, kind: str) -> PeerRows:
        """The memory of one kind of kernel that adds up rows of a width over ranks as it makes them."""

    def shares(self, width: int) -> RowShares:
        """The memory of launches in which each rank adds up its share of many rows of a width."""


def decodes(op: Op) -> bool:
    """Whether an operation runs over the few rows of a step; prefill's GEMMs and experts have kernels of their own."""
    return op.stage is not Stage.PREFILL


def triggers_first(op: Op) -> bool:
    """Whether a small launch lets the next one start before it waits itself: in the target's step.

    What later kernels read before they wait was written at the step's start there, and weights are asked for the
    sooner. Drafts' rows are laid out on the way: there launches that wait first make them visible to attention.
    """
    return op.stage is Stage.VERIFY


def in_parts(op: Op) -> bool:
    """Whether an operation sums K in parts, as `tp_invariant` asks; each of 8 ranks has a single part."""
    return "num_parts" in op.params


def sum_in_parts(programs: Iterable[Program]) -> bool:
    """Whether any operation of the programs sums K in parts."""
    return any(in_parts(op) for program in programs for op in program.ops)


@dataclass(frozen=True)
class BlockArgmax:
    """The best pair of each row and block of logits, which the GEMM that made them has written next to them.

    logits  the buffer that the logits are in
    pairs   [M, blocks, 2] int32
    limit   bits of the largest magnitude that leaves a row whole, see `PartialArgmax`
    """

    logits: str
    pairs: torch.Tensor
    limit: int


@dataclass
class Binding:
    """A program with its buffers, weights and workspaces on one device.

    loop            the control of the device loop whose body the step is, if it is one
    switches        whether the choice of a width is for a SWITCH node
    num_awaited     MoE layers so far whose logits are awaited; each fills the next one's with sentinels
    all_reduces     the memory by which this rank adds up rows with others; None: it is the only one
    block_argmax    the argmax of each block of the last GEMM's logits, if it has written one
    is_invariant    no bit may depend on how many ranks there are: not on extents of which each has a part
    fresh           buffers that a kernel may still be writing when the next call starts; a cache, of which `kv_write`
                    alone wrote, with the buffer of the lengths that it wrote after, others with ""
    """

    program: Program
    buffers: Mapping[str, torch.Tensor]
    weights: DeviceWeights
    gpu: Gpu
    workspace: Workspace
    loop: LoopControl | None = None
    switches: bool = False
    all_reduces: AllReduces | None = None
    num_awaited: int = 0
    block_argmax: BlockArgmax | None = None
    is_invariant: bool = False
    fresh: dict[str, str] = field(default_factory=dict)

    def wrote(self, op: Op) -> None:
        """Take what an operation writes for fresh."""
        lens = op.reads.get("write_lens", "")
        for name in op.writes.values():
            self.fresh[name] = lens if self.fresh.get(name, lens) == lens else ""

    def arguments(self, op: Op) -> dict[str, Any]:
        """The buffers and parameters of an operation by argument name; its weights are left out."""
        return op.arguments(self.buffers)

    def vectors(self, op: Op) -> dict[str, Any]:
        """The weights of an operation that reads nothing but vectors and small tables, by argument name."""
        return {name: self.weights.vector(weight) for name, weight in op.weights.items()}

    def bias(self, op: Op) -> torch.Tensor | None:
        """The bias of a GEMM in the order of its packed weight's rows, if it has one."""
        return self.weights.bias(op.weights["bias"]) if "bias" in op.weights else None

    def sinks(self, op: Op) -> torch.Tensor | None:
        """The attention sinks of an operation, [H], if it has them."""
        return self.weights.vector(op.weights["sinks"]) if "sinks" in op.weights else None

    def channel(self, width: int, whole: bool = False) -> Channel:
        """The memory for rows of a width. Raises ConfigError where there is no other rank."""
        return self._others().channel(width, whole)

    def peer_rows(self, width: int, kind: str) -> PeerRows:
        """The memory of a kind of kernel for rows of a width. Raises ConfigError as `channel` does."""
        return self._others().rows(width, kind)

    def row_shares(self, width: int) -> RowShares:
        """The memory for many rows of a width. Raises ConfigError as `channel` does."""
        return self._others().shares(width)

    def _others(self) -> AllReduces:
        if self.all_reduces is None:
            raise ConfigError(f"{self.program.name} exchanges rows among ranks, and its executor has no others")
        return self.all_reduces

    def k_parts(self, op: Op, depth: int) -> KParts | None:
        """The parts of K in which an operation sums; None: its kernels cut K as they like.

        Raises ConfigError where parts are not made of whole steps of kernels.
        """
        if not in_parts(op):
            return None
        try:
            return KParts.of(int(op.params["num_parts"] or 1), int(op.params["unit"] or 1), depth)
        except ShapeError as error:
            raise ConfigError(
                f"{self.program.name}: tp_invariant cannot sum {next(iter(op.weights.values()))} by kernels: {error}; "
                "leave it out, or use executor 'reference'"
            ) from None

    @cached_property
    def shares_rows(self) -> bool:
        """Whether GEMMs of many rows have blocks that share them: where there are more slots than FEW_SLOTS."""
        tokens = self.program.buffers.get("tokens")
        return tokens is not None and tokens.shape[0] > FEW_SLOTS

    @cached_property
    def max_context(self) -> int:
        """The positions of the longest context."""
        return self.program.buffers["tokens"].shape[1]

    @cached_property
    def prefill_chunk(self) -> int:
        """The positions of a chunk of prefill. Raises ConfigError for a program that is no prefill."""
        for op in self.program.ops:
            size = op.params.get("chunk_size")
            if op.kind in ("prefill_attention", "refresh_attention") and isinstance(size, int):
                return size
        raise ConfigError(f"{self.program.name} has no attention of prefill, and so no size of its chunks")
