"""This module records the sessions of one runtime: the tokens, the lifetime and the pinned chunks of each."""

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
MAX_ANSWERS = 8  # answers that a session keeps to draft from
MIN_STALE = 64  # the heap is not rebuilt for this many stale entries or fewer


class SessionKey(NamedTuple):
    """A session's name, with the salt whose requests share cached prefixes."""

    cache_salt: str
    session_id: str


class SessionRecord:
    """One session.

    token_ids    prompt and answer of the request that ended last
    seed         of that request; with it, an answer that is continued gets the tokens that would have come next
    data         JSON values of the session's owner, such as the messages of a chat
    ttl_s        seconds that it lives after its last request
    num_running  its running requests; it does not end before they do
    answers      of the requests that ended last, newest first; for a session from a file one answer, all of its text
    deadline     the clock's time at which it ends if none of its requests runs
    entry        its entry in the book's heap, at its deadline or before; None: it has none
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
        """The earlier answers that the prompt does not contain."""
        whole = array("i", prompt).tobytes()
        return tuple(answer for answer in self.answers if not _stands_in(answer, whole))


_Entry = tuple[float, int, SessionRecord]  # a time, a unique number, and the session that may end at that time


class SessionBook(Mapping[SessionKey, SessionRecord]):
    """Maps keys to the live sessions. A session that has ended pins nothing; its record may be opened again.

    Every request that names a session first ends the expired ones, so a heap orders sessions by deadline. When a
    deadline moves later, its entry stays in place, and is corrected when it reaches the top.

    kvcache    pins the sessions' chunks
    ttl_s      seconds that a session lives after its last request by default
    num_files  sessions that are being written to files: the device's memory must not change meanwhile
    """

    def __init__(self, kvcache: KVCache, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._kvcache, self._ttl_s, self._clock = kvcache, ttl_s, clock
        self._live: dict[SessionKey, SessionRecord] = {}
        self._heap: list[_Entry] = []
        self._numbers = itertools.count()
        self._num_stale = 0  # entries that no session refers to
        self._num_ended = 0
        self.num_files = 0

    def __getitem__(self, key: SessionKey) -> SessionRecord:
        return self._live[key]

    def __iter__(self) -> Any:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def open(self, key: SessionKey, ttl_s: float | None = None) -> SessionRecord:
        """Find a live session, or open a new one. Raises RequestError for an invalid name."""
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
        """Restart a session's lifetime of `ttl_s`.

        If it has to be added and the book is full, the session that would end first is ended. Raises RequestError if
        all of them have running requests.
        """
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
        """Record that a request of the session was submitted."""
        self.revive(record)
        record.num_running += 1
        record.num_requests += 1

    def finish(
        self, record: SessionRecord, token_ids: tuple[int, ...] | None, seed: int | None, num_prompt: int = 0
    ) -> None:
        """Record that a request of the session has ended.

        token_ids   its prompt and answer; None: it failed or never ran, and the session keeps its tokens
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
        """Open a session with the same tokens, seed, data and pinned chunks. Raises RequestError for a name in use."""
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
        """End a session: its chunks may be evicted as all others."""
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
        """Counts of live and ended sessions, as JSON; {} before the first session."""
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
        """The session without running requests whose deadline comes first; None if there is none."""
        while self._heap:
            entry = at, _, record = self._heap[0]
            if record.entry is entry and at == record.deadline and not record.num_running:
                return record
            heapq.heappop(self._heap)
            if record.entry is not entry:
                self._num_stale -= 1
                continue
            record.entry = None
            if not record.num_running:  # else the end of its request enters it again
                self._enter_heap(record)
        return None

    def _enter_heap(self, record: SessionRecord) -> None:
        record.entry = (record.deadline, next(self._numbers), record)
        heapq.heappush(self._heap, record.entry)

    def _leave_heap(self, record: SessionRecord) -> None:
        """Mark a session's entry as stale; once more than half of the heap is stale, drop all stale entries."""
        if record.entry is None:
            return
        record.entry = None
        self._num_stale += 1
        if self._num_stale > max(MIN_STALE, len(self._heap) / 2):
            self._heap = [entry for entry in self._heap if entry[2].entry is entry]
            heapq.heapify(self._heap)
            self._num_stale = 0


def _stands_in(answer: tuple[int, ...], whole: bytes) -> bool:
    """Whether a packed text contains an answer's tokens as one contiguous run."""
    packed = array("i", answer)
    place = whole.find(packed.tobytes())
    while place % packed.itemsize:  # not at a token's first byte, or -1: not found
        if place < 0:
            return False
        place = whole.find(packed.tobytes(), place + 1)
    return True


def check_session_id(session_id: object) -> str:
    """Return a session's name if it is valid. Raises RequestError if not."""
    if not isinstance(session_id, str) or not 1 <= len(session_id) <= MAX_NAME or not session_id.isprintable():
        raise RequestError(f"a session's id must have 1 to {MAX_NAME} printable characters, got {shown(session_id)}")
    return session_id
