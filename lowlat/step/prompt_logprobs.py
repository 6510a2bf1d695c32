"""This module emits the pass that computes a prompt's logprobs: the LM head over rows that prefill left.

If a request asks for logprobs of its prompt, prefill leaves the residual stream of its positions. A pass takes
PASS_ROWS of them and computes their logits as a step does, so that a row has the bits that a step would give it. For
the host it keeps each token's logprob and rank, and the likeliest tokens, by position. A cursor on the device points to
the next rows.
"""

import torch

from lowlat.graphs.program import Program, ProgramBuilder, Stage, named
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.reference.step.slot_record import MAX_LOGPROBS
from lowlat.models.decoder import emit_lm_head
from lowlat.models.layers import Rows
from lowlat.step.state import StepGeometry, declare_state

__all__ = ["build_pass"]


def build_pass(geometry: StepGeometry) -> Program:
    """The Program of a pass. Its rows form a slot of their own, whose record has the number of likeliest tokens."""
    stage = Stage.VERIFY
    builder = ProgramBuilder("prompt logprobs", OPERATIONS, range_names=geometry.range_names)
    declare_state(builder, geometry)
    count = geometry.pass_rows
    residual = builder.scratch("prompt.residual", (count, geometry.config.hidden_size), geometry.dtype)
    live, targets = (
        builder.scratch("row_live", (count,), torch.uint8),
        builder.scratch("targets", (1, count), torch.int32),
    )
    reads = {"residual": "prompt_residual", "targets": "prompt_targets", "count": "prefill_count"}
    writes = {"out": residual, "row_live": live, "target_tokens": targets}
    builder.emit("take_prompt_rows", stage, reads={**reads, "cursor": "prompt_cursor"}, writes=writes)
    rows = Rows("", count, live, "", {}, {})
    logits = {"logits": emit_lm_head(builder, geometry.config, rows, residual, stage), "row_live": live}
    shape = (1, count, MAX_LOGPROBS + 1)
    values = builder.scratch("logprob_values", shape, torch.float32)
    ids, ranks = builder.scratch("logprob_ids", shape, torch.int32), builder.scratch("ranks", (1, count), torch.int32)
    slot = {"slots": builder.constant("prompt.slots", torch.zeros(1, dtype=torch.int32)), "slot_ints": "prompt_ints"}
    outs = {"logprob_values": values, "logprob_ids": ids}
    builder.emit("logprobs", stage, reads={**logits, "target_tokens": targets, **slot}, writes=outs)
    builder.emit("token_ranks", stage, reads={**logits, "target_tokens": targets}, writes={"ranks": ranks})
    builder.emit(
        "keep_prompt_logprobs",
        stage,
        reads={**outs, "ranks": ranks, "count": "prefill_count"},
        writes=named("prompt_logprob_values", "prompt_logprob_ids", "prompt_ranks", cursor="prompt_cursor"),
    )
    return builder.build()
