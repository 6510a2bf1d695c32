"""The target's decoder, from its geometry: the families differ by fields of ModelConfig alone."""

from dataclasses import replace

import torch

from lowlat.graphs.program import ProgramBuilder, Stage
from lowlat.kernels.formats import FORMATS
from lowlat.models.geometry import ModelConfig
from lowlat.models.layers import TORCH_DTYPES, Emitter, Rows

__all__ = ["emit_decoder", "emit_lm_head", "emit_prompt_logits"]


def emit_decoder(
    builder: ProgramBuilder,
    config: ModelConfig,
    rows: Rows,
    tokens: str,
    tables: tuple[str, str],
    stage: Stage,
    num_layers: int | None = None,
    last: str = "",
) -> list[str]:
    """Append the layers' operations; return the residual stream at boundaries 0 to L, as buffer names.

    tokens  [M] int32; tables: cos and sin, [C, D / 2] float32. The KV cache must be declared. `num_layers`
    stops early, where nobody needs the rest. `last` is a buffer for the last boundary; "": one of the rows' own.
    """
    emitter = Emitter(builder, rows, TORCH_DTYPES[config.dtype], stage)
    boundaries = [emitter.embed(tokens, "embed.weight", config.hidden_size, "residual.0")]
    for layer in range(config.num_layers if num_layers is None else num_layers):
        attended = _emit_attention(emitter, config, layer, boundaries[-1], tables)
        middle = emitter.add(boundaries[-1], attended, "residual.middle")
        normed = emitter.norm(middle, f"layers.{layer}.ffn_norm.weight", config.rms_norm_eps, "normed")
        if config.experts is None:
            inner, width = config.intermediate_size, config.hidden_size
            name = f"layers.{layer}"
            output = emitter.gated_ffn(normed, name, inner, width, bias=config.mlp_bias, shard=config.shard)
        else:
            output = _emit_experts(emitter, config, layer, normed)
        out = last if layer + 1 == config.num_layers else ""
        boundaries.append(emitter.add(middle, output, f"residual.{layer + 1}", out))
    return boundaries


def _emit_attention(emitter: Emitter, config: ModelConfig, layer: int, residual: str, tables: tuple[str, str]) -> str:
    name, eps = f"layers.{layer}", config.rms_norm_eps
    normed = emitter.norm(residual, f"{name}.attn_norm.weight", eps, "normed")
    width = config.query_size + 2 * config.kv_size
    product = emitter.linear(normed, f"{name}.qkv", width, "qkv", bias=config.qkv_bias)
    heads = (config.num_heads, config.num_kv_heads)
    if config.qk_norm:
        product = emitter.qk_norm(product, name, heads, config.head_dim, eps)
    parts = emitter.rotate(product, {"q": heads[0], "k": heads[1], "v": heads[1]}, config.head_dim, tables)
    caches = (f"k_cache.{layer}", f"v_cache.{layer}")
    emitter.kv_write(parts["k"], parts["v"], caches, config.windows[layer])
    sinks, scale = f"{name}.sinks" if config.sinks else None, config.head_dim**-0.5
    partial = emitter.rows.partial if config.windows[layer] is None else None
    if partial is not None and not emitter.rows.chooses:
        attended = emitter.partial_attention(parts["q"], layer, config.query_size, partial, sinks=sinks, scale=scale)
    else:
        if partial is not None:
            emitter.choose_blocks(parts["q"], layer, partial)
        window = config.windows[layer]
        attended = emitter.attention(
            parts["q"], caches, config.query_size, sinks=sinks, shard=config.shard, scale=scale, window=window
        )
    return emitter.output(attended, f"{name}.o", config.hidden_size, config.shard, bias=config.output_bias)


def _emit_experts(emitter: Emitter, config: ModelConfig, layer: int, normed: str) -> str:
    experts = config.experts
    if experts is None:
        raise ValueError("a dense model has no experts")
    name, count, chosen = f"layers.{layer}", emitter.rows.count, experts.num_experts_per_token
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
    activated = emitter.scratch("activated", count, chosen, config.intermediate_size)
    emitter.emit(
        "experts_gate_up",
        {"x": normed, "expert_ids": ids},
        {"out": activated},
        weights={part: f"{name}.experts.gate_up.{part}" for part in parts},
        limit=experts.swiglu_limit,
        alpha=experts.swiglu_alpha,
    )
    output = emitter.scratch("down", count, config.hidden_size, dtype=torch.float32)
    shard, own = config.shard, dict[str, int]()
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


def emit_lm_head(builder: ProgramBuilder, config: ModelConfig, rows: Rows, residual: str, stage: Stage) -> str:
    """Final norm and LM head: float32 logits [M, V], returned by buffer name."""
    emitter = Emitter(builder, replace(rows, prefix="target."), TORCH_DTYPES[config.dtype], stage)
    normed = emitter.norm(residual, "norm.weight", config.rms_norm_eps, "final")
    return emitter.vocabulary(normed, "lm_head", config.vocab_size, "logits", config.shard)


def emit_prompt_logits(
    builder: ProgramBuilder, config: ModelConfig, rows: Rows, residual: str, out: str, stage: Stage
) -> None:
    """Final norm and LM head of prefill's rows, into a buffer of state: float32 logits [M, V]."""
    emitter = Emitter(builder, replace(rows, prefix="prefill.target."), TORCH_DTYPES[config.dtype], stage)
    normed = emitter.norm(residual, "norm.weight", config.rms_norm_eps, "final")
    emitter.vocabulary(normed, "lm_head", config.vocab_size, "logits", config.shard, out)
