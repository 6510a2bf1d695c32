"""This module has the costs by which the device chooses draft lengths: bytes that steps read, or measured times.

They are relative integers, of a step without positions and for each position that its slots attend to. Where the draft
model reads features, a step of length zero also bears its share of the runs that its positions wait for. Where rows
choose among experts, a step costs more or less by those that its rows are expected to choose.
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

    base          of a step whose slots have no positions
    per_position  what each position adds, whichever slot's
    experts       that a layer's rows chose in steps of these costs, mean; () where there are none to choose
    per_expert    what one more adds, in every layer
    """

    base: Sequence[float]
    per_position: Sequence[float]
    experts: Sequence[float] = ()
    per_expert: float = 0.0

    @classmethod
    def between(cls, near: Sequence[float], far: Sequence[float], positions: tuple[int, int]) -> "StepCosts":
        """The costs on the line through two, at two counts of positions; all are even where those are the same."""
        first, second = positions
        run = max(second - first, 1)
        slopes = [max(0.0, (b - a) / run) for a, b in zip(near, far, strict=True)]
        return cls([max(0.0, cost - slope * first) for cost, slope in zip(near, slopes, strict=True)], slopes)

    def by_rows(self) -> list[float]:
        """The experts by the rows of a slot, from one on: of bodies in order, the last of which has one row, too."""
        return list(self.experts[:-1])

    def choosing(self, experts: Sequence[float]) -> "StepCosts":
        """The costs where rows are expected to choose so many experts, by the rows of a slot from one on."""
        wanted = (*experts, experts[0])
        more = [self.per_expert * (each - own) for each, own in zip(wanted, self.experts, strict=True)]
        base = [max(each + change, LEAST_SHARE * each) for each, change in zip(self.base, more, strict=True)]
        return replace(self, base=base, experts=wanted)

    def at(self, positions: int) -> list[float]:
        """The costs at so many positions of all slots together."""
        return [base + slope * positions for base, slope in zip(self.base, self.per_position, strict=True)]


Costs = Mapping[Bucket, StepCosts]
LEAST_SHARE = 0.1  # of a cost, whatever experts its rows choose


def by_bytes(
    programs: Mapping[Bucket, Program],
    bucket: Bucket,
    weights: Mapping[str, torch.Tensor],
    experts: ExpertsSpec | None = None,
) -> StepCosts:
    """Bytes that each body of a bucket reads: weights, embeddings left out, and keys and values of each position.

    weights  by canonical name; their content is not read
    experts  of MoE layers, of which those are read that rows choose, each as likely as another
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
    """The share of a layer's experts that the rows of an operation choose, each as likely as another."""
    if experts is None or op.kind not in EXPERT_OPS:
        return 1.0
    return experts.share_read(experts.expected_distinct(program.buffers[op.reads["expert_ids"]].shape[0]))


def weight_sizes(programs: Sequence[Program], weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Bytes of weights as the operations of programs name them."""
    names = {name for program in programs for op in program.ops for name in op.weights.values()}
    return {name: sum(weights[part].nbytes for part in matrix_parts(name, weights).values()) for name in names}


def expert_bytes(program: Program, weights: Mapping[str, torch.Tensor], experts: ExpertsSpec) -> float:
    """Bytes of one expert in each of the layers that verify."""
    layers = {op.writes["expert_ids"] for op in routers_of(program)}
    reading = [op for op in program.ops if op.kind in EXPERT_OPS and op.reads["expert_ids"] in layers]
    sizes = weight_sizes([program], weights)
    return sum(weight_bytes(op, sizes, 1.0) for op in reading) / experts.num_matrices


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
