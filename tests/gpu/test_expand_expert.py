"""Experts expanded on a card: bit for bit torch's unpacking, of every code at every scale, for any experts at once."""

from typing import Any

import pytest
import torch
from expert_cases import all_codes_and_scales, make_experts

from lowlat.executors.launcher import Launcher
from lowlat.kernels.expand_expert import expand_experts
from lowlat.kernels.expert_packing import PackedExperts, unpack_expert

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher(torch.device("cuda", 0))


def check(launcher: Launcher, packed: PackedExperts, chosen: list[int]) -> None:
    ids = torch.tensor(chosen, dtype=torch.int32, device="cuda")
    order = None if packed.order is None else packed.order.to("cuda", torch.int32)
    out = torch.full((len(chosen) + 1, packed.rows, packed.columns), 1234.0, dtype=torch.bfloat16, device="cuda")
    launcher.run(*expand_experts(packed, ids, out=out[:-1], order=order))
    torch.cuda.synchronize()
    assert bool((out[-1] == 1234.0).all()), "a store past the last matrix"
    for place, expert in enumerate(chosen):
        want = unpack_expert(packed, expert)
        assert torch.equal(out[place].view(torch.int16), want.view(torch.int16)), (place, expert)


def test_every_code_at_every_scale_is_exact(launcher: Launcher) -> None:
    packed = all_codes_and_scales("cuda")
    check(launcher, packed, [0])
    on_host = all_codes_and_scales()
    assert torch.equal(unpack_expert(packed, 0).cpu().view(torch.int16), unpack_expert(on_host, 0).view(torch.int16))


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (82, 96), (1152, 576), (5760, 2880)])
def test_expansions_are_the_unpacked_matrices(launcher: Launcher, rows: int, columns: int, quantised: bool) -> None:
    for gated in (False, rows % 16 == 0):
        sizes: dict[str, Any] = {"quantised": quantised, "gated": gated, "scales": (1, 191)}
        experts = make_experts(5, rows, columns, device="cuda", **sizes)
        check(launcher, experts.packed, [4, 0, 2, 4])
        check(launcher, experts.packed, [1])
