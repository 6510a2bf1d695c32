"""An MoE layer's GEMMs by warpgroups, walked thread by thread on a CPU."""

from types import ModuleType
from typing import Any

import pytest
import torch
from expert_cases import ALPHA, LIMIT, make_experts, shares_of, want_down, want_gate_up
from kernel_walk import Walker
from moe_cases import Poisoned
from stages import wide
from walked_groups import walkable_groups

from lowlat.kernels.moe.prefill.warpgroup_plan import num_places, warpgroup_workspaces
from lowlat.kernels.toolchain.kernel import H200, Gpu

pytestmark = pytest.mark.second

TWO_BLOCKS = Gpu(2, H200.shared_bytes, (9, 0))


@pytest.mark.parametrize(("quantised", "rows", "biased"), [(True, 40, True), wide("fp8", 30, False)])
def test_a_moe_by_warpgroups_is_the_reference_s(
    quantised: Any, rows: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU of two SMs, so that blocks have units of several sizes; rows of one expert or two."""
    up = make_experts(3, 256, 192, quantised=quantised, gated=True, biased=biased)
    down = make_experts(3, 192, 128, quantised=quantised, gated=False, biased=biased)
    x, workspace, walker = torch.randn(rows, 192).bfloat16(), Poisoned(), Walker()
    ids = torch.tensor([[0, -1]] * (rows - 6) + [[2, 0], [0, 2], [-1, -1]] * 2, dtype=torch.int32)
    shares, limits = shares_of(ids), {"limit": LIMIT, "alpha": ALPHA} if biased else {}
    out, asked = torch.full((rows, 192), torch.nan), torch.zeros(rows, 2, 128).bfloat16()
    with walkable_groups(walker, "moe.prefill.experts") as modules:
        made: ModuleType = modules[-1]
        monkeypatch.setattr(made, "takes_warpgroups", lambda *_: True)
        calls = made.prefill_experts(
            x, ids, shares, gate_up=up.packed, gate_up_bias=up.packed_bias, down=down.packed, down_bias=down.bias,
            activated=asked, out=out, **limits, workspace=workspace, gpu=TWO_BLOCKS,
        )  # fmt: skip
        walker.run(*calls)
    assert [call.kernel.name.split("_")[1] for call in calls] == [
        "grouping", "pairs", "warpgroups", "warpgroups", "placed"
    ]  # fmt: skip
    assert set(warpgroup_workspaces(rows, 2, 3, 192, 128)) < set(workspace.asked) and not asked.any()
    activated = want_gate_up(up, x, ids)
    want = torch.where(ids[..., None] >= 0, want_down(down, activated, ids), 0).sum(1)
    torch.testing.assert_close(out, want, rtol=1e-2, atol=2e-3 * float(want.std()))
    assert not out[-1].any()


def test_places_hold_every_expert_s_pairs() -> None:
    """An expert's places begin at a multiple of eight, after those of the expert before it, whatever the counts."""
    for counts in ([0, 1, 7, 8, 9, 0, 16, 33], [8] * 5, [0] * 4, [23, 1]):
        first, end = 0, 0
        for expert, count in enumerate(counts):
            start = (first // 8 + expert) * 8
            assert start >= end
            first, end = first + count, start + -(-count // 8) * 8
        assert end <= num_places(sum(counts), len(counts))
