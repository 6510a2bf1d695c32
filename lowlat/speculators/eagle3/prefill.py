"""This module emits the draft model's rows in prefill: the target's features, shifted by one position."""

from lowlat.graphs.program import Stage
from lowlat.models.layers import Emitter, Rows
from lowlat.speculators.base import PrefillScope
from lowlat.speculators.eagle3.emitter import Eagle3Emitter

__all__ = ["emit_draft_prefill"]


def emit_draft_prefill(scope: PrefillScope, eagle: Eagle3Emitter) -> None:
    """Append fc, the shift and the KV writes for a program's positions, after the boundaries were computed."""
    draft, common = eagle.draft, {"block_table": "prefill_table", "chunk": "prefill_chunk"}
    write = {"row_live": "prefill_draft_live", **common}
    rows = Rows("prefill.draft_model.", scope.size, None, "prefill_draft_positions", common, write, scope.chunk)
    emitter = Emitter(scope.builder, rows, scope.dtype, Stage.PREFILL)
    features = emitter.scratch("features", scope.size, len(draft.capture_boundaries) * draft.target_hidden_size)
    sources = {f"source{k}": scope.boundaries[boundary] for k, boundary in enumerate(draft.capture_boundaries)}
    emitter.emit("join_features", sources, {"out": features})
    hidden = eagle.emit_fc(emitter, features)
    shifted = emitter.scratch("shifted", scope.size, draft.hidden_size)
    emitter.emit(
        "draft_prefill_rows",
        {"hidden": hidden, **common},
        {"block_features": "block_features", "shifted": shifted},
        block_size=scope.block_size,
    )
    emitter.emit("take_last", {"x": hidden, "commit_lens": "prefill_count"}, {"out": "prefilled_feature"})
    eagle.emit_stack(emitter, *eagle.emit_input(emitter, "prefill_tokens", shifted))
