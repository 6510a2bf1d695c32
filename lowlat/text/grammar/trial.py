"""This module tries grammars in processes of their own (`worker.py` says why), several at once."""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowlat.errors import ConfigError
from lowlat.text.children import end_child
from lowlat.text.grammar.spec import GrammarSpec
from lowlat.text.grammar.vocabulary import LIMITS, Vocabulary
from lowlat.text.schemas import Steps

__all__ = ["ONE_OF", "Refused", "TooLong", "Trials"]

HEADER_BYTES = 8
START_TIMEOUT_S = 60.0  # an interpreter and a large vocabulary, on a machine that is busy
GRACE_S = 0.5  # beyond a trial's own limit, which its process keeps by itself
MAX_MEMORY_BYTES = 512 << 20  # of address space, of which the interpreter and a vocabulary of 200,000 take 0.1 GiB
MAX_MASK_S = 0.02
WALK_S = 0.005
MAX_ANSWER_BYTES = 16 << 20
ONE_OF = "oneOf constraints are not supported"  # the library's words for one that it cannot hold


class Refused(Exception):
    """The library does not take the grammar; says why, in its own words."""


class TooLong(Exception):
    """The trial did not end within its time, or was ended for its memory."""


class Trials:
    """Tries grammars against one vocabulary. Safe for several threads, which do not wait for each other."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process, which makes itself ready meanwhile; a trial waits for it."""
        with self._lock:
            if self._process is None:
                self._start()

    def run(self, spec: GrammarSpec, limit_s: float) -> str:
        """The library's text of a grammar that can be served.

        limit_s  of time by the clock, from when the process begins with it
        Raises Refused, TooLong, and ConfigError where the process cannot be had.
        """
        reply = self._try({"kind": spec.kind, "text": spec.text, "limit_s": limit_s})
        if "grammar" not in reply:
            raise Refused(f"{reply['why']!s:.300}")
        return str(reply["grammar"])

    def overlapping(self, schema: str, paths: Sequence[Steps], limit_s: float) -> Steps | None:
        """The path of the first `oneOf` of a schema that is why the library refuses it; None where it cannot be told.

        paths  of all schemas within it that have a `oneOf`, outer ones first
        Raises TooLong, and ConfigError as `run` does.
        """
        reply = self._try({"kind": "one_of", "text": schema, "paths": paths, "refusal": ONE_OF, "limit_s": limit_s})
        return paths[reply["place"]] if "place" in reply else None

    def _try(self, asked: dict[str, Any]) -> dict[str, Any]:
        job, limit_s = json.dumps(asked).encode("ascii"), asked["limit_s"]
        receiving, sending = os.pipe()
        try:
            try:
                self._submit(job, sending)
            finally:
                os.close(sending)
            answer = _receive(receiving, time.monotonic() + limit_s + GRACE_S)
        finally:
            os.close(receiving)
        if not answer:
            raise TooLong
        try:
            reply: dict[str, Any] = json.loads(answer)
        except ValueError:  # its time was over while it answered
            raise TooLong from None
        return reply

    def close(self) -> None:
        """End the process; a later trial starts another."""
        with self._lock:
            self._stop()

    def _submit(self, job: bytes, pipe: int) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._stop()
            if self._process is None:
                self._start()
            connection = self._connection
            if connection is None:
                raise ConfigError("the process for grammars could not be started")
            try:
                if not self._ready:
                    _expect(connection, bytes(HEADER_BYTES))
                    self._ready = True
                connection.settimeout(START_TIMEOUT_S)
                socket.send_fds(connection, [len(job).to_bytes(HEADER_BYTES, "little")], [pipe])
                connection.sendall(job)
            except OSError as error:
                self._stop()
                raise ConfigError(f"the process for grammars ended: {error.strerror or error}") from error

    def _start(self) -> None:
        own, theirs = socket.socketpair()
        inherited = ("HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONUSERBASE")  # where the library may lie
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-X", "utf8", str(Path(__file__).with_name("worker.py"))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in inherited if name in os.environ},
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        except OSError as error:
            own.close()
            raise ConfigError(f"the process for grammars could not be started: {error.strerror}") from error
        finally:
            theirs.close()
        self._process, self._connection, self._ready = process, own, False
        self._end = weakref.finalize(self, _end, process, own)
        vocabulary = self._vocabulary
        start = {
            "lengths": list(map(len, vocabulary.tokens)),
            "special": vocabulary.special_token_ids,
            "end_id": vocabulary.end_id,
            "limits": LIMITS,
            "max_memory_bytes": MAX_MEMORY_BYTES,
            "max_mask_s": MAX_MASK_S,
            "walk_s": WALK_S,
        }
        own.settimeout(START_TIMEOUT_S)
        try:
            for frame in (json.dumps(start).encode("ascii"), b"".join(vocabulary.tokens)):
                own.sendall(len(frame).to_bytes(HEADER_BYTES, "little") + frame)
        except OSError as error:
            self._stop()
            raise ConfigError(f"the process for grammars ended: {error.strerror or error}") from error

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._connection = self._end = None


def _expect(connection: socket.socket, wanted: bytes) -> None:
    received = b""
    while len(received) < len(wanted):
        piece = connection.recv(len(wanted) - len(received))
        if not piece:
            raise ConnectionError("it did not become ready")
        received += piece


def _receive(pipe: int, deadline: float) -> bytes:
    """All that comes until the other end is closed; b"" where that is not in time."""
    received = bytearray()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poll.poll(remaining * 1000):
            return b""
        piece = os.read(pipe, 1 << 20)
        if not piece:
            return bytes(received)
        received += piece
        if len(received) > MAX_ANSWER_BYTES:
            return b""


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    """End the process and wait for it, so that neither it nor its socket stays after."""
    connection.close()
    end_child(process)
