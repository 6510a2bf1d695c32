"""This module makes the proposals of a wide step: it lists the slots, and drafts from texts that requests name.

Source of drafts from texts: as in `suffix_draft`. Here only the longest match counts, since a named text has few.
"""

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.graphs.schema_check import check_arguments
from lowlat.kernels.reference.speculation.ngram_draft import check_batch
from lowlat.kernels.reference.speculation.suffix_draft import SAMPLES, SHARE, check_options, fractions
from lowlat.kernels.reference.step.slots import FROM_TEXT

__all__ = ["MAX_TEXT", "check_texts", "draft_from_texts", "open_proposals"]

MAX_TEXT = 1 << 20  # tokens of a slot's texts
MAX_ROWS = 32


@operation("""
    read    slots          int32  [B]      -1 pads
    read    lengths        int32  [max_B]  committed tokens n
    write   draft_live     uint8  [B]      1 for slots that are active
    write   draft_lens     int32  [B]      their n, else 0
    update  draft_sources  int32  [max_B]  of these slots: 1 where the source is text next to a draft model; else 0
""")
def open_proposals(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    *,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
    draft_sources: torch.Tensor,
    source: int,
) -> None:
    """List the slots for which a step makes proposals, before it verifies them, and store the proposals' source.

    source  its number in `verified_source`
    """
    check_arguments(open_proposals, locals())
    live = slots >= 0
    draft_live.copy_(live)
    draft_lens.copy_(torch.where(live, lengths[slots.clamp(min=0).long()], 0))
    draft_sources[slots[live].long()] = int(source == FROM_TEXT)


@operation("""
    read    tokens            int32  [Bmax, C]  committed tokens
    read    slots             int32  [B]        -1 pads
    read    draft_live        uint8  [B]        slots that go on
    read    draft_lens        int32  [B]        committed tokens n' of such slots, C at most
    read    draft_texts       int32  [Bmax, D]  texts, -1 after each
    read    draft_text_lens   int32  [Bmax]     their tokens in all, these -1 included; 0: there are none
    update  draft_nodes       int32  [B, T]     as `suffix_draft` wrote them, with shares and lengths
    update  draft_shares      int32  [B, T]
    update  match_lens        int32  [B]
""")
def draft_from_texts(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
    draft_texts: torch.Tensor,
    draft_text_lens: torch.Tensor,
    *,
    draft_nodes: torch.Tensor,
    draft_shares: torch.Tensor,
    match_lens: torch.Tensor,
    max_depth: int,
    max_spec_factor: float,
) -> None:
    """Draft from a slot's named texts if these match a longer ending of its own text than its own drafts follow.

    Endings have 1 to max_depth tokens. The 32 longest matches are looked at, of equally long ones the last first. The
    first is followed that is not at a text's end: up to its text's end, and for at most max_spec_factor * m drafts, m
    the match's tokens. All shares are whole.
    Time: one read of the texts. Captured: yes. Raises ShapeError for shapes, lengths and options that do not fit.
    """
    check_arguments(draft_from_texts, locals())
    check_batch(tokens, slots.shape[0])
    check_texts(draft_nodes.shape[1], draft_texts.shape[1], max_depth, max_spec_factor)
    factor, _ = fractions(max_spec_factor, 0.0)
    count = draft_nodes.shape[1] - 1
    for index, (slot, live) in enumerate(zip(slots.tolist(), draft_live.tolist(), strict=True)):
        if slot < 0 or not live:
            continue
        ending = tokens[slot, : int(draft_lens[index])][-max_depth:]
        text = draft_texts[slot, : int(draft_text_lens[slot])]
        length, place = _longest_match(text, ending)
        if length <= int(match_lens[index]):
            continue
        drafts = text[place : place + min(count, length * factor >> 16)].tolist()
        drafts = drafts[: drafts.index(-1)] if -1 in drafts else drafts
        draft_nodes[index] = -1
        draft_shares[index] = 0
        draft_nodes[index, 1 : len(drafts) + 1] = torch.tensor(drafts, dtype=torch.int32)
        draft_shares[index, 1 : len(drafts) + 1] = SHARE
        match_lens[index] = length


def _longest_match(text: torch.Tensor, ending: torch.Tensor) -> tuple[int, int]:
    """Return the length of the match that is followed, and the place after it; 0: there is none."""
    size = text.shape[0]
    lengths = torch.zeros(size, dtype=torch.int64, device=text.device)
    going = torch.ones(size, dtype=torch.bool, device=text.device)
    going[:1] = False
    for back in range(1, min(ending.shape[0], size - 1) + 1):
        going[:back] = False
        going[back:] &= text[: size - back] == ending[-back]
        lengths += going
    places = lengths.nonzero().flatten().tolist()
    found = sorted(((int(lengths[place]), place) for place in places), reverse=True)[:SAMPLES]
    return next(((length, place) for length, place in found if text[place] >= 0), (0, 0))


def check_texts(rows: int, size: int, max_depth: int, max_spec_factor: float) -> None:
    """Raise ShapeError for rows of a slot, sizes of its texts and options that `draft_from_texts` does not take."""
    check_options(max_depth, max_spec_factor, 0.0)
    if rows > MAX_ROWS:
        raise ShapeError(f"named texts give up to {MAX_ROWS - 1} drafts, got {rows - 1}")
    if not 2 <= size <= MAX_TEXT:
        raise ShapeError(f"draft_texts must have rows of 2 to {MAX_TEXT} tokens, got {size}")
