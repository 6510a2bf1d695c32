"""The choice of a step's width and the beginning of a slot's record: `choose_width` and `join_widths` of the reference.

One block: a thread learns and reckons for each slot, and one of them chooses, and sets the condition of the SWITCH node
whose bodies are the widths, where there is one. It knows no request and no model.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import byte_at, divide, int_at, long_at, set_int
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS
from lowlat.kernels.reference.step.widths import (
    AGE,
    ALL_DECAY,
    BUDGET,
    CLOSE,
    CLOSE_INTERVAL,
    DECAY,
    EDGE,
    FIRST_INTERVAL,
    INTERVAL,
    JOINED,
    LAST,
    LENGTH_SEEN,
    MAX_INTERVAL,
    ONE,
    PRIOR,
    SETTLED,
    TRIED,
    WAITED,
    WEIGHT,
    check_widths,
)
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types, uint32

__all__ = ["choose_width", "examples", "join_widths"]

THREADS = 128
MAX_SLOTS = 8
PRIORS = tuple(number for entry in PRIOR for number in entry)


def choose_width(
    active: torch.Tensor,
    lengths: torch.Tensor,
    extended: torch.Tensor,
    slot_ints: torch.Tensor,
    width_bounds: torch.Tensor,
    width_costs: torch.Tensor,
    *,
    width_odds: torch.Tensor,
    width_seen: torch.Tensor,
    width_policy: torch.Tensor,
    width_choice: torch.Tensor,
    row: int,
    most_waiting: int,
    condition: int | None = None,
) -> list[KernelCall]:
    """Learn and choose, as the reference's `choose_width`, whose arguments these are.

    condition  the handle of the SWITCH node that the choice is for; None: there is none
    Time: two trips to memory, one of them to the host's, and some 40 short divisions in a row. Raises ShapeError.
    """
    given = (width_bounds, width_costs, width_odds, width_seen, width_policy)
    check_widths(active, lengths, extended, *given, row)
    max_batch, most = active.shape[0], width_costs.shape[1] - 2
    if max_batch > MAX_SLOTS:
        raise ShapeError(f"widths are chosen for at most {MAX_SLOTS} slots, got {max_batch}")
    kernel = _make(max_batch, most, row, most_waiting, condition is not None)
    arguments = (active, lengths, extended, slot_ints, *given, width_choice, condition or 0)
    return [KernelCall(kernel, (1, 1, 1), arguments)]


@device_function
def _learn(slot: Any, tried: Any, right: Any, odds: Any, decay: Any, age: Any, first: Any, most: Any) -> None:
    """Count a step's drafts in a record of the shared odds; positions from `first` on that it did not see age."""
    for position in range(most):
        at = (slot * most + position) * 2
        hits, tries = int64(odds[at]), int64(odds[at + 1])
        if position < tried and position <= right:
            hits += (int64(ONE) if position < right else int64(0)) - (hits >> decay)
            tries += int64(ONE) - (tries >> decay)
        elif position >= first:
            hits -= hits >> age
            tries -= tries >> age
        odds[at] = int32(hits)
        odds[at + 1] = int32(tries)


@device_function
def _reckon(slot: Any, allowed: Any, odds: Any, expected: Any, max_batch: Any, most: Any) -> None:
    """Tokens of a slot's step by its width, in 1024ths."""
    total, product, before, before_all = int64(ONE), int64(ONE), int64(ONE), int64(ONE)
    expected[slot * (most + 1)] = int32(total)
    for position in range(most):
        own, every = (slot * most + position) * 2, (max_batch * most + position) * 2
        weight = int64(WEIGHT) if position > 0 else int64(0)
        right_all, tried_all = int64(odds[every]), int64(odds[every + 1])
        over = max(tried_all + weight * ONE, int64(1))
        rate_all, _ = divide((right_all + weight * before_all) * ONE, over)
        usual, _ = divide(rate_all * before, max(before_all, int64(1)))
        usual = min(usual, int64(ONE))
        rate, _ = divide((int64(odds[own]) + WEIGHT * usual) * ONE, int64(odds[own + 1]) + WEIGHT * ONE)
        rate = min(rate, int64(ONE))
        product, _ = divide(product * rate, int64(ONE))
        if position < allowed:
            total += product
        expected[slot * (most + 1) + position + 1] = int32(total)
        before, before_all = rate, rate_all


@device_function
def _choose(expected: Any, costs: Any, low: Any, high: Any, policy: Any) -> Any:
    """The width of most expected tokens by cost between two; the policy is updated."""
    drafted = max(low, min(int64(1), high))
    for width in range(drafted + 1, high + 1):
        if int64(expected[width]) * int64(costs[drafted]) > int64(expected[drafted]) * int64(costs[width]):
            drafted = width
    best = drafted
    drafting = int64(expected[drafted]) * int64(costs[low])
    idle = int64(expected[low]) * int64(costs[drafted])
    if low == 0 and idle >= drafting:
        best = int64(0)
    last = int64(policy[LAST])
    if low <= last and last <= high and last != best:
        gained, kept = int64(expected[best]) * int64(costs[last]), int64(expected[last]) * int64(costs[best])
        if gained - kept <= (kept >> EDGE):
            best = last
    policy[LAST] = int32(best)
    chosen = best
    if best > 0:
        settled = min(int64(policy[BUDGET]) + 1, int64(SETTLED))
        policy[BUDGET] = int32(settled)
        if settled == SETTLED:
            policy[INTERVAL] = int32(FIRST_INTERVAL)
        policy[WAITED] = int32(0)
    else:
        policy[BUDGET] = int32(0)
        waited, interval = int64(policy[WAITED]) + 1, int64(policy[INTERVAL])
        close = idle - drafting <= (idle >> CLOSE)
        enough = int64(CLOSE_INTERVAL) if close else interval
        if high == 0 or waited < enough:
            policy[WAITED] = int32(waited)
        else:
            policy[WAITED] = int32(0)
            chosen = drafted
            if not close:
                policy[INTERVAL] = int32(min(2 * max(interval, int64(1)), int64(MAX_INTERVAL)))
    return chosen


@device_function
def _bounded(value: Any, most: Any) -> Any:
    return max(int64(0), min(int64(value), int64(most)))


@device_function
def _load(thread: Any, count: Any, source: Any, target: Any) -> None:
    """Integers into shared memory, one a thread."""
    if thread < count:
        target[thread] = int32(int_at(source, thread))


@device_function
def _store(thread: Any, count: Any, source: Any, target: Any) -> None:
    """Integers out of shared memory, one a thread."""
    if thread < count:
        set_int(target, thread, int64(source[thread]))


@device_function
def _load_slot(slot: Any, most: Any, addresses: Any, found: Any, facts: Any) -> None:
    """Whether a slot is active and its length; the drafts that it is allowed, and its positions that wait."""
    active, lengths, extended, slot_ints = addresses
    length = int_at(lengths, slot)
    found[slot * 2], found[slot * 2 + 1] = int32(int_at(active, slot)), int32(length)
    facts[slot * 2] = int32(_bounded(long_at(slot_ints, slot * NUM_INTS + DRAFT_LIMIT), most))
    facts[slot * 2 + 1] = int32(length - 1 - int_at(extended, slot))


@device_function
def _learn_step(slot: Any, record: Any, found: Any, seen: Any, odds: Any, rates: Any, most: Any) -> None:
    """Count an active slot's last step in a record: its own, or that of all requests."""
    if found[slot * 2] != 0:
        decay, age, first = rates
        tried = int64(seen[slot * 2 + TRIED])
        right = int64(found[slot * 2 + 1]) - int64(seen[slot * 2 + LENGTH_SEEN]) - 1
        _learn(record, tried, right, odds, decay, age, first, most)


@device_function
def _decide(bounds: Any, sizes: Any, slots: Any, expected: Any, totals: Any, costs: Any, policy: Any) -> Any:
    """The body of the step by what all slots expect; the drafts of each are noted."""
    low, high = bounds
    max_batch, most, most_waiting = sizes
    found, facts, seen = slots
    count, limit, waiting = int64(0), int64(0), int64(0)
    for width in range(most + 1):
        totals[width] = int32(0)
    for slot in range(max_batch):
        if found[slot * 2] != 0:
            count += 1
            limit, waiting = max(limit, int64(facts[slot * 2])), max(waiting, int64(facts[slot * 2 + 1]))
            for width in range(most + 1):
                totals[width] += expected[slot * (most + 1) + width]
    chosen = low
    if count > 0:
        chosen = _choose(totals, costs, low, max(low, min(high, limit)), policy)
    enough = int64(most_waiting) if chosen == 0 else int64(most + 2)
    must_run = most_waiting > 0 and waiting >= enough
    for slot in range(max_batch):
        if found[slot * 2] != 0:
            tried = int64(0) if must_run else min(chosen, int64(facts[slot * 2]))
            seen[slot * 2 + LENGTH_SEEN], seen[slot * 2 + TRIED] = found[slot * 2 + 1], int32(tried)
    return int64(most + 1) if must_run else chosen


@cache
def _make(max_batch: int, most: int, row: int, most_waiting: int, switching: bool) -> Kernel:
    """Specialised by the slots, K, the bucket, what may wait, and whether it sets a condition."""
    num_odds, num_seen, num_expected = (max_batch + 1) * most * 2, max_batch * 2, max_batch * (most + 1)
    columns, policies, sizes = most + 2, 4, (max_batch, most, most_waiting)

    def kernel(
        active: Any,
        lengths: Any,
        extended: Any,
        slot_ints: Any,
        width_bounds: Any,
        width_costs: Any,
        width_odds: Any,
        width_seen: Any,
        width_policy: Any,
        width_choice: Any,
        condition: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        odds = cuda.shared.array(shape=num_odds, dtype=int32)
        seen = cuda.shared.array(shape=num_seen, dtype=int32)
        costs = cuda.shared.array(shape=columns, dtype=int32)
        policy = cuda.shared.array(shape=policies, dtype=int32)
        expected = cuda.shared.array(shape=num_expected, dtype=int32)
        totals = cuda.shared.array(shape=columns, dtype=int32)
        facts = cuda.shared.array(shape=num_seen, dtype=int32)
        found = cuda.shared.array(shape=num_seen, dtype=int32)
        thread = int64(cuda.threadIdx.x)
        _load(thread, num_odds, width_odds, odds)
        _load(thread, num_seen, width_seen, seen)
        _load(thread, columns, width_costs + row * columns * 4, costs)
        _load(thread, policies, width_policy, policy)
        low, high = _bounded(int_at(width_bounds, 0), most), _bounded(int_at(width_bounds, 1), most)
        if thread < max_batch:
            _load_slot(thread, most, (active, lengths, extended, slot_ints), found, facts)
        cuda.syncthreads()
        if thread < max_batch:
            _learn_step(thread, thread, found, seen, odds, (int64(DECAY), int64(AGE), int64(0)), most)
        elif thread == THREADS - 1:
            for slot in range(max_batch):
                rates = (int64(ALL_DECAY), int64(ALL_DECAY), int64(1))
                _learn_step(int64(slot), int64(max_batch), found, seen, odds, rates, most)
        cuda.syncthreads()
        if thread < max_batch and found[thread * 2] != 0:
            _reckon(thread, int64(facts[thread * 2]), odds, expected, int64(max_batch), most)
        cuda.syncthreads()
        if thread == 0:
            body = _decide((low, high), sizes, (found, facts, seen), expected, totals, costs, policy)
            set_int(width_choice, 0, body)
            if switching:
                ptx.set_graph_condition(condition, uint32(body))
        cuda.syncthreads()
        _store(thread, num_odds, odds, width_odds)
        _store(thread, num_seen, seen, width_seen)
        _store(thread, policies, policy, width_policy)

    name = f"choose_width_{max_batch}_{most}_{row}_{most_waiting}" + ("_switching" if switching else "")
    signature = (*[types.int64] * 10, types.uint64)
    return Kernel(name, kernel, signature, THREADS, linked=not switching)


def join_widths(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    draft_live: torch.Tensor,
    *,
    extended: torch.Tensor,
    width_odds: torch.Tensor,
    width_seen: torch.Tensor,
    width_policy: torch.Tensor,
) -> list[KernelCall]:
    """Begin a slot's record, as the reference's `join_widths`, whose arguments these are. Raises ShapeError."""
    max_batch, most = lengths.shape[0], width_odds.shape[1]
    check_shape("slots", slots, 1)
    check_shape("draft_live", draft_live, 1)
    check_shape("extended", extended, max_batch)
    check_shape("width_odds", width_odds, max_batch + 1, most, 2)
    check_shape("width_seen", width_seen, max_batch, 2)
    arguments = (slots, lengths, draft_live, extended, width_odds, width_seen, width_policy)
    return [KernelCall(_make_join(max_batch, most), (1, 1, 1), arguments)]


@cache
def _make_join(max_batch: int, most: int) -> Kernel:
    def kernel(
        slots: Any, lengths: Any, draft_live: Any, extended: Any, width_odds: Any, width_seen: Any, width_policy: Any
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        position, slot = int64(cuda.threadIdx.x), int_at(slots, 0)
        if slot < 0 or byte_at(draft_live, 0) == 0:
            return
        length, every = int_at(lengths, slot), max_batch * most * 2
        is_new = int_at(width_odds, every + 1) == 0
        cuda.syncthreads()
        if position < most:
            right, tried = int_at(width_odds, every + position * 2), int_at(width_odds, every + position * 2 + 1)
            if is_new:
                right, tried = int64(PRIORS[position * 2]), int64(PRIORS[position * 2 + 1])
                set_int(width_odds, every + position * 2, right)
                set_int(width_odds, every + position * 2 + 1, tried)
            rate, _ = divide(right * ONE, max(tried, int64(1)))
            own = (slot * most + position) * 2
            set_int(width_odds, own, rate * JOINED)
            set_int(width_odds, own + 1, int64(ONE * JOINED))
        if position == 0:
            set_int(extended, slot, length - 2)
            set_int(width_seen, slot * 2 + LENGTH_SEEN, length)
            set_int(width_seen, slot * 2 + TRIED, int64(0))
            set_int(width_policy, WAITED, int64(FIRST_INTERVAL))
            set_int(width_policy, INTERVAL, int64(FIRST_INTERVAL))

    return Kernel(f"join_widths_{max_batch}_{most}", kernel, (types.int64,) * 7, 32)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    return [_make(8, 7, 7, 8, False), _make(1, 5, 0, 32, True), _make_join(8, 7)]
