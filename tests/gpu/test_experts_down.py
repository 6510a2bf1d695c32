"""Down products of experts against the reference, the extremes of scales, and a pair's bits in any company."""

import dataclasses

import pytest
import torch
from expert_cases import ALPHA, LIMIT, Experts, choices, make_experts, shares_of, want_down

from lowlat.executors.launcher import Launcher
from lowlat.kernels.expert_packing import pack_experts, unpack_expert
from lowlat.kernels.experts_down import experts_down
from lowlat.kernels.experts_gate_up import experts_gate_up
from lowlat.kernels.experts_plan import DOWN, ExpertPlan, ExpertShape, plan_experts

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-5
ROWS = (1, 2, 3, 5, 8, 9, 17, 64)


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    """One launcher for all tests."""
    return Launcher(torch.device("cuda", 0))


def _run(
    launcher: Launcher, experts: Experts, activated: torch.Tensor, ids: torch.Tensor, plan: ExpertPlan | None = None
) -> torch.Tensor:
    out = torch.full((*ids.shape, experts.packed.rows), torch.nan, device="cuda")
    calls = experts_down(
        activated=activated, expert_ids=ids, expert_weights=shares_of(ids), weight=experts.packed, bias=experts.bias,
        out=out, card=launcher.card, plan=plan,
    )  # fmt: skip
    launcher.run(*calls)
    return out


def _exact(experts: Experts, activated: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """In float64, of live pairs [n, N]."""
    matrices = {int(each): unpack_expert(experts.packed, int(each)).double() for each in ids[ids >= 0].unique()}
    shares, bias, found = shares_of(ids).double(), experts.bias.double(), []
    for row, rank in (ids >= 0).nonzero().tolist():
        expert = int(ids[row, rank])
        found.append(shares[row, rank] * (matrices[expert] @ activated[row, rank].double() + bias[expert]))
    return torch.stack(found)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    ("count", "ranks", "width", "depth"), [(4, 4, 100, 96), (128, 4, 48, 160), (32, 4, 2880, 2880), (8, 2, 40, 2080)]
)
def test_products_match_float64(
    launcher: Launcher, quantised: bool, count: int, ranks: int, width: int, depth: int
) -> None:
    """All ways to choose, at every number of rows; dead pairs are not read, and give zeros."""
    experts = make_experts(count, width, depth, quantised=quantised, gated=False, device="cuda")
    for rows in ROWS:
        for kind in ("random", "shared", "apart", "dead", "none"):
            ids = choices(kind, rows, ranks, count, "cuda")
            activated = torch.randn(rows, ranks, depth, device="cuda").bfloat16()
            activated[ids < 0] = torch.nan
            got, live = _run(launcher, experts, activated, ids), ids >= 0
            assert not got[~live].any()
            if bool(live.any()):
                want = _exact(experts, activated, ids)
                assert float((got[live].double() - want).norm() / want.norm()) < TOLERANCE


def test_products_match_the_reference(launcher: Launcher) -> None:
    experts = make_experts(8, 96, 160, quantised=True, gated=False, device="cuda")
    ids = choices("random", 5, 4, 8, "cuda")
    activated = torch.randn(5, 4, 160, device="cuda").bfloat16()
    torch.testing.assert_close(
        _run(launcher, experts, activated, ids), want_down(experts, activated, ids), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("scale", "size"), [(1, 1.0), (2, 1.0), (2, 2.0**60), (191, 2.0**50), (191, 2.0**-61), (127, 2.0**60)]
)
def test_every_code_at_the_extremes_of_scales(launcher: Launcher, scale: int, size: float) -> None:
    """One code a row of the matrix, all 16, in every column: one-hot inputs give them back exactly."""
    codes = torch.arange(16, dtype=torch.uint8, device="cuda").view(1, 16, 1, 1)
    blocks = (codes | codes << 4).expand(1, 16, 2, 16).contiguous()
    scales = torch.full((1, 16, 2), scale, dtype=torch.uint8, device="cuda")
    packed = pack_experts(blocks=blocks, scales=scales)
    matrix = unpack_expert(packed, 0).double()
    ids = torch.zeros(64, 1, dtype=torch.int32, device="cuda")
    hot = (torch.eye(64, device="cuda") * size).bfloat16().view(64, 1, 64)
    bias = torch.zeros(1, 16, device="cuda").bfloat16()
    got = _run(launcher, Experts({}, packed, bias, None), hot, ids)
    assert torch.equal(got[:, 0].double(), (matrix.t() * size))


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(("width", "depth"), [(100, 160), (2880, 2880)])
def test_a_pair_has_the_same_bits_in_any_company(launcher: Launcher, quantised: bool, width: int, depth: int) -> None:
    experts = make_experts(16, width, depth, quantised=quantised, gated=False, device="cuda")
    row, ids = torch.randn(1, 4, depth, device="cuda").bfloat16(), choices("random", 1, 4, 16, "cuda")
    alone = _run(launcher, experts, row, ids)
    for rows in ROWS[1:]:
        for kind in ("random", "shared", "dead"):
            activated = torch.full((rows, 4, depth), torch.nan, device="cuda", dtype=torch.bfloat16)
            others = choices(kind, rows, 4, 16, "cuda")
            place = int(torch.randint(rows, (1,)))
            activated[place], others[place] = row[0], ids[0]
            default = plan_experts(rows, ExpertShape(DOWN, width, depth, 4, quantised), launcher.card)
            plans: list[ExpertPlan | None] = [None, dataclasses.replace(default, stages=1)]
            plans += [dataclasses.replace(default, num_blocks=7), dataclasses.replace(default, part=1, num_blocks=11)]
            for plan in plans:
                assert torch.equal(_run(launcher, experts, activated, others, plan)[place], alone[0])


def test_both_products_behind_each_other(launcher: Launcher) -> None:
    """Many launches without a wait between them: the second starts inside the first, and reads what that wrote."""
    up = make_experts(32, 1152, 576, quantised=True, gated=True, device="cuda")
    down = make_experts(32, 576, 576, quantised=True, gated=False, device="cuda")
    assert up.order is not None
    bias = up.bias[:, up.order.cuda()].contiguous()
    x = torch.randn(6, 576, device="cuda").bfloat16()
    chosen = [choices("random", 6, 4, 32, "cuda") for _ in range(40)]
    found = []
    for apart in (True, False):
        calls, outs = [], []
        for ids in chosen:
            activated = torch.full((6, 4, 576), torch.nan, device="cuda", dtype=torch.bfloat16)
            outs.append(torch.full((6, 4, 576), torch.nan, device="cuda"))
            calls += experts_gate_up(
                x=x, expert_ids=ids, weight=up.packed, bias=bias, out=activated, limit=LIMIT, alpha=ALPHA,
                card=launcher.card,
            )  # fmt: skip
            calls += experts_down(
                activated=activated, expert_ids=ids, expert_weights=shares_of(ids), weight=down.packed,
                bias=down.bias, out=outs[-1], card=launcher.card,
            )  # fmt: skip
        torch.cuda.synchronize()
        launches = [launcher.prepare(call) for call in calls]
        for launch in launches:
            launch.issue(launcher.stream())
            if apart:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        found.append(torch.stack(outs))
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
