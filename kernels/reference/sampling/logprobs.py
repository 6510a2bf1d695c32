"""Logarithmic probabilities of drawn tokens and of their likeliest alternatives, from the raw logits."""

import torch

from lowlat.kernels.reference.shapes import check_shape, live_rows
from lowlat.kernels.reference.step.slot_record import MAX_LOGPROBS, NUM_LOGPROBS

__all__ = ["logprobs"]


def logprobs(
    logits: torch.Tensor,
    row_live: torch.Tensor,
    target_tokens: torch.Tensor,
    slots: torch.Tensor,
    slot_ints: torch.Tensor,
    *,
    logprob_values: torch.Tensor,
    logprob_ids: torch.Tensor,
) -> None:
    """Log-softmax of the drawn token and of the NUM_LOGPROBS likeliest, for the slots that ask.

    logits          [B * T, V]        float32  before any processing
    row_live        [B, T] or [B*T]   uint8
    target_tokens   [B, T]            int32    the draws; -1 dead
    slots           [B]               int32    -1 pads
    slot_ints       [max B, NUM_INTS] int64    column NUM_LOGPROBS: -1 none, 0 the drawn token alone
    logprob_values  [B, T, 21]        float32  out: column 0 the drawn token, then likeliest first; 0 where unused
    logprob_ids     [B, T, 21]        int32    out: the ids of the columns; -1 where unused
    Equal logits come lowest id first. A row whose logits are not finite gives nothing: its request fails.
    Raises ShapeError on the host for shapes that do not fit.
    """
    batch, rows = target_tokens.shape
    check_shape("logprob_values", logprob_values, batch, rows, MAX_LOGPROBS + 1)
    check_shape("logprob_ids", logprob_ids, batch, rows, MAX_LOGPROBS + 1)
    check_shape("logits", logits, batch * rows, logits.shape[1])
    logprob_values.zero_()
    logprob_ids.fill_(-1)
    live = live_rows(row_live, batch * rows)
    targets = target_tokens.tolist()
    for index, slot in enumerate(slots.tolist()):
        wanted = -1 if slot < 0 else int(slot_ints[slot, NUM_LOGPROBS])
        wanted = min(wanted, MAX_LOGPROBS, logits.shape[1])
        for node in range(rows):
            row = logits[index * rows + node]
            if wanted < 0 or not live[index * rows + node] or not bool(row.isfinite().all()):
                continue
            values = torch.log_softmax(row, 0)
            drawn = row.new_tensor([targets[index][node]], dtype=torch.int64)
            ids = torch.cat((drawn, torch.argsort(row, descending=True, stable=True)[:wanted]))
            logprob_values[index, node, : wanted + 1] = values[ids]
            logprob_ids[index, node, : wanted + 1] = ids.int()
