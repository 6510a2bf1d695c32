"""This module places a program's scratch in one run of bytes, where buffers that are never held together may overlap.

Prefill's buffers have many rows: of a target's residual streams alone there is one for every layer. From its last
reader on a buffer's bytes are free for others. A launch may cover several operations, and reads what the first of them
reads while it writes what the last one writes, so a place is taken again only operations later. What a fused launch
keeps to itself has no place at all. Steps keep all their buffers apart: these are small, and some are filled or read
ahead of their operation.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lowlat.graphs import Role, aligned_bytes
from lowlat.graphs.program import Program, Stage

__all__ = ["APART", "ScratchPlaces", "may_overlap", "place_scratch"]

APART = 12  # operations from a buffer's last use to the first one of another in its place; more than a launch covers


@dataclass(frozen=True)
class ScratchPlaces:
    """Places of scratch buffers by name, in bytes from the begin of the memory, and how many bytes they take."""

    offsets: Mapping[str, int]
    num_bytes: int


@dataclass(frozen=True)
class _Held:
    """A buffer with its aligned bytes, and the operations from the first to the last that it is held for."""

    name: str
    num_bytes: int
    first: int
    last: int

    def meets(self, other: "_Held") -> bool:
        return self.first <= other.last + APART and other.first <= self.last + APART


def may_overlap(program: Program) -> bool:
    """Whether a program's scratch may overlap, and lack what no launch is given: that of prefill alone."""
    return all(op.stage is Stage.PREFILL for op in program.ops)


def place_scratch(program: Program, unused: Collection[str] = ()) -> ScratchPlaces:
    """The places of a program's scratch: the largest buffers come first, each as low as those that it meets allow.

    unused  buffers that no launch is given: they have no place
    """
    shares, end = may_overlap(program), len(program.ops)
    held = []
    for spec in program.specs(Role.SCRATCH):
        if spec.name in unused:
            continue
        uses = program.uses.get(spec.name, ())
        whole = not shares or not uses or uses[0][1]  # what is read or updated first holds what it was allocated with
        first, last = (0, end) if whole else (uses[0][0], uses[-1][0])
        held.append(_Held(spec.name, aligned_bytes(spec), first, last))
    if shares:
        held.sort(key=lambda each: (-each.num_bytes, each.first))
    offsets: dict[str, int] = {}
    total = 0
    for number, each in enumerate(held):
        at = total
        if shares:
            taken = sorted((offsets[one.name], one.num_bytes) for one in held[:number] if one.meets(each))
            at = 0
            for start, size in taken:
                if at + each.num_bytes <= start:
                    break
                at = max(at, start + size)
        offsets[each.name] = at
        total = max(total, at + each.num_bytes)
    return ScratchPlaces(offsets, total)
