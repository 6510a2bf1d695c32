"""Logarithmic probabilities of the drawn tokens and their likeliest alternatives, from the raw logits."""

import torch

from lowlat.kernels.reference.slot_record import NUM_LOGPROBS

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
    """For the rows of slots that ask: column 0 the drawn token, then the likeliest, ties to the lowest id.

    logits          [B * T, V]   float32
    row_live        [B, T]       uint8
    target_tokens   [B, T]       int32
    slots           [B]          int32    -1 pads
    slot_ints       [max B, 8]   int64    NUM_LOGPROBS: -1 for none
    logprob_values  [B, T, 21]   float32  out
    logprob_ids     [B, T, 21]   int32    out: -1 where nothing was asked for
    """
    logprob_ids.fill_(-1)
    rows = target_tokens.shape[1]
    for index, slot in enumerate(slots.tolist()):
        count = int(slot_ints[slot, NUM_LOGPROBS]) if slot >= 0 else -1
        if count < 0:
            continue
        for node in range(rows):
            if not row_live.reshape(-1, rows)[index, node]:
                continue
            row = torch.log_softmax(logits[index * rows + node], -1)
            best = torch.sort(row, descending=True, stable=True)[1][:count]
            ids = torch.cat((target_tokens[index, node : node + 1].long(), best))
            logprob_ids[index, node, : ids.shape[0]] = ids.int()
            logprob_values[index, node, : ids.shape[0]] = row[ids]
