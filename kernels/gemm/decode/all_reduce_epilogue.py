"""The epilogue of a decode GEMM whose inputs are cut for ranks: sums are pushed to peers as tiles are finished, and
their total is added to the residual stream.

A tile is awaited by the warps that finish it, while others multiply on: but for a block's last tiles an all-reduce
hides after the weights. A block finishes its tiles in ascending order, on all ranks: so a peer that a wait for a
tile depends on can itself wait for earlier tiles alone, however grids are cut.
"""

from typing import Any

from lowlat.kernels.collectives.peers.rows import make_add_value, make_begin
from lowlat.kernels.gemm.decode.epilogue_parts import Epilogue, make_scales, make_value
from lowlat.kernels.gemm.decode.plan import DecodeGemmPlan, DecodeGemmShape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, int64, uint32

__all__ = ["make_all_reduce_epilogue"]


def make_all_reduce_epilogue(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Epilogue:
    """Bias, the sum over ranks, and the residual, rounded to bf16; all but the sum as `ADD` has it."""
    width, has_bias = shape.width, shape.bias
    value_of, load_scales = make_value(shape, plan), make_scales(shape)
    begin_all_reduce, add_value = make_begin(shape.ranks, width), make_add_value(shape.ranks)

    @device_function
    def locate(tile: Any, index: Any, count: Any) -> Any:
        row, column = uint32(index >> uint32(4)), uint32(index & uint32(15))
        return row, column, int64(row) < count and tile * 16 + int64(column) < width

    @device_function
    def nothing() -> Any:
        return float32(0), float32(0), float32(1), (int64(0), uint32(0), uint32(0), int64(0), int64(0))

    @device_function
    def begin(
        tile: Any, row: Any, column: Any, _row_live: Any, bias: Any, residual: Any, _out: Any, beside: Any,
        scales: Any,
    ) -> Any:  # fmt: skip
        own, at = float32(0), tile * 16 + int64(column)
        scale, _ = load_scales(scales, tile, column, False)
        if has_bias:
            own = ptx.load_global_bf16(bias + at * 2)
        begun = begin_all_reduce(beside, row, at)
        return own, ptx.load_global_bf16(residual + (int64(row) * width + at) * 2), scale, begun

    @device_function
    def finish(area: Any, tile: Any, row: Any, column: Any, loaded: Any, out: Any, _totals: Any, beside: Any) -> None:
        own, old, scale, begun = loaded
        value, at = value_of(area, row, column, scale, own), tile * 16 + int64(column)
        value = ptx.add_rn(add_value(value, beside, begun), old)
        ptx.store_global_u16(out + (int64(row) * width + at) * 2, ptx.bf16_bits(value))

    return Epilogue(16, locate, begin, nothing, finish)
