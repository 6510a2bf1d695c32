"""A slot's table of blocks put in its place among all slots', where prefill leaves it for the steps after it."""

from functools import cache
from typing import Any

import torch

from lowlat.kernels.common.memory import int_at, set_int
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types

__all__ = ["examples", "place_table"]

THREADS = 256


def place_table(table: torch.Tensor, slot: torch.Tensor, *, block_table: torch.Tensor) -> list[KernelCall]:
    """`place_table` of the reference.

    table        [1, C / block]      int32
    slot         [1]                 int32
    block_table  [max B, C / block]  int32  updated: row `slot`
    Time: that of a launch. Captured: yes. Raises ShapeError for shapes or dtypes that do not fit.
    """
    check_dtype(torch.int32, table=table, slot=slot, block_table=block_table)
    width = block_table.shape[-1]
    check_shape("table", table, 1, width)
    check_shape("slot", slot, 1)
    return [KernelCall(_make(), (-(-width // THREADS), 1, 1), (table, slot, block_table, width))]


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
