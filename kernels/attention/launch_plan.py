"""This module plans a launch of attention: it lists the plans that fit a GPU, which change no bit, and chooses one.

The numbers that decide bits (the split, teams of warps, whether a block has a whole window) follow from shapes alone
and belong to no plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product

from lowlat.kernels.attention.limits import HEAD_DIM
from lowlat.kernels.attention.plan import MAX_WARP_DIM
from lowlat.kernels.toolchain.kernel import HOPPER, Gpu
from lowlat.kernels.tuning.table import Knobs, Planned, choose_plan

__all__ = [
    "ALIGNMENT",
    "DESCRIPTOR_WORDS",
    "KIND",
    "STATIC_BYTES",
    "TEAMS",
    "TILE_BYTES",
    "AttentionPlan",
    "AttentionWork",
    "candidate_plans",
    "choose_attention_plan",
    "is_whole",
    "pipeline_bytes",
    "takes_turns",
]

KIND = "attention"
TILE_BYTES = {dim: 256 * dim for dim in HEAD_DIM.values}  # of 64 positions; half for codes
TEAMS = {64: 3, 128: 2, 256: 1, 512: 1}  # at once over a whole window: one of 128 spans three tiles
DESCRIPTOR_WORDS = 4  # of a stage and warp: place and flags, tile of positions, row of the tree
TURN_BYTES = 64 + 1024  # of a warp, if keys and values take turns: rows of 16 positions, scores of 16 query rows
ALIGNMENT = 128  # of the stages: pieces of rows are permuted within 128 bytes
STATIC_BYTES = 5 * 1024  # the most static shared memory of the kernel
WHOLE_WINDOW = 256
QUERY_ROWS = 16  # of a tile
DERIVED_STAGES = {64: 4, 128: 3, 256: 3, 512: 1}
ALONE_STAGES = {64: 2, 128: 2, 256: 3, 512: 3}  # the most if an SM has one block; fewer if these do not fit
LEAST_STAGES = 2
MOST_STAGES = 8  # twice as many for codes, like the derived numbers
MOST_BLOCKS = 3  # except for codes with few query rows, which have fewer sums
FEW_ROWS = 8
LONG_SPLIT = 512
MANY_WINDOWS = 0.9  # of half the SMs: to read so many windows again for each tile of rows takes too long


@dataclass(frozen=True)
class AttentionPlan:
    """The plan of a launch; it changes no bit of the result.

    row_tiles  tiles of 16 query rows that share one reading of keys and values; one, if all items then have a block
    stages     tiles of positions in flight in each block
    blocks     blocks of the grid for each SM; if positions are split, no more blocks share an SM
    """

    row_tiles: int
    stages: int
    blocks: int

    @property
    def knobs(self) -> Knobs:
        """The numbers that a table may choose."""
        return {"row_tiles": self.row_tiles, "stages": self.stages, "blocks": self.blocks}


@dataclass(frozen=True)
class AttentionWork:
    """The facts on which a launch's plan depends; not the contexts, which change while a bucket is replayed.

    batch, rows  slots of the step, and rows of each
    window       None: all positions
    keep_first   positions kept before a window
    split        positions of a split
    coded        the caches hold e4m3 codes
    """

    batch: int
    rows: int
    group: int
    kv_heads: int
    head_dim: int
    window: int | None
    keep_first: int
    split: int
    coded: bool = False

    @property
    def whole(self) -> bool:
        """Whether a block has all positions of its rows, see `is_whole`."""
        return is_whole(self.window, self.keep_first)

    @property
    def few(self) -> bool:
        """Whether a slot has at most half a tile of query rows of a key-value head."""
        return self.rows * self.group <= FEW_ROWS

    @property
    def query_tiles(self) -> int:
        """Tiles of 16 query rows of a slot and key-value head."""
        return -(-self.rows * self.group // QUERY_ROWS)

    @property
    def most_shared(self) -> int:
        """Tiles of query rows for which a thread has registers at once; three for narrow heads, if these are all."""
        return 3 if self.query_tiles == 3 and self.head_dim == 64 and self.window is None and not self.coded else 2

    @property
    def facts(self) -> dict[str, int | bool]:
        """The key of tables; slots, and tiles of query rows if not all are shared, count as the next power of two."""
        codes: dict[str, int | bool] = {"coded": True, "few": self.few} if self.coded else {}
        tiles = self.query_tiles if self.query_tiles <= self.most_shared else _next_power(self.query_tiles)
        return codes | {
            "batch": _next_power(self.batch), "query_tiles": tiles, "group": self.group,
            "kv_heads": self.kv_heads, "head_dim": self.head_dim, "window": self.window or 0,
            "keeps": self.keep_first > 0, "split": 0 if self.whole else self.split,
        }  # fmt: skip


def is_whole(window: int | None, keep_first: int) -> bool:
    """Return whether a block takes all positions of its rows: for a window of few tiles without kept first positions.

    It decides bits, and depends on the layer alone.
    """
    return window is not None and window <= WHOLE_WINDOW and not keep_first


def pipeline_bytes(head_dim: int, stages: int, teams: int, coded: bool = False, takes_turns: bool = False) -> int:
    """Return a block's dynamic shared memory: stages, descriptors, alignment; scores, if keys and values take turns."""
    tile_bytes, warps = TILE_BYTES[head_dim] // (2 if coded or takes_turns else 1), 4 * -(-head_dim // MAX_WARP_DIM)
    more = TURN_BYTES if takes_turns else 0
    return stages * teams * (tile_bytes + warps * (DESCRIPTOR_WORDS * 4 + more)) + ALIGNMENT


def takes_turns(work: AttentionWork, gpu: Gpu) -> bool:
    """Return whether a tile's values take the place of its keys in shared memory, since there is no space for both."""
    needed = pipeline_bytes(work.head_dim, 1, TEAMS[work.head_dim], work.coded) + STATIC_BYTES
    return work.head_dim > MAX_WARP_DIM and needed > gpu.most_bytes(1)


def candidate_plans(work: AttentionWork, gpu: Gpu) -> tuple[AttentionPlan, ...]:
    """List the plans that fit a GPU: the derived one, then others, those first that are likely to be faster."""
    tiles = work.query_tiles
    if work.whole:
        are_many = 2 * work.batch * work.kv_heads >= MANY_WINDOWS * gpu.num_multiprocessors
        return _whole_plans(work.head_dim, 1 if work.coded else tiles, are_many)  # two tiles of codes lack registers
    if work.head_dim > MAX_WARP_DIM and takes_turns(work, gpu):
        return (AttentionPlan(1, 1, 1),)
    blocks = 2 + work.few + (work.split >= LONG_SPLIT) if work.coded else 2
    return _split_plans(work.head_dim, min(tiles, work.most_shared), work.window is not None, gpu, work.coded, blocks)


def choose_attention_plan(work: AttentionWork, gpu: Gpu) -> tuple[AttentionPlan, Planned]:
    """Choose the plan of a launch by a GPU's table, or the derived one; also return its place in tables."""
    return choose_plan(gpu.tuning, KIND, work.facts, candidate_plans(work, gpu))


@cache
def _split_plans(
    head_dim: int, most_shared: int, windowed: bool, gpu: Gpu, coded: bool, blocks: int
) -> tuple[AttentionPlan, ...]:
    """Two blocks an SM are derived, of as many stages as pay and fit, else one. Two tiles of query rows
    share keys and values where there are registers: heads of 128 have just enough, on 9.0 and without a window. One
    stage fewer is faster there (an H200, 8 rows at 8K: 17.2 us with 2, 19.3 with 3; without sharing 20.9). Three tiles
    of heads of 64 do where a slot has no more, on 9.0 without a window. Heads of 256
    have registers for one tile, and shared memory for two blocks of codes alone. Those of 512 fill an SM with a block
    of eight warps; where a tile does not fit its keys and values take turns.

    most_shared  tiles of query rows that an item may have
    blocks  that are derived of codes, where registers last: they are bound by instructions' latency. One more for few
            query rows, and one for long splits, of which there are many (an H200, heads of 128, 4 slots at 16K: 36.1
            us with 4, 39.2 with 3, 43.2 with 2; 1 slot at 8K: 10.5, 9.4, 9.9)
    """

    narrow = 2 if coded else 1

    def fits(plan: AttentionPlan) -> bool:
        needed = pipeline_bytes(head_dim, plan.stages, 1, coded) + STATIC_BYTES
        return needed <= gpu.most_bytes(plan.blocks) and plan.blocks <= most_blocks(plan.row_tiles)

    def most_blocks(row_tiles: int) -> int:
        if head_dim > MAX_WARP_DIM:
            return 1
        if windowed or row_tiles * head_dim > 128 or gpu.capability < HOPPER or (coded and row_tiles > 1):
            return MOST_BLOCKS - 1
        return max(MOST_BLOCKS, blocks)

    def most_stages(blocks: int) -> int:
        return max((s for s in range(1, narrow * MOST_STAGES + 1) if fits(AttentionPlan(1, s, blocks))), default=0)

    several, most = most_shared > 1, narrow * DERIVED_STAGES[head_dim]
    shares = several and (head_dim == 64 or (head_dim == 128 and gpu.capability == HOPPER and not windowed))
    shared = most_shared if gpu.capability == HOPPER else min(most_shared, 2)
    row_tiles, most = (shared, most if head_dim == 64 else most - 1) if shares else (1, most)
    most_usual = min(blocks, most_blocks(row_tiles))
    cuts = product(range(most_usual, 1, -1), range(most, LEAST_STAGES - 1, -1))
    usual = (AttentionPlan(row_tiles, stages, count) for count, stages in cuts)
    alone = (AttentionPlan(row_tiles, stages, 1) for stages in range(ALONE_STAGES[head_dim], 0, -1))
    derived = next(filter(fits, chain(usual, alone)))

    def found() -> Iterator[AttentionPlan]:
        for fewer in range(row_tiles - 1, 0, -1):
            yield replace(derived, row_tiles=fewer)
        for tiles in range(row_tiles, 0, -1):
            yield AttentionPlan(tiles, most_stages(4), 4)
            yield AttentionPlan(tiles, most_stages(3), 3)
            yield AttentionPlan(tiles, most_stages(1), 1)
            yield AttentionPlan(tiles, most_stages(2), 2)
            yield AttentionPlan(tiles, derived.stages - 1, derived.blocks)

    return tuple(dict.fromkeys((derived, *(plan for plan in found() if plan.stages >= LEAST_STAGES and fits(plan)))))


@cache
def _whole_plans(head_dim: int, query_tiles: int, are_many: bool) -> tuple[AttentionPlan, ...]:
    """A short window's few tiles lie side by side, none after another: teams that end an item after different numbers
    of tiles must meet in one stage. Its rows are derived to lie in blocks of their own, which leaves registers for the
    blocks before and after; where windows are many, two tiles of rows share one (an H100, 8 slots of 16 rows: 6.6 us
    for 7.6)."""
    shared = 2 if head_dim == 64 and query_tiles > 1 else 1
    cuts = ((1, 2), (1, 1), (shared, 2), (shared, 1))
    cuts = (cuts[2:] + cuts[:2]) if are_many else cuts
    return tuple(dict.fromkeys(AttentionPlan(row_tiles, 1, blocks) for row_tiles, blocks in cuts))


def _next_power(count: int) -> int:
    return 1 << (count - 1).bit_length()
