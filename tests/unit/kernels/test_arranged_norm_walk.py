"""Norms that leave their rows arranged, walked thread by thread: the bits of a norm and of `arrange` after it."""

import pytest
import torch
from kernel_walk import Walker, walkable
from rowwise_cases import EPS, flags, poison, same_bits, weights
from stages import wide

from lowlat.errors import ShapeError
from lowlat.kernels.elementwise.arranged_norm import arranged_add_norm, arranged_rms_norm
from lowlat.kernels.elementwise.norm_add import norm_add
from lowlat.kernels.gemm.prefill.activation_layout import arranged_shape

pytestmark = pytest.mark.second

NAMES = ("gemm.prefill.activation_layout", "elementwise.norm", "elementwise.arranged_norm")
# rows, width, whether rows are dead
WIDTHS = [
    *((3, 72, True), (2, 64, True), (1, 8, False)),
    *(wide(9, 200, False), wide(2, 4096, True), wide(3, 2880, False), wide(2, 4096 + 40, False), wide(1, 8192, True)),
]


@pytest.mark.parametrize(("rows", "width", "with_dead"), WIDTHS)
def test_norms_have_the_bits_of_norm_and_arrangement(rows: int, width: int, with_dead: bool) -> None:
    x, weight, live = torch.randn(rows, width).bfloat16() * 3, weights(width), flags(rows) if with_dead else None
    normed, want, found = poison(rows, width), *(poison(*arranged_shape(rows, width)) for _ in range(2))
    with walkable(walker := Walker(), *NAMES) as (layout, norm, arranged):
        walker.run(*norm.rms_norm(x, weight, live, out=normed, eps=EPS), *layout.arrange(x=normed, out=want))
        calls = arranged.arranged_rms_norm(x, weight, live, out=found, eps=EPS)
        assert len(calls) == 1
        walker.run(*calls)
        again, kept = poison(*arranged_shape(rows, width)), poison(rows, width)
        walker.run(*arranged.arranged_rms_norm(x, weight, live, out=again, kept=kept, eps=EPS))
    assert same_bits(found, want) and bool(found.isfinite().all())
    assert same_bits(again, want) and same_bits(kept, normed)
    assert bool(found.any())


@pytest.mark.parametrize(("rows", "width", "with_dead"), WIDTHS)
def test_sums_stay_rows_and_their_norms_are_arranged(rows: int, width: int, with_dead: bool) -> None:
    dtype = torch.float32 if with_dead else torch.bfloat16
    a, b, weight, live = torch.randn(rows, width).bfloat16(), torch.randn(rows, width).to(dtype), weights(width), None
    live = flags(rows) if with_dead else None
    sums = [poison(rows, width) for _ in range(2)]
    normed, want, found = poison(rows, width), *(poison(*arranged_shape(rows, width)) for _ in range(2))
    with walkable(walker := Walker(), *NAMES) as (layout, norm, arranged):
        calls = norm.add_norm(a, b, weight, live, total=sums[0], out=normed, eps=EPS)
        walker.run(*calls, *layout.arrange(x=normed, out=want))
        walker.run(*arranged.arranged_add_norm(a, b, weight, live, total=sums[1], out=found, eps=EPS))
        again, kept, total = poison(*arranged_shape(rows, width)), poison(rows, width), poison(rows, width)
        walker.run(*arranged.arranged_add_norm(a, b, weight, live, total=total, out=again, kept=kept, eps=EPS))
    assert same_bits(found, want) and same_bits(*sums)
    assert same_bits(again, want) and same_bits(kept, normed) and same_bits(total, sums[0])
    assert bool(found.isfinite().all()) and bool(sums[1].isfinite().all())


@pytest.mark.parametrize(("rows", "width", "with_dead"), [WIDTHS[0], wide(2, 4096 + 40, False)])
def test_sums_of_what_is_normed_are_normed_and_arranged(rows: int, width: int, with_dead: bool) -> None:
    x, residual, live = torch.randn(rows, width), torch.randn(rows, width).bfloat16(), flags(rows)
    given = {"residual": residual, "row_live": live if with_dead else None, "eps": EPS, "next_eps": EPS}
    given |= {"scalar": torch.tensor([0.7]), "next_weight": weights(width), "weight": weights(width)}
    sums, normed = [poison(rows, width) for _ in range(2)], poison(rows, width)
    want, found = (poison(*arranged_shape(rows, width)) for _ in range(2))
    with walkable(walker := Walker(), *NAMES, "elementwise.norm_add") as (layout, _, _, summing):
        walker.run(*summing.norm_add(x, **given, total=sums[0], out=normed), *layout.arrange(x=normed, out=want))
        walker.run(*summing.norm_add(x, **given, total=sums[1], out=found, arranged=True))
    assert same_bits(found, want) and same_bits(*sums)
    assert bool(found.isfinite().all()) and bool(found.any())


def test_a_row_of_nan_leaves_zeros_past_its_end() -> None:
    x, found = torch.randn(3, 72).bfloat16(), poison(*arranged_shape(3, 72))
    x[1, 5] = torch.nan
    with walkable(walker := Walker(), *NAMES) as (*_, arranged):
        walker.run(*arranged.arranged_rms_norm(x, weights(72), out=found, eps=EPS))
    assert int(found[:, 1].isnan().sum()) == 72 and bool(found[:, [0, 2]].isfinite().all())


def test_what_does_not_fit_is_refused() -> None:
    x, weight, out = poison(3, 72), poison(72), poison(*arranged_shape(3, 72))
    with pytest.raises(ShapeError, match="multiple of 8"):
        arranged_rms_norm(poison(3, 63), poison(63), out=out, eps=EPS)
    with pytest.raises(ShapeError, match="kept must have shape"):
        arranged_rms_norm(x, weight, out=out, kept=poison(3, 64), eps=EPS)
    with pytest.raises(ShapeError, match="b must be"):
        arranged_add_norm(x, x.half(), weight, total=x, out=out, eps=EPS)
    with pytest.raises(ShapeError, match="out must have shape"):
        norm_add(x, weight, x, next_weight=weight, total=x, out=out, eps=EPS, next_eps=EPS)
    with pytest.raises(ShapeError, match="a norm has a weight and eps"):
        norm_add(x, None, x, total=x, eps=EPS)
    with pytest.raises(ShapeError, match="scalar must have shape"):
        norm_add(x, None, x, scalar=weight, total=x)
