"""Batched text from a dense target in plain torch: a static cache, a few GEMMs a layer.

For writing training data by the ten million tokens; transformers' own loop is several times slower at such batch
sizes. It uses the model's modules, so weights and norms are the target's; attention is written out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["can_decode", "decode"]

_CHECK_EVERY = 16  # steps between looks at whether every text has ended; each look waits for the device


def can_decode(model: Any) -> bool:
    """Say whether `decode` knows this architecture: Llama's layers, biased or not, with full attention."""
    plain = getattr(model.config, "sliding_window", None) is None
    return plain and getattr(model.config, "model_type", "") in ("llama", "mistral", "qwen2")


class _Cache:
    """Keys and values of all layers, [batch * G, total, D] each, and the positions that left padding hides."""

    def __init__(self, model: Any, hidden: Tensor) -> None:
        config = model.config
        rows, total = hidden.shape
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        shape = (config.num_hidden_layers, rows * self.kv_heads, total, self.head_dim)
        dtype = next(model.parameters()).dtype
        self.keys = torch.zeros(shape, dtype=dtype, device=hidden.device)
        self.values = torch.zeros_like(self.keys)
        self.bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, float("-inf"))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def _forward(model: Any, cache: _Cache, ids: Tensor, positions: Tensor, start: int) -> Tensor:
    """Run ids [batch, n] at cache rows start..start + n - 1; return the last row's hidden state [batch, N]."""
    decoder = model.model
    rows, count = ids.shape
    end, kv_heads, size = start + count, cache.kv_heads, cache.head_dim
    hidden = decoder.embed_tokens(ids)
    cos, sin = (table[:, None] for table in decoder.rotary_emb(hidden, position_ids=positions))
    group = cache.heads // kv_heads
    order = torch.arange(count, device=ids.device)
    causal = torch.zeros(count, end, dtype=hidden.dtype, device=ids.device)
    causal.masked_fill_(torch.arange(end, device=ids.device)[None] > start + order[:, None], float("-inf"))
    bias = cache.bias[:, None, None, :end] + causal  # [batch, 1, n, end]
    if count > 1:  # a row of padding sees itself, or its softmax would have nothing to share
        bias[:, :, order, start + order] = 0
    bias = bias.expand(rows, kv_heads, count, end).reshape(rows * kv_heads, 1, count, end)
    for index, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        x = layer.input_layernorm(hidden)
        query = _rotate(attention.q_proj(x).view(rows, count, cache.heads, size).transpose(1, 2), cos, sin)
        key = _rotate(attention.k_proj(x).view(rows, count, kv_heads, size).transpose(1, 2), cos, sin)
        value = attention.v_proj(x).view(rows, count, kv_heads, size).transpose(1, 2)
        cache.keys[index, :, start:end] = key.reshape(rows * kv_heads, count, size)
        cache.values[index, :, start:end] = value.reshape(rows * kv_heads, count, size)
        query = query.reshape(rows * kv_heads, group * count, size)
        scores = torch.bmm(query, cache.keys[index, :, :end].transpose(1, 2)) * size**-0.5
        scores = scores.view(rows * kv_heads, group, count, end) + bias
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(hidden.dtype)
        mixed = torch.bmm(weights.view(rows * kv_heads, group * count, end), cache.values[index, :, :end])
        mixed = mixed.view(rows, cache.heads, count, size).transpose(1, 2).reshape(rows, count, -1)
        hidden = hidden + attention.o_proj(mixed)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return decoder.norm(hidden[:, -1])  # type: ignore[no-any-return]


@torch.no_grad()
def decode(
    model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, *, temperature: float, ends: Sequence[int]
) -> list[list[int]]:
    """Continue prompts as one batch; return the new tokens of each, its first end id included.

    temperature   0 is greedy; otherwise the whole distribution is sampled by the Gumbel maximum
    ends          ids that end a text; empty: every text gets max_tokens tokens
    Memory: batch * (longest prompt + max_tokens) rows of K and V, and the prompt's scores of one layer.
    """
    device = next(model.parameters()).device
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    hidden_places = torch.zeros(len(prompts), width + max_tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        hidden_places[row, : width - len(prompt)] = True
    ids, hidden_places = ids.to(device), hidden_places.to(device)
    padding = hidden_places.sum(1)
    cache = _Cache(model, hidden_places)
    out = torch.zeros(len(prompts), max_tokens, dtype=torch.long, device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    stops = torch.tensor(list(ends), dtype=torch.long, device=device)
    positions = (torch.arange(width, device=device)[None] - padding[:, None]).clamp(min=0)
    last = _forward(model, cache, ids, positions, 0)
    written = 0
    for step in range(max_tokens):
        logits = model.lm_head(last).float()
        if temperature > 0:
            logits = logits / temperature - torch.empty_like(logits).exponential_().log()
        chosen = logits.argmax(-1)
        out[:, step] = chosen
        written = step + 1
        ended |= torch.isin(chosen, stops)
        if written == max_tokens or (written % _CHECK_EVERY == 0 and bool(ended.all())):
            break
        last = _forward(model, cache, chosen[:, None], (width + step - padding)[:, None], width + step)
    found = out[:, :written].tolist()
    return [_until_end(tokens, set(ends)) for tokens in found]


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens
