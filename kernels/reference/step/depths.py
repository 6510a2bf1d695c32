"""Drafting that ends where more would not pay, by how sure the draft model is: the choice, and what it learns.

Drafting halts behind some levels, its ends. There the kind of the last draft's confidence tells how many of this step's
drafts should be right: odds by position behind a draft of that kind, kept for each slot and over all requests as
`width_odds` keeps them, apart by the run of right drafts as well. The step verifies the width that brings most beyond
what its time brings at the best width's rate; where that is wider than what is drafted, drafting goes on. The same seed
gives the same tokens whatever is chosen. All numbers are integers.
"""

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.sampling.draft_confidence import NUM_KINDS
from lowlat.kernels.reference.schema import operation
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS
from lowlat.kernels.reference.step.width_odds import (
    MAX_WIDTH,
    NUM_RUNS,
    ONE,
    PRIOR_WEIGHT,
    count_drafts,
    expected_tokens,
    run_index,
)
from lowlat.kernels.reference.step.widths import UNIT

__all__ = [
    "NUM_PLACES",
    "SURE_PRIOR",
    "check_depths",
    "check_sure",
    "choose_depth",
    "join_confidence",
    "learn_confidence",
]

NUM_PLACES = NUM_RUNS * NUM_KINDS
FIRST_RATES = (232, 396, 560, 724, 888)  # in 1024ths, before anything was seen: of a draft by its kind of confidence,
LATER_RATES = (600, 687, 775, 862, 950)  # and of each behind it
SURE_PRIOR = tuple(
    tuple((rate * PRIOR_WEIGHT, ONE * PRIOR_WEIGHT) for rate in (first, *[later] * (MAX_WIDTH - 1)))
    for first, later in zip(FIRST_RATES, LATER_RATES, strict=True)
)


@operation(f"""
    read    slots           int32  [B]
    read    lengths         int32  [max_B]                    committed tokens
    read    slot_ints       int64  [max_B, {NUM_INTS}]        DRAFT_LIMIT
    read    width_bounds    int32  [2]                        the least and the greatest width that the host allows
    read    width_costs     int32  [n, 2, K + 2]              BASE and SLOPE of steps by their width
    read    depth_costs     int32  [n, 2, E, K + 1]           the same where so much is drafted
    read    width_runs      int32  [max_B]                    right drafts in a row
    read    width_expected  int32  [max_B, K + 1]             tokens of a step by its width, before it drafts
    read    sure_expected   int32  [max_B, {NUM_KINDS}, K + 1]  tokens by width from a draft of each kind on
    read    draft_kinds     int32  [B, E]
    update  draft_expected  int32  [max_B, K + 1]             tokens of this step by its width
    update  draft_runs      int32  [max_B]                    the kind of the run behind which it drafts
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
    width_runs: torch.Tensor,
    width_expected: torch.Tensor,
    sure_expected: torch.Tensor,
    draft_kinds: torch.Tensor,
    *,
    draft_expected: torch.Tensor,
    draft_runs: torch.Tensor,
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
    check_depths(width_costs, depth_costs, width_expected, sure_expected, draft_kinds, row, end, depth)
    most, listed = (
        width_expected.shape[1] - 1,
        [(index, slot) for index, slot in enumerate(slots.tolist()) if slot >= 0],
    )
    for index, slot in listed:
        tokens = draft_expected[slot].tolist() if end else [ONE]
        before = tokens[depth - 1]
        survival = before - tokens[depth - 2] if depth > 1 else ONE
        behind = sure_expected[slot, int(draft_kinds[index, end])].tolist()
        further = [before + survival * (behind[width] - ONE) // ONE for width in range(1, most - depth + 2)]
        draft_expected[slot] = torch.tensor([*tokens[:depth], *further], dtype=torch.int32)
        draft_runs[slot] = run_index(int(width_runs[slot]))
    allowed = {slot: max(0, min(int(slot_ints[slot, DRAFT_LIMIT]), most)) for _, slot in listed}
    positions = sum(int(lengths[slot]) for slot in allowed)
    low, high = max(0, min(int(width_bounds[0]), most)), max(0, min(int(width_bounds[1]), most))
    high = max(low, min(high, max(allowed.values(), default=0)))
    before_drafts, known = (_tokens(expected, allowed, most) for expected in (width_expected, draft_expected))
    usual = _costs(width_costs[row, :, : most + 1], positions)
    best = low
    for width in range(low + 1, high + 1):
        if before_drafts[width] * usual[best] > before_drafts[best] * usual[width]:
            best = width
    costs = _costs(depth_costs[row, :, end], positions)
    values = [known[width] * usual[best] - before_drafts[best] * costs[width] for width in range(most + 1)]
    chosen = max(low, 1)
    for width in range(chosen + 1, high + 1):
        if values[width] > values[chosen]:
            chosen = width
    width_choice[0], draft_further[0] = chosen, int(chosen > depth)


def _tokens(expected: torch.Tensor, allowed: dict[int, int], most: int) -> list[int]:
    """The tokens of all slots together by width."""
    return [sum(int(expected[slot, min(width, limit)]) for slot, limit in allowed.items()) for width in range(most + 1)]


def _costs(table: torch.Tensor, positions: int) -> list[int]:
    return [base + (slope * positions >> UNIT) for base, slope in zip(*table.tolist(), strict=True)]


def check_depths(
    width_costs: torch.Tensor,
    depth_costs: torch.Tensor,
    width_expected: torch.Tensor,
    sure_expected: torch.Tensor,
    draft_kinds: torch.Tensor,
    row: int,
    end: int,
    depth: int,
) -> None:
    """Raise ShapeError for shapes and numbers that `choose_depth` does not take."""
    (max_batch, columns), (_, ends) = width_expected.shape, draft_kinds.shape
    buckets = width_costs.shape[0]
    check_shape("width_costs", width_costs, buckets, 2, columns + 1)
    check_shape("depth_costs", depth_costs, buckets, 2, ends, columns)
    check_shape("sure_expected", sure_expected, max_batch, NUM_KINDS, columns)
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
    read    draft_runs       int32  [max_B]                    the kind of the run behind which the step drafted
    read    width_runs       int32  [max_B]                    right drafts in a row, this step's counted
    update  sure_odds        int32  [max_B + 1, {NUM_PLACES}, K, 2]  right drafts from one of a kind on; the last: all
    update  sure_expected    int32  [max_B, {NUM_KINDS}, K + 1]      tokens by width from a draft of each kind on
""")
def learn_confidence(
    slots: torch.Tensor,
    accepted_lens: torch.Tensor,
    num_verified: torch.Tensor,
    verified_source: torch.Tensor,
    draft_kinds: torch.Tensor,
    draft_ends: torch.Tensor,
    draft_runs: torch.Tensor,
    width_runs: torch.Tensor,
    *,
    sure_odds: torch.Tensor,
    sure_expected: torch.Tensor,
) -> None:
    """Count how drafts of each kind fared, and those behind them, and reckon what they should bring in the next step.

    A kind is counted where its draft was verified and all before it were right. Captured: yes. Raises ShapeError.
    """
    check_sure(sure_odds, sure_expected)
    odds, ends = sure_odds.tolist(), draft_ends.tolist()
    listed = [(index, slot) for index, slot in enumerate(slots.tolist()) if slot >= 0 and int(accepted_lens[index])]
    for index, slot in listed:
        tried = 0 if int(verified_source[index]) == FORCED_DRAFTS else int(num_verified[index])
        right = int(accepted_lens[index]) - 1
        for column, end in enumerate(ends):
            if end <= min(tried, right + 1):
                place = int(draft_runs[slot]) * NUM_KINDS + int(draft_kinds[index, column])
                count_drafts(odds[slot][place], odds[-1][place], tried - end + 1, right - end + 1)
    sure_odds.copy_(torch.tensor(odds, dtype=torch.int32))
    for _, slot in listed:
        sure_expected[slot] = _sure_tokens(odds[slot], odds[-1], run_index(int(width_runs[slot])))


def _sure_tokens(own: list[list[list[int]]], every: list[list[list[int]]], run: int) -> torch.Tensor:
    """Tokens by width from a draft of each kind on, behind a run of a kind."""
    places = range(run * NUM_KINDS, (run + 1) * NUM_KINDS)
    return torch.tensor([expected_tokens(own[place], every[place]) for place in places], dtype=torch.int32)


@operation(f"""
    read    slots          int32  [1]                                the slot whose request begins
    read    draft_live     uint8  [1]
    update  sure_odds      int32  [max_B + 1, {NUM_PLACES}, K, 2]
    update  sure_expected  int32  [max_B, {NUM_KINDS}, K + 1]
""")
def join_confidence(
    slots: torch.Tensor, draft_live: torch.Tensor, *, sure_odds: torch.Tensor, sure_expected: torch.Tensor
) -> None:
    """Begin a slot's odds by confidence, with those over all requests. Raises ShapeError."""
    check_sure(sure_odds, sure_expected)
    slot, most = int(slots[0]), sure_odds.shape[2]
    if slot < 0 or not int(draft_live[0]):
        return
    if not int(sure_odds[-1, 0, 0, 1]):
        sure_odds[-1] = torch.tensor([rates[:most] for rates in SURE_PRIOR] * NUM_RUNS, dtype=torch.int32)
    sure_odds[slot] = 0
    sure_expected[slot] = _sure_tokens(sure_odds[slot].tolist(), sure_odds[-1].tolist(), 0)


def check_sure(sure_odds: torch.Tensor, sure_expected: torch.Tensor) -> None:
    """Raise ShapeError for odds by confidence of other shapes than there are."""
    slots, most = sure_expected.shape[0], sure_odds.shape[2]
    if not 1 <= most <= MAX_WIDTH:
        raise ShapeError(f"drafts have odds by position for 1 to {MAX_WIDTH} positions, got {most}")
    check_shape("sure_odds", sure_odds, slots + 1, NUM_PLACES, most, 2)
    check_shape("sure_expected", sure_expected, slots, NUM_KINDS, most + 1)
