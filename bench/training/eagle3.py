"""The EAGLE3 draft model as a torch module for training, with several draft steps simulated in parallel.

Row j belongs to the feature of position j and takes the token after it, x[j + 1]; it predicts x[j + 2].
In step 0 every row has the target's true features. In step k row j stands for a draft that left the true features
after at row j - k: its hidden input is what step k - 1 gave at row j - 1, and it attends to the step 0 rows up to
j - k and, for i = 1..k, to row j - k + i of step i. Nothing here knows about caches or generation.

Source: EAGLE-3, arXiv 2503.01840, section 3 (training-time test).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lowlat.models.layer_spec import RopeConfig
from lowlat.models.rope import inverse_frequencies

__all__ = [
    "DraftLayer",
    "DraftSizes",
    "Eagle3DraftModel",
    "RmsNorm",
    "attend_steps",
    "load_draft_model",
    "rotate",
    "rotation_of",
    "save_draft_model",
]

PIECE = 1024  # rows that attend at once where a mask is needed


@dataclass(frozen=True)
class DraftSizes:
    """Sizes of a draft model; `boundaries` are the target's residual streams entering those layers.

    yarn_factor  how many times the positions that its rotary embedding was made for are stretched
    window       positions that a row sees, its own included; None: all before it
    """

    hidden: int
    target_hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    draft_vocabulary: int
    max_context: int
    rope_theta: float
    rms_norm_eps: float
    boundaries: tuple[int, int, int]
    yarn_factor: float = 1.0
    window: int | None = None

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding: YaRN from `max_context / yarn_factor` positions on where the factor is above 1."""
        if self.yarn_factor == 1:
            return RopeConfig(self.rope_theta)
        return RopeConfig(
            self.rope_theta,
            "yarn",
            factor=self.yarn_factor,
            original_max_position=round(self.max_context / self.yarn_factor),
            attention_factor=0.1 * math.log(self.yarn_factor) + 1,
        )


class RmsNorm(nn.Module):
    """Root-mean-square norm in fp32 with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, sizes: DraftSizes, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, sizes.heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(width, sizes.kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(width, sizes.kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)


class _Mlp(nn.Module):
    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)


class DraftLayer(nn.Module):
    """Parameters of a decoder layer by their published names; one that is `doubled` reads embedding and hidden state
    side by side, and norms both."""

    def __init__(self, sizes: DraftSizes, *, doubled: bool) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.rms_norm_eps)
        if doubled:
            self.hidden_norm = RmsNorm(sizes.hidden, sizes.rms_norm_eps)
        self.self_attn = _Attention(sizes, (2 if doubled else 1) * sizes.hidden)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.rms_norm_eps)
        self.mlp = _Mlp(sizes)

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """The residual stream [..., N] after the gated FFN."""
        inner, mlp = self.post_attention_layernorm(hidden), self.mlp
        out: Tensor = hidden + mlp.down_proj(functional.silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
        return out


class Eagle3DraftModel(nn.Module):
    """fc, one decoder layer whose attention reads (embedding, hidden), a final norm and an LM head.

    Parameter names are those of the published checkpoints: midlayer.*, fc, norm, lm_head; buffers d2t and t2d.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, sizes: DraftSizes, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(3 * sizes.target_hidden, sizes.hidden, bias=False)
        self.midlayer = DraftLayer(sizes, doubled=True)
        self.norm = RmsNorm(sizes.hidden, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden, sizes.draft_vocabulary, bias=False)
        ids = torch.arange(sizes.draft_vocabulary) if draft_ids is None else draft_ids.long().sort().values
        kept = torch.zeros(sizes.vocabulary, dtype=torch.bool)
        kept[ids] = True
        self.register_buffer("d2t", ids - torch.arange(sizes.draft_vocabulary))
        self.register_buffer("t2d", kept)

    @property
    def draft_ids(self) -> Tensor:
        """The target id of each draft id, [Vd] int64, increasing."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    def steps(self, embeddings: Tensor, features: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Yield what the LM head reads in steps 0, 1, ...; rows j < k of step k have no meaning.

        embeddings  [rows, length, N]       the target's embedding of the token after each position
        features    [rows, length, 3 * Nt]  the target's three residual streams, low to high
        yields      [rows, length, N]           normed; `lm_head` makes draft logits of any of its rows
        """
        rotation = rotation_of(self.sizes, torch.arange(embeddings.shape[1], device=embeddings.device))
        embedded = self.midlayer.input_layernorm(embeddings)
        hidden = self.fc(features)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(num_steps):
            if step:
                hidden = functional.pad(hidden[:, :-1], (0, 0, 1, 0))
            hidden = self._layer(embedded, hidden, rotation, keys, values)
            yield self.norm(hidden)

    def _layer(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        layer, sizes = self.midlayer, self.sizes
        attention = layer.self_attn
        both = torch.cat([embedded, layer.hidden_norm(hidden)], dim=-1)
        rows, length = both.shape[:2]

        def split_heads(x: Tensor, count: int) -> Tensor:
            return x.view(rows, length, count, sizes.head_dim).transpose(1, 2)

        query = rotate(split_heads(attention.q_proj(both), sizes.heads), rotation)
        key = rotate(split_heads(attention.k_proj(both), sizes.kv_heads), rotation)
        value = split_heads(attention.v_proj(both), sizes.kv_heads)
        group = sizes.heads // sizes.kv_heads
        keys.append(key.repeat_interleave(group, dim=1))
        values.append(value.repeat_interleave(group, dim=1))
        mixed = attend_steps(query, keys, values, sizes.window)
        return layer.feed_forward(hidden + attention.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1)))


def rotation_of(sizes: DraftSizes, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [n, D] of positions [n]."""
    rope = sizes.rope
    angles = positions.float()[:, None] * inverse_frequencies(rope, sizes.head_dim).to(positions.device)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [rows, heads, length, D], the two halves of a head paired."""
    low, high = x.chunk(2, dim=-1)
    turned = torch.cat([-high, low], dim=-1)
    return (x.float() * rotation[0] + turned.float() * rotation[1]).to(x.dtype)


def attend_steps(query: Tensor, keys: list[Tensor], values: list[Tensor], window: int | None) -> Tensor:
    """Attend as step k = len(keys) - 1 does: step 0's rows up to j - k, and row j - k + i of every later step i.

    Long rows go piece by piece, each computed again for its gradient: a mask of all of them would need length squared.
    """
    length = query.shape[2]
    if len(keys) == 1 and window is None:
        return functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
    given = query, tuple(keys), tuple(values), window
    if length <= PIECE:
        return _attend_piece(*given, 0, length)
    pieces = [(begin, min(begin + PIECE, length)) for begin in range(0, length, PIECE)]
    again = partial(checkpoint, _attend_piece, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(*given, *piece) for piece in pieces], dim=2)


def _attend_piece(
    query: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...], window: int | None, begin: int, end: int
) -> Tensor:
    """Attention of rows begin to end - 1, [rows, heads, end - begin, D]."""
    step, reach = len(keys) - 1, end if window is None else window - 1
    row = torch.arange(begin, end, device=query.device)[:, None]
    seen, some = [], []
    for own in range(step + 1):  # the step whose rows these keys are
        start = max(0, begin - (step if own else reach))
        some.append(slice(start, end))
        behind = row - torch.arange(start, end, device=query.device)
        here = behind == step - own if own else behind >= step
        seen.append(here if window is None else here & (behind < window))
    key, value = (
        torch.cat([each[:, :, part] for each, part in zip(rows, some, strict=True)], dim=2) for rows in (keys, values)
    )
    return functional.scaled_dot_product_attention(query[:, :, begin:end], key, value, attn_mask=torch.cat(seen, dim=1))


def _rope_scaling(sizes: DraftSizes) -> dict[str, Any] | None:
    rope = sizes.rope
    if rope.kind == "default":
        return None
    return {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position,
    }


def layer_keys(sizes: DraftSizes, num_layers: int) -> dict[str, Any]:
    """The keys of a config.json that tell the sizes of a draft model's layers."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_context,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "vocab_size": sizes.vocabulary,
    }


def _config(sizes: DraftSizes) -> dict[str, Any]:
    low, middle, high = sizes.boundaries
    if low != 2:
        raise ValueError(f"the first boundary is {low}; ids of layer outputs can only be told apart when it is 2")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer_keys(sizes, 1),
        "target_hidden_size": sizes.target_hidden,
        "rope_scaling": _rope_scaling(sizes),
        **({} if sizes.window is None else {"layer_types": ["sliding_attention"], "sliding_window": sizes.window}),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "draft_vocab_size": sizes.draft_vocabulary,
        "torch_dtype": "bfloat16",
        # ids name the layers whose output is taken, so boundary b is written as b - 1
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [low - 1, middle - 1, high - 1],
            "use_aux_hidden_state": True,
        },
    }


def save_draft_model(head: Eagle3DraftModel, directory: str | Path) -> None:
    """Write config.json and model.safetensors (bf16), names as published; d2t, t2d only if ids are left out."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    tensors = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in state.items()}
    if head.sizes.draft_vocabulary == head.sizes.vocabulary:
        del tensors["d2t"], tensors["t2d"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(head.sizes), indent=1) + "\n", encoding="utf-8")


def load_draft_model(directory: str | Path) -> Eagle3DraftModel:
    """Read a draft model that `save_draft_model` wrote; fp32, on the CPU."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(directory / "model.safetensors")
    low, middle, high = (i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    sizes = DraftSizes(
        hidden=config["hidden_size"],
        target_hidden=config["target_hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocabulary=config["vocab_size"],
        draft_vocabulary=config["draft_vocab_size"],
        max_context=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"],
        boundaries=(low, middle, high),
        yarn_factor=(config.get("rope_scaling") or {}).get("factor", 1.0),
        window=config.get("sliding_window"),
    )
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    draft_ids = None if offsets is None else torch.arange(offsets.shape[0]) + offsets
    head = Eagle3DraftModel(sizes, draft_ids)
    missing = head.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=False)
    unexpected = [*missing.unexpected_keys, *(k for k in missing.missing_keys if k not in ("d2t", "t2d"))]
    if unexpected:
        raise ValueError(f"{directory} is no such head: {unexpected} do not fit")
    return head
