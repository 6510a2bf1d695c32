"""This module rounds rows of a prefill GEMM to e4m3 codes with a scale, and arranges them for 8-bit tensor cores.

A row's scale is its largest magnitude over 448, so a row's codes depend on the row alone. A step is 128 columns, a byte
each. Lanes hold packed weights in words of four codes. So the instruction's slice of 32 columns stands for other
columns of the weight, and the rows' columns are permuted to match: word e of quad q, with column 8 q + 4 e and the
three after it, is word 4 e + q of its 32 columns, and its bytes are in the order of CODE_ORDER. Pieces of 16 bytes are
swizzled for shared memory.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.norm_math import EVERY_LANE, THREADS, WARPS, high_value, low_value
from lowlat.kernels.formats.fp8 import CODE_ORDER
from lowlat.kernels.gemm.packing import PackedMatrix
from lowlat.kernels.gemm.prefill.activation_layout import STEP, arranged_shape, transposed
from lowlat.kernels.gemm.prefill.plan import has_prefill_gemm
from lowlat.kernels.gemm.tiles import CODED_ROWS_TILES
from lowlat.kernels.reference.gemm.coded_rows import LARGEST_CODE, LEAST_PEAK
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32

__all__ = [
    "CODED_STEP", "CodedRows", "block_peak", "by_codes", "chunk_peak", "code_arranged", "code_rows", "coded_shape",
    "examples", "is_coded_by_row", "place_of_code", "store_chunk", "store_scale",
]  # fmt: skip

CODED_STEP = 128  # columns
SLICE = 32
MAGNITUDES, MAGNITUDE = 0x7FFF7FFF, 0x7FFF
WHOLE_WARPS = 0xFFFFFFE0


def coded_shape(rows: int, columns: int) -> tuple[int]:
    """The shape of the uint8 memory of rows [M, K]: codes, and a float32 scale for each row after them."""
    return (rows * (columns + 4),)


@dataclass(frozen=True)
class CodedRows:
    """Rows [M, K] in such memory.

    memory         [M K + 4 M]  uint8
    rows, columns  M, K: K a multiple of 128
    Raises ShapeError for another size of memory, or K that is no multiple.
    """

    memory: torch.Tensor
    rows: int
    columns: int

    def __post_init__(self) -> None:
        check_shape("memory", self.memory, *coded_shape(self.rows, self.columns))
        if self.columns % CODED_STEP or self.memory.dtype != torch.uint8:
            raise ShapeError(
                f"coded rows are bytes of a multiple of {CODED_STEP} columns, got {self.memory.dtype} of {self.columns}"
            )

    @property
    def codes(self) -> torch.Tensor:
        """The codes, [K / 128, M, 128] uint8: column k of row m at [k // 128, m, place_of_code(m, k % 128)]."""
        count = self.rows * self.columns
        return self.memory[:count].view(self.columns // CODED_STEP, self.rows, CODED_STEP)

    @property
    def scales(self) -> torch.Tensor:
        """The scales of the rows, [M] float32."""
        return self.memory[self.rows * self.columns :].view(torch.float32)


def place_of_code(row: int, column: int) -> int:
    """Where in its arranged row of 128 one of a step's columns lies."""
    quad, half, byte = column % SLICE // 8, column % 8 // 4, CODE_ORDER.index(column % 4)
    piece = column // SLICE * 2 + half
    return (piece ^ row % 8) * 16 + 4 * quad + byte


def is_coded_by_row(weight: PackedMatrix) -> bool:
    """Whether codes of rows can be multiplied by a weight: FP8 with a scale for each row, of whole steps."""
    tiles = weight.tile_format
    is_fp8 = tiles.name == CODED_ROWS_TILES.name and tiles.row_scales and not tiles.groups
    return is_fp8 and weight.columns % CODED_STEP == 0


def by_codes(weight: PackedMatrix) -> PackedMatrix:
    """A weight as codes of rows are multiplied by it: two steps as one, and two columns counted as one.

    Raises ShapeError where `is_coded_by_row` denies it.
    """
    if not is_coded_by_row(weight):
        raise ShapeError(
            f"codes of rows are multiplied by FP8 with a scale for each row, of a multiple of {CODED_STEP} columns, "
            f"not by {weight.tile_format.label} of {weight.columns}"
        )
    height, width, size = weight.tiles.shape
    tiles = weight.tiles.view(height, width // 2, 2 * size)
    return replace(weight, tiles=tiles, columns=weight.columns // 2, tile_format=CODED_ROWS_TILES)


@device_function
def chunk_peak(words: Any) -> Any:
    """The bits of the largest magnitude of a chunk, four words of two bf16, as bf16; NaN is above all numbers."""
    found = uint32(0)
    for word in words:
        magnitudes = word & uint32(MAGNITUDES)
        found = max(found, uint32(magnitudes & uint32(MAGNITUDE)), uint32(magnitudes >> uint32(16)))
    return uint32(found)


@device_function
def block_peak(peak: Any, peaks: Any) -> Any:
    """The largest of a block of THREADS threads' magnitudes, as float32; at least LEAST_PEAK.

    peaks  [WARPS] float32, shared memory that nobody reads or writes meanwhile. All threads must come here.
    """
    thread = uint32(cuda.threadIdx.x)
    largest = ptx.warp_max(uint32(peak))
    if thread & uint32(31) == uint32(0):
        peaks[thread >> uint32(5)] = ptx.float_of_bits(uint32(largest << uint32(16)))
    cuda.syncthreads()
    bits = ptx.bits_of_float(float32(LEAST_PEAK))
    for warp in range(WARPS):  # bits of numbers that are not negative are in their order, and NaN's above
        bits = max(bits, ptx.bits_of_float(peaks[warp]))
    return ptx.float_of_bits(bits)


@device_function
def _two_codes(word: Any, inverse: Any) -> Any:
    return ptx.e4m3_pair(ptx.mul_rn(low_value(word), inverse), ptx.mul_rn(high_value(word), inverse))


@device_function
def _four_codes(first: Any, second: Any, inverse: Any) -> Any:
    """A word of the codes of four columns, in the order of CODE_ORDER: 2, 0, 3, 1."""
    return ptx.interleave_codes(_two_codes(first, inverse), _two_codes(second, inverse))


@device_function
def store_chunk(words: Any, inverse: Any, out: Any, row: Any, rows: Any, chunk: Any, lives: Any) -> None:
    """Store the codes of eight columns, four words of bf16; two neighbouring lanes exchange halves of theirs.

    inverse  448 over the row's largest magnitude
    lives    whether the lane has a chunk; all lanes of a warp must come here
    """
    first, second = _four_codes(words[0], words[1], inverse), _four_codes(words[2], words[3], inverse)
    odd = uint32(chunk & uint32(1))
    sent = int32(first if odd else second)
    got = uint32(int32(cuda.shfl_xor_sync(EVERY_LANE, sent, 1)))
    if odd:
        first = got
    else:
        second = got
    step, quad = uint32(chunk >> uint32(4)), uint32(chunk & uint32(2))
    piece = uint32(uint32(uint32(chunk >> uint32(2)) & uint32(3)) * uint32(2) + odd)
    place = uint32(uint32(uint32(piece ^ uint32(row)) & uint32(7)) * uint32(16) + uint32(quad * uint32(4)))
    if lives:
        at = out + (int64(step) * int64(rows) + int64(row)) * int64(CODED_STEP) + int64(place)
        ptx.store_global_64(at, first, second)


@device_function
def store_scale(peak: Any, out: Any, row: Any, rows: Any, width: Any) -> Any:
    """Store a row's scale, by one thread; return what its numbers are multiplied by: 448 over its peak."""
    if uint32(cuda.threadIdx.x) == uint32(0):
        at = out + int64(rows) * int64(width) + int64(row) * int64(4)
        ptx.store_global_f32(at, ptx.div_rn(peak, float32(LARGEST_CODE)))
    return ptx.div_rn(float32(LARGEST_CODE), peak)


def code_rows(*, x: torch.Tensor, out: CodedRows) -> list[KernelCall]:
    """Code rows, in one launch.

    x    [M, K]  bf16
    out  of them, out
    Time: x and the codes once over the L2's bandwidth. Captured: yes. Raises ShapeError for shapes or dtypes that do
    not fit.
    """
    check_shape("x", x, out.rows, out.columns)
    return _call(x, out, is_arranged=False)


def code_arranged(*, arranged: torch.Tensor, out: CodedRows) -> list[KernelCall]:
    """Code rows that are arranged, in one launch: as `code_rows` of the rows.

    arranged  [K / 64, M, 64]  bf16: rows as `arrange` leaves them
    """
    check_shape("arranged", arranged, *arranged_shape(out.rows, out.columns))
    return _call(arranged, out, is_arranged=True)


def _call(x: torch.Tensor, out: CodedRows, *, is_arranged: bool) -> list[KernelCall]:
    if x.dtype != torch.bfloat16:
        raise ShapeError(f"rows of bf16 are coded, got {x.dtype}")
    return [KernelCall(_make(out.columns, is_arranged), (out.rows, 1, 1), (x, out.memory, out.rows))]


@cache
def _make(width: int, is_arranged: bool) -> Kernel:
    """Grid (M,): a block has a row, in registers."""
    chunks = width // 8
    own = -(-chunks // THREADS)
    num_words = 4 * own

    @device_function
    def load(x: Any, row: Any, rows: Any, chunk: Any) -> Any:
        """A chunk of the row; of an arranged one the piece that has its place, see `transposed`."""
        if is_arranged:
            step, place = int64(uint32(chunk >> uint32(3))), int64(uint32(uint32(chunk ^ row) & uint32(7)))
            at = x + (step * int64(rows) + int64(row)) * int64(2 * STEP) + place * int64(16)
        else:
            at = x + (int64(row) * int64(chunks) + int64(chunk)) * int64(16)
        return ptx.load_global_128(at)

    @device_function
    def in_order(words: Any, thread: Any) -> Any:
        return transposed(words, thread) if is_arranged else words

    def code_row(x: Any, out: Any, rows: Any) -> None:
        peaks = cuda.shared.array(shape=WARPS, dtype=float32)
        words = cuda.local.array(num_words, uint32)
        thread, row, peak = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x), uint32(0)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        for part in range(own):
            chunk, at = uint32(thread + uint32(part * THREADS)), 4 * part
            a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            if chunk < uint32(chunks):
                a, b, c, d = load(x, row, uint32(rows), chunk)
            words[at], words[at + 1], words[at + 2], words[at + 3] = a, b, c, d
            peak = max(peak, chunk_peak((a, b, c, d)))
        inverse = store_scale(block_peak(peak, peaks), out, row, uint32(rows), uint32(width))
        for part in range(own):
            chunk, at = uint32(thread + uint32(part * THREADS)), 4 * part
            if uint32(chunk & uint32(WHOLE_WARPS)) < uint32(chunks):  # of all lanes of a warp, as they exchange
                held = in_order((words[at], words[at + 1], words[at + 2], words[at + 3]), thread)
                store_chunk(held, inverse, out, row, uint32(rows), chunk, chunk < uint32(chunks))

    name = f"code_{'arranged' if is_arranged else 'rows'}_{width}"
    return Kernel(name, code_row, (types.int64,) * 3, THREADS)


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Specialisations that stand for all, for a GPU whose prefill GEMMs take codes."""
    return [_make(4096, False), _make(14336, True)] if has_prefill_gemm(gpu) else []
