"""This module has the common parts of a decode GEMM's epilogues: their functions, a value's sum, the scales of rows."""

from dataclasses import dataclass
from typing import Any

from lowlat.kernels.formats.fragment import share_of
from lowlat.kernels.gemm.decode.plan import PAD, DecodeGemmPlan, DecodeGemmShape
from lowlat.kernels.gemm.k_parts import KParts, make_tree
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, int64, uint32

__all__ = ["Epilogue", "make_scales", "make_total", "make_value"]


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of a tile: the most values of a row, and device functions for one value.

    locate   (tile, index, count) -> row, column, and whether the value exists
    begin    starts the loads of operands besides the sums, without waiting
    nothing  returns the same as `begin`, without loading
    finish   adds the warps' sums, applies the epilogue, and stores the value
    """

    values: int
    locate: Any
    begin: Any
    nothing: Any
    finish: Any


def make_total(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Any:
    """A function: the sum of the warps' partial sums of a value, in the order of warps."""
    sum_bytes, share, partials = plan.sum_bytes, share_of(shape.weights), plan.partials
    is_share, whole = share != 1, 1 / share

    @device_function
    def total_of(area: Any, row: Any, column: Any) -> Any:
        place = area + (row * uint32(PAD) + column) * uint32(4)
        total = ptx.load_shared_f32(place)
        for warp in range(1, partials):
            total = ptx.add_rn(total, ptx.load_shared_f32(place + uint32(warp * sum_bytes)))
        if is_share:
            total = ptx.mul_rn(total, float32(whole))
        return total

    return total_of


def make_value(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Any:
    """A function: a value of the output, which is its sum times the scale, plus the bias, each step rounded.

    With parts of K, each part is scaled by itself, and the first has the bias, before they are added as a tree.
    """
    if shape.parts is not None:
        return _make_value_of_parts(shape, plan, shape.parts)
    total_of, scaled, has_bias = make_total(shape, plan), shape.weights.row_scales, shape.bias

    @device_function
    def value_of(area: Any, row: Any, column: Any, scale: Any, own: Any) -> Any:
        value = total_of(area, row, column)
        if scaled:
            value = ptx.mul_rn(value, scale)
        if has_bias:
            value = ptx.add_rn(value, own)
        return value

    return value_of


def _make_value_of_parts(shape: DecodeGemmShape, plan: DecodeGemmPlan, parts: KParts) -> Any:
    """The value for a set of warps, each of which has one part of K."""
    sum_bytes, share = plan.sum_bytes, share_of(shape.weights)
    is_share, whole = share != 1, 1 / share
    scaled, has_bias = shape.weights.row_scales, shape.bias

    def make_part(part: int) -> Any:
        @device_function
        def load(place: Any, given: Any) -> Any:
            scale, own = given
            value = ptx.load_shared_f32(uint32(place + uint32(part * sum_bytes)))
            if is_share:
                value = ptx.mul_rn(value, float32(whole))
            if scaled:
                value = ptx.mul_rn(value, scale)
            if has_bias and part == 0:
                value = ptx.add_rn(value, own)
            return value

        return load

    add_up = make_tree(make_part, 0, parts.count)

    @device_function
    def value_of_parts(area: Any, row: Any, column: Any, scale: Any, own: Any) -> Any:
        return add_up(uint32(area + (row * uint32(PAD) + column) * uint32(4)), (scale, own))

    return value_of_parts


def make_scales(shape: DecodeGemmShape) -> Any:
    """A function: the scales of a value's weight row, and of the row 8 below; 1 if rows have none."""
    scaled = shape.weights.row_scales

    @device_function
    def load_scales(scales: Any, tile: Any, column: Any, paired: Any) -> Any:
        """Load the scales of a value's weight row and, if paired, of the row 8 below."""
        own, other = float32(1), float32(1)
        if scaled:
            place = scales + (tile * 16 + int64(column)) * 4
            own = ptx.load_global_f32(place)
            if paired:
                other = ptx.load_global_f32(place + 32)
        return own, other

    return load_scales
