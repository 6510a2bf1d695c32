"""How the products of a mixture of experts are cut, and the constants that their parts share. It knows no kernel."""

from dataclasses import dataclass

from lowlat.errors import ShapeError
from lowlat.kernels.kernel import Card

__all__ = [
    "CODE_BYTES",
    "DOWN",
    "GATE_UP",
    "MAX_PAIRS",
    "PAD",
    "SCALE_BYTES",
    "ExpertPlan",
    "ExpertShape",
    "plan_experts",
    "rows_a_launch",
]

GATE_UP, DOWN = "gate_up", "down"
CODE_BYTES, SCALE_BYTES = 512, 32  # of a tile of 16 rows by 64 columns in MXFP4
BF16_BYTES = 2048  # of the same tile in bf16
MAX_PAIRS = 256  # of a row and a rank, in one launch: each has a thread while they are listed
MAX_COLUMNS = 8  # of a tile of mma
PAD = 20  # floats from one pair's partial sums to the next one's: no bank conflicts
WARPS = 16
MOST_STAGES = {True: 7, False: 3}  # by quantised; README.md beside this file tells what was tried
SYSTEM_BYTES = 1024  # of shared memory, a block


@dataclass(frozen=True)
class ExpertShape:
    """Weights [E, rows, columns] and what follows their product.

    kind       GATE_UP or DOWN
    ranks      experts a row
    quantised  MXFP4, else bf16
    """

    kind: str
    rows: int
    columns: int
    ranks: int
    quantised: bool

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows."""
        return -(-self.rows // 16)

    @property
    def steps(self) -> int:
        """Steps of 64 columns."""
        return -(-self.columns // 64)

    @property
    def step_bytes(self) -> int:
        """Of a tile's words of one step."""
        return CODE_BYTES if self.quantised else BF16_BYTES


@dataclass(frozen=True)
class ExpertPlan:
    """How a product is cut: nothing but `warps` changes any bit of the result.

    columns     pairs that one reading of an expert's weights serves: 1, 2, 4 or 8
    capacity    pairs that a block can list: a multiple of 4
    warps       of a block: warp w takes the steps w, w + warps, .. of every tile
    stages      steps under way in each warp
    blocks      that share a multiprocessor
    min_blocks  that must fit on a multiprocessor: twice as many where the next kernel's are to fit beside these
    num_blocks  of the grid
    """

    columns: int
    capacity: int
    warps: int
    stages: int
    blocks: int
    min_blocks: int
    num_blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * 32

    @property
    def sum_bytes(self) -> int:
        """One warp's partial sums of a tile."""
        return self.columns * PAD * 4

    @property
    def list_bytes(self) -> int:
        """The lists of pairs: ids, leaders, units, and each unit's pairs."""
        return self.capacity * 4 * (3 + self.columns)

    def stage_bytes(self, shape: ExpertShape) -> int:
        """One warp's copy of one step: every lane its own bytes, so scales are there four times."""
        return CODE_BYTES + 4 * SCALE_BYTES if shape.quantised else BF16_BYTES

    def input_bytes(self, shape: ExpertShape) -> int:
        """The inputs of one unit."""
        return shape.steps * self.columns * 128

    def shared_bytes(self, shape: ExpertShape) -> int:
        """Dynamic shared memory of a block."""
        copies = self.warps * (self.stages * self.stage_bytes(shape) + 2 * self.sum_bytes)
        return copies + self.input_bytes(shape) + self.list_bytes


def rows_a_launch(ranks: int, limit: int = 64) -> int:
    """The most rows of one launch. Raises ShapeError for more ranks than a launch has pairs."""
    if not 0 < ranks <= MAX_PAIRS:
        raise ShapeError(f"{ranks} experts a row; at most {MAX_PAIRS}")
    return min(limit, MAX_PAIRS // ranks)


def plan_experts(
    rows: int,
    shape: ExpertShape,
    card: Card,
    *,
    warps: int = WARPS,
    stages: int | None = None,
    blocks: int = 1,
) -> ExpertPlan:
    """The plan for M rows: a block that leaves half of a multiprocessor to the next kernel, where that is possible.

    rows    M, at most `rows_a_launch`
    stages  None: as many as fit into half of a block's greatest shared memory, and at most so many as pay
    Raises ShapeError for a card whose blocks have too little shared memory, or threads that cannot list the pairs.
    """
    capacity = 4
    while capacity < rows * shape.ranks:
        capacity *= 2
    if capacity > min(MAX_PAIRS, warps * 32):
        raise ShapeError(f"{rows} rows of {shape.ranks} experts; {warps} warps list at most {warps * 32} pairs")
    most = MOST_STAGES[shape.quantised] * WARPS // (warps * blocks)
    tried = [stages] if stages is not None else range(most, 0, -1)
    columns = 1
    while columns < min(rows, MAX_COLUMNS, warps * 2):  # a thread for each of a tile's 16 values of each pair
        columns *= 2
    half = card.shared_bytes // 2 - SYSTEM_BYTES
    num_blocks = min(rows * shape.ranks * shape.tiles, card.num_multiprocessors * blocks)
    # where inputs fill a block, a unit holds fewer pairs; but rather the whole of a block than fewer pairs
    while columns:
        for room, least, shared in ((half, min(4, most), 2), (card.shared_bytes, 1, 1)):
            for count in tried:
                plan = ExpertPlan(columns, capacity, warps, count, blocks, shared * blocks, num_blocks)
                used = plan.shared_bytes(shape) * blocks + SYSTEM_BYTES * (blocks - 1)
                if used <= room and (count >= least or stages is not None):
                    return plan
        columns //= 2
    raise ShapeError(
        f"a product of {shape.columns} columns does not fit the {card.shared_bytes} bytes of shared memory that a "
        "block may have"
    )
