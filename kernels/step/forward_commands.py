"""This module forwards the host's words to all ranks, in a launch of its own before the step.

Only the first rank reads the host's words. The host writes while steps run. If two GPUs read for themselves, they might
see a command, or the end of a loop, in different steps. Only counts are forwarded. The commands themselves are in
pinned memory that all GPUs read, and stay there until the step that takes them has been published. Rank 0 forwards
again only after the step has exchanged rows between ranks, see `peers.words`.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowlat.kernels.collectives.peers.words import MAX_RANKS, area_of, await_long, check_rank
from lowlat.kernels.common.memory import long_at, set_long
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types, uint32

__all__ = [
    "AREA_SHAPE",
    "COUNTER_SHAPE",
    "NUM_WORDS",
    "STOP",
    "TAIL",
    "CommandChannel",
    "examples",
    "forward_commands",
]

THREADS = 32
TAIL, STOP, NUM_WORDS = 0, 1, 2
AREA_SHAPE = (2, NUM_WORDS, 2)  # int64: slots that take turns, words of 16 bytes
COUNTER_SHAPE = (4,)  # int32: the last epoch, whether a wait was given up, two unused


@dataclass(frozen=True)
class CommandChannel:
    """The memory by which rank 0 forwards.

    areas      [2, 2, 2] int64, by rank: what rank 0 pushes to
    counters   [4] int32, this rank's own, zero at first
    forwarded  [2] int64, this rank's own: the commands written so far, and whether loops are to end
    abort      [1] int64 in pinned memory, of all ranks and the host: not zero ends waits, and loops
    """

    rank: int
    areas: tuple[torch.Tensor, ...]
    counters: torch.Tensor
    forwarded: torch.Tensor
    abort: torch.Tensor

    def __post_init__(self) -> None:
        check_rank(self.rank, len(self.areas))
        for area in self.areas:
            check_shape("area", area, *AREA_SHAPE)
        check_shape("counters", self.counters, *COUNTER_SHAPE)
        check_shape("forwarded", self.forwarded, NUM_WORDS)
        check_dtype(torch.int64, forwarded=self.forwarded, abort=self.abort, area=self.areas[0])
        check_dtype(torch.int32, counters=self.counters)


@cache
def _make_forward(ranks: int) -> Kernel:
    def forward_commands(
        tail: Any, stop: Any, forwarded: Any, counters: Any, abort: Any, rank: Any,
        a0: Any, a1: Any, a2: Any, a3: Any, a4: Any, a5: Any, a6: Any, a7: Any,
    ) -> None:  # fmt: skip
        thread, areas = int64(cuda.threadIdx.x), (a0, a1, a2, a3, a4, a5, a6, a7)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        epoch, lost = ptx.load_global_64(counters)
        epoch = uint32(epoch + uint32(1))
        cuda.syncthreads()
        if thread < int64(NUM_WORDS):
            place = int64(epoch & uint32(1)) * int64(NUM_WORDS * 16) + thread * int64(16)
            value, before = int64(0), long_at(forwarded, thread)
            if rank == int64(0):
                value = ptx.load_acquire_system(tail if thread == int64(TAIL) else stop)
                if thread == int64(STOP) and ptx.load_acquire_system(abort) != int64(0):
                    value = int64(1)
                if value != before:
                    ptx.fence_system()  # whoever sees the count sees what is counted
                low, high = uint32(value & int64(0xFFFFFFFF)), uint32(value >> int64(32))
                for peer in range(1, ranks):
                    ptx.store_relaxed_system_words(area_of(int64(peer), areas) + place, low, high, epoch)
            else:
                code = (rank + int64(1)) | int64(1 << 8)
                value, given_up = await_long(area_of(rank, areas) + place, epoch, abort, code, lost)
                if given_up != uint32(0):
                    value = before if thread == int64(TAIL) else int64(1)
                    ptx.store_global_u32(counters + int64(4), uint32(1))
            set_long(forwarded, thread, value)
        if thread == int64(0):
            ptx.store_global_u32(counters, epoch)

    return Kernel(f"forward_commands_ranks{ranks}", forward_commands, (types.int64,) * (6 + MAX_RANKS), THREADS)


def forward_commands(
    command_tail: torch.Tensor, stop_flag: torch.Tensor, *, channel: CommandChannel
) -> list[KernelCall]:
    """Read the two words on rank 0, await them on others, and leave them in `channel.forwarded`.

    command_tail, stop_flag  [1] int64, in pinned memory; only rank 0 reads them
    One launch of one warp. A wait that is given up leaves the count as it was, and ends loops. Raises ShapeError.
    """
    check_shape("command_tail", command_tail, 1)
    check_shape("stop_flag", stop_flag, 1)
    check_dtype(torch.int64, command_tail=command_tail, stop_flag=stop_flag)
    ranks = len(channel.areas)
    areas: list[Argument] = [*channel.areas, *[0] * (MAX_RANKS - ranks)]
    given = (command_tail, stop_flag, channel.forwarded, channel.counters, channel.abort, channel.rank)
    return [KernelCall(_make_forward(ranks), (1, 1, 1), (*given, *areas), dependent=False)]


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [_make_forward(2), _make_forward(8)]
