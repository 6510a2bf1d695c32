"""Rows as e4m3 codes: the reference's bits; products of codes against float64, and their bits under any plan."""

from typing import Any

import pytest
import torch

from lowlat.executors.launcher import Launcher
from lowlat.kernels.elementwise.elementwise import silu_mul
from lowlat.kernels.formats import FP8
from lowlat.kernels.formats.dense import pack_matrix
from lowlat.kernels.gemm.packing import gate_up_permutation, runs_of
from lowlat.kernels.gemm.prefill.activation_layout import arrange, arranged_shape
from lowlat.kernels.gemm.prefill.coded_rows import (
    CodedRows,
    by_codes,
    code_arranged,
    code_rows,
    coded_shape,
    place_of_code,
)
from lowlat.kernels.gemm.prefill.gemm import arranged_prefill_gemm, gated_prefill_gemm
from lowlat.kernels.gemm.prefill.plan import PrefillGemmPlan, partials_shape, plans_of
from lowlat.kernels.reference.gemm import coded_rows as reference

# norm-wise, of a product of codes that tensor cores add up with some 13 bits
LIMIT = 3e-3


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def empty_codes(rows: int, columns: int) -> CodedRows:
    memory = torch.full(coded_shape(rows, columns), 0x7F, device="cuda", dtype=torch.uint8)
    return CodedRows(memory, rows, columns)


def codes_in_order(coded: CodedRows) -> torch.Tensor:
    places = torch.tensor([[place_of_code(row, column) for column in range(128)] for row in range(8)], device="cuda")
    own = places[torch.arange(coded.rows, device="cuda") % 8].expand(coded.codes.shape[0], -1, -1)
    return coded.codes.gather(2, own).permute(1, 0, 2).reshape(coded.rows, coded.columns)


@pytest.mark.parametrize(("rows", "columns"), [(3, 128), (64, 4096), (130, 14336)])
def test_codes_are_the_reference_s(launcher: Launcher, rows: int, columns: int) -> None:
    x = random(rows, columns, scale=5.0)
    x[0], x[1] = 0, x[1] * 1e-30
    x[2, 5] = 3e38
    arranged = torch.empty(arranged_shape(rows, columns), device="cuda", dtype=torch.bfloat16)
    plain, other = empty_codes(rows, columns), empty_codes(rows, columns)
    launcher.run(*code_rows(x=x, out=plain), *arrange(x=x, out=arranged), *code_arranged(arranged=arranged, out=other))
    numbers, scales = reference.code_rows(x.cpu())
    assert torch.equal(plain.memory, other.memory)
    assert torch.equal(plain.scales.cpu(), scales.flatten())
    assert torch.equal(codes_in_order(plain).cpu(), numbers.to(torch.float8_e4m3fn).view(torch.uint8))


class Product:
    """A weight in FP8 by row, and its products by codes."""

    def __init__(self, launcher: Launcher, width: int, depth: int, order: torch.Tensor | None = None) -> None:
        self.launcher, self.depth = launcher, depth
        parts = FP8.quantise(torch.randn(width, depth, device="cuda") * depth**-0.5)
        self.weight, self.packed = FP8.dequantise(parts, torch.float32).double(), pack_matrix(FP8, parts, order)
        self.bias, self.columns = random(width), None
        self.packed_bias = self.bias
        if order is not None:
            self.columns, self.packed_bias = runs_of(order).cuda(), self.bias[order.cuda()].contiguous()

    def plans(self, rows: int) -> tuple[PrefillGemmPlan, ...]:
        weight = by_codes(self.packed)
        return plans_of(rows, weight.rows, weight.columns, self.launcher.gpu, weight.tile_format)

    def coded(self, x: torch.Tensor) -> CodedRows:
        found = empty_codes(*x.shape)
        self.launcher.run(*code_rows(x=x, out=found))
        return found

    def run(self, x: torch.Tensor, plan: PrefillGemmPlan | None = None) -> torch.Tensor:
        rows, weight, plan = x.shape[0], by_codes(self.packed), plan or self.plans(x.shape[0])[0]
        out = torch.full((rows, weight.rows), torch.nan, device="cuda")
        partials = torch.full(partials_shape(plan, rows, weight.rows, weight.columns), torch.nan, device="cuda")
        calls = arranged_prefill_gemm(
            arranged=self.coded(x), weight=self.packed, bias=self.packed_bias, columns=self.columns,
            partials=partials, out=out, gpu=self.launcher.gpu, plan=plan,
        )  # fmt: skip
        self.launcher.run(*calls)
        return out

    def want(self, x: torch.Tensor) -> torch.Tensor:
        numbers, scales = reference.code_rows(x)
        return (numbers.double() @ self.weight.t()) * scales.double() + self.bias.double()


@pytest.mark.parametrize(("width", "depth"), [(40, 128), (6144, 4096), (4096, 14336)])
def test_products_of_codes(launcher: Launcher, width: int, depth: int) -> None:
    order = torch.arange(width).view(-1, 8).flip(0).reshape(-1)
    product = Product(launcher, width, depth, order)
    for rows in (64, 512, 2048):
        x = random(rows, depth)
        want = product.want(x)
        errors = (product.run(x).double() - want).norm(dim=1) / want.norm(dim=1)
        assert float(errors.max()) < LIMIT, (rows, float(errors.max()))


@pytest.mark.parametrize(("width", "depth"), [(264, 1024), (4096, 4096)])
def test_neither_plans_nor_company_change_a_bit_of_a_row(launcher: Launcher, width: int, depth: int) -> None:
    product, row = Product(launcher, width, depth), random(1, depth)
    alone = torch.zeros(64, depth, device="cuda", dtype=torch.bfloat16)
    alone[0] = row
    bits = product.run(alone)[0]
    for rows in (64, 192, 1280, 2048):
        x = random(rows, depth, scale=4.0)
        first = product.run(x)
        for plan in product.plans(rows):
            assert torch.equal(product.run(x, plan), first), (rows, plan)
            for place in (0, 7, rows // 2 + 5, rows - 1):
                mixed = x.clone()
                mixed[place] = row
                if place != 7:
                    mixed[place - 1], mixed[(place + 1) % rows] = torch.nan, torch.inf
                found = product.run(mixed, plan)
                assert torch.equal(found[place], bits), (rows, place, plan)
                assert place == 7 or found[place - 1].isnan().all()


@pytest.mark.parametrize(("inner", "depth"), [(14336, 4096), (1000, 384), (8704, 5120)])
def test_gated_products_are_the_product_its_activation_and_their_arrangement(
    launcher: Launcher, inner: int, depth: int
) -> None:
    order = gate_up_permutation(inner)
    product = Product(launcher, 2 * inner, depth, order)
    for rows in (64, 768):
        x, row_live = random(rows, depth), (torch.arange(rows, device="cuda") % 5 > 0).byte()
        activated = torch.empty(rows, inner, device="cuda", dtype=torch.bfloat16)
        want, found = (torch.full(arranged_shape(rows, inner), torch.nan, device="cuda").bfloat16() for _ in range(2))
        launcher.run(*silu_mul(product.run(x), row_live, out=activated), *arrange(x=activated, out=want))
        given: dict[str, Any] = {"arranged": product.coded(x), "weight": product.packed, "bias": product.packed_bias}
        given |= {"row_live": row_live, "out": found, "gpu": launcher.gpu}
        calls = {}
        for plan in {(plan.rows, plan.depth, plan.apart): plan for plan in reversed(product.plans(rows))}.values():
            sums = torch.full(partials_shape(plan, rows, 2 * inner, depth // 2), torch.nan, device="cuda")
            calls[plan] = gated_prefill_gemm(**given, partials=sums, plan=plan)
        launcher.compile_ahead(call for each in calls.values() for call in each)
        for plan, each in calls.items():
            found.fill_(torch.nan)
            launcher.run(*each)
            assert torch.equal(found.view(torch.int16), want.view(torch.int16)), (rows, plan)
