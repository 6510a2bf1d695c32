"""This module estimates the costs of draft lengths from the number of experts that their rows choose in past steps.

At intervals the engine copies the expert ids of one MoE layer, a different one each time, after a launched step. It
counts them when the copy has arrived, so no step waits. While no drafts are made, the rows of consecutive steps stand
for the rows of one longer step. The estimates change no token.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowlat.executors import Executor
from lowlat.graphs import Bucket
from lowlat.step.draft_length_costs import Costs, StepCosts
from lowlat.step.draft_length_times import write_costs
from lowlat.step.expert_counts import ExpertCounts, chosen_rows, routers_of
from lowlat.step.variants import bodies_of, is_choice

__all__ = ["ExpertPrices"]

DRAFTED_INTERVAL = 32  # while drafts are made: one step is examined in every DRAFTED_INTERVAL
IDLE_INTERVAL, LOOKS = 128, 8  # while none are made: LOOKS consecutive steps are examined in every IDLE_INTERVAL
LEAST_CHANGE = 0.01  # relative change of a cost below which the device is not updated

Rows = list[list[int]]
Chain = tuple[int, list[int], Rows]
NO_CHAIN: Chain = (-1, [], [])
Look = Callable[[], Sequence[torch.Tensor] | None]


class ExpertPrices:
    """Examines steps whose draft length the device chooses, and updates the device's costs when they change.

    costs        the initial costs of all buckets, with the numbers of experts that they assume
    num_waiting  see `cost_table`
    """

    def __init__(self, executor: Executor, costs: Costs, num_waiting: int) -> None:
        self._executor, self._costs, self._num_waiting = executor, costs, num_waiting
        self._told: Costs = costs
        self._counts = ExpertCounts({bucket.batch: each.by_rows() for bucket, each in costs.items()})
        self._looks: deque[tuple[int, Bucket, Look]] = deque()
        self._num_launched = self._layer = 0
        self._drafts = False  # whether the last examined step had drafts
        self._chain = NO_CHAIN  # the number of the last step without drafts, its slots, their consecutive rows so far

    def launched(self, bucket: Bucket, *, loops: bool) -> None:
        """Record the launch of a step, or of a loop of steps, and examine it if that is due; no step waits for this."""
        if not is_choice(bucket):
            return
        if loops:
            self._chain = NO_CHAIN  # the last steps of two loops are not consecutive
            wanted, self._layer = not self._looks, self._layer + 1
        else:
            interval, looks = (DRAFTED_INTERVAL, 1) if self._drafts else (IDLE_INTERVAL, LOOKS)
            place = self._num_launched % interval
            wanted, self._layer = place < looks, self._layer + (place == 0)
        if wanted:
            self._look(bucket)
        self._num_launched += 1
        if self._looks:
            self._take()

    def report(self) -> dict[str, Any]:
        """Return a block `experts_by_rows` of the counted experts, by slots and rows a slot, as JSON."""
        found = self._counts.to_dict()
        return {"experts_by_rows": found} if found else {}

    def _look(self, bucket: Bucket) -> None:
        executor, bodies = self._executor, bodies_of(bucket)
        layer = self._layer % len(routers_of(executor.program(bodies[0])))
        ids = [
            executor.scratch(body)[routers_of(executor.program(body))[layer].writes["expert_ids"]] for body in bodies
        ]
        state = executor.state
        wanted = [state["draft_length_choice"], state[f"opened.{bucket.batch}.slots"], *ids]
        self._looks.append((self._num_launched, bucket, executor.peek(wanted)))

    def _take(self) -> None:
        """Count the experts of the copies that have arrived; once all have, update the device's costs."""
        while self._looks:
            number, bucket, look = self._looks[0]
            found = look()
            if found is None:
                return
            self._looks.popleft()
            choice, slots, *ids = found
            rows = chosen_rows(ids[int(choice)], bucket.batch, slots.tolist())
            self._drafts = 0 < int(choice) <= bucket.num_speculative_tokens
            self._counts.record(self._in_a_row(number, slots.tolist(), rows))
        self._tell()

    def _in_a_row(self, number: int, slots: list[int], rows: Rows) -> Rows:
        """Return a step's rows; if each slot has one row, append the rows of the steps just before, newest first."""
        if any(len(each) != 1 for each in rows):
            return rows
        last, before, chain = self._chain
        if last == number - 1 and before == slots and len(chain) == len(rows):
            rows = [[*each, *known][:LOOKS] for known, each in zip(chain, rows, strict=True)]
        self._chain = number, slots, rows
        return rows

    def _tell(self) -> None:
        costs = {bucket: each.choosing(self._counts.expected(bucket.batch)) for bucket, each in self._costs.items()}
        if any(_differs(each, self._told[bucket]) for bucket, each in costs.items()):
            self._told = costs
            write_costs(self._executor, costs, self._num_waiting)


def _differs(costs: StepCosts, others: StepCosts) -> bool:
    return any(abs(one - other) > LEAST_CHANGE * other for one, other in zip(costs.base, others.base, strict=True))
