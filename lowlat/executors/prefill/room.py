"""How much memory a prefill program's experts want beside its scratch, and how it is shared out. It knows no kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowlat.executors.orders import EXPERT_PRODUCTS
from lowlat.kernels.pair_tiles import TILE_WORDS, most_tiles, tile_pairs_of
from lowlat.program import Program, Stage

__all__ = ["ExpertsRoom", "room_of"]

ALIGNMENT = 256


@dataclass(frozen=True)
class ExpertsRoom:
    """What one layer's experts need at a time.

    num_pairs   of a row and a rank: their list by expert, int32
    num_tiles   of pairs: TILE_WORDS int32 each
    num_values  what each of a row's experts adds to it, float32
    """

    num_pairs: int = 0
    num_tiles: int = 0
    num_values: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self._sizes())

    def cut(self, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The parts [pairs] int32, [tiles, TILE_WORDS] int32 and [values] float32 of uint8 memory of `num_bytes`."""
        pairs, tiles, values = room[: self.num_bytes].split(self._sizes())
        ends = 4 * self.num_pairs, 4 * TILE_WORDS * self.num_tiles, 4 * self.num_values
        order, listed = pairs[: ends[0]].view(torch.int32), tiles[: ends[1]].view(torch.int32)
        return order, listed.view(self.num_tiles, TILE_WORDS), values[: ends[2]].view(torch.float32)

    def _sizes(self) -> list[int]:
        sizes = 4 * self.num_pairs, 4 * TILE_WORDS * self.num_tiles, 4 * self.num_values
        return [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]


def room_of(program: Program, weight: Callable[[str], torch.Tensor]) -> ExpertsRoom:
    """The room that a prefill program wants on a card; none for a program without experts, or that is no prefill.

    weight  a weight by its canonical name; only the biases of experts' products are asked for, [E, N]
    """
    pairs, tiles, values = [0], [0], [0]
    for op in program.ops:
        if op.kind in EXPERT_PRODUCTS and op.stage is Stage.PREFILL:
            rows, ranks = program.buffers[op.reads["expert_ids"]].shape
            num_experts, width = weight(op.weights["bias"]).shape
            pairs.append(rows * ranks)
            tiles.append(most_tiles(rows * ranks, num_experts, tile_pairs_of(rows * ranks, num_experts)))
            if op.kind == "experts_down":
                values.append(rows * ranks * width)
    return ExpertsRoom(max(pairs), max(tiles), max(values))
