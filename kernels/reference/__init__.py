"""The executable specification: every operation of a step by its torch meaning, on any device.

`OPERATIONS` maps an operation's kind to its function. Operations write into the arrays they are handed and keep
a row's bits independent of its company, see `rows` and `linear`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lowlat.kernels.reference.attention import attention, kv
from lowlat.kernels.reference.gemm import linear
from lowlat.kernels.reference.moe import experts
from lowlat.kernels.reference.rows import draft_rows as draft_rows
from lowlat.kernels.reference.rows import elementwise, rope
from lowlat.kernels.reference.sampling import draft_topk, logprobs, ngram_draft, sample
from lowlat.kernels.reference.step import accept, publish, slots

__all__ = ["OPERATIONS"]

_FUNCTIONS: tuple[Callable[..., None], ...] = (
    accept.accept,
    accept.accept_simulated,
    accept.commit,
    accept.truncate,
    attention.attention,
    attention.prefill_attention,
    draft_topk.draft_topk,
    elementwise.add,
    elementwise.cast,
    elementwise.concat_norms,
    elementwise.embed,
    elementwise.qk_norm,
    elementwise.rms_norm,
    elementwise.silu_mul,
    elementwise.split_norms,
    experts.experts_down,
    experts.experts_gate_up,
    experts.router,
    draft_rows.assign_drafts,
    draft_rows.gather_features,
    draft_rows.gather_level,
    draft_rows.draft_prefill_rows,
    draft_rows.draft_rows,
    draft_rows.join_features,
    draft_rows.store_boundary,
    draft_rows.take_last,
    draft_rows.tree_masks,
    kv.kv_compact,
    kv.kv_write,
    kv.prefill_kv_write,
    linear.linear,
    logprobs.logprobs,
    ngram_draft.ngram_draft,
    publish.publish,
    rope.rope,
    sample.finite,
    sample.sample,
    slots.apply_commands,
    slots.gather_rows,
    slots.list_active_slots,
)

OPERATIONS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {function.__name__: function for function in _FUNCTIONS}
)
