"""This module has the kernel of the gated delta rule over a step's rows, alone or with convolution and gated norm.

Four warps have up to 32 columns of a head's state in registers, 8 columns a warp. They apply the pending rows, write
the state once, and continue through the step's rows. If the norm follows, the blocks of a head are a cluster, and each
sends its part of the sum of squares to the others. Every block convolves the query and the key of its head by itself,
in shared memory; one of them stores the inputs for later steps. Rings by position keep reads and writes of a launch
apart.

Without drafts a step reads and writes a state once, 8 bytes a number. The output is o = decay S^T q + d (k q) with the
state before the row, so that both products of a row are summed at once.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from lowlat.kernels.common.memory import byte_at, divide, int_at, turns
from lowlat.kernels.common.norm_math import high_value, low_value
from lowlat.kernels.recurrent.delta_math import (
    beta_of,
    convolved,
    decay_of,
    four_numbers,
    gated,
    head_inverse,
    lane_squares,
    part_sum,
    rounded,
    store_four,
    tile_sum,
    unit_heads,
)
from lowlat.kernels.recurrent.limits import TAPS, part_columns
from lowlat.kernels.toolchain import ptx, ptx_state
from lowlat.kernels.toolchain.kernel import Kernel, plan_name
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["HeadSizes", "StepSizes", "make_step"]

WARP_COLUMNS = 8
NAN = math.nan
KEPT = TAPS - 1


@dataclass(frozen=True)
class HeadSizes:
    """Key heads, value heads, and the sizes of each."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def columns(self) -> int:
        """Columns of a value head that a block has."""
        return part_columns(self.value_dim)

    @property
    def parts(self) -> int:
        """Blocks of a value head."""
        return self.value_dim // self.columns

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Columns of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class StepSizes:
    """The sizes that decide a kernel.

    rows       a slot
    width      columns of x
    inputs     places of the convolution's ring; 0: x is what the convolution gave, in bf16
    pending    places of the ring of pending rows
    eps        of the gated norm; None: the output is the rule's
    wide_norm  the norm's weight is float32
    early      lengths, states and pending rows are older than the kernel before, and are read before it ends
    """

    heads: HeadSizes
    rows: int
    width: int
    inputs: int
    pending: int
    eps: float | None
    wide_norm: bool
    early: bool


@cache
def make_step(sizes: StepSizes) -> Kernel:
    """Grid (B * Hv * blocks of a head,)."""
    heads, rows, width, ring, places = sizes.heads, sizes.rows, sizes.width, sizes.inputs, sizes.pending
    key_heads, value_heads, key_dim, value_dim = heads.key_heads, heads.value_heads, heads.key_dim, heads.value_dim
    columns, parts, group, channels = heads.columns, heads.parts, heads.group, heads.channels
    convolves, norms, eps, early, wide_norm = ring > 0, sizes.eps is not None, sizes.eps, sizes.early, sizes.wide_norm
    threads = columns // WARP_COLUMNS * 32
    warps, most = threads // 32, places // 2
    own = 2 * key_dim + columns  # channels of a block: its query, its key, its columns of values
    fours, key_fours, value_fours = own // 4, key_dim // 4, columns // 4
    scale, value_channel, first_gate = key_dim**-0.5, 2 * key_heads * key_dim, width - value_heads * value_dim
    # shared memory, in bytes
    mixed = 0
    gates = mixed + rows * own * 4
    outputs = gates + rows * 16
    pending_keys = outputs + rows * columns * 4
    pending_values = pending_keys + most * key_dim * 4
    pending_decays = pending_values + most * columns * 4
    squares = pending_decays + -(-most // 4) * 16
    fresh = squares + -(-rows * parts // 4) * 16
    known = fresh + rows * own * 4 * convolves
    taps_at = known + KEPT * own * 2 * convolves
    z_at = taps_at + own * 2 * TAPS * convolves
    shared_bytes = z_at + rows * columns * 4 * norms
    # a lane's part of the state: two columns four apart, and every eighth four numbers of each
    pieces, stride, tile_rows = key_dim // 32, 4 * key_dim * 4, key_dim // 8
    load_tile, store_tile = ptx_state.load_tile(pieces, stride), ptx_state.store_tile(pieces, stride)
    tile_sums, update_tile = ptx_state.tile_sums(tile_rows), ptx_state.update_tile(tile_rows)
    load_vector, no_state = ptx.load_shared_tiles(pieces, 128), ptx.zeros(ptx_state.COLUMNS * tile_rows)
    await_known, await_all = ptx.copies_wait(1), ptx.copies_wait(0)

    @device_function
    def channel_of(place: Any, key_head: Any, column: Any) -> Any:
        """The channel of x at a place among a block's; column: its first of the values."""
        channel = int64(value_channel) + column + place - int64(2 * key_dim)
        if place < int64(key_dim):
            channel = key_head * int64(key_dim) + place
        elif place < int64(2 * key_dim):
            channel = int64(key_heads * key_dim) + key_head * int64(key_dim) + place - int64(key_dim)
        return channel

    @device_function
    def live_rows(row_live: Any, first: Any, slot: Any) -> Any:
        count = int64(0)
        if slot >= int64(0):
            for row in range(rows):
                count += int64(byte_at(row_live, first + int64(row)) != int64(0))
        return count

    @device_function
    def copy_pending(
        base: Any, thread: Any, slot: Any, start: Any, count: Any, key_head: Any, head: Any, column: Any, k: Any,
        d: Any, g: Any,
    ) -> None:  # fmt: skip
        place = thread
        while place < count * int64(key_fours + value_fours):
            row, piece = divide(place, key_fours + value_fours)
            at = slot * int64(places) + divide(start + row, places)[1]
            if piece < int64(key_fours):
                source = k + ((at * int64(key_heads) + key_head) * int64(key_fours) + piece) * int64(16)
                target = int64(pending_keys) + (row * int64(key_fours) + piece) * int64(16)
            else:
                piece -= int64(key_fours)
                source = d + (at * int64(value_heads * value_dim) + column) * int64(4) + piece * int64(16)
                target = int64(pending_values) + (row * int64(value_fours) + piece) * int64(16)
            ptx.copy_async_16(uint32(base + uint32(target)), source)
            place += int64(threads)
        if thread < count:
            at = slot * int64(places) + divide(start + thread, places)[1]
            target = uint32(int64(pending_decays) + thread * int64(4))
            ptx.copy_async_4(uint32(base + target), g + (at * int64(value_heads) + head) * int64(4))

    @device_function
    def copy_known(
        base: Any, thread: Any, slot: Any, position: Any, key_head: Any, column: Any, taps: Any, conv_state: Any
    ) -> None:
        """The inputs before the step's, none before position 0, and the taps."""
        place = thread
        while place < int64(KEPT * (own // 8)):
            row, piece = divide(place, own // 8)
            before = position - int64(KEPT) + row
            if before >= int64(0):
                at = slot * int64(ring) + divide(before, ring)[1]
                channel = channel_of(piece * int64(8), key_head, column)
                target = uint32(int64(known) + (row * int64(own) + piece * int64(8)) * int64(2))
                ptx.copy_async_16(uint32(base + target), conv_state + (at * int64(channels) + channel) * int64(2))
            place += int64(threads)
        place = thread
        while place < int64(own // 2):
            channel = channel_of(place * int64(2), key_head, column)
            target = uint32(int64(taps_at) + place * int64(16))
            ptx.copy_async_16(uint32(base + target), taps + channel * int64(2 * TAPS))
            place += int64(threads)

    @device_function
    def copy_fresh(base: Any, thread: Any, first: Any, count: Any, key_head: Any, column: Any, x: Any, z: Any) -> None:
        """The step's own inputs, or what the convolution gave of them, and the gates z of its columns."""
        place = thread
        while place < count * int64(fours):
            row, piece = divide(place, fours)
            channel = channel_of(piece * int64(4), key_head, column)
            at = (first + row) * int64(width) + channel
            if convolves:
                ptx.copy_async_16(uint32(base + uint32(int64(fresh) + place * int64(16))), x + at * int64(4))
            else:
                low, high = ptx.load_global_64(x + at * int64(2))
                target = uint32(base + uint32(int64(mixed) + place * int64(16)))
                store_four(target, low_value(low), high_value(low), low_value(high), high_value(high))
            place += int64(threads)
        if norms:
            place = thread
            while place < count * int64(value_fours):
                row, piece = divide(place, value_fours)
                at = (first + row) * int64(width) + int64(first_gate) + column
                target = uint32(base + uint32(int64(z_at) + place * int64(16)))
                ptx.copy_async_16(target, z + at * int64(4) + piece * int64(16))
                place += int64(threads)

    @device_function
    def input_four(base: Any, row: Any, piece: Any, position: Any) -> Any:
        """Four inputs at a row of the step, or before it."""
        a, b, c, d = float32(0.0), float32(0.0), float32(0.0), float32(0.0)
        if row >= int64(0):
            at = uint32(base + uint32(int64(fresh) + (row * int64(fours) + piece) * int64(16)))
            a, b, c, d = four_numbers(ptx.load_shared_128(at))
            a, b, c, d = rounded(a), rounded(b), rounded(c), rounded(d)
        elif position + row >= int64(0):
            at = uint32(base + uint32(int64(known) + ((row + int64(KEPT)) * int64(fours) + piece) * int64(8)))
            low, high = ptx.load_shared_u32(at), ptx.load_shared_u32(at + uint32(4))
            a, b, c, d = low_value(low), high_value(low), low_value(high), high_value(high)
        return a, b, c, d

    @device_function
    def tap_four(base: Any, channel: Any) -> Any:
        """The taps of a channel of the block."""
        at = uint32(base + uint32(int64(taps_at) + channel * int64(2 * TAPS)))
        low, high = ptx.load_shared_u32(at), ptx.load_shared_u32(at + uint32(4))
        return low_value(low), high_value(low), low_value(high), high_value(high)

    @device_function
    def convolve(
        base: Any, thread: Any, slot: Any, position: Any, count: Any, key_head: Any, column: Any, keeps: Any,
        conv_state: Any,
    ) -> None:  # fmt: skip
        """The convolution of the step's rows; their inputs are stored, the query's and the key's where `keeps`."""
        place = thread
        while place < count * int64(fours):
            row, piece = divide(place, fours)
            x0 = input_four(base, row - int64(3), piece, position)
            x1 = input_four(base, row - int64(2), piece, position)
            x2 = input_four(base, row - int64(1), piece, position)
            x3 = input_four(base, row, piece, position)
            u = tap_four(base, piece * int64(4))
            v = tap_four(base, piece * int64(4) + int64(1))
            w = tap_four(base, piece * int64(4) + int64(2))
            y = tap_four(base, piece * int64(4) + int64(3))
            store_four(
                uint32(base + uint32(int64(mixed) + place * int64(16))),
                convolved(x0[0], x1[0], x2[0], x3[0], u[0], u[1], u[2], u[3]),
                convolved(x0[1], x1[1], x2[1], x3[1], v[0], v[1], v[2], v[3]),
                convolved(x0[2], x1[2], x2[2], x3[2], w[0], w[1], w[2], w[3]),
                convolved(x0[3], x1[3], x2[3], x3[3], y[0], y[1], y[2], y[3]),
            )
            if keeps or piece >= int64(2 * key_fours):
                at = slot * int64(ring) + divide(position + row, ring)[1]
                channel = channel_of(piece * int64(4), key_head, column)
                target = conv_state + (at * int64(channels) + channel) * int64(2)
                ptx.store_global_64(target, ptx.bf16_pair(x3[0], x3[1]), ptx.bf16_pair(x3[2], x3[3]))
            place += int64(threads)

    @device_function
    def store_gates(base: Any, row: Any, first: Any, head: Any, ba: Any, a_log: Any, dt_bias: Any, broken: Any) -> None:
        """The decay and beta of a row; NaN where the slot's states cannot be those before it."""
        at = ba + ((first + row) * int64(2 * value_heads) + head) * int64(4)
        beta = beta_of(ptx.load_global_f32(at))
        decay = decay_of(ptx.load_global_f32(at + int64(4 * value_heads)), a_log, dt_bias)
        if broken:
            beta = float32(NAN)
        target = uint32(base + uint32(int64(gates) + row * int64(16)))
        ptx.store_shared_f32(target, decay)
        ptx.store_shared_f32(target + uint32(4), beta)

    @device_function
    def keep_rows(
        base: Any, thread: Any, slot: Any, position: Any, count: Any, key_head: Any, head: Any, keeps: Any, k: Any,
        g: Any,
    ) -> None:  # fmt: skip
        """The rows' decays as pending ones, by a head's first block, and their keys where it `keeps` those."""
        if keeps:
            place = thread
            while place < count * int64(key_fours):
                row, piece = divide(place, key_fours)
                at = slot * int64(places) + divide(position + row, places)[1]
                source = uint32(base + uint32(int64(mixed) + (row * int64(own) + int64(key_dim)) * int64(4)))
                words = ptx.load_shared_128(source + uint32(piece * int64(16)))
                target = k + ((at * int64(key_heads) + key_head) * int64(key_fours) + piece) * int64(16)
                ptx.store_global_128(target, words[0], words[1], words[2], words[3])
                place += int64(threads)
        if thread < count:
            at = slot * int64(places) + divide(position + thread, places)[1]
            decay = ptx.load_shared_f32(uint32(base + uint32(int64(gates) + thread * int64(16))))
            ptx.store_global_f32(g + (at * int64(value_heads) + head) * int64(4), decay)

    @device_function
    def weight_four(weight: Any, column: Any) -> Any:
        """Four of the norm's weights."""
        if wide_norm:
            return four_numbers(ptx.load_global_nc_128(weight + column * int64(4)))
        low, high = ptx.load_global_64(weight + column * int64(2))
        return low_value(low), high_value(low), low_value(high), high_value(high)

    @device_function
    def output_four(base: Any, row: Any, piece: Any) -> Any:
        at = uint32(base + uint32(int64(outputs) + (row * int64(value_fours) + piece) * int64(16)))
        return four_numbers(ptx.load_shared_128(at))

    @device_function
    def share_squares(base: Any, thread: Any, part: Any, count: Any) -> None:
        """Tell all blocks of the head this one's sums of squares."""
        for turn in range(turns(rows * value_fours, threads)):
            row, piece = divide(thread + turn * threads, value_fours)
            x = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))
            if row < count:
                x = output_four(base, row, piece)
            total = part_sum(lane_squares(x), value_fours)
            if row < count and piece == int64(0):
                target = uint32(base + uint32(int64(squares) + (row * int64(parts) + part) * int64(4)))
                if parts == 1:
                    ptx.store_shared_f32(target, total)
                else:
                    for peer in range(parts):
                        ptx_state.store_shared_of_peer(target, uint32(peer), total)
        if parts == 1:
            cuda.syncthreads()
        else:
            ptx_state.sync_cluster_memory()

    @device_function
    def write_out(base: Any, thread: Any, first: Any, count: Any, column: Any, weights: Any, out: Any) -> None:
        """The outputs of the block's columns, normed if the kernel does so, zeros for dead rows."""
        for turn in range(turns(rows * value_fours, threads)):
            row, piece = divide(thread + turn * threads, value_fours)
            if row < int64(rows):
                low, high = uint32(0), uint32(0)
                if row < count:
                    x = output_four(base, row, piece)
                    if norms:
                        sums = uint32(base + uint32(int64(squares) + row * int64(4 * parts)))
                        inverse = head_inverse(sums, parts, value_dim, eps)
                        at = uint32(base + uint32(int64(z_at) + (row * int64(value_fours) + piece) * int64(16)))
                        z = four_numbers(ptx.load_shared_128(at))
                        low = ptx.bf16_pair(
                            gated(x[0], inverse, weights[0], z[0]), gated(x[1], inverse, weights[1], z[1])
                        )
                        high = ptx.bf16_pair(
                            gated(x[2], inverse, weights[2], z[2]), gated(x[3], inverse, weights[3], z[3])
                        )
                    else:
                        low, high = ptx.bf16_pair(x[0], x[1]), ptx.bf16_pair(x[2], x[3])
                at = (first + row) * int64(value_heads * value_dim) + column + piece * int64(4)
                ptx.store_global_64(out + at * int64(2), low, high)

    def gated_delta(
        x: Any,
        taps: Any,
        conv_state: Any,
        ba: Any,
        a_log: Any,
        dt_bias: Any,
        slots: Any,
        dense_lens: Any,
        state_lens: Any,
        row_live: Any,
        state: Any,
        pending_k: Any,
        pending_d: Any,
        pending_g: Any,
        norm_weight: Any,
        out: Any,
    ) -> None:
        base = uint32(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        thread = int64(cuda.threadIdx.x)
        rest, part = divide(cuda.blockIdx.x, parts)
        owner, head = divide(rest, value_heads)
        key_head, in_group = divide(head, group)
        column, first = head * int64(value_dim) + part * int64(columns), owner * int64(rows)
        keeps = part == int64(0) and in_group == int64(0)
        weights = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))
        if norms:  # a thread has the same columns of every row that it writes
            piece = divide(thread, value_fours)[1]
            weights = weight_four(norm_weight, part * int64(columns) + piece * int64(4))
        own_a_log = ptx.load_global_f32(a_log + head * int64(4))
        own_dt_bias = ptx.load_global_f32(dt_bias + head * int64(4))
        if not early:
            ptx.wait_for_previous_kernel()
            ptx.let_next_kernel_start()
        slot = int_at(slots, owner)
        count = live_rows(row_live, first, slot)
        position, num_pending, broken, tile = int64(0), int64(0), False, no_state()
        lane, warp = thread & int64(31), thread >> int64(5)
        rank, in_eight = lane >> int64(3), uint32(lane & int64(7))
        own_column = warp * int64(WARP_COLUMNS) + rank
        place = (slot * int64(value_heads * value_dim) + column + own_column) * int64(4 * key_dim)
        place = state + place + int64(in_eight) * int64(16)
        if count > int64(0):
            position = int_at(dense_lens, owner)
            num_pending = position - int_at(state_lens, slot)
            broken = num_pending < int64(0) or num_pending > int64(most)
            if broken:
                num_pending = int64(0)
            copy_pending(
                base, thread, slot, position - num_pending, num_pending, key_head, head, column, pending_k, pending_d,
                pending_g,
            )  # fmt: skip
            if convolves:
                copy_known(base, thread, slot, position, key_head, column, taps, conv_state)
            tile = load_tile(place)
        ptx.copies_commit()
        if early:
            ptx.wait_for_previous_kernel()
            ptx.let_next_kernel_start()
        if count == int64(0):
            write_out(base, thread, first, count, column, weights, out)
            return
        copy_fresh(base, thread, first, count, key_head, column, x, x)
        ptx.copies_commit()
        if thread < count:
            store_gates(base, thread, first, head, ba, own_a_log, own_dt_bias, broken)
        await_known()
        cuda.syncthreads()
        lines = uint32(base + in_eight * uint32(16))
        for row in range(num_pending):
            k = load_vector(uint32(lines + uint32(int64(pending_keys) + row * int64(4 * key_dim))))
            decay = ptx.load_shared_f32(uint32(base + uint32(int64(pending_decays) + row * int64(4))))
            at = uint32(base + uint32(int64(pending_values) + (row * int64(columns) + own_column) * int64(4)))
            tile = update_tile(tile, k, decay, ptx.load_shared_f32(at), ptx.load_shared_f32(at + uint32(16)))
        if num_pending > int64(0):
            store_tile(place, tile)
        await_all()
        cuda.syncthreads()
        if convolves:
            convolve(base, thread, slot, position, count, key_head, column, keeps, conv_state)
            cuda.syncthreads()
        row = warp
        while row < count:
            query = uint32(base + uint32(int64(mixed) + row * int64(4 * own)))
            product = unit_heads(query, uint32(query + uint32(4 * key_dim)), uint32(lane), key_dim, scale)
            if lane == int64(0):
                ptx.store_shared_f32(uint32(base + uint32(int64(gates + 8) + row * int64(16))), product)
            row += int64(warps)
        cuda.syncthreads()
        if part == int64(0):
            keep_rows(base, thread, slot, position, count, key_head, head, keeps, pending_k, pending_g)
        for row in range(count):
            q = load_vector(uint32(lines + uint32(int64(mixed) + row * int64(4 * own))))
            k = load_vector(uint32(lines + uint32(int64(mixed + 4 * key_dim) + row * int64(4 * own))))
            decay, beta, product, _ = four_numbers(
                ptx.load_shared_128(uint32(base + uint32(int64(gates) + row * int64(16))))
            )
            sums = tile_sums(tile, k, q)
            seen0, seen1 = tile_sum(sums[0]), tile_sum(sums[1])
            read0, read1 = tile_sum(sums[2]), tile_sum(sums[3])
            at = uint32(base + uint32(int64(mixed + 8 * key_dim) + (row * int64(own) + own_column) * int64(4)))
            d0 = ptx.mul_rn(beta, ptx.fma_rn(-decay, seen0, ptx.load_shared_f32(at)))
            d1 = ptx.mul_rn(beta, ptx.fma_rn(-decay, seen1, ptx.load_shared_f32(at + uint32(16))))
            if in_eight == uint32(0):
                at = uint32(base + uint32(int64(outputs) + (row * int64(columns) + own_column) * int64(4)))
                ptx.store_shared_f32(at, rounded(ptx.fma_rn(d0, product, ptx.mul_rn(decay, read0))))
                ptx.store_shared_f32(at + uint32(16), rounded(ptx.fma_rn(d1, product, ptx.mul_rn(decay, read1))))
                kept = slot * int64(places) + divide(position + row, places)[1]
                target = pending_d + (kept * int64(value_heads * value_dim) + column + own_column) * int64(4)
                ptx.store_global_f32(target, d0)
                ptx.store_global_f32(target + int64(16), d1)
            tile = update_tile(tile, k, decay, d0, d1)
        cuda.syncthreads()
        if norms:
            share_squares(base, thread, part, count)
        write_out(base, thread, first, count, column, weights, out)

    return Kernel(
        plan_name("gated_delta", sizes), gated_delta, (types.int64,) * 16, threads, shared_bytes=shared_bytes,
        cluster=parts if norms else 1, waits_before_trigger=True,
    )  # fmt: skip
