"""This module adds up a prefill GEMM's segments of K from the first to the last, scaled, with the bias.

The results are in the original order of columns.
"""

from functools import cache
from typing import Any

import torch

from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["THREADS", "add_segments", "examples", "make_total"]

THREADS = 256


def add_segments(
    *,
    partials: torch.Tensor,
    scales: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None,
    columns: torch.Tensor | None,
    out: torch.Tensor,
) -> list[KernelCall]:
    """Add up the sums of segments, in one launch.

    partials  [S, M, N]  float32
    scales    [N]        float32, in the partials' order, of which more may follow; None: ones
    row_scales [M]       float32; None: ones
    bias      [N]        bf16, or None
    columns   [N / 8]    int32: the column of out at which eight columns of the partials begin; None: the same
    out       [M, N]     float32, out: zero plus the segments one by one, times the scale, times the row's, plus the
                         bias, each rounded
    Time: (S + 1) * M * N * 4 bytes over the L2's bandwidth. Captured: yes. Raises ShapeError for shapes that do not
    fit.
    """
    segments, rows, width = partials.shape
    check_shape("out", out, rows, width)
    blocks = -(-rows * (width // 4) // THREADS)
    kernel = _make(width, segments, bias is not None, columns is not None, scales is not None, row_scales is not None)
    beside = (0 if each is None else each for each in (scales, bias, columns))
    arguments = (partials, *beside, out, rows)
    if row_scales is not None:
        check_shape("row_scales", row_scales, rows)
        arguments = (*arguments, row_scales)
    return [KernelCall(kernel, (blocks, 1, 1), arguments)]


def make_total(width: int, segments: int, *, with_bias: bool, with_scales: bool, with_row_scales: bool) -> Any:
    """A function of a thread: four neighbouring columns of a row, added up, scaled and with the bias, each rounded.

    width  N, of the partials
    """

    @device_function
    def add(sums: Any, words: Any) -> Any:
        return (
            ptx.add_rn(sums[0], ptx.float_of_bits(words[0])),
            ptx.add_rn(sums[1], ptx.float_of_bits(words[1])),
            ptx.add_rn(sums[2], ptx.float_of_bits(words[2])),
            ptx.add_rn(sums[3], ptx.float_of_bits(words[3])),
        )

    @device_function
    def scale(sums: Any, words: Any) -> Any:
        return (
            ptx.mul_rn(sums[0], ptx.float_of_bits(words[0])),
            ptx.mul_rn(sums[1], ptx.float_of_bits(words[1])),
            ptx.mul_rn(sums[2], ptx.float_of_bits(words[2])),
            ptx.mul_rn(sums[3], ptx.float_of_bits(words[3])),
        )

    @device_function
    def biases(low: Any, high: Any) -> Any:
        return (
            uint32(low << uint32(16)), uint32(low & uint32(0xFFFF0000)), uint32(high << uint32(16)),
            uint32(high & uint32(0xFFFF0000)),
        )  # fmt: skip

    @device_function
    def total(partials: Any, scales: Any, bias: Any, row: Any, column: Any, rows: Any, row_scales: Any) -> Any:
        zero = float32(0)
        sums = (zero, zero, zero, zero)
        at = partials + (int64(row) * int64(width) + int64(column)) * int64(4)
        for segment in range(segments):
            sums = add(sums, ptx.load_global_128(at + int64(segment) * int64(rows) * int64(4 * width)))
        if with_scales:
            sums = scale(sums, ptx.load_global_128(scales + int64(column) * int64(4)))
        if with_row_scales:
            own = ptx.bits_of_float(ptx.load_global_f32(row_scales + int64(row) * int64(4)))
            sums = scale(sums, (own, own, own, own))
        if with_bias:
            low, high = ptx.load_global_64(bias + int64(column) * int64(2))
            sums = add(sums, biases(low, high))
        return sums

    return total


@cache
def _make(
    width: int,
    segments: int,
    with_bias: bool,
    with_columns: bool,
    with_scales: bool = False,
    with_row_scales: bool = False,
) -> Kernel:
    """A thread has four columns of a row."""
    chunks = width // 4
    total = make_total(width, segments, with_bias=with_bias, with_scales=with_scales, with_row_scales=with_row_scales)

    @device_function
    def add_up(partials: Any, scales: Any, bias: Any, columns: Any, out: Any, rows: Any, row_scales: Any) -> None:
        number = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        row = uint32(number // uint32(chunks))
        chunk = uint32(number - row * uint32(chunks))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        if row < uint32(rows):
            column = uint32(chunk * uint32(4))
            a, b, c, d = total(partials, scales, bias, row, column, rows, row_scales)
            if with_columns:
                run = ptx.load_global_i32(columns + int64(uint32(chunk >> uint32(1))) * int64(4))
                column = uint32(uint32(run) + uint32(column & uint32(4)))
            ptx.store_global_128(
                out + (int64(row) * int64(width) + int64(column)) * int64(4),
                ptx.bits_of_float(a), ptx.bits_of_float(b), ptx.bits_of_float(c), ptx.bits_of_float(d),
            )  # fmt: skip

    def sum_split_k(partials: Any, scales: Any, bias: Any, columns: Any, out: Any, rows: Any) -> None:
        add_up(partials, scales, bias, columns, out, rows, int64(0))

    def sum_coded_split_k(
        partials: Any, scales: Any, bias: Any, columns: Any, out: Any, rows: Any, row_scales: Any
    ) -> None:
        add_up(partials, scales, bias, columns, out, rows, row_scales)

    beside = f"{'bias' if with_bias else 'plain'}_{'columns' if with_columns else 'inplace'}"
    beside += ("_scaled" if with_scales else "") + ("_rows" if with_row_scales else "")
    function, count = (sum_coded_split_k, 7) if with_row_scales else (sum_split_k, 6)
    return Kernel(f"wide_add_{width}x{segments}_{beside}", function, (types.int64,) * count, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [
        _make(6144, 5, True, True),
        _make(4096, 8, False, False, with_scales=True),
        _make(4096, 2, False, False, with_scales=True, with_row_scales=True),
    ]
