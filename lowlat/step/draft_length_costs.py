"""The costs of steps by draft length, by which the device chooses: bytes that they read, or times that were measured.

They are relative integers, of a step without positions and for each position that its slots attend to. Where the draft
model reads features, a step of length zero also bears its share of the runs that its positions wait for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lowlat.graphs import Bucket
from lowlat.graphs.program import Op, Program
from lowlat.kernels.formats import matrix_parts
from lowlat.kernels.reference.speculation.draft_lengths import BASE, LARGEST_COST, SLOPE, UNIT
from lowlat.step.variants import bodies_of

__all__ = ["Costs", "StepCosts", "by_bytes", "cost_table"]

FEW_ROWS = ("embed", "walk_candidates")  # operations that read some rows of a table


@dataclass(frozen=True)
class StepCosts:
    """The costs of a bucket's bodies, in the order of the choice, in any unit.

    base          of a step whose slots have no positions
    per_position  what each position adds, whichever slot's
    """

    base: Sequence[float]
    per_position: Sequence[float]

    @classmethod
    def between(cls, near: Sequence[float], far: Sequence[float], positions: tuple[int, int]) -> "StepCosts":
        """The costs on the line through two, at two counts of positions; all are even where those are the same."""
        first, second = positions
        run = max(second - first, 1)
        slopes = [max(0.0, (b - a) / run) for a, b in zip(near, far, strict=True)]
        return cls([max(0.0, cost - slope * first) for cost, slope in zip(near, slopes, strict=True)], slopes)

    def at(self, positions: int) -> list[float]:
        """The costs at so many positions of all slots together."""
        return [base + slope * positions for base, slope in zip(self.base, self.per_position, strict=True)]


Costs = Mapping[Bucket, StepCosts]


def by_bytes(programs: Mapping[Bucket, Program], bucket: Bucket, weights: Mapping[str, torch.Tensor]) -> StepCosts:
    """Bytes that each body of a bucket reads: weights, embeddings left out, and keys and values of each position.

    weights  by canonical name; their content is not read
    """
    steps = [programs[body] for body in bodies_of(bucket)]
    base = [float(sum(_weight_bytes(op, weights) for op in step.ops)) for step in steps]
    return StepCosts(base, [float(sum(_position_bytes(op, step) for op in step.ops)) for step in steps])


def _weight_bytes(op: Op, weights: Mapping[str, torch.Tensor]) -> int:
    if op.kind in FEW_ROWS:
        return 0
    return sum(weights[part].nbytes for name in op.weights.values() for part in matrix_parts(name, weights).values())


def _position_bytes(op: Op, program: Program) -> int:
    """Bytes of a position's key and value, where an operation attends to all of them."""
    if op.kind != "attention" or op.params.get("window") is not None:
        return 0
    cache = program.buffers[op.reads["k_cache"]]
    return 2 * cache.shape[1] * cache.shape[3] * cache.dtype.itemsize


def cost_table(shape: Sequence[int], costs: Costs, context: int, num_waiting: int) -> torch.Tensor:
    """The costs of buckets' bodies as `draft_length_costs` has them, those of length zero with their share of the last
    one.

    shape        of `draft_length_costs`
    context      positions of a slot at most
    num_waiting  positions that wait for the draft model at most; 0: nothing waits
    """
    scale = LARGEST_COST / max(max(each.at(bucket.batch * context)) for bucket, each in costs.items())
    table = torch.zeros(*shape, dtype=torch.int32)
    for bucket, each in costs.items():
        for part, numbers, unit in ((BASE, each.base, 1), (SLOPE, each.per_position, 1 << UNIT)):
            share = max(0.0, numbers[-1] - numbers[0]) / num_waiting if num_waiting else 0.0
            row = [round(number * scale * unit) for number in (numbers[0] + share, *numbers[1:])]
            table[bucket.batch - 1, part] = torch.tensor([max(number, 1 - part) for number in row])
    return table
