"""A GGUF of a dense target's canonical weights, for llama.cpp: a file for timing.

Values within a head are not in the order that llama.cpp rotates, and there is no vocabulary: what it computes means
nothing, its time is that of the model. Weights are streamed, so that the file may be larger than memory.
"""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch

from lowlat.errors import ConfigError
from lowlat.models.geometry import ModelConfig
from lowlat.models.target import OpenedTarget

__all__ = ["FAMILIES", "write_gguf"]

FAMILIES = {"llama": "llama", "qwen3": "qwen3"}  # lowlat's name to GGUF's architecture
OUTER = {"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
OF_LAYER = {
    "attn_norm.weight": "attn_norm.weight",
    "o.weight": "attn_output.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "down.weight": "ffn_down.weight",
    "q_norm.weight": "attn_q_norm.weight",
    "k_norm.weight": "attn_k_norm.weight",
}


def write_gguf(target: OpenedTarget, path: Path) -> Path:
    """Write a target's weights, matrices in bfloat16. Raises ConfigError for a family that is not one of FAMILIES."""
    config = target.config
    if config.family not in FAMILIES or config.experts is not None:
        raise ConfigError(f"no GGUF is written of family {config.family!r}; known: {', '.join(FAMILIES)}")
    beside = path.with_suffix(".part")
    writer = gguf.GGUFWriter(beside, FAMILIES[config.family])
    _describe(writer, config)
    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    shapes = {name: tensor for name, tensor in target.weights.shapes().items() if name not in tied}
    order = []
    for name, tensor in shapes.items():
        for own, part in _parts(name, tensor, config):
            raw = None if part.dim() == 1 else gguf.GGMLQuantizationType.BF16
            shape = tuple(part.shape) if raw is None else (part.shape[0], 2 * part.shape[1])
            kind = np.dtype(np.float32) if raw is None else np.dtype(np.uint8)
            writer.add_tensor_info(own, shape, kind, part.numel() * (4 if raw is None else 2), raw_dtype=raw)
        order.append(name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in order:
        for _, part in _parts(name, target.weights[name], config):
            writer.write_tensor_data(_array(part))
    writer.close()
    return beside.replace(path)


def _describe(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    attention = config.attention
    writer.add_feed_forward_length(config.ffn.inner_size)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_rope_dimension_count(attention.head_dim)
    writer.add_rope_freq_base(attention.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")


def _parts(name: str, tensor: torch.Tensor, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """A canonical weight's tensors by their names in a GGUF; `tensor` may be without data."""
    if name in OUTER:
        yield OUTER[name], tensor
        return
    _, layer, own = name.split(".", 2)
    block = f"blk.{layer}"
    if own == "qkv.weight":
        sizes = (config.attention.query_size, *[config.attention.kv_size] * 2)
        for letter, part in zip("qkv", tensor.split(sizes), strict=True):
            yield f"{block}.attn_{letter}.weight", part
    elif own == "gate_up.weight":
        for kind, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"{block}.ffn_{kind}.weight", part
    elif own in OF_LAYER:
        yield f"{block}.{OF_LAYER[own]}", tensor
    else:
        raise ConfigError(f"{name}: no GGUF is written of a target with such a weight")


def _array(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    if tensor.dim() == 1:
        return tensor.float().numpy()
    return tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
