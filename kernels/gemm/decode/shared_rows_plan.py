"""This module plans a decode GEMM of 33 to 128 rows whose warps share the rows of a K step.

A warp of the usual kernel copies rows for itself, which beyond 32 rows are more bytes than its weights. Here a K step's
rows are copied once for a block, and its warps divide weight tiles and rows. All warps wait for each other once a
stage. With few weight tiles a block that wait is most of its time, so a stage has several steps.
"""

from dataclasses import dataclass
from functools import cache

from lowlat.kernels.gemm.decode.plan import KIND, WARPS, DecodeGemmPlan, DecodeGemmShape
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.kernels.tuning.table import Fact, Planned, choose_plan

__all__ = ["MOST_SHARED_ROWS", "SharedRowsPlan", "choose_shared_plan", "shared_plans", "shares_rows"]

FEW_ROWS, MOST_SHARED_ROWS = 32, 128  # up to which blocks do not share them, and up to which they may
ROW_TILES = (8, 16)
TILES_A_WARP = 2  # weight tiles: one reading of rows from shared memory is for both
TILES_A_BLOCK = (2, 4, 8, 16)
MOST_OWN_ROW_TILES, MOST_OF_GROUPS = 8, 4  # of a warp: sums are in registers, of groups twice
LEAST_STAGES, MOST_STAGES = 2, 8
SPANS = (4, 2, 1)
# us on an H200: of a stage whatever it has, and of each of its steps; of a stage next to products, and of 128 tiles of
# weights by rows; and bytes that an SM copies in one, however many others do
STAGE_US, STEP_US, WAIT_US, PRODUCTS_US, COPIED_BYTES = 0.4, 0.1, 0.1, 1.0, 42_000


@dataclass(frozen=True)
class SharedRowsPlan(DecodeGemmPlan):
    """The plan of such a GEMM; it changes no bit of the result.

    row_tiles     tiles of 8 rows: 8 or 16
    weight_tiles  tiles of 16 weight rows of a block: 2, 4, 8 or 16
    stages        pipeline stages of a block, being copied or multiplied
    span          K steps of a stage, WARPS apart: 1, 2 or 4; the last stage of a turn may have fewer
    The other fields are those of every decode GEMM's plan.
    """

    @property
    def warp_columns(self) -> int:
        """Warps along the weight's rows, each with two weight tiles."""
        return self.weight_tiles // TILES_A_WARP

    @property
    def own_row_tiles(self) -> int:
        """Tiles of rows that a warp multiplies."""
        return self.row_tiles * self.warp_columns // WARPS

    @property
    def copied_row_tiles(self) -> int:
        """Tiles of rows that a warp copies."""
        return self.row_tiles // WARPS

    @property
    def of_warp(self) -> DecodeGemmPlan:
        """The plan for a warp's part of a step."""
        return DecodeGemmPlan(
            self.own_row_tiles, 8, TILES_A_WARP, 1, 1, self.num_blocks, 1, self.suspends, tile_bytes=self.tile_bytes
        )

    @property
    def finishing(self) -> int:
        """Warps that finish tiles: all."""
        return WARPS

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * WARPS

    @property
    def partials(self) -> int:
        """1: a value's sums are added in registers, in the order of the usual kernel."""
        return 1

    @property
    def totals_at(self) -> int:
        """Where sums begin, after the stages."""
        return self.stages * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.totals_at + self.weight_tiles * self.sum_bytes + self.best_bytes


def shares_rows(rows: int, shape: DecodeGemmShape, gpu: Gpu) -> bool:
    """Whether warps may share rows: if there are more than FEW_ROWS, and the shape has no feature that it lacks."""
    alone = shape.norm_eps is None and shape.parts is None and shape.block is None and shape.ranks == 1
    return FEW_ROWS < rows <= MOST_SHARED_ROWS and alone and bool(shared_plans(rows, shape, gpu))


def shared_plans(rows: int, shape: DecodeGemmShape, gpu: Gpu) -> tuple[SharedRowsPlan, ...]:
    """The plans for M rows that fit a GPU, the derived one first; empty if none fits."""
    return _plans(next(tiles for tiles in ROW_TILES if 8 * tiles >= rows), shape, gpu)


@cache
def _plans(row_tiles: int, shape: DecodeGemmShape, gpu: Gpu) -> tuple[SharedRowsPlan, ...]:
    """The plans for a number of row tiles: those with the most stages first, then the fastest by `_stage_us`."""
    sms, plans = gpu.num_multiprocessors, []
    most = MOST_OF_GROUPS if shape.weights.groups else MOST_OWN_ROW_TILES
    for tiles in TILES_A_BLOCK:
        if row_tiles * tiles // (TILES_A_WARP * WARPS) > most:
            continue
        groups = -(-shape.width // (16 * tiles))
        for span in (each for each in SPANS if each * WARPS <= max(WARPS, shape.steps)):
            fitting = [
                plan
                for stages in range(MOST_STAGES, LEAST_STAGES - 1, -1)
                if (plan := _cut(row_tiles, tiles, stages, span, min(groups, sms), shape, gpu)).shared_bytes
                <= gpu.shared_bytes
            ]
            num_stages = -(-groups // sms) * WARPS * -(-shape.steps // (WARPS * span))
            plans += [(rank, num_stages * _stage_us(plan), -tiles, plan) for rank, plan in enumerate(fitting)]
    return tuple(plan for *_, plan in sorted(plans, key=lambda each: each[:3]))


def _stage_us(plan: SharedRowsPlan) -> float:
    """The estimated time of a stage: the longest of the barrier, the products, and the copies."""
    products = plan.span * PRODUCTS_US * plan.weight_tiles * plan.row_tiles / 128
    return max(STAGE_US + STEP_US * plan.span, WAIT_US + products, plan.stage_bytes / COPIED_BYTES)


def _cut(
    row_tiles: int, tiles: int, stages: int, span: int, num_blocks: int, shape: DecodeGemmShape, gpu: Gpu
) -> SharedRowsPlan:
    return SharedRowsPlan(
        row_tiles, 8, tiles, stages, 1, num_blocks, 1, gpu.suspends, keeps_argmax=shape.best is not None,
        tile_bytes=shape.weights.shared_bytes, span=span,
    )  # fmt: skip


def choose_shared_plan(rows: int, shape: DecodeGemmShape, gpu: Gpu) -> tuple[SharedRowsPlan, Planned]:
    """The plan for M rows from the GPU's tuning table, or the derived one; and its key in tables."""
    plans = shared_plans(rows, shape, gpu)
    facts: dict[str, Fact] = {
        "shared_rows": 8 * plans[0].row_tiles, "N": shape.width, "K": shape.depth, "epilogue": shape.epilogue,
        "normed": False, "argmax": shape.best is not None,
    }  # fmt: skip
    if shape.weights.name != "bf16":
        facts["weights"] = shape.weights.label
    return choose_plan(gpu.tuning, KIND, facts, plans)
