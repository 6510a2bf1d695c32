"""This module has EAGLE3's and P-EAGLE's draft models in plain torch, only for comparison.

It reads the checkpoint's own tensors and computes the whole sequence anew at each call, by the equations of EAGLE-3
(arXiv 2503.01840, section 3) and the draft model's flags. It shares only the config reader and the RoPE tables with
the runtime.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from lowlat.checkpoint.tensors import Checkpoint
from lowlat.models.families import FAMILIES
from lowlat.models.layer_spec import Rotation
from lowlat.models.rope import rope_tables
from lowlat.models.target import read_model_config
from lowlat.speculators.eagle3.geometry import Eagle3Config
from lowlat.speculators.eagle3.tensors import open_draft_model
from lowlat.speculators.peagle.geometry import PeagleConfig

__all__ = ["PlainDraftModel"]

EMBEDDING, LM_HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class PlainDraftModel:
    """One draft model over one target, in one dtype, on the CPU.

    tensors     the draft model's tensors by normalised name, and those that it borrows from the target
    target_eps  epsilon of the target's final norm
    """

    def __init__(self, config: Eagle3Config, tensors: Mapping[str, torch.Tensor], target_eps: float) -> None:
        self.config, self.target_eps = config, target_eps
        self.tensors = tensors
        offsets = tensors.get("d2t")
        self.offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if offsets is None else offsets.long()

    @classmethod
    def load(
        cls, config: Eagle3Config, head: str | Path, target: str | Path, dtype: torch.dtype, target_eps: float
    ) -> "PlainDraftModel":
        """Read the draft model's tensors, and the target's embedding and LM head if it has none of its own."""
        stored = open_draft_model(Path(head))
        names = {name: normalised for normalised, name in stored.stored.items() if normalised != "t2d"}
        tensors = {names[entry.name]: tensor for entry, tensor in stored.checkpoint.read(list(names))}
        checkpoint = Checkpoint.open(Path(target))
        family = FAMILIES[read_model_config(target, dtype="float32").family]
        names_of_target, borrowed = family.names_in(checkpoint.entries), {}
        if not config.own_embedding:
            borrowed["embed_tokens.weight"] = EMBEDDING
        if not config.own_lm_head:
            borrowed["lm_head.weight"] = LM_HEAD if names_of_target.stored(LM_HEAD) in checkpoint.entries else EMBEDDING
        if config.final_hidden:
            borrowed["target.norm.weight"] = FINAL_NORM
        for own, name in borrowed.items():
            ((_, tensors[own]),) = checkpoint.read([names_of_target.stored(name)])
        floats = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        return cls(config, floats, target_eps)

    def fc(self, captured: Sequence[torch.Tensor]) -> torch.Tensor:
        """Map captured residual streams, each [n, Ht], to the draft model's features [n, H]."""
        if self.config.final_hidden:
            return self._norm(captured[0], "target.norm", self.target_eps)
        if self.config.fc_norm:
            captured = [self._norm(x, f"fc_norm.{k}") for k, x in enumerate(captured)]
        joined = torch.cat(list(captured), dim=-1)
        if self.config.norm_before_fc:
            joined = self._norm(joined, "input_norm")
        return F.linear(joined, self.tensors["fc.weight"])

    def stages(
        self, tokens: Sequence[int], features: torch.Tensor, drafts: Sequence[int]
    ) -> list[dict[str, torch.Tensor]]:
        """Return the last row's stages for each draft: after the tokens, then after each draft but the last.

        tokens    x[0..n]
        features  [n, H], of x[0..n-1]
        drafts    [S] the drafts that were made
        """
        following, states, result = list(tokens[1:]), features, []
        if isinstance(self.config, PeagleConfig):
            return self._parallel_stages(following, features, len(drafts), self.config.mask_token)
        for draft in drafts:
            found, out = self._last_row(following, states)
            result.append(found)
            states = torch.cat((states, (found["pre_head_hidden"] if self.config.norm_output else out)[None]))
            following.append(draft)
        return result

    def _last_row(self, tokens: Sequence[int], hidden: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the last row's stages, and the last layer's output [H]."""
        found, out = self._rows(tokens, hidden)
        return {stage: rows[-1] for stage, rows in found.items()}, out[-1]

    def _parallel_stages(
        self, tokens: list[int], features: torch.Tensor, depth: int, mask_token: int
    ) -> list[dict[str, torch.Tensor]]:
        """Return P-EAGLE's stages: one pass with S - 1 mask tokens after the tokens, of which the last S rows count."""
        captured = self.tensors["mask_hidden"].reshape(1, -1).chunk(len(self.config.capture_boundaries), dim=-1)
        state = captured[0] if self.config.final_hidden else self.fc(captured)
        states = torch.cat((features, state.expand(depth - 1, -1)))
        found, _ = self._rows([*tokens, *[mask_token] * (depth - 1)], states)
        return [{stage: rows[row] for stage, rows in found.items()} for row in range(-depth, 0)]

    def _rows(self, tokens: Sequence[int], hidden: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return all rows by stage, after each layer's attention and FFN and around the LM head; and the output."""
        embedded = self.tensors["embed_tokens.weight"][torch.tensor(list(tokens))]
        normed = self._norm(hidden, "layers.0.hidden_norm")
        x = torch.cat((self._norm(embedded, "layers.0.input_layernorm"), normed), dim=-1)
        stream = normed if self.config.norm_before_residual else hidden
        found: dict[str, torch.Tensor] = {}
        for layer in range(self.config.num_layers):
            own = f"layers.{layer}"
            x = self._norm(stream, f"{own}.input_layernorm") if layer else x
            middle = stream + self._attend(x, layer)
            inner = self._norm(middle, f"{own}.post_attention_layernorm")
            gated = F.silu(self._linear(inner, f"{own}.mlp.gate_proj")) * self._linear(inner, f"{own}.mlp.up_proj")
            stream = middle + self._linear(gated, f"{own}.mlp.down_proj")
            prefix = "" if layer == self.config.num_layers - 1 else f"{own}."
            found |= {f"{prefix}attn_out": middle, f"{prefix}ffn_out": stream}
        normed = self._norm(stream, "norm")
        logits = F.linear(normed, self.tensors["lm_head.weight"])
        return {**found, "pre_head_hidden": normed, "logits": logits}, stream

    def _attend(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        config, count, own = self.config.attentions[layer], x.shape[0], f"layers.{layer}.self_attn"
        q = self._linear(x, f"{own}.q_proj").view(count, config.num_heads, config.head_dim)
        k = self._linear(x, f"{own}.k_proj").view(count, config.num_kv_heads, config.head_dim)
        v = self._linear(x, f"{own}.v_proj").view(count, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q, k = self._norm(q, f"{own}.q_norm"), self._norm(k, f"{own}.k_norm")
        q, k = self._rotate(q, config.rotation), self._rotate(k, config.rotation)
        group, window = config.num_heads // config.num_kv_heads, config.window
        visible = torch.ones(count, count, dtype=torch.bool).tril()
        if window is not None:
            visible &= ~visible.tril(-window)
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.repeat_interleave(group, dim=1).transpose(0, 1),
            v.repeat_interleave(group, dim=1).transpose(0, 1),
            attn_mask=visible,
        )
        return self._linear(attended.transpose(0, 1).reshape(count, -1), f"{own}.o_proj")

    def _rotate(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        cos, sin = (table[:, None] for table in rope_tables(*rotation, x.shape[0]))
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

    def _norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"].float()
        return F.rms_norm(x.float(), x.shape[-1:], weight, eps or self.config.rms_norm_eps).to(x.dtype)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))
