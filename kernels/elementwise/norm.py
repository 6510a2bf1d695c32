"""This module has RMS norms of whole rows: alone, after a residual sum, or of the parts of a row; one launch each.

A block has a row, and sums its squares in the order of `norm_math`. The residual stream is bf16; a GEMM's output may
still be float32.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.norm_math import THREADS, WARPS
from lowlat.kernels.common.norm_row import (
    add_row,
    is_live,
    load_first,
    make_norm_functions,
    weights_label,
)
from lowlat.kernels.elementwise.limits import ROW_WIDTH
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, float32, int64, types

__all__ = [
    "add_norm",
    "are_wide",
    "check_dtype",
    "check_row_live",
    "check_sum",
    "check_width",
    "examples",
    "rms_norm",
    "split_norms",
    "two_norms",
]

PARTS = 4  # parts of a row that one launch norms


def check_width(width: int) -> None:
    """Raise ShapeError unless rows of `width` elements are whole chunks of 16 bytes and not too wide."""
    ROW_WIDTH.check("the width of rows", width)


def check_dtype(dtype: torch.dtype, **tensors: torch.Tensor | None) -> None:
    """Raise ShapeError unless all tensors that are there have this dtype: kernels see addresses alone."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != dtype:
            raise ShapeError(f"{name} must be {dtype}, got {tensor.dtype}")


def are_wide(*weights: torch.Tensor) -> bool:
    """Whether norm weights are float32. Raises ShapeError unless all are, or all are bf16."""
    for weight in weights:
        if weight.dtype not in (torch.bfloat16, torch.float32) or weight.dtype != weights[0].dtype:
            raise ShapeError(
                f"weights of norms must be all torch.bfloat16 or all torch.float32, got "
                f"{', '.join(str(each.dtype) for each in weights)}"
            )
    return weights[0].dtype == torch.float32


def check_row_live(row_live: torch.Tensor | None, rows: int) -> None:
    """Raise ShapeError unless there is a flag for each row, or no flags at all."""
    if row_live is not None and row_live.numel() != rows:
        raise ShapeError(f"row_live must have {rows} entries, got shape {list(row_live.shape)}")


def check_sum(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, row_live: torch.Tensor | None, total: torch.Tensor
) -> tuple[int, int, bool]:
    """The rows and the width of a residual sum whose norm is taken, and whether the norm's weight is float32. Raises
    ShapeError for what does not fit."""
    rows, width = a.shape
    check_width(width)
    check_row_live(row_live, rows)
    for name, tensor in (("b", b), ("total", total)):
        check_shape(name, tensor, rows, width)
    check_shape("weight", weight, width)
    check_dtype(torch.bfloat16, a=a, total=total)
    if b.dtype != torch.float32:
        check_dtype(torch.bfloat16, b=b)
    return rows, width, are_wide(weight)


@cache
def _make_norms(width: int, parts: int, eps: float, wide_weights: bool = False, triggers_first: bool = False) -> Kernel:
    """Norms of up to PARTS of the `parts` parts of each row, from part `start` on: grid (M, parts here)."""
    functions = make_norm_functions(wide_weights)
    load_first_weights, finish_norm = functions.load_first, functions.finish

    def norms(x: Any, row_live: Any, out: Any, start: Any, w0: Any, w1: Any, w2: Any, w3: Any) -> None:
        if triggers_first:
            ptx.let_next_kernel_start()
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        row, part = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        weight = w0
        if part == int64(1):
            weight = w1
        elif part == int64(2):
            weight = w2
        elif part == int64(3):
            weight = w3
        weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        if not triggers_first:
            ptx.let_next_kernel_start()
        offset = (row * int64(parts) + int64(start) + part) * int64(width * 2)
        words = load_first(x + offset, width, False)
        live = is_live(row_live, row)
        finish_norm(words, weights, x + offset, False, weight, out + offset, int64(0), live, sums, width, eps)

    signature = (types.int64,) * 8
    name = f"norms_n{width}_parts{parts}_eps{eps!r}{weights_label(wide_weights)}{'_first' * triggers_first}"
    return Kernel(name, norms, signature, THREADS, waits_before_trigger=not triggers_first)


@cache
def _make_two(width: int, eps: float, wide_weights: bool = False, triggers_first: bool = False) -> Kernel:
    """Norms of two arrays, each with a weight: grid (M, 2)."""
    functions = make_norm_functions(wide_weights)
    load_first_weights, finish_norm = functions.load_first, functions.finish

    def two_norms(x0: Any, x1: Any, w0: Any, w1: Any, row_live: Any, out0: Any, out1: Any) -> None:
        if triggers_first:
            ptx.let_next_kernel_start()
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        row, x, weight, out = int64(cuda.blockIdx.x), x0, w0, out0
        if cuda.blockIdx.y > 0:
            x, weight, out = x1, w1, out1
        weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        if not triggers_first:
            ptx.let_next_kernel_start()
        offset = row * int64(width * 2)
        words = load_first(x + offset, width, False)
        live = is_live(row_live, row)
        finish_norm(words, weights, x + offset, False, weight, out + offset, int64(0), live, sums, width, eps)

    name = f"two_norms_n{width}_eps{eps!r}{weights_label(wide_weights)}{'_first' * triggers_first}"
    return Kernel(name, two_norms, (types.int64,) * 7, THREADS, waits_before_trigger=not triggers_first)


@cache
def _make_add_norm(width: int, eps: float, wide: bool, wide_weights: bool = False) -> Kernel:
    """A residual sum and its norm: grid (M,)."""
    functions = make_norm_functions(wide_weights)
    load_first_weights, finish_norm = functions.load_first, functions.finish

    def add_norm(a: Any, b: Any, weight: Any, row_live: Any, total: Any, out: Any) -> None:
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        row = int64(cuda.blockIdx.x)
        weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        offset = row * int64(width * 2)
        other = row * int64(width * (4 if wide else 2))
        live = is_live(row_live, row)
        first = add_row(a + offset, b + other, wide, total + offset, width)
        finish_norm(first, weights, total + offset, False, weight, out + offset, int64(0), live, sums, width, eps)

    signature = (types.int64,) * 6
    name = f"add_norm_n{width}_{'f32' if wide else 'bf16'}_eps{eps!r}{weights_label(wide_weights)}"
    return Kernel(name, add_norm, signature, THREADS, waits_before_trigger=True)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    eps: float,
    triggers_first: bool = False,
) -> list[KernelCall]:
    """x / rms(x) * weight in float32, rounded once; dead rows give zero.

    x         [M, N]  bf16
    weight    [N]     bf16 or float32
    row_live  [M]     uint8; None: all rows are live
    out       [M, N]  bf16  out
    triggers_first  the next launch may start before this one waits for the one before it
    One launch. Raises ShapeError for shapes that do not fit, or N outside of ROW_WIDTH.
    """
    return _split_norms(x, row_live, out, eps, [weight], triggers_first)


def split_norms(
    x: torch.Tensor, row_live: torch.Tensor | None = None, *, out: torch.Tensor, eps: float, **weights: torch.Tensor
) -> list[KernelCall]:
    """RMS norm of each of the F parts of every row on its own, as `rms_norm` of that part gives it.

    x, out     [M, F * Ht]  bf16
    weight0..  [Ht]         bf16, or all float32
    One launch for every PARTS parts. Raises ShapeError as `rms_norm` does.
    """
    if not weights:
        raise ShapeError("split_norms needs a weight for each part")
    return _split_norms(x, row_live, out, eps, [weights[f"weight{part}"] for part in range(len(weights))])


def _split_norms(
    x: torch.Tensor,
    row_live: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    ordered: list[torch.Tensor],
    triggers_first: bool = False,
) -> list[KernelCall]:
    rows, parts = x.shape[0], len(ordered)
    width = x.shape[1] // parts
    check_width(width)
    check_row_live(row_live, rows)
    check_shape("x", x, rows, parts * width)
    check_shape("out", out, rows, parts * width)
    check_dtype(torch.bfloat16, x=x, out=out)
    for part, weight in enumerate(ordered):
        check_shape(f"weight{part}", weight, width)
    kernel = _make_norms(width, parts, eps, are_wide(*ordered), triggers_first)
    live = 0 if row_live is None else row_live
    calls = []
    for start in range(0, parts, PARTS):
        here = ordered[start : start + PARTS]
        addresses: list[Argument] = [*here, *[0] * (PARTS - len(here))]
        calls.append(KernelCall(kernel, (rows, len(here), 1), (x, live, out, start, *addresses)))
    return calls


def two_norms(
    xs: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor],
    row_live: torch.Tensor | None = None,
    *,
    outs: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    triggers_first: bool = False,
) -> list[KernelCall]:
    """`rms_norm` of two arrays, each with a weight of its own, in one launch; the same bits.

    xs        two [M, N]  bf16
    weights   two [N]     bf16, or both float32
    row_live  [M]         uint8; None: all rows are live
    outs      two [M, N]  bf16  out; neither is one of xs
    triggers_first  as `rms_norm` has it
    Raises ShapeError as `rms_norm` does.
    """
    rows, width = xs[0].shape
    check_width(width)
    check_row_live(row_live, rows)
    for x, weight, out in zip(xs, weights, outs, strict=True):
        check_shape("x", x, rows, width)
        check_shape("out", out, rows, width)
        check_shape("weight", weight, width)
        check_dtype(torch.bfloat16, x=x, out=out)
    kernel = _make_two(width, eps, are_wide(*weights), triggers_first)
    live = 0 if row_live is None else row_live
    return [KernelCall(kernel, (rows, 2, 1), (*xs, *weights, live, *outs))]


def add_norm(
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    total: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> list[KernelCall]:
    """The residual sum total = a + b, rounded, and the norm of what was rounded; dead rows have a sum but norm zero.

    a         [M, N]  bf16           the residual stream
    b         [M, N]  float32, bf16  what is added
    weight    [N]     bf16 or float32
    row_live  [M]     uint8; None: all rows are live
    total     [M, N]  bf16  out
    out       [M, N]  bf16  out
    One launch. Raises ShapeError as `rms_norm` does.
    """
    rows, width, wide_weights = check_sum(a, b, weight, row_live, total)
    check_shape("out", out, rows, width)
    check_dtype(torch.bfloat16, out=out)
    kernel = _make_add_norm(width, eps, b.dtype == torch.float32, wide_weights)
    live = 0 if row_live is None else row_live
    return [KernelCall(kernel, (rows, 1, 1), (a, b, weight, live, total, out))]


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [
        _make_norms(64, 1, 1e-5),
        _make_norms(4096, 1, 1e-5),
        _make_norms(2880, 3, 1e-5),
        _make_norms(8192, 1, 1e-6),
        _make_add_norm(4096, 1e-5, True),
        _make_add_norm(2880, 1e-5, False),
        _make_add_norm(12288, 1e-5, True),
        _make_norms(8192, 1, 1e-6, True),
        _make_norms(2816, 1, 1e-6, False, True),
        _make_two(2816, 1e-6, False, True),
        _make_add_norm(5120, 1e-6, True, True),
    ]
