"""This module keeps the chunks on the device that prompts can share, until a request needs their blocks."""

from collections.abc import Hashable, Iterable, Sequence

from lowlat.errors import ConfigError
from lowlat.sequence.block_pool import BlockPool
from lowlat.sequence.pool_book import PoolBook
from lowlat.sequence.prefix_chains import PrefixChain, PrefixChains
from lowlat.sequence.prefix_index import CachedChunk, PrefixIndex
from lowlat.sequence.tiers.tiers import CacheTiers

__all__ = ["SharedChunks"]


class SharedChunks:
    """The prefix index, and the first pool's blocks, in which its chunks lie.

    num_blocks, block_size, prefill_chunk  see `lowlat.sequence.kvcache.KVCache`
    reuse       False: no chunk is shared
    books       the books of other pools, which drop and pin the same chunks
    tiers       the tiers below the device's memory, which pin the same chunks; None: there are none
    generation  a number that grows when an admission that did not fit might fit now
    Raises ConfigError for sizes that cannot work.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefill_chunk: int,
        *,
        reuse: bool,
        books: Sequence[PoolBook],
        tiers: CacheTiers | None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        if block_size < 1 or prefill_chunk < 1 or prefill_chunk % block_size:
            raise ConfigError(
                f"prefill_chunk must be a positive multiple of block_size {block_size}, got {prefill_chunk}"
            )
        self.prefill_chunk, self.per_chunk = prefill_chunk, prefill_chunk // block_size
        self.reuse, self.books, self.tiers = reuse, tuple(books), tiers
        self.index = PrefixIndex()
        self.generation = 0
        self._chains = PrefixChains(self.index, prefill_chunk)
        self._pins: dict[Hashable, tuple[list[bytes], tuple[list[bytes], ...]]] = {}  # chains, and where prompts go on

    @property
    def num_evictable(self) -> int:
        """Blocks of listed chunks without users."""
        return self.index.num_unused * self.per_chunk

    @property
    def num_available(self) -> int:
        """Blocks that `take` can return."""
        return len(self.pool.free) + self.num_evictable

    def chain(self, prompt: Sequence[int], root: bytes) -> PrefixChain:
        """Return the digests of a prompt's chunks, under the root of its salt."""
        return self._chains.of(prompt, root)

    def num_chunks(self, prompt: Sequence[int]) -> int:
        """Return the number of chunks that a prompt may reuse: prefill always reads its last token."""
        return (len(prompt) - 1) // self.prefill_chunk if self.reuse else 0

    def num_whole(self, token_ids: Sequence[int]) -> int:
        """Return the number of complete chunks of a text; 0 without reuse."""
        return len(token_ids) // self.prefill_chunk if self.reuse else 0

    def lookup(self, prompt: Sequence[int], root: bytes) -> tuple[list[bytes], list[CachedChunk]]:
        """Return the digests of a prompt's first chunks that are listed, and these chunks."""
        digests: list[bytes] = []
        hits: list[CachedChunk] = []
        chain = self.chain(prompt, root)
        for k in range(self.num_chunks(prompt)):
            digest = chain.digest(k)
            chunk = self.index.get(digest)
            if chunk is None:
                break
            digests.append(digest)
            hits.append(chunk)
        return digests, hits

    def num_hits(self, digests: Sequence[bytes]) -> int:
        """Return the number of chunks after which a prompt can go on in all pools."""
        count = len(digests)
        while count and (fewer := min((book.num_hits(digests, count) for book in self.books), default=count)) < count:
            count = fewer
        return count

    def blocks_of(self, table: Sequence[int], k: int) -> Sequence[int]:
        """Return the blocks of chunk k in a table."""
        return table[k * self.per_chunk : (k + 1) * self.per_chunk]

    def take(self, count: int) -> list[int]:
        """Take `count` blocks; if too few are free, the least recently used chunks are evicted."""
        while len(self.pool.free) < count:
            self.free(self.index.evict_oldest())
        return self.pool.take(count)

    def free(self, chunks: Iterable[CachedChunk], *, poisoned: bool = False) -> None:
        """Free the blocks of chunks that left the index; poisoned: they are cleared before reuse."""
        for chunk in chunks:
            for book in self.books:
                book.drop(chunk.digest, poisoned=poisoned)
            if poisoned:
                self.pool.dirty.update(chunk.blocks)
            if not chunk.num_users:
                self.pool.give_back(chunk.blocks)

    def retire(self, chunk: CachedChunk) -> None:
        """Count one user of a chunk less."""
        self.pool.give_back(self.index.retire(chunk))

    def pin(self, owner: Hashable, digests: Sequence[bytes], *, completed: bool = True) -> None:
        """Pin a chain of chunks in every pool and tier, in place of the owner's pins before.

        Other pools may lack what the end of the chain needs, if decoding wrote it or a prompt was broken off. Then they
        pin what is needed after the longest part from which a prompt can go on.

        completed  False: they also pin what the last completed chain needs, since the next prompt may differ
        """
        chain = list(digests)
        ends: tuple[list[bytes], ...] = (chain[: self.num_hits(chain)],)
        if not completed and owner in self._pins:
            ends += self._pins[owner][1][-1:]
        self.unpin(owner)
        self._pins[owner] = chain, ends
        self.index.pin(chain)
        for book in self.books:
            for each in (chain, *ends):
                book.pin(each)
        if self.tiers is not None:
            self.tiers.pin(chain)

    def unpin(self, owner: Hashable) -> None:
        """Remove an owner's pins."""
        chain, ends = self._pins.pop(owner, ([], ()))
        self.index.unpin(chain)
        for book in self.books:
            for each in (chain, *ends):
                book.unpin(each)
        if self.tiers is not None:
            self.tiers.unpin(chain)

    def pinned(self, owner: Hashable) -> list[bytes]:
        """Return the chain that an owner pins."""
        return list(self._pins.get(owner, ([], ()))[0])
