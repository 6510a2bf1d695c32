"""This module writes a session to one file: tokens, and the state after them, for one model and its numerics.

A line of JSON says whose it is and what follows: the tokens as packed int32, then contents of chunks, one for each pool
(`lowlat.executors.block_moves`), then a digest of all before. A file is read to its digest before anything of it is
believed. Who can write it decides what the model goes on from, so it must be its owner's alone.
"""

import hashlib
import json
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
import torch
from msgspec import Meta, Struct

from lowlat.checkpoint.files import take_out_unfinished, written_whole
from lowlat.engine.sessions.book import MAX_NAME, SessionRecord
from lowlat.errors import CapacityError, RequestError, SessionError
from lowlat.sequence.tiers.key import ChunkKey, Save

if TYPE_CHECKING:
    from lowlat.engine.stepped import SteppedRuntime

__all__ = ["SessionFile", "write_session"]

VERSION = 1
DIGEST_BYTES = 32
MAX_HEADER_BYTES = 64 << 20
MAX_TOKENS = 1 << 27
PIECE_BYTES = 4 << 20
BATCH_BYTES = 128 << 20  # of contents that are brought to the device between two steps, of other pools all of one
POLL_S = 0.002


class _Content(Struct, array_like=True, forbid_unknown_fields=True):
    """The content of a chunk, by its number, in a pool."""

    chunk: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    pool: Annotated[str, Meta(max_length=64)]
    num_bytes: Annotated[int, Meta(ge=0)]


class _Header(Struct, forbid_unknown_fields=True):
    """The first line of a file.

    model     digest of the model's files, and of the draft model's
    layout    digest of how contents are laid out
    numerics  of the runtime that made it
    """

    lowlat_session: int
    session_id: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    model_name: str
    model: str
    layout: str
    numerics: str
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None
    ttl_s: Annotated[float, Meta(ge=0)]
    data: dict[str, Any]
    contents: list[_Content]


def write_session(runtime: "SteppedRuntime", record: SessionRecord, path: Path) -> int:
    """See `Session.save`."""
    if not record.token_ids:
        raise RequestError(f"session {record.key.session_id!r} has no tokens: no request of it has ended yet")
    token_ids, seed = record.token_ids, record.seed
    apart, rest = _held(runtime, token_ids, record.key.cache_salt)
    mover = runtime.executor.mover
    try:
        mark = runtime.owned_call(lambda _: mover.mark())
        sizes = [mover.content_bytes(save.key.pool, len(save.places)) for _, save in apart]
        contents = [_Content(k, save.key.pool, size) for (k, save), size in zip(apart, sizes, strict=True)]
        late = [(k, pool, wait()) for k, pool, wait in rest]
        contents += [_Content(k, pool, content.numel()) for k, pool, content in late]
        facts = runtime.content_facts()
        header = _Header(
            VERSION, record.key.session_id, facts.model_name, facts.model, facts.layout, runtime.numerics,
            len(token_ids), seed, record.ttl_s, record.data, contents,
        )  # fmt: skip

        def pieces() -> Iterator[bytes | memoryview]:
            yield _encoded(header)
            yield _packed(token_ids)
            buffer = mover.allocate(max(sizes, default=0), "prefill_chunk")
            for (_, save), size in zip(apart, sizes, strict=True):
                mover.start_out([save], [buffer[:size]], mark)()
                yield _view(buffer[:size])
            for _, _, content in late:
                yield _view(content)

        return _write(path, pieces())
    finally:

        def let_go(owned: "SteppedRuntime") -> None:
            owned.kvcache.let_go([save.holder for _, save in apart])
            owned.sessions.num_files -= 1

        runtime.owned_call(let_go)


def _held(
    runtime: "SteppedRuntime", token_ids: tuple[int, ...], salt: str
) -> tuple[list[tuple[int, Save]], list[tuple[int, str, Callable[[], torch.Tensor]]]]:
    """A session's state: chunks whose blocks stay until they are let go of, and contents that were read at once.

    Contents that lie in the tiers come to the device first.
    """

    def hold(owned: "SteppedRuntime") -> Any:
        if owned.asleep:
            raise RequestError("the runtime sleeps (Runtime.sleep): a session is saved after Runtime.wake")
        ready, saves = owned.kvcache.hold(token_ids, salt)
        owned.fill_blocks()
        if not ready:
            return None
        apart = [(k, save) for k, save in saves if save.holder is not None]
        read = owned.executor.mover.read
        try:
            rest = [(k, save.key.pool, read(save.key.pool, save.places)) for k, save in saves if not save.holder]
        except CapacityError:
            owned.kvcache.let_go([save.holder for _, save in apart])
            raise
        owned.sessions.num_files += 1
        return apart, rest

    while (found := runtime.owned_call(hold)) is None:
        time.sleep(POLL_S)
    held: tuple[list[tuple[int, Save]], list[tuple[int, str, Callable[[], torch.Tensor]]]] = found
    return held


def _encoded(header: _Header) -> bytes:
    try:
        line = json.dumps(msgspec.to_builtins(header), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the session's data must be of JSON values: {error!s:.200}") from error
    if len(line) > MAX_HEADER_BYTES:
        raise RequestError(f"the session's data has {len(line)} bytes as JSON; at most {MAX_HEADER_BYTES}")
    return line


def _packed(token_ids: Iterable[int]) -> bytes:
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _view(content: torch.Tensor) -> memoryview:
    return memoryview(content.numpy())  # type: ignore[arg-type]


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> int:
    """Write pieces and their digest, under another name until they are whole. Raises SessionError."""
    digest, size = hashlib.blake2b(digest_size=DIGEST_BYTES), DIGEST_BYTES
    try:
        take_out_unfinished(path.parent, f".{path.name}-")
        with written_whole(path, f".{path.name}-") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
                size += len(piece)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SessionError(f"session file {path} cannot be written: {error.strerror or error}") from error
    return size


class SessionFile:
    """A file that `write_session` has written, opened and found whole.

    Raises SessionError for what is none, is torn or altered, or may have been written by another user.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise SessionError(f"session file {path} cannot be read: {error.strerror or error}") from error
        try:
            self._header, self._start = self._checked()
            self.token_ids = self._tokens()
        except OSError as error:
            self._file.close()
            raise SessionError(f"session file {path} cannot be read: {error.strerror or error}") from error
        except BaseException:
            self._file.close()
            raise

    session_id = property(lambda self: self._header.session_id, doc="Its name when it was written.")
    seed = property(lambda self: self._header.seed, doc="Of its last request.")
    ttl_s = property(lambda self: self._header.ttl_s, doc="How long it lives after its last request, seconds.")
    data = property(lambda self: self._header.data, doc="JSON values of its owner's.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def why_foreign(self, runtime: "SteppedRuntime") -> SessionError | None:
        """Why its state is of no use to a runtime; None: it is."""
        header = self._header
        force = "; load_session(..., force=True) takes its tokens, which are then read again"
        try:
            facts = runtime.content_facts()
        except SessionError as error:
            return SessionError(f"{error}{force}")
        if header.model != facts.model:
            return self._error(f"is of the model {header.model_name!r}, whose files are not those of "
                               f"{facts.model_name!r}, draft model included{force}")  # fmt: skip
        if header.numerics != runtime.numerics:
            return self._error(f"has numerics {header.numerics}, and this runtime {runtime.numerics}: results would "
                               f"not have the same bits{force}")  # fmt: skip
        if header.layout != facts.layout:
            return self._error(f"has a state of another layout than this runtime's{force}")
        places = runtime.kvcache.places_by_pool()
        for each in header.contents:
            whole = each.pool in places and (each.chunk + 1) * runtime.kvcache.prefill_chunk <= header.num_tokens
            if not whole or each.num_bytes != runtime.executor.mover.content_bytes(each.pool, places[each.pool]):
                return self._error("is altered: its contents are not those of its tokens")
        return None

    def restore(self, runtime: "SteppedRuntime", record: SessionRecord) -> None:
        """Bring its state to the device, a few chunks between two steps, and pin it for the session."""
        key, offset = record.key, self._start + 4 * self._header.num_tokens
        keys = runtime.owned_call(lambda owned: owned.kvcache.pin_tokens(key, self.token_ids, key.cache_salt))
        batch: dict[ChunkKey, torch.Tensor] = {}
        size = 0
        pools = [*(each.pool for each in self._header.contents), None]
        for each, following in zip(self._header.contents, pools[1:], strict=True):
            content = torch.empty(each.num_bytes, dtype=torch.uint8)
            self._file.seek(offset)
            if self._file.readinto(_view(content)) != each.num_bytes:
                raise self._error("was changed while it was read")
            offset, size = offset + each.num_bytes, size + each.num_bytes
            batch[ChunkKey(keys[each.chunk], each.pool)] = content
            may_part = not each.pool or each.pool != following  # what rows see of a window is of use together alone
            if following is None or (size >= BATCH_BYTES and may_part):
                runtime.owned_call(partial(_adopt, self.token_ids, key.cache_salt, batch))
                batch, size = {}, 0

    def _checked(self) -> tuple[_Header, int]:
        """The header, and where what follows begins, when all is as it was written."""
        facts = os.fstat(self._file.fileno())
        if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
            raise self._error("may be written by others than this user: chown it, or chmod 600 it")
        line = self._file.readline(MAX_HEADER_BYTES)
        if not line.endswith(b"\n") or not line.startswith(b"{"):
            raise self._error("is no session's file")
        digest, left = hashlib.blake2b(line, digest_size=DIGEST_BYTES), facts.st_size - len(line) - DIGEST_BYTES
        while left > 0 and (piece := self._file.read(min(left, PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
        if left or self._file.read() != digest.digest():
            raise self._error("is torn or altered: its digest is another's")
        try:
            header = msgspec.json.decode(line, type=_Header)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._error(f"is no session's file of this version: {error!s:.200}") from error
        if header.lowlat_session != VERSION:
            raise self._error(f"is of version {header.lowlat_session}; this lowlat reads {VERSION}")
        size = 4 * header.num_tokens + sum(each.num_bytes for each in header.contents)
        if size != facts.st_size - len(line) - DIGEST_BYTES:
            raise self._error("is altered: its contents have other sizes than it says")
        return header, len(line)

    def _tokens(self) -> tuple[int, ...]:
        self._file.seek(self._start)
        tokens = array("i", self._file.read(4 * self._header.num_tokens))
        if sys.byteorder == "big":
            tokens.byteswap()
        return tuple(tokens)

    def _error(self, problem: str) -> SessionError:
        return SessionError(f"session file {self._path} {problem}")


def _adopt(
    token_ids: tuple[int, ...], salt: str, contents: Mapping[ChunkKey, torch.Tensor], owned: "SteppedRuntime"
) -> None:
    """Bring contents of a session's chunks to the device; for the runtime's owner."""
    if owned.asleep:
        raise RequestError("the runtime sleeps (Runtime.sleep): a session is loaded after Runtime.wake")
    owned.kvcache.adopt(token_ids, salt, contents)
    owned.fill_blocks()
