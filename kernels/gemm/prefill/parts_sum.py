"""This module adds up scaled parts of K as a tree of neighbouring pairs; the first part gets the bias."""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.gemm.k_parts import KParts, add_four, load_four, make_tree
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["add_parts", "examples"]

THREADS = 256


def add_parts(
    *,
    partials: torch.Tensor,
    parts: KParts,
    steps: int,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    out: torch.Tensor,
) -> list[KernelCall]:
    """Add up the sums of parts, in one launch.

    partials  [P, M, N]  float32: those of parts without columns are not read
    parts     P of K, which has so many steps of 64 columns
    scales    [N]        float32, in the partials' order, of which more may follow; None: ones
    bias      [N]        bf16, or None
    columns   [N / 8]    int32: the column of out at which eight columns of the partials begin; None: the same
    out       [M, N]     float32, out: ((p0 + p1) + (p2 + p3)) + ..., each part times the scale, the first plus the
                         bias, all rounded one by one
    Time: (P + 1) * M * N * 4 bytes over the L2's bandwidth. Captured: yes. Raises ShapeError for shapes that do not
    fit, or N that is no multiple of 4, or with columns of 8.
    """
    count, rows, width = partials.shape
    check_shape("partials", partials, parts.count, rows, width)
    check_shape("out", out, rows, width)
    if width % (4 if columns is None else 8):
        raise ShapeError(f"rows must be a multiple of 4 wide, with columns of 8, got {width}")
    ends = parts.ends(steps)
    held = tuple(part for part in range(count) if ends[part + 1] > ends[part])
    kernel = _make(width, count, held, bias is not None, columns is not None, scales is not None)
    beside = (0 if each is None else each for each in (scales, bias, columns))
    blocks = -(-rows * (width // 4) // THREADS)
    return [KernelCall(kernel, (blocks, 1, 1), (partials, *beside, out, rows))]


@device_function
def _times(a: Any, b: Any) -> Any:
    return ptx.mul_rn(a[0], b[0]), ptx.mul_rn(a[1], b[1]), ptx.mul_rn(a[2], b[2]), ptx.mul_rn(a[3], b[3])


def _make_part(part: int, is_held: bool, with_bias: bool, with_scales: bool) -> Any:
    """A device function that returns a part's four summands; zeros if the part has no columns."""

    @device_function
    def load_part(place: Any, given: Any) -> Any:
        pitch, scales, bias = given
        zero = float32(0)
        sums = (zero, zero, zero, zero)
        if is_held:
            sums = load_four(place + int64(part) * pitch)
            if with_scales:
                sums = _times(sums, load_four(scales))
        if with_bias and part == 0:
            low, high = ptx.load_global_64(bias)
            first = ptx.float_of_bits(uint32(low << uint32(16))), ptx.float_of_bits(uint32(low & uint32(0xFFFF0000)))
            last = ptx.float_of_bits(uint32(high << uint32(16))), ptx.float_of_bits(uint32(high & uint32(0xFFFF0000)))
            sums = add_four(sums, (first[0], first[1], last[0], last[1]))
        return sums

    return load_part


@cache
def _make(
    width: int, count: int, held: tuple[int, ...], with_bias: bool, with_columns: bool, with_scales: bool
) -> Kernel:
    """A thread has four columns of a row."""
    chunks = width // 4

    def make_part(part: int) -> Any:
        return _make_part(part, part in held, with_bias, with_scales)

    add_up = make_tree(make_part, 0, count, add_four)

    def sum_parts(partials: Any, scales: Any, bias: Any, columns: Any, out: Any, rows: Any) -> None:
        number = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        row = uint32(number // uint32(chunks))
        chunk = uint32(number - row * uint32(chunks))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        if row < uint32(rows):
            column = uint32(chunk * uint32(4))
            at = partials + (int64(row) * int64(width) + int64(column)) * int64(4)
            pitch = int64(rows) * int64(4 * width)
            a, b, c, d = add_up(at, (pitch, scales + int64(column) * int64(4), bias + int64(column) * int64(2)))
            if with_columns:
                run = ptx.load_global_i32(columns + int64(uint32(chunk >> uint32(1))) * int64(4))
                column = uint32(uint32(run) + uint32(column & uint32(4)))
            ptx.store_global_128(
                out + (int64(row) * int64(width) + int64(column)) * int64(4),
                ptx.bits_of_float(a), ptx.bits_of_float(b), ptx.bits_of_float(c), ptx.bits_of_float(d),
            )  # fmt: skip

    flags = "".join(letter for letter, on in (("b", with_bias), ("c", with_columns), ("s", with_scales)) if on)
    empty = "".join(f"_{part}" for part in range(count) if part not in held)
    return Kernel(f"add_parts_{width}x{count}_{flags}{empty}", sum_parts, (types.int64,) * 6, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [
        _make(4096, 8, tuple(range(8)), False, False, False),
        _make(2880, 4, tuple(range(4)), True, True, True),
        _make(320, 8, (0, 1, 2, 4, 6), True, False, False),
    ]
