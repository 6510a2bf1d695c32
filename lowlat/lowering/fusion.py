"""A fusion is a pattern of operations and the calls that compute it. This module cuts programs into groups by fusions.

Operations are taken in order. At each one the fusions of the table are tried in order. The first fusion whose pattern
matches and whose precondition holds covers its run of operations. An operation without a fusion has its own kernel. So
an operation put in between costs the fusions that it interrupts and nothing else.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from lowlat.graphs import Role
from lowlat.graphs.program import Op, Program
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, Call

__all__ = ["Fusion", "LayoutOf", "Run", "cover"]

Layouts = Mapping[str, torch.Tensor]
LayoutOf = Callable[[str], torch.Tensor | None]


@dataclass(frozen=True)
class Run:
    """Consecutive operations of a program."""

    program: Program
    start: int
    count: int

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The operations in order."""
        return self.program.ops[self.start : self.start + self.count]

    @property
    def following(self) -> Op | None:
        """The operation after the run, if any."""
        end = self.start + self.count
        return self.program.ops[end] if end < len(self.program.ops) else None

    def find(self, *kinds: str) -> Op | None:
        """The first operation of one of these kinds, if any."""
        return next((op for op in self.ops if op.kind in kinds), None)

    def op(self, *kinds: str) -> Op:
        """The first operation of one of these kinds; the fusion's pattern guarantees that there is one."""
        return next(op for op in self.ops if op.kind in kinds)

    def all(self, kind: str) -> list[Op]:
        """Every operation of a kind, in order."""
        return [op for op in self.ops if op.kind == kind]

    def shape(self, buffer: str) -> tuple[int, ...]:
        """The shape of a buffer."""
        return self.program.buffers[buffer].shape

    def ends(self, buffer: str) -> bool:
        """Whether a scratch buffer is dead after this run: no operation reads it before it is written again."""
        if self.program.buffers[buffer].role is not Role.SCRATCH:
            return False
        uses = self.program.uses.get(buffer, ())
        place = bisect_left(uses, (self.start + self.count, False))
        return place == len(uses) or not uses[place][1]


def _always(run: Run, gpu: Gpu) -> bool:
    return True


def _nothing(run: Run) -> Sequence[str]:
    return ()


def _no_layouts(run: Run) -> Layouts:
    return {}


@dataclass(frozen=True)
class Fusion:
    """One entry of the table of fusions.

    pattern  kinds of operations in order, separated by spaces: `a|b` is either, `a?` is optional, `a*` is repeated any
             number of times; the longest match is tried first
    saves    at least this many launches are saved against the operations' own kernels; 0: the gain is in the operation
             after the run
    lower    returns the calls that compute a run
    applies  the precondition besides the pattern: which operations read each other's buffers, sizes, the GPU
    hides    buffers of the run that the calls do not write; no operation may read them after it
    layouts  row permutations of packed weights that the calls require, by weight
    """

    name: str
    pattern: str
    saves: int
    lower: Callable[[Binding, Run], Sequence[Call]]
    applies: Callable[[Run, Gpu], bool] = _always
    hides: Callable[[Run], Sequence[str]] = _nothing
    layouts: Callable[[Run], Layouts] = _no_layouts

    def match(self, program: Program, start: int, gpu: Gpu, layout_of: LayoutOf | None) -> Run | None:
        """The longest run from `start` on that this fusion covers; None if there is none.

        layout_of  the row permutation with which a weight is packed; None: no weight is packed yet
        """
        for count in _counts(_tokens(self.pattern), program.ops, start):
            run = Run(program, start, count)
            if not count or not self.applies(run, gpu) or not all(map(run.ends, self.hides(run))):
                continue
            if layout_of is None or all(_same(layout_of(name), want) for name, want in self.layouts(run).items()):
                return run
        return None


def cover(
    program: Program, gpu: Gpu, fusions: Sequence[Fusion], layout_of: LayoutOf | None = None
) -> Iterator[tuple[Fusion | None, Run]]:
    """Cut a program into runs, each with its fusion; None: a single operation with its own kernel."""
    start, by_kind = 0, _by_first_kind(tuple(fusions))
    while start < len(program.ops):
        possible = by_kind.get(program.ops[start].kind, ())
        matches = ((fusion, fusion.match(program, start, gpu, layout_of)) for fusion in possible)
        found = next(((fusion, run) for fusion, run in matches if run is not None), (None, Run(program, start, 1)))
        yield found
        start += found[1].count


@cache
def _by_first_kind(fusions: tuple[Fusion, ...]) -> Mapping[str, Sequence[Fusion]]:
    """The fusions whose runs may begin with an operation of each kind, in the table's order."""
    found: dict[str, list[Fusion]] = {}
    for fusion in fusions:
        tokens = _tokens(fusion.pattern)
        required = next(place for place, token in enumerate(tokens) if token.least)
        for kind in {kind for token in tokens[: required + 1] for kind in token.kinds}:
            found.setdefault(kind, []).append(fusion)
    return found


def _same(known: torch.Tensor | None, want: torch.Tensor) -> bool:
    return known is want or (known is not None and torch.equal(known, want))


@dataclass(frozen=True)
class _Token:
    kinds: frozenset[str]
    least: int
    many: bool


@cache
def _tokens(pattern: str) -> tuple[_Token, ...]:
    words = ((word.rstrip("?*"), word[-1]) for word in pattern.split())
    return tuple(_Token(frozenset(kinds.split("|")), 0 if mark in "?*" else 1, mark == "*") for kinds, mark in words)


def _counts(tokens: Sequence[_Token], ops: Sequence[Op], start: int) -> Iterator[int]:
    """The lengths of the pattern's matches from `start` on, longest first for each token, without empty matches."""
    if not tokens:
        yield 0
        return
    token, rest = tokens[0], tokens[1:]
    most = 0
    while start + most < len(ops) and ops[start + most].kind in token.kinds and (token.many or most == 0):
        most += 1
    for taken in range(most, token.least - 1, -1):
        yield from (taken + count for count in _counts(rest, ops, start + taken))
