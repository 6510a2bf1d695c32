"""This package is the executable specification: it has every operation of a step in torch, for any device.

`OPERATIONS` maps an operation's kind to its schema and its function, which are written together (see `graphs.schema`).
Operations write into the arrays that they are given. A row's bits do not depend on other rows, see `row_blocks` and
`gemm.linear`.
"""

from lowlat.graphs.schema import Operation, OperationSchema, operations_of
from lowlat.kernels.reference.attention import attention, kv, partial
from lowlat.kernels.reference.collectives import ranks
from lowlat.kernels.reference.elementwise import elementwise, rope
from lowlat.kernels.reference.gemm import linear
from lowlat.kernels.reference.moe import experts
from lowlat.kernels.reference.recurrent import delta_conv, delta_rule, gates, pending
from lowlat.kernels.reference.sampling import logprobs, prompt_logprobs, sample
from lowlat.kernels.reference.speculation import (
    accept,
    choose_drafts,
    draft_block,
    draft_lengths,
    draft_rows,
    draft_scores,
    draft_topk,
    grow,
    hand_over,
    length_probabilities,
    local_conv,
    markov,
    ngram_draft,
    proposals,
    suffix_draft,
    token_rows,
    waiting,
)
from lowlat.kernels.reference.step import checks, publish, slots

__all__ = ["OPERATIONS", "Operation", "OperationSchema"]

OPERATIONS = operations_of(
    accept,
    attention,
    checks,
    delta_conv,
    delta_rule,
    draft_block,
    draft_lengths,
    draft_rows,
    choose_drafts,
    draft_scores,
    draft_topk,
    elementwise,
    experts,
    gates,
    grow,
    hand_over,
    kv,
    linear,
    local_conv,
    logprobs,
    markov,
    ngram_draft,
    partial,
    pending,
    prompt_logprobs,
    proposals,
    publish,
    ranks,
    rope,
    sample,
    slots,
    suffix_draft,
    token_rows,
    waiting,
    length_probabilities,
)
