"""This module has DFlash2's kernels: the convolution along a block's rows, and the walk through candidates."""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import divide, int_at, set_int
from lowlat.kernels.common.norm_math import lane_sum
from lowlat.kernels.common.norm_row import chunk_values, is_live
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation import local_conv as reference
from lowlat.kernels.speculation.limits import GROUPS, SCORED_RANKS, VECTORS
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32

__all__ = ["examples", "local_conv", "walk_candidates"]

THREADS = 128
CHUNK = 8
WARPS, LANES = 16, 32


@launches(reference.local_conv)
def local_conv(given: Given) -> list[KernelCall]:
    """`local_conv` of the reference; x and out are bf16 or float32, the weight bf16.

    Raises ShapeError for rows that are no whole blocks or groups, and groups outside of GROUPS.
    """
    (count, width), taps, (_, rows) = given["x"].shape, given["weight"].shape[1], given["row_live"].shape
    group, side = given.params["group"], given.params["side"]
    GROUPS.check("local_conv: columns of a group", group)
    check_shape("coefficients", given["coefficients"], count, 2 * taps * (width // group))
    check_dtype(torch.bfloat16, weight=given["weight"])
    if given["row_live"].numel() != count or width % group:
        raise ShapeError(f"local_conv: {count} rows of {width}, blocks of {rows}, groups of {group} do not fit")
    kernel = _make_conv(width, rows, taps, group, side, *(given[name].dtype == torch.float32 for name in ("x", "out")))
    return [KernelCall(kernel, (count, -(-(width // CHUNK) // THREADS), 1), given.tensors)]


@cache
def _make_conv(width: int, rows: int, taps: int, group: int, side: int, reads: bool, writes: bool) -> Kernel:
    """Eight columns a thread, which are of one group: grid (M, chunks of a row / THREADS).

    reads, writes  whether x and out are float32
    """
    groups = width // group
    in_bytes, out_bytes = (4 if wide else 2 for wide in (reads, writes))

    @device_function
    def added(total: Any, value: Any, base: Any, own: Any) -> Any:
        return ptx.add_rn(total, ptx.mul_rn(ptx.add_rn(base, own), value))

    def kernel(x: Any, coefficients: Any, row_live: Any, weight: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row = int64(cuda.blockIdx.x)
        _, place = divide(row, rows)
        chunk = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if chunk < uint32(width // CHUNK):
            zero = float32(0.0)
            a0, a1, a2, a3, a4, a5, a6, a7 = zero, zero, zero, zero, zero, zero, zero, zero
            mine = int64(uint32(chunk * uint32(CHUNK)) // uint32(group))
            if is_live(row_live, row):
                for tap in range(taps):
                    if place >= tap:
                        at = (row * (2 * taps) + (side * taps + tap)) * groups + mine
                        own = ptx.load_global_f32(coefficients + at * int64(4))
                        w = chunk_values(weight + int64((side * taps + tap) * width * 2), chunk, False)
                        v = chunk_values(x + (row - tap) * int64(in_bytes * width), chunk, reads)
                        a0, a1 = added(a0, v[0], w[0], own), added(a1, v[1], w[1], own)
                        a2, a3 = added(a2, v[2], w[2], own), added(a3, v[3], w[3], own)
                        a4, a5 = added(a4, v[4], w[4], own), added(a5, v[5], w[5], own)
                        a6, a7 = added(a6, v[6], w[6], own), added(a7, v[7], w[7], own)
            target = out + row * int64(out_bytes * width) + int64(chunk) * int64(out_bytes * CHUNK)
            if writes:
                b0, b1, b2, b3 = (
                    ptx.bits_of_float(a0), ptx.bits_of_float(a1), ptx.bits_of_float(a2), ptx.bits_of_float(a3)
                )  # fmt: skip
                ptx.store_global_128(target, b0, b1, b2, b3)
                b4, b5, b6, b7 = (
                    ptx.bits_of_float(a4), ptx.bits_of_float(a5), ptx.bits_of_float(a6), ptx.bits_of_float(a7)
                )  # fmt: skip
                ptx.store_global_128(target + int64(16), b4, b5, b6, b7)
            else:
                p0, p1 = ptx.bf16_pair(a0, a1), ptx.bf16_pair(a2, a3)
                p2, p3 = ptx.bf16_pair(a4, a5), ptx.bf16_pair(a6, a7)
                ptx.store_global_128(target, p0, p1, p2, p3)

    kinds = f"{'f' if reads else 'b'}{'f' if writes else 'b'}"
    name = f"local_conv_{kinds}_{width}_{rows}_{taps}x{group}_{side}"
    return Kernel(name, kernel, (types.int64,) * 5, THREADS, waits_before_trigger=True)


@launches(reference.walk_candidates)
def walk_candidates(given: Given) -> list[KernelCall]:
    """`walk_candidates` of the reference; vectors are bf16.

    Raises ShapeError for rows that do not fit, k outside of SCORED_RANKS, and ranks outside of VECTORS.
    """
    batch, rows, count, nodes, ranks, rank = given.sizes("B", "R", "M", "N", "k", "r")
    first_row = given.params["first_row"]
    SCORED_RANKS.check("walk_candidates: candidates of a row", ranks)
    VECTORS.check("walk_candidates: the rank", rank)
    check_dtype(torch.bfloat16, predecessors=given["predecessors"], successors=given["successors"])
    if count != batch * rows or not 0 <= first_row < rows or nodes <= rows - first_row:
        raise ShapeError(f"walk_candidates: {count} rows, {rows} a slot, from {first_row} on draft no {nodes} nodes")
    kernel = _make_walk(rows, first_row, nodes, ranks, rank)
    return [KernelCall(kernel, (batch, 1, 1), given.tensors)]


@cache
def _make_walk(rows: int, first_row: int, num_nodes: int, ranks: int, rank: int) -> Kernel:
    """A block a slot, a warp a candidate in turn: grid (B,)."""
    chunks = rank // CHUNK

    def kernel(
        candidates: Any, scores: Any, hidden: Any, tokens: Any, predecessors: Any, successors: Any, draft_nodes: Any
    ) -> None:
        found = cuda.shared.array(shape=ranks, dtype=float32)
        chosen = cuda.shared.array(shape=1, dtype=int32)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        owner, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        warp, lane = divide(thread, LANES)
        if thread == 0:
            chosen[0] = int32(int_at(tokens, owner * rows))
        cuda.syncthreads()
        for node in range(1, rows - first_row + 1):
            row = owner * rows + (first_row + node - 1)
            before = int64(chosen[0])
            if before >= 0:
                for place in range(warp, ranks, WARPS):
                    token, total = int_at(candidates, row * ranks + place), float32(0.0)
                    if token >= 0:
                        for chunk in range(lane, chunks, LANES):
                            a = chunk_values(predecessors + before * int64(2 * rank), chunk, False)
                            h = chunk_values(hidden + row * int64(4 * rank), chunk, True)
                            b = chunk_values(successors + token * int64(2 * rank), chunk, False)
                            for number in range(CHUNK):
                                edge = ptx.mul_rn(ptx.mul_rn(a[number], h[number]), b[number])
                                total = ptx.add_rn(total, edge)
                    total = lane_sum(total)
                    if lane == 0:
                        own = ptx.load_global_f32(scores + (row * ranks + place) * int64(4))
                        found[place] = ptx.add_rn(own, total)
            cuda.syncthreads()
            if thread == 0:
                best = int64(-1)
                if before >= 0:
                    best = int_at(candidates, row * ranks)
                    top = found[0]
                    for place in range(1, ranks):
                        token = int_at(candidates, row * ranks + place)
                        if token >= 0 and found[place] > top:
                            best, top = token, found[place]
                set_int(draft_nodes, owner * num_nodes + node, best)
                chosen[0] = int32(best)
            cuda.syncthreads()

    name = f"walk_candidates_{rows}_{first_row}_{num_nodes}_{ranks}x{rank}"
    return Kernel(name, kernel, (types.int64,) * 7, WARPS * LANES)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    return [
        _make_conv(5120, 8, 2, 16, 0, False, False),
        _make_conv(5120, 8, 2, 16, 1, True, True),
        _make_walk(8, 1, 8, 16, 256),
    ]
