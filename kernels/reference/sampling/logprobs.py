"""This module computes logprobs of drawn tokens and of the likeliest alternatives, from the raw logits."""

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.shapes import check_shape, live_rows
from lowlat.kernels.reference.step.slot_record import MAX_LOGPROBS, NUM_INTS, NUM_LOGPROBS

__all__ = ["logprobs"]


@operation(f"""
    read    logits          float32  [B * T, V]                  before any processing
    read    row_live        uint8    flat [B * T]
    read    target_tokens   int32    [B, T]                      the draws; -1 where there is none
    read    slots           int32    [B]                         -1 pads
    read    slot_ints       int64    [max_B, {NUM_INTS}]         column NUM_LOGPROBS: -1 none, 0 the drawn token alone
    write   logprob_values  float32  [B, T, {MAX_LOGPROBS + 1}]  the drawn token, then likeliest first; 0 where unused
    write   logprob_ids     int32    [B, T, {MAX_LOGPROBS + 1}]  their ids; -1 where unused
""")
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
    """Compute the log-softmax of the drawn token and of the MAX_LOGPROBS likeliest, for slots that ask for it.

    Of equal logits the lowest id comes first. A row without a draw, or whose logits are not finite, has no logprobs:
    its request fails.
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
            drew = live[index * rows + node] and targets[index][node] >= 0
            if wanted < 0 or not drew or not bool(row.isfinite().all()):
                continue
            values = torch.log_softmax(row, 0)
            drawn = row.new_tensor([targets[index][node]], dtype=torch.int64)
            ids = torch.cat((drawn, torch.argsort(row, descending=True, stable=True)[:wanted]))
            logprob_values[index, node, : wanted + 1] = values[ids]
            logprob_ids[index, node, : wanted + 1] = ids.int()
