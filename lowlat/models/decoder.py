"""This module walks the specs of a target's layers, and emits them as the operations of a Program."""

from dataclasses import replace

from lowlat.graphs.program import ProgramBuilder, Stage
from lowlat.models.geometry import ModelConfig
from lowlat.models.layer_spec import DeltaSpec
from lowlat.models.layers import TORCH_DTYPES, Emitter, Rows, rounded_scale
from lowlat.models.walk import (
    Layer,
    Tables,
    emit_attended,
    emit_delta,
    emit_ffn,
    emit_gated,
    emit_heads,
    emit_layer_scale,
    emit_output,
    emit_per_layer,
    emit_projection,
    emit_sandwich,
    layer_of,
    score_params,
)

__all__ = ["cache_names", "emit_decoder", "emit_lm_head", "emit_prompt_logits", "emit_vocabulary"]


def emit_decoder(
    builder: ProgramBuilder,
    config: ModelConfig,
    rows: Rows,
    tokens: str,
    tables: Tables,
    stage: Stage,
    last: str = "",
    owner: str = "",
) -> list[str]:
    """Append the layers' operations; return the residual stream at boundaries 0 to L, as buffer names.

    tokens  [M] int32
    tables  cos and sin of the layers' RoPE settings, [C, D / 2] float32 each
    last    the buffer for the last boundary; "": a scratch buffer
    owner   the prefix of the names of weights and caches
    The layers' states must be declared. The caller emits the end of each state's step, see `SequenceState.emit_end`.
    """
    coded = frozenset(config.coded_rows if rows.are_prompt else ())
    emitter = Emitter(builder, rows, TORCH_DTYPES[config.dtype], stage, coded)
    scale = config.embedding_scale
    boundaries = [emitter.embed(tokens, f"{owner}embed.weight", config.hidden_size, "residual.0", scale=scale)]
    inputs = _emit_per_layer_inputs(emitter, config, tokens, boundaries[0], owner)
    for number in range(config.num_layers):
        caches = cache_names(_kv_layer(config, number), owner)
        layer = layer_of(config, number, f"{owner}layers.{number}", caches)
        normed = emitter.norm(boundaries[-1], f"{layer.name}.attn_norm.weight", layer.eps, "normed")
        mixed = emit_sandwich(emitter, layer, _emit_mixer(emitter, layer, number, normed, tables), "post_attn")
        middle = emitter.add(boundaries[-1], mixed, "residual.middle")
        normed = emitter.norm(middle, f"{layer.name}.ffn_norm.weight", layer.eps, "normed")
        output = emit_sandwich(emitter, layer, emit_ffn(emitter, layer, normed, middle), "post_ffn")
        out = last if number + 1 == config.num_layers else ""
        boundaries.append(_emit_end(emitter, layer, number, (middle, output), inputs, out))
    return boundaries


def cache_names(layer: int, owner: str = "") -> tuple[str, str]:
    """The buffers of a layer's keys and values."""
    return f"{owner}k_cache.{layer}", f"{owner}v_cache.{layer}"


def _kv_layer(config: ModelConfig, number: int) -> int:
    """The layer whose cache a layer reads."""
    spec = config.attentions.get(number)
    return number if spec is None or spec.kv_layer is None else spec.kv_layer


def _emit_per_layer_inputs(emitter: Emitter, config: ModelConfig, tokens: str, residual: str, owner: str) -> str:
    """Emit the tokens' embeddings for all layers, [M, L P]; "" if layers have none."""
    if config.per_layer_size is None:
        return ""
    size = config.per_layer_size
    width, scale = config.num_layers * size, rounded_scale(size**0.5, config.dtype)
    embedded = emitter.embed(tokens, f"{owner}per_layer_embed.weight", width, "per_layer.embedded", scale=scale)
    projected = emitter.linear(residual, f"{owner}per_layer_projection", width, "per_layer.projected")
    out = emitter.scratch("per_layer.inputs", emitter.rows.count, width)
    reads = {"projected": projected, "embedded": embedded, **emitter.live()}
    own = {"scale": config.hidden_size**-0.5, "eps": config.rms_norm_eps}
    emitter.emit("per_layer_inputs", reads, {"out": out}, weights={"weight": f"{owner}per_layer_norm.weight"}, **own)
    return out


def _emit_end(emitter: Emitter, layer: Layer, number: int, sums: tuple[str, str], inputs: str, out: str) -> str:
    """Emit the end of a layer: the sum with its FFN, the term of its per-layer embedding, and its scale.

    sums    the residual stream after the mixer, and the FFN's output
    inputs  the tokens' embeddings for all layers
    out     the buffer for the layer's residual stream; "": a scratch buffer
    """
    name, last = f"residual.{number + 1}", "" if layer.spec.scaled else out
    if layer.spec.per_layer_size is None:
        total = emitter.add(*sums, f"{name}.unscaled" if layer.spec.scaled else name, last)
    else:
        summed = emitter.add(*sums, "residual.ffn")
        gated = emit_per_layer(emitter, layer, number, summed, inputs)
        total = emitter.add(summed, gated, f"{name}.unscaled" if layer.spec.scaled else name, last)
    if not layer.spec.scaled:
        return total
    return emit_layer_scale(emitter, layer, total, name, out)


def _emit_mixer(emitter: Emitter, layer: Layer, number: int, normed: str, tables: Tables) -> str:
    """Emit a layer's mixer with its output projection, for normed rows [M, N]: [M, N] float32."""
    if isinstance(layer.spec.mixer, DeltaSpec):
        return emit_delta(emitter, layer, layer.spec.mixer, number, normed)
    attended = _emit_attention(emitter, layer, number, normed, tables)
    return emit_output(emitter, layer, emit_gated(emitter, layer, normed, attended))


def _emit_attention(emitter: Emitter, layer: Layer, number: int, normed: str, tables: Tables) -> str:
    """Emit attention, [M, H * D]: over all of the cache, or with SpecPV over the slots' lists of blocks."""
    attention = layer.attention
    product = emit_projection(emitter, layer, normed, attention.projected, "qkv")
    query = emit_heads(emitter, layer, product, attention.projected, tables)["q"]
    partial = emitter.rows.partial if attention.window is None else None
    if partial is not None and not emitter.rows.chooses:
        sinks = f"{layer.name}.sinks" if attention.sinks else None
        return emitter.partial_attention(
            query, number, attention.query_size, partial, sinks=sinks, **score_params(attention)
        )
    if partial is not None:
        emitter.choose_blocks(query, number, partial)
    return emit_attended(emitter, layer, query, window=attention.window)


def emit_lm_head(builder: ProgramBuilder, config: ModelConfig, rows: Rows, residual: str, stage: Stage) -> str:
    """Emit final norm and LM head; returns the buffer of the logits, [M, V] float32."""
    return _emit_logits(
        Emitter(builder, replace(rows, prefix="target."), TORCH_DTYPES[config.dtype], stage), config, residual
    )


def emit_prompt_logits(
    builder: ProgramBuilder, config: ModelConfig, rows: Rows, residual: str, out: str, stage: Stage
) -> None:
    """Emit final norm and LM head over prefill's rows, into the state buffer `out`: logits [M, V] float32."""
    emitter = Emitter(builder, replace(rows, prefix="prefill.target."), TORCH_DTYPES[config.dtype], stage)
    _emit_logits(emitter, config, residual, out)


def _emit_logits(emitter: Emitter, config: ModelConfig, residual: str, out: str = "") -> str:
    return emit_vocabulary(emitter, config, residual, config.vocab_size, out)


def emit_vocabulary(
    emitter: Emitter, config: ModelConfig, residual: str, width: int, out: str = "", owner: str = ""
) -> str:
    """Emit final norm and LM head; returns the buffer of the logits, [M, width] float32.

    out    the buffer for the logits; "": a scratch buffer
    owner  the prefix of the names of weights
    """
    normed = emitter.norm(residual, f"{owner}norm.weight", config.rms_norm_eps, "final")
    cap = config.logit_softcap
    return emitter.vocabulary(normed, f"{owner}lm_head", width, "logits", config.shard, out, softcap=cap)
