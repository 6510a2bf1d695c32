"""This module copies drafts from a slot's own text. Source: prompt lookup decoding, A. Saxena, 2023."""

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.graphs.schema_check import check_arguments

__all__ = ["MAX_MATCH", "check_batch", "check_matches", "ngram_draft"]

MAX_MATCH = 16


@operation("""
    read   tokens       int32  [Bmax, C]  committed tokens
    read   slots        int32  [B]        -1 pads
    read   draft_live   uint8  [B]        slots that go on
    read   draft_lens   int32  [B]        committed tokens n' of such slots, C at most
    write  draft_nodes  int32  [B, T]    drafts from node 1 on, -1 in node 0 and where nothing was found
""")
def ngram_draft(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
    *,
    draft_nodes: torch.Tensor,
    min_match: int,
    max_match: int,
) -> None:
    """Draft the tokens that followed an earlier occurrence of the text's ending, of the longest ending that has one.

    An ending has min_match to max_match tokens, and may overlap its earlier occurrence. The last occurrence counts. The
    tokens after it, up to the text's end, are taken as a period: drafts that reach the end begin it again. So a slot
    has T - 1 drafts or none.
    Time: one read of the text. Captured: yes. Raises ShapeError for shapes and lengths that do not fit.
    """
    check_arguments(ngram_draft, locals())
    check_batch(tokens, slots.shape[0])
    check_matches(min_match, max_match)
    draft_nodes.fill_(-1)
    count = draft_nodes.shape[1] - 1
    for index, (slot, live) in enumerate(zip(slots.tolist(), draft_live.tolist(), strict=True)):
        if slot < 0 or not live:
            continue
        length = int(draft_lens[index])
        start = _continuation(tokens[slot, :length], min_match, max_match)
        if start:
            at = start + torch.arange(count, device=tokens.device) % (length - start)
            draft_nodes[index, 1:] = tokens[slot, at]


def _continuation(text: torch.Tensor, min_match: int, max_match: int) -> int:
    """Return the position after the last of the longest matches of the text's ending; 0 if there is none. text [n]"""
    length = text.shape[0]
    lengths = torch.zeros(length, dtype=torch.int64, device=text.device)  # of the match that ends before a position
    going = torch.ones(length, dtype=torch.bool, device=text.device)
    going[0] = False
    for back in range(1, min(max_match, length - 1) + 1):
        going[:back] = False
        going[back:] &= text[: length - back] == text[length - back]
        lengths += going
    best = lengths.max() if length > 1 else lengths.sum()
    if int(best) < min_match:
        return 0
    return int((lengths == best).nonzero()[-1])


def check_matches(min_match: int, max_match: int) -> None:
    """Raise ShapeError for lengths of matches that `ngram_draft` does not take."""
    if not 1 <= min_match <= max_match <= MAX_MATCH:
        raise ShapeError(f"matches must be from 1 to {MAX_MATCH} long, got min {min_match} and max {max_match}")


def check_batch(tokens: torch.Tensor, batch: int) -> None:
    """Raise ShapeError for fewer texts than slots."""
    if batch > tokens.shape[0]:
        raise ShapeError(f"tokens must have rows for {batch} slots, got shape {list(tokens.shape)}")
