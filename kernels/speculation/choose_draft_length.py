"""This module has `choose_draft_length` of the reference as a kernel, alone or in the kernel of a step's start.

Each thread adds up one length. One thread chooses, and sets the condition of the SWITCH node over lengths, if there is
one.
"""

from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import int_at, long_at, set_int, turns
from lowlat.kernels.reference.speculation import draft_lengths as reference
from lowlat.kernels.reference.speculation.draft_lengths import (
    BASE,
    EDGE,
    FIRST_TRIAL,
    SLOPE,
    TRIAL,
    UNIT,
    check_costs,
)
from lowlat.kernels.reference.speculation.length_probabilities import MAX_WAITED
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches_with
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types, uint32

__all__ = [
    "BODY",
    "CHOICE_WORDS",
    "FACTS",
    "ChoicePlan",
    "bounded",
    "choice_plan",
    "choose",
    "choose_draft_length",
    "examples",
    "load_choice",
]

THREADS = 128
MAX_SLOTS = 32
ACTIVE, COMMITTED, ALLOWED, WAITING, FACTS = 0, 1, 2, 3, 4  # columns of a slot's facts
LAST, WAITED, BODY, CHOICE_WORDS = 0, 1, 2, 3  # of the choice's words in shared memory


@dataclass(frozen=True)
class ChoicePlan:
    """The extents that the choice is specialised by.

    most          the greatest draft length
    row           of the costs: the bucket's
    most_waiting  positions that may wait for the draft model; 0: nothing waits
    switching     it sets the condition of a SWITCH node
    """

    max_batch: int
    most: int
    row: int
    most_waiting: int
    switching: bool = False

    @property
    def num_costs(self) -> int:
        """Costs of the bucket's row."""
        return 2 * (self.most + 2)

    @property
    def num_expected(self) -> int:
        """Expected tokens of all slots by draft length."""
        return self.max_batch * (self.most + 1)

    @property
    def num_facts(self) -> int:
        """Facts of all slots."""
        return self.max_batch * FACTS

    @property
    def num_totals(self) -> int:
        """Tokens and costs by draft length."""
        return 2 * (self.most + 1)


def choice_plan(given: Given, *, switching: bool) -> ChoicePlan:
    """The plan for these arguments of `choose_draft_length`. Raises ShapeError for too many slots, and other costs."""
    max_batch, buckets, most = given.sizes("max_B", "n", "K")
    row, most_waiting = given.params["row"], given.params["most_waiting"]
    check_costs(row, buckets, most)
    if max_batch > MAX_SLOTS:
        raise ShapeError(f"draft lengths are chosen for at most {MAX_SLOTS} slots, got {max_batch}")
    return ChoicePlan(max_batch, most, row, most_waiting, switching)


@launches_with(reference.choose_draft_length)
def choose_draft_length(given: Given, *, condition: int | None = None) -> list[KernelCall]:
    """Choose, as the reference's `choose_draft_length` does.

    condition  the handle of the SWITCH node that the choice is for; None: there is none
    Time: a trip to memory and one to the host's, at once. Raises ShapeError.
    """
    plan = choice_plan(given, switching=condition is not None)
    return [KernelCall(_make(plan), (1, 1, 1), (*given.tensors, condition or 0))]


@device_function
def bounded(value: Any, most: Any) -> Any:
    """A number kept from 0 to the greatest draft length."""
    return max(int64(0), min(int64(value), int64(most)))


@device_function
def load_choice(thread: Any, threads: Any, sizes: Any, addresses: Any, shared: Any) -> None:
    """All that a choice is made by into shared memory.

    sizes  of the plan: max_batch, most, row
    """
    max_batch, most, row = sizes
    active, lengths, extended, slot_ints, costs_at, expected_at, last, waited = addresses
    facts, expected, costs, words = shared
    num_costs, num_expected = 2 * (most + 2), max_batch * (most + 1)
    if thread == 0:
        before, since = int_at(last, 0), int_at(waited, 0)
        words[LAST], words[WAITED] = before, since
    for turn in range(turns(num_expected, threads)):
        place = thread + turn * threads
        if place < num_expected:
            expected[place] = int_at(expected_at, place)
    for turn in range(turns(num_costs, threads)):
        place = thread + turn * threads
        if place < num_costs:
            costs[place] = int_at(costs_at, row * num_costs + place)
    if thread < max_batch:
        going, length = int_at(active, thread), int_at(lengths, thread)
        limit, run = long_at(slot_ints, thread * NUM_INTS + DRAFT_LIMIT), int_at(extended, thread)
        facts[thread * FACTS + ACTIVE] = going
        facts[thread * FACTS + COMMITTED] = length
        facts[thread * FACTS + ALLOWED] = bounded(limit, most)
        facts[thread * FACTS + WAITING] = length - 1 - run


@device_function
def _add_up(length: Any, sizes: Any, shared: Any, totals: Any) -> None:
    """The tokens of all active slots at a draft length, and what it costs."""
    max_batch, most, _row = sizes
    facts, expected, costs, _words = shared
    tokens, positions = int64(0), int64(0)
    for slot in range(max_batch):
        if facts[slot * FACTS + ACTIVE] != 0:
            tokens += expected[slot * (most + 1) + min(length, facts[slot * FACTS + ALLOWED])]
            positions += facts[slot * FACTS + COMMITTED]
    base, slope = costs[BASE * (most + 2) + length], costs[SLOPE * (most + 2) + length]
    totals[length] = tokens
    totals[most + 1 + length] = base + ((slope * positions) >> int64(UNIT))


@device_function
def _best(low: Any, high: Any, last: Any, tokens: Any, first: Any) -> Any:
    """The draft length of most expected tokens by cost between two, of those that draft, and how much zero is better.

    tokens  by draft length; the costs begin at `first`
    """
    drafted = max(low, min(int64(1), high))
    for length in range(drafted + 1, high + 1):
        if tokens[length] * tokens[first + drafted] > tokens[drafted] * tokens[first + length]:
            drafted = int64(length)
    gap = tokens[0] * tokens[first + drafted] - tokens[drafted] * tokens[first]
    best = int64(drafted)
    if low == 0 and gap >= 0:
        best = int64(0)
    if low <= last and last <= high and last != best:
        gained, kept = tokens[best] * tokens[first + last], tokens[last] * tokens[first + best]
        if gained - kept <= (kept >> int64(EDGE)):
            best = int64(last)
    return best, drafted, max(gap, int64(0))


@device_function
def _decide(sizes: Any, most_waiting: Any, bounds: Any, shared: Any, totals: Any) -> Any:
    """The body of the step; the words keep what the next choice is made by."""
    max_batch, most, _row = sizes
    facts, _expected, _costs, words = shared
    low, most_allowed = bounded(bounds[0], most), bounded(bounds[1], most)
    count, limit, waiting, first = int64(0), int64(0), int64(0), int64(most + 1)
    for slot in range(max_batch):
        if facts[slot * FACTS + ACTIVE] != 0:
            count += 1
            limit = max(limit, int64(facts[slot * FACTS + ALLOWED]))
            waiting = max(waiting, int64(facts[slot * FACTS + WAITING]))
    if count == 0:
        return low
    high = max(low, min(most_allowed, limit))
    best, drafted, gap = _best(low, high, int64(words[LAST]), totals, first)
    waited = int64(0)
    if best == 0:
        waited = min(int64(words[WAITED]) + 1, int64(MAX_WAITED))
    idle = int64(totals[0]) * int64(totals[first + drafted])
    tries = best == 0 and high > 0 and waited >= FIRST_TRIAL and waited * (idle >> int64(TRIAL)) >= gap
    length = drafted if tries else best
    enough = int64(most_waiting) if length == 0 else int64(most + 2)
    must_run = most_waiting > 0 and waiting >= enough
    words[LAST] = best
    words[WAITED] = int64(0) if tries and not must_run else waited
    return int64(most + 1) if must_run else length


@device_function
def choose(thread: Any, plan: Any, bounds: Any, shared: Any, totals: Any, outs: Any, condition: Any) -> None:
    """Choose by what was loaded, by one block; the body stands in the words.

    bounds  the least and the greatest draft length that the host allows, of which the first thread knows
    """
    sizes, most_waiting, switching = plan[:3], plan[3], plan[4]
    most = sizes[1]
    words, (last, waited, choice) = shared[3], outs
    cuda.syncthreads()
    if thread <= most:
        _add_up(thread, sizes, shared, totals)
    cuda.syncthreads()
    if thread == 0:
        body = _decide(sizes, most_waiting, bounds, shared, totals)
        if switching:
            ptx.set_graph_condition(condition, uint32(body))
        words[BODY] = body
        set_int(choice, 0, body)
        set_int(last, 0, words[LAST])
        set_int(waited, 0, words[WAITED])
    cuda.syncthreads()


@cache
def _make(plan: ChoicePlan) -> Kernel:
    whole, sizes, threads = astuple(plan), astuple(plan)[:3], THREADS
    num_costs, num_expected, num_facts, num_totals = plan.num_costs, plan.num_expected, plan.num_facts, plan.num_totals

    def kernel(
        active: Any,
        lengths: Any,
        extended: Any,
        slot_ints: Any,
        length_bounds: Any,
        draft_length_costs: Any,
        length_expected: Any,
        length_last: Any,
        length_waited: Any,
        draft_length_choice: Any,
        condition: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        facts = cuda.shared.array(shape=num_facts, dtype=int64)
        expected = cuda.shared.array(shape=num_expected, dtype=int64)
        costs = cuda.shared.array(shape=num_costs, dtype=int64)
        words = cuda.shared.array(shape=CHOICE_WORDS, dtype=int64)
        totals = cuda.shared.array(shape=num_totals, dtype=int64)
        thread, shared = int64(cuda.threadIdx.x), (facts, expected, costs, words)
        bounds = (int_at(length_bounds, 0), int_at(length_bounds, 1))
        reads = (active, lengths, extended, slot_ints, draft_length_costs, length_expected, length_last, length_waited)
        load_choice(thread, threads, sizes, reads, shared)
        outs = (length_last, length_waited, draft_length_choice)
        choose(thread, whole, bounds, shared, totals, outs, condition)

    name = "choose_draft_length_" + "_".join(map(str, astuple(plan)))
    return Kernel(name, kernel, (*[types.int64] * 10, types.uint64), threads, linked=not plan.switching)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    plan = ChoicePlan(8, 7, 7, 8)
    return [_make(each) for each in (plan, ChoicePlan(1, 5, 0, 64, switching=True))]
