"""This module has the plan and the shape of a decode GEMM, and the constants that its parts share."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from lowlat.errors import ShapeError
from lowlat.kernels.common.norm_math import THREADS as NORM_THREADS
from lowlat.kernels.common.pipeline import BARRIER_BYTES
from lowlat.kernels.gemm.decode.ranking import ROW_BYTES, WARPS, GemmSizes
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.tiles import BF16_TILES, TileFormat
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.kernels.tuning.table import Fact, Knobs, Planned, choose_plan

__all__ = [
    "ADD",
    "ALL_REDUCE",
    "BFLOAT16",
    "FLOAT32",
    "GATE",
    "GELU_GATE",
    "MAX_ROWS",
    "PAD",
    "ROTATE",
    "SILU",
    "SUM_BYTES",
    "WARPS",
    "ArgmaxShape",
    "BlockShape",
    "DecodeGemmPlan",
    "DecodeGemmShape",
    "HeadsShape",
    "candidate_plans",
    "choose_decode_plan",
    "plan_decode_gemm",
    "rows_at_once",
    "steps_to_hold",
]

MOST_FINISHING = {1: 4, 2: 4, 4: 2, 8: 2}  # warps, by tiles of rows: more rows leave fewer registers
THROTTLE = 8192  # bytes that a warp has under way before the kernel before this one has ended
MAX_ROWS = 64
MOST_CHUNKS = 16  # of 8 elements of rows that a thread norms: they are in its registers
PAD = 20  # floats from one row of partial sums to the next: no bank conflicts
SUM_BYTES = 8 * PAD * 4  # 8 rows of partial sums
MOST_STAGES = 12  # of one tile of rows, as long as they fit
MOST_STAGES_OF_MORE = 4
NEIGHBOUR_BYTES = 16 * 1024  # of a block of the launch before or after: a router, a delta net
SHARE = 0.78  # of a block's shared memory, for stages and sums of more tiles of rows
MOST_NORMED_TWICE = 2  # rows
RAGGED_STEPS = 8  # k steps of a warp from which on pairs of them pay though the last one may stand alone
RAGGED_FOURS = 16  # likewise fours of four-bit weights, of which the last may be fewer
GROUPS_FOR_NORM = 4  # of weight tiles, in a block, next to which a norm of more rows done twice is little
KIND = "decode_gemm"
FLOAT32, BFLOAT16, ADD, SILU, ROTATE = "float32", "bfloat16", "add", "silu", "rotate"
GATE, GELU_GATE = "gate", "gelu_gate"  # the product is the gate of rows that are there, by its sigmoid or its GELU
ALL_REDUCE = "all_reduce"  # ADD, of the sum over ranks


@dataclass(frozen=True)
class DecodeGemmPlan:
    """The plan of a decode GEMM; it changes no bit of the result.

    row_tiles     tiles of 8 rows: 1, 2, 4 or 8
    columns       rows of a tile that have memory: 1, 2, 4 or 8; 8 with more than one tile
    weight_tiles  tiles of 16 weight rows that a warp multiplies at once: 1, 2 or 4
    stages        pipeline stages of each warp: K steps that are being copied
    areas         of partial sums of one tile: with two, one is added while the other is filled
    num_blocks    blocks of the grid
    sharing       blocks that fit on an SM: 1 or 2
    suspends      whether a warp that waits for sums may be suspended, see `Gpu.suspends`
    steps_held    the number of K steps of rows if a block norms and holds all of them; 0: rows are copied next to the
                  weights
    keeps_argmax  whether a block keeps the partial argmax of each of its rows: see `partial_argmax`
    tile_bytes    bytes of a step of one weight tile in shared memory
    span          K steps that a warp copies and multiplies at once: 1, 2 or 4; the last of a tile may be fewer
    density       blocks of the grid on an SM: 1 or 2
    sets          sets of warps, each for a tile, or for several weight tiles at once; a set has a warp for each part of
                  K
    """

    row_tiles: int
    columns: int
    weight_tiles: int
    stages: int
    areas: int
    num_blocks: int
    sharing: int
    suspends: bool
    steps_held: int = 0
    keeps_argmax: bool = False
    tile_bytes: int = BF16_TILES.shared_bytes
    span: int = 1
    density: int = 1
    sets: int = 1

    @property
    def knobs(self) -> Knobs:
        """The fields that a tuning table may choose; those for quantised weights only if they are not 1."""
        more = {name: value for name, value in (("span", self.span), ("density", self.density)) if value > 1}
        return {"weight_tiles": self.weight_tiles, "stages": self.stages, "areas": self.areas, **more}

    def is_ragged(self, steps: int) -> bool:
        """Whether, for this number of steps of K, a warp's last span is shorter than the others."""
        return steps % (WARPS * self.span) > 0 and self.span > 1

    def groups(self, width: int) -> int:
        """Groups of weight tiles, which the grid walks, in a weight of `width` rows."""
        return _groups(width, self.weight_tiles * self.sets)

    @property
    def finishing(self) -> int:
        """Warps of the epilogue: each lane finishes one or several values of a tile."""
        return min(MOST_FINISHING[self.row_tiles], -(-self.row_tiles * self.columns * 16 // 32))

    @property
    def rounds(self) -> int:
        """The most values of a tile that a lane of the epilogue's warps finishes."""
        return -(-self.row_tiles * self.columns * 16 // (self.finishing * 32))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return NORM_THREADS if self.steps_held else (WARPS + self.finishing) * 32

    @property
    def throttle(self) -> int:
        """The most stages in flight before the kernel before this one has ended, so that its reads do not queue."""
        return -(-THROTTLE // (self.weight_tiles * self.tile_bytes * self.span * self.density))

    @property
    def rows_bytes(self) -> int:
        """Bytes of one K step of a tile of rows."""
        return self.columns * ROW_BYTES

    @property
    def step_bytes(self) -> int:
        """Bytes of one warp's copy of one K step."""
        return self.weight_tiles * self.tile_bytes + (0 if self.steps_held else self.row_tiles * self.rows_bytes)

    @property
    def stage_bytes(self) -> int:
        """Bytes of one warp's copy of the K steps that it multiplies at once."""
        return self.span * self.step_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that a block holds, and of its warps' sums of squares after them."""
        return self.steps_held * self.rows_bytes + (self.columns * NORM_THREADS // 32 * 4 if self.steps_held else 0)

    @property
    def sum_bytes(self) -> int:
        """Bytes of one warp's partial sums of one weight tile."""
        return self.row_tiles * SUM_BYTES

    @property
    def partials(self) -> int:
        """Partial sums of a value, which lie next to each other for the epilogue."""
        return WARPS

    @property
    def totals_at(self) -> int:
        """The offset of the sums, after the stages."""
        return WARPS * self.stages * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        own = self.stages * self.stage_bytes + self.areas * self.sum_bytes
        return WARPS * own + self.areas * BARRIER_BYTES + self.held_bytes + self.best_bytes

    @property
    def best_bytes(self) -> int:
        """The best pairs, one for each value of a tile; the last of a block's shared memory."""
        return self.rounds * self.finishing * 32 * 8 if self.keeps_argmax else 0


@dataclass(frozen=True)
class HeadsShape:
    """The shape of RoPE in the epilogue of a q, k, v GEMM, and of the cache for keys and values.

    rows         rows a slot, for the write to the cache
    block_size   positions a block of the cache; 0: queries alone
    table_width  blocks of a slot's table
    coded        the cache holds e4m3 codes
    """

    queries: int
    groups: int
    dim: int
    rows: int
    block_size: int
    table_width: int
    coded: bool = False


@dataclass(frozen=True)
class ArgmaxShape:
    """The shape of the partial argmax: every block writes each row's best pair, in the form of `select`.

    blocks  pairs of a row: at least the number of the grid's blocks
    limit   bits of the largest finite magnitude; a row with a larger one is marked as broken
    """

    blocks: int
    limit: int


@dataclass(frozen=True)
class BlockShape:
    """The shape of the rows that are added to a GEMM's rows, one of each slot's block.

    wide  rows a slot of the GEMM
    rows  rows a slot of the block
    """

    wide: int
    rows: int


@dataclass(frozen=True)
class DecodeGemmShape:
    """A weight [width, depth], the prologue and the epilogue of its GEMM.

    heads       with ROTATE only
    live        whether dead rows are zero; with SILU, GATE, GELU_GATE and with a block only
    best        with FLOAT32 only
    block       with FLOAT32 only, and not scattered
    scattered   whether columns are written in the order before the weight was permuted; with FLOAT32 and BFLOAT16 only
    weights     the weight's format
    ranks       ranks that sum their products; more than one with ALL_REDUCE only
    wide_norm   whether the norm's weight is float32
    keeps_norm  whether the first block writes the normed rows; with FLOAT32 only, without best
    activation  of gates whose ups are next to them, by its name; with SILU only
    softcap     c: numbers x become c tanh(x / c); with FLOAT32 only, without a block. None: they stay
    pitch       stride of the gated rows; with GELU_GATE only
    parts       of K, one for each warp; with FLOAT32, BFLOAT16, ADD and ALL_REDUCE only. None: warps divide all steps
    """

    width: int
    depth: int
    epilogue: str
    bias: bool
    live: bool
    heads: HeadsShape | None = None
    norm_eps: float | None = None
    best: ArgmaxShape | None = None
    scattered: bool = False
    weights: TileFormat = BF16_TILES
    ranks: int = 1
    parts: KParts | None = None
    block: BlockShape | None = None
    wide_norm: bool = False
    keeps_norm: bool = False
    activation: str = SILU
    softcap: float | None = None
    pitch: int = 0

    @property
    def scales_at(self) -> int:
        """The offset in bytes of the scales of its rows, which follow its tiles."""
        return -(-self.width // 16) * self.steps * self.weights.step_bytes

    @property
    def steps(self) -> int:
        """Steps of 64 columns."""
        return -(-self.depth // 64)


def rows_at_once(gpu: Gpu) -> int:
    """The most rows of one launch: 64, or fewer if a block has too little shared memory for them."""
    fitting = (tiles for tiles in (8, 4, 2) if _least_bytes(tiles) <= gpu.shared_bytes)
    return 8 * next(fitting, 1)


def _least_bytes(row_tiles: int) -> int:
    return DecodeGemmPlan(row_tiles, 8, 1, 1, 1, 1, 1, suspends=False).shared_bytes


def steps_to_hold(rows: int, depth: int, gpu: Gpu) -> int:
    """The K steps of M rows [M, K] if a block can norm and hold them and has most of its memory for weights; else 0."""
    steps, columns = -(-depth // 64), _columns(rows)
    fits = rows <= 8 and columns * -(-depth // (8 * NORM_THREADS)) <= MOST_CHUNKS
    return steps if fits and 3 * steps * columns * ROW_BYTES <= gpu.shared_bytes else 0


def _groups(width: int, weight_tiles: int) -> int:
    return -(-width // (16 * weight_tiles))


def _columns(rows: int) -> int:
    return next(count for count in (1, 2, 4, 8) if count >= min(rows, 8))


def candidate_plans(
    rows: int,
    width: int,
    gpu: Gpu,
    steps_held: int = 0,
    *,
    keeps_argmax: bool = False,
    weights: TileFormat = BF16_TILES,
    depth: int = 0,
    parts: KParts | None = None,
    all_reduces: bool = False,
) -> tuple[DecodeGemmPlan, ...]:
    """The plans for M rows by [N, K] that fit a GPU, the derived one first, then those that are likely to be faster.

    steps_held  K steps of rows that a block holds: the result of `steps_to_hold`, or 0
    weights     the weight's format
    depth       K; 0: any
    parts       of K, if it is summed in parts
    all_reduces  whether its sums go to other ranks
    Raises ShapeError for a GPU whose blocks have too little shared memory.
    """
    row_tiles = next(tiles for tiles in (1, 2, 4, 8) if 8 * tiles >= rows)
    steps, sets = -(-depth // 64), 1
    most_span = next((span for span in (4, 2) if depth > 0 and steps % (span * WARPS) == 0), 1)
    most_span = max(most_span, 2 if steps >= RAGGED_STEPS * WARPS else 1)
    if weights.code_bits == 4 and steps >= RAGGED_FOURS * WARPS:
        most_span = 4
    if parts is not None:
        most_span, sets = 1, _sets(width, parts, gpu)
        width = 16 * _groups(width, sets)
    own_steps = 0 if parts is not None else -(-depth // (64 * WARPS))
    sizes = GemmSizes(row_tiles, _columns(rows), width, own_steps, steps_held > 0, all_reduces, weights, gpu)
    plans = _candidates(sizes, gpu.read_gb_s, steps_held, keeps_argmax, most_span)
    if not plans:
        raise ShapeError(f"{rows} rows do not fit the {gpu.shared_bytes} bytes of shared memory that a block may have")
    return plans if sets == 1 else tuple(replace(plan, sets=sets) for plan in plans)


def _sets(width: int, parts: KParts, gpu: Gpu) -> int:
    """The number of sets: as many as there are warps for, if every SM still has work."""
    fitting = (count for count in (8, 4, 2) if count * parts.count <= WARPS)
    return next((count for count in fitting if _groups(width, count) >= gpu.num_multiprocessors), 1)


def plan_decode_gemm(
    rows: int,
    width: int,
    gpu: Gpu,
    steps_held: int = 0,
    *,
    keeps_argmax: bool = False,
    weights: TileFormat = BF16_TILES,
    depth: int = 0,
    parts: KParts | None = None,
    all_reduces: bool = False,
) -> DecodeGemmPlan:
    """The derived plan for M rows by [N, K]: the first of `candidate_plans`."""
    return candidate_plans(
        rows, width, gpu, steps_held, keeps_argmax=keeps_argmax, weights=weights, depth=depth, parts=parts,
        all_reduces=all_reduces,
    )[0]  # fmt: skip


def choose_decode_plan(
    rows: int, shape: DecodeGemmShape, gpu: Gpu, steps_held: int = 0
) -> tuple[DecodeGemmPlan, Planned]:
    """The plan for M rows from the GPU's tuning table, or the derived one; and its key in tables. Raises as they do."""
    keeps = shape.best is not None
    plans = candidate_plans(
        rows, shape.width, gpu, steps_held, keeps_argmax=keeps, weights=shape.weights, depth=shape.depth,
        parts=shape.parts, all_reduces=shape.epilogue == ALL_REDUCE,
    )  # fmt: skip
    facts: dict[str, Fact] = {
        "rows": 8 * plans[0].row_tiles if rows > 8 else plans[0].columns, "N": shape.width, "K": shape.depth,
        "epilogue": shape.epilogue, "normed": steps_held > 0, "argmax": keeps,
    }  # fmt: skip
    if shape.ranks > 1:
        facts["gpus"] = shape.ranks
    if shape.weights != BF16_TILES:
        facts["weights"] = shape.weights.label
    if shape.parts is not None:
        facts["parts"] = shape.parts.count
    return choose_plan(gpu.tuning, KIND, facts, plans)


@cache
def _candidates(
    sizes: GemmSizes, read_gb_s: float, steps_held: int, keeps_argmax: bool, most_span: int
) -> tuple[DecodeGemmPlan, ...]:
    """The derived plan multiplies as many tiles at once as keep most SMs busy, one block on each, as
    `GemmSizes` ranks them.

    read_gb_s  of the GPU, on which the ranking depends and by which GPUs are not told apart
    most_span  the most k steps that a warp may take at once

    Quantised weights of one tile of rows take two steps at once and, where no argmax is kept, two blocks a
    SM, of one weight tile a warp: what decodes them waits for its own instructions, and more warps hide it.
    Four steps at once take a seventh fewer instructions of INT4 and a tenth fewer of FP8, in half as many stages.
    A norm of more rows than two is dear when done twice: where blocks have few groups of tiles to make up for it, or
    rows or zero points leave too few registers, such plans come after the others, for a table to choose.
    """

    gpu, weights, width = sizes.gpu, sizes.weights, sizes.width
    row_tiles, columns, tile_bytes = sizes.row_tiles, sizes.columns, weights.shared_bytes
    most_stages = MOST_STAGES * BF16_TILES.shared_bytes // tile_bytes  # as many bytes under way
    decodes = weights != BF16_TILES and row_tiles == 1

    def cut(weight_tiles: int, stages: int, areas: int, span: int = 1, density: int = 1) -> DecodeGemmPlan:
        num_blocks = min(_groups(width, weight_tiles), density * gpu.num_multiprocessors)
        plan = DecodeGemmPlan(
            row_tiles, columns, weight_tiles, stages, areas, num_blocks, density, gpu.suspends, steps_held,
            keeps_argmax, tile_bytes, span, density,
        )  # fmt: skip
        shares = plan.shared_bytes <= gpu.most_bytes(2) and not steps_held
        return replace(plan, sharing=2) if shares else plan

    def derive(weight_tiles: int, span: int = 1, density: int = 1) -> DecodeGemmPlan | None:
        """The first that fits, of the most stages on."""
        whole, part = gpu.most_bytes(density), int(gpu.shared_bytes * SHARE)
        cuts = [(stages, areas, part) for stages in range(MOST_STAGES_OF_MORE, 1, -1) for areas in (2, 1)]
        if row_tiles == 1:
            cuts = [(stages, 2, whole) for stages in range(most_stages // (span * density), 0, -1)]
        cuts += [(2, 2, whole), (2, 1, whole), (1, 2, part), (1, 1, whole)]
        plans = ((cut(weight_tiles, stages, areas, span, density), budget) for stages, areas, budget in cuts)
        return next((plan for plan, budget in plans if plan.shared_bytes <= budget), None)

    def settled(plan: DecodeGemmPlan) -> tuple[DecodeGemmPlan, ...]:
        """A derived plan; before it, where its stages leave a neighbour no memory and stay empty, one of fewer."""
        paying = sizes.most_paying(plan.weight_tiles, plan.span, plan.density)
        leaves = gpu.shared_bytes - plan.density * plan.shared_bytes
        if paying is None or paying >= plan.stages or leaves >= NEIGHBOUR_BYTES:
            return (plan,)
        return cut(plan.weight_tiles, paying, plan.areas, plan.span, plan.density), plan

    ranked = sizes.ranked_tiles()
    derived = [plan for tiles in ranked if (plan := derive(tiles)) is not None]
    if not derived:
        return ()
    densities: tuple[int, ...] = (2, 1) if decodes and not keeps_argmax else (1,)
    has_groups = _groups(width, 1) >= GROUPS_FOR_NORM * 2 * gpu.num_multiprocessors
    makes_up = has_groups and columns <= 4 and not weights.zeros
    if steps_held and columns > MOST_NORMED_TWICE and not makes_up:
        densities = densities[::-1] if most_span > 1 else (1,)
    more = [
        each
        for density in densities
        for span in (span for span in sizes.spans(density) if span <= (most_span if decodes else 1))
        for tiles in ((1, 2) if density > 1 else ranked)
        if span * density > 1 and (plan := derive(tiles, span, density)) is not None
        if density == 1 or plan.num_blocks > gpu.num_multiprocessors
        for each in settled(plan)
    ]
    tiles, stages, areas = derived[0].weight_tiles, derived[0].stages, derived[0].areas
    near = [(tiles, stages + 1, areas), (tiles, stages * 3 // 4, areas), (tiles, stages, 3 - areas)]
    far = [(tiles, stages // 2, areas), *((p.weight_tiles, p.stages * 3 // 4, p.areas) for p in derived[1:2])]
    rest = product(ranked, range(most_stages, 0, -1), (2, 1))
    cuts = ((cut(*each) for each in some if each[1] > 0) for some in (near, far, rest))
    paying = sizes.stages_of(tiles, stages)
    first = [*settled(cut(tiles, paying, areas))] if paying != stages else [*settled(derived[0])][:-1]
    plans = dict.fromkeys((*more, *first, *derived[:2], *next(cuts), *derived[2:], *next(cuts), *next(cuts)))
    return tuple(plan for plan in plans if plan.shared_bytes <= gpu.most_bytes(plan.density))
