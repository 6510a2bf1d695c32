"""SpecPV's operations against plain torch written after its authors' code, and against attention over everything."""

import pytest
import torch
from attention_cases import chain, tree
from partial_cases import PartialCase

from lowlat.kernels import reference


@pytest.mark.parametrize("length", [161, 384, 415])
def test_blocks_are_those_that_the_authors_choose(length: int) -> None:
    case = PartialCase(length, dtype=torch.float32)
    case.choose()
    assert torch.equal(case.listed(), case.positions())
    first = 4 + case.left_out  # the window's first part, which the lists go on with
    entries = case.table[0, first // 2] * 2 + first % 2
    assert (case.lists[1, :, 4] == entries).all() and (case.lists[0] == -1).all()
    assert (case.lists[1, :, case.lists.shape[2] - case.left_out :] == 0).all()


def test_summaries_of_new_keys_alone_are_renewed() -> None:
    case, other = PartialCase(203), PartialCase(203)
    reference.partial.summarise_blocks(**case.span())
    reference.partial.summarise_blocks(**other.span(100))
    changed = (case.summary != other.summary).flatten(3).any(-1)[case.table[0].long()].any(1).flatten()
    assert changed.tolist() == [place < 100 // 16 for place in range(len(changed))]


@pytest.mark.parametrize("masks", [chain(4), tree(6, 1)], ids=["chain", "tree"])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_over_a_list_is_that_over_its_positions(masks: list[int], sinks: bool) -> None:
    case = PartialCase(390, dtype=torch.float32)
    case.choose()
    given = case.attended(masks, torch.tensor([0.5, -1.0, 2.0, 0.0]) if sinks else None)
    reference.partial.partial_attention(**given)
    keys, values = case.dense()
    window = torch.arange((4 + case.left_out) * 16, case.length).expand(2, -1)
    for row, mask in enumerate(masks):
        own = torch.tensor([case.length + bit for bit in range(6) if mask >> bit & 1]).expand(2, -1)
        seen = torch.cat((case.listed(), window, own), 1)
        for head in range(4):
            scores = keys[head // 2, seen[head // 2]] @ given["q"][row, head] * given["scale"]
            if sinks:
                scores = torch.cat((scores, given["sinks"][head : head + 1]))
            weights = scores.softmax(0)[: seen.shape[1]]
            wanted = weights @ values[head // 2, seen[head // 2]]
            torch.testing.assert_close(given["out"][row, head * 64 : head * 64 + 64], wanted, atol=1e-5, rtol=1e-4)
    assert not given["out"][len(masks) :].any()


@pytest.mark.parametrize("masks", [chain(3), tree(5, 2)], ids=["chain", "tree"])
def test_a_list_of_everything_has_the_bits_of_attention(masks: list[int]) -> None:
    case = PartialCase(300)
    case.left_out, case.shifts[1] = 0, 0
    case.choose()
    given = case.attended(masks)
    reference.partial.partial_attention(**given)
    others = {name: value for name, value in given.items() if name not in ("block", "block_lists", "out")}
    wanted = torch.empty_like(given["out"])
    reference.attention.attention(**others, block_table=case.table.expand(2, -1), out=wanted)
    assert torch.equal(given["out"], wanted)


def test_positions_of_a_list_leave_out_the_shift() -> None:
    lens, slots = torch.tensor([100, 50, 9], dtype=torch.int32), torch.tensor([2, 0, -1], dtype=torch.int32)
    out = torch.empty(3, dtype=torch.int32)
    reference.partial.list_lens(lens, slots, torch.tensor([0, 7, 32], dtype=torch.int32), out=out)
    assert out.tolist() == [68, 50, 9]
