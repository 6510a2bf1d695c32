"""This module has the norm of a layer's output, the residual sum, its scale and the next norm, in one launch.

A layer with norms on both sides rounds a GEMM's output, norms it, adds it to the residual stream, may multiply the sum
by a number, and norms it for the next GEMM. A block has a row and keeps it in registers. It sums squares in the order
of `norm_math` and rounds where the operations do, so it has their bits.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.norm_math import (
    THREADS,
    WARPS,
    add_squares,
    high_value,
    inverse_rms,
    low_value,
    make_block_sum,
)
from lowlat.kernels.common.norm_row import is_live, make_norm_functions, weights_label
from lowlat.kernels.elementwise.norm import are_wide, check_dtype, check_row_live, check_width
from lowlat.kernels.gemm.prefill.activation_layout import STEP, arranged_shape, piece_address, transposed
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["examples", "norm_add"]

WHOLE_WARPS = 0xFFFFFFE0


@dataclass(frozen=True)
class _Shape:
    """The sizes and options that the kernel's code depends on.

    width       of a row
    eps         of the norm of what is added; None: it is added as it is
    next_eps    of the norm of the sum; None: there is none
    wide        what is added is float32, rounded first where it is normed; else bf16
    wide_norms  weights of norms are float32
    scaled      the sum is multiplied by a number: "float32" or "bfloat16", as it is stored; "": it is not
    arranged    the norm of the sum is left as a prefill GEMM reads it
    triggers_first  the next kernel may start before this one waits
    sum_eps     of the norm of a sum before the one to the residual stream; None: there is one sum
    """

    width: int
    eps: float | None
    next_eps: float | None
    wide: bool
    wide_norms: bool
    scaled: str = ""
    arranged: bool = False
    triggers_first: bool = False
    sum_eps: float | None = None

    @property
    def name(self) -> str:
        norm = "" if self.eps is None else f"_eps{self.eps!r}"
        norm += "" if self.sum_eps is None else f"_sum{self.sum_eps!r}"
        following = "" if self.next_eps is None else f"_next{self.next_eps!r}"
        scaled, arranged = f"_times_{self.scaled}" if self.scaled else "", "_arranged" if self.arranged else ""
        kind, label = "f32" if self.wide else "bf16", weights_label(self.wide_norms) + "_first" * self.triggers_first
        return f"norm_add_n{self.width}_{kind}{norm}{following}{scaled}{arranged}{label}"


@device_function
def _sum_pair(word: Any, other: Any) -> Any:
    """Two packed bf16 plus two others, each sum rounded."""
    return ptx.bf16_pair(ptx.add_rn(low_value(word), low_value(other)), ptx.add_rn(high_value(word), high_value(other)))


@device_function
def _times_pair(word: Any, factor: Any) -> Any:
    """Two packed bf16 times a number, each product rounded."""
    return ptx.bf16_pair(ptx.mul_rn(low_value(word), factor), ptx.mul_rn(high_value(word), factor))


def _make_load_number(scaled: str) -> Any:
    """A device function that loads the number by which a sum is multiplied, from its address."""
    wide, there = scaled == "float32", scaled != ""

    @device_function
    def load_number(address: Any) -> Any:
        factor = float32(1.0)
        if there:
            factor = ptx.load_global_f32(address) if wide else ptx.load_global_bf16(address)
        return factor

    return load_number


def _make_load_weights(shape: _Shape, own: int, certain: int, there: bool) -> Any:
    """A function: a thread's chunks of a norm's weight, kept in an array; zeros past the row's end.

    certain  chunks that every thread has
    """
    functions, chunks = make_norm_functions(shape.wide_norms), shape.width // 8
    size, load_ahead, no_weights = functions.size, functions.load_ahead, functions.no_weights

    @device_function
    def load(kept: Any, weight: Any, thread: Any) -> None:
        if there:
            for part in range(own):
                chunk, words = uint32(thread + uint32(part * THREADS)), no_weights()
                if part < certain or chunk < uint32(chunks):
                    words = load_ahead(weight, chunk)
                for word in range(size):
                    kept[size * part + word] = words[word]

    return load


def _make_load_rows(shape: _Shape, own: int, certain: int) -> Any:
    """A function: a thread's chunks of what is added, of what it is added to, and of the residual stream where that is
    another; kept in arrays, zeros past the end.

    All loads are on their way before anything is made of the first.
    """
    chunks, wide, size, twice = shape.width // 8, shape.wide, 8 if shape.wide else 4, shape.sum_eps is not None

    @device_function
    def load_others(others: Any, residual: Any, thread: Any) -> None:
        for part in range(own):
            chunk, at = uint32(thread + uint32(part * THREADS)), 4 * part
            a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            if part < certain or chunk < uint32(chunks):
                a, b, c, d = ptx.load_global_128(residual + int64(chunk) * int64(16))
            others[at], others[at + 1], others[at + 2], others[at + 3] = a, b, c, d

    @device_function
    def load(added: Any, others: Any, streams: Any, source: Any, residual: Any, stream: Any, thread: Any) -> None:
        for part in range(own):
            chunk, at = uint32(thread + uint32(part * THREADS)), size * part
            for word in range(size):
                added[at + word] = uint32(0)
            if part < certain or chunk < uint32(chunks):
                place = source + int64(chunk) * int64(4 * size)
                added[at], added[at + 1], added[at + 2], added[at + 3] = ptx.load_global_128(place)
                if wide:
                    a, b, c, d = ptx.load_global_128(place + int64(16))
                    added[at + 4], added[at + 5], added[at + 6], added[at + 7] = a, b, c, d
        load_others(others, residual, thread)
        if twice:
            load_others(streams, stream, thread)
        ptx.sync_warp()  # loads do not sink below it

    return load


def _make_join(shape: _Shape) -> Any:
    """A function: a word of what is added, rounded, where it is normed; else of the rounded sum with the stream."""
    wide, norms = shape.wide, shape.eps is not None

    @device_function
    def word_of(added: Any, at: Any, word: Any, other: Any) -> Any:
        if norms and not wide:
            return added[at + word]
        if wide:
            low, high = ptx.float_of_bits(added[at + 2 * word]), ptx.float_of_bits(added[at + 2 * word + 1])
        else:
            low, high = low_value(added[at + word]), high_value(added[at + word])
        if not norms:
            low, high = ptx.add_rn(low_value(other), low), ptx.add_rn(high_value(other), high)
        return ptx.bf16_pair(low, high)

    return word_of


@cache
def _make(shape: _Shape) -> Kernel:
    """Grid (M,). A block has the warps that a row has chunks for: the sums of others would be zero."""
    width, chunks, wide = shape.width, shape.width // 8, shape.wide
    pieces = -(-width // STEP) * 8 if shape.arranged else chunks
    threads, own = min(THREADS, -(-pieces // 32) * 32), -(-pieces // THREADS)
    full = own - 1 if own > 1 and pieces % THREADS else own  # chunks, or pieces past a row's end, that every warp has
    certain = chunks // threads  # chunks that every thread has
    num_words, num_added = 4 * own, (8 if wide else 4) * own
    functions, added_size = make_norm_functions(shape.wide_norms), 8 if wide else 4
    scale, held, size = functions.scale, functions.held, functions.size
    norms, follows, arranged = shape.eps is not None, shape.next_eps is not None, shape.arranged
    eps, next_eps, triggers_first = shape.eps or 0.0, shape.next_eps or 0.0, shape.triggers_first
    load_number, times = _make_load_number(shape.scaled), shape.scaled != ""
    twice, sum_eps = shape.sum_eps is not None, shape.sum_eps or 0.0
    there = norms, twice, follows
    load_weights, load_sum_weights, load_next = (_make_load_weights(shape, own, certain, each) for each in there)
    load_rows, word_of = _make_load_rows(shape, own, certain), _make_join(shape)
    sum_block = make_block_sum(threads // 32)
    kept_size, sum_size, next_size = (size * own if each else 1 for each in there)
    num_streams = num_words if twice else 1

    @device_function
    def has_work(chunk: Any, part: Any) -> Any:
        """Whether a warp has chunks of this part, or pieces past a row's end."""
        return part < full or uint32(chunk & uint32(WHOLE_WARPS)) < uint32(pieces)

    @device_function
    def inverse_of(words: Any, sums: Any, eps: Any, thread: Any) -> Any:
        total = float32(0.0)
        for part in range(own):
            at = 4 * part
            if has_work(uint32(thread + uint32(part * THREADS)), part):
                total = add_squares(total, words[at], words[at + 1], words[at + 2], words[at + 3])
        return inverse_rms(sum_block(total, sums), width, eps)

    @device_function
    def store_next(words: Any, kept: Any, inverse: Any, live: Any, out: Any, row: Any, rows: Any, thread: Any) -> None:
        for part in range(own):
            chunk, at = uint32(thread + uint32(part * THREADS)), 4 * part
            if has_work(chunk, part):  # all lanes of a warp, as they exchange
                own_words = words[at], words[at + 1], words[at + 2], words[at + 3]
                a, b, c, d = scale(own_words, inverse, held(kept, size * part))
                if not live or (arranged and part >= certain and chunk >= uint32(chunks)):
                    a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
                if arranged:
                    a, b, c, d = transposed((a, b, c, d), thread)
                    if chunk < uint32(pieces):
                        ptx.store_global_128(piece_address(out, uint32(row), rows, chunk), a, b, c, d)
                elif part < certain or chunk < uint32(chunks):
                    ptx.store_global_128(out + row * int64(width * 2) + int64(chunk) * int64(16), a, b, c, d)

    def make_add(normed: bool, last: bool) -> Any:
        """A function: a row, or its norm, is added; the last sum is multiplied and stored."""

        @device_function
        def add(words: Any, others: Any, kept: Any, inverse: Any, live: Any, factor: Any, target: Any) -> None:
            thread = uint32(cuda.threadIdx.x)
            for part in range(own):
                chunk, at = uint32(thread + uint32(part * THREADS)), 4 * part
                if has_work(chunk, part):
                    a, b, c, d = words[at], words[at + 1], words[at + 2], words[at + 3]
                    if normed:
                        a, b, c, d = scale((a, b, c, d), inverse, held(kept, size * part))
                        if not live:
                            a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
                        a, b = _sum_pair(others[at], a), _sum_pair(others[at + 1], b)
                        c, d = _sum_pair(others[at + 2], c), _sum_pair(others[at + 3], d)
                    if last and times:
                        a, b = _times_pair(a, factor), _times_pair(b, factor)
                        c, d = _times_pair(c, factor), _times_pair(d, factor)
                    if last and (part < certain or chunk < uint32(chunks)):
                        ptx.store_global_128(target + int64(chunk) * int64(16), a, b, c, d)
                    words[at], words[at + 1], words[at + 2], words[at + 3] = a, b, c, d

        return add

    add, add_last = make_add(norms, not twice), make_add(True, True)

    def norm_add(
        x: Any, weight: Any, residual: Any, row_live: Any, number: Any, sum_weight: Any, stream: Any, next_weight: Any,
        total: Any, out: Any, rows: Any,
    ) -> None:  # fmt: skip
        if triggers_first:
            ptx.let_next_kernel_start()
        sums = cuda.shared.array(WARPS, types.float32, alignment=16)
        between_sums = cuda.shared.array(WARPS, types.float32, alignment=16)
        next_sums = cuda.shared.array(WARPS, types.float32, alignment=16)
        words, others = cuda.local.array(num_words, uint32), cuda.local.array(num_words, uint32)
        added = cuda.local.array(num_added, uint32)
        streams = cuda.local.array(num_streams, uint32)
        kept, kept_next = cuda.local.array(kept_size, uint32), cuda.local.array(next_size, uint32)
        kept_sum = cuda.local.array(sum_size, uint32)
        row, thread = int64(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        load_weights(kept, weight, thread)
        load_sum_weights(kept_sum, sum_weight, thread)
        load_next(kept_next, next_weight, thread)
        factor = load_number(number)
        ptx.wait_for_previous_kernel()
        if not triggers_first:
            ptx.let_next_kernel_start()
        live, offset = is_live(row_live, row), row * int64(width * 2)
        source = x + row * int64(width * (4 if wide else 2))
        load_rows(added, others, streams, source, residual + offset, stream + offset, thread)
        for part in range(own):
            at, first = 4 * part, added_size * part
            words[at] = word_of(added, first, 0, others[at])
            words[at + 1] = word_of(added, first, 1, others[at + 1])
            words[at + 2] = word_of(added, first, 2, others[at + 2])
            words[at + 3] = word_of(added, first, 3, others[at + 3])
        inverse = float32(0.0)
        if norms:
            inverse = inverse_of(words, sums, eps, thread)
        add(words, others, kept, inverse, live, factor, total + offset)
        if twice:
            inverse = inverse_of(words, between_sums, sum_eps, thread)
            add_last(words, streams, kept_sum, inverse, live, factor, total + offset)
        if follows:
            store_next(words, kept_next, inverse_of(words, next_sums, next_eps, thread), live, out, row, rows, thread)

    return Kernel(shape.name, norm_add, (types.int64,) * 11, threads, waits_before_trigger=not triggers_first)


def norm_add(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    scalar: torch.Tensor | None = None,
    sum_weight: torch.Tensor | None = None,
    stream: torch.Tensor | None = None,
    next_weight: torch.Tensor | None = None,
    total: torch.Tensor,
    out: torch.Tensor | None = None,
    eps: float | None = None,
    sum_eps: float | None = None,
    next_eps: float | None = None,
    arranged: bool = False,
    triggers_first: bool = False,
) -> list[KernelCall]:
    """total = residual + norm(x), times a number, and out = norm(total): the bits of `cast`, `rms_norm`, `add`, `scale`
    and `rms_norm` one after the other. With stream, total = stream + norm(residual + norm(x)), times the number.

    x            [M, N]  float32, bf16    what is added; rounded to bf16 before its norm
    weight       [N]     bf16 or float32  with eps; None: x is added as it is
    residual     [M, N]  bf16
    row_live     [M]     uint8; None: all rows are live. Norms of dead rows are zero
    scalar       [1]     bf16 or float32; None: sums are not multiplied
    sum_weight   [N]     as weight, with sum_eps and stream, and with eps; None: there is one sum
    stream       [M, N]  bf16
    next_weight  [N]     as weight, with next_eps and out; None: the sum is not normed
    total        [M, N]  bf16  out
    out          [M, N]  bf16  out; arranged: [ceil(N/64), M, 64], as `arrange` leaves it
    triggers_first  the next launch may start before this one waits for the one before it
    One launch. Raises ShapeError for shapes or dtypes that do not fit, arguments that do not go together, or N outside
    of ROW_WIDTH.
    """
    rows, width = residual.shape
    check_width(width)
    check_row_live(row_live, rows)
    for name, tensor in (("x", x), ("total", total)):
        check_shape(name, tensor, rows, width)
    check_dtype(torch.bfloat16, residual=residual, stream=stream, total=total, out=out)
    wide = x.dtype == torch.float32
    if not wide:
        check_dtype(torch.bfloat16, x=x)
    if (weight is None) != (eps is None) or (next_weight is None) != (next_eps is None):
        raise ShapeError("a norm has a weight and eps")
    if (next_weight is None) != (out is None):
        raise ShapeError("the norm of the sum has a weight and `out`")
    if len({each is None for each in (sum_weight, sum_eps, stream)}) > 1 or (stream is not None and eps is None):
        raise ShapeError("a sum that is normed has a weight, eps and a stream, and is of a norm")
    if stream is not None:
        check_shape("stream", stream, rows, width)
    weights = [each for each in (weight, sum_weight, next_weight) if each is not None]
    for each in weights:
        check_shape("weight", each, width)
    if out is not None:
        check_shape("out", out, *(arranged_shape(rows, width) if arranged else (rows, width)))
    wide_norms = bool(weights) and are_wide(*weights)
    shape = _Shape(width, eps, next_eps, wide, wide_norms, _kind(scalar), arranged, triggers_first, sum_eps)
    optional = (0 if each is None else each for each in (row_live, scalar, sum_weight, stream, next_weight))
    first = 0 if weight is None else weight
    arguments = (x, first, residual, *optional, total, 0 if out is None else out, rows)
    return [KernelCall(_make(shape), (rows, 1, 1), arguments)]


def _kind(scalar: torch.Tensor | None) -> str:
    """How a number is stored; "" for none. Raises ShapeError for other dtypes or several numbers."""
    if scalar is None:
        return ""
    check_shape("scalar", scalar, 1)
    if scalar.dtype != torch.float32:
        check_dtype(torch.bfloat16, scalar=scalar)
    return str(scalar.dtype).removeprefix("torch.")


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [
        _make(_Shape(5376, 1e-6, 1e-6, True, False, "bfloat16")),
        _make(_Shape(5376, 1e-6, 1e-6, False, False, "bfloat16", triggers_first=True)),
        _make(_Shape(2560, 1e-6, None, False, False, triggers_first=True)),
        _make(_Shape(2816, 1e-6, 1e-6, False, True, "float32")),
        _make(_Shape(2816, None, 1e-6, False, False, "bfloat16")),
        _make(_Shape(2816, 1e-6, 1e-6, True, False, "bfloat16", triggers_first=True, sum_eps=1e-6)),
        _make(_Shape(5376, 1e-6, 1e-6, True, False, arranged=True)),
        _make(_Shape(72, 1e-6, 1e-6, True, True, arranged=True)),
    ]
