"""What becomes of a tile's sums: a product's bias, residual, activation, or rotation and the write to the cache."""

from typing import Any

from lowlat.kernels import ptx
from lowlat.kernels.activation import silu_times
from lowlat.kernels.numba_cuda import cuda, device_function, float32, int32, int64, uint32
from lowlat.kernels.thin_matmul_plan import ADD, FLOAT32, PAD, SILU, THREADS, WARPS, MatmulPlan, MatmulShape

__all__ = ["make_finish_rotated", "make_finish_tile"]


def _make_total(plan: MatmulPlan) -> Any:
    sum_bytes = plan.sum_bytes

    @device_function
    def total_of(area: Any, row: Any, column: Any) -> Any:
        place = area + (row * uint32(PAD) + column) * uint32(4)
        total = ptx.load_shared_f32(place)
        for warp in range(1, WARPS):
            total = ptx.add_rn(total, ptx.load_shared_f32(place + uint32(warp * sum_bytes)))
        return total

    return total_of


def make_finish_tile(shape: MatmulShape, plan: MatmulPlan) -> Any:
    """A function: add the warps' sums in order, then bias, residual or activation, and store what exists."""
    width, epilogue = shape.width, shape.epilogue
    padded_rows = 8 * plan.row_tiles
    has_bias, live, silu, add = shape.bias, shape.live, epilogue == SILU, epilogue == ADD
    wide = epilogue == FLOAT32
    columns = 8 if silu else 16
    outputs, out_width = padded_rows * columns, width // 2 if silu else width

    total_of = _make_total(plan)

    def finish_tile(
        area: Any, tile: Any, row_live: Any, bias: Any, residual: Any, out: Any, count: Any, _rotation: Any
    ) -> None:
        for index in range(uint32(cuda.threadIdx.x), uint32(outputs), uint32(THREADS)):
            column = index % uint32(columns)
            row = index // uint32(columns)
            first = tile * 16
            place = first + int64(column)
            if int64(row) < count and place < width:
                at = int64(row) * out_width + first // (16 // columns) + int64(column)
                value = total_of(area, row, column)
                if has_bias:
                    value = ptx.add_rn(value, ptx.load_global_bf16(bias + place * 2))
                if silu:
                    up = total_of(area, row, column + uint32(8))
                    if has_bias:
                        up = ptx.add_rn(up, ptx.load_global_bf16(bias + place * 2 + 16))
                    value = silu_times(value, up)
                    if live and ptx.load_global_u8(row_live + int64(row)) == uint32(0):
                        value = float32(0)
                if add:
                    value = ptx.add_rn(value, ptx.load_global_bf16(residual + at * 2))
                if wide:
                    ptx.store_global_f32(out + at * 4, value)
                else:
                    ptx.store_global_u16(out + at * 2, ptx.bf16_bits(value))

    return device_function(finish_tile)


def make_finish_rotated(shape: MatmulShape, plan: MatmulPlan) -> Any:
    """A function: rotate queries and keys, whose tiles hold 8 dimensions and their partners, and store all parts.

    Queries go to `out`, keys and values of live rows to the cache. Products and sums are rounded one by one, as the
    reference does.
    """
    heads, total_of, padded_rows, has_bias = shape.heads, _make_total(plan), 8 * plan.row_tiles, shape.bias
    if heads is None:
        raise ValueError("a rotated product needs its heads")
    queries, groups, dim = heads.queries, heads.groups, heads.dim
    tiles, half = dim // 16, dim // 2
    cache_row = _make_cache_row(shape)

    @device_function
    def finish_rotated(
        area: Any, tile: Any, row_live: Any, bias: Any, _residual: Any, out: Any, count: Any, rotation: Any
    ) -> None:
        positions, cosines, sines, k_cache, v_cache, table, slots, write_lens, offsets, first_row = rotation
        head = int32(uint32(tile) // uint32(tiles))
        inner = int32(int32(tile) - head * tiles)
        rotated = head < queries + groups
        columns = uint32(8) if rotated else uint32(16)
        for index in range(uint32(cuda.threadIdx.x), uint32(padded_rows) * columns, uint32(THREADS)):
            row, column = index // columns, index % columns
            if int64(row) < count and head < queries + 2 * groups:
                value, place = total_of(area, row, column), tile * 16 + int64(column)
                if has_bias:
                    value = ptx.add_rn(value, ptx.load_global_bf16(bias + place * 2))
                if rotated:
                    partner = total_of(area, row, column + uint32(8))
                    if has_bias:
                        partner = ptx.add_rn(partner, ptx.load_global_bf16(bias + place * 2 + 16))
                    at = int64(inner * 8) + int64(column)
                    angle = int64(ptx.load_global_i32(positions + int64(row) * 4)) * half + at
                    c, s = ptx.load_global_f32(cosines + angle * 4), ptx.load_global_f32(sines + angle * 4)
                    low = ptx.bf16_bits(ptx.add_rn(ptx.mul_rn(value, c), -ptx.mul_rn(partner, s)))
                    high = ptx.bf16_bits(ptx.add_rn(ptx.mul_rn(partner, c), ptx.mul_rn(value, s)))
                    target = out + (int64(row) * queries + int64(head)) * (dim * 2)
                    stored = True
                    if head >= queries:
                        cached = cache_row(row, head - queries, row_live, table, slots, write_lens, offsets, first_row)
                        target, stored = k_cache + cached * (dim * 2), cached >= 0
                    if stored:
                        ptx.store_global_u16(target + at * 2, low)
                        ptx.store_global_u16(target + (at + half) * 2, high)
                else:
                    cached = cache_row(
                        row, head - queries - groups, row_live, table, slots, write_lens, offsets, first_row
                    )
                    if cached >= 0:
                        at = int64(inner * 16) + int64(column)
                        ptx.store_global_u16(v_cache + (cached * dim + at) * 2, ptx.bf16_bits(value))

    return finish_rotated


def _make_cache_row(shape: MatmulShape) -> Any:
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
