"""This module starts a step: it applies the host's commands, lists the active slots, and lays out the rows to verify.

State arrays have one row for each slot of the largest batch. A bucket reaches them through the list of active slots, so
that a step may run in another bucket than the step before.
"""

import torch

from lowlat.errors import DeviceError
from lowlat.graphs.schema import operation
from lowlat.kernels.reference.step.slot_record import (
    DRAFT_LIMIT,
    FORCED,
    HAS_GRAMMAR,
    LENGTH,
    MASKED,
    MAX_BIASES,
    MAX_LENGTH,
    MAX_STOPS,
    NUM_FLOATS,
    NUM_INTS,
)

__all__ = [
    "CANCEL",
    "COMMAND_WIDTH",
    "FORCED_DRAFTS",
    "FROM_METHOD",
    "FROM_TEXT",
    "JOIN",
    "MAX_FORCED",
    "MAX_PATHS",
    "MAX_PATH_NODES",
    "NO_SOURCE",
    "REWIND",
    "SET_DRAFT_LIMIT",
    "apply_commands",
    "gather_rows",
    "list_active_slots",
    "publish_rows",
]

JOIN, CANCEL, SET_DRAFT_LIMIT, REWIND = 1, 2, 3, 4
NO_SOURCE, FROM_METHOD, FROM_TEXT, FORCED_DRAFTS = range(4)  # a slot's drafts are from; text: next to a draft model
MAX_PATHS = 64  # of a slot, that are compared with a forced text
MAX_PATH_NODES = 10240  # on the paths of all slots of a step: 40 KiB of a kernel's shared memory
MAX_FORCED = 31  # the most tokens of a forced text that one step verifies
COMMAND_WIDTH = 4  # opcode, slot, value, reserved


@operation(f"""
    read    command_ring        int64    [R, {COMMAND_WIDTH}]   opcode, slot, value, 0
    read    command_tail        int64    [1]                    commands written so far
    read    staged_ints         int64    [max_B, {NUM_INTS}]    staged_*: a joining slot's first state, by the host
    read    staged_floats       float32  [max_B, {NUM_FLOATS}]
    read    staged_tokens       int32    [max_B, C]
    read    staged_table        int32    [max_B, blocks]
    read    staged_stop_ids     int32    [max_B, {MAX_STOPS}]
    read    staged_bias_ids     int32    [max_B, {MAX_BIASES}]
    read    staged_bias_values  float32  [max_B, {MAX_BIASES}]
    update  command_head        int64    [1]                    commands taken so far
    update  slot_ints           int64    [max_B, {NUM_INTS}]    and below: the slots' state
    update  slot_floats         float32  [max_B, {NUM_FLOATS}]
    update  tokens              int32    [max_B, C]
    update  block_table         int32    [max_B, blocks]
    update  stop_ids            int32    [max_B, {MAX_STOPS}]
    update  bias_ids            int32    [max_B, {MAX_BIASES}]
    update  bias_values         float32  [max_B, {MAX_BIASES}]
    update  lengths             int32    [max_B]
    update  active              int32    [max_B]
    update  num_drafts          int32    [max_B]
    update  prompt_seen         uint8    [max_B, V]
    update  output_counts       int32    [max_B, V]
""")
def apply_commands(
    command_ring: torch.Tensor,
    command_tail: torch.Tensor,
    staged_ints: torch.Tensor,
    staged_floats: torch.Tensor,
    staged_tokens: torch.Tensor,
    staged_table: torch.Tensor,
    staged_stop_ids: torch.Tensor,
    staged_bias_ids: torch.Tensor,
    staged_bias_values: torch.Tensor,
    *,
    command_head: torch.Tensor,
    slot_ints: torch.Tensor,
    slot_floats: torch.Tensor,
    tokens: torch.Tensor,
    block_table: torch.Tensor,
    stop_ids: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    lengths: torch.Tensor,
    active: torch.Tensor,
    num_drafts: torch.Tensor,
    prompt_seen: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """Apply the commands between the ring's head and tail: a slot joins or leaves, gets a draft limit, or goes back.

    A slot that goes back to fewer committed tokens is active and has no drafts, and verifies the host's forced tokens.
    """
    tail = int(command_tail)
    for index in range(int(command_head), tail):
        opcode, slot, value, _ = command_ring[index % command_ring.shape[0]].tolist()
        if opcode == JOIN:
            pairs = (
                (slot_ints, staged_ints),
                (slot_floats, staged_floats),
                (tokens, staged_tokens),
                (block_table, staged_table),
                (stop_ids, staged_stop_ids),
                (bias_ids, staged_bias_ids),
                (bias_values, staged_bias_values),
            )
            for state, staged in pairs:
                state[slot].copy_(staged[slot])
            length = int(slot_ints[slot, LENGTH])
            lengths[slot] = length
            num_drafts[slot] = 0
            active[slot] = 1
            output_counts[slot].zero_()
            prompt_seen[slot].zero_()
            prompt_seen[slot, tokens[slot, :length].long()] = 1
        elif opcode == CANCEL:
            active[slot] = 0
            num_drafts[slot] = 0
        elif opcode == SET_DRAFT_LIMIT:
            slot_ints[slot, DRAFT_LIMIT] = value
        elif opcode == REWIND:
            dropped = tokens[slot, value : int(lengths[slot])].long()
            output_counts[slot].index_add_(0, dropped, -torch.ones_like(dropped, dtype=output_counts.dtype))
            lengths[slot], num_drafts[slot], active[slot] = value, 0, 1
            slot_ints[slot, HAS_GRAMMAR] = FORCED
    command_head.fill_(tail)


def _forced(ints: list[int], row: list[int], rows: int, width: int) -> list[int]:
    """Return the host's forced tokens, as many as one step may verify; empty if it forces none."""
    count = min(row[0], rows - 1, width - 1, ints[DRAFT_LIMIT], MAX_FORCED) if ints[HAS_GRAMMAR] else 0
    return row[1 : max(count, 0) + 1]


@operation("""
    read    active  int32  [max_B]
    write   slots   int32  [B]      -1 pads
""")
def list_active_slots(active: torch.Tensor, *, slots: torch.Tensor) -> None:
    """List the active slots in order."""
    listed = active.nonzero().reshape(-1)[: slots.shape[0]].to(slots.dtype)
    slots.fill_(-1)
    slots[: listed.shape[0]] = listed


@operation(f"""
    read   slots            int32  [B]
    read   lengths          int32  [max_B]              committed tokens n
    read   tokens           int32  [max_B, C]           committed tokens
    read   drafts           int32  [max_B, max_T]       drafted nodes, topological order, node 0 unused
    read   num_drafts       int32  [max_B]
    read   tree_masks       int64  [max_B, max_T]       ancestors and self of each drafted node
    read   tree_paths       int32  [max_B, P, W]        root to leaf, -1 pads
    read   slot_ints        int64  [max_B, {NUM_INTS}]  per-slot limits
    read   grammar_forced   int32  [max_B, max_T]       for a slot with a grammar: count, tokens that must follow
    read   grammar_decided  int64  [max_B]              the number of committed tokens after which they hold
    read   draft_sources    int32  [max_B]              1: the drafts are from text next to a draft model; else 0
    write  row_tokens       int32  [B, T]               -1 where dead
    write  row_positions    int32  [B, T]               absolute; 0 where dead
    write  row_live         uint8  [B, T]
    write  row_masks        int64  [B, T]
    write  paths            int32  [B, P, W]            -1 from the first dead node on
    write  dense_lens       int32  [B]                  n - 1, the root's position; 0 for a pad
    write  num_verified     int32  [B]                  live drafted nodes
    write  verified_depth   int32  [B]                  depth of the deepest
    write  verified_source  int32  [B]                  NO_SOURCE where there are none
""")
def gather_rows(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    tree_masks: torch.Tensor,
    tree_paths: torch.Tensor,
    slot_ints: torch.Tensor,
    grammar_forced: torch.Tensor,
    grammar_decided: torch.Tensor,
    draft_sources: torch.Tensor,
    *,
    row_tokens: torch.Tensor,
    row_positions: torch.Tensor,
    row_live: torch.Tensor,
    row_masks: torch.Tensor,
    paths: torch.Tensor,
    dense_lens: torch.Tensor,
    num_verified: torch.Tensor,
    verified_depth: torch.Tensor,
    verified_source: torch.Tensor,
) -> None:
    """Lay out the rows of this step: the last committed token, then the drafted nodes that may be verified.

    A slot verifies min(its drafts, the bucket's, its request's limit) nodes, none past its maximal length. The tokens
    that its grammar forces next replace its drafts, as a chain, unless a path of its drafts begins with them. If T is
    more than 1, a kernel waits until the host has written these tokens; the reference raises DeviceError if it has not.
    """
    rows = row_tokens.shape[1]
    row_tokens.fill_(-1)
    paths.fill_(-1)
    for out in (row_positions, row_live, row_masks, dense_lens, num_verified, verified_depth, verified_source):
        out.zero_()
    for index, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        length = int(lengths[slot])
        limit = min(int(num_drafts[slot]), rows - 1, int(slot_ints[slot, DRAFT_LIMIT]))
        deepest = int(slot_ints[slot, MAX_LENGTH]) - length - 1
        node_masks, node_tokens, known = tree_masks[slot], drafts[slot], tree_paths[slot]
        decided = int(grammar_decided[slot])
        if rows > 1 and slot_ints[slot, HAS_GRAMMAR] and decided < length:
            raise DeviceError(f"slot {slot} begins after {length} tokens, and what is forced is that after {decided}")
        forced = _forced(slot_ints[slot].tolist(), grammar_forced[slot].tolist(), rows, known.shape[1])
        at_hand = [
            [int(node_tokens[node]) if 0 < node <= limit else -1 for node in path[1 : len(forced) + 1]]
            for path in known[:MAX_PATHS].tolist()
        ]
        source = FROM_TEXT if draft_sources[slot] else FROM_METHOD
        if forced not in at_hand:
            source = FORCED_DRAFTS
            limit, known = len(forced), torch.full_like(known, -1)
            node_masks = torch.tensor([(2 << node) - 1 for node in range(limit + 1)])
            node_tokens = node_tokens.new_tensor([-1, *forced])
            known[:, 0], known[0] = 0, torch.arange(known.shape[1])
        masks = [1, *node_masks[1 : limit + 1].tolist()]
        depths = [(mask & (2**64 - 1)).bit_count() - 1 for mask in masks]
        live = [depth <= max(deepest, 0) for depth in depths]
        count = len(live)
        device = row_tokens.device
        alive = torch.tensor(live, device=device)
        candidates = torch.cat((tokens[slot, length - 1 : length], node_tokens[1:count]))
        row_tokens[index, :count] = torch.where(alive, candidates, -1)
        row_live[index, :count] = alive.to(row_live.dtype)
        positions = torch.tensor([length - 1 + depth for depth in depths], device=device)
        row_positions[index, :count] = torch.where(alive, positions, 0).int()
        row_masks[index, :count] = torch.where(alive, torch.tensor(masks, device=device), 0)
        dense_lens[index] = length - 1
        num_verified[index] = sum(live) - 1
        verified_source[index] = source if sum(live) > 1 else NO_SOURCE
        verified_depth[index] = max(depth for depth, alive_ in zip(depths, live, strict=True) if alive_)
        dead = (known < 0) | (known >= count)
        dead[:, 1:] |= known[:, 1:] == 0  # paths are all zero until a slot's first drafts: only the root is valid
        dead |= ~alive[known.clamp(0, count - 1).long()]
        paths[index] = torch.where(dead.cumsum(-1) > 0, -1, known)
        paths[index, :, 0] = 0


@operation(f"""
    read    slots                int32  [B]
    read    lengths              int32  [max_B]              committed tokens n
    read    slot_ints            int64  [max_B, {NUM_INTS}]
    read    row_tokens           int32  [B, T]               as `gather_rows` wrote them
    read    row_masks            int64  [B, T]
    read    draft_length_choice  int32  [1]                  the draft length chosen, if it is chosen first
    update  grammar_tokens       int32  [max_B, max_T]       -1 where dead
    update  grammar_paths        int64  [max_B, max_T]       ancestors and self of each row; 0 where dead
    update  grammar_lengths      int64  [max_B]              n, written last
""")
def publish_rows(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    slot_ints: torch.Tensor,
    row_tokens: torch.Tensor,
    row_masks: torch.Tensor,
    draft_length_choice: torch.Tensor | None = None,
    *,
    grammar_tokens: torch.Tensor,
    grammar_paths: torch.Tensor,
    grammar_lengths: torch.Tensor,
    most_drafts: int = 0,
) -> None:
    """Publish the rows of slots with a grammar, so that the host fills their masks while the target runs.

    most_drafts  with draft_length_choice: if the step makes 1 to `most_drafts` drafts, its rows are not published here,
                 but after drafting
    Columns past the step's rows are dead. Slots without a grammar are not published.
    """
    if draft_length_choice is not None and 1 <= int(draft_length_choice[0]) <= most_drafts:
        return
    rows = row_tokens.shape[1]
    for index, slot in enumerate(slots.tolist()):
        if slot >= 0 and slot_ints[slot, HAS_GRAMMAR] == MASKED:
            grammar_tokens[slot].fill_(-1)
            grammar_paths[slot].zero_()
            grammar_tokens[slot, :rows] = row_tokens[index].to(grammar_tokens.device)
            grammar_paths[slot, :rows] = row_masks[index].to(grammar_paths.device)
            grammar_lengths[slot] = lengths[slot].to(grammar_lengths.dtype)
