"""This module makes the best pairs of rows of logits if no GEMM left them, for `sample` and `argmax`; and finite flags.

A block reads a chunk of a row and stores its best pair, in the form of `select`. So a kernel that begins with pairs
finds them as the LM head's GEMM would leave them, except that the chunks differ.
"""

import functools
from typing import Any

import torch

from lowlat.kernels.reference.sampling import sample as reference
from lowlat.kernels.sampling.select import (
    BROKEN,
    CHUNK,
    FINITE,
    INFINITY,
    MINUS_INFINITY,
    THREADS,
    WARPS,
    best_partial,
    block_best,
    copies_wait_all,
    count_chunks,
    load_words,
    make_stage,
    words_best,
    words_broken,
)
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall, Workspace
from lowlat.kernels.toolchain.launches import Given, launches_with
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types, uint32
from lowlat.kernels.toolchain.ptx import (
    let_next_kernel_start,
    load_global_u8,
    shared_address,
    store_global_64,
    store_global_u8,
    wait_for_previous_kernel,
)

__all__ = ["examples", "finite", "row_pairs"]

PAIRS = 2 * WARPS


def row_pairs(logits: torch.Tensor, limit: int, workspace: Workspace) -> tuple[torch.Tensor, list[KernelCall]]:
    """The best pairs of rows, and the launch that writes them.

    logits  [M, V]  float32
    limit   bits of the largest magnitude that leaves a row whole: `select.FINITE` or `select.INFINITY`
    The pairs are [M, chunks, 2] int32, of a workspace that the next caller of as many shares. Raises ShapeError for V
    above 327680.
    """
    rows, width = logits.shape
    chunks = count_chunks("logits", width)
    pairs = workspace(f"row_pairs.{rows}.{chunks}", (rows, chunks, 2), torch.int32)
    return pairs, [KernelCall(_make_pairs(width, limit), (chunks, rows, 1), (logits, pairs))]


@launches_with(reference.finite)
def finite(given: Given, *, workspace: Workspace) -> list[KernelCall]:
    """`finite` of the reference. Two launches. Raises ShapeError for arguments that do not fit, and as `row_pairs`."""
    pairs, calls = row_pairs(given["logits"], FINITE, workspace)
    grid = (given["finite"].numel(), 1, 1)
    return [*calls, KernelCall(_make_finite(pairs.shape[1]), grid, (pairs, *given.take("row_live", "finite")))]


@functools.cache
def _make_pairs(width: int, limit: int) -> Kernel:
    """Grid (chunks of a row, M)."""
    chunks, stage = count_chunks("logits", width), make_stage(width)

    def row_pairs_kernel(logits: Any, out: Any) -> None:
        wait_for_previous_kernel()
        let_next_kernel_start()
        staged = cuda.shared.array(CHUNK, types.uint32, alignment=16)
        pairs = cuda.shared.array(PAIRS, types.uint32)
        base = shared_address(staged)
        chunk, row = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        first = chunk * CHUNK
        stage(base, logits + row * (4 * width), first, uint32(MINUS_INFINITY))
        copies_wait_all()
        words = load_words(base)
        key, low = words_best(words, first)
        if words_broken(words, first, width, uint32(limit)):
            key = uint32(BROKEN)
        key, low = block_best(key, low, pairs)
        if cuda.threadIdx.x == 0:
            store_global_64(out + (row * chunks + chunk) * 8, key, low)

    return Kernel(f"row_pairs_{width}_{limit:x}", row_pairs_kernel, (types.int64,) * 2, THREADS)


@functools.cache
def _make_finite(chunks: int) -> Kernel:
    """A warp a row: grid (M,)."""

    def finite_kernel(pairs: Any, row_live: Any, out: Any) -> None:
        wait_for_previous_kernel()
        let_next_kernel_start()
        row = int64(cuda.blockIdx.x)
        key, _ = best_partial(pairs + row * (8 * chunks), chunks)
        if cuda.threadIdx.x == 0:
            sound = load_global_u8(row_live + row) != uint32(0) and key != uint32(BROKEN)
            store_global_u8(out + row, uint32(1) if sound else uint32(0))

    return Kernel(f"finite_{chunks}", finite_kernel, (types.int64,) * 3, 32)


def examples() -> list[Kernel]:
    """Specialisations for CI to compile: with and without wide loads."""
    return [_make_pairs(128256, FINITE), _make_pairs(97, INFINITY), _make_finite(32)]
