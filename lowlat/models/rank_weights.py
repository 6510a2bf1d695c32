"""This module cuts canonical weights for ranks as they are streamed: each rank gets its own part of each tensor.

It knows names and extents, and neither files nor devices. What no rule names is whole on every rank.
"""

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowlat.checkpoint.source import Named
from lowlat.errors import ConfigError
from lowlat.models.geometry import ModelConfig
from lowlat.models.shard import LayerShard

__all__ = ["RankCuts", "cut_stream", "rank_weights"]

LAYER = re.compile(
    r"(?P<draft>draft_model\.)?(layers\.(?P<number>\d+)\.)?"
    r"(?P<layer>qkv|qk|q|kv|k|context\.kv?|o|gate|gate_up|down|(experts|shared)\.(gate_up|down)|lm_head|sinks"
    r"|delta_(in|ba|conv|a|dt|out))(\.(?P<part>\w+))?"
)
LM_HEADS = ("lm_head.", "draft_model.lm_head.")  # the target's and the draft model's
PROJECTIONS = {  # letters of the heads whose rows a weight has, in order; z, b and a: as values' of a delta net
    **{letters: letters for letters in ("qkv", "qk", "q", "kv", "k")},
    "gate": "q",
    "delta_in": "qkvz",
    "delta_conv": "qkv",
    "delta_ba": "ba",
    "delta_a": "a",
    "delta_dt": "a",
}
OUTPUTS = ("o", "delta_out")  # projections that read heads
CONTEXT = "context."  # projections of keys, and of values, of a draft model's layers, one layer's after the other's
BLOCKS = "blocks"  # MXFP4's, whose numbers take two dimensions
Span = tuple[int, int]


@dataclass(frozen=True)
class RankCuts:
    """The parts of canonical weights that a rank has.

    config  the rank's geometry, with the draft model's cuts in `shard.draft`
    """

    config: ModelConfig

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """A weight's part, contiguous; the tensor itself where the rank has all of it, None where it has nothing.

        Raises ConfigError where numbers that are held together would be torn apart.
        """
        match = LAYER.fullmatch(name)
        shard = self.config.shard
        if match is not None and shard is not None and match["draft"]:
            shard = shard.draft
        if match is None or shard is None or shard.size == 1:
            return tensor
        layer, part = match["layer"], match["part"]
        if layer == "lm_head":
            return _rows(tensor, [shard.vocabulary(tensor.shape[0])], 0)
        if layer.startswith(CONTEXT):
            letters = layer.removeprefix(CONTEXT)
            return _rows(tensor, _head_rows([(own, letter) for own in shard.layers for letter in letters]), 0)
        own = shard.layers[int(match["number"] or 0)]
        if layer == "sinks":
            return _rows(tensor, [own.heads], 0)
        if layer in PROJECTIONS:
            rows = _delta_rows if layer.startswith("delta") else _head_rows
            return _rows(tensor, rows([(own, letter) for letter in PROJECTIONS[layer]]), 0)
        is_shared = own.shared_size > 0 and not layer.startswith("experts.")
        if layer.endswith("gate_up"):
            (start, stop), whole = (own.shared_inner, own.shared_size) if is_shared else (own.inner, own.inner_size)
            return _rows(tensor, [(start, stop), (whole + start, whole + stop)], int(layer.startswith("experts.")))
        if part == "bias":
            return None if shard.rank else tensor
        size = own.head_dim
        span, depth = own.inner, own.inner_size
        if layer in OUTPUTS:
            span, depth = (own.heads[0] * size, own.heads[1] * size), own.num_heads * size
        elif is_shared:
            span, depth = own.shared_inner, own.shared_size
        return _columns(name, tensor, span, depth, 2 if part == BLOCKS else 1)


def _head_rows(made: Iterable[tuple[LayerShard, str]]) -> list[Span]:
    """The rows of queries, keys and values that ranks have, of a product of layers' heads in this order."""
    spans, first = [], 0
    for own, letter in made:
        start, stop = own.heads if letter == "q" else own.kv_heads
        spans.append((first + start * own.head_dim, first + stop * own.head_dim))
        first += (own.num_heads if letter == "q" else own.num_kv_heads) * own.head_dim
    return spans


def _delta_rows(made: Iterable[tuple[LayerShard, str]]) -> list[Span]:
    """The same of a delta net: queries and keys by key heads, values and gates z by value heads, b and a one a head."""
    spans, first = [], 0
    for own, letter in made:
        is_key = letter in "qk"
        start, stop = own.kv_heads if is_key else own.heads
        size = own.key_dim if is_key else own.head_dim if letter in "vz" else 1
        spans.append((first + start * size, first + stop * size))
        first += (own.num_kv_heads if is_key else own.num_heads) * size
    return spans


def _rows(tensor: torch.Tensor, spans: Sequence[Span], axis: int) -> torch.Tensor:
    return torch.cat([tensor.narrow(axis, start, stop - start) for start, stop in spans], axis)


def _columns(name: str, tensor: torch.Tensor, span: Span, depth: int, from_end: int) -> torch.Tensor:
    """Columns of K of a part of a matrix.

    depth     K, of which an entry of the part holds one number or several; one entry of all: the rank has it, too
    from_end  the dimension of K, counted from the last
    """
    count = tensor.shape[-from_end]
    if count == 1:
        return tensor
    held = 1 << (-(-depth // count) - 1).bit_length()  # what formats hold together is a power of two
    if span[0] % held or (span[1] % held and span[1] != depth):
        raise ConfigError(f"{name} holds {held} numbers of a row together, and tensor_parallel_size would cut it at "
                          f"{span[0]} and {span[1]} of {depth}")  # fmt: skip
    first, last = span[0] // held, -(-span[1] // held)
    return tensor.narrow(-from_end, first, last - first).contiguous()


def cut_stream(
    stream: Iterable[Named], configs: Sequence[ModelConfig]
) -> Generator[tuple[tuple[str, ...], tuple[torch.Tensor | None, ...]], None, None]:
    """Every tensor of a stream once, with each rank's part, None for a rank that has nothing of it.

    Names of one tensor stay together where they are cut alike. Parts that are the whole tensor are the stream's own,
    others have memory of their own. Raises ConfigError as `RankCuts.cut` does.
    """
    cuts = [RankCuts(config) for config in configs]
    for names, tensor in stream:
        head = tuple(name for name in names if name.startswith(LM_HEADS))
        others = tuple(name for name in names if name not in head)
        for together in (others, head) if len(configs) > 1 else (names,):
            if together:
                yield together, tuple(each.cut(together[0], tensor) for each in cuts)


def rank_weights(weights: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """A rank's part of weights in memory, or of tensors without content; names of one whole tensor stay one."""
    cuts = RankCuts(config)
    made = {name: cuts.cut(name, tensor) for name, tensor in weights.items()}
    return {name: tensor for name, tensor in made.items() if tensor is not None}
