"""This module has the kernels that check slots before a step and after its commit: one block each, slot after slot.

They are specialised by plans. Arrays are passed as addresses.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from lowlat.kernels.common.memory import int_at, long_at, set_byte, set_int, set_long, turns
from lowlat.kernels.reference.step.checks import (
    ADVANCED,
    BLOCK_BOUNDS,
    BLOCK_RESERVED,
    BLOCK_SHARED,
    COMMITTED_LENGTH,
    DRAFT_LIMIT_BOUNDS,
    DRAFTS_BOUNDS,
    ENDS,
    LENGTH_BOUNDS,
    LENGTH_CHANGED,
    MAX_LENGTH_BOUNDS,
    NULL_BLOCK,
    START,
    WIDTH,
)
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, LENGTH, MAX_LENGTH, NUM_INTS
from lowlat.kernels.step.check_failures import NOTHING, PLACES, THREADS, drop, less, tell
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, plan_name
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types

__all__ = ["CommitPlan", "SlotsPlan", "commit_kernel", "slots_kernel"]


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
class CommitPlan:
    """The extents that `check_commit` is specialised by; `ring` entries of the ring."""

    batch: int
    max_batch: int
    ring: int
    checks_lengths: bool


@device_function
def _check_lengths(slot: Any, limits: Any, parts: Any, reads: Any, best: Any) -> Any:
    """The least of what fails of a slot's lengths and counts."""
    max_context, max_rows = limits
    joins, rewinds = parts
    lengths, checked_lengths, num_drafts, slot_ints = reads
    length, drafts, ints = int_at(lengths, slot), int_at(num_drafts, slot), slot * NUM_INTS
    longest, limit = long_at(slot_ints, ints + MAX_LENGTH), long_at(slot_ints, ints + DRAFT_LIMIT)
    known = long_at(slot_ints, ints + LENGTH) if joins else int_at(checked_lengths, slot)
    best = less(best, longest < 1 or longest > max_context, MAX_LENGTH_BOUNDS, 0, longest, max_context)
    best = less(best, length < 1 or length >= longest, LENGTH_BOUNDS, 0, length, longest - 1)
    best = less(best, length > known or (length < known and not rewinds), LENGTH_CHANGED, 0, length, known)
    best = less(best, drafts < 0 or drafts >= max_rows, DRAFTS_BOUNDS, 0, drafts, int64(max_rows - 1))
    return less(best, limit < 0, DRAFT_LIMIT_BOUNDS, 0, limit, 0)


@device_function
def _check_table(thread: Any, last: Any, num_blocks: Any, table: Any, reserved: Any, best: Any) -> Any:
    """The least of what fails among a slot's blocks up to the last that a step may write."""
    place = int64(thread)
    while place <= last:
        block, own = int_at(table, place), int_at(reserved, place)
        within = block > 0 and block < num_blocks
        best = less(best, block == 0, NULL_BLOCK, place, block, own)
        best = less(best, block != 0 and not within, BLOCK_BOUNDS, place, block, int64(num_blocks - 1))
        best = less(best, within and block != own, BLOCK_RESERVED, place, block, own)
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
                        best = less(best, not inside, START, 0, length - 1, int64(max_context - 1))
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
                tell(check_failures, slot, best[0], best[1], best[2])
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
                tell(check_failures, int_at(slots, thread), int64(least[thread]), block, int64(0))
        if thread < batch:
            slot = int_at(slots, thread)
            if slot >= 0 and least[thread] < NOTHING:
                drop(thread, slot, falls_back, (slots, active, num_drafts, slot_ints), check_failures)
            elif slot >= 0 and checks_lengths:
                set_int(checked_lengths, slot, int_at(lengths, slot))

    return Kernel(plan_name("check_slots", plan), kernel, (types.int64,) * 9, THREADS)


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
                best = less(best, count < 0 or count > most, COMMITTED_LENGTH, index, count, most)
                best = less(best, length != expected, ADVANCED, index, length, expected)
                if best[0] < NOTHING:
                    tell(check_failures, slot, best[0], best[1], best[2])
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
