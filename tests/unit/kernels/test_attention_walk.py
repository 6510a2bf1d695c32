"""The attention kernels themselves, walked thread by thread on a CPU: what they compute, read and leave alone.

Small sizes; the walker checks every address, and copies arrive both as late and as early as they can.
"""

import math
from typing import Any

import pytest
import torch
from attention_cases import Case, chain, check, tree
from kernel_walk import Walker, walkable

NAMES = ("plan", "copy", "tile", "merge", "combine")
HEAD_DIM = 64


def run(case: Case, late: bool, **options: Any) -> torch.Tensor:
    """The kernels' result; every float of the workspace is NaN at first."""
    out = torch.full_like(case.q.reshape(case.q.shape[0], -1), math.nan)

    def workspace(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, math.nan if dtype.is_floating_point else 0, dtype=dtype)

    walker = Walker(late, may_leave=True)
    with walkable(walker, *(f"attention_{name}" for name in NAMES), "attention") as modules:
        calls = modules[-1].attention(
            **case.arguments(), **case.options, **options, out=out, workspace=workspace, early_metadata=True
        )
        for call in calls:
            walker.run(call)
    return out


@pytest.mark.parametrize(
    ("lengths", "rows", "late"),
    [([200], "one", False), ([0, 130], "chain", True), ([191], "tree", False), ([64, 40], "dead", True)],
)
def test_a_short_window_is_the_reference_s(lengths: list[int], rows: str, late: bool) -> None:
    """Windows of three and four tiles, of one, and of none; rows that begin elsewhere; a dead row among live ones."""
    masks = {"one": [1], "chain": chain(3), "tree": tree(3, 2), "dead": chain(2)}[rows]
    kv_heads = 2 if rows == "one" else 1
    case = Case(
        lengths, [masks] * len(lengths), head_dim=HEAD_DIM, group=2, kv_heads=kv_heads, block=16, device="cpu",
        window=128, live=[1, 0, 1, 1] if rows == "dead" else None,
        sinks=torch.tensor([0.5, -3.0, 1.5, 0.0][: 2 * kv_heads]),
    )  # fmt: skip
    check(run(case, late, num_blocks=3 if rows == "one" else 2), case.expected())  # one block more than there are items


@pytest.mark.parametrize(("rows", "late"), [("chain", True), ("tree", False)])
def test_splits_and_their_sum_are_the_reference_s(rows: str, late: bool) -> None:
    """Two splits, and one; a slot's pipeline begins while another's ends; a tree's rows one after the other."""
    lengths, masks, kv_heads = ([290, 70], chain(2), 2) if rows == "chain" else ([290], tree(3, 2), 1)
    case = Case(lengths, [masks] * len(lengths), head_dim=HEAD_DIM, group=2, kv_heads=kv_heads, block=16, device="cpu")
    check(run(case, late, num_blocks=3), case.expected())


def test_a_row_has_the_same_bits_in_any_company() -> None:
    case = Case([130], [chain(3)], head_dim=HEAD_DIM, group=2, block=16, device="cpu", window=100)
    together = run(case, True, num_blocks=2)
    case.live = torch.tensor([0, 1, 0], dtype=torch.uint8)
    alone = run(case, False, num_blocks=1)
    assert torch.equal(alone[1], together[1]) and not alone[[0, 2]].any()


def test_a_row_whose_window_begins_later_than_its_neighbours_has_the_bits_of_the_row_alone() -> None:
    """Tiles 0 to 3 are read for three rows together, 1 to 3 for the last alone: the same warps must add up the same
    tiles. Values that all but cancel show the order: what they leave depends on when the smallest comes."""
    case = Case([190], [chain(3)], head_dim=HEAD_DIM, group=2, block=16, device="cpu", window=128)
    case.q.zero_()
    for position in range(64, 193):  # all of the last row's weights are equal
        value = 1.0 if position == 192 else 2.0**26 if position < 128 else -(2.0**26)
        page = int(case.table[0, position // 16])
        case.caches[1][page, :, position % 16] = 0.0 if position in (64, 128) else value
    together = run(case, True, num_blocks=1)
    case.q, case.lengths, case.masks = case.q[2:3], [192], [[1]]
    case.live = torch.ones(1, dtype=torch.uint8)
    assert torch.equal(run(case, False, num_blocks=1)[0], together[2])
