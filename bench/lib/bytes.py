"""This module counts the bytes that a step must move, for floors, by `lowlat.tools.bench.step_bytes`.

    matrices  once for each use, in their formats; of experts those that rows chose
    cache     keys and values of the layers that a step attends to, within their windows
    state     recurrent states, each read and written once

Rows of whole models on one GPU count matrices, and every committed position (`matrices_only`). Left out there, below
0.1 %, are norms, biases and other vectors, which rows of several GPUs and of any geometry count, and the last position,
which a step writes itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.lib.case import Case
from bench.lib.weights import Plan
from lowlat.graphs.program import Program
from lowlat.kernels.formats import matrix_name
from lowlat.models.geometry import ModelConfig
from lowlat.step.weight_reads import weight_bytes
from lowlat.tools.bench.step_bytes import cache_bytes, part_sizes, plan_sizes, program_bytes

__all__ = ["StepBytes", "step_bytes"]


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one step; state: those of recurrent states, which are among them."""

    total: int
    state: int


def step_bytes(
    program: Program,
    plan: Plan,
    config: ModelConfig,
    case: Case,
    distinct_experts: float | None = None,
    *,
    ranks: Sequence[ModelConfig] = (),
    matrices_only: bool = False,
) -> StepBytes:
    """Return the bytes of a case's step; with several GPUs those of the GPU that reads most.

    program           the step's program
    plan              the weights, with the draft model's if the case drafts
    distinct_experts  distinct experts in an MoE layer, without a shared one
    ranks             the geometry of each rank; (): there is one
    """
    experts = config.experts
    share = 1.0 if experts is None else experts.share_read(distinct_experts or 0.0)
    stored = {name: (part.shape, part.dtype) for name, part in plan.items()}
    if config.tie_embeddings and "lm_head.weight" not in stored:
        stored["lm_head.weight"] = stored["embed.weight"]
    states = (op for op in program.ops if op.kind == "delta_rule")
    state, found = round(sum(cache_bytes(program, op, [0.0] * case.batch) for op in states)), []
    for rank in ranks or (config,):
        sizes = part_sizes(stored, rank) if ranks else plan_sizes(stored)
        if matrices_only:
            read = _matrices_and_cache(program, _matrices(plan, sizes), case, share)
        else:
            read = program_bytes(program, sizes, [float(case.context)] * case.batch, share)
        found.append(read)
    return StepBytes(max(found), state)


def _matrices_and_cache(program: Program, sizes: Mapping[str, int], case: Case, share: float) -> int:
    lengths = [case.context + 1.0] * case.batch  # a step reads all but the last
    total = sum(weight_bytes(op, sizes, share) for op in program.ops)
    for op in program.ops:
        whole = replace(op, params={name: value for name, value in op.params.items() if name != "first"})
        total += cache_bytes(program, whole, lengths)
    return round(total)


def _matrices(plan: Plan, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of matrices, without vectors."""
    wide = {matrix_name(name) or name for name, part in plan.items() if len(part.shape) > 1}
    return {name: size for name, size in sizes.items() if name in wide and not name.endswith("bias")}
