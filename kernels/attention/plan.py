"""This module lists on the device the work of a launch of attention, and has the cursor that walks the list.

Positions are divided into splits of 128, 256 or 512 and tiles of 64, at fixed places. An item is a slot, a key-value
head, a few tiles of 16 query rows and a split. Items are counted from the slots' lengths alone, so that the first
copies may start before the tree's masks are known. This module touches no keys, values or queries.
"""

from dataclasses import dataclass
from typing import Any

from lowlat.kernels.attention.limits import FEW_SLOTS, MAX_SLOTS
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, uint32

__all__ = [
    "AttentionShape",
    "advance",
    "enter_item",
    "entry_of",
    "head_of",
    "make_count_splits",
    "make_plan_functions",
    "make_spread",
    "query_row",
    "query_tiles_of",
    "row_tile_of",
]

TILE_SHIFT = 6  # 64 positions
TILE = 1 << TILE_SHIFT
FAR = 1 << 30

# Fields of a slot's part of the plan, in shared memory
ITEMS, DENSE, KEEP_SPLITS, WINDOW_SPLIT, NUM_SPLITS, SLOT, ALIVE, TREE, END_MAX, END_MIN, LAST = range(11)
PLAN_STRIDE = 16
# Fields of the cursor, in registers
# PAGES: in lane i the page of the item's tile PAGES_TILE + i
ITEM, PLACE, POSITION_TILE, LAST_TILE, PASS, PAGES, PAGES_TILE = range(7)
CURSOR_FIELDS = 7
# A place: bits 0 to 7 the entry among the slots, 8 to 11 flags, 12 to 19 the row tile, 20 to 31 the head
FIRST_STEP, LAST_STEP, ALL_VISIBLE, ALONE = 1 << 8, 1 << 9, 1 << 10, 1 << 11
ROW_TILE_SHIFT, HEAD_SHIFT = 12, 20
NO_ITEM = -1
MAX_WARP_DIM = 256  # the most dimensions of a head whose sums fit a warp's registers


@dataclass(frozen=True)
class AttentionShape:
    """The constants of a specialisation.

    group      query heads of one key-value head
    block      positions of a block of the cache
    row_tiles  the most tiles of 16 query rows that share one reading of keys and values: see `make_spread`
    stages     tiles of positions in flight in each block
    sinks      whether heads have attention sinks
    early      whether the plan may be read before the previous kernel ends
    late_rows  whether rows' flags and masks may only be read after that; with `early`
    split      positions of a split
    whole      an item has all positions of its rows, and writes their results itself: only short windows
    teams      teams of four warps: team t takes the tiles whose number is t modulo `teams`
    blocks     the most blocks that may share an SM; 0: as many as fit
    parts      parts of a block of the cache; the table is then a list of parts for each key-value head. 0: of blocks
    coded      the caches hold e4m3 codes
    few        a slot has at most 8 query rows of a key-value head, so tiles have no second half
    converts   the GPU converts codes to fp16; else shifts do
    softcap    c: scores s become c tanh(s / c); None: they stay
    many       there may be more than FEW_SLOTS slots
    takes_turns  a stage has a tile's keys and then its values, since shared memory has no space for both
    """

    head_dim: int
    group: int
    kv_heads: int
    block: int
    first: int
    window: int | None
    keep_first: int
    row_tiles: int
    stages: int
    sinks: bool
    early: bool
    split: int = 256
    whole: bool = False
    teams: int = 1
    blocks: int = 2
    parts: int = 0
    coded: bool = False
    few: bool = False
    converts: bool = True
    late_rows: bool = False
    softcap: float | None = None
    takes_turns: bool = False
    many: bool = False

    @property
    def slots(self) -> int:
        """The most slots that a launch is planned for."""
        return MAX_SLOTS if self.many else FEW_SLOTS

    @property
    def eights(self) -> int:
        """Groups of 8 query rows in an item."""
        return 1 if self.few else 2 * self.row_tiles

    @property
    def halves(self) -> int:
        """Parts of a head's dimensions with warps of their own; if more than one, they add up partial scores."""
        return -(-self.head_dim // MAX_WARP_DIM)

    @property
    def warp_dim(self) -> int:
        """Dimensions of a head that a warp multiplies."""
        return self.head_dim // self.halves

    @property
    def row_bytes(self) -> int:
        """Bytes of a position's keys, or values, of one head, that a warp multiplies."""
        return self.warp_dim if self.coded else 2 * self.warp_dim

    @property
    def pitch(self) -> int:
        """Bytes of a position's keys, or values, of one head in the cache."""
        return self.halves * self.row_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of a warp's part of a stage: keys and values of 16 positions, or these after those."""
        return self.values_at + 16 * self.row_bytes

    @property
    def values_at(self) -> int:
        """Bytes from a warp's stage to its values."""
        return 0 if self.takes_turns else 16 * self.row_bytes

    @property
    def descriptor_bytes(self) -> int:
        """Bytes of a stage's descriptor; in turns it also has the rows of the cache of 16 positions."""
        return 16 + (64 if self.takes_turns else 0)

    @property
    def warps(self) -> int:
        """Warps of a block, of which four share a tile, or four each half of its dimensions."""
        return 4 * self.teams * self.halves

    @property
    def split_shift(self) -> int:
        """The binary logarithm of `split`."""
        return self.split.bit_length() - 1

    @property
    def _flags(self) -> tuple[tuple[str, bool], ...]:
        return ("s", self.sinks), ("e", self.early), ("r", self.late_rows), ("w", self.whole), ("t", self.takes_turns)

    @property
    def name(self) -> str:
        """All constants."""
        flags = "".join(letter for letter, on in self._flags if on)
        window = "all" if self.window is None else f"{self.window}w{self.keep_first}"
        return (
            f"attention_{self.head_dim}x{self.group}x{self.kv_heads}_b{self.block}_{window}_f{self.first}_"
            f"{self.row_tiles}x{self.stages}x{self.split}{flags}{self.teams}x{self.blocks}"
            + (f"_l{self.parts}" if self.parts else "")
            + ("_8" if self.few else "")
            + ("" if self.softcap is None else f"_t{self.softcap:g}")
            + (("_c" if self.converts else "_d") if self.coded else "")
            + ("_many" if self.many else "")
        )


@device_function
def entry_of(place: Any) -> Any:
    """Return the entry among the step's slots."""
    return int32(uint32(place) & uint32(255))


@device_function
def row_tile_of(place: Any) -> Any:
    """Return the item's first query row, in units of the rows of an item."""
    return int32((uint32(place) >> uint32(ROW_TILE_SHIFT)) & uint32(255))


@device_function
def head_of(place: Any) -> Any:
    """Return the key-value head."""
    return int32(uint32(place) >> uint32(HEAD_SHIFT))


@device_function
def query_tiles_of(rows: Any, group: Any) -> Any:
    """Return the number of tiles of 16 query rows of a slot and key-value head."""
    return (rows * group + 15) >> 4


@device_function
def query_row(row_tile: Any, row: Any, group: Any) -> Any:
    """Return the slot's tree row, and the head within its group, for row `row` of a tile of 16."""
    place = uint32(row_tile) * uint32(16) + uint32(row)
    node = uint32(place // uint32(group))
    return node, uint32(place - node * uint32(group))


def make_count_splits(shape: AttentionShape) -> Any:
    """A device function that counts a slot's splits, from its dense length and its rows' most ancestors.

    It returns the processed splits at the start, the first of the others, and the number of all splits.
    """
    first, split_size, split_shift, whole = shape.first, shape.split, shape.split_shift, shape.whole
    windowed, window, keep_first = shape.window is not None, shape.window or 0, shape.keep_first

    @device_function
    def count_splits(dense: Any, tail: Any) -> Any:
        splits = (int64(dense + tail - 1) >> split_shift) + 1
        start, keep = int64(first), int64(0)
        if windowed:
            start = max(start, int64(dense - window))
        start = min(start >> split_shift, splits - 1)
        if windowed and keep_first > 0:
            keep = min(int64((first + keep_first + split_size - 1) >> split_shift), start)
        if whole:
            splits, start = int64(1), int64(0)
        return int32(keep), int32(start), int32(splits)

    return count_splits


def make_plan_functions(shape: AttentionShape) -> tuple[Any, Any]:
    """Make `read_rows` and `plan_slots`; all threads of a block call them, with barriers before and after.

    read_rows   stores the position after each row's own, 0 for dead rows, and the facts common to a slot's rows
    plan_slots  stores each slot's number of items, and its splits
    """
    early, count_splits = shape.early, make_count_splits(shape)
    group, kv_heads, tile_rows = shape.group, shape.kv_heads, 16 * shape.row_tiles

    @device_function
    def read_rows(
        plan: Any, row_ends: Any, slots: Any, dense_lens: Any, row_live: Any, row_masks: Any, batch: Any, rows: Any
    ) -> None:
        thread = int32(cuda.threadIdx.x)
        if thread < batch:
            plan[thread * PLAN_STRIDE + ALIVE] = 0
            plan[thread * PLAN_STRIDE + TREE] = 0
            plan[thread * PLAN_STRIDE + END_MAX] = 0
            plan[thread * PLAN_STRIDE + END_MIN] = FAR
        cuda.syncthreads()
        index = thread
        while index < batch * rows:
            entry = int64(uint32(index) // uint32(rows))
            slot = ptx.load_global_i32(slots + entry * 4)
            dense = ptx.load_global_i32(dense_lens + entry * 4)
            live = ptx.load_global_u8(row_live + int64(index))
            mask = ptx.load_global_i64(row_masks + int64(index) * 8)
            end = int32(0)
            if slot >= 0 and live != 0:
                end = int32(dense + cuda.popc(mask))
                at = entry * PLAN_STRIDE
                cuda.atomic.max(plan, at + ALIVE, int32(1))
                cuda.atomic.max(plan, at + END_MAX, end)
                cuda.atomic.min(plan, at + END_MIN, end)
                if mask & (mask + 1):  # other bits than the lowest are set, so it is no chain
                    cuda.atomic.max(plan, at + TREE, int32(1))
            row_ends[index] = end
            index += int32(cuda.blockDim.x)
        cuda.syncthreads()

    @device_function
    def plan_slots(plan: Any, slots: Any, dense_lens: Any, batch: Any, rows: Any, tail: Any) -> None:
        entry = int32(cuda.threadIdx.x)
        if entry < batch:
            at = entry * PLAN_STRIDE
            slot = ptx.load_global_i32(slots + int64(entry) * 4)
            dense = max(ptx.load_global_i32(dense_lens + int64(entry) * 4), int32(0))
            alive = slot >= 0
            if not early:
                alive = alive and plan[at + ALIVE] != 0
            plan[at + LAST] = int32(dense + tail - 1)
            keep, start, splits = count_splits(dense, tail)
            tiles = (rows * group + tile_rows - 1) // tile_rows
            plan[at + ITEMS] = int32((splits - start + keep) * kv_heads * tiles if alive else 0)
            plan[at + DENSE], plan[at + SLOT] = dense, slot
            plan[at + KEEP_SPLITS], plan[at + WINDOW_SPLIT], plan[at + NUM_SPLITS] = keep, start, splits
        cuda.syncthreads()

    return read_rows, plan_slots


def make_spread(shape: AttentionShape) -> Any:
    """A device function of all threads that gives items one tile of query rows each, if there are blocks for all.

    It returns whether it did. Items of several tiles take fewer instructions in all, items of one tile fewer each.
    """
    group, tile_rows = shape.group, 16 * shape.row_tiles

    @device_function
    def spread(plan: Any, batch: Any, rows: Any) -> Any:
        entry, blocks, items = int32(cuda.threadIdx.x), uint32(cuda.gridDim.x), uint32(0)
        tiles, alone = uint32((rows * group + tile_rows - 1) // tile_rows), uint32(query_tiles_of(rows, group))
        for other in range(batch):
            items += uint32(plan[other * PLAN_STRIDE + ITEMS]) // tiles * alone
        cuda.syncthreads()
        fits = items <= blocks
        if fits and entry < batch:
            at = entry * PLAN_STRIDE + ITEMS
            plan[at] = int32(uint32(plan[at]) // tiles * alone)
        cuda.syncthreads()
        return fits

    return spread


def enter_item(shape: AttentionShape) -> Any:
    """A device function that sets the cursor to the start of an item; past the last, its place becomes NO_ITEM.

    If a team's first tile would be after the item's last, the team still has one step there, of which no row sees
    anything.
    """
    first, windowed, window, keep_end = (
        shape.first,
        shape.window is not None,
        shape.window or 0,
        shape.first + shape.keep_first,
    )
    group, kv_heads, tile_rows = shape.group, shape.kv_heads, 16 * shape.row_tiles
    tiles_a_split, whole, teams = shape.split // TILE, shape.whole, shape.teams

    @device_function
    def enter(cursor: Any, plan: Any, item: Any, batch: Any, rows: Any) -> None:
        cursor[ITEM] = int32(item)
        rest, entry = int32(item), int32(0)
        while entry < batch and rest >= plan[entry * PLAN_STRIDE + ITEMS]:
            rest = int32(rest - plan[entry * PLAN_STRIDE + ITEMS])
            entry = int32(entry + 1)
        if entry >= batch:
            cursor[PLACE] = int32(NO_ITEM)
            return
        at = entry * PLAN_STRIDE
        tiles = uint32((rows * group + tile_rows - 1) // tile_rows)
        outer = uint32(uint32(rest) // tiles)
        number = uint32(outer // uint32(kv_heads))
        keep, start = plan[at + KEEP_SPLITS], plan[at + WINDOW_SPLIT]
        split = int32(number)
        if split >= keep:
            split = int32(split - keep + start)
        dense = plan[at + DENSE]
        low = int64(split) * tiles_a_split
        high = min(low + tiles_a_split - 1, plan[at + LAST] >> TILE_SHIFT)
        if whole:
            high = int64(plan[at + LAST] >> TILE_SHIFT)
            low = min(int64(max(int32(first), int32(dense - window)) >> TILE_SHIFT), high)
        elif windowed:
            if split < start:
                high = min(high, (keep_end - 1) >> TILE_SHIFT)
            elif keep_end <= (low << TILE_SHIFT) or keep_end == first:
                low = max(low, min((dense - window) >> TILE_SHIFT, high))
        if teams > 1:  # by a tile's own number, not by an item's start, which depends on the other rows
            team, start = uint32(cuda.threadIdx.x) >> uint32(7), uint32(low) % uint32(teams)
            low += int64(uint32(team + uint32(teams) - start) % uint32(teams))
        head, row_tile = outer - number * uint32(kv_heads), uint32(rest) - outer * tiles
        cursor[PLACE] = int32(
            uint32(entry) | uint32(FIRST_STEP) | (head << uint32(HEAD_SHIFT)) | (row_tile << uint32(ROW_TILE_SHIFT))
        )
        cursor[POSITION_TILE], cursor[LAST_TILE], cursor[PASS] = int32(low), int32(high), int32(-1)
        cursor[PAGES_TILE] = int32(low + 1)  # after `low`, so its pages are looked up

    return enter


def advance(shape: AttentionShape) -> Any:
    """A device function that advances the cursor, and returns whether the step before was its item's last.

    `passing` says that this step was of one row of a tree; `last_pass` is the last such row.
    """
    enter, teams = enter_item(shape), shape.teams

    @device_function
    def move_on(cursor: Any, plan: Any, passing: Any, last_pass: Any, batch: Any, rows: Any) -> Any:
        cursor[PLACE] = int32(cursor[PLACE] & ~FIRST_STEP)
        if passing and cursor[PASS] < last_pass:
            cursor[PASS] = int32(cursor[PASS] + 1)
            return False
        cursor[PASS] = int32(-1)
        if cursor[POSITION_TILE] + int32(teams) <= cursor[LAST_TILE]:
            cursor[POSITION_TILE] = int32(cursor[POSITION_TILE] + teams)
            return False
        enter(cursor, plan, int32(cursor[ITEM] + int32(cuda.gridDim.x)), batch, rows)
        return True

    return move_on
