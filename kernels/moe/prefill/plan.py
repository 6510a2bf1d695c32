"""This module plans the grouped GEMMs of an MoE layer: tiles of pairs, warps, stages."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from lowlat.errors import ShapeError
from lowlat.kernels.moe.plan import DOWN, GATE_UP, ExpertShape
from lowlat.kernels.moe.prefill.pair_tiles import TILE_PAIRS, tile_pairs_of
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.kernels.tuning.table import Knobs, Planned, choose_plan

__all__ = [
    "PAIR_BYTES",
    "STEP_ROW_BYTES",
    "SUM_PITCH",
    "WARP_ROWS",
    "WARP_TILES",
    "GroupedPlan",
    "MoePlan",
    "choose_moe_plan",
    "moe_plans",
    "plan_grouped",
]

KIND = "experts_grouped"

WARP_TILES = 2  # of 16 weight rows
WARP_ROWS = 16 * WARP_TILES
STEP_ROW_BYTES = 128  # of an input, a step
PAIR_BYTES = 4  # of its number
SUM_PITCH = (WARP_ROWS + 4) * 4  # bytes from a pair's sums to the next one's: no bank is met twice
WARPS = 4
# blocks an SM whose registers must fit, by pairs of a tile
MIN_BLOCKS = {16: 5, 32: 5, 64: 3, 96: 3, 128: 2}
MOST_STAGES = 4


@dataclass(frozen=True)
class GroupedPlan:
    """How a grouped GEMM is cut; nothing of it changes any bit of the result. Raises ShapeError for odd tiles.

    pairs   of a tile: the inputs that one reading of an expert's weights serves; a multiple of 8 * `skip`
    warps   of a block, each with 32 weight rows and all pairs
    stages  steps of 64 columns, under way or multiplied
    skip    tiles of 8 pairs that are left out together where no pair is live
    """

    pairs: int
    warps: int
    stages: int
    skip: int

    def __post_init__(self) -> None:
        if self.pairs % (8 * self.skip):
            raise ShapeError(f"tiles of {self.pairs} pairs, of which {8 * self.skip} are left out together")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def pair_tiles(self) -> int:
        """Tiles of 8 pairs."""
        return self.pairs // 8

    @property
    def min_blocks(self) -> int:
        """Blocks that must fit on an SM."""
        return max(1, MIN_BLOCKS.get(self.pairs, 1) * 4 // self.warps)

    def row_blocks(self, shape: ExpertShape) -> int:
        """Blocks that share a tile of pairs, each with other weight rows."""
        return -(-shape.tiles // (WARP_TILES * self.warps))

    def words_at(self) -> int:
        """Bytes from a stage's begin, where inputs are, to its weights."""
        return self.pairs * STEP_ROW_BYTES

    def scales_at(self, shape: ExpertShape) -> int:
        """Bytes from a stage's begin to its scales."""
        return self.words_at() + self.warps * WARP_TILES * shape.step_bytes

    def stage_bytes(self, shape: ExpertShape) -> int:
        """Inputs, words and scales of one step."""
        return self.scales_at(shape) + self.warps * WARP_TILES * shape.scale_bytes

    def list_at(self, shape: ExpertShape) -> int:
        """Bytes to the numbers of the tile's pairs: after the stages, and the sums that take their place."""
        return max(self.stages * self.stage_bytes(shape), self.warps * self.pairs * SUM_PITCH)

    def shared_bytes(self, shape: ExpertShape) -> int:
        """Dynamic shared memory of a block."""
        return self.list_at(shape) + self.pairs * PAIR_BYTES


@dataclass(frozen=True)
class MoePlan:
    """How both grouped GEMMs of an MoE layer are cut, which share the tiles of pairs; no bit depends on it.

    pairs   of a tile
    warps   of a block
    stages  the most of each GEMM
    """

    pairs: int
    warps: int
    stages: int

    @property
    def knobs(self) -> Knobs:
        """The numbers that a table may choose."""
        return {"pairs": self.pairs, "warps": self.warps, "stages": self.stages}

    def of(self, shape: ExpertShape, gpu: Gpu) -> GroupedPlan:
        """The plan of one GEMM. Raises ShapeError as `plan_grouped` does."""
        return plan_grouped(self.pairs, shape, gpu, warps=self.warps, most_stages=self.stages)


@cache
def moe_plans(num_pairs: int, num_experts: int, shapes: tuple[ExpertShape, ...], gpu: Gpu) -> tuple[MoePlan, ...]:
    """The plans for so many pairs, by which all shapes' GEMMs fit a GPU: the derived one first, which need not."""
    pairs = tile_pairs_of(num_pairs, num_experts)
    derived, place = MoePlan(pairs, WARPS, MOST_STAGES), TILE_PAIRS.index(pairs)
    near = [*TILE_PAIRS[place + 1 : place + 2], *TILE_PAIRS[max(place - 1, 0) : place]]
    plans = [MoePlan(pairs, WARPS, MOST_STAGES - 1), MoePlan(pairs, 2 * WARPS, MOST_STAGES)]
    plans += [MoePlan(each, WARPS, MOST_STAGES) for each in near]
    plans += [MoePlan(pairs, WARPS, 2), *(MoePlan(each, 2 * WARPS, MOST_STAGES) for each in near)]
    fitting = [derived]
    for plan in plans:
        with suppress(ShapeError):
            if [plan.of(shape, gpu) for shape in shapes] not in [[f.of(s, gpu) for s in shapes] for f in fitting]:
                fitting.append(plan)
    return tuple(fitting)


def choose_moe_plan(num_pairs: int, num_experts: int, shape: ExpertShape, gpu: Gpu) -> tuple[MoePlan, Planned]:
    """The plan of both GEMMs of an MoE layer by a GPU's table, or the derived one; and its place in tables.

    shape  of either: that of the other follows
    """
    gated = shape.kind == GATE_UP
    hidden, inner = (shape.columns, shape.rows // 2) if gated else (shape.rows, shape.columns)
    both = (
        ExpertShape(GATE_UP, 2 * inner, hidden, shape.top_k, shape.format),
        ExpertShape(DOWN, hidden, inner, shape.top_k, shape.format),
    )
    facts: dict[str, int | str] = {
        "rows": num_pairs // shape.top_k, "N": hidden, "inner": inner, "top_k": shape.top_k, "experts": num_experts,
        "format": shape.format.name,
    }  # fmt: skip
    return choose_plan(gpu.tuning, KIND, facts, moe_plans(num_pairs, num_experts, both, gpu))


def plan_grouped(
    tile_pairs: int,
    shape: ExpertShape,
    gpu: Gpu,
    *,
    warps: int = WARPS,
    stages: int | None = None,
    most_stages: int = MOST_STAGES,
) -> GroupedPlan:
    """The plan for tiles of so many pairs, as `pair_tiles` has them or another multiple of 16.

    stages  None: at most `most_stages`, as fit where as many blocks meet on an SM as registers allow
    Raises ShapeError for a GPU whose blocks have too little shared memory, or tiles of other sizes.
    """
    if tile_pairs < 16 or tile_pairs % 16 or tile_pairs > 32 * warps:
        raise ShapeError(f"tiles of {tile_pairs} pairs; a multiple of 16, at most {32 * warps}, is wanted")
    skip = 1 if tile_pairs == 16 else 2
    depths = range(most_stages, 1, -1) if stages is None else (stages,)
    plans = [GroupedPlan(tile_pairs, warps, depth, skip) for depth in depths]
    fitting = [plan for plan in plans if plan.shared_bytes(shape) <= gpu.shared_bytes]
    if not fitting:
        raise ShapeError(
            f"a grouped GEMM of tiles of {tile_pairs} pairs does not fit the {gpu.shared_bytes} bytes of shared "
            "memory that a block may have"
        )
    full = [plan for plan in fitting if plan.shared_bytes(shape) <= gpu.most_bytes(plan.min_blocks)]
    return (full or fitting)[0]
