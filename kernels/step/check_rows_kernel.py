"""This module has the kernels that check the rows to verify and the accepted rows: one block each, slot after slot.

They are specialised by plans. Arrays are passed as addresses.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from lowlat.kernels.common.memory import byte_at, int_at, long_at, set_byte, set_int, set_long, turns
from lowlat.kernels.reference.step.checks import (
    ACCEPTED_LENGTH,
    ACCEPTED_NODE,
    DENSE,
    ENDS,
    MASK_BEYOND,
    MASK_CLOSED,
    MASK_DEAD,
    MASK_PATH,
    MASK_SELF,
    MASK_UNSEEN,
    POSITION,
    VERIFIED,
    WIDTH,
)
from lowlat.kernels.step.check_failures import NOTHING, THREADS, drop, less, tell
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, plan_name
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types

__all__ = ["MAX_ROWS", "AcceptedPlan", "RowsPlan", "accepted_kernel", "rows_kernel"]

MAX_ROWS = 64


@dataclass(frozen=True)
class RowsPlan:
    """The extents, the limit and the kinds that `check_rows` is specialised by."""

    batch: int
    rows: int
    num_paths: int
    width: int
    max_batch: int
    max_context: int
    checks_lengths: bool
    checks_spans: bool
    checks_masks: bool
    falls_back: bool


@dataclass(frozen=True)
class AcceptedPlan:
    """The extents that `check_accepted` is specialised by."""

    batch: int
    rows: int
    max_batch: int
    falls_back: bool


@device_function
def _check_row(row: Any, slot: Any, length: Any, max_context: Any, parts: Any, own: Any, best: Any) -> Any:
    """The least of what fails at one row."""
    checks_spans, checks_masks = parts
    masks, live, position = own
    mask, alive = int64(masks[row]), live[row] != 0
    if checks_spans and slot >= 0:
        last = min(length - 1 + row, int64(max_context - 1))
        best = less(best, alive and (position < length - 1 or position > last), POSITION, row, position, last)
    if checks_masks:
        best = less(best, not alive and mask != 0, MASK_DEAD, row, mask, 0)
        best = less(best, alive and (mask >> row) & 1 == 0, MASK_SELF, row, mask, int64(1) << row)
        # of row 63 the bit is the sign, after which there is none
        later = (mask >> row) >> 1 if row < 63 else int64(0)
        best = less(best, alive and later != 0, MASK_BEYOND, row, mask, (int64(2) << row) - 1)
        above, held = int64(0), int64(-1)
        while alive and above < row and held < 0:
            if (mask >> above) & 1 == 1 and (live[above] == 0 or int64(masks[above]) & ~mask != 0):
                held = above
            above += 1
        best = less(best, held >= 0, MASK_CLOSED, row, mask, masks[max(held, int64(0))])
    return best


@device_function
def _check_path(path: Any, sizes: Any, source: Any, masks: Any, seen: Any, index: Any, best: Any) -> Any:
    """The least of what fails along a path, whose nodes are seen."""
    rows, width = sizes
    expected, met, column, going = int64(0), int64(0), int64(0), True
    while going and column < width:
        place = path * width + column
        node = int_at(source, place)
        going = node >= 0
        if going:
            expected |= int64(1) << (node & 63)
            known = int64(0)
            if node < rows:
                met |= int64(1) << node
                known = int64(masks[node])
            best = less(best, known != expected, MASK_PATH, place, known, expected)
        column += 1
    cuda.atomic.or_(seen, index, met)
    return best


@device_function
def _check_counts(length: Any, index: Any, rows: Any, live: Any, dense_lens: Any, num_verified: Any, best: Any) -> Any:
    """The least of what fails of a slot's position and its count of verified drafts."""
    dense, verified, count = int_at(dense_lens, index), int_at(num_verified, index), int64(-1)
    for row in range(rows):
        count += int64(1) if live[row] != 0 else int64(0)
    count = count if live[0] != 0 else int64(-1)
    best = less(best, dense != length - 1, DENSE, 0, dense, length - 1)
    return less(best, verified != count or count < 0, VERIFIED, 0, verified, count)


@cache
def rows_kernel(plan: RowsPlan) -> Kernel:
    """The kernel of `check_rows`, grid (1,)."""
    batch, rows, num_paths, width, max_batch, max_context = astuple(plan)[:6]
    checks_lengths, checks_spans, checks_masks, falls_back = astuple(plan)[6:]

    def kernel(
        lengths: Any, paths: Any, slots: Any, active: Any, num_drafts: Any, slot_ints: Any, row_tokens: Any,
        row_positions: Any, row_live: Any, row_masks: Any, dense_lens: Any, num_verified: Any, check_failures: Any,
    ) -> None:  # fmt: skip
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        least = cuda.shared.array(shape=batch, dtype=int64)
        seen = cuda.shared.array(shape=batch, dtype=int64)
        masks = cuda.shared.array(shape=rows, dtype=int64)
        live = cuda.shared.array(shape=rows, dtype=int32)
        thread = int64(cuda.threadIdx.x)
        if thread < batch:
            least[thread] = NOTHING
            seen[thread] = 0
        for index in range(batch):
            slot, best = int_at(slots, index), (int64(NOTHING), int64(0), int64(0))
            length, position = int64(0), int64(0)
            if slot >= 0:
                length = int_at(lengths, slot)
            if thread < rows:
                masks[thread] = long_at(row_masks, index * rows + thread)
                live[thread] = byte_at(row_live, index * rows + thread)
                position = int_at(row_positions, index * rows + thread)
            cuda.syncthreads()
            if checks_lengths and slot >= 0 and thread == 0:
                best = _check_counts(length, index, rows, live, dense_lens, num_verified, best)
            if thread < rows:
                own = (masks, live, position)
                best = _check_row(thread, slot, length, max_context, (checks_spans, checks_masks), own, best)
            if checks_masks:
                for turn in range(turns(num_paths, THREADS)):
                    path = thread + turn * THREADS
                    if path < num_paths:
                        source = paths + index * (num_paths * width * 4)
                        best = _check_path(path, (rows, width), source, masks, seen, index, best)
                cuda.syncthreads()
                if thread < rows:
                    unseen = live[thread] != 0 and (int64(seen[index]) >> thread) & 1 == 0
                    best = less(best, unseen, MASK_UNSEEN, thread, masks[thread], 0)
            if best[0] < NOTHING:
                cuda.atomic.min(least, index, best[0])
            cuda.syncthreads()
            fails = least[index] < NOTHING
            row = slot if slot >= 0 else int64(max_batch)
            if best[0] < NOTHING and least[index] == best[0]:
                tell(check_failures, row, best[0], best[1], best[2])
            if fails and thread < rows:
                place = index * rows + thread
                set_int(row_tokens, place, int64(-1))
                set_int(row_positions, place, int64(0))
                set_byte(row_live, place, int64(0))
                set_long(row_masks, place, int64(0))
            if fails and thread == 0:
                set_int(dense_lens, index, int64(0))
                set_int(num_verified, index, int64(0))
                if slot >= 0:
                    drop(index, slot, falls_back, (slots, active, num_drafts, slot_ints), check_failures)
                else:
                    set_long(check_failures, max_batch * WIDTH + ENDS, int64(0))
            cuda.syncthreads()

    return Kernel(plan_name("check_rows", plan), kernel, (types.int64,) * 13, THREADS)


@device_function
def _check_nodes(count: Any, rows: Any, nodes: Any, row_live: Any, row_masks: Any) -> Any:
    """The first of the accepted rows that is no live child of the one before; (key, value, expected)."""
    best, place, above, held = (int64(NOTHING), int64(0), int64(0)), int64(0), int64(-1), int64(0)
    while place < count and best[0] == NOTHING:
        node = int_at(nodes, place)
        inside, right = node >= 0 and node < rows, False
        if inside:
            mask = long_at(row_masks, node)
            right = byte_at(row_live, node) != 0 and mask == held | (int64(1) << node) and above < node
            held = mask
        best = less(best, not right, ACCEPTED_NODE, place, node, above)
        above = node
        place += 1
    return best


@cache
def accepted_kernel(plan: AcceptedPlan) -> Kernel:
    """The kernel of `check_accepted`, grid (1,): a thread an entry."""
    batch, rows, max_batch, falls_back = astuple(plan)

    def kernel(
        accepted_nodes: Any, row_live: Any, row_masks: Any, num_verified: Any, slots: Any, active: Any, num_drafts: Any,
        slot_ints: Any, accepted_lens: Any, check_failures: Any,
    ) -> None:  # fmt: skip
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        index, best = int64(cuda.threadIdx.x), (int64(NOTHING), int64(0), int64(0))
        last = cuda.shared.array(shape=1, dtype=int32)
        slot = int64(-1)
        if index == 0:
            last[0] = -1
        cuda.syncthreads()
        if index < batch:
            slot, count = int_at(slots, index), int_at(accepted_lens, index)
            most = min(int_at(num_verified, index), int64(rows - 1)) + 1
            if slot < 0:
                best = less(best, count != 0, ACCEPTED_LENGTH, index, count, 0)
            elif count < 1 or count > most:
                best = less(best, True, ACCEPTED_LENGTH, index, count, most)
            else:
                nodes = accepted_nodes + index * (rows * 4)
                best = _check_nodes(count, rows, nodes, row_live + index * rows, row_masks + index * (rows * 8))
            if best[0] < NOTHING:
                set_int(accepted_lens, index, int64(0))
            if best[0] < NOTHING and slot >= 0:
                tell(check_failures, slot, best[0], best[1], best[2])
                drop(index, slot, falls_back, (slots, active, num_drafts, slot_ints), check_failures)
            elif best[0] < NOTHING:
                cuda.atomic.max(last, 0, int32(index))
        cuda.syncthreads()
        if slot < 0 and best[0] < NOTHING and last[0] == index:
            tell(check_failures, int64(max_batch), best[0], best[1], best[2])
            set_long(check_failures, max_batch * WIDTH + ENDS, int64(0))

    return Kernel(plan_name("check_accepted", plan), kernel, (types.int64,) * 10, 32)
