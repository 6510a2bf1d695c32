"""Geometries with other layers: the same model but for some fields, which every layer then has."""

from dataclasses import fields, replace
from typing import Any, TypeVar

from lowlat.models.geometry import Decoder
from lowlat.models.layer_spec import AttentionSpec

__all__ = ["with_changes"]

Config = TypeVar("Config", bound=Decoder)
OF_ATTENTION = {field.name for field in fields(AttentionSpec)}


def with_changes(config: Config, **changes: Any) -> Config:
    """The geometry with other fields: of attention or the FFN, in every layer, or of the whole.

    changes  fields of AttentionSpec; `windows`, one a layer; `inner_size`; `ffn`, another record; or of the config
    """
    mixer = {name: changes.pop(name) for name in OF_ATTENTION & set(changes)}
    windows = changes.pop("windows", config.windows)
    inner, ffn = changes.pop("inner_size", None), changes.pop("ffn", None)
    layers = []
    for layer, window in zip(config.layers, windows, strict=True):
        own = ffn or layer.ffn
        layers.append(
            replace(
                layer,
                mixer=replace(layer.mixer, **{"window": window, **mixer}),
                ffn=own if inner is None else replace(own, inner_size=inner),
            )
        )
    return replace(config, layers=tuple(layers), **changes)
