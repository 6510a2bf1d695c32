"""The thin matrix product against torch in float64, and a row's bits in any company."""

import dataclasses

import pytest
import torch
from quantised_layers import random_parts
from selection_cases import best_of, best_pairs

from lowlat.executors.launcher import Launcher
from lowlat.kernels.elementwise.elementwise import output_gate
from lowlat.kernels.elementwise.norm import rms_norm
from lowlat.kernels.formats import DENSE_FORMATS
from lowlat.kernels.formats.dense import pack_matrix
from lowlat.kernels.gemm.decode.gemm import (
    MAX_ROWS,
    BlockRow,
    DecodeGemmPlan,
    NormPrologue,
    PartialArgmax,
    decode_gemm,
    plan_decode_gemm,
    steps_to_hold,
)
from lowlat.kernels.gemm.decode.plan import candidate_plans
from lowlat.kernels.gemm.packing import gate_up_permutation, pack, rope_permutation, runs_of
from lowlat.kernels.sampling.select import BROKEN, FINITE, INFINITY
from lowlat.kernels.speculation.markov import bias_rows
from lowlat.kernels.toolchain.kernel import H200

SHAPES = ((256, 320), (6144, 4096), (320, 896), (97, 200), (4096, 14336), (48, 32))
ROWS = (1, 3, 8, 9, 17, 40, 64, 70)


def _random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_product_matches_torch(launcher: Launcher, width: int, depth: int) -> None:
    """Every number of rows, with and without a bias, in float32."""
    weight, bias = _random(width, depth, scale=depth**-0.5), _random(width)
    packed = pack(weight)
    for rows in ROWS:
        x = _random(rows, depth)
        for offset in (None, bias):
            out = torch.full((rows, width), torch.nan, device="cuda")
            launcher.run(*decode_gemm(x=x, weight=packed, out=out, bias=offset))
            want = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
            assert _error(out, want) < 1e-5


@pytest.mark.parametrize("name", DENSE_FORMATS)
@pytest.mark.parametrize(("width", "depth"), [(256, 384), (6144, 4096), (4096, 14336), (104, 128), (16384, 5376)])
def test_quantised_weights_give_the_products_of_their_numbers(
    launcher: Launcher, name: str, width: int, depth: int
) -> None:
    """Every number of rows, scales of 16 and of 32 bits; a row's bits are those of the row alone, in any plan."""
    for wide in (False, True):
        parts = random_parts(name, width, depth, wide=wide, device="cuda")
        weight = pack_matrix(DENSE_FORMATS[name], parts)
        numbers, bias = DENSE_FORMATS[name].dequantise(parts, torch.float32).double(), _random(width)
        row = _random(1, depth)
        alone = torch.empty(1, width, device="cuda")
        launcher.run(*decode_gemm(x=row, weight=weight, out=alone, bias=bias))
        for rows in ROWS:
            x, out = _random(rows, depth), torch.full((rows, width), torch.nan, device="cuda")
            x[rows // 2] = row
            launcher.run(*decode_gemm(x=x, weight=weight, out=out, bias=bias))
            assert _error(out, x.double() @ numbers.t() + bias.double()) < 1e-5
            assert torch.equal(out[rows // 2], alone[0])
            if rows > MAX_ROWS:
                continue
            for plan in candidate_plans(rows, width, H200, weights=weight.tile_format, depth=depth)[1:5]:
                again = torch.full_like(out, torch.nan)
                launcher.run(*decode_gemm(x=x, weight=weight, out=again, bias=bias, plan=plan))
                assert torch.equal(again, out)


@pytest.mark.parametrize("order", [gate_up_permutation(2048), rope_permutation(40, 8, 64)], ids=["gate_up", "rope"])
def test_a_permuted_weight_gives_original_columns(launcher: Launcher, order: torch.Tensor) -> None:
    """The bits of the weight as it was, in float32 and in bf16, with and without a bias, at every number of rows."""
    width, runs, order = len(order), runs_of(order).cuda(), order.cuda()
    weight, bias = _random(width, 896, scale=0.03), _random(width)
    permuted, plain = pack(weight, order), pack(weight)
    for rows in ROWS:
        x = _random(rows, 896)
        for kind, own in ((torch.float32, None), (torch.bfloat16, bias)):
            got, want = (torch.full((rows, width), torch.nan, device="cuda", dtype=kind) for _ in range(2))
            ordered = None if own is None else own[order].contiguous()
            launcher.run(*decode_gemm(x=x, weight=permuted, bias=ordered, columns=runs, out=got))
            launcher.run(*decode_gemm(x=x, weight=plain, bias=own, out=want))
            assert bool(want.isfinite().all()) and torch.equal(got, want)


@pytest.mark.parametrize(("width", "depth"), [(256, 320), (4096, 4096)])
def test_residual_and_activation(launcher: Launcher, width: int, depth: int) -> None:
    """Fused parts equal the same parts apart; dead rows give zeros after the activation."""
    weight = _random(width, depth, scale=depth**-0.5)
    plain, gated = pack(weight), pack(weight, gate_up_permutation(width // 2))
    for rows in ROWS[1:]:
        x, live = _random(rows, depth), torch.ones(rows, dtype=torch.uint8, device="cuda")
        live[rows // 2] = 0
        product = x.double() @ weight.double().t()
        residual = _random(rows, width)
        out = torch.full((rows, width), torch.nan, device="cuda", dtype=torch.bfloat16)
        launcher.run(*decode_gemm(x=x, weight=plain, out=out, residual=residual))
        assert _error(out, residual.double() + product) < 4e-3
        launcher.run(*decode_gemm(x=x, weight=plain, out=out, gated=residual, row_live=live))
        gate, want = torch.full((rows, width), torch.nan, device="cuda"), torch.full_like(out, torch.nan)
        launcher.run(*decode_gemm(x=x, weight=plain, out=gate), *output_gate(residual, gate, live, out=want))
        assert torch.equal(out, want) and not want[rows // 2].any()
        act = torch.full((rows, width // 2), torch.nan, device="cuda", dtype=torch.bfloat16)
        launcher.run(*decode_gemm(x=x, weight=gated, out=act, row_live=live, activation="silu"))
        gate, up = product.chunk(2, dim=-1)
        assert _error(act, torch.nn.functional.silu(gate) * up * live[:, None]) < 4e-3
        assert not act[rows // 2].any()


@pytest.mark.parametrize(("width", "depth"), [(256, 320), (4096, 4096), (512, 14336)])
def test_a_row_has_the_same_bits_in_any_company(launcher: Launcher, width: int, depth: int) -> None:
    """Alone, among others that hold NaN, at any place, and however the product is cut."""
    weight = pack(_random(width, depth, scale=depth**-0.5))
    row = _random(1, depth)
    alone = torch.empty(1, width, device="cuda")
    launcher.run(*decode_gemm(x=row, weight=weight, out=alone))
    for rows in ROWS[1:]:
        x = torch.full((rows, depth), torch.nan, device="cuda", dtype=torch.bfloat16)
        place = int(torch.randint(rows, (1,)))
        x[place] = row
        plans: list[DecodeGemmPlan | None] = [None]
        if rows <= MAX_ROWS:
            default = plan_decode_gemm(rows, width, H200)
            plans += [dataclasses.replace(default, weight_tiles=1, stages=1)]
            plans += [dataclasses.replace(default, num_blocks=7)]
        for plan in plans:
            out = torch.empty(rows, width, device="cuda")
            launcher.run(*decode_gemm(x=x, weight=weight, out=out, plan=plan))
            assert torch.equal(out[place], alone[0])


@pytest.mark.parametrize(("width", "depth"), [(97, 200), (32000, 320), (128256, 128)])
def test_best_pairs_are_those_of_the_rows_it_leaves(launcher: Launcher, width: int, depth: int) -> None:
    """Every number of rows; ties, a row that is not finite; the product's own bits stay."""
    weight = _random(width, depth)
    weight[width // 3] = weight[width - 5] = weight[width // 3 + 1]
    packed = pack(weight)
    for rows in ROWS:
        x = _random(rows, depth)
        x[rows // 2, 1] = torch.inf
        plain, out = (torch.full((rows, width), torch.nan, device="cuda") for _ in range(2))
        pairs = torch.full((rows, 132, 2), 77, dtype=torch.int32, device="cuda")
        launcher.run(*decode_gemm(x=x, weight=packed, out=plain))
        launcher.run(*decode_gemm(x=x, weight=packed, out=out, best=PartialArgmax(pairs, FINITE)))
        assert torch.equal(plain.view(torch.int32), out.view(torch.int32))
        (largest, low), (want, want_low) = best_of(pairs), best_of(best_pairs(out, FINITE, 1))
        assert torch.equal(largest, want)
        whole = largest != BROKEN
        assert not whole[rows // 2] and torch.equal(low[whole], want_low[whole])


@pytest.mark.parametrize(("width", "depth"), [(97, 200), (32000, 320), (128256, 256), (151936, 8)])
def test_a_row_of_a_block_is_added_as_an_operation_alone_adds_it(launcher: Launcher, width: int, depth: int) -> None:
    """Bit for bit, of one row a slot and of more; with the best pairs of the sums."""
    weight = _random(width, depth)
    weight[width // 3] = weight[width - 5] = weight[width // 3 + 1]
    packed = pack(weight)
    for slots, wide, row in ((1, 1, 6), (2, 3, 0), (8, 1, 3)):
        rows = slots * wide
        x, block = _random(rows, depth), torch.randn(slots * 7, width, device="cuda")
        live = (torch.arange(rows, device="cuda") % 3 != 1).to(torch.uint8).reshape(slots, wide)
        plain, want = (torch.full((rows, width), torch.nan, device="cuda") for _ in range(2))
        launcher.run(*decode_gemm(x=x, weight=packed, out=plain))
        launcher.run(*bias_rows(block, plain, live, out=want, row=row))
        lows = best_of(best_pairs(want, INFINITY, 1))
        out, pairs = torch.full_like(want, torch.nan), torch.zeros(rows, 132, 2, dtype=torch.int32, device="cuda")
        best = PartialArgmax(pairs, INFINITY)
        beside = BlockRow(block, wide, row)
        launcher.run(*decode_gemm(x=x, weight=packed, out=out, beside=beside, best=best, row_live=live))
        assert torch.equal(out.view(torch.int32), want.view(torch.int32))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(best_of(pairs), lows, strict=True))


@pytest.mark.parametrize(("width", "depth"), [(256, 320), (5120, 2880), (6144, 4096), (97, 200), (48, 8192)])
def test_a_product_norms_its_rows_as_a_norm_alone_does(launcher: Launcher, width: int, depth: int) -> None:
    """Bit for bit, and again after each other without a wait between them."""
    eps, weight, scale = 1e-5, pack(_random(width, depth, scale=depth**-0.5)), _random(depth)
    for rows in (1, 2, 3, 4, 5, 8):
        if not steps_to_hold(rows, depth, H200):
            continue
        scale = scale.float() * 1.01 if rows % 2 else scale.bfloat16()
        x, live = _random(rows, depth), torch.ones(rows, dtype=torch.uint8, device="cuda")
        live[rows // 2] = rows == 1
        normed, want = torch.full_like(x, torch.nan), torch.full((rows, width), torch.nan, device="cuda")
        norm = NormPrologue(scale, eps, live)
        apart = rms_norm(x, scale, live, out=normed, eps=eps)
        launcher.run(*apart, *decode_gemm(x=normed, weight=weight, out=want))
        outs = [torch.full((rows, width), torch.nan, device="cuda") for _ in range(20)]
        launcher.run(*(call for out in outs for call in decode_gemm(x=x, weight=weight, out=out, norm=norm)))
        kept = torch.full_like(x, torch.nan)
        outs.append(torch.full((rows, width), torch.nan, device="cuda"))
        launcher.run(*decode_gemm(x=x, weight=weight, out=outs[-1], norm=dataclasses.replace(norm, out=kept)))
        assert torch.equal(kept, normed)
        assert want.isfinite().all()
        assert all(torch.equal(out, want) for out in outs)
