"""The width of a step: how many drafts are made and verified, by what they should bring against what they cost.

A slot's drafts are a chain. Odds by position say how often a draft whose predecessors were right was right as well: by
slot, forgetting what is old, and over all requests, from which a new request begins. What a slot has not seen lately
is taken from the position before it, in the proportion that holds over all requests: so a width that was not tried for
long is tried again where it would pay if nothing had changed. Expected of a width is a token for each slot and the sum
over its drafts of the products of the odds up to each. The width of most expected tokens by its cost is chosen, but the
last one stays unless another is better by more than a 256th. At width zero nothing is seen: then drafts are tried after
a number of steps that doubles as long as that does not lead away from zero, or soon where they should bring as much.
The same seed gives the same tokens whatever is chosen. All numbers are integers, so that every executor chooses alike.
"""

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.schema import operation
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS

__all__ = [
    "AGE",
    "ALL_DECAY",
    "BUDGET",
    "CLOSE",
    "CLOSE_INTERVAL",
    "DECAY",
    "EDGE",
    "FIRST_INTERVAL",
    "INTERVAL",
    "LAST",
    "LENGTH_SEEN",
    "MAX_INTERVAL",
    "MAX_WIDTH",
    "ONE",
    "PRIOR",
    "PRIOR_RATES",
    "TRIED",
    "WAITED",
    "WEIGHT",
    "check_widths",
    "choose_width",
    "join_widths",
]

MAX_WIDTH = 7
ONE = 1024
DECAY = 4  # an observation of a slot loses a 16th of its weight to each that follows
ALL_DECAY = 8  # one over all requests a 256th
AGE = 6  # and what a slot has not seen anew in a step a 64th
WEIGHT = 8  # observations: those that stand in for what a slot has not seen
JOINED = 8  # observations of all requests with which a new one begins
EDGE = 8  # a width is left for one that is better by more than a 256th
FIRST_INTERVAL, MAX_INTERVAL = 32, 1024  # steps at width zero until a draft is tried
CLOSE, CLOSE_INTERVAL = 5, 8  # where drafting would bring at most a 32nd less, it is tried after so many
SETTLED = 32  # steps in a row with drafts after which the interval begins anew
LENGTH_SEEN, TRIED = 0, 1  # of a slot, at its last choice
LAST, WAITED, INTERVAL, BUDGET = 0, 1, 2, 3  # of the policy: the last width, steps at zero, their limit, steps above
PRIOR_RATES = (720, 740, 760, 770, 780, 790, 800)  # in 1024ths, before anything was seen
PRIOR = tuple((rate * JOINED, ONE * JOINED) for rate in PRIOR_RATES)


@operation(f"""
    read    active         int32  [max_B]
    read    lengths        int32  [max_B]              committed tokens
    read    extended       int32  [max_B]              positions that the draft model has run over
    read    slot_ints      int64  [max_B, {NUM_INTS}]  DRAFT_LIMIT
    read    width_bounds   int32  [2]                  the least and the greatest width that the host allows
    read    width_costs    int32  [n, K + 2]           of a step: widths 0 to K, zero with the draft model's run behind
    update  width_odds     int32  [max_B + 1, K, 2]    drafts that were right and were to be; the last of all requests
    update  width_seen     int32  [max_B, 2]           a slot's length at its last choice, and its drafts
    update  width_policy   int32  [4]
    write   width_choice   int32  [1]                  0 to K, or K + 1: zero, but the draft model must run
""")
def choose_width(
    active: torch.Tensor,
    lengths: torch.Tensor,
    extended: torch.Tensor,
    slot_ints: torch.Tensor,
    width_bounds: torch.Tensor,
    width_costs: torch.Tensor,
    *,
    width_odds: torch.Tensor,
    width_seen: torch.Tensor,
    width_policy: torch.Tensor,
    width_choice: torch.Tensor,
    row: int,
    most_waiting: int,
) -> None:
    """Learn from the last step of each active slot, and choose the width of this one.

    row           of the costs: the bucket's
    most_waiting  positions that may wait for the draft model before it must run; 0: nothing waits
    A body that drafts takes K + 1 waiting positions: where more wait, a step of width zero first runs the draft model.
    Time: some 40 short divisions in a row. Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    check_widths(active, lengths, extended, width_bounds, width_costs, width_odds, width_seen, width_policy, row)
    costs, odds, policy = width_costs[row].tolist(), width_odds.tolist(), width_policy.tolist()
    most = len(costs) - 2
    expected, limit, waiting = [0] * (most + 1), 0, 0
    slots = [slot for slot, each in enumerate(active.tolist()) if each]
    for slot in slots:
        before, tried = width_seen[slot].tolist()
        _learn(odds[slot], odds[-1], tried, int(lengths[slot]) - before - 1)
    for slot in slots:
        length = int(lengths[slot])
        allowed = max(0, min(int(slot_ints[slot, DRAFT_LIMIT]), most))
        limit, waiting = max(limit, allowed), max(waiting, length - 1 - int(extended[slot]))
        expected = [a + b for a, b in zip(expected, _expected(odds[slot], odds[-1], allowed), strict=True)]
    low, high = max(0, min(int(width_bounds[0]), most)), max(0, min(int(width_bounds[1]), most))
    high = max(low, min(high, limit))
    width = _choose(expected, costs, low, high, policy) if slots else low
    must_run = bool(most_waiting) and waiting >= (most_waiting if width == 0 else most + 2)
    for slot in slots:
        allowed = max(0, min(int(slot_ints[slot, DRAFT_LIMIT]), most))
        width_seen[slot] = torch.tensor((int(lengths[slot]), 0 if must_run else min(width, allowed)), dtype=torch.int32)
    width_odds.copy_(torch.tensor(odds, dtype=torch.int32))
    width_policy.copy_(torch.tensor(policy, dtype=torch.int32))
    width_choice[0] = most + 1 if must_run else width


def _learn(own: list[list[int]], every: list[list[int]], tried: int, right: int) -> None:
    """Count a step of `tried` drafts of which the first `right` were right; what it did not see ages."""
    for position, (mine, others) in enumerate(zip(own, every, strict=True)):
        if position < tried and position <= right:
            hit = ONE if position < right else 0
            for entry, decay in ((mine, DECAY), (others, ALL_DECAY)):
                entry[0] += hit - (entry[0] >> decay)
                entry[1] += ONE - (entry[1] >> decay)
        else:
            for entry, age in ((mine, AGE), (others, ALL_DECAY))[: 2 if position else 1]:
                entry[0] -= entry[0] >> age
                entry[1] -= entry[1] >> age


def _expected(own: list[list[int]], every: list[list[int]], allowed: int) -> list[int]:
    """Tokens of a step by its width, in 1024ths."""
    total, product, before, before_all = ONE, ONE, ONE, ONE
    found = [total]
    for position, ((right, tried), (all_right, all_tried)) in enumerate(zip(own, every, strict=True)):
        weight = WEIGHT if position else 0
        rate_all = (all_right + weight * before_all) * ONE // max(all_tried + weight * ONE, 1)
        usual = min(rate_all * before // max(before_all, 1), ONE)
        rate = min((right + WEIGHT * usual) * ONE // (tried + WEIGHT * ONE), ONE)
        product = product * rate // ONE
        total += product if position < allowed else 0
        found.append(total)
        before, before_all = rate, rate_all
    return found


def _choose(expected: list[int], costs: list[int], low: int, high: int, policy: list[int]) -> int:
    """The width of most expected tokens by cost between two; `policy` is updated."""
    best = drafted = max(low, min(1, high))
    for width in range(drafted + 1, high + 1):
        if expected[width] * costs[drafted] > expected[drafted] * costs[width]:
            best = drafted = width
    drafting, idle = expected[drafted] * costs[low], expected[low] * costs[drafted]
    if low == 0 and idle >= drafting:
        best = 0
    last = policy[LAST]
    if low <= last <= high and last != best:
        gained, kept = expected[best] * costs[last], expected[last] * costs[best]
        if gained - kept <= (kept >> EDGE):
            best = last
    policy[LAST] = best
    if best > 0:
        policy[BUDGET] = min(policy[BUDGET] + 1, SETTLED)
        if policy[BUDGET] == SETTLED:
            policy[INTERVAL] = FIRST_INTERVAL
        policy[WAITED] = 0
        return best
    policy[BUDGET] = 0
    policy[WAITED] += 1
    is_close = idle - drafting <= (idle >> CLOSE)
    if high == 0 or policy[WAITED] < (CLOSE_INTERVAL if is_close else policy[INTERVAL]):
        return 0
    policy[WAITED] = 0
    if not is_close:
        policy[INTERVAL] = min(2 * max(policy[INTERVAL], 1), MAX_INTERVAL)
    return drafted


@operation("""
    read    slots         int32  [1]                the slot whose request begins
    read    lengths       int32  [max_B]
    read    draft_live    uint8  [1]
    update  extended      int32  [max_B]            its prompt's last position is the first that waits
    update  width_odds    int32  [max_B + 1, K, 2]
    update  width_seen    int32  [max_B, 2]
    update  width_policy  int32  [4]
""")
def join_widths(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    draft_live: torch.Tensor,
    *,
    extended: torch.Tensor,
    width_odds: torch.Tensor,
    width_seen: torch.Tensor,
    width_policy: torch.Tensor,
) -> None:
    """Begin a slot's record behind its first token, with the odds over all requests; its first step tries a draft."""
    slot = int(slots[0])
    if slot < 0 or not int(draft_live[0]):
        return
    length = int(lengths[slot])
    extended[slot] = length - 2
    if not int(width_odds[-1, 0, 1]):
        width_odds[-1] = torch.tensor(PRIOR[: width_odds.shape[1]], dtype=torch.int32)
    rates = width_odds[-1].tolist()
    begun = [(right * ONE // max(tried, 1) * JOINED, ONE * JOINED) for right, tried in rates]
    width_odds[slot] = torch.tensor(begun, dtype=torch.int32)
    width_seen[slot] = torch.tensor((length, 0), dtype=torch.int32)
    width_policy[WAITED] = width_policy[INTERVAL] = FIRST_INTERVAL


def check_widths(
    active: torch.Tensor,
    lengths: torch.Tensor,
    extended: torch.Tensor,
    width_bounds: torch.Tensor,
    width_costs: torch.Tensor,
    width_odds: torch.Tensor,
    width_seen: torch.Tensor,
    width_policy: torch.Tensor,
    row: int,
) -> None:
    """Raise ShapeError for shapes that `choose_width` does not take."""
    (max_batch,), (buckets, columns) = active.shape, width_costs.shape
    if not 3 <= columns <= MAX_WIDTH + 2 or not 0 <= row < buckets:
        raise ShapeError(f"costs must be of widths to 1 up to {MAX_WIDTH} and have row {row}; got {buckets}, {columns}")
    for name, tensor in (("lengths", lengths), ("extended", extended)):
        check_shape(name, tensor, max_batch)
    check_shape("width_bounds", width_bounds, 2)
    check_shape("width_odds", width_odds, max_batch + 1, columns - 2, 2)
    check_shape("width_seen", width_seen, max_batch, 2)
    check_shape("width_policy", width_policy, 4)
