"""This module reads configs of draft models that use the layers of a target family, by their model_type.

Other draft models have plain layers, see `lowlat.speculators.draft_files.sizes`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lowlat.checkpoint.fields import Fields
from lowlat.errors import ConfigError
from lowlat.models.families import gemma, gemma4
from lowlat.models.families.dense import Sizes
from lowlat.models.geometry import ModelConfig
from lowlat.models.hf_config import FULL, SLIDING
from lowlat.models.layers import rounded_scale

__all__ = ["LayerStyle", "layer_style", "with_layer_defaults"]


@dataclass(frozen=True)
class LayerStyle:
    """How to read the layers of a family in a draft model's config.

    with_defaults  adds the family's defaults for missing keys to a config
    read           returns the fields of a `DraftConfig` that depend on layers, from a config, its sizes and the target.
                   Raises ConfigError for layers that draft models cannot have
    harmless       keys without effect
    """

    with_defaults: Callable[[Fields], Fields]
    read: Callable[[Fields, Sizes, ModelConfig], dict[str, Any]]
    harmless: frozenset[str]


def layer_style(fields: Fields) -> LayerStyle | None:
    """The style of a config's layers; None: plain layers."""
    named = fields.values.get("model_type")
    return STYLES.get(named) if isinstance(named, str) else None


def with_layer_defaults(fields: Fields) -> Fields:
    """A config with its family's defaults for missing keys; a config of plain layers is returned unchanged."""
    style = layer_style(fields)
    return fields if style is None else style.with_defaults(fields)


def _gemma4_defaults(fields: Fields) -> Fields:
    count = fields.values.get("num_hidden_layers")
    kinds = [FULL] * count if isinstance(count, int) and 0 < count <= 64 else [FULL]
    return gemma.with_defaults(fields, layer_types=kinds)


def _gemma4_fields(fields: Fields, sizes: Sizes, target: ModelConfig) -> dict[str, Any]:
    """The fields for Gemma 4's layers of full attention with dense FFNs, with its embedding scale and logit softcap."""
    layers = gemma4.layer_specs(fields, sizes, 0)
    if any(isinstance(kind, str) and kind != FULL for kind in fields.values.get("layer_types") or ()):
        raise ConfigError(f"{fields.label}: layer_types entry {SLIDING!r} is not implemented for draft models")
    for layer in layers:
        if layer.experts is not None or layer.per_layer_size is not None:
            what = "enable_moe_block" if layer.experts is not None else "hidden_size_per_layer_input"
            raise ConfigError(f"{fields.label}: {what} {fields.values[what]} is not implemented for draft models")
    return {
        **sizes.model(),
        "target_hidden_size": target.hidden_size,
        "max_position": sizes.max_position,
        "layers": layers,
        "embedding_scale": rounded_scale(sizes.hidden_size**0.5, target.dtype),
        "logit_softcap": fields.optional_number("final_logit_softcapping", 1e-3, 1e6),
    }


GEMMA4 = LayerStyle(_gemma4_defaults, _gemma4_fields, frozenset(gemma.HARMLESS))
STYLES: Mapping[str, LayerStyle] = dict.fromkeys(("gemma4_text", "gemma4_unified_text"), GEMMA4)
