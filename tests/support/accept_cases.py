"""Random runs for acceptance, truncation, commit and the draft model's rows."""

import random
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from kernel_cases import SAME_SHAPES, Arrays, Bench, poisoned, random_topology

from lowlat.kernels.reference.speculation.accept import accept, accept_simulated, commit, truncate
from lowlat.kernels.reference.speculation.draft_rows import draft_rows
from lowlat.kernels.reference.step.slot_record import MAX_LENGTH, MAX_STOPS, NUM_INTS
from lowlat.kernels.speculation import accept as kernels
from lowlat.kernels.toolchain.kernel import KernelCall

CONTEXT, VOCABULARY = 40, 30
ACCEPT_READS = ("target_tokens", "draft_tokens", "paths", "slots")
ACCEPT_OUTS = ("accepted_tokens", "accepted_nodes", "accepted_lens", "best_path")
TRUNCATE_READS = ("finite", "lengths", "slot_ints", "stop_ids")
TRUNCATE_OUTS = ("commit_lens", "finish")
STATE = ("tokens", "lengths", "active", "output_counts", "num_drafts")
COMMIT_OUTS = ("draft_live", "draft_lens")
DRAFT_OUTS = ("tokens", "positions", "row_live", "write_lens", "live_positions")


def check_accept(bench: Bench, seed: int, *, batch: int, alone: bool, head: bool, probability: float | None) -> Arrays:
    """One random acceptance and commit against the reference, fused or each alone; returns what the reference gives."""
    torch.manual_seed(seed)
    arrays = _arrays(random.Random(seed // SAME_SHAPES), random.Random(seed), batch)

    def apply(module: Any, found: Arrays) -> list[KernelCall]:
        """Every operation of a module, the reference's or the kernels', in order."""
        first = {name: found[name] for name in (*ACCEPT_READS, *ACCEPT_OUTS)}
        if probability is None:
            made = [module.accept(**first)]
        else:
            made = [
                module.accept_simulated(**first, lengths=found["lengths"], probability=probability, seed=seed * 7919)
            ]
        names: tuple[str, ...] = (*ACCEPT_OUTS[:3], *TRUNCATE_READS, "slots", *TRUNCATE_OUTS)
        made.append(module.truncate(**{name: found[name] for name in names}))
        names = ("accepted_tokens", *TRUNCATE_OUTS, "slots", *STATE, *COMMIT_OUTS)
        made.append(module.commit(**{name: found[name] for name in names}))
        if head:
            names = ("accepted_tokens", "commit_lens", "draft_live", "dense_lens")
            made.append(module.draft_rows(**{name: found[name] for name in names}, **_draft_outs(found)))
        return [call for calls in made for call in calls or ()]

    def fused(found: Arrays) -> list[KernelCall]:
        names = (*ACCEPT_READS, *ACCEPT_OUTS, *TRUNCATE_READS, *TRUNCATE_OUTS, *STATE, *COMMIT_OUTS)
        given: dict[str, Any] = {name: found[name] for name in names}
        if probability is not None:
            given |= {"probability": probability, "seed": seed * 7919}
        if head:
            given |= {"draft_rows": _draft_outs(found), "dense_lens": found["dense_lens"]}
        return kernels.accept_and_commit(**given)

    meanings = SimpleNamespace(
        accept=accept, accept_simulated=accept_simulated, truncate=truncate, commit=commit, draft_rows=draft_rows
    )
    calls = partial(apply, kernels) if alone else fused
    return bench.compare(arrays, partial(apply, meanings), calls)


def _draft_outs(arrays: Arrays) -> Arrays:
    return {name: arrays[f"draft.{name}"] for name in DRAFT_OUTS}


def _arrays(shapes: random.Random, source: random.Random, batch: int) -> Arrays:
    max_batch = batch + shapes.randint(0, 2)
    topologies = [random_topology(shapes, 14, 6) for _ in range(batch)]
    rows = max(topology.num_nodes for topology in topologies)
    width = max(topology.depth for topology in topologies) + 1 + shapes.randint(0, 1)
    num_paths = max(len(topology.paths) for topology in topologies) + shapes.randint(0, 1)
    slots = torch.tensor(source.sample(range(max_batch), batch), dtype=torch.int32)
    for index in range(batch):
        if source.random() < 0.15:
            slots[index] = -1
    targets = torch.randint(0, 4, (batch, rows), dtype=torch.int32)
    drafts = torch.randint(0, 4, (batch, rows), dtype=torch.int32)
    paths = torch.full((batch, num_paths, width), -1, dtype=torch.int32)
    for index, topology in enumerate(topologies):
        live = source.randint(1, topology.num_nodes)
        targets[index, live:] = drafts[index, live:] = -1
        paths[index, :, 0] = 0
        if source.random() < 0.5:  # the whole of one path is right
            right = source.choice(topology.paths)
            for parent, node in pairwise(right):
                if node < live:
                    drafts[index, node] = targets[index, parent]
        for number, path in enumerate(topology.paths):
            known = [node for node in path if node < live]
            paths[index, number, : len(known)] = torch.tensor(known, dtype=torch.int32)
        if slots[index] < 0:
            paths[index] = targets[index] = drafts[index] = -1
    lengths = torch.randint(1, CONTEXT - 12, (max_batch,), dtype=torch.int32)
    ints = torch.randint(-(2**60), 2**60, (max_batch, NUM_INTS))
    ints[:, MAX_LENGTH] = lengths + torch.randint(1, 12, (max_batch,))
    finite = (torch.rand(batch, rows) < 0.95).to(torch.uint8)
    stop_ids = torch.full((max_batch, MAX_STOPS), -1, dtype=torch.int32)
    for slot in range(max_batch):
        stop_ids[slot, : source.randint(0, 2)] = source.randint(0, 9)
    arrays = {
        "target_tokens": targets,
        "draft_tokens": drafts,
        "paths": paths,
        "slots": slots,
        "finite": finite,
        "lengths": lengths,
        "slot_ints": ints,
        "stop_ids": stop_ids,
        "dense_lens": torch.where(slots >= 0, lengths[slots.clamp(min=0).long()] - 1, 0).int(),
        "tokens": torch.randint(0, VOCABULARY, (max_batch, CONTEXT), dtype=torch.int32),
        "active": torch.ones(max_batch, dtype=torch.int32),
        "output_counts": torch.randint(0, 5, (max_batch, VOCABULARY), dtype=torch.int32),
        "num_drafts": torch.randint(0, 5, (max_batch,), dtype=torch.int32),
        "draft_live": poisoned(batch, dtype=torch.uint8),
        "draft.tokens": poisoned(batch, rows),
        "draft.positions": poisoned(batch, rows),
        "draft.row_live": poisoned(batch, rows, dtype=torch.uint8),
        "draft.live_positions": poisoned(batch, 1),
    }
    for name in ("accepted_tokens", "accepted_nodes"):
        arrays[name] = poisoned(batch, rows)
    for name in ("accepted_lens", "best_path", "commit_lens", "finish", "draft_lens", "draft.write_lens"):
        arrays[name] = poisoned(batch)
    return arrays
