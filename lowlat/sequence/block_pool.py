"""This module keeps the blocks of the first pool that no request or chunk holds: free ones, and those to clear."""

from collections.abc import Iterable

from lowlat.errors import ConfigError

__all__ = ["BlockPool"]


class BlockPool:
    """A pool of `num_blocks` blocks; block 0 is the null block, which is never handed out.

    free      blocks that can be handed out, a stack: at first the lowest is on top
    dirty     blocks that are held, and must be cleared after they are given back
    to_clear  dirty blocks that were given back
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
        """Take free blocks, ascending, so that neighbours in a chunk are copied as one run."""
        return sorted(self.free.pop() for _ in range(count))

    def give_back(self, blocks: Iterable[int]) -> None:
        """Give blocks back: dirty ones must be cleared before they are free."""
        for block in blocks:
            if block in self.dirty:
                self.dirty.discard(block)
                self.to_clear.append(block)
            else:
                self.free.append(block)

    def take_to_clear(self) -> list[int]:
        """Free the blocks to clear, and return them: the caller clears them before it launches anything else."""
        blocks, self.to_clear = self.to_clear, []
        self.free.extend(blocks)
        return blocks
