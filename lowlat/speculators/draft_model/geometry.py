"""This module has the geometry of a whole model that drafts, and converts it to a target's for `emit_decoder`."""

from dataclasses import dataclass
from typing import ClassVar

from lowlat.models.geometry import ComputeDtype, DraftConfig, ModelConfig

__all__ = ["OWNER", "WholeDraftConfig"]

OWNER = "draft_model."  # begins the names of a draft model's weights, caches and rows


@dataclass(frozen=True, kw_only=True)
class WholeDraftConfig(DraftConfig):
    """A model of a family of targets, with its own embedding and LM head; it reads no state of the target.

    family             a name in the table of `lowlat.models.families`
    dtype              the target's compute dtype
    tie_embeddings     whether the files have one matrix for embedding and LM head
    stored_vocab_size  rows of the embedding in the files; vocab_size is the target's
    """

    method: ClassVar[str] = "draft_model"
    family: str
    dtype: ComputeDtype
    tie_embeddings: bool
    stored_vocab_size: int

    @property
    def shares_head(self) -> bool:
        """Whether the LM head is the embedding's tensor, as in the files; with other rows it is a separate matrix."""
        return self.tie_embeddings and not self.is_cut and self.draft_vocab_size == self.vocab_size

    @property
    def decoder(self) -> ModelConfig:
        """This rank's part of the model, as a target's geometry; its vocabulary is that of its files."""
        return ModelConfig(
            family=self.family,
            dtype=self.dtype,
            tie_embeddings=self.tie_embeddings,
            hidden_size=self.hidden_size,
            vocab_size=self.stored_vocab_size,
            max_position=self.max_position,
            rms_norm_eps=self.rms_norm_eps,
            layers=self.layers,
            quantisation=self.quantisation,
            quantiser=self.quantiser,
            shard=self.shard,
            embedding_scale=self.embedding_scale,
            logit_softcap=self.logit_softcap,
        )
