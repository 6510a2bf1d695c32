"""This module learns how many experts a step's rows choose, by its slots and rows, from steps that ran.

Rows that follow one another in a text choose partly the same experts, how many depends on the text; each further row
pulls those that no row before it chose. Of a step that was looked at, every number of its slots and rows is counted,
as if the step had had no more.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import or_

import torch

from lowlat.graphs.program import Op, Program, Stage

__all__ = ["ExpertCounts", "chosen_rows", "distinct_experts", "routers_of"]

MEMORY = 64  # steps that were looked at, over which means run
KNOWN_BEFORE = 4  # as many steps what is known before counts for


def routers_of(program: Program) -> list[Op]:
    """The routers of the layers that verify, in order."""
    return [op for op in program.ops if op.kind == "router" and op.stage is Stage.VERIFY]


def distinct_experts(program: Program, scratch: Mapping[str, torch.Tensor]) -> float:
    """The experts that the rows of a step which has just run chose, a layer, mean; a shared one counts, too."""
    ids = [scratch[op.writes["expert_ids"]].tolist() for op in routers_of(program)]
    return sum(len({each for row in layer for each in row} - {-1}) for layer in ids) / len(ids)


def chosen_rows(ids: torch.Tensor, batch: int, slots: Iterable[int]) -> list[list[int]]:
    """For each active slot its live rows' experts, as bits of an integer a row.

    ids    [M, k] int32  M rows of `batch` slots, -1 in dead ones
    slots  [batch]       -1 where there is none
    """
    rows = [
        [sum(1 << each for each in {*row} - {-1}) for row in slot]
        for slot in ids.view(batch, -1, ids.shape[1]).tolist()
    ]
    return [[row for row in each if row] for each, slot in zip(rows, slots, strict=True) if slot >= 0]


class ExpertCounts:
    """The distinct experts a layer of steps by slots and rows a slot.

    before  by slots, and rows a slot from one on: what is known before a step was looked at
    """

    def __init__(self, before: Mapping[int, Sequence[float]]) -> None:
        self._before = {slots: tuple(each) for slots, each in before.items()}
        self._means: dict[tuple[int, int], tuple[int, float]] = {}

    def record(self, rows: Sequence[Sequence[int]]) -> None:
        """Count a layer of a step, by each active slot's rows as bits, see `chosen_rows`."""
        unions = [list(accumulate(each, or_)) for each in rows]
        for num_rows in range(min(map(len, unions), default=0)):
            union = 0
            for num_slots, each in enumerate(unions, 1):
                union |= each[num_rows]
                if num_rows < len(self._before.get(num_slots, ())):
                    self._add((num_slots, num_rows + 1), union.bit_count())

    def _add(self, place: tuple[int, int], count: int) -> None:
        seen, mean = self._means.get(place) or (KNOWN_BEFORE, self._before[place[0]][place[1] - 1])
        seen = min(seen + 1, MEMORY)
        self._means[place] = seen, mean + (count - mean) / seen

    def expected(self, slots: int) -> list[float]:
        """The distinct experts of steps of so many slots, by rows a slot from one on.

        Where no such step was seen, what is known before, as far off as it was for the nearest fewer rows and slots.
        """
        return [self._expected(slots, rows) for rows in range(1, len(self._before[slots]) + 1)]

    def _expected(self, slots: int, rows: int) -> float:
        fewer = [place for place in self._means if place[0] <= slots and place[1] <= rows]
        if not fewer:
            return self._before[slots][rows - 1]
        nearest = max(fewer, key=lambda place: (place[0] * place[1], place[1]))
        return self._before[slots][rows - 1] * self._means[nearest][1] / self._before[nearest[0]][nearest[1] - 1]

    def to_dict(self) -> dict[str, list[float]]:
        """Return JSON values: by slots, those of steps that were seen, by rows a slot."""
        found: dict[str, list[float]] = {}
        for (slots, _), (_, mean) in sorted(self._means.items()):
            found.setdefault(str(slots), []).append(round(mean, 3))
        return found
