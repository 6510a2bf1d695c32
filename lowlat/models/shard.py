"""A shard is the part of a target that one of several ranks runs; this module computes its extents from the geometry.

Attention is cut by heads, delta nets by value heads, FFNs and experts by their inner width, the LM head by the
vocabulary. Embedding, norms and routers are whole on every rank. A draft model is cut the same way, or whole on every
rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lowlat.errors import ConfigError
from lowlat.kernels.formats import FORMATS, MatrixFormat
from lowlat.kernels.reference.collectives.cuts import bounds
from lowlat.models.layer_spec import ExpertsSpec, LayerSpec, ParallelSpec

if TYPE_CHECKING:
    from lowlat.models.geometry import Decoder, DraftConfig, ModelConfig

Config = TypeVar("Config", bound="Decoder")

__all__ = [
    "PARTS",
    "STEP",
    "VOCABULARY_UNIT",
    "LayerShard",
    "Place",
    "Shard",
    "rank_configs",
    "rank_drafts",
    "span",
]

PARTS = 8  # parts in which K is summed with tp_invariant, on any number of ranks
WIDTH = 8  # numbers of a row that kernels read at once: widths are multiples of it
STEP = 64  # columns of K that kernels take at once: parts that are summed one by one have whole steps
VOCABULARY_UNIT = 8  # ids that stay together
ROW = 1 << 12  # a multiple of every format's block
OPTION = "tensor_parallel_size"


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank's place among all.

    rank       from 0
    size       ranks: 1, 2, 4 or 8
    invariant  whether a rank sums its part of K in the parts of PARTS ranks, so that any size gives the same bits
    """

    rank: int
    size: int
    invariant: bool

    @property
    def num_parts(self) -> int:
        """Parts of K that this rank sums one by one."""
        return PARTS // self.size if self.invariant else 1


@dataclass(frozen=True, kw_only=True)
class LayerShard(Place):
    """The part of one layer that a rank has, by the sizes of the whole layer.

    unit         columns of the inner width that stay together: at least a format's block; with `invariant` whole steps
                 of the kernels, if the width has enough for each part
    output_unit  the same for the output projection's inputs, which are cut by heads
    num_heads, num_kv_heads, head_dim, inner_size  of the whole layer; for a delta net its value heads, key heads, and
                 the size of a value head
    key_dim      the size of a delta net's key heads; 0 for attention, where it is head_dim
    shared_size  the inner width of an FFN besides experts: a dense one, or a shared expert's own; 0: there is none
    """

    unit: int
    output_unit: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    key_dim: int = 0
    shared_size: int = 0

    @property
    def group(self) -> int:
        """The number of query heads for each key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def heads(self) -> tuple[int, int]:
        """The query heads of this rank: the first, and the one after the last."""
        return span(self.num_heads, self.size, self.rank, head_unit(self.num_heads, self.num_kv_heads))

    @property
    def kv_heads(self) -> tuple[int, int]:
        """The key-value heads of this rank's query heads; several ranks may have the same ones."""
        first, last = self.heads
        return first // self.group, -(-last // self.group)

    @property
    def inner(self) -> tuple[int, int]:
        """This rank's columns of the inner width of the FFN, or of each expert."""
        return span(self.inner_size, self.size, self.rank, self.unit)

    @property
    def shared_inner(self) -> tuple[int, int]:
        """This rank's columns of the inner width of the FFN besides experts."""
        return span(self.shared_size, self.size, self.rank, self.unit)


@dataclass(frozen=True, kw_only=True)
class Shard(Place):
    """The part of a whole model that a rank has.

    layers  its part of each layer, [L]
    draft   its part of the target's draft model; None: there is none, or it is whole on every rank
    """

    layers: tuple[LayerShard, ...]
    draft: "Shard | None" = None

    def vocabulary(self, vocab_size: int, rank: int | None = None) -> tuple[int, int]:
        """The rows of an LM head that this rank has, or another one."""
        return span(vocab_size, self.size, self.rank if rank is None else rank, VOCABULARY_UNIT)


def span(total: int, size: int, rank: int, unit: int = 1) -> tuple[int, int]:
    """The part of an extent that a rank has, see `bounds`."""
    ends = bounds(total, size, unit)
    return ends[rank], ends[rank + 1]


def head_unit(num_heads: int, num_kv_heads: int) -> int:
    """The number of query heads that stay together.

    It is an eighth of all, if these are whole groups or parts of one group. Else it is a group, or 1 if there is only
    one group.
    """
    if num_heads % PARTS == 0 and num_kv_heads & (num_kv_heads - 1) == 0:
        return num_heads // PARTS
    return 1 if num_kv_heads == 1 else num_heads // num_kv_heads


def rank_configs(config: "ModelConfig", size: int, *, invariant: bool = False) -> tuple["ModelConfig", ...]:
    """Cut a target's geometry for each rank; for one rank without `invariant` it stays unchanged.

    Raises ConfigError for a target that cannot be cut this way.
    """
    if size == 1 and not invariant:
        return (config,)
    _check(config, size, "target", config.vocab_size, invariant)
    return tuple(_coded_part(part) for part in _cut(config, size, invariant))


def rank_drafts(
    targets: Sequence["ModelConfig"], draft: "DraftConfig"
) -> tuple[tuple["ModelConfig", "DraftConfig"], ...]:
    """Cut a draft model for the ranks of its cut target; returns both parts of each. Raises ConfigError as above."""
    shard = targets[0].shard
    if shard is None:
        raise ValueError("the target is whole")
    _check(draft, shard.size, "draft model", draft.draft_vocab_size, shard.invariant)
    parts = _cut(draft, shard.size, shard.invariant)
    return tuple(
        (replace(target, shard=replace(target.shard, draft=part.shard)), part)  # type: ignore[type-var]
        for target, part in zip(targets, parts, strict=True)
    )


def _cut(config: Config, size: int, invariant: bool) -> tuple[Config, ...]:
    return tuple(_part(config, rank, size, invariant) for rank in range(size))


def _part(config: Config, rank: int, size: int, invariant: bool) -> Config:
    place: dict[str, Any] = {"rank": rank, "size": size, "invariant": invariant}
    shards = tuple(_layer_shard(config, layer, place) for layer in config.layers)
    layers = tuple(_layer_part(layer, shard) for layer, shard in zip(config.layers, shards, strict=True))
    return replace(config, layers=layers, shard=Shard(**place, layers=shards))


def _layer_shard(config: "Decoder", layer: LayerSpec, place: dict[str, Any]) -> LayerShard:
    unit, output_unit = _units(config, layer, place["invariant"])
    heads = layer.mixer.heads
    return LayerShard(
        **place,
        unit=unit,
        output_unit=output_unit,
        num_heads=heads.count,
        num_kv_heads=heads.groups,
        head_dim=heads.dim,
        inner_size=layer.inner_sizes[0],
        key_dim=heads.key_dim,
        shared_size=layer.inner_sizes[1],
    )


def _layer_part(layer: LayerSpec, shard: LayerShard) -> LayerSpec:
    """Give a layer the heads and the inner width of a rank."""
    count, groups = (stop - start for start, stop in (shard.heads, shard.kv_heads))
    mixer = layer.mixer.with_heads(count, groups)
    own, other = (stop - start for start, stop in (shard.inner, shard.shared_inner))
    if isinstance(layer.ffn, ParallelSpec):
        dense, experts = replace(layer.ffn.dense, inner_size=other), replace(layer.ffn.experts, inner_size=own)
        return replace(layer, mixer=mixer, ffn=ParallelSpec(dense=dense, experts=experts))
    ffn = replace(layer.ffn, inner_size=own)
    if isinstance(ffn, ExpertsSpec) and ffn.shared_ffn is not None:
        ffn = replace(ffn, shared_ffn=replace(ffn.shared_ffn, inner_size=other))
    return replace(layer, mixer=mixer, ffn=ffn)


def _coded_part(part: "ModelConfig") -> "ModelConfig":
    """Cut the KV cache's scales, if it holds codes, to the rank's key-value heads."""
    if part.coded_kv is None or part.shard is None:
        return part
    spans = [part.shard.layers[number].kv_heads for number in part.caching]
    scales = tuple(
        (keys[first:last], values[first:last])
        for (keys, values), (first, last) in zip(part.coded_kv.scales, spans, strict=True)
    )
    return replace(part, coded_kv=replace(part.coded_kv, scales=scales))


def _check(config: "Decoder", size: int, owner: str, vocab_size: int, invariant: bool) -> None:
    """Raise ConfigError for a model that cannot be cut, with the sizes and the option."""
    problem = None
    for layer in dict.fromkeys(config.layers):
        problem = problem or _layer_problem(config, layer, size, invariant)
    if problem is None and vocab_size < PARTS * VOCABULARY_UNIT:
        problem = f"needs {PARTS * VOCABULARY_UNIT} ids in a vocabulary, which has {vocab_size}"
    if problem is not None:
        raise ConfigError(f"the {owner} cannot be cut: {OPTION} {size} {problem}")


def _layer_problem(config: "Decoder", layer: LayerSpec, size: int, invariant: bool) -> str | None:
    """Say why a layer cannot be cut; None if it can."""
    heads, (unit, output_unit) = layer.mixer.heads, _units(config, layer, invariant)
    most = heads.count // head_unit(heads.count, heads.groups)
    least = heads.count // size * heads.dim if most == PARTS else output_unit
    together = math.lcm(WIDTH, _dense_block(config))
    if size > most:
        count, groups = heads.options
        return f"is more than {most}, the parts of {count} {heads.count} with {groups} {heads.groups}"
    if least % together:
        return f"cuts inputs of output projections at multiples of {least}, and {together} are held together"
    for width in filter(None, layer.inner_sizes):
        if width % unit or width < size * unit:
            return f"cuts intermediate_size {width} into parts of multiples of {unit}, which it has not"
    return None


def _units(config: "Decoder", layer: LayerSpec, invariant: bool) -> tuple[int, int]:
    """The numbers of inputs that stay together in a cut layer: of the inner width, and of heads' outputs.

    If parts are summed one by one, the former is in whole steps, provided the inner width has enough for all parts.
    `_check` makes sure that the latter is a multiple of the numbers that formats store together.
    """
    experts = 1 if layer.experts is None else FORMATS[layer.experts.weight_format].block
    heads = layer.mixer.heads
    output = heads.dim * head_unit(heads.count, heads.groups)
    unit = math.lcm(WIDTH, experts, _dense_block(config))
    whole = math.lcm(unit, STEP)
    has_steps = all(width % whole == 0 and width >= PARTS * whole for width in filter(None, layer.inner_sizes))
    return whole if invariant and has_steps else unit, output


def _dense_block(config: "Decoder") -> int:
    formats: list[MatrixFormat] = [] if config.quantiser is None else [config.quantiser.packed]
    if config.quantisation is not None:
        formats += [rule.stored.packed for rule in config.quantisation.rules]
    return math.lcm(1, *(_together(each) for each in formats))


def _together(weight_format: MatrixFormat) -> int:
    """The numbers of a row that share a scale; the format's block if all or none do."""
    specs = weight_format.specs(1, ROW, torch.bfloat16)
    scales = [shape[1] for part, (shape, _) in specs.items() if part.endswith("scales")]
    return max((ROW // count for count in scales if count > 1), default=weight_format.block)
