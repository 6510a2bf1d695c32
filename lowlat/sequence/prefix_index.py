"""The prefix index lists the chunks of KV that prompts may share, counts their users, and orders their eviction.

It works in chunks, since KV is shared only in whole chunks. `lowlat.sequence.kvcache` gives blocks to requests.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["CachedChunk", "PrefixIndex"]


@dataclass(eq=False, slots=True)
class CachedChunk:
    """One written, immutable chunk of KV.

    digest     the chained digest of its tokens and all before them
    parent     the chunk before it; None for the first of a text
    blocks     its blocks of the first pool, in order of position
    num_users  block tables and copies that hold it
    listed     whether it is in the index; after it leaves, its users keep its blocks, which nobody else gets
    is_torn    a request was broken off during prefill after this chunk
    """

    digest: bytes
    parent: "CachedChunk | None"
    blocks: tuple[int, ...]
    num_users: int
    listed: bool = True
    is_torn: bool = False
    children: "dict[bytes, CachedChunk]" = field(default_factory=dict)


class PrefixIndex:
    """Chunks by chained content digest, with an LRU list of those without users.

    The parent of a listed chunk is listed. Callers call `retire` and `touch` for a leaf before its ancestors, so that a
    chunk is older than its unused ancestors and is evicted first. Pinned chunks are evicted after all others. A chain
    is pinned from its root on, so that the ancestors of a pinned chunk are pinned, too.

    num_pinned       listed chunks that are pinned
    num_broken_pins  pinned chunks that were evicted all the same, because a request had no other space
    """

    def __init__(self) -> None:
        self._chunks: dict[bytes, CachedChunk] = {}
        self._unused: dict[bytes, CachedChunk] = {}  # insertion order: oldest first
        self._unused_pinned: dict[bytes, CachedChunk] = {}
        self._pins: Counter[bytes] = Counter()
        self.num_pinned = self.num_broken_pins = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[CachedChunk]:
        return iter(self._chunks.values())

    @property
    def num_unused(self) -> int:
        """Listed chunks that no table holds."""
        return len(self._unused) + len(self._unused_pinned)

    def pin(self, digests: Sequence[bytes]) -> None:
        """Pin the chunks of a chain, from its root on, listed or not: while listed they are evicted after others."""
        self.num_pinned += sum(digest in self._chunks for digest in set(digests) if digest not in self._pins)
        self._pins.update(digests)
        for digest in reversed(digests):
            self.touch(digest)

    def unpin(self, digests: Sequence[bytes]) -> None:
        """Undo one `pin` of these chunks."""
        for digest in digests:
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]
                self.num_pinned -= digest in self._chunks
        for digest in reversed(digests):
            self.touch(digest)

    def root(self, salt: str) -> bytes:
        """Return the parent digest of first chunks for a salt; requests with another salt never find these chunks."""
        return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"salt").digest()

    def digest(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Return the digest of the chunk after `parent`; for the first chunk `parent` is the root of the salt."""
        content = array("q", token_ids).tobytes()
        return hashlib.blake2b(parent + content, digest_size=32).digest()

    def get(self, digest: bytes) -> CachedChunk | None:
        """Return the listed chunk with this digest, or None."""
        return self._chunks.get(digest)

    def add(self, digest: bytes, parent: CachedChunk | None, blocks: Sequence[int]) -> CachedChunk:
        """List a chunk whose KV is written, with one user. The digest must be new and the parent listed."""
        chunk = CachedChunk(digest, parent, tuple(blocks), num_users=1)
        self._chunks[digest] = chunk
        self.num_pinned += digest in self._pins
        if parent is not None:
            parent.children[digest] = chunk
        return chunk

    def acquire(self, chunk: CachedChunk) -> None:
        """Count one more user of a chunk."""
        chunk.num_users += 1
        self._forget_unused(chunk.digest)

    def retire(self, chunk: CachedChunk) -> tuple[int, ...]:
        """Count one user less; returns the blocks to free, if it was the last user and the chunk has left the index."""
        chunk.num_users -= 1
        if chunk.num_users:
            return ()
        if not chunk.listed:
            return chunk.blocks
        self._note_unused(chunk)
        return ()

    def touch(self, digest: bytes) -> None:
        """Make a chunk the newest of the unused ones; does nothing if it is in use."""
        if (chunk := self._forget_unused(digest)) is not None:
            self._note_unused(chunk)

    def touch_chain(self, chunk: CachedChunk) -> None:
        """Make an unused chunk the newest, then its ancestors.

        Does nothing for a chunk that left the index, where another may have its digest.
        """
        above = chunk if chunk.listed else None
        while above is not None:
            self.touch(above.digest)
            above = above.parent

    def oldest_first(self) -> list[CachedChunk]:
        """Return the chunks without users, in the order of eviction."""
        return [*self._unused.values(), *self._unused_pinned.values()]

    def evict_oldest(self) -> list[CachedChunk]:
        """Drop the chunk that is unused for longest, and its descendants; unpinned chunks go before pinned ones.

        Returns the dropped chunks. A descendant may have users: those of a request that computed an equal prefix itself
        and listed chunks after it. Such a chunk only leaves the index. Raises KeyError when no chunk is unused.
        """
        if not self._unused:
            if not self._unused_pinned:
                raise KeyError("no chunk is unused")
            self.num_broken_pins += 1
        return self.drop(next(iter((self._unused or self._unused_pinned).values())))

    def drop(self, chunk: CachedChunk) -> list[CachedChunk]:
        """Remove a chunk and all its descendants from the index; returns them."""
        if not chunk.listed:
            return []
        if chunk.parent is not None:
            del chunk.parent.children[chunk.digest]
        dropped, pending = [], [chunk]
        while pending:
            last = pending.pop()
            pending.extend(last.children.values())
            last.children.clear()
            last.parent, last.listed = None, False
            del self._chunks[last.digest]
            self.num_pinned -= last.digest in self._pins
            self._forget_unused(last.digest)
            dropped.append(last)
        return dropped

    def problems(self) -> Iterator[str]:
        """Describe the index's faults, one string each; none if it is sound."""
        position = {digest: place for place, digest in enumerate([*self._unused, *self._unused_pinned])}
        for digest, chunk in self._chunks.items():
            name = digest.hex()[:8]
            if chunk.digest != digest or not chunk.listed:
                yield f"chunk {name} is listed under a digest that is not its own"
            if (chunk.num_users == 0) != (digest in position):
                yield f"chunk {name} has {chunk.num_users} users, but is counted otherwise"
            parent = chunk.parent
            if parent is None:
                continue
            if self._chunks.get(parent.digest) is not parent or parent.children.get(digest) is not chunk:
                yield f"chunk {name} hangs on a parent that is not listed or does not know it"
            elif digest in position and position.get(parent.digest, len(position)) < position[digest]:
                yield f"chunk {name} would be evicted after its parent"
        for digest in position.keys() - self._chunks.keys():
            yield f"unused chunk {digest.hex()[:8]} is not listed"
        if self.num_pinned != (count := sum(digest in self._chunks for digest in self._pins)):
            yield f"{count} chunks are pinned, and {self.num_pinned} are counted"
        for digest in position:
            if (digest in self._unused_pinned) != (digest in self._pins):
                yield f"unused chunk {digest.hex()[:8]} has {self._pins[digest]} pins, but goes as if it had others"

    def _note_unused(self, chunk: CachedChunk) -> None:
        (self._unused_pinned if chunk.digest in self._pins else self._unused)[chunk.digest] = chunk

    def _forget_unused(self, digest: bytes) -> CachedChunk | None:
        return self._unused.pop(digest, None) or self._unused_pinned.pop(digest, None)
