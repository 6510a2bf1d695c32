"""Prompts' rows by narrow weights on a GPU: exact products nearly, and a row's bits in any company, under any plan."""

from itertools import product

import pytest
import torch

from lowlat.executors.launcher import Launcher
from lowlat.kernels.gemm.prefill.narrow_gemm import NarrowPlan, narrow_gemm

# gates of 27B and 35B-A3B, routers of gpt-oss, 35B-A3B and Qwen3-Coder-Next; an odd one, whose K is no whole steps
SIZES = [(96, 5120), (64, 2048), (128, 2880), (257, 2048), (513, 2048), (5, 8)]
PLANS = [NarrowPlan(*tile, stages) for tile, stages in product(((64, 128), (64, 48), (32, 96), (32, 16)), (3, 4))]


def poisoned(_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def drawn(rows: int, width: int, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of very different sizes, a weight and a bias."""
    x = torch.randn(rows, depth, device="cuda") * torch.logspace(-2, 2, rows, device="cuda")[:, None]
    weight = torch.randn(width, depth, device="cuda") / depth**0.5
    return x.bfloat16(), weight.bfloat16(), torch.randn(width, device="cuda").bfloat16()


def multiply(
    launcher: Launcher,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    plan: NarrowPlan | None = None,
) -> torch.Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, device="cuda")
    launcher.run(*narrow_gemm(x, weight, bias, out=out, workspace=poisoned, gpu=launcher.gpu, plan=plan))
    return out


@pytest.mark.parametrize(("width", "depth"), SIZES)
@pytest.mark.parametrize("rows", [1, 64, 130, 2048])
def test_every_row_is_close_to_the_exact_one(launcher: Launcher, rows: int, width: int, depth: int) -> None:
    x, weight, bias = drawn(rows, width, depth)
    for own in (bias, None):
        exact = x.double() @ weight.double().t() + (0 if own is None else own.double())
        found = multiply(launcher, x, weight, own)
        errors = (found.double() - exact).norm(dim=1) / exact.norm(dim=1)
        assert float(errors.max()) < 1e-5, f"row {int(errors.argmax())}: {float(errors.max())}"


@pytest.mark.parametrize(("width", "depth"), SIZES)
def test_a_row_s_bits_are_its_own(launcher: Launcher, width: int, depth: int) -> None:
    """In chunks, alone, at other places, and with some of the weight's rows."""
    x, weight, bias = drawn(2048, width, depth)
    together = multiply(launcher, x, weight, bias)
    for size in (64, 128, 1000):
        chunks = [multiply(launcher, chunk.contiguous(), weight, bias) for chunk in x.split(size)]
        assert torch.equal(torch.cat(chunks), together)
    for rows in ([7], [2047, 3, 99], list(range(500, 571))):
        assert torch.equal(multiply(launcher, x[rows].contiguous(), weight, bias), together[rows])
    half = slice(width // 2, width)
    assert torch.equal(multiply(launcher, x, weight[half].contiguous(), bias[half].contiguous()), together[:, half])


@pytest.mark.parametrize(("width", "depth"), [(96, 5120), (257, 2048), (5, 72)])
@pytest.mark.parametrize("rows", [63, 512])
def test_plans_change_no_bit(launcher: Launcher, rows: int, width: int, depth: int) -> None:
    x, weight, bias = drawn(rows, width, depth)
    want = multiply(launcher, x, weight, bias)
    for plan in PLANS:
        assert torch.equal(multiply(launcher, x, weight, bias, plan), want), plan


def test_what_is_not_finite_stays_in_its_row(launcher: Launcher) -> None:
    x, weight, bias = drawn(200, 96, 2048)
    want = multiply(launcher, x, weight, bias)
    x[3, 5], x[190, 2047] = torch.nan, torch.inf
    found = multiply(launcher, x, weight, bias)
    assert bool(found[3].isnan().all()) and not bool(found[190].isfinite().any())
    others = [row for row in range(200) if row not in (3, 190)]
    assert torch.equal(found[others], want[others])
