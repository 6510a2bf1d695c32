"""This module plans a prefill GEMM: segments of K, which decide its bits, and tiles, stages and blocks, which do not.

A block multiplies 128 weight rows by a tile of x's rows, step by step. The L2 sends each block's inputs to its SM:
weights once for each tile of x, and x once for each tile of weights. If two neighbouring tiles of weights are a
cluster, each block copies half of the rows to both, and x is sent once for two tiles. If a GEMM has too few tiles to
keep a GPU busy, each segment has blocks of its own, and the segments' sums are added afterwards.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from lowlat.errors import ShapeError
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.prefill.ranking import MEMORY_BYTES_A_US, STEP_US, PlanCost, time_us
from lowlat.kernels.gemm.tiles import BF16_TILES, TileFormat
from lowlat.kernels.toolchain.kernel import HOPPER, Gpu
from lowlat.kernels.tuning.table import Fact, Knobs, Planned, choose_plan

__all__ = [
    "APART_ROWS",
    "BLOCK_ROWS",
    "CONSUMERS",
    "COPYING_REGISTERS",
    "GROUP_ROWS",
    "MOST_ROWS",
    "MULTIPLYING_REGISTERS",
    "PRODUCERS",
    "STEP",
    "STEP_ROW_BYTES",
    "PrefillGemmPlan",
    "choose_prefill_plan",
    "cut_of",
    "has_prefill_gemm",
    "partials_shape",
    "plan_prefill_gemm",
    "plans_of",
    "segments_of",
]

KIND = "prefill_gemm"
STEP = 64  # columns
GROUP_ROWS = 64  # weight rows that a warpgroup multiplies at once
STEP_ROW_BYTES = 2 * STEP
CONSUMERS = 2  # warpgroups that multiply
PRODUCERS = 4  # warps that copy: one alone takes as long to begin a step's copies as it takes to multiply them
WIDE, LARGE = 128, 256  # rows of a tile that may be multiplied by halves of steps; that lacks registers for all totals
STORED_TOTALS = 80  # of the 128 of a thread that has a tile of 256 rows: three stages fit next to them
COPYING_REGISTERS, MULTIPLYING_REGISTERS = 40, 232  # a thread, then: of 168 that all begin with
MOST_ROWS = 4096
APART_ROWS = 1024  # up to so many segments may be apart: more rows have tiles enough, and their sums would take memory
TILE_ROWS = (64, 128, LARGE)  # of x
MOST_SEGMENTS = 8
ALIGNMENT = 1024  # bytes: of a stage
BARRIER_BYTES = 256  # of all stages
STAGE_COUNTS = range(8, 1, -1)
BLOCK_ROWS = CONSUMERS * GROUP_ROWS  # of weights

# Segments are reckoned with an H200's sizes alone, so that bits are the same on every GPU; plans with the GPU's own
MULTIPROCESSORS = 132
SEGMENT_ROWS = 128  # of x: where segments matter most


@dataclass(frozen=True)
class PrefillGemmPlan:
    """Tiles and stages of a GEMM, which change no bit of the result. Raises ShapeError for what does not fit.

    rows    of x, of a tile: 64, 128 or 256
    depth   steps of 64 columns of a stage: 1 or, of tiles of less than 256 rows, 2
    stages  under way or multiplied
    apart   segments are blocks' own, and another kernel adds them up; else a thread has their totals next to its sums
    tile_bytes  of a step of one tile of weights
    cluster     blocks that share rows of x: 1 or, of tiles of more than 64 rows, 2
    stored_totals  of a thread, in shared memory, where registers lack for all of them
    """

    rows: int
    depth: int
    stages: int
    apart: bool
    tile_bytes: int = BF16_TILES.step_bytes
    cluster: int = 1
    stored_totals: int = 0

    def __post_init__(self) -> None:
        if (self.rows, self.depth) not in STEP_US or self.stages < 2:
            raise ShapeError(f"no prefill GEMM is cut by {self}")

    @property
    def knobs(self) -> Knobs:
        """The numbers that a table may choose."""
        return {
            "rows": self.rows,
            "depth": self.depth,
            "stages": self.stages,
            "apart": self.apart,
            "cluster": self.cluster,
        }

    @property
    def sums(self) -> int:
        """Sums of a thread."""
        return self.rows // 2

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * CONSUMERS + 32 * PRODUCERS

    @property
    def by_halves(self) -> bool:
        """Whether a step is multiplied half by half, for which warps that copy leave registers."""
        return self.rows >= WIDE and self.depth == 1

    @property
    def stage_bytes(self) -> int:
        """Rows of x, then of weights; the next stage's begin at a multiple of 1024."""
        used = self.depth * (self.rows * STEP_ROW_BYTES + BLOCK_ROWS // 16 * self.tile_bytes)
        return -(-used // ALIGNMENT) * ALIGNMENT

    @property
    def totals_at(self) -> int:
        """Where totals begin that stand in shared memory, after the stages and their barriers."""
        return self.stages * self.stage_bytes + BARRIER_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return ALIGNMENT + self.totals_at + 4 * self.stored_totals * 128 * CONSUMERS

    def units(self, rows: int, weight_rows: int, segments: int) -> int:
        """The units that clusters of blocks take one by one: a tile for each block, or segments of them."""
        blocks = -(-weight_rows // (BLOCK_ROWS * self.cluster))
        return rows // self.rows * blocks * (segments if self.apart else 1)


def has_prefill_gemm(gpu: Gpu) -> bool:
    """Whether a GPU has the instructions of prefill GEMMs."""
    return gpu.capability == HOPPER


@cache
def segments_of(weight_rows: int, columns: int) -> tuple[int, int]:
    """Into how many segments K is cut, and steps of 64 columns of each but the last, by N and K alone.

    A segment's sums begin at zero, and segments are added one by one.
    """
    steps, choices = -(-columns // STEP), []
    for count in range(1, MOST_SEGMENTS + 1):
        length = -(-steps // count)
        count = -(-steps // length)
        plan = PrefillGemmPlan(SEGMENT_ROWS, 1, 2, count > 1)
        speeds = (MULTIPROCESSORS, MEMORY_BYTES_A_US)
        time = time_us(plan, SEGMENT_ROWS, weight_rows, steps, (count, length), *speeds)
        choices.append((time, count, length))
    return min(choices)[1:]


def cut_of(weight_rows: int, columns: int, parts: KParts | None) -> tuple[int, int]:
    """The segments, and steps of each but the last: of `segments_of`, or parts of K, of which the longest tells."""
    if parts is None:
        return segments_of(weight_rows, columns)
    ends = parts.ends(-(-columns // STEP))
    return parts.count, max(stop - start for start, stop in pairwise(ends))


def plan_prefill_gemm(
    rows: int,
    weight_rows: int,
    columns: int,
    gpu: Gpu,
    weights: TileFormat = BF16_TILES,
    parts: KParts | None = None,
) -> PrefillGemmPlan:
    """The derived plan for [M, K] by [N, K]: the first of `plans_of`. Raises as that does."""
    return plans_of(rows, weight_rows, columns, gpu, weights, parts)[0]


def choose_prefill_plan(
    rows: int,
    weight_rows: int,
    columns: int,
    gpu: Gpu,
    weights: TileFormat = BF16_TILES,
    parts: KParts | None = None,
) -> tuple[PrefillGemmPlan, Planned]:
    """The plan for [M, K] by [N, K] by a GPU's table, or the derived one; and its place in tables.

    Raises as `plans_of` does.
    """
    plans = plans_of(rows, weight_rows, columns, gpu, weights, parts)
    facts: dict[str, Fact] = {"rows": rows, "N": weight_rows, "K": columns}
    if weights != BF16_TILES:
        facts["weights"] = weights.label
    if parts is not None:
        facts["parts"] = parts.count
    return choose_plan(gpu.tuning, KIND, facts, plans)


def plans_of(
    rows: int,
    weight_rows: int,
    columns: int,
    gpu: Gpu,
    weights: TileFormat = BF16_TILES,
    parts: KParts | None = None,
) -> tuple[PrefillGemmPlan, ...]:
    """All plans for [M, K] by [N, K]: with as many stages as fit, first the one that should take least time, then with
    fewer. weights: how the weight is held; parts: of K, which are segments then, apart where there are several.

    Raises ShapeError for M that is no multiple of 64 or above 4096, or of several parts above 1024, for N or K that is
    no multiple of 8, or a GPU that `has_prefill_gemm` denies.
    """
    if not has_prefill_gemm(gpu):
        raise ShapeError(f"prefill GEMMs are for GPUs of capability 9.0, not {gpu.capability[0]}.{gpu.capability[1]}")
    if rows % 64 or not 0 < rows <= MOST_ROWS:
        raise ShapeError(f"a prefill GEMM takes a multiple of 64 rows up to {MOST_ROWS}, got {rows}")
    if weight_rows % 8 or columns % 8:
        raise ShapeError(f"a prefill GEMM's weight must have multiples of 8 as sizes, got {weight_rows} x {columns}")
    if parts is not None and parts.count > 1 and rows > APART_ROWS:
        raise ShapeError(f"a prefill GEMM of {parts.count} parts of K takes at most {APART_ROWS} rows, got {rows}")
    plans = _plans(rows, weight_rows, columns, gpu, gpu.read_gb_s, weights, parts)
    if not plans:
        raise ShapeError(f"a prefill GEMM does not fit the {gpu.shared_bytes} bytes of shared memory of a block")
    return plans


@cache
def _plans(
    rows: int,
    weight_rows: int,
    columns: int,
    gpu: Gpu,
    read_gb_s: float,
    weights: TileFormat,
    parts: KParts | None,
) -> tuple[PrefillGemmPlan, ...]:
    (segments, length), steps = cut_of(weight_rows, columns, parts), -(-columns // STEP)
    several = parts is not None and segments > 1
    is_even = steps % 2 == 0 and (parts.unit % 2 == 0 if parts is not None and several else length % 2 == 0)
    is_narrow = weight_rows <= BLOCK_ROWS
    aparts = (True,) if several else (False, True) if segments > 1 and rows <= APART_ROWS else (False,)
    full = [
        plan
        for tile in (TILE_ROWS[:-1] if several else TILE_ROWS)
        for depth in ((1, 2) if is_even else (1,))
        for apart in aparts
        for cluster in ((1, 2) if tile >= WIDE and not is_narrow else (1,))
        if rows % tile == 0 and (plan := _fitted(tile, depth, apart, segments, gpu, weights, cluster)) is not None
    ]
    cost = PlanCost(rows, weight_rows, steps, (segments, length), gpu.num_multiprocessors, 1000 * read_gb_s)
    full.sort(key=cost.key)
    first = [replace(plan, stages=cost.stages(plan)) for plan in full[:1]]
    fewer = [replace(plan, stages=plan.stages * parts // 4) for parts in (3, 2) for plan in full if plan.stages >= 4]
    return tuple(dict.fromkeys((*first, *full, *fewer)))


def partials_shape(
    plan: PrefillGemmPlan, rows: int, weight_rows: int, columns: int, parts: KParts | None = None
) -> tuple[int, int, int]:
    """The shape of the float32 workspace for segments' sums; its first extent is 0 where none is needed."""
    return cut_of(weight_rows, columns, parts)[0] if plan.apart else 0, rows, weight_rows


def _fitted(
    tile: int, depth: int, apart: bool, segments: int, gpu: Gpu, weights: TileFormat, cluster: int
) -> PrefillGemmPlan | None:
    """With as many stages as fit; None where not even two do, or registers lack for totals next to the sums."""
    has_totals = tile >= WIDE and segments > 1 and not apart
    if (tile, depth) not in STEP_US or (has_totals and (depth == 2 or weights.zeros)):
        return None
    stored = STORED_TOTALS if has_totals and tile == LARGE else 0
    plans = (PrefillGemmPlan(tile, depth, count, apart, weights.step_bytes, cluster, stored) for count in STAGE_COUNTS)
    return next((plan for plan in plans if plan.shared_bytes <= gpu.shared_bytes), None)
