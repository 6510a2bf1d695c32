"""The epilogue of the q, k, v GEMM applies RoPE, and writes keys and values to the cache."""

from typing import Any

from lowlat.kernels.common.kv_codes import encode, load_scale
from lowlat.kernels.gemm.decode.epilogue_parts import Epilogue, make_scales, make_total
from lowlat.kernels.gemm.decode.plan import DecodeGemmPlan, DecodeGemmShape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, int32, int64, uint32

__all__ = ["make_rotated_epilogue"]


def make_rotated_epilogue(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Epilogue:
    """Apply RoPE to queries and keys, whose tiles hold 8 dimensions and their partners, and store all heads.

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
        """Load the biases of a value and its partner, cosine, sine, destination (0: none), scales, and the cache's."""
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
    """A function that stores a number of a key or a value in the cache, in bf16 or as a code."""

    @device_function
    def store(target: Any, value: Any, code_scale: Any) -> None:
        if coded:
            ptx.store_global_u8(target, encode(value, code_scale))
        else:
            ptx.store_global_u16(target, ptx.bf16_bits(value))

    return store


def _make_cache_row(shape: DecodeGemmShape) -> Any:
    """A function: the cache's row for a row's key or value of a head; -1 for a dead row."""
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
