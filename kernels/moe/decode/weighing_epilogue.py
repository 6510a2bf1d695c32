"""This module has the epilogue of an MoE layer's second GEMM, which multiplies values by their experts' weights."""

from typing import Any

from lowlat.kernels.moe.decode.expert_list import make_chosen, make_expert_of, make_pair_of, make_share_of
from lowlat.kernels.moe.decode.gemm import Epilogue, make_total
from lowlat.kernels.moe.plan import PAD, ExpertPlan, ExpertShape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, uint32

__all__ = ["make_weighing"]


def make_weighing(shape: ExpertShape, plan: ExpertPlan) -> Epilogue:
    """The epilogue of down's values: outputs [M, k, N] float32 times their shares, which other blocks may await.

    Of parts of K each has an output, [M, k, P, N], the first with the bias.
    """
    rows, expert_of, pair_of, total_of = shape.rows, make_expert_of(plan), make_pair_of(plan), make_total(plan)
    share_of, padded = make_share_of(plan), shape.padded_rows
    biased, scaled, outputs, in_parts = shape.biased, shape.format.row_scales, shape.outputs, shape.parts is not None
    sum_bytes = plan.sum_bytes

    @device_function
    def finish_parts(area: Any, out: Any, pair: Any, row: Any, place: Any, value: Any, held: Any) -> None:
        """A value of each part, of which a warp each has the sum."""
        source = uint32(area + (place * uint32(PAD) + value) * uint32(4))
        for part in range(outputs):
            total = ptx.load_shared_f32(uint32(source + uint32(part * sum_bytes)))
            if scaled:
                total = ptx.mul_rn(total, ptx.float_of_bits(held[2]))
            if biased and part == 0:
                total = ptx.add_rn(total, ptx.float_of_bits(held[0] << uint32(16)))
            at = out + ((int64(pair) * outputs + part) * rows + row) * 4
            ptx.store_relaxed_gpu_f32(at, ptx.mul_rn(ptx.float_of_bits(held[1]), total))

    @device_function
    def begin(lists: Any, beside: Any, unit: Any, tile: Any, place: Any, value: Any) -> Any:
        bias, scales = beside
        row, own, scale = int64(tile) * 16 + int64(value), uint32(0), uint32(0)
        if row < rows:
            expert = int64(expert_of(lists, unit))
            if biased:
                own = ptx.load_global_u16(bias + (expert * rows + row) * 2)
            if scaled:
                scale = ptx.bits_of_float(ptx.load_global_f32(scales + (expert * padded + row) * 4))
        return own, ptx.bits_of_float(share_of(lists, pair_of(lists, unit, place))), scale, uint32(0)

    @device_function
    def finish(
        lists: Any, area: Any, out: Any, unit: Any, tile: Any, place: Any, value: Any, held: Any, _limit: Any,
        _alpha: Any,
    ) -> None:  # fmt: skip
        row = int64(tile) * 16 + int64(value)
        if row < rows:
            pair = pair_of(lists, unit, place)
            if in_parts:
                finish_parts(area, out, pair, row, place, value, held)
                return
            total = total_of(area, place, value)
            if scaled:
                total = ptx.mul_rn(total, ptx.float_of_bits(held[2]))
            if biased:
                total = ptx.add_rn(total, ptx.float_of_bits(held[0] << uint32(16)))
            at = out + (int64(pair) * rows + row) * 4
            ptx.store_relaxed_gpu_f32(at, ptx.mul_rn(ptx.float_of_bits(held[1]), total))

    return Epilogue(begin, finish, _make_clear(shape, plan.finishing * 32))


def _make_clear(shape: ExpertShape, threads: int) -> Any:
    """A device function that stores zeros for dead pairs, each by one block; none for parts, which are not read."""
    rows, chosen = shape.rows, make_chosen()
    if shape.parts is not None:

        @device_function
        def nothing(_lists: Any, _out: Any, _count: Any, _thread: Any) -> None:
            pass

        return nothing

    @device_function
    def clear(lists: Any, out: Any, count: Any, thread: Any) -> None:
        for pair in range(uint32(cuda.blockIdx.x), uint32(count), uint32(cuda.gridDim.x)):
            if not chosen(lists, pair):
                for row in range(thread, uint32(rows), uint32(threads)):
                    ptx.store_relaxed_gpu_f32(out + (int64(pair) * rows + int64(row)) * 4, float32(0))

    return clear
