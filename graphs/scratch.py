"""This module places a program's scratch buffers in one arena of bytes, where prefill's buffers may share memory.

Prefill's buffers have many rows, and there is a residual stream for every layer. After its last reader a buffer's bytes
are free for other buffers. One launch may cover several operations: it writes the outputs of the last while it reads
the inputs of the first. So bytes are used again only APART operations later. A buffer inside a fused launch has no
memory at all. A step's buffers do not share memory: they are small, and some are written or read ahead of their
operation.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lowlat.graphs import Role, aligned_bytes
from lowlat.graphs.program import Program, Stage

__all__ = ["APART", "ScratchPlaces", "may_overlap", "place_scratch"]

APART = 12  # operations between a buffer's last use and the next buffer's first one; more than a launch covers


@dataclass(frozen=True)
class ScratchPlaces:
    """Offsets of scratch buffers by name, in bytes from the start of the arena, and the size of the arena in bytes."""

    offsets: Mapping[str, int]
    num_bytes: int


@dataclass(frozen=True)
class _Held:
    """A buffer with its aligned bytes, and the first and the last operation that use it."""

    name: str
    num_bytes: int
    first: int
    last: int

    def meets(self, other: "_Held") -> bool:
        return self.first <= other.last + APART and other.first <= self.last + APART


def may_overlap(program: Program) -> bool:
    """Whether a program's scratch buffers may share memory, and may be left out if no launch uses them: in prefill."""
    return all(op.stage is Stage.PREFILL for op in program.ops)


def place_scratch(program: Program, unused: Collection[str] = ()) -> ScratchPlaces:
    """The offsets of a program's scratch: the largest buffers first, each as low as the live buffers around it allow.

    unused  buffers that no launch uses: they get no memory
    """
    shares, end = may_overlap(program), len(program.ops)
    held = []
    for spec in program.specs(Role.SCRATCH):
        if spec.name in unused:
            continue
        uses = program.uses.get(spec.name, ())
        whole = not shares or not uses or uses[0][1]  # a buffer that is first read or updated keeps its initial content
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
