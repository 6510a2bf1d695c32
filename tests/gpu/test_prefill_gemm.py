"""Wide products against float64, and a row's bits in any company, at any place, under any plan."""

from collections.abc import Callable, Sequence

import pytest
import torch
from quantised_layers import random_parts

from lowlat.executors.launcher import Launcher
from lowlat.kernels.elementwise.elementwise import silu_mul
from lowlat.kernels.formats import DENSE_FORMATS
from lowlat.kernels.formats.dense import pack_matrix, unpack_matrix
from lowlat.kernels.gemm.packing import PackedMatrix, gate_up_permutation, pack, rope_permutation, runs_of
from lowlat.kernels.gemm.prefill.activation_layout import arrange, arranged_shape
from lowlat.kernels.gemm.prefill.gemm import gated_prefill_gemm, prefill_gemm
from lowlat.kernels.gemm.prefill.plan import PrefillGemmPlan, partials_shape, plans_of, segments_of
from lowlat.kernels.gemm.unpacking import unpack_weight, unpacked_shape
from lowlat.kernels.toolchain.kernel import KernelCall

SHAPES = ((8, 8), (200, 72), (5120, 2880), (4096, 14336))
ROWS = (64, 192, 256, 1280)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


class Product:
    """A weight, and what its products want."""

    def __init__(
        self, launcher: Launcher, width: int, depth: int, order: torch.Tensor | None = None, *, bias: bool = False
    ) -> None:
        self.launcher, self.weight = launcher, random(width, depth, scale=depth**-0.5)
        self.packed: PackedMatrix = pack(self.weight, order)
        self.plain_bias = random(width) if bias else None
        self.bias, self.columns = self.plain_bias, None
        if order is not None:
            self.columns = runs_of(order).cuda()
            if self.plain_bias is not None:
                self.bias = self.plain_bias[order.cuda()].contiguous()

    def plans(self, rows: int) -> Sequence[PrefillGemmPlan]:
        return plans_of(rows, self.packed.rows, self.packed.columns, self.launcher.gpu, self.packed.tile_format)

    def calls(self, rows: int, plan: PrefillGemmPlan) -> list[KernelCall]:
        """Over memory that nobody has written."""
        return self._calls(torch.empty(rows, self.weight.shape[1], device="cuda", dtype=torch.bfloat16), plan)[0]

    def start(self, x: torch.Tensor, plan: PrefillGemmPlan | None = None) -> Callable[[], torch.Tensor]:
        """A function that launches, without waiting, and gives the product's buffer."""
        if plan is None:
            plan = self.plans(x.shape[0])[0]
        calls, out = self._calls(x, plan)

        def launch() -> torch.Tensor:
            self.launcher.run(*calls)
            return out

        return launch

    def _calls(self, x: torch.Tensor, plan: PrefillGemmPlan) -> tuple[list[KernelCall], torch.Tensor]:
        rows = x.shape[0]
        arranged = torch.full(arranged_shape(rows, self.packed.columns), torch.nan, device="cuda", dtype=torch.bfloat16)
        partials = torch.full(
            partials_shape(plan, rows, self.packed.rows, self.packed.columns), torch.nan, device="cuda"
        )
        out = torch.full((rows, self.packed.rows), torch.nan, device="cuda")
        calls = prefill_gemm(
            x=x, weight=self.packed, bias=self.bias, columns=self.columns, arranged=arranged, partials=partials,
            out=out, gpu=self.launcher.gpu, plan=plan,
        )  # fmt: skip
        return calls, out

    def run(self, x: torch.Tensor, plan: PrefillGemmPlan | None = None) -> torch.Tensor:
        return self.start(x, plan)()

    def want(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.double() @ self.weight.double().t()
        return exact if self.plain_bias is None else exact + self.plain_bias.double()


def where(found: torch.Tensor, want: torch.Tensor) -> str:
    """Which rows and columns of a product are wrong, to learn from one run."""
    wrong = ((found.double() - want).abs() > 0.02 * want.abs().max()) | found.isnan()
    rows, columns = wrong.any(1).nonzero().flatten(), wrong.any(0).nonzero().flatten()
    few = found[:4, :8].tolist(), want[:4, :8].tolist()
    return (
        f"{int(wrong.sum())} of {wrong.numel()} wrong, {int(found.isnan().sum())} NaN; {len(rows)} rows: "
        f"{rows[:24].tolist()}; {len(columns)} columns: {columns[:40].tolist()}; begins {few}"
    )


def check(found: torch.Tensor, want: torch.Tensor) -> None:
    error = float((found.double() - want).norm() / want.norm())
    assert error < 1e-5, f"{error}: {where(found, want)}"


@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_product_is_torch_s(launcher: Launcher, width: int, depth: int) -> None:
    product = Product(launcher, width, depth, bias=True)
    for rows in (64, 512):
        x = random(rows, depth)
        check(product.run(x), product.want(x))


@pytest.mark.parametrize("name", DENSE_FORMATS)
@pytest.mark.parametrize(("width", "depth"), [(104, 128), (6144, 4096), (4096, 14336)])
def test_quantised_weights_have_the_bits_of_their_numbers(
    launcher: Launcher, name: str, width: int, depth: int
) -> None:
    """Under any plan, by scales of 16 and of 32 bits; also the numbers that one launch unpacks."""
    order = torch.arange(width).view(-1, 8).flip(0).reshape(-1)
    for wide in (False, True):
        quantised, plain = (Product(launcher, width, depth, order, bias=True) for _ in range(2))
        parts = random_parts(name, width, depth, wide=wide, device="cuda")
        quantised.packed, plain.bias = pack_matrix(DENSE_FORMATS[name], parts, order), None
        numbers = torch.full(unpacked_shape(width, depth), torch.nan, device="cuda", dtype=torch.bfloat16)
        launcher.run(*unpack_weight(weight=quantised.packed, out=numbers))
        assert torch.equal(numbers[:width, :depth], unpack_matrix(quantised.packed)) and not numbers[width:].any()
        plain.packed, plain.columns = pack(numbers[:width, :depth]), None
        for rows in (64, 512):
            x = random(rows, depth)
            want = plain.run(x)
            if quantised.packed.scales is not None:
                want = want * quantised.packed.scales[:width]
            assert quantised.bias is not None
            want = (want + quantised.bias.float())[:, torch.argsort(order)]
            for plan in (plans := quantised.plans(rows))[: 1 if width == 104 else len(plans)]:
                found = quantised.run(x, plan)
                assert torch.equal(found, want), f"{plan}: {where(found, want.double())}"


@pytest.mark.parametrize(
    ("order", "depth"),
    [(gate_up_permutation(14336), 4096), (gate_up_permutation(40), 200), (rope_permutation(40, 8, 128), 4096)],
)
def test_rows_that_were_packed_in_another_order_come_out_in_theirs(
    launcher: Launcher, order: torch.Tensor, depth: int
) -> None:
    product = Product(launcher, len(order), depth, order, bias=True)
    x = random(128, depth)
    check(product.run(x), product.want(x))


@pytest.mark.parametrize(("width", "depth"), [(264, 1000), (2880, 4096)])
def test_neither_plans_nor_company_change_a_bit_of_a_row(launcher: Launcher, width: int, depth: int) -> None:
    product, row = Product(launcher, width, depth), random(1, depth)
    launcher.compile_ahead(call for rows in ROWS for plan in product.plans(rows) for call in product.calls(rows, plan))
    alone = torch.zeros(64, depth, device="cuda", dtype=torch.bfloat16)
    alone[0] = row
    bits = product.run(alone)[0]
    for rows in ROWS:
        x = random(rows, depth, scale=4.0)
        first = product.run(x)
        check(first, product.want(x))
        for plan in product.plans(rows):
            found = product.run(x, plan)
            assert torch.equal(found, first), f"{rows} rows, {plan}: {where(found, first.double())}"
            for place in (0, 7, 63, rows // 2 + 5, rows - 1):
                mixed = x.clone()
                mixed[place] = row
                if place != 7:
                    mixed[place - 1], mixed[(place + 1) % rows] = torch.nan, torch.inf
                assert torch.equal(product.run(mixed, plan)[place], bits), (rows, place, plan)


def gated_product(launcher: Launcher, name: str, inner: int, depth: int, *, bias: bool, wide: bool) -> Product:
    """A product by gates and ups of a format; gates of bf16 have all magnitudes."""
    order = gate_up_permutation(inner)
    product = Product(launcher, 2 * inner, depth, order, bias=bias)
    if name == "bf16":
        product.packed.tiles[::7] *= 300
    else:
        parts = random_parts(name, 2 * inner, depth, wide=wide, device="cuda")
        product.packed = pack_matrix(DENSE_FORMATS[name], parts, order)
    return product


@pytest.mark.parametrize(
    ("name", "inner", "depth", "bias"),
    [
        ("bf16", 14336, 4096, False),
        ("bf16", 1000, 320, True),
        ("fp8", 14336, 4096, False),
        ("int4_64", 1000, 320, True),
    ],
)
def test_gated_products_are_the_product_its_activation_and_their_arrangement(
    launcher: Launcher, name: str, inner: int, depth: int, bias: bool
) -> None:
    """Bit for bit, under every tile; gates of all magnitudes, dead rows."""
    product = gated_product(launcher, name, inner, depth, bias=bias, wide=bias)
    assert segments_of(2 * inner, depth)[0] == 1
    for rows in (64, 768):
        x, row_live = random(rows, depth), (torch.arange(rows, device="cuda") % 5 > 0).byte()
        arranged = torch.empty(arranged_shape(rows, depth), device="cuda", dtype=torch.bfloat16)
        activated = torch.empty(rows, inner, device="cuda", dtype=torch.bfloat16)
        want, found = (torch.full(arranged_shape(rows, inner), torch.nan, device="cuda").bfloat16() for _ in range(2))
        launcher.run(*silu_mul(product.run(x), row_live, out=activated), *arrange(x=activated, out=want))
        launcher.run(*arrange(x=x, out=arranged))
        plans = {(plan.rows, plan.depth): plan for plan in reversed(product.plans(rows))}
        calls = {
            plan: gated_prefill_gemm(
                arranged=arranged, weight=product.packed, bias=product.bias, row_live=row_live, out=found,
                gpu=launcher.gpu, plan=plan,
            )
            for plan in plans.values()
        }  # fmt: skip
        launcher.compile_ahead(call for each in calls.values() for call in each)
        for plan, each in calls.items():
            found.fill_(torch.nan)
            launcher.run(*each)
            assert torch.equal(found.view(torch.int16), want.view(torch.int16)), (rows, plan)


@pytest.mark.parametrize(
    ("name", "inner", "depth", "activation", "rows", "every"),
    [
        ("bf16", 17408, 5120, "silu", 2048, True),
        ("bf16", 17408, 5120, "gelu_tanh", 128, True),
        ("fp8", 17408, 5120, "silu", 2048, False),
        ("int4_128", 17408, 5120, "silu", 2048, False),
        ("int4_64_zeros", 12288, 4096, "silu", 128, True),
        ("bf16", 2112, 2816, "gelu_tanh", 1024, True),
    ],
)
def test_gates_of_added_segments_are_the_product_its_activation_and_their_arrangement(
    launcher: Launcher, name: str, inner: int, depth: int, activation: str, rows: int, every: bool
) -> None:
    """Bit for bit, whether the block adds its segments up or a launch does; nothing is stored past the last step, where
    the last pair of blocks may have one too many.

    every  under every way to cut it, not the derived plan's alone
    """
    product = gated_product(launcher, name, inner, depth, bias=True, wide=False)
    x, row_live = random(rows, depth), (torch.arange(rows, device="cuda") % 5 > 0).byte()
    ways = {(plan.rows, plan.depth, plan.apart, plan.cluster): plan for plan in reversed(product.plans(rows))}
    plans = list(ways.values()) if every else product.plans(rows)[:1]
    steps, height, width = arranged_shape(rows, inner)
    arranged, want = (torch.empty(arranged_shape(rows, each), device="cuda").bfloat16() for each in (depth, inner))
    activated = torch.empty(rows, inner, device="cuda", dtype=torch.bfloat16)
    memory = torch.empty(steps + 1, height, width, device="cuda", dtype=torch.bfloat16)
    assert segments_of(2 * inner, depth)[0] > 1
    calls = {}
    for plan in plans:
        sums = torch.empty(partials_shape(plan, rows, 2 * inner, depth), device="cuda")
        calls[plan] = sums, gated_prefill_gemm(
            arranged=arranged, weight=product.packed, bias=product.bias, row_live=row_live, partials=sums,
            out=memory[:-1], activation=activation, gpu=launcher.gpu, plan=plan,
        )  # fmt: skip
    unfused = [
        *product.calls(rows, product.plans(rows)[0]),
        *silu_mul(torch.empty(rows, 2 * inner, device="cuda"), row_live, out=activated, activation=activation),
        *arrange(x=activated, out=want),
    ]
    launcher.compile_ahead([*unfused, *(call for _, each in calls.values() for call in each)])
    launcher.run(*silu_mul(product.run(x), row_live, out=activated, activation=activation))
    launcher.run(*arrange(x=activated, out=want), *arrange(x=x, out=arranged))
    assert want.isfinite().all() and want.count_nonzero() > want.numel() // 8
    for plan, (sums, each) in calls.items():
        sums.fill_(torch.nan)
        memory.fill_(torch.nan)
        launcher.run(*each)
        assert torch.equal(memory[:-1].view(torch.int16), want.view(torch.int16)), plan
        assert memory[-1].isnan().all(), plan


def test_a_row_that_is_not_finite_spoils_itself_alone(launcher: Launcher) -> None:
    product, x = Product(launcher, 6144, 4096), random(256, 4096)
    clean = product.run(x)
    x[100, 4000], x[3, 0] = torch.nan, torch.nan
    spoilt = product.run(x)
    others = [row for row in range(256) if row not in (3, 100)]
    assert torch.equal(spoilt[others], clean[others])
    assert spoilt[[3, 100]].isnan().all()


def test_launches_behind_each_other_do_not_meet(launcher: Launcher) -> None:
    products = [Product(launcher, width, depth) for width, depth in ((6144, 4096), (264, 1000), (2880, 4096))]
    rows = (192, 64, 512)
    chosen = [(product, random(count, product.weight.shape[1])) for count in rows for product in products]
    wanted = [product.run(x) for product, x in chosen]
    torch.cuda.synchronize()
    starts = [product.start(x) for product, x in chosen]
    for _ in range(20):
        found = [start() for start in starts]
    for each, want in zip(found, wanted, strict=True):
        assert torch.equal(each, want)
