"""This module tracks the chunks that are being copied between the device and the tiers.

If a chunk's copy runs beside steps, the copy counts as one of the chunk's users, so that its blocks do not change.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Protocol

import torch

from lowlat.sequence.pool_book import PoolBook
from lowlat.sequence.prefix_index import CachedChunk
from lowlat.sequence.shared_chunks import SharedChunks
from lowlat.sequence.tiers.key import COMING, ChunkKey, Load, Presence, Save
from lowlat.sequence.tiers.tiers import READ_AHEAD

__all__ = ["ChunkMoves", "GivenContents"]


class Source(Protocol):
    """A source of contents of chunks.

    apart  contents are copied to the device while others decode, and arrive later
    """

    apart: bool

    def find(self, key: ChunkKey) -> torch.Tensor | Presence | None:
        """Return a content, [n] uint8 in host memory; COMING: it is on its way; None: there is none."""

    def read_ahead(self, keys: Iterable[ChunkKey]) -> None:
        """Begin to read contents that will be asked for."""


class GivenContents:
    """A source of contents that the caller already has; see `Source`."""

    apart = False

    def __init__(self, contents: Mapping[ChunkKey, torch.Tensor]) -> None:
        self._contents = contents

    def find(self, key: ChunkKey) -> torch.Tensor | Presence | None:
        """See Source."""
        return self._contents.get(key)

    def read_ahead(self, keys: Iterable[ChunkKey]) -> None:
        """See Source."""
        return


class ChunkMoves:
    """The copies of chunks that are to begin (`loads`, `saves`), and those that are under way.

    moving    chunks that copies hold, and the number of these copies
    arriving  chunks whose contents have not arrived on the device
    """

    def __init__(self, chunks: SharedChunks) -> None:
        self.loads: list[Load] = []
        self.saves: list[Save] = []
        self._saved: set[ChunkKey] = set()  # the keys of `saves`
        self.moving: Counter[CachedChunk] = Counter()
        self.arriving: set[CachedChunk] = set()
        self._found: dict[ChunkKey, torch.Tensor] = {}  # other pools' contents, until all that a prompt needs are there
        self._chunks = chunks

    def settle(self) -> None:
        """Release the chunks whose copies have ended; those whose copy failed leave the index."""
        tiers = self._chunks.tiers
        if tiers is None or not (ended := tiers.take_done()):
            return
        for holder in tiers.take_failed():
            if isinstance(holder, CachedChunk):
                self.forget_kept(holder.digest)
                self._chunks.free(self._chunks.index.drop(holder))
        self.end(ended)

    def hold(self, chunk: CachedChunk) -> CachedChunk:
        """Note that a copy holds a chunk until `end`; the caller has counted the copy as a user."""
        self.moving[chunk] += 1
        return chunk

    def end(self, holders: Iterable[object]) -> None:
        """Record that copies of these chunks have ended."""
        chunks = [holder for holder in holders if isinstance(holder, CachedChunk)]
        for chunk in chunks:
            self.moving[chunk] -= 1
            if not self.moving[chunk]:
                del self.moving[chunk]
                self.arriving.discard(chunk)
            self._chunks.retire(chunk)
        above = {chunk.parent for chunk in chunks}
        for chunk in chunks:
            if chunk not in above:
                self._chunks.index.touch_chain(chunk)

    def save(self, digests: Iterable[bytes], *, with_all_before: bool = False) -> None:
        """Queue chunks for the tiers: those that are not kept there yet, but whose parents are.

        with_all_before  all ancestors are among the digests, or in the tiers; the parents are not checked
        """
        if self._chunks.tiers is None:
            return
        for digest in digests:
            chunk = self._chunks.index.get(digest)
            if chunk is None or self._is_kept(digest):
                continue
            if with_all_before or chunk.parent is None or self._is_kept(chunk.parent.digest):
                self._chunks.index.acquire(chunk)
                self._save(Save(ChunkKey(digest, ""), chunk.blocks, self.hold(chunk)))

    def save_of(self, book: PoolBook, digests: Iterable[bytes], *, spare: bool = False) -> None:
        """Do the same for another pool; spare: see `Save`."""
        tiers = self._chunks.tiers
        if tiers is None:
            return
        for digest in digests:
            places = book.places(digest)
            if places is None or not self._is_kept(digest) or self._is_kept(digest, book.name):
                continue
            if not spare or tiers.has_space(book.name, len(places)):
                self._save(Save(ChunkKey(digest, book.name), places, spare=spare))

    def _save(self, save: Save) -> None:
        self.saves.append(save)
        self._saved.add(save.key)

    def _is_kept(self, digest: bytes, pool: str = "") -> bool:
        """Whether a content is in the tiers, or on its way there."""
        key = ChunkKey(digest, pool)
        return key in self._saved or (self._chunks.tiers is not None and self._chunks.tiers.has(key))

    def take_saves(self) -> list[Save]:
        """Take the contents that the caller must read for the tiers."""
        saves, self.saves = self.saves, []
        self._saved.clear()
        return saves

    def contents(self, token_ids: Sequence[int], root: bytes, count: int) -> list[tuple[int, Save]]:
        """Return the contents of a text's first chunks that are listed, by number; hold those of the first pool.

        The caller reads contents without a holder before it launches anything else.
        """
        chain, found = self._chunks.chain(token_ids, root), list[tuple[int, Save]]()
        for k in range(count):
            chunk = self._chunks.index.get(chain.digest(k))
            if chunk is None:
                break
            self._chunks.index.acquire(chunk)
            found.append((k, Save(ChunkKey(chunk.digest, ""), chunk.blocks, self.hold(chunk))))
        digests = [save.key.digest for _, save in found]
        for book in self._chunks.books:
            for digest in book.needed(digests):
                if (places := book.places(digest)) is not None:
                    found.append((digests.index(digest), Save(ChunkKey(digest, book.name), places)))
        return found

    def restore(self, source: Source, prompt: Sequence[int], root: bytes, count: int) -> bool:
        """List the contents that a source has of a prompt's first chunks, in unused blocks; False: more are coming."""
        chunks, held = self._chunks, list[CachedChunk]()
        chain, ready = chunks.chain(prompt, root), True
        for k in range(count):
            digest = chain.digest(k)
            chunk = chunks.index.get(digest)
            if chunk is None:
                found = source.find(ChunkKey(digest, ""))
                if found is COMING:
                    ready = False
                    following = range(k + 1, min(count, k + READ_AHEAD))
                    source.read_ahead(ChunkKey(chain.digest(later), "") for later in following)
                if not isinstance(found, torch.Tensor) or chunks.num_available < chunks.per_chunk:
                    break
                chunk = chunks.index.add(digest, held[-1] if held else None, chunks.take(chunks.per_chunk))
                if source.apart:  # its one user is the copy
                    self.arriving.add(chunk)
                    self.loads.append(Load("", chunk.blocks, found, self.hold(chunk)))
                    chunks.index.acquire(chunk)
                else:
                    self.loads.append(Load("", chunk.blocks, found))
            else:
                chunks.index.acquire(chunk)
            held.append(chunk)
        ready = ready and self.arriving.isdisjoint(held)
        digests, found_before = [chunk.digest for chunk in held], self._found
        self._found = {}
        for book in chunks.books if ready else ():
            ready = self._restore_of(book, source, digests, found_before) and ready
        for chunk in reversed(held):
            chunks.index.retire(chunk)
        return ready

    def _restore_of(
        self, book: PoolBook, source: Source, digests: Sequence[bytes], before: Mapping[ChunkKey, torch.Tensor]
    ) -> bool:
        """Do the same for another pool.

        before  contents that an earlier call found; they are kept until all contents that a prompt needs are there
        """
        contents: dict[bytes, torch.Tensor] = {}
        coming = False

        def is_kept(digest: bytes) -> bool | Presence:
            nonlocal coming
            key = ChunkKey(digest, book.name)
            found = before[key] if key in before else source.find(key)
            if isinstance(found, torch.Tensor):
                contents[digest] = found
            coming = coming or found is COMING
            return COMING if found is COMING else found is not None

        restored = book.restore(digests, is_kept)
        self.loads += [Load(book.name, places, contents[digest]) for digest, places in restored.items()]
        if coming:
            self._found |= {ChunkKey(digest, book.name): content for digest, content in contents.items()}
        return not coming

    def touch_kept(self, digests: Sequence[bytes]) -> None:
        """Make the contents from which a prompt can go on the newest in the tiers, the last chunk first.

        A chunk is of use without its descendants, but not without its ancestors, or other pools' contents at its end.
        """
        tiers, books = self._chunks.tiers, self._chunks.books
        if tiers is None:
            return
        kept = list(digests if tiers.has_files else takewhile(self._is_kept, digests))

        def goes_on(book: PoolBook) -> bool:
            return book.goes_on(kept, lambda digest: self._is_kept(digest, book.name))

        while kept and not tiers.has_files and not all(map(goes_on, books)):
            kept.pop()
        ends = [ChunkKey(digest, book.name) for book in books for digest in book.needed(kept)]
        tiers.touch([*(ChunkKey(digest, "") for digest in reversed(kept)), *ends])

    def forget_kept(self, digest: bytes) -> None:
        """Remove a chunk that may hold NaN from the tiers."""
        tiers = self._chunks.tiers
        self._found = {key: content for key, content in self._found.items() if key.digest != digest}
        if tiers is not None:
            for pool in ("", *(book.name for book in self._chunks.books)):
                tiers.drop(ChunkKey(digest, pool))
