"""The end of a step: what the host must know goes into a ring that it polls."""

import torch

__all__ = [
    "ACCEPTED",
    "COMMITTED",
    "FINISH",
    "LENGTH_AFTER",
    "RECORD_WIDTH",
    "SLOT",
    "VERIFIED",
    "VERIFIED_DEPTH",
    "publish",
]

SLOT, COMMITTED, FINISH, VERIFIED, ACCEPTED, LENGTH_AFTER, VERIFIED_DEPTH, RECORD_WIDTH = range(8)


def publish(
    slots: torch.Tensor,
    commit_lens: torch.Tensor,
    accepted_lens: torch.Tensor,
    accepted_tokens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    finish: torch.Tensor,
    num_verified: torch.Tensor,
    verified_depth: torch.Tensor,
    lengths: torch.Tensor,
    logprob_values: torch.Tensor,
    logprob_ids: torch.Tensor,
    *,
    ring_records: torch.Tensor,
    ring_tokens: torch.Tensor,
    ring_logprob_values: torch.Tensor,
    ring_logprob_ids: torch.Tensor,
    ring_head: torch.Tensor,
) -> None:
    """Write one entry of the ring, then advance its head; the order is what a polling host relies on.

    ring_records         [R, max B, 7]          int32    out: see the column names; SLOT is -1 for a pad
    ring_tokens          [R, max B, max T]      int32    out: committed tokens, -1 pads
    ring_logprob_values  [R, max B, max T, 21]  float32  out: of each committed token
    ring_logprob_ids     [R, max B, max T, 21]  int32    out: -1 where none was asked for
    ring_head            [1]                    int64    updated: entries written so far
    ACCEPTED counts committed drafts: the bonus token is none, nor is what truncation dropped.
    """
    entry = int(ring_head) % ring_records.shape[0]
    records, tokens = ring_records[entry], ring_tokens[entry]
    records[:, SLOT] = -1
    tokens.fill_(-1)
    ring_logprob_ids[entry].fill_(-1)
    for index, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        count = int(commit_lens[index])
        records[index, SLOT] = slot
        records[index, COMMITTED] = count
        records[index, FINISH] = finish[index]
        records[index, VERIFIED] = num_verified[index]
        records[index, ACCEPTED] = min(int(accepted_lens[index]) - 1, count)
        records[index, LENGTH_AFTER] = lengths[slot]
        records[index, VERIFIED_DEPTH] = verified_depth[index]
        tokens[index, :count] = accepted_tokens[index, :count]
        nodes = accepted_nodes[index, :count].long()
        ring_logprob_values[entry, index, :count] = logprob_values[index, nodes].to(ring_logprob_values.device)
        ring_logprob_ids[entry, index, :count] = logprob_ids[index, nodes].to(ring_logprob_ids.device)
    ring_head += 1
