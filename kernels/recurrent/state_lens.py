"""This module sets the lengths of recurrent states, once a step or a chunk, after the last layer."""

from functools import cache
from typing import Any

from lowlat.kernels.common.memory import byte_at, int_at, set_int
from lowlat.kernels.reference.recurrent import pending as reference
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
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


@launches(reference.advance_states)
def advance_states(given: Given) -> list[KernelCall]:
    """`advance_states` of the reference, in one launch."""
    batch, rows = given.sizes("B", "R")
    return [KernelCall(_make(), (-(-batch // THREADS), 1, 1), (*given.tensors, batch, rows))]


@launches(reference.prefill_advance_states)
def prefill_advance_states(given: Given) -> list[KernelCall]:
    """`prefill_advance_states` of the reference, in one launch."""
    return [KernelCall(_make(), (1, 1, 1), (given["slot"], given["chunk"], 0, given["state_lens"], 1, 0))]


def examples() -> list[Kernel]:
    """The one kernel."""
    return [_make()]
