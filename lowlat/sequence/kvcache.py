"""This module is the host's bookkeeping of paged KV: block tables, free blocks, prefix reuse, and balance checks.

A request has one block table for all layers without a window, the target's and the draft model's: the same block ids
index each layer's cache. Other kinds of state have pools and books of their own, see `PoolBook`. The book touches no
memory: the runtime writes the KV, reports what it wrote, and zeroes the blocks that `take_blocks_to_clear` returns. The
device's stream orders all work, so a freed block may be handed out at once: its next writer runs later.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

import torch

from lowlat.errors import RequestError
from lowlat.sequence.admitted import Admitted, block_problems, table_problems
from lowlat.sequence.book import Allocation, BlockStats, InvariantError, MovedIn, MovedOut
from lowlat.sequence.chunk_moves import ChunkMoves, GivenContents
from lowlat.sequence.pool_book import PoolBook
from lowlat.sequence.prefix_index import CachedChunk
from lowlat.sequence.shared_chunks import SharedChunks
from lowlat.sequence.tiers.key import ChunkKey, Load, Save
from lowlat.sequence.tiers.tiers import CacheTiers

__all__ = ["KVCache"]


class KVCache:
    """The book of the first pool: `num_blocks` blocks of `block_size` positions, of which block 0 is the null block.

    num_blocks      blocks in the pool, the null block included
    prefill_chunk   positions of one prefill chunk, a multiple of block_size: the unit of sharing
    reuse           share complete chunks written by prefill
    share_decoded   also share chunks that decoding wrote, wholly or in part
    books           the books of other pools, which this book calls from now on
    tiers           the cache below the device's memory, whose chunks prompts also find; None: there is none

    For each request the scheduler calls `check`, then `admit` until it fits, `append` and `mark_prefilled` for each
    part of the prompt, and `release`. Decode steps call nothing.

    Each block is free, in use (in a table), evictable (it has content but no user, so admission may take it), or
    waiting to be cleared. Admission reserves the worst case, so that no step can run out. Not safe for use by several
    threads. Raises ConfigError for sizes that cannot work.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefill_chunk: int,
        *,
        reuse: bool,
        share_decoded: bool,
        books: Sequence[PoolBook] = (),
        tiers: CacheTiers | None = None,
    ) -> None:
        self.tiers = tiers if reuse else None
        self._chunks = SharedChunks(num_blocks, block_size, prefill_chunk, reuse=reuse, books=books, tiers=self.tiers)
        self._moves = ChunkMoves(self._chunks)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefill_chunk = prefill_chunk
        self.reuse = reuse
        self.share_decoded = reuse and share_decoded
        self._books = self._chunks.books
        self._entries: dict[str, Admitted] = {}
        self._queries = self._query_tokens = self._hit_tokens = 0

    @property
    def generation(self) -> int:
        """A number that grows when an admission that did not fit might fit now, or a chunk has come from a file."""
        return self._chunks.generation + (0 if self.tiers is None else self.tiers.num_read)

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out."""
        return self._chunks.pool.capacity

    def max_total_tokens(self, num_overprovision: int) -> int:
        """Return the most tokens, prompt and completion, that the pool holds for one request."""
        return self.capacity * self.block_size - num_overprovision

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def is_coming(self, prompt_token_ids: Sequence[int], salt: str) -> bool:
        """Whether an admitted request is about to write the first chunk of this prompt that is not listed yet."""
        chunks = self._chunks
        chain = chunks.chain(prompt_token_ids, chunks.index.root(salt))
        count = chunks.num_chunks(prompt_token_ids)
        found = next((k for k in range(count) if chunks.index.get(chain.digest(k)) is None), count)
        if found == count:
            return False
        end = (found + 1) * self.prefill_chunk

        def writes(entry: Admitted) -> bool:
            if entry.root != chain.root or entry.tainted or not entry.num_prefilled < end <= entry.num_known:
                return False
            return chunks.chain(entry.prompt, entry.root).digest(found) == chain.digest(found)

        return any(map(writes, self._entries.values()))

    def pin(self, owner: Hashable, digests: Sequence[bytes]) -> None:
        """Pin a chain of chunks for an owner, in place of its pins before: they are evicted after others."""
        self._chunks.pin(owner, digests)

    def unpin(self, owner: Hashable) -> None:
        """Remove an owner's pins."""
        self._chunks.unpin(owner)

    def pinned(self, owner: Hashable) -> list[bytes]:
        """Return the chain that an owner pins, as digests."""
        return self._chunks.pinned(owner)

    def pin_tokens(self, owner: Hashable, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Pin the complete chunks of a text for an owner; returns their digests."""
        chain = self._chunks.chain(token_ids, self._chunks.index.root(salt))
        digests = [chain.digest(k) for k in range(len(token_ids) // self.prefill_chunk)]
        self._chunks.pin(owner, digests)
        return digests

    def places_by_pool(self) -> dict[str, int]:
        """Return the blocks or rows of a chunk's content, by pool."""
        return {"": self._chunks.per_chunk, **{book.name: book.num_places for book in self._books}}

    def hold(self, token_ids: Sequence[int], salt: str) -> tuple[bool, list[tuple[int, Save]]]:
        """Hold the contents of a text's cached chunks until `let_go`.

        Returns True, and the contents by number of the chunk; while chunks of the tiers are on their way to the device,
        False, and holds nothing. The caller reads contents without a holder before it launches anything else.
        """
        self._moves.settle()
        root, count = self._chunks.index.root(salt), self._chunks.num_whole(token_ids)
        if self.tiers is not None and not self._moves.restore(self.tiers, token_ids, root, count):
            return False, []
        return True, self._moves.contents(token_ids, root, count)

    def let_go(self, holders: Sequence[object]) -> None:
        """Release the chunks that `hold` held."""
        self._moves.end(holders)
        self._chunks.generation += 1

    def adopt(self, token_ids: Sequence[int], salt: str, contents: Mapping[ChunkKey, torch.Tensor]) -> None:
        """List the given contents of a text's chunks in unused blocks; `take_loads` then returns the copies to make."""
        self._moves.settle()
        count = self._chunks.num_whole(token_ids)
        self._moves.restore(GivenContents(contents), token_ids, self._chunks.index.root(salt), count)
        self._chunks.generation += 1

    def check(self, request_id: str, max_total_tokens: int, num_overprovision: int) -> None:
        """Raise RequestError if a request's worst case is larger than the whole pool: it would wait for ever."""
        num_blocks = self.num_needed(max_total_tokens, num_overprovision)
        if num_blocks > self.capacity:
            raise RequestError(
                f"request {request_id} needs {num_blocks} KV blocks of {self.block_size} positions; "
                f"the pool has {self.capacity} (kv_blocks)"
            )
        for book in self._books:
            book.check(request_id, num_blocks)

    def admit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_total_tokens: int,
        num_overprovision: int,
        salt: str = "",
        *,
        reads: bool = True,
    ) -> Allocation | None:
        """Reserve a request's worst case, and share cached chunks of its prompt; returns None if it does not fit now.

        prompt_token_ids    [n] n >= 1; not copied, and must not change while the request lives
        max_total_tokens    the most tokens, prompt and completion
        num_overprovision   positions that a step may write past them
        salt                chunks are shared only among requests of the same salt
        reads               False: use no cached chunk; later requests may still share this prompt's chunks
        num_cached_tokens of the result is a multiple of prefill_chunk, at most n - 1.
        Time: one digest a cached chunk, plus the blocks. Raises RequestError for an id in use, an empty prompt, a total
        below the prompt, or a worst case larger than the whole pool.
        """
        self._moves.settle()
        total = self.num_needed(max_total_tokens, num_overprovision)
        self._check_admission(request_id, prompt_token_ids, max_total_tokens)
        self.check(request_id, max_total_tokens, num_overprovision)
        chunks, root = self._chunks, self._chunks.index.root(salt)
        if reads and self.tiers is not None:
            count = chunks.num_chunks(prompt_token_ids)
            if not self._moves.restore(self.tiers, prompt_token_ids, root, count):
                return None
        digests, hits = chunks.lookup(prompt_token_ids, root) if reads else ([], [])
        last = hits[-1] if hits else None  # with tiers, another text's next chunk may be there
        has_others = last is not None and (last.children or last.is_torn or self.tiers is not None)
        num_common = len(digests) if has_others else 0
        count = chunks.num_hits(digests)
        digests, hits = digests[:count], hits[:count]
        table = self._table(hits, total)
        if table is None or not all(book.fits(total, digests) for book in self._books):
            return None
        for book in self._books:
            book.admit(request_id, total, len(prompt_token_ids), digests, num_common)
        if self.tiers is not None:
            self._moves.touch_kept(digests)
            self.tiers.ask(digests)
            if not self.tiers.has_files:
                self._moves.save(digests)
                for book in self._books:
                    self._moves.save_of(book, book.needed(digests))
        blocks, num_cached = table(), len(hits) * self.prefill_chunk
        entry = Admitted(prompt_token_ids, blocks, total, num_cached, root, digests, dict(enumerate(hits)))
        entry.chain = chunks.chain(prompt_token_ids, root) if isinstance(prompt_token_ids, tuple) else None
        self._entries[request_id] = entry
        self._queries += 1
        self._query_tokens += len(prompt_token_ids)
        self._hit_tokens += num_cached
        return Allocation(list(blocks), num_cached)

    def _table(self, hits: Sequence[CachedChunk], total: int) -> Callable[[], list[int]] | None:
        """Return a function that makes a table of `total` blocks, these chunks first; None if too few are available."""
        shared = [block for chunk in hits for block in chunk.blocks]
        num_pinned = sum(len(chunk.blocks) for chunk in hits if not chunk.num_users)
        if total - len(shared) > self._chunks.num_available - num_pinned:
            return None

        def made() -> list[int]:
            for chunk in hits:
                self._chunks.index.acquire(chunk)
            return shared + self._chunks.take(total - len(shared))

        return made

    def take_loads(self) -> list[Load]:
        """Take the contents of the tiers that the caller must write to the device before it launches anything else."""
        loads, self._moves.loads = self._moves.loads, []
        return loads

    def take_saves(self) -> list[Save]:
        """Take the new contents that the caller must read for the tiers before it launches anything else."""
        return self._moves.take_saves()

    def note_all(self) -> None:
        """Queue all unused chunks that are in no tier for `take_saves`, least recently used first."""
        self._moves.settle()
        digests = [chunk.digest for chunk in self._chunks.index.oldest_first()]
        self._moves.save(digests, with_all_before=True)
        for book in self._books:
            self._moves.save_of(book, digests)

    def forget_all(self) -> None:
        """Drop all chunks on the device from the index; prompts still find chunks in the tiers.

        Raises InvariantError while requests or copies hold blocks.
        """
        self._moves.settle()
        if self._entries or self._moves.moving:
            raise InvariantError(
                f"{len(self._entries)} requests and {len(self._moves.moving)} copies hold blocks: their content cannot "
                "be forgotten"
            )
        for chunk in self._chunks.index.oldest_first():
            self._chunks.free(self._chunks.index.drop(chunk))
        self._chunks.generation += 1

    def append(self, request_id: str, start: int, stop: int) -> None:
        """Give a request its blocks in other pools for the prompt's positions [start, stop); the first pool's it has.

        Raises RequestError for an unknown id.
        """
        self._entry(request_id)
        for book in self._books:
            book.append(request_id, start, stop)

    def commands(self, request_id: str) -> dict[str, Sequence[int]]:
        """Return the commands for the next part of a request's prompt: contents [1, n] of command buffers, by name.

        "prefill_table" has the request's blocks by position, and other pools' tables theirs; its steps use them, too.
        Raises RequestError for an unknown id.
        """
        found: dict[str, Sequence[int]] = {"prefill_table": list(self._entry(request_id).table)}
        for book in self._books:
            found |= book.commands(request_id)
        return found

    def mark_prefilled(self, request_id: str, num_tokens: int) -> None:
        """Record that prefill wrote (or the stream will have written) the KV of the prompt's first num_tokens.

        Call it after every chunk; it lists the complete chunks for sharing. If an equal chunk is listed already, the
        request's own blocks are not shared. Raises RequestError for an unknown id, InvariantError when num_tokens goes
        back or past the prompt's last token.
        """
        entry = self._entry(request_id)
        if not entry.num_prefilled <= num_tokens <= len(entry.prompt):
            raise InvariantError(
                f"request {request_id}: {num_tokens} prompt tokens cannot be prefilled after "
                f"{entry.num_prefilled} of {len(entry.prompt)}"
            )
        entry.num_prefilled, num_before = num_tokens, len(entry.digests)
        listed = self._register(request_id, entry.prompt, num_tokens)
        if self.tiers is not None:
            self.tiers.ask(entry.digests[num_before:])
        self._moves.save(listed)
        for book in self._books:
            self._moves.save_of(book, book.worth_keeping(request_id, entry.digests, num_before))
            self._moves.save_of(book, book.spare(entry.digests, num_before), spare=True)
        if num_tokens == len(entry.prompt) and self._books:
            for book in self._books:
                book.mark_prefilled(request_id)
            self._chunks.generation += 1

    def release(
        self,
        request_id: str,
        token_ids: Sequence[int] | None = None,
        *,
        num_written: int | None = None,
        poisoned: bool = False,
        owner: Hashable = None,
        completed: bool = True,
    ) -> None:
        """Free a request's blocks; its listed chunks become evictable. The device must not write to them any more.

        token_ids     the whole committed sequence, prompt included; only share_decoded uses it
        num_written   positions of it whose KV (the target's and the draft model's) is certainly written; None: all but
                      the last. With a draft model give less: a slot's last step does not extend its KV
        poisoned      the request failed with NaN: no chunk that it wrote or read is shared again, and all of its blocks
                      are cleared before reuse
        owner         pins the chunks of the sequence, in place of its pins before; None: nobody does
        completed     False: the request was broken off; its owner keeps its pins unless the sequence continues them
        Raises RequestError for an unknown id, InvariantError for a sequence that does not continue the prompt.
        """
        entry = self._entry(request_id)
        if poisoned:
            self._distrust(request_id)
        elif self.share_decoded and token_ids is not None and entry.num_prefilled == len(entry.prompt):
            written = len(token_ids) - 1 if num_written is None else min(num_written, len(token_ids) - 1)
            if list(token_ids[: len(entry.prompt)]) != list(entry.prompt):
                raise InvariantError(f"request {request_id}: the committed sequence does not start with its prompt")
            if written > len(entry.table) * self.block_size:
                raise InvariantError(f"request {request_id}: {written} positions exceed its {len(entry.table)} blocks")
            self._register(request_id, token_ids, written)
        if owner is not None and not poisoned and not entry.tainted:
            before = self._chunks.pinned(owner)
            if completed or entry.digests[: len(before)] == before:
                self._chunks.pin(owner, entry.digests, completed=completed)
        last = self._chunks.index.get(entry.digests[-1]) if entry.digests else None
        if last is not None and entry.num_prefilled < len(entry.prompt):
            last.is_torn = True
        self._let_go(request_id)
        for book in self._books:
            book.release(request_id)

    def _let_go(self, request_id: str) -> None:
        """Free a request's blocks of the first pool."""
        entry, chunks = self._entries.pop(request_id), self._chunks
        through_chunks = {block for k in entry.held for block in chunks.blocks_of(entry.table, k)}
        chunks.pool.give_back(block for block in reversed(entry.table) if block not in through_chunks)
        for k in sorted(entry.held, reverse=True):
            chunks.retire(entry.held[k])
        for digest in reversed(entry.digests):  # also others' equal chunks: a chunk goes before its ancestors
            chunks.index.touch(digest)
        self._moves.touch_kept(entry.digests)
        chunks.generation += 1

    def grow(self, request_id: str) -> None:
        """Tell the books that a request's prompt, the list that it was admitted with, is now longer.

        Raises RequestError for an unknown id.
        """
        entry = self._entry(request_id)
        for book in self._books:
            book.grow(request_id, len(entry.prompt))

    def num_to_move(self, request_id: str, num_written: int) -> dict[str, int]:
        """Return the number of blocks, by pool, whose contents `move_out` would have the caller read.

        Raises RequestError for an unknown id.
        """
        count = min(len(self._entry(request_id).table), -(-num_written // self.block_size))
        return {"": count, **{book.name: book.num_to_move(request_id) for book in self._books}}

    def move_out(
        self, request_id: str, num_written: int, has_space: Callable[[Mapping[str, int]], bool]
    ) -> MovedOut | None:
        """Free a request's blocks, whose contents the caller reads first; its listed chunks become evictable.

        has_space  whether the caller has memory for so many blocks by pool; if not, this returns None and does nothing

        Raises RequestError for an unknown id.
        """
        entry, counts = self._entry(request_id), self.num_to_move(request_id, num_written)
        if not has_space(counts):
            return None
        places = {"": tuple(entry.table[: counts[""]])}
        own: dict[str, object] = {}
        for book in self._books:
            places[book.name], own[book.name] = book.move_out(request_id)
        self._let_go(request_id)
        return MovedOut(places, tuple(entry.table), own | {"": entry})

    def move_in(self, request_id: str, moved: MovedOut) -> MovedIn | None:
        """Give a request blocks again, and share its chunks that are still listed; returns None if it does not fit now.

        With share_decoded it gets only blocks of its own: decoding may have written other bits to a listed chunk.
        Raises InvariantError for a request that was not moved out.
        """
        self._moves.settle()
        before = moved.own[""]
        if not isinstance(before, Admitted) or request_id in self._entries:
            raise InvariantError(f"request {request_id} was not moved out")
        hits: list[CachedChunk] = []
        for digest in before.digests if self.reuse and not self.share_decoded else ():
            if (chunk := self._chunks.index.get(digest)) is None or chunk in self._moves.arriving:
                break
            hits.append(chunk)
        table = self._table(hits, before.num_reserved)
        if table is None or not all(book.fits_moved(moved.own[book.name]) for book in self._books):
            return None
        blocks = table()
        num_shared, num_moved = len(hits) * self._chunks.per_chunk, len(moved.places[""])
        tainted = before.tainted or any(not chunk.listed for chunk in before.held.values())
        held = dict(enumerate(hits))
        self._entries[request_id] = replace(before, table=blocks, held=held, tainted=tainted)
        places: dict[str, tuple[int | None, ...]] = {"": (*[None] * num_shared, *blocks[num_shared:num_moved])}
        for book in self._books:
            places[book.name] = book.move_in(request_id, moved.own[book.name])
        return MovedIn(list(blocks), places)

    def num_free_without(self, request_ids: Set[str]) -> int:
        """Return the least number of blocks that would be free if these requests held none."""
        return self.capacity - self.num_held(self._entries.keys() - request_ids)

    def num_held(self, request_ids: Iterable[str]) -> int:
        """Return the number of blocks that these requests hold, shared ones counted once; unknown ids hold none."""
        entries = (self._entries[name] for name in request_ids if name in self._entries)
        return len({block for entry in entries for block in entry.table})

    def num_needed(self, max_total_tokens: int, num_overprovision: int) -> int:
        """Return the blocks of a request's worst case."""
        return -(-(max_total_tokens + num_overprovision) // self.block_size)

    def take_blocks_to_clear(self) -> list[int]:
        """Take the blocks of failed requests: they are free, and the caller zeroes them before it launches anything."""
        blocks = self._chunks.pool.take_to_clear()
        self._chunks.generation += bool(blocks)
        return blocks

    def take_pool_blocks_to_clear(self) -> dict[str, list[int]]:
        """Do the same for other pools, by name; what is launched next may already use these blocks."""
        found = {book.name: blocks for book in self._books if (blocks := book.take_blocks_to_clear())}
        self._chunks.generation += bool(found)
        return found

    def stats(self) -> BlockStats:
        """Return counts of blocks and hits."""
        self._moves.settle()
        pool, index, per_chunk = self._chunks.pool, self._chunks.index, self._chunks.per_chunk
        free, evictable, to_clear = len(pool.free), self._chunks.num_evictable, len(pool.to_clear)
        return BlockStats(
            num_blocks=self.capacity,
            num_free=free,
            num_evictable=evictable,
            num_to_clear=to_clear,
            num_used=self.capacity - free - evictable - to_clear,
            queries=self._queries,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            num_pinned=index.num_pinned * per_chunk,
            num_broken_pins=index.num_broken_pins * per_chunk,
        )

    def pool_stats(self) -> dict[str, list[dict[str, int]]]:
        """Return counts of other pools, as JSON, by kind of pool."""
        found: dict[str, list[dict[str, int]]] = {}
        for book in self._books:
            found.setdefault(book.kind, []).append(book.stats())
        return found

    def invariants(self) -> None:
        """Check that all books balance. Raises InvariantError with what does not. Time: linear in all blocks."""
        self._moves.settle()
        problems = [*self._chunks.index.problems()]
        for find in (table_problems, block_problems):
            problems += find(self._entries, self._chunks, self._moves)
        for book in self._books:
            problems += book.problems(self._entries, self._chunks.index)
        if problems:
            raise InvariantError("; ".join(problems))

    def _entry(self, request_id: str) -> Admitted:
        entry = self._entries.get(request_id)
        if entry is None:
            raise RequestError(f"request {request_id} holds no KV blocks: it is unknown or has ended")
        return entry

    def _check_admission(self, request_id: str, prompt: Sequence[int], max_total: int) -> None:
        if request_id in self._entries:
            raise RequestError(f"request {request_id} holds KV blocks already")
        if not prompt:
            raise RequestError(f"request {request_id} has an empty prompt")
        if max_total < len(prompt):
            raise RequestError(f"request {request_id}: max_total_tokens {max_total} is below its {len(prompt)} tokens")

    def _register(self, request_id: str, token_ids: Sequence[int], num_written: int) -> list[bytes]:
        """List the new complete chunks below num_written, and return their digests; skip those without a parent."""
        listed: list[bytes] = []
        entry, chunks = self._entries[request_id], self._chunks
        for k in range(len(entry.digests), num_written // self.prefill_chunk if self.reuse else 0):
            above = entry.digests[-1] if k else entry.root
            start, stop = k * self.prefill_chunk, (k + 1) * self.prefill_chunk
            if entry.chain is not None and stop <= len(entry.prompt):
                digest = entry.chain.digest(k)
            else:
                digest = chunks.index.digest(above, token_ids[start:stop])
            entry.digests.append(digest)
            parent = chunks.index.get(above)
            if entry.tainted or (k and parent is None):
                continue
            if chunks.index.get(digest) is None:
                entry.held[k] = chunks.index.add(digest, parent, chunks.blocks_of(entry.table, k))
                chunks.generation += 1
            for book in self._books:
                book.attach(request_id, k, digest)
            listed.append(digest)
        return listed

    def _distrust(self, request_id: str) -> None:
        """Unlist the chunks that a poisoned request wrote or read and their descendants; mark its blocks dirty."""
        entry, chunks = self._entries[request_id], self._chunks
        for book in self._books:
            book.distrust(request_id)
        chunks.pool.dirty.update(entry.table)
        suspects = {id(chunk) for chunk in entry.held.values()}
        listed = [entry.held[k] for k in sorted(entry.held)]
        if self._books:  # other pools may list its blocks of a chunk that is another request's here
            listed += [chunk for digest in entry.digests if (chunk := chunks.index.get(digest)) is not None]
        for own in listed:
            dropped = chunks.index.drop(own)
            suspects.update(map(id, dropped))
            for chunk in dropped:
                self._moves.forget_kept(chunk.digest)
            chunks.free(dropped, poisoned=True)
        for other in self._entries.values():
            if any(id(chunk) in suspects for chunk in other.held.values()):
                other.tainted = True
