"""This module cuts canonical weights for ranks as they are streamed: each rank gets its part of each tensor.

Names and shapes decide the cuts, independent of files and devices. A weight that no rule names is whole on every rank.
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
PROJECTIONS = {  # letters of the heads whose rows a weight has, in order; z, b and a go by a delta net's value heads
    **{letters: letters for letters in ("qkv", "qk", "q", "kv", "k")},
    "gate": "q",
    "delta_in": "qkvz",
    "delta_conv": "qkv",
    "delta_ba": "ba",
    "delta_a": "a",
    "delta_dt": "a",
}
OUTPUTS = ("o", "delta_out")  # projections whose inputs are heads
CONTEXT = "context."  # key and value projections of all layers of a draft model, one layer after another
BLOCKS = "blocks"  # of MXFP4, whose numbers take two dimensions
Span = tuple[int, int]


@dataclass(frozen=True)
class RankCuts:
    """Cuts canonical weights to the parts of one rank.

    config  the rank's geometry, with the draft model's cuts in `shard.draft`
    """

    config: ModelConfig

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Cut a weight to the rank's part, contiguous; the tensor itself if the rank has all of it, None if nothing.

        Raises ConfigError if the cut would split numbers that the format stores together.
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
    """The rank's rows of a fused projection: for each layer and letter in this order, its heads' rows."""
    spans, first = [], 0
    for own, letter in made:
        start, stop = own.heads if letter == "q" else own.kv_heads
        spans.append((first + start * own.head_dim, first + stop * own.head_dim))
        first += (own.num_heads if letter == "q" else own.num_kv_heads) * own.head_dim
    return spans


def _delta_rows(made: Iterable[tuple[LayerShard, str]]) -> list[Span]:
    """The same for a delta net: q and k have key heads, v and the gate z value heads, b and a one row a value head."""
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
    """Cut the columns of K of a matrix part.

    depth     K. An entry of the part stands for one number or several; an entry for all of K goes to every rank
    from_end  the dimension of K, counted from the last
    """
    count = tensor.shape[-from_end]
    if count == 1:
        return tensor
    held = 1 << (-(-depth // count) - 1).bit_length()  # formats store a power of two numbers together
    if span[0] % held or (span[1] % held and span[1] != depth):
        raise ConfigError(f"{name} holds {held} numbers of a row together, and tensor_parallel_size would cut it at "
                          f"{span[0]} and {span[1]} of {depth}")  # fmt: skip
    first, last = span[0] // held, -(-span[1] // held)
    return tensor.narrow(-from_end, first, last - first).contiguous()


def cut_stream(
    stream: Iterable[Named], configs: Sequence[ModelConfig]
) -> Generator[tuple[tuple[str, ...], tuple[torch.Tensor | None, ...]], None, None]:
    """Yield every tensor of a stream once, as its names and each rank's part; None for a rank that has none of it.

    Names of one tensor stay together if they are cut alike. A part that is the whole tensor is the stream's tensor;
    other parts have their own memory. Raises ConfigError as `RankCuts.cut` does.
    """
    cuts = [RankCuts(config) for config in configs]
    for names, tensor in stream:
        head = tuple(name for name in names if name.startswith(LM_HEADS))
        others = tuple(name for name in names if name not in head)
        for together in (others, head) if len(configs) > 1 else (names,):
            if together:
                yield together, tuple(each.cut(together[0], tensor) for each in cuts)


def rank_weights(weights: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Cut weights in memory, or tensors without content, to a rank's part; names of one whole tensor still share it."""
    cuts = RankCuts(config)
    made = {name: cuts.cut(name, tensor) for name, tensor in weights.items()}
    return {name: tensor for name, tensor in made.items() if tensor is not None}
