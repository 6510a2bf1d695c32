"""This is the book of snapshots: a snapshot is a row of the recurrent states with the state after a chunk of a prompt.

`lowlat.sequence.kvcache` calls it beside its own book. A prompt goes on after the longest prefix that has both its keys
and values and a snapshot. Snapshots are large, so prompts leave few:

- at the end of a prompt's last complete chunk,
- where another prompt was found to diverge from this one, such as the end of a system prompt,
- at regular intervals of positions,
- while a prompt is read, at the end of the last part: this one moves along with each part, so that a prompt that is
  broken off goes on from there.

The least recently used snapshot is evicted first. If one text goes on from its own end, and leaves a snapshot at its
new end, that does not count as a use. Requests reserve no snapshot, so each request fits: its state is in the slot's
own row. A snapshot is written whole before it is read, so nothing is cleared. The host's commands tell each part of
prefill from which row it begins, and in which rows it leaves its states.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from lowlat.sequence.pool_book import IsKept, PoolBook
from lowlat.sequence.prefix_index import PrefixIndex
from lowlat.sequence.tiers.key import COMING

__all__ = ["MAX_KEPT", "NO_SNAPSHOTS", "OWN_ROW", "PREFILL_STATES", "SnapshotBook"]

PREFILL_STATES = "prefill_states"  # the command buffer: the first row, then pairs of a row and a number of positions
OWN_ROW = -1  # in this buffer: the slot's own row; in a pair: no snapshot
MAX_KEPT = 2  # snapshots that one part of a prompt may leave
NO_SNAPSHOTS = (OWN_ROW, *(OWN_ROW, 0) * MAX_KEPT)  # a part that begins with the slot's own row and leaves none


class _Place(Enum):
    """The reason for which a snapshot was left."""

    END = "the end of a prompt"
    PASSING = "the end of what was read of a prompt, which moves along"
    PARTING = "where it parts from another text"
    OFTEN = "every so many positions"


@dataclass(eq=False, slots=True)
class _Snapshot:
    """A row with the state after a chunk. If it is dropped, its row is free after its last user has begun.

    place      why it was left
    num_users  admitted requests that have yet to begin with it
    num_found  requests that were admitted to begin with it
    """

    digest: bytes
    row: int
    place: _Place
    num_users: int = 0
    num_found: int = 0
    listed: bool = True

    @property
    def is_end(self) -> bool:
        """Whether the text that left it is expected to go on from it once."""
        return self.place in (_Place.END, _Place.PASSING)


@dataclass(eq=False, slots=True)
class _Holding:
    """The book's record of a request.

    begins      the snapshot that it will begin with; None: there is none, or it has begun
    num_prompt  positions of its prompt
    parting     the position at which it diverges from another text; 0: it does not
    begun       the digest of the snapshot that it began with
    pending     rows that the part under way leaves, and why, by the number of the chunk that they follow
    own         digests of the snapshots that it has left
    passing     the snapshot that moves along, its own or that of a request that was broken off
    command     contents of the command buffer for the part under way
    grows       its prompt becomes longer while it is read
    """

    begins: _Snapshot | None
    num_prompt: int
    parting: int = 0
    begun: bytes | None = None
    pending: dict[int, tuple[int, _Place]] = field(default_factory=dict)
    own: list[bytes] = field(default_factory=list)
    passing: _Snapshot | None = None
    command: list[int] = field(default_factory=list)
    grows: bool = False


class SnapshotBook(PoolBook):
    """The book of snapshots: rows `first_row` to `first_row` + `num_snapshots` - 1 of the recurrent states.

    prefill_chunk  positions of a chunk: snapshots lie at multiples of it
    interval       positions between regular snapshots, a multiple of prefill_chunk; 0: none are left
    """

    name, kind, num_places = ".states", "snapshots", 1

    def __init__(self, first_row: int, num_snapshots: int, prefill_chunk: int, interval: int = 0) -> None:
        super().__init__()
        self.num_snapshots, self._chunk, self._interval = num_snapshots, prefill_chunk, interval
        self._first_row = first_row
        self._free = list(range(first_row + num_snapshots - 1, first_row - 1, -1))
        self._listed: OrderedDict[bytes, _Snapshot] = OrderedDict()  # in the order of eviction
        self._dropped: list[_Snapshot] = []  # unlisted, but a request has yet to begin with them
        self._holdings: dict[str, _Holding] = {}
        self._num_found = 0

    def num_hits(self, digests: Sequence[bytes], most: int) -> int:
        """Return the largest number of chunks, at most `most`, of which the last has a snapshot."""
        return next((count for count in range(most, 0, -1) if digests[count - 1] in self._listed), 0)

    def needed(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Return the last two: a prompt that ends with a complete chunk leaves its last snapshot before that chunk."""
        return digests[-2:]

    def goes_on(self, digests: Sequence[bytes], is_kept: IsKept) -> bool:
        """Whether a snapshot after the last chunk is kept."""
        return bool(digests) and bool(is_kept(digests[-1]))

    def restore(self, digests: Sequence[bytes], is_kept: IsKept) -> Mapping[bytes, tuple[int, ...]]:
        """List the snapshot after the last chunk that has one, if it is in the tier; returns the row to fill."""
        for digest in reversed(digests):
            if digest in self._listed:
                return {}
            if kept := is_kept(digest):
                row = None if kept is COMING else self._take(_Place.END)
                if row is None:
                    return {}
                self._listed[digest] = _Snapshot(digest, row, _Place.END)
                return {digest: (row,)}
        return {}

    def places(self, digest: bytes) -> tuple[int, ...] | None:
        """Return the row of a listed snapshot."""
        snapshot = self._listed.get(digest)
        return None if snapshot is None else (snapshot.row,)

    def admit(
        self, request_id: str, num_blocks: int, num_prompt: int, digests: Sequence[bytes], num_common: int
    ) -> None:
        """Hold the snapshot that a request begins with, and note where it diverges from another text."""
        begins = None
        if digests:
            begins = self._listed[digests[-1]]
            begins.num_users += 1
            begins.num_found += 1
            if begins.num_found > begins.is_end:  # several texts go on from it; a single one soon leaves a new end
                self._listed.move_to_end(begins.digest)
            self._num_found += 1
        begun = digests[-1] if digests else None
        passing = begins if begins is not None and begins.place is _Place.PASSING else None
        self._holdings[request_id] = _Holding(begins, num_prompt, num_common * self._chunk, begun, passing=passing)

    def append(self, request_id: str, start: int, stop: int) -> None:
        """Take rows for the snapshots that the prompt's positions [start, stop) leave, as far as rows are available."""
        holding = self._holdings[request_id]
        self._forget_pending(holding)
        begins = holding.begins
        places = self._places(holding, start, stop)
        if places and begins is None:
            self._move_along(holding)
        for position, place in places.items():
            row = self._take(place)
            if row is not None:
                holding.pending[position // self._chunk - 1] = row, place
        if begins is not None:  # what is launched later may write to its row
            holding.begins = None
            self._let_go(begins)
        pairs = [(kept, (k + 1) * self._chunk - start) for k, (kept, _) in holding.pending.items()]
        pairs += [(OWN_ROW, 0)] * (MAX_KEPT - len(pairs))
        begin = OWN_ROW if begins is None else begins.row
        holding.command = [begin, *(value for pair in pairs for value in pair)]

    def commands(self, request_id: str) -> Mapping[str, Sequence[int]]:
        """Return the row that the part under way begins with, and MAX_KEPT pairs of a row and a number of positions."""
        return {PREFILL_STATES: self._holdings[request_id].command}

    def attach(self, request_id: str, k: int, digest: bytes) -> None:
        """List the snapshot after chunk k under its digest, if the request left one and none is listed yet."""
        holding = self._holdings[request_id]
        if (found := holding.pending.pop(k, None)) is None:
            return
        row, place = found
        if digest in self._listed:
            self._free.append(row)
            return
        self._move_along(holding)  # drops the one before, with whose row the part began
        snapshot = self._listed[digest] = _Snapshot(digest, row, place)
        self._listed.move_to_end(digest, last=place in (_Place.END, _Place.PARTING))
        holding.own.append(digest)
        if place is _Place.PASSING:
            holding.passing = snapshot

    def worth_keeping(self, request_id: str, digests: Sequence[bytes], num_before: int) -> Iterable[bytes]:
        """Yield the new chunks with a snapshot, but the one that moves along."""
        for digest in digests[num_before:]:
            snapshot = self._listed.get(digest)
            if snapshot is not None and snapshot.place is not _Place.PASSING:
                yield digest

    def drop(self, digest: bytes, *, poisoned: bool = False) -> None:
        """Unlist a chunk's snapshot; its row is written whole before it is read again, so nothing is cleared."""
        snapshot = self._listed.pop(digest, None)
        if snapshot is None:
            return
        snapshot.listed = False
        if snapshot.num_users:
            self._dropped.append(snapshot)
        else:
            self._free.append(snapshot.row)

    def distrust(self, request_id: str) -> None:
        """Unlist all snapshots of a request that failed with NaN."""
        for digest in self._holdings[request_id].own:
            self.drop(digest, poisoned=True)

    def release(self, request_id: str) -> None:
        """Take back a request's rows; its listed snapshots stay, and the last one is evicted after all others.

        If the request has left none, this holds for the snapshot that it began with.
        """
        holding = self._holdings.pop(request_id)
        self._forget_pending(holding)
        if holding.begins is not None:
            self._let_go(holding.begins)
        last = holding.own[-1] if holding.own else holding.begun
        if last is not None and last in self._listed:
            self._listed.move_to_end(last)

    def grow(self, request_id: str, num_prompt: int) -> None:
        """Record the new length; a growing prompt leaves the snapshot of its end only with its last part."""
        holding = self._holdings[request_id]
        holding.num_prompt, holding.grows = num_prompt, True

    def move_out(self, request_id: str) -> tuple[tuple[int, ...], object]:
        """Release the request; there is nothing to move, since its state is in the slot's own row."""
        self.release(request_id)
        return (), None

    def move_in(self, request_id: str, moved: object) -> tuple[int, ...]:
        """Record a request that decodes: it begins with no snapshot, and leaves none."""
        self._holdings[request_id] = _Holding(None, 0, command=list(NO_SNAPSHOTS))
        return ()

    def stats(self) -> dict[str, int]:
        """Return counts of snapshots by state, and of requests that began with one, as JSON."""
        return {
            "num_snapshots": self.num_snapshots,
            "num_free": len(self._free),
            "num_listed": len(self._listed),
            "num_found": self._num_found,
            "num_broken_pins": self.num_broken_pins,
        }

    def problems(self, requests: Collection[str], index: PrefixIndex) -> Iterator[str]:
        """Describe the book's faults; yields nothing if it is sound."""
        if set(requests) != set(self._holdings):
            yield f"snapshots: {len(self._holdings)} requests are known, and {len(requests)} hold blocks"
        if lost := [digest for digest in self._listed if index.get(digest) is None]:
            yield f"snapshots: {len(lost)} are listed that no prompt finds"
        rows = [*self._free, *(each.row for each in (*self._listed.values(), *self._dropped))]
        rows += [row for holding in self._holdings.values() for row, _ in holding.pending.values()]
        if sorted(rows) != list(range(self._first_row, self._first_row + self.num_snapshots)):
            yield f"snapshots: rows {sorted(rows)} are accounted for, of {self.num_snapshots} from {self._first_row} on"
        users = [id(each.begins) for each in self._holdings.values() if each.begins is not None]
        for snapshot in (*self._listed.values(), *self._dropped):
            if snapshot.num_users != (count := users.count(id(snapshot))):
                yield f"snapshot of row {snapshot.row} has {count} users, and counts {snapshot.num_users}"

    def _places(self, holding: _Holding, start: int, stop: int) -> Mapping[int, _Place]:
        """Return the positions in (start, stop] whose states are worth a row, the best first, at most MAX_KEPT."""
        size, num_prompt, is_last = self._chunk, holding.num_prompt, stop >= holding.num_prompt
        found: dict[int, _Place] = {}
        if is_last or not holding.grows:
            found = dict.fromkeys((num_prompt // size * size, (num_prompt - 1) // size * size), _Place.END)
        found.setdefault(holding.parting, _Place.PARTING)
        if self._interval:
            for position in range((start // self._interval + 1) * self._interval, num_prompt, self._interval):
                found.setdefault(position, _Place.OFTEN)
        if not is_last:
            found.setdefault(stop // size * size, _Place.PASSING)
        return dict(islice(((each, place) for each, place in found.items() if start < each <= stop), MAX_KEPT))

    def _move_along(self, holding: _Holding) -> None:
        """Drop a request's snapshot that moves along, unless another request is about to begin with it."""
        passing, holding.passing = holding.passing, None
        if passing is not None and passing.listed and not passing.num_users:
            self.drop(passing.digest)

    def _take(self, place: _Place) -> int | None:
        """Take a free row, or evict the least recently used snapshot; sessions' snapshots go after others.

        Returns None if requests are about to read all snapshots, if one that moves along would evict another, or if a
        regular one would evict a session's.
        """
        if not self._free:
            free = [each for each in self._listed.values() if not each.num_users]
            unused = next((each for each in free if each.digest not in self._pins), free[0] if free else None)
            if unused is None or place is _Place.PASSING or (place is _Place.OFTEN and unused.digest in self._pins):
                return None
            self.num_broken_pins += unused.digest in self._pins
            self.drop(unused.digest)
        return self._free.pop()

    def _let_go(self, snapshot: _Snapshot) -> None:
        snapshot.num_users -= 1
        if not snapshot.listed and not snapshot.num_users:
            self._dropped.remove(snapshot)
            self._free.append(snapshot.row)

    def _forget_pending(self, holding: _Holding) -> None:
        """Give back the rows that a part took for snapshots, and that were not listed."""
        self._free.extend(row for row, _ in holding.pending.values())
        holding.pending.clear()
