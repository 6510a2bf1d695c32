"""This module reads the geometry of a whole model that drafts for a target, and checks that it fits the target."""

from pathlib import Path

from lowlat.checkpoint.tensors import stored_names
from lowlat.errors import ConfigError
from lowlat.models.families import FAMILIES
from lowlat.models.geometry import ModelConfig
from lowlat.models.hf_config import read_config
from lowlat.models.target import read_model_config
from lowlat.speculators.draft_model.geometry import WholeDraftConfig
from lowlat.speculators.draft_model.tokens import check_tokens

__all__ = ["is_whole", "parse_whole"]

FEATURES = {"fc.weight"}  # tensors that read a target's features


def parse_whole(directory: Path, target: ModelConfig, target_directory: Path | None) -> WholeDraftConfig:
    """Read the geometry of a draft model; of the weights only headers are read.

    target_directory  the target's, whose tokenizer is compared; None: only the sizes of vocabularies are compared
    Raises ConfigError for a model that lowlat does not run, that has another vocabulary or recurrent layers, and for a
    draft model that was made for one target, such as EAGLE's.
    """
    config = read_model_config(directory, dtype=target.dtype)
    config = config.for_context(config.usual_context)
    _check_whole(directory, config)
    delta = next((layer.mixer.chains_only for layer in config.layers if layer.mixer.chains_only), None)
    if delta is not None:
        raise ConfigError(
            f"{directory}: method 'draft_model' is not implemented for draft models with {delta}, whose states would "
            "have to be rewound; take a model whose layers are all attention"
        )
    check_tokens((directory, config.vocab_size), (target_directory, target.vocab_size))
    return WholeDraftConfig(
        layout="whole",
        family=config.family,
        dtype=config.dtype,
        tie_embeddings=config.tie_embeddings,
        stored_vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        vocab_size=target.vocab_size,
        max_position=config.usual_context,
        rms_norm_eps=config.rms_norm_eps,
        layers=config.layers,
        quantisation=config.quantisation,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=min(config.vocab_size, target.vocab_size),
        capture_boundaries=(),
        own_embedding=True,
        own_lm_head=True,
        own_draft_map=False,
        embedding_scale=config.embedding_scale,
        logit_softcap=config.logit_softcap,
    )


def is_whole(directory: Path) -> bool:
    """Whether the files have the tensors of a model of a family. Raises ConfigError for files that cannot be read."""
    family = FAMILIES.get(str(read_config(directory).values.get("model_type")))
    names = stored_names(directory)
    if family is None or names is None or FEATURES & {name.removeprefix("model.") for name in names}:
        return False
    return any(kind.fit(names) for kind in family.names)


def _check_whole(directory: Path, config: ModelConfig) -> None:
    """Raise ConfigError for the files of a draft model that needs a target's states."""
    if stored_names(directory) is not None and not is_whole(directory):
        stem = FAMILIES[config.family].names[0].stem
        raise ConfigError(
            f"{directory}: method 'draft_model' takes a whole model, with {stem}.embed_tokens.weight and without "
            "fc.weight, and this is none: EAGLE-3, P-EAGLE, DFlash and DSpark files have methods of their own, which "
            "method 'auto' finds; EAGLE-1's and EAGLE-2's are not implemented"
        )
