"""This module reads the scales of an 8-bit KV cache, which quantised checkpoints store beside attention's weights.

Names: `self_attn.k_scale` and `self_attn.v_scale` (compressed-tensors), `self_attn.k_proj.k_scale` and
`self_attn.v_proj.v_scale` (ModelOpt), `self_attn.k_proj.output_scale` and `self_attn.v_proj.output_scale` (older
exports of both); a single `self_attn.kv_scale` holds for keys and values. If a layer has one scale, it holds for all KV
heads. A cached value is its code times the scale.
"""

from collections.abc import Mapping

import torch

from lowlat.checkpoint.tensors import FLOAT_NAMES, Checkpoint, TensorEntry
from lowlat.errors import ConfigError
from lowlat.kernels.reference.attention.kv_codes import LARGEST, SMALLEST

__all__ = ["LayerScales", "kv_scale_names", "read_kv_scales"]

LayerScales = tuple[tuple[float, ...], tuple[float, ...]]  # scales of keys and of values, by KV head


def kv_scale_names(layer: int, stem: str = "model") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the possible names of the scales of a layer's keys, and of its values; the first one that exists holds.

    stem  the beginning of the decoder's names
    """
    owner = f"{stem}.layers.{layer}.self_attn"
    keys, values = (
        (f"{owner}.{p}_scale", f"{owner}.{p}_proj.{p}_scale", f"{owner}.kv_scale", f"{owner}.{p}_proj.output_scale")
        for p in "kv"
    )
    return keys, values


def read_kv_scales(
    checkpoint: Checkpoint | None, kv_heads: Mapping[int, int], stem: str = "model"
) -> tuple[LayerScales, ...]:
    """Read the scales of all layers with a cache, rounded to bfloat16; 1 without a checkpoint or without scales in it.

    kv_heads  key-value heads by the layer's number
    stem      the beginning of the decoder's names
    Raises ConfigError, with file and tensor, for a dtype, shape or value that no scales of so many heads can have.
    """
    entries = {} if checkpoint is None else checkpoint.entries
    wanted = [
        (next((name for name in names if name in entries), None), heads)
        for layer, heads in kv_heads.items()
        for names in kv_scale_names(layer, stem)
    ]
    found: dict[str, tuple[float, ...]] = {}
    if checkpoint is not None:
        heads_of = {name: heads for name, heads in wanted if name is not None}
        found = {
            entry.name: _checked(entry, stored, heads_of[entry.name])
            for entry, stored in checkpoint.read(list(heads_of))
        }
    each = [(1.0,) * heads if name is None else found[name] for name, heads in wanted]
    return tuple(zip(each[0::2], each[1::2], strict=True))


def _checked(entry: TensorEntry, stored: torch.Tensor, num_kv_heads: int) -> tuple[float, ...]:
    label = f"{entry.file}: tensor {entry.name!r}"
    if entry.dtype not in FLOAT_NAMES or stored.numel() not in (1, num_kv_heads):
        raise ConfigError(
            f"{label}: expected 1 or {num_kv_heads} numbers, one a KV head, of a floating-point dtype, found "
            f"{entry.dtype} {list(entry.shape)}; kv_cache_dtype 'auto' does without it"
        )
    scales: list[float] = stored.reshape(-1).to(torch.bfloat16).tolist()
    for scale in scales:
        if not SMALLEST <= scale <= LARGEST:
            raise ConfigError(
                f"{label}: expected a scale from {SMALLEST:g} to {LARGEST:g}, found {scale}; kv_cache_dtype 'auto' "
                "does without it"
            )
    return tuple(scales if len(scales) > 1 else scales * num_kv_heads)
