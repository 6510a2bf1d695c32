"""Norms on a GPU: the reference's values, the promised order bit for bit, and a row's bits in any company."""

from typing import Any

import pytest
import torch
from rowwise_cases import (
    EPS,
    Lab,
    check_add_norm,
    check_norm_add,
    check_norm_add_twice,
    check_norms,
    check_permutation,
    check_split_norms,
    flags,
    poison,
    same_bits,
    weights,
)

from lowlat.executors.launcher import Launcher
from lowlat.kernels.elementwise.arranged_norm import arranged_add_norm, arranged_rms_norm
from lowlat.kernels.elementwise.limits import MAX_WIDTH
from lowlat.kernels.elementwise.norm import add_norm, rms_norm, split_norms, two_norms
from lowlat.kernels.elementwise.norm_add import norm_add
from lowlat.kernels.gemm.prefill.activation_layout import arrange, arranged_shape
from lowlat.kernels.toolchain.kernel import KernelCall


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [8, 264, 2880, 4096, 4104, 5120, 8192, 12296, MAX_WIDTH])
def test_norms_against_the_reference(lab: Lab, width: int, dtype: torch.dtype) -> None:
    check_norms(lab, 5, width, dtype)


@pytest.mark.parametrize("width", [2880, 4096, 8192])
def test_the_promised_order(lab: Lab, width: int) -> None:
    check_permutation(lab, width)
    check_permutation(lab, width)


@pytest.mark.parametrize(("parts", "width"), [(1, 64), (3, 2880), (3, 4096), (6, 5120)])
def test_split_norms_against_the_reference(lab: Lab, parts: int, width: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check_split_norms(lab, 4, parts, width, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 2880, 4096, 5120, 16384])
def test_sums_against_the_reference(lab: Lab, width: int, dtype: torch.dtype) -> None:
    for weight_dtype in (torch.bfloat16, torch.float32):
        check_add_norm(lab, 4, width, dtype, weight_dtype)


@pytest.mark.parametrize("width", [2880, 5120])
def test_a_row_has_the_same_bits_in_any_company(lab: Lab, width: int) -> None:
    x, b, weight = torch.randn(9, width).bfloat16(), torch.randn(9, width), weights(width)
    together = lab.launch(rms_norm, {"out": poison(9, width)}, x=x, weight=weight, eps=EPS)["out"]
    outs = {"total": poison(9, width), "out": poison(9, width)}
    sums = lab.launch(add_norm, outs, a=x, b=b, weight=weight, eps=EPS)
    for row in (0, 3, 8):
        only = slice(row, row + 1)
        given = {"x": x[only], "weight": weight, "eps": EPS, "triggers_first": row == 3}
        alone = lab.launch(rms_norm, {"out": poison(1, width)}, **given)["out"]
        assert same_bits(alone[0], together[row])
        outs = {"total": poison(1, width), "out": poison(1, width)}
        alone_sums = lab.launch(add_norm, outs, a=x[only], b=b[only], weight=weight, eps=EPS)
        assert all(same_bits(alone_sums[key][0], sums[key][row]) for key in outs)
        again = lab.launch(rms_norm, {"out": poison(1, width)}, x=sums["total"][row : row + 1], weight=weight, eps=EPS)
        assert same_bits(again["out"][0], sums["out"][row])


def test_a_part_has_the_bits_of_a_row(lab: Lab) -> None:
    x, weight = torch.randn(3, 3 * 2880).bfloat16(), weights(2880)
    named = {f"weight{part}": weight for part in range(3)}
    split = lab.launch(split_norms, {"out": poison(3, 3 * 2880)}, x=x, eps=EPS, **named)["out"]
    whole = lab.launch(rms_norm, {"out": poison(9, 2880)}, x=x.reshape(9, 2880), weight=weight, eps=EPS)["out"]
    assert same_bits(split.reshape(9, 2880), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [72, 2816, 5376])
def test_two_norms_have_the_bits_of_each_alone(lab: Lab, width: int, dtype: torch.dtype) -> None:
    xs, scales = [torch.randn(5, width).bfloat16() for _ in range(2)], [weights(width, dtype) for _ in range(2)]

    def both(x0: Any, x1: Any, w0: Any, w1: Any, live: Any, out0: Any, out1: Any, first: bool) -> list[KernelCall]:
        return two_norms((x0, x1), (w0, w1), live, outs=(out0, out1), eps=EPS, triggers_first=first)

    for live, first in ((None, False), (flags(5), True)):
        given = {"x0": xs[0], "x1": xs[1], "w0": scales[0], "w1": scales[1], "live": live, "first": first}
        found = lab.launch(both, {"out0": poison(5, width), "out1": poison(5, width)}, **given)
        for number, (x, weight) in enumerate(zip(xs, scales, strict=True)):
            own = {"x": x, "weight": weight, "row_live": live, "eps": EPS}
            alone = lab.launch(rms_norm, {"out": poison(5, width)}, **own)["out"]
            assert same_bits(found[f"out{number}"], alone)


def test_zeros_infinities_and_nan_stay_in_their_rows(lab: Lab) -> None:
    x = torch.randn(4, 4096).bfloat16()
    x[0], x[1, 5], x[2, 7] = 0, torch.inf, torch.nan
    found = lab.launch(rms_norm, {"out": poison(4, 4096)}, x=x, weight=weights(4096), eps=EPS)["out"]
    assert not bool(found[0].any())
    assert bool(found[1, 5].isnan()) and bool(found[2].isnan().all())
    assert bool(found[3].isfinite().all())


@pytest.mark.parametrize("rows", [1, 64, 320])
@pytest.mark.parametrize("width", [8, 72, 200, 2880, 4096, 5120, 12296, MAX_WIDTH])
def test_rows_that_are_left_arranged_have_the_bits_of_an_arrangement(lab: Lab, width: int, rows: int) -> None:
    """Of norms and of sums, with dead rows and without; sums stay rows."""
    x, b = torch.randn(rows, width).bfloat16(), torch.randn(rows, width)
    weight = weights(width, torch.float32 if rows == 64 else torch.bfloat16)
    room = poison(*arranged_shape(rows, width))
    for live in (None, flags(rows)):
        normed = lab.launch(rms_norm, {"out": poison(rows, width)}, x=x, weight=weight, row_live=live, eps=EPS)["out"]
        want = lab.launch(arrange, {"out": room}, x=normed)["out"]
        found = lab.launch(arranged_rms_norm, {"out": room}, x=x, weight=weight, row_live=live, eps=EPS)["out"]
        assert same_bits(found, want) and bool(found.isfinite().all())
        both = {"out": room, "kept": poison(rows, width)}
        again = lab.launch(arranged_rms_norm, both, x=x, weight=weight, row_live=live, eps=EPS)
        assert same_bits(again["out"], want) and same_bits(again["kept"], normed)
    for added in (b, b.bfloat16()):
        given = {"a": x, "b": added, "weight": weight, "row_live": flags(rows), "eps": EPS}
        plain = lab.launch(add_norm, {"total": poison(rows, width), "out": poison(rows, width)}, **given)
        want = lab.launch(arrange, {"out": room}, x=plain["out"])["out"]
        sums = lab.launch(arranged_add_norm, {"total": poison(rows, width), "out": room}, **given)
        assert same_bits(sums["total"], plain["total"]) and same_bits(sums["out"], want)
        both = {"total": poison(rows, width), "out": room, "kept": poison(rows, width)}
        again = lab.launch(arranged_add_norm, both, **given)
        assert all(same_bits(again[name], sums[name]) for name in sums) and same_bits(again["kept"], plain["out"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 2560, 2816, 5376, 16384])
def test_norm_sum_scale_and_norm_in_one_launch(lab: Lab, width: int, dtype: torch.dtype) -> None:
    check_norm_add(lab, 4, width, dtype, scalar=0.7, arranges=True)
    check_norm_add(lab, 1, width, dtype, torch.float32, arranges=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 2560, 2816, 5376, 16384])
def test_two_sums_in_one_launch(lab: Lab, width: int, dtype: torch.dtype) -> None:
    check_norm_add_twice(lab, 4, width, dtype)
    check_norm_add_twice(lab, 1, width, dtype, torch.float32)


@pytest.mark.parametrize("width", [2560, 2816, 5376])
def test_launches_that_start_before_the_one_before_ends_have_its_results(launcher: Launcher, width: int) -> None:
    """Sums of sums, 64 launches of which each reads what the one before it wrote, several at once on the device."""
    x, weight = (torch.randn(3, width).bfloat16().cuda() for _ in range(2))
    expected: torch.Tensor | None = None
    for early in (False, True):
        rows, calls = [x, *(poison(3, width).cuda() for _ in range(65))], list[KernelCall]()
        normed = [x, *(poison(3, width).cuda() for _ in range(64))]
        for number in range(64):
            given: dict[str, Any] = {"weight": weight[0], "eps": EPS, "next_weight": weight[1], "next_eps": EPS}
            outs: dict[str, Any] = {"total": rows[number + 1], "out": normed[number + 1]}
            calls += norm_add(normed[number], residual=rows[number], **given, **outs, triggers_first=early)
        calls += rms_norm(rows[64], weight[2], out=rows[65], eps=EPS, triggers_first=early)
        for _ in range(5):
            for each in (*rows[1:], *normed[1:]):
                each.fill_(torch.nan)
            launcher.run(*calls)
            torch.cuda.synchronize()
            found = torch.stack([*rows[1:], *normed[1:]])
            expected = found if expected is None else expected
            assert same_bits(expected, found) and bool(found.isfinite().all())
