"""This module emits the MTP layer: it differs from EAGLE3's only in its input.

A row takes the embedding of x_{t+1} and the target's normed state h_t; if the target has not run there, the layer's own
normed output replaces h_t. Both are normed and concatenated, embedding first. fc maps them to the layer's input, which
is the residual stream. RoPE rotates the row by t, as vLLM does; transformers uses t + 1, which differs only by
rounding.
"""

from lowlat.graphs.program import Stage
from lowlat.models.layers import Emitter
from lowlat.speculators.eagle3.emitter import Eagle3Emitter

__all__ = ["MtpEmitter"]


class MtpEmitter(Eagle3Emitter):
    """Appends the MTP layer's operations."""

    def emit_input(self, emitter: Emitter, tokens: str, hidden: str) -> tuple[str, str]:
        """Emit the layer's normed input [M, H], and the residual [M, H], which is fc of both inputs."""
        draft, stage = self.draft, emitter.stage
        both, _ = super().emit_input(emitter, tokens, hidden)
        if emitter.rows.chunk is None:
            emitter.stage = Stage.DRAFT_FC
        joined = emitter.cast(emitter.linear(both, "draft_model.fc", draft.hidden_size, "fc"), "joined")
        emitter.stage = stage
        return emitter.norm(joined, "draft_model.attn_norm.weight", draft.rms_norm_eps, "input.normed"), joined
