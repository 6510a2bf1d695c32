"""The part of a target that one of several ranks runs: its geometry, and which pieces of weights it has.

Attention is cut by heads, FFNs and experts by their inner width, the LM head by the vocabulary. Embedding, norms and
routers are whole on every rank, and so is the draft model. It reads no weight.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lowlat.errors import ConfigError
from lowlat.kernels.formats import FORMATS, MatrixFormat
from lowlat.kernels.reference.exchange.cuts import bounds

if TYPE_CHECKING:
    from lowlat.models.geometry import ModelConfig

__all__ = ["PARTS", "VOCABULARY_UNIT", "Shard", "rank_configs", "span"]

PARTS = 8  # that K is summed in with tp_invariant, on however many ranks
WIDTH = 8  # numbers of a row that kernels read at once: widths are multiples
VOCABULARY_UNIT = 8  # ids that stay together
ROW = 1 << 12  # a width that every block divides
OPTION = "tensor_parallel_size"


@dataclass(frozen=True)
class Shard:
    """One rank's place among all, and the sizes of the whole target of which its geometry has a part.

    rank       from 0
    size       ranks: 1, 2, 4 or 8
    invariant  whether what a rank sums over its part of K is cut as for PARTS ranks: bits are then those of any size
    unit       inputs of a cut layer that stay together: a format's block, at least
    num_heads, num_kv_heads, intermediate_size  of the whole target
    """

    rank: int
    size: int
    invariant: bool
    unit: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int

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
        return span(self.num_heads, self.size, self.rank)

    @property
    def kv_heads(self) -> tuple[int, int]:
        """Its key-value heads; where there are fewer than ranks, several ranks have the same."""
        if self.num_kv_heads >= self.size:
            return span(self.num_kv_heads, self.size, self.rank)
        own = self.rank * self.num_kv_heads // self.size
        return own, own + 1

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


def rank_configs(config: "ModelConfig", size: int, *, invariant: bool = False) -> tuple["ModelConfig", ...]:
    """The geometry of each rank's part; of one rank that sums K at once, the whole target's, unchanged.

    Raises ConfigError for a target that cannot be cut so.
    """
    if size == 1 and not invariant:
        return (config,)
    _check(config, size)
    unit = max(WIDTH, _block(config))
    found = []
    for rank in range(size):
        whole = (config.num_heads, config.num_kv_heads, config.intermediate_size)
        found.append(_part(config, Shard(rank, size, invariant, unit, *whole)))
    return tuple(found)


def _part(config: "ModelConfig", shard: Shard) -> "ModelConfig":
    first, last = shard.kv_heads
    coded = config.coded_kv
    if coded is not None:
        coded = replace(coded, scales=tuple((keys[first:last], values[first:last]) for keys, values in coded.scales))
    heads, inner = shard.heads, shard.inner
    return replace(
        config,
        num_heads=heads[1] - heads[0],
        num_kv_heads=last - first,
        intermediate_size=inner[1] - inner[0],
        coded_kv=coded,
        shard=shard,
    )


def _check(config: "ModelConfig", size: int) -> None:
    """Refuse what cannot be cut, with the sizes and the option."""
    heads, kv_heads, unit = config.num_heads, config.num_kv_heads, max(WIDTH, _block(config))
    if heads % size:
        raise ConfigError(f"{OPTION} {size} does not divide the target's num_attention_heads {heads}")
    if max(kv_heads, size) % min(kv_heads, size):
        raise ConfigError(f"{OPTION} {size} neither divides the target's num_key_value_heads {kv_heads}, "
                          f"nor is it a multiple")  # fmt: skip
    own = heads // size * config.head_dim
    if config.quantisation is not None or config.quantiser is not None:
        block = _dense_block(config)
        if own % block:
            raise ConfigError(f"{OPTION} {size} leaves {own} of the inputs of the target's output projections to a "
                              f"rank, and their format holds {block} together")  # fmt: skip
    if config.intermediate_size % unit or config.intermediate_size < size * unit:
        raise ConfigError(f"{OPTION} {size} cuts the target's intermediate_size {config.intermediate_size} into "
                          f"parts of multiples of {unit}, which it has not")  # fmt: skip
    if config.vocab_size < PARTS * VOCABULARY_UNIT:
        raise ConfigError(f"{OPTION} {size} needs a vocabulary of {PARTS * VOCABULARY_UNIT} ids, and the target has "
                          f"{config.vocab_size}")  # fmt: skip


def _block(config: "ModelConfig") -> int:
    """Inputs of a layer that its format holds together, the most of all formats."""
    experts = 1 if config.experts is None else FORMATS[config.experts.weight_format].block
    return math.lcm(experts, _dense_block(config))


def _dense_block(config: "ModelConfig") -> int:
    formats: list[MatrixFormat] = [] if config.quantiser is None else [config.quantiser.packed]
    if config.quantisation is not None:
        formats += [rule.stored.packed for rule in config.quantisation.rules]
    return math.lcm(1, *(_together(each) for each in formats))


def _together(weight_format: MatrixFormat) -> int:
    """Numbers of a row that share a scale, 1 where all or none do."""
    specs = weight_format.specs(1, ROW, torch.bfloat16)
    scales = [shape[1] for part, (shape, _) in specs.items() if part.endswith("scales")]
    return max((ROW // count for count in scales if count > 1), default=weight_format.block)
