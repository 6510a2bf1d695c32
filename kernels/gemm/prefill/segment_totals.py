"""This module adds up a prefill GEMM's tile over all segments of K, next to the sums of the present segment.

Small tiles leave registers for all totals. Large tiles keep a part in shared memory, where each thread has places that
no other thread reads.
"""

from typing import Any

from lowlat.kernels.gemm.prefill.plan import CONSUMERS, PrefillGemmPlan
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["make_add_segments"]

PITCH = 16 * 128 * CONSUMERS  # bytes from four of a thread's totals to its next four


def make_add_segments(steps: int, length: int, segments: int, plan: PrefillGemmPlan, run: Any) -> Any:
    """A function of a warpgroup: the sums of all steps, added up from the first segment to the last.

    steps   of 64 columns; a segment has `length`, but the last one
    run     the sums of so many steps, from zero
    """
    if plan.stored_totals:
        return _make_partly_stored(steps, length, segments, plan, run)
    add, zeros = ptx_hopper.add_tiles(plan.sums), ptx.zeros(plan.sums)

    @device_function
    def add_segments(
        sums: Any, base: Any, barriers: Any, within: Any, stage: Any, parity: Any, warp: Any, lane: Any, rows: Any
    ) -> Any:
        total = zeros()
        for part in range(segments):
            number = min(uint32(length), uint32(uint32(steps) - uint32(part) * uint32(length)))
            sums, stage, parity = run(sums, base, barriers, within, stage, parity, number, lane, rows)
            total = add(total, sums)
        return total, stage, parity

    return add_segments


def _make_partly_stored(steps: int, length: int, segments: int, plan: PrefillGemmPlan, run: Any) -> Any:
    """The same, with as many of a thread's totals in shared memory as the plan says."""
    count, stored, totals_at, last = plan.sums, plan.stored_totals, plan.totals_at, segments - 1
    held = count - stored
    store, load = ptx_hopper.store_sums(stored, PITCH), ptx_hopper.load_sums(stored, PITCH)
    of_held, of_stored = ptx_hopper.take_sums(count, 0, held), ptx_hopper.take_sums(count, held, stored)
    add, add_held, add_stored = (ptx_hopper.add_tiles(number) for number in (count, held, stored))
    zeros, none = ptx.zeros(count), ptx.zeros(held)

    @device_function
    def add_segments(
        sums: Any, base: Any, barriers: Any, within: Any, stage: Any, parity: Any, warp: Any, lane: Any, rows: Any
    ) -> Any:
        place = uint32(base + uint32(totals_at) + uint32(warp * uint32(32) + lane) * uint32(16))
        total = none()
        for part in range(segments):
            number = min(uint32(length), uint32(uint32(steps) - uint32(part) * uint32(length)))
            sums, stage, parity = run(sums, base, barriers, within, stage, parity, number, lane, rows)
            if part == 0:
                sums = add(zeros(), sums)
            else:
                sums = add_held(total, of_held(sums)) + add_stored(load(place), of_stored(sums))
            if part < last:
                store(place, of_stored(sums))
                total = of_held(sums)
        return sums, stage, parity

    return add_segments
