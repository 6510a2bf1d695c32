"""Rows as e4m3 codes and products of codes, walked thread by thread on a CPU."""

from typing import Any

import pytest
import torch
from gpu_arithmetic import e4m3_code
from kernel_walk import Walker, walkable
from quantised_layers import random_parts
from stages import wide
from walked_groups import walkable_groups

from lowlat.errors import ShapeError
from lowlat.kernels.formats import DENSE_FORMATS
from lowlat.kernels.formats.dense import pack_matrix
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.packing import PackedMatrix, gate_up_permutation, runs_of
from lowlat.kernels.gemm.prefill import coded_rows as coding
from lowlat.kernels.gemm.prefill.activation_layout import arranged_shape, place_of
from lowlat.kernels.gemm.prefill.gemm import arranged_prefill_gemm
from lowlat.kernels.gemm.prefill.plan import plans_of
from lowlat.kernels.gemm.tiles import CODED_ROWS_TILES
from lowlat.kernels.reference.gemm.coded_rows import code_rows
from lowlat.kernels.toolchain.kernel import H200, Gpu

NAMES = tuple(f"gemm.prefill.{part}" for part in ("plan", "coded_rows", "gemm"))
NORMS = ("elementwise.norm", "gemm.prefill.coded_rows", "elementwise.coded_norm")
TWO_BLOCKS = Gpu(2, H200.shared_bytes, (9, 0))


def coded_by_hand(x: torch.Tensor) -> coding.CodedRows:
    """Rows as the reference codes them, arranged one by one."""
    (rows, columns), (numbers, scales) = x.shape, code_rows(x)
    out = coding.CodedRows(torch.empty(coding.coded_shape(rows, columns), dtype=torch.uint8), rows, columns)
    codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    for row in range(rows):
        for column in range(columns):
            out.codes[column // 128, row, coding.place_of_code(row, column % 128)] = codes[row, column]
    out.scales.copy_(scales.flatten())
    return out


def test_places_of_a_row_are_a_permutation() -> None:
    for row in range(8):
        assert sorted(coding.place_of_code(row, column) for column in range(128)) == list(range(128))


def test_codes_of_the_walk_are_torch_s() -> None:
    numbers = torch.cat([torch.randn(500) * 40, torch.tensor([0.0, -0.0, 448, 500, -1e9, 2**-10, 3 * 2**-10, 17, 19])])
    want = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    assert [e4m3_code(each) for each in numbers.tolist()] == want


@pytest.mark.parametrize(("columns", "is_arranged"), [(128, False), (256, True), (4224, False)])
def test_coding_walked(columns: int, is_arranged: bool) -> None:
    """The reference's bits: of zeros, tiny rows, rows of one large number, and NaN and infinite ones, alone."""
    x = torch.randn(6, columns).bfloat16() * 3
    x[1], x[2, 5], x[3] = 0, 1e30, x[3] * 1e-30
    x[4, 7], x[5, 100] = torch.nan, -torch.inf
    out = coding.CodedRows(torch.full(coding.coded_shape(6, columns), 0x55, dtype=torch.uint8), 6, columns)
    with walkable(walker := Walker(), "gemm.prefill.coded_rows") as (module,):
        if is_arranged:
            arranged = torch.zeros(arranged_shape(6, columns), dtype=torch.bfloat16)
            for row in range(6):
                for column in range(columns):
                    arranged[column // 64, row, place_of(row, column % 64)] = x[row, column]
            walker.run(*module.code_arranged(arranged=arranged, out=out))
        else:
            walker.run(*module.code_rows(x=x, out=out))
    want = coded_by_hand(x)
    assert torch.equal(out.codes[:, :4], want.codes[:, :4])
    assert torch.equal(out.scales[:4], want.scales[:4])
    spoilt = out.codes[:, 4:].contiguous().view(torch.float8_e4m3fn).float()
    assert spoilt[:, 0].isnan().any() and spoilt[:, 1].isnan().any()


def fp8_weight(width: int, depth: int, order: torch.Tensor) -> tuple[PackedMatrix, torch.Tensor]:
    """A random weight in FP8 by row, packed, and its numbers, float64."""
    parts = random_parts("fp8", width, depth, wide=True)
    packed = pack_matrix(DENSE_FORMATS["fp8"], parts, order)
    return packed, DENSE_FORMATS["fp8"].dequantise(parts, torch.float32).double()


@pytest.mark.parametrize(
    ("rows", "width", "depth", "segments", "cut"),
    [
        (64, 40, 256, (1, 2), (64, 1, 2, False)),
        (128, 136, 256, (2, 1), (128, 1, 2, True)),
        (128, 72, 512, (1, 4), (128, 2, 2, False)),
        wide(256, 264, 384, (2, 2), (256, 1, 2, False, 2, 80)),
    ],
)
@pytest.mark.second
def test_products_of_codes_walked(
    rows: int, width: int, depth: int, segments: tuple[int, int], cut: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product of codes, times the scales of rows of both, plus the bias, in original columns."""
    order = torch.arange(width).view(-1, 8).flip(0).reshape(-1)
    x, bias = torch.randn(rows, depth).bfloat16(), torch.randn(width).bfloat16()
    x[3] *= 1000
    packed, weight = fp8_weight(width, depth, order)
    held, out = coded_by_hand(x), torch.full((rows, width), torch.nan)
    with walkable_groups(walker := Walker(), *NAMES) as (plans, codes, module):
        for each in (plans, module):
            monkeypatch.setattr(each, "cut_of", lambda *_: segments)
        plan = plans.PrefillGemmPlan(*cut[:4], 2048, *cut[4:])
        monkeypatch.setattr(module, "plans_of", lambda *_: [plan])
        partials = torch.full((segments[0] if plan.apart else 0, rows, width), torch.nan)
        calls = module.arranged_prefill_gemm(
            arranged=codes.CodedRows(held.memory, rows, depth), weight=packed, bias=bias[order],
            columns=runs_of(order), partials=partials, out=out, gpu=TWO_BLOCKS, plan=plan,
        )  # fmt: skip
        walker.run(*calls)
    numbers, scales = code_rows(x)
    want = (numbers.double() @ weight.t()) * scales.double() + bias.double()
    assert float(((out.double() - want).norm(dim=1) / want.norm(dim=1)).max()) < 1e-6


@pytest.mark.parametrize(
    ("segments", "cut"),
    [
        ((1, 1), (128, 1, 2, False)),
        ((2, 1), (128, 1, 2, False, 2)),
        ((2, 1), (64, 1, 2, True)),
        wide((2, 1), (256, 1, 2, False, 1, 80)),
    ],
)
@pytest.mark.second
def test_gated_products_of_codes_walked(
    segments: tuple[int, int], cut: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the product of codes, its activation and their arrangement, however segments are added up; dead rows
    are zero.
    """
    rows, inner, depth = 2 * cut[0] if cut[0] < 256 else cut[0], 72, 128 * segments[0]
    order, x = gate_up_permutation(inner), 4 * torch.randn(rows, depth).bfloat16()
    packed, _ = fp8_weight(2 * inner, depth, order)
    row_live, walker = (torch.arange(rows) % 5 > 0).byte(), Walker()
    product, activated = torch.full((rows, 2 * inner), torch.nan), torch.full((rows, inner), torch.nan).bfloat16()
    out, again = (torch.full(arranged_shape(rows, inner), torch.nan).bfloat16() for _ in range(2))
    names = (*NAMES, "elementwise.elementwise")
    with walkable_groups(walker, *names) as (plans, codes, module, elementwise):
        for each in (plans, module):
            monkeypatch.setattr(each, "cut_of", lambda *_: segments)
        plan = plans.PrefillGemmPlan(*cut[:4], 2048, *cut[4:])
        monkeypatch.setattr(module, "plans_of", lambda *_: [plan])
        held = codes.CodedRows(coded_by_hand(x).memory, rows, depth)
        given = {"arranged": held, "weight": packed, "gpu": TWO_BLOCKS, "plan": plan}
        sums = [torch.full((segments[0] if plan.apart else 0, rows, 2 * inner), torch.nan) for _ in range(2)]
        walker.run(*module.arranged_prefill_gemm(**given, columns=runs_of(order), partials=sums[0], out=product))
        walker.run(*module.gated_prefill_gemm(**given, row_live=row_live, partials=sums[1], out=out))
        walker.run(*elementwise.silu_mul(product, row_live, out=activated))
        walker.run(*module.arrange(x=activated, out=again))
    assert torch.equal(out.view(torch.int16), again.view(torch.int16))
    gate, up = product.split(inner, 1)
    want = (gate / (1 + torch.exp(-gate)) * up).bfloat16() * row_live[:, None].bool()
    assert torch.allclose(activated.float(), want.float(), rtol=2**-7, atol=1e-30)
    assert float((activated == want).float().mean()) > 0.99


def test_what_codes_are_not_multiplied_by_is_refused() -> None:
    rows, out = 64, torch.empty(64, 256, device="meta")
    held = coding.CodedRows(torch.empty(coding.coded_shape(rows, 256), dtype=torch.uint8, device="meta"), rows, 256)
    for name in ("fp8_block", "nvfp4"):
        weight = pack_matrix(DENSE_FORMATS[name], random_parts(name, 256, 256, wide=True))
        with pytest.raises(ShapeError, match=f"FP8 with a scale for each row, .* not by {weight.tile_format.name}"):
            arranged_prefill_gemm(arranged=held, weight=weight, out=out, gpu=H200)
    weight, _ = fp8_weight(256, 256, torch.arange(256))
    with pytest.raises(ShapeError, match="in one part of K, not in 8"):
        arranged_prefill_gemm(arranged=held, weight=weight, out=out, gpu=H200, parts=KParts(8, 1))
    with pytest.raises(ShapeError, match="memory must have shape"):
        coding.CodedRows(held.memory, rows, 128)
    assert plans_of(64, 256, 128, H200, CODED_ROWS_TILES)[0].tile_bytes == 2048


@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [(3, 128, None), (3, 256, torch.float32), (2, 4224, torch.bfloat16)]
)
def test_norms_leave_the_codes_of_their_rows(rows: int, width: int, dtype: torch.dtype | None) -> None:
    """Alone and after a sum, which stays; a dead row has codes of zeros."""
    a, weight, live = torch.randn(rows, width).bfloat16() * 3, torch.randn(width).bfloat16(), torch.ones(rows).byte()
    live[1] = 0
    b = None if dtype is None else torch.randn(rows, width).to(dtype)
    sums, normed = [torch.empty(rows, width).bfloat16() for _ in range(2)], torch.empty(rows, width).bfloat16()
    found = torch.full(coding.coded_shape(rows, width), 0x55, dtype=torch.uint8)
    with walkable(walker := Walker(), *NORMS) as (norm, codes, coded):
        out = codes.CodedRows(found, rows, width)
        if b is None:
            walker.run(*norm.rms_norm(a, weight, live, out=normed, eps=1e-5))
            walker.run(*coded.coded_rms_norm(a, weight, live, out=out, eps=1e-5))
        else:
            walker.run(*norm.add_norm(a, b, weight, live, total=sums[0], out=normed, eps=1e-5))
            walker.run(*coded.coded_add_norm(a, b, weight, live, total=sums[1], out=out, eps=1e-5))
            assert torch.equal(*sums)
    assert torch.equal(found, coded_by_hand(normed).memory) and normed[0].any() and not normed[1].any()
