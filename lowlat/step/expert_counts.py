"""This module learns how many different experts a step's rows choose, by numbers of slots and rows.

Consecutive rows of a text share some of their experts; how many depends on the text. A step reads each expert once. So
a further row adds only the experts that no row before it chose. A sampled step is counted for every smaller number of
slots and rows, too, as if it had had only these.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import or_

import torch

from lowlat.graphs.program import Op, Program, Stage

__all__ = ["ExpertCounts", "chosen_rows", "distinct_experts", "routers_of"]

MEMORY = 64  # sampled steps over which means run
KNOWN_BEFORE = 4  # sampled steps that the initial estimate counts for


def routers_of(program: Program) -> list[Op]:
    """The routers of a program's VERIFY stage, in order of layers."""
    return [op for op in program.ops if op.kind == "router" and op.stage is Stage.VERIFY]


def distinct_experts(program: Program, scratch: Mapping[str, torch.Tensor]) -> float:
    """The different experts that a step's rows chose in a layer, mean over layers, a shared expert included.

    scratch  the step's buffers, after it has run
    """
    ids = [scratch[op.writes["expert_ids"]].tolist() for op in routers_of(program)]
    return sum(len({each for row in layer for each in row} - {-1}) for layer in ids) / len(ids)


def chosen_rows(ids: torch.Tensor, batch: int, slots: Iterable[int]) -> list[list[int]]:
    """For each active slot, the experts of its live rows; a row is an integer with a bit for each expert.

    ids    [M, k] int32  the experts of M rows of `batch` slots; -1 in dead rows
    slots  [batch]       the slots; -1 pads
    """
    rows = [
        [sum(1 << each for each in {*row} - {-1}) for row in slot]
        for slot in ids.view(batch, -1, ids.shape[1]).tolist()
    ]
    return [[row for row in each if row] for each, slot in zip(rows, slots, strict=True) if slot >= 0]


class ExpertCounts:
    """The mean number of different experts in a layer of a step, by slots and rows a slot.

    before  the initial estimate: by slots, a sequence by rows a slot from one on
    """

    def __init__(self, before: Mapping[int, Sequence[float]]) -> None:
        self._before = {slots: tuple(each) for slots, each in before.items()}
        self._means: dict[tuple[int, int], tuple[int, float]] = {}

    def record(self, rows: Sequence[Sequence[int]]) -> None:
        """Count one layer of a step, given the result of `chosen_rows`."""
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
        """The expected number of different experts for this many slots, by rows a slot from one on.

        If no such step was counted, it is the initial estimate, corrected by the ratio of mean to estimate at the
        nearest smaller numbers of slots and rows.
        """
        return [self._expected(slots, rows) for rows in range(1, len(self._before[slots]) + 1)]

    def _expected(self, slots: int, rows: int) -> float:
        fewer = [place for place in self._means if place[0] <= slots and place[1] <= rows]
        if not fewer:
            return self._before[slots][rows - 1]
        nearest = max(fewer, key=lambda place: (place[0] * place[1], place[1]))
        return self._before[slots][rows - 1] * self._means[nearest][1] / self._before[nearest[0]][nearest[1] - 1]

    def to_dict(self) -> dict[str, list[float]]:
        """Return JSON values: the means of counted steps, by slots, then by rows a slot."""
        found: dict[str, list[float]] = {}
        for (slots, _), (_, mean) in sorted(self._means.items()):
            found.setdefault(str(slots), []).append(round(mean, 3))
        return found
