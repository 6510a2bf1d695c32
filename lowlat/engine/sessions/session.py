"""This module has the session as programs hold it: an object that can be forked, saved to a file and loaded."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowlat.engine.sessions.book import SessionKey, SessionRecord
from lowlat.engine.sessions.files import SessionFile, write_session
from lowlat.errors import RequestError
from lowlat.options.declaration import check_number, shown
from lowlat.options.keywords import NamedSession

if TYPE_CHECKING:
    from lowlat.engine.stepped import SteppedRuntime

__all__ = ["Session", "load_session", "open_session", "record_of"]

MAX_TTL_S = 1e9


class Session:
    """Session is a conversation whose prefix stays on the device or in the cache's tiers while others are evicted.

    `Runtime.session` and `Runtime.load_session` make one; requests name it: `runtime.generate(text, session=session)`.
    It changes no token. If a request finds no other memory, the session's chunks are evicted too, and recomputed later.
    `session_id` and `cache_salt` name it; `ttl_s` is how many seconds it lives after its last request. `data` belongs
    to its owner: JSON values that are saved with it, such as a chat's messages. Any thread may call its methods.
    """

    def __init__(self, runtime: "SteppedRuntime", record: SessionRecord) -> None:
        self._runtime, self._record = runtime, record
        self._forks = itertools.count(1)

    @property
    def session_id(self) -> str:
        """Its name."""
        return self._record.key.session_id

    @property
    def cache_salt(self) -> str:
        """The salt: only requests with the same one share the session's prefix."""
        return self._record.key.cache_salt

    @property
    def ttl_s(self) -> float:
        """Seconds that it lives after its last request."""
        return self._record.ttl_s

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and answer of the request that ended last; empty before the first.

        `runtime.generate(session.token_ids, seed=session.seed, session=session)` continues the answer.
        """
        return self._record.token_ids

    @property
    def seed(self) -> int | None:
        """The seed of that request. Draws are keyed by seed and position, so the same seed continues the answer."""
        return self._record.seed

    @property
    def data(self) -> dict[str, Any]:
        """The owner's JSON values."""
        return self._record.data

    def fork(self, session_id: str | None = None) -> "Session":
        """Open a second session that continues from here independently; the common prefix is kept once.

        session_id  its name; None: this one's with a number
        Raises RequestError for a name in use.
        """
        name = f"{self.session_id}-{next(self._forks)}" if session_id is None else session_id
        record = self._runtime.owned_call(lambda runtime: runtime.sessions.fork(self._record, name))
        return Session(self._runtime, record)

    def save(self, path: str | Path) -> int:
        """Write the session to a file, completely or not at all; returns the file's size in bytes.

        Only this user may access the file. It holds tokens, seed and data, and the state after the tokens as far as the
        device or the tiers have it. `Runtime.load_session` continues from it. Requests decode meanwhile.
        Raises RequestError for a session without tokens, SessionError if the file cannot be written.
        """
        return write_session(self._runtime, self._record, Path(path))

    def close(self) -> None:
        """End the session: its prefix may be evicted as any other. A request that names it opens it again.

        Further calls do nothing.
        """
        self._runtime.owned_call(lambda runtime: runtime.sessions.end(self._record))

    def record_of(self, runtime: "SteppedRuntime") -> SessionRecord:
        """Return its record to the runtime that it belongs to. Raises RequestError for another runtime."""
        if runtime is not self._runtime:
            raise RequestError(f"session {self.session_id!r} belongs to another runtime; save and load it")
        return self._record

    def __repr__(self) -> str:
        return f"Session({self.session_id!r}, {len(self.token_ids)} tokens, ttl_s={self.ttl_s:g})"


def open_session(runtime: "SteppedRuntime", session_id: str, cache_salt: str, ttl_s: float | None) -> Session:
    """See `Runtime.session`."""
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be text, got {shown(cache_salt)}")
    _check_ttl(ttl_s)
    key = SessionKey(cache_salt, session_id)
    return Session(runtime, runtime.owned_call(lambda owned: owned.sessions.open(key, ttl_s)))


def load_session(
    runtime: "SteppedRuntime", path: Path, session_id: str | None, cache_salt: str, ttl_s: float | None, *, force: bool
) -> Session:
    """See `Runtime.load_session`."""
    _check_ttl(ttl_s)
    with SessionFile(path) as file:
        name = file.session_id if session_id is None else session_id
        problem = file.why_foreign(runtime)
        if problem is not None and not force:
            raise problem
        token_ids = runtime.checks.prompt_ids(file.token_ids)
        key = SessionKey(cache_salt, name)

        def open_new(owned: "SteppedRuntime") -> SessionRecord:
            if key in owned.sessions:
                raise RequestError(f"there is a session {name!r} already; give another session_id, or close it")
            return owned.sessions.open(key, file.ttl_s if ttl_s is None else ttl_s)

        record = runtime.owned_call(open_new)
        record.token_ids, record.seed, record.data = token_ids, file.seed, file.data
        record.answers = (token_ids,)
        if problem is None:
            try:
                file.restore(runtime, record)
            except BaseException:
                runtime.owned_call(lambda owned: owned.sessions.end(record))  # another try may take its name
                raise
    return Session(runtime, record)


def record_of(
    runtime: "SteppedRuntime", session: NamedSession | str | None, cache_salt: str
) -> tuple[SessionRecord | None, str]:
    """Find the record of the session that a request names, and the request's salt. Raises RequestError."""
    if session is None:
        return None, cache_salt
    if isinstance(session, Session):
        if cache_salt not in ("", session.cache_salt):
            raise RequestError(f"session {session.session_id!r} has a cache_salt of its own; leave cache_salt out")
        return session.record_of(runtime), session.cache_salt
    if not isinstance(cache_salt, str):
        raise RequestError(f"cache_salt must be text, got {shown(cache_salt)}")
    name: Any = session
    return runtime.sessions.open(SessionKey(cache_salt, name)), cache_salt


def _check_ttl(ttl_s: Any) -> None:
    if ttl_s is not None:
        check_number("ttl_s", ttl_s, 0.0, MAX_TTL_S, RequestError)
