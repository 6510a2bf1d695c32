"""A kernel before it is compiled, and the arguments of one launch of it; nothing here touches a device.

A kernel's module makes `Kernel`s (a Python function specialised by constants) and `KernelCall`s (a kernel, a grid
and its arguments). An executor compiles, launches or captures them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, TypeVar

import torch

from lowlat.kernels.tuning.table import Planned, TuningTable

__all__ = [
    "H200",
    "HOPPER",
    "Argument",
    "Gpu",
    "Kernel",
    "KernelCall",
    "Workspace",
    "WorkspaceShape",
    "examples_for",
    "plan_name",
]

T = TypeVar("T")

HOPPER = (9, 0)  # the compute capability of an H100 and an H200
RESERVED_BYTES = 1024  # of shared memory, a block: what the driver takes from 8.0 on
GRAIN = 128  # of shared memory
H200_GB_S = 4850.0  # of memory; for GPUs that do not say
READ_SHARE = 0.93  # of it, that streaming reads get
Argument = torch.Tensor | int | float
# name, shape, dtype -> memory that a lowering owns and calls share, zero at first; kernels leave counters at zero
Workspace = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
WorkspaceShape = tuple[str, tuple[int, ...], torch.dtype]  # what a workspace is asked for


@dataclass(frozen=True)
class Gpu:
    """The properties of a device by which kernels are cut.

    shared_bytes  shared memory that one block may have
    peak_gb_s     bandwidth of its memory by clock and width, GB/s; 0.0: unknown
    tuning        plans that were measured on such a GPU; None: all plans are derived
    is_shared     several ranks of a step run on it: no block may wait for another rank's, which may find no room
    """

    num_multiprocessors: int
    shared_bytes: int
    capability: tuple[int, int]
    peak_gb_s: float = field(default=0.0, compare=False)
    tuning: TuningTable | None = field(default=None, compare=False, repr=False)
    is_shared: bool = field(default=False, compare=False)

    @property
    def suspends(self) -> bool:
        """Whether a warp that waits at a barrier in shared memory may be suspended."""
        return self.capability >= HOPPER

    @property
    def read_gb_s(self) -> float:
        """Bandwidth of streaming reads, GB/s, reckoned by the memory's peak: the same at every load."""
        return READ_SHARE * (self.peak_gb_s or H200_GB_S)

    def most_bytes(self, blocks: int) -> int:
        """The most shared memory a block of which so many blocks fit on an SM."""
        return (self.shared_bytes + RESERVED_BYTES) // blocks - RESERVED_BYTES

    def least_bytes(self, blocks: int) -> int:
        """The least shared memory a block of which no more than so many blocks fit on an SM."""
        return self.most_bytes(blocks + 1) + GRAIN


H200 = Gpu(132, 227 * 1024, HOPPER)  # an H100 SXM's too


def examples_for(gpu: Gpu, cases: Sequence[T], few: int) -> Sequence[T]:
    """Cases whose kernels depend on a GPU: all of them for blocks of an H200's size, for others the first few, which
    show that plans of that size compile."""
    return cases if gpu.shared_bytes == H200.shared_bytes else cases[:few]


@dataclass(frozen=True)
class Kernel:
    """A kernel specialised by constants.

    name          with the constants, unique: it names the kernel in profiles and in the cache of compiled code
    function      the Python function; its first act is `wait_for_previous_kernel`, but for prefetches of weights
    signature     Numba types of its parameters: arrays for tensors, or int64 for a tensor's address
    threads       threads a block, fixed
    min_blocks    blocks that must fit on an SM: caps the registers
    shared_bytes  dynamic shared memory a block, next to what it declares itself
    linked        False: the driver links it when it is loaded (it calls a function of the driver's)
    most_blocks   blocks of it that may meet on an SM; 0: as many as fit. A launch that starts while others'
                  blocks leave would else crowd the SMs that empty first, and wait for those
    specific      it has instructions of one capability alone, which no later one has: assembled for that (sm_90a)
    whole         its warpgroups hand registers to each other (`ptx_hopper.give_registers`), which is assembled in whole
                  programs alone: by the linker, from the compiler's intermediate code
    cluster       neighbouring blocks in x that run together and reach each other's shared memory (9.0 on); a grid is a
                  multiple of it
    waits_before_trigger   all its blocks wait for the kernel before it and then let the next one start (programmatic
                  dependent launch): kernels after it find done, before they wait, what was launched before it
    """

    name: str
    function: Callable[..., None]
    signature: tuple[Any, ...]
    threads: int
    min_blocks: int = 1
    shared_bytes: int = 0
    linked: bool = True
    most_blocks: int = 0
    specific: bool = False
    whole: bool = False
    cluster: int = 1
    waits_before_trigger: bool = False

    def __hash__(self) -> int:
        return hash(self.name)

    def shared_bytes_on(self, gpu: Gpu) -> int:
        """Dynamic shared memory that a launch asks for: more than it uses where that keeps blocks apart."""
        return max(self.shared_bytes, gpu.least_bytes(self.most_blocks) if self.most_blocks else 0)


@dataclass(frozen=True)
class KernelCall:
    """One launch: tensors are passed as arrays or by address, as the kernel's signature says.

    dependent  may start before the kernel before it ends (programmatic dependent launch, capability 9.0 on)
    planned    its place in tables of tuned plans; None: no GPU cuts it otherwise than another
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    dependent: bool = True
    planned: Planned | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [each for each in self.arguments if isinstance(each, torch.Tensor)]

    def __post_init__(self) -> None:
        if len(self.arguments) != len(self.kernel.signature):
            raise ValueError(
                f"{self.kernel.name} takes {len(self.kernel.signature)} arguments, got {len(self.arguments)}"
            )
        if self.grid[0] % self.kernel.cluster:
            raise ValueError(
                f"{self.kernel.name} has clusters of {self.kernel.cluster} blocks, got {self.grid[0]} blocks"
            )


def plan_name(kind: str, plan: Any) -> str:
    """The name of a kernel: its kind, and all numbers of its plan, those of plans within it included."""
    return kind + re.sub(r"\W+", "_", str(astuple(plan))).rstrip("_")
