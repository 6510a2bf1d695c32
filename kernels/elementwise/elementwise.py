"""This module has copies, rounding, residual sums and gated activations as kernels, for when no GEMM includes them.

Every thread has 8 elements, or 16 bytes.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.activation import (
    GELU_TANH,
    SILU,
    activation_label,
    gate_times,
    gated_activation,
    sigmoid,
    soft_capped,
)
from lowlat.kernels.common.memory import WIDE
from lowlat.kernels.common.norm_row import chunk_values, is_live
from lowlat.kernels.elementwise.limits import CHUNKS
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.reference.elementwise import elementwise as reference
from lowlat.kernels.reference.recurrent.gates import add_gated as add_gated_reference
from lowlat.kernels.reference.recurrent.gates import output_gate as output_gate_reference
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types, uint32

__all__ = ["add", "add_gated", "cast", "examples", "identity", "output_gate", "scale", "silu_mul", "soft_cap"]

THREADS = 128
CHUNK = 8
FOUR = 4


@cache
def _make_identity() -> Kernel:
    """A thread has 16 bytes, or one of the few that are left."""

    def identity(x: Any, out: Any, chunks: Any, rest: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place = int64(cuda.blockIdx.x) * int64(THREADS) + int64(cuda.threadIdx.x)
        if place < chunks:
            a, b, c, d = ptx.load_global_128(x + place * int64(WIDE))
            ptx.store_global_128(out + place * int64(WIDE), a, b, c, d)
        elif place < chunks + rest:
            at = chunks * int64(WIDE) + place - chunks
            ptx.store_global_u8(out + at, ptx.load_global_u8(x + at))

    return Kernel("identity", identity, (types.int64,) * 4, THREADS)


@cache
def _make_cast(wide: bool) -> Kernel:
    def cast(x: Any, out: Any, chunks: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        chunk = int64(cuda.blockIdx.x) * int64(THREADS) + int64(cuda.threadIdx.x)
        if chunk < chunks:
            v = chunk_values(x, chunk, wide)
            ptx.store_global_128(
                out + chunk * int64(16),
                ptx.bf16_pair(v[0], v[1]),
                ptx.bf16_pair(v[2], v[3]),
                ptx.bf16_pair(v[4], v[5]),
                ptx.bf16_pair(v[6], v[7]),
            )

    return Kernel(f"cast_{_name(wide)}", cast, (types.int64,) * 3, THREADS)


@cache
def _make_add(wide_a: bool, wide_b: bool) -> Kernel:
    def add(a: Any, b: Any, out: Any, chunks: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        chunk = int64(cuda.blockIdx.x) * int64(THREADS) + int64(cuda.threadIdx.x)
        if chunk < chunks:
            v, w = chunk_values(a, chunk, wide_a), chunk_values(b, chunk, wide_b)
            ptx.store_global_128(
                out + chunk * int64(16),
                ptx.bf16_pair(ptx.add_rn(v[0], w[0]), ptx.add_rn(v[1], w[1])),
                ptx.bf16_pair(ptx.add_rn(v[2], w[2]), ptx.add_rn(v[3], w[3])),
                ptx.bf16_pair(ptx.add_rn(v[4], w[4]), ptx.add_rn(v[5], w[5])),
                ptx.bf16_pair(ptx.add_rn(v[6], w[6]), ptx.add_rn(v[7], w[7])),
            )

    return Kernel(f"add_{_name(wide_a)}_{_name(wide_b)}", add, (types.int64,) * 4, THREADS)


@cache
def _make_add_gated(width: int) -> Kernel:
    """Grid (M, chunks of a row of N = width elements / THREADS)."""

    def add_gated(a: Any, b: Any, gate: Any, row_live: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row = int64(cuda.blockIdx.x)
        chunk = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if chunk < uint32(width // CHUNK):
            share, at = sigmoid(ptx.load_global_f32(gate + row * int64(4))), row * int64(4 * width)
            v, w = chunk_values(a + at, chunk, True), chunk_values(b + at, chunk, True)
            p = ptx.bits_of_float(ptx.add_rn(v[0], ptx.mul_rn(share, w[0])))
            q = ptx.bits_of_float(ptx.add_rn(v[1], ptx.mul_rn(share, w[1])))
            r = ptx.bits_of_float(ptx.add_rn(v[2], ptx.mul_rn(share, w[2])))
            s = ptx.bits_of_float(ptx.add_rn(v[3], ptx.mul_rn(share, w[3])))
            p4 = ptx.bits_of_float(ptx.add_rn(v[4], ptx.mul_rn(share, w[4])))
            q4 = ptx.bits_of_float(ptx.add_rn(v[5], ptx.mul_rn(share, w[5])))
            r4 = ptx.bits_of_float(ptx.add_rn(v[6], ptx.mul_rn(share, w[6])))
            s4 = ptx.bits_of_float(ptx.add_rn(v[7], ptx.mul_rn(share, w[7])))
            if not is_live(row_live, row):
                p, q, r, s = uint32(0), uint32(0), uint32(0), uint32(0)
                p4, q4, r4, s4 = uint32(0), uint32(0), uint32(0), uint32(0)
            place = out + at + int64(chunk) * int64(4 * CHUNK)
            ptx.store_global_128(place, p, q, r, s)
            ptx.store_global_128(place + int64(16), p4, q4, r4, s4)

    return Kernel(f"add_gated_{width}", add_gated, (types.int64,) * 5, THREADS)


@cache
def _make_silu_mul(width: int, activation: str = SILU) -> Kernel:
    """Grid (M, chunks of a row of I = width elements / THREADS)."""
    activated = gated_activation(activation)

    def silu_mul(gate_up: Any, row_live: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row = int64(cuda.blockIdx.x)
        chunk = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if chunk < uint32(width // CHUNK):
            source = gate_up + row * int64(8 * width)
            g = chunk_values(source, chunk, True)
            u = chunk_values(source + int64(4 * width), chunk, True)
            a = ptx.bf16_pair(activated(g[0], u[0]), activated(g[1], u[1]))
            b = ptx.bf16_pair(activated(g[2], u[2]), activated(g[3], u[3]))
            c = ptx.bf16_pair(activated(g[4], u[4]), activated(g[5], u[5]))
            d = ptx.bf16_pair(activated(g[6], u[6]), activated(g[7], u[7]))
            if not is_live(row_live, row):
                a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            ptx.store_global_128(out + row * int64(2 * width) + int64(chunk) * int64(16), a, b, c, d)

    return Kernel(f"silu_mul_i{width}{activation_label(activation)}", silu_mul, (types.int64,) * 3, THREADS)


@cache
def _make_output_gate(width: int) -> Kernel:
    """Grid (M, chunks of a row of N = width elements / THREADS)."""

    def output_gate(x: Any, gate: Any, row_live: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row = int64(cuda.blockIdx.x)
        chunk = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if chunk < uint32(width // CHUNK):
            g = chunk_values(gate + row * int64(4 * width), chunk, True)
            v = chunk_values(x + row * int64(2 * width), chunk, False)
            a = ptx.bf16_pair(gate_times(v[0], g[0]), gate_times(v[1], g[1]))
            b = ptx.bf16_pair(gate_times(v[2], g[2]), gate_times(v[3], g[3]))
            c = ptx.bf16_pair(gate_times(v[4], g[4]), gate_times(v[5], g[5]))
            d = ptx.bf16_pair(gate_times(v[6], g[6]), gate_times(v[7], g[7]))
            if not is_live(row_live, row):
                a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            ptx.store_global_128(out + row * int64(2 * width) + int64(chunk) * int64(16), a, b, c, d)

    return Kernel(f"output_gate_n{width}", output_gate, (types.int64,) * 4, THREADS)


@cache
def _make_scale(wide: bool) -> Kernel:
    """A thread has a chunk. wide: the number is float32."""

    def scale(x: Any, scalar: Any, out: Any, chunks: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        chunk = int64(cuda.blockIdx.x) * int64(THREADS) + int64(cuda.threadIdx.x)
        if chunk < chunks:
            factor = ptx.load_global_f32(scalar) if wide else ptx.load_global_bf16(scalar)
            v = chunk_values(x, chunk, False)
            ptx.store_global_128(
                out + chunk * int64(16),
                ptx.bf16_pair(ptx.mul_rn(v[0], factor), ptx.mul_rn(v[1], factor)),
                ptx.bf16_pair(ptx.mul_rn(v[2], factor), ptx.mul_rn(v[3], factor)),
                ptx.bf16_pair(ptx.mul_rn(v[4], factor), ptx.mul_rn(v[5], factor)),
                ptx.bf16_pair(ptx.mul_rn(v[6], factor), ptx.mul_rn(v[7], factor)),
            )

    return Kernel(f"scale_{_name(wide)}", scale, (types.int64,) * 4, THREADS)


@cache
def _make_soft_cap(cap: float) -> Kernel:
    """A thread has four numbers."""

    def soft_cap(x: Any, chunks: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        chunk = int64(cuda.blockIdx.x) * int64(THREADS) + int64(cuda.threadIdx.x)
        if chunk < chunks:
            a, b, c, d = ptx.load_global_128(x + chunk * int64(WIDE))
            ptx.store_global_128(
                x + chunk * int64(WIDE),
                ptx.bits_of_float(soft_capped(ptx.float_of_bits(a), cap)),
                ptx.bits_of_float(soft_capped(ptx.float_of_bits(b), cap)),
                ptx.bits_of_float(soft_capped(ptx.float_of_bits(c), cap)),
                ptx.bits_of_float(soft_capped(ptx.float_of_bits(d), cap)),
            )

    return Kernel(f"soft_cap_{cap!r}", soft_cap, (types.int64,) * 2, THREADS)


@cache
def _make_take(width: int, count: int) -> Kernel:
    """Grid (M, words of 16 bytes of a row of N = count elements / THREADS)."""

    def take_columns(x: Any, out: Any, first: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row = int64(cuda.blockIdx.x)
        place = int64(cuda.blockIdx.y) * int64(THREADS) + int64(cuda.threadIdx.x)
        if place < int64(count // FOUR):
            words = ptx.load_global_128(x + (row * int64(width) + first) * int64(4) + place * int64(16))
            target = out + row * int64(4 * count) + place * int64(16)
            ptx.store_global_128(target, words[0], words[1], words[2], words[3])

    return Kernel(f"take_columns_{width}_{count}", take_columns, (types.int64,) * 3, THREADS)


def take_columns(x: torch.Tensor, *, out: torch.Tensor, first: int) -> list[KernelCall]:
    """Columns `first` to `first` + N - 1 of rows [M, W] of float32, as rows [M, N].

    One launch. Raises ShapeError for columns that are not there, and for sizes that are no multiples of 4.
    """
    (rows, width), count = x.shape, out.shape[1]
    check_shape("out", out, rows, count)
    check_dtype(torch.float32, x=x, out=out)
    if width % FOUR or count % FOUR or first % FOUR or not 0 <= first <= width - count:
        raise ShapeError(f"columns {first} to {first + count - 1} of {width} are not multiples of {FOUR} inside of it")
    grid = (rows, -(-(count // FOUR) // THREADS), 1)
    return [KernelCall(_make_take(width, count), grid, (x, out, first))]


def scale(x: torch.Tensor, scalar: torch.Tensor, *, out: torch.Tensor) -> list[KernelCall]:
    """x times one number in float32, rounded once: x [M, N] bf16, scalar [1] bf16 or float32 -> out [M, N] bf16 out.

    One launch. Raises ShapeError as `cast` does.
    """
    check_shape("x", x, *out.shape)
    check_shape("scalar", scalar, 1)
    check_dtype(torch.bfloat16, x=x)
    chunks = _chunks(out)
    kernel = _make_scale(_is_wide("scalar", scalar))
    return [KernelCall(kernel, (-(-chunks // THREADS), 1, 1), (x, scalar, out, chunks))]


def soft_cap(x: torch.Tensor, cap: float) -> list[KernelCall]:
    """Numbers x become cap * tanh(x / cap), in place: x [..] float32, with the bits that a decode GEMM gives its own.

    One launch. Raises ShapeError unless x has a multiple of 4 numbers, side by side.
    """
    check_dtype(torch.float32, x=x)
    if x.numel() % FOUR or not x.is_contiguous():
        raise ShapeError(f"x must have a multiple of {FOUR} elements side by side, got shape {list(x.shape)}")
    chunks = x.numel() // FOUR
    return [KernelCall(_make_soft_cap(cap), (max(1, -(-chunks // THREADS)), 1, 1), (x, chunks))]


def _name(wide: bool) -> str:
    return "f32" if wide else "bf16"


def _is_wide(name: str, tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.float32:
        return True
    check_dtype(torch.bfloat16, **{name: tensor})
    return False


def _chunks(out: torch.Tensor) -> int:
    check_dtype(torch.bfloat16, out=out)
    CHUNKS.check("elements of out", out.numel())
    return out.numel() // CHUNK


def identity(x: torch.Tensor, *, out: torch.Tensor) -> list[KernelCall]:
    """A copy of x, contiguous, of any shape and dtype, which out has too; by single bytes where 16 are not aligned.

    One launch. Raises ShapeError unless shapes and dtypes agree and both are contiguous.
    """
    check_shape("x", x, *out.shape)
    check_dtype(out.dtype, x=x)
    if not (x.is_contiguous() and out.is_contiguous()):
        raise ShapeError("x and out must be contiguous")
    size = x.numel() * x.element_size()
    chunks = 0 if (x.data_ptr() | out.data_ptr()) % WIDE else size // WIDE
    rest = size - chunks * WIDE
    grid = (max(1, -(-(chunks + rest) // THREADS)), 1, 1)
    return [KernelCall(_make_identity(), grid, (x, out, chunks, rest))]


def cast(x: torch.Tensor, *, out: torch.Tensor) -> list[KernelCall]:
    """Round a GEMM's output once: x [M, N] float32 (or bf16, copied) -> out [M, N] bf16 out.

    One launch. Raises ShapeError unless the shapes agree and M * N is a multiple of 8.
    """
    check_shape("x", x, *out.shape)
    chunks = _chunks(out)
    return [KernelCall(_make_cast(_is_wide("x", x)), (-(-chunks // THREADS), 1, 1), (x, out, chunks))]


def add(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> list[KernelCall]:
    """a + b in float32, rounded once: a, b [M, N] float32 or bf16 -> out [M, N] bf16 out.

    One launch. Raises ShapeError as `cast` does.
    """
    check_shape("a", a, *out.shape)
    check_shape("b", b, *out.shape)
    chunks = _chunks(out)
    kernel = _make_add(_is_wide("a", a), _is_wide("b", b))
    return [KernelCall(kernel, (-(-chunks // THREADS), 1, 1), (a, b, out, chunks))]


@launches(add_gated_reference)
def add_gated(given: Given) -> list[KernelCall]:
    """a + b * sigmoid(gate) in float32, the sigmoid, the product and the sum each rounded; dead rows are zero.

    One launch. Raises ShapeError unless N is a multiple of 8.
    """
    rows, width = given["out"].shape
    return [KernelCall(_make_add_gated(width), _grid(rows, width), given.take("a", "b", "gate", "row_live", "out"))]


@launches(reference.silu_mul)
def silu_mul(given: Given) -> list[KernelCall]:
    """silu(gate) * up of a fused gate-up GEMM's output, gates first, or gelu_tanh's, in bf16; dead rows give zero.

    One launch. Raises ShapeError unless I is a multiple of 8, out bf16 and the activation one of these.
    """
    rows, width = given["out"].shape
    check_dtype(torch.bfloat16, out=given["out"])
    kernel = _make_silu_mul(width, given.params["activation"])
    return [KernelCall(kernel, _grid(rows, width), given.take("gate_up", "row_live", "out"))]


@launches(output_gate_reference)
def output_gate(given: Given) -> list[KernelCall]:
    """x * sigmoid(gate), gate and sigmoid rounded to bf16 before the product; dead rows give zero.

    One launch. Raises ShapeError unless N is a multiple of 8, and x and out are bf16.
    """
    rows, width = given["out"].shape
    check_dtype(torch.bfloat16, out=given["out"])
    return [KernelCall(_make_output_gate(width), _grid(rows, width), given.take("x", "gate", "row_live", "out"))]


def _grid(rows: int, width: int) -> tuple[int, int, int]:
    """A thread for each 8 columns. Raises ShapeError for other widths."""
    CHUNKS.check("columns of out", width)
    return rows, -(-(width // CHUNK) // THREADS), 1


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    sums = [_make_add(False, True), _make_add(False, False)]
    rows = [
        _make_silu_mul(14336),
        _make_silu_mul(21504, GELU_TANH),
        _make_take(10240, 2048),
        _make_add_gated(2048),
        _make_output_gate(4096),
        _make_soft_cap(30.0),
        _make_scale(False),
    ]
    return [_make_identity(), _make_cast(True), *sums, *rows]
