"""This module multiplies a tile with a warp's queries and weights on the tensor cores, as bf16 or as e4m3 codes.

Scores have queries as rows and 8 positions as columns. Sums have dimensions as rows and 8 queries as columns. So the
first product's result is the second's operand in the same registers, and eight queries take eight columns, not sixteen.
A lane reads 16 bytes of a key at once. Of values it reads a transposed matrix; of codes a matrix of pairs, two
dimensions of two positions.

Codes are converted to fp16, which holds each exactly: by the GPU's own conversion, or before 8.9 by shifts, to 2**-8
times their value. Queries are fp16, too, each row times the power of two that brings its largest number to 2**12;
numbers 36 binades below that are lost. Scales and powers of two multiply scores and results in float32; nothing is
rounded to bf16 here.

For 16 positions of heads of 128 and 8 queries a warp needs 24 products. For codes it needs 2 conversions for each of 32
words, and 16 permutations, where shifts, masks and a product of bf16 took some 300 instructions.
"""

from typing import Any

from lowlat.kernels.attention.copies import FULL_WARP, make_swizzle
from lowlat.kernels.attention.plan import AttentionShape
from lowlat.kernels.common.kv_codes import load_scale
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, uint32

__all__ = ["make_arrange_queries", "make_products"]

SIGNS, MAGNITUDES = 0x80008000, 0x3F803F80  # of fp16
SHIFTED = 2.0**8  # the missing factor of numbers made by shifts
LARGEST = 127 + 12  # the biased float32 exponent to which a row's largest query is scaled


def make_products(shape: AttentionShape) -> tuple[Any, Any]:
    """Make `add_scores`, for two groups of 8 positions, and `add_values`, which scales sums and adds weighed values."""
    return _make_add_scores(shape), _make_add_values(shape)


def _make_halves(shape: AttentionShape) -> tuple[Any, Any]:
    """Make two device functions that convert a word of codes: bytes 0 and 1, 2 and 3; or bytes 0 and 2, 1 and 3."""
    if shape.converts:

        @device_function
        def convert_every_other(word: Any) -> Any:
            return ptx.e4m3_to_f16(ptx.swap_middle_bytes(word))

        return ptx.e4m3_to_f16, convert_every_other

    @device_function
    def every_other(word: Any) -> Any:
        signs, magnitudes = uint32(SIGNS), uint32(MAGNITUDES)
        even = (uint32(word << uint32(8)) & signs) | (uint32(word << uint32(7)) & magnitudes)
        return even, (word & signs) | ((word >> uint32(1)) & magnitudes)

    @device_function
    def in_order(word: Any) -> Any:
        return every_other(ptx.swap_middle_bytes(word))

    return in_order, every_other


def _make_add_scores(shape: AttentionShape) -> Any:
    row_swizzle, pitch, row_tiles = make_swizzle(shape), shape.row_bytes, shape.row_tiles
    if shape.coded:
        return _make_add_coded_scores(shape)
    reads, words = pitch // 64, shape.warp_dim // 8

    @device_function
    def add_scores(scores: Any, queries: Any, stage: Any, lane: Any) -> None:
        row, quad = lane >> uint32(2), lane & uint32(3)
        base = uint32(stage + row * uint32(pitch) + ((quad ^ row_swizzle(row)) << uint32(4)))
        for read in range(reads):
            for half in range(2):
                at = (base ^ uint32((read & 1) << 6)) + uint32((read >> 1) * 128 + half * 8 * pitch)
                keys = ptx.load_shared_128(at)
                for tile in range(row_tiles):
                    s, a = tile * 8 + half * 4, 2 * (tile * words + read * 2)
                    b = a + words
                    scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = ptx.mma_bf16(
                        scores[s], scores[s + 1], scores[s + 2], scores[s + 3],
                        queries[a], queries[b], queries[a + 1], queries[b + 1], keys[0], keys[1],
                    )  # fmt: skip
                    scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = ptx.mma_bf16(
                        scores[s], scores[s + 1], scores[s + 2], scores[s + 3],
                        queries[a + 2], queries[b + 2], queries[a + 3], queries[b + 3], keys[2], keys[3],
                    )  # fmt: skip

    return add_scores


def _make_add_coded_scores(shape: AttentionShape) -> Any:
    """A device function that adds every other product of a row to one sum, the others to a second sum.

    With few queries the two sums are the rows of a tile's halves. Its operand then has twice the dimensions, and no
    zeros.
    """
    row_swizzle, pitch, row_tiles, few = make_swizzle(shape), shape.row_bytes, shape.row_tiles, shape.few
    words, num_sums, (in_order, _) = shape.warp_dim // 8, 16 * shape.row_tiles, _make_halves(shape)

    @device_function
    def multiply(sums: Any, queries: Any, tile: Any, half: Any, pair: Any, low: Any, high: Any) -> None:
        s, top = tile * 16 + (pair & 1) * 8 + half * 4, 2 * (tile * words + pair)
        a, b, c, d = top, top + words, top + 1, top + words + 1
        if few:
            a, b, c, d = pair // 2 * 4, pair // 2 * 4 + 2, pair // 2 * 4 + 1, pair // 2 * 4 + 3
        sums[s], sums[s + 1], sums[s + 2], sums[s + 3] = ptx.mma_f16(
            sums[s], sums[s + 1], sums[s + 2], sums[s + 3], queries[a], queries[b], queries[c], queries[d], low, high
        )

    @device_function
    def add_scores(scores: Any, queries: Any, stage: Any, lane: Any) -> None:
        sums = cuda.local.array(num_sums, float32)
        for k in range(num_sums):
            sums[k] = float32(0)
        row, quad = lane >> uint32(2), lane & uint32(3)
        base = uint32(stage + row * uint32(pitch) + ((quad ^ row_swizzle(row)) << uint32(4)))
        for read in range(pitch // 64):
            for half in range(2):
                keys = ptx.load_shared_128(
                    (base ^ uint32((read & 1) << 6)) + uint32((read >> 1) * 128 + half * 8 * pitch)
                )
                for column in range(4):
                    low, high = in_order(keys[column])
                    for tile in range(row_tiles):
                        multiply(sums, queries, tile, half, read * 4 + column, low, high)
        other = 10 if few else 8  # of few rows the second sums are a tile's lower rows
        for tile in range(row_tiles):
            for k in range(8):
                if not few or k & 2 == 0:
                    scores[tile * 8 + k] = ptx.add_rn(sums[tile * 16 + k], sums[tile * 16 + k + other])

    return add_scores


def _make_add_values(shape: AttentionShape) -> Any:
    row_swizzle, pitch, eights, coded = make_swizzle(shape), shape.row_bytes, shape.eights, shape.coded
    first = shape.values_at // pitch
    reads, tiles, columns = pitch // 32, shape.warp_dim // 16, 2 if coded else 1
    multiply, every_other = ptx.mma_f16 if coded else ptx.mma_bf16, _make_halves(shape)[1]

    @device_function
    def operand(values: Any, column: Any) -> Any:
        if coded:  # dimensions 2 i as rows i, dimensions 2 i + 1 as rows 8 + i
            low_even, low_odd = every_other(values[column])
            high_even, high_odd = every_other(values[2 + column])
            return low_even, low_odd, high_even, high_odd
        return values[0], values[1], values[2], values[3]

    @device_function
    def shrink(totals: Any, factors: Any, lane: Any) -> None:
        changed = factors[0] != float32(1)
        for part in range(1, eights):
            changed = changed or factors[part] != float32(1)
        if cuda.ballot_sync(FULL_WARP, changed):
            for part in range(eights):
                source = int32((lane & uint32(3)) << uint32(3))
                left = cuda.shfl_sync(FULL_WARP, factors[part], source)
                right = cuda.shfl_sync(FULL_WARP, factors[part], int32(source + 4))
                for pair in range(2 * tiles):
                    o = (part * tiles * 2 + pair) * 2
                    totals[o], totals[o + 1] = ptx.mul_rn(totals[o], left), ptx.mul_rn(totals[o + 1], right)

    @device_function
    def add_values(totals: Any, weights: Any, factors: Any, stage: Any, lane: Any) -> None:
        shrink(totals, factors, lane)
        row, piece = (lane & uint32(7)) | ((lane >> uint32(1)) & uint32(8)), (lane >> uint32(3)) & uint32(1)
        base = uint32(stage + (row + uint32(first)) * uint32(pitch) + ((piece ^ row_swizzle(row)) << uint32(4)))
        for read in range(reads):
            values = ptx.load_shared_matrix_x4_transposed((base ^ uint32((read & 3) << 5)) + uint32((read >> 2) * 128))
            for column in range(columns):
                v0, v1, v2, v3 = operand(values, column)
                for part in range(eights):
                    o = (part * tiles + read * columns + column) * 4
                    totals[o], totals[o + 1], totals[o + 2], totals[o + 3] = multiply(
                        totals[o], totals[o + 1], totals[o + 2], totals[o + 3],
                        v0, v1, v2, v3, weights[2 * part], weights[2 * part + 1],
                    )  # fmt: skip

    return add_values


def make_arrange_queries(shape: AttentionShape) -> Any:
    """A device function that converts loaded queries for products with codes: to fp16.

    Each row's multiplier of scores follows, then the multiplier of results.
    """
    words, eights = shape.warp_dim // 8, shape.eights
    unit = 1.0 if shape.converts else SHIFTED

    @device_function
    def narrow(queries: Any, first: Any) -> Any:
        """Return the power of two by which a row's numbers are scaled; a lane has a quarter of the row."""
        both = uint32(0)
        for word in range(words):
            both = ptx.max_bf16_pair(both, queries[first + word] & uint32(0x7FFF7FFF))
        largest = max(int32(both >> uint32(16)), int32(both & uint32(0xFFFF)))
        largest = max(largest, int32(cuda.shfl_xor_sync(FULL_WARP, largest, 1)))
        largest = max(largest, int32(cuda.shfl_xor_sync(FULL_WARP, largest, 2)))
        exponent = uint32(max(int32(largest >> 7), int32(LARGEST - 126)))
        factor = ptx.float_of_bits(uint32(uint32(LARGEST + 127) - exponent) << uint32(23))
        for word in range(words):
            bits = queries[first + word]
            low = ptx.mul_rn(ptx.float_of_bits(uint32(bits << uint32(16))), factor)
            high = ptx.mul_rn(ptx.float_of_bits(bits & uint32(0xFFFF0000)), factor)
            queries[first + word] = ptx.f16_pair(low, high)
        return ptx.float_of_bits(uint32(exponent - uint32(LARGEST - 127)) << uint32(23))

    @device_function
    def arrange(queries: Any, kv_scales: Any, head: Any, kv_heads: Any, scale: Any) -> None:
        of_keys = ptx.mul_rn(ptx.mul_rn(load_scale(kv_scales, head), float32(unit)), scale)
        for part in range(eights):
            lacking = narrow(queries, part * words)
            queries[eights * words + part] = ptx.bits_of_float(ptx.mul_rn(of_keys, lacking))
        of_values = ptx.mul_rn(load_scale(kv_scales, head + int32(kv_heads)), float32(unit))
        queries[eights * words + eights] = ptx.bits_of_float(of_values)

    return arrange
