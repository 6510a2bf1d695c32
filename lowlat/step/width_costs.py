"""The costs of steps by their width, by which the device chooses: bytes of weights, or times that were measured.

They are relative integers. Where the draft model reads features, a step of width zero also bears its share of the runs
that its positions wait for.
"""

from collections.abc import Mapping, Sequence

import torch

from lowlat.graphs import Bucket
from lowlat.kernels.formats import matrix_parts
from lowlat.models.program import Program

__all__ = ["Costs", "by_bytes", "cost_table"]

LARGEST = 1 << 29  # costs times expected tokens fit into 64 bits with room to spare
Costs = Mapping[Bucket, Sequence[float]]


def by_bytes(programs: Mapping[Bucket, Program], bucket: Bucket, weights: Mapping[str, torch.Tensor]) -> list[float]:
    """Bytes of weights that each body of a bucket reads, embeddings left out, in the order of the choice.

    weights  by canonical name; their content is not read
    """
    return [float(_weight_bytes(programs[body], weights)) for body in bucket.bodies]


def _weight_bytes(program: Program, weights: Mapping[str, torch.Tensor]) -> int:
    read = [name for op in program.ops if op.kind != "embed" for name in op.weights.values()]
    return sum(weights[part].nbytes for name in read for part in matrix_parts(name, weights).values())


def cost_table(shape: Sequence[int], costs: Costs, num_waiting: int) -> torch.Tensor:
    """The costs of buckets' bodies as `width_costs` has them, those of width zero with their share of the last one.

    shape        of `width_costs`
    num_waiting  positions that wait for the draft model at most; 0: nothing waits
    """
    scale = LARGEST / max(max(each) for each in costs.values())
    table = torch.zeros(*shape, dtype=torch.int32)
    for bucket, each in costs.items():
        share = max(0.0, each[-1] - each[0]) / num_waiting if num_waiting else 0.0
        table[bucket.batch - 1] = torch.tensor([max(1, round(cost * scale)) for cost in (each[0] + share, *each[1:])])
    return table
