"""This module has the epilogue of an MoE layer's first GEMM: SwiGLU, clamped or plain, or GELU, of gates and ups."""

from typing import Any

from lowlat.kernels.common.activation import clamped_swiglu, gated_activation
from lowlat.kernels.moe.decode.expert_list import make_chosen, make_expert_of, make_pair_of
from lowlat.kernels.moe.decode.gemm import Epilogue, make_total
from lowlat.kernels.moe.plan import ExpertPlan, ExpertShape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, uint32

__all__ = ["make_swiglu"]


def make_swiglu(shape: ExpertShape, plan: ExpertPlan) -> Epilogue:
    """The epilogue of gate and up values: activations [M, k, I] bf16, which other blocks may await."""
    rows, expert_of, pair_of, total_of = shape.rows, make_expert_of(plan), make_pair_of(plan), make_total(plan)
    width, padded = rows // 2, shape.padded_rows
    biased, scaled, clamped = shape.biased, shape.format.row_scales, shape.clamped

    plain = gated_activation(shape.activation)

    @device_function
    def begin(lists: Any, beside: Any, unit: Any, tile: Any, _place: Any, value: Any) -> Any:
        bias, scales = beside
        expert, row = int64(expert_of(lists, unit)), int64(tile) * 16 + int64(value)
        first, second, gate, up = uint32(0), uint32(0), uint32(0), uint32(0)
        if biased:
            at = bias + (expert * rows + row) * 2
            first, second = ptx.load_global_u16(at), ptx.load_global_u16(at + 16)
        if scaled:
            at = scales + (expert * padded + row) * 4
            gate, up = ptx.bits_of_float(ptx.load_global_f32(at)), ptx.bits_of_float(ptx.load_global_f32(at + 32))
        return first, second, gate, up

    @device_function
    def finish(
        lists: Any, area: Any, out: Any, unit: Any, tile: Any, place: Any, value: Any, held: Any, limit: Any, alpha: Any
    ) -> None:
        gate, up = total_of(area, place, value), total_of(area, place, value + uint32(8))
        if scaled:
            gate, up = ptx.mul_rn(gate, ptx.float_of_bits(held[2])), ptx.mul_rn(up, ptx.float_of_bits(held[3]))
        if biased:
            gate = ptx.add_rn(gate, ptx.float_of_bits(held[0] << uint32(16)))
            up = ptx.add_rn(up, ptx.float_of_bits(held[1] << uint32(16)))
        pair = pair_of(lists, unit, place)
        at = int64(pair) * width + int64(tile) * 8 + int64(value)
        activated = clamped_swiglu(gate, up, limit, alpha) if clamped else plain(gate, up)
        ptx.store_relaxed_gpu_u16(out + at * 2, ptx.bf16_bits(activated))

    return Epilogue(begin, finish, _make_clear(shape, plan.finishing * 32))


def _make_clear(shape: ExpertShape, threads: int) -> Any:
    """A device function that stores zeros for dead pairs, each by one block; no GEMM reads them."""
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
