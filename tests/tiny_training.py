"""A tiny Llama target with a tokenizer, as training writes them."""

from pathlib import Path

import torch

from lowlat.tools.train.tokenizer import save_tokenizer, train_tokenizer

__all__ = ["tiny_target"]


def tiny_target(tmp_path: Path) -> Path:
    """Write the model and its tokenizer of 257 ids into a directory, which is returned."""
    from transformers import LlamaConfig, LlamaForCausalLM

    save_tokenizer(train_tokenizer(["a few words, a few more words"] * 3, 257), tmp_path, max_context=64)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=24, intermediate_size=40, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path
