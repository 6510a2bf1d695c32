"""This module gathers embedding rows from a row-major weight, or from the packed one of the LM head's GEMM.

So tied embeddings need one copy. It may also compute the first norm. A scale multiplies rows in float32, each number
rounded once.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.norm_math import THREADS, WARPS, high_value, low_value
from lowlat.kernels.common.norm_row import (
    chunk_address,
    gather_chunk,
    is_live,
    load_first,
    make_norm_functions,
    store_row,
    table_row,
    weights_label,
)
from lowlat.kernels.elementwise.norm import are_wide, check_dtype, check_row_live, check_width
from lowlat.kernels.gemm.packing import PackedMatrix
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32

__all__ = ["check_table", "embed", "embed_norm", "examples"]

EMBED_THREADS = 128


def check_table(weight: torch.Tensor | PackedMatrix, width: int) -> tuple[torch.Tensor, bool]:
    """The tensor after an embedding weight, and whether it is packed.

    Raises ShapeError unless its rows have `width` elements in their own order.
    """
    if isinstance(weight, PackedMatrix):
        if weight.order is not None:
            raise ShapeError("an embedding's packed rows must stand in their own order")
        if weight.columns != width:
            raise ShapeError(f"weight must have {width} columns, got {weight.columns}")
        check_dtype(torch.bfloat16, weight=weight.tiles)
        return weight.tiles, True
    check_shape("weight", weight, weight.shape[0], width)
    check_dtype(torch.bfloat16, weight=weight)
    return weight, False


@device_function
def _times(word: Any, factor: Any) -> Any:
    """Two packed bf16 times a factor, each product rounded once."""
    return ptx.bf16_pair(ptx.mul_rn(low_value(word), factor), ptx.mul_rn(high_value(word), factor))


def _make_gather(scale: float | None) -> Any:
    """The function `gather_chunk`, or one that multiplies by a scale."""
    if scale is None:
        return gather_chunk
    factor = scale

    @device_function
    def gather_scaled(table: Any, token: Any, chunk: Any, target: Any, width: Any, tiled: Any) -> Any:
        words = (uint32(0), uint32(0), uint32(0), uint32(0))
        if token >= 0:
            a, b, c, d = ptx.load_global_nc_128(chunk_address(table_row(table, token, width, tiled), chunk, tiled))
            by = float32(factor)
            words = _times(a, by), _times(b, by), _times(c, by), _times(d, by)
        ptx.store_global_128(target + int64(chunk) * int64(16), words[0], words[1], words[2], words[3])
        return words

    return gather_scaled


@cache
def _make_scaled_embed_norm(width: int, tiled: bool, eps: float, wide: bool, scale: float) -> Kernel:
    """A block a row: grid (M,). wide: the norm's weight is float32. The norm reads the row as it was stored."""
    functions, gather = make_norm_functions(wide), _make_gather(scale)
    load_first_weights, finish_norm = functions.load_first, functions.finish

    def scaled_embed_norm(tokens: Any, table: Any, weight: Any, row_live: Any, out: Any, normed: Any) -> None:
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        row, thread = int64(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        token = int32(ptx.load_global_i32(tokens + row * int64(4)))
        live = is_live(row_live, row) and token >= int32(0)
        target = out + row * int64(width * 2)
        first, chunk = (uint32(0), uint32(0), uint32(0), uint32(0)), thread
        while chunk < uint32(width // 8):
            words = gather(table, token, chunk, target, width, tiled)
            if chunk == thread:
                first = words
            chunk = uint32(chunk + uint32(THREADS))
        place = normed + row * int64(width * 2)
        finish_norm(first, weights, target, False, weight, place, int64(0), live, sums, width, eps)

    name = f"{_name('embed_norm', width, tiled, scale)}_eps{eps!r}{weights_label(wide)}"
    return Kernel(name, scaled_embed_norm, (types.int64,) * 6, THREADS, waits_before_trigger=True)


def _name(kind: str, width: int, tiled: bool, scale: float | None) -> str:
    return f"{kind}_n{width}_{'packed' if tiled else 'rows'}{'' if scale is None else f'_scale{scale!r}'}"


@cache
def _make_embed(width: int, tiled: bool, scale: float | None = None) -> Kernel:
    """Every chunk of every row has a thread: grid (M, chunks of a row / EMBED_THREADS)."""
    gather = _make_gather(scale)

    def embed(tokens: Any, weight: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row = int64(cuda.blockIdx.x)
        chunk = uint32(uint32(cuda.blockIdx.y) * uint32(EMBED_THREADS) + uint32(cuda.threadIdx.x))
        if chunk < uint32(width // 8):
            token = int32(ptx.load_global_i32(tokens + row * int64(4)))
            gather(weight, token, chunk, out + row * int64(width * 2), width, tiled)

    return Kernel(
        _name("embed", width, tiled, scale), embed, (types.int64,) * 3, EMBED_THREADS, waits_before_trigger=True
    )


@cache
def _make_embed_norm(width: int, tiled: bool, eps: float, wide: bool = False) -> Kernel:
    """A block a row: grid (M,). wide: the norm's weight is float32."""
    functions = make_norm_functions(wide)
    load_first_weights, finish_norm = functions.load_first, functions.finish

    def embed_norm(tokens: Any, table: Any, weight: Any, row_live: Any, out: Any, normed: Any) -> None:
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        row = int64(cuda.blockIdx.x)
        weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        token = int32(ptx.load_global_i32(tokens + row * int64(4)))
        known = token >= int32(0)
        live = is_live(row_live, row) and known
        source = table_row(table, max(token, int32(0)), width, tiled)
        words = load_first(source, width, tiled)
        offset = row * int64(width * 2)
        store_row(words, source, tiled, out + offset, known, width)
        finish_norm(words, weights, source, tiled, weight, normed + offset, int64(0), live, sums, width, eps)

    name = f"{_name('embed_norm', width, tiled, None)}_eps{eps!r}{weights_label(wide)}"
    return Kernel(name, embed_norm, (types.int64,) * 6, THREADS, waits_before_trigger=True)


def embed(
    tokens: torch.Tensor, weight: torch.Tensor | PackedMatrix, *, out: torch.Tensor, scale: float | None = None
) -> list[KernelCall]:
    """Gather embedding rows; a dead row (token -1) gives zero.

    tokens  [B, T] or [M]  int32
    weight  [V, N]         bf16, row-major or packed
    out     [M, N]         bf16  out
    scale   multiplies the rows in float32, rounded once; None: they are taken as they are
    One launch. Raises ShapeError for shapes that do not fit, or N outside of ROW_WIDTH.
    """
    rows, width = tokens.numel(), out.shape[-1]
    check_width(width)
    check_shape("out", out, rows, width)
    check_dtype(torch.bfloat16, out=out)
    check_dtype(torch.int32, tokens=tokens)
    table, tiled = check_table(weight, width)
    grid = (rows, -(-(width // 8) // EMBED_THREADS), 1)
    return [KernelCall(_make_embed(width, tiled, scale), grid, (tokens, table, out))]


def embed_norm(
    tokens: torch.Tensor,
    weight: torch.Tensor | PackedMatrix,
    norm_weight: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    normed: torch.Tensor,
    eps: float,
    scale: float | None = None,
) -> list[KernelCall]:
    """Embedding rows and their RMS norm, see `embed` and `norm.rms_norm`.

    norm_weight  [N]     bf16 or float32
    row_live     [M]     uint8; None: all rows are live. The norm of a dead row is zero, its embedding is not
    out, normed  [M, N]  bf16  out
    One launch. Raises ShapeError as `embed` does.
    """
    rows, width = tokens.numel(), out.shape[-1]
    check_width(width)
    check_row_live(row_live, rows)
    check_shape("out", out, rows, width)
    check_shape("normed", normed, rows, width)
    check_shape("norm_weight", norm_weight, width)
    check_dtype(torch.bfloat16, out=out, normed=normed)
    check_dtype(torch.int32, tokens=tokens)
    table, tiled = check_table(weight, width)
    live = 0 if row_live is None else row_live
    shape = (width, tiled, eps, are_wide(norm_weight))
    kernel = _make_embed_norm(*shape) if scale is None else _make_scaled_embed_norm(*shape, scale)
    return [KernelCall(kernel, (rows, 1, 1), (tokens, table, norm_weight, live, out, normed))]


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [
        _make_embed(4096, False),
        _make_embed(2880, True),
        _make_embed_norm(4096, False, 1e-5),
        _make_embed_norm(2880, True, 1e-5),
        _make_embed_norm(8192, True, 1e-5),
        _make_embed_norm(5120, True, 1e-6, True),
        _make_embed(10752, False, 16.0),
        _make_scaled_embed_norm(5376, True, 1e-6, False, 73.5),
    ]
