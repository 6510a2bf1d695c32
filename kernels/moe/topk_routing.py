"""This module has top-k routing: it chooses each row's experts and their weights from its logits.

A warp has a row, and stores its experts and their weights in shared memory. For few rows, every block of an MoE layer
routes all rows for itself (`make_route`), and `expert_list` reads the result; `route_top_k` is a launch of its own.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.norm_math import lane_sum
from lowlat.kernels.common.norm_row import is_live
from lowlat.kernels.common.sentinels import is_missing, next_turn
from lowlat.kernels.elementwise.norm import check_dtype, check_row_live
from lowlat.kernels.moe.limits import MAX_CHOSEN, MAX_EXPERTS
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = [
    "RoutingArea",
    "TopKRouting",
    "examples",
    "make_publish",
    "make_route",
    "route_top_k",
]

CHAIN = 8  # logits a lane, of which a chain of comparisons finds the largest as soon as a tree does
EVERY_LANE = 0xFFFFFFFF
SIGN = 0x80000000
ROWS = 4  # of a block of `route_top_k`
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class TopKRouting:
    """The logits by which rows choose their experts: the largest ones, and the softmax over them as shares.

    logits    [M, E]  float32
    row_live  [M] or [B, T]  uint8; None: all rows are live
    over_all  shares are those of the softmax over all logits
    shared    the last expert is every row's last one, with the sigmoid of its logit as its share; the others are chosen
              and weighed without it
    Of equal logits the lowest id comes first. A NaN counts as the largest, and makes the row's shares NaN. A dead row
    has ids of -1 and shares of 0.
    """

    logits: torch.Tensor
    row_live: torch.Tensor | None = None
    over_all: bool = False
    shared: bool = False

    @property
    def num_experts(self) -> int:
        """E, the shared one among them."""
        return self.logits.shape[1]

    def check(self, rows: int, top_k: int, num_experts: int) -> None:
        """Raise ShapeError unless M rows can choose so many of E experts each by these logits."""
        chosen, routed = top_k - self.shared, num_experts - self.shared
        if not 1 <= chosen <= min(routed, MAX_CHOSEN) or routed > MAX_EXPERTS:
            raise ShapeError(
                f"a row chooses at most {MAX_CHOSEN} experts of at most {MAX_EXPERTS}"
                f"{' next to a shared one' * self.shared}, got {chosen} of {routed}"
            )
        check_shape("logits", self.logits, rows, num_experts)
        check_dtype(torch.float32, logits=self.logits)
        check_dtype(torch.uint8, row_live=self.row_live)
        check_row_live(self.row_live, rows)

    def of(self, part: slice) -> tuple[Argument, Argument]:
        """The arguments of a launch over some rows: their logits, and their flags or 0."""
        return self.logits[part], 0 if self.row_live is None else self.row_live.view(-1)[part]


class RoutingArea(Protocol):
    """The area of shared memory for a block's ids, from its start on, and shares, so many bytes further."""

    @property
    def threads(self) -> int: ...
    @property
    def shares_at(self) -> int: ...


def route_top_k(
    *,
    routing: TopKRouting,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> list[KernelCall]:
    """Choose k experts for each of M rows, and their shares, as `TopKRouting` says, in one launch of a warp a row.

    expert_ids      [M, k]  int32    out: -1 in dead rows
    expert_weights  [M, k]  float32  out: 0 in dead rows
    scale           [E]     float32  by which an expert's shares are multiplied last; None: they are not
    Some microseconds. Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    rows, top_k = expert_ids.shape
    routing.check(rows, top_k, routing.num_experts)
    check_shape("expert_weights", expert_weights, rows, top_k)
    check_dtype(torch.int32, expert_ids=expert_ids)
    check_dtype(torch.float32, expert_weights=expert_weights)
    grid = (-(-rows // ROWS), 1, 1)
    arguments: tuple[Argument, ...] = (*routing.of(slice(None)), expert_ids, expert_weights, rows)
    kernel = _make(routing.num_experts, top_k, routing.over_all, routing.shared, scale is not None)
    if scale is not None:
        check_shape("scale", scale, routing.num_experts)
        check_dtype(torch.float32, scale=scale)
        arguments = (*arguments, scale)
    return [KernelCall(kernel, grid, arguments)]


def make_route(plan: RoutingArea, top_k: int, num_experts: int, over_all: bool = False, shared: bool = False) -> Any:
    """A device function of all threads that routes `count` pairs' rows, with ids and weights to `area`; one barrier."""
    route_row, warps = _make_route_row(plan, top_k, num_experts, over_all, shared), plan.threads // 32

    @device_function
    def route(area: Any, logits: Any, row_live: Any, count: Any, thread: Any) -> None:
        row, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        while int64(row) * int64(top_k) < count:
            route_row(area, logits + int64(row) * int64(4 * num_experts), row_live, row, lane)
            row = uint32(row + uint32(warps))
        cuda.syncthreads()

    return route


def _make_largest(first: int, count: int) -> Any:
    """A device function that finds the largest of several keys, as a tree."""
    if count == 1:

        @device_function
        def only(keys: Any) -> Any:
            return keys[first]

        return only
    left, right = _make_largest(first, count // 2), _make_largest(first + count // 2, count - count // 2)

    @device_function
    def largest(keys: Any) -> Any:
        return max(left(keys), right(keys))

    return largest


def _make_lowest(first: int, count: int) -> Any:
    """A device function that finds a lane's lowest expert with a given key, else EVERY_LANE; as a tree."""
    if count == 1:

        @device_function
        def only(keys: Any, key: Any, lane: Any) -> Any:
            return uint32(lane + uint32(32 * first)) if keys[first] == key else uint32(EVERY_LANE)

        return only
    left, right = _make_lowest(first, count // 2), _make_lowest(first + count // 2, count - count // 2)

    @device_function
    def lowest(keys: Any, key: Any, lane: Any) -> Any:
        return min(left(keys, key, lane), right(keys, key, lane))

    return lowest


def _make_find_by_tree(own: int) -> Any:
    """A device function of a warp that finds the largest key of all lanes, and its lowest expert; some key is not 0."""
    largest, lowest = _make_largest(0, own), _make_lowest(0, own)

    @device_function
    def find_by_tree(keys: Any, lane: Any) -> Any:
        top = ptx.warp_max(largest(keys))
        low = uint32(uint32(EVERY_LANE) - lowest(keys, top, lane))
        return top, uint32(uint32(EVERY_LANE) - ptx.warp_max(low))

    return find_by_tree


def _make_route_row(plan: RoutingArea, top_k: int, num_experts: int, over_all: bool, shared: bool) -> Any:
    routed, chosen, shares_at = num_experts - shared, top_k - shared, plan.shares_at
    own = -(-routed // 32)
    by_tree, find_by_tree = own > CHAIN, _make_find_by_tree(own)

    @device_function
    def power_of(value: Any, peak: Any) -> Any:
        return ptx.exp2_approx(ptx.mul_rn(ptx.add_rn(value, -peak), float32(LOG2_E)))

    @device_function
    def route_row(area: Any, logits: Any, row_live: Any, row: Any, lane: Any) -> None:
        """Find a row's largest logits and their softmax, by one warp, once the logits are there (see `sentinels`)."""
        values, keys = cuda.local.array(own, float32), cuda.local.array(own, uint32)
        waits, turns = True, uint32(0)
        if shared:
            gate = float32(0)
        while waits:
            turns = next_turn(turns)
            for part in range(own):  # all loads are under way before anything waits for one
                expert = min(uint32(lane + uint32(32 * part)), uint32(routed - 1))
                values[part] = ptx.load_relaxed_gpu_f32(logits + int64(expert) * int64(4))
            if shared:
                gate = ptx.load_relaxed_gpu_f32(logits + int64(4 * routed))
            waits = False
            for part in range(own):
                waits = waits or is_missing(ptx.bits_of_float(values[part]))
            if shared:
                waits = waits or is_missing(ptx.bits_of_float(gate))
        live = is_live(row_live, row)
        for part in range(own):
            there = uint32(lane + uint32(32 * part)) < uint32(routed)
            keys[part] = _key(values[part]) if there else uint32(0)
        mine, mine_id = float32(0), uint32(0)
        peak, total = float32(0), float32(0)
        for k in range(chosen):
            if by_tree:
                top, found = find_by_tree(keys, lane)
            else:
                best, place = uint32(0), uint32(0)
                for part in range(own):
                    if keys[part] > best:
                        best, place = keys[part], uint32(lane + uint32(32 * part))
                top = ptx.warp_max(best)
                low = uint32(EVERY_LANE) - place if best == top else uint32(0)
                found = uint32(uint32(EVERY_LANE) - ptx.warp_max(uint32(low)))
            for part in range(own):
                if found == uint32(lane + uint32(32 * part)):
                    keys[part] = uint32(0)
            if k == 0:
                peak = _value(top)
            power = power_of(_value(top), peak)
            total = ptx.add_rn(total, power)
            if lane == uint32(k):
                mine, mine_id = power, found
        if over_all:
            total = float32(0)
            for part in range(own):
                if uint32(lane + uint32(32 * part)) < uint32(routed):
                    total = ptx.add_rn(total, power_of(values[part], peak))
            total = lane_sum(total)
        if shared and lane == uint32(chosen):
            mine, mine_id, total = float32(1), uint32(routed), ptx.add_rn(float32(1), power_of(float32(0), gate))
        if lane < uint32(top_k):
            at = uint32(area + (row * uint32(top_k) + lane) * uint32(4))
            ptx.store_shared_u32(at, mine_id if live else uint32(EVERY_LANE))
            ptx.store_shared_f32(at + uint32(shares_at), ptx.div_rn(mine, total) if live else float32(0))

    return route_row


def make_publish(plan: RoutingArea, most: int) -> Any:
    """A device function of all threads: the last block writes ids and weights of at most `count` pairs to memory."""
    shares_at, threads, turns = plan.shares_at, plan.threads, -(-most // plan.threads)

    @device_function
    def publish(area: Any, ids: Any, shares: Any, count: Any, thread: Any) -> None:
        if uint32(cuda.blockIdx.x) == uint32(cuda.gridDim.x) - uint32(1) and int64(thread) < count:
            at, own = int64(thread) * int64(4), uint32(area + thread * uint32(4))
            ptx.store_global_u32(ids + at, ptx.load_shared_u32(own))
            ptx.store_global_f32(shares + at, ptx.load_shared_f32(own + uint32(shares_at)))

    @device_function
    def publish_in_turns(area: Any, ids: Any, shares: Any, count: Any, thread: Any) -> None:
        for turn in range(turns):
            publish(area, ids, shares, count, uint32(thread + uint32(turn * threads)))

    return publish if turns == 1 else publish_in_turns


@device_function
def _key(value: Any) -> Any:
    """An integer, never 0, that is larger for a larger number; NaN has the largest, both zeros the same."""
    bits = ptx.bits_of_float(ptx.add_rn(value, float32(0.0)))
    key = uint32(bits | uint32(SIGN))
    if bits & uint32(SIGN):
        key = uint32(bits ^ uint32(EVERY_LANE))
    if value != value:
        key = uint32(EVERY_LANE)
    return key


@device_function
def _value(key: Any) -> Any:
    """The number that has a key."""
    bits = uint32(key ^ uint32(SIGN))
    if not key & uint32(SIGN):
        bits = uint32(key ^ uint32(EVERY_LANE))
    return ptx.float_of_bits(bits)


@dataclass(frozen=True)
class _Block:
    """The area of a block of `route_top_k`: ids and then shares of its pairs."""

    threads: int
    shares_at: int


@cache
def _make(num_experts: int, top_k: int, over_all: bool = False, shared: bool = False, scaled: bool = False) -> Kernel:
    pairs, threads = ROWS * top_k, 32 * ROWS
    shares_at = 4 * pairs
    route = make_route(_Block(threads, shares_at), top_k, num_experts, over_all, shared)

    def route_top_k(logits: Any, row_live: Any, ids: Any, shares: Any, rows: Any) -> None:
        area = ptx.shared_address(cuda.shared.array(shape=0, dtype=float32))
        thread, first = uint32(cuda.threadIdx.x), uint32(uint32(cuda.blockIdx.x) * uint32(ROWS))
        live = row_live
        if live != int64(0):
            live = row_live + int64(first)
        count = uint32(min(uint32(uint32(rows) - first), uint32(ROWS)) * uint32(top_k))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        route(area, logits + int64(first) * int64(4 * num_experts), live, int64(count), thread)
        if thread < count:
            at, own = int64(first * uint32(top_k) + thread) * int64(4), uint32(area + thread * uint32(4))
            ptx.store_global_u32(ids + at, ptx.load_shared_u32(own))
            ptx.store_global_f32(shares + at, ptx.load_shared_f32(uint32(own + uint32(shares_at))))

    def route_and_scale(logits: Any, row_live: Any, ids: Any, shares: Any, rows: Any, scale: Any) -> None:
        area = ptx.shared_address(cuda.shared.array(shape=0, dtype=float32))
        thread, first = uint32(cuda.threadIdx.x), uint32(uint32(cuda.blockIdx.x) * uint32(ROWS))
        live = row_live
        if live != int64(0):
            live = row_live + int64(first)
        count = uint32(min(uint32(uint32(rows) - first), uint32(ROWS)) * uint32(top_k))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        route(area, logits + int64(first) * int64(4 * num_experts), live, int64(count), thread)
        if thread < count:
            at, own = int64(first * uint32(top_k) + thread) * int64(4), uint32(area + thread * uint32(4))
            expert, share = ptx.load_shared_u32(own), ptx.load_shared_f32(uint32(own + uint32(shares_at)))
            if expert != uint32(EVERY_LANE):  # a dead row's share is 0
                share = ptx.mul_rn(share, ptx.load_global_f32(scale + int64(expert) * int64(4)))
            ptx.store_global_u32(ids + at, expert)
            ptx.store_global_f32(shares + at, share)

    signature = (*(types.int64,) * 5,)
    name = f"route_top_k_{num_experts}x{top_k}{'_over_all' if over_all else ''}{'_shared' if shared else ''}"
    if scaled:
        return Kernel(f"{name}_scaled", route_and_scale, (*signature, types.int64), threads, 1, 2 * shares_at)
    return Kernel(name, route_top_k, signature, threads, 1, 2 * shares_at)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    shared = [_make(257, 9, shared=True), _make(MAX_EXPERTS + 1, MAX_CHOSEN + 1, over_all=True, shared=True)]
    return [_make(128, 4), _make(128, 8, over_all=True), _make(128, 8, scaled=True), *shared]
