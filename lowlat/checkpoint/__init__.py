"""This package reads Hugging Face directories, and gives tensors and fields; it trusts no file.

Only safetensors and JSON are read. Everything that a config asks for and lowlat does not implement is refused by
name, and so is every key or tensor that nobody knows; all errors are ConfigError.

Canonical weights have outputs as rows and one name whatever the family: `embed.weight`, `norm.weight`,
`lm_head.weight`, `layers.{i}.` with `attn_norm qkv q_norm k_norm sinks o ffn_norm gate_up down router experts`, and
`draft_model.` with a draft model's. Fused rows are in the order q, k, v and gate, up. `formats` has the formats of
stored weights.
"""
