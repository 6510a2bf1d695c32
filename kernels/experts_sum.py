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
    early: bool = False,
) -> list[KernelCall]:
    """total = residual + the sum over ranks of share * (partial + the expert's bias), and the norm of what was rounded.

    residual        [M, N]     bf16
    partials        [M, k, N]  float32  the experts' products, without bias or share; of a dead rank: never looked at
    expert_ids      [M, k]     int32; -1 dead
    expert_weights  [M, k]     float32
    bias            [E, N]     bf16
    total           [M, N]     bf16  out
    norm_weight     [N]        bf16; None: no norm
    row_live        [M]        uint8, of the norm; None: all rows are live; dead ones have a sum but norm zero
    out             [M, N]     bf16  out: the norm, with norm_weight alone
    early           residual, ids and shares are older than any kernel that may still run when this one starts: all but
                    the products is read before it waits
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
    arguments = (residual, partials, expert_ids, expert_weights, bias, total)
    if norm_weight is None or out is None:
        return [KernelCall(_make(width, chosen, early, None), (rows, 1, 1), (*arguments, 0, 0, 0))]
    check_shape("norm_weight", norm_weight, width)
    check_shape("out", out, rows, width)
    live = 0 if row_live is None else row_live
    return [KernelCall(_make(width, chosen, early, eps), (rows, 1, 1), (*arguments, norm_weight, live, out))]


@cache
def _make(width: int, chosen: int, early: bool, eps: float | None) -> Kernel:
    """Grid (M,); eps None: no norm."""
    load_old, add_new = _make_load_old(width, chosen), _make_add_new(width, chosen)
    num_biases, norms = 4 * chosen, eps is not None
    used_eps = eps or 0.0

    def experts_sum(
        residual: Any, partials: Any, ids: Any, shares: Any, bias: Any, total: Any, weight: Any, row_live: Any, out: Any
    ) -> None:
        ptx.let_next_kernel_start()
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        old, biases = cuda.local.array(4, uint32), cuda.local.array(num_biases, uint32)
        known, parts = cuda.local.array(chosen, int64), cuda.local.array(chosen, float32)
        thread, row = uint32(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        weights = (uint32(0), uint32(0), uint32(0), uint32(0))
        if norms:
            weights = load_first_weights(weight, width)
        if not early:
            ptx.wait_for_previous_kernel()
        if thread < uint32(width // 8):
            load_old(old, known, parts, biases, residual, ids, shares, bias, row, thread)
        if early:
            ptx.wait_for_previous_kernel()
        offset = row * int64(width * 2)
        live = norms and is_live(row_live, row)
        first = (uint32(0), uint32(0), uint32(0), uint32(0))
        chunk = thread
        while chunk < uint32(width // 8):
            words = add_new(old, known, parts, biases, partials, row, chunk)
            place = total + offset + int64(chunk) * int64(16)
            ptx.store_global_128(place, words[0], words[1], words[2], words[3])
            if chunk == thread:
                first = words
            chunk = uint32(chunk + uint32(THREADS))
            if chunk < uint32(width // 8):
                load_old(old, known, parts, biases, residual, ids, shares, bias, row, chunk)
        if norms:
            source, target = total + offset, out + offset
            finish_norm(first, weights, source, False, weight, target, int64(0), live, sums, width, used_eps)

    name = f"experts_sum_n{width}_k{chosen}{'_early' if early else ''}{'' if eps is None else f'_eps{eps!r}'}"
    return Kernel(name, experts_sum, (types.int64,) * 9, THREADS)


def _make_load_old(width: int, chosen: int) -> Any:
    @device_function
    def load_old(
        old: Any, known: Any, parts: Any, biases: Any, residual: Any, ids: Any, shares: Any, bias: Any, row: Any,
        chunk: Any,
    ) -> None:  # fmt: skip
        """Everything of 8 columns but the products: the residual, each rank's expert, share and bias."""
        for rank in range(chosen):
            at = (row * int64(chosen) + int64(rank)) * int64(4)
            known[rank], parts[rank] = int64(ptx.load_global_i32(ids + at)), ptx.load_global_f32(shares + at)
        offset = int64(chunk) * int64(16)
        old[0], old[1], old[2], old[3] = ptx.load_global_128(residual + row * int64(2 * width) + offset)
        for rank in range(chosen):
            place = bias + max(known[rank], int64(0)) * int64(2 * width) + offset
            at = 4 * rank
            biases[at], biases[at + 1], biases[at + 2], biases[at + 3] = ptx.load_global_nc_128(place)

    return load_old


def _make_add_new(width: int, chosen: int) -> Any:
    num_values = 8 * TOGETHER

    @device_function
    def add_new(old: Any, known: Any, parts: Any, biases: Any, partials: Any, row: Any, chunk: Any) -> Any:
        """8 columns of the residual sum, as four words; the products of TOGETHER ranks are loaded side by side."""
        sums, values = cuda.local.array(8, float32), cuda.local.array(num_values, float32)
        for k in range(8):
            sums[k] = float32(0)
        for start in range(0, chosen, TOGETHER):
            for rank in range(TOGETHER):
                if start + rank < chosen:
                    source = partials + (row * int64(chosen) + int64(start + rank)) * int64(4 * width)
                    loaded = chunk_values(source, chunk, True)
                    for k in range(8):
                        values[8 * rank + k] = loaded[k]
            for rank in range(TOGETHER):
                if start + rank < chosen:
                    for k in range(8):
                        word = biases[4 * (start + rank) + (k >> 1)]
                        own = high_value(word) if k & 1 else low_value(word)
                        part = ptx.mul_rn(parts[start + rank], ptx.add_rn(values[8 * rank + k], own))
                        if known[start + rank] < int64(0):
                            part = float32(0)
                        sums[k] = ptx.add_rn(sums[k], part)
        return (
            ptx.bf16_pair(ptx.add_rn(low_value(old[0]), sums[0]), ptx.add_rn(high_value(old[0]), sums[1])),
            ptx.bf16_pair(ptx.add_rn(low_value(old[1]), sums[2]), ptx.add_rn(high_value(old[1]), sums[3])),
            ptx.bf16_pair(ptx.add_rn(low_value(old[2]), sums[4]), ptx.add_rn(high_value(old[2]), sums[5])),
            ptx.bf16_pair(ptx.add_rn(low_value(old[3]), sums[6]), ptx.add_rn(high_value(old[3]), sums[7])),
        )

    return add_new


def examples() -> list[Kernel]:
    """Specialisations that stand for all: gpt-oss, alone and with its norm, and eight ranks of wide rows."""
    return [
        _make(2880, 4, False, None),
        _make(2880, 4, True, 1e-5),
        _make(64, 3, False, 1e-5),
        _make(5120, 8, True, 1e-6),
    ]
