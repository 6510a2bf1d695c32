"""This module has the layout of rows as a prefill GEMM's second operand: steps of 64 columns, permuted and swizzled.

A step's rows are 128 bytes each, one after another. Lanes read packed weights 8 columns at a time, where the
instruction expects 2 and 2. So the instruction's slice of 16 columns stands for other columns of the weight, and the
rows' columns are permuted to match: of every 32 columns, words of 2 columns as a 4 x 4 matrix, transposed. Pieces of 16
bytes are swizzled for shared memory, so that a step is copied there without change.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types, uint32

__all__ = ["STEP", "arrange", "arranged_shape", "examples", "piece_address", "place_of", "transposed"]

STEP = 64  # columns
HALF = 32
THREADS = 256
FULL_WARP = 0xFFFFFFFF


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
    blocks = -(-rows * 8 * out.shape[0] // THREADS)
    return [KernelCall(_make(columns), (blocks, 1, 1), (x, out, rows))]


@device_function
def _exchanged(words: Any, odd: Any, distance: Any) -> Any:
    """Two words of four from the lane so far away: those two that it has and this one wants."""
    a, b, c, d = words
    if distance == 1:
        first = int32(cuda.shfl_xor_sync(FULL_WARP, int32(a if odd else b), distance))
        second = int32(cuda.shfl_xor_sync(FULL_WARP, int32(c if odd else d), distance))
    else:
        first = int32(cuda.shfl_xor_sync(FULL_WARP, int32(a if odd else c), distance))
        second = int32(cuda.shfl_xor_sync(FULL_WARP, int32(b if odd else d), distance))
    return uint32(first), uint32(second)


@device_function
def transposed(words: Any, lane: Any) -> Any:
    """Four words of each of four neighbouring lanes: word i of lane j becomes word j of lane i."""
    a, b, c, d = words
    odd = (lane & uint32(1)) != uint32(0)
    first, second = _exchanged((a, b, c, d), odd, 1)
    if odd:
        a, c = first, second
    else:
        b, d = first, second
    odd = (lane & uint32(2)) != uint32(0)
    first, second = _exchanged((a, b, c, d), odd, 2)
    if odd:
        a, b = first, second
    else:
        c, d = first, second
    return a, b, c, d


@device_function
def piece_address(out: Any, row: Any, rows: Any, piece: Any) -> Any:
    """The address of 16 bytes of an arranged row, by their number after `transposed`, eight a step."""
    step, place = int64(uint32(piece >> uint32(3))), int64(uint32(uint32(piece ^ uint32(row)) & uint32(7)))
    return out + (step * int64(rows) + int64(row)) * int64(2 * STEP) + place * int64(16)


@cache
def _make(columns: int) -> Kernel:
    """A lane loads 16 bytes and stores 16 bytes; four neighbours have 32 columns of a row."""
    pieces = 8 * -(-columns // STEP)

    def arrange_activations(x: Any, out: Any, rows: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        number = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        row = uint32(number // uint32(pieces))
        piece = uint32(number - uint32(row * uint32(pieces)))
        column = uint32(piece * uint32(8))
        a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
        if row < uint32(rows) and column < uint32(columns):
            a, b, c, d = ptx.load_global_128(x + (int64(row) * int64(columns) + int64(column)) * int64(2))
        a, b, c, d = transposed((a, b, c, d), uint32(cuda.threadIdx.x))
        if row < uint32(rows):
            ptx.store_global_128(piece_address(out, row, rows, piece), a, b, c, d)

    return Kernel(f"arrange_activations_{columns}", arrange_activations, (types.int64,) * 3, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [_make(4096), _make(72)]
