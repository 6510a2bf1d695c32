"""This module counts on the host the tiles that a launch of attention walks, from lengths, masks and shapes.

A step of the kernel is a tile of 64 positions for an item's query rows, or for only one of its rows if the tile has
positions of a tree. Nothing is launched.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowlat.kernels.attention.launch_plan import QUERY_ROWS, TEAMS, AttentionPlan, AttentionWork
from lowlat.kernels.attention.plan import TILE, TILE_SHIFT

__all__ = ["TileCounts", "count_tiles"]


@dataclass(frozen=True)
class TileCounts:
    """Steps of a launch's blocks, all key-value heads together.

    total     steps whose keys and values are copied
    empty     steps of which no row sees a position: they end before any product
    masked    steps that are multiplied under a mask
    executed  steps that are multiplied, masked ones included
    """

    total: int
    empty: int
    masked: int
    executed: int


@dataclass(frozen=True)
class _Slot:
    """A slot of a launch: positions that all rows share, and the position after each row's own, 0 for a dead row."""

    dense: int
    last: int
    ends: tuple[int, ...]
    is_tree: bool


def count_tiles(
    work: AttentionWork,
    plan: AttentionPlan,
    dense_lens: Sequence[int],
    masks: Sequence[Sequence[int]],
    *,
    num_blocks: int,
    live: Sequence[bool] | None = None,
    tail: int | None = None,
    first: int = 0,
) -> TileCounts:
    """The steps of a launch.

    dense_lens  [B]     positions that all of a slot's rows share
    masks       [B, R]  bit a: the row sees node a, as `attention` has them
    num_blocks  of the grid
    live        [B * R] None: all rows are
    tail        the most ancestors that a row may have; None: R
    first       the first position that is seen
    """
    rows, tail = work.rows, tail or work.rows
    alive = [True] * len(dense_lens) * rows if live is None else list(live)
    slots = []
    for entry, dense in enumerate(dense_lens):
        own = alive[entry * rows : (entry + 1) * rows]
        ends = tuple(dense + mask.bit_count() if on else 0 for mask, on in zip(masks[entry], own, strict=True))
        is_tree = any(on and mask & (mask + 1) for mask, on in zip(masks[entry], own, strict=True))
        slots.append(_Slot(dense, dense + tail - 1, ends, is_tree))
    splits = sum(len(list(_tiles(work, slot, first))) for slot in slots)
    row_tiles = 1 if not work.whole and splits * work.kv_heads * work.query_tiles <= num_blocks else plan.row_tiles
    total = empty = masked = 0
    for slot in slots:
        for step in _steps(work, row_tiles, slot, first):
            total += 1
            empty += step is None
            masked += step is True
    heads = work.kv_heads
    return TileCounts(heads * total, heads * empty, heads * masked, heads * (total - empty))


def _steps(work: AttentionWork, row_tiles: int, slot: _Slot, first: int) -> Iterator[bool | None]:
    """Each step of a slot and key-value head: whether it is masked, None for an empty one."""
    item_rows, query_rows = QUERY_ROWS * row_tiles, work.rows * work.group
    for tiles in _tiles(work, slot, first):
        for low in range(0, query_rows, item_rows):
            nodes = range(low // work.group, min((low + item_rows - 1) // work.group, work.rows - 1) + 1)
            for tile in tiles:
                start = tile << TILE_SHIFT
                if _is_plain(work, slot, start, first):
                    yield False
                elif slot.is_tree and start + TILE > slot.dense:
                    yield from (None if start >= slot.ends[node] else True for node in nodes)
                else:
                    yield None if start >= max(slot.ends) else True


def _is_plain(work: AttentionWork, slot: _Slot, start: int, first: int) -> bool:
    """Whether a tile holds only positions of earlier steps, each seen by all rows."""
    plain = start >= first and start + TILE <= slot.dense
    if work.window is None or not plain:
        return plain
    return start > slot.last - work.window or start + TILE <= first + work.keep_first


def _tiles(work: AttentionWork, slot: _Slot, first: int) -> Iterator[list[int]]:
    """The tiles of each split, one after another; of a whole window, of each team."""
    window, keep_end = work.window, first + work.keep_first
    begin = first if window is None else max(first, slot.dense - window)
    last = slot.last >> TILE_SHIFT
    if work.whole:
        low, teams = min(begin >> TILE_SHIFT, last), TEAMS[work.head_dim]
        yield [tile for team in range(teams) for tile in _of_team(low, last, team, teams)]
        return
    shift, size = work.split.bit_length() - 1, work.split // TILE
    splits = (slot.last >> shift) + 1
    start = min(begin >> shift, splits - 1)
    keep = min((keep_end + work.split - 1) >> shift, start) if window is not None and work.keep_first else 0
    for split in (*range(keep), *range(start, splits)):
        low, high = split * size, min(split * size + size - 1, last)
        if window is not None:
            if split < start:
                high = min(high, (keep_end - 1) >> TILE_SHIFT)
            elif keep_end <= low << TILE_SHIFT or keep_end == first:
                low = max(low, min((slot.dense - window) >> TILE_SHIFT, high))
        yield list(range(low, max(high, low) + 1))


def _of_team(low: int, high: int, team: int, teams: int) -> range:
    """A team's tiles: those whose number leaves its own; one step all the same where there is none."""
    own = low + (team + teams - low % teams) % teams
    return range(own, max(high, own) + 1, teams)
