"""Random states and commands for the start of a step."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kernel_cases import SAME_SHAPES, Arrays, Bench, poisoned, random_topology

from lowlat.kernels.reference.speculation.draft_lengths import choose_draft_length
from lowlat.kernels.reference.speculation.draft_rows import tree_masks
from lowlat.kernels.reference.step.slot_record import (
    DRAFT_LIMIT,
    HAS_GRAMMAR,
    LENGTH,
    MAX_BIASES,
    MAX_LENGTH,
    MAX_STOPS,
    NUM_FLOATS,
    NUM_INTS,
)
from lowlat.kernels.reference.step.slots import (
    CANCEL,
    COMMAND_WIDTH,
    JOIN,
    REWIND,
    SET_DRAFT_LIMIT,
    apply_commands,
    gather_rows,
    list_active_slots,
    publish_rows,
)
from lowlat.kernels.step import begin_step
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.kernels.toolchain.launches import among

RING, TABLE = 8, 7
MOST = 5
Arguments = dict[str, Any]
STATE = ("ints", "floats", "tokens", "table", "stop_ids", "bias_ids", "bias_values")
JOINED = ("slot_ints", "slot_floats", "tokens", "block_table", "stop_ids", "bias_ids", "bias_values")
COUNTED = ("lengths", "active", "num_drafts", "prompt_seen", "output_counts")
LISTED = ("active", "slots")
OUTS = (
    *("row_tokens", "row_positions", "row_live", "row_masks", "paths"),
    *("dense_lens", "num_verified", "verified_depth", "verified_source"),
)
TOLD = ("grammar_tokens", "grammar_paths", "grammar_lengths")


@dataclass
class Looks:
    """The looks at a word that a kernel waits for; `then` is called at the third."""

    count: int = 0
    then: Callable[[], object] = list

    def see(self) -> None:
        """One more."""
        self.count += 1
        if self.count == 3:
            self.then()


def check_begin_step(
    bench: Bench, seed: int, *, batch: int, max_batch: int, num_commands: int, context: int, how: str = "fused"
) -> None:
    """One random step against the reference: "fused", each operation "alone", or fused over slots that are "given"."""
    torch.manual_seed(seed)
    shapes, source = random.Random(seed // SAME_SHAPES), random.Random(seed)
    arrays = _arrays(shapes, source, batch, max_batch, num_commands, context)
    arrays["staged_tokens"] = _same_tail(arrays, max_batch)
    if how == "given":
        given = source.sample(range(max_batch), batch)
        arrays["slots"] = torch.tensor([slot if source.random() < 0.8 else -1 for slot in given], dtype=torch.int32)
        bench.compare(arrays, _given, lambda found: begin_step.begin_step(found, lists=False))
    else:
        bench.compare(arrays, _reference, _alone if how == "alone" else _fused)


def check_opening(
    bench: Bench,
    seed: int,
    *,
    batch: int,
    max_batch: int,
    num_commands: int,
    context: int,
    condition: int | None = None,
) -> int:
    """A random start of a step that chooses its width, in one launch, against the reference; returns the choice."""
    torch.manual_seed(seed)
    shapes, source = random.Random(seed // SAME_SHAPES), random.Random(seed)
    arrays = _arrays(shapes, source, batch, max_batch, num_commands, context)
    arrays["staged_tokens"] = _same_tail(arrays, max_batch)
    gained = torch.randint(0, 1000, (max_batch, MOST + 1), dtype=torch.int32)
    gained[:, 0] = 1024
    arrays |= {
        "extended": arrays["lengths"] - torch.randint(1, 12, (max_batch,), dtype=torch.int32),
        "length_bounds": torch.tensor([0, source.choice((MOST, 2))], dtype=torch.int32),
        "draft_length_costs": torch.randint(1 << 20, 1 << 21, (max_batch, 2, MOST + 2), dtype=torch.int32)
        .sort()
        .values,
        "length_expected": gained.cumsum(1).int(),
        "length_last": torch.tensor([source.randint(0, MOST)], dtype=torch.int32),
        "length_waited": torch.tensor([source.randint(0, 50)], dtype=torch.int32),
        "draft_length_choice": poisoned(1),
    }
    row, waiting = source.randrange(max_batch), source.choice((0, 9))

    def reference(found: Arrays) -> None:
        applied, listed, gathered, told = _each(found)
        apply_commands(**applied)
        list_active_slots(**listed)
        choose_draft_length(**among(choose_draft_length, found), row=row, most_waiting=waiting)
        gather_rows(**gathered)
        publish_rows(**told, draft_length_choice=found["draft_length_choice"], most_drafts=MOST)

    def calls(found: Arrays) -> list[KernelCall]:
        choice = begin_step.Choice(row, waiting, condition)
        return begin_step.begin_step(found, choice=choice, most_drafts=MOST)

    return int(bench.compare(arrays, reference, calls)["draft_length_choice"])


def check_handed(bench: Bench, seed: int, *, batch: int) -> None:
    """Drafts that are handed to the state and laid out as rows, in one launch, against the reference."""
    torch.manual_seed(seed)
    shapes, source = random.Random(seed // SAME_SHAPES), random.Random(seed)
    arrays = _arrays(shapes, source, batch, batch + 1, 0, 30)
    rows, width = arrays["row_tokens"].shape[1], arrays["tree_paths"].shape[2]
    depth = min(rows, width)
    arrays["slots"] = torch.tensor(source.sample(range(batch + 1), batch), dtype=torch.int32)
    arrays["slots"][torch.rand(batch) < 0.2] = -1
    handed: Arrays = {
        "draft_nodes": torch.randint(-1, 9, (batch, rows), dtype=torch.int32),
        "draft_live": (arrays["slots"] >= 0).to(torch.uint8),
        "topology_masks": torch.tensor([(2 << row) - 1 for row in range(rows)]),
        "topology_paths": torch.arange(depth, dtype=torch.int32)[None],
    }
    _, _, gathered, told = _each(arrays)
    names = [*handed, *gathered, *told]

    def reference(found: Arrays) -> None:
        tree_masks(**among(tree_masks, found))
        gather_rows(**_each(arrays | found)[2])
        publish_rows(**_each(arrays | found)[3])

    def calls(found: Arrays) -> list[KernelCall]:
        return begin_step.begin_step(found, applies=False, lists=False, hands=True)

    bench.compare({name: (arrays | handed)[name] for name in names}, reference, calls)


def check_wait(bench: Bench, seed: int, looks: Looks) -> None:
    """The host says what is forced when the kernel has looked for it a few times: the rows are the same."""
    torch.manual_seed(seed)
    arrays = _arrays(random.Random(seed), random.Random(seed), 2, 3, seed % 3, 30)
    arrays["staged_tokens"] = _same_tail(arrays, 3)
    arrays["active"].fill_(1)
    for name in ("slot_ints", "staged_ints"):
        arrays[name][:, HAS_GRAMMAR] = 1

    def undecided(found: Arrays) -> list[KernelCall]:
        told = {name: found[name].clone() for name in ("grammar_forced", "grammar_decided")}
        for name in told:
            found[name].fill_(-1)
        looks.then = lambda: [found[name].copy_(tensor) for name, tensor in told.items()]
        return _fused(found)

    bench.compare(arrays, _reference, undecided)


def _same_tail(arrays: Arrays, max_batch: int) -> torch.Tensor:
    """Past a prompt's end what is staged equals the state: the kernel does not copy it, the reference does."""
    staged = arrays["staged_tokens"].clone()
    for slot in range(max_batch):
        length = int(arrays["staged_ints"][slot, LENGTH])
        staged[slot, length:] = arrays["tokens"][slot, length:]
    return staged


def _each(arrays: Arrays) -> tuple[Arguments, Arguments, Arguments, Arguments]:
    """The arguments of the four operations."""
    staged = (f"staged_{name}" for name in STATE)
    applied = ("command_ring", "command_tail", *staged, "command_head", *JOINED, *COUNTED)
    read = (
        "slots",
        "lengths",
        "tokens",
        "drafts",
        "num_drafts",
        "tree_masks",
        "tree_paths",
        "slot_ints",
        "grammar_forced",
        "grammar_decided",
        "draft_sources",
    )
    every = (applied, LISTED, (*read, *OUTS), (*("slots", "lengths", "slot_ints", "row_tokens", "row_masks"), *TOLD))
    first, second, third, fourth = ({name: arrays[name] for name in names} for names in every)
    return first, second, third, fourth


def _reference(arrays: Arrays) -> None:
    applied, listed, gathered, told = _each(arrays)
    apply_commands(**applied)
    list_active_slots(**listed)
    gather_rows(**gathered)
    publish_rows(**told)


def _fused(arrays: Arrays) -> list[KernelCall]:
    return begin_step.begin_step(arrays)


def _given(arrays: Arrays) -> None:
    applied, _, gathered, told = _each(arrays)
    apply_commands(**applied)
    gather_rows(**gathered)
    publish_rows(**told)


def _alone(arrays: Arrays) -> list[KernelCall]:
    applied, listed, gathered, told = _each(arrays)
    calls = begin_step.apply_commands(**applied), begin_step.list_active_slots(**listed)
    return [*calls[0], *calls[1], *begin_step.gather_rows(**gathered), *begin_step.publish_rows(**told)]


def _arrays(
    shapes: random.Random, source: random.Random, batch: int, max_batch: int, num_commands: int, context: int
) -> Arrays:
    topologies = [random_topology(shapes, 12, 5) for _ in range(max_batch)]
    max_rows = max(topology.num_nodes for topology in topologies) + shapes.randint(0, 2)
    num_paths = max(len(topology.paths) for topology in topologies) + shapes.randint(0, 2)
    width = max(topology.depth for topology in topologies) + 1 + shapes.randint(0, 1)
    rows = shapes.randint(1, max_rows)
    vocabulary = 40
    arrays: Arrays = {}
    for prefix in ("staged_", ""):
        names = [f"staged_{name}" for name in STATE] if prefix else list(JOINED)
        ints = torch.randint(-(2**60), 2**60, (max_batch, NUM_INTS))
        ints[:, DRAFT_LIMIT] = torch.randint(0, 14, (max_batch,))
        ints[:, LENGTH] = torch.randint(1, context - 2, (max_batch,))
        ints[:, HAS_GRAMMAR] = torch.randint(0, 3, (max_batch,))
        ints[:, MAX_LENGTH] = ints[:, LENGTH] + torch.randint(0, 8, (max_batch,))
        widths = (TABLE, MAX_STOPS, MAX_BIASES)
        parts = [ints, torch.randn(max_batch, NUM_FLOATS)]
        parts.append(torch.randint(0, vocabulary, (max_batch, context), dtype=torch.int32))
        parts += [torch.randint(-1, 99, (max_batch, width), dtype=torch.int32) for width in widths]
        arrays.update(zip(names, [*parts, torch.randn(max_batch, MAX_BIASES)], strict=True))
    arrays["lengths"] = (arrays["slot_ints"][:, MAX_LENGTH] - torch.randint(0, 9, (max_batch,))).clamp(min=1).int()
    arrays["lengths"].clamp_(max=context)
    arrays["draft_sources"] = torch.randint(0, 2, (max_batch,), dtype=torch.int32)
    arrays["active"] = torch.randint(0, 2, (max_batch,), dtype=torch.int32)
    arrays["prompt_seen"] = torch.randint(0, 2, (max_batch, vocabulary), dtype=torch.uint8)
    arrays["output_counts"] = torch.randint(0, 9, (max_batch, vocabulary), dtype=torch.int32)
    drafts = torch.randint(0, vocabulary, (max_batch, max_rows), dtype=torch.int32)
    masks = torch.zeros(max_batch, max_rows, dtype=torch.int64)
    paths = torch.full((max_batch, num_paths, width), -1, dtype=torch.int32)
    counts = torch.zeros(max_batch, dtype=torch.int32)
    for slot, topology in enumerate(topologies):
        if source.random() < 0.2:  # as at first
            paths[slot] = 0
            continue
        counts[slot] = source.randint(0, topology.num_nodes - 1)
        masks[slot, : topology.num_nodes] = torch.tensor(topology.packed_masks)
        for number, path in enumerate(topology.paths):
            paths[slot, number, : len(path)] = torch.tensor(path, dtype=torch.int32)
    arrays.update(drafts=drafts, num_drafts=counts, tree_masks=masks, tree_paths=paths)
    head = source.randint(0, 100)
    ring = torch.randint(-5, 5, (RING, COMMAND_WIDTH))
    for index in range(head, head + num_commands):
        opcode, slot = source.choice((JOIN, CANCEL, SET_DRAFT_LIMIT, REWIND, 9)), source.randrange(max_batch)
        most = min(int(arrays["lengths"][slot]), *arrays["staged_ints"][:, LENGTH].tolist())
        ring[index % RING] = torch.tensor([opcode, slot, source.randint(1, max(1, min(7, most))), 0])
    arrays.update(
        command_ring=ring, command_head=torch.tensor([head]), command_tail=torch.tensor([head + num_commands])
    )
    arrays["slots"] = poisoned(batch)
    forced = torch.randint(0, 2, (max_batch, max_rows), dtype=torch.int32)  # some are drafted already, see below
    forced[:, 0] = torch.randint(0, max_rows, (max_batch,))
    drafts %= 2
    arrays["grammar_forced"] = forced
    arrays["grammar_decided"] = torch.full((max_batch,), context + source.randrange(3))
    arrays["grammar_tokens"] = poisoned(max_batch, max_rows)
    for name, shape in (("grammar_paths", (max_batch, max_rows)), ("grammar_lengths", (max_batch,))):
        arrays[name] = poisoned(*shape, dtype=torch.int64)
    for name in OUTS[:2]:
        arrays[name] = poisoned(batch, rows)
    arrays.update(row_live=poisoned(batch, rows, dtype=torch.uint8), row_masks=poisoned(batch, rows, dtype=torch.int64))
    arrays["paths"] = poisoned(batch, num_paths, width)
    arrays.update({name: poisoned(batch) for name in OUTS[5:]})
    return arrays
