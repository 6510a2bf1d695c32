"""This module stores a prefilled slot's block table among those of all slots, for the slot's steps."""

from functools import cache
from typing import Any

from lowlat.kernels.common.memory import int_at, set_int
from lowlat.kernels.reference.attention import kv as reference
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types

__all__ = ["examples", "place_table"]

THREADS = 256


@launches(reference.place_table)
def place_table(given: Given) -> list[KernelCall]:
    """`place_table` of the reference. Time: that of a launch. Captured: yes."""
    (width,) = given.sizes("blocks")
    return [KernelCall(_make(), (-(-width // THREADS), 1, 1), (*given.tensors, width))]


@cache
def _make() -> Kernel:
    """Grid (blocks of the table / THREADS)."""

    def kernel(table: Any, slot: Any, block_table: Any, width: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place = int64(cuda.blockIdx.x) * int64(THREADS) + int64(cuda.threadIdx.x)
        if place < width:
            set_int(block_table, int64(int_at(slot, int64(0))) * width + place, int_at(table, place))

    return Kernel("place_table", kernel, (types.int64,) * 4, THREADS)


def examples() -> list[Kernel]:
    """The one specialisation that there is."""
    return [_make()]
