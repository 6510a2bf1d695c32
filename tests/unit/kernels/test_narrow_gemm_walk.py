"""Products of prompts' rows with a narrow weight, walked thread by thread: values, bits in any company, plans."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from kernel_inventory import B200, GPUS
from kernel_walk import Walker, walkable
from stages import wide

from lowlat.errors import ShapeError
from lowlat.kernels.gemm.prefill.narrow_gemm import narrow_gemm, narrow_workspace, num_parts, plan_narrow
from lowlat.kernels.toolchain.kernel import H200, Gpu

pytestmark = pytest.mark.second

SMALL = Gpu(4, H200.shared_bytes, (9, 0))
Multiply = Callable[..., torch.Tensor]


def poisoned(_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@contextmanager
def walked(monkeypatch: pytest.MonkeyPatch, part_steps: int, late: bool = True) -> Iterator[Multiply]:
    """A product by walked kernels, K in parts of so many steps at the least, rows and columns by a plan's tile."""
    walker = Walker(late, may_leave=False)
    with walkable(walker, "gemm.prefill.narrow_gemm") as (module,):
        monkeypatch.setattr(module, "PART_STEPS", part_steps)

        def multiply(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: tuple[int, int, int]
        ) -> torch.Tensor:
            out = torch.full((x.shape[0], weight.shape[0]), torch.nan)
            plan = module.NarrowPlan(*tile)
            walker.run(*module.narrow_gemm(x, weight, bias, out=out, workspace=poisoned, plan=plan))
            return out

        yield multiply


def drawn(rows: int, width: int, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = (torch.randn(rows, depth) * torch.logspace(-2, 2, rows)[:, None]).bfloat16()
    return x, (torch.randn(width, depth) / depth**0.5).bfloat16(), torch.randn(width).bfloat16()


@pytest.mark.parametrize("late", [True, wide(False)])
@pytest.mark.parametrize(
    ("rows", "width", "depth", "part_steps", "tile"),
    [
        (37, 22, 328, 1, (32, 16, 3)),  # four parts of one step or two, of which the last is 8 columns
        (70, 24, 136, 8, (64, 32, 4)),  # one part, of fewer steps than stages
        wide(65, 130, 576, 2, (64, 128, 3)),
    ],
)
def test_products_are_close_to_exact_ones(
    rows: int, width: int, depth: int, part_steps: int, tile: tuple[int, int, int], late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each row by its own size: what is small is as exact as what is large."""
    x, weight, bias = drawn(rows, width, depth)
    for own in (bias, None):
        with walked(monkeypatch, part_steps, late) as multiply:
            found = multiply(x, weight, own, tile)
        exact = x.double() @ weight.double().t() + (0 if own is None else own.double())
        assert bool(((found.double() - exact).norm(dim=1) <= 1e-6 * exact.norm(dim=1)).all())


def test_a_row_s_bits_are_its_own_and_its_weight_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some of the rows, of some of the weight's, at other places, in other tiles; NaN stays in its row."""
    x, weight, bias = drawn(40, 40, 264)
    with walked(monkeypatch, 1) as multiply:
        together = multiply(x, weight, bias, (64, 48, 3))
        x[5, 17] = torch.nan
        again = multiply(x, weight, bias, (32, 16, 4))
        rows, columns = [39, 2, 7], [33, 8, 1, 30, 4]
        some = multiply(x[rows].contiguous(), weight[columns].contiguous(), bias[columns].contiguous(), (32, 16, 3))
    assert bool(again[5].isnan().all())
    others = [row for row in range(40) if row != 5]
    assert torch.equal(again[others], together[others])
    assert torch.equal(some, together[rows][:, columns])


def test_k_is_cut_by_k_alone() -> None:
    assert [num_parts(depth) for depth in (8, 960, 1024, 2048, 2880, 5120)] == [1, 1, 2, 4, 4, 4]
    assert narrow_workspace(7, 257, 2048) == ("prefill.narrow", (4, 7, 260), torch.float32)


@pytest.mark.parametrize("gpu", [*GPUS.values(), B200, SMALL], ids=str)
@pytest.mark.parametrize(("width", "depth"), [(1, 8), (64, 2048), (96, 5120), (128, 2880), (257, 2048), (513, 2048)])
def test_plans_fit_their_gpu(width: int, depth: int, gpu: Gpu) -> None:
    for rows in (1, 64, 128, 512, 2048, 4096):
        plan = plan_narrow(rows, width, depth, gpu)
        assert plan.rows in (32, 64) and plan.columns % 16 == 0 and 16 <= plan.columns <= 128 and plan.stages >= 3
        assert plan.shared_bytes <= gpu.shared_bytes


def test_many_rows_and_few_fill_the_gpu() -> None:
    """27B's gates: of 2,048 rows tiles of 64 by all columns, of 128 small ones."""
    many, few = plan_narrow(2048, 96, 5120, H200), plan_narrow(128, 96, 5120, H200)
    assert (many.rows, many.columns) == (64, 96) and (few.rows, few.columns) == (32, 16)
    out, x, weight = torch.empty(2048, 96), torch.empty(2048, 5120).bfloat16(), torch.empty(96, 5120).bfloat16()
    product, _ = narrow_gemm(x, weight, out=out, workspace=poisoned)
    assert product.grid == (32, 4, 1)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, out = torch.empty(3, 64).bfloat16(), torch.empty(5, 64).bfloat16(), torch.empty(3, 5)
    with pytest.raises(ShapeError, match="narrow_gemm: K must be a multiple of 8, got 60"):
        narrow_gemm(x[:, :60], weight[:, :60], out=out, workspace=poisoned)
    with pytest.raises(ShapeError, match=r"weight must be torch\.bfloat16"):
        narrow_gemm(x, weight.float(), out=out, workspace=poisoned)
    with pytest.raises(ShapeError, match=r"weight must have shape \[5, 64\]"):
        narrow_gemm(x, weight[:, :56], out=out, workspace=poisoned)
    with pytest.raises(ShapeError, match="bias must have shape"):
        narrow_gemm(x, weight, torch.empty(4).bfloat16(), out=out, workspace=poisoned)
