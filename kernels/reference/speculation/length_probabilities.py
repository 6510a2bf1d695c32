"""This module learns the acceptance probabilities of drafts, and from them the expected tokens by draft length.

A slot's drafts are a chain. The acceptance probability of a position is how often its draft was accepted if those
before it were. Probabilities are kept separately by the number of accepted drafts in the last step that drafted, which
predicts better than anything else: after many, the next drafts are nearly always right; after none, often not. Each
slot has its own, in which old observations fade. All requests together have others: a new request begins with them, and
its observations change them little by little. For a position that a slot has not seen lately, the probability is that
of the position before, scaled by the ratio of both over all requests. The expected tokens of a length are one plus the
sum over its drafts of the products of the acceptance probabilities up to each. All numbers are integers, so that every
executor counts the same.
"""

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.graphs.schema_check import check_arguments
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS

__all__ = [
    "AGE",
    "ALL_DECAY",
    "DECAY",
    "MAX_LENGTH",
    "MAX_WAITED",
    "NUM_RUNS",
    "ONE",
    "PRIOR",
    "RUNS",
    "WEIGHT",
    "check_most",
    "expected_tokens",
    "join_lengths",
    "learn_draft_lengths",
    "run_index",
]

MAX_LENGTH = 7
ONE = 1024
RUNS = (1, 3, 7)  # accepted drafts at which the next kind of run begins
NUM_RUNS = 1 + len(RUNS)
MAX_WAITED = 1 << 16  # steps at length zero: more than any trial waits for
DECAY = 5  # an observation of a slot loses a 32nd of its weight with each later one
ALL_DECAY = 8  # an observation over all requests loses a 256th
AGE = 6  # and a slot's observations of positions that a step did not reach lose a 64th
WEIGHT = 10  # observations: the weight of the estimate for what a slot has not seen
PRIOR_WEIGHT = 4  # observations: the weight of the rates below, over all requests
PRIOR_RATES = (  # in 1024ths, before any observation: by the kind of run, and by position
    (600, 700, 740, 760, 770, 780, 790),
    (720, 740, 760, 770, 780, 790, 800),
    (800, 800, 800, 800, 800, 800, 800),
    (900, 900, 900, 900, 900, 900, 900),
)
PRIOR = tuple(tuple((rate * PRIOR_WEIGHT, ONE * PRIOR_WEIGHT) for rate in rates) for rates in PRIOR_RATES)


@operation(f"""
    read    slots            int32  [B]
    read    accepted_lens    int32  [B]                          accepted drafts plus one; 0 for a dead slot
    read    num_verified     int32  [B]                          verified drafts
    read    verified_source  int32  [B]                          tokens that a grammar forces do not count
    read    dense_lens       int32  [B]                          the root's position
    update  extended         int32  [max_B]                      positions that the draft model has run over
    update  length_probabilities       int32  [max_B + 1, {NUM_RUNS}, K, 2]  accepted, tried; last: of all requests
    update  length_runs       int32  [max_B]                      accepted drafts of the last step that drafted
    update  length_expected   int32  [max_B, K + 1]               tokens of the next step by its length, in {ONE}ths
""")
def learn_draft_lengths(
    slots: torch.Tensor,
    accepted_lens: torch.Tensor,
    num_verified: torch.Tensor,
    verified_source: torch.Tensor,
    dense_lens: torch.Tensor,
    *,
    extended: torch.Tensor,
    length_probabilities: torch.Tensor,
    length_runs: torch.Tensor,
    length_expected: torch.Tensor,
    extends: bool,
) -> None:
    """Count the accepted drafts of a step, and compute the expected tokens of the next.

    extends  the draft model has run in the step, over all positions before the root
    """
    check_arguments(learn_draft_lengths, locals())
    check_most(length_probabilities.shape[2])
    probabilities = length_probabilities.tolist()
    listed = [(index, slot) for index, slot in enumerate(slots.tolist()) if slot >= 0 and int(accepted_lens[index])]
    for index, slot in listed:
        tried = 0 if int(verified_source[index]) == FORCED_DRAFTS else int(num_verified[index])
        right, run = int(accepted_lens[index]) - 1, int(length_runs[slot])
        _count(probabilities[slot][run_index(run)], probabilities[-1][run_index(run)], tried, right)
        length_runs[slot] = right if tried else run
        if extends:
            extended[slot] = dense_lens[index]
    length_probabilities.copy_(torch.tensor(probabilities, dtype=torch.int32))
    for _, slot in listed:
        place = run_index(int(length_runs[slot]))
        length_expected[slot] = torch.tensor(
            expected_tokens(probabilities[slot][place], probabilities[-1][place]), dtype=torch.int32
        )


def run_index(run: int) -> int:
    """Return the kind of a run of accepted drafts."""
    return sum(run >= least for least in RUNS)


def _count(own: list[list[int]], every: list[list[int]], tried: int, right: int) -> None:
    """Count a step of `tried` drafts of which the first `right` were accepted; all other observations age."""
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


def expected_tokens(own: list[list[int]], every: list[list[int]]) -> list[int]:
    """Compute the expected tokens of a step by its draft length, in 1024ths."""
    total, product, before, before_all = ONE, ONE, ONE, ONE
    found = [total]
    for position, ((right, tried), (all_right, all_tried)) in enumerate(zip(own, every, strict=True)):
        weight = WEIGHT if position else 0
        rate_all = (all_right + weight * before_all) * ONE // max(all_tried + weight * ONE, 1)
        usual = min(rate_all * before // max(before_all, 1), ONE)
        rate = min((right + WEIGHT * usual) * ONE // (tried + WEIGHT * ONE), ONE)
        product = product * rate // ONE
        total += product
        found.append(total)
        before, before_all = rate, rate_all
    return found


@operation(f"""
    read    slots           int32  [1]                          the slot whose request begins
    read    lengths         int32  [max_B]
    read    draft_live      uint8  [1]
    update  extended        int32  [max_B]                      its prompt's last position is the first that waits
    update  length_probabilities      int32  [max_B + 1, {NUM_RUNS}, K, 2]
    update  length_runs      int32  [max_B]
    update  length_expected  int32  [max_B, K + 1]
    update  length_waited    int32  [1]                          steps at length zero: its first step tries a draft
""")
def join_lengths(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    draft_live: torch.Tensor,
    *,
    extended: torch.Tensor,
    length_probabilities: torch.Tensor,
    length_runs: torch.Tensor,
    length_expected: torch.Tensor,
    length_waited: torch.Tensor,
) -> None:
    """Begin a slot's record after its first token, with the acceptance probabilities over all requests.

    The slot's first step tries a draft.
    """
    check_arguments(join_lengths, locals())
    check_most(length_probabilities.shape[2])
    slot = int(slots[0])
    if slot < 0 or not int(draft_live[0]):
        return
    extended[slot] = int(lengths[slot]) - 2
    if not int(length_probabilities[-1, 0, 0, 1]):
        length_probabilities[-1] = torch.tensor(
            [rates[: length_probabilities.shape[2]] for rates in PRIOR], dtype=torch.int32
        )
    length_probabilities[slot] = 0
    length_runs[slot] = 0
    expected = expected_tokens(length_probabilities[slot, 0].tolist(), length_probabilities[-1, 0].tolist())
    length_expected[slot] = torch.tensor(expected, dtype=torch.int32)
    length_waited[0] = MAX_WAITED


def check_most(most: int) -> None:
    """Raise ShapeError for a greatest draft length for which no records are kept."""
    if not 1 <= most <= MAX_LENGTH:
        raise ShapeError(f"drafts have acceptance probabilities by position for 1 to {MAX_LENGTH}, got {most}")
