"""Keys and values of prefill stored to the caches, walked thread by thread on a CPU."""

from typing import Any

import pytest
import torch
from kernel_walk import Walker, walkable
from kv_write_cases import Chunk

from lowlat.errors import ShapeError
from lowlat.kernels import reference

CASES = [
    Chunk(32, 0, 32),
    Chunk(32, 0, 32, dead=(0,)),
    Chunk(32, 96, 17, heads=3),
    Chunk(32, 32, 0),
    Chunk(48, 240, 48, heads=5, block=8, dim=8),
    Chunk(32, 96, 17, heads=3, coded=True),
    Chunk(2, 30, 2, heads=9, dim=128),  # several turns of a block's threads
]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_rows_are_stored_where_the_reference_stores_them(case: Chunk) -> None:
    found, expected = case.arrays(), case.arrays()
    with walkable(walker := Walker(), "attention.kv_write") as modules:
        kernels: Any = modules[-1]
        walker.run(*kernels.prefill_kv_write(**found))
    reference.kv.prefill_kv_write(**expected)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(found[name], expected[name]), name
        assert torch.equal(found[name], case.arrays()[name]) == (case.live == 0)


def test_a_slot_s_table_is_put_in_its_place() -> None:
    """Of more blocks than a block has threads; the tables of other slots stay as they are."""
    torch.manual_seed(0)
    table, slot = torch.randint(1, 1 << 20, (1, 515)).int(), torch.tensor([2], dtype=torch.int32)
    found = torch.randint(1, 1 << 20, (4, 515)).int()
    expected, before = found.clone(), found.clone()
    with walkable(walker := Walker(), "attention.place_table") as modules:
        kernels: Any = modules[-1]
        walker.run(*kernels.place_table(table, slot, block_table=found))
    reference.kv.place_table(table, slot, block_table=expected)
    assert torch.equal(found, expected) and torch.equal(found[2], table[0])
    assert torch.equal(found[[0, 1, 3]], before[[0, 1, 3]])
    for wrong in (table[0], table[:, 1:], table.long()):
        with pytest.raises(ShapeError):
            kernels.place_table(wrong, slot, block_table=found)
