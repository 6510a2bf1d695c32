"""The bytes that a step must move, as benchmarks' floors count them; `lowlat.tools.bench.step_bytes` counts them.

    matrices  each once each use, in its format; of experts those that rows chose
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
    """The bytes of a case's step, of several GPUs those of the one that reads most.

    program           of the step
    plan              the weights, of the draft model, too, where the case drafts
    distinct_experts  a layer, of an MoE layer, a shared one left out
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
    lengths = [case.context + 1.0] * case.batch  # of which all but the last are read
    total = sum(weight_bytes(op, sizes, share) for op in program.ops)
    for op in program.ops:
        whole = replace(op, params={name: value for name, value in op.params.items() if name != "first"})
        total += cache_bytes(program, whole, lengths)
    return round(total)


def _matrices(plan: Plan, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of matrices alone."""
    wide = {matrix_name(name) or name for name, part in plan.items() if len(part.shape) > 1}
    return {name: size for name, size in sizes.items() if name in wide and not name.endswith("bias")}
