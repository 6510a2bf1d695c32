"""This book has the sessions of one runtime: what each has said, how long it lives, and the chunks that it pins."""

import heapq
import itertools
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

from lowlat.errors import RequestError
from lowlat.options.declaration import shown
from lowlat.sequence.kvcache import KVCache

__all__ = ["MAX_NAME", "SessionBook", "SessionKey", "SessionRecord", "check_session_id"]

MAX_NAME = 128
MAX_SESSIONS = 4096
MAX_ANSWERS = 8  # of a session that are kept to draft from
MIN_STALE = 64  # entries of the heap that are left where they are


class SessionKey(NamedTuple):
    """The name of a session, within what shares cached prefixes."""

    cache_salt: str
    session_id: str


class SessionRecord:
    """One session.

    token_ids    prompt and answer of the request that ended last
    seed         of that request: with it, more tokens are those that would have come
    data         its owner's own, as JSON values: the messages of a chat, say
    ttl_s        how long it lives after its last request
    num_running  requests of it under way: it does not end before they do
    answers      of the requests that ended last, the last one first; of a session from a file all of its text
    deadline     when it ends, where no request of it is under way
    entry        its place in the book's heap, at its deadline or before; None: it has none
    """

    def __init__(self, key: SessionKey, ttl_s: float) -> None:
        self.key, self.ttl_s = key, ttl_s
        self.token_ids: tuple[int, ...] = ()
        self.seed: int | None = None
        self.data: dict[str, Any] = {}
        self.num_running = 0
        self.answers: tuple[tuple[int, ...], ...] = ()
        self.deadline = 0.0
        self.entry: _Entry | None = None
        self.num_requests = 0

    def answers_beside(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The earlier answers that a prompt does not hold."""
        whole = array("i", prompt).tobytes()
        return tuple(answer for answer in self.answers if not _stands_in(answer, whole))


_Entry = tuple[float, int, SessionRecord]  # a time, a number of its own, and who may have to end then


class SessionBook(Mapping[SessionKey, SessionRecord]):
    """The sessions that live. A session that has ended pins nothing; its record may be opened again.

    A heap finds those that end first, for every request that names a session asks for them. A deadline that moves on
    leaves its entry where it is until the heap comes to it.

    kvcache  pins their chunks
    ttl_s    how long a session lives after its last request, where it says nothing else
    num_files  sessions that are being written to files: the device's memory must stay as it is
    """

    def __init__(self, kvcache: KVCache, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._kvcache, self._ttl_s, self._clock = kvcache, ttl_s, clock
        self._live: dict[SessionKey, SessionRecord] = {}
        self._heap: list[_Entry] = []
        self._numbers = itertools.count()
        self._num_stale = 0  # entries that are no session's any more
        self._num_ended = 0
        self.num_files = 0

    def __getitem__(self, key: SessionKey) -> SessionRecord:
        return self._live[key]

    def __iter__(self) -> Any:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def open(self, key: SessionKey, ttl_s: float | None = None) -> SessionRecord:
        """A session that lives, or a new one. Raises RequestError for a name that is none."""
        self.expire()
        record = self._live.get(key)
        if record is None:
            check_session_id(key.session_id)
            record = SessionRecord(key, self._ttl_s if ttl_s is None else ttl_s)
        if ttl_s is not None:
            record.ttl_s = ttl_s
        self.revive(record)
        return record

    def revive(self, record: SessionRecord) -> None:
        """Have a session live from now on, as long as it says."""
        before = self._live.get(record.key)
        if before is None and len(self._live) >= MAX_SESSIONS:
            first = self._first_to_end()
            if first is None:
                raise RequestError(f"{MAX_SESSIONS} sessions have requests under way; wait, or leave session out")
            self.end(first)
        if before is not None and before is not record:
            self._leave_heap(before)
        self._live[record.key] = record
        self._touch(record)

    def begin(self, record: SessionRecord) -> None:
        """A request of it was submitted."""
        self.revive(record)
        record.num_running += 1
        record.num_requests += 1

    def finish(
        self, record: SessionRecord, token_ids: tuple[int, ...] | None, seed: int | None, num_prompt: int = 0
    ) -> None:
        """A request of it has ended; token_ids None: it failed, or never ran, and leaves nothing.

        num_prompt  tokens of its prompt, after which its answer begins
        """
        record.num_running -= 1
        if token_ids is not None:
            record.token_ids, record.seed = token_ids, seed
            record.answers = (token_ids[num_prompt:], *record.answers)[:MAX_ANSWERS]
        live = self._live.get(record.key)
        if live is record:
            self._touch(record)
        elif live is None:
            self._kvcache.unpin(record.key)  # it was closed while the request ran

    def fork(self, record: SessionRecord, session_id: str) -> SessionRecord:
        """A session that goes on from the same place. Raises RequestError for a name in use."""
        key = SessionKey(record.key.cache_salt, check_session_id(session_id))
        if key in self._live:
            raise RequestError(f"there is a session {session_id!r} already; fork under another name, or close it")
        twin = SessionRecord(key, record.ttl_s)
        twin.token_ids, twin.seed, twin.data = record.token_ids, record.seed, deepcopy(record.data)
        twin.answers = record.answers
        self.revive(twin)
        self._kvcache.pin(key, self._kvcache.pinned(record.key))
        return twin

    def end(self, record: SessionRecord) -> None:
        """Let the chunks of a session go as others do."""
        if self._live.get(record.key) is record:
            del self._live[record.key]
            self._leave_heap(record)
            self._kvcache.unpin(record.key)
            self._num_ended += 1

    def expire(self) -> None:
        """End the sessions whose time has passed."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            first = self._first_to_end()
            if first is None or first.deadline > now:
                return
            self.end(first)

    def stats(self) -> dict[str, int]:
        """Sessions that live and have ended, as JSON; nothing before there was one."""
        self.expire()
        if not self._live and not self._num_ended:
            return {}
        running = sum(record.num_running > 0 for record in self._live.values())
        return {"num_sessions": len(self._live), "num_running": running, "num_ended": self._num_ended}

    def _touch(self, record: SessionRecord) -> None:
        record.deadline = self._clock() + record.ttl_s
        if record.entry is None or record.entry[0] > record.deadline:
            self._leave_heap(record)
            self._enter_heap(record)

    def _first_to_end(self) -> SessionRecord | None:
        """The session whose deadline comes first, of those that have no request under way; None without one."""
        while self._heap:
            entry = at, _, record = self._heap[0]
            if record.entry is entry and at == record.deadline and not record.num_running:
                return record
            heapq.heappop(self._heap)
            if record.entry is not entry:
                self._num_stale -= 1
                continue
            record.entry = None
            if not record.num_running:  # else its end brings it back
                self._enter_heap(record)
        return None

    def _enter_heap(self, record: SessionRecord) -> None:
        record.entry = (record.deadline, next(self._numbers), record)
        heapq.heappush(self._heap, record.entry)

    def _leave_heap(self, record: SessionRecord) -> None:
        """Leave a session's entry to be passed over; where most are, they are taken out, with what they hold."""
        if record.entry is None:
            return
        record.entry = None
        self._num_stale += 1
        if self._num_stale > max(MIN_STALE, len(self._heap) / 2):
            self._heap = [entry for entry in self._heap if entry[2].entry is entry]
            heapq.heapify(self._heap)
            self._num_stale = 0


def _stands_in(answer: tuple[int, ...], whole: bytes) -> bool:
    """Whether a text, packed, holds all tokens of an answer, one after the other."""
    packed = array("i", answer)
    place = whole.find(packed.tobytes())
    while place % packed.itemsize:  # between two tokens; -1 is no place
        if place < 0:
            return False
        place = whole.find(packed.tobytes(), place + 1)
    return True


def check_session_id(session_id: object) -> str:
    """A session's name. Raises RequestError for what is none."""
    if not isinstance(session_id, str) or not 1 <= len(session_id) <= MAX_NAME or not session_id.isprintable():
        raise RequestError(f"a session's id must have 1 to {MAX_NAME} printable characters, got {shown(session_id)}")
    return session_id
