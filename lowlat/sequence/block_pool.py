"""This pool has the blocks that nobody holds: free ones, and those that are cleared before reuse."""

from collections.abc import Iterable

from lowlat.errors import ConfigError

__all__ = ["BlockPool"]


class BlockPool:
    """A pool of `num_blocks` blocks, of which block 0 is null and never handed out.

    free      blocks that can be handed out, a stack: the lowest on top at first
    dirty     blocks that are held, and are to be cleared when they come back
    to_clear  blocks that came back so
    Raises ConfigError for a pool without a block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(f"kv_blocks must be at least 2 (block 0 is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, 0, -1))
        self.to_clear: list[int] = []
        self.dirty: set[int] = set()

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out."""
        return self.num_blocks - 1

    def take(self, count: int) -> list[int]:
        """Free blocks, ascending: neighbours of a chunk are copied as one run, in whatever order they were freed."""
        return sorted(self.free.pop() for _ in range(count))

    def give_back(self, blocks: Iterable[int]) -> None:
        """Blocks that nobody holds any more; dirty ones are free once they were cleared."""
        for block in blocks:
            if block in self.dirty:
                self.dirty.discard(block)
                self.to_clear.append(block)
            else:
                self.free.append(block)

    def take_to_clear(self) -> list[int]:
        """Blocks that are free from here on, and that the caller clears before anything else is launched."""
        blocks, self.to_clear = self.to_clear, []
        self.free.extend(blocks)
        return blocks
