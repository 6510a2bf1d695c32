"""The list of a step's distinct experts and of the pairs that chose them, made by every block for itself.

A pair is a row and one of its experts; a unit is an expert and up to `columns` of its pairs: so many as one tile of mma
takes. Units come in the order of their first pairs; the list is the same in every block.
"""

from typing import Any

from lowlat.kernels.moe.plan import ExpertPlan
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, uint32

__all__ = ["make_chosen", "make_expert_of", "make_list_units", "make_members_of", "make_pair_of", "make_share_of"]


def make_list_units(plan: ExpertPlan) -> Any:
    """A function of all threads: list the units of `count` ids, which stand at `area`; returns how many there are.

    A barrier must stand between the writes of the ids and this call.
    """
    return _make_list_few(plan) if plan.capacity <= 32 else _make_list_many(plan)


def _make_list_few(plan: ExpertPlan) -> Any:
    """At most a pair a lane: the first warp compares them among its lanes; one barrier."""
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


def _make_list_many(plan: ExpertPlan) -> Any:
    """A pair a thread, compared with all others in shared memory; three barriers."""
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


@device_function
def _sum_before(area: Any, end: Any, value: Any) -> Any:
    """How many of the first `end` words at `area` equal `value`."""
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
    """A function: a unit's expert."""
    units_at = 8 * plan.capacity

    @device_function
    def expert_of(area: Any, unit: Any) -> Any:
        return uint32(ptx.load_shared_u32(area + uint32(units_at) + unit * uint32(4)) & uint32(0xFFFFFF))

    return expert_of


def make_members_of(plan: ExpertPlan) -> Any:
    """A function: how many pairs a unit has."""
    units_at = 8 * plan.capacity

    @device_function
    def members_of(area: Any, unit: Any) -> Any:
        return uint32(ptx.load_shared_u32(area + uint32(units_at) + unit * uint32(4)) >> uint32(24))

    return members_of


def make_pair_of(plan: ExpertPlan) -> Any:
    """A function: the pair in a column of a unit: row * top_k + i is that of a row and its i-th expert."""
    columns, pairs_at = plan.columns, 12 * plan.capacity

    @device_function
    def pair_of(area: Any, unit: Any, column: Any) -> Any:
        return ptx.load_shared_u32(area + uint32(pairs_at) + (unit * uint32(columns) + column) * uint32(4))

    return pair_of


def make_chosen() -> Any:
    """A function: whether a pair is live."""

    @device_function
    def chosen(area: Any, pair: Any) -> Any:
        return int32(ptx.load_shared_u32(area + pair * uint32(4))) >= int32(0)

    return chosen


def make_share_of(plan: ExpertPlan) -> Any:
    """A function: a pair's share."""
    shares_at = plan.shares_at

    @device_function
    def share_of(area: Any, pair: Any) -> Any:
        return ptx.load_shared_f32(area + uint32(shares_at) + pair * uint32(4))

    return share_of
