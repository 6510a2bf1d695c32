"""This module sizes a window's pool: layers of one sliding window share its blocks and its tables.

A row at position p of such a layer sees positions above p - window, so a request needs few blocks of it at a time,
however long its text: those that prefill writes and sees, and in decoding a ring, whose blocks return when the text
has moved on. The table of a slot is complete when it begins to decode: nothing about it changes from step to step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lowlat.models.windows import window_suffix

__all__ = ["ALIGNMENT", "ENDS_KEPT", "WindowPool", "kept_windows"]

ALIGNMENT = 128  # kernels read whole tiles of positions: none reads below a multiple of it that a window reaches
ENDS_KEPT = 4  # for each request that the pool serves, ends of prompts whose blocks can stay for the next prompts


def kept_windows(windows: Iterable[int | None], max_context: int) -> tuple[int, ...]:
    """The windows that get a pool, ascending: those of some layer that do not hold the whole context."""
    return tuple(sorted({window for window in windows if window is not None and window < max_context}))


@dataclass(frozen=True)
class WindowPool:
    """A window's pool, and what a request may need of it.

    window       positions that a row sees, its own included
    num_blocks   blocks of the pool, the null block included
    block_size   positions of a block
    num_at_once  positions of a prompt that prefill writes at once, at most
    num_behind   positions before a slot's last token from which rows may still be run
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
        """The ending of the names of its tables, and its name."""
        return window_suffix(self.window)

    def first_block(self, position: int) -> int:
        """The block of a table from which rows at `position`, or later ones, read; those before it are not read."""
        lowest = max(0, position - self.window - self.num_behind)
        return lowest // ALIGNMENT * ALIGNMENT // self.block_size

    @property
    def ring_blocks(self) -> int:
        """Blocks after which decoding may come back to the first: nothing that a row still sees is written over."""
        span = self.window + self.num_behind + self.num_ahead + ALIGNMENT
        return -(-span // self.block_size) + 1

    @property
    def end_blocks(self) -> int:
        """Blocks that a prompt's end needs, from the first that rows after it see."""
        return -(-(self.window + self.num_behind + ALIGNMENT) // self.block_size) + 1

    def most_blocks(self, per_chunk: int) -> int:
        """Blocks that a request holds at a time, at most, however long it is.

        per_chunk  blocks of a chunk, which is kept as long as one of them is seen
        """
        return self.end_blocks + -(-self.num_at_once // self.block_size) + per_chunk + self.ring_blocks

    def worst_case(self, num_blocks: int, per_chunk: int) -> int:
        """Blocks that a request whose table has `num_blocks` holds at a time, at most."""
        return min(num_blocks, self.most_blocks(per_chunk))

    def default_blocks(self, num_blocks: int, per_chunk: int, num_requests: int) -> int:
        """Blocks of a pool, the null block included, for so many requests whose tables have `num_blocks`.

        Next to what each needs there are some for the ends of prompts, which the next prompts may go on from.
        """
        each = self.worst_case(num_blocks, per_chunk) + ENDS_KEPT * (self.end_blocks + per_chunk)
        return num_requests * min(num_blocks, each) + 1
