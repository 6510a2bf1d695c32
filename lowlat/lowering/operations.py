"""This table has the implementations of each operation without fusions, in order of preference.

A kernel takes its operation's buffers, weights and parameters by the names of the reference's arguments. If a kernel
needs more (an embedding that may be packed, workspaces, the GPU), the operation has a function here.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.graphs.program import Op, Program
from lowlat.kernels.attention.attention import attention, partial_attention
from lowlat.kernels.attention.kv_compact import kv_compact_layer
from lowlat.kernels.attention.kv_write import kv_write, prefill_kv_write
from lowlat.kernels.attention.limits import INVARIANT_HEADS, choose_split
from lowlat.kernels.attention.partial.block_lists import choose_blocks, list_lens
from lowlat.kernels.attention.partial.block_summary import summarise_blocks
from lowlat.kernels.attention.place_table import place_table
from lowlat.kernels.collectives.all_reduce import gather_ranks
from lowlat.kernels.collectives.parts import all_gather, sum_ranks
from lowlat.kernels.elementwise.elementwise import (
    add,
    add_gated,
    cast,
    identity,
    output_gate,
    scale,
    silu_mul,
    take_columns,
)
from lowlat.kernels.elementwise.embed import embed
from lowlat.kernels.elementwise.norm import rms_norm, split_norms
from lowlat.kernels.elementwise.per_layer import per_layer_gate, per_layer_inputs
from lowlat.kernels.elementwise.qk_norm import qk_norm
from lowlat.kernels.elementwise.rotate import rotate
from lowlat.kernels.gemm.packing import gate_up_permutation
from lowlat.kernels.moe.decode.experts import experts_down, experts_gate_up
from lowlat.kernels.moe.prefill.experts import prefill_down, prefill_gate_up
from lowlat.kernels.moe.router import prefill_router, router
from lowlat.kernels.recurrent.delta_conv import delta_conv, prefill_delta_conv
from lowlat.kernels.recurrent.delta_norm import delta_norm
from lowlat.kernels.recurrent.delta_prefill import prefill_delta_rule
from lowlat.kernels.recurrent.state_lens import advance_states, prefill_advance_states
from lowlat.kernels.sampling.logprobs.prompt import keep_prompt_logprobs, take_prompt_rows, token_ranks
from lowlat.kernels.sampling.logprobs.tokens import logprobs
from lowlat.kernels.sampling.row_pairs import finite
from lowlat.kernels.sampling.sample import sample
from lowlat.kernels.sampling.select import FINITE, INFINITY
from lowlat.kernels.speculation.accept import accept, accept_simulated, commit, draft_rows, truncate
from lowlat.kernels.speculation.choose_draft_length import choose_draft_length
from lowlat.kernels.speculation.choose_drafts import choose_drafts
from lowlat.kernels.speculation.draft_block import block_rows, mask_rows
from lowlat.kernels.speculation.draft_input import concat_norms
from lowlat.kernels.speculation.draft_level import assign_drafts, gather_level
from lowlat.kernels.speculation.draft_rows import (
    draft_prefill_rows,
    gather_features,
    join_features,
    store_boundary,
    take_block,
    take_last_row,
)
from lowlat.kernels.speculation.draft_scores import draft_topk_logprobs
from lowlat.kernels.speculation.draft_topk import draft_topk
from lowlat.kernels.speculation.grow import choose_nodes, grow_block_tree, grow_tree
from lowlat.kernels.speculation.hand_over import hand_over_tree
from lowlat.kernels.speculation.length_probabilities import join_lengths, learn_draft_lengths
from lowlat.kernels.speculation.local_conv import local_conv, walk_candidates
from lowlat.kernels.speculation.markov import bias_rows, markov_gate, parent_tokens
from lowlat.kernels.speculation.ngram_draft import ngram_draft
from lowlat.kernels.speculation.proposals import draft_from_texts, open_proposals
from lowlat.kernels.speculation.suffix_draft import suffix_draft
from lowlat.kernels.speculation.token_rows import token_rows
from lowlat.kernels.speculation.waiting import keep_features, take_features, waiting_rows
from lowlat.kernels.step.begin_step import apply_commands, gather_rows, list_active_slots, publish_rows
from lowlat.kernels.step.checks import check_accepted, check_commit, check_rows, check_slots
from lowlat.kernels.step.publish import publish, tree_masks
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.lowering.binding import Binding, Call, decodes, triggers_first
from lowlat.lowering.implementations import Implementation, Lower, lower_by
from lowlat.lowering.linear import LINEAR, NARROW_LINEAR
from lowlat.lowering.prefill_attention import PROMPT_ATTENTION, refresh_attention
from lowlat.lowering.recurrent_fusions import rule_alone
from lowlat.lowering.weight_parts import experts_name

__all__ = [
    "RING_COUNT",
    "block_argmax_of",
    "draft_topk_alone",
    "early_reads",
    "lower_alone",
    "operation_layouts",
    "publication",
]

# arguments that kernels read before they wait for the kernel before them, which may not have written these
EARLY: Mapping[str, tuple[str, ...]] = {
    "sample": (
        *("slots", "row_live", "row_tokens", "row_masks", "lengths", "slot_ints", "slot_floats"),
        *("bias_ids", "bias_values", "stop_ids", "prompt_seen", "output_counts"),
    ),
}
RING_COUNT = "publish.count"  # entries written to the ring so far, kept on the device


def lower_alone(binding: Binding, op: Op) -> Sequence[Call]:
    """The calls that compute one operation without fusion. Raises ConfigError for a kind that is not in the table."""
    implementations = OPERATIONS.get(op.kind)
    if implementations is None:
        raise ConfigError(f"{binding.program.name}: operation {op.kind} has no kernel; use executor='reference'")
    return lower_by(implementations, binding, op)


def _by_name(build: Callable[..., Sequence[KernelCall]]) -> Lower:
    """The entry of a kernel with exactly the reference's arguments."""
    return lambda binding, op: build(**binding.arguments(op), **binding.vectors(op))


def _with_workspace(build: Callable[..., Sequence[KernelCall]]) -> Lower:
    """The entry of a kernel that also needs workspaces."""
    return lambda binding, op: build(**binding.arguments(op), **binding.vectors(op), workspace=binding.workspace)


def _with_gpu(build: Callable[..., Sequence[KernelCall]]) -> Lower:
    """The entry of a kernel that also needs workspaces and plans for the GPU."""
    return lambda binding, op: build(
        **binding.arguments(op), **binding.vectors(op), workspace=binding.workspace, gpu=binding.gpu
    )


def _rms_norm(binding: Binding, op: Op) -> Sequence[Call]:
    return rms_norm(**binding.arguments(op), **binding.vectors(op), triggers_first=triggers_first(op))


def _embed(binding: Binding, op: Op) -> Sequence[Call]:
    return embed(**binding.arguments(op), weight=binding.weights.table(op.weights["weight"]))


def _attention(binding: Binding, op: Op) -> Sequence[Call]:
    given = binding.arguments(op)
    given.pop("group", None)  # of torch's products alone
    buffers = binding.program.buffers
    max_batch, max_context = buffers["tokens"].shape
    heads = INVARIANT_HEADS if binding.is_invariant else given["k_cache"].shape[1]
    most = [given["row_masks"], *(buffers[name] for name in ("row_tokens", "draft_nodes") if name in buffers)]
    attend = attention if op.kind == "attention" else partial_attention
    return attend(
        **given,
        split=choose_split(max_batch, max_context, heads, given["q"].shape[-1]),
        sinks=binding.sinks(op),
        workspace=binding.workspace,
        gpu=binding.gpu,
        early_metadata=_is_settled(binding, op),
        early_rows=binding.fresh.keys().isdisjoint((op.reads["row_live"], op.reads["row_masks"])),
        tail=max(each.shape[1] for each in most),  # no row has more ancestors than a slot has nodes, or such rows
    )


def _is_settled(binding: Binding, op: Op) -> bool:
    """Whether attention may copy the keys and values before its dense lengths before it waits."""
    lens, tables = op.reads["dense_lens"], (op.reads.get(name) for name in ("slots", "block_table", "block_lists"))
    caches = (binding.fresh.get(op.reads[name], lens) for name in ("k_cache", "v_cache"))
    return binding.fresh.keys().isdisjoint((lens, *tables)) and all(each == lens for each in caches)


def _summarise_blocks(binding: Binding, op: Op) -> Sequence[Call]:
    return summarise_blocks(**binding.arguments(op), gpu=binding.gpu)


def block_argmax_of(binding: Binding, op: Op) -> torch.Tensor | None:
    """The argmax of each block of an operation's logits, if the LM head's GEMM has written it."""
    limit, known = INFINITY if op.kind == "draft_topk" else FINITE, binding.block_argmax
    return known.pairs if known is not None and (known.logits, known.limit) == (op.reads["logits"], limit) else None


def draft_topk_alone(binding: Binding, op: Op, **children: Any) -> Sequence[Call]:
    """The calls of `draft_topk`. With `children`, the arguments of `assign_drafts`, and `then`, the next level's, they
    also compute these."""
    given, best = {**binding.arguments(op), **binding.vectors(op)}, block_argmax_of(binding, op)
    return draft_topk(**given, **children, best=best if given["k"] == 1 else None, workspace=binding.workspace)


def _sample(binding: Binding, op: Op) -> Sequence[Call]:
    return sample(**binding.arguments(op), best=block_argmax_of(binding, op), workspace=binding.workspace)


def _gather_ranks(binding: Binding, op: Op) -> Sequence[Call]:
    """Lower `gather_ranks` for one rank, as a copy."""
    given = binding.arguments(op)
    x, out = given["x"], given["out"]
    if out.shape[0] == 1:
        return identity(x, out=out.view(x.shape))
    return gather_ranks(x, channel=binding.channel(out.shape[2]), out=out)


def _decodes(_binding: Binding, op: Op) -> bool:
    return decodes(op)


def _gate_up_of(binding: Binding, op: Op) -> dict[str, Any]:
    name = experts_name(op)
    bias = binding.weights.experts_bias(name) if "bias" in op.weights else None
    return {**binding.arguments(op), "experts": binding.weights.experts(name), "bias": bias, "gpu": binding.gpu}


def _gate_up(binding: Binding, op: Op) -> Sequence[Call]:
    return experts_gate_up(**_gate_up_of(binding, op), many=binding.shares_rows)


def _grouped_gate_up(binding: Binding, op: Op) -> Sequence[Call]:
    return prefill_gate_up(**_gate_up_of(binding, op), workspace=binding.workspace)


def _down_of(binding: Binding, op: Op) -> dict[str, Any]:
    given = {**binding.arguments(op), "experts": binding.weights.experts(experts_name(op))}
    bias = binding.weights.vector(op.weights["bias"]) if "bias" in op.weights else None
    parts = binding.k_parts(op, given["activated"].shape[-1])
    for name in ("num_parts", "unit"):
        given.pop(name, None)
    return given | {"bias": bias, "gpu": binding.gpu, "parts": parts, "workspace": binding.workspace}


def _down(binding: Binding, op: Op) -> Sequence[Call]:
    return experts_down(**_down_of(binding, op), many=binding.shares_rows)


def _grouped_down(binding: Binding, op: Op) -> Sequence[Call]:
    return prefill_down(**_down_of(binding, op))


def operation_layouts(program: Program) -> dict[str, torch.Tensor]:
    """The row permutations of packed weights that operations need without fusions, by weight."""
    gate_ups = [op for op in program.ops if op.kind == "experts_gate_up"]
    return {experts_name(op): gate_up_permutation(program.buffers[op.writes["out"]].shape[2]) for op in gate_ups}


def early_reads(op: Op) -> list[str]:
    """The buffers that an operation's kernel reads before it waits."""
    return [op.reads[name] for name in EARLY.get(op.kind, ()) if name in op.reads]


def publication(binding: Binding, op: Op) -> dict[str, Any]:
    """The arguments of `publish`, with the device's count of ring entries."""
    return {**binding.arguments(op), "ring_count": binding.workspace(RING_COUNT, (1,), torch.int64)}


def _publish(binding: Binding, op: Op) -> Sequence[Call]:
    return publish(**publication(binding, op), loop=binding.loop)


def _choose_draft_length(binding: Binding, op: Op) -> Sequence[Call]:
    return choose_draft_length(**binding.arguments(op), condition=0 if binding.switches else None)


_BY_NAME = (
    *(accept, accept_simulated, add, add_gated, apply_commands, assign_drafts, bias_rows, block_rows, cast),
    *(choose_drafts, draft_from_texts, open_proposals),
    *(check_accepted, check_commit, check_rows, check_slots),
    *(choose_nodes, grow_block_tree, grow_tree, hand_over_tree),
    *(commit, concat_norms, draft_prefill_rows, draft_rows, gather_features, gather_level),
    *(gather_rows, identity, join_features, join_lengths, keep_features, kv_write, learn_draft_lengths),
    *(list_active_slots, local_conv, walk_candidates),
    *(list_lens, markov_gate, mask_rows, ngram_draft, parent_tokens, place_table, prefill_kv_write, publish_rows),
    *(output_gate, per_layer_gate, per_layer_inputs, qk_norm, scale),
    *(
        silu_mul,
        split_norms,
        store_boundary,
        suffix_draft,
        take_block,
        take_columns,
        take_features,
        tree_masks,
        truncate,
    ),
    *(advance_states, delta_conv, delta_norm, prefill_advance_states, prefill_delta_conv),
    *(all_gather, keep_prompt_logprobs, sum_ranks, take_prompt_rows, token_ranks, token_rows, waiting_rows),
)
_ALONE: Mapping[str, Lower] = MappingProxyType(
    {
        **{build.__name__: _by_name(build) for build in _BY_NAME},
        "choose_blocks": _with_gpu(choose_blocks),
        "choose_draft_length": _choose_draft_length,
        "delta_rule": rule_alone,
        "draft_topk": draft_topk_alone,
        "draft_topk_logprobs": _with_workspace(draft_topk_logprobs),
        "embed": _embed,
        "finite": _with_workspace(finite),
        "gather_ranks": _gather_ranks,
        "kv_compact": _by_name(kv_compact_layer),
        "logprobs": _with_workspace(logprobs),
        "prefill_delta_rule": _with_gpu(prefill_delta_rule),
        "publish": _publish,
        "refresh_attention": refresh_attention,
        "rms_norm": _rms_norm,
        "rope": _by_name(rotate),
        "sample": _sample,
        "summarise_blocks": _summarise_blocks,
        "take_last": _by_name(take_last_row),
    }
)
OPERATIONS: Mapping[str, Sequence[Implementation]] = MappingProxyType(
    {
        **{kind: (Implementation("kernel", lower),) for kind, lower in _ALONE.items()},
        "attention": (Implementation("kernel", _attention, plans=("attention",)),),
        "experts_down": (
            Implementation("decode", _down, covers=_decodes, plans=("experts",)),
            Implementation("grouped", _grouped_down, plans=("experts_grouped",)),
        ),
        "experts_gate_up": (
            Implementation("decode", _gate_up, covers=_decodes, plans=("experts",)),
            Implementation("grouped", _grouped_gate_up, plans=("experts_grouped",)),
        ),
        "linear": LINEAR,
        "narrow_linear": NARROW_LINEAR,
        "partial_attention": (Implementation("kernel", _attention, plans=("attention",)),),
        "prefill_attention": PROMPT_ATTENTION,
        "router": (
            Implementation("decode", _with_gpu(router), covers=_decodes),
            Implementation("prompt", _with_gpu(prefill_router)),
        ),
    }
)
