"""Prefill on a card: whole chunks and a mixture's products, against the reference on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_cases import ALPHA, LIMIT, choices, make_experts
from prefill_cases import NAMES, chunk_differences, make_named

from lowlat.executors import expansion
from lowlat.executors.expansion import Expansion
from lowlat.executors.launcher import Launcher
from lowlat.executors.prefill_experts import ChunkExperts, expand_by_kernel, expand_by_torch
from lowlat.executors.prefill_units import UnitExperts
from lowlat.kernels.reference import experts as reference

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher(DEVICE)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


@pytest.mark.parametrize("few_rows", [0, expansion.FEW_ROWS])
@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_is_the_reference_s(
    name: str, few_rows: int, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most positions within 4 %; a row whose router all but tied may choose another expert, and be seen by others."""
    torch.manual_seed(7)
    monkeypatch.setattr(expansion, "FEW_ROWS", few_rows)
    for buffer, differences in chunk_differences(make_named(name, tmp_path), DEVICE, launcher).items():
        assert float((differences < 4e-2).double().mean()) > 0.75, buffer
        assert name != "llama" or float(differences.max()) < 4e-2, buffer


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("kind", ["random", "shared", "apart"])
def test_products_of_a_chunk_are_the_reference_s(
    kind: str, quantised: bool, by_kernel: bool, launcher: Launcher
) -> None:
    """Several chunks and layers after each other in one workspace, without a wait in between."""
    count, rows, hidden, inner = 16, 200, 192, 288
    up = make_experts(count, 2 * inner, hidden, quantised=quantised, gated=True, device="cuda", seed=1)
    down = make_experts(count, hidden, inner, quantised=quantised, gated=False, device="cuda", seed=2)
    size = Expansion(3, 3 * 2 * inner * hidden)
    room = torch.full((size.elements,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    products = {"up": up.packed, "down": down.packed}
    expand = expand_by_kernel(launcher, products, ids, room) if by_kernel else expand_by_torch
    chunk = ChunkExperts(size, room, ids, expand)
    limits: dict[str, Any] = {"limit": LIMIT, "alpha": ALPHA}
    for _ in range(3):
        chosen = choices(kind, rows, 4, count, "cuda")
        x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
        shares = torch.softmax(torch.randn(rows, 4, device=DEVICE), -1)
        activated = torch.full((rows, 4, inner), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        out = torch.full((rows, hidden), torch.nan, device=DEVICE)
        chunk.choose(chosen)
        chunk.gate_up(x, chosen, experts=up.packed, bias=up.bias, out=activated, **limits)
        chunk.down(activated, chosen, shares, experts=down.packed, bias=down.bias, out=out)
        wanted, summed = torch.empty_like(activated), torch.empty_like(out)
        reference.experts_gate_up(x, chosen, up.bias, **up.matrices, out=wanted, **limits)
        reference.experts_down(activated, chosen, shares, down.bias, **down.matrices, out=summed)
        assert apart(activated, wanted) < 2e-3
        assert apart(out, summed) < 1e-4


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("kind", ["random", "shared", "apart"])
def test_products_of_few_rows_are_the_reference_s(kind: str, quantised: bool, launcher: Launcher) -> None:
    """More rows than a launch takes; two layers' products share their room, without a wait in between."""
    count, rows, hidden, inner = 16, 150, 192, 288
    ups = [make_experts(count, 2 * inner, hidden, quantised=quantised, gated=True, device="cuda") for _ in range(2)]
    downs = [make_experts(count, hidden, inner, quantised=quantised, gated=False, device="cuda") for _ in range(2)]
    units = UnitExperts(launcher, torch.full((rows * 4 * hidden,), torch.nan, device=DEVICE))
    limits: dict[str, Any] = {"limit": LIMIT, "alpha": ALPHA}
    chosen = choices(kind, rows, 4, count, "cuda")
    x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
    shares = torch.softmax(torch.randn(rows, 4, device=DEVICE), -1)
    activated = torch.full((2, rows, 4, inner), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    out = torch.full((2, rows, hidden), torch.nan, device=DEVICE)
    runs = []
    for layer, (up, down) in enumerate(zip(ups, downs, strict=True)):
        assert up.order is not None
        bias = up.bias[:, up.order.cuda()].contiguous()
        arguments = {"x": x, "expert_ids": chosen, "out": activated[layer], **limits}
        runs.append(units.gate_up(arguments, experts=up.packed, bias=bias))
        runs.append(units.down(activated[layer], chosen, shares, experts=down.packed, bias=down.bias, out=out[layer]))
    for run in runs:
        run()
    for layer, (up, down) in enumerate(zip(ups, downs, strict=True)):
        wanted, summed = torch.empty_like(activated[layer]), torch.empty_like(out[layer])
        reference.experts_gate_up(x, chosen, up.bias, **up.matrices, out=wanted, **limits)
        reference.experts_down(activated[layer], chosen, shares, down.bias, **down.matrices, out=summed)
        assert apart(activated[layer], wanted) < 2e-3
        assert apart(out[layer], summed) < 1e-4
