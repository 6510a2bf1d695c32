"""The executable specification: every operation of a step by its torch meaning, on any device.

`OPERATIONS` maps an operation's kind to its schema and its function, which stand together, see `schema`. Operations
write into the arrays they are handed and keep a row's bits independent of its company, see `row_blocks` and
`gemm.linear`.
"""

from lowlat.kernels.reference.attention import attention, kv, partial
from lowlat.kernels.reference.exchange import ranks
from lowlat.kernels.reference.gemm import linear
from lowlat.kernels.reference.moe import experts
from lowlat.kernels.reference.rows import draft_block, draft_rows, elementwise, markov, rope, waiting
from lowlat.kernels.reference.sampling import (
    choose_drafts,
    draft_confidence,
    draft_topk,
    logprobs,
    ngram_draft,
    prompt_logprobs,
    sample,
    suffix_draft,
)
from lowlat.kernels.reference.schema import Operation, OperationSchema, operations_of
from lowlat.kernels.reference.step import accept, depths, publish, slots, width_odds, widths
from lowlat.kernels.reference.trees import draft_scores, grow, hand_over

__all__ = ["OPERATIONS", "Operation", "OperationSchema"]

OPERATIONS = operations_of(
    accept,
    attention,
    depths,
    draft_block,
    draft_confidence,
    draft_rows,
    choose_drafts,
    draft_scores,
    draft_topk,
    elementwise,
    experts,
    grow,
    hand_over,
    kv,
    linear,
    logprobs,
    markov,
    ngram_draft,
    partial,
    prompt_logprobs,
    publish,
    ranks,
    rope,
    sample,
    slots,
    suffix_draft,
    waiting,
    width_odds,
    widths,
)
