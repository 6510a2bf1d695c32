"""This module has the kernel that computes the contributions of a prompt's rows to the gated delta rule, tile by tile.

A tile has up to 32 positions. The kernel needs no state. A block has a tile of a key head: it multiplies keys and
queries by keys, and each of its warps then solves a value head's tile, see `delta_tile_math`. Tiles are at fixed
absolute positions, so they are the same in chunks of any size. Rows that a tile lacks, before the chunk, past its live
rows or past the tile's own, have keys, queries and betas of zero and a decay of one.
"""

from functools import cache
from typing import Any

import torch

from lowlat.kernels.common.memory import divide, int_at
from lowlat.kernels.common.norm_math import EVERY_LANE, high_value, low_value
from lowlat.kernels.recurrent.delta_math import beta_of, decay_of, store_four, unit_factor
from lowlat.kernels.recurrent.delta_step import HeadSizes
from lowlat.kernels.recurrent.delta_tile_math import (
    GATES_AT,
    PITCH,
    TILE,
    TILE_BYTES,
    product_of_rows,
    solve_tile,
    write_fragments,
)
from lowlat.kernels.toolchain import ptx, ptx_warp
from lowlat.kernels.toolchain.kernel import Kernel, WorkspaceShape
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["make_tiles", "most_tiles", "row_stride", "tile_workspace"]

WARPS, MIN_BLOCKS = 4, 3  # of a block, of an SM


def row_stride(dim: int) -> int:
    """Bytes from a row of bf16 to the next in shared memory: 16 bytes of 8 of them lie on different banks."""
    return 2 * dim + 16


def most_tiles(rows: int, size: int) -> int:
    """The most tiles of so many positions that so many rows lie in, wherever they begin."""
    return (rows + 2 * size - 2) // size


def tile_workspace(heads: HeadSizes, tiles: int) -> WorkspaceShape:
    """The workspace of what tiles bring: of each value head and tile TILE_BYTES."""
    return "delta.tiles", (heads.value_heads, tiles, TILE_BYTES // 4), torch.float32


@cache
def make_tiles(heads: HeadSizes, size: int) -> Kernel:
    """Grid (tiles, Hk). size: positions of a tile, a divisor of TILE.

    tiles  [Hv, tiles, TILE_BYTES] out
    """
    key_heads, value_heads, dim, group = heads.key_heads, heads.value_heads, heads.key_dim, heads.group
    channels, stride, pieces = heads.channels, row_stride(dim), dim // 8  # of 16 bytes
    scale, threads, solvers = dim**-0.5, 32 * WARPS, min(WARPS, group)
    # shared memory, in bytes: keys and queries, then what a warp needs for a value head at the same place; products
    # of both, 1 / the norms of keys and what queries are multiplied by
    rows_bytes, matrix_bytes = 16 * TILE, PITCH * TILE
    warp_bytes = rows_bytes + 2 * matrix_bytes
    products = max(2 * TILE * stride, solvers * warp_bytes)
    factors = products + 2 * matrix_bytes
    await_copies = ptx.copies_wait(0)
    u32, f32, i64 = types.uint32, types.float32, types.int64

    def product(ops: Any, first: Any, second: Any) -> Any:
        return product_of_rows(ops, first, second, dim=dim, stride=stride)

    def store_product(ops: Any, address: Any, sums: Any) -> None:
        for place, value in enumerate(sums):
            tile, low, part = place // 4, place % 4 // 2, place % 2
            ops.store_float(address, PITCH * 8 * low + 32 * tile + 4 * part, value)

    multiply = ptx_warp.unrolled(product, TILE // 2, u32, u32)
    store_sums = ptx_warp.unrolled(store_product, 0, u32, (f32, TILE // 2))
    solve = ptx_warp.unrolled(solve_tile, 3, u32, u32, u32, u32, u32, u32, f32, f32)
    write = ptx_warp.unrolled(write_fragments, 0, u32, i64)

    @device_function
    def copy_rows(base: Any, thread: Any, first: Any, low: Any, high: Any, key_head: Any, mixed: Any) -> None:
        """Keys, then queries; zeros for rows that are not there."""
        for turn in range(2 * TILE * pieces // threads):
            place = thread + int64(turn * threads)
            row, piece = divide(place, pieces)
            vector, row = row >> int64(5), row & int64(TILE - 1)
            is_there = low <= row < high
            at = (first + row) * int64(channels) + (int64(key_heads) * (int64(1) - vector) + key_head) * int64(dim)
            source = mixed + (at + piece * int64(8)) * int64(2) if is_there else mixed
            target = uint32(base + uint32((vector * int64(TILE) + row) * int64(stride) + piece * int64(16)))
            ptx.copy_async_16_or_zero(target, source, uint32(16) if is_there else uint32(0))
        ptx.copies_commit()

    @device_function
    def find_norms(base: Any, thread: Any) -> None:
        """Two neighbouring lanes have a row's key, the next two its query, half each."""
        row, is_query, half = thread >> int64(2), thread >> int64(1) & int64(1), thread & int64(1)
        at = uint32(base + uint32((is_query * int64(TILE) + row) * int64(stride) + half * int64(dim)))
        total = float32(0.0)
        for piece in range(pieces // 2):
            for word in ptx.load_shared_128(uint32(at + uint32(16 * piece))):
                total = ptx.fma_rn(low_value(word), low_value(word), total)
                total = ptx.fma_rn(high_value(word), high_value(word), total)
        total = ptx.add_rn(total, cuda.shfl_xor_sync(EVERY_LANE, total, 1))
        factor = unit_factor(total)
        if is_query == int64(1):
            factor = ptx.mul_rn(factor, float32(scale))
        if half == int64(0):
            target = uint32(base + uint32(int64(factors) + (is_query * int64(TILE) + row) * int64(4)))
            ptx.store_shared_f32(target, factor)

    @device_function
    def multiply_rows(base: Any, lane: Any, warp: Any) -> None:
        """A warp has 16 rows of keys or of queries."""
        is_query, upper = warp >> int64(1), warp & int64(1)
        first = (is_query * int64(TILE) + upper * int64(16) + (lane & int64(15))) * int64(stride)
        first += (lane >> int64(4)) * int64(16)
        second = (lane & int64(7)) * int64(stride) + (lane >> int64(3)) * int64(16)
        sums = multiply(uint32(base + uint32(first)), uint32(base + uint32(second)))
        row = is_query * int64(TILE) + upper * int64(16) + (lane >> int64(2))
        at = int64(products) + row * int64(PITCH) + (lane & int64(3)) * int64(8)
        store_sums(uint32(base + uint32(at)), sums)

    @device_function
    def solve_head(
        base: Any, lane: Any, warp: Any, index: Any, is_there: Any, head: Any, ba: Any, a_log: Any, dt_bias: Any,
        target: Any,
    ) -> None:  # fmt: skip
        """A value head's tile by a warp; index: the lane's row in the chunk."""
        beta, decay = float32(0.0), float32(1.0)
        if is_there:
            at = ba + (index * int64(2 * value_heads) + head) * int64(4)
            beta = beta_of(ptx.load_global_f32(at))
            bias = ptx.load_global_f32(dt_bias + head * int64(4))
            decay = decay_of(
                ptx.load_global_f32(at + int64(4 * value_heads)), ptx.load_global_f32(a_log + head * int64(4)), bias
            )
        word = uint32(lane)
        at = uint32(base + uint32(int64(factors) + lane * int64(4)))
        key, query = ptx.load_shared_f32(at), ptx.load_shared_f32(uint32(at + uint32(4 * TILE)))
        rows = uint32(base + uint32(warp * int64(warp_bytes)))
        matrices = uint32(rows + uint32(rows_bytes))
        store_four(uint32(rows + word * uint32(16)), decay, ptx.mul_rn(beta, key), query, float32(0.0))
        barrier = uint32(warp + int64(1))
        ptx.sync_one_warp(barrier)
        before, after, total = solve(
            barrier, uint32(base + uint32(products) + word * uint32(4)), rows, matrices,
            uint32(matrices + word * uint32(4)), word, key, beta,
        )  # fmt: skip
        row, place = lane >> int64(2), lane & int64(3)
        source = uint32(matrices + uint32(row * int64(PITCH) + place * int64(8)))
        write(source, target + lane * int64(16))
        at = target + int64(GATES_AT) + (lane >> int64(1)) * int64(32) + (lane & int64(1)) * int64(4)
        ptx.store_global_f32(at, ptx.mul_rn(before, key))
        ptx.store_global_f32(at + int64(8), ptx.mul_rn(before, query))
        ptx.store_global_f32(at + int64(16), ptx.mul_rn(after, key))
        ptx.store_global_f32(at + int64(24), total)
        ptx.sync_one_warp(barrier)

    def gated_delta_tiles(mixed: Any, ba: Any, a_log: Any, dt_bias: Any, chunk: Any, tiles: Any, most: Any) -> None:
        thread, number, key_head = int64(cuda.threadIdx.x), int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        lane, warp = thread & int64(31), thread >> int64(5)
        base = uint32(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        start, live = int_at(chunk, int64(0)), int_at(chunk, int64(1))
        first = number * int64(size) - divide(start, size)[1]  # row of the chunk
        if first >= live:
            return
        low, high = max(-first, int64(0)), min(live - first, int64(size))
        copy_rows(base, thread, first, low, high, key_head, mixed)
        await_copies()
        cuda.syncthreads()
        find_norms(base, thread)
        multiply_rows(base, lane, warp)
        cuda.syncthreads()
        member = warp
        while member < int64(group):
            head = key_head * int64(group) + member
            target = tiles + (head * most + number) * int64(TILE_BYTES)
            solve_head(base, lane, warp, first + lane, low <= lane < high, head, ba, a_log, dt_bias, target)
            member += int64(WARPS)

    name = f"gated_delta_tiles_{key_heads}_{value_heads}_{dim}_{heads.value_dim}_{size}"
    return Kernel(
        name, gated_delta_tiles, (i64,) * 7, threads, min_blocks=MIN_BLOCKS, shared_bytes=factors + 8 * TILE,
        waits_before_trigger=True,
    )  # fmt: skip
