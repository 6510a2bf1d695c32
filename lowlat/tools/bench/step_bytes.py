"""This module counts, from its Program, the bytes that a decode step must read.

A weight counts each time that an operation uses it, in the checkpoint's format; of an MoE layer, the experts that rows
chose count. Keys and values before the last token count, and recurrent states, read and written. Embedding rows,
activations, and new keys and values are left out, because they are small in comparison.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from lowlat.engine.runtime import Runtime
from lowlat.graphs import Bucket
from lowlat.graphs.program import Op, Program
from lowlat.kernels.formats import matrix_name
from lowlat.models.geometry import ModelConfig
from lowlat.models.partial_kv import PartialKV
from lowlat.models.rank_weights import rank_weights
from lowlat.models.weight_plan import WeightPlan
from lowlat.speculators.base import Speculator, weight_shapes
from lowlat.step.weight_reads import weight_bytes

__all__ = [
    "attended",
    "cache_bytes",
    "listed",
    "part_sizes",
    "plan_sizes",
    "program_bytes",
    "step_bytes",
    "weight_sizes",
]

LIMITS = ("first", "window", "keep_first")  # parameters that limit the positions that attention reads


def step_bytes(runtime: Runtime, bucket: Bucket, lengths: Sequence[float], distinct_experts: float | None) -> int:
    """Return the bytes of one step of active requests with these lengths; with several GPUs those of the first.

    distinct_experts  distinct experts in an MoE layer, with a shared one
    """
    config, speculator, experts = runtime.model_config, runtime.speculator, runtime.model_config.experts
    sizes = weight_sizes(config, speculator, runtime.rank_config)
    share = 1.0 if experts is None else experts.share_read(max(0.0, (distinct_experts or 0.0) - experts.shared))
    return program_bytes(runtime.executor.program(bucket), sizes, lengths, share, runtime.geometry.partial)


def program_bytes(
    program: Program,
    sizes: Mapping[str, int],
    lengths: Sequence[float],
    experts_share: float,
    partial: PartialKV | None = None,
) -> int:
    """Return the bytes of one step by its program.

    sizes          bytes of weights as operations name them
    experts_share  the share of a layer's experts that rows choose
    partial        SpecPV's sizes, if steps attend to a part of the cache
    """
    weights = sum(weight_bytes(op, sizes, experts_share) for op in program.ops)
    return round(weights + sum(cache_bytes(program, op, lengths, partial) for op in program.ops))


def cache_bytes(program: Program, op: Op, lengths: Sequence[float], partial: PartialKV | None = None) -> float:
    """Return the bytes of keys and values that an operation reads, or of recurrent states that it reads and writes.

    Arguments: see `program_bytes`.
    """
    if op.kind == "delta_rule":
        state = program.buffers[op.writes["state"]]
        return 2.0 * len(lengths) * state.num_bytes / state.shape[0]
    if op.kind == "attention":
        return _cache_bytes(program, op, [attended(length, **_limits(op)) for length in lengths])
    if op.kind == "partial_attention":
        return _cache_bytes(program, op, [listed(length, partial) for length in lengths])
    return 0.0


def attended(length: float, *, first: int = 0, window: int | None = None, keep_first: int = 0) -> float:
    """Return the number of positions that attention reads before the last of `length` tokens."""
    end = max(0.0, length - 1)
    if window is None:
        return max(0.0, end - first)
    low = max(float(first), end - window)
    return end - low + max(0.0, min(low - first, keep_first)) if end > low else 0.0


def listed(length: float, partial: PartialKV | None) -> float:
    """Return the positions of a slot's list right after a refresh, before the last of `length` tokens."""
    end = max(0.0, length - 1)
    return end if partial is None or end < partial.threshold else end - partial.shift(int(end))


def _limits(op: Op) -> dict[str, Any]:
    return {name: op.params[name] for name in LIMITS if op.params.get(name) is not None}


def _cache_bytes(program: Program, op: Op, positions: Sequence[float]) -> float:
    """Return the bytes of keys and values of each request's positions."""
    total = 0.0
    for argument in ("k_cache", "v_cache"):
        spec = program.buffers[op.reads[argument]]
        _, kv_heads, _, head_dim = spec.shape
        total += sum(positions) * kv_heads * head_dim * spec.dtype.itemsize
    return total


def weight_sizes(
    config: ModelConfig, speculator: Speculator | None = None, rank: ModelConfig | None = None
) -> dict[str, int]:
    """Return bytes of a target's and a speculator's weights, as operations name them; all parts of quantised matrices.

    rank  the geometry of a rank with a shard of them; None: they are whole
    """
    whole = weight_shapes(config, speculator)
    parts = whole if rank is None else rank_weights(whole, rank)
    return plan_sizes({name: (tuple(part.shape), part.dtype) for name, part in parts.items()})


def part_sizes(plan: WeightPlan, rank: ModelConfig) -> dict[str, int]:
    """Return bytes of a rank's shard of planned weights, as operations name them."""
    whole = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in plan.items()}
    return plan_sizes({name: (tuple(part.shape), part.dtype) for name, part in rank_weights(whole, rank).items()})


def plan_sizes(plan: WeightPlan) -> dict[str, int]:
    """Return bytes of planned weights, as operations name them; all parts of quantised matrices."""
    sizes: dict[str, int] = {}
    for name, (shape, dtype) in plan.items():
        matrix = matrix_name(name) or name
        sizes[matrix] = sizes.get(matrix, 0) + prod(shape) * dtype.itemsize
    return sizes
