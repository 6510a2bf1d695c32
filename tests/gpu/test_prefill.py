"""Prefill on a card: whole chunks and a mixture's products, against the reference on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_cases import ALPHA, LIMIT, choices, make_experts
from prefill_cases import NAMES, chunk_differences, make_named

from lowlat.executors.launcher import Launcher
from lowlat.executors.prefill.experts import GroupedExperts, down_by_torch, gate_up_by_torch
from lowlat.executors.prefill.kernels import Launches
from lowlat.executors.prefill.room import ExpertsRoom
from lowlat.kernels.reference.moe import experts as reference

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher(DEVICE)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


@pytest.mark.parametrize("live", [None, 5])
@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_is_the_reference_s(name: str, live: int | None, launcher: Launcher, tmp_path: Path) -> None:
    """Most positions within 4 %; a row whose router all but tied may choose another expert, and be seen by others."""
    torch.manual_seed(7)
    for buffer, differences in chunk_differences(make_named(name, tmp_path), DEVICE, launcher, live=live).items():
        assert float((differences < 4e-2).double().mean()) > 0.75, buffer
        assert name != "llama" or float(differences.max()) < 4e-2, buffer


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("kind", ["random", "shared", "apart"])
def test_products_by_torch_are_the_reference_s(kind: str, quantised: bool) -> None:
    count, rows, hidden, inner = 16, 200, 192, 288
    up = make_experts(count, 2 * inner, hidden, quantised=quantised, gated=True, device="cuda", seed=1)
    down = make_experts(count, hidden, inner, quantised=quantised, gated=False, device="cuda", seed=2)
    limits: dict[str, Any] = {"limit": LIMIT, "alpha": ALPHA}
    chosen = choices(kind, rows, 4, count, "cuda")
    x, shares = torch.randn(rows, hidden, device=DEVICE).bfloat16(), torch.rand(rows, 4, device=DEVICE)
    activated = torch.full((rows, 4, inner), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    out = torch.full((rows, hidden), torch.nan, device=DEVICE)
    gate_up_by_torch(x, chosen, experts=up.packed, bias=up.bias, out=activated, **limits)
    down_by_torch(activated, chosen, shares, experts=down.packed, bias=down.bias, out=out)
    wanted, summed = torch.empty_like(activated), torch.empty_like(out)
    reference.experts_gate_up(x, chosen, up.bias, **up.matrices, out=wanted, **limits)
    reference.experts_down(activated, chosen, shares, down.bias, **down.matrices, out=summed)
    assert apart(activated, wanted) < 2e-3
    assert apart(out, summed) < 1e-4


@pytest.mark.parametrize("rows", [5, 150, 600])
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("kind", ["random", "shared", "apart"])
def test_products_by_kernels_are_the_reference_s(kind: str, quantised: bool, rows: int, launcher: Launcher) -> None:
    """Two layers share their room, without a wait in between."""
    count, hidden, inner = 16, 192, 288
    ups = [make_experts(count, 2 * inner, hidden, quantised=quantised, gated=True, device="cuda") for _ in range(2)]
    downs = [make_experts(count, hidden, inner, quantised=quantised, gated=False, device="cuda") for _ in range(2)]
    size = ExpertsRoom(4 * rows, 4 * rows, 4 * rows * hidden)
    launches = Launches(launcher)
    grouped = GroupedExperts(launches, size, torch.full((size.num_bytes,), 255, dtype=torch.uint8, device=DEVICE))
    limits: dict[str, Any] = {"limit": LIMIT, "alpha": ALPHA}
    chosen = [choices(kind, rows, 4, count, "cuda") for _ in range(2)]
    x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
    shares = torch.softmax(torch.randn(rows, 4, device=DEVICE), -1)
    activated = torch.full((2, rows, 4, inner), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    out = torch.full((2, rows, hidden), torch.nan, device=DEVICE)
    runs = []
    for layer, (up, down) in enumerate(zip(ups, downs, strict=True)):
        assert up.order is not None
        bias, ids = up.bias[:, up.order.cuda()].contiguous(), chosen[layer]
        runs.append(grouped.gate_up(x, ids, experts=up.packed, bias=bias, out=activated[layer], **limits))
        runs.append(grouped.down(activated[layer], ids, shares, experts=down.packed, bias=down.bias, out=out[layer]))
    launches.load()
    for run in runs:
        run()
    for layer, (up, down) in enumerate(zip(ups, downs, strict=True)):
        wanted, summed = torch.empty_like(activated[layer]), torch.empty_like(out[layer])
        reference.experts_gate_up(x, chosen[layer], up.bias, **up.matrices, out=wanted, **limits)
        reference.experts_down(activated[layer], chosen[layer], shares, down.bias, **down.matrices, out=summed)
        assert apart(activated[layer], wanted) < 2e-3
        assert apart(out[layer], summed) < 1e-4
