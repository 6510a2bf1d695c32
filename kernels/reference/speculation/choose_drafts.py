"""This module chooses a model's drafts or those from a slot's own text, by the expected number of accepted ones.

A slot keeps both proposals. After the step it compares each with the text, whichever was verified. So it learns the
acceptance probabilities of both: how often a draft is right if those before it were. A model's are kept by the draft's
position. Text's are kept by the length of the ending that the draft continues, relative to the shares of such drafts.
The same seed gives the same tokens whatever is chosen.
"""

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.graphs.schema_check import check_arguments
from lowlat.kernels.reference.speculation.ngram_draft import check_batch
from lowlat.kernels.reference.speculation.suffix_draft import SHARE

__all__ = [
    "CHOSEN",
    "DECAY",
    "MADE_AT",
    "MATCH",
    "MAX_DRAFTS",
    "NUM_BINS",
    "PRIOR",
    "PROPOSAL_WIDTH",
    "check_count",
    "choose_drafts",
]

MAX_DRAFTS = 7
NUM_BINS = 8
DECAY = 4  # an observation loses a 16th of its weight with each later one
MADE_AT, MATCH, CHOSEN, FIRST = 0, 1, 2, 3  # columns; from FIRST on the model's drafts, the text's, the text's shares
PROPOSAL_WIDTH = FIRST + 3 * MAX_DRAFTS
PRIOR_WEIGHT = 8  # observations
# In 1024ths, before any observation: the model's by position, the text's by an ending's tokens, from 1 to 8 or more.
# They are near the bundled pair's, but lower for text. In a replay of its texts with copies the choices gained two
# thirds of what the best choices would have gained.
PRIOR_RATES = ((740, 760, 790, 800, 800, 800, 800, 800), (300, 460, 600, 700, 760, 800, 840, 960))
PRIOR = tuple(tuple((rate * PRIOR_WEIGHT, SHARE * PRIOR_WEIGHT) for rate in rates) for rates in PRIOR_RATES)


@operation(f"""
    read    tokens               int32  [Bmax, C]                 committed tokens
    read    slots                int32  [B]                       -1 pads
    read    draft_live           uint8  [B]                       slots that continue
    read    draft_lens           int32  [B]                       committed tokens n' of such slots
    read    text_nodes           int32  [B, T]                    as `suffix_draft` wrote them, with shares and lengths
    read    draft_shares         int32  [B, T]
    read    match_lens           int32  [B]
    update  draft_nodes          int32  [B, T]                    the model's drafts; out: the chosen ones
    update  proposals            int32  [Bmax, {PROPOSAL_WIDTH}]  both last proposals, see the columns above
    update  draft_probabilities  int32  [Bmax, 2, {NUM_BINS}, 2]  model and text: right drafts, expected right ones
    update  draft_sources        int32  [Bmax]                    1: the text's are chosen; 0: the model's
""")
def choose_drafts(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
    text_nodes: torch.Tensor,
    draft_shares: torch.Tensor,
    match_lens: torch.Tensor,
    *,
    draft_nodes: torch.Tensor,
    proposals: torch.Tensor,
    draft_probabilities: torch.Tensor,
    draft_sources: torch.Tensor,
    fresh: bool,
) -> None:
    """Learn from the last proposals, and choose the drafts with more expected accepted ones; the model's if equal.

    fresh  the slots' requests are new: their acceptance probabilities begin with PRIOR
    A source's expected number of accepted drafts is the sum over its drafts of the products of the acceptance
    probabilities up to each. For a text's draft this probability is its share of the places with its predecessors,
    times the ratio of right drafts to the sum of such shares so far.
    Time: some dozen integers a slot. Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    check_arguments(choose_drafts, locals())
    check_batch(tokens, slots.shape[0])
    check_count(draft_nodes.shape[1])
    for index, (slot, live) in enumerate(zip(slots.tolist(), draft_live.tolist(), strict=True)):
        if slot < 0 or not live:
            continue
        length = int(draft_lens[index])
        probabilities = (
            draft_probabilities[slot].tolist() if not fresh else [[list(each) for each in rates] for rates in PRIOR]
        )
        if not fresh:
            _learn(tokens[slot, :length].tolist(), proposals[slot].tolist(), probabilities)
        model, text = draft_nodes[index, 1:].tolist(), text_nodes[index, 1:].tolist()
        promises, match = _promises(draft_shares[index, 1:].tolist()), int(match_lens[index])
        of_model = _expected(model, [SHARE] * len(model), probabilities[0], range(len(model)))
        of_text = _expected(text, promises, probabilities[1], [_text_bin(match, place) for place in range(len(text))])
        chosen = int(of_text > of_model)
        pads = [-1] * (MAX_DRAFTS - len(model))
        kept = [length, match, chosen, *model, *pads, *text, *pads, *promises, *pads]
        proposals[slot] = torch.tensor(kept, dtype=torch.int32)
        draft_probabilities[slot] = torch.tensor(probabilities, dtype=torch.int32)
        draft_sources[slot] = chosen
        if chosen:
            draft_nodes[index, 1:] = text_nodes[index, 1:]


def _text_bin(match: int, place: int) -> int:
    """Return the bin of a text's draft: by the tokens of the ending that it continues, with the drafts before it."""
    return max(0, min(match + place, NUM_BINS) - 1)


def _promises(shares: list[int]) -> list[int]:
    """Convert shares among all places to each draft's share among the places with its predecessors."""
    return [share * SHARE // max(before, 1) for share, before in zip(shares, [SHARE, *shares], strict=False)]


def _learn(text: list[int], proposal: list[int], probabilities: list[list[list[int]]]) -> None:
    """Compare both kept proposals with the text since then, draft by draft up to the first wrong one."""
    start = proposal[MADE_AT]
    for source in (0, 1):
        for place in range(MAX_DRAFTS):
            draft = proposal[FIRST + source * MAX_DRAFTS + place]
            if start <= 0 or start + place >= len(text) or draft < 0:
                break
            promise = proposal[FIRST + 2 * MAX_DRAFTS + place] if source else SHARE
            right = text[start + place] == draft
            entry = probabilities[source][_text_bin(proposal[MATCH], place) if source else place]
            entry[0] += (SHARE if right else 0) - (entry[0] >> DECAY)
            entry[1] += promise - (entry[1] >> DECAY)
            if not right:
                break


def _expected(drafts: list[int], promises: list[int], probabilities: list[list[int]], bins: list[int] | range) -> int:
    """Compute the expected number of accepted drafts, in 1024ths."""
    product, total = SHARE, 0
    for draft, promise, at in zip(drafts, promises, bins, strict=True):
        if draft < 0:
            break
        right, promised = probabilities[at]
        rate = min(SHARE, right * SHARE // max(promised, 1))
        product = product * (rate * promise // SHARE) // SHARE
        total += product
    return total


def check_count(rows: int) -> None:
    """Raise ShapeError for rows of a slot, the root's included, that `choose_drafts` does not take."""
    if not 2 <= rows <= MAX_DRAFTS + 1:
        raise ShapeError(f"a slot must have from 1 to {MAX_DRAFTS} drafts, got {rows - 1}")
