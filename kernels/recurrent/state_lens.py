"""The lengths of recurrent states, set once a step or a chunk, after the last layer."""

from functools import cache
from typing import Any

import torch

from lowlat.kernels.common.memory import byte_at, int_at, set_int
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types

__all__ = ["advance_states", "examples", "prefill_advance_states"]

THREADS = 32


@cache
def _make() -> Kernel:
    """Grid (slots / THREADS,). rows: of a slot; 0: a chunk's start and live rows stand in `lens`."""

    def advance_states_kernel(slots: Any, lens: Any, row_live: Any, state_lens: Any, batch: Any, rows: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        owner = int64(cuda.blockIdx.x) * int64(THREADS) + int64(cuda.threadIdx.x)
        if owner < batch:
            slot, length = int_at(slots, owner), int_at(lens, owner)
            if rows == 0:
                set_int(state_lens, slot, length + int_at(lens, int64(1)))
            elif slot >= 0 and byte_at(row_live, owner * rows) != 0:
                set_int(state_lens, slot, length)

    return Kernel("advance_states", advance_states_kernel, (types.int64,) * 6, THREADS, waits_before_trigger=True)


def advance_states(
    slots: torch.Tensor, dense_lens: torch.Tensor, row_live: torch.Tensor, *, state_lens: torch.Tensor
) -> list[KernelCall]:
    """`advance_states` of the reference, whose arguments these are.

    One launch. Raises ShapeError for shapes or dtypes that do not fit.
    """
    batch = slots.shape[0]
    check_shape("slots", slots, batch)
    check_shape("dense_lens", dense_lens, batch)
    rows = row_live.numel() // batch
    check_shape("row_live", row_live.reshape(-1), batch * rows)
    check_dtype(torch.int32, slots=slots, dense_lens=dense_lens, state_lens=state_lens)
    grid = (-(-batch // THREADS), 1, 1)
    return [KernelCall(_make(), grid, (slots, dense_lens, row_live, state_lens, batch, rows))]


def prefill_advance_states(slot: torch.Tensor, chunk: torch.Tensor, *, state_lens: torch.Tensor) -> list[KernelCall]:
    """`prefill_advance_states` of the reference, whose arguments these are.

    One launch. Raises ShapeError for shapes or dtypes that do not fit.
    """
    check_shape("slot", slot, 1)
    check_shape("chunk", chunk, 2)
    check_dtype(torch.int32, slot=slot, chunk=chunk, state_lens=state_lens)
    return [KernelCall(_make(), (1, 1, 1), (slot, chunk, 0, state_lens, 1, 0))]


def examples() -> list[Kernel]:
    """The one kernel."""
    return [_make()]
