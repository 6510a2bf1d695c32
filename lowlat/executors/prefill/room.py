"""How much memory a prefill program wants on a card beside its scratch, and how it is shared out."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lowlat.executors.lowering.weight_layouts import EXPERT_PRODUCTS
from lowlat.kernels.attention.gathered_rows import gathered_rows
from lowlat.kernels.gemm.prefill.plan import MOST_ROWS, STEP, segments_of
from lowlat.kernels.moe.prefill.pair_tiles import TILE_WORDS, most_tiles, tile_pairs_of
from lowlat.program.program import Op, Program, Stage

__all__ = ["AttentionRoom", "ExpertsRoom", "ProductsRoom", "Room", "room_of"]

ALIGNMENT = 256
LENGTHS_BYTES = 16  # [2, 2] int32


@dataclass(frozen=True)
class ExpertsRoom:
    """What one layer's experts need at a time.

    num_pairs   of a row and a rank: their list by expert, int32
    num_tiles   of pairs: TILE_WORDS int32 each
    num_values  what each of a row's experts adds to it, float32
    num_logits  of each row and expert, float32
    """

    num_pairs: int = 0
    num_tiles: int = 0
    num_values: int = 0
    num_logits: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self._sizes())

    def cut(self, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The parts [pairs] and [tiles, TILE_WORDS] int32, [values] and [logits] float32, of uint8 of `num_bytes`."""
        parts = room[: self.num_bytes].split(self._sizes())
        pairs, tiles, values, logits = (part[: 4 * count] for part, count in zip(parts, self._counts(), strict=True))
        listed = tiles.view(torch.int32).view(self.num_tiles, TILE_WORDS)
        return pairs.view(torch.int32), listed, values.view(torch.float32), logits.view(torch.float32)

    def _counts(self) -> tuple[int, ...]:
        return self.num_pairs, TILE_WORDS * self.num_tiles, self.num_values, self.num_logits

    def _sizes(self) -> list[int]:
        return [_aligned(4 * count) for count in self._counts()]


@dataclass(frozen=True)
class AttentionRoom:
    """What one layer's attention needs at a time.

    keys_bytes  of the keys that a chunk sees; as many of values, and the lengths beside them
    """

    keys_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self._sizes())

    def cut(self, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys uint8, values uint8 and lengths [2, 2] int32 of uint8 memory of `num_bytes`; empty where none are."""
        keys, values, lengths = room[: self.num_bytes].split(self._sizes())
        words = lengths[:LENGTHS_BYTES].view(torch.int32).view(-1, 2)
        return keys[: self.keys_bytes], values[: self.keys_bytes], words

    def _sizes(self) -> list[int]:
        each = _aligned(self.keys_bytes)
        return [each, each, _aligned(LENGTHS_BYTES) if each else 0]


@dataclass(frozen=True)
class ProductsRoom:
    """What one product needs, where it is a wide one.

    num_arranged  bf16: rows as the product reads them
    num_partials  float32: sums of segments
    """

    num_arranged: int = 0
    num_partials: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of both parts."""
        return _aligned(2 * self.num_arranged) + _aligned(4 * self.num_partials)

    def cut(self, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Arranged rows bf16 and partial sums float32, both flat, of uint8 memory of `num_bytes`."""
        first = _aligned(2 * self.num_arranged)
        arranged, partials = room[: 2 * self.num_arranged], room[first : first + 4 * self.num_partials]
        return arranged.view(torch.bfloat16), partials.view(torch.float32)


@dataclass(frozen=True)
class Room:
    """What the layers of a prefill program share, one at a time."""

    experts: ExpertsRoom = field(default_factory=ExpertsRoom)
    attention: AttentionRoom = field(default_factory=AttentionRoom)
    products: ProductsRoom = field(default_factory=ProductsRoom)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self._sizes())

    def cut(self, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The experts' part, attention's and the products' of uint8 memory of `num_bytes`."""
        experts, attention, products = room[: self.num_bytes].split(self._sizes())
        return experts, attention, products

    def _sizes(self) -> list[int]:
        return [self.experts.num_bytes, self.attention.num_bytes, self.products.num_bytes]


def room_of(program: Program, shape_of: Callable[[str], torch.Size]) -> Room:
    """The room that a prefill program wants on a card; none for a program that is no prefill.

    shape_of  a weight's, by its canonical name; asked of matrices of products [N, K], and biases of experts' [E, N]
    """
    pairs, tiles, values, logits, keys, arranged, partials = [0], [0], [0], [0], [0], [0], [0]
    for op in program.ops:
        if op.kind == "linear" and op.stage is Stage.PREFILL:
            num_rows, (height, width) = program.buffers[op.writes["out"]].shape[0], shape_of(op.weights["weight"])
            num_rows, segments = min(num_rows, MOST_ROWS), segments_of(height, width)[0]
            arranged.append(-(-width // STEP) * STEP * num_rows)
            partials.append(segments * num_rows * height if segments > 1 else 0)
        if op.kind in EXPERT_PRODUCTS and op.stage is Stage.PREFILL:
            rows, ranks = program.buffers[op.reads["expert_ids"]].shape
            num_experts, width = shape_of(op.weights["bias"])
            pairs.append(rows * ranks)
            logits.append(rows * num_experts)
            tiles.append(most_tiles(rows * ranks, num_experts, tile_pairs_of(rows * ranks, num_experts)))
            if op.kind == "experts_down":
                values.append(rows * ranks * width)
        if op.kind == "prefill_attention":
            keys.append(_keys_bytes(program, op))
    experts = ExpertsRoom(max(pairs), max(tiles), max(values), max(logits))
    return Room(experts, AttentionRoom(max(keys)), ProductsRoom(max(arranged), max(partials)))


def _keys_bytes(program: Program, op: Op) -> int:
    """Bytes of the keys that a chunk of the longest context takes in one layer."""
    cache = program.buffers[op.reads["k_cache"]]
    size, longest = program.buffers[op.reads["q"]].shape[0], program.buffers["tokens"].shape[1]
    window = op.params.get("window")
    num_rows = gathered_rows(size, longest, window if isinstance(window, int) else None)
    return num_rows * cache.shape[1] * cache.shape[3] * cache.dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
