"""This module lists the launches of a step for a profile: stage, bytes, all-reduces.

It derives them from the fused groups to which the step was lowered.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from lowlat.kernels.moe.packing import bytes_an_expert
from lowlat.tools.profile.times import AllReduce, CallSite

if TYPE_CHECKING:
    from lowlat.lowering.lower import LoweredGroup

__all__ = ["all_reduce_of", "call_sites", "moved_bytes"]

EXPERT_GEMMS = ("experts_gate_up", "experts_down")
FORWARDING = "forward_commands"  # before a step's first group: others await the first rank there


def call_sites(
    groups: Sequence["LoweredGroup"],
    buffers: Mapping[str, torch.Tensor],
    lengths: Sequence[Sequence[int]],
    num_experts: float = 0.0,
) -> tuple[CallSite, ...]:
    """Return a step's launches in order; bytes are means over steps, with each request's tokens from `lengths`.

    buffers      the step's state by name, of which the caches' shapes matter
    num_experts  distinct experts that a layer's rows choose, on average
    """
    sites = []
    for group in groups:
        also = tuple(dict.fromkeys(op.stage for op in group.ops if op.stage is not group.stage))
        for place, call in enumerate(group.kernel_calls):
            moved = fmean(moved_bytes(group, place, buffers, tokens, num_experts) for tokens in lengths)
            source = call.kernel.function.__name__
            sites.append(CallSite(group.stage, call.kernel.name, source, moved, also, all_reduce_of(group, place)))
    return tuple(sites)


def all_reduce_of(group: "LoweredGroup", place: int) -> AllReduce:
    """Return how the `place`-th call of a group exchanges with other ranks; only the last call of a group may."""
    calls, kinds = group.kernel_calls, {op.kind for op in group.ops}
    if calls[place].kernel.function.__name__ == FORWARDING:
        return AllReduce.ALONE
    if "gather_ranks" not in kinds or place < len(calls) - 1:
        return AllReduce.NONE
    return AllReduce.FUSED if kinds & {"linear", *EXPERT_GEMMS} else AllReduce.ALONE


def moved_bytes(
    group: "LoweredGroup",
    place: int,
    buffers: Mapping[str, torch.Tensor],
    lengths: Sequence[int],
    num_experts: float = 0.0,
) -> int:
    """Return the bytes that a group's `place`-th call must read: a GEMM's weight; experts' matrices; keys and values.

    lengths      tokens of every active request before the step
    num_experts  distinct experts that the rows choose: each one's matrices are read once
    Attention reads the positions before the last token, and its group's first call counts for all of them. Neglected
    are drafts' positions, rows, norms, tables, logits and all that is written: small next to weights and caches.
    """
    call = group.kernel_calls[place]
    if call.kernel.name.startswith("decode_gemm"):
        tiles = call.arguments[0]
        return tiles.numel() * tiles.element_size() if isinstance(tiles, torch.Tensor) else 0
    if any(op.kind in EXPERT_GEMMS for op in group.ops):
        return round(num_experts * bytes_an_expert(call.arguments))
    op = next((op for op in group.ops if op.kind in ("attention", "partial_attention")), None)
    if op is None or place:
        return 0
    from lowlat.kernels.attention.attention import attention_bytes

    cache = buffers[op.reads["k_cache"]]
    _, kv_heads, _, head_dim = cache.shape
    options: dict[str, Any] = {name: op.params[name] for name in ("first", "window", "keep_first") if name in op.params}
    dense = [max(0, length - 1) for length in lengths]
    if op.kind == "partial_attention":  # lists of a few requests in the first slots, as they are in a profile
        shifts = buffers["partial_shifts"].tolist()
        dense = [max(0, length - shift) for length, shift in zip(dense, shifts, strict=False)]
    return attention_bytes(dense, kv_heads=kv_heads, head_dim=head_dim, itemsize=cache.element_size(), **options)
