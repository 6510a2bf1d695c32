"""The partial argmax: the best pair of each row among a block's columns, with which `argmax` and `sample` begin.

A lane that finishes values has the same row and the same place in every tile; it keeps the best of what it saw in
shared memory, and at the block's end the lanes of a row agree. Pairs, and what breaks a row, are as `select` has them.
"""

from dataclasses import dataclass
from typing import Any

from lowlat.kernels.gemm.decode.plan import DecodeGemmPlan, DecodeGemmShape
from lowlat.kernels.sampling.select import BROKEN, EVERY_LANE, LARGEST_WORD, MAGNITUDE, greater, order_key
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, uint32

__all__ = ["Best", "make_argmax"]


@dataclass(frozen=True)
class Best:
    """Device functions of the warps that finish; where a GEMM keeps no best pairs, they do nothing.

    begin  (totals, thread)                 forget
    keep   (totals, tile, index, value)     a value of a tile of 16 columns: index is row * 16 + column
    end    (totals, thread, bests, count)   bests: address of [M, blocks, 2] uint32
    """

    begin: Any
    keep: Any
    end: Any


def make_argmax(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Best:
    """How a GEMM keeps its rows' best pairs after all else that a block has in shared memory."""
    best = shape.best
    if best is None:
        return Best(_nothing_begins, _nothing_is_kept, _nothing_is_left)
    blocks, limit, rounds, threads = best.blocks, best.limit, plan.rounds, plan.finishing * 32
    # from the sums, which every function is given the address of
    begins_at = plan.shared_bytes - plan.best_bytes - plan.totals_at

    @device_function
    def place_of(totals: Any, index: Any) -> Any:
        return uint32(totals + uint32(begins_at) + index * uint32(8))

    @device_function
    def begin(totals: Any, thread: Any) -> None:
        for turn in range(rounds):
            ptx.store_shared_64(place_of(totals, uint32(thread + uint32(turn * threads))), uint32(0), uint32(0))

    @device_function
    def keep(totals: Any, tile: Any, index: Any, value: Any) -> None:
        place, bits = place_of(totals, index), ptx.bits_of_float(value)
        key = uint32(BROKEN) if uint32(bits & uint32(MAGNITUDE)) > uint32(limit) else order_key(bits)
        if key > ptx.load_shared_u32(place):  # tiles come in order: of equal ones the first stays
            ptx.store_shared_64(place, key, uint32(tile))

    @device_function
    def end(totals: Any, thread: Any, bests: Any, count: Any) -> None:
        for turn in range(rounds):
            index = uint32(thread + uint32(turn * threads))
            row, column, place = uint32(index >> uint32(4)), uint32(index & uint32(15)), place_of(totals, index)
            key, tile = ptx.load_shared_u32(place), ptx.load_shared_u32(uint32(place + uint32(4)))
            low = uint32(uint32(LARGEST_WORD) - (tile * uint32(16) + column)) if key > uint32(0) else uint32(0)
            for distance in (8, 4, 2, 1):
                its_key = uint32(cuda.shfl_xor_sync(EVERY_LANE, int32(key), distance))
                its_low = uint32(cuda.shfl_xor_sync(EVERY_LANE, int32(low), distance))
                key, low = greater(key, low, its_key, its_low)
            if column == uint32(0) and int64(row) < count:
                block = int64(cuda.blockIdx.x)
                while block < blocks:  # places without a block hold no number
                    ptx.store_global_64(bests + (int64(row) * blocks + block) * 8, key, low)
                    key, low = uint32(0), uint32(0)
                    block += int64(cuda.gridDim.x)

    return Best(begin, keep, end)


@device_function
def _nothing_begins(_totals: Any, _thread: Any) -> None:
    pass


@device_function
def _nothing_is_kept(_totals: Any, _tile: Any, _index: Any, _value: Any) -> None:
    pass


@device_function
def _nothing_is_left(_totals: Any, _thread: Any, _bests: Any, _count: Any) -> None:
    pass
