"""The kernels of a step's checks: a block each, whose threads look at one slot after the other.

Of all that fails at a slot the least is told, by code and then place: threads keep their own, and meet at the least
of all. They know addresses only, and are specialised by a plan.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from lowlat.kernels.common.memory import byte_at, int_at, long_at, set_byte, set_int, set_long, turns
from lowlat.kernels.reference.step.checks import (
    ACCEPTED_LENGTH,
    ACCEPTED_NODE,
    ADVANCED,
    BLOCK_BOUNDS,
    BLOCK_RESERVED,
    BLOCK_SHARED,
    CODE,
    COMMITTED_LENGTH,
    DENSE,
    DRAFT_LIMIT_BOUNDS,
    DRAFTS_BOUNDS,
    ENDS,
    EXPECTED,
    LENGTH_BOUNDS,
    LENGTH_CHANGED,
    MASK_BEYOND,
    MASK_CLOSED,
    MASK_DEAD,
    MASK_PATH,
    MASK_SELF,
    MASK_UNSEEN,
    MAX_LENGTH_BOUNDS,
    NULL_BLOCK,
    PLACE,
    POSITION,
    START,
    VALUE,
    VERIFIED,
    WIDTH,
)
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, LENGTH, MAX_LENGTH, NUM_INTS
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, plan_name
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types

__all__ = [
    "MAX_ROWS",
    "AcceptedPlan",
    "CommitPlan",
    "RowsPlan",
    "SlotsPlan",
    "accepted_kernel",
    "commit_kernel",
    "rows_kernel",
    "slots_kernel",
]

THREADS = 256
MAX_ROWS = 64
NOTHING = (1 << 62) - 1  # above any code and place
PLACES = 32  # bits of a place


@dataclass(frozen=True)
class SlotsPlan:
    """The extents, limits and kinds that `check_slots` is specialised by; `table` entries of a block table."""

    batch: int
    max_batch: int
    table: int
    max_context: int
    max_rows: int
    overhang: int
    block_size: int
    num_blocks: int
    checks_lengths: bool
    checks_spans: bool
    falls_back: bool
    joins: bool
    rewinds: bool

    @property
    def most_written(self) -> int:
        """Blocks that a step may write of one slot, at most."""
        return self.overhang // self.block_size + 2


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


@dataclass(frozen=True)
class CommitPlan:
    """The extents that `check_commit` is specialised by; `ring` entries of the ring."""

    batch: int
    max_batch: int
    ring: int
    checks_lengths: bool


@device_function
def _less(best: Any, fails: Any, code: Any, place: Any, value: Any, expected: Any) -> Any:
    """The lesser of a failure and another one, where that is one: (key, value, expected)."""
    key = int64(code) << PLACES | int64(place)
    known, known_value, known_expected = best
    if fails and key < known:
        return key, int64(value), int64(expected)
    return known, known_value, known_expected


@device_function
def _tell(failures: Any, row: Any, key: Any, value: Any, expected: Any) -> None:
    """Write a failure, but whether it ends the request."""
    first = row * WIDTH
    set_long(failures, first + CODE, key >> PLACES)
    set_long(failures, first + PLACE, key & ((int64(1) << PLACES) - 1))
    set_long(failures, first + VALUE, value)
    set_long(failures, first + EXPECTED, expected)


@device_function
def _drop(index: Any, slot: Any, falls_back: Any, state: Any, failures: Any) -> None:
    """Take a slot off the list: it goes on without drafts where it may have had some, else it ends."""
    slots, active, num_drafts, slot_ints = state
    limit = slot * NUM_INTS + DRAFT_LIMIT
    goes_on = falls_back and long_at(slot_ints, limit) > 0
    if goes_on:
        set_long(slot_ints, limit, int64(0))
    else:
        set_int(active, slot, int64(0))
    set_int(num_drafts, slot, int64(0))
    set_int(slots, index, int64(-1))
    set_long(failures, slot * WIDTH + ENDS, int64(0) if goes_on else int64(1))


@device_function
def _check_lengths(slot: Any, limits: Any, parts: Any, reads: Any, best: Any) -> Any:
    """The least of what fails of a slot's lengths and counts."""
    max_context, max_rows = limits
    joins, rewinds = parts
    lengths, checked_lengths, num_drafts, slot_ints = reads
    length, drafts, ints = int_at(lengths, slot), int_at(num_drafts, slot), slot * NUM_INTS
    longest, limit = long_at(slot_ints, ints + MAX_LENGTH), long_at(slot_ints, ints + DRAFT_LIMIT)
    known = long_at(slot_ints, ints + LENGTH) if joins else int_at(checked_lengths, slot)
    best = _less(best, longest < 1 or longest > max_context, MAX_LENGTH_BOUNDS, 0, longest, max_context)
    best = _less(best, length < 1 or length >= longest, LENGTH_BOUNDS, 0, length, longest - 1)
    best = _less(best, length > known or (length < known and not rewinds), LENGTH_CHANGED, 0, length, known)
    best = _less(best, drafts < 0 or drafts >= max_rows, DRAFTS_BOUNDS, 0, drafts, int64(max_rows - 1))
    return _less(best, limit < 0, DRAFT_LIMIT_BOUNDS, 0, limit, 0)


@device_function
def _check_table(thread: Any, last: Any, num_blocks: Any, table: Any, reserved: Any, best: Any) -> Any:
    """The least of what fails among a slot's blocks up to the last that a step may write."""
    place = int64(thread)
    while place <= last:
        block, own = int_at(table, place), int_at(reserved, place)
        within = block > 0 and block < num_blocks
        best = _less(best, block == 0, NULL_BLOCK, place, block, own)
        best = _less(best, block != 0 and not within, BLOCK_BOUNDS, place, block, int64(num_blocks - 1))
        best = _less(best, within and block != own, BLOCK_RESERVED, place, block, own)
        place += THREADS
    return best


@device_function
def _check_shared(thread: Any, batch: Any, most: Any, width: Any, slots: Any, block_table: Any, shared: Any) -> None:
    """Compare the blocks that each whole slot may write with those of the others; the least place stands in `least`."""
    least, firsts, lasts, written = shared
    for other in range(batch):
        place = int64(thread)
        while place <= lasts[other]:
            block = int_at(block_table, int_at(slots, other) * width + place)
            for index in range(batch):
                for turn in range(most):
                    if index != other and written[index * most + turn] == block:
                        key = (int64(BLOCK_SHARED) << PLACES) | (int64(firsts[index]) + turn)
                        cuda.atomic.min(least, index, key)
            place += THREADS


@cache
def slots_kernel(plan: SlotsPlan) -> Kernel:
    """The kernel of `check_slots`, grid (1,); `checks_spans` reads two block tables."""
    batch, max_batch, width, max_context, max_rows, overhang, block_size, num_blocks = astuple(plan)[:8]
    checks_lengths, checks_spans, falls_back, joins, rewinds = astuple(plan)[8:]
    most, num_words = plan.most_written, (max_batch + 1) * WIDTH
    num_written = batch * most

    def kernel(
        lengths: Any, block_table: Any, staged_table: Any, slots: Any, active: Any, num_drafts: Any, slot_ints: Any,
        checked_lengths: Any, check_failures: Any,
    ) -> None:  # fmt: skip
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        least = cuda.shared.array(shape=batch, dtype=int64)
        firsts = cuda.shared.array(shape=batch, dtype=int32)
        lasts = cuda.shared.array(shape=batch, dtype=int32)
        written = cuda.shared.array(shape=num_written, dtype=int32)
        thread = int64(cuda.threadIdx.x)
        for turn in range(turns(num_words, THREADS)):
            place = thread + turn * THREADS
            if place < num_words:
                set_long(check_failures, place, int64(0))
        if thread < batch:
            least[thread] = NOTHING
            firsts[thread] = 0
            lasts[thread] = -1
        cuda.syncthreads()
        for index in range(batch):
            slot, best = int_at(slots, index), (int64(NOTHING), int64(0), int64(0))
            if slot >= 0:
                length = int_at(lengths, slot)
                if checks_lengths and thread == 0:
                    reads = (lengths, checked_lengths, num_drafts, slot_ints)
                    best = _check_lengths(slot, (max_context, max_rows), (joins, rewinds), reads, best)
                if checks_spans:
                    inside = length >= 1 and length <= max_context
                    if thread == 0:
                        best = _less(best, not inside, START, 0, length - 1, int64(max_context - 1))
                    if inside:
                        last = min((length - 1 + overhang) // block_size, int64(width - 1))
                        first = slot * (width * 4)
                        best = _check_table(thread, last, num_blocks, block_table + first, staged_table + first, best)
                        if thread == 0:
                            lasts[index] = last
                            firsts[index] = (length if joins else length - 1) // block_size
                if best[0] < NOTHING:
                    cuda.atomic.min(least, index, best[0])
            cuda.syncthreads()
            if best[0] < NOTHING and least[index] == best[0]:
                _tell(check_failures, slot, best[0], best[1], best[2])
        if checks_spans:
            if thread < batch and least[thread] < NOTHING:
                lasts[thread] = -1
            cuda.syncthreads()
            for turn in range(turns(num_written, THREADS)):
                place = thread + turn * THREADS
                if place < num_written:
                    index = place // most
                    entry, block = firsts[index] + place % most, int64(-1)
                    if entry <= lasts[index]:
                        block = int_at(block_table, int_at(slots, index) * width + entry)
                    written[place] = block
            cuda.syncthreads()
            _check_shared(thread, batch, most, width, slots, block_table, (least, firsts, lasts, written))
            cuda.syncthreads()
            if thread < batch and lasts[thread] >= 0 and least[thread] < NOTHING:
                place = (int64(least[thread]) & ((int64(1) << PLACES) - 1)) - firsts[thread]
                block = int64(written[thread * most + place])
                _tell(check_failures, int_at(slots, thread), int64(least[thread]), block, int64(0))
        if thread < batch:
            slot = int_at(slots, thread)
            if slot >= 0 and least[thread] < NOTHING:
                _drop(thread, slot, falls_back, (slots, active, num_drafts, slot_ints), check_failures)
            elif slot >= 0 and checks_lengths:
                set_int(checked_lengths, slot, int_at(lengths, slot))

    return Kernel(plan_name("check_slots", plan), kernel, (types.int64,) * 9, THREADS)


@device_function
def _check_row(row: Any, slot: Any, length: Any, max_context: Any, parts: Any, own: Any, best: Any) -> Any:
    """The least of what fails at one row."""
    checks_spans, checks_masks = parts
    masks, live, position = own
    mask, alive = int64(masks[row]), live[row] != 0
    if checks_spans and slot >= 0:
        last = min(length - 1 + row, int64(max_context - 1))
        best = _less(best, alive and (position < length - 1 or position > last), POSITION, row, position, last)
    if checks_masks:
        best = _less(best, not alive and mask != 0, MASK_DEAD, row, mask, 0)
        best = _less(best, alive and (mask >> row) & 1 == 0, MASK_SELF, row, mask, int64(1) << row)
        # of row 63 the bit is the sign, behind which there is none
        later = (mask >> row) >> 1 if row < 63 else int64(0)
        best = _less(best, alive and later != 0, MASK_BEYOND, row, mask, (int64(2) << row) - 1)
        above, held = int64(0), int64(-1)
        while alive and above < row and held < 0:
            if (mask >> above) & 1 == 1 and (live[above] == 0 or int64(masks[above]) & ~mask != 0):
                held = above
            above += 1
        best = _less(best, held >= 0, MASK_CLOSED, row, mask, masks[max(held, int64(0))])
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
            best = _less(best, known != expected, MASK_PATH, place, known, expected)
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
    best = _less(best, dense != length - 1, DENSE, 0, dense, length - 1)
    return _less(best, verified != count or count < 0, VERIFIED, 0, verified, count)


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
                    best = _less(best, unseen, MASK_UNSEEN, thread, masks[thread], 0)
            if best[0] < NOTHING:
                cuda.atomic.min(least, index, best[0])
            cuda.syncthreads()
            fails = least[index] < NOTHING
            row = slot if slot >= 0 else int64(max_batch)
            if best[0] < NOTHING and least[index] == best[0]:
                _tell(check_failures, row, best[0], best[1], best[2])
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
                    _drop(index, slot, falls_back, (slots, active, num_drafts, slot_ints), check_failures)
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
        best = _less(best, not right, ACCEPTED_NODE, place, node, above)
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
                best = _less(best, count != 0, ACCEPTED_LENGTH, index, count, 0)
            elif count < 1 or count > most:
                best = _less(best, True, ACCEPTED_LENGTH, index, count, most)
            else:
                nodes = accepted_nodes + index * (rows * 4)
                best = _check_nodes(count, rows, nodes, row_live + index * rows, row_masks + index * (rows * 8))
            if best[0] < NOTHING:
                set_int(accepted_lens, index, int64(0))
            if best[0] < NOTHING and slot >= 0:
                _tell(check_failures, slot, best[0], best[1], best[2])
                _drop(index, slot, falls_back, (slots, active, num_drafts, slot_ints), check_failures)
            elif best[0] < NOTHING:
                cuda.atomic.max(last, 0, int32(index))
        cuda.syncthreads()
        if slot < 0 and best[0] < NOTHING and last[0] == index:
            _tell(check_failures, int64(max_batch), best[0], best[1], best[2])
            set_long(check_failures, max_batch * WIDTH + ENDS, int64(0))

    return Kernel(plan_name("check_accepted", plan), kernel, (types.int64,) * 10, 32)


@cache
def commit_kernel(plan: CommitPlan) -> Kernel:
    """The kernel of `check_commit`, grid (1,): a thread an entry, then all copy the failures into the ring."""
    batch, max_batch, ring, checks_lengths = astuple(plan)
    num_words = (max_batch + 1) * WIDTH

    def kernel(
        commit_lens: Any, accepted_lens: Any, lengths: Any, ring_head: Any, slots: Any, active: Any, draft_live: Any,
        draft_lens: Any, checked_lengths: Any, check_failures: Any, ring_checks: Any,
    ) -> None:  # fmt: skip
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        index = int64(cuda.threadIdx.x)
        if checks_lengths and index < batch:
            slot = int_at(slots, index)
            if slot >= 0:
                count, most, length = int_at(commit_lens, index), int_at(accepted_lens, index), int_at(lengths, slot)
                expected, best = int_at(checked_lengths, slot) + count, (int64(NOTHING), int64(0), int64(0))
                best = _less(best, count < 0 or count > most, COMMITTED_LENGTH, index, count, most)
                best = _less(best, length != expected, ADVANCED, index, length, expected)
                if best[0] < NOTHING:
                    _tell(check_failures, slot, best[0], best[1], best[2])
                    set_long(check_failures, slot * WIDTH + ENDS, int64(1))
                    set_int(slots, index, int64(-1))
                    set_int(active, slot, int64(0))
                    set_byte(draft_live, index, int64(0))
                    set_int(draft_lens, index, int64(0))
                else:
                    set_int(checked_lengths, slot, length)
        cuda.syncthreads()
        entry = (ptx.load_volatile_i64(ring_head) % ring) * num_words
        for turn in range(turns(num_words, THREADS)):
            place = index + turn * THREADS
            if place < num_words:
                set_long(ring_checks, entry + place, long_at(check_failures, place))

    return Kernel(plan_name("check_commit", plan), kernel, (types.int64,) * 11, THREADS)
