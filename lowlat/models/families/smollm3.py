"""SmolLM3 (dense): config.json to geometry. Every fourth layer has no RoPE.

Source: transformers models/smollm3.
"""

from dataclasses import replace
from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.models.families.dense import parse_decoder
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import layer_windows
from lowlat.models.layer_spec import RopeConfig

__all__ = ["parse"]


def _turning(fields: Fields) -> tuple[bool, ...]:
    """Whether each layer has RoPE."""
    count = fields.integer("num_hidden_layers", 1, 1 << 20)
    interval = fields.integer("no_rope_layer_interval", 1, 1 << 20, default=4)
    given = fields.optional_integers("no_rope_layers", 0, 1, max_count=1 << 12)
    if given is None:
        return tuple((layer + 1) % interval != 0 for layer in range(count))
    if len(given) < count:
        raise fields.error("no_rope_layers", f"a list of {count} numbers, one a layer")
    return tuple(map(bool, given[:count]))


def _windows(fields: Fields, turning: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The windows of the layers: only those without RoPE have one."""
    windows = layer_windows(fields, off_by_default=True)
    if "layer_types" in fields.values:
        return windows
    return tuple(None if turns else window for window, turns in zip(windows, turning, strict=True))


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a SmolLM3. Raises ConfigError for features that lowlat does not implement."""
    turning, biased = _turning(fields), fields.boolean("attention_bias", False)
    config = parse_decoder(
        fields,
        directory,
        dtype,
        family="smollm3",
        architecture="SmolLM3ForCausalLM",
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=fields.boolean("mlp_bias", False),
        windows=_windows(fields, turning),
        tied=True,
        default_theta=2e6,
    )
    still = RopeConfig(config.attention.rope.theta, "proportional", share=0.0)
    layers = (
        layer if turns else replace(layer, mixer=replace(mixer, rope=still))
        for layer, mixer, turns in zip(config.layers, config.attentions.values(), turning, strict=True)
    )
    return replace(config, layers=tuple(layers))
