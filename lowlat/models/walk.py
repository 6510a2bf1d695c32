"""This module emits the parts of one decoder layer by its spec, for targets and draft models.

Shapes: M rows, H query and G key-value heads of D dimensions, N hidden size, I inner width. The caller emits the norms
and residual sums around mixer and FFN.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowlat.errors import ConfigError
from lowlat.kernels.formats import FORMATS
from lowlat.models.geometry import Decoder
from lowlat.models.layer_spec import (
    AttentionSpec,
    DeltaSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    ParallelSpec,
    Rotation,
)
from lowlat.models.layers import Emitter
from lowlat.models.shard import LayerShard

__all__ = [
    "Layer",
    "Tables",
    "emit_attended",
    "emit_delta",
    "emit_ffn",
    "emit_gated",
    "emit_heads",
    "emit_layer_scale",
    "emit_output",
    "emit_per_layer",
    "emit_projection",
    "emit_sandwich",
    "layer_of",
    "score_params",
]

Tables = Mapping[Rotation, tuple[str, str]]


@dataclass(frozen=True)
class Layer:
    """A layer's spec with the names of its weights and buffers.

    name       the prefix of its weights' canonical names
    caches     the buffers of its keys and values, if it has attention
    shard      the rank's part of the layer; None: all of it
    kv_window  positions that any of its rows may ever attend to, counted back; None: all positions before the row
    """

    spec: LayerSpec
    name: str
    caches: tuple[str, str]
    hidden_size: int
    eps: float
    shard: LayerShard | None
    kv_window: int | None

    @property
    def attention(self) -> AttentionSpec:
        """The mixer. Raises ConfigError if it is no attention."""
        if not isinstance(self.spec.mixer, AttentionSpec):
            raise ConfigError(f"{self.name}: expected a layer with attention, found {self.spec.mixer}")
        return self.spec.mixer

    @property
    def head_counts(self) -> dict[str, int]:
        """Numbers of heads of queries, keys and values, by the letters q, k and v."""
        attention = self.attention
        return {"q": attention.num_heads, "k": attention.num_kv_heads, "v": attention.num_kv_heads}


def layer_of(config: Decoder, number: int, name: str, caches: tuple[str, str]) -> Layer:
    """A layer of a target or of a draft model, by number."""
    shard = None if config.shard is None else config.shard.layers[number]
    spec = config.layers[number]
    window = spec.mixer.window if isinstance(spec.mixer, AttentionSpec) else None
    return Layer(spec, name, caches, config.hidden_size, config.rms_norm_eps, shard, window)


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
    """Emit qk_norm if the layer has it, RoPE and the KV write; returns the heads by letter, [M, H or G, D].

    product  a GEMM's output with these heads, [M, ...]
    letters  the heads in the output, in order, out of q, k and v; with `keys_as_values` k gives k and v
    normed   the buffer of normed heads
    write    whether keys and values are written to the cache
    """
    attention, counts = layer.attention, layer.head_counts
    if attention.qk_norm:
        heads = (counts["q"] if "q" in letters else 0, counts["k"] if "k" in letters else 0)
        values = {name: True for name in ("v_norm", "keys_as_values") if getattr(attention, name) and heads[1]}
        has_keys = attention.kv_layer is None
        product = emitter.qk_norm(
            product, layer.name, heads, attention.head_dim, layer.eps, normed, has_keys=has_keys, **values
        )
        letters += "v" if "keys_as_values" in values else ""
    own = {letter: counts[letter] for letter in letters}
    parts = emitter.rotate(product, own, attention.head_dim, tables[attention.rotation])
    if write and "k" in parts:
        emitter.kv_write(parts["k"], parts["v"], layer.caches, layer.kv_window)
    return parts


def emit_projection(emitter: Emitter, layer: Layer, x: str, letters: str, name: str) -> str:
    """Emit one GEMM for the projections of the heads `letters`: [M, ...] float32."""
    attention, counts = layer.attention, layer.head_counts
    width = sum(counts[letter] for letter in letters) * attention.head_dim
    return emitter.linear(x, f"{layer.name}.{letters}", width, name, bias=attention.qkv_bias)


def emit_attended(emitter: Emitter, layer: Layer, query: str, **seen: Any) -> str:
    """Emit attention of queries [M, H, D] over the layer's cache: [M, H * D].

    seen  parameters that limit the positions of a row, other than the spec's: `window`, `first`, `keep_first`
    """
    attention = layer.attention
    params = {**score_params(attention), **seen}
    sinks = f"{layer.name}.sinks" if attention.sinks else None
    return emitter.attention(
        query, layer.caches, attention.query_size, sinks=sinks, shard=layer.shard, kv_window=layer.kv_window, **params
    )


def emit_gated(emitter: Emitter, layer: Layer, normed: str, attended: str) -> str:
    """Multiply the output of attention, [M, H * D], by the layer's output gate, if it has one.

    normed  the layer's normed input, [M, N]
    """
    if not layer.attention.gated:
        return attended
    width = layer.attention.query_size
    gate = emitter.linear(normed, f"{layer.name}.gate", width, "gate", bias=layer.attention.qkv_bias)
    out = emitter.scratch("gated", emitter.rows.count, width)
    emitter.emit("output_gate", {"x": attended, "gate": gate, **emitter.live()}, {"out": out})
    return out


def emit_delta(emitter: Emitter, layer: Layer, delta: DeltaSpec, number: int, normed: str) -> str:
    """Emit a gated delta net with its output projection over normed rows [M, N]: [M, N] float32.

    The layer's states must be declared, see `lowlat.sequence.recurrent`.
    """
    name, count = layer.name, emitter.rows.count
    channels, width, form = delta.num_channels, delta.value_size, "prefill_" if emitter.rows.chunk else ""
    ba = emitter.narrow_linear(normed, f"{name}.delta_ba", 2 * delta.num_value_heads, "delta_ba")
    product = emitter.linear(normed, f"{name}.delta_in", channels + width, "delta_in")
    mixed = emitter.scratch("delta_mixed", count, channels)
    given = emitter.rows.recurrent | ({"snapshots": "prefill_states"} if form else {"state_lens": "state_lens"})
    weights = {"weight": f"{name}.delta_conv.weight"}
    states = {"conv_state": f"conv_state.{number}"}
    emitter.emit(f"{form}delta_conv", {"x": product, **given}, {**states, "out": mixed}, weights=weights)
    output = emitter.scratch("delta_rule", count, width)
    kept = ("state",) if form else ("state", "pending_k", "pending_d", "pending_g")
    states = {each: f"delta_{each}.{number}" for each in kept}
    weights = {"a_log": f"{name}.delta_a.weight", "dt_bias": f"{name}.delta_dt.weight"}
    reads, params = {"mixed": mixed, "ba": ba, **given}, {"chunk_size": emitter.rows.chunk} if form else {}
    emitter.emit(f"{form}delta_rule", reads, {**states, "out": output}, weights=weights, **params)
    gated = emitter.scratch("delta_norm", count, width)
    reads, weights = {"x": output, "gates": product, **emitter.live()}, {"weight": f"{name}.delta_norm.weight"}
    emitter.emit("delta_norm", reads, {"out": gated}, weights=weights, eps=layer.eps)
    return emitter.output(gated, f"{name}.delta_out", layer.hidden_size, layer.shard)


def score_params(attention: AttentionSpec) -> dict[str, Any]:
    """The parameters of attention scores: scale and softcap."""
    capped = {} if attention.softcap is None else {"softcap": attention.softcap}
    return {"scale": attention.score_scale, **capped}


def emit_output(emitter: Emitter, layer: Layer, attended: str) -> str:
    """Emit the output projection, summed over ranks: [M, N] float32."""
    bias = layer.attention.output_bias
    return emitter.output(attended, f"{layer.name}.o", layer.hidden_size, layer.shard, bias=bias)


def emit_ffn(emitter: Emitter, layer: Layer, normed: str, residual: str = "") -> str:
    """Emit the FFN over normed rows [M, N], summed over ranks: [M, N] float32, or the compute dtype for a ParallelSpec.

    residual  the rows before their norm, which the experts of a ParallelSpec read
    """
    ffn = layer.spec.ffn
    if isinstance(ffn, ExpertsSpec):
        return _emit_experts(emitter, layer, ffn, normed, normed)
    unit = 1 if layer.shard is None else layer.shard.unit
    if isinstance(ffn, DenseSpec):
        return _emit_dense(emitter, layer, layer.name, ffn, normed, unit)
    dense = _emit_dense(emitter, layer, layer.name, ffn.dense, normed, unit, "dense.")
    dense = _emit_normed(emitter, layer, dense, "post_dense")
    taken = emitter.norm(residual, f"{layer.name}.pre_experts_norm.weight", layer.eps, "experts.normed")
    routed = emitter.norm(residual, f"{layer.name}.router_norm.weight", layer.eps, "router.normed")
    experts = _emit_experts(emitter, layer, ffn.experts, taken, routed, scaled=True)
    return emitter.add(dense, _emit_normed(emitter, layer, experts, "post_experts"), "ffn")


def emit_sandwich(emitter: Emitter, layer: Layer, output: str, norm: str) -> str:
    """Round, norm and scale the output of a mixer or an FFN, [M, N], as the layer's spec says.

    norm  "post_attn" or "post_ffn"
    """
    spec = layer.spec
    if not spec.sandwich and spec.sum_scale is None:
        return output
    is_rounded = norm == "post_ffn" and isinstance(spec.ffn, ParallelSpec)
    out = output if is_rounded else emitter.cast(output, f"{norm}.rounded")
    if spec.sandwich:
        out = emitter.norm(out, f"{layer.name}.{norm}_norm.weight", layer.eps, f"{norm}.normed")
    if spec.sum_scale is not None:
        out = _emit_scaled(emitter, layer, out, "sum_scale", f"{norm}.scaled")
    return out


def emit_layer_scale(emitter: Emitter, layer: Layer, total: str, name: str, out: str = "") -> str:
    """Multiply the residual stream [M, N] by the layer's scalar.

    name  of a scratch buffer for the result
    out   the buffer to use instead; "": none
    """
    return _emit_scaled(emitter, layer, total, "scalar", name, out)


def emit_per_layer(emitter: Emitter, layer: Layer, number: int, residual: str, inputs: str) -> str:
    """Emit the term that the per-layer embedding adds to the residual stream: [M, N], normed.

    residual  the residual stream, [M, N], which gates the embedding
    inputs    the tokens' embeddings for all layers, [M, L P]
    """
    size = layer.spec.per_layer_size or 0
    gate = emitter.linear(residual, f"{layer.name}.per_layer_gate", size, "per_layer.gate")
    gated = emitter.scratch("per_layer.gated", emitter.rows.count, size)
    emitter.emit("per_layer_gate", {"gate": gate, "inputs": inputs, **emitter.live()}, {"out": gated}, layer=number)
    output = emitter.linear(gated, f"{layer.name}.per_layer_out", layer.hidden_size, "per_layer.output")
    return _emit_normed(emitter, layer, output, "post_per_layer")


def _emit_scaled(emitter: Emitter, layer: Layer, x: str, scalar: str, name: str, out: str = "") -> str:
    """Multiply rows [M, N] by a weight of the layer that is one number."""
    out = out or emitter.scratch(name, *emitter.builder.spec(x).shape)
    emitter.emit("scale", {"x": x}, {"out": out}, weights={"scalar": f"{layer.name}.{scalar}"})
    return out


def _emit_normed(emitter: Emitter, layer: Layer, output: str, norm: str) -> str:
    """Round and norm a GEMM's output [M, N]."""
    rounded = emitter.cast(output, f"{norm}.rounded")
    return emitter.norm(rounded, f"{layer.name}.{norm}_norm.weight", layer.eps, f"{norm}.normed")


def _emit_dense(
    emitter: Emitter, layer: Layer, name: str, ffn: DenseSpec, normed: str, unit: int, prefix: str = ""
) -> str:
    """Emit a dense FFN. name: the prefix of its weights' names; prefix: the prefix of its buffers' names."""
    shard = layer.shard
    product = emitter.linear(normed, f"{name}.gate_up", 2 * ffn.inner_size, f"{prefix}gate_up", bias=ffn.bias)
    activated = emitter.scratch(f"{prefix}activated", emitter.rows.count, ffn.inner_size)
    own = {} if ffn.activation == "silu" else {"activation": ffn.activation}
    emitter.emit("silu_mul", {"gate_up": product, **emitter.live()}, {"out": activated}, **own)
    return emitter.summed_linear(
        activated, f"{name}.down", layer.hidden_size, f"{prefix}down", shard, unit=unit, bias=ffn.bias
    )


def _emit_experts(
    emitter: Emitter, layer: Layer, experts: ExpertsSpec, normed: str, routed: str, *, scaled: bool = False
) -> str:
    """Emit experts over normed rows [M, N]; the router reads `routed`.

    scaled  whether the router has a scale for each expert
    """
    name, count, chosen = layer.name, emitter.rows.count, experts.num_taken
    one_more = {"shared": True} if experts.shared else {}
    ids = emitter.scratch(f"expert_ids.{name}", count, chosen, dtype=torch.int32)
    shares = emitter.scratch("expert_weights", count, chosen, dtype=torch.float32)
    biases = ("bias",) if experts.biased else ()
    emitter.emit(
        "router",
        {"x": routed, **emitter.wanted()},
        {"expert_ids": ids, "expert_weights": shares},
        weights={part: f"{name}.router.{part}" for part in ("weight", *biases, *(("scale",) if scaled else ()))},
        over_all=experts.shares_of_all,
        **one_more,
    )
    parts = (*FORMATS[experts.weight_format].parts, *biases)
    activation = {} if experts.activation == "silu" else {"activation": experts.activation}
    activated = emitter.scratch("experts.activated", count, chosen, experts.inner_size)
    emitter.emit(
        "experts_gate_up",
        {"x": normed, "expert_ids": ids},
        {"out": activated},
        weights={part: f"{name}.experts.gate_up.{part}" for part in parts},
        limit=experts.swiglu_limit,
        alpha=experts.swiglu_alpha,
        **activation,
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
    summed = emitter.sum_ranks(output, "down", shard)
    if experts.shared_ffn is None:
        return summed
    unit = 1 if shard is None else shard.unit
    shared = _emit_dense(emitter, layer, f"{name}.shared", experts.shared_ffn, normed, unit, "shared.")
    gate = emitter.linear(normed, f"{name}.shared_gate", 1, "shared.gate")
    out = emitter.scratch("ffn", count, layer.hidden_size, dtype=torch.float32)
    emitter.emit("add_gated", {"a": summed, "b": shared, "gate": gate, **emitter.live()}, {"out": out})
    return out
