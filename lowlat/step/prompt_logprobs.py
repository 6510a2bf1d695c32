"""This module emits the pass over a prompt's positions: the LM head over the next rows that prefill left.

Prefill of a request that asks leaves the residual stream of its positions. A pass takes PASS_ROWS of them, makes their
logits as a step does, so that a row has the bits that a step would give it, and keeps for the host, by position, the
token's logarithmic probability and rank and the likeliest tokens. A cursor on the device says which rows are next.
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
    """The Program of a pass; its rows are a slot's of its own, whose record says how many alternatives are wanted."""
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
