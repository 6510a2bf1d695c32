"""Random slots, rows and acceptances, whole or with one thing wrong, for the checks of a step."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch
from kernel_cases import SAME_SHAPES, Arrays, poisoned, random_topology

from lowlat.kernels.reference.step import checks as reference
from lowlat.kernels.reference.step.checks import CODE, WIDTH
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, LENGTH, MAX_LENGTH, NUM_INTS
from lowlat.kernels.step import checks as kernels
from lowlat.kernels.toolchain.kernel import KernelCall

BLOCK, CONTEXT, RING = 4, 80, 3
EARLIER = 99  # a code
STATE = ("slots", "active", "num_drafts", "slot_ints", "check_failures")
Wrong = Callable[[Arrays, random.Random, int], object]
Check = Callable[..., set[int]]


class Compares(Protocol):
    """A bench, or what runs the reference alone."""

    def compare(
        self, arrays: Arrays, reference: Callable[[Arrays], object], calls: Callable[[Arrays], Sequence[KernelCall]]
    ) -> Arrays:
        """Run the reference and the calls, compare their arrays, and return them."""


def set_one(name: str, value: Callable[[int, random.Random], int], at: str = "slot") -> Wrong:
    """Change one number of a slot's or an entry's, where `value` is given what it was."""

    def wrong(arrays: Arrays, source: random.Random, entry: int) -> None:
        array = arrays[name]
        place: Any = int(arrays["slots"][entry]) if at == "slot" else entry
        place = (place, source.randrange(array.shape[1])) if array.ndim == 2 else place
        array[place] = value(int(array[place]), source)

    return wrong


def set_int(column: int, value: int) -> Wrong:
    """Change a column of a slot's record."""

    def wrong(arrays: Arrays, source: random.Random, entry: int) -> None:
        arrays["slot_ints"][int(arrays["slots"][entry]), column] = value

    return wrong


def share(arrays: Arrays, source: random.Random, entry: int) -> None:
    """Let the host reserve another slot's last block for a slot's last one, too."""
    slot, other = int(arrays["slots"][entry]), int(arrays["slots"][entry - 1])
    place = (int(arrays["lengths"][slot]) - 1) // BLOCK
    for name in ("block_table", "staged_table"):
        arrays[name][slot, place] = arrays[name][other, 0]


def lose_root(arrays: Arrays, source: random.Random, entry: int) -> None:
    """Take the root out of the mask with the most bits."""
    masks = arrays["row_masks"][entry]
    masks[max(range(len(masks)), key=lambda row: int(masks[row]).bit_count())] &= ~1


SLOTS_WRONG: dict[str, Wrong] = {
    "nothing": lambda *_: None,
    "length": set_one("lengths", lambda old, source: old + source.choice((-1, 1))),
    "length bounds": set_one("lengths", lambda old, source: source.choice((0, -5, CONTEXT + 3, 1 << 30))),
    "drafts": set_one("num_drafts", lambda old, source: source.choice((-1, 1000))),
    "limit": set_int(DRAFT_LIMIT, -1),
    "longest": set_int(MAX_LENGTH, CONTEXT + 1),
    "null block": set_one("block_table", lambda old, source: 0),
    "block": set_one("block_table", lambda old, source: source.choice((-3, 999, 5))),
    "shared": share,
}
ROWS_WRONG: dict[str, Wrong] = {
    "nothing": lambda *_: None,
    "mask": set_one("row_masks", lambda old, source: source.choice((0, 1, -1, old | 1 << 40, old ^ 4)), "entry"),
    "root": lose_root,
    "live": set_one("row_live", lambda old, source: 1 - old, "entry"),
    "position": set_one("row_positions", lambda old, source: source.choice((-1, old + 50, CONTEXT + 9)), "entry"),
    "dense": set_one("dense_lens", lambda old, source: old + 1, "entry"),
    "verified": set_one("num_verified", lambda old, source: source.choice((-1, old + 1, 99)), "entry"),
    "path": lambda arrays, source, entry: arrays["paths"][entry].fill_(-1),
    "node": lambda arrays, source, entry: arrays["paths"][entry, 0, -1:].fill_(source.choice((70, 1, 0))),
}
ACCEPTED_WRONG: dict[str, Wrong] = {
    "nothing": lambda *_: None,
    "length": set_one("accepted_lens", lambda old, source: source.choice((0, -1, old + 30)), "entry"),
    "node": lambda arrays, source, entry: arrays["accepted_nodes"][entry, :2].fill_(source.choice((-1, 1, 99))),
}
COMMIT_WRONG: dict[str, Wrong] = {
    "nothing": lambda *_: None,
    "length": set_one("lengths", lambda old, source: old + source.choice((-1, 1))),
    "count": set_one("commit_lens", lambda old, source: source.choice((-1, 70)), "entry"),
}


def check_slots(
    bench: Compares, seed: int, wrong: str, *, batch: int = 3, joins: bool = False, **kinds: bool
) -> set[int]:
    """Random slots against the reference; the codes that failed."""
    arrays, _, source = _slots(seed, batch)
    if joins:
        for slot in range(arrays["lengths"].shape[0]):
            arrays["slot_ints"][slot, LENGTH] = arrays["lengths"][slot]
    _spoil(arrays, SLOTS_WRONG[wrong], source)
    names = (*STATE, "lengths", "block_table", "staged_table", "checked_lengths")
    flags = {"checks_lengths": True, "checks_spans": True, "falls_back": bool(seed % 2), **kinds}
    sizes = {"max_context": CONTEXT, "max_rows": 9, "overhang": 9, "block_size": BLOCK, "num_blocks": 200}
    return _compare(bench, "check_slots", arrays, names, {**flags, **sizes, "joins": joins, "rewinds": seed % 3 == 0})


def check_rows(bench: Compares, seed: int, wrong: str, *, batch: int = 3, **kinds: bool) -> set[int]:
    """Random rows of chains and trees, some of them dead, against the reference; the codes that failed."""
    arrays, _, source = _rows(seed, batch)
    _spoil(arrays, ROWS_WRONG[wrong], source)
    names = (
        *(*STATE, "lengths", "paths", "row_tokens", "row_positions", "row_live", "row_masks"),
        *("dense_lens", "num_verified"),
    )
    flags = {**dict.fromkeys(("checks_lengths", "checks_spans", "checks_masks"), True), **kinds}
    return _compare(bench, "check_rows", arrays, names, {**flags, "falls_back": bool(seed % 2), "max_context": CONTEXT})


def check_accepted(bench: Compares, seed: int, wrong: str, *, batch: int = 3) -> set[int]:
    """A random acceptance against the reference; the codes that failed."""
    arrays, _, source = _rows(seed, batch)
    _accept(arrays, source)
    _spoil(arrays, ACCEPTED_WRONG[wrong], source)
    names = (*STATE, "accepted_nodes", "row_live", "row_masks", "num_verified", "accepted_lens")
    return _compare(bench, "check_accepted", arrays, names, {"falls_back": bool(seed % 2)})


def check_commit(bench: Compares, seed: int, wrong: str, *, batch: int = 3, checks_lengths: bool = True) -> set[int]:
    """A random commit against the reference; the codes that failed."""
    arrays, _, source = _rows(seed, batch)
    _accept(arrays, source)
    arrays["check_failures"][-1, CODE] = EARLIER  # of an earlier check, which is told with the others
    slots, max_batch = arrays["slots"], arrays["active"].shape[0]
    arrays["commit_lens"] = arrays["accepted_lens"].clone()
    arrays["checked_lengths"] = arrays["lengths"].clone()
    for entry, slot in enumerate(slots.tolist()):
        if slot >= 0:
            arrays["lengths"][slot] += arrays["commit_lens"][entry]
    arrays["ring_head"] = torch.tensor([source.randint(0, 99)])
    arrays["ring_checks"] = poisoned(RING, max_batch + 1, WIDTH, dtype=torch.int64)
    arrays["draft_live"] = (slots >= 0).to(torch.uint8)
    arrays["draft_lens"] = torch.randint(1, 9, (batch,), dtype=torch.int32)
    _spoil(arrays, COMMIT_WRONG[wrong], source)
    names = (
        *("slots", "active", "check_failures", "commit_lens", "accepted_lens", "lengths", "draft_live"),
        *("draft_lens", "checked_lengths", "ring_head", "ring_checks"),
    )
    found = _compare(bench, "check_commit", arrays, names, {"checks_lengths": checks_lengths})
    return found - {EARLIER}


def _compare(
    bench: Compares,
    kind: str,
    arrays: Arrays,
    names: tuple[str, ...],
    params: dict[str, Any],
) -> set[int]:
    def apply(module: ModuleType, found: Arrays) -> list[KernelCall]:
        given = {name: found[name] for name in names}
        return getattr(module, kind)(**given, **params) or []

    expected = bench.compare(arrays, partial(apply, reference), partial(apply, kernels))
    return {int(code) for code in expected["check_failures"][:, CODE]} - {0}


def _spoil(arrays: Arrays, wrong: Wrong, source: random.Random) -> None:
    listed = [entry for entry, slot in enumerate(arrays["slots"].tolist()) if slot >= 0]
    wrong(arrays, source, source.choice(listed[1:] or listed))


def _slots(seed: int, batch: int) -> tuple[Arrays, random.Random, random.Random]:
    """Slots of random lengths, drafts and tables, all as they should be."""
    torch.manual_seed(seed)
    shapes, source = random.Random(seed // SAME_SHAPES), random.Random(seed)
    max_batch = batch + shapes.randint(0, 2)
    slots = torch.tensor(source.sample(range(max_batch), batch), dtype=torch.int32)
    slots[0] = -1 if source.random() < 0.3 and batch > 2 else slots[0]
    lengths = torch.randint(1, CONTEXT - 10, (max_batch,), dtype=torch.int32)
    ints = torch.randint(-(2**60), 2**60, (max_batch, NUM_INTS))
    ints[:, MAX_LENGTH] = lengths + torch.randint(1, 9, (max_batch,))
    ints[:, DRAFT_LIMIT] = torch.randint(0, 3, (max_batch,))
    width = (CONTEXT + 9) // BLOCK + 1
    blocks = torch.randperm(max_batch * width).view(max_batch, width).int() + 1
    arrays: Arrays = {
        "slots": slots,
        "active": torch.ones(max_batch, dtype=torch.int32),
        "num_drafts": torch.randint(0, 9, (max_batch,), dtype=torch.int32),
        "slot_ints": ints,
        "lengths": lengths,
        "checked_lengths": lengths.clone(),
        "block_table": blocks,
        "staged_table": blocks.clone(),
        "check_failures": torch.zeros(max_batch + 1, WIDTH, dtype=torch.int64),
    }
    return arrays, shapes, source


def _rows(seed: int, batch: int) -> tuple[Arrays, random.Random, random.Random]:
    """Rows of chains and trees, of which the last ones may be dead."""
    arrays, shapes, source = _slots(seed, batch)
    topologies = [random_topology(shapes, 14, 6) for _ in range(batch)]
    rows = max(topology.num_nodes for topology in topologies) + shapes.randint(0, 1)
    width = max(topology.depth for topology in topologies) + 1
    num_paths = max(len(topology.paths) for topology in topologies)
    arrays |= {name: torch.zeros(batch, rows, dtype=torch.int32) for name in ("row_tokens", "row_positions")}
    arrays["row_live"] = torch.zeros(batch, rows, dtype=torch.uint8)
    arrays["row_masks"] = torch.zeros(batch, rows, dtype=torch.int64)
    arrays["paths"] = torch.full((batch, num_paths, width), -1, dtype=torch.int32)
    arrays |= {name: torch.zeros(batch, dtype=torch.int32) for name in ("dense_lens", "num_verified")}
    for entry, topology in enumerate(topologies):
        slot = int(arrays["slots"][entry])
        if slot < 0:
            continue
        count, length = source.randint(1, topology.num_nodes), int(arrays["lengths"][slot])
        masks = topology.packed_masks[:count]
        arrays["row_live"][entry, :count] = 1
        arrays["row_masks"][entry, :count] = torch.tensor(masks)
        arrays["row_positions"][entry, :count] = torch.tensor([length - 2 + mask.bit_count() for mask in masks])
        arrays["dense_lens"][entry], arrays["num_verified"][entry] = length - 1, count - 1
        for number, path in enumerate(topology.paths):
            known = [node for node in path if node < count]
            arrays["paths"][entry, number, : len(known)] = torch.tensor(known, dtype=torch.int32)
    return arrays, shapes, source


def _accept(arrays: Arrays, source: random.Random) -> None:
    """A run of accepted nodes for each slot: the beginning of a path."""
    batch, rows = arrays["row_live"].shape
    arrays["accepted_nodes"] = torch.full((batch, rows), -1, dtype=torch.int32)
    arrays["accepted_lens"] = torch.zeros(batch, dtype=torch.int32)
    for entry, slot in enumerate(arrays["slots"].tolist()):
        if slot < 0:
            continue
        nodes = [node for node in source.choice(arrays["paths"][entry].tolist()) if node >= 0] or [0]
        nodes = nodes[: source.randint(1, len(nodes))]
        arrays["accepted_nodes"][entry, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
        arrays["accepted_lens"][entry] = len(nodes)
