"""This module chooses a step's draft length, the number of drafts that it makes and verifies.

The expected tokens of a length are the sum over all slots, by their acceptance probabilities, see
`length_probabilities`. A length's cost is the time of such a step, and grows with the positions that it attends to.
The length with the most expected tokens for its cost is chosen, but the last choice stays unless another is better by
more than a 256th. At length zero nothing is learnt. So a draft is tried now and then, as often as takes at most a 512th
of the time by the known costs. The same seed gives the same tokens whatever is chosen. All numbers are integers, so
that every executor makes the same choice.
"""

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.graphs.schema_check import check_arguments
from lowlat.kernels.reference.speculation.length_probabilities import MAX_LENGTH, MAX_WAITED
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS

__all__ = [
    "BASE",
    "EDGE",
    "FIRST_TRIAL",
    "LARGEST_COST",
    "SLOPE",
    "TRIAL",
    "UNIT",
    "best_length",
    "bounds_of",
    "check_costs",
    "choose_draft_length",
    "costs_by_length",
    "slot_limits",
    "tokens_by_length",
]

EDGE = 8  # a new length must be better than the last by more than a 256th
TRIAL = 9  # at length zero drafts are tried in at most a 512th of the time
FIRST_TRIAL = 6  # steps at length zero before the first trial: so few positions wait that no draft model need run
BASE, SLOPE = 0, 1  # columns of costs: without positions, and for each UNIT of positions
UNIT = 10  # positions, as a power of two
LARGEST_COST = 1 << 29  # so that costs times expected tokens of 32 slots fit into 64 bits


@operation(f"""
    read    active               int32  [max_B]
    read    lengths              int32  [max_B]              committed tokens
    read    extended             int32  [max_B]              positions that the draft model has run over
    read    slot_ints            int64  [max_B, {NUM_INTS}]  DRAFT_LIMIT
    read    length_bounds        int32  [2]                  least and greatest draft length that the host allows
    read    draft_length_costs   int32  [n, 2, K + 2]        BASE and SLOPE: 0 to K, and 0 when the draft model runs
    read    length_expected      int32  [max_B, K + 1]       tokens of a slot's step by its draft length
    update  length_last          int32  [1]
    update  length_waited        int32  [1]                  steps at length zero since a draft was tried
    write   draft_length_choice  int32  [1]                  0 to K, or K + 1: zero, but the draft model must run
""")
def choose_draft_length(
    active: torch.Tensor,
    lengths: torch.Tensor,
    extended: torch.Tensor,
    slot_ints: torch.Tensor,
    length_bounds: torch.Tensor,
    draft_length_costs: torch.Tensor,
    length_expected: torch.Tensor,
    *,
    length_last: torch.Tensor,
    length_waited: torch.Tensor,
    draft_length_choice: torch.Tensor,
    row: int,
    most_waiting: int,
) -> None:
    """Choose the draft length of a step.

    row           the bucket's row of the costs
    most_waiting  the most positions that may wait for the draft model before it must run; 0: positions never wait
    A body that drafts takes K + 1 waiting positions. If more wait, a step of length zero first runs the draft model,
    and the next step drafts. Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    check_arguments(choose_draft_length, locals())
    most = draft_length_costs.shape[2] - 2
    check_costs(row, draft_length_costs.shape[0], most)
    slots = [slot for slot, each in enumerate(active.tolist()) if each]
    allowed = slot_limits(slots, slot_ints, most)
    waiting = max((int(lengths[slot]) - 1 - int(extended[slot]) for slot in slots), default=0)
    expected = tokens_by_length(length_expected, allowed)
    costs = costs_by_length(draft_length_costs[row], sum(int(lengths[slot]) for slot in slots))
    low, high = bounds_of(length_bounds, allowed, most)
    choice = low
    if slots:
        best, drafted, gap = best_length(expected, costs, low, high, int(length_last))
        waited = 0 if best else min(int(length_waited) + 1, MAX_WAITED)
        idle = expected[0] * costs[drafted]
        tried = not best and high > 0 and waited >= FIRST_TRIAL and waited * (idle >> TRIAL) >= gap
        length = drafted if tried else best
        must_run = bool(most_waiting) and waiting >= (most_waiting if length == 0 else most + 2)
        length_last[0], length_waited[0] = best, 0 if tried and not must_run else waited
        choice = most + 1 if must_run else length
    draft_length_choice[0] = choice


def slot_limits(slots: list[int], slot_ints: torch.Tensor, most: int) -> dict[int, int]:
    """Return the most drafts that each of these slots may make."""
    return {slot: max(0, min(int(slot_ints[slot, DRAFT_LIMIT]), most)) for slot in slots}


def bounds_of(length_bounds: torch.Tensor, limits: dict[int, int], most: int) -> tuple[int, int]:
    """Return the least and the greatest draft length of a step, by the host's bounds and its slots' limits."""
    low, high = (max(0, min(int(bound), most)) for bound in length_bounds)
    return low, max(low, min(high, max(limits.values(), default=0)))


def tokens_by_length(expected: torch.Tensor, limits: dict[int, int]) -> list[int]:
    """Add up all slots' expected tokens by draft length; beyond a slot's limit its tokens are those at the limit."""
    most = expected.shape[1]
    return [sum(int(expected[slot, min(length, limit)]) for slot, limit in limits.items()) for length in range(most)]


def costs_by_length(costs: torch.Tensor, positions: int) -> list[int]:
    """Return the costs of a step with so many positions, by draft length; from their BASE and SLOPE [2, n]."""
    return [base + (slope * positions >> UNIT) for base, slope in zip(*costs.tolist(), strict=True)]


def best_length(
    expected: list[int], costs: list[int], low: int, high: int, last: int | None = None
) -> tuple[int, int, int]:
    """Return the best draft length between two bounds, of those that draft, and by how much length zero is better.

    The best length has the most expected tokens for its cost.

    last  the length that stays unless another is better by more than a 256th; None: there is none
    """
    best = drafted = max(low, min(1, high))
    for length in range(drafted + 1, high + 1):
        if expected[length] * costs[drafted] > expected[drafted] * costs[length]:
            best = drafted = length
    gap = expected[0] * costs[drafted] - expected[drafted] * costs[0]
    if low == 0 and gap >= 0:
        best = 0
    if last is not None and low <= last <= high and last != best:
        gained, kept = expected[best] * costs[last], expected[last] * costs[best]
        if gained - kept <= (kept >> EDGE):
            best = last
    return best, drafted, max(gap, 0)


def check_costs(row: int, buckets: int, most: int) -> None:
    """Raise ShapeError for costs that `choose_draft_length` does not take."""
    if not 1 <= most <= MAX_LENGTH or not 0 <= row < buckets:
        raise ShapeError(
            f"costs must be of draft lengths to 1 up to {MAX_LENGTH} and have row {row}; got {buckets}, {most + 2}"
        )
