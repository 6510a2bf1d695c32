"""This module launches the router of an MoE layer: the norm, the logits of each row's experts, and top-k routing.

For few rows, the launch of the experts' GEMMs does the top-k routing itself (`mlp`), and `router_logits` the rest;
`router` is the whole operation in two launches. A prompt's many rows are already normed, and tensor cores multiply them
(`prefill_router`); their sums have other bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.elementwise.norm import are_wide, check_dtype, check_row_live
from lowlat.kernels.gemm.prefill.narrow_gemm import narrow_gemm
from lowlat.kernels.moe.limits import MAX_ROUTED_WIDTH, ROUTED_WIDTH
from lowlat.kernels.moe.router_kernel import EXPERTS, MOST_AWAITED, make_router, min_blocks_of, rows_at_once
from lowlat.kernels.moe.topk_routing import TopKRouting, route_top_k
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain.kernel import H200, Argument, Gpu, Kernel, KernelCall, Workspace, WorkspaceShape

__all__ = ["RouterNorm", "examples", "prefill_router", "router", "router_logits", "router_workspace"]


@dataclass(frozen=True)
class RouterNorm:
    """The norm of a router's rows, which its launch makes as well; bit for bit what `rms_norm` gives.

    weight    [N]     bf16
    out       [M, N]  bf16  out: the normed rows; zeros in dead rows
    row_live  [M] or [B, T]  uint8; None: all rows are live
    """

    weight: torch.Tensor
    eps: float
    out: torch.Tensor
    row_live: torch.Tensor | None = None


def router_workspace(rows: int, num_experts: int) -> WorkspaceShape:
    """The workspace of `router` and `prefill_router` for M rows and E experts: logits [M, E] float32."""
    return "router.logits", (rows, num_experts), torch.float32


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    row_live: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    over_all: bool = False,
    shared: bool = False,
    norm: RouterNorm | None = None,
    workspace: Workspace,
    gpu: Gpu = H200,
) -> list[KernelCall]:
    """Choose each row's experts, and their shares by softmax over the chosen or over all, in two launches.

    x               [M, N]  bf16; the rows before the norm where there is one
    weight, bias    [E, N], [E]  bf16; the weight row-major; without a bias None
    row_live        [M] or [B, T]  uint8; None: all rows are live
    scale           [E]     float32  by which an expert's shares are multiplied last; None: they are not
    expert_ids      [M, k]  int32    out: largest logit first, the lowest id among equals; -1 in dead rows
    expert_weights  [M, k]  float32  out: shares; 0 in dead rows
    over_all        shares are those of the softmax over all logits; else they sum to 1
    shared          the last of the E experts is every row's last one, as `TopKRouting` has it
    norm            rows are normed first; None: they are normed already
    workspace       is asked for `router_workspace`
    Bits: those of `router_logits` and of the routing of `experts_mlp`, with a norm and without.
    Captured: yes. Raises ShapeError as `router_logits` and `route_top_k` do.
    """
    logits = workspace(*router_workspace(x.shape[0], weight.shape[0]))
    calls = router_logits(x, weight, bias, norm=norm, logits=logits, gpu=gpu)
    routing = TopKRouting(logits, row_live, over_all, shared)
    outs = {"expert_ids": expert_ids, "expert_weights": expert_weights}
    return calls + route_top_k(routing=routing, **outs, scale=scale)


def prefill_router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    row_live: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    over_all: bool = False,
    shared: bool = False,
    workspace: Workspace,
    gpu: Gpu = H200,
) -> list[KernelCall]:
    """`router` of a prompt's rows, which are normed already, in three launches.

    workspace  is asked for `router_workspace` and `narrow_workspace`
    Arguments: as `router` takes them. Bits of logits: those of `narrow_gemm`. Captured: yes. Raises ShapeError as
    `narrow_gemm` and `route_top_k` do.
    """
    logits = workspace(*router_workspace(x.shape[0], weight.shape[0]))
    calls = narrow_gemm(x, weight, bias, out=logits, workspace=workspace, gpu=gpu)
    routing = TopKRouting(logits, row_live, over_all, shared)
    return calls + route_top_k(routing=routing, expert_ids=expert_ids, expert_weights=expert_weights, scale=scale)


def router_logits(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: RouterNorm | None = None,
    logits: torch.Tensor,
    awaited: Sequence[torch.Tensor] = (),
    gpu: Gpu = H200,
) -> list[KernelCall]:
    """Norm each row where a norm is given, and multiply it with the router's weight, in one launch.

    x               [M, N]  bf16
    weight, bias    [E, N], [E]  bf16; the weight row-major; without a bias None
    norm            None: rows are normed already
    logits          [M, E]  float32  out: weight @ normed + bias, products and sums by columns in a fixed order
    awaited         at most three of any shape, of whole 16 bytes  out: `sentinels.MISSING` throughout
    Time: a few trips to memory. Raises ShapeError for shapes that do not fit, and N outside of ROUTED_WIDTH.
    """
    rows, width = x.shape
    experts = weight.shape[0]
    ROUTED_WIDTH.check("router: the width of rows", width)
    check_shape("weight", weight, experts, width)
    if bias is not None:
        check_shape("bias", bias, experts)
    check_shape("logits", logits, rows, experts)
    check_dtype(torch.bfloat16, x=x, weight=weight, bias=bias)
    check_dtype(torch.float32, logits=logits)
    norm_weight, live, normed = (0, 0, 0) if norm is None else _norm_arguments(norm, rows, width)
    wide = norm is not None and are_wide(norm.weight)
    blocks = -(-experts // EXPERTS)
    held = rows_at_once(rows, width, blocks, gpu, wide)
    turns = -(-rows // held)
    grid = (blocks, min(turns, max(1, 2 * gpu.num_multiprocessors // blocks)), 1)
    none = MOST_AWAITED - len(awaited)
    filled: tuple[Argument, ...] = (*awaited, *(0,) * none, *map(_chunks, awaited), *(0,) * none)
    eps, biased = None if norm is None else norm.eps, bias is not None
    kernel = make_router(width, experts, held, min_blocks_of(width, held, gpu), eps, biased, wide)
    given: tuple[Argument, ...] = (x, norm_weight, live, weight, 0 if bias is None else bias, normed, logits, rows)
    return [KernelCall(kernel, grid, (*given, *filled))]


def _norm_arguments(norm: RouterNorm, rows: int, width: int) -> tuple[Argument, Argument, Argument]:
    check_row_live(norm.row_live, rows)
    check_shape("norm.weight", norm.weight, width)
    check_shape("norm.out", norm.out, rows, width)
    check_dtype(torch.bfloat16, norm_out=norm.out)
    return norm.weight, 0 if norm.row_live is None else norm.row_live, norm.out


def _chunks(awaited: torch.Tensor) -> int:
    """The 16 bytes that a tensor has. Raises ShapeError where they are not whole."""
    num_bytes = awaited.numel() * awaited.element_size()
    if num_bytes % 16:
        raise ShapeError(f"router: what is awaited must be of a multiple of 16 bytes, got {num_bytes}")
    return num_bytes // 16


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Specialisations, as a GPU has them: gpt-oss-120b with 1, 2 and 4 rows at once, the widest, a small, two of rows
    that are normed already, and the most experts."""
    shapes: tuple[tuple[int, int, int, float | None], ...] = (
        (2880, 128, 1, 1e-5),
        (2880, 128, 2, 1e-5),
        (2880, 128, 4, 1e-5),
        (MAX_ROUTED_WIDTH, 256, 1, 1e-5),
        (64, 5, 4, 1e-5),
        (2880, 128, 4, None),
        (MAX_ROUTED_WIDTH, 256, 1, None),
        (2048, 513, 1, 1e-6),
    )
    return [
        make_router(width, experts, held, min_blocks_of(width, held, gpu), eps) for width, experts, held, eps in shapes
    ]
