"""This module sizes a window's pool, whose blocks and tables all layers with that sliding window share.

A row at position p of such a layer sees the positions above p - window. So a request needs few blocks at a time, at any
length: in prefill those that it writes and sees, in decoding a ring of blocks, which it writes over and over. The
table of a slot is complete when it begins to decode; no step changes it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lowlat.models.windows import window_suffix

__all__ = ["ALIGNMENT", "ENDS_KEPT", "WindowPool", "kept_windows"]

ALIGNMENT = 128  # kernels read whole tiles of positions, from a multiple of this at or below the window's first one
ENDS_KEPT = 4  # ends of prompts, for each request that the pool holds, whose blocks can stay for later prompts


def kept_windows(windows: Iterable[int | None], max_context: int) -> tuple[int, ...]:
    """Return the windows that get a pool, ascending: those that are shorter than the whole context."""
    return tuple(sorted({window for window in windows if window is not None and window < max_context}))


@dataclass(frozen=True)
class WindowPool:
    """A window's pool, and the number of blocks that a request may need in it.

    window       positions that a row sees, its own included
    num_blocks   blocks of the pool, the null block included
    block_size   positions of a block
    num_at_once  the most positions of a prompt that prefill writes at once
    num_behind   positions before a slot's last token at which rows may still run
    num_ahead    positions past a slot's tokens that a step may write
    """

    window: int
    num_blocks: int
    block_size: int
    num_at_once: int
    num_behind: int
    num_ahead: int

    @property
    def suffix(self) -> str:
        """The suffix of its tables' names, which is also its own name."""
        return window_suffix(self.window)

    def first_block(self, position: int) -> int:
        """Return the first block of a table that rows at `position` or later read."""
        lowest = max(0, position - self.window - self.num_behind)
        return lowest // ALIGNMENT * ALIGNMENT // self.block_size

    @property
    def ring_blocks(self) -> int:
        """Blocks of a ring: when decoding returns to the first, no row sees the positions that it writes over."""
        span = self.window + self.num_behind + self.num_ahead + ALIGNMENT
        return -(-span // self.block_size) + 1

    @property
    def end_blocks(self) -> int:
        """Blocks of a prompt's end: those that rows after it see."""
        return -(-(self.window + self.num_behind + ALIGNMENT) // self.block_size) + 1

    def most_blocks(self, per_chunk: int) -> int:
        """Return the most blocks that a request of any length holds at a time.

        per_chunk  blocks of a chunk, which is held as long as a row sees one of its blocks
        """
        return self.end_blocks + -(-self.num_at_once // self.block_size) + per_chunk + self.ring_blocks

    def worst_case(self, num_blocks: int, per_chunk: int) -> int:
        """Return the most blocks that a request whose table has `num_blocks` blocks holds at a time."""
        return min(num_blocks, self.most_blocks(per_chunk))

    def default_blocks(self, num_blocks: int, per_chunk: int, num_requests: int) -> int:
        """Return the blocks of a pool, the null block included, for `num_requests` tables of `num_blocks` blocks.

        Beside each request's worst case, it has blocks for ENDS_KEPT ends of prompts, from which later prompts go on.
        """
        each = self.worst_case(num_blocks, per_chunk) + ENDS_KEPT * (self.end_blocks + per_chunk)
        return num_requests * min(num_blocks, each) + 1
