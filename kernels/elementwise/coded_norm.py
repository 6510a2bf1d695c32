"""This module has RMS norms of whole rows, alone or after a residual sum, that store the codes a prefill GEMM reads.

A block has a row, in registers. Its bits are those of `coded_rows` after the norms of `arranged_norm`.
"""

from functools import cache
from typing import Any

import torch

from lowlat.kernels.common.norm_math import THREADS, WARPS, add_squares, block_sum, inverse_rms
from lowlat.kernels.common.norm_row import chunk_values, is_live, make_norm_functions, weights_label
from lowlat.kernels.elementwise.norm import are_wide, check_dtype, check_row_live, check_sum, check_width
from lowlat.kernels.gemm.prefill.coded_rows import CodedRows, block_peak, chunk_peak, store_chunk, store_scale
from lowlat.kernels.gemm.prefill.plan import has_prefill_gemm
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["coded_add_norm", "coded_rms_norm", "examples"]

WHOLE_WARPS = 0xFFFFFFE0
ALONE, NARROW, WIDE = "", "bf16", "f32"  # what is added to a row before its norm


def _make_load_chunk(added: str) -> Any:
    """A device function that loads a chunk of a row, or adds and stores a chunk of two rows."""
    wide = added == WIDE

    if added == ALONE:

        @device_function
        def load_chunk(row: Any, _other: Any, _total: Any, chunk: Any) -> Any:
            return ptx.load_global_128(row + int64(chunk) * int64(16))

        return load_chunk

    @device_function
    def add_chunk(row: Any, other: Any, total: Any, chunk: Any) -> Any:
        x, y = chunk_values(row, chunk, False), chunk_values(other, chunk, wide)
        a = ptx.bf16_pair(ptx.add_rn(x[0], y[0]), ptx.add_rn(x[1], y[1]))
        b = ptx.bf16_pair(ptx.add_rn(x[2], y[2]), ptx.add_rn(x[3], y[3]))
        c = ptx.bf16_pair(ptx.add_rn(x[4], y[4]), ptx.add_rn(x[5], y[5]))
        d = ptx.bf16_pair(ptx.add_rn(x[6], y[6]), ptx.add_rn(x[7], y[7]))
        ptx.store_global_128(total + int64(chunk) * int64(16), a, b, c, d)
        return a, b, c, d

    return add_chunk


@cache
def _make(width: int, eps: float, added: str, wide_weights: bool = False) -> Kernel:
    """Grid (M,)."""
    functions, chunks = make_norm_functions(wide_weights), width // 8
    own = -(-chunks // THREADS)
    scale, held, size, load_weights = functions.scale, functions.held, functions.size, functions.load_weights
    num_words, num_weights = 4 * own, size * own
    other_bytes, load_chunk = width * (4 if added == WIDE else 2), _make_load_chunk(added)

    def coded_norm(a: Any, b: Any, weight: Any, row_live: Any, total: Any, out: Any, rows: Any) -> None:
        sums, peaks = cuda.shared.array(shape=WARPS, dtype=float32), cuda.shared.array(shape=WARPS, dtype=float32)
        words, kept = cuda.local.array(num_words, uint32), cuda.local.array(num_weights, uint32)
        thread, row, zero = uint32(cuda.threadIdx.x), int64(cuda.blockIdx.x), uint32(0)
        for part in range(own):
            chunk = uint32(thread + uint32(part * THREADS))
            if chunk < uint32(chunks):
                found = load_weights(weight, chunk)
                for word in range(size):
                    kept[size * part + word] = found[word]
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        offset, live = row * int64(width * 2), is_live(row_live, row)
        squares, peak = float32(0.0), zero
        for part in range(own):
            chunk, at = uint32(thread + uint32(part * THREADS)), 4 * part
            c, d, e, f = zero, zero, zero, zero
            if chunk < uint32(chunks):
                c, d, e, f = load_chunk(a + offset, b + row * int64(other_bytes), total + offset, chunk)
            squares = add_squares(squares, c, d, e, f)
            words[at], words[at + 1], words[at + 2], words[at + 3] = c, d, e, f
        inverse = inverse_rms(block_sum(squares, sums), width, eps)
        for part in range(own):
            chunk, at = uint32(thread + uint32(part * THREADS)), 4 * part
            c, d, e, f = zero, zero, zero, zero
            if live and chunk < uint32(chunks):
                own_words = words[at], words[at + 1], words[at + 2], words[at + 3]
                c, d, e, f = scale(own_words, inverse, held(kept, size * part))
            peak = max(peak, chunk_peak((c, d, e, f)))
            words[at], words[at + 1], words[at + 2], words[at + 3] = c, d, e, f
        factor = store_scale(block_peak(peak, peaks), out, row, uint32(rows), uint32(width))
        for part in range(own):
            chunk, at = uint32(thread + uint32(part * THREADS)), 4 * part
            if uint32(chunk & uint32(WHOLE_WARPS)) < uint32(chunks):  # of all lanes of a warp, as they exchange
                normed = words[at], words[at + 1], words[at + 2], words[at + 3]
                store_chunk(normed, factor, out, uint32(row), uint32(rows), chunk, chunk < uint32(chunks))

    kind = f"add_norm_n{width}_{added}" if added else f"norm_n{width}"
    name = f"coded_{kind}_eps{eps!r}{weights_label(wide_weights)}"
    return Kernel(name, coded_norm, (types.int64,) * 7, THREADS)


def coded_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, row_live: torch.Tensor | None = None, *, out: CodedRows, eps: float
) -> list[KernelCall]:
    """The codes of the rows of `norm.rms_norm`, in one launch.

    x         [M, N]  bf16
    weight    [N]     bf16 or float32
    row_live  [M]     uint8; None: all rows are live
    out       of these rows, out; codes of dead rows are zero
    Raises ShapeError for shapes or dtypes that do not fit, or N above MAX_WIDTH.
    """
    rows, width = x.shape
    check_width(width)
    check_row_live(row_live, rows)
    check_shape("weight", weight, width)
    check_dtype(torch.bfloat16, x=x)
    return _call(x, None, weight, row_live, None, out, eps)


def coded_add_norm(
    a: torch.Tensor,
    b: torch.Tensor,
    weight: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    total: torch.Tensor,
    out: CodedRows,
    eps: float,
) -> list[KernelCall]:
    """The sum and the codes of the rows of `norm.add_norm`, in one launch.

    a         [M, N]  bf16           the residual stream
    b         [M, N]  float32, bf16  what is added
    weight    [N]     bf16 or float32
    row_live  [M]     uint8; None: all rows are live
    total     [M, N]  bf16  out: row by row
    out       of the normed rows, out; codes of dead rows are zero
    Raises ShapeError as `coded_rms_norm` does.
    """
    check_sum(a, b, weight, row_live, total)
    return _call(a, b, weight, row_live, total, out, eps)


def _call(
    a: torch.Tensor,
    b: torch.Tensor | None,
    weight: torch.Tensor,
    row_live: torch.Tensor | None,
    total: torch.Tensor | None,
    out: CodedRows,
    eps: float,
) -> list[KernelCall]:
    rows, width = a.shape
    check_shape("the coded rows", torch.empty(out.rows, out.columns, device="meta"), rows, width)
    added = ALONE if b is None else WIDE if b.dtype == torch.float32 else NARROW
    optional = [0 if each is None else each for each in (b, row_live, total)]
    arguments = (a, optional[0], weight, optional[1], optional[2], out.memory, rows)
    return [KernelCall(_make(width, eps, added, are_wide(weight)), (rows, 1, 1), arguments)]


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Specialisations that stand for all, for a GPU whose prefill GEMMs take codes."""
    if not has_prefill_gemm(gpu):
        return []
    return [
        _make(4096, 1e-5, ALONE),
        _make(4096, 1e-5, WIDE),
        _make(5120, 1e-6, NARROW),
        _make(5120, 1e-6, WIDE, True),
    ]
