"""The table of operations: the kernels, or the library call, by which each operation is covered alone.

A kernel takes its operation's buffers, weights and parameters by the names that the reference has. Where more is
needed (a table that may be packed, workspaces, the card), the operation has a function here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.executors.lowering.binding import Binding, Call, decodes
from lowlat.executors.lowering.prefill_attention import prefill_attention
from lowlat.executors.lowering.prefill_gemm import prefill_linear
from lowlat.kernels.attention.attention import attention, choose_split, num_stages
from lowlat.kernels.attention.kv_compact import kv_compact
from lowlat.kernels.attention.prefill_kv_write import prefill_kv_write
from lowlat.kernels.gemm.decode.gemm import decode_gemm
from lowlat.kernels.rows.draft_input import concat_norms
from lowlat.kernels.rows.draft_rows import gather_features, store_boundary, take_last
from lowlat.kernels.rows.elementwise import add, cast, silu_mul
from lowlat.kernels.rows.embed import embed
from lowlat.kernels.rows.norm import rms_norm, split_norms
from lowlat.kernels.rows.rotate import rotate
from lowlat.kernels.sampling.draft_topk import draft_topk
from lowlat.kernels.sampling.logprobs import logprobs
from lowlat.kernels.sampling.select import FINITE, INFINITY
from lowlat.kernels.step.publish import publish
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.program.program import Op, Stage


    raise NotImplementedError


    raise NotImplementedError


__all__ = ["RING_COUNT", "argmax_of", "draft_topk_alone", "lower_alone", "publication", "rotation_weights"]

RING_COUNT = "publish.count"  # entries written to the ring so far, kept on the device
Lower = Callable[[Binding, Op], Sequence[Call]]


def lower_alone(binding: Binding, op: Op) -> Sequence[Call]:
    """The calls that cover one operation by itself. Raises ConfigError for a kind that is not in the table."""
    entry = OPERATIONS.get(op.kind)
    if entry is None:
        raise ConfigError(f"{binding.program.name}: operation {op.kind} has no kernel; use executor='reference'")
    return entry(binding, op)


def _by_name(build: Callable[..., Sequence[KernelCall]]) -> Lower:
    """The entry of a kernel that takes just what the reference takes."""
    return lambda binding, op: build(**binding.arguments(op), **binding.vectors(op))


def _with_workspace(build: Callable[..., Sequence[KernelCall]]) -> Lower:
    """The entry of a kernel that wants workspaces, too."""
    return lambda binding, op: build(**binding.arguments(op), **binding.vectors(op), workspace=binding.workspace)


def _embed(binding: Binding, op: Op) -> Sequence[Call]:
    return embed(**binding.arguments(op), weight=binding.weights.table(op.weights["weight"]))


def _linear(binding: Binding, op: Op) -> Sequence[Call]:
    if not decodes(op):
        return prefill_linear(binding, op)
    given, name = binding.arguments(op), op.weights["weight"]
    return decode_gemm(
        x=given["x"], weight=binding.weights.matrix(name), bias=binding.bias(op), out=given["out"],
        **({} if binding.weights.runs(name) is None else {"columns": 1}), card=binding.card,
    )  # fmt: skip


def _attention(binding: Binding, op: Op) -> Sequence[Call]:
    given = binding.arguments(op)
    max_batch, max_context = binding.program.buffers["tokens"].shape
    return attention(
        **given,
        split=choose_split(max_batch, max_context, given["k_cache"].shape[1]),
        sinks=binding.sinks(op),
        workspace=binding.workspace,
        num_blocks=2 * binding.card.num_multiprocessors,
        stages=num_stages(given["q"].shape[2], binding.card),
        early_metadata=op.stage is Stage.BASE_DECODE_STEP,
        tail=binding.program.buffers["row_tokens"].shape[1],  # no row has more ancestors than a slot has rows
    )


def _kv_compact(binding: Binding, op: Op) -> Sequence[Call]:
    given = binding.arguments(op)
    caches: dict[str, Any] = {f"{part}_caches": [given.pop(f"{part}_cache")] for part in ("k", "v")}
    return kv_compact(**given, **caches, workspace=binding.workspace)


def _take_last(binding: Binding, op: Op) -> Sequence[Call]:
    given = binding.arguments(op)
    return take_last([(given["x"], given["out"])], given["commit_lens"])


def rotation_weights(binding: Binding, norm: Op) -> dict[str, torch.Tensor | None]:
    """The weights of the heads' norms, for those of queries and keys that a GEMM's product has."""
    counts = {"q_weight": norm.params["num_heads"], "k_weight": norm.params["num_kv_heads"]}
    vectors = binding.vectors(norm)
    return {name: vectors[name] if count else None for name, count in counts.items()}


@dataclass(frozen=True)
class FoundArgmax:
    """The partial argmax of logits, and the calls that make it where no GEMM left it."""

    pairs: torch.Tensor
    calls: Sequence[KernelCall] = ()


def argmax_of(binding: Binding, op: Op) -> FoundArgmax:
    """The partial argmax of the logits that an operation chooses by."""
    limit, left = INFINITY if op.kind == "draft_topk" else FINITE, binding.left
    if left is not None and (left.logits, left.limit) == (op.reads["logits"], limit):
        return FoundArgmax(left.pairs)
    logits = binding.buffers[op.reads["logits"]]
    pairs = binding.workspace("sampling.partial_argmax", pairs_shape(logits), torch.int32)
    return FoundArgmax(pairs, row_pairs(logits=logits, pairs=pairs, limit=limit))


def draft_topk_alone(binding: Binding, op: Op, **children: Any) -> Sequence[Call]:
    """The calls of `draft_topk`; of `assign_drafts` too, where `children` are its arguments."""
    given, vectors, workspace = binding.arguments(op), binding.vectors(op), binding.workspace
    if given["k"] > 1:
        return draft_topk(**given, **vectors, **children, workspace=workspace)
    found = argmax_of(binding, op)
    return [*found.calls, *draft_topk(**given, **vectors, **children, best=found.pairs, workspace=workspace)]


def publication(binding: Binding, op: Op) -> dict[str, Any]:
    """The arguments of `publish`, with the count of entries that the device keeps."""
    return {**binding.arguments(op), "ring_count": binding.workspace(RING_COUNT, (1,), torch.int64)}


def _publish(binding: Binding, op: Op) -> Sequence[Call]:
    return publish(**publication(binding, op), loop=binding.loop)


OPERATIONS: Mapping[str, Lower] = MappingProxyType(
    {
        "add": _by_name(add),
        "attention": _attention,
        "cast": _by_name(cast),
        "concat_norms": _by_name(concat_norms),
        "draft_topk": draft_topk_alone,
        "embed": _embed,
        "gather_features": _by_name(gather_features),
        "kv_compact": _kv_compact,
        "linear": _linear,
        "logprobs": _with_workspace(logprobs),
        "prefill_attention": prefill_attention,
        "prefill_kv_write": _by_name(prefill_kv_write),
        "publish": _publish,
        "rms_norm": _by_name(rms_norm),
        "rope": _by_name(rotate),
        "silu_mul": _by_name(silu_mul),
        "split_norms": _by_name(split_norms),
        "store_boundary": _by_name(store_boundary),
        "take_last": _take_last,
    }
)
