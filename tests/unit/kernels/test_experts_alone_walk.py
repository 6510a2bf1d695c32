"""Every operation of an MoE layer in launches of its own, walked thread by thread on a CPU: the bits of the one launch
for few rows, and of the chain for many."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_cases import ALPHA, LIMIT, choices, make_experts, shares_of, want_gate_up
from kernel_inventory import B200, GPUS
from kernel_walk import Walker, walkable
from moe_cases import Poisoned, make_logits, make_moe, want_routing
from moe_walk import ALONE, small_gpu, walk
from rowwise_cases import EPS, canonical_logits, canonical_norm, router_inputs
from stages import wide

from lowlat.errors import ShapeError
from lowlat.kernels.formats import BF16, MXFP4
from lowlat.kernels.moe.decode.experts import experts_down, experts_gate_up
from lowlat.kernels.moe.plan import DOWN, GATE_UP, ExpertShape, partials_workspace, plan_experts
from lowlat.kernels.moe.prefill.experts import list_workspaces, prefill_down, prefill_gate_up
from lowlat.kernels.moe.router import router_workspace
from lowlat.kernels.moe.topk_routing import TopKRouting
from lowlat.kernels.toolchain.kernel import Gpu, KernelCall

pytestmark = pytest.mark.second

ROUTER, PREFILL = "moe.router", "moe.prefill.experts"


@pytest.mark.parametrize(
    ("late", "kind", "rows", "top_k", "quantised", "hidden", "inner", "blocks", "cut"),
    [
        (True, "random", 1, 2, True, 288, 96, 3, None),
        wide(False, "random", 3, 2, True, 96, 160, 2, {"warps": 2, "stages": 1}),
        (True, "shared", 11, 1, True, 160, 32, 4, {"warps": 2, "part": 1}),
        wide(False, "ties", 4, 3, False, 72, 40, 1, {"warps": 3}),
        (True, "none", 2, 2, True, 64, 32, 2, {"warps": 2}),
    ],
)
@pytest.mark.wide
def test_gemms_alone_have_the_bits_of_the_one_launch(
    late: bool, kind: str, rows: int, top_k: int, quantised: bool, hidden: int, inner: int, blocks: int,
    cut: dict[str, int] | None,
) -> None:  # fmt: skip
    """Activations, weighed products, and the residual sum that another operation makes of theirs; dead rows, an expert
    of more pairs than a unit has. The plan follows from shapes where none is given."""
    moe, gpu = make_moe(5, hidden, inner, quantised=quantised), small_gpu(blocks)
    fused = moe.arguments(moe.rows(rows), top_k)
    logits = make_logits("random" if kind == "none" else kind, rows, 5)
    live = ((torch.arange(rows) % 3 != 1) & (kind != "none")).to(torch.uint8)
    plan = None if cut is None else moe.plan(rows, top_k, gpu, **cut)
    walk(Walker(late), fused, TopKRouting(logits, live), blocks, plan=plan)
    ids, shares = fused["expert_ids"], fused["expert_weights"]
    activated = torch.full_like(fused["activated"], torch.nan)
    out, workspace = torch.full((rows, hidden), torch.nan), Poisoned()
    plans: list[Any] = [None, None]
    if plan is not None:
        plans = [replace(plan.up_plan, num_blocks=blocks), replace(plan.down_plan, num_blocks=2 * blocks)]
    walker = Walker(late)
    with walkable(walker, ALONE) as modules:
        calls = modules[-1].experts_gate_up(
            fused["x"], ids, experts=fused["gate_up"], bias=fused["gate_up_bias"], out=activated, limit=LIMIT,
            alpha=ALPHA, gpu=gpu, plan=plans[0],
        )  # fmt: skip
        calls += modules[-1].experts_down(
            activated, ids, shares, experts=fused["down"], bias=fused["down_bias"], out=out, workspace=workspace,
            gpu=gpu, plan=plans[1],
        )  # fmt: skip
        walker.run(*calls)
    assert torch.equal(activated, fused["activated"])
    partials = workspace(*partials_workspace(rows, top_k, hidden))
    assert torch.equal(partials, fused["partials"])
    assert torch.equal((fused["residual"].float() + out).bfloat16(), fused["total"])
    assert bool(out[ids[:, 0] < 0].eq(0).all()) and bool(out[ids[:, 0] >= 0].ne(0).any(1).all())


def test_plans_of_one_gemm_cut_k_as_those_of_both() -> None:
    for gpu in (*GPUS.values(), B200):
        for rows in (1, 8, 64):
            for held in (MXFP4, BF16):
                moe_up = ExpertShape(GATE_UP, 5760, 2880, 4, held)
                for shape in (moe_up, ExpertShape(DOWN, 2880, 2880, 4, held)):
                    plan = plan_experts(rows, shape, gpu)
                    assert plan.warps == 15 and plan.shared_bytes(shape) <= gpu.shared_bytes


def test_more_rows_than_a_launch_takes_and_one_sum() -> None:
    moe, workspace = make_moe(3, 64, 32), Poisoned()
    given, ids = moe.arguments(moe.rows(67), 2), choices("random", 67, 2, 3)
    up = experts_gate_up(
        given["x"], ids, experts=given["gate_up"], bias=given["gate_up_bias"], out=given["activated"], limit=LIMIT,
        alpha=ALPHA,
    )  # fmt: skip
    down = experts_down(
        given["activated"], ids, shares_of(ids), experts=given["down"], bias=given["down_bias"],
        out=torch.empty(67, 64), workspace=workspace,
    )  # fmt: skip
    assert [call.arguments[-3] for call in up] == [128, 6] and len(down) == 3
    assert workspace.asked == [partials_workspace(67, 2, 64)]
    later = {each.data_ptr() for each in up[1].arguments if isinstance(each, torch.Tensor)}
    assert {given[name][64:].data_ptr() for name in ("x", "activated")} | {ids[64:].data_ptr()} <= later


def walked_router(rows: int, workspace: Poisoned, given: dict[str, Any], eps: float | None) -> dict[str, torch.Tensor]:
    """The whole router over rows that are normed already, or with the norm before it; walked."""
    x, live = given["x"], given["row_live"]
    found = {"ids": torch.full((rows, 3), 77, dtype=torch.int32), "shares": torch.full((rows, 3), torch.nan)}
    found["normed"] = torch.full_like(x, torch.nan)
    walker = Walker()
    with walkable(walker, ROUTER) as modules:
        made = modules[-1]
        norm = None if eps is None else made.RouterNorm(given["norm_weight"], eps, found["normed"], live)
        walker.run(
            *made.router(
                x, given["weight"], given["bias"], live, expert_ids=found["ids"], expert_weights=found["shares"],
                norm=norm, workspace=workspace, gpu=Gpu(2, 160 * 1024, (9, 0)),
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize(("rows", "width", "experts"), [(5, 72, 9), wide(1, 4096 + 72, 6)])
def test_a_router_of_normed_rows_has_the_bits_of_norm_and_router_together(rows: int, width: int, experts: int) -> None:
    """Logits, ids and shares; more rows than a block holds, more chunks of a row than a thread has, dead rows."""
    given, workspaces = router_inputs(rows, width, experts), (Poisoned(), Poisoned())
    together = walked_router(rows, workspaces[0], given, EPS)
    alive = torch.where(given["row_live"][:, None] != 0, canonical_norm(given["x"], given["norm_weight"], EPS), 0)
    assert torch.equal(together["normed"].view(torch.int16), alive.view(torch.int16))
    alone = walked_router(rows, workspaces[1], {**given, "x": together["normed"]}, None)
    logits = [each(*router_workspace(rows, experts)) for each in workspaces]
    assert torch.equal(logits[0], canonical_logits(alive, given["weight"], given["bias"]))
    assert torch.equal(logits[0], logits[1]) and torch.equal(together["ids"], alone["ids"])
    assert torch.equal(together["shares"], alone["shares"]) and bool(alone["shares"].isfinite().all())
    wanted, about = want_routing(TopKRouting(logits[1], given["row_live"]), 3)
    assert torch.equal(alone["ids"], wanted)
    torch.testing.assert_close(alone["shares"], about, rtol=1e-5, atol=1e-7)
    assert all(each.asked[0] == router_workspace(rows, experts) for each in workspaces)


@pytest.mark.parametrize(("kind", "rows", "quantised"), [("dead", 10, True)])
def test_prefill_s_gemms_stand_alone_or_behind_each_other(kind: str, rows: int, quantised: bool) -> None:
    """A down GEMM that groups pairs for itself has the bits of one that takes the gate_up GEMM's lists."""
    up = make_experts(3, 64, 64, quantised=quantised, gated=True)
    down = make_experts(3, 40, 32, quantised=quantised, gated=False)
    assert up.order is not None
    x, ids, gpu = torch.randn(rows, 64).bfloat16(), choices(kind, rows, 2, 3), Gpu(2, 160 * 1024, (9, 0))
    shares, activated = shares_of(ids), torch.full((rows, 2, 32), torch.nan).bfloat16()
    outs, chain, own, walker = torch.full((2, rows, 40), torch.nan), Poisoned(), Poisoned(), Walker()
    with walkable(walker, PREFILL) as modules:
        made = modules[-1]
        calls: list[KernelCall] = made.prefill_gate_up(
            x, ids, experts=up.packed, bias=up.packed_bias, out=activated, limit=LIMIT, alpha=ALPHA,
            workspace=chain, gpu=gpu,
        )  # fmt: skip
        rest: dict[str, Any] = {"experts": down.packed, "bias": down.bias, "gpu": gpu}
        calls += made.prefill_down(activated, ids, shares, **rest, out=outs[0], workspace=chain, grouped=True)
        assert len(calls) == 4
        walker.run(*calls)
        alone = made.prefill_down(activated, ids, shares, **rest, out=outs[1], workspace=own)
        assert [call.kernel.name.split("_")[1] for call in alone] == ["grouping", "grouped", "topk"]
        walker.run(*alone)
    live = ids >= 0
    torch.testing.assert_close(activated[live], want_gate_up(up, x, ids)[live], rtol=2**-7, atol=1e-6)
    assert torch.equal(outs[0], outs[1]) and bool(outs[0][live.any(1)].ne(0).all()) and not outs[0][~live.any(1)].any()
    assert set(chain.asked) == set(own.asked) == {*list_workspaces(rows, 2, 3), partials_workspace(rows, 2, 40)}


def test_lists_and_partials_are_sized_by_shapes_alone() -> None:
    assert list_workspaces(512, 4, 128) == (
        ("experts.order", (2048,), torch.int32),
        ("experts.tiles", (2048 // 16 + 128, 4), torch.int32),
    )
    assert router_workspace(7, 128) == ("router.logits", (7, 128), torch.float32)
    experts, ids, asked = make_experts(4, 32, 64, quantised=True, gated=True), choices("random", 5, 2, 4), Poisoned()
    gpu = Gpu(132, 227 * 1024, (9, 0))
    prefill_gate_up(
        torch.zeros(5, 64).bfloat16(), ids, experts=experts.packed, bias=experts.bias, limit=LIMIT, alpha=ALPHA,
        out=torch.zeros(5, 2, 16).bfloat16(), workspace=asked, gpu=gpu,
    )  # fmt: skip
    assert set(asked.asked) == set(list_workspaces(5, 2, 4))
    with pytest.raises(ShapeError, match="must have shape"):
        prefill_down(
            torch.zeros(5, 2, 64).bfloat16(), ids, torch.zeros(5, 2), experts=experts.packed, bias=experts.bias,
            out=torch.zeros(5, 31), workspace=asked, gpu=gpu,
        )  # fmt: skip
