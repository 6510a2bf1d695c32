"""Random states at the end of a step: its drafts, and the entry that goes into the ring."""

import random

import torch
from kernel_cases import SAME_SHAPES, Arrays, Bench, poisoned, random_topology

from lowlat.kernels.reference.speculation.draft_rows import tree_masks
from lowlat.kernels.reference.speculation.length_probabilities import NUM_RUNS, ONE, learn_draft_lengths
from lowlat.kernels.reference.speculation.waiting import keep_features
from lowlat.kernels.reference.step.publish import RECORD_WIDTH, publish
from lowlat.kernels.step import publish as kernels
from lowlat.kernels.step.publish import LoopControl
from lowlat.kernels.toolchain.kernel import KernelCall

RING, COLUMNS, MOST = 4, 5, 5
READS = (
    *("slots", "commit_lens", "accepted_lens", "accepted_tokens", "accepted_nodes", "finish", "num_verified"),
    *("verified_depth", "verified_source", "lengths", "logprob_values", "logprob_ids"),
)
RINGS = ("ring_records", "ring_tokens", "ring_logprob_values", "ring_logprob_ids", "ring_head")
DRAFT_READS = ("draft_nodes", "draft_live", "topology_masks", "topology_paths")
DRAFTS = ("drafts", "num_drafts", "tree_masks", "tree_paths")


def check_publish(bench: Bench, seed: int, *, drafting: str, batch: int = 3, loop: LoopControl | None = None) -> Arrays:
    """Against the reference: the ring alone ("no" drafts), after the drafts ("fused"), or both in turn ("alone")."""
    torch.manual_seed(seed)
    arrays = _arrays(
        random.Random(seed // SAME_SHAPES),
        random.Random(seed),
        batch,
        batch + 1 if loop is None else loop.active.shape[0],
    )

    def reference(found: Arrays) -> None:
        if drafting != "no":
            tree_masks(**{name: found[name] for name in (*DRAFT_READS, "slots", *DRAFTS)})
        publish(**{name: found[name] for name in (*READS, *RINGS)})
        found["ring_count"] += 1

    def calls(found: Arrays) -> list[KernelCall]:
        publication = {name: found[name] for name in (*READS, *RINGS, "ring_count")}
        drafted = {name: found[name] for name in (*DRAFT_READS, *DRAFTS)}
        if drafting == "fused":
            return kernels.finish_step(**drafted, publication=publication, loop=loop)
        masks = kernels.tree_masks(**drafted, slots=found["slots"]) if drafting == "alone" else []
        return [*masks, *kernels.publish(**publication, loop=loop)]

    return bench.compare(arrays, reference, calls)


def check_end(bench: Bench, seed: int, *, keeps: bool, batch: int = 3, loop: LoopControl | None = None) -> None:
    """A publication with what is learnt of the drafts and, where it `keeps`, the features that wait, in one launch."""
    torch.manual_seed(seed)
    shapes, source = random.Random(seed // SAME_SHAPES), random.Random(seed)
    max_batch = batch + 1 if loop is None else loop.active.shape[0]
    arrays = _arrays(shapes, source, batch, max_batch)
    rows = arrays["accepted_nodes"].shape[1]
    probabilities = torch.randint(1, 8 * ONE, (max_batch + 1, NUM_RUNS, MOST, 2), dtype=torch.int32).sort().values
    arrays["verified_source"] %= 4
    learnt: Arrays = {
        "dense_lens": torch.randint(0, 60, (batch,), dtype=torch.int32),
        "extended": torch.randint(0, 60, (max_batch,), dtype=torch.int32),
        "length_probabilities": probabilities,
        "length_runs": torch.randint(0, 12, (max_batch,), dtype=torch.int32),
        "length_expected": poisoned(max_batch, MOST + 1),
    }
    features: Arrays = {f"source{number}": torch.randn(batch * rows, 8) for number in range(3)}
    features["waiting_features"] = torch.randn(max_batch, rows + 3, 24)
    heads = ("accepted_nodes", "commit_lens", "dense_lens", "slots")
    told = ("slots", "accepted_lens", "num_verified", "verified_source")
    extends = source.random() < 0.5

    def parts(found: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        kept = {name: found[name] for name in (*heads, *features)}
        publication = {name: found[name] for name in (*READS, *RINGS)}
        return publication, {name: found[name] for name in (*told, *learnt)}, kept

    def reference(found: Arrays) -> None:
        publication, learning, kept = parts(found)
        publish(**publication)
        found["ring_count"] += 1
        if keeps:
            keep_features(**kept)
        learn_draft_lengths(**learning, extends=extends)

    def calls(found: Arrays) -> list[KernelCall]:
        publication, learning, kept = parts(found)
        given = {**publication, "ring_count": found["ring_count"]}
        return kernels.end_step(given, {**learning, "extends": extends}, kept if keeps else None, loop)

    bench.compare({**arrays, **learnt, **features}, reference, calls)


def _arrays(shapes: random.Random, source: random.Random, batch: int, max_batch: int) -> Arrays:
    topology = random_topology(shapes, 10, 4)
    rows, max_rows = topology.num_nodes, topology.num_nodes + shapes.randint(0, 2)
    slots = torch.tensor(source.sample(range(max_batch), batch), dtype=torch.int32)
    slots[torch.rand(batch) < 0.25] = -1
    accepted = torch.randint(1, rows + 1, (batch,), dtype=torch.int32)
    accepted[slots < 0] = 0
    commits = torch.minimum(accepted, torch.randint(0, rows + 1, (batch,), dtype=torch.int32))
    nodes = torch.stack([torch.randperm(rows) for _ in range(batch)]).int()
    nodes[torch.arange(rows) >= accepted[:, None]] = -1
    width, num_paths = topology.depth + 1, len(topology.paths)
    paths = [[*path, *[-1] * (width - len(path))] for path in topology.paths]
    head = source.randint(0, 99)
    drafted = torch.randint(-1 if source.random() < 0.5 else 0, 9, (batch, rows), dtype=torch.int32)
    values = torch.randn(batch, rows, COLUMNS)
    values[0, 0, 0] = torch.nan
    arrays: Arrays = {
        "slots": slots,
        "commit_lens": commits,
        "accepted_lens": accepted,
        "accepted_tokens": torch.randint(0, 99, (batch, rows), dtype=torch.int32),
        "accepted_nodes": nodes,
        "lengths": torch.randint(0, 99, (max_batch,), dtype=torch.int32),
        "logprob_values": values,
        "logprob_ids": torch.randint(-1, 99, (batch, rows, COLUMNS), dtype=torch.int32),
        "ring_head": torch.tensor([head]),
        "ring_count": torch.tensor([head]),
        "ring_records": poisoned(RING, max_batch, RECORD_WIDTH),
        "ring_tokens": poisoned(RING, max_batch, max_rows),
        "ring_logprob_values": poisoned(RING, max_batch, max_rows, COLUMNS, dtype=torch.float32),
        "ring_logprob_ids": poisoned(RING, max_batch, max_rows, COLUMNS),
        "draft_nodes": drafted,
        "draft_live": (torch.rand(batch) < 0.7).to(torch.uint8) * (slots >= 0).to(torch.uint8),
        "topology_masks": torch.tensor(topology.packed_masks),
        "topology_paths": torch.tensor(paths, dtype=torch.int32),
        "drafts": poisoned(max_batch, max_rows),
        "num_drafts": poisoned(max_batch),
        "tree_masks": poisoned(max_batch, max_rows, dtype=torch.int64),
        "tree_paths": poisoned(max_batch, num_paths + shapes.randint(0, 1), width + shapes.randint(0, 1)),
    }
    arrays.update({name: torch.randint(0, 9, (batch,), dtype=torch.int32) for name in ("finish", "num_verified")})
    arrays |= {name: torch.randint(0, 9, (batch,), dtype=torch.int32) for name in ("verified_depth", "verified_source")}
    return arrays
