"""The clamped SwiGLU of experts' gate and up values, as they come out of the first GEMM of a mixture."""

from typing import Any

from lowlat.kernels.common.activation import clamped_swiglu
from lowlat.kernels.moe.decode.expert_list import make_chosen, make_expert_of, make_pair_of
from lowlat.kernels.moe.decode.gemm import Epilogue, make_total
from lowlat.kernels.moe.plan import ExpertPlan, ExpertShape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, uint32

__all__ = ["make_swiglu"]


def make_swiglu(shape: ExpertShape, plan: ExpertPlan) -> Epilogue:
    """The epilogue of gate and up values: activations [M, R, I] bf16, which other blocks may await."""
    rows, expert_of, pair_of, total_of = shape.rows, make_expert_of(plan), make_pair_of(plan), make_total(plan)
    width = rows // 2

    @device_function
    def begin(lists: Any, bias: Any, unit: Any, tile: Any, _place: Any, value: Any) -> Any:
        at = bias + (int64(expert_of(lists, unit)) * rows + int64(tile) * 16 + int64(value)) * 2
        return ptx.load_global_u16(at), ptx.load_global_u16(at + 16)

    @device_function
    def finish(
        lists: Any, area: Any, out: Any, unit: Any, tile: Any, place: Any, value: Any, first: Any, second: Any,
        limit: Any, alpha: Any,
    ) -> None:  # fmt: skip
        gate = ptx.add_rn(total_of(area, place, value), ptx.float_of_bits(first << uint32(16)))
        up = ptx.add_rn(total_of(area, place, value + uint32(8)), ptx.float_of_bits(second << uint32(16)))
        pair = pair_of(lists, unit, place)
        at = int64(pair) * width + int64(tile) * 8 + int64(value)
        ptx.store_relaxed_gpu_u16(out + at * 2, ptx.bf16_bits(clamped_swiglu(gate, up, limit, alpha)))

    return Epilogue(begin, finish, _make_clear(shape, plan.finishing * 32))


def _make_clear(shape: ExpertShape, threads: int) -> Any:
    """A function: store zeros for the dead pairs, each from one block; no GEMM reads them."""
    pieces, chosen = shape.rows // 16, make_chosen()

    @device_function
    def clear(lists: Any, out: Any, count: Any, thread: Any) -> None:
        zero = uint32(0)
        for pair in range(uint32(cuda.blockIdx.x), uint32(count), uint32(cuda.gridDim.x)):
            if not chosen(lists, pair):
                for piece in range(thread, uint32(pieces), uint32(threads)):
                    at = int64(pair) * pieces + int64(piece)
                    ptx.store_global_128(out + at * 16, zero, zero, zero, zero)

    return clear
