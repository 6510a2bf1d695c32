"""This is the book of a window's pool: it gives requests their blocks, and lists chunks' blocks for later prompts.

`lowlat.sequence.kvcache` calls it beside its own book, which finds the cached prefix; this book has the blocks that
rows after the prefix see. A request reserves only what it holds at a time. While it runs, it gives back the blocks that
none of its later rows sees. The blocks of complete chunks of a prompt stay listed until a request needs the space.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from lowlat.errors import RequestError
from lowlat.sequence.book import InvariantError
from lowlat.sequence.pool_book import IsKept, PoolBook
from lowlat.sequence.prefix_index import PrefixIndex
from lowlat.sequence.tiers.key import COMING
from lowlat.sequence.window_pool import WindowPool

__all__ = ["WindowBook"]

KEPT_EVERY = 8192  # most positions between the places of a prompt whose contents the tiers keep for later prompts
KEPT_WINDOWS = 16  # the same limit in windows


@dataclass(eq=False, slots=True)
class _Part:
    """A chunk's blocks in this pool, written and immutable; if unlisted, they are free after their last user."""

    digest: bytes
    blocks: tuple[int, ...]
    num_users: int
    listed: bool = True
    is_end: bool = False  # at the end of a prompt, which is expected to go on from it once
    num_found: int = 0  # prompts that went on from it, or diverged after it

    @property
    def is_shared(self) -> bool:
        """Whether several texts go on from it."""
        return self.num_found > self.is_end


@dataclass(eq=False, slots=True)
class _Holding:
    """The book's record of a request.

    table       its blocks by position, 0 where it holds none
    num_prompt  positions of its prompt
    is_whole    it holds all of its blocks to its end; else decoding repeats the ring's, from `ring_start` on
    takes_more  it will take blocks in place of those that it gives back
    parting     chunks that rows see where it diverges from another text; some were not listed
    num_held    different blocks of the table
    parts       its chunks that are or were listed, by number
    """

    table: list[int]
    num_reserved: int
    num_prompt: int
    is_whole: bool
    takes_more: bool
    parting: range = range(0)
    num_held: int = 0
    first: int = 0  # place in the table of the first block that it may hold
    stop: int = 0  # place after the last block that it has got so far
    ring_start: int | None = None
    ring_size: int = 0
    parts: dict[int, _Part] = field(default_factory=dict)


class WindowBook(PoolBook):
    """The book of one window's pool. Each block is free, held by a table, listed without users, or to be cleared."""

    kind = "windows"

    def __init__(self, pool: WindowPool, prefill_chunk: int) -> None:
        super().__init__()
        self.pool, self.name = pool, pool.suffix
        self.per_chunk = self.num_places = prefill_chunk // pool.block_size
        self._chunk = prefill_chunk
        self._free = list(range(pool.num_blocks - 1, 0, -1))
        self._to_clear: list[int] = []
        self._to_clear_in_use: list[int] = []  # handed out before they were cleared, and not written yet
        self._dirty: set[int] = set()
        self._parts: OrderedDict[bytes, _Part] = OrderedDict()  # unused ones are evicted in this order
        self._unused: dict[bytes, _Part] = {}
        self._holdings: dict[str, _Holding] = {}

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out."""
        return self.pool.num_blocks - 1

    def check(self, request_id: str, num_blocks: int) -> None:
        """Raise RequestError if a table of `num_blocks` blocks holds more of them at a time than the pool has."""
        needed = self.pool.worst_case(num_blocks, self.per_chunk)
        if needed > self.capacity:
            raise RequestError(
                f"request {request_id} needs {needed} KV blocks at a time of layers with a window of "
                f"{self.pool.window}; their pool has {self.capacity}"
            )

    def num_hits(self, digests: Sequence[bytes], most: int) -> int:
        """Return the largest number of chunks, at most `most`, such that the chunks that later rows see are listed."""
        for count in range(most, 0, -1):
            first = self._first_seen(count * self._chunk)
            if all(digests[k] in self._parts for k in range(first, count)):
                return count
        return 0

    def needed(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Return the chunks that rows after the chain see."""
        return digests[self._first_seen(len(digests) * self._chunk) :]

    def restore(self, digests: Sequence[bytes], is_kept: IsKept) -> Mapping[bytes, tuple[int, ...]]:
        """List the chunks that rows after the chain see, or after as much of it as the tier and free blocks allow."""
        for count in range(len(digests), 0, -1):
            first = self._first_seen(count * self._chunk)
            seen = digests[first:count]
            missing = [digest for digest in seen if digest not in self._parts]
            if not missing:
                return {}
            kept = list(takewhile(bool, map(is_kept, missing)))
            if len(kept) < len(missing):
                continue
            if COMING in kept:
                return {}
            held = [self._parts[digest] for digest in seen if digest in self._parts]
            for part in held:
                part.num_users += 1
                self._unused.pop(part.digest, None)
            found: dict[bytes, tuple[int, ...]] = {}
            if len(missing) * self.per_chunk <= self._num_available(self._holders_that_take_more()):
                for digest in missing:
                    blocks = found[digest] = tuple(self._take(self.per_chunk))
                    held.append(_Part(digest, blocks, num_users=1))
                    self._parts[digest] = held[-1]
            for part in held:
                self._retire(part, is_end=True)
            return found
        return {}

    def places(self, digest: bytes) -> tuple[int, ...] | None:
        """Return the blocks of a listed chunk."""
        part = self._parts.get(digest)
        return None if part is None else part.blocks

    def fits(self, num_blocks: int, digests: Sequence[bytes]) -> bool:
        """Whether a request with a table of `num_blocks` blocks, which goes on after these chunks, fits now."""
        hits = self._seen_after(digests).values()
        needed, is_whole = self._need(num_blocks, len(digests))
        holders = self._holders_that_take_more()
        num_back = len(hits)  # cached chunks that reduce the blocks that must be available
        if not is_whole:  # it replaces all of them later; those with other users are not free then
            num_back = sum(not part.num_users for part in hits)
        else:  # it keeps them: they are not free when their other users replace them
            num_back -= sum(0 < part.num_users == holders[part] for part in hits)
        pinned = sum(not part.num_users for part in hits)
        return needed - (num_back - pinned) * self.per_chunk <= self._num_available(holders)

    def admit(
        self, request_id: str, num_blocks: int, num_prompt: int, digests: Sequence[bytes], num_common: int
    ) -> None:
        """Reserve a request's blocks; `fits` must have returned True."""
        hits = self._seen_after(digests)
        needed, is_whole = self._need(num_blocks, len(digests))
        holding = _Holding([0] * num_blocks, needed, num_prompt, is_whole, takes_more=not is_whole, parts=hits)
        holding.first = self._first_seen(len(digests) * self._chunk) * self.per_chunk
        holding.stop = len(digests) * self.per_chunk
        if num_common > len(digests):
            holding.parting = range(self._first_seen(num_common * self._chunk), num_common)
        for k, part in hits.items():
            part.num_users, part.num_found = part.num_users + 1, part.num_found + 1
            self._unused.pop(part.digest, None)
            holding.table[k * self.per_chunk : (k + 1) * self.per_chunk] = part.blocks
        holding.num_held = len(hits) * self.per_chunk
        self._holdings[request_id] = holding
        if is_whole:
            self._extend(holding, num_blocks)

    def append(self, request_id: str, start: int, stop: int) -> None:
        """Give a request the blocks of its prompt's positions [start, stop), and with the last part its ring.

        It gives back the blocks that rows from `start` on do not see.
        """
        holding = self._holdings[request_id]
        if holding.is_whole or holding.ring_start is not None:
            return
        self._forget(holding, start)
        size = self.pool.block_size
        self._extend(holding, -(-stop // size))
        if stop >= holding.num_prompt:
            left = len(holding.table) - holding.stop
            holding.ring_start, holding.ring_size = holding.stop, min(left, self.pool.ring_blocks)
            ring = self._take(holding.ring_size)
            holding.num_held += holding.ring_size
            for place in range(left):
                holding.table[holding.stop + place] = ring[place % len(ring)]
            holding.stop = len(holding.table)

    def mark_prefilled(self, request_id: str) -> None:
        """Give back the blocks that rows after the prompt do not see; the request takes no more blocks."""
        holding = self._holdings[request_id]
        if not holding.is_whole:
            self._forget(holding, holding.num_prompt, end=self._first_of_end(holding, holding.num_prompt))
            holding.num_reserved, holding.takes_more = holding.num_held, False

    def commands(self, request_id: str) -> Mapping[str, Sequence[int]]:
        """Return a request's blocks by position, 0 where none of its rows reads."""
        return {f"prefill_table{self.name}": list(self._holdings[request_id].table)}

    def attach(self, request_id: str, k: int, digest: bytes) -> None:
        """List a request's blocks of chunk k under its digest, if it has all of them and none are listed yet.

        Blocks of its ring are not listed: steps under way may still write over them.
        """
        holding = self._holdings[request_id]
        first, stop = k * self.per_chunk, (k + 1) * self.per_chunk
        blocks = tuple(holding.table[first:stop])
        in_ring = holding.ring_start is not None and stop > holding.ring_start
        if digest not in self._parts and k not in holding.parts and not in_ring and 0 not in blocks:
            holding.parts[k] = self._parts[digest] = _Part(digest, blocks, num_users=1)
        if k in holding.parting and (part := self._parts.get(digest)) is not None:
            part.num_found += 1

    def worth_keeping(self, request_id: str, digests: Sequence[bytes], num_before: int) -> Iterable[bytes]:
        """Yield the chunks that rows see after this prompt's end, after its divergence from another, or at intervals.

        The intervals are KEPT_EVERY positions or KEPT_WINDOWS windows: prompts that go on from the middle begin there.
        """
        holding, count = self._holdings[request_id], len(digests)
        is_read = count == holding.num_prompt // self._chunk
        end = self._first_of_end(holding, count * self._chunk) if is_read else count
        often = max(1, min(KEPT_EVERY, KEPT_WINDOWS * self.pool.window) // self._chunk)
        for k in range(min(end, num_before), count):
            after = -(-(k + 1) // often) * often
            if k >= end or k in holding.parting or k >= self._first_seen(after * self._chunk):
                yield digests[k]
        yield from (part.digest for part in holding.parts.values() if part.is_shared)

    def spare(self, digests: Sequence[bytes], num_before: int) -> Iterable[bytes]:
        """Return all new chunks: a prompt may go on from any chunk, as a question about a document does."""
        return digests[num_before:]

    def drop(self, digest: bytes, *, poisoned: bool = False) -> None:
        """Unlist a chunk; poisoned: its blocks are cleared before reuse."""
        part = self._parts.pop(digest, None)
        if part is None:
            return
        part.listed = False
        if poisoned:
            self._dirty.update(part.blocks)
        if not part.num_users:
            del self._unused[digest]
            self._give_back(part.blocks)

    def distrust(self, request_id: str) -> None:
        """Unlist the chunks of a request that failed with NaN, and have all of its blocks cleared."""
        holding = self._holdings[request_id]
        self._dirty.update(block for block in holding.table if block)
        for part in holding.parts.values():
            if part.listed:
                self.drop(part.digest, poisoned=True)

    def release(self, request_id: str) -> None:
        """Take back a request's blocks; its listed chunks stay, those at its end longest."""
        holding = self._holdings.pop(request_id)
        private = set(holding.table).difference((0,), *(part.blocks for part in holding.parts.values()))
        self._give_back(sorted(private, reverse=True))
        end = self._first_of_end(holding, (max(holding.parts, default=0) + 1) * self._chunk)
        for k in sorted(holding.parts):
            self._retire(holding.parts[k], is_end=k >= end)

    def num_to_move(self, request_id: str) -> int:
        """Return the number of blocks that it holds."""
        return self._holdings[request_id].num_held

    def grow(self, request_id: str, num_prompt: int) -> None:
        """Record the new length of the prompt, after which its ring begins."""
        self._holdings[request_id].num_prompt = num_prompt

    def move_out(self, request_id: str) -> tuple[tuple[int, ...], object]:
        """Take back a request's blocks; returns them once each, in the order of its table."""
        holding = self._holdings[request_id]
        places = tuple(dict.fromkeys(block for block in holding.table if block))
        self.release(request_id)
        return places, replace(holding, table=list(holding.table), parts={})

    def fits_moved(self, moved: object) -> bool:
        """Whether as many blocks as it had reserved are available."""
        available = self._num_available(self._holders_that_take_more())
        return isinstance(moved, _Holding) and moved.num_reserved <= available

    def move_in(self, request_id: str, moved: object) -> tuple[int, ...]:
        """Give it blocks of its own in place of its former ones, including those of its ring."""
        if not isinstance(moved, _Holding):
            raise InvariantError(f"request {request_id} was not moved out of window {self.pool.window}")
        before = dict.fromkeys(block for block in moved.table if block)
        now = dict(zip(before, self._take(len(before)), strict=True))
        table = [now.get(block, 0) for block in moved.table]
        self._holdings[request_id] = replace(moved, table=table)
        return tuple(now.values())

    def take_blocks_to_clear(self) -> list[int]:
        """Take the blocks that the caller zeroes before it launches anything else."""
        blocks, self._to_clear = self._to_clear, []
        in_use, self._to_clear_in_use = self._to_clear_in_use, []
        self._free.extend(blocks)
        return blocks + in_use

    def stats(self) -> dict[str, int]:
        """Return counts of blocks by state, and the window, as JSON."""
        free, evictable = len(self._free), len(self._unused) * self.per_chunk
        used = self.capacity - free - evictable - len(self._to_clear)
        counts = {"num_free": free, "num_evictable": evictable, "num_to_clear": len(self._to_clear), "num_used": used}
        broken = {"num_broken_pins": self.num_broken_pins * self.per_chunk}
        return {"window": self.pool.window, "num_blocks": self.capacity, **counts, **broken}

    def _need(self, num_blocks: int, num_hits: int) -> tuple[int, bool]:
        """Return the blocks that a request reserves, and whether it holds the whole table from its first row on."""
        first = self.pool.first_block(num_hits * self._chunk) // self.per_chunk * self.per_chunk
        most = self.pool.most_blocks(self.per_chunk)
        return min(num_blocks - first, most), num_blocks - first <= most

    def _seen_after(self, digests: Sequence[bytes]) -> dict[int, _Part]:
        """Return the listed chunks that rows after a chain see, by number."""
        return {k: self._parts[digests[k]] for k in range(self._first_seen(len(digests) * self._chunk), len(digests))}

    def _first_seen(self, position: int) -> int:
        """Return the number of the first chunk that rows from `position` on see."""
        return self.pool.first_block(position) // self.per_chunk

    def _first_of_end(self, holding: _Holding, position: int) -> int:
        """Return the first chunk that rows see in prompts that go on from `position`, or in the same prompt again."""
        return self._first_seen(min(position, (holding.num_prompt - 1) // self._chunk * self._chunk))

    def _num_available(self, holders: Counter[_Part]) -> int:
        """Return the blocks that are unused and not reserved; holders: see `_holders_that_take_more`."""
        return len(self._free) + len(self._unused) * self.per_chunk - self._num_outstanding(holders)

    def _num_outstanding(self, holders: Counter[_Part]) -> int:
        """Return the blocks that requests have yet to take: reserved ones, and replacements of those others hold."""
        shared = sum(count - (count == part.num_users) for part, count in holders.items())
        not_taken = sum(each.num_reserved - each.num_held for each in self._holdings.values())
        return not_taken + shared * self.per_chunk

    def _holders_that_take_more(self) -> Counter[_Part]:
        """Count, by chunk, the requests that hold it and will take other blocks in its place."""
        return Counter(part for each in self._holdings.values() if each.takes_more for part in each.parts.values())

    def _extend(self, holding: _Holding, stop: int) -> None:
        """Fill a table with blocks up to place `stop`."""
        count = max(0, stop - holding.stop)
        holding.table[holding.stop : holding.stop + count] = self._take(count)
        holding.num_held += count
        holding.stop += count

    def _forget(self, holding: _Holding, position: int, end: int | None = None) -> None:
        """Give back the blocks that rows from `position` on do not see; those of a listed chunk together.

        end  the first chunk that rows of continuing prompts see: chunks from it on are evicted after others
        """
        first = self.pool.first_block(position)
        place = holding.first
        while place < first:
            k, part = place // self.per_chunk, holding.parts.get(place // self.per_chunk)
            stop = place + 1
            if part is not None:
                stop = (k + 1) * self.per_chunk
                if stop > first:
                    break
                self._retire(holding.parts.pop(k), is_end=end is not None and k >= end)
            elif holding.table[place]:
                self._give_back((holding.table[place],))
            holding.num_held -= sum(block > 0 for block in holding.table[place:stop])
            holding.table[place:stop] = [0] * (stop - place)
            place = stop
        holding.first = place

    def _retire(self, part: _Part, *, is_end: bool) -> None:
        """Count one user of a chunk less.

        is_end  the chunk is at the end of the user's prompt
        Chunks at ends of prompts, and those from which several texts went on, are evicted after others. If only its own
        text went on from an end, the end keeps its place in the order: the text has a new end. All others are evicted
        first.
        """
        part.num_users -= 1
        if is_end and part.listed:
            part.is_end = True
            self._parts.move_to_end(part.digest)
        if part.num_users:
            return
        if not part.listed:
            self._give_back(part.blocks)
            return
        self._unused[part.digest] = part
        if part.is_shared:
            self._parts.move_to_end(part.digest)
        elif not part.is_end:
            self._parts.move_to_end(part.digest, last=False)

    def _take(self, count: int) -> list[int]:
        while len(self._free) < count and self._unused:
            unused = (each for each in self._parts if each in self._unused)  # few of the first ones have users
            digest = next((each for each in unused if each not in self._pins), None)
            if digest is None:
                digest = next(each for each in self._parts if each in self._unused)
            part = self._unused.pop(digest)
            self.num_broken_pins += digest in self._pins
            del self._parts[digest]
            self._give_back(part.blocks)
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(taken) < count:  # a failed request's block that another request shared
            if not self._to_clear:
                raise InvariantError(f"{count} blocks of window {self.pool.window} were reserved, and are not there")
            taken.append(self._to_clear.pop())
            self._to_clear_in_use.append(taken[-1])
        return sorted(taken)

    def _give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self._to_clear_in_use:
                self._to_clear_in_use.remove(block)
                self._dirty.add(block)
            if block in self._dirty:
                self._dirty.discard(block)
                self._to_clear.append(block)
            else:
                self._free.append(block)

    def problems(self, requests: Collection[str], index: PrefixIndex) -> Iterator[str]:
        """Describe the book's faults; yields nothing if it is sound.

        requests  the ids of requests that hold blocks of the first pool
        index     the chunks that prompts find
        """
        name = f"window {self.pool.window}"
        if set(requests) != set(self._holdings):
            yield f"{name}: {len(self._holdings)} requests hold blocks, and {len(requests)} of other layers"
        if lost := [digest for digest in self._parts if index.get(digest) is None]:
            yield f"{name}: {len(lost)} chunks are listed that no prompt finds"
        states, users = Counter(self._free) + Counter(self._to_clear), Counter[int]()
        parts = {id(part): part for part in self._parts.values()}
        for request_id, holding in self._holdings.items():
            held = set(holding.table) - {0}
            if len(held) != holding.num_held or holding.num_held > holding.num_reserved:
                yield (f"{name}: request {request_id} holds {len(held)} blocks, counts {holding.num_held}, and "
                       f"reserved {holding.num_reserved}")  # fmt: skip
            for k, part in holding.parts.items():
                users[id(part)] += 1
                parts[id(part)] = part
                if tuple(holding.table[k * self.per_chunk : (k + 1) * self.per_chunk]) != part.blocks:
                    yield f"{name}: chunk {k} of request {request_id} is not at its place in the table"
            states.update(held.difference(*(part.blocks for part in holding.parts.values())))
        for key, part in parts.items():
            states.update(part.blocks)
            if part.num_users != users[key] or (part.listed and (not users[key]) != (part.digest in self._unused)):
                yield f"{name}: blocks {part.blocks} have {part.num_users} users, {users[key]} tables hold them"
        wrong = [block for block in range(1, self.pool.num_blocks) if states[block] != 1]
        if wrong or states[0] or states.total() != self.capacity:
            yield f"{name}: blocks {wrong} do not have one state; {states.total()} of {self.capacity} are accounted for"
        if self._dirty.intersection(self._free):
            yield f"{name}: blocks {sorted(self._dirty.intersection(self._free))} are free but not cleared"
        missing = -self._num_available(self._holders_that_take_more()) - len(self._to_clear)
        if missing > 0:
            yield f"{name}: {missing} blocks more are reserved than are there"
