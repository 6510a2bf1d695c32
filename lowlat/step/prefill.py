"""Chunks of prefill as Programs: the target over their tokens, and the head's rows for them.

Chunks start at multiples of their fixed size, and a chunk's bits depend on its prefix alone, so that complete chunks
can be shared. Chunks of one prompt that follow each other may run at once, and a chunk that holds few positions as a
part of one: no bit of them depends on it. The last prompt token is left to the first step, as its root.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from lowlat.models.decoder import emit_decoder
from lowlat.models.layers import Emitter, Rows
from lowlat.program.program import Program, ProgramBuilder, Stage
from lowlat.speculators.eagle3.emitter import Eagle3Emitter
from lowlat.step.state import StepGeometry, declare_tables, state_specs

__all__ = ["build_prefill", "build_prefills"]


# What the host writes of each row; programs of fewer rows read the first of them.
BY_ROW = ("prefill_tokens", "prefill_live", "prefill_draft_live", "prefill_positions", "prefill_draft_positions")


def build_prefills(geometry: StepGeometry) -> Mapping[int, Program]:
    """The Programs of all sizes, ascending, by the positions that they take."""
    return MappingProxyType({size: build_prefill(geometry, size) for size in geometry.prefill_sizes})


def build_prefill(geometry: StepGeometry, size: int | None = None) -> Program:
    """The Program of so many positions, whole chunks or the first part of one, None: one chunk; the host writes
    `prefill_*` before it runs."""
    size, stage = size or geometry.prefill_chunk, Stage.PREFILL
    builder = ProgramBuilder("prefill")
    for spec in state_specs(geometry):
        builder.declare(replace(spec, shape=(size,)) if spec.name in BY_ROW else spec)
    tables = declare_tables(builder, geometry)
    common = {"block_table": "prefill_table", "chunk": "prefill_chunk"}
    own = common, _write("prefill_live"), geometry.prefill_chunk
    rows = Rows("prefill.", size, None, "prefill_positions", *own)
    boundaries = emit_decoder(builder, geometry.config, rows, "prefill_tokens", tables["target"], stage)
    if geometry.head is not None:
        _emit_head(builder, geometry, size, boundaries, tables["head"], common)
    return builder.build()


def _write(live: str) -> dict[str, str]:
    return {"row_live": live, "block_table": "prefill_table", "chunk": "prefill_chunk"}


def _emit_head(
    builder: ProgramBuilder,
    geometry: StepGeometry,
    size: int,
    boundaries: list[str],
    tables: tuple[str, str],
    common: dict[str, str],
) -> None:
    head = geometry.head
    if head is None:
        return
    own = common, _write("prefill_draft_live"), geometry.prefill_chunk
    rows = Rows("prefill.head.", size, None, "prefill_draft_positions", *own)
    emitter = Emitter(builder, rows, geometry.dtype, Stage.PREFILL)
    eagle = Eagle3Emitter(geometry.config, head, tables, geometry.draft_window)
    features = emitter.scratch("features", size, len(head.capture_boundaries) * head.target_hidden_size)
    sources = {f"source{k}": boundaries[boundary] for k, boundary in enumerate(head.capture_boundaries)}
    emitter.emit("join_features", sources, {"out": features})
    hidden = eagle.emit_fc(emitter, features)
    shifted = emitter.scratch("shifted", size, head.hidden_size)
    emitter.emit(
        "draft_prefill_rows",
        {"hidden": hidden, **common},
        {"block_features": "block_features", "shifted": shifted},
        block_size=geometry.block_size,
    )
    both, _ = eagle.emit_input(emitter, "prefill_tokens", shifted)
    eagle.emit_kv(emitter, both)
