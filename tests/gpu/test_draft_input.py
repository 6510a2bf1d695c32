"""The head's attention input on a GPU: accepted rows, and deeper levels of the tree."""

from typing import Any

import pytest
import torch
from draft_input_cases import check_block_input, check_chain_level, check_draft_input, check_level_input
from rowwise_cases import EPS, Lab, canonical_norm, poison, same_bits, weights

from lowlat.kernels.speculation.draft_input import concat_norms, draft_input


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("batch", "rows", "width"), [(1, 1, 24), (1, 4, 4096), (4, 4, 2880), (8, 2, 5120), (2, 8, 8192)]
)
def test_accepted_rows(lab: Lab, batch: int, rows: int, width: int, packed: bool) -> None:
    check_draft_input(lab, batch, rows, width, packed=packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("batch", "wide", "above", "width"), [(1, 1, 1, 24), (1, 1, 1, 4096), (4, 6, 8, 2880), (5, 8, 3, 5120)]
)
def test_levels(lab: Lab, batch: int, wide: int, above: int, width: int, packed: bool) -> None:
    check_level_input(lab, batch, wide, above, width, packed=packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("batch", "width"), [(1, 24), (1, 4096), (3, 2880), (8, 8192)])
def test_levels_of_a_chain(lab: Lab, batch: int, width: int, packed: bool) -> None:
    for masked in (False, True):
        check_chain_level(lab, batch, width, packed=packed, masked=masked)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("accepted", "drafting", "width"), [(8, 7, 4096), (4, 3, 2880), (1, 2, 24), (6, 5, 8192)])
def test_blocks(lab: Lab, accepted: int, drafting: int, width: int, packed: bool) -> None:
    for kept in (True, False):
        check_block_input(lab, accepted, drafting, width, packed=packed, kept=kept)


def test_halves_have_the_bits_of_plain_norms_in_any_company(lab: Lab) -> None:
    width, table = 2880, torch.randn(50, 2880).bfloat16()
    tokens, hidden = torch.randint(0, 50, (6,)).int(), torch.randn(6, width).bfloat16()
    norms: dict[str, Any] = {"embed_weight": weights(width), "hidden_weight": weights(width), "eps": EPS}
    left = canonical_norm(table[tokens.long()], norms["embed_weight"], EPS)
    right = canonical_norm(hidden, norms["hidden_weight"], EPS)
    outs = {"out": poison(6, 2 * width), "normed_hidden": poison(6, width)}
    whole = lab.launch(draft_input, outs, tokens=tokens, weight=table, hidden=hidden, **norms)
    assert same_bits(whole["out"], torch.cat((left, right), dim=1))
    assert same_bits(whole["normed_hidden"], right)
    embedded = table[tokens.long()]
    plain = lab.launch(concat_norms, outs, embedded=embedded, hidden=hidden, **norms)
    assert same_bits(plain["out"], whole["out"])
    for row in (0, 5):
        outs, only = {"out": poison(1, 2 * width), "normed_hidden": poison(1, width)}, slice(row, row + 1)
        alone = lab.launch(draft_input, outs, tokens=tokens[only], weight=table, hidden=hidden[only], **norms)
        assert same_bits(alone["out"][0], whole["out"][row])
