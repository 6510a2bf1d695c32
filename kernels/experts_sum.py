"""What a mixture of experts adds to the residual stream: each row's weighed products, from the first rank to the last,
alone, or in the launch that norms the result for what follows.

Alone it takes several blocks a row; with the norm a block has a row, as in `norm`. Every sum is rounded by itself, as
the reference has it.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels import ptx
from lowlat.kernels.kernel import Kernel, KernelCall
from lowlat.kernels.norm import check_dtype, check_row_live, check_width
from lowlat.kernels.norm_math import THREADS, WARPS, high_value, low_value
from lowlat.kernels.norm_row import chunk_values, finish_norm, is_live, load_first_weights
from lowlat.kernels.numba_cuda import cuda, device_function, float32, int64, types, uint32
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["examples", "experts_sum", "make_add_ranks"]

MAX_CHOSEN = 8
SUM_THREADS = 128  # of a sum without a norm
TOGETHER = 4  # ranks whose loads are under way at once


def experts_sum(
    *,
    residual: torch.Tensor,
    partials: torch.Tensor,
    total: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    row_live: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    eps: float = 0.0,
    early: bool = False,
) -> list[KernelCall]:
    """total = residual + the sum of the partials from the first rank on, and the norm of what was rounded.

    residual     [M, N]     bf16
    partials     [M, k, N]  float32  what `experts_down` gives
    total        [M, N]     bf16  out
    norm_weight  [N]        bf16; None: no norm
    row_live     [M]        uint8, of the norm; None: all rows are live; dead ones have a sum but norm zero
    out          [M, N]     bf16  out: the norm, with norm_weight alone
    early        the residual is older than any kernel that may still run when this one starts: it is read before it
                 waits
    One launch. Raises ShapeError for shapes that do not fit, k above 8, and as `rms_norm` does.
    """
    rows, width = residual.shape
    chosen = partials.shape[1]
    check_width(width)
    if not 1 <= chosen <= MAX_CHOSEN:
        raise ShapeError(f"experts_sum takes 1 to {MAX_CHOSEN} experts a row, got {chosen}")
    check_shape("partials", partials, rows, chosen, width)
    check_shape("total", total, rows, width)
    check_dtype(torch.bfloat16, residual=residual, total=total, norm_weight=norm_weight, out=out)
    check_dtype(torch.float32, partials=partials)
    if (norm_weight is None) != (out is None):
        raise ShapeError("experts_sum: a norm needs both norm_weight and out")
    check_row_live(row_live, rows)
    arguments = (residual, partials, total)
    if norm_weight is None or out is None:
        return [KernelCall(_make_sum(width, chosen, early), (-(-width // (8 * SUM_THREADS)), rows, 1), arguments)]
    check_shape("norm_weight", norm_weight, width)
    check_shape("out", out, rows, width)
    live = 0 if row_live is None else row_live
    return [KernelCall(_make_sum_norm(width, chosen, early, eps), (rows, 1, 1), (*arguments, norm_weight, live, out))]


@cache
def _make_sum(width: int, chosen: int, early: bool) -> Kernel:
    """Grid (parts of a row, M): a thread has 8 columns."""
    add_ranks, chunks = make_add_ranks(width, chosen), width // 8

    def experts_sum(residual: Any, partials: Any, total: Any) -> None:
        ptx.let_next_kernel_start()
        chunk = uint32(uint32(cuda.blockIdx.x) * uint32(SUM_THREADS) + uint32(cuda.threadIdx.x))
        row = int64(cuda.blockIdx.y)
        place = row * int64(width * 2) + int64(chunk) * int64(16)
        old = (uint32(0), uint32(0), uint32(0), uint32(0))
        if not early:
            ptx.wait_for_previous_kernel()
        if chunk < uint32(chunks):
            old = ptx.load_global_128_l2(residual + place)
        if early:
            ptx.wait_for_previous_kernel()
        if chunk < uint32(chunks):
            a, b, c, d = add_ranks(old, partials + row * int64(4 * chosen * width), chunk)
            ptx.store_global_128(total + place, a, b, c, d)

    name = f"experts_sum_n{width}_k{chosen}{'_early' if early else ''}"
    return Kernel(name, experts_sum, (types.int64,) * 3, SUM_THREADS)


@cache
def _make_sum_norm(width: int, chosen: int, early: bool, eps: float) -> Kernel:
    """Grid (M,)."""
    add_ranks = make_add_ranks(width, chosen)

    def experts_sum_norm(residual: Any, partials: Any, total: Any, weight: Any, row_live: Any, out: Any) -> None:
        ptx.let_next_kernel_start()
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        thread, row = uint32(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        offset = row * int64(width * 2)
        old = (uint32(0), uint32(0), uint32(0), uint32(0))
        weights = load_first_weights(weight, width)
        if not early:
            ptx.wait_for_previous_kernel()
        if thread < uint32(width // 8):
            old = ptx.load_global_128_l2(residual + offset + int64(thread) * int64(16))
        if early:
            ptx.wait_for_previous_kernel()
        live = is_live(row_live, row)
        first = (uint32(0), uint32(0), uint32(0), uint32(0))
        chunk = thread
        while chunk < uint32(width // 8):
            words = add_ranks(old, partials + row * int64(4 * chosen * width), chunk)
            place = int64(chunk) * int64(16)
            ptx.store_global_128(total + offset + place, words[0], words[1], words[2], words[3])
            if chunk == thread:
                first = words
            chunk = uint32(chunk + uint32(THREADS))
            if chunk < uint32(width // 8):
                old = ptx.load_global_128_l2(residual + offset + int64(chunk) * int64(16))
        finish_norm(first, weights, total + offset, False, weight, out + offset, int64(0), live, sums, width, eps)

    name = f"experts_sum_norm_n{width}_k{chosen}{'_early' if early else ''}_eps{eps!r}"
    return Kernel(name, experts_sum_norm, (types.int64,) * 6, THREADS)


def make_add_ranks(width: int, chosen: int) -> Any:
    """A function: 8 columns of a row's residual plus what its ranks add, as four words."""
    num_values = 8 * TOGETHER

    @device_function
    def add_ranks(old: Any, partials: Any, chunk: Any) -> Any:
        """The products of TOGETHER ranks are loaded side by side."""
        sums, values = cuda.local.array(8, float32), cuda.local.array(num_values, float32)
        for k in range(8):
            sums[k] = float32(0)
        for start in range(0, chosen, TOGETHER):
            for rank in range(TOGETHER):
                if start + rank < chosen:
                    loaded = chunk_values(partials + int64((start + rank) * 4 * width), chunk, True)
                    for k in range(8):
                        values[8 * rank + k] = loaded[k]
            for rank in range(TOGETHER):
                if start + rank < chosen:
                    for k in range(8):
                        sums[k] = ptx.add_rn(sums[k], values[8 * rank + k])
        return (
            ptx.bf16_pair(ptx.add_rn(low_value(old[0]), sums[0]), ptx.add_rn(high_value(old[0]), sums[1])),
            ptx.bf16_pair(ptx.add_rn(low_value(old[1]), sums[2]), ptx.add_rn(high_value(old[1]), sums[3])),
            ptx.bf16_pair(ptx.add_rn(low_value(old[2]), sums[4]), ptx.add_rn(high_value(old[2]), sums[5])),
            ptx.bf16_pair(ptx.add_rn(low_value(old[3]), sums[6]), ptx.add_rn(high_value(old[3]), sums[7])),
        )

    return add_ranks


def examples() -> list[Kernel]:
    """Specialisations that stand for all: gpt-oss, alone and with its norm, and eight ranks of wide rows."""
    return [
        _make_sum(2880, 4, False),
        _make_sum(2880, 4, True),
        _make_sum_norm(2880, 4, True, 1e-5),
        _make_sum_norm(64, 3, False, 1e-5),
        _make_sum_norm(5120, 8, True, 1e-6),
    ]
