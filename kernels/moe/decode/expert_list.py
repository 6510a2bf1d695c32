"""This module lists a step's distinct experts with the pairs that chose them; every block makes the list for itself.

A pair is a row and one of its experts. A unit is an expert and up to `columns` of its pairs, as many as one tile of mma
takes. Units are in the order of their first pairs; the list is the same in every block.
"""

from typing import Any

from lowlat.kernels.moe.plan import ExpertPlan
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, uint32

__all__ = ["make_chosen", "make_expert_of", "make_list_units", "make_members_of", "make_pair_of", "make_share_of"]

FULL_WARP = 0xFFFFFFFF
USUAL = 8  # experts a row; where there are more, four rows have just more pairs than a warp has lanes


def make_list_units(plan: ExpertPlan, top_k: int) -> Any:
    """A device function of all threads that lists the units of the `count` ids at `area`, and returns their number.

    A barrier is needed between the writes of the ids and this call.
    """
    if plan.turns > 1:
        return _make_list_in_turns(plan)
    if plan.capacity <= 32:
        return _make_list_few(plan)
    return _make_list_twice(plan) if plan.capacity <= 64 and top_k > USUAL else _make_list_many(plan)


def _make_list_few(plan: ExpertPlan) -> Any:
    """A device function for at most one pair a lane: the first warp compares its lanes' pairs; one barrier."""
    capacity, columns = plan.capacity, plan.columns
    leaders_at, units_at, pairs_at = 4 * capacity, 8 * capacity, 12 * capacity

    @device_function
    def list_few(area: Any, count: Any, thread: Any) -> Any:
        if thread < uint32(32):
            mine = int32(-1)
            if int64(thread) < count:
                mine = int32(ptx.load_shared_u32(area + thread * uint32(4)))
            same = ptx.lanes_of_same(uint32(mine))
            earlier = uint32(uint32(uint32(1) << thread) - uint32(1))
            before, leads = ptx.count_bits(uint32(same & earlier)), uint32(0)
            if mine >= int32(0) and before % uint32(columns) == uint32(0):
                leads = uint32(1)
            leaders = ptx.ballot(leads)
            if thread == uint32(0):
                ptx.store_shared_u32(area + uint32(leaders_at), ptx.count_bits(leaders))
            if leads == uint32(1):
                unit, rest = ptx.count_bits(uint32(leaders & earlier)), uint32(same & ~earlier)
                members = uint32(0)
                for column in range(columns):
                    if rest != uint32(0):
                        lower = uint32(rest & uint32(uint32(0) - rest))
                        place = area + uint32(pairs_at) + (unit * uint32(columns) + uint32(column)) * uint32(4)
                        ptx.store_shared_u32(place, ptx.count_bits(uint32(lower - uint32(1))))
                        rest, members = uint32(rest ^ lower), uint32(members + uint32(1))
                word = uint32(mine) | (members << uint32(24))
                ptx.store_shared_u32(area + uint32(units_at) + unit * uint32(4), word)
        cuda.syncthreads()
        return ptx.load_shared_u32(area + uint32(leaders_at))

    return list_few


def _make_list_twice(plan: ExpertPlan) -> Any:
    """A device function for at most two pairs a lane, one of each half of the list; one barrier.

    The first warp compares them, once for each pair of the second half.
    """
    capacity, columns = plan.capacity, plan.columns
    leaders_at, units_at, pairs_at = 4 * capacity, 8 * capacity, 12 * capacity

    @device_function
    def load_id(area: Any, pair: Any, count: Any) -> Any:
        return int32(ptx.load_shared_u32(area + pair * uint32(4))) if int64(pair) < count else int32(-1)

    @device_function
    def lowest(mask: Any) -> Any:
        return uint32(mask & uint32(uint32(0) - mask))

    @device_function
    def leads(mine: Any, before: Any) -> Any:
        return uint32(1) if mine >= int32(0) and before % uint32(columns) == uint32(0) else uint32(0)

    @device_function
    def store_unit(area: Any, unit: Any, mine: Any, low: Any, high: Any) -> None:
        """Store a unit with the first pairs of these masks of both halves."""
        members, place = uint32(0), area + uint32(pairs_at) + unit * uint32(4 * columns)
        for column in range(columns):
            if low != uint32(0):
                bit = lowest(low)
                ptx.store_shared_u32(place + uint32(4 * column), ptx.count_bits(uint32(bit - uint32(1))))
                low, members = uint32(low ^ bit), uint32(members + uint32(1))
            elif high != uint32(0):
                bit = lowest(high)
                pair = uint32(uint32(32) + ptx.count_bits(uint32(bit - uint32(1))))
                ptx.store_shared_u32(place + uint32(4 * column), pair)
                high, members = uint32(high ^ bit), uint32(members + uint32(1))
        ptx.store_shared_u32(area + uint32(units_at) + unit * uint32(4), uint32(mine) | (members << uint32(24)))

    @device_function
    def list_twice(area: Any, count: Any, thread: Any) -> Any:
        if thread < uint32(32):
            first, second = load_id(area, thread, count), load_id(area, uint32(thread + uint32(32)), count)
            same, alike = ptx.lanes_of_same(uint32(first)), ptx.lanes_of_same(uint32(second))
            above, below = uint32(0), uint32(0)  # pairs of the other half with the same expert
            for lane in range(uint32(max(count, int64(32)) - int64(32))):
                equal = uint32(0)
                if first == int32(cuda.shfl_sync(FULL_WARP, second, int32(lane))):
                    equal = uint32(1)
                found = ptx.ballot(equal)
                above = uint32(above | uint32(equal << uint32(lane)))
                if thread == uint32(lane):
                    below = found
            earlier = uint32(uint32(uint32(1) << thread) - uint32(1))
            leads_first = leads(first, ptx.count_bits(uint32(same & earlier)))
            before = uint32(ptx.count_bits(below) + ptx.count_bits(uint32(alike & earlier)))
            leads_second = leads(second, before)
            leaders, others = ptx.ballot(leads_first), ptx.ballot(leads_second)
            units = ptx.count_bits(leaders)
            if thread == uint32(0):
                ptx.store_shared_u32(area + uint32(leaders_at), uint32(units + ptx.count_bits(others)))
            if leads_first == uint32(1):
                unit = ptx.count_bits(uint32(leaders & earlier))
                store_unit(area, unit, first, uint32(same & ~earlier), above)
            if leads_second == uint32(1):
                unit = uint32(units + ptx.count_bits(uint32(others & earlier)))
                store_unit(area, unit, second, uint32(0), uint32(alike & ~earlier))
        cuda.syncthreads()
        return ptx.load_shared_u32(area + uint32(leaders_at))

    return list_twice


def _make_list_many(plan: ExpertPlan) -> Any:
    """A device function for one pair a thread: each is compared with all others in shared memory; three barriers."""
    capacity, columns = plan.capacity, plan.columns
    leaders_at, units_at, pairs_at = 4 * capacity, 8 * capacity, 12 * capacity

    @device_function
    def list_many(area: Any, count: Any, thread: Any) -> Any:
        mine, leads = int32(-1), uint32(0)
        if thread < uint32(capacity):
            if int64(thread) < count:
                mine = int32(ptx.load_shared_u32(area + thread * uint32(4)))
            ptx.store_shared_u32(area + thread * uint32(4), uint32(mine))
        cuda.syncthreads()
        if mine >= int32(0):
            before = _sum_before(area, thread, uint32(mine))
            leads = uint32(1) if before % uint32(columns) == uint32(0) else uint32(0)
        if thread < uint32(capacity):
            ptx.store_shared_u32(area + uint32(leaders_at) + thread * uint32(4), leads)
        ptx.sync_warp()  # the barrier that counts wants whole warps
        units = uint32(cuda.syncthreads_count(leads))
        if leads == uint32(1):
            unit = _sum_before(area + uint32(leaders_at), thread, uint32(1))
            members, other = uint32(0), thread
            while other < uint32(capacity) and members < uint32(columns):
                if ptx.load_shared_u32(area + other * uint32(4)) == uint32(mine):
                    place = (unit * uint32(columns) + members) * uint32(4)
                    ptx.store_shared_u32(area + uint32(pairs_at) + place, other)
                    members = uint32(members + uint32(1))
                other = uint32(other + uint32(1))
            word = uint32(mine) | (members << uint32(24))
            ptx.store_shared_u32(area + uint32(units_at) + unit * uint32(4), word)
        cuda.syncthreads()
        return units

    return list_many


def _make_list_in_turns(plan: ExpertPlan) -> Any:
    """A device function for several pairs a thread, like `_make_list_many`; a barrier each turn, and two more."""
    capacity, columns, turns, threads = plan.capacity, plan.columns, plan.turns, plan.threads
    leaders_at, units_at, pairs_at = 4 * capacity, 8 * capacity, 12 * capacity

    @device_function
    def store_unit(area: Any, pair: Any, unit: Any) -> None:
        """Store the unit of a first pair: the pair itself, and later pairs of the same expert."""
        mine, members = ptx.load_shared_u32(area + pair * uint32(4)), uint32(0)
        place, start = area + uint32(pairs_at) + unit * uint32(4 * columns), uint32(pair & ~uint32(3))
        while start < uint32(capacity) and members < uint32(columns):
            four = ptx.load_shared_128(area + start * uint32(4))
            for inner in range(4):
                other = uint32(start + uint32(inner))
                if four[inner] == mine and other >= pair and members < uint32(columns):
                    ptx.store_shared_u32(place + members * uint32(4), other)
                    members = uint32(members + uint32(1))
            start = uint32(start + uint32(4))
        ptx.store_shared_u32(area + uint32(units_at) + unit * uint32(4), uint32(mine) | (members << uint32(24)))

    @device_function
    def list_in_turns(area: Any, count: Any, thread: Any) -> Any:
        units = uint32(0)
        for turn in range(turns):
            pair = uint32(thread + uint32(turn * threads))
            if pair < uint32(capacity) and int64(pair) >= count:
                ptx.store_shared_u32(area + pair * uint32(4), uint32(FULL_WARP))
        cuda.syncthreads()
        for turn in range(turns):
            pair, leads = uint32(thread + uint32(turn * threads)), uint32(0)
            if pair < uint32(capacity):
                mine = ptx.load_shared_u32(area + pair * uint32(4))
                if int32(mine) >= int32(0):
                    before = _sum_before(area, pair, mine)
                    leads = uint32(1) if before % uint32(columns) == uint32(0) else uint32(0)
                ptx.store_shared_u32(area + uint32(leaders_at) + pair * uint32(4), leads)
            ptx.sync_warp()  # the barrier that counts wants whole warps
            units = uint32(units + uint32(cuda.syncthreads_count(leads)))
        for turn in range(turns):
            pair = uint32(thread + uint32(turn * threads))
            if pair < uint32(capacity) and ptx.load_shared_u32(area + uint32(leaders_at) + pair * uint32(4)) != uint32(
                0
            ):
                store_unit(area, pair, _sum_before(area + uint32(leaders_at), pair, uint32(1)))
        cuda.syncthreads()
        return units

    return list_in_turns


@device_function
def _sum_before(area: Any, end: Any, value: Any) -> Any:
    """Count the words that equal `value` among the first `end` at `area`."""
    total, start = uint32(0), uint32(0)
    while start < end:
        a, b, c, d = ptx.load_shared_128(area + start * uint32(4))
        left = uint32(end - start)
        total = uint32(total + (uint32(1) if a == value else uint32(0)))
        total = uint32(total + (uint32(1) if b == value and left > uint32(1) else uint32(0)))
        total = uint32(total + (uint32(1) if c == value and left > uint32(2) else uint32(0)))
        total = uint32(total + (uint32(1) if d == value and left > uint32(3) else uint32(0)))
        start = uint32(start + uint32(4))
    return total


def make_expert_of(plan: ExpertPlan) -> Any:
    """A device function that returns a unit's expert."""
    units_at = 8 * plan.capacity

    @device_function
    def expert_of(area: Any, unit: Any) -> Any:
        return uint32(ptx.load_shared_u32(area + uint32(units_at) + unit * uint32(4)) & uint32(0xFFFFFF))

    return expert_of


def make_members_of(plan: ExpertPlan) -> Any:
    """A device function that returns the number of a unit's pairs."""
    units_at = 8 * plan.capacity

    @device_function
    def members_of(area: Any, unit: Any) -> Any:
        return uint32(ptx.load_shared_u32(area + uint32(units_at) + unit * uint32(4)) >> uint32(24))

    return members_of


def make_pair_of(plan: ExpertPlan) -> Any:
    """A device function that returns the pair in a column of a unit; row * top_k + i is a row with its i-th expert."""
    columns, pairs_at = plan.columns, 12 * plan.capacity

    @device_function
    def pair_of(area: Any, unit: Any, column: Any) -> Any:
        return ptx.load_shared_u32(area + uint32(pairs_at) + (unit * uint32(columns) + column) * uint32(4))

    return pair_of


def make_chosen() -> Any:
    """A device function that returns whether a pair is live."""

    @device_function
    def chosen(area: Any, pair: Any) -> Any:
        return int32(ptx.load_shared_u32(area + pair * uint32(4))) >= int32(0)

    return chosen


def make_share_of(plan: ExpertPlan) -> Any:
    """A device function that returns a pair's weight."""
    shares_at = plan.shares_at

    @device_function
    def share_of(area: Any, pair: Any) -> Any:
        return ptx.load_shared_f32(area + uint32(shares_at) + pair * uint32(4))

    return share_of
