"""Whether a step drafts further: `choose_depth` of the reference.

A thread has a slot and a width: it revises what the slot should bring by it. Then a thread adds up a width, and one
chooses, and sets the conditions of the nodes that go by it, where there are such: a SWITCH whose bodies are the widths,
and an IF around the levels behind this end. It knows no request and no model.
"""

from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import int_at, long_at, set_int
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation.depths import (
    EXPECTED,
    LEAST_RATE,
    MOST_RATE,
    NUM_SURE,
    RIGHT,
    SURE_FIRST,
    SURE_LATER,
    SURE_WEIGHT,
    TRIED,
    check_depths,
)
from lowlat.kernels.reference.speculation.draft_confidence import NUM_KINDS
from lowlat.kernels.reference.speculation.width_odds import MAX_WIDTH, ONE
from lowlat.kernels.reference.speculation.widths import UNIT
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS
from lowlat.kernels.speculation.choose_width import bounded
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types, uint32

__all__ = ["choose_depth", "examples"]

MAX_SLOTS = 8
LANES = MAX_WIDTH + 1  # threads of a slot, and of each column of costs: a power of two
COST_THREAD = MAX_SLOTS * LANES  # the first of those that load costs
THREADS = COST_THREAD + 4 * LANES
HALF = 32  # bits of a bound
BITS = ONE.bit_length() - 1
SLOT, LENGTH, ALLOWED, FACTS = 0, 1, 2, 3  # columns of an entry's facts


@dataclass(frozen=True)
class _Plan:
    """The extents that the choice is specialised by.

    row        of the costs: the bucket's
    end        by its number, of `ends`
    depth      the drafts that are made by then
    switching  it sets the conditions of a SWITCH node and of an IF node
    """

    batch: int
    most: int
    row: int
    ends: int
    end: int
    depth: int
    switching: bool


def choose_depth(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    slot_ints: torch.Tensor,
    width_bounds: torch.Tensor,
    width_costs: torch.Tensor,
    depth_costs: torch.Tensor,
    width_expected: torch.Tensor,
    sure_odds: torch.Tensor,
    draft_kinds: torch.Tensor,
    *,
    draft_expected: torch.Tensor,
    draft_rates: torch.Tensor,
    width_choice: torch.Tensor,
    draft_further: torch.Tensor,
    row: int,
    end: int,
    depth: int,
    condition: int | None = None,
    further: int | None = None,
) -> list[KernelCall]:
    """Choose, as the reference's `choose_depth`, whose arguments these are.

    condition  the handle of the SWITCH node that the width is for; None: there is none
    further    that of the IF node around further levels, set to 1 or 0; None: there is none. Both come together.
    They are the call's last two arguments. Time: two trips to memory, and one to the host's meanwhile. Raises
    ShapeError, for one condition alone, too.
    """
    check_depths(width_costs, depth_costs, width_expected, sure_odds, draft_kinds, row, end, depth)
    (batch, ends), (max_batch, columns) = draft_kinds.shape, width_expected.shape
    check_shape("slots", slots, batch)
    check_shape("draft_expected", draft_expected, max_batch, columns)
    check_shape("draft_rates", draft_rates, max_batch, columns - 1)
    check_shape("lengths", lengths, max_batch)
    for name, tensor, size in (("width_bounds", width_bounds, 2), ("width_choice", width_choice, 1)):
        check_shape(name, tensor, size)
    check_shape("draft_further", draft_further, 1)
    check_shape("slot_ints", slot_ints, max_batch, NUM_INTS)
    if batch > MAX_SLOTS:
        raise ShapeError(f"depths are chosen for at most {MAX_SLOTS} slots, got {batch}")
    if (condition is None) != (further is None):
        raise ShapeError("a condition for the width and one for further drafts come together")
    plan = _Plan(batch, columns - 1, row, ends, end, depth, condition is not None)
    given = (slots, lengths, slot_ints, width_bounds, width_costs, depth_costs)
    known = (width_expected, sure_odds, draft_kinds)
    writes = (draft_expected, draft_rates, width_choice, draft_further)
    return [KernelCall(_make(plan), (1, 1, 1), (*given, *known, *writes, condition or 0, further or 0))]


@device_function
def _rate(tokens: Any, first: Any, width: Any) -> Any:
    """The odds beforehand of the last draft of a width, by the tokens of a step by its width; they begin at `first`."""
    most, before, last = int_at(tokens, first + width), int_at(tokens, first + width - 1), int64(ONE)
    if width > 1:
        last = before - int_at(tokens, first + width - 2)
    rate = ((most - before) * int64(ONE)) // max(last, int64(1))
    return max(int64(LEAST_RATE), min(rate, int64(MOST_RATE)))


@device_function
def _corrected(rate: Any, kind: Any, behind: Any, most: Any, sure_odds: Any) -> Any:
    """A rate whose odds are multiplied by what has become of drafts so far behind one of a kind."""
    place = (kind * most + behind) * NUM_SURE
    right, tried = int_at(sure_odds, place + RIGHT), int_at(sure_odds, place + TRIED)
    expected, prior = int_at(sure_odds, place + EXPECTED), int64(0)
    for each in range(NUM_KINDS):
        if each == kind:
            prior = int64(SURE_LATER[each]) if behind > 0 else int64(SURE_FIRST[each])
    right, tried = right + prior * int64(SURE_WEIGHT), tried + int64(ONE * SURE_WEIGHT)
    expected += int64(ONE * SURE_WEIGHT // 2)
    more = rate * max(right, int64(1)) * max(tried - expected, int64(1))
    less = (int64(ONE) - rate) * max(tried - right, int64(1)) * max(expected, int64(1))
    return (more * int64(ONE)) // (more + less)


@device_function
def _load(thread: Any, plan: Any, reads: Any, draft_rates: Any, shared: Any) -> None:
    """A slot's part by a thread for each width: what is known, and the corrected odds of that width's last draft."""
    most, ends, end, depth = plan[1], plan[3], plan[4], plan[5]
    slots, lengths, slot_ints, width_expected, sure_odds, draft_kinds, draft_expected = reads
    facts, usual, known, rates = shared
    entry, width = thread // LANES, thread % LANES
    slot, kind = int_at(slots, entry), int_at(draft_kinds, entry * ends + end)
    before, length, limit, tokens, corrected = int64(0), int64(0), int64(0), int64(0), int64(0)
    if slot >= 0 and width <= most:
        first = slot * (most + 1)
        before, tokens = int_at(width_expected, first + width), int64(ONE)
        if end > 0:
            tokens = int_at(draft_expected, first + width)
        if width == 0:
            length, limit = int_at(lengths, slot), long_at(slot_ints, slot * NUM_INTS + DRAFT_LIMIT)
        else:
            rate = _rate(width_expected, first, width)
            set_int(draft_rates, slot * most + width - 1, rate)
            if width >= depth:
                corrected = _corrected(rate, kind, width - depth, most, sure_odds)
    usual[thread] = before
    known[thread] = tokens
    rates[thread] = corrected
    if width == 0:
        facts[entry * FACTS + SLOT] = slot
        facts[entry * FACTS + LENGTH] = length
        facts[entry * FACTS + ALLOWED] = bounded(limit, most)


@device_function
def _revised(thread: Any, depth: Any, shared: Any) -> Any:
    """Tokens of a slot's step by a width, from this end on; those of fewer drafts than are made stay."""
    _facts, _usual, known, rates = shared
    entry, width = thread // LANES, thread % LANES
    if width < depth:
        return known[thread]
    total, survival = known[entry * LANES + depth - 1], int64(ONE)
    if depth > 1:
        survival = total - known[entry * LANES + depth - 2]
    for place in range(depth, width + 1):
        survival = (survival * rates[entry * LANES + place]) >> int64(BITS)
        total += survival
    return total


@device_function
def _load_costs(place: Any, plan: Any, addresses: Any, costs: Any) -> None:
    """One of the numbers that costs are reckoned by: BASE and SLOPE of usual steps by width, then those of this end."""
    most, row, ends, end = plan[1:5]
    part, width = place // LANES, place % LANES
    if width <= most:
        if part < 2:
            costs[place] = int_at(addresses[0], (row * 2 + part) * (most + 2) + width)
        else:
            costs[place] = int_at(addresses[1], ((row * 2 + part - 2) * ends + end) * (most + 1) + width)


@device_function
def _add_up(width: Any, plan: Any, shared: Any, costs: Any, totals: Any) -> None:
    """The tokens of all slots at a width, as far as each may, and what it costs: as usual, and from this end on."""
    facts, usual, known, _rates = shared
    before, tokens, positions = int64(0), int64(0), int64(0)
    for entry in range(plan[0]):
        at = entry * LANES + min(width, facts[entry * FACTS + ALLOWED])
        before += usual[at]
        tokens += known[at]
        positions += facts[entry * FACTS + LENGTH]
    totals[width] = before
    totals[LANES + width] = tokens
    for part in range(2):
        base, slope = costs[2 * part * LANES + width], costs[(2 * part + 1) * LANES + width]
        totals[(2 + part) * LANES + width] = base + ((slope * positions) >> int64(UNIT))


@device_function
def _decide(plan: Any, bounds: Any, facts: Any, totals: Any) -> Any:
    """The width that the step verifies. Turns are as many as there are widths, so that their loads go together."""
    most = plan[1]
    low, high = bounded((bounds << int64(HALF)) >> int64(HALF), most), bounded(bounds >> int64(HALF), most)
    allowed = int64(0)
    for entry in range(plan[0]):
        allowed = max(allowed, facts[entry * FACTS + ALLOWED])
    high = max(low, min(high, allowed))
    tokens, cost = int64(0), int64(0)  # of the best width at usual costs, by what was expected before any draft
    for width in range(most + 1):
        its_tokens, its_cost = totals[width], totals[2 * LANES + width]
        if width == low or (low < width <= high and its_tokens * cost > tokens * its_cost):
            tokens, cost = its_tokens, its_cost
    first = max(low, int64(1))
    chosen, most_value = first, int64(0)
    for width in range(1, most + 1):
        value = totals[LANES + width] * cost - tokens * totals[3 * LANES + width]
        if width == first or (first < width <= high and value > most_value):
            chosen, most_value = int64(width), value
    return chosen


@cache
def _make(plan: _Plan) -> Kernel:
    sizes, batch, most, depth, switching = astuple(plan)[:6], plan.batch, plan.most, plan.depth, plan.switching
    num_facts, num_pairs, num_costs = batch * FACTS, batch * LANES, 4 * LANES

    def kernel(
        slots: Any, lengths: Any, slot_ints: Any, width_bounds: Any, width_costs: Any, depth_costs: Any,
        width_expected: Any, sure_odds: Any, draft_kinds: Any, draft_expected: Any, draft_rates: Any,
        width_choice: Any, draft_further: Any, condition: Any, further: Any,
    ) -> None:  # fmt: skip
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        facts = cuda.shared.array(shape=num_facts, dtype=int64)
        usual = cuda.shared.array(shape=num_pairs, dtype=int64)
        known = cuda.shared.array(shape=num_pairs, dtype=int64)
        rates = cuda.shared.array(shape=num_pairs, dtype=int64)
        costs = cuda.shared.array(shape=num_costs, dtype=int64)
        totals = cuda.shared.array(shape=num_costs, dtype=int64)
        thread, bounds, shared = int64(cuda.threadIdx.x), int64(0), (facts, usual, known, rates)
        if thread == 0:
            bounds = long_at(width_bounds, 0)  # both in one trip to the host; nobody waits for it before the end
        if thread < num_pairs:
            reads = (slots, lengths, slot_ints, width_expected, sure_odds, draft_kinds, draft_expected)
            _load(thread, sizes, reads, draft_rates, shared)
        elif thread >= COST_THREAD:
            _load_costs(thread - COST_THREAD, sizes, (width_costs, depth_costs), costs)
        cuda.syncthreads()
        tokens = int64(0)
        if thread < num_pairs:
            tokens = _revised(thread, depth, shared)
        cuda.syncthreads()
        if thread < num_pairs:
            slot, width = facts[thread // LANES * FACTS + SLOT], thread % LANES
            if slot < 0 or width > most:
                tokens = int64(0)
            else:
                set_int(draft_expected, slot * (most + 1) + width, tokens)
            known[thread] = tokens
        cuda.syncthreads()
        if thread <= most:
            _add_up(thread, sizes, shared, costs, totals)
        cuda.syncthreads()
        if thread == 0:
            chosen = _decide(sizes, bounds, facts, totals)
            goes_on = int64(1) if chosen > depth else int64(0)
            if switching:
                ptx.set_graph_condition(condition, uint32(chosen))
                ptx.set_graph_condition(further, uint32(goes_on))
            set_int(width_choice, 0, chosen)
            set_int(draft_further, 0, goes_on)

    name = "choose_depth_" + "_".join(map(str, astuple(plan)))
    signature = (*[types.int64] * 13, types.uint64, types.uint64)
    return Kernel(name, kernel, signature, THREADS, linked=not plan.switching)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    plan = _Plan(8, 7, 7, 3, 1, 2, False)
    return [_make(plan), _make(replace(plan, batch=1, most=5, row=0, end=0, depth=1, switching=True))]
