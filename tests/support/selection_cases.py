"""Helpers of the tests of kernels that choose tokens: memory for calls, and near-ties of the reference's draw."""

import math
from collections.abc import Sequence

import torch
from sampling_cases import MAX_ROWS, World

from lowlat.kernels.reference.sampling.random import gumbel
from lowlat.kernels.reference.sampling.sample import allowed, keep, penalise
from lowlat.kernels.reference.step.slot_record import (
    FREQUENCY,
    HAS_GRAMMAR,
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

SIGN, WORD = 1 << 31, (1 << 32) - 1


def best_pairs(logits: torch.Tensor, limit: int, blocks: int = 7) -> torch.Tensor:
    """Return the best pairs that a GEMM leaves next to logits [M, V]: [M, blocks, 2] int32.

    Blocks take tiles of 16 columns in turn, as the product's do; what they leave is in `select`'s words.
    """
    bits = logits.float().cpu().view(torch.int32).long() & WORD
    keys = torch.where(bits > SIGN, bits ^ WORD, bits | SIGN)
    keys = torch.where((bits & (SIGN - 1)) > limit, WORD, keys)
    columns = torch.arange(logits.shape[1])
    pairs = torch.zeros(logits.shape[0], blocks, 2, dtype=torch.int64)
    for block in range(blocks):
        mine = columns[columns // 16 % blocks == block]
        if mine.numel():
            largest = keys[:, mine].max(1, keepdim=True).values
            lowest = mine[(keys[:, mine] == largest).int().argmax(1)]
            pairs[:, block, 0], pairs[:, block, 1] = largest[:, 0], WORD - lowest
    return torch.where(pairs >= SIGN, pairs - (1 << 32), pairs).int().to(logits.device)


def best_of(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows' pairs [M, blocks, 2] int32 the best: its key, and the second half of it, [M] int64 each."""
    key, low = (pairs.long() & WORD).unbind(-1)
    largest = key.max(1).values
    return largest, torch.where(key == largest[:, None], low, 0).max(1).values


class Memory:
    """A workspace: zero at first, kept by name."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name not in self.tensors:
            self.tensors[name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return self.tensors[name]

    def at_rest(self) -> bool:
        """Whether counters and tables are zero, as the next call needs them."""
        return all(
            not bool(tensor.any()) for name, tensor in self.tensors.items() if "counters" in name or "masses" in name
        )


def make_world(vocabulary: int, options: list[dict[str, float]], biased: Sequence[int]) -> World:
    """A slot for each set of options, after a prompt and some tokens; stop ids in all, biases in some slots."""
    world = World(vocabulary, len(options))
    for slot, each in enumerate(options):
        world.set(slot, length=12 + slot, prompt_length=10, **each)
        if "has_grammar" in each:
            world.mask(slot, torch.rand(MAX_ROWS, vocabulary) < 0.4)
    world.prompt_seen.random_(0, 2)
    world.output_counts.random_(0, 3)
    world.stop_ids[:, 1], world.stop_ids[:, 31], world.stop_ids[:, 7] = 2, vocabulary - 1, vocabulary
    for slot in biased:
        world.bias(slot, {1: 2.5, vocabulary - 1: 5.0, vocabulary // 2: -3.0, vocabulary + 3: 4.0}, first=254)
    return world


def draw_scores(
    world: World, logits: torch.Tensor, slot: int, tokens: list[int], mask: int, node: int = 0
) -> torch.Tensor:
    """Return the numbers that the reference compares at a node, [V] float32, minus infinity for banned tokens."""
    floats, ints = world.floats[slot], world.ints[slot].tolist()
    counts = world.output_counts[slot].clone()
    for bit in range(1, len(tokens)):
        if mask >> bit & 1:
            counts[tokens[bit]] += 1
    parameters = floats[[REPETITION, PRESENCE, FREQUENCY]]
    row = penalise(logits, world.prompt_seen[slot], counts, *parameters)
    for column, token in enumerate(world.bias_ids[slot].tolist()):
        if 0 <= token < row.numel():
            row[token] += world.bias_values[slot, column]
    largest_float = torch.finfo(torch.float32).max
    row = row.clamp(-largest_float, largest_float)
    position = int(world.lengths[slot]) + mask.bit_count() - 1
    if position - ints[PROMPT_LENGTH] < ints[MIN_TOKENS]:
        stops = world.stop_ids[slot].long()
        row[stops[(stops >= 0) & (stops < row.numel())]] = -math.inf
    if ints[HAS_GRAMMAR] == 1:
        row[~allowed(world.grammar_masks[slot, node], row.numel())] = -math.inf
    if float(floats[TEMPERATURE]) == 0.0:
        return row
    scaled = (row - row.max()) / floats[TEMPERATURE]
    kept = keep(scaled, ints[TOP_K], float(floats[TOP_P]), float(floats[MIN_P]))
    return torch.where(kept, scaled + gumbel(ints[SEED], position, row.numel(), row.device), -math.inf)
