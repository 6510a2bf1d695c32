"""This module applies the gated delta rule to a chunk of a prompt on tensor cores, in tiles of up to 32 positions.

Columns of a state do not depend on each other: a warp has 16 columns of a head in registers, and a block 8 to 64. A
launch before computes the rows' contributions for all tiles at once (`delta_tiles`). A tile of these, and its rows'
keys, queries and values, are copied to shared memory two tiles ahead. `delta_tile_math` has the products.
"""

import math
from functools import cache
from typing import Any

import torch

from lowlat.kernels.common.memory import divide, int_at
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.recurrent.delta_rule import check_heads, snapshot_pairs
from lowlat.kernels.recurrent.delta_step import HeadSizes
from lowlat.kernels.recurrent.delta_tile_math import (
    GATES_AT,
    TILE,
    TILE_BYTES,
    advance_tile,
    load_state,
    store_state,
)
from lowlat.kernels.recurrent.delta_tiles import make_tiles, most_tiles, row_stride, tile_workspace
from lowlat.kernels.reference.recurrent import delta_rule as reference
from lowlat.kernels.toolchain import ptx, ptx_warp
from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel, KernelCall, Workspace
from lowlat.kernels.toolchain.launches import Given, launches_with
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["examples", "prefill_delta_rule"]

STAGES = 3
NEVER = 1 << 40  # more rows than a chunk has
WARP_COLUMNS, WIDE = 16, 64
LEAST_COPIERS = 2  # warps of a block that copy for those that have columns, of which there are as many or fewer


@cache
def _make_walk(heads: HeadSizes, size: int, columns: int, pairs: int, most_blocks: int = 0) -> Kernel:
    """Grid (Hv * blocks of a head,).

    size         positions of a tile, a divisor of TILE
    columns      of a head that a block has
    pairs        of a row of the states and a number of rows; -1: no snapshots are given
    most_blocks  as `Kernel` has it
    """
    key_heads, value_heads, dim, value_dim = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim
    parts, group, channels = value_dim // columns, heads.group, heads.channels
    walkers, halves = -(-columns // WARP_COLUMNS), min(columns // 8, 2)
    first_copier, copiers = 32 * walkers, 32 * max(walkers, LEAST_COPIERS)
    threads = first_copier + copiers
    pieces, value_pieces = dim // 8, columns // 8  # of 16 bytes
    stride, value_stride = row_stride(dim), row_stride(max(columns, WARP_COLUMNS))
    # shared memory, in bytes, of a stage: keys and queries, values, what the tile brings
    values_at = 2 * TILE * stride
    tile_at = values_at + TILE * value_stride
    stage_bytes = tile_at + TILE_BYTES
    out_stride = 2 * value_heads * value_dim
    zero_fours = columns // 4
    await_tile, await_all = ptx.copies_wait(STAGES - 2), ptx.copies_wait(0)
    u32, f32, i64 = types.uint32, types.float32, types.int64
    numbers = dim // 2  # of a state that a lane has

    def advanced(ops: Any, *arguments: Any) -> Any:
        return advance_tile(
            ops, *arguments, dim=dim, stride=stride, value_stride=value_stride, halves=halves, out_stride=out_stride
        )

    def loaded(ops: Any, address: Any, is_there: Any) -> Any:
        return load_state(ops, address, is_there, dim, halves)

    def stored(ops: Any, address: Any, state: Any, whole: Any) -> None:
        store_state(ops, address, state, whole, dim, halves)

    advance = ptx_warp.unrolled(advanced, numbers, (f32, numbers), u32, u32, u32, u32, u32, i64, u32, u32)
    load = ptx_warp.unrolled(loaded, numbers, i64, u32)
    store = ptx_warp.unrolled(stored, 0, i64, (f32, numbers), u32)

    @device_function
    def copy_tile(
        base: Any, thread: Any, number: Any, lead: Any, live: Any, most: Any, key_head: Any, head: Any, column: Any,
        mixed: Any, tiles: Any,
    ) -> None:  # fmt: skip
        """A tile's rows, zeros for those that are not there, and what it brings; as a group of copies."""
        first = number * int64(size) - lead
        low, high = max(-first, int64(0)), min(live - first, int64(size))
        if thread >= int64(first_copier) and high > int64(0):
            own = thread - int64(first_copier)
            stage = uint32(base + uint32(divide(number, STAGES)[1] * int64(stage_bytes)))
            place = own
            while place < int64(TILE * pieces):
                row, piece = divide(place, pieces)
                is_there = low <= row < high
                size_there = uint32(16) if is_there else uint32(0)
                key = mixed
                if is_there:
                    at = (first + row) * int64(channels) + int64(key_heads * dim) + key_head * int64(dim)
                    key = mixed + (at + piece * int64(8)) * int64(2)
                query = key - int64(2 * key_heads * dim) if is_there else mixed
                target = uint32(stage + uint32(row * int64(stride) + piece * int64(16)))
                ptx.copy_async_16_or_zero(target, key, size_there)
                ptx.copy_async_16_or_zero(uint32(target + uint32(TILE * stride)), query, size_there)
                place += int64(copiers)
            place = own
            while place < int64(TILE * value_pieces):
                row, piece = divide(place, value_pieces)
                is_there = low <= row < high
                source = mixed
                if is_there:
                    at = (first + row) * int64(channels) + int64(2 * key_heads * dim) + column + piece * int64(8)
                    source = mixed + at * int64(2)
                target = uint32(stage + uint32(int64(values_at) + row * int64(value_stride) + piece * int64(16)))
                ptx.copy_async_16_or_zero(target, source, uint32(16) if is_there else uint32(0))
                place += int64(copiers)
            source = tiles + (head * most + number) * int64(TILE_BYTES)
            place = own
            while place < int64(TILE_BYTES // 16):
                target = uint32(stage + uint32(int64(tile_at) + place * int64(16)))
                ptx.copy_async_16(target, source + place * int64(16))
                place += int64(copiers)
        ptx.copies_commit()

    @device_function
    def next_stop(snapshots: Any, done: Any) -> Any:
        """After how many rows, more than are done, the next snapshot is due."""
        stop = int64(NEVER)
        for pair in range(pairs):
            row, after = int_at(snapshots, int64(2 * pair + 1)), int_at(snapshots, int64(2 * pair + 2))
            if row >= int64(0) and after > done and after < stop:
                stop = after
        return stop

    @device_function
    def keep_state(snapshots: Any, before: Any, done: Any, origin: Any, state: Any) -> None:
        """Store a lane's part of the snapshots that are due after more than `before` and up to `done` rows: NaN for one
        that is due within a tile, where there is no state."""
        for pair in range(pairs):
            row, after = int_at(snapshots, int64(2 * pair + 1)), int_at(snapshots, int64(2 * pair + 2))
            if row >= int64(0) and before < after <= done:
                whole = uint32(1) if after == done else uint32(0)
                store(origin + row * int64(4 * value_heads * value_dim * dim), state, whole)

    def prefill_gated_delta(
        mixed: Any, slot: Any, chunk: Any, snapshots: Any, tiles: Any, state: Any, out: Any, count: Any, most: Any
    ) -> None:
        base = uint32(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        thread = int64(cuda.threadIdx.x)
        head, part = divide(cuda.blockIdx.x, parts)
        key_head = divide(head, group)[0]
        column = head * int64(value_dim) + part * int64(columns)
        lane, warp = thread & int64(31), thread >> int64(5)
        row, place = lane >> int64(2), lane & int64(3)
        # where a lane's part of a stage begins, as `advance_tile` has it
        rows_at = uint32((lane & int64(7)) * int64(stride) + (lane >> int64(3)) * int64(16))
        turned_at = uint32((lane & int64(15)) * int64(stride) + (lane >> int64(4)) * int64(16))
        own_values = (lane & int64(7)) + (lane >> int64(4)) * int64(8), warp * int64(2) + (lane >> int64(3) & int64(1))
        own_values_at = uint32(int64(values_at) + own_values[0] * int64(value_stride) + own_values[1] * int64(16))
        own_tile_at, own_gates_at = uint32(tile_at + lane * int64(16)), uint32(tile_at + GATES_AT + place * int64(32))
        own_column = column + warp * int64(WARP_COLUMNS)
        origin = state + ((own_column + row) * int64(dim) + place * int64(2)) * int64(4)
        row_bytes = int64(4 * value_heads * value_dim * dim)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        start, live = int_at(chunk, int64(0)), int_at(chunk, int64(1))
        own = int_at(slot, int64(0))
        begin, stop = own, int64(NEVER)
        if pairs >= 0:
            begin = int_at(snapshots, int64(0))
            begin = own if begin < int64(0) else begin
            stop = next_stop(snapshots, int64(0))
        lead = divide(start, size)[1]
        num_tiles = divide(lead + live + int64(size - 1), size)[0] if live > int64(0) else int64(0)
        for number in range(STAGES - 1):
            copy_tile(base, thread, int64(number), lead, live, most, key_head, head, column, mixed, tiles)
        walks = warp < int64(walkers)
        tile = load(origin + begin * row_bytes, uint32(1) if walks and start > int64(0) else uint32(0))
        for number in range(num_tiles):
            await_tile()
            cuda.syncthreads()
            ahead = number + int64(STAGES - 1)
            copy_tile(base, thread, ahead, lead, live, most, key_head, head, column, mixed, tiles)
            first = number * int64(size) - lead
            low, done = max(-first, int64(0)), min(live, first + int64(size))
            if walks:
                stage = uint32(base + uint32(divide(number, STAGES)[1] * int64(stage_bytes)))
                target = out + ((first + row) * int64(value_heads * value_dim) + own_column + place * int64(2)) * int64(
                    2
                )
                tile = advance(
                    tile, uint32(stage + rows_at), uint32(stage + turned_at), uint32(stage + own_values_at),
                    uint32(stage + own_tile_at), uint32(stage + own_gates_at), target, uint32(row - low),
                    uint32(done - first - low),
                )  # fmt: skip
                if stop <= done:
                    keep_state(snapshots, first + low, done, origin, tile)
                    stop = next_stop(snapshots, done)
        await_all()
        if walks and live > int64(0):
            store(origin + own * row_bytes, tile, uint32(1))
        item = live * int64(zero_fours) + thread
        while item < count * int64(zero_fours):
            row, piece = divide(item, zero_fours)
            at = row * int64(value_heads * value_dim) + column + piece * int64(4)
            ptx.store_global_64(out + at * int64(2), uint32(0), uint32(0))
            item += int64(threads)

    name = f"prefill_gated_delta_{key_heads}_{value_heads}_{dim}_{value_dim}_{size}_{columns}"
    name += (f"_kept{pairs}" if pairs >= 0 else "") + (f"_most{most_blocks}" if most_blocks else "")
    return Kernel(
        name, prefill_gated_delta, (i64,) * 9, threads, shared_bytes=STAGES * stage_bytes, most_blocks=most_blocks,
        waits_before_trigger=True,
    )  # fmt: skip


def _columns(heads: HeadSizes, gpu: Gpu) -> int:
    """The columns that a block has: as many as a step's, or twice those of whole heads where blocks would share SMs."""
    is_many = heads.value_heads * heads.parts > gpu.num_multiprocessors
    return WIDE if is_many and heads.value_dim % WIDE == 0 else heads.columns


@launches_with(reference.prefill_delta_rule)
def prefill_delta_rule(given: Given, *, workspace: Workspace, gpu: Gpu = H200) -> list[KernelCall]:
    """`prefill_delta_rule` of the reference; mixed and out are bf16, weights float32.

    Rows are taken in tiles that begin at multiples of 32 positions, or of the greatest common divisor of 32 and
    chunk_size: so rows and states have the same bits in chunks of any size that begin there. A snapshot that is due
    elsewhere is NaN, but for one at the chunk's end. Two launches. Time: some 1.2 us a tile, whatever the number of
    heads, as long as each of their blocks finds an SM. Captured: yes. Raises ShapeError for arguments that do not fit.
    """
    mixed, ba, a_log, dt_bias = (given[name] for name in ("mixed", "ba", "a_log", "dt_bias"))
    rows, heads = mixed.shape[0], HeadSizes(*given.sizes("Hk", "Hv", "Dk", "Dv"))
    check_heads(heads)
    check_dtype(torch.bfloat16, mixed=mixed)
    check_dtype(torch.float32, a_log=a_log, dt_bias=dt_bias)
    size, columns = math.gcd(TILE, given.params["chunk_size"] or TILE), _columns(heads, gpu)
    most, blocks = most_tiles(rows, size), heads.value_heads * heads.value_dim // columns
    tiles = workspace(*tile_workspace(heads, most))
    pairs = snapshot_pairs(given.arrays.get("snapshots"))
    return [
        KernelCall(
            make_tiles(heads, size), (most, heads.key_heads, 1),
            (mixed, ba, a_log, dt_bias, given["chunk"], tiles, most),
        ),
        KernelCall(
            # SMs that the launch before leaves first would else get more blocks than others, which all wait for
            _make_walk(heads, size, columns, pairs, -(-blocks // gpu.num_multiprocessors)),
            (blocks, 1, 1),
            (mixed, *given.take("slot", "chunk", "snapshots"), tiles, given["state"], given["out"], rows, most),
        ),
    ]  # fmt: skip


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: 35B-A3B's heads, 27B's, narrow ones, and those of short tiles."""
    moe, dense, small = HeadSizes(16, 32, 128, 128), HeadSizes(16, 48, 128, 128), HeadSizes(4, 8, 96, 24)
    return [
        make_tiles(moe, TILE),
        make_tiles(small, 16),
        _make_walk(moe, TILE, 32, 2, most_blocks=1),
        _make_walk(moe, TILE, 32, -1),
        _make_walk(dense, TILE, 64, 2, most_blocks=1),
        _make_walk(small, 16, 8, -1),
    ]
