"""The prefix index knows which chunks of one runtime's KV may be shared, who uses them, and which goes first.

Its unit is the chunk, the unit in which KV may be shared at all: one with a block missing would be of no use
to anybody. Blocks are handed out to requests by `lowlat.sequence.kvcache`.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["CachedChunk", "PrefixIndex"]


@dataclass(eq=False, slots=True)
class CachedChunk:
    """One written, immutable chunk: the chained digest of its content, its blocks, and the tables that hold it.

    is_torn  the prompt of a request went on after it, which was broken off

    A chunk that left the index (`listed` False) keeps its users until they end; its blocks are not shared
    again.
    """

    digest: bytes
    parent: "CachedChunk | None"
    blocks: tuple[int, ...]
    num_users: int
    listed: bool = True
    is_torn: bool = False
    children: "dict[bytes, CachedChunk]" = field(default_factory=dict)


class PrefixIndex:
    """Chunks by chained content digest, and an LRU of those without users.

    The parent of a listed chunk is listed. Unused chunks are in the order in which they go: `retire` and
    `touch` are called leaf first, so that a chunk is older than its unused ancestors. Pinned chunks go after all
    others; a pin is of a chain from its root, so that what leads to a pinned chunk is pinned, too.

    num_pinned       listed chunks that are pinned
    num_broken_pins  pinned chunks that went all the same, as a request had no other place
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
        """Pin a chain, from its root on: these chunks, whenever they are listed, go after those without a pin."""
        self.num_pinned += sum(digest in self._chunks for digest in set(digests) if digest not in self._pins)
        self._pins.update(digests)
        for digest in reversed(digests):
            self.touch(digest)

    def unpin(self, digests: Sequence[bytes]) -> None:
        """Take a pin back that `pin` has given these chunks."""
        for digest in digests:
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]
                self.num_pinned -= digest in self._chunks
        for digest in reversed(digests):
            self.touch(digest)

    def root(self, salt: str) -> bytes:
        """The parent digest of first chunks of requests with this salt; requests with another never find them."""
        return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"salt").digest()

    def digest(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The digest of a chunk after `parent`, which is the root of its salt for the first chunk of a sequence."""
        content = array("q", token_ids).tobytes()
        return hashlib.blake2b(parent + content, digest_size=32).digest()

    def get(self, digest: bytes) -> CachedChunk | None:
        """The listed chunk with this digest."""
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
        """One more table holds the chunk."""
        chunk.num_users += 1
        self._forget_unused(chunk.digest)

    def retire(self, chunk: CachedChunk) -> tuple[int, ...]:
        """One table less holds the chunk; its blocks, if it was the last and the chunk is listed no more."""
        chunk.num_users -= 1
        if chunk.num_users:
            return ()
        if not chunk.listed:
            return chunk.blocks
        self._note_unused(chunk)
        return ()

    def touch(self, digest: bytes) -> None:
        """Make an unused chunk the newest."""
        if (chunk := self._forget_unused(digest)) is not None:
            self._note_unused(chunk)

    def touch_chain(self, chunk: CachedChunk) -> None:
        """Make an unused chunk newest, and then what leads to it; of one that left the index neither: another may have
        its digest there."""
        above = chunk if chunk.listed else None
        while above is not None:
            self.touch(above.digest)
            above = above.parent

    def oldest_first(self) -> list[CachedChunk]:
        """The chunks without users, in the order in which they go."""
        return [*self._unused.values(), *self._unused_pinned.values()]

    def evict_oldest(self) -> list[CachedChunk]:
        """Drop the chunk unused for longest, one without a pin before others, with what is reached through it alone.

        Returns the dropped chunks. Those with users (a request that computed an equal prefix itself
        registered what came after) merely leave the index. Raises KeyError when no chunk is unused.
        """
        if not self._unused:
            if not self._unused_pinned:
                raise KeyError("no chunk is unused")
            self.num_broken_pins += 1
        return self.drop(next(iter((self._unused or self._unused_pinned).values())))

    def drop(self, chunk: CachedChunk) -> list[CachedChunk]:
        """Take a chunk and all its descendants out of the index; returns them."""
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
        """Faults of the index itself, in words; nothing when it is sound."""
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
