"""Rows as the second matrix of a wide product wants them: steps of 64 columns side by side, permuted and swizzled.

A step's rows are 128 bytes each, behind each other. Packed weights go to the tensor cores as lanes read them, 8 columns
at a time, where the instruction expects 2 and 2; so its slice of 16 columns stands for other columns of the weight, and
the rows' columns are put where that makes them meet: of every 32, words of 2 columns as a 4 x 4 matrix, transposed.
Pieces of 16 bytes are swizzled as shared memory wants them, so that a step is copied there as it lies. It knows no
product.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels import ptx
from lowlat.kernels.kernel import Kernel, KernelCall
from lowlat.kernels.numba_cuda import cuda, device_function, int64, types, uint32
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["STEP", "arrange", "arranged_shape", "examples", "place_of"]

STEP = 64  # columns
HALF = 32
THREADS = 128


def arranged_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """The shape of [M, K] arranged, of which K is padded to a multiple of 64."""
    return -(-columns // STEP), rows, STEP


def place_of(row: int, column: int) -> int:
    """Where in its arranged row of 64 one of a step's columns lies."""
    half, word, second = column // HALF, column % HALF // 2, column % 2
    piece, place = 4 * half + word % 4, word // 4
    return (piece ^ row % 8) * 8 + 2 * place + second


def arrange(*, x: torch.Tensor, out: torch.Tensor) -> list[KernelCall]:
    """Arrange rows, in one launch.

    x    [M, K]              bf16
    out  [ceil(K/64), M, 64] bf16, out: column k of row m at [k // 64, m, place_of(m, k % 64)]; zeros past K
    Time: both once over the L2's bandwidth. Captured: yes. Raises ShapeError for shapes that do not fit, or K that is
    no multiple of 8.
    """
    rows, columns = x.shape
    check_shape("out", out, *arranged_shape(rows, columns))
    if columns % 8:
        raise ShapeError(f"rows must be a multiple of 8 wide to be arranged, got {columns}")
    blocks = -(-rows * 2 * out.shape[0] // THREADS)
    return [KernelCall(_make(columns), (blocks, 1, 1), (x, out, rows))]


@cache
def _make(columns: int) -> Kernel:
    """A thread has 32 columns of a row; neighbours have the same columns of the rows behind it."""
    halves = 2 * -(-columns // STEP)

    @device_function
    def load(row: Any, column: Any) -> Any:
        a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
        if column < uint32(columns):
            a, b, c, d = ptx.load_global_128_l2(row + int64(column) * int64(2))
        return a, b, c, d

    def wide_arrange(x: Any, out: Any, rows: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        number = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        half = uint32(number // uint32(rows))
        if half < uint32(halves):
            row = uint32(number - uint32(half * uint32(rows)))
            source, column = x + int64(row) * int64(2 * columns), uint32(half * uint32(HALF))
            a = load(source, column)
            b = load(source, uint32(column + uint32(8)))
            c = load(source, uint32(column + uint32(16)))
            d = load(source, uint32(column + uint32(24)))
            target = out + (int64(uint32(half >> uint32(1))) * int64(rows) + int64(row)) * int64(2 * STEP)
            piece = uint32((half & uint32(1)) * uint32(4))
            for word in range(4):
                place = uint32(uint32(piece + uint32(word)) ^ (row & uint32(7)))
                ptx.store_global_128(target + int64(place) * int64(16), a[word], b[word], c[word], d[word])

    return Kernel(f"wide_arrange_{columns}", wide_arrange, (types.int64,) * 3, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [_make(4096), _make(72)]
