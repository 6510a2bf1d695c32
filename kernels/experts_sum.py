"""What a mixture of experts adds to the residual stream: each row's shares of its experts' products, from the first
rank to the last, in the launch that norms the result for what follows.

A block has a row, as in `norm`. Every product and every sum is rounded by itself, as the reference has it.
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

__all__ = ["examples", "experts_sum"]

MAX_CHOSEN = 8
TOGETHER = 4  # ranks whose loads are under way at once


def experts_sum(
    *,
    residual: torch.Tensor,
    partials: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    bias: torch.Tensor,
    total: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    row_live: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    eps: float = 0.0,
) -> list[KernelCall]:
    """total = residual + the sum over ranks of share * (partial + bias of the expert), and the norm of what was rounded.

    residual        [M, N]     bf16
    partials        [M, k, N]  float32  the experts' products, without bias or share; of a dead rank: never looked at
    expert_ids      [M, k]     int32; -1 dead
    expert_weights  [M, k]     float32
    bias            [E, N]     bf16
    total           [M, N]     bf16  out
    norm_weight     [N]        bf16; None: no norm
    row_live        [M]        uint8, of the norm; None: all rows are live; dead ones have a sum but norm zero
    out             [M, N]     bf16  out: the norm, with norm_weight alone
    One launch. Raises ShapeError for shapes that do not fit, k above 8, and as `rms_norm` does.
    """
    rows, width = residual.shape
    chosen = expert_ids.shape[1]
    check_width(width)
    if not 1 <= chosen <= MAX_CHOSEN:
        raise ShapeError(f"experts_sum takes 1 to {MAX_CHOSEN} experts a row, got {chosen}")
    check_shape("partials", partials, rows, chosen, width)
    check_shape("expert_ids", expert_ids, rows, chosen)
    check_shape("expert_weights", expert_weights, rows, chosen)
    check_shape("bias", bias, bias.shape[0], width)
    check_shape("total", total, rows, width)
    check_dtype(torch.bfloat16, residual=residual, bias=bias, total=total, norm_weight=norm_weight, out=out)
    check_dtype(torch.float32, partials=partials, expert_weights=expert_weights)
    check_dtype(torch.int32, expert_ids=expert_ids)
    if (norm_weight is None) != (out is None):
        raise ShapeError("experts_sum: a norm needs both norm_weight and out")
    check_row_live(row_live, rows)
    inputs = (residual, partials, expert_ids, expert_weights, bias)
    if norm_weight is None or out is None:
        return [KernelCall(_make_sum(width, chosen), (rows, 1, 1), (*inputs, total))]
    check_shape("norm_weight", norm_weight, width)
    check_shape("out", out, rows, width)
    live = 0 if row_live is None else row_live
    kernel = _make_sum_norm(width, chosen, eps)
    return [KernelCall(kernel, (rows, 1, 1), (*inputs, total, norm_weight, live, out))]


@cache
def _make_sum(width: int, chosen: int) -> Kernel:
    add_experts = _make_add_experts(width, chosen)

    def experts_sum(residual: Any, partials: Any, ids: Any, shares: Any, bias: Any, total: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row, chunk = int64(cuda.blockIdx.x), uint32(cuda.threadIdx.x)
        while chunk < uint32(width // 8):
            add_experts(residual, partials, ids, shares, bias, total, row, chunk)
            chunk = uint32(chunk + uint32(THREADS))

    return Kernel(f"experts_sum_n{width}_k{chosen}", experts_sum, (types.int64,) * 6, THREADS)


@cache
def _make_sum_norm(width: int, chosen: int, eps: float) -> Kernel:
    add_experts = _make_add_experts(width, chosen)

    def experts_sum_norm(
        residual: Any, partials: Any, ids: Any, shares: Any, bias: Any, total: Any, weight: Any, row_live: Any, out: Any
    ) -> None:
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        thread, row = uint32(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        offset = row * int64(width * 2)
        live = is_live(row_live, row)
        first = (uint32(0), uint32(0), uint32(0), uint32(0))
        chunk = thread
        while chunk < uint32(width // 8):
            words = add_experts(residual, partials, ids, shares, bias, total, row, chunk)
            if chunk == thread:
                first = words
            chunk = uint32(chunk + uint32(THREADS))
        finish_norm(first, weights, total + offset, False, weight, out + offset, int64(0), live, sums, width, eps)

    name = f"experts_sum_norm_n{width}_k{chosen}_eps{eps!r}"
    return Kernel(name, experts_sum_norm, (types.int64,) * 9, THREADS)


def _make_add_experts(width: int, chosen: int) -> Any:
    """A function: 8 columns of a row's sum, stored, as four words; loads of TOGETHER ranks run side by side."""
    num_values, num_biases = 8 * TOGETHER, 4 * TOGETHER

    @device_function
    def add_experts(
        residual: Any, partials: Any, ids: Any, shares: Any, bias: Any, total: Any, row: Any, chunk: Any
    ) -> Any:
        sums, values = cuda.local.array(8, float32), cuda.local.array(num_values, float32)
        biases, known = cuda.local.array(num_biases, uint32), cuda.local.array(TOGETHER, int64)
        parts = cuda.local.array(TOGETHER, float32)
        offset = row * int64(2 * width) + int64(chunk) * int64(16)
        x = chunk_values(residual + row * int64(2 * width), chunk, False)
        for k in range(8):
            sums[k] = float32(0)
        for start in range(0, chosen, TOGETHER):
            for rank in range(TOGETHER):
                if start + rank < chosen:
                    at = row * int64(chosen) + int64(start + rank)
                    known[rank] = int64(ptx.load_global_i32(ids + at * int64(4)))
                    parts[rank] = ptx.load_global_f32(shares + at * int64(4))
                    loaded = chunk_values(partials + at * int64(4 * width), chunk, True)
                    for k in range(8):
                        values[8 * rank + k] = loaded[k]
            for rank in range(TOGETHER):
                if start + rank < chosen:
                    place = max(known[rank], int64(0)) * int64(2 * width) + int64(chunk) * int64(16)
                    a, b, c, d = ptx.load_global_nc_128(bias + place)
                    biases[4 * rank], biases[4 * rank + 1] = a, b
                    biases[4 * rank + 2], biases[4 * rank + 3] = c, d
            for rank in range(TOGETHER):
                if start + rank < chosen:
                    for k in range(8):
                        word = biases[4 * rank + (k >> 1)]
                        own = high_value(word) if k & 1 else low_value(word)
                        part = ptx.mul_rn(parts[rank], ptx.add_rn(values[8 * rank + k], own))
                        if known[rank] < int64(0):
                            part = float32(0)
                        sums[k] = ptx.add_rn(sums[k], part)
        words = (
            ptx.bf16_pair(ptx.add_rn(x[0], sums[0]), ptx.add_rn(x[1], sums[1])),
            ptx.bf16_pair(ptx.add_rn(x[2], sums[2]), ptx.add_rn(x[3], sums[3])),
            ptx.bf16_pair(ptx.add_rn(x[4], sums[4]), ptx.add_rn(x[5], sums[5])),
            ptx.bf16_pair(ptx.add_rn(x[6], sums[6]), ptx.add_rn(x[7], sums[7])),
        )
        ptx.store_global_128(total + offset, words[0], words[1], words[2], words[3])
        return words

    return add_experts


def examples() -> list[Kernel]:
    """Specialisations that stand for all: gpt-oss, and eight ranks of wide rows."""
    return [
        _make_sum(2880, 4),
        _make_sum(64, 2),
        _make_sum_norm(2880, 4, 1e-5),
        _make_sum_norm(64, 3, 1e-5),
        _make_sum_norm(5120, 8, 1e-6),
    ]
