"""The choice of rows' experts by their logits, which a block makes for itself.

A warp has a row, and leaves its experts and their shares in shared memory, where `experts_list` reads them. It knows
neither who wrote the logits nor what the experts compute.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.norm_row import is_live
from lowlat.kernels.common.sentinels import is_missing, next_turn
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.rows.norm import check_dtype, check_row_live
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, uint32

__all__ = ["MAX_CHOSEN", "MAX_EXPERTS", "Choice", "Place", "make_choose", "make_publish"]

MAX_EXPERTS, MAX_CHOSEN = 256, 8
EVERY_LANE = 0xFFFFFFFF
SIGN = 0x80000000
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Choice:
    """What rows choose their experts by: the largest logits, and the softmax over the chosen as their shares.

    logits    [M, E]  float32
    row_live  [M] or [B, T]  uint8; None: all rows are live
    Of equal logits the lowest id comes first. A NaN counts as the largest, and makes the row's shares NaN. A dead row
    has ids of -1 and shares of 0.
    """

    logits: torch.Tensor
    row_live: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.logits.shape[1]

    def check(self, rows: int, ranks: int, num_experts: int) -> None:
        """Raise ShapeError unless M rows can choose so many of E experts each by these logits."""
        if not 1 <= ranks <= min(num_experts, MAX_CHOSEN) or num_experts > MAX_EXPERTS:
            raise ShapeError(
                f"a row chooses at most {MAX_CHOSEN} experts of at most {MAX_EXPERTS}, got {ranks} of {num_experts}"
            )
        check_shape("logits", self.logits, rows, num_experts)
        check_dtype(torch.float32, logits=self.logits)
        check_dtype(torch.uint8, row_live=self.row_live)
        check_row_live(self.row_live, rows)

    def of(self, part: slice) -> tuple[Argument, Argument]:
        """What a launch over some rows takes: their logits, and their flags or 0."""
        return self.logits[part], 0 if self.row_live is None else self.row_live.view(-1)[part]


class Place(Protocol):
    """Where a block leaves what rows have chosen: ids from the area's start, shares so many bytes further."""

    @property
    def threads(self) -> int: ...
    @property
    def shares_at(self) -> int: ...


def make_choose(plan: Place, ranks: int, num_experts: int) -> Any:
    """A function of all threads: ids and shares of the rows of `count` pairs to their places at `area`; one barrier."""
    choose, warps = _make_choose_row(plan, ranks, num_experts), plan.threads // 32

    @device_function
    def choose_rows(area: Any, logits: Any, row_live: Any, count: Any, thread: Any) -> None:
        row, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        while int64(row) * int64(ranks) < count:
            choose(area, logits + int64(row) * int64(4 * num_experts), row_live, row, lane)
            row = uint32(row + uint32(warps))
        cuda.syncthreads()

    return choose_rows


def _make_choose_row(plan: Place, ranks: int, num_experts: int) -> Any:
    own, shares_at = -(-num_experts // 32), plan.shares_at

    @device_function
    def choose(area: Any, logits: Any, row_live: Any, row: Any, lane: Any) -> None:
        """One warp: a row's largest logits and their softmax, when the logits are there, as `awaited` has it."""
        values, keys = cuda.local.array(own, float32), cuda.local.array(own, uint32)
        waits, turns = True, uint32(0)
        while waits:
            turns = next_turn(turns)
            for part in range(own):  # all loads are under way before anything waits for one
                expert = min(uint32(lane + uint32(32 * part)), uint32(num_experts - 1))
                values[part] = ptx.load_relaxed_gpu_f32(logits + int64(expert) * int64(4))
            waits = False
            for part in range(own):
                waits = waits or is_missing(ptx.bits_of_float(values[part]))
        live = is_live(row_live, row)
        for part in range(own):
            there = uint32(lane + uint32(32 * part)) < uint32(num_experts)
            keys[part] = _key(values[part]) if there else uint32(0)
        mine, mine_id = float32(0), uint32(0)
        peak, total = float32(0), float32(0)
        for rank in range(ranks):
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
            if rank == 0:
                peak = _value(top)
            power = ptx.exp2_approx(ptx.mul_rn(ptx.add_rn(_value(top), -peak), float32(LOG2_E)))
            total = ptx.add_rn(total, power)
            if lane == uint32(rank):
                mine, mine_id = power, found
        if lane < uint32(ranks):
            at = uint32(area + (row * uint32(ranks) + lane) * uint32(4))
            ptx.store_shared_u32(at, mine_id if live else uint32(EVERY_LANE))
            ptx.store_shared_f32(at + uint32(shares_at), ptx.div_rn(mine, total) if live else float32(0))

    return choose


def make_publish(plan: Place) -> Any:
    """A function of all threads: the last block writes ids and shares of `count` pairs to global memory."""
    shares_at = plan.shares_at

    @device_function
    def publish(area: Any, ids: Any, shares: Any, count: Any, thread: Any) -> None:
        if uint32(cuda.blockIdx.x) == uint32(cuda.gridDim.x) - uint32(1) and int64(thread) < count:
            at, own = int64(thread) * int64(4), uint32(area + thread * uint32(4))
            ptx.store_global_u32(ids + at, ptx.load_shared_u32(own))
            ptx.store_global_f32(shares + at, ptx.load_shared_f32(own + uint32(shares_at)))

    return publish


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
