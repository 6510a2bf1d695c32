"""This module accepts drafts: it follows the drafted children that equal the target's draw, and commits the path.

Source: EAGLE-3, arXiv 2503.01840, section 3. Sample-and-match: the draw at every node is the target's own, so the
committed tokens are those of decoding without drafts, whatever the drafts are.
"""

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.sampling.random import uniforms
from lowlat.kernels.reference.step.slot_record import MAX_LENGTH, MAX_STOPS, NUM_INTS

__all__ = ["FINISH_ERROR", "FINISH_LENGTH", "FINISH_STOP", "accept", "accept_simulated", "commit", "truncate"]

FINISH_STOP, FINISH_LENGTH, FINISH_ERROR = 1, 2, 3
SIMULATION_STREAM = 7


@operation("""
    read    target_tokens    int32  [B, T]     the target's draw after each node; -1 where dead
    read    draft_tokens     int32  [B, T]     the tree's tokens, node 0 the last committed; -1 pads
    read    paths            int32  [B, P, W]  node indices root to leaf; -1 pads
    read    slots            int32  [B]        -1 pads
    write   accepted_tokens  int32  [B, T]     tokens to commit; -1 pads
    write   accepted_nodes   int32  [B, T]     the nodes whose draws these are, root first; -1 pads
    write   accepted_lens    int32  [B]        1..T for an active slot, 0 for a dead one
    write   best_path        int32  [B]        the path taken, the first of the longest; -1 for a dead slot
""")
def accept(
    target_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    paths: torch.Tensor,
    slots: torch.Tensor,
    *,
    accepted_tokens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    accepted_lens: torch.Tensor,
    best_path: torch.Tensor,
) -> None:
    """Take the longest drafted path that the target agrees with, and the target's token after it."""
    accepted_tokens.fill_(-1)
    accepted_nodes.fill_(-1)
    best_path.fill_(-1)
    accepted_lens.zero_()
    for index, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        targets, drafts = target_tokens[index].tolist(), draft_tokens[index].tolist()
        best: list[int] = []
        for number, path in enumerate(paths[index].tolist()):
            nodes = [0]
            for node in path[1:]:
                if node < 0 or drafts[node] != targets[nodes[-1]]:
                    break
                nodes.append(node)
            if len(nodes) > len(best):
                best, best_path[index] = nodes, number
        _take(index, best, [targets[node] for node in best], accepted_tokens, accepted_nodes, accepted_lens)


@operation("""
    read    target_tokens    int32  [B, T]     the target's draw after each node; -1 where dead
    read    draft_tokens     int32  [B, T]     the tree's tokens, node 0 the last committed; -1 pads
    read    paths            int32  [B, P, W]  node indices root to leaf; -1 pads
    read    slots            int32  [B]        -1 pads
    read    lengths          int32  [max_B]    committed tokens
    write   accepted_tokens  int32  [B, T]     tokens to commit; -1 pads
    write   accepted_nodes   int32  [B, T]     the nodes whose draws these are, root first; -1 pads
    write   accepted_lens    int32  [B]        1..T for an active slot, 0 for a dead one
    write   best_path        int32  [B]        the path taken, the first of the longest; -1 for a dead slot
""")
def accept_simulated(
    target_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    paths: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    *,
    accepted_tokens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    accepted_lens: torch.Tensor,
    best_path: torch.Tensor,
    probability: float,
    seed: int,
) -> None:
    """Accept each draft with a fixed probability, if those before it were accepted, whatever its token; for benchmarks.

    A draft's coin depends only on (seed + slot, its absolute position), so longer and shorter drafts accept the same
    positions. The resulting text has no meaning.
    """
    accepted_tokens.fill_(-1)
    accepted_nodes.fill_(-1)
    best_path.fill_(-1)
    accepted_lens.zero_()
    chance = float(torch.tensor(probability, dtype=torch.float32))  # rounded to float32, as coins are
    for index, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        longest = max(range(paths.shape[1]), key=lambda p: int((paths[index, p] >= 0).sum()))
        path = [node for node in paths[index, longest].tolist() if node >= 0]
        count = 1
        while count < len(path) and _coin(seed + slot, int(lengths[slot]) + count - 1) < chance:
            count += 1
        nodes = path[:count]
        tokens = [int(draft_tokens[index, node]) for node in nodes[1:]] + [int(target_tokens[index, nodes[-1]])]
        best_path[index] = longest
        _take(index, nodes, tokens, accepted_tokens, accepted_nodes, accepted_lens)


def _coin(seed: int, position: int) -> float:
    return float(uniforms(seed, position, 1, torch.device("cpu"), stream=SIMULATION_STREAM))


def _take(
    index: int,
    nodes: list[int],
    tokens: list[int],
    accepted_tokens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    accepted_lens: torch.Tensor,
) -> None:
    count = len(nodes)
    accepted_nodes[index, :count] = torch.tensor(nodes, dtype=torch.int32)
    accepted_tokens[index, :count] = torch.tensor(tokens, dtype=torch.int32)
    accepted_lens[index] = count


@operation(f"""
    read    accepted_tokens  int32  [B, T]                as `accept` wrote them, with nodes and lengths
    read    accepted_nodes   int32  [B, T]
    read    accepted_lens    int32  [B]
    read    finite           uint8  [B, T]                per node
    read    slots            int32  [B]
    read    lengths          int32  [max_B]               committed tokens n
    read    slot_ints        int64  [max_B, {NUM_INTS}]
    read    stop_ids         int32  [max_B, {MAX_STOPS}]  -1 pads
    write   commit_lens      int32  [B]                   tokens to commit, 0 for a dead slot
    write   finish           int32  [B]                   0, FINISH_STOP, FINISH_LENGTH or FINISH_ERROR
""")
def truncate(
    accepted_tokens: torch.Tensor,
    accepted_nodes: torch.Tensor,
    accepted_lens: torch.Tensor,
    finite: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    slot_ints: torch.Tensor,
    stop_ids: torch.Tensor,
    *,
    commit_lens: torch.Tensor,
    finish: torch.Tensor,
) -> None:
    """Cut the accepted tokens at the first stop token, at the length limit, or before a row without a draw.

    A row has no draw if its logits are not finite, or if a grammar allows no token.
    """
    commit_lens.zero_()
    finish.zero_()
    for index, (slot, count) in enumerate(zip(slots.tolist(), accepted_lens.tolist(), strict=True)):
        if slot < 0:
            continue
        stops = {token for token in stop_ids[slot].tolist() if token >= 0}
        room = int(slot_ints[slot, MAX_LENGTH]) - int(lengths[slot])
        for place in range(count):
            token = int(accepted_tokens[index, place])
            if token < 0 or not finite[index, int(accepted_nodes[index, place])]:
                finish[index] = FINISH_ERROR
                break
            commit_lens[index] = place + 1
            if token in stops:
                finish[index] = FINISH_STOP
                break
            if place + 1 >= room:
                finish[index] = FINISH_LENGTH
                break


@operation("""
    read    accepted_tokens  int32  [B, T]
    read    commit_lens      int32  [B]
    read    finish           int32  [B]
    read    slots            int32  [B]
    update  tokens           int32  [max_B, C]
    update  lengths          int32  [max_B]
    update  active           int32  [max_B]
    update  output_counts    int32  [max_B, V]
    update  num_drafts       int32  [max_B]
    write   draft_live       uint8  [B]         1 for slots that continue, and so will draft
    write   draft_lens       int32  [B]         the new committed length n' of such slots, else 0
""")
def commit(
    accepted_tokens: torch.Tensor,
    commit_lens: torch.Tensor,
    finish: torch.Tensor,
    slots: torch.Tensor,
    *,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    active: torch.Tensor,
    output_counts: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
) -> None:
    """Append the tokens, advance lengths and counts, end finished slots, and retract all drafts."""
    draft_live.zero_()
    draft_lens.zero_()
    entries = zip(slots.tolist(), commit_lens.tolist(), finish.tolist(), strict=True)
    for index, (slot, count, reason) in enumerate(entries):
        if slot < 0:
            continue
        length = int(lengths[slot])
        new = accepted_tokens[index, :count]
        tokens[slot, length : length + count] = new
        output_counts[slot].index_add_(0, new.long(), torch.ones_like(new))
        lengths[slot] = length + count
        num_drafts[slot] = 0
        if reason:
            active[slot] = 0
        else:
            draft_live[index] = 1
            draft_lens[index] = length + count
