"""The expansion of packed experts, walked thread by thread: bit for bit what torch's unpacking gives, in place."""

from typing import Any

import pytest
import torch
from expert_cases import all_codes_and_scales
from kernel_walk import Walker, walkable

from lowlat.errors import ShapeError
from lowlat.kernels.expand_expert import expand_experts
from lowlat.kernels.expert_packing import PackedExperts, pack_experts, unpack_expert

FILL = 1234.0


def walked(packed: PackedExperts, ids: list[int]) -> torch.Tensor:
    """Of one more matrix than was asked for, so that a store past the last one is seen."""
    out = torch.full((len(ids) + 1, packed.rows, packed.columns), FILL, dtype=torch.bfloat16)
    order = None if packed.order is None else packed.order.int()
    walker = Walker()
    with walkable(walker, "experts_multiply", "expand_expert") as (_, module):
        chosen = torch.tensor(ids, dtype=torch.int32)
        for call in module.expand_experts(packed, chosen, out=out[: len(ids)], order=order):
            walker.run(call)
    assert bool((out[-1] == FILL).all())
    return out[:-1]


def same_bits(found: torch.Tensor, packed: PackedExperts, ids: list[int]) -> bool:
    wanted = torch.stack([unpack_expert(packed, expert) for expert in ids])
    return torch.equal(found.view(torch.int16), wanted.view(torch.int16))


def random_experts(rows: int, columns: int, quantised: bool, ordered: bool) -> PackedExperts:
    order = torch.randperm(rows) if ordered else None
    if not quantised:
        return pack_experts(weight=torch.randn(3, rows, columns).bfloat16(), order=order)
    blocks = torch.randint(0, 256, (3, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(1, 192, blocks.shape[:-1], dtype=torch.uint8)
    return pack_experts(blocks=blocks, scales=scales, order=order)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "quantised"),
    [(16, 64, True), (41, 96, True), (9, 352, True), (16, 64, False), (41, 72, False), (7, 8, False)],
)
def test_an_expansion_is_the_unpacked_matrix(rows: int, columns: int, quantised: bool, ordered: bool) -> None:
    """Rows and columns that fill no tile; more tiles than a block has warps; experts in any order, one twice."""
    packed = random_experts(rows, columns, quantised, ordered)
    assert same_bits(walked(packed, [2, 0, 2]), packed, [2, 0, 2])


def test_every_code_at_every_scale_is_exact() -> None:
    packed = all_codes_and_scales()
    assert same_bits(walked(packed, [0]), packed, [0])


def test_what_does_not_fit_is_refused() -> None:
    packed, ids = random_experts(16, 64, True, True), torch.tensor([0, 1], dtype=torch.int32)
    assert packed.order is not None
    fine: dict[str, Any] = {"out": torch.zeros(2, 16, 64).bfloat16(), "order": packed.order.int()}
    assert len(expand_experts(packed, ids, **fine)) == 1
    for changes, match in (
        ({"out": fine["out"][:1]}, "out must have shape"),
        ({"out": fine["out"].float()}, "out must be torch.bfloat16"),
        ({"order": packed.order}, "order must be torch.int32"),
        ({"order": packed.order.int()[:8]}, "order must have shape"),
        ({"order": None}, "an order of their own"),
    ):
        with pytest.raises(ShapeError, match=match):
            expand_experts(packed, ids, **(fine | changes))
    with pytest.raises(ShapeError, match="at least one"):
        expand_experts(packed, ids[:0], **(fine | {"out": fine["out"][:0]}))
    with pytest.raises(ShapeError, match="expert_ids must be"):
        expand_experts(packed, ids.long(), **fine)
    odd = pack_experts(weight=torch.zeros(1, 16, 20).bfloat16())
    with pytest.raises(ShapeError, match="multiple of 8, got 20"):
        expand_experts(odd, ids[:1], out=torch.zeros(1, 16, 20).bfloat16())
