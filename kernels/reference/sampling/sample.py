"""This module draws the target's token at every node: it processes the logits by the node's history, then draws.

A draw depends only on the node's logits, its request's parameters and history, its seed and its absolute position. So
drafts change no token (sample-and-match). The order of processing is:

1. repetition penalty: a logit of a token in the prompt or the output is divided by it if positive, else multiplied
2. presence penalty, then frequency penalty: subtracted for tokens of the output
3. logit bias: added
4. min_tokens: stop ids are banned while fewer tokens have been generated; then tokens that the row's grammar forbids
5. temperature 0: the largest logit, the lowest id among equals. Otherwise (logit - largest) / temperature, then
6. top_k, top_p among the tokens that top_k kept, min_p; then the largest of logit + Gumbel noise among the kept

transformers has the same order of warpers (temperature, top_k, top_p, min_p), and vLLM of penalties. Each of the three
cut-offs keeps every token whose logit reaches a bound, so tokens that tie at the bound are all kept. top_p's masses
are integers in units of 2**-40 of the likeliest token's, so that their sums do not depend on the order of summation.
"""

import math

import torch

from lowlat.errors import DeviceError
from lowlat.graphs.schema import operation
from lowlat.kernels.reference.sampling.random import gumbel
from lowlat.kernels.reference.shapes import check_shape, live_rows
from lowlat.kernels.reference.step.slot_record import (
    FREQUENCY,
    HAS_GRAMMAR,
    MASKED,
    MAX_BIASES,
    MAX_STOPS,
    MIN_P,
    MIN_TOKENS,
    NUM_FLOATS,
    NUM_INTS,
    PRESENCE,
    PROMPT_LENGTH,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

__all__ = ["allowed", "finite", "keep", "lowest_argmax", "penalise", "sample"]

MASS_UNIT = 2.0**40
LARGEST = torch.finfo(torch.float32).max
MASK_BITS = (1 << 64) - 1


@operation("""
    read    logits    float32  [B * T, V]
    read    row_live  uint8    flat [B * T]
    write   finite    uint8    [B, T]        1 for a live row without NaN or infinity, else 0
""")
def finite(logits: torch.Tensor, row_live: torch.Tensor, *, finite: torch.Tensor) -> None:
    """Flag the rows whose raw logits are all finite; minus infinity from a model counts as a failure, too."""
    check_shape("logits", logits, finite.numel(), logits.shape[1])
    sound = logits.isfinite().all(-1) & (row_live.reshape(-1) != 0)
    finite.copy_(sound.reshape(finite.shape))


def lowest_argmax(row: torch.Tensor) -> int:
    """Return the index of the largest of [V] numbers without NaN, the lowest among equals, on any device."""
    return int((row == row.max()).nonzero()[0, 0])


def allowed(mask: torch.Tensor, width: int) -> torch.Tensor:
    """Unpack a row's mask [ceil(width / 32)] int32, lowest bit first, to [width] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (mask[:, None] >> bits & 1).bool().reshape(-1)[:width]


def keep(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Mark the tokens that may be drawn.

    scaled  [V]  float32  (logit - largest) / temperature: the likeliest is 0, banned tokens are -inf
    top_k   keep logits that reach the k-th largest; 0 keeps all
    top_p   keep logits that reach the largest bound whose tokens hold top_p of the mass that top_k kept
    min_p   keep tokens at least min_p times as likely as the likeliest
    Returns [V] bool; at least one is true.
    """
    kept = scaled > -math.inf
    if 0 < top_k < scaled.numel():
        kept &= scaled >= torch.topk(scaled, top_k).values[-1]
    probabilities = torch.exp(scaled)
    if top_p < 1.0:
        masses = torch.where(kept, (probabilities * MASS_UNIT).long(), 0)
        order = torch.argsort(scaled, descending=True, stable=True)
        sums = masses[order].cumsum(0)
        total = int(sums[-1])
        need = min(max(math.ceil(top_p * total), 1), total)
        kept &= scaled >= scaled[order[int((sums < need).sum())]]
    if min_p > 0.0:
        kept &= probabilities >= min_p
    return kept


def penalise(
    logits: torch.Tensor,
    prompt_seen: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Apply the three penalties to one row, in this order, each operation rounded by itself: a new [V] float32.

    logits       [V]  float32
    prompt_seen  [V]  uint8
    counts       [V]  int32    occurrences of each token in the output, drafted ancestors included
    repetition, presence, frequency  []  float32, on the row's device: some devices divide by a host number by
                 multiplying by its reciprocal
    A quotient beyond float32's range becomes its largest or least number.
    """
    in_output = counts > 0
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition).clamp(-LARGEST, LARGEST)
    row = torch.where(in_output | (prompt_seen != 0), penalised, logits)
    row = row - presence * in_output.float()
    return row - frequency * counts.float()


class _Rows:
    """The arguments of `sample`, read one row at a time."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state
        self.lengths = state["lengths"].tolist()
        self.tokens = state["row_tokens"].tolist()
        self.masks = state["row_masks"].tolist()

    def draw(self, logits: torch.Tensor, slot: int, index: int, node: int) -> int:
        """Draw the token after one live node."""
        if not bool(logits.isfinite().all()):
            return 0
        ints, floats = self.state["slot_ints"][slot].tolist(), self.state["slot_floats"][slot]
        mask = self.masks[index][node] & MASK_BITS
        position = self.lengths[slot] + mask.bit_count() - 1
        drafted = [self.tokens[index][bit] for bit in range(1, mask.bit_length()) if mask >> bit & 1]
        row = self._penalise(logits, slot, drafted)
        row = self._bias(row, slot)
        if position - ints[PROMPT_LENGTH] < ints[MIN_TOKENS]:
            row[self._listed("stop_ids", slot, row.numel())[1]] = -math.inf
        if ints[HAS_GRAMMAR] == MASKED:
            row[~self._allowed(slot, node, row.numel())] = -math.inf
        largest = row.max()
        if ints[HAS_GRAMMAR] == MASKED and float(largest) == -math.inf:
            return -1
        temperature = floats[TEMPERATURE]
        if float(temperature) == 0.0 or float(largest) == -math.inf:
            return lowest_argmax(row)
        scaled = (row - largest) / temperature
        kept = keep(scaled, ints[TOP_K], float(floats[TOP_P]), float(floats[MIN_P]))
        noisy = scaled + gumbel(ints[SEED], position, row.numel(), row.device)
        return lowest_argmax(torch.where(kept, noisy, -math.inf))

    def _allowed(self, slot: int, node: int, width: int) -> torch.Tensor:
        """Return the tokens that a row's grammar allows. Raises DeviceError if the host has not filled the masks."""
        ready, length = int(self.state["grammar_ready"][slot]), self.lengths[slot]
        if ready < length:
            raise DeviceError(f"slot {slot} draws after {length} tokens, and its masks are those after {ready}")
        return allowed(self.state["grammar_masks"][slot, node].to(self.state["slot_ints"].device), width)

    def _penalise(self, logits: torch.Tensor, slot: int, drafted: list[int]) -> torch.Tensor:
        """Apply steps 1 and 2, into a new row."""
        floats = self.state["slot_floats"][slot]
        parameters = floats[[REPETITION, PRESENCE, FREQUENCY]]
        if parameters.tolist() == [1.0, 0.0, 0.0]:
            return logits.clone()
        counts = self.state["output_counts"][slot].clone()
        if drafted:
            ids = torch.tensor(drafted, device=counts.device)
            counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))
        return penalise(logits, self.state["prompt_seen"][slot], counts, *parameters)

    def _bias(self, row: torch.Tensor, slot: int) -> torch.Tensor:
        """Apply step 3 in place."""
        places, ids = self._listed("bias_ids", slot, row.numel())
        row[ids] = row[ids] + self.state["bias_values"][slot][places]
        return row.clamp_(-LARGEST, LARGEST)

    def _listed(self, name: str, slot: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the used columns of a slot's list of ids, and the ids; ids outside the vocabulary are pads."""
        ids = self.state[name][slot].long()
        places = ((ids >= 0) & (ids < vocabulary)).nonzero()[:, 0]
        return places, ids[places]


@operation(f"""
    read    logits         float32  [B * T, V]             raw
    read    row_live       uint8    flat [B * T]
    read    row_tokens     int32    [B, T]                 the node's token; node 0 the last committed; -1 dead
    read    row_masks      int64    [B, T]                 bit j: node j is an ancestor or the node itself
    read    slots          int32    [B]                    the state row of each bucket slot; -1 pads
    read    lengths        int32    [max_B]                committed tokens n
    read    slot_ints      int64    [max_B, {NUM_INTS}]    see `slot_record`
    read    slot_floats    float32  [max_B, {NUM_FLOATS}]  see `slot_record`
    read    prompt_seen    uint8    [max_B, V]             1 if the prompt has the token
    read    output_counts  int32    [max_B, V]             how often the token was generated and committed
    read    bias_ids       int32    [max_B, {MAX_BIASES}]  distinct; -1 pads
    read    bias_values    float32  [max_B, {MAX_BIASES}]
    read    stop_ids       int32    [max_B, {MAX_STOPS}]   -1 pads
    read    grammar_masks  int32    [max_B, max_T, W]      W = ceil(V / 32); bit 1: allowed, little end first
    read    grammar_ready  int64    [max_B]                the committed tokens after which the slot's masks hold
    write   target_tokens  int32    [B, T]                 the draw; -1 dead or nothing allowed, 0 not finite
""")
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
    grammar_masks: torch.Tensor,
    grammar_ready: torch.Tensor,
    *,
    target_tokens: torch.Tensor,
) -> None:
    """Draw the target's token at every live node; the module's docstring gives the order of processing.

    The draw after a node of depth d (bits set in its mask - 1) has the absolute position n + d. The node and its
    ancestors, except node 0, count as output, too. If the slot has a grammar, tokens that the node's mask forbids have
    probability 0. A kernel waits until the host has filled the masks; the reference raises DeviceError if it has not.
    Time: a few passes over each live row, a sort where top_p is set. Captured: yes, as a kernel.
    Raises ShapeError on the host for shapes that do not fit.
    Source: Gumbel-max over counter-based numbers, see `random`; penalties as OpenAI's and CTRL's (arXiv
    1909.05858, section 4.1).
    """
    batch, rows = target_tokens.shape
    check_shape("logits", logits, batch * rows, prompt_seen.shape[1])
    for name, array in (("row_tokens", row_tokens), ("row_masks", row_masks)):
        check_shape(name, array, batch, rows)
    state = {
        "row_tokens": row_tokens,
        "row_masks": row_masks,
        "lengths": lengths,
        "slot_ints": slot_ints,
        "slot_floats": slot_floats,
        "prompt_seen": prompt_seen,
        "output_counts": output_counts,
        "bias_ids": bias_ids,
        "bias_values": bias_values,
        "stop_ids": stop_ids,
        "grammar_masks": grammar_masks,
        "grammar_ready": grammar_ready,
    }
    reader = _Rows(state)
    live = live_rows(row_live, batch * rows)
    target_tokens.fill_(-1)
    for index, slot in enumerate(slots.tolist()):
        for node in range(rows):
            row = index * rows + node
            if slot >= 0 and live[row]:
                target_tokens[index, node] = reader.draw(logits[row], slot, index, node)
