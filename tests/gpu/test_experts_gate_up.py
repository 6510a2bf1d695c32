"""Gate and up products of experts against the reference, and a pair's bits in any company."""

import dataclasses

import pytest
import torch
from expert_cases import ALPHA, LIMIT, Experts, choices, make_experts, want_gate_up

from lowlat.executors.launcher import Launcher
from lowlat.kernels.experts_gate_up import experts_gate_up
from lowlat.kernels.experts_plan import GATE_UP, ExpertPlan, ExpertShape, plan_experts

pytestmark = pytest.mark.gpu

TOLERANCE = 4e-3
ROWS = (1, 2, 3, 5, 8, 9, 17, 64)


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    """One launcher for all tests."""
    return Launcher(torch.device("cuda", 0))


def _run(
    launcher: Launcher, experts: Experts, x: torch.Tensor, ids: torch.Tensor, plan: ExpertPlan | None = None
) -> torch.Tensor:
    out = torch.full((*ids.shape, experts.packed.rows // 2), torch.nan, device="cuda", dtype=torch.bfloat16)
    bias = experts.bias if experts.order is None else experts.bias[:, experts.order.cuda()].contiguous()
    launcher.run(
        *experts_gate_up(
            x=x, expert_ids=ids, weight=experts.packed, bias=bias, out=out, limit=LIMIT, alpha=ALPHA,
            card=launcher.card, plan=plan,
        )
    )  # fmt: skip
    return out


def _check(got: torch.Tensor, want: torch.Tensor, ids: torch.Tensor) -> None:
    assert not got[ids < 0].any()
    if bool((ids >= 0).any()):
        assert float((got.double() - want.double()).norm() / want.double().norm()) < TOLERANCE


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(
    ("count", "ranks", "width", "depth"), [(4, 4, 192, 96), (128, 4, 64, 160), (32, 4, 5760, 2880), (8, 2, 320, 2080)]
)
def test_products_match_the_reference(
    launcher: Launcher, quantised: bool, count: int, ranks: int, width: int, depth: int
) -> None:
    """All ways to choose, at every number of rows."""
    experts = make_experts(count, width, depth, quantised=quantised, gated=True, device="cuda")
    for rows in ROWS:
        x = torch.randn(rows, depth, device="cuda").bfloat16()
        for kind in ("random", "shared", "apart", "dead", "none"):
            ids = choices(kind, rows, ranks, count, "cuda")
            _check(_run(launcher, experts, x, ids), want_gate_up(experts, x, ids), ids)


def test_more_rows_than_a_launch_takes(launcher: Launcher) -> None:
    experts = make_experts(16, 192, 96, quantised=True, gated=True, device="cuda")
    x, ids = torch.randn(150, 96, device="cuda").bfloat16(), choices("dead", 150, 4, 16, "cuda")
    _check(_run(launcher, experts, x, ids), want_gate_up(experts, x, ids), ids)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(("width", "depth"), [(192, 160), (5760, 2880)])
def test_a_pair_has_the_same_bits_in_any_company(launcher: Launcher, quantised: bool, width: int, depth: int) -> None:
    """Alone, beside rows that hold NaN, at any place, whoever shares its expert, and however the product is cut."""
    experts = make_experts(16, width, depth, quantised=quantised, gated=True, device="cuda")
    row, ids = torch.randn(1, depth, device="cuda").bfloat16(), choices("random", 1, 4, 16, "cuda")
    alone = _run(launcher, experts, row, ids)
    for rows in ROWS[1:]:
        for kind in ("random", "shared", "dead"):
            x = torch.full((rows, depth), torch.nan, device="cuda", dtype=torch.bfloat16)
            others = choices(kind, rows, 4, 16, "cuda")
            place = int(torch.randint(rows, (1,)))
            x[place], others[place] = row[0], ids[0]
            shape = ExpertShape(GATE_UP, width, depth, 4, quantised)
            default = plan_experts(rows, shape, launcher.card)
            plans: list[ExpertPlan | None] = [None, dataclasses.replace(default, stages=1)]
            plans += [dataclasses.replace(default, num_blocks=7), dataclasses.replace(default, part=1, num_blocks=11)]
            for plan in plans:
                assert torch.equal(_run(launcher, experts, x, others, plan)[place], alone[0])


def test_limits_and_infinities(launcher: Launcher) -> None:
    """Products past the limits are clamped as the reference does; what is not a number stays so, in its row alone."""
    experts = make_experts(4, 192, 96, quantised=True, gated=True, device="cuda", scales=(126, 134))
    x, ids = torch.randn(3, 96, device="cuda").bfloat16() * 100, choices("random", 3, 4, 4, "cuda")
    x[1, 5] = torch.nan
    got, want = _run(launcher, experts, x, ids), want_gate_up(experts, x, ids)
    torch.testing.assert_close(got, want, rtol=2**-6, atol=1e-6, equal_nan=True)
    assert got[1].isnan().all()
    assert got[::2].isfinite().all()
