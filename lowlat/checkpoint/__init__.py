"""Hugging Face directories in, checked geometry and canonical weights out; no file is trusted.

Only safetensors and JSON are read. Everything that a config asks for and lowlat does not implement is refused by
name, and so is every key or tensor that nobody knows; all errors are ConfigError.

Canonical weights have outputs as rows and one name whatever the family: `embed.weight`, `norm.weight`,
`lm_head.weight`, `layers.{i}.` with `attn_norm qkv q_norm k_norm sinks o ffn_norm gate_up down router experts`, and
`head.` with a head's. Fused rows are in the order q, k, v and gate, up. This package knows neither devices nor
kernels.
"""

from lowlat.checkpoint.head import LoadedHead, load_head
from lowlat.checkpoint.head_config import read_head_config
from lowlat.checkpoint.plan import weight_plan
from lowlat.checkpoint.target import LoadedTarget, StoredTarget, load_target, open_target, read_model_config

__all__ = [
    "LoadedHead",
    "LoadedTarget",
    "StoredTarget",
    "load_head",
    "load_target",
    "open_target",
    "read_head_config",
    "read_model_config",
    "weight_plan",
]
