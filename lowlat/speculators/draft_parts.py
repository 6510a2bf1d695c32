"""This module has parts of draft models that all methods share: recipes of weights, and the emission of common rows."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from lowlat.checkpoint.recipes import Piece, Recipe
from lowlat.graphs.program import Stage
from lowlat.models.geometry import DraftConfig
from lowlat.models.layer_spec import AttentionSpec, DenseSpec, LayerSpec
from lowlat.models.layers import Emitter
from lowlat.models.weight_plan import WeightPlan, rounded_plan
from lowlat.speculators.base import StepScope

__all__ = [
    "BY_SLOT",
    "DRAFT_MAP",
    "LM_HEAD",
    "assign_drafts",
    "emit_accepted_rows",
    "layer_recipes",
    "one_piece",
    "own_weight_plan",
    "seen_before",
    "table_recipes",
    "vocabulary_report",
]

DRAFT_MAP = "draft_model.draft_to_target"
LM_HEAD = "draft_model.lm_head.weight"
BY_SLOT = {"slots": "slots", "block_table": "block_table"}
# norms of a layer after its attention, canonical -> stored name; SANDWICH: of layers with norms after mixer and FFN
SANDWICH = {
    "post_attn_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}
PLAIN = {"ffn_norm": "post_attention_layernorm"}


def one_piece(weight: str, tensor: str, dtype: torch.dtype, *shape: int) -> Recipe:
    """The recipe of a canonical weight that is one stored tensor."""
    return Recipe(weight, (Piece(tensor, shape),), dtype)


def table_recipes(config: DraftConfig, dtype: torch.dtype) -> list[Recipe]:
    """Recipes of a draft model's own embedding and LM head. A cut LM head has none, since it is made at load."""
    made = []
    if config.own_embedding:
        made.append(
            one_piece("draft_model.embed.weight", "embed_tokens.weight", dtype, config.vocab_size, config.hidden_size)
        )
    if config.own_lm_head and not config.is_cut:
        made.append(one_piece(LM_HEAD, "lm_head.weight", dtype, config.draft_vocab_size, config.hidden_size))
    return made


def own_weight_plan(config: DraftConfig, recipes: Sequence[Recipe], dtype: torch.dtype) -> WeightPlan:
    """Canonical name -> (shape, dtype) of a draft model's own weights: those of recipes, and those made at load.

    The latter are the map of draft ids, and a cut LM head.
    """
    plan = {recipe.weight: (recipe.shape, recipe.dtype) for recipe in recipes}
    if config.is_cut:
        plan[LM_HEAD] = ((config.draft_vocab_size, config.hidden_size), dtype)
    plan[DRAFT_MAP] = ((config.draft_vocab_size,), torch.int32)
    return MappingProxyType(dict(rounded_plan(plan, config.quantiser)))


def vocabulary_report(config: DraftConfig) -> dict[str, Any]:
    """The size of the draft vocabulary and, if the caller chose it, the share of a text that it covers."""
    size = {"draft_vocab_size": config.draft_vocab_size}
    return {**size, "draft_vocab_coverage": config.coverage} if config.is_cut else size


def layer_recipes(
    spec: LayerSpec,
    hidden: int,
    dtype: torch.dtype,
    names: tuple[str, str],
    *,
    products: Sequence[str],
    columns: int,
    norms: Mapping[str, str],
) -> list[Recipe]:
    """The recipes of a decoder layer.

    hidden    its hidden size
    names     the prefixes of the canonical and of the stored names
    products  the projections that are one GEMM, each by its letters of q, k, v
    columns   the columns of these matrices
    norms     canonical -> stored name of the norms before the attention
    """
    name, own = names
    attention, ffn = spec.mixer, spec.ffn
    if not isinstance(ffn, DenseSpec) or not isinstance(attention, AttentionSpec):
        raise ValueError(f"files of draft models have attention and dense FFNs, found {spec}")
    inner = ffn.inner_size
    rows = {"q": attention.query_size, "k": attention.kv_size, "v": attention.kv_size}

    def one(weight: str, tensor: str, *shape: int) -> Recipe:
        return one_piece(f"{name}.{weight}", f"{own}.{tensor}", dtype, *shape)

    def projections(product: str, part: str, *width: int) -> Recipe:
        pieces = tuple(Piece(f"{own}.self_attn.{each}_proj.{part}", (rows[each], *width)) for each in product)
        return Recipe(f"{name}.{product}.{part}", pieces, dtype)

    def gates(part: str, *width: int) -> Recipe:
        pieces = tuple(Piece(f"{own}.mlp.{each}_proj.{part}", (inner, *width)) for each in ("gate", "up"))
        return Recipe(f"{name}.gate_up.{part}", pieces, dtype)

    norms = {**norms, **(SANDWICH if spec.sandwich else PLAIN)}
    made = [
        *(one(f"{weight}.weight", f"{tensor}.weight", hidden) for weight, tensor in norms.items()),
        *(projections(product, "weight", columns) for product in products),
        one("o.weight", "self_attn.o_proj.weight", hidden, attention.query_size),
        gates("weight", hidden),
        one("down.weight", "mlp.down_proj.weight", hidden, inner),
    ]
    if attention.qkv_bias:
        made += [projections(product, "bias") for product in products]
    if attention.qk_norm:
        made += [one(f"{part}_norm.weight", f"self_attn.{part}_norm.weight", attention.head_dim) for part in "qk"]
    if spec.scaled:
        made.append(one_piece(f"{name}.scalar", f"{own}.layer_scalar", torch.float32, 1))
    if attention.output_bias:
        made.append(one("o.bias", "self_attn.o_proj.bias", hidden))
    if ffn.bias:
        made += [gates("bias"), one("down.bias", "mlp.down_proj.bias", hidden)]
    return made


def emit_accepted_rows(scope: StepScope) -> None:
    """Emit `draft_rows`, which lays out the rows of accepted tokens for a draft model, in buffers `draft_model.*`."""
    builder, batch, rows = scope.builder, scope.bucket.batch, scope.rows
    outs = {
        "tokens": builder.scratch("draft_model.tokens", (batch, rows), torch.int32),
        "positions": builder.scratch("draft_model.positions", (batch, rows), torch.int32),
        "row_live": builder.scratch("draft_model.row_live", (batch, rows), torch.uint8),
        "write_lens": builder.scratch("draft_model.write_lens", (batch,), torch.int32),
        "live_positions": builder.scratch("draft_model.live_positions", (batch, 1), torch.int32),
    }
    names = ("accepted_tokens", "commit_lens", "draft_live", "dense_lens")
    builder.emit("draft_rows", Stage.DRAFT_FC, reads=scope.reads(*names), writes=outs)


def seen_before(batch: int, count: int) -> torch.Tensor:
    """The causal masks of `count` rows a slot: [B, count] int64."""
    seen = [(2 << row) - 1 for row in range(count)]
    signed = [mask - (1 << 64) if mask >> 63 else mask for mask in seen]
    return torch.tensor(signed, dtype=torch.int64).repeat(batch, 1)


def assign_drafts(
    level: Emitter, top_tokens: str, children: Sequence[int], child_rows: Sequence[int], child_ranks: Sequence[int]
) -> None:
    """Emit the assignment of a level's likeliest tokens to the nodes `children` of `draft_nodes`.

    child_rows   for each child, the row of its slot in the level
    child_ranks  for each child, the rank of its token in that row
    """
    lists = {"children": children, "child_rows": child_rows, "child_ranks": child_ranks}
    own = {
        name: level.builder.constant(f"{level.rows.prefix}{name}", torch.tensor(list(values), dtype=torch.int32))
        for name, values in lists.items()
    }
    level.emit("assign_drafts", {"top_tokens": top_tokens, **own}, {"draft_nodes": "draft_nodes"})
