"""The choice of rows' experts by their logits in a launch of its own, for many rows: each is made once.

A warp has a row. Where rows are few, every block of a product chooses for itself (`experts_mlp`).
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowlat.kernels.moe.decode.topk_routing import Choice, make_choose
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.rows.norm import check_dtype
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, float32, int64, types, uint32

__all__ = ["examples", "route_top_k"]

ROWS = 4  # of a block


def route_top_k(*, choice: Choice, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> list[KernelCall]:
    """The experts of M rows, R each, and their shares, as `Choice` says.

    expert_ids      [M, R]  int32    out: -1 in dead rows
    expert_weights  [M, R]  float32  out: 0 in dead rows
    One launch, some microseconds. Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    rows, ranks = expert_ids.shape
    choice.check(rows, ranks, choice.num_experts)
    check_shape("expert_weights", expert_weights, rows, ranks)
    check_dtype(torch.int32, expert_ids=expert_ids)
    check_dtype(torch.float32, expert_weights=expert_weights)
    grid = (-(-rows // ROWS), 1, 1)
    arguments = (*choice.of(slice(None)), expert_ids, expert_weights, rows)
    return [KernelCall(_make(choice.num_experts, ranks), grid, arguments)]


@dataclass(frozen=True)
class _Block:
    """Ids and then shares of a block's pairs, in its shared memory."""

    threads: int
    shares_at: int


@cache
def _make(num_experts: int, ranks: int) -> Kernel:
    pairs, threads = ROWS * ranks, 32 * ROWS
    shares_at = 4 * pairs
    choose = make_choose(_Block(threads, shares_at), ranks, num_experts)

    def route_top_k(logits: Any, row_live: Any, ids: Any, shares: Any, rows: Any) -> None:
        area = ptx.shared_address(cuda.shared.array(shape=0, dtype=float32))
        thread, first = uint32(cuda.threadIdx.x), uint32(uint32(cuda.blockIdx.x) * uint32(ROWS))
        live = row_live
        if live != int64(0):
            live = row_live + int64(first)
        count = uint32(min(uint32(uint32(rows) - first), uint32(ROWS)) * uint32(ranks))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        choose(area, logits + int64(first) * int64(4 * num_experts), live, int64(count), thread)
        if thread < count:
            at, own = int64(first * uint32(ranks) + thread) * int64(4), uint32(area + thread * uint32(4))
            ptx.store_global_u32(ids + at, ptx.load_shared_u32(own))
            ptx.store_global_f32(shares + at, ptx.load_shared_f32(uint32(own + uint32(shares_at))))

    signature = (*(types.int64,) * 5,)
    return Kernel(f"route_top_k_{num_experts}x{ranks}", route_top_k, signature, threads, 1, 2 * shares_at)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [_make(128, 4)]
