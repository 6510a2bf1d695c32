"""Epilogues of a decode GEMM: bias, residual or a block's row, activation, or rotation and the write to the cache; and
the warps that finish tiles by them."""

from typing import Any

from lowlat.kernels.common.activation import gate_times, gated_activation, gelu_gate_times, soft_capped
from lowlat.kernels.common.kv_codes import encode, load_scale
from lowlat.kernels.common.pipeline import Pipeline
from lowlat.kernels.gemm.decode.all_reduce_epilogue import make_all_reduce_epilogue
from lowlat.kernels.gemm.decode.epilogue_parts import Epilogue, make_scales, make_total, make_value
from lowlat.kernels.gemm.decode.partial_argmax import make_argmax
from lowlat.kernels.gemm.decode.plan import (
    ADD,
    ALL_REDUCE,
    FLOAT32,
    GATE,
    GELU_GATE,
    ROTATE,
    SILU,
    WARPS,
    BlockShape,
    DecodeGemmPlan,
    DecodeGemmShape,
)
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, uint32

__all__ = ["make_finishing"]


def make_finishing(shape: DecodeGemmShape, plan: DecodeGemmPlan, pipeline: Pipeline) -> Any:
    """A function of the warps that finish: finish all tiles of a block, as the others hand them over."""
    tiles, best = plan.groups(shape.width), make_argmax(shape, plan)
    if shape.epilogue == ALL_REDUCE:
        epilogue = make_all_reduce_epilogue(shape, plan)
    elif shape.epilogue == ROTATE:
        epilogue = _make_rotated_epilogue(shape, plan)
    else:
        epilogue = _make_epilogue(shape, plan, best.keep)
    weight_tiles, area_bytes, finishing = plan.weight_tiles, WARPS * plan.sum_bytes, plan.finishing * 32
    sets, set_bytes = plan.sets, 0 if shape.parts is None else shape.parts.count * plan.sum_bytes
    rounds = -(-plan.row_tiles * plan.columns * epilogue.values // finishing)
    begin_best, end_best = best.begin, best.end
    await_full, release, after = pipeline.await_full, pipeline.release, pipeline.after
    locate, begin, nothing, end = epilogue.locate, epilogue.begin, epilogue.nothing, epilogue.finish

    @device_function
    def finish(
        totals: Any, barriers: Any, thread: Any, row_live: Any, bias: Any, residual: Any, out: Any, bests: Any,
        count: Any, beside: Any, scales: Any,
    ) -> None:  # fmt: skip
        """next to: what ROTATE takes, or EXCHANGE."""
        thread = uint32(thread - uint32(WARPS * 32))
        begin_best(totals, thread)
        tile, area, parity = int64(cuda.blockIdx.x), uint32(0), uint32(0)
        while tile < tiles:
            for part in range(weight_tiles):
                for own in range(sets):
                    number = (tile * weight_tiles + part) * sets + own
                    source = totals + area * uint32(area_bytes) + uint32(own * set_bytes)
                    for turn in range(rounds):
                        row, column, wanted = locate(number, uint32(thread + uint32(turn * finishing)), count)
                        loaded = nothing()
                        if wanted:
                            loaded = begin(number, row, column, row_live, bias, residual, out, beside, scales)
                        if own == 0 and turn == 0:
                            await_full(barriers, area, parity)
                        if wanted:
                            end(source, number, row, column, loaded, out, totals, beside)
                release(barriers, area, uint32(thread & uint32(31)))
                area, parity = after(area, parity)
            tile += int64(cuda.gridDim.x)
        end_best(totals, thread, bests, count)

    return finish


def _make_epilogue(shape: DecodeGemmShape, plan: DecodeGemmPlan, keep_argmax: Any) -> Epilogue:
    """Bias, residual, activation or the gate of rows; in float32, or rounded to bf16.

    keep_argmax  `Best.keep`
    With `shape.scattered` the address of `columns` takes the residual's place, with `shape.block` that of the
    first block's row.
    """
    width, epilogue, scattered = shape.width, shape.epilogue, shape.scattered
    has_block, block = shape.block is not None, shape.block or BlockShape(1, 1)
    rows_added_to, block_rows = block.wide, block.rows
    has_bias, live, silu, add = shape.bias, shape.live, epilogue == SILU, epilogue == ADD
    gates, pitch = epilogue in (GATE, GELU_GATE), shape.pitch
    activated, gated = gated_activation(shape.activation), gelu_gate_times if epilogue == GELU_GATE else gate_times
    caps, cap = shape.softcap is not None, shape.softcap or 1.0
    wide, scaled = epilogue == FLOAT32, shape.weights.row_scales
    columns = 8 if silu else 16
    out_width = width // 2 if silu else width
    total_of, load_scales, value_of = make_total(shape, plan), make_scales(shape), make_value(shape, plan)

    @device_function
    def locate(tile: Any, index: Any, count: Any) -> Any:
        row, column = uint32(index // uint32(columns)), uint32(index % uint32(columns))
        return row, column, int64(row) < count and tile * 16 + int64(column) < width

    @device_function
    def offset_of(tile: Any, row: Any, column: Any) -> Any:
        return int64(row) * out_width + tile * columns + int64(column)

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
        if (add or gates) and pitch == 0:
            other = ptx.load_global_bf16(residual + offset_of(tile, row, column) * 2)
        if pitch > 0:
            other = ptx.load_global_bf16(residual + (int64(row) * pitch + tile * 16 + int64(column)) * 2)
        if scattered:  # the original column of the run of eight, in place of `alive`, which is of SILU
            run = tile * 2 + int64(uint32(column >> uint32(3)))
            alive = uint32(ptx.load_global_i32(residual + run * 4))
        if has_block:
            added = int64(uint32(row // uint32(rows_added_to)) * uint32(block_rows))
            other = ptx.load_global_f32(residual + (added * width + tile * 16 + int64(column)) * 4)
        if live:
            alive = ptx.load_global_u8(row_live + int64(row))
        return own, other, alive, scale, other_scale

    @device_function
    def finish(area: Any, tile: Any, row: Any, column: Any, loaded: Any, out: Any, totals: Any, _beside: Any) -> None:
        own, other, alive, scale, other_scale = loaded
        at, value = offset_of(tile, row, column), value_of(area, row, column, scale, own)
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
        if add or has_block:
            value = ptx.add_rn(value, other)
        if gates:
            value = gated(other, value)
        if live and alive == uint32(0):
            value = float32(0)
        if wide:
            ptx.store_global_f32(out + at * 4, value)
            keep_argmax(totals, tile, uint32(row * uint32(columns) + column), value)
        else:
            ptx.store_global_u16(out + at * 2, ptx.bf16_bits(value))

    return Epilogue(columns, locate, begin, nothing, finish)


def _make_rotated_epilogue(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Epilogue:
    """Rotate queries and keys, whose tiles hold 8 dimensions and their partners, and store all parts.

    Queries go to `out`, keys and values of live rows to the cache. Products and sums are rounded one by one, as the
    reference does.
    """
    heads, total_of, has_bias, scaled = shape.heads, make_total(shape, plan), shape.bias, shape.weights.row_scales
    if heads is None:
        raise ValueError("a GEMM with rotation needs its heads")
    queries, groups, dim, coded = heads.queries, heads.groups, heads.dim, heads.coded
    tiles, half, item, store = dim // 16, dim // 2, 1 if coded else 2, _make_store(coded)  # item: of the cache
    cache_row, load_scales = _make_cache_row(shape), make_scales(shape)

    @device_function
    def locate(tile: Any, index: Any, count: Any) -> Any:
        head = int32(uint32(tile) // uint32(tiles))
        columns = uint32(8) if head < queries + groups else uint32(16)
        row = uint32(index // columns)
        return row, uint32(index - row * columns), int64(row) < count and head < queries + 2 * groups

    @device_function
    def begin(
        tile: Any, row: Any, column: Any, row_live: Any, bias: Any, _residual: Any, out: Any, rotation: Any,
        scales: Any,
    ) -> Any:  # fmt: skip
        """Bias of a value and its partner, cosine, sine, where the value goes (0: nowhere), scales, the cache's."""
        positions, cosines, sines, k_cache, v_cache, table, slots, write_lens, offsets, kv_scales, first_row = rotation
        head = int32(uint32(tile) // uint32(tiles))
        inner = int32(int32(tile) - head * tiles)
        own, partner, c, s, code_scale = float32(0), float32(0), float32(0), float32(0), float32(1)
        if coded and head >= queries:
            code_scale = load_scale(kv_scales, head - queries)  # values' heads stand after keys', as scales do
        scale, other_scale = load_scales(scales, tile, column, head < queries + groups)
        if has_bias:
            own = ptx.load_global_bf16(bias + (tile * 16 + int64(column)) * 2)
        if head < queries + groups:
            if has_bias:
                partner = ptx.load_global_bf16(bias + (tile * 16 + int64(column)) * 2 + 16)
            at = int64(inner * 8) + int64(column)
            angle = int64(ptx.load_global_i32(positions + int64(row) * 4)) * half + at
            c, s = ptx.load_global_f32(cosines + angle * 4), ptx.load_global_f32(sines + angle * 4)
            target = out + ((int64(row) * queries + int64(head)) * dim + at) * 2
            if head >= queries:
                cached = cache_row(row, head - queries, row_live, table, slots, write_lens, offsets, first_row)
                target = k_cache + (cached * dim + at) * item if cached >= 0 else int64(0)
        else:
            cached = cache_row(row, head - queries - groups, row_live, table, slots, write_lens, offsets, first_row)
            at = int64(inner * 16) + int64(column)
            target = v_cache + (cached * dim + at) * item if cached >= 0 else int64(0)
        return own, partner, c, s, target, scale, other_scale, code_scale

    @device_function
    def finish(area: Any, tile: Any, row: Any, column: Any, loaded: Any, _out: Any, _totals: Any, _beside: Any) -> None:
        own, partner_bias, c, s, target, scale, other_scale, code_scale = loaded
        if target == int64(0):
            return
        value = total_of(area, row, column)
        if scaled:
            value = ptx.mul_rn(value, scale)
        if has_bias:
            value = ptx.add_rn(value, own)
        head = int32(uint32(tile) // uint32(tiles))
        if head < queries + groups:
            partner = total_of(area, row, column + uint32(8))
            if scaled:
                partner = ptx.mul_rn(partner, other_scale)
            if has_bias:
                partner = ptx.add_rn(partner, partner_bias)
            low = ptx.add_rn(ptx.mul_rn(value, c), -ptx.mul_rn(partner, s))
            high = ptx.add_rn(ptx.mul_rn(partner, c), ptx.mul_rn(value, s))
            if head >= queries:
                store(target, low, code_scale)
                store(target + half * item, high, code_scale)
            else:
                ptx.store_global_u16(target, ptx.bf16_bits(low))
                ptx.store_global_u16(target + half * 2, ptx.bf16_bits(high))
        else:
            store(target, value, code_scale)

    return Epilogue(16, locate, begin, _nothing_rotated, finish)


@device_function
def _nothing_rotated() -> Any:
    return float32(0), float32(0), float32(0), float32(0), int64(0), float32(1), float32(1), float32(1)


def _make_store(coded: bool) -> Any:
    """A function: a number of a key or a value goes to the cache, in bf16 or as a code."""

    @device_function
    def store(target: Any, value: Any, code_scale: Any) -> None:
        if coded:
            ptx.store_global_u8(target, encode(value, code_scale))
        else:
            ptx.store_global_u16(target, ptx.bf16_bits(value))

    return store


def _make_cache_row(shape: DecodeGemmShape) -> Any:
    """A function: the row of the cache that a row's key or value of a head goes to; -1 for a dead row."""
    heads = shape.heads
    groups, rows, block, width = (0, 1, 1, 0) if heads is None else (
        heads.groups, heads.rows, max(heads.block_size, 1), heads.table_width
    )  # fmt: skip

    @device_function
    def cache_row(
        row: Any, head: Any, row_live: Any, table: Any, slots: Any, write_lens: Any, offsets: Any, first_row: Any
    ) -> Any:
        if ptx.load_global_u8(row_live + int64(row)) == uint32(0):
            return int64(-1)
        number = uint32(int64(row) + first_row)
        entry = number // uint32(rows)
        inside = number - entry * uint32(rows)
        slot = ptx.load_global_i32(slots + int64(entry) * 4)
        position = uint32(
            ptx.load_global_i32(write_lens + int64(entry) * 4) + ptx.load_global_i32(offsets + int64(inside) * 4)
        )
        page = position // uint32(block)
        number = ptx.load_global_i32(table + (int64(slot) * width + int64(page)) * 4)
        place = position - page * uint32(block)
        return (int64(number) * groups + int64(head)) * block + int64(place)

    return cache_row
