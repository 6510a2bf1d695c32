"""This module computes the costs by which the device chooses draft lengths: bytes that steps read, or measured times.

Costs are relative integers: one for a step without context, and one for each position that its slots attend to. If the
draft model reads features, a step of length zero also bears its share of the draft model's later run over its tokens.
In a target with experts, a cost is corrected by the number of experts that the step's rows are expected to choose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowlat.graphs import Bucket
from lowlat.graphs.program import Op, Program
from lowlat.kernels.formats import matrix_parts
from lowlat.kernels.reference.speculation.draft_lengths import BASE, LARGEST_COST, SLOPE, UNIT
from lowlat.models.layer_spec import ExpertsSpec
from lowlat.step.expert_counts import routers_of
from lowlat.step.variants import bodies_of
from lowlat.step.weight_reads import EXPERT_OPS, weight_bytes

__all__ = ["Costs", "StepCosts", "by_bytes", "cost_table", "expert_bytes", "weight_sizes"]


@dataclass(frozen=True)
class StepCosts:
    """The costs of a bucket's bodies, in the order of the choice, in any unit.

    base          the cost of a step whose slots have no positions
    per_position  the cost of each position, of any slot
    experts       the mean number of experts in a layer in the steps of these costs; () without MoE layers
    per_expert    the cost of one more expert in every layer
    """

    base: Sequence[float]
    per_position: Sequence[float]
    experts: Sequence[float] = ()
    per_expert: float = 0.0

    @classmethod
    def between(cls, near: Sequence[float], far: Sequence[float], positions: tuple[int, int]) -> "StepCosts":
        """Costs interpolated between `near` and `far`, which are costs at two numbers of positions.

        If the two numbers are the same, positions cost nothing.
        """
        first, second = positions
        run = max(second - first, 1)
        slopes = [max(0.0, (b - a) / run) for a, b in zip(near, far, strict=True)]
        return cls([max(0.0, cost - slope * first) for cost, slope in zip(near, slopes, strict=True)], slopes)

    def by_rows(self) -> list[float]:
        """The numbers of experts by rows a slot, from one on; without the last body's, which has one row again."""
        return list(self.experts[:-1])

    def choosing(self, experts: Sequence[float]) -> "StepCosts":
        """The costs corrected for other numbers of experts, which are given by rows a slot from one on."""
        wanted = (*experts, experts[0])
        more = [self.per_expert * (each - own) for each, own in zip(wanted, self.experts, strict=True)]
        base = [max(each + change, LEAST_SHARE * each) for each, change in zip(self.base, more, strict=True)]
        return replace(self, base=base, experts=wanted)

    def at(self, positions: int) -> list[float]:
        """The costs at a number of positions of all slots together."""
        return [base + slope * positions for base, slope in zip(self.base, self.per_position, strict=True)]


Costs = Mapping[Bucket, StepCosts]
LEAST_SHARE = 0.1  # of a cost: the correction for experts leaves at least this share


def by_bytes(
    programs: Mapping[Bucket, Program],
    bucket: Bucket,
    weights: Mapping[str, torch.Tensor],
    experts: ExpertsSpec | None = None,
) -> StepCosts:
    """Bytes that each body of a bucket reads: weights without embeddings, and keys and values of each position.

    weights  by canonical name; their content is not read
    experts  the spec of MoE layers; rows are assumed to choose each expert with the same probability
    """
    bodies = bodies_of(bucket)
    steps = [programs[body] for body in bodies]
    sizes = weight_sizes(steps, weights)
    base = [float(sum(weight_bytes(op, sizes, _share_read(op, step, experts)) for op in step.ops)) for step in steps]
    slopes = [float(sum(_position_bytes(op, step) for op in step.ops)) for step in steps]
    if experts is None:
        return StepCosts(base, slopes)
    chosen = [experts.expected_distinct(body.batch * body.rows) + experts.shared for body in bodies]
    return StepCosts(base, slopes, chosen, expert_bytes(steps[0], weights, experts))


def _share_read(op: Op, program: Program, experts: ExpertsSpec | None) -> float:
    """The share of a layer's experts that an operation's rows choose, if all are equally likely."""
    if experts is None or op.kind not in EXPERT_OPS:
        return 1.0
    return experts.share_read(experts.expected_distinct(program.buffers[op.reads["expert_ids"]].shape[0]))


def weight_sizes(programs: Sequence[Program], weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Bytes of weights, by the names that the programs' operations use."""
    names = {name for program in programs for op in program.ops for name in op.weights.values()}
    return {name: sum(weights[part].nbytes for part in matrix_parts(name, weights).values()) for name in names}


def expert_bytes(program: Program, weights: Mapping[str, torch.Tensor], experts: ExpertsSpec) -> float:
    """Bytes of one expert, summed over the target's MoE layers."""
    layers = {op.writes["expert_ids"] for op in routers_of(program)}
    reading = [op for op in program.ops if op.kind in EXPERT_OPS and op.reads["expert_ids"] in layers]
    sizes = weight_sizes([program], weights)
    return sum(weight_bytes(op, sizes, 1.0) for op in reading) / experts.num_matrices


def _position_bytes(op: Op, program: Program) -> int:
    """Bytes of a position's key and value, for attention without a window; 0 for other operations."""
    if op.kind != "attention" or op.params.get("window") is not None:
        return 0
    cache = program.buffers[op.reads["k_cache"]]
    return 2 * cache.shape[1] * cache.shape[3] * cache.dtype.itemsize


def cost_table(shape: Sequence[int], costs: Costs, context: int, num_waiting: int) -> torch.Tensor:
    """The buffer `draft_length_costs` for the costs of buckets' bodies.

    A step of length zero also bears its share of the last body, which runs the draft model over the waiting positions.
    shape        of `draft_length_costs`
    context      the most positions of a slot
    num_waiting  the most positions that wait for the draft model; 0: none wait
    """
    scale = LARGEST_COST / max(max(each.at(bucket.batch * context)) for bucket, each in costs.items())
    table = torch.zeros(*shape, dtype=torch.int32)
    for bucket, each in costs.items():
        for part, numbers, unit in ((BASE, each.base, 1), (SLOPE, each.per_position, 1 << UNIT)):
            share = max(0.0, numbers[-1] - numbers[0]) / num_waiting if num_waiting else 0.0
            row = [round(number * scale * unit) for number in (numbers[0] + share, *numbers[1:])]
            table[bucket.batch - 1, part] = torch.tensor([max(number, 1 - part) for number in row])
    return table
