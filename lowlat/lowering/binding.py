"""A binding is a program with its memory on one device, from which lowering makes calls; their types are here, too."""

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
    """A call of torch's operations on the current stream; a capture records their launches.

    function     called with `arguments`; it must not wait for the device, nor depend on the contents of tensors
    is_fallback  whether lowlat has a kernel for it on another GPU, for other sizes or for plain weights
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
    """The peer memory with which a rank sums rows over all ranks; see `PeerMemory`."""

    def channel(self, width: int, whole: bool) -> Channel:
        """The memory of all-reduce launches over rows of a width; whole: one block has a whole row, as norms need."""

    def rows(self, width: int, kind: str) -> PeerRows:
        """The memory of a kind of kernel that computes rows of a width and sums them over ranks."""

    def shares(self, width: int) -> RowShares:
        """The memory of launches over many rows of a width, of which each rank sums its share."""


def decodes(op: Op) -> bool:
    """Whether an operation runs over a step's few rows; prefill's GEMMs and experts have other kernels."""
    return op.stage is not Stage.PREFILL


def triggers_first(op: Op) -> bool:
    """Whether a small launch lets the next one start before it waits for the one before it: in the target's forward.

    There later kernels read, before they wait, only buffers from the step's start, and they can load weights earlier.
    In drafting the rows are laid out between kernels: launches that wait first make them visible to attention.
    """
    return op.stage is Stage.VERIFY


def in_parts(op: Op) -> bool:
    """Whether an operation sums K in parts, for `tp_invariant`; with 8 ranks each has one part."""
    return "num_parts" in op.params


def sum_in_parts(programs: Iterable[Program]) -> bool:
    """Whether any operation of the programs sums K in parts."""
    return any(in_parts(op) for program in programs for op in program.ops)


@dataclass(frozen=True)
class BlockArgmax:
    """The argmax of each row and block of logits, which the LM head's GEMM has written next to the logits.

    logits  the buffer of the logits
    pairs   [M, blocks, 2] int32
    limit   bits of the largest magnitude that leaves a row whole, see `PartialArgmax`
    """

    logits: str
    pairs: torch.Tensor
    limit: int


@dataclass
class Binding:
    """A program with its buffers, weights and workspaces on one device.

    loop            the control of the device loop, if the step is its body
    switches        whether the choice of a draft length sets a SWITCH node's condition
    num_awaited     number of MoE layers so far whose router logits the next launch awaits word by word; each layer
                    fills the next one's logits with sentinels
    all_reduces     the memory with which this rank sums rows over ranks; None: there is one rank
    block_argmax    the argmax of each block of the last GEMM's logits, if it has written one
    is_invariant    whether no bit may depend on the number of ranks
    fresh           buffers that a kernel may still write when the next call starts. A cache that only `kv_write` wrote
                    has the buffer of the lengths after which it wrote; others have ""
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
        """Add the buffers that an operation writes to `fresh`."""
        lens = op.reads.get("write_lens", "")
        for name in op.writes.values():
            self.fresh[name] = lens if self.fresh.get(name, lens) == lens else ""

    def arguments(self, op: Op) -> dict[str, Any]:
        """The buffers and parameters of an operation by argument name, without its weights."""
        return op.arguments(self.buffers)

    def vectors(self, op: Op) -> dict[str, Any]:
        """The weights of an operation that reads only vectors and small tables, by argument name."""
        return {name: self.weights.vector(weight) for name, weight in op.weights.items()}

    def bias(self, op: Op) -> torch.Tensor | None:
        """The bias of a GEMM in the order of its packed weight's rows, if it has one."""
        return self.weights.bias(op.weights["bias"]) if "bias" in op.weights else None

    def sinks(self, op: Op) -> torch.Tensor | None:
        """The attention sinks of an operation, [H], if it has them."""
        return self.weights.vector(op.weights["sinks"]) if "sinks" in op.weights else None

    def channel(self, width: int, whole: bool = False) -> Channel:
        """The memory for rows of a width. Raises ConfigError if there is no other rank."""
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
        """The parts of K in which an operation sums; None: its kernels choose them.

        Raises ConfigError if a part is not a whole number of a kernel's K steps.
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
        """Whether GEMMs of many rows divide the rows among blocks: with more slots than FEW_SLOTS."""
        tokens = self.program.buffers.get("tokens")
        return tokens is not None and tokens.shape[0] > FEW_SLOTS

    @cached_property
    def max_context(self) -> int:
        """The positions of the longest context."""
        return self.program.buffers["tokens"].shape[1]

    @cached_property
    def prefill_chunk(self) -> int:
        """The positions of a chunk of prefill. Raises ConfigError for another program."""
        for op in self.program.ops:
            size = op.params.get("chunk_size")
            if op.kind in ("prefill_attention", "refresh_attention") and isinstance(size, int):
                return size
        raise ConfigError(f"{self.program.name} has no attention of prefill, and so no size of its chunks")
