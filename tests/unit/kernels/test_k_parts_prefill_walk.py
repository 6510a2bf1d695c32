"""Prefill's products whose K is summed in parts, walked thread by thread on a CPU: the bits of parts summed alone and
added as a tree, however many GPUs have them.
"""

import itertools
from typing import Any

import pytest
import torch
from all_reduce_cases import tree_sum
from kernel_walk import Walker, walkable
from quantised_layers import random_parts
from stages import wide
from walked_groups import walkable_groups

from lowlat.errors import ShapeError
from lowlat.kernels.formats import matrix_format
from lowlat.kernels.formats.dense import pack_matrix
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.packing import PackedMatrix, pack, runs_of
from lowlat.kernels.gemm.prefill.activation_layout import arranged_shape
from lowlat.kernels.gemm.prefill.plan import PrefillGemmPlan, cut_of, plans_of, segments_of
from lowlat.kernels.reference.collectives.cuts import bounds
from lowlat.kernels.toolchain.kernel import H200, Gpu

pytestmark = pytest.mark.second

NAMES = ("gemm.k_parts", "gemm.prefill.plan", "gemm.prefill.gemm")
TWO_BLOCKS = Gpu(2, H200.shared_bytes, (9, 0))


def part_of(held: dict[str, torch.Tensor], columns: int, span: slice) -> dict[str, torch.Tensor]:
    """The parts of some columns of a matrix."""
    own = {}
    for name, each in held.items():
        spread = columns // each.shape[1] if each.dim() > 1 and each.shape[1] > 1 else 0
        own[name] = each[:, span.start // spread : -(-span.stop // spread)].contiguous() if spread else each
    return own


def packed(held: dict[str, torch.Tensor], order: torch.Tensor) -> PackedMatrix:
    """A matrix, packed."""
    return pack(held["weight"], order) if "weight" in held else pack_matrix(matrix_format(held), held, order)


def multiplied(
    x: torch.Tensor, weight: PackedMatrix, bias: torch.Tensor | None, columns: torch.Tensor, count: int, number: int
) -> torch.Tensor:
    """A rank's product of so many parts, by one of its plans."""
    rows, width, depth = x.shape[0], weight.rows, x.shape[1]
    out = torch.full((rows, width), torch.nan)
    arranged = torch.full(arranged_shape(rows, depth), torch.nan, dtype=torch.bfloat16)
    with walkable_groups(walker := Walker(late=number % 2 == 0), *NAMES) as modules:
        cut, plans, module = modules
        parts = cut.KParts(count, 1)
        every = plans.plans_of(rows, width, depth, TWO_BLOCKS, weight.tile_format, parts)
        plan = min(every, key=lambda plan: (plan.rows > 128, plan.stages, (plan.rows + number) % 3))
        partials = torch.full((count if plan.apart else 0, rows, width), torch.nan)
        given: Any = {"x": x, "weight": weight, "bias": bias, "columns": columns, "arranged": arranged}
        given |= {"partials": partials, "parts": parts, "gpu": TWO_BLOCKS, "plan": plan}
        walker.run(*module.prefill_gemm(**given, out=out))
    return out


@pytest.mark.parametrize(("name", "steps"), [("bf16", 5), wide("nvfp4", 6), wide("int4_32_zeros", 8)])
def test_any_number_of_ranks_has_the_tree_of_eight_parts(name: str, steps: int) -> None:
    """The first part has the bias, rows' scales apply to each part, and columns are the original ones; some parts may
    have no columns."""
    rows, width, columns = 64, 40, 64 * steps
    order = torch.arange(width).view(-1, 8).flip(0).reshape(-1)
    x, bias = torch.randn(rows, columns).bfloat16(), torch.randn(width).bfloat16()
    held = {"weight": torch.randn(width, columns).bfloat16() / 8} if name == "bf16" else {}
    held = held or random_parts(name, width, columns, wide=True)

    def by_ranks(size: int) -> list[torch.Tensor]:
        ends, found = [64 * end for end in bounds(steps, size, 1)], []
        for number, (start, stop) in enumerate(itertools.pairwise(ends)):
            if start == stop:
                found.append(torch.zeros(rows, width))
                continue
            own = packed(part_of(held, columns, slice(start, stop)), order)
            given = None if number else bias[order]
            found.append(multiplied(x[:, start:stop].contiguous(), own, given, runs_of(order), 8 // size, number))
        return found

    whole = tree_sum(by_ranks(8))
    expected = x.double() @ matrix_format(held).dequantise(held, torch.float32).double().t() + bias.double()
    assert float((whole.double() - expected).norm() / expected.norm()) < 3e-3
    for size in (1, 4):
        assert torch.equal(tree_sum(by_ranks(size)), whole), size


@pytest.mark.parametrize("order", [None, torch.arange(48).view(-1, 8).flip(0).reshape(-1)])
def test_parts_are_added_as_a_tree(order: torch.Tensor | None) -> None:
    """Each part times the scale, the first plus the bias; those without columns are zero."""
    rows, width = 5, 48
    partials, scales, bias = torch.randn(8, rows, width), torch.rand(64), torch.randn(width).bfloat16()
    parts = list(partials * scales[:width])
    parts[0] = parts[0] + bias.float()
    partials[[3, 5, 7]], columns = torch.nan, None if order is None else runs_of(order)
    for number in (3, 5, 7):
        parts[number] = torch.zeros(rows, width)
    want, out = tree_sum(parts), torch.full((rows, width), torch.nan)
    if order is not None:
        want = torch.empty_like(want).index_copy_(1, order, want)
    with walkable(walker := Walker(), "gemm.k_parts", "gemm.prefill.parts_sum") as modules:
        module: Any = modules[-1]
        given = {"partials": partials, "scales": scales, "bias": bias, "columns": columns, "out": out}
        walker.run(*module.add_parts(**given, parts=KParts(8, 1), steps=5))
    assert torch.equal(out, want)


def test_the_order_of_sums_does_not_depend_on_the_width() -> None:
    """Parts are cut by K alone, where segments are cut by the width, too."""
    assert len({segments_of(width, 4096) for width in (4096, 28672)}) == 2
    for parts in (KParts(1, 1), KParts(8, 1), KParts(4, 2)):
        assert len({cut_of(width, 4096, parts) for width in (1024, 4096, 28672)}) == 1
    plans = plans_of(1024, 4096, 14336, H200, parts=KParts(8, 1))
    assert all(plan.apart and plan.rows < 256 for plan in plans)
    assert all(not plan.apart for plan in plans_of(2048, 4096, 14336, H200, parts=KParts(1, 1)))
    assert all(plan.depth == 1 for plan in plans_of(512, 4096, 2944, H200, parts=KParts(8, 1)))
    assert PrefillGemmPlan(128, 2, 2, True) not in plans
    with pytest.raises(ShapeError, match="8 parts of K takes at most 1024 rows, got 2048"):
        plans_of(2048, 4096, 14336, H200, parts=KParts(8, 1))
