"""Wide products without their instructions: the order of columns, arranging, adding, plans and refusals."""

from typing import Any

import pytest
import torch
from kernel_inventory import B200, GPUS
from kernel_walk import Walker, walkable
from quantised_layers import random_parts
from stages import later, wide
from walked_groups import walkable_groups

from lowlat.errors import ShapeError
from lowlat.kernels.formats import DENSE_FORMATS
from lowlat.kernels.formats.dense import pack_matrix, unpack_matrix
from lowlat.kernels.gemm.packing import PackedMatrix, gate_up_permutation, pack, rope_permutation, runs_of
from lowlat.kernels.gemm.prefill.activation_layout import arrange, arranged_shape, place_of
from lowlat.kernels.gemm.prefill.gemm import examples, prefill_gemm
from lowlat.kernels.gemm.prefill.plan import has_prefill_gemm, partials_shape, plan_prefill_gemm, plans_of, segments_of
from lowlat.kernels.toolchain.kernel import H200, Gpu

MATRICES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (5120, 2880), (2880, 4096), (200, 72), (8, 8))
ROWS = (*range(64, 1025, 64), 2048, 4096)


def arranged_by_hand(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    out = torch.zeros(arranged_shape(rows, columns), dtype=x.dtype)
    for row in range(rows):
        for column in range(columns):
            out[column // 64, row, place_of(row, column % 64)] = x[row, column]
    return out


def product_of_fragments(tile: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """One packed tile [1024] by an arranged step [M, 64], as lanes hold them and the instruction reads: [16, M]."""
    number_rows = rows.shape[0]
    swizzle = torch.arange(8)[None, :] ^ (torch.arange(number_rows) % 8)[:, None]
    pieces = rows.view(number_rows, 8, 8)[torch.arange(number_rows)[:, None], swizzle]
    second = pieces.reshape(number_rows, 4, 16)  # slices of 16 columns
    found = torch.zeros(16, number_rows, dtype=torch.float64)
    for part in range(4):
        first = torch.zeros(16, 16, dtype=torch.float64)
        half, slice_ = divmod(part, 2)
        for lane in range(32):
            g, t = divmod(lane, 4)
            for low, row in ((0, g), (1, g + 8)):
                words = tile[(low * 2 + half) * 256 + lane * 8 :][:8].view(4, 2)  # pairs of columns
                for position, word in ((2 * t, 2 * slice_), (2 * t + 8, 2 * slice_ + 1)):
                    first[row, position : position + 2] = words[word].double()
        found += first @ second[:, part].double().t()
    return found


def test_packed_weights_meet_arranged_columns() -> None:
    weight, x = torch.randn(16, 200).bfloat16(), torch.randn(24, 200).bfloat16()
    packed, arranged = pack(weight), arranged_by_hand(x)
    steps = range(packed.tiles.shape[1])
    found = torch.stack([product_of_fragments(packed.tiles[0, step], arranged[step]) for step in steps]).sum(0)
    assert torch.allclose(found, weight.double() @ x.double().t(), rtol=1e-12)


def test_places_of_a_row_are_a_permutation() -> None:
    for row in range(8):
        assert sorted(place_of(row, column) for column in range(64)) == list(range(64))


@pytest.mark.parametrize(("rows", "columns"), [(64, 72), (24, 200), (8, 64), (64, 8)])
def test_arranging_walked(rows: int, columns: int) -> None:
    walker, x = Walker(), torch.randn(rows, columns).bfloat16()
    out = torch.full(arranged_shape(rows, columns), torch.nan, dtype=torch.bfloat16)
    with walkable(walker, "gemm.prefill.activation_layout") as (module,):
        walker.run(*module.arrange(x=x, out=out))
    assert torch.equal(out, arranged_by_hand(x))


NAMES = ("gemm.prefill.plan", "gemm.prefill.gemm")
TWO_BLOCKS = Gpu(2, H200.shared_bytes, (9, 0))


def packed_weight(name: str, width: int, depth: int, order: torch.Tensor) -> tuple[PackedMatrix, torch.Tensor]:
    """A random weight in a format, packed, and what prefill takes it for, in float64."""
    if name == "bf16":
        weight = torch.randn(width, depth).bfloat16()
        return pack(weight, order), weight.double()
    packed = pack_matrix(DENSE_FORMATS[name], random_parts(name, width, depth, wide=width == 40), order)
    numbers = unpack_matrix(packed).double()
    numbers = numbers if packed.scales is None else numbers * packed.scales[:width, None]
    return packed, numbers[torch.argsort(order)]


@pytest.mark.parametrize(
    ("held", "rows", "width", "depth", "segments", "cut"),
    [
        ("bf16", 64, 136, 72, (1, 2), (64, 1, 3, False)),
        ("int4_32_zeros", 64, 40, 192, (2, 2), (64, 1, 2, False)),
        ("bf16", 128, 136, 256, (2, 2), (128, 2, 2, True)),
        ("fp8", 256, 136, 200, (2, 2), (256, 1, 3, True, 2)),
        ("nvfp4", 128, 136, 240, (2, 2), (128, 1, 2, True)),
        ("fp8_block", 128, 136, 120, (1, 2), (128, 2, 2, False)),
        wide("bf16", 512, 264, 200, (4, 1), (256, 1, 2, False, 2, 80)),
        ("fp8", 256, 72, 200, (2, 2), (256, 1, 2, False, 1, 80)),
    ],
)
@pytest.mark.second
def test_products_walked(
    held: str, rows: int, width: int, depth: int, segments: tuple[int, int], cut: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On a GPU of two SMs, so that blocks have several units; numbers of a quantised weight in bf16."""
    order = torch.arange(width).view(-1, 8).flip(0).reshape(-1)
    x, bias = torch.randn(rows, depth).bfloat16(), torch.randn(width)
    packed, weight = packed_weight(held, width, depth, order)
    bias, walker, out = bias.bfloat16(), Walker(), torch.full((rows, width), torch.nan)
    arranged = torch.full(arranged_shape(rows, depth), torch.nan, dtype=torch.bfloat16)
    with walkable_groups(walker, *NAMES) as (plans, module):
        for each in (plans, module):
            monkeypatch.setattr(each, "cut_of", lambda *_: segments)
        plan = plans.PrefillGemmPlan(*cut[:4], packed.tile_format.step_bytes, *cut[4:])
        monkeypatch.setattr(module, "plans_of", lambda *_: [plan])
        partials = torch.full((segments[0] if plan.apart else 0, rows, width), torch.nan)
        calls = module.prefill_gemm(
            x=x, weight=packed, bias=bias[order], columns=runs_of(order), arranged=arranged,
            partials=partials, out=out, gpu=TWO_BLOCKS, plan=plan,
        )  # fmt: skip
        walker.run(*calls)
    want = x.double() @ weight.t() + bias.double()
    assert float((out.double() - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize(
    ("held", "rows", "inner", "segments", "activation", "cut"),
    [
        ("bf16", 128, 72, (1, 2), "silu", (64, 1, 2, False)),
        ("fp8", 128, 72, (1, 2), "silu", (128, 1, 2, False)),
        later("int4_32_zeros", 128, 72, (1, 2), "silu", (128, 2, 2, False)),
        ("bf16", 64, 72, (2, 1), "gelu_tanh", (64, 1, 2, False)),
        ("bf16", 64, 72, (3, 1), "silu", (64, 1, 2, True)),
        later("nvfp4", 128, 136, (2, 2), "silu", (128, 1, 2, False, 2)),
        later("fp8", 256, 40, (2, 2), "silu", (256, 1, 2, False, 1, 80)),
        later("fp8", 64, 40, (2, 2), "gelu_tanh", (64, 2, 2, True)),
        wide("bf16", 256, 136, (4, 1), "gelu_tanh", (256, 1, 2, False, 2, 80)),
        wide("int4_32_zeros", 128, 72, (2, 2), "silu", (64, 2, 2, False)),
        wide("int4_32_zeros", 128, 136, (2, 2), "silu", (128, 1, 2, True)),
    ],
)
def test_gated_products_walked(
    held: str, rows: int, inner: int, segments: tuple[int, int], activation: str, cut: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The bits of the product, its activation and their arrangement one by one, however segments are added up; dead
    rows and further columns zero.
    """
    depth, order = 64 * segments[0] * segments[1] - 32, gate_up_permutation(inner)
    x = 4 * torch.randn(rows, depth).bfloat16()
    packed, _ = packed_weight(held, 2 * inner, depth, order)
    bias, walker, row_live = torch.randn(2 * inner).bfloat16(), Walker(), (torch.arange(rows) % 5 > 0).byte()
    arranged, activated = arranged_by_hand(x), torch.full((rows, inner), torch.nan, dtype=torch.bfloat16)
    product = torch.full((rows, 2 * inner), torch.nan)
    out, again = (torch.full(arranged_shape(rows, inner), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    with walkable_groups(walker, *NAMES, "elementwise.elementwise") as (plans, module, elementwise):
        for each in (plans, module):
            monkeypatch.setattr(each, "cut_of", lambda *_: segments)
        plan = plans.PrefillGemmPlan(*cut[:4], packed.tile_format.step_bytes, *cut[4:])
        monkeypatch.setattr(module, "plans_of", lambda *_: [plan])
        given = {"arranged": arranged, "weight": packed, "bias": bias[order], "gpu": TWO_BLOCKS, "plan": plan}
        sums = [torch.full((segments[0] if plan.apart else 0, rows, 2 * inner), torch.nan) for _ in range(2)]
        walker.run(*module.arranged_prefill_gemm(**given, columns=runs_of(order), partials=sums[0], out=product))
        gated = {"row_live": row_live, "partials": sums[1], "out": out, "activation": activation}
        calls = module.gated_prefill_gemm(**given, **gated)
        assert len(calls) == 1 + plan.apart
        walker.run(*calls)
        walker.run(*elementwise.silu_mul(product, row_live, out=activated, activation=activation))
        walker.run(*module.arrange(x=activated, out=again))
    assert torch.equal(product.isfinite(), torch.ones_like(product, dtype=torch.bool))
    assert torch.equal(out.view(torch.int16), again.view(torch.int16))
    gate, up = product.double().split(inner, 1)
    inner_gate = gate if activation == "silu" else 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    want = (gate * torch.sigmoid(inner_gate) * up).bfloat16() * row_live[:, None].bool()
    assert torch.allclose(out.float(), arranged_by_hand(want).float(), rtol=2**-7, atol=1e-30)
    assert float((out == arranged_by_hand(want)).float().mean()) > 0.99


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("order", [None, gate_up_permutation(24)])
def test_segments_are_added_in_their_order(order: torch.Tensor | None, with_bias: bool) -> None:
    segments, rows, width = 3, 5, 48
    partials, walker = torch.randn(segments, rows, width), Walker()
    bias = torch.randn(width).bfloat16() if with_bias else None
    columns = None if order is None else runs_of(order)
    want = partials[0] + partials[1] + partials[2]
    want = want if bias is None else want + bias.float()
    if order is not None:
        want = torch.empty_like(want).index_copy_(1, order, want)
    out = torch.full((rows, width), torch.nan)
    with walkable(walker, "gemm.prefill.split_k_sum") as (module,):
        walker.run(*module.add_segments(partials=partials, bias=bias, columns=columns, out=out))
    assert torch.equal(out, want)


@pytest.mark.parametrize("order", [gate_up_permutation(40), rope_permutation(3, 1, 64), torch.arange(24)])
def test_runs_restore_an_order(order: torch.Tensor) -> None:
    runs = runs_of(order)
    assert runs.dtype == torch.int32 and runs.shape == (len(order) // 8,)
    assert torch.equal((runs[:, None] + torch.arange(8)).flatten().long(), order)


@pytest.mark.parametrize("order", [torch.arange(24).flip(0), torch.arange(12), torch.arange(16).view(2, 8)])
def test_orders_without_runs_are_refused(order: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match="runs of 8"):
        runs_of(order)


def test_plans_fit_and_cover_a_product() -> None:
    for width, depth in MATRICES:
        segments, length = segments_of(width, depth)
        assert (segments - 1) * length < -(-depth // 64) <= segments * length
        for rows in ROWS:
            plans = plans_of(rows, width, depth, H200)
            assert plan_prefill_gemm(rows, width, depth, H200) in plans
            for plan in plans:
                assert rows % plan.rows == 0 and plan.stages >= 2 and plan.shared_bytes <= H200.shared_bytes
                assert length % plan.depth == 0 and plan.apart <= (segments > 1)
                assert partials_shape(plan, rows, width, depth) == (segments if plan.apart else 0, rows, width)


def test_segments_know_no_gpu_and_no_rows() -> None:
    """Bits depend on them: another choice is another result."""
    assert [segments_of(*matrix) for matrix in MATRICES[:4]] == [(2, 32), (4, 16), (1, 64), (4, 56)]


@pytest.mark.parametrize(
    ("rows", "width", "depth", "gpu", "message"),
    [
        (32, 64, 64, H200, "multiple of 64 rows"),
        (4160, 64, 64, H200, "up to 4096"),
        (64, 60, 64, H200, "multiples of 8"),
        (64, 64, 60, H200, "multiples of 8"),
        (64, 64, 64, B200, "capability 9.0, not 10.0"),
        (64, 64, 64, Gpu(132, 32 * 1024, (9, 0)), "shared memory"),
    ],
)
def test_what_does_not_fit_is_refused(rows: int, width: int, depth: int, gpu: Gpu, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        plan_prefill_gemm(rows, width, depth, gpu)


def arguments(rows: int = 64, width: int = 4096, depth: int = 4096, **changes: Any) -> dict[str, Any]:
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    return {
        "x": torch.empty(rows, depth, **bf16),
        "weight": pack(torch.empty(width, depth, **bf16)),
        "arranged": torch.empty(arranged_shape(rows, depth), **bf16),
        "partials": torch.empty(segments_of(width, depth)[0], rows, width, device="meta"),
        "out": torch.empty(rows, width, device="meta"),
        "gpu": H200,
        **changes,
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.empty(64, 4096), "of bf16"),
        ("partials", None, "need a workspace"),
        ("plan", plan_prefill_gemm(128, 4096, 4096, H200), "no plan for 64 rows"),
        ("gpu", B200, "capability 9.0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name: str, value: Any, message: str) -> None:
    assert prefill_gemm(**arguments())
    with pytest.raises(ShapeError, match=message):
        prefill_gemm(**arguments(**{name: value}))


def test_rows_that_cannot_be_copied_16_bytes_at_a_time_are_not_arranged() -> None:
    with pytest.raises(ShapeError, match="multiple of 8 wide"):
        arrange(x=torch.empty(64, 60), out=torch.empty(1, 64, 64))


def test_launches_are_two_or_three() -> None:
    whole = plan_prefill_gemm(512, 4096, 4096, H200)
    assert len(prefill_gemm(**arguments(512, plan=whole))) == 2 + whole.apart
    assert len(prefill_gemm(**arguments(64))) == 3


def test_only_one_capability_has_it() -> None:
    assert [capability for capability, gpu in GPUS.items() if has_prefill_gemm(gpu)] == [(9, 0)]
    assert all(bool(examples(gpu)) == has_prefill_gemm(gpu) for gpu in GPUS.values())
    assert all(kernel.specific for kernel in examples())
