"""What travels to a block's shared memory: the weights of its run of tiles, one stage after the other, and inputs.

A stage is one step for each warp that multiplies, of one or two tiles: first each tile's words, then each one's scales.
"""

from typing import Any

from lowlat.kernels import ptx
from lowlat.kernels.experts_list import make_members_of, make_pair_of
from lowlat.kernels.experts_multiply import scaled
from lowlat.kernels.experts_plan import GATE_UP, SCALE_BYTES, ExpertPlan, ExpertShape
from lowlat.kernels.numba_cuda import device_function, int64, uint32

__all__ = ["make_fetch", "make_load_inputs"]


def make_fetch(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A function of one warp's lanes: let a stage travel, and its barrier know.

    It takes the stage's place and its barrier, the addresses of the words and scales of the first step of all, the
    number of the stage's first step among those of all tiles of all experts, its steps, its tiles, and the lane.
    """
    steps, step_bytes, warps, quantised = shape.steps, shape.step_bytes, plan.warps, shape.quantised
    scales_at, both_bytes = plan.tiles * plan.warps * step_bytes, step_bytes + (SCALE_BYTES if quantised else 0)
    tiles = plan.tiles

    @device_function
    def fetch_in_bulk(
        place: Any, barrier: Any, weight: Any, scales: Any, number: Any, count: Any, together: Any, lane: Any
    ) -> None:
        if lane == uint32(0):
            ptx.barrier_expect(barrier, uint32(uint32(together * count) * uint32(both_bytes)))
            for tile in range(tiles):
                if uint32(tile) < together:
                    at = int64(number) + int64(tile * steps)
                    to_words = uint32(place + uint32(tile * warps * step_bytes))
                    ptx.copy_bulk_once(to_words, weight + at * step_bytes, uint32(count * uint32(step_bytes)), barrier)
                    if quantised:
                        to_scales = uint32(place + uint32(scales_at + tile * warps * SCALE_BYTES))
                        ptx.copy_bulk_once(
                            to_scales, scales + at * SCALE_BYTES, uint32(count * uint32(SCALE_BYTES)), barrier
                        )

    @device_function
    def fetch_by_lanes(
        place: Any, barrier: Any, weight: Any, scales: Any, number: Any, count: Any, together: Any, lane: Any
    ) -> None:
        for tile in range(tiles):
            if uint32(tile) < together:
                at = int64(number) + int64(tile * steps)
                to_words, words = uint32(place + uint32(tile * warps * step_bytes)), weight + at * step_bytes
                _copy(to_words, words, uint32(count * uint32(step_bytes)), lane)
                if quantised:
                    to_scales = uint32(place + uint32(scales_at + tile * warps * SCALE_BYTES))
                    _copy(to_scales, scales + at * SCALE_BYTES, uint32(count * uint32(SCALE_BYTES)), lane)
        ptx.barrier_arrive_with_copies(barrier)

    return fetch_in_bulk if plan.bulk else fetch_by_lanes


@device_function
def _copy(place: Any, source: Any, num_bytes: Any, lane: Any) -> None:
    place, at = ptx.varying(place), uint32(lane * uint32(16))
    while at < num_bytes:
        ptx.copy_async_16_once(uint32(place + at), source + int64(at))
        at = uint32(at + uint32(512))


def make_load_inputs(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A function of all threads that multiply: a unit's inputs to shared memory, as lanes read them; past the last
    column zeros.

    Columns that no pair has keep what was there: they feed columns of the product that nobody reads.
    """
    columns, threads, pieces, depth = plan.columns, plan.warps * 32, shape.steps * 8, shape.columns
    ranks = shape.ranks if shape.kind == GATE_UP else 1
    quantised, members_of, pair_of = shape.quantised, make_members_of(plan), make_pair_of(plan)

    @device_function
    def load_inputs(lists: Any, area: Any, x: Any, unit: Any, thread: Any) -> None:
        count, index = uint32(members_of(lists, unit) * uint32(pieces)), thread
        while index < count:
            column = uint32(index // uint32(pieces))
            piece = uint32(index - column * uint32(pieces))
            index = uint32(index + uint32(threads))
            row = uint32(pair_of(lists, unit, column) // uint32(ranks))
            a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            if piece < uint32(depth // 8):
                a, b, c, d = ptx.load_global_128(x + (int64(row) * depth + int64(piece) * 8) * 2)
                if quantised:
                    a, b, c, d = scaled(a), scaled(b), scaled(c), scaled(d)
            place = (piece >> uint32(2)) * uint32(columns * 64) + column * uint32(64) + (piece & uint32(3)) * uint32(16)
            ptx.store_shared_128(area + place, a, b, c, d)

    return load_inputs
