"""This module defines a kernel before it is compiled, and one launch of it. Nothing here touches a device.

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
RESERVED_BYTES = 1024  # shared memory that the driver reserves for each block, from 8.0 on
GRAIN = 128  # shared memory is allocated in multiples of so many bytes
H200_GB_S = 4850.0  # memory bandwidth, also assumed for GPUs that do not report theirs
READ_SHARE = 0.93  # the share of it that streaming reads reach
Argument = torch.Tensor | int | float
# name, shape, dtype -> memory that a lowering owns and its calls share. It is zero at first; kernels reset counters
Workspace = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
WorkspaceShape = tuple[str, tuple[int, ...], torch.dtype]  # the arguments of a `Workspace`


@dataclass(frozen=True)
class Gpu:
    """The properties of a device on which grids, tiles and plans depend.

    shared_bytes  shared memory that one block may have
    peak_gb_s     bandwidth of its memory by clock and width, GB/s; 0.0: unknown
    tuning        plans that were measured on such a GPU; None: all plans are derived
    is_shared     several ranks of a step run on it: no block may wait for a block of another rank, for which there may
                  be no free SM
    """

    num_multiprocessors: int
    shared_bytes: int
    capability: tuple[int, int]
    peak_gb_s: float = field(default=0.0, compare=False)
    tuning: TuningTable | None = field(default=None, compare=False, repr=False)
    is_shared: bool = field(default=False, compare=False)

    @property
    def suspends(self) -> bool:
        """Whether the hardware may suspend a warp that waits at a barrier in shared memory."""
        return self.capability >= HOPPER

    @property
    def read_gb_s(self) -> float:
        """The bandwidth of streaming reads, GB/s, from the memory's peak, so that it is the same at every load."""
        return READ_SHARE * (self.peak_gb_s or H200_GB_S)

    def most_bytes(self, blocks: int) -> int:
        """Return the most shared memory that a block may have if `blocks` blocks are to fit on an SM."""
        return (self.shared_bytes + RESERVED_BYTES) // blocks - RESERVED_BYTES

    def least_bytes(self, blocks: int) -> int:
        """Return the least shared memory of a block with which at most `blocks` blocks fit on an SM."""
        return self.most_bytes(blocks + 1) + GRAIN


H200 = Gpu(132, 227 * 1024, HOPPER)  # an H100 SXM has the same sizes


def examples_for(gpu: Gpu, cases: Sequence[T], few: int) -> Sequence[T]:
    """Return the cases of a kernel's plans that tests compile for a GPU.

    These are all cases if the GPU's blocks have an H200's shared memory. For other GPUs they are the first `few`, which
    show that plans of that size compile.
    """
    return cases if gpu.shared_bytes == H200.shared_bytes else cases[:few]


@dataclass(frozen=True)
class Kernel:
    """A kernel specialised by constants.

    name          unique, with the constants in it; it names the kernel in profiles and in the cache of compiled code
    function      the Python function; it first calls `wait_for_previous_kernel`, except for prefetches of weights
    signature     Numba types of its parameters: arrays for tensors, or int64 for a tensor's address
    threads       threads a block, fixed
    min_blocks    blocks that must fit on an SM: this caps the registers
    shared_bytes  dynamic shared memory a block, in addition to static arrays that the function declares
    linked        False: the driver links it when it is loaded, because it calls a function of the driver
    most_blocks   the most of its blocks that may share an SM; 0: as many as fit. Without a limit, a launch that starts
                  while blocks of other kernels end would crowd the SMs that empty first, and run at their pace
    specific      it uses instructions of one capability that no later one has, and is assembled for that (sm_90a)
    whole         its warpgroups hand registers to each other (`ptx_hopper.give_registers`). The assembler accepts that
                  only in whole programs, so the linker makes the code from the compiler's intermediate code
    cluster       neighbouring blocks in x that run together and reach each other's shared memory (9.0 on); a grid is a
                  multiple of it
    waits_before_trigger   all its blocks first wait for the kernel before it and only then let the next kernel start
                  (programmatic dependent launch). So the next kernel may read the results of all launches before this
                  one already before its own wait
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
        """Return the dynamic shared memory of a launch: with `most_blocks`, enough that no more blocks fit on an SM."""
        return max(self.shared_bytes, gpu.least_bytes(self.most_blocks) if self.most_blocks else 0)


@dataclass(frozen=True)
class KernelCall:
    """One launch. Tensors are passed as arrays or by address, as the kernel's signature says.

    dependent  it may start before the previous kernel ends (programmatic dependent launch, capability 9.0 on)
    planned    its kind and key in tables of tuned plans; None: it is the same on every GPU
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
    """Return the name of a kernel: its kind and all numbers of its plan, with those of nested plans."""
    return kind + re.sub(r"\W+", "_", str(astuple(plan))).rstrip("_")
