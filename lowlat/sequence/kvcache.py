"""Paged KV bookkeeping on the host: tables, free blocks, prefix reuse, and what must balance.

One table serves all layers that see everything, the target's and the draft model's: the same block ids index the
caches of each. Other kinds of state have pools and books of their own, see `PoolBook`. It touches no memory:
the runtime writes the KV, says what was written, and zeroes what `take_blocks_to_clear` names. Everything is
ordered by the device's stream: a block that is freed here may be handed out at once, since later work runs
later.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from lowlat.errors import ConfigError, RequestError
from lowlat.sequence.book import Allocation, BlockStats, InvariantError, MovedIn, MovedOut, SequenceBook
from lowlat.sequence.pool_book import PoolBook
from lowlat.sequence.prefix_chains import PrefixChains
from lowlat.sequence.prefix_index import CachedChunk, PrefixIndex
from lowlat.sequence.tiers.key import COMING, ChunkKey, Load, Presence, Save
from lowlat.sequence.tiers.tiers import READ_AHEAD, CacheTiers

__all__ = ["KVCache"]


@dataclass(eq=False, slots=True)
class _Entry:
    """One admitted request: `digests` is its chain so far, `held` its chunks that are or were listed, by number."""

    prompt: Sequence[int]
    table: list[int]
    num_reserved: int
    num_prefilled: int
    root: bytes
    digests: list[bytes] = field(default_factory=list)
    held: dict[int, CachedChunk] = field(default_factory=dict)
    tainted: bool = False  # it read KV of a poisoned request: nothing of it is shared any more


class _Source(Protocol):
    """Where contents of chunks come from.

    apart  they are copied to the device while others decode, and are there later
    """

    apart: bool

    def find(self, key: ChunkKey) -> torch.Tensor | Presence | None:
        """A content, [n] uint8 in host memory; COMING: it will be there; None: it is not."""

    def read_ahead(self, keys: Iterable[ChunkKey]) -> None:
        """Contents that will be asked for."""


class _Contents:
    """Contents that a caller has."""

    apart = False

    def __init__(self, contents: Mapping[ChunkKey, torch.Tensor]) -> None:
        self._contents = contents

    def find(self, key: ChunkKey) -> torch.Tensor | Presence | None:
        return self._contents.get(key)

    def read_ahead(self, keys: Iterable[ChunkKey]) -> None:
        return


class KVCache(SequenceBook):
    """Which block holds what, for a pool of `num_blocks` blocks of `block_size` positions; block 0 is null.

    num_blocks      blocks in the pool, the null block included
    prefill_chunk   positions of one prefill chunk, a multiple of block_size: the unit of sharing
    reuse           share complete chunks written by prefill
    share_decoded   also share chunks that decoding wrote, wholly or in part
    books           of other pools, which belong to this book from now on
    tiers           of the cache below the device's memory, whose chunks prompts find, too; None: there are none

    A block is free, in use (in a table), evictable (content nobody uses, free for admission), or waiting to
    be cleared. Admission reserves the worst case, so that no step can run out. Not safe for use by several
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
        if num_blocks < 2:
            raise ConfigError(f"kv_blocks must be at least 2 (block 0 is the null block), got {num_blocks}")
        if block_size < 1 or prefill_chunk < 1 or prefill_chunk % block_size:
            raise ConfigError(
                f"prefill_chunk must be a positive multiple of block_size {block_size}, got {prefill_chunk}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefill_chunk = prefill_chunk
        self.reuse = reuse
        self.share_decoded = reuse and share_decoded
        self.tiers = tiers if reuse else None
        self._generation = 0
        self._loads: list[Load] = []
        self._saves: list[Save] = []
        self._index = PrefixIndex()
        self._chains = PrefixChains(self._index, prefill_chunk)
        self._pins: dict[Hashable, list[bytes]] = {}
        self._moving: Counter[CachedChunk] = Counter()  # held by copies to or from the tiers
        self._arriving: set[CachedChunk] = set()  # whose contents are not there yet
        self._books = tuple(books)
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: the lowest on top at first
        self._to_clear: list[int] = []
        self._dirty: set[int] = set()
        self._entries: dict[str, _Entry] = {}
        self._queries = self._query_tokens = self._hit_tokens = 0

    @property
    def generation(self) -> int:
        """A number that grows whenever an admission that did not fit might fit now, or a chunk has come from a file."""
        return self._generation + (0 if self.tiers is None else self.tiers.num_read)

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out."""
        return self.num_blocks - 1

    def max_total_tokens(self, num_overprovision: int) -> int:
        """Tokens of prompt and completion that the pool holds for one request."""
        return self.capacity * self.block_size - num_overprovision

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def is_coming(self, prompt_token_ids: Sequence[int], salt: str) -> bool:
        """Whether a request that was admitted is about to write the next chunk of a prompt that is not there yet."""
        chain = self._chains.of(prompt_token_ids, self._index.root(salt))
        count = (len(prompt_token_ids) - 1) // self.prefill_chunk if self.reuse else 0
        found = next((k for k in range(count) if self._index.get(chain.digest(k)) is None), count)
        if found == count:
            return False
        end = (found + 1) * self.prefill_chunk

        def writes(entry: _Entry) -> bool:
            known = len(entry.prompt) - (not isinstance(entry.prompt, tuple))  # one that grows may wait at its last
            if entry.root != chain.root or entry.tainted or not entry.num_prefilled < end <= known:
                return False
            return self._chains.of(entry.prompt, entry.root).digest(found) == chain.digest(found)

        return any(map(writes, self._entries.values()))

    def pin(self, owner: Hashable, digests: Sequence[bytes]) -> None:
        """Have a chain of chunks stay while others can go, as long as its owner pins it, in place of those before."""
        self.unpin(owner)
        self._pins[owner] = chain = list(digests)
        self._index.pin(chain)
        for book in self._books:
            book.pin(chain)
        if self.tiers is not None:
            self.tiers.pin(chain)

    def unpin(self, owner: Hashable) -> None:
        """Let the chunks of an owner go as others do."""
        chain = self._pins.pop(owner, [])
        self._index.unpin(chain)
        for book in self._books:
            book.unpin(chain)
        if self.tiers is not None:
            self.tiers.unpin(chain)

    def pinned(self, owner: Hashable) -> list[bytes]:
        """The chain that an owner pins."""
        return list(self._pins.get(owner, ()))

    def pin_tokens(self, owner: Hashable, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Pin the whole chunks of some tokens; returns their digests."""
        chain = self._chains.of(token_ids, self._index.root(salt))
        digests = [chain.digest(k) for k in range(len(token_ids) // self.prefill_chunk)]
        self.pin(owner, digests)
        return digests

    def places_by_pool(self) -> dict[str, int]:
        """The blocks or rows that a content has, by pool."""
        return {"": self.prefill_chunk // self.block_size, **{book.name: book.num_places for book in self._books}}

    def hold(self, token_ids: Sequence[int], salt: str) -> tuple[bool, list[tuple[int, Save]]]:
        """The contents from which tokens go on, by chunk, whose blocks stay until `let_go` of their holders.

        Those of the tiers come to the device first; False: they are on their way, and nothing is held. Contents
        without a holder are to be read before anything else is launched.
        """
        self._settle()
        root, count = self._index.root(salt), len(token_ids) // self.prefill_chunk if self.reuse else 0
        if self.tiers is not None and not self._restore(self.tiers, token_ids, root, count):
            return False, []
        chain, found = self._chains.of(token_ids, root), list[tuple[int, Save]]()
        for k in range(count):
            chunk = self._index.get(chain.digest(k))
            if chunk is None:
                break
            self._index.acquire(chunk)
            found.append((k, Save(ChunkKey(chunk.digest, ""), chunk.blocks, self._hold(chunk))))
        digests = [save.key.digest for _, save in found]
        for book in self._books:
            for digest in book.needed(digests):
                if (places := book.places(digest)) is not None:
                    found.append((digests.index(digest), Save(ChunkKey(digest, book.name), places)))
        return True, found

    def let_go(self, holders: Sequence[object]) -> None:
        """End what `hold` has begun."""
        self._end_moves([holder for holder in holders if isinstance(holder, CachedChunk)])
        self._generation += 1

    def adopt(self, token_ids: Sequence[int], salt: str, contents: Mapping[ChunkKey, torch.Tensor]) -> None:
        """List contents of some tokens' chunks in blocks that nobody uses; `take_loads` then has them."""
        self._settle()
        count = len(token_ids) // self.prefill_chunk if self.reuse else 0
        self._restore(_Contents(contents), token_ids, self._index.root(salt), count)
        self._generation += 1

    def check(self, request_id: str, max_total_tokens: int, num_overprovision: int) -> None:
        """Raise RequestError where a worst case is larger than the whole pool: it would wait for ever."""
        num_blocks = self._num_blocks_for(max_total_tokens, num_overprovision)
        if num_blocks > self.capacity:
            raise RequestError(
                f"request {request_id} needs {num_blocks} KV blocks of {self.block_size} positions; "
                f"the pool has {self.capacity} (kv_blocks)"
            )
        for book in self._books:
            book.check(request_id, num_blocks)

    def _num_blocks_for(self, max_total_tokens: int, num_overprovision: int) -> int:
        return -(-(max_total_tokens + num_overprovision) // self.block_size)

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
        """Reserve a request's worst case, sharing what is cached of its prompt; None when it does not fit
        now.

        prompt_token_ids    [n] n >= 1; not copied, and must not change while the request lives
        max_total_tokens    prompt and completion at most
        num_overprovision   positions that a step may write past them
        salt                only what requests of the same salt have cached is shared
        reads               False: all of the prompt will be prefilled; it is shared with others all the same
        num_cached_tokens of the result is a multiple of prefill_chunk, at most n - 1.
        Time: one digest a cached chunk, plus the blocks. Raises RequestError for an id in use, an empty
        prompt, a total below the prompt, or a worst case larger than the whole pool.
        """
        self._settle()
        total = self._num_blocks_for(max_total_tokens, num_overprovision)
        self._check_admission(request_id, prompt_token_ids, max_total_tokens)
        self.check(request_id, max_total_tokens, num_overprovision)
        root = self._index.root(salt)
        if reads and self.tiers is not None:
            count = (len(prompt_token_ids) - 1) // self.prefill_chunk
            if not self._restore(self.tiers, prompt_token_ids, root, count):
                return None
        digests, hits = self._lookup(prompt_token_ids, root) if reads else ([], [])
        num_found = len(digests)
        count = self._num_hits(digests)
        digests, hits = digests[:count], hits[:count]
        shared = [block for chunk in hits for block in chunk.blocks]
        num_pinned = sum(len(chunk.blocks) for chunk in hits if not chunk.num_users)
        if total - len(shared) > len(self._free) + self._num_evictable() - num_pinned:
            return None
        if not all(book.fits(total, digests) for book in self._books):
            return None
        for book in self._books:
            book.admit(request_id, total, len(prompt_token_ids), digests, num_found)
        for chunk in hits:
            self._index.acquire(chunk)
        table = shared + self._take(total - len(shared))
        num_cached = len(hits) * self.prefill_chunk
        self._entries[request_id] = _Entry(
            prompt_token_ids, table, total, num_cached, root, digests, dict(enumerate(hits))
        )
        self._queries += 1
        self._query_tokens += len(prompt_token_ids)
        self._hit_tokens += num_cached
        return Allocation(list(table), num_cached)

    def take_loads(self) -> list[Load]:
        """Contents of the tiers that the caller writes to the device before anything else is launched."""
        loads, self._loads = self._loads, []
        return loads

    def take_saves(self) -> list[Save]:
        """Contents that prefill has written, which the caller reads for the tiers before anything else is launched."""
        saves, self._saves = self._saves, []
        return saves

    def note_all(self) -> None:
        """Have `take_saves` name all that is listed and in no tier, what was used longest ago first."""
        self._settle()
        self._note_saves(chunk.digest for chunk in self._index.oldest_first())

    def forget_all(self) -> None:
        """Share nothing that the device holds any more; what the tiers hold is found there.

        Raises InvariantError while requests hold blocks.
        """
        self._settle()
        if self._entries or self._moving:
            raise InvariantError(
                f"{len(self._entries)} requests and {len(self._moving)} copies hold blocks: their content cannot be "
                "forgotten"
            )
        for chunk in self._index.oldest_first():
            self._unlist(self._index.drop(chunk))
        self._generation += 1

    def append(self, request_id: str, start: int, stop: int) -> None:
        """Give a request its blocks of the prompt's positions [start, stop) in other pools; it has all of the first.

        Raises RequestError for an unknown id.
        """
        self._entry(request_id)
        for book in self._books:
            book.append(request_id, start, stop)

    def commands(self, request_id: str) -> dict[str, Sequence[int]]:
        """The commands to the next part of a request's prompt, by buffer. Raises RequestError for an unknown id."""
        found: dict[str, Sequence[int]] = {"prefill_table": list(self._entry(request_id).table)}
        for book in self._books:
            found |= book.commands(request_id)
        return found

    def mark_prefilled(self, request_id: str, num_tokens: int) -> None:
        """Say that prefill wrote (or the stream will have written) the KV of the prompt's first num_tokens.

        Call it after every chunk; it lists the complete chunks among them for sharing. Where an equal chunk
        is listed already, the request keeps its own blocks to itself. Raises RequestError for an unknown id,
        InvariantError when num_tokens goes back or past the prompt's last token.
        """
        entry = self._entry(request_id)
        if not entry.num_prefilled <= num_tokens <= len(entry.prompt):
            raise InvariantError(
                f"request {request_id}: {num_tokens} prompt tokens cannot be prefilled after "
                f"{entry.num_prefilled} of {len(entry.prompt)}"
            )
        entry.num_prefilled = num_tokens
        self._note_saves(self._register(request_id, entry.prompt, num_tokens))
        if num_tokens == len(entry.prompt) and self._books:
            for book in self._books:
                book.mark_prefilled(request_id)
            self._generation += 1

    def release(
        self,
        request_id: str,
        token_ids: Sequence[int] | None = None,
        *,
        num_written: int | None = None,
        poisoned: bool = False,
        owner: Hashable = None,
    ) -> None:
        """Free a request's blocks; what is listed stays evictable. The device must write to them no more.

        token_ids     the whole committed sequence, prompt included; used by share_decoded alone
        num_written   positions of it whose KV (target's and head's) is certainly written; None: all but the
                      last. With a draft model give less: a slot's last step does not extend its KV
        poisoned      the request failed with NaN: nothing that it wrote or read is shared again, and every
                      block of it is cleared before reuse
        owner         pins the chunks of the sequence from now on, in place of those that it pinned; None: nobody does
        Raises RequestError for an unknown id, InvariantError for a sequence that does not continue the
        prompt.
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
            self.pin(owner, entry.digests)
        self._let_go(request_id)
        for book in self._books:
            book.release(request_id)

    def _let_go(self, request_id: str) -> None:
        """Free a request's blocks of the first pool."""
        entry = self._entries.pop(request_id)
        per_chunk = self.prefill_chunk // self.block_size
        shared = [k * per_chunk + i for k in entry.held for i in range(per_chunk)]
        private = set(range(len(entry.table))).difference(shared)
        self._give_back(entry.table[i] for i in sorted(private, reverse=True))
        for k in sorted(entry.held, reverse=True):
            self._give_back(self._index.retire(entry.held[k]))
        for digest in reversed(entry.digests):  # equal chunks of others, too: none outlives what leads to it
            self._index.touch(digest)
        self._generation += 1

    def grow(self, request_id: str) -> None:
        """Say that a request's prompt has become longer. Raises RequestError for an unknown id."""
        entry = self._entry(request_id)
        for book in self._books:
            book.grow(request_id, len(entry.prompt))

    def move_out(
        self, request_id: str, num_written: int, has_space: Callable[[Mapping[str, int]], bool]
    ) -> MovedOut | None:
        """Free a request's blocks, whose contents the caller reads first; what is listed stays evictable.

        Raises RequestError for an unknown id.
        """
        entry = self._entry(request_id)
        places = {"": tuple(entry.table[: -(-num_written // self.block_size)])}
        if not has_space({"": len(places[""]), **{book.name: book.num_to_move(request_id) for book in self._books}}):
            return None
        own: dict[str, object] = {}
        for book in self._books:
            places[book.name], own[book.name] = book.move_out(request_id)
        self._let_go(request_id)
        return MovedOut(places, tuple(entry.table), own | {"": entry})

    def move_in(self, request_id: str, moved: MovedOut) -> MovedIn | None:
        """Give a request blocks again, and chunks of its prompt that are listed; None when they do not fit now.

        What decoding wrote is shared under other bits, so that with share_decoded all blocks are its own.
        Raises InvariantError for what was not moved out.
        """
        self._settle()
        before = moved.own[""]
        if not isinstance(before, _Entry) or request_id in self._entries:
            raise InvariantError(f"request {request_id} was not moved out")
        hits: list[CachedChunk] = []
        for digest in before.digests if self.reuse and not self.share_decoded else ():
            if (chunk := self._index.get(digest)) is None or chunk in self._arriving:
                break
            hits.append(chunk)
        shared = [block for chunk in hits for block in chunk.blocks]
        num_pinned = sum(len(chunk.blocks) for chunk in hits if not chunk.num_users)
        count = before.num_reserved - len(shared)
        if count > len(self._free) + self._num_evictable() - num_pinned:
            return None
        if not all(book.fits_moved(moved.own[book.name]) for book in self._books):
            return None
        for chunk in hits:
            self._index.acquire(chunk)
        table = shared + self._take(count)
        num_moved = len(moved.places[""])
        tainted = before.tainted or any(not chunk.listed for chunk in before.held.values())
        held = dict(enumerate(hits))
        self._entries[request_id] = replace(before, table=table, held=held, tainted=tainted)
        places: dict[str, tuple[int | None, ...]] = {"": (*[None] * len(shared), *table[len(shared) : num_moved])}
        for book in self._books:
            places[book.name] = book.move_in(request_id, moved.own[book.name])
        return MovedIn(list(table), places)

    def num_free_without(self, request_ids: Collection[str]) -> int:
        """Blocks that would be free, at the least, if these requests held none."""
        others = {block for name, entry in self._entries.items() if name not in request_ids for block in entry.table}
        return self.capacity - len(others)

    def num_needed(self, max_total_tokens: int, num_overprovision: int) -> int:
        """Blocks of a request's worst case."""
        return self._num_blocks_for(max_total_tokens, num_overprovision)

    def take_blocks_to_clear(self) -> list[int]:
        """Blocks of failed requests: they are free, and the caller zeroes them before anything else is launched."""
        blocks, self._to_clear = self._to_clear, []
        if blocks:
            self._free.extend(blocks)
            self._generation += 1
        return blocks

    def take_pool_blocks_to_clear(self) -> dict[str, list[int]]:
        """The same of other pools, by name; where there are none, nothing.

        Some may be handed out again already: zero them before the next part of a prompt is launched.
        """
        found = {book.name: blocks for book in self._books if (blocks := book.take_blocks_to_clear())}
        self._generation += bool(found)
        return found

    def stats(self) -> BlockStats:
        """Counts of blocks and hits."""
        self._settle()
        free, evictable, to_clear = len(self._free), self._num_evictable(), len(self._to_clear)
        return BlockStats(
            num_blocks=self.capacity,
            num_free=free,
            num_evictable=evictable,
            num_to_clear=to_clear,
            num_used=self.capacity - free - evictable - to_clear,
            queries=self._queries,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            num_pinned=self._index.num_pinned * (self.prefill_chunk // self.block_size),
            num_broken_pins=self._index.num_broken_pins * (self.prefill_chunk // self.block_size),
        )

    def pool_stats(self) -> dict[str, list[dict[str, int]]]:
        """Counts of each other pool, as JSON, by their kind."""
        found: dict[str, list[dict[str, int]]] = {}
        for book in self._books:
            found.setdefault(book.kind, []).append(book.stats())
        return found

    def invariants(self) -> None:
        """Check that everything balances. Raises InvariantError naming what does not. Time: all blocks."""
        self._settle()
        problems = [*self._index.problems(), *self._table_problems(), *self._block_problems()]
        for book in self._books:
            problems += book.problems(self._entries, self._index)
        if problems:
            raise InvariantError("; ".join(problems))

    def _entry(self, request_id: str) -> _Entry:
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

    def _num_evictable(self) -> int:
        return self._index.num_unused * (self.prefill_chunk // self.block_size)

    def _chunk_of(self, token_ids: Sequence[int], k: int) -> Sequence[int]:
        return token_ids[k * self.prefill_chunk : (k + 1) * self.prefill_chunk]

    def _lookup(self, prompt: Sequence[int], root: bytes) -> tuple[list[bytes], list[CachedChunk]]:
        digests: list[bytes] = []
        hits: list[CachedChunk] = []
        chain = self._chains.of(prompt, root)
        for k in range((len(prompt) - 1) // self.prefill_chunk if self.reuse else 0):
            digest = chain.digest(k)
            chunk = self._index.get(digest)
            if chunk is None:
                break
            digests.append(digest)
            hits.append(chunk)
        return digests, hits

    def _settle(self) -> None:
        """Let go of chunks whose copies to or from the tiers have ended."""
        if self.tiers is not None and (ended := self.tiers.take_done()):
            self._end_moves([holder for holder in ended if isinstance(holder, CachedChunk)])

    def _end_moves(self, chunks: Sequence[CachedChunk]) -> None:
        """Copies of these chunks have ended."""
        for chunk in chunks:
            self._moving[chunk] -= 1
            if not self._moving[chunk]:
                del self._moving[chunk]
                self._arriving.discard(chunk)
            self._give_back(self._index.retire(chunk))
        above = {chunk.parent for chunk in chunks}
        for chunk in chunks:
            if chunk not in above:
                self._index.touch_chain(chunk)

    def _hold(self, chunk: CachedChunk) -> CachedChunk:
        """Keep a chunk's blocks as they are until a copy has ended."""
        self._moving[chunk] += 1
        return chunk

    def _num_hits(self, digests: Sequence[bytes]) -> int:
        """The chunks after which a prompt can go on in every layer."""
        count = len(digests)
        while count and (fewer := min((book.num_hits(digests, count) for book in self._books), default=count)) < count:
            count = fewer
        return count

    def _take(self, count: int) -> list[int]:
        """Free blocks, ascending: neighbours of a chunk are copied as one run, in whatever order they were freed."""
        while len(self._free) < count:
            self._unlist(self._index.evict_oldest())
        return sorted(self._free.pop() for _ in range(count))

    def _unlist(self, chunks: Iterable[CachedChunk]) -> None:
        """Free the blocks of chunks that left the index."""
        for chunk in chunks:
            for book in self._books:
                book.drop(chunk.digest)
            if not chunk.num_users:
                self._give_back(chunk.blocks)

    def _give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self._dirty:
                self._dirty.discard(block)
                self._to_clear.append(block)
            else:
                self._free.append(block)

    def _register(self, request_id: str, token_ids: Sequence[int], num_written: int) -> list[bytes]:
        """List the new complete chunks below num_written, and return them; one whose parent is gone is not listed."""
        listed: list[bytes] = []
        entry = self._entries[request_id]
        per_chunk = self.prefill_chunk // self.block_size
        for k in range(len(entry.digests), num_written // self.prefill_chunk if self.reuse else 0):
            above = entry.digests[-1] if k else entry.root
            digest = self._index.digest(above, self._chunk_of(token_ids, k))
            entry.digests.append(digest)
            parent = self._index.get(above)
            if entry.tainted or (k and parent is None):
                continue
            if self._index.get(digest) is None:
                entry.held[k] = self._index.add(digest, parent, entry.table[k * per_chunk : (k + 1) * per_chunk])
                self._generation += 1
            for book in self._books:
                book.attach(request_id, k, digest)
            listed.append(digest)
        return listed

    def _note_saves(self, digests: Iterable[bytes]) -> None:
        """Chunks whose contents, of each pool that lists them, are to be kept in the tiers, where they are not yet."""
        if self.tiers is None:
            return
        for digest in digests:
            chunk = self._index.get(digest)
            places = {"": None if chunk is None else chunk.blocks}
            places |= {book.name: book.places(digest) for book in self._books}
            for pool, found in places.items():
                if found is not None and self.tiers.wants(ChunkKey(digest, pool)):
                    holder = None
                    if chunk is not None and not pool:
                        self._index.acquire(chunk)
                        holder = self._hold(chunk)
                    self._saves.append(Save(ChunkKey(digest, pool), found, holder))

    def _restore(self, source: "_Source", prompt: Sequence[int], root: bytes, count: int) -> bool:
        """List what a source holds of a prompt's first chunks, in unused blocks; False: more is on its way."""
        per_chunk, held = self.prefill_chunk // self.block_size, list[CachedChunk]()
        chain, ready = self._chains.of(prompt, root), True
        for k in range(count):
            digest = chain.digest(k)
            chunk = self._index.get(digest)
            if chunk is None:
                found = source.find(ChunkKey(digest, ""))
                if found is COMING:
                    ready = False
                    following = range(k + 1, min(count, k + READ_AHEAD))
                    source.read_ahead(ChunkKey(chain.digest(later), "") for later in following)
                if not isinstance(found, torch.Tensor) or len(self._free) + self._num_evictable() < per_chunk:
                    break
                chunk = self._index.add(digest, held[-1] if held else None, self._take(per_chunk))
                if source.apart:  # its one user is the copy
                    self._arriving.add(chunk)
                    self._loads.append(Load("", chunk.blocks, found, self._hold(chunk)))
                    self._index.acquire(chunk)
                else:
                    self._loads.append(Load("", chunk.blocks, found))
            else:
                self._index.acquire(chunk)
            held.append(chunk)
        ready = ready and self._arriving.isdisjoint(held)
        digests = [chunk.digest for chunk in held]
        for book in self._books if ready else ():
            ready = self._restore_of(book, source, digests) and ready
        for chunk in reversed(held):
            self._index.retire(chunk)
        return ready

    def _restore_of(self, book: PoolBook, source: "_Source", digests: Sequence[bytes]) -> bool:
        """The same of another pool."""
        contents: dict[bytes, torch.Tensor] = {}
        coming = False

        def is_kept(digest: bytes) -> bool:
            nonlocal coming
            found = source.find(ChunkKey(digest, book.name))
            coming = coming or found is COMING
            if isinstance(found, torch.Tensor):
                contents[digest] = found
            return digest in contents

        restored = book.restore(digests, is_kept)
        self._loads += [Load(book.name, places, contents[digest]) for digest, places in restored.items()]
        return not coming

    def _distrust(self, request_id: str) -> None:
        """Unlist what a poisoned request wrote or read and all that was computed from it; mark it dirty."""
        entry = self._entries[request_id]
        for book in self._books:
            book.distrust(request_id)
        self._dirty.update(entry.table)
        suspects = {id(chunk) for chunk in entry.held.values()}
        listed = [entry.held[k] for k in sorted(entry.held)]
        if self._books:  # it may have listed its blocks there of a chunk that is another's here
            listed += [chunk for digest in entry.digests if (chunk := self._index.get(digest)) is not None]
        for own in listed:
            for chunk in self._index.drop(own):
                suspects.add(id(chunk))
                self._forget_kept(chunk.digest)
                for book in self._books:
                    book.drop(chunk.digest, poisoned=True)
                self._dirty.update(chunk.blocks)
                if not chunk.num_users:
                    self._give_back(chunk.blocks)
        for other in self._entries.values():
            if any(id(chunk) in suspects for chunk in other.held.values()):
                other.tainted = True

    def _forget_kept(self, digest: bytes) -> None:
        """Take a chunk that may hold NaN out of the tiers."""
        if self.tiers is not None:
            for pool in ("", *(book.name for book in self._books)):
                self.tiers.drop(ChunkKey(digest, pool))

    def _table_problems(self) -> list[str]:
        problems = []
        users: Counter[int] = Counter({id(chunk): count for chunk, count in self._moving.items()})
        chunks = {id(chunk): chunk for chunk in (*self._index, *self._moving)}
        for request_id, entry in self._entries.items():
            table = entry.table
            if 0 in table or len(set(table)) != len(table):
                problems.append(f"the table of request {request_id} holds the null block or a block twice")
            if len(table) != entry.num_reserved:
                problems.append(f"request {request_id} reserved {entry.num_reserved} blocks, holds {len(table)}")
            per_chunk = self.prefill_chunk // self.block_size
            for k, chunk in entry.held.items():
                users[id(chunk)] += 1
                chunks[id(chunk)] = chunk
                if tuple(table[k * per_chunk : (k + 1) * per_chunk]) != chunk.blocks:
                    problems.append(f"chunk {k} of request {request_id} is not at its place in the table")
        for key, chunk in chunks.items():
            if chunk.num_users != users[key]:
                problems.append(f"blocks {chunk.blocks}: {chunk.num_users} users, {users[key]} tables hold them")
        return problems

    def _block_problems(self) -> list[str]:
        """Each block has exactly one state; one in several tables is there through the same chunk."""
        states = Counter(self._free) + Counter(self._to_clear)
        cached = {id(chunk): chunk for chunk in (*self._index, *self._moving)}
        for entry in self._entries.values():
            cached.update((id(chunk), chunk) for chunk in entry.held.values())
            through_chunks = {block for chunk in entry.held.values() for block in chunk.blocks}
            states.update(block for block in entry.table if block not in through_chunks)
        for chunk in cached.values():
            states.update(chunk.blocks)
        problems = [
            f"block {block} has {states[block]} states" for block in range(1, self.num_blocks) if states[block] != 1
        ]
        if states.total() != self.capacity or states[0]:
            problems.append(f"{states.total()} blocks are accounted for, {self.capacity} exist")
        if self._dirty.intersection(self._free):
            problems.append(f"blocks {sorted(self._dirty.intersection(self._free))} are free but not cleared")
        return problems
