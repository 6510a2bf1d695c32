"""This package reads the tensors and config fields of Hugging Face model directories; it trusts no file.

It reads only safetensors and JSON. If a config asks for something that lowlat does not implement, or a key or tensor is
unknown, the model is refused by name; all errors are ConfigError.

Canonical weights have outputs as rows, and the same names in all families: `embed.weight`, `norm.weight`,
`lm_head.weight`, `layers.{i}.` with `attn_norm qkv q_norm k_norm sinks o ffn_norm gate_up down router experts`, and
`draft_model.` with those of a draft model. Fused rows are in the order q, k, v and gate, up. `formats` has the formats
of stored weights.
"""
