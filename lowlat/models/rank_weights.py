"""Canonical weights of a target cut for ranks, as they are streamed: each tensor is read once, and each rank gets its
own part of it.

It knows names and extents, and neither files nor devices. A name that is none of a target's is whole on every rank.
"""

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowlat.checkpoint.source import Named
from lowlat.errors import ConfigError
from lowlat.models.geometry import ModelConfig
from lowlat.models.shard import Shard

__all__ = ["RankCuts", "cut_stream", "rank_weights"]

LAYER = re.compile(r"layers\.\d+\.(qkv|o|gate_up|down|experts\.gate_up|experts\.down)\.(\w+)|layers\.\d+\.(sinks)")
LM_HEAD = "lm_head."
BLOCKS = "blocks"  # MXFP4's, whose numbers take two dimensions
Span = tuple[int, int]


@dataclass(frozen=True)
class RankCuts:
    """The parts of canonical weights that a rank has.

    config  the rank's geometry
    """

    config: ModelConfig

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """A weight's part, contiguous; the tensor itself where the rank has all of it, None where it has nothing.

        Raises ConfigError where numbers that are held together would be torn apart.
        """
        shard = self.config.shard
        if shard is None or shard.size == 1:
            return tensor
        if name.startswith(LM_HEAD):
            return _rows(tensor, [shard.vocabulary(tensor.shape[0])], 0)
        match = LAYER.fullmatch(name)
        if match is None:
            return tensor
        layer, part = match[1] or match[3], match[2]
        if layer == "sinks":
            return _rows(tensor, [shard.heads], 0)
        if layer == "qkv":
            return _rows(tensor, self._heads(shard), 0)
        of_experts = layer.startswith("experts.")
        if layer.endswith("gate_up"):
            (start, stop), whole = shard.inner, shard.intermediate_size
            return _rows(tensor, [(start, stop), (whole + start, whole + stop)], int(of_experts))
        if part == "bias":
            return None if shard.rank else tensor
        size = self.config.head_dim
        is_output = layer == "o"
        span = (shard.heads[0] * size, shard.heads[1] * size) if is_output else shard.inner
        depth = shard.num_heads * size if is_output else shard.intermediate_size
        return _columns(name, tensor, span, depth, 2 if part == BLOCKS else 1)

    def _heads(self, shard: Shard) -> list[Span]:
        """The rows of queries, keys and values among those of all heads."""
        size = self.config.head_dim
        keys, values = shard.num_heads, shard.num_heads + shard.num_kv_heads
        spans = (shard.heads, *((first + shard.kv_heads[0], first + shard.kv_heads[1]) for first in (keys, values)))
        return [(start * size, stop * size) for start, stop in spans]


def _rows(tensor: torch.Tensor, spans: Sequence[Span], axis: int) -> torch.Tensor:
    return torch.cat([tensor.narrow(axis, start, stop - start) for start, stop in spans], axis)


def _columns(name: str, tensor: torch.Tensor, span: Span, depth: int, behind: int) -> torch.Tensor:
    """Columns of K of a part of a matrix.

    depth   K, of which an entry of the part holds one number or several; one entry of all: the rank has it, too
    behind  the dimension of K, counted from the last
    """
    count = tensor.shape[-behind]
    if count == 1:
        return tensor
    held = 1 << (-(-depth // count) - 1).bit_length()  # what formats hold together is a power of two
    if span[0] % held or (span[1] % held and span[1] != depth):
        raise ConfigError(f"{name} holds {held} numbers of a row together, and tensor_parallel_size would cut it at "
                          f"{span[0]} and {span[1]} of {depth}")  # fmt: skip
    first, last = span[0] // held, -(-span[1] // held)
    return tensor.narrow(-behind, first, last - first).contiguous()


def cut_stream(
    stream: Iterable[Named], configs: Sequence[ModelConfig]
) -> Generator[tuple[tuple[str, ...], tuple[torch.Tensor | None, ...]], None, None]:
    """Every tensor of a stream once, with each rank's part, None for a rank that has nothing of it.

    Names of one tensor stay together where they are cut alike. Parts that are the whole tensor are the stream's own,
    others have memory of their own. Raises ConfigError as `RankCuts.cut` does.
    """
    cuts = [RankCuts(config) for config in configs]
    for names, tensor in stream:
        head = tuple(name for name in names if name.startswith(LM_HEAD))
        others = tuple(name for name in names if name not in head)
        for together in (others, head) if len(configs) > 1 else (names,):
            if together:
                yield together, tuple(each.cut(together[0], tensor) for each in cuts)


def rank_weights(weights: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """A rank's part of weights in memory, or of tensors without content; names of one whole tensor stay one."""
    cuts = RankCuts(config)
    made = {name: cuts.cut(name, tensor) for name, tensor in weights.items()}
    return {name: tensor for name, tensor in made.items() if tensor is not None}
