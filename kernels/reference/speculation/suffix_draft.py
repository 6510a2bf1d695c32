"""This module drafts the tokens that most often followed the endings of a slot's own text.

Source: SuffixDecoding, G. Oliaro and others, arXiv 2411.04975, section 3. Here the text itself is searched, and no
suffix tree is kept.
"""

from collections import Counter

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.graphs.schema_check import check_arguments
from lowlat.kernels.reference.speculation.ngram_draft import check_batch

__all__ = ["MAX_DEPTH", "SAMPLES", "SHARE", "check_options", "fractions", "suffix_draft"]

MAX_DEPTH = 32
MAX_FACTOR = 16.0
SAMPLES = 32  # the most places that are counted
SHARE = 1024  # shares are in 1024ths


@operation("""
    read   tokens        int32  [Bmax, C]  committed tokens
    read   slots         int32  [B]        -1 pads
    read   draft_live    uint8  [B]        slots that go on
    read   draft_lens    int32  [B]        committed tokens n' of such slots, C at most
    write  draft_nodes   int32  [B, T]     drafts from node 1 on, -1 in node 0 and after the last
    write  draft_shares  int32  [B, T]     of the places counted, in 1024ths, how many had all drafts up to this one
    write  match_lens    int32  [B]        tokens of the ending that was followed; 0 where none was
""")
def suffix_draft(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
    *,
    draft_nodes: torch.Tensor,
    draft_shares: torch.Tensor,
    match_lens: torch.Tensor,
    max_depth: int,
    max_spec_factor: float,
    min_token_prob: float,
) -> None:
    """Draft the most frequent continuation of one of the text's endings: the ending with the most expected drafts.

    Endings of 1 to max_depth tokens are searched in the text. The 32 places with the longest matches are counted, of
    equally long ones the last. For an ending of m tokens the drafts are chosen one by one. Each is the token that comes
    next in most of the ending's places, of equally frequent ones that of the last place. Then only the places with this
    token count. There are at most max_spec_factor * m drafts, and none whose share of the ending's places is below
    min_token_prob. The expected drafts are the sum of the shares; of equal sums the longest ending's are taken. A place
    is followed up to the text's end; these tokens are taken as a period, as in `ngram_draft`.
    Time: one read of the text. Captured: yes. Raises ShapeError for shapes, lengths and options that do not fit.
    """
    check_arguments(suffix_draft, locals())
    check_batch(tokens, slots.shape[0])
    check_options(max_depth, max_spec_factor, min_token_prob)
    draft_nodes.fill_(-1)
    draft_shares.zero_()
    match_lens.zero_()
    options = (draft_nodes.shape[1] - 1, max_depth, *fractions(max_spec_factor, min_token_prob))
    for index, (slot, live) in enumerate(zip(slots.tolist(), draft_live.tolist(), strict=True)):
        if slot < 0 or not live:
            continue
        length, drafts, counts, places = _best(tokens[slot, : int(draft_lens[index])], *options)
        for node, (token, count) in enumerate(zip(drafts, counts, strict=True), 1):
            draft_nodes[index, node] = token
            draft_shares[index, node] = count * SHARE // places
        match_lens[index] = length


def fractions(max_spec_factor: float, min_token_prob: float) -> tuple[int, int]:
    """Return both options in 65536ths, the first rounded up, the second down, so that simple fractions stay exact."""
    return -int(-max_spec_factor * 65536 // 1), int(min_token_prob * 65536 // 1)


def _best(
    text: torch.Tensor, count: int, max_depth: int, factor: int, least: int
) -> tuple[int, list[int], list[int], int]:
    """Return the followed ending's length, its drafts, the number of places with each, and the number counted."""
    size, words = text.shape[0], text.tolist()
    found: tuple[int, list[int], list[int], int] = (0, [], [], 1)
    matches = _longest_matches(text, max_depth)
    for length in range(1, max((reach for reach, _ in matches), default=0) + 1):
        places = [place for reach, place in matches if reach >= length]
        whole, drafts, counts = len(places), list[int](), list[int]()
        while len(drafts) < min(count, length * factor >> 16):
            following = {place: words[place + len(drafts) % (size - place)] for place in places}
            often = Counter(following.values())
            last = max(places, key=lambda place: (often[following[place]], place))
            token = following[last]
            if often[token] << 16 < least * whole:
                break
            places = [place for place in places if following[place] == token]
            drafts.append(token)
            counts.append(often[token])
        if drafts and sum(counts) * found[3] >= sum(found[2]) * whole:
            found = (length, drafts, counts, whole)
    return found


def _longest_matches(text: torch.Tensor, max_depth: int) -> list[tuple[int, int]]:
    """List the matches of the text's end, as lengths and the places after them: longest first, of equals the last."""
    length = text.shape[0]
    lengths = torch.zeros(length, dtype=torch.int64, device=text.device)
    going = torch.ones(length, dtype=torch.bool, device=text.device)
    going[0] = False
    for back in range(1, min(max_depth, length - 1) + 1):
        going[:back] = False
        going[back:] &= text[: length - back] == text[length - back]
        lengths += going
    places = lengths.nonzero().flatten().tolist()
    return sorted(((int(lengths[place]), place) for place in places), reverse=True)[:SAMPLES]


def check_options(max_depth: int, max_spec_factor: float, min_token_prob: float) -> None:
    """Raise ShapeError for options that `suffix_draft` does not take."""
    if not 1 <= max_depth <= MAX_DEPTH:
        raise ShapeError(f"max_depth must be from 1 to {MAX_DEPTH}, got {max_depth}")
    if not 0 < max_spec_factor <= MAX_FACTOR:
        raise ShapeError(f"max_spec_factor must be above 0 and at most {MAX_FACTOR}, got {max_spec_factor}")
    if not 0 <= min_token_prob <= 1:
        raise ShapeError(f"min_token_prob must be from 0 to 1, got {min_token_prob}")
