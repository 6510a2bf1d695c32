"""This module estimates which tiles and stages of a prefill GEMM take least time, without a table. They change no bit.

Times are estimated like those of segments (`time_us`), with corrections from the measured tables of two GPUs: the costs
of each way to sum segments, of tiles of codes, and of rows of x that the L2 does not hold. `python -m bench.plan_times`
compares the choices with the tables.
"""

from dataclasses import dataclass
from typing import Protocol

from lowlat.kernels.gemm.tiles import BF16_TILES

__all__ = ["MEMORY_BYTES_A_US", "STEP_US", "PlanCost", "Tiling", "time_us"]

STEP = 64  # columns
# What times are reckoned with, of an H200. A step, by a tile's rows and a stage's depth
STEP_US = {(64, 1): 0.34, (64, 2): 0.315, (128, 1): 0.44, (128, 2): 0.46, (256, 1): 0.80}
PAIRED = 0.97  # of that, where blocks are paired, which takes START_US to begin
MEMORY_BYTES_A_US = 4_500_000  # of the GPU's memory
SUM_BYTES_A_US = 8_000_000  # of segments' sums, written and read
TILE_ROW_US, ADD_US, START_US = 0.01, 3.0, 1.5  # to end a tile, a row of x; to begin the kernel that adds segments up
# Of plans alone, where segments are given:
LATER_US = 1.0  # more for segments apart: their sums leave the L2 before they are added up
TOTAL_US = 0.2  # a segment, to add its sums to the totals that a thread holds
CODES_OF_FEW = 1.24  # a step of 64 rows of x by 8- or 4-bit weights: decoding them is for few rows
L2_BYTES, BEYOND_L2 = 64_000_000, 1.12  # of x, more than an L2 holds; a step of wide tiles then
NARROW, WIDEST = 64, 256  # rows of a tile


class Tiling(Protocol):
    """Tiles and stages, as `PrefillGemmPlan` has them."""

    @property
    def rows(self) -> int:
        """Rows of x of a tile."""
        ...

    @property
    def depth(self) -> int:
        """K steps of a stage."""
        ...

    @property
    def stages(self) -> int:
        """Stages under way or multiplied."""
        ...

    @property
    def apart(self) -> bool:
        """Whether segments are blocks' own."""
        ...

    @property
    def tile_bytes(self) -> int:
        """Bytes of a step of one tile of weights."""
        ...

    @property
    def cluster(self) -> int:
        """Blocks that share rows of x."""
        ...

    def units(self, rows: int, weight_rows: int, segments: int) -> int:
        """Units that clusters of blocks take one by one."""
        ...


def time_us(
    plan: Tiling,
    rows: int,
    weight_rows: int,
    steps: int,
    segments: tuple[int, int],
    multiprocessors: int,
    memory_bytes_a_us: float,
) -> float:
    """A rough time, to choose by: steps as they were measured, but no faster than the memory."""
    turns, own = _turns(plan, rows, weight_rows, steps, segments, multiprocessors)
    step, start = STEP_US[plan.rows, plan.depth], 0.0
    if plan.cluster > 1:
        step, start = PAIRED * step, START_US
    time = start + turns * (own * step + TILE_ROW_US * plan.rows)
    time = max(time, weight_rows * steps * plan.tile_bytes / (16 * memory_bytes_a_us))
    if plan.apart:
        time += ADD_US + 8 * segments[0] * rows * weight_rows / SUM_BYTES_A_US
    return time


def _turns(
    plan: Tiling, rows: int, weight_rows: int, steps: int, segments: tuple[int, int], multiprocessors: int
) -> tuple[int, int]:
    """Turns of the grid, and steps of each."""
    turns = -(-plan.units(rows, weight_rows, segments[0]) // (multiprocessors // plan.cluster))
    return turns, segments[1] if plan.apart else steps


@dataclass(frozen=True)
class PlanCost:
    """The GEMM whose plans are ranked.

    rows, weight_rows, steps  M, N, steps of K
    segments                  how many, and steps of each but the last
    """

    rows: int
    weight_rows: int
    steps: int
    segments: tuple[int, int]
    multiprocessors: int
    memory_bytes_a_us: float

    def key(self, plan: Tiling) -> tuple[float, int, int]:
        """The key of sorting: time; of those that wait for the memory alike, the widest tile, unpaired."""
        return round(self._time_us(plan), 6), -plan.rows, plan.cluster

    def stages(self, plan: Tiling) -> int:
        """How many of its stages pay. A block that has a whole segment under way from the start leaves no shared
        memory for the next launch's; nor does one of codes, of which stages hold more steps."""
        if plan.rows > NARROW or self.rows > NARROW or not plan.apart:
            return plan.stages
        is_filled = plan.stages * plan.depth < 2 * self.segments[1] <= 2 * plan.stages * plan.depth
        return plan.stages * 3 // 4 if is_filled or _has_codes(plan) else plan.stages

    def _time_us(self, plan: Tiling) -> float:
        gemm = self.rows, self.weight_rows, self.steps, self.segments, self.multiprocessors
        time = time_us(plan, *gemm, self.memory_bytes_a_us)
        turns, own = _turns(plan, *gemm)
        stream = turns * own * STEP_US[plan.rows, plan.depth] * (PAIRED if plan.cluster > 1 else 1.0)
        if plan.rows == NARROW and _has_codes(plan):
            time += (CODES_OF_FEW - 1) * stream
        if plan.rows == WIDEST and self.rows * self.steps * 2 * STEP > L2_BYTES:
            time += (BEYOND_L2 - 1) * stream
        if plan.apart:
            sums = 8 * self.segments[0] * self.rows * self.weight_rows / SUM_BYTES_A_US
            return time + LATER_US + sums * (MEMORY_BYTES_A_US / self.memory_bytes_a_us - 1)
        return time + TOTAL_US * self.segments[0] * turns if self.segments[0] > 1 else time


def _has_codes(plan: Tiling) -> bool:
    return plan.tile_bytes < BF16_TILES.step_bytes
