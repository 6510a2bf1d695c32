"""This module emits chunks of prefill: the target over their tokens, and a speculator's operations after it.

Chunks start at multiples of their fixed size, and a chunk's bits depend on its prefix alone. So complete chunks can be
shared. Consecutive chunks of one prompt may run at once, and a chunk of few positions may run as a part of a chunk;
both change no bit. Prefill keeps the hidden state of the last live row: after a prompt's last chunk the first token is
chosen from it, see `lowlat.step.decode`.

With SpecPV one more program refreshes a slot that decodes. It runs the slot's last tokens over all of the cache, so
that their keys and values become exact, and the last rows choose the slot's blocks. In lossless SpecPV all keys and
values are exact already. There the choosing rows run as a step's rows do, which reads the cache once.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from lowlat.graphs.program import Program, ProgramBuilder, Stage, named
from lowlat.kernels.reference import OPERATIONS
from lowlat.models.decoder import emit_decoder, emit_prompt_logits
from lowlat.models.layers import Rows
from lowlat.models.walk import Tables
from lowlat.speculators.base import PrefillScope
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.prompt_logprobs import build_pass
from lowlat.step.state import StepGeometry, declare_state, declare_tables, waiting_boundaries
from lowlat.step.variants import PASS, REFRESH

__all__ = ["build_prefill", "build_prefills", "build_refresh"]


# Buffers with a value for each row, which the host writes; programs of fewer rows read the first values.
BY_ROW = ("prefill_tokens", "prefill_live", "prefill_draft_live", "prefill_positions", "prefill_draft_positions")


def build_prefills(geometry: StepGeometry) -> Mapping[int, Program]:
    """The Programs of all sizes by number of positions, ascending; of a refresh by REFRESH, and of a pass by PASS."""
    refreshes = {} if geometry.partial is None else {REFRESH: build_refresh(geometry)}
    passes = {PASS: build_pass(geometry)} if geometry.prompt_logprobs else {}
    prefills = {size: build_prefill(geometry, size) for size in geometry.prefill_sizes}
    return MappingProxyType({**refreshes, **passes, **prefills})


def build_prefill(geometry: StepGeometry, size: int | None = None) -> Program:
    """The Program of prefill. The host writes `prefill_*` before it runs.

    size  positions: whole chunks, or the first part of one; None: one chunk
    """
    size, stage = geometry.prefill_chunk if size is None else size, Stage.PREFILL
    builder = ProgramBuilder("prefill", OPERATIONS)
    leaves = "prompt_residual" if geometry.prompt_logprobs else ""
    rows, tables, boundaries = _emit_target(builder, geometry, size, leaves=leaves)
    builder.emit("identity", stage, reads=named(x="prefill_slot"), writes=named(out="prefilled_slot"))
    for pool in geometry.window_pools:  # steps use the last chunk's tables; a command brings the first pool's
        reads = named(table=f"prefill_table{pool.suffix}", slot="prefill_slot")
        builder.emit("place_table", stage, reads=reads, writes=named(block_table=f"block_table{pool.suffix}"))
    last = named(x=boundaries[-1], commit_lens="prefill_count")
    builder.emit("take_last", stage, reads=last, writes=named(out="prefilled_residual"))
    if geometry.prompt_logits:
        emit_prompt_logits(builder, geometry.config, rows, boundaries[-1], "prompt_logits", stage)
    if geometry.speculator is not None:
        scope = PrefillScope(
            builder=builder,
            config=geometry.config,
            boundaries=boundaries,
            tables=tables,
            block_size=geometry.block_size,
            size=size,
            chunk=geometry.prefill_chunk,
        )
        geometry.speculator.emit_prefill(scope)
        for boundary in dict.fromkeys(waiting_boundaries(geometry)):
            last = named(x=boundaries[boundary], commit_lens="prefill_count")
            builder.emit("take_last", stage, reads=last, writes=named(out=f"prefilled_source.{boundary}"))
    return builder.build()


def build_refresh(geometry: StepGeometry) -> Program:
    """The Program of SpecPV's refresh: the target runs a slot's last rows over all of its cache, and these choose the
    blocks of its lists. In lossless SpecPV it writes no keys and values."""
    size = geometry.refresh_size
    if geometry.partial is not None and geometry.partial.lossless:
        return _build_choice(geometry, size)
    builder = ProgramBuilder("refresh", OPERATIONS)
    _emit_target(builder, geometry, size, refresh=True)
    return builder.build()


def _emit_target(
    builder: ProgramBuilder, geometry: StepGeometry, size: int, *, leaves: str = "", refresh: bool = False
) -> tuple[Rows, Tables, list[str]]:
    """Emit the target over `size` positions of a prompt; returns its rows, the RoPE tables and its boundaries.

    leaves  the state buffer that keeps the last boundary; "": none does
    """
    stage = Stage.PREFILL
    declare_state(builder, geometry, dict.fromkeys((*BY_ROW, leaves), size))
    tables = declare_tables(builder, geometry)
    attention = named(block_table="prefill_table", chunk="prefill_chunk")
    rows = Rows(
        prefix="prefill.",
        count=size,
        live=None,
        positions="prefill_positions",
        attention=attention,
        write=named(row_live="prefill_live", **attention),
        chunk=geometry.prefill_chunk,
        partial=geometry.partial,
        refresh=refresh,
        recurrent=named(slot="prefill_slot", chunk="prefill_chunk"),
    )
    if geometry.partial is not None:
        builder.emit("identity", stage, reads=named(x="prefill_shifts"), writes=named(out="partial_shifts"))
    boundaries = emit_decoder(builder, geometry.config, rows, "prefill_tokens", tables, stage, last=leaves)
    for state in geometry.sequence_states:
        state.emit_end(builder, rows, stage)
    return rows, tables, boundaries


def _build_choice(geometry: StepGeometry, size: int) -> Program:
    """The Program of a refresh that writes no keys and values: the slot's last `size` rows choose its blocks."""
    stage = Stage.VERIFY
    builder = ProgramBuilder("refresh", OPERATIONS, range_names=geometry.range_names)
    declare_state(builder, geometry, dict.fromkeys(BY_ROW, size))
    tables = declare_tables(builder, geometry)
    masks = torch.tensor([TreeTopology.chain(size - 1).packed_masks], dtype=torch.int64)
    attention = {
        "slots": builder.constant("refresh.slots", torch.zeros(1, dtype=torch.int32)),  # the first row of prefill_table
        "block_table": "prefill_table",
        "dense_lens": "prefill_start",
        "row_masks": builder.constant("refresh.row_masks", masks),
    }
    rows = Rows(
        prefix="refresh.", count=size, live="prefill_live", positions="prefill_positions", attention=attention,
        write={}, partial=geometry.partial, refresh=True,
    )  # fmt: skip
    builder.emit("identity", stage, reads=named(x="prefill_shifts"), writes=named(out="partial_shifts"))
    emit_decoder(builder, geometry.config, rows, "prefill_tokens", tables, stage)
    return builder.build()
