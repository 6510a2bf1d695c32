"""How a wide product is cut: segments of K, which decide its bits, and tiles, stages and blocks, which do not.

A block multiplies 128 or 256 weight rows by a tile of x's rows, step by step. Of L2 to multiprocessors it moves what
every block reads: weights once for each tile of x, x once for each tile of weights. Where a product has too few tiles
to keep a card busy, its segments are blocks' own, and their sums are added afterwards. It knows no kernel.
"""

from dataclasses import dataclass
from functools import cache

from lowlat.errors import ShapeError
from lowlat.kernels.kernel import Card
from lowlat.kernels.ptx_hopper import GROUP_ROWS

__all__ = [
    "CONSUMERS",
    "PRODUCERS",
    "STEP",
    "STEP_ROW_BYTES",
    "WidePlan",
    "has_wide",
    "partials_shape",
    "plan_wide",
    "plans_of",
    "segments_of",
]

HOPPER = (9, 0)
STEP = 64  # columns
STEP_ROW_BYTES = 2 * STEP
CONSUMERS = 2  # warpgroups that multiply
PRODUCERS = 4  # warps that copy: one alone takes as long to begin a step's copies as it takes to multiply them
MOST_ROWS = 1024
MOST_SEGMENTS = 8
MOST_SUMS = 128  # a thread, of all that it holds
ALIGNMENT = 1024  # bytes: of a stage
BARRIER_BYTES = 256  # of all stages
STAGE_COUNTS = range(8, 1, -1)
TILES = ((64, 1), (128, 1), (128, 2), (256, 1))  # rows of x and times 128 weight rows of a block

# What times are reckoned with, of an H200; segments with these alone, so that bits are the same on every card.
MULTIPROCESSORS = 132
SEGMENT_ROWS = 128  # of x: where segments matter most
BYTES_A_US = 75_000  # that a multiprocessor gets from the L2
PRODUCTS_A_US = 2_700_000  # multiplications of a multiprocessor
MEMORY_BYTES_A_US = 4_500_000  # of the card's memory
PARTIAL_BYTES_A_US = 4_000_000  # of segments' sums, written and read
TILE_US, ADD_US = 1.5, 3.0  # to end a tile; to begin the kernel that adds segments up


@dataclass(frozen=True)
class WidePlan:
    """How a product is cut; nothing of it changes any bit of the result. Raises ShapeError for what does not fit.

    rows    of x, of a tile: 64, 128 or 256
    groups  times 64 weight rows of a warpgroup: 1 or 2
    depth   steps of 64 columns of a stage: 1 or 2
    stages  under way or multiplied
    apart   segments are blocks' own, and another kernel adds them up
    """

    rows: int
    groups: int
    depth: int
    stages: int
    apart: bool

    def __post_init__(self) -> None:
        if self.rows not in (64, 128, 256) or self.groups not in (1, 2) or self.sums > MOST_SUMS:
            raise ShapeError(f"no wide product has tiles of {self.rows} rows by {self.block_rows} weight rows")

    @property
    def sums(self) -> int:
        """Sums of a thread."""
        return self.groups * self.rows // 2

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * CONSUMERS + 32 * PRODUCERS

    @property
    def block_rows(self) -> int:
        """Weight rows of a block."""
        return CONSUMERS * GROUP_ROWS * self.groups

    @property
    def stage_bytes(self) -> int:
        """Rows of x, then of weights."""
        return (self.rows + self.block_rows) * self.depth * STEP_ROW_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return ALIGNMENT + self.stages * self.stage_bytes + BARRIER_BYTES

    def units(self, rows: int, weight_rows: int, segments: int) -> int:
        """What blocks take one by one: tiles, or segments of them."""
        return rows // self.rows * -(-weight_rows // self.block_rows) * (segments if self.apart else 1)


def has_wide(card: Card) -> bool:
    """Whether a card has the instructions of wide products."""
    return card.capability == HOPPER


@cache
def segments_of(weight_rows: int, columns: int) -> tuple[int, int]:
    """Into how many segments K is cut, and steps of 64 columns of each but the last, by N and K alone.

    A segment's sums begin at zero, and segments are added one by one.
    """
    steps, choices = -(-columns // STEP), []
    for count in range(1, MOST_SEGMENTS + 1):
        length = -(-steps // count)
        count = -(-steps // length)
        plans = [WidePlan(SEGMENT_ROWS, groups, 1, 2, count > 1) for rows, groups in TILES if rows == SEGMENT_ROWS]
        times = [_time_us(plan, SEGMENT_ROWS, weight_rows, steps, (count, length), MULTIPROCESSORS) for plan in plans]
        choices.append((min(times), count, length))
    return min(choices)[1:]


def plan_wide(rows: int, weight_rows: int, columns: int, card: Card) -> WidePlan:
    """The plan for [M, K] by [N, K]: of all `plans_of` it the one that should take least time. Raises as that does."""
    segments, steps = segments_of(weight_rows, columns), -(-columns // STEP)
    plans = plans_of(rows, weight_rows, columns, card)
    return min(plans, key=lambda plan: _time_us(plan, rows, weight_rows, steps, segments, card.num_multiprocessors))


def plans_of(rows: int, weight_rows: int, columns: int, card: Card) -> list[WidePlan]:
    """All plans for [M, K] by [N, K], with as many stages as fit.

    Raises ShapeError for M that is no multiple of 64 or above 1024, N or K that is no multiple of 8, or a card that
    `has_wide` denies.
    """
    if not has_wide(card):
        raise ShapeError(
            f"wide products are for cards of capability 9.0, not {card.capability[0]}.{card.capability[1]}"
        )
    if rows % 64 or not 0 < rows <= MOST_ROWS:
        raise ShapeError(f"a wide product takes a multiple of 64 rows up to {MOST_ROWS}, got {rows}")
    if weight_rows % 8 or columns % 8:
        raise ShapeError(f"a wide product's weight must have multiples of 8 as sizes, got {weight_rows} x {columns}")
    (segments, length), steps = segments_of(weight_rows, columns), -(-columns // STEP)
    plans = [
        plan
        for tile, groups in TILES
        for depth in ((1, 2) if length % 2 == 0 and steps % 2 == 0 else (1,))
        for apart in ((False, True) if segments > 1 else (False,))
        if rows % tile == 0 and (plan := _fitted(tile, groups, depth, apart, segments, card)) is not None
    ]
    if not plans:
        raise ShapeError(f"a wide product does not fit the {card.shared_bytes} bytes of shared memory of a block")
    return plans


def partials_shape(plan: WidePlan, rows: int, weight_rows: int, columns: int) -> tuple[int, int, int]:
    """The shape of the float32 workspace for segments' sums; its first extent is 0 where none is needed."""
    return segments_of(weight_rows, columns)[0] if plan.apart else 0, rows, weight_rows


def _fitted(tile: int, groups: int, depth: int, apart: bool, segments: int, card: Card) -> WidePlan | None:
    """With as many stages as fit; None where registers hold not all sums, totals beside them, or no two stages fit."""
    sums = groups * tile // 2 * (1 if apart or segments == 1 else 2)
    if sums > MOST_SUMS:
        return None
    plans = (WidePlan(tile, groups, depth, stages, apart) for stages in STAGE_COUNTS)
    return next((plan for plan in plans if plan.shared_bytes <= card.shared_bytes), None)


def _time_us(
    plan: WidePlan, rows: int, weight_rows: int, steps: int, segments: tuple[int, int], multiprocessors: int
) -> float:
    """A rough time, to choose by."""
    count, length = segments
    units = plan.units(rows, weight_rows, count)
    step_us = max(plan.stage_bytes / plan.depth / BYTES_A_US, plan.rows * plan.block_rows * STEP / PRODUCTS_A_US)
    turns = -(-units // multiprocessors)
    time = turns * ((length if plan.apart else steps) * step_us + TILE_US)
    time = max(time, 2 * weight_rows * steps * STEP / MEMORY_BYTES_A_US)
    if plan.apart:
        time += ADD_US + 8 * count * rows * weight_rows / PARTIAL_BYTES_A_US
    return time
