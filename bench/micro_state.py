"""The state that kernels of a step find when they are timed alone: agreed drafts, and the bytes of small kernels.

A step's scratch is shared by its operations, so what one of them reads is written again before it is timed.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import torch

from lowlat.graphs import BufferSpec
from lowlat.lowering.lower import LoweredGroup

__all__ = ["agree", "buffer_bytes", "copied_positions", "drafts_of_slots", "path_of"]

# Buffers of which a step without commands, penalties, biases or grammars touches little: rows of int32 ids, or nothing
BY_ROWS = ("tokens", "output_counts")
UNTOUCHED = ("staged_", "command_", "bias_", "grammar_", "prompt_seen", "block_table")
RINGS = "ring_"  # one record of many


def drafts_of_slots(batch: int, depth: int) -> list[int]:
    """Drafts that the slots' target agrees with, each slot another count: 0, 1, .. up to the depth."""
    return [slot % (depth + 1) for slot in range(batch)]


def path_of(paths: Sequence[Sequence[int]], count: int) -> list[int]:
    """The nodes of the last path that has so many drafts, root first. Raises ValueError where there is none."""
    nodes = next((path for path in reversed(paths) if sum(node >= 0 for node in path) > count), None)
    if nodes is None:
        raise ValueError(f"no path has {count} drafts: {paths}")
    return list(nodes[: count + 1])


def agree(scratch: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], drafts: Sequence[int]) -> None:
    """Write what acceptance reads, so that it takes so many drafts of each slot, on `path_of`; all slots are active.

    scratch  of a step: slots [B], dense_lens [B], row_tokens, target_tokens, finite [B, T], paths [B, P, W]
    state    tree_paths [slots, P, W] and lengths [slots]
    Raises ValueError where a slot has no path of so many drafts.
    """
    batch, rows = scratch["row_tokens"].shape
    paths = state["tree_paths"][:batch].cpu()
    tokens = 1 + torch.arange(batch * rows, dtype=torch.int32).view(batch, rows)
    targets = torch.zeros_like(tokens)  # no draft's
    for slot, count in enumerate(drafts):
        for node, child in pairwise(path_of(paths[slot].tolist(), count)):
            targets[slot, node] = tokens[slot, child]
    scratch["slots"].copy_(torch.arange(batch, dtype=torch.int32))
    scratch["dense_lens"].copy_(state["lengths"][:batch] - 1)
    scratch["paths"].copy_(paths)
    scratch["row_tokens"].copy_(tokens)
    scratch["target_tokens"].copy_(targets)
    scratch["finite"].fill_(1)


def copied_positions(state: Mapping[str, torch.Tensor], drafts: Sequence[int]) -> int:
    """Accepted nodes that do not lie at their positions: keys and values of so many are moved."""
    paths = [path_of(state["tree_paths"][slot].tolist(), count) for slot, count in enumerate(drafts)]
    return sum(node != place for path in paths for place, node in enumerate(path))


def buffer_bytes(group: LoweredGroup, specs: Mapping[str, BufferSpec], batch: int, rows: int, moved: int = 0) -> int:
    """Bytes that a group of small operations reads and writes: of each of its buffers what so many slots use.

    batch, rows  slots of the step, and rows of each; state of more slots counts in proportion
    moved        positions of the KV cache that are copied, each read and written
    """
    names = {name for op in group.ops for name in (*op.reads.values(), *op.writes.values())}
    slots = specs["slot_ints"].shape[0] if "slot_ints" in specs else batch
    return sum(_bytes(name, specs[name], batch, rows, slots, moved) for name in names)


def _bytes(name: str, spec: BufferSpec, batch: int, rows: int, slots: int, moved: int) -> int:
    size, shape = spec.dtype.itemsize, tuple(spec.shape)
    if name.startswith(("k_cache", "v_cache")):
        groups, dim = shape[1], shape[3]
        return 2 * moved * groups * dim * size
    if name.startswith(RINGS) and len(shape) > 1:
        return prod(shape[1:]) * size * batch // slots
    if name in BY_ROWS:
        return batch * rows * size
    if name.startswith(UNTOUCHED):
        return 0
    whole = prod(shape) * size
    return whole * batch // slots if shape and shape[0] == slots else whole
