"""One layer of a decoder as operations, by its spec: targets and draft models are made of the same.

Shapes: M rows, H query and G key-value heads of D dimensions, N hidden size, I inner width. Norms and residual sums
around mixer and FFN belong to who walks the layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowlat.kernels.formats import FORMATS
from lowlat.models.geometry import Decoder
from lowlat.models.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, Rotation
from lowlat.models.layers import Emitter
from lowlat.models.shard import LayerShard

__all__ = [
    "Layer",
    "Tables",
    "emit_attended",
    "emit_ffn",
    "emit_heads",
    "emit_output",
    "emit_projection",
    "emit_sandwich",
    "layer_of",
    "score_params",
]

Tables = Mapping[Rotation, tuple[str, str]]


@dataclass(frozen=True)
class Layer:
    """A layer, and the names by which a program knows it.

    name    the beginning of its weights' canonical names
    caches  the buffers of its keys and values
    shard   the part of it that a rank has; None: all of it
    kv_window  positions in which all lies that its rows ever see; None: they may see everything before them
    """

    spec: LayerSpec
    name: str
    caches: tuple[str, str]
    hidden_size: int
    eps: float
    shard: LayerShard | None
    kv_window: int | None

    @property
    def head_counts(self) -> dict[str, int]:
        """Heads of queries, keys and values."""
        attention = self.spec.mixer
        return {"q": attention.num_heads, "k": attention.num_kv_heads, "v": attention.num_kv_heads}


def layer_of(config: Decoder, number: int, name: str, caches: tuple[str, str]) -> Layer:
    """A layer of a target or of a draft model."""
    shard = None if config.shard is None else config.shard.layers[number]
    spec = config.layers[number]
    return Layer(spec, name, caches, config.hidden_size, config.rms_norm_eps, shard, spec.mixer.window)


def emit_heads(
    emitter: Emitter,
    layer: Layer,
    product: str,
    letters: str,
    tables: Tables,
    *,
    normed: str = "qk_normed",
    write: bool = True,
) -> dict[str, str]:
    """The heads in a GEMM's output [M, ...], normed where the layer says so and rotated: by letter, [M, H or G, D].

    letters  of q, k and v, those that the output holds, in this order
    normed   the buffer of normed heads
    write    whether keys and values are stored
    """
    attention, counts = layer.spec.mixer, layer.head_counts
    if attention.qk_norm:
        heads = (counts["q"] if "q" in letters else 0, counts["k"] if "k" in letters else 0)
        product = emitter.qk_norm(product, layer.name, heads, attention.head_dim, layer.eps, normed)
    own = {letter: counts[letter] for letter in letters}
    parts = emitter.rotate(product, own, attention.head_dim, tables[attention.rotation])
    if write and "k" in parts:
        emitter.kv_write(parts["k"], parts["v"], layer.caches, layer.kv_window)
    return parts


def emit_projection(emitter: Emitter, layer: Layer, x: str, letters: str, name: str) -> str:
    """The product [M, ...] of the projections of some heads, float32."""
    attention, counts = layer.spec.mixer, layer.head_counts
    width = sum(counts[letter] for letter in letters) * attention.head_dim
    return emitter.linear(x, f"{layer.name}.{letters}", width, name, bias=attention.qkv_bias)


def emit_attended(emitter: Emitter, layer: Layer, query: str, **seen: Any) -> str:
    """Attention of queries [M, H, D] over the layer's cache, [M, H * D].

    seen  what rows see, where it is not what the spec says: `window`, `first`, `keep_first`
    """
    attention = layer.spec.mixer
    params = {**score_params(attention), **seen}
    sinks = f"{layer.name}.sinks" if attention.sinks else None
    return emitter.attention(query, layer.caches, attention.query_size, sinks=sinks, shard=layer.shard, **params)


def score_params(attention: AttentionSpec) -> dict[str, Any]:
    """The parameters by which scores are made."""
    capped = {} if attention.softcap is None else {"softcap": attention.softcap}
    return {"scale": attention.score_scale, **capped}


def emit_output(emitter: Emitter, layer: Layer, attended: str) -> str:
    """The output projection, summed over ranks: [M, N] float32."""
    bias = layer.spec.mixer.output_bias
    return emitter.output(attended, f"{layer.name}.o", layer.hidden_size, layer.shard, bias=bias)


def emit_ffn(emitter: Emitter, layer: Layer, normed: str) -> str:
    """The FFN over normed rows [M, N], summed over ranks: [M, N] float32."""
    ffn = layer.spec.ffn
    if isinstance(ffn, ExpertsSpec):
        return _emit_experts(emitter, layer, ffn, normed)
    return _emit_dense(emitter, layer, ffn, normed)


def emit_sandwich(emitter: Emitter, layer: Layer, output: str, norm: str) -> str:
    """The output of a mixer or an FFN, [M, N] float32, normed where the layer says so: rounded, then normed.

    norm  of "post_attn" and "post_ffn"
    """
    if not layer.spec.sandwich:
        return output
    rounded = emitter.cast(output, f"{norm}.rounded")
    return emitter.norm(rounded, f"{layer.name}.{norm}_norm.weight", layer.eps, f"{norm}.normed")


def _emit_dense(emitter: Emitter, layer: Layer, ffn: DenseSpec, normed: str) -> str:
    name, shard = layer.name, layer.shard
    product = emitter.linear(normed, f"{name}.gate_up", 2 * ffn.inner_size, "gate_up", bias=ffn.bias)
    activated = emitter.scratch("activated", emitter.rows.count, ffn.inner_size)
    own = {} if ffn.activation == "silu" else {"activation": ffn.activation}
    emitter.emit("silu_mul", {"gate_up": product, **emitter.live()}, {"out": activated}, **own)
    unit = 1 if shard is None else shard.unit
    return emitter.summed_linear(activated, f"{name}.down", layer.hidden_size, "down", shard, unit=unit, bias=ffn.bias)


def _emit_experts(emitter: Emitter, layer: Layer, experts: ExpertsSpec, normed: str) -> str:
    name, count, chosen = layer.name, emitter.rows.count, experts.num_experts_per_token
    ids = emitter.scratch("expert_ids", count, chosen, dtype=torch.int32)
    shares = emitter.scratch("expert_weights", count, chosen, dtype=torch.float32)
    biases = ("bias",) if experts.biased else ()
    emitter.emit(
        "router",
        {"x": normed, **emitter.wanted()},
        {"expert_ids": ids, "expert_weights": shares},
        weights={part: f"{name}.router.{part}" for part in ("weight", *biases)},
        over_all=experts.shares_of_all,
    )
    parts = (*FORMATS[experts.weight_format].parts, *biases)
    activated = emitter.scratch("activated", count, chosen, experts.inner_size)
    emitter.emit(
        "experts_gate_up",
        {"x": normed, "expert_ids": ids},
        {"out": activated},
        weights={part: f"{name}.experts.gate_up.{part}" for part in parts},
        limit=experts.swiglu_limit,
        alpha=experts.swiglu_alpha,
    )
    output = emitter.scratch("down", count, layer.hidden_size, dtype=torch.float32)
    shard, own = layer.shard, dict[str, int]()
    if shard is not None and shard.invariant:
        own = {"num_parts": shard.num_parts, "unit": shard.unit}
    if shard is not None and shard.rank:
        parts = (*FORMATS[experts.weight_format].parts,)  # the first rank adds the bias
    emitter.emit(
        "experts_down",
        {"activated": activated, "expert_ids": ids, "expert_weights": shares},
        {"out": output},
        weights={part: f"{name}.experts.down.{part}" for part in parts},
        **own,
    )
    return emitter.sum_ranks(output, "down", shard)
