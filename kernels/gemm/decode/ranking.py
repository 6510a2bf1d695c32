"""This module ranks plans of a decode GEMM by expected time, for GPUs without a tuning table.

It uses the number of SMs, bytes, turns of the grid and K steps. All plans give the same bits. `python -m
bench.plan_times` compares the rules with the times in tables: it shows a rule that a GPU contradicts.
"""

from dataclasses import dataclass

from lowlat.kernels.gemm.tiles import BF16_TILES, TileFormat
from lowlat.kernels.toolchain.kernel import Gpu

__all__ = ["WARPS", "GemmSizes"]

WARPS = 8  # that multiply
ROW_BYTES = 128  # a row by 64 columns
ROWS_COST = 0.0132  # of rows next to weights, for each GB/s of the memory that an SM has for itself
# A warp's step costs instructions next to its weights, as many bytes' time, of few rows and of more: of bf16 they are
# hidden.
STEP_COST_OF_FEW, STEP_COST = 1100, 220
FULL_TURNS, HALF_FULL = 0.9, 0.5  # busy SMs, of all: below the one a grid is uneven, below the other few SMs work
FEW_TURNS = 3  # of a grid that is short: how its turns overlap with other launches tells more than its stream
SHORT_STEPS = 2  # of a warp in a tile: such a tile costs more to end than to read
SHORT_STREAM = 24  # steps of a warp in all its tiles: its first steps and its last are most of them
DEEP_STEPS = 12  # of a warp in a tile: as many as it has stages of one tile
FEW_STEPS, SOME_STEPS = 4, 8  # likewise, of a third and of two thirds of these stages
STAGES_OF_FOUR = 3  # that make four steps at once worth their memory
LEAST_STAGES = 2  # of a warp whose block has fewer steps yet
MOST_UNEVEN = 4  # turns of four tiles at once: of more, the last one tells little
ALONE = 2.0  # times as dear: four tiles of 64 rows leave room for one stage, which is copied and multiplied by turns


@dataclass(frozen=True)
class GemmSizes:
    """The sizes that the ranking of cuts depends on.

    row_tiles, columns  as `DecodeGemmPlan` has them
    width      rows of the weight, N
    own_steps  K steps of a warp in a tile; 0: not known
    holds      blocks norm their rows and hold them
    all_reduces  sums go to other ranks
    """

    row_tiles: int
    columns: int
    width: int
    own_steps: int
    holds: bool
    all_reduces: bool
    weights: TileFormat
    gpu: Gpu

    def groups(self, weight_tiles: int) -> int:
        """Groups of weight tiles, which the grid walks."""
        return -(-self.width // (16 * weight_tiles))

    def turns(self, weight_tiles: int = 1) -> float:
        """Groups of each SM, were they spread evenly."""
        return self.groups(weight_tiles) / self.gpu.num_multiprocessors

    def busy(self, weight_tiles: int = 1) -> float:
        """The share of SMs that have a group in the mean turn."""
        groups, sms = self.groups(weight_tiles), self.gpu.num_multiprocessors
        return groups / (-(-groups // sms) * sms)

    @property
    def is_few(self) -> bool:
        """Whether rows are one tile of bf16 weights' product."""
        return self.row_tiles == 1 and self.weights == BF16_TILES and self.own_steps > 0

    @property
    def has_short_stream(self) -> bool:
        """Whether a warp's steps are so few that what starts and ends them tells."""
        return 0 < self.own_steps * self.turns() <= SHORT_STREAM

    def ranked_tiles(self) -> list[int]:
        """Weight tiles at once, the likeliest to be fastest first."""
        counts: tuple[int, ...] = (1, 2) if self.row_tiles == 1 or self.weights.groups else (1, 2, 4)
        if self.weights.groups and self.row_tiles == 8:
            counts = (1,)  # a group's own sums take registers
        ranked = sorted(counts, key=lambda tiles: (self._cost(tiles), tiles))
        first = self._tiles_of_few() if self.is_few else None
        return ranked if first is None else [first, *(tiles for tiles in ranked if tiles != first)]

    def _tiles_of_few(self) -> int | None:
        """Where the cost says too little: tiles that are read at once are dear to wait for, and cheap to end.

        Short tiles go in pairs, ended once for two. Pairs of an uneven grid leave SMs idle that single tiles, of which
        all stages are under way from the start, keep busy.
        """
        if self.own_steps <= SHORT_STEPS and self.turns() * 3 >= 2:
            return 2
        if self.all_reduces and self.own_steps > FEW_STEPS:
            return 1
        is_tie = self.busy(1) == self.busy(2)
        return 1 if not self.holds and is_tie and self.busy() < FULL_TURNS and self.own_steps > DEEP_STEPS else None

    def stages_of(self, weight_tiles: int, stages: int) -> int:
        """How many of the stages that fit pay.

        Stages beyond what a short, uneven grid needs keep blocks of the next launch out of shared memory that its own
        idle SMs have; so do those of sums that wait for other ranks.
        """
        if not self.is_few:
            return stages
        if self.all_reduces:
            return stages * 3 // 4 if self.own_steps <= SOME_STEPS else stages
        is_uneven = HALF_FULL <= self.busy() < FULL_TURNS and self.turns() <= FEW_TURNS
        if weight_tiles > 1 or not is_uneven or not SHORT_STEPS < self.own_steps <= SOME_STEPS:
            return stages
        return stages // 2 if self.columns == 1 else stages * 3 // 4

    def most_paying(self, weight_tiles: int, span: int, density: int) -> int | None:
        """The stages that a warp of few rows fills with all the steps of its block, where nearly every SM has a block
        with one group of tiles; else None.

        More would stay empty, and keep blocks of the launches before and after out of the SMs' shared memory.
        """
        groups, blocks = self.groups(weight_tiles), density * self.gpu.num_multiprocessors
        if self.row_tiles > 1 or not self.own_steps or not FULL_TURNS * blocks <= groups <= blocks:
            return None
        return max(LEAST_STAGES, -(-self.own_steps // span))

    def spans(self, density: int) -> tuple[int, ...]:
        """K steps that a warp takes at once, the likeliest to be fastest first: four of one row's four-bit weights,
        whose turns of the loop are dearest next to their bytes, where several stages of four fit; four where the stream
        is short, of one row, or of FP8 where a block is alone on its SM. FP8 by block has no space for enough stages of
        four."""
        is_eight_bits = self.weights.code_bits == 8
        is_whole = not (is_eight_bits and self.weights.groups)
        is_quick = self.has_short_stream and is_whole and (self.columns == 1 or (density == 1 and is_eight_bits))
        stages_bytes = STAGES_OF_FOUR * WARPS * 4 * (self.weights.shared_bytes + ROW_BYTES)
        is_dear = self.columns == 1 and self.weights.code_bits == 4 and stages_bytes <= self.gpu.most_bytes(density)
        return (4, 2, 1) if is_quick or is_dear else (2, 4, 1)

    def _cost(self, weight_tiles: int) -> float:
        """Time next to a stream of the weights alone: rows that are read again for every group of tiles cost a part of
        what weights do, by what the L2 gives an SM, a step costs its own, and SMs without a group in the
        last turn are lost. Four tiles at once leave one area of sums, so that nothing hides a turn that is not full.
        """
        rows_bytes = 0 if self.holds else self.row_tiles * self.columns * ROW_BYTES
        step_cost = 0 if self.weights == BF16_TILES else STEP_COST_OF_FEW if self.row_tiles == 1 else STEP_COST
        rows_cost = ROWS_COST * self.gpu.read_gb_s / self.gpu.num_multiprocessors
        busy, weight_bytes = self.busy(weight_tiles), weight_tiles * self.weights.shared_bytes
        cost = (1 + (rows_cost * rows_bytes + step_cost) / weight_bytes) / busy
        if weight_tiles == 4 and self.row_tiles == 8:
            return cost * ALONE
        return cost / busy if weight_tiles == 4 and self.turns(4) <= MOST_UNEVEN else cost
