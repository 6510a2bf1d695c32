"""This module reads the configs of DSpark draft models, in DeepSpec's layout and in speculators'.

    layout       recognised by           DSpark's own keys
    deepspec     an architecture of it   the top level; each row drafts the token after its own
    speculators  speculators_model_type  the top level; the same, unless `sample_from_anchor` is false

DeepSpec's DFlash draft models have this form, too, without a bias.
Source: deepseek-ai/DeepSpec, `modeling/dspark`, and vllm-project/speculators' `models/dspark`.
"""

from pathlib import Path
from typing import Any

from lowlat.checkpoint.fields import Fields
from lowlat.errors import ConfigError
from lowlat.models.geometry import ModelConfig
from lowlat.speculators.dflash.config import BlockFile, BlockKind, parse_block_model
from lowlat.speculators.draft_files.tensors import DraftTensors
from lowlat.speculators.dspark.geometry import DsparkConfig

__all__ = ["DEEPSPEC", "parse_dspark"]

DEEPSPEC = ("Qwen3DSparkModel", "Gemma4DSparkModel")
MAX_RANK = 4096


def _deepspec_file(fields: Fields) -> BlockFile:
    if not set(DEEPSPEC) & set(fields.optional_strings("architectures", max_count=16) or ()):
        names = " or ".join(DEEPSPEC)
        raise ConfigError(f"{fields.label}: architectures do not name {names}: this is no DSpark draft model")
    return BlockFile(fields, fields, fields, "deepspec")


def _heads(file: BlockFile) -> dict[str, Any]:
    """Read the fields of the Markov head and the confidence head. Raises ConfigError for unimplemented ones."""
    own, published = file.own, file.layout == "speculators"
    rank = own.integer("markov_rank", 0, MAX_RANK, 256 if published else None)
    own.refuse_unless("markov_head_type", ("vanilla", "gated"), "a bias by the token before alone")
    kind = own.optional_string("markov_head_type")
    if rank and kind is None and not published:
        raise ConfigError(f"{own.label}: markov_head_type is missing; a Markov head of rank {rank} needs it")
    if rank and own.optional_integer("selector_rank", 1, MAX_RANK) is not None:
        raise ConfigError(
            f"{own.label}: markov_rank and selector_rank are contradictory: either would choose the drafts"
        )
    sure = own.boolean("enable_confidence_head", published)
    reads = own.boolean("confidence_head_with_markov", published and rank > 0)
    if sure and reads and not rank:
        raise ConfigError(f"{own.label}: confidence_head_with_markov is true, but markov_rank is 0")
    return {
        "markov_rank": rank,
        "markov_gated": bool(rank) and kind == "gated",
        "confidence": sure,
        "confidence_markov": sure and reads,
    }


DSPARK = BlockKind("dspark", "DSpark", (*DEEPSPEC, "DSparkSpeculator"), _deepspec_file, DsparkConfig, _heads, True)


def parse_dspark(
    directory: Path, target: ModelConfig, capture_layers: tuple[int, ...] | None
) -> tuple[DsparkConfig, DraftTensors]:
    """Read a DSpark draft model's geometry and its tensors; see `parse_block_model`.

    Raises ConfigError, also for a Markov head with its own state (rnn).
    """
    config, tensors = parse_block_model(directory, target, capture_layers, DSPARK)
    if not isinstance(config, DsparkConfig):
        raise ValueError(f"a DSpark draft model has a record of its own, found {config}")
    return config, tensors
