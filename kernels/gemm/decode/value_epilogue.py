"""This module composes the epilogues of a decode GEMM that store one value for each row and column.

A value is its sum with scale and bias, or an activated gate times its up. It may have a softcap. It may be combined
with an operand that was loaded ahead: a residual, rows that it gates, or a block's row. It is zero in dead rows. It is
stored in bf16, or in float32 with the partial argmax of its row. A further operand is an `Operand` and an entry in
OPERANDS.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lowlat.kernels.common.activation import gate_times, gated_activation, gelu_gate_times, soft_capped
from lowlat.kernels.gemm.decode.epilogue_parts import Epilogue, make_scales, make_total, make_value
from lowlat.kernels.gemm.decode.plan import (
    ADD,
    FLOAT32,
    GATE,
    GELU_GATE,
    SILU,
    BlockShape,
    DecodeGemmPlan,
    DecodeGemmShape,
)
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, int64, uint32

__all__ = ["OPERANDS", "Operand", "make_value_epilogue"]


@dataclass(frozen=True)
class Operand:
    """An operand that is combined with a value of the product.

    load  (rows, tile, row, column) -> float32, from the address of the operand's rows
    join  (other, value) -> float32, rounded as in the operation's reference
    """

    load: Any
    join: Any


def _residual(shape: DecodeGemmShape) -> Operand:
    return Operand(_make_load_rows(shape.width), _make_sum())


def _gated_rows(shape: DecodeGemmShape) -> Operand:
    return Operand(_make_load_rows(shape.width), gate_times)


def _gated_inputs(shape: DecodeGemmShape) -> Operand:
    return Operand(_make_load_rows(shape.pitch or shape.width), gelu_gate_times)


def _block_row(shape: DecodeGemmShape) -> Operand:
    """The operand of one row of each slot's block, in float32, which is added to all of the slot's rows."""
    block, width = shape.block or BlockShape(1, 1), shape.width
    rows_added_to, block_rows = block.wide, block.rows

    @device_function
    def load(rows: Any, tile: Any, row: Any, column: Any) -> Any:
        added = int64(uint32(row // uint32(rows_added_to)) * uint32(block_rows))
        return ptx.load_global_f32(rows + (added * width + tile * 16 + int64(column)) * 4)

    return Operand(load, _make_sum())


OPERANDS: Mapping[str, Callable[[DecodeGemmShape], Operand]] = {
    ADD: _residual,
    GATE: _gated_rows,
    GELU_GATE: _gated_inputs,
}


def _make_load_rows(pitch: int) -> Any:
    """A function that loads a number of bf16 rows with a stride of `pitch` numbers."""

    @device_function
    def load(rows: Any, tile: Any, row: Any, column: Any) -> Any:
        return ptx.load_global_bf16(rows + (int64(row) * pitch + tile * 16 + int64(column)) * 2)

    return load


def _make_sum() -> Any:
    @device_function
    def join(other: Any, value: Any) -> Any:
        return ptx.add_rn(value, other)

    return join


def _operand(shape: DecodeGemmShape) -> Operand | None:
    """The operand of a shape's epilogue, if it has one; an activation's up is part of the product."""
    make = _block_row if shape.block is not None else OPERANDS.get(shape.epilogue)
    return None if make is None else make(shape)


def make_value_epilogue(shape: DecodeGemmShape, plan: DecodeGemmPlan, keep_argmax: Any) -> Epilogue:
    """The epilogue of a shape without rotation and all-reduce.

    keep_argmax  `Best.keep`
    With `shape.scattered` the address of `columns` takes the place of an operand's rows.
    """
    width, scattered, has_bias, live = shape.width, shape.scattered, shape.bias, shape.live
    silu, wide, scaled = shape.epilogue == SILU, shape.epilogue == FLOAT32, shape.weights.row_scales
    columns, out_width = (8, width // 2) if silu else (16, width)
    activated, caps, cap = gated_activation(shape.activation), shape.softcap is not None, shape.softcap or 1.0
    total_of, load_scales, value_of = make_total(shape, plan), make_scales(shape), make_value(shape, plan)
    found = _operand(shape)
    operand, joins = found or _residual(shape), found is not None  # one that does not join is never called
    load_other, join = operand.load, operand.join

    @device_function
    def locate(tile: Any, index: Any, count: Any) -> Any:
        row, column = uint32(index // uint32(columns)), uint32(index % uint32(columns))
        return row, column, int64(row) < count and tile * 16 + int64(column) < width

    @device_function
    def nothing() -> Any:
        return float32(0), float32(0), uint32(1), float32(1), float32(1)

    @device_function
    def begin(
        tile: Any, row: Any, column: Any, row_live: Any, bias: Any, residual: Any, _out: Any, _rotation: Any,
        scales: Any,
    ) -> Any:  # fmt: skip
        own, other, alive = float32(0), float32(0), uint32(1)
        scale, other_scale = load_scales(scales, tile, column, silu)
        if has_bias:
            own = ptx.load_global_bf16(bias + (tile * 16 + int64(column)) * 2)
        if has_bias and silu:
            other = ptx.load_global_bf16(bias + (tile * 16 + int64(column)) * 2 + 16)
        if joins:
            other = load_other(residual, tile, row, column)
        if scattered:  # the original column of the run of eight, in place of `alive`, which is of others
            run = tile * 2 + int64(uint32(column >> uint32(3)))
            alive = uint32(ptx.load_global_i32(residual + run * 4))
        if live:
            alive = ptx.load_global_u8(row_live + int64(row))
        return own, other, alive, scale, other_scale

    @device_function
    def finish(area: Any, tile: Any, row: Any, column: Any, loaded: Any, out: Any, totals: Any, _beside: Any) -> None:
        own, other, alive, scale, other_scale = loaded
        at, value = int64(row) * out_width + tile * columns + int64(column), value_of(area, row, column, scale, own)
        if scattered:
            at = int64(row) * out_width + int64(uint32(alive + (column & uint32(7))))
        if silu:
            up = total_of(area, row, column + uint32(8))
            if scaled:
                up = ptx.mul_rn(up, other_scale)
            if has_bias:
                up = ptx.add_rn(up, other)
            value = activated(value, up)
        if caps:
            value = soft_capped(value, cap)
        if joins:
            value = join(other, value)
        if live and alive == uint32(0):
            value = float32(0)
        if wide:
            ptx.store_global_f32(out + at * 4, value)
            keep_argmax(totals, tile, uint32(row * uint32(columns) + column), value)
        else:
            ptx.store_global_u16(out + at * 2, ptx.bf16_bits(value))

    return Epilogue(columns, locate, begin, nothing, finish)
