"""Drafting that ends where more would not pay, by how sure the draft model is: the choice, and what it learns.

Drafting halts behind some levels, its ends. There the kind of the last draft's confidence tells how many of this step's
drafts should be right. The odds by position that `width_odds` keeps, behind the last step's run of right drafts, are
multiplied by what a kind has meant over all requests: how often a draft of that kind was right against wrong, and each
of those behind it, over what its odds had said beforehand. So a confidence that says nothing changes nothing. The step
verifies the width that brings most beyond what its time brings at the best width's rate; where that is wider than what
is drafted, drafting goes on. The same seed gives the same tokens whatever is chosen. All numbers are integers.
"""

from itertools import pairwise

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation.draft_confidence import NUM_KINDS
from lowlat.kernels.reference.speculation.width_odds import ALL_DECAY, MAX_WIDTH, ONE
from lowlat.kernels.reference.speculation.widths import (
    best_width,
    bounds_of,
    costs_by_width,
    slot_limits,
    tokens_by_width,
)
from lowlat.kernels.reference.step.slot_record import NUM_INTS
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS

__all__ = [
    "EXPECTED",
    "LEAST_RATE",
    "MOST_RATE",
    "NUM_SURE",
    "RIGHT",
    "SURE_FIRST",
    "SURE_LATER",
    "SURE_WEIGHT",
    "TRIED",
    "check_depths",
    "check_sure",
    "choose_depth",
    "learn_confidence",
]

RIGHT, TRIED, EXPECTED = range(3)  # of a kind's drafts, in 1024ths: right, verified, and right by the odds beforehand
NUM_SURE = 3
SURE_WEIGHT = 4  # observations, of even odds beforehand, that a kind begins with and always keeps
SURE_FIRST = (134, 293, 512, 683, 878)  # in 1024ths, how many of them were right: of a draft by its kind of confidence,
SURE_LATER = (286, 396, 512, 600, 727)  # and of each behind it
LEAST_RATE, MOST_RATE = 16, ONE - 4  # odds beforehand are kept from nothing and from certainty


@operation(f"""
    read    slots           int32  [B]
    read    lengths         int32  [max_B]                    committed tokens
    read    slot_ints       int64  [max_B, {NUM_INTS}]        DRAFT_LIMIT
    read    width_bounds    int32  [2]                        the least and the greatest width that the host allows
    read    width_costs     int32  [n, 2, K + 2]              BASE and SLOPE of steps by their width
    read    depth_costs     int32  [n, 2, E, K + 1]           the same where so much is drafted
    read    width_expected  int32  [max_B, K + 1]             tokens of a step by its width, before it drafts
    read    sure_odds       int32  [{NUM_KINDS}, K, {NUM_SURE}]                  RIGHT, TRIED, EXPECTED of each kind
    read    draft_kinds     int32  [B, E]
    update  draft_expected  int32  [max_B, K + 1]             tokens of this step by its width
    update  draft_rates     int32  [max_B, K]                 the odds of its drafts beforehand, in 1024ths
    write   width_choice    int32  [1]                        1 to K
    write   draft_further   int32  [1]                        whether that is wider than what is drafted
""")
def choose_depth(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    slot_ints: torch.Tensor,
    width_bounds: torch.Tensor,
    width_costs: torch.Tensor,
    depth_costs: torch.Tensor,
    width_expected: torch.Tensor,
    sure_odds: torch.Tensor,
    draft_kinds: torch.Tensor,
    *,
    draft_expected: torch.Tensor,
    draft_rates: torch.Tensor,
    width_choice: torch.Tensor,
    draft_further: torch.Tensor,
    row: int,
    end: int,
    depth: int,
) -> None:
    """Choose the width that the step verifies, and whether it drafts further for it.

    row    of the costs: the bucket's
    end    the end at which drafting halts, by its number
    depth  the drafts that are made by then
    Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    check_depths(width_costs, depth_costs, width_expected, sure_odds, draft_kinds, row, end, depth)
    most = width_expected.shape[1] - 1
    listed = [(index, slot) for index, slot in enumerate(slots.tolist()) if slot >= 0]
    for index, slot in listed:
        rates = _rates(width_expected[slot].tolist())
        tokens = draft_expected[slot].tolist() if end else [ONE]
        total = tokens[depth - 1]
        survival = total - tokens[depth - 2] if depth > 1 else ONE
        further: list[int] = []
        kind = int(draft_kinds[index, end])
        for rate, counts in zip(rates[depth - 1 :], sure_odds[kind].tolist(), strict=False):
            survival = survival * _corrected(rate, *_scale(counts, kind, len(further))) // ONE
            total += survival
            further.append(total)
        draft_expected[slot] = torch.tensor([*tokens[:depth], *further], dtype=torch.int32)
        draft_rates[slot] = torch.tensor(rates, dtype=torch.int32)
    allowed = slot_limits([slot for _, slot in listed], slot_ints, most)
    positions = sum(int(lengths[slot]) for slot in allowed)
    low, high = bounds_of(width_bounds, allowed, most)
    before_drafts, known = (tokens_by_width(expected, allowed) for expected in (width_expected, draft_expected))
    usual = costs_by_width(width_costs[row], positions)
    best, _, _ = best_width(before_drafts, usual, low, high)
    costs = costs_by_width(depth_costs[row, :, end], positions)
    values = [known[width] * usual[best] - before_drafts[best] * costs[width] for width in range(most + 1)]
    chosen = max(low, 1)
    for width in range(chosen + 1, high + 1):
        if values[width] > values[chosen]:
            chosen = width
    width_choice[0], draft_further[0] = chosen, int(chosen > depth)


def _rates(tokens: list[int]) -> list[int]:
    """The odds of each draft whose predecessors are right, by the tokens of a step by its width."""
    survivals = [ONE, *(after - before for before, after in pairwise(tokens))]
    rates = [after * ONE // max(before, 1) for before, after in pairwise(survivals)]
    return [max(LEAST_RATE, min(rate, MOST_RATE)) for rate in rates]


def _scale(counts: list[int], kind: int, behind: int) -> tuple[int, int]:
    """By what odds are multiplied and divided, of the draft so far behind one of a kind, as it was counted."""
    first = SURE_LATER[kind] if behind else SURE_FIRST[kind]
    right, tried = counts[RIGHT] + first * SURE_WEIGHT, counts[TRIED] + ONE * SURE_WEIGHT
    expected = counts[EXPECTED] + ONE * SURE_WEIGHT // 2
    return max(right, 1) * max(tried - expected, 1), max(tried - right, 1) * max(expected, 1)


def _corrected(rate: int, more: int, less: int) -> int:
    """A rate whose odds are multiplied by `more` over `less`."""
    return rate * more * ONE // (rate * more + (ONE - rate) * less)


def check_depths(
    width_costs: torch.Tensor,
    depth_costs: torch.Tensor,
    width_expected: torch.Tensor,
    sure_odds: torch.Tensor,
    draft_kinds: torch.Tensor,
    row: int,
    end: int,
    depth: int,
) -> None:
    """Raise ShapeError for shapes and numbers that `choose_depth` does not take."""
    columns, ends = width_expected.shape[1], draft_kinds.shape[1]
    buckets = width_costs.shape[0]
    check_shape("width_costs", width_costs, buckets, 2, columns + 1)
    check_shape("depth_costs", depth_costs, buckets, 2, ends, columns)
    check_shape("sure_odds", sure_odds, NUM_KINDS, columns - 1, NUM_SURE)
    if (end == 0) != (depth == 1):
        raise ShapeError(f"the first end, and no other, is behind the first draft; got end {end}, depth {depth}")
    if not (0 <= row < buckets and 0 <= end < ends and 1 <= depth < columns <= MAX_WIDTH + 1):
        raise ShapeError(
            f"row {row} of {buckets}, end {end} of {ends} or depth {depth} of {columns - 1} (at most {MAX_WIDTH}) "
            "is out of range"
        )


@operation(f"""
    read    slots            int32  [B]
    read    accepted_lens    int32  [B]                        drafts that were right, and one; 0 for a dead slot
    read    num_verified     int32  [B]                        drafts that were to be
    read    verified_source  int32  [B]                        what a grammar forces is no draft
    read    draft_kinds      int32  [B, E]
    read    draft_ends       int32  [E]                        the drafts that these are of, from 1 on, ascending
    read    draft_rates      int32  [max_B, K]                 the odds of the step's drafts beforehand
    update  sure_odds        int32  [{NUM_KINDS}, K, {NUM_SURE}]                   from a draft of each kind on
""")
def learn_confidence(
    slots: torch.Tensor,
    accepted_lens: torch.Tensor,
    num_verified: torch.Tensor,
    verified_source: torch.Tensor,
    draft_kinds: torch.Tensor,
    draft_ends: torch.Tensor,
    draft_rates: torch.Tensor,
    *,
    sure_odds: torch.Tensor,
) -> None:
    """Count how drafts of each kind fared, and those behind them, beside what their odds had said.

    A draft is counted where it was verified and all before it were right. Captured: yes. Raises ShapeError.
    """
    check_sure(draft_rates, sure_odds)
    odds = sure_odds.tolist()
    for index, slot in enumerate(slots.tolist()):
        right, rates = int(accepted_lens[index]) - 1, draft_rates[slot].tolist()
        forced = int(verified_source[index]) == FORCED_DRAFTS
        if slot < 0 or right < 0 or forced:
            continue
        seen = min(int(num_verified[index]), right + 1)
        for column, end in enumerate(draft_ends.tolist()):
            for position in range(end - 1, seen):
                entry = odds[int(draft_kinds[index, column])][position - end + 1]
                counted = (ONE if position < right else 0, ONE, rates[position])
                entry[:] = [old - (old >> ALL_DECAY) + new for old, new in zip(entry, counted, strict=True)]
    sure_odds.copy_(torch.tensor(odds, dtype=torch.int32))


def check_sure(draft_rates: torch.Tensor, sure_odds: torch.Tensor) -> None:
    """Raise ShapeError for odds by confidence of other shapes than there are."""
    most = draft_rates.shape[1]
    if not 1 <= most <= MAX_WIDTH:
        raise ShapeError(f"drafts have odds by position for 1 to {MAX_WIDTH} positions, got {most}")
    check_shape("sure_odds", sure_odds, NUM_KINDS, most, NUM_SURE)
