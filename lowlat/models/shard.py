"""The part of a target that one of several ranks runs: its geometry, and which pieces of weights it has.

Attention is cut by heads, FFNs and experts by their inner width, the LM head by the vocabulary. Embedding, norms and
routers are whole on every rank. A draft model is cut alike, or whole on every rank. It reads no weight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from lowlat.errors import ConfigError
from lowlat.kernels.formats import FORMATS, MatrixFormat
from lowlat.kernels.reference.collectives.cuts import bounds

if TYPE_CHECKING:
    from lowlat.models.geometry import DraftConfig, ExpertsConfig, ModelConfig

Config = TypeVar("Config", "ModelConfig", "DraftConfig")

__all__ = ["PARTS", "STEP", "VOCABULARY_UNIT", "Shard", "rank_configs", "rank_drafts", "span"]

PARTS = 8  # that K is summed in with tp_invariant, on however many ranks
WIDTH = 8  # numbers of a row that kernels read at once: widths are multiples
STEP = 64  # columns of K that kernels take at once: of parts that are summed one by one they have whole steps
VOCABULARY_UNIT = 8  # ids that stay together
ROW = 1 << 12  # a width that every block divides
OPTION = "tensor_parallel_size"


@dataclass(frozen=True)
class Shard:
    """One rank's place among all, and the sizes of the whole model of which its geometry has a part.

    rank       from 0
    size       ranks: 1, 2, 4 or 8
    invariant  whether what a rank sums over its part of K is cut as for PARTS ranks: bits are then those of any size
    unit       columns of the inner width that stay together: a format's block, at least; with `invariant` whole steps
               of the kernels, if it has some for each part
    output_unit  the same of the output projection's inputs, which are cut by heads
    num_heads, num_kv_heads, intermediate_size  of the whole model
    draft      the same of a target's draft model; None: there is none, or it is whole on every rank
    """

    rank: int
    size: int
    invariant: bool
    unit: int
    output_unit: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    head_dim: int
    draft: "Shard | None" = None

    @property
    def num_parts(self) -> int:
        """Parts of K that this rank sums one by one."""
        return PARTS // self.size if self.invariant else 1

    @property
    def group(self) -> int:
        """Query heads of a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def heads(self) -> tuple[int, int]:
        """The query heads of this rank: the first, and the one behind the last."""
        return span(self.num_heads, self.size, self.rank, head_unit(self.num_heads, self.num_kv_heads))

    @property
    def kv_heads(self) -> tuple[int, int]:
        """The key-value heads that its query heads attend to; several ranks may have the same."""
        first, last = self.heads
        return first // self.group, -(-last // self.group)

    @property
    def inner(self) -> tuple[int, int]:
        """Its columns of the FFN's, or of each expert's, inner width."""
        return span(self.intermediate_size, self.size, self.rank, self.unit)

    def vocabulary(self, vocab_size: int, rank: int | None = None) -> tuple[int, int]:
        """Its rows, or another rank's, of an LM head."""
        return span(vocab_size, self.size, self.rank if rank is None else rank, VOCABULARY_UNIT)


def span(total: int, size: int, rank: int, unit: int = 1) -> tuple[int, int]:
    """The part of an extent that a rank has, see `bounds`."""
    ends = bounds(total, size, unit)
    return ends[rank], ends[rank + 1]


def head_unit(num_heads: int, num_kv_heads: int) -> int:
    """Query heads that stay together: an eighth of all, if these are whole groups or parts of one; else a group.

    Heads of the only group need not stay together.
    """
    if num_heads % PARTS == 0 and num_kv_heads & (num_kv_heads - 1) == 0:
        return num_heads // PARTS
    return 1 if num_kv_heads == 1 else num_heads // num_kv_heads


def rank_configs(config: "ModelConfig", size: int, *, invariant: bool = False) -> tuple["ModelConfig", ...]:
    """The geometry of each rank's part of a target; of one rank that sums K at once, the whole target's, unchanged.

    Raises ConfigError for a target that cannot be cut so.
    """
    if size == 1 and not invariant:
        return (config,)
    _check(config, size, "target", config.vocab_size, invariant)
    return _cut(config, size, invariant)


def rank_drafts(
    targets: Sequence["ModelConfig"], draft: "DraftConfig"
) -> tuple[tuple["ModelConfig", "DraftConfig"], ...]:
    """The parts of a target with those of its draft model, cut for as many ranks. Raises ConfigError as above."""
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
    whole = (config.num_heads, config.num_kv_heads, config.intermediate_size, config.head_dim)
    units = _units(config, invariant)
    return tuple(_part(config, Shard(rank, size, invariant, *units, *whole)) for rank in range(size))


def _part(config: Config, shard: Shard) -> Config:
    first, last = shard.kv_heads
    coded = getattr(config, "coded_kv", None)
    if coded is not None:
        coded = replace(coded, scales=tuple((keys[first:last], values[first:last]) for keys, values in coded.scales))
    own = {} if coded is None else {"coded_kv": coded}
    heads, inner = shard.heads, shard.inner
    return replace(
        config,
        num_heads=heads[1] - heads[0],
        num_kv_heads=last - first,
        intermediate_size=inner[1] - inner[0],
        shard=shard,
        **own,
    )


def _check(config: "ModelConfig | DraftConfig", size: int, owner: str, vocab_size: int, invariant: bool) -> None:
    """Refuse what cannot be cut, with the sizes and the option."""
    heads, kv_heads, (unit, output_unit) = config.num_heads, config.num_kv_heads, _units(config, invariant)
    most = heads // head_unit(heads, kv_heads)
    least = heads // size * config.head_dim if most == PARTS else output_unit
    together = math.lcm(WIDTH, _dense_block(config))
    inner = config.intermediate_size
    problem = None
    if size > most:
        problem = f"is more than {most}, the parts of num_attention_heads {heads} with num_key_value_heads {kv_heads}"
    elif least % together:
        problem = f"cuts inputs of output projections at multiples of {least}, and {together} are held together"
    elif inner % unit or inner < size * unit:
        problem = f"cuts intermediate_size {inner} into parts of multiples of {unit}, which it has not"
    elif vocab_size < PARTS * VOCABULARY_UNIT:
        problem = f"needs {PARTS * VOCABULARY_UNIT} ids in a vocabulary, which has {vocab_size}"
    if problem is not None:
        raise ConfigError(f"the {owner} cannot be cut: {OPTION} {size} {problem}")


def _units(config: "ModelConfig | DraftConfig", invariant: bool) -> tuple[int, int]:
    """Inputs of the layers that are cut, which stay together: of the inner width, and of heads' outputs.

    The inner width stays together in whole steps where parts are summed one by one, if it has some for all of them.
    The latter are a multiple of what formats hold together where so many ranks are allowed, see `_check`.
    """
    mixture: ExpertsConfig | None = getattr(config, "experts", None)
    experts = 1 if mixture is None else FORMATS[mixture.weight_format].block
    dense = _dense_block(config)
    output = config.head_dim * head_unit(config.num_heads, config.num_kv_heads)
    unit = math.lcm(WIDTH, experts, dense)
    whole, inner = math.lcm(unit, STEP), config.intermediate_size
    return whole if invariant and inner % whole == 0 and inner >= PARTS * whole else unit, output


def _dense_block(config: "ModelConfig | DraftConfig") -> int:
    formats: list[MatrixFormat] = [] if config.quantiser is None else [config.quantiser.packed]
    if config.quantisation is not None:
        formats += [rule.stored.packed for rule in config.quantisation.rules]
    return math.lcm(1, *(_together(each) for each in formats))


def _together(weight_format: MatrixFormat) -> int:
    """Numbers of a row that share a scale, 1 where all or none do."""
    specs = weight_format.specs(1, ROW, torch.bfloat16)
    scales = [shape[1] for part, (shape, _) in specs.items() if part.endswith("scales")]
    return max((ROW // count for count in scales if count > 1), default=weight_format.block)
