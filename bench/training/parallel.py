"""P-EAGLE, DFlash and DSpark draft models as one torch module for training: S drafts after an anchor, in one pass.

An anchor is the position n of the last known token; its draft i is the token at n + 1 + i. After each anchor lie a
block's rows, at positions n, n + 1 and so on, which see what is known before n, and of their block:

    method   known before n                     rows of a block                   see of it   draft
    peagle   rows of tokens, as EAGLE3's        S - 1 of the mask, without token  those       row n - 1, then each
                                                and feature                       before
    dflash   keys and values of features alone  the anchor's token, S masks       all         each mask
    dspark   the same                           the anchor's token, S - 1 masks   all         each

Many anchors of a text are drafted at once. Nothing here knows about caches or generation.
Source: vllm-project/speculators, z-lab/dflash and deepseek-ai/DeepSpec.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from bench.training.eagle3 import DraftLayer, DraftSizes, Eagle3DraftModel, RmsNorm, layer_keys, rotate, rotation_of
from bench.training.teacher import Teacher

__all__ = ["METHODS", "ParallelDraftModel", "ParallelForm", "parallel_loss", "save_parallel_model"]

METHODS = ("peagle", "dflash", "dspark")


@dataclass(frozen=True)
class ParallelForm:
    """The form of a parallel draft model besides its sizes.

    drafts       S, of a pass
    markov_rank  of DSpark's bias by the token before, which its confidence reads, too
    """

    method: str
    layers: int
    drafts: int
    mask_token: int
    markov_rank: int = 0

    @property
    def block_rows(self) -> int:
        """Rows after an anchor."""
        return self.drafts + {"peagle": -1, "dflash": 1, "dspark": 0}[self.method]


class _MarkovHead(nn.Module):
    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)


class _ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)


class ParallelDraftModel(nn.Module):
    """Parameters by the published checkpoints' names; the embedding is the target's, and is not trained."""

    def __init__(self, sizes: DraftSizes, form: ParallelForm, embedding: Tensor) -> None:
        super().__init__()
        if sizes.draft_vocabulary != sizes.vocabulary:
            raise ValueError("a parallel draft model is trained for the target's whole vocabulary")
        self.sizes, self.form = sizes, form
        self.is_peagle = form.method == "peagle"
        features = len(sizes.boundaries) * sizes.target_hidden
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=True)
        self.fc = nn.Linear(features, sizes.hidden, bias=False)
        if self.is_peagle:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, features))
        else:
            self.hidden_norm = RmsNorm(sizes.hidden, sizes.rms_norm_eps)
        self.layers = nn.ModuleList(
            DraftLayer(sizes, doubled=self.is_peagle and not number) for number in range(form.layers)
        )
        self.norm = RmsNorm(sizes.hidden, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if form.markov_rank:
            self.markov_head = _MarkovHead(sizes.vocabulary, form.markov_rank)
            self.confidence_head = _ConfidenceHead(sizes.hidden + form.markov_rank)

    @torch.no_grad()
    def start_from(self, teacher: Teacher, head: Eagle3DraftModel | None) -> None:
        """Take what the target's last layers have, and fc, norms and LM head of an EAGLE3 draft model, if one is given.

        A P-EAGLE model's first layer is then that draft model's, and the others change nothing yet.
        """
        model, sizes = teacher.model.model, self.sizes
        self.lm_head.weight.copy_(teacher.model.get_output_embeddings().weight)
        self.norm.weight.copy_(model.norm.weight)
        nn.init.normal_(self.fc.weight, std=0.02 / sizes.hidden**0.5)
        if sizes.hidden == sizes.target_hidden:
            self.fc.weight[:, -sizes.hidden :] += torch.eye(sizes.hidden)
        for layer, source in zip(self._layers, model.layers[-self.form.layers :], strict=True):
            weights = dict(source.named_parameters())
            for name, parameter in layer.named_parameters():
                if name in weights and weights[name].shape == parameter.shape:
                    parameter.copy_(weights[name])
        if not self.is_peagle:
            self.hidden_norm.weight.copy_(model.layers[-self.form.layers].input_layernorm.weight)
        if self.form.markov_rank:
            nn.init.zeros_(self.markov_head.markov_w2.weight)
        if head is None:
            return
        for part in ("fc", "norm", "lm_head"):
            getattr(self, part).weight.copy_(getattr(head, part).weight)
        if self.is_peagle:
            self._layers[0].load_state_dict(head.midlayer.state_dict())
            for layer in self._layers[1:]:
                nn.init.zeros_(layer.get_parameter("self_attn.o_proj.weight"))
                nn.init.zeros_(layer.get_parameter("mlp.down_proj.weight"))

    @property
    def _layers(self) -> list[DraftLayer]:
        return [cast(DraftLayer, layer) for layer in self.layers]

    def states(self, tokens: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Run the blocks of all anchors; what the LM head reads for each draft.

        tokens    [rows, length + 1] int64
        features  [rows, length, 3 * Nt]  the target's streams
        anchors   [A] int64, 1 to length
        result    [rows, A, S, N]         normed
        """
        form, (rows, length) = self.form, features.shape[:2]
        blocks = torch.full((rows, len(anchors), form.block_rows), form.mask_token, device=tokens.device)
        if not self.is_peagle:
            blocks[:, :, 0] = tokens[:, anchors]
        stream, read, context = self._inputs(tokens, features, blocks.flatten(1))
        positions, seen = self._layout(length, anchors)
        own = slice(0 if self.is_peagle else length, None)
        turned, queries = rotation_of(self.sizes, positions), rotation_of(self.sizes, positions[own])
        for number, layer in enumerate(self._layers):
            x = read if number == 0 and read is not None else layer.input_layernorm(stream)
            keyed = x if context is None else torch.cat([context.to(x.dtype), x], dim=1)
            stream = layer.feed_forward(stream + self._attend(layer, x, keyed, queries, turned, seen[own]))
        found: Tensor = self.norm(stream)
        shape = (rows, len(anchors), form.block_rows, self.sizes.hidden)
        drafted = found[:, found.shape[1] - blocks[0].numel() :].reshape(shape)
        if self.is_peagle:
            return torch.cat([found[:, anchors - 1][:, :, None], drafted], dim=2)
        return drafted[:, :, 1:] if form.method == "dflash" else drafted

    def _inputs(self, tokens: Tensor, features: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The residual stream, the first layer's input where it is another, and what keys alone are made of."""
        hidden, embedded = self.fc(features), self.embed_tokens(blocks)
        if not self.is_peagle:
            return embedded, None, self.hidden_norm(hidden)
        masked = self.fc(self.mask_hidden.to(features.dtype)).expand(len(blocks), blocks.shape[1], -1)
        stream = torch.cat([hidden, masked.to(hidden.dtype)], dim=1)
        first = self._layers[0]
        whole = torch.cat([self.embed_tokens(tokens[:, 1 : features.shape[1] + 1]), embedded], dim=1)
        return stream, torch.cat([first.input_layernorm(whole).to(stream.dtype), first.hidden_norm(stream)], -1), None

    def _layout(self, length: int, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of the known rows and the blocks', [n], and which of them each sees, [n, n] bool."""
        count, device = self.form.block_rows, anchors.device
        known, row = torch.arange(length, device=device), torch.arange(count, device=device)
        positions = torch.cat([known, (anchors[:, None] + row).flatten()])
        starts = torch.cat([known + 1, anchors.repeat_interleave(count)])  # the first position that is not seen
        block = torch.arange(len(anchors), device=device).repeat_interleave(count)
        within = torch.cat([torch.full((length,), -1, device=device), block])
        same = (within[:, None] == within[None]) & (within[:, None] >= 0)
        if self.is_peagle:
            same = same & (positions[None] <= positions[:, None])
        seen = torch.zeros(len(positions), len(positions), dtype=torch.bool, device=device)
        seen[:, :length] = known[None] < starts[:, None]
        return positions, seen | same

    def _attend(
        self,
        layer: DraftLayer,
        x: Tensor,
        keyed: Tensor,
        queries: tuple[Tensor, Tensor],
        turned: tuple[Tensor, Tensor],
        seen: Tensor,
    ) -> Tensor:
        attention, sizes = layer.self_attn, self.sizes

        def heads(projected: Tensor, count: int) -> Tensor:
            split: Tensor = projected.reshape(*projected.shape[:2], count, sizes.head_dim)
            return split.transpose(1, 2)

        group = sizes.heads // sizes.kv_heads
        query = rotate(heads(attention.q_proj(x), sizes.heads), queries)
        key = rotate(heads(attention.k_proj(keyed), sizes.kv_heads), turned).repeat_interleave(group, dim=1)
        value = heads(attention.v_proj(keyed), sizes.kv_heads).repeat_interleave(group, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        out: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def logits(self, states: Tensor, previous: Tensor) -> Tensor:
        """Draft logits [..., V] of states [..., N], after the tokens [...] before each."""
        logits: Tensor = self.lm_head(states)
        if self.form.markov_rank:
            logits = logits + self.markov_head.markov_w2(self.markov_head.markov_w1(previous))
        return logits

    def confidence(self, states: Tensor, previous: Tensor) -> Tensor:
        """Log-acceptance probabilities [...] that a draft is accepted."""
        known = self.markov_head.markov_w1(previous)
        found: Tensor = self.confidence_head.proj(torch.cat([states, known.to(states.dtype)], dim=-1))
        return found[..., 0]


def parallel_loss(
    teacher: Teacher,
    head: ParallelDraftModel,
    tokens: Tensor,
    keep: Tensor,
    *,
    anchors: int,
    decay: float,
    sharpness: float,
) -> tuple[Tensor, Tensor]:
    """The weighted loss over drafts, and the share of drafts that are the target's argmax, by place in the block.

    tokens     [rows, length + 1] int64
    keep       [rows, length + 1] bool   the tokens worth predicting
    anchors    blocks a row, at random positions
    sharpness  the target's distribution is taken at this temperature
    The drafts before each are taken to be right. DSpark's confidence learns the overlap of both distributions.
    """
    count, length = head.form.drafts, tokens.shape[1] - 1
    places = torch.randperm(length - count, device=tokens.device)[:anchors].sort().values + 1
    at = places[:, None] + torch.arange(count, device=tokens.device)  # of the token before each draft, [A, S]
    with torch.no_grad():
        features, last = teacher.features(tokens, head.sizes.boundaries)
        logits = teacher.logits(last[:, at])
        best, probabilities = logits.argmax(-1), (logits / sharpness).softmax(-1)
        del logits
    states, previous, wanted = head.states(tokens, features[:, :-1], places), tokens[:, at], keep[:, at + 1].float()
    drafted = head.logits(states, previous).float()
    wrong = -(probabilities * drafted.log_softmax(-1)).sum(-1)
    weights = wanted * decay ** torch.arange(count, device=tokens.device)
    loss = (wrong * weights).sum() / weights.sum().clamp(min=1)
    if head.form.markov_rank:
        overlap = torch.minimum((drafted.detach() / sharpness).softmax(-1), probabilities).sum(-1)
        sure = head.confidence(states.detach(), previous).float()
        lost = functional.binary_cross_entropy_with_logits(sure, overlap, reduction="none")
        loss = loss + (lost * weights).sum() / weights.sum().clamp(min=1)
    right = ((drafted.detach().argmax(-1) == best) * wanted).sum((0, 1))
    return loss, right / wanted.sum((0, 1)).clamp(min=1)


def _config(head: ParallelDraftModel, num_target_layers: int) -> dict[str, Any]:
    sizes, form = head.sizes, head.form
    kind = {"peagle": "PEagleSpeculator", "dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[form.method]
    key = "eagle_aux_hidden_state_layer_ids" if form.method == "peagle" else "aux_hidden_state_layer_ids"
    config = {
        "architectures": [kind],
        "speculators_model_type": form.method,
        "target_hidden_size": sizes.target_hidden,
        "num_target_layers": num_target_layers,
        "draft_vocab_size": sizes.vocabulary,
        "mask_token_id": form.mask_token,
        key: list(sizes.boundaries),
        "transformer_layer_config": layer_keys(sizes, form.layers),
        "torch_dtype": "bfloat16",
    }
    if form.method == "peagle":
        return {**config, "norm_before_residual": False}
    config |= {"block_size": form.block_rows, "sample_from_anchor": form.method == "dspark"}
    if form.method == "dspark":
        config |= {"markov_rank": form.markov_rank, "markov_head_type": "vanilla"}
        config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return config


def save_parallel_model(head: ParallelDraftModel, directory: str | Path, num_target_layers: int) -> None:
    """Write config.json and model.safetensors (bf16) in speculators' layout, without the target's embedding."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items() if name != "embed_tokens.weight"}
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(_config(head, num_target_layers), indent=1)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
