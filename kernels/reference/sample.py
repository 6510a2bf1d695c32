"""The target's token at every node: penalties, filters, and a draw keyed by (seed, absolute position).

The order is: repetition, presence and frequency penalties; logit bias; stop tokens out before min_tokens; then the
argmax, or temperature, top-k, top-p, min-p and a Gumbel-max draw. Ties go to the lowest token id, at the filters'
edges too: top-k keeps exactly k, top-p the shortest prefix of the sorted distribution that reaches p.
Every row is processed alone, so its bits are its own.
"""

import torch

from lowlat.kernels.reference.random import gumbel
from lowlat.kernels.reference.slot_record import (
    FREQUENCY,
    MIN_P,
    MIN_TOKENS,
    PRESENCE,
    PROMPT_LENGTH,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

__all__ = ["argmax", "draw", "filter_logits", "finite", "penalise", "sample"]


def finite(logits: torch.Tensor, row_live: torch.Tensor, *, finite: torch.Tensor) -> None:
    """Flag the live rows whose logits are all finite: logits [M, V], row_live [M] -> finite [B, T] uint8 out."""
    finite.copy_(torch.isfinite(logits).all(-1).reshape(finite.shape) & (row_live.reshape(finite.shape) != 0))


def argmax(row: torch.Tensor) -> int:
    """Index of the largest value, the lowest of equals: row [V]."""
    return int((row == row.amax()).to(torch.uint8).argmax())


def penalise(
    row: torch.Tensor,
    seen: torch.Tensor,
    counts: torch.Tensor,
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> torch.Tensor:
    """Apply the penalties: row [V] float32, seen [V] bool (prompt or output), counts [V] of generated tokens."""
    if repetition != 1.0:
        row = torch.where(seen, torch.where(row > 0, row / repetition, row * repetition), row)
    if presence or frequency:
        row = row - (counts > 0).float() * presence - counts.float() * frequency
    return row


def filter_logits(row: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Temperature, then -inf for what top-k, top-p or min-p leaves out: row [V] -> [V] float32."""
    row = row / temperature
    if 0 < top_k < row.shape[0] or top_p < 1.0:
        ordered, ids = torch.sort(row, descending=True, stable=True)
        kept = torch.ones_like(ordered, dtype=torch.bool)
        if 0 < top_k < row.shape[0]:
            kept[top_k:] = False
        if top_p < 1.0:
            shares = torch.softmax(torch.where(kept, ordered, -torch.inf), -1)
            before = torch.cumsum(shares.double(), -1) - shares.double()
            kept &= before < top_p
        mask = torch.zeros_like(kept)
        mask[ids[kept]] = True
        row = torch.where(mask, row, -torch.inf)
    if min_p > 0.0:
        shares = torch.softmax(row, -1)
        row = torch.where(shares >= min_p * shares.amax(), row, -torch.inf)
    return row


def draw(row: torch.Tensor, seed: int, position: int) -> int:
    """A token of softmax(row), row [V] float32, by the Gumbel noise of (seed, position)."""
    return argmax(row + gumbel(seed, position, row.shape[0], row.device))


def sample(
    logits: torch.Tensor,
    row_live: torch.Tensor,
    row_tokens: torch.Tensor,
    row_masks: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    slot_ints: torch.Tensor,
    slot_floats: torch.Tensor,
    prompt_seen: torch.Tensor,
    output_counts: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    stop_ids: torch.Tensor,
    *,
    target_tokens: torch.Tensor,
) -> None:
    """Draw the target's token after every live node.

    logits         [B * T, V]   float32
    row_live       [B, T]       uint8
    row_tokens     [B, T]       int32    the nodes' tokens
    row_masks      [B, T]       int64    bits of a node's ancestors and of itself
    slots          [B]          int32    -1 pads
    lengths        [max B]      int32    committed tokens n, the root included
    slot_ints      [max B, 8]   int64    see slot_record
    slot_floats    [max B, 6]   float32
    prompt_seen    [max B, V]   uint8
    output_counts  [max B, V]   int32    committed generated tokens
    bias_ids       [max B, ..]  int32    -1 pads
    bias_values    [max B, ..]  float32
    stop_ids       [max B, ..]  int32    -1 pads
    target_tokens  [B, T]       int32    out: -1 where dead; a row that is not finite gives 0, see `finite`
    A node at depth d draws for position n + d; its history is the committed one and its drafted ancestors.
    """
    rows = target_tokens.shape[1]
    target_tokens.fill_(-1)
    live = row_live.reshape(-1, rows).tolist()
    for index, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        state = (slot_ints[slot].tolist(), slot_floats[slot].tolist())
        plain = _is_plain(state, bias_ids[slot])
        for node in range(rows):
            if not live[index][node]:
                continue
            row = logits[index * rows + node]
            path = [n for n in range(rows) if int(row_masks[index, node]) >> n & 1]
            depth = len(path) - 1
            if not bool(torch.isfinite(row).all()):
                target_tokens[index, node] = 0
                continue
            if not plain:
                drafted = row_tokens[index, path[1:]].long()
                counts = output_counts[slot].index_add(0, drafted, torch.ones_like(drafted, dtype=torch.int32))
                seen = (prompt_seen[slot] != 0) | (counts > 0)
                num_generated = int(lengths[slot]) + depth - state[0][PROMPT_LENGTH]
                blocked = stop_ids[slot] if num_generated < state[0][MIN_TOKENS] else stop_ids[slot, :0]
                row = _process(row, state[1], seen, counts, (bias_ids[slot], bias_values[slot]), blocked)
            target_tokens[index, node] = _choose(row, state, int(lengths[slot]) + depth)


def _is_plain(state: tuple[list[int], list[float]], bias_ids: torch.Tensor) -> bool:
    """Whether a slot's logits need no processing before the choice."""
    ints, floats = state
    penalties = floats[REPETITION] != 1.0 or floats[PRESENCE] != 0.0 or floats[FREQUENCY] != 0.0
    return not penalties and ints[MIN_TOKENS] == 0 and int(bias_ids[0]) < 0


def _process(
    row: torch.Tensor,
    floats: list[float],
    seen: torch.Tensor,
    counts: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor],
    blocked: torch.Tensor,
) -> torch.Tensor:
    row = penalise(
        row,
        seen,
        counts,
        repetition=floats[REPETITION],
        presence=floats[PRESENCE],
        frequency=floats[FREQUENCY],
    )
    ids, values = biases
    given = ids >= 0
    row = row.index_add(0, ids[given].long(), values[given])
    return row.index_fill(0, blocked[blocked >= 0].long(), -torch.inf)


def _choose(row: torch.Tensor, state: tuple[list[int], list[float]], position: int) -> int:
    ints, floats = state
    if floats[TEMPERATURE] == 0.0:
        return argmax(row)
    kept = filter_logits(
        row, temperature=floats[TEMPERATURE], top_k=ints[TOP_K], top_p=floats[TOP_P], min_p=floats[MIN_P]
    )
    return draw(kept, ints[SEED], position)
