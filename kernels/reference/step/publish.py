"""This module publishes a step's results in a ring that the host polls."""

import torch

from lowlat.graphs.schema import operation

__all__ = [
    "ACCEPTED",
    "COMMITTED",
    "FINISH",
    "LENGTH_AFTER",
    "RECORD_WIDTH",
    "SLOT",
    "VERIFIED",
    "VERIFIED_DEPTH",
    "VERIFIED_SOURCE",
    "publish",
]

SLOT, COMMITTED, FINISH, VERIFIED, ACCEPTED, LENGTH_AFTER, VERIFIED_DEPTH, VERIFIED_SOURCE, RECORD_WIDTH = range(9)


@operation(f"""
    read    slots                int32    [B]
    read    commit_lens          int32    [B]
    read    accepted_lens        int32    [B]
    read    accepted_tokens      int32    [B, T]
    read    accepted_nodes       int32    [B, T]
    read    finish               int32    [B]
    read    num_verified         int32    [B]
    read    verified_depth       int32    [B]
    read    verified_source      int32    [B]
    read    lengths              int32    [max_B]
    read    logprob_values       float32  [B, T, n]
    read    logprob_ids          int32    [B, T, n]
    update  ring_records         int32    [R, max_B, {RECORD_WIDTH}]  see the column names; SLOT is -1 for a pad
    update  ring_tokens          int32    [R, max_B, max_T]           committed tokens, -1 pads
    update  ring_logprob_values  float32  [R, max_B, max_T, n]        of each committed token
    update  ring_logprob_ids     int32    [R, max_B, max_T, n]        -1 where none was asked for
    update  ring_head            int64    [1]                         entries written so far
""")
def publish(
    slots: torch.Tensor,
    commit_lens: torch.Tensor,
    accepted_lens: torch.Tensor,
    accepted_tokens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    finish: torch.Tensor,
    num_verified: torch.Tensor,
    verified_depth: torch.Tensor,
    verified_source: torch.Tensor,
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
    """Write one entry of the ring, then advance its head; a polling host relies on this order.

    ACCEPTED counts committed drafts, without the bonus token and without tokens that truncation dropped.
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
        records[index, VERIFIED_SOURCE] = verified_source[index]
        tokens[index, :count] = accepted_tokens[index, :count]
        nodes = accepted_nodes[index, :count].long()
        ring_logprob_values[entry, index, :count] = logprob_values[index, nodes].to(ring_logprob_values.device)
        ring_logprob_ids[entry, index, :count] = logprob_ids[index, nodes].to(ring_logprob_ids.device)
    ring_head += 1
