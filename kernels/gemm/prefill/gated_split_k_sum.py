"""This module adds up a prefill GEMM's segments of gates and ups, activates and arranges the sums, in one launch.

The partials' columns are in the packed order, 8 gates and their 8 ups by turns, so a thread has both of eight channels.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.activation import GELU_TANH, SILU, activation_label, gated_activation
from lowlat.kernels.common.norm_row import is_live
from lowlat.kernels.gemm.packing import TILE_ROWS
from lowlat.kernels.gemm.prefill.activation_layout import STEP, arranged_shape, piece_address, transposed
from lowlat.kernels.gemm.prefill.split_k_sum import THREADS, make_total
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, types, uint32

__all__ = ["examples", "gate_segments"]


def gate_segments(
    *,
    partials: torch.Tensor,
    scales: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None,
    row_live: torch.Tensor | None = None,
    out: torch.Tensor,
    activation: str = SILU,
) -> list[KernelCall]:
    """Add up the sums of segments, activate gates and multiply them by their ups, in one launch; dead rows are zero.

    partials    [S, M, 2I]          float32: of every 16 columns 8 gates, then their ups
    scales      [2I]                float32, in the partials' order, of which more may follow; None: ones
    row_scales  [M]                 float32; None: ones
    bias        [2I]                bf16, in the partials' order, or None
    row_live    [M]                 uint8; None: all rows are live
    out         [ceil(I/64), M, 64] bf16, out: the bits of `silu_mul` over `add_segments`', as `arrange` leaves them
    activation  of gates, by its name
    Time: S * M * 2I * 4 bytes over the L2's bandwidth. Captured: yes. Raises ShapeError for shapes that do not fit, or
    2I that is no multiple of 16.
    """
    segments, rows, width = partials.shape
    if width % TILE_ROWS:
        raise ShapeError(f"gates and ups stand by turns in multiples of {TILE_ROWS} columns, got {width}")
    check_shape("out", out, *arranged_shape(rows, width // 2))
    if bias is not None:
        check_shape("bias", bias, width)
    if row_live is not None:
        check_shape("row_live", row_live, rows)
    if row_scales is not None:
        check_shape("row_scales", row_scales, rows)
    kernel = _make(width, segments, bias is not None, scales is not None, row_scales is not None, activation)
    beside = (0 if each is None else each for each in (scales, bias, row_live, row_scales))
    blocks = -(-rows * _pieces(width) // THREADS)
    return [KernelCall(kernel, (blocks, 1, 1), (partials, *beside, out, rows))]


def _pieces(width: int) -> int:
    """Pieces of eight channels of an arranged row, padded to whole steps."""
    return 8 * -(-width // (2 * STEP))


@cache
def _make(
    width: int, segments: int, with_bias: bool, with_scales: bool, with_row_scales: bool, activation: str = SILU
) -> Kernel:
    """A lane has a piece: eight channels of a row; four neighbours have 32, and store one piece each."""
    pieces, activated = _pieces(width), gated_activation(activation)
    total = make_total(width, segments, with_bias=with_bias, with_scales=with_scales, with_row_scales=with_row_scales)

    @device_function
    def two_words(sources: Any, row: Any, column: Any, rows: Any) -> Any:
        """Four channels of a row, from the column of the first one's gate on."""
        partials, scales, bias, row_scales = sources
        gates = total(partials, scales, bias, row, column, rows, row_scales)
        ups = total(partials, scales, bias, row, uint32(column + uint32(TILE_ROWS // 2)), rows, row_scales)
        first = ptx.bf16_pair(activated(gates[0], ups[0]), activated(gates[1], ups[1]))
        return first, ptx.bf16_pair(activated(gates[2], ups[2]), activated(gates[3], ups[3]))

    def sum_gated_split_k(
        partials: Any, scales: Any, bias: Any, row_live: Any, row_scales: Any, out: Any, rows: Any
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        number = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        row = uint32(number // uint32(pieces))
        piece = uint32(number - uint32(row * uint32(pieces)))
        column = uint32(piece * uint32(TILE_ROWS))
        a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
        if row < uint32(rows) and column < uint32(width) and is_live(row_live, row):
            sources = (partials, scales, bias, row_scales)
            a, b = two_words(sources, row, column, rows)
            c, d = two_words(sources, row, uint32(column + uint32(4)), rows)
        a, b, c, d = transposed((a, b, c, d), uint32(cuda.threadIdx.x))
        if row < uint32(rows):
            ptx.store_global_128(piece_address(out, row, rows, piece), a, b, c, d)

    beside = ("bias" if with_bias else "plain") + ("_scaled" if with_scales else "")
    beside += ("_rows" if with_row_scales else "") + activation_label(activation)
    return Kernel(f"gated_wide_add_{width}x{segments}_{beside}", sum_gated_split_k, (types.int64,) * 7, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [
        _make(34816, 2, False, False, False),
        _make(24576, 2, False, True, True),
        _make(4224, 4, True, True, False, GELU_TANH),
    ]
