"""Products of a tile of keys and values that are e4m3 codes: decoded in registers on the way to the tensor cores.

A lane reads 16 codes of a key at once, and of values a transposed matrix of pairs of bytes: two dimensions of two
positions. Either way a word's codes 0 and 2 are one operand and codes 1 and 3 another: queries are rearranged alike,
and sums of 8 dimensions are those of every other one of 16.

Estimate for heads of 128, 16 positions and a tile of query rows, of a warp: 32 words a lane at 9 instructions, 288 in
all, beside some 350 that keys and values in bf16 take as well, for 4 KiB in place of 8; no read meets a bank conflict.
"""

from typing import Any

from lowlat.kernels.attention.copies import make_swizzle
from lowlat.kernels.attention.plan import AttentionShape
from lowlat.kernels.common.kv_codes import decode
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["make_coded_products", "make_coded_queries"]


def make_coded_queries(shape: AttentionShape) -> Any:
    """A function: of every two words of queries, the first and third numbers, and the second and fourth."""

    @device_function
    def rearrange(queries: Any, count: Any) -> None:
        for pair in range(count // 2):
            first, second = queries[2 * pair], queries[2 * pair + 1]
            queries[2 * pair] = uint32((first & uint32(0xFFFF)) | uint32(second << uint32(16)))
            queries[2 * pair + 1] = uint32((first >> uint32(16)) | (second & uint32(0xFFFF0000)))

    return rearrange


def make_coded_products(shape: AttentionShape) -> tuple[Any, Any]:
    """Scores of two groups of 8 positions; and sums times their factors plus weights times values."""
    row_swizzle, words = make_swizzle(shape), shape.head_dim // 8  # of a half of a tile's query rows
    chunks, pitch, row_tiles = shape.head_dim // 64, shape.row_bytes, shape.row_tiles
    pairs, sums, multipliers = shape.head_dim // 32, shape.head_dim // 2, row_tiles * shape.head_dim // 4

    @device_function
    def add_scores(scores: Any, queries: Any, stage: Any, lane: Any) -> None:
        row, quad = lane >> uint32(2), lane & uint32(3)
        base = uint32(stage + row * uint32(pitch) + ((quad ^ row_swizzle(row)) << uint32(4)))
        for chunk in range(chunks):
            for half in range(2):
                codes = ptx.load_shared_128((base ^ uint32((chunk & 1) << 6)) + uint32(half * 8 * pitch))
                for word in range(4):
                    even, odd = decode(codes[word], queries[multipliers])
                    for tile in range(row_tiles):
                        s, a = tile * 8 + half * 4, 2 * tile * words + chunk * 8 + word * 2
                        b = a + words
                        scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = ptx.mma_bf16(
                            scores[s], scores[s + 1], scores[s + 2], scores[s + 3],
                            queries[a], queries[b], queries[a + 1], queries[b + 1], even, odd,
                        )  # fmt: skip

    @device_function
    def add_values(totals: Any, queries: Any, weights: Any, factors: Any, stage: Any, lane: Any) -> None:
        row = lane & uint32(15)
        base = uint32(stage + (row + uint32(16)) * uint32(pitch))
        base = uint32(base + (((lane >> uint32(4)) ^ row_swizzle(row)) << uint32(4)))
        for pair in range(pairs):
            codes = ptx.load_shared_matrix_x4_transposed(base ^ uint32(pair << 5))
            for half in range(2):
                low_even, low_odd = decode(codes[2 * half], queries[multipliers + 1])
                high_even, high_odd = decode(codes[2 * half + 1], queries[multipliers + 1])
                for tile in range(row_tiles):
                    top, bottom, w = factors[2 * tile], factors[2 * tile + 1], tile * 4
                    o = tile * sums + pair * 16 + half * 8
                    totals[o], totals[o + 1], totals[o + 2], totals[o + 3] = ptx.mma_bf16(
                        ptx.mul_rn(totals[o], top), ptx.mul_rn(totals[o + 1], top),
                        ptx.mul_rn(totals[o + 2], bottom), ptx.mul_rn(totals[o + 3], bottom),
                        weights[w], weights[w + 1], weights[w + 2], weights[w + 3], low_even, high_even,
                    )  # fmt: skip
                    o += 4
                    totals[o], totals[o + 1], totals[o + 2], totals[o + 3] = ptx.mma_bf16(
                        ptx.mul_rn(totals[o], top), ptx.mul_rn(totals[o + 1], top),
                        ptx.mul_rn(totals[o + 2], bottom), ptx.mul_rn(totals[o + 3], bottom),
                        weights[w], weights[w + 1], weights[w + 2], weights[w + 3], low_odd, high_odd,
                    )  # fmt: skip

    return add_scores, add_values
