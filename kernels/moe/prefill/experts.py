"""This module runs the GEMMs of an MoE layer for many rows: it groups (row, expert) pairs by expert, then multiplies.

Each operation groups its pairs by itself, so that it can run alone. A down GEMM right after the gate_up GEMM of the
same pairs uses the lists that it left in the workspace. The sizes of workspaces follow from shapes alone.
"""

import itertools
import math
from dataclasses import replace
from typing import Any

import torch

from lowlat.kernels.common.activation import SILU
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.prefill.activation_layout import arranged_shape
from lowlat.kernels.gemm.prefill.parts_sum import add_parts
from lowlat.kernels.moe.packing import PackedExperts
from lowlat.kernels.moe.plan import DOWN, GATE_UP, ExpertShape, partials_workspace
from lowlat.kernels.moe.prefill.grouped_gemm import grouped_down, grouped_gate_up
from lowlat.kernels.moe.prefill.grouping import group_pairs
from lowlat.kernels.moe.prefill.pair_arrangement import arrange_pairs
from lowlat.kernels.moe.prefill.pair_tiles import TILE_PAIRS, TILE_WORDS, most_tiles
from lowlat.kernels.moe.prefill.plan import MoePlan, choose_moe_plan
from lowlat.kernels.moe.prefill.warpgroup_gemm import warpgroup_down, warpgroup_gate_up
from lowlat.kernels.moe.prefill.warpgroup_plan import MOST_PAIRS, takes_warpgroups, warpgroup_workspaces
from lowlat.kernels.moe.topk_sum import add_placed_topk, add_topk
from lowlat.kernels.toolchain.kernel import Gpu, KernelCall, Workspace, WorkspaceShape
from lowlat.kernels.tuning.table import Planned

__all__ = ["PARTS_ROWS", "list_workspaces", "parts_workspace", "prefill_down", "prefill_experts", "prefill_gate_up"]

PARTS_ROWS = 1024  # whose sums of parts of K take memory at a time


def list_workspaces(rows: int, top_k: int, num_experts: int) -> tuple[WorkspaceShape, WorkspaceShape]:
    """The workspaces of both GEMMs for M rows with k of E experts each: the lists of pairs and of tiles of pairs."""
    pairs = rows * top_k
    tiles = most_tiles(pairs, num_experts, TILE_PAIRS[0])  # the smallest ones that a plan may have are the most
    return ("experts.order", (pairs,), torch.int32), ("experts.tiles", (tiles, TILE_WORDS), torch.int32)


def prefill_gate_up(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    *,
    experts: PackedExperts,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    limit: float | None = None,
    alpha: float | None = None,
    activation: str = SILU,
    workspace: Workspace,
    gpu: Gpu,
) -> list[KernelCall]:
    """Group pairs by expert, multiply them by the gate and up matrices, and apply SwiGLU: two launches.

    x           [M, K]      bf16
    expert_ids  [M, k]      int32: no expert twice in a row; -1 dead
    experts     [E, 2I, K]  packed in the order of `gate_up_permutation`
    bias        [E, 2I]     bf16, in the weight's order; None: none
    out         [M, k, I]   bf16, out: as `grouped_gate_up` has it; dead pairs' are not written
    workspace   is asked for `list_workspaces`
    Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    shape, plan, planned = _plan(GATE_UP, expert_ids, experts, gpu)
    lists = _lists(expert_ids, experts, workspace, plan)
    product = grouped_gate_up(
        x=x, **lists, weight=experts, bias=bias, out=out, limit=limit, alpha=alpha, activation=activation,
        plan=plan.of(shape, gpu),
    )  # fmt: skip
    return _group(expert_ids, experts, plan, lists) + _marked(product, planned)


def prefill_down(
    activated: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    *,
    experts: PackedExperts,
    bias: torch.Tensor | None = None,
    out: torch.Tensor,
    workspace: Workspace,
    gpu: Gpu,
    grouped: bool = False,
    parts: KParts | None = None,
) -> list[KernelCall]:
    """Group pairs by expert, multiply them by the down matrices, weigh the outputs and add up each row's.

    activated       [M, k, I]  bf16; dead pairs' are not read
    expert_ids      [M, k]     int32: no expert twice in a row; -1 dead
    expert_weights  [M, k]     float32: shares
    experts         [E, N, I]  packed
    bias            [E, N]     bf16; None: none
    out             [M, N]     float32, out: share * (down @ activated + bias), added from a row's first expert to its
                               last, every product and sum rounded by itself; zero for a dead row
    workspace       is asked for `list_workspaces` and `partials_workspace`
    grouped         the workspace has the lists of these very ids: `prefill_gate_up` of them, with as many experts,
                    comes right before. Two launches then, else three
    parts           of I: each gives such a sum, the first with the bias, and they are added as `cuts.tree_sum` does,
                    1024 rows at a time, in two launches a part; the workspace is asked for `parts_workspace`, too
    Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    if parts is not None:
        calls = []
        for some in (slice(first, first + PARTS_ROWS) for first in range(0, len(out), PARTS_ROWS)):
            given = (activated[some], expert_ids[some], expert_weights[some])
            calls += _down_in_parts(*given, experts, bias, out[some], parts, workspace, gpu)
        return calls
    shape, plan, planned = _plan(DOWN, expert_ids, experts, gpu)
    lists = _lists(expert_ids, experts, workspace, plan)
    calls = [] if grouped else _group(expert_ids, experts, plan, lists)
    partials = workspace(*partials_workspace(expert_ids.shape[0], expert_ids.shape[1], experts.rows))
    product = grouped_down(
        activated=activated, **lists, expert_weights=expert_weights, weight=experts, bias=bias, out=partials,
        plan=plan.of(shape, gpu),
    )  # fmt: skip
    return calls + _marked(product, planned) + add_topk(partials=partials, expert_ids=expert_ids, out=out)


def _down_in_parts(
    activated: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    experts: PackedExperts,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    parts: KParts,
    workspace: Workspace,
    gpu: Gpu,
) -> list[KernelCall]:
    """`prefill_down` of few enough rows, a part of K after the other."""
    (rows, top_k), (shape, plan, planned) = ids.shape, _plan(DOWN, ids, experts, gpu)
    lists = _lists(ids, experts, workspace, plan)
    calls = _group(ids, experts, plan, lists)
    partials = workspace(*partials_workspace(rows, top_k, experts.rows))
    sums = workspace(*parts_workspace(rows, experts.rows, parts))
    for number, (first, end) in enumerate(itertools.pairwise(parts.ends(shape.steps))):
        if first == end:
            continue
        product = grouped_down(
            activated=activated, **lists, expert_weights=shares, weight=experts, bias=None if number else bias,
            out=partials, steps=(first, end), plan=plan.of(shape, gpu),
        )  # fmt: skip
        calls += _marked(product, planned) + add_topk(partials=partials, expert_ids=ids, out=sums[number])
    return calls + add_parts(partials=sums, parts=parts, steps=shape.steps, out=out)


def parts_workspace(rows: int, width: int, parts: KParts) -> WorkspaceShape:
    """The workspace of sums [P, M, N] of parts of K, of as many rows as are summed at a time."""
    return "experts.parts", (parts.count, min(rows, PARTS_ROWS), width), torch.float32


def prefill_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    *,
    gate_up: PackedExperts,
    gate_up_bias: torch.Tensor | None = None,
    down: PackedExperts,
    down_bias: torch.Tensor | None = None,
    activated: torch.Tensor,
    out: torch.Tensor,
    limit: float | None = None,
    alpha: float | None = None,
    activation: str = SILU,
    workspace: Workspace,
    gpu: Gpu,
) -> list[KernelCall]:
    """Both GEMMs of an MoE layer, and the sum over each row's experts, in four or five launches.

    x               [M, K]     bf16
    expert_ids      [M, k]     int32: no expert twice in a row; -1 dead
    expert_weights  [M, k]     float32: shares
    gate_up, down              and their biases, limit and alpha: as `prefill_gate_up` and `prefill_down` take them
    activated       [M, k, I]  bf16: may be written
    out             [M, N]     float32, out: the bits of `prefill_gate_up` and `prefill_down` one after the other
    workspace       is asked for `list_workspaces`, and for `partials_workspace` or, where the GPU multiplies so many
                    pairs by warpgroups, for `warpgroup_workspaces`
    Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    (rows, top_k), (hidden, inner) = expert_ids.shape, (gate_up.columns, down.columns)
    if not takes_warpgroups(hidden, inner, rows * top_k, down.num_experts, gpu) or hidden != down.rows:
        rest: dict[str, Any] = {"workspace": workspace, "gpu": gpu}
        return [
            *prefill_gate_up(
                x,
                expert_ids,
                experts=gate_up,
                bias=gate_up_bias,
                out=activated,
                limit=limit,
                alpha=alpha,
                activation=activation,
                **rest,
            ),
            *prefill_down(
                activated, expert_ids, expert_weights, experts=down, bias=down_bias, out=out, grouped=True, **rest
            ),
        ]
    order, tiles = (workspace(*each) for each in list_workspaces(rows, top_k, down.num_experts))
    lists = {"order": order, "tiles": tiles[: most_tiles(rows * top_k, down.num_experts, MOST_PAIRS)]}
    asked = warpgroup_workspaces(rows, top_k, down.num_experts, hidden, inner)
    places, arranged, outputs = (workspace(*each) for each in asked)
    inputs_shape = arranged_shape(outputs.shape[0], hidden)
    inputs = outputs.view(-1).view(torch.bfloat16)[: math.prod(inputs_shape)].view(inputs_shape)
    return [
        *group_pairs(expert_ids=expert_ids, num_experts=down.num_experts, tile_pairs=MOST_PAIRS, **lists),
        *arrange_pairs(x=x, top_k=top_k, **lists, places=places, out=inputs),
        *warpgroup_gate_up(
            arranged=inputs, tiles=lists["tiles"], weight=gate_up, bias=gate_up_bias, out=arranged, limit=limit,
            alpha=alpha, activation=activation, top_k=top_k, gpu=gpu,
        ),
        *warpgroup_down(
            arranged=arranged, tiles=lists["tiles"], weight=down, bias=down_bias, out=outputs, top_k=top_k, gpu=gpu
        ),
        *add_placed_topk(
            outputs=outputs, places=places, expert_ids=expert_ids, expert_weights=expert_weights, out=out
        ),
    ]  # fmt: skip


def _group(
    ids: torch.Tensor, experts: PackedExperts, plan: MoePlan, lists: dict[str, torch.Tensor]
) -> list[KernelCall]:
    return group_pairs(expert_ids=ids, num_experts=experts.num_experts, tile_pairs=plan.pairs, **lists)


def _lists(ids: torch.Tensor, experts: PackedExperts, workspace: Workspace, plan: MoePlan) -> dict[str, Any]:
    order, tiles = list_workspaces(ids.shape[0], ids.shape[1], experts.num_experts)
    count = most_tiles(ids.numel(), experts.num_experts, plan.pairs)
    return {"order": workspace(*order), "tiles": workspace(*tiles)[:count]}


def _plan(kind: str, ids: torch.Tensor, experts: PackedExperts, gpu: Gpu) -> tuple[ExpertShape, MoePlan, Planned]:
    shape = ExpertShape(kind, experts.rows, experts.columns, ids.shape[1], experts.format)
    return shape, *choose_moe_plan(ids.numel(), experts.num_experts, shape, gpu)


def _marked(calls: list[KernelCall], planned: Planned) -> list[KernelCall]:
    """Calls with their place in tables."""
    return [replace(call, planned=planned) for call in calls]
