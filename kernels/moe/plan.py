"""This module plans the GEMMs of an MoE layer for few rows, and has the constants that their modules share."""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.activation import SILU, activation_label
from lowlat.kernels.common.pipeline import BARRIER_BYTES
from lowlat.kernels.formats import WeightFormat
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.toolchain.kernel import Gpu, WorkspaceShape
from lowlat.kernels.tuning.table import Knobs, Planned, choose_plan

__all__ = [
    "DOWN",
    "GATE_UP",
    "MAX_COLUMNS",
    "MAX_PAIRS",
    "MAX_PARTS",
    "MOST_PART",
    "PAD",
    "ExpertPlan",
    "ExpertShape",
    "choose_expert_plan",
    "expert_plans",
    "facts_of",
    "near_cuts",
    "next_power",
    "partials_workspace",
    "parts_of",
    "plan_experts",
    "rows_a_launch",
    "stages_wanted",
    "warps_of",
]

KIND = "experts"
GATE_UP, DOWN = "gate_up", "down"
MAX_PAIRS = 256  # of a row and one of its experts, in one launch: each has a thread while they are listed
MANY_PAIRS, MANY_ROWS = 1024, 128  # of a launch over many slots' rows, where a thread lists several pairs
MAX_COLUMNS = 8  # of a tile of mma
PAD = 20  # floats from one pair's partial sums to the next one's
# Tiles whose sums are handed over at once, where instructions are what takes time: in words of four bits, which are so
# many for their bytes, and for more than one row, whose last tiles are a small part of all.
MOST_TOGETHER, FOUR_BITS = 2, 512  # bytes of a tile's words
MAX_PARTS = 8  # of K, and warps where K is summed in parts
MOST_WARPS = 15  # that multiply
LEAST_WARPS = 7
MOST_PART = 3  # steps whose inputs a thread holds
MOST_STAGES = 2  # parts under way; more only queue up before the memory, but where parts are small:
IN_FLIGHT, MOST_SMALL_STAGES = 40 << 10, 6  # bytes that an SM should have under way, and stages for them


@dataclass(frozen=True)
class ExpertShape:
    """Weights [E, rows, columns] and the kind of their GEMM.

    kind    GATE_UP or DOWN
    top_k   experts a row
    format  of the weights
    biased  experts have biases
    clamped gate and up values are those of the clamped SwiGLU; else of the plain one
    parts   of K, of which each is a warp's, for few rows and with DOWN alone; None: warps have runs of all steps
    pitch   columns from a row to the next where these are some of them, whole steps, for many rows; 0: they are all
    activation of gates that are not clamped, by its name; with GATE_UP alone
    """

    kind: str
    rows: int
    columns: int
    top_k: int
    format: WeightFormat
    biased: bool = True
    clamped: bool = True
    parts: KParts | None = None
    pitch: int = 0
    activation: str = SILU

    @property
    def label(self) -> str:
        """The part of kernels' names that tells formats, epilogues and parts apart."""
        parts = f"_of{self.pitch}" if self.pitch else "" if self.parts is None else f"_{self.parts.name}"
        gates = "" if self.clamped else f"_plain{activation_label(self.activation)}"
        return f"{self.format.name}{'' if self.biased else '_unbiased'}{gates}{parts}"

    @property
    def outputs(self) -> int:
        """Weighed outputs of a pair: one, or one for each part."""
        return 1 if self.parts is None else self.parts.count

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows."""
        return -(-self.rows // 16)

    @property
    def padded_rows(self) -> int:
        """Rows of a matrix as it is packed."""
        return 16 * self.tiles

    @property
    def steps(self) -> int:
        """Steps of 64 columns."""
        return -(-self.columns // 64)

    @property
    def tile_steps(self) -> int:
        """Steps from a tile to the next."""
        return -(-(self.pitch or self.columns) // 64)

    @property
    def values(self) -> int:
        """Of a pair, from a tile: a row's, or those of a gate and an up row together."""
        return 8 if self.kind == GATE_UP else 16

    @property
    def step_bytes(self) -> int:
        """Bytes of a tile's words of one step."""
        return self.format.tile_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of a tile's scales of one step."""
        return self.format.scale_bytes


@dataclass(frozen=True)
class ExpertPlan:
    """How a GEMM is cut: nothing but `warps` changes any bit of the result.

    columns     pairs that one reading of an expert's weights serves: 1, 2, 4 or 8
    capacity    pairs that a block can list: a multiple of 4
    warps       that multiply: each has an equal run of a tile's steps
    finishing   warps that finish a tile, a value a lane or several
    part        steps of a tile that are copied together: all that a warp has, or fewer
    stages      parts under way, of each warp; and areas of sums: one is added up while the others fill
    num_blocks  of the grid
    suspends    a warp that waits for sums may be suspended, as `Gpu.suspends` has it
    sets        tiles that warps multiply side by side, each set with a warp a part of K
    together    tiles, 1 or 2, whose sums are handed over at once; of two, addresses stay in registers
    """

    columns: int
    capacity: int
    warps: int
    finishing: int
    part: int
    stages: int
    num_blocks: int
    suspends: bool
    sets: int = 1
    together: int = 1

    @property
    def knobs(self) -> Knobs:
        """The numbers that a table may choose."""
        return {"stages": self.stages, "part": self.part, "columns": self.columns}

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.warps + self.finishing) * 32

    @property
    def sum_bytes(self) -> int:
        """One warp's partial sums of a tile."""
        return self.columns * PAD * 4

    @property
    def tile_sum_bytes(self) -> int:
        """All warps' partial sums of a tile."""
        return self.warps * self.sum_bytes

    @property
    def area_bytes(self) -> int:
        """All sums that are handed over at once."""
        return self.together * self.tile_sum_bytes

    @property
    def turns(self) -> int:
        """Pairs that a thread lists, at most."""
        return -(-self.capacity // self.threads)

    @property
    def shares_at(self) -> int:
        """Bytes from the lists' begin, where the pairs' ids are, to their shares."""
        return self.capacity * 4 * (3 + self.columns)

    @property
    def list_bytes(self) -> int:
        """The lists of pairs: ids, leaders, units, each unit's pairs, and the pairs' shares."""
        return self.shares_at + self.capacity * 4

    def steps_a_warp(self, shape: ExpertShape) -> int:
        """Of a tile: warp w has the steps from w times so many on, the last ones fewer or none; or those of a part."""
        return steps_a_warp(shape, self.warps)

    def is_even(self, shape: ExpertShape) -> bool:
        """Whether every warp has the same steps, and every part is whole."""
        return shape.parts is None and shape.steps % (self.warps * self.part) == 0

    def stage_bytes(self, shape: ExpertShape) -> int:
        """One part of a warp's steps: their words, then their scales."""
        return self.part * (shape.step_bytes + shape.scale_bytes)

    def ring_bytes(self, shape: ExpertShape) -> int:
        """All stages of a warp."""
        return self.stages * self.stage_bytes(shape)

    def shared_bytes(self, shape: ExpertShape) -> int:
        """Dynamic shared memory of a block."""
        areas = self.stages * (self.area_bytes + BARRIER_BYTES)
        return self.warps * self.ring_bytes(shape) + areas + self.list_bytes


def rows_a_launch(top_k: int, limit: int = 64, pairs: int = MAX_PAIRS) -> int:
    """The most rows of one launch. Raises ShapeError for more experts a row than a launch has pairs."""
    if not 0 < top_k <= MAX_PAIRS:
        raise ShapeError(f"{top_k} experts a row; at most {MAX_PAIRS}")
    return min(limit, pairs // top_k)


def next_power(count: int) -> int:
    """The least power of two that is no less than `count`."""
    return 1 << (count - 1).bit_length()


def warps_of(steps: int) -> int:
    """The warps that multiply: so many that none has more steps than with most warps."""
    return max(LEAST_WARPS, -(-steps // -(-steps // MOST_WARPS)))


def steps_a_warp(shape: ExpertShape, warps: int) -> int:
    """The most steps of a tile that one of so many warps has."""
    if shape.parts is None:
        return -(-shape.steps // warps)
    return max(stop - start for start, stop in itertools.pairwise(shape.parts.ends(shape.steps)))


def sets_of(shape: ExpertShape) -> int:
    """Tiles side by side: as many as there are warps for, if all groups of tiles are whole."""
    if shape.parts is None:
        return 1
    fitting = (MAX_PARTS // shape.parts.count >> halvings for halvings in range(4))
    return next((count for count in fitting if count and shape.tiles % count == 0), 1)


def stages_wanted(shape: ExpertShape, warps: int | None = None, part: int = MOST_PART) -> int:
    """Parts under way that pay: so many that IN_FLIGHT bytes are, and MOST_STAGES at least."""
    warps = warps or warps_of(shape.steps)
    steps = min(part, MOST_PART, -(-shape.steps // warps)) * min(warps, shape.steps)
    return max(MOST_STAGES, min(MOST_SMALL_STAGES, -(-IN_FLIGHT // (steps * (shape.step_bytes + shape.scale_bytes)))))


def plan_experts(
    rows: int,
    shape: ExpertShape,
    gpu: Gpu,
    *,
    warps: int | None = None,
    stages: int | None = None,
    part: int = MOST_PART,
    columns: int = MAX_COLUMNS,
    together: int = MOST_TOGETHER,
) -> ExpertPlan:
    """The plan for M rows: a block an SM, and parts of all steps that a warp has, if they fit.

    rows     M, at most `rows_a_launch`
    warps    None: `warps_of` the steps; another number gives other bits
    stages   None: as many as fit, and at most so many as pay
    part     the most steps that are copied together
    columns  the most pairs that one reading of an expert's weights serves: a power of two
    together the most tiles whose sums are handed over at once
    Raises ShapeError for a GPU whose blocks have too little shared memory, or threads that cannot list the pairs.
    """
    capacity, sets = max(4, next_power(rows * shape.top_k)), sets_of(shape)
    if shape.parts is not None:
        warps = shape.parts.count * sets
    if warps is None:
        warps = warps_of(shape.steps)
    columns = min(columns, next_power(min(rows, MAX_COLUMNS)))
    finishing = -(-columns * shape.values // 32)
    if gpu.capability[0] not in (9, 10):  # where 16 warps leave registers enough, and 17 do not
        finishing = 1
    if shape.parts is not None:  # a block must list its pairs, however few of its warps multiply
        finishing = max(finishing, MAX_PARTS - warps)
    threads = (warps + finishing) * 32
    if capacity > (MANY_PAIRS if capacity > MAX_PAIRS else threads):
        raise ShapeError(f"{rows} rows of {shape.top_k} experts; {threads} threads list no more pairs than they are")
    num_blocks, suspends = min(rows * shape.top_k * shape.tiles // sets, gpu.num_multiprocessors), gpu.suspends
    parts = range(min(part, MOST_PART, steps_a_warp(shape, warps)), 0, -1)
    depths = (MOST_STAGES, 1) if stages is None else (stages,)
    most = together if rows > 1 and shape.step_bytes <= FOUR_BITS else 1
    for depth, part, handed in itertools.product(depths, parts, range(most, 0, -1)):
        plan = ExpertPlan(columns, capacity, warps, finishing, part, depth, num_blocks, suspends, sets, handed)
        if plan.shared_bytes(shape) <= gpu.shared_bytes:
            return plan
    raise ShapeError(
        f"a GEMM of experts for {rows} rows does not fit the {gpu.shared_bytes} bytes of shared memory that a "
        "block may have"
    )


def near_cuts(stages: int, part: int, columns: int) -> list[dict[str, int]]:
    """Other stages, parts and columns than those that are derived, those that are likely to be faster first."""
    cuts = [(stages + 1, part, columns), (stages + 1, part - 1, columns), (stages, part - 1, columns)]
    cuts += [(stages, part, columns // 2), (stages + 2, 1, columns), (stages - 1, part, columns)]
    return [{"stages": s, "part": p, "columns": c} for s, p, c in cuts if min(s, p, c) > 0]


@cache
def expert_plans(rows: int, shape: ExpertShape, gpu: Gpu) -> tuple[ExpertPlan, ...]:
    """The plans of a GEMM for M rows that fit a GPU, the derived one first. Raises ShapeError as `plan_experts`."""
    derived = plan_experts(rows, shape, gpu)
    plans = [derived]
    for cut in near_cuts(derived.stages, derived.part, derived.columns):
        with suppress(ShapeError):
            plans.append(plan_experts(rows, shape, gpu, **cut))
    return tuple(dict.fromkeys(plans))


def choose_expert_plan(rows: int, shape: ExpertShape, gpu: Gpu, num_experts: int) -> tuple[ExpertPlan, Planned]:
    """The plan of a GEMM for M rows by a GPU's table, or the derived one; and its place in tables."""
    facts = {"kind": shape.kind, **facts_of(rows, shape, num_experts)}
    if shape.parts is not None:
        facts["parts"] = shape.parts.count
    return choose_plan(gpu.tuning, KIND, facts, expert_plans(rows, shape, gpu))


def facts_of(rows: int, shape: ExpertShape, num_experts: int) -> dict[str, int | str]:
    """The facts that plans of a GEMM of E experts depend on; M rows count by the next power of two."""
    return {
        "rows": next_power(rows), "N": shape.rows, "K": shape.columns, "top_k": shape.top_k, "experts": num_experts,
        "format": shape.format.name,
    }  # fmt: skip


def partials_workspace(rows: int, top_k: int, width: int, parts: KParts | None = None) -> WorkspaceShape:
    """The workspace of a down GEMM [M, N], for few rows and many: weighed outputs [M, k, N] float32.

    parts  of K, of which each has outputs of its own: [M, k * P, N], a pair's after each other
    """
    return "experts.partials", (rows, top_k * (1 if parts is None else parts.count), width), torch.float32


def parts_of(rows: int, top_k: int, *, many: bool = False) -> Iterator[tuple[slice, int]]:
    """The rows of each launch over M of them, and how many they are. Raises ShapeError as `rows_a_launch` does.

    many  launches have up to MANY_ROWS rows, as few and as even as there can be: each reads nearly all experts
    """
    most = rows_a_launch(top_k)
    if many and rows > most:
        launches = -(-rows // rows_a_launch(top_k, MANY_ROWS, MANY_PAIRS))
        most = -(-rows // launches)
    for begin in range(0, rows, most):
        part = slice(begin, min(begin + most, rows))
        yield part, part.stop - begin
