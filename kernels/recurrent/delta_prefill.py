"""The gated delta rule over a chunk of a prompt: the recurrence of a step's kernel, row after row.

Columns of a state do not depend on each other, so a block takes up to 32 columns of a head and walks the chunk's rows;
each warp goes its own way within a tile of rows. A launch before makes what rows bring: unit queries, keys, gates.
Tiles of them are copied to shared memory two ahead, and the next row is loaded while one is reckoned.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from lowlat.kernels.common.memory import divide, int_at
from lowlat.kernels.common.norm_math import high_value, low_value
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.recurrent.delta_math import (
    beta_of,
    decay_of,
    four_numbers,
    rounded,
    store_four,
    tile_sum,
    unit_heads,
)
from lowlat.kernels.recurrent.delta_rule import check_heads, snapshot_pairs
from lowlat.kernels.recurrent.delta_step import WARP_COLUMNS, HeadSizes
from lowlat.kernels.reference.recurrent import delta_rule as reference
from lowlat.kernels.toolchain import ptx, ptx_state
from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel, KernelCall, Workspace, WorkspaceShape
from lowlat.kernels.toolchain.launches import Given, launches_with
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["examples", "heads_of", "prefill_delta_rule", "row_workspaces"]

TILE_BYTES = 16 << 10  # of queries and keys, at most
STAGES = 3
NEVER = 1 << 40  # more rows than a chunk has
WARPS = 4  # of a block that makes what rows bring


@cache
def _make_rows(heads: HeadSizes) -> Kernel:
    """A row's unit query and key, and its gates: grid (c, Hk / WARPS), a warp a key head.

    vectors  [Hk, c, 2, Dk] float32 out: the query, the key
    gates    [Hv, c, 4]     float32 out: decay, beta, the query's product with the key, nothing
    """
    key_heads, value_heads, dim, group = heads.key_heads, heads.value_heads, heads.key_dim, heads.group
    channels, fours = heads.channels, heads.key_dim // 4
    scale = dim**-0.5

    def gated_delta_rows(
        mixed: Any, ba: Any, a_log: Any, dt_bias: Any, chunk: Any, vectors: Any, gates: Any, count: Any
    ) -> None:
        thread, row = int64(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        lane, warp = thread & int64(31), thread >> int64(5)
        head = int64(cuda.blockIdx.y) * int64(WARPS) + warp
        base = uint32(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        query = uint32(base + uint32(warp * int64(8 * dim)))
        key = uint32(query + uint32(4 * dim))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        if head >= int64(key_heads) or row >= int_at(chunk, int64(1)):
            return
        source = mixed + (row * int64(channels) + head * int64(dim)) * int64(2)
        piece = lane
        while piece < int64(fours):
            low, high = ptx.load_global_64(source + piece * int64(8))
            at = uint32(piece * int64(16))
            store_four(query + at, low_value(low), high_value(low), low_value(high), high_value(high))
            low, high = ptx.load_global_64(source + int64(2 * key_heads * dim) + piece * int64(8))
            store_four(key + at, low_value(low), high_value(low), low_value(high), high_value(high))
            piece += int64(32)
        product = unit_heads(query, key, uint32(lane), dim, scale)
        target = vectors + (head * count + row) * int64(8 * dim)
        piece = lane
        while piece < int64(fours):
            at = uint32(piece * int64(16))
            a, b, c, d = ptx.load_shared_128(query + at)
            ptx.store_global_128(target + piece * int64(16), a, b, c, d)
            a, b, c, d = ptx.load_shared_128(key + at)
            ptx.store_global_128(target + int64(4 * dim) + piece * int64(16), a, b, c, d)
            piece += int64(32)
        place = lane
        while place < int64(group):
            own = head * int64(group) + place
            at = ba + (row * int64(2 * value_heads) + own) * int64(4)
            beta = beta_of(ptx.load_global_f32(at))
            bias = ptx.load_global_f32(dt_bias + own * int64(4))
            decay = decay_of(
                ptx.load_global_f32(at + int64(4 * value_heads)), ptx.load_global_f32(a_log + own * int64(4)), bias
            )
            ptx.store_global_128(
                gates + (own * count + row) * int64(16), ptx.bits_of_float(decay), ptx.bits_of_float(beta),
                ptx.bits_of_float(product), uint32(0),
            )  # fmt: skip
            place += int64(32)

    name = f"gated_delta_rows_{key_heads}_{value_heads}_{dim}_{heads.value_dim}"
    shared = WARPS * 8 * dim
    return Kernel(
        name, gated_delta_rows, (types.int64,) * 8, WARPS * 32, shared_bytes=shared, waits_before_trigger=True
    )


@cache
def _make_walk(heads: HeadSizes, pairs: int, most_blocks: int = 0) -> Kernel:
    """Grid (Hv * blocks of a head,).

    pairs        of a row of the states and a number of rows; -1: no snapshots are given
    most_blocks  as `Kernel` has it
    """
    value_heads, key_dim, value_dim = heads.value_heads, heads.key_dim, heads.value_dim
    columns, parts, group, channels = heads.columns, heads.parts, heads.group, heads.channels
    threads = columns // WARP_COLUMNS * 32
    value_channel, value_fours, value_words = 2 * heads.key_heads * key_dim, columns // 4, columns // 8
    row_pieces = key_dim // 2  # of 16 bytes: a query and a key
    tile_size = 16 if 16 * 8 * key_dim <= TILE_BYTES else 8
    # shared memory, in bytes: of a stage, then two tiles of outputs
    values_at = tile_size * 8 * key_dim
    gates_at = values_at + tile_size * 2 * columns
    stage_bytes = gates_at + tile_size * 16
    outputs = STAGES * stage_bytes
    output_bytes = tile_size * columns * 4
    pieces, stride, tile_rows = key_dim // 32, 4 * key_dim * 4, key_dim // 8
    load_tile, store_tile = ptx_state.load_tile(pieces, stride), ptx_state.store_tile(pieces, stride)
    no_state = ptx.zeros(ptx_state.COLUMNS * tile_rows)
    tile_sums, update_tile = ptx_state.tile_sums(tile_rows), ptx_state.update_tile(tile_rows)
    load_vector = ptx.load_shared_tiles(pieces, 128)
    await_tile, await_all = ptx.copies_wait(STAGES - 2), ptx.copies_wait(0)

    @device_function
    def copy_tile(
        base: Any, thread: Any, number: Any, live: Any, count: Any, key_head: Any, head: Any, column: Any, mixed: Any,
        vectors: Any, gates: Any,
    ) -> None:  # fmt: skip
        """A tile's rows that are live, as a group of copies."""
        first = number * int64(tile_size)
        rows = min(live - first, int64(tile_size))
        stage = uint32(base + uint32(divide(number, STAGES)[1] * int64(stage_bytes)))
        source = vectors + (key_head * count + first) * int64(8 * key_dim)
        place = thread
        while place < rows * int64(row_pieces):
            ptx.copy_async_16(uint32(stage + uint32(place * int64(16))), source + place * int64(16))
            place += int64(threads)
        place = thread
        while place < rows * int64(value_words):
            row, piece = divide(place, value_words)
            at = (first + row) * int64(channels) + int64(value_channel) + column + piece * int64(8)
            ptx.copy_async_16(uint32(stage + uint32(int64(values_at) + place * int64(16))), mixed + at * int64(2))
            place += int64(threads)
        if thread < rows:
            target = uint32(stage + uint32(int64(gates_at) + thread * int64(16)))
            ptx.copy_async_16(target, gates + (head * count + first + thread) * int64(16))
        ptx.copies_commit()

    @device_function
    def write_tile(base: Any, thread: Any, number: Any, live: Any, column: Any, out: Any) -> None:
        """The outputs of a tile's live rows."""
        first = number * int64(tile_size)
        source = uint32(base + uint32(int64(outputs) + (number & int64(1)) * int64(output_bytes)))
        place = thread
        while place < int64(tile_size * value_fours):
            row, piece = divide(place, value_fours)
            if first + row < live:
                x = four_numbers(ptx.load_shared_128(uint32(source + uint32(place * int64(16)))))
                at = (first + row) * int64(value_heads * value_dim) + column + piece * int64(4)
                ptx.store_global_64(out + at * int64(2), ptx.bf16_pair(x[0], x[1]), ptx.bf16_pair(x[2], x[3]))
            place += int64(threads)

    @device_function
    def value_at(address: Any, is_odd: Any) -> Any:
        """A number of bf16, the second of a word where `is_odd`."""
        word = ptx.load_shared_u32(address)
        return high_value(word) if is_odd else low_value(word)

    @device_function
    def walk_row(
        tile: Any, q: Any, k: Any, row: Any, decays: Any, values: Any, is_odd: Any, results: Any, writes: Any
    ) -> Any:
        """The state after a row of a tile; its outputs are stored by the lane that `writes`.

        decays, values, results  addresses of the first row's gates, of its values and outputs in the lane's column
        """
        decay, beta, product, _ = four_numbers(ptx.load_shared_128(uint32(decays + row * uint32(16))))
        at = uint32(values + row * uint32(2 * columns))
        value0, value1 = value_at(at, is_odd), value_at(uint32(at + uint32(8)), is_odd)
        sums = tile_sums(tile, k, q)
        seen0, seen1 = tile_sum(sums[0]), tile_sum(sums[1])
        read0, read1 = tile_sum(sums[2]), tile_sum(sums[3])
        d0 = ptx.mul_rn(beta, ptx.fma_rn(-decay, seen0, value0))
        d1 = ptx.mul_rn(beta, ptx.fma_rn(-decay, seen1, value1))
        if writes:
            at = uint32(results + row * uint32(4 * columns))
            ptx.store_shared_f32(at, rounded(ptx.fma_rn(d0, product, ptx.mul_rn(decay, read0))))
            ptx.store_shared_f32(uint32(at + uint32(16)), rounded(ptx.fma_rn(d1, product, ptx.mul_rn(decay, read1))))
        return update_tile(tile, k, decay, d0, d1)

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
    def keep_tile(snapshots: Any, done: Any, origin: Any, tile: Any) -> Any:
        """Store a lane's part of the snapshots that are due after so many rows, and give the next stop.

        origin  where the part is in the first row of the states
        """
        for pair in range(pairs):
            row, after = int_at(snapshots, int64(2 * pair + 1)), int_at(snapshots, int64(2 * pair + 2))
            if row >= int64(0) and after == done:
                store_tile(origin + row * int64(4 * value_heads * value_dim * key_dim), tile)
        return next_stop(snapshots, done)

    def prefill_gated_delta(
        mixed: Any,
        slot: Any,
        chunk: Any,
        snapshots: Any,
        vectors: Any,
        gates: Any,
        state: Any,
        out: Any,
        count: Any,
    ) -> None:
        base = uint32(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        thread = int64(cuda.threadIdx.x)
        head, part = divide(cuda.blockIdx.x, parts)
        key_head = divide(head, group)[0]
        column = head * int64(value_dim) + part * int64(columns)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        start, live = int_at(chunk, int64(0)), int_at(chunk, int64(1))
        lane, warp = thread & int64(31), thread >> int64(5)
        in_eight = uint32(lane & int64(7))
        own_column = warp * int64(WARP_COLUMNS) + (lane >> int64(3))
        lines, writes, is_odd = (
            uint32(in_eight * uint32(16)),
            in_eight == uint32(0),
            (own_column & int64(1)) == int64(1),
        )
        value_offset = uint32(int64(values_at) + (own_column & int64(-2)) * int64(2))
        out_offset = uint32(own_column * int64(4))
        origin = state + (column + own_column) * int64(4 * key_dim) + int64(in_eight) * int64(16)
        row_bytes = int64(4 * value_heads * value_dim * key_dim)
        own = int_at(slot, int64(0))
        begin, stop = own, int64(NEVER)
        if pairs >= 0:
            begin = int_at(snapshots, int64(0))
            begin = own if begin < int64(0) else begin
            stop = next_stop(snapshots, int64(0))
        for number in range(STAGES - 1):
            copy_tile(base, thread, int64(number), live, count, key_head, head, column, mixed, vectors, gates)
        tile = no_state()
        if start > int64(0):
            tile = load_tile(origin + begin * row_bytes)
        num_tiles = divide(live + int64(tile_size - 1), tile_size)[0]
        for number in range(num_tiles):
            await_tile()
            cuda.syncthreads()
            copy_tile(
                base, thread, number + int64(STAGES - 1), live, count, key_head, head, column, mixed, vectors, gates
            )
            if number > 0:
                write_tile(base, thread, number - int64(1), live, column, out)
            stage = uint32(base + uint32(divide(number, STAGES)[1] * int64(stage_bytes)))
            results = uint32(base + uint32(int64(outputs) + (number & int64(1)) * int64(output_bytes)) + out_offset)
            decays, values = uint32(stage + uint32(gates_at)), uint32(stage + value_offset)
            first = number * int64(tile_size)
            rows, row = uint32(min(live - first, int64(tile_size))), uint32(0)
            while row < rows:  # up to the tile's end or the next snapshot
                end = rows
                if stop - first < int64(rows):
                    end = uint32(stop - first)
                last, vectors_at = uint32(end - uint32(1)), uint32(stage + lines)
                at = uint32(vectors_at + row * uint32(8 * key_dim))
                q, k = load_vector(at), load_vector(uint32(at + uint32(4 * key_dim)))
                while row < end:  # two rows a turn, so that what was loaded ahead need not be moved
                    after = uint32(row + uint32(1))
                    at = uint32(vectors_at + min(after, last) * uint32(8 * key_dim))
                    next_q, next_k = load_vector(at), load_vector(uint32(at + uint32(4 * key_dim)))
                    tile = walk_row(tile, q, k, row, decays, values, is_odd, results, writes)
                    at = uint32(vectors_at + min(uint32(row + uint32(2)), last) * uint32(8 * key_dim))
                    q, k = load_vector(at), load_vector(uint32(at + uint32(4 * key_dim)))
                    if after < end:
                        tile = walk_row(tile, next_q, next_k, after, decays, values, is_odd, results, writes)
                    row = uint32(row + uint32(2))
                row = end
                if first + int64(end) == stop:
                    stop = keep_tile(snapshots, stop, origin, tile)
        await_all()
        cuda.syncthreads()
        if live > int64(0):
            write_tile(base, thread, num_tiles - int64(1), live, column, out)
            store_tile(origin + own * row_bytes, tile)
        place = live * int64(value_fours) + thread
        while place < count * int64(value_fours):
            row, piece = divide(place, value_fours)
            at = row * int64(value_heads * value_dim) + column + piece * int64(4)
            ptx.store_global_64(out + at * int64(2), uint32(0), uint32(0))
            place += int64(threads)

    name = f"prefill_gated_delta_{heads.key_heads}_{value_heads}_{key_dim}_{value_dim}"
    name += (f"_kept{pairs}" if pairs >= 0 else "") + (f"_most{most_blocks}" if most_blocks else "")
    shared = outputs + 2 * output_bytes
    return Kernel(
        name, prefill_gated_delta, (types.int64,) * 9, threads, shared_bytes=shared, most_blocks=most_blocks,
        waits_before_trigger=True,
    )  # fmt: skip


def heads_of(state: Sequence[int], channels: int) -> HeadSizes:
    """The sizes of heads, of the shape of their states [R, Hv, Dv, Dk] and the columns of queries, keys and values."""
    _, value_heads, value_dim, key_dim = state
    return HeadSizes(max(channels - value_heads * value_dim, 0) // (2 * key_dim), value_heads, key_dim, value_dim)


def row_workspaces(heads: HeadSizes, rows: int) -> tuple[WorkspaceShape, WorkspaceShape]:
    """The workspaces of what rows bring: unit queries and keys [Hk, c, 2, Dk], and gates [Hv, c, 4]."""
    return (
        ("delta.vectors", (heads.key_heads, rows, 2, heads.key_dim), torch.float32),
        ("delta.gates", (heads.value_heads, rows, 4), torch.float32),
    )


@launches_with(reference.prefill_delta_rule)
def prefill_delta_rule(given: Given, *, workspace: Workspace, gpu: Gpu = H200) -> list[KernelCall]:
    """`prefill_delta_rule` of the reference; mixed and out are bf16, weights float32.

    Two launches. Time: some 200 cycles a row, whatever the number of heads, as long as a head's blocks find an SM.
    Captured: yes. Raises ShapeError for arguments that do not fit.
    """
    mixed, ba, a_log, dt_bias = (given[name] for name in ("mixed", "ba", "a_log", "dt_bias"))
    rows, heads = mixed.shape[0], HeadSizes(*given.sizes("Hk", "Hv", "Dk", "Dv"))
    check_heads(heads)
    check_dtype(torch.bfloat16, mixed=mixed)
    check_dtype(torch.float32, a_log=a_log, dt_bias=dt_bias)
    vectors, gates = (workspace(*each) for each in row_workspaces(heads, rows))
    grid, blocks = (rows, -(-heads.key_heads // WARPS), 1), heads.value_heads * heads.parts
    return [
        KernelCall(_make_rows(heads), grid, (mixed, ba, a_log, dt_bias, given["chunk"], vectors, gates, rows)),
        KernelCall(
            # SMs that the launch before leaves first would else get more blocks than others, which all wait for
            _make_walk(heads, snapshot_pairs(given.arrays.get("snapshots")), -(-blocks // gpu.num_multiprocessors)),
            (blocks, 1, 1),
            (mixed, *given.take("slot", "chunk", "snapshots"), vectors, gates, given["state"], given["out"], rows),
        ),
    ]


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: 35B-A3B's heads, and the widest."""
    moe, widest = HeadSizes(16, 32, 128, 128), HeadSizes(4, 8, 128, 256)
    return [
        _make_rows(moe),
        _make_walk(moe, 2),
        _make_walk(moe, -1),
        _make_walk(moe, 2, most_blocks=1),
        _make_walk(widest, -1),
    ]
