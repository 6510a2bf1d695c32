"""This module has RMS norms of whole rows, alone or after a residual sum, that store rows as a prefill GEMM reads them.

A block has a row, as in `norm`. Four neighbouring lanes have 32 columns of it, exchange them, and store them arranged,
see `lowlat.kernels.gemm.prefill.activation_layout`. Rows that other launches read, too, are also stored in plain order.
"""

from functools import cache
from typing import Any

import torch

from lowlat.kernels.common.norm_math import THREADS, WARPS
from lowlat.kernels.common.norm_row import (
    NormFunctions,
    add_row,
    is_live,
    load_first,
    make_norm_functions,
    row_inverse,
    weights_label,
)
from lowlat.kernels.elementwise.norm import are_wide, check_dtype, check_row_live, check_sum, check_width
from lowlat.kernels.gemm.prefill.activation_layout import STEP, arranged_shape, piece_address, transposed
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["arranged_add_norm", "arranged_rms_norm", "examples"]

WHOLE_WARPS = 0xFFFFFFE0


def _make_finish(functions: NormFunctions, keeps: bool) -> Any:
    """A function of a block, see its docstring. keeps: rows are stored as they are, too."""
    scale, load_weights = functions.scale, functions.load_weights

    @device_function
    def finish(
        first: Any, first_weights: Any, source: Any, weight: Any, out: Any, rows: Any, live: Any, sums: Any, width: Any,
        eps: Any, kept: Any,
    ) -> None:  # fmt: skip
        """Norm a row whose first chunks are held, and store it arranged; zeros past its end, and for a dead row.

        out   of all rows
        kept  the same as they are
        sums  [WARPS] float32, shared; all threads of the block must come here, once
        """
        thread, row = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        chunks, pieces = uint32(width // 8), uint32((width + STEP - 1) // STEP * 8)
        more = width > 8 * THREADS  # a constant: rows of one chunk a thread compile without the loads below
        inverse = row_inverse(first, source, False, sums, width, eps)
        words, weights, chunk = first, first_weights, thread
        while uint32(chunk & uint32(WHOLE_WARPS)) < pieces:  # of all lanes of a warp, as they exchange
            a, b, c, d = scale(words, inverse, weights)
            if not live or chunk >= chunks:
                a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            if keeps and chunk < chunks:
                ptx.store_global_128(kept + (int64(row) * int64(width // 8) + int64(chunk)) * int64(16), a, b, c, d)
            a, b, c, d = transposed((a, b, c, d), thread)
            if chunk < pieces:
                ptx.store_global_128(piece_address(out, row, rows, chunk), a, b, c, d)
            chunk = uint32(chunk + uint32(THREADS))
            if more and chunk < chunks:
                words = ptx.load_global_128(source + int64(chunk) * int64(16))
                weights = load_weights(weight, chunk)

    return finish


@cache
def _make_norm(width: int, eps: float, wide_weights: bool = False, keeps: bool = False) -> Kernel:
    """A norm: grid (M,)."""
    functions = make_norm_functions(wide_weights)
    load_first_weights, finish = functions.load_first, _make_finish(functions, keeps)

    @device_function
    def norm_row(x: Any, weight: Any, row_live: Any, out: Any, rows: Any, kept: Any) -> None:
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        row = int64(cuda.blockIdx.x)
        weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        source = x + row * int64(width * 2)
        words = load_first(source, width, False)
        finish(words, weights, source, weight, out, rows, is_live(row_live, row), sums, width, eps, kept)

    def arranged_norm(x: Any, weight: Any, row_live: Any, out: Any, rows: Any) -> None:
        norm_row(x, weight, row_live, out, rows, int64(0))

    def arranged_kept_norm(x: Any, weight: Any, row_live: Any, out: Any, rows: Any, kept: Any) -> None:
        norm_row(x, weight, row_live, out, rows, kept)

    end = f"n{width}_eps{eps!r}{weights_label(wide_weights)}"
    if keeps:
        return Kernel(f"arranged_kept_norm_{end}", arranged_kept_norm, (types.int64,) * 6, THREADS)
    return Kernel(f"arranged_norm_{end}", arranged_norm, (types.int64,) * 5, THREADS)


@cache
def _make_add_norm(width: int, eps: float, wide: bool, wide_weights: bool = False, keeps: bool = False) -> Kernel:
    """A residual sum and its norm: grid (M,)."""
    functions = make_norm_functions(wide_weights)
    load_first_weights, finish = functions.load_first, _make_finish(functions, keeps)

    @device_function
    def add_norm_row(a: Any, b: Any, weight: Any, row_live: Any, total: Any, out: Any, rows: Any, kept: Any) -> None:
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        row = int64(cuda.blockIdx.x)
        weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        offset = row * int64(width * 2)
        other = row * int64(width * (4 if wide else 2))
        live = is_live(row_live, row)
        first = add_row(a + offset, b + other, wide, total + offset, width)
        finish(first, weights, total + offset, weight, out, rows, live, sums, width, eps, kept)

    def arranged_add_norm(a: Any, b: Any, weight: Any, row_live: Any, total: Any, out: Any, rows: Any) -> None:
        add_norm_row(a, b, weight, row_live, total, out, rows, int64(0))

    def arranged_kept_add_norm(
        a: Any, b: Any, weight: Any, row_live: Any, total: Any, out: Any, rows: Any, kept: Any
    ) -> None:
        add_norm_row(a, b, weight, row_live, total, out, rows, kept)

    end = f"n{width}_{'f32' if wide else 'bf16'}_eps{eps!r}{weights_label(wide_weights)}"
    if keeps:
        return Kernel(f"arranged_kept_add_norm_{end}", arranged_kept_add_norm, (types.int64,) * 8, THREADS)
    return Kernel(f"arranged_add_norm_{end}", arranged_add_norm, (types.int64,) * 7, THREADS)


def arranged_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    kept: torch.Tensor | None = None,
    eps: float,
) -> list[KernelCall]:
    """The rows of `norm.rms_norm` as `arrange` leaves them, in one launch.

    x         [M, N]               bf16
    weight    [N]                  bf16 or float32
    row_live  [M]                  uint8; None: all rows are live
    out       [ceil(N/64), M, 64]  bf16  out; zeros past N, and for dead rows
    kept      [M, N]               bf16  out: the same rows as they are; None: nobody reads them
    Raises ShapeError for shapes or dtypes that do not fit, or N that is no multiple of 8 or above MAX_WIDTH.
    """
    rows, width = x.shape
    check_width(width)
    check_row_live(row_live, rows)
    check_shape("weight", weight, width)
    check_shape("out", out, *arranged_shape(rows, width))
    check_dtype(torch.bfloat16, x=x, out=out)
    kernel = _make_norm(width, eps, are_wide(weight), kept is not None)
    live = 0 if row_live is None else row_live
    return [KernelCall(kernel, (rows, 1, 1), (x, weight, live, out, rows, *_checked(kept, rows, width)))]


def arranged_add_norm(
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    total: torch.Tensor,
    out: torch.Tensor,
    kept: torch.Tensor | None = None,
    eps: float,
) -> list[KernelCall]:
    """The sum and the rows of `norm.add_norm`, the rows as `arrange` leaves them, in one launch.

    a         [M, N]               bf16           the residual stream
    b         [M, N]               float32, bf16  what is added
    weight    [N]                  bf16 or float32
    row_live  [M]                  uint8; None: all rows are live
    total     [M, N]               bf16  out: row by row
    out       [ceil(N/64), M, 64]  bf16  out; zeros past N, and for dead rows
    kept      [M, N]               bf16  out: the same rows as they are; None: nobody reads them
    Raises ShapeError as `arranged_rms_norm` does.
    """
    rows, width, wide_weights = check_sum(a, b, weight, row_live, total)
    check_shape("out", out, *arranged_shape(rows, width))
    check_dtype(torch.bfloat16, out=out)
    kernel = _make_add_norm(width, eps, b.dtype == torch.float32, wide_weights, kept is not None)
    live = 0 if row_live is None else row_live
    return [KernelCall(kernel, (rows, 1, 1), (a, b, weight, live, total, out, rows, *_checked(kept, rows, width)))]


def _checked(kept: torch.Tensor | None, rows: int, width: int) -> tuple[torch.Tensor, ...]:
    """The argument of rows that are kept as they are, if they are."""
    if kept is None:
        return ()
    check_shape("kept", kept, rows, width)
    check_dtype(torch.bfloat16, kept=kept)
    return (kept,)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [
        _make_norm(4096, 1e-5),
        _make_norm(72, 1e-5),
        _make_add_norm(4096, 1e-5, True),
        _make_add_norm(2880, 1e-5, False),
        _make_add_norm(12296, 1e-5, True),
        _make_norm(2048, 1e-6, True),
        _make_add_norm(5120, 1e-6, True, True),
        _make_norm(5120, 1e-6, True, keeps=True),
        _make_add_norm(5120, 1e-6, True, True, keeps=True),
    ]
