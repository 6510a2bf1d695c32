"""Down GEMMs of an MoE layer whose K is summed in parts, walked thread by thread on a CPU: the bits of parts summed
alone and added as a tree, however many GPUs have them; few rows and many.
"""

import itertools
from typing import Any

import pytest
import torch
from all_reduce_cases import tree_sum
from expert_cases import Experts, choices, make_experts, shares_of
from kernel_walk import Walker, walkable
from moe_cases import Poisoned
from moe_walk import small_gpu
from stages import wide

from lowlat.errors import ShapeError
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.moe.decode.experts import experts_down
from lowlat.kernels.moe.packing import PackedExperts, pack_experts
from lowlat.kernels.reference.collectives.cuts import bounds
from lowlat.kernels.reference.moe.experts import experts_down as reference

pytestmark = pytest.mark.second

DECODE, PREFILL = "moe.decode.experts", "moe.prefill.experts"
NUM_EXPERTS = 3


def of_columns(experts: Experts, start: int, stop: int) -> PackedExperts:
    """Some columns of all matrices, packed."""
    if "weight" in experts.matrices:
        return pack_experts({"weight": experts.matrices["weight"][:, :, start:stop].contiguous()})
    own = {name: part[:, :, start // 32 : stop // 32].contiguous() for name, part in experts.matrices.items()}
    return pack_experts(own)


class Case:
    """Random rows with experts of an MoE layer, summed by so many ranks."""

    def __init__(self, rows: int, top_k: int, width: int, steps: int, quantised: bool, kind: str = "random") -> None:
        self.steps, self.width = steps, width
        self.experts = make_experts(NUM_EXPERTS, width, 64 * steps, quantised=quantised, gated=False)
        self.ids = choices(kind, rows, top_k, NUM_EXPERTS)
        self.ids[1::3] = -1
        self.shares = shares_of(self.ids)
        self.activated = torch.randn(rows, top_k, 64 * steps).bfloat16()
        self.activated[self.ids < 0] = torch.nan

    def by_ranks(self, size: int, prefill: bool, **changes: int) -> list[torch.Tensor]:
        """Return the output of each of `size` ranks; the first adds the biases."""
        found, ends = [], [64 * end for end in bounds(self.steps, size, 1)]
        for number, (start, stop) in enumerate(itertools.pairwise(ends)):
            out = torch.full((len(self.ids), self.width), torch.nan)
            if start == stop:
                found.append(out.zero_())
                continue
            given: dict[str, Any] = {
                "activated": self.activated[:, :, start:stop].contiguous(), "expert_ids": self.ids, "out": out,
                "expert_weights": self.shares, "experts": of_columns(self.experts, start, stop),
                "bias": None if number else self.experts.bias, "workspace": Poisoned(), "gpu": small_gpu(3),
            }  # fmt: skip
            with walkable(
                walker := Walker(late=number % 2 == 0, may_leave=prefill), PREFILL if prefill else DECODE
            ) as modules:
                module, parts = modules[-1], KParts(8 // size, 1)
                if prefill:
                    walker.run(*module.prefill_down(**given, parts=parts))
                else:
                    calls = module.experts_down(**given, parts=parts)
                    walker.run(*calls)
            found.append(out)
        return found

    def check(self, prefill: bool) -> None:
        """The tree over eight parts that are summed alone, by any number of ranks, near what the reference has."""
        whole, expected = tree_sum(self.by_ranks(8, prefill)), torch.empty(len(self.ids), self.width)
        live = self.activated.masked_fill(self.ids[..., None] < 0, 0)
        given: Any = {"bias": self.experts.bias, **self.experts.matrices, "out": expected}
        reference(live, self.ids, self.shares, **given, num_parts=8, unit=64)
        assert float((whole - expected).norm() / expected.norm()) < 1e-5
        assert bool(whole[self.ids[:, 0] < 0].eq(0).all())
        for size in (1, 4):
            assert torch.equal(tree_sum(self.by_ranks(size, prefill)), whole), size


@pytest.mark.parametrize(
    ("rows", "top_k", "width", "steps", "quantised", "kind"),
    [
        (1, 2, 16, 9, False, "random"),
        wide(4, 2, 32, 33, True, "random"),  # parts of more steps than are copied at once
        wide(3, 2, 48, 5, True, "random"),  # some parts have no columns, and tiles come alone
    ],
)
def test_few_rows(rows: int, top_k: int, width: int, steps: int, quantised: bool, kind: str) -> None:
    Case(rows, top_k, width, steps, quantised, kind).check(prefill=False)


@pytest.mark.parametrize(("rows", "top_k", "width", "steps", "quantised"), [(17, 2, 36, 9, True)])
@pytest.mark.wide
def test_many_rows(rows: int, top_k: int, width: int, steps: int, quantised: bool) -> None:
    Case(rows, top_k, width, steps, quantised).check(prefill=True)


def test_parts_without_whole_steps_are_refused() -> None:
    experts = make_experts(2, 32, 96, quantised=False, gated=False).packed
    ids = torch.zeros(1, 1, dtype=torch.int32)
    given: dict[str, Any] = {"experts": experts, "out": torch.empty(1, 32), "workspace": Poisoned()}
    with pytest.raises(ShapeError, match="whole steps of 64 columns, not 96 in 8"):
        experts_down(torch.zeros(1, 1, 96).bfloat16(), ids, torch.ones(1, 1), **given, parts=KParts(8, 1))
