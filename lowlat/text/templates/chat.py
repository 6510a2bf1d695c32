"""This module renders a model's chat templates in a separate process (`chat_worker.py` gives the reasons).

The worker starts when templates are loaded, inherits no lock or socket, and ends with its parent. After a template has
killed it, it is started again.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowlat.errors import ConfigError, RequestError
from lowlat.text.children import end_child

__all__ = ["ChatLimits", "ChatTemplates"]

HEADER_BYTES = 8
START_TIMEOUT_S = 60.0  # a Python interpreter on a machine that is busy loading a model


@dataclass(frozen=True)
class ChatLimits:
    """The limits of one rendering.

    max_cpu_s         processor time; beyond it the kernel ends the worker
    max_wall_s        wall time, for a template that waits instead of computing
    max_memory_bytes  address space of the worker, Python included (about 60 MB)
    max_characters    characters of the rendered text
    max_input_bytes   messages and variables, as JSON
    """

    max_cpu_s: float = 0.5
    max_wall_s: float = 20.0
    max_memory_bytes: int = 512 << 20
    max_characters: int = 8 << 20
    max_input_bytes: int = 8 << 20


class _WorkerGone(Exception):
    """The worker ended or did not answer in time; the message is the reason."""


class ChatTemplates:
    """Renders the named templates of one model. Safe to call from several threads, one rendering at a time.

    Raises ConfigError when a template does not compile.
    """

    def __init__(self, templates: Mapping[str, str], limits: ChatLimits | None = None) -> None:
        self._templates = dict(templates)
        self._limits = limits or ChatLimits()
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._end_worker: weakref.finalize[..., Any] | None = None
        with self._lock:
            self._start()

    @property
    def names(self) -> tuple[str, ...]:
        """The templates' names, in the order of the model's files."""
        return tuple(self._templates)

    @property
    def sources(self) -> tuple[str, ...]:
        """The templates as written, in the same order."""
        return tuple(self._templates.values())

    def source(self, name: str) -> str:
        """A template as written."""
        return self._templates[name]

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """Render one template.

        Raises RequestError when the template refuses the messages or fails on them, or when they are no JSON or too
        large; ConfigError when it does what the sandbox forbids, or exceeds its limits. Time: about 0.05 ms (measured,
        1 kB of messages) plus the template's own.
        """
        request = self._encode({"template": name, "variables": dict(variables)})
        with self._lock:
            if self._worker is None:
                self._start()
            reply = self._asked(request, self._limits.max_wall_s)
        text = reply.get("text")
        if isinstance(text, str) and len(text) <= self._limits.max_characters:
            return text
        if reply.get("blame") == "messages":
            raise RequestError(f"the chat template does not accept the messages: {reply.get('why')!s:.300}")
        raise ConfigError(f"the chat template {name!r} cannot be used: {reply.get('why')!s:.300}")

    def close(self) -> None:
        """End the worker; a later rendering starts another."""
        with self._lock:
            self._stop()

    def _encode(self, request: Mapping[str, Any]) -> bytes:
        try:
            data = json.dumps(request, allow_nan=False).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages and template variables must be JSON values: {error!s:.200}") from error
        if len(data) > self._limits.max_input_bytes:
            raise RequestError(
                f"messages and template variables take {len(data)} bytes as JSON; "
                f"at most {self._limits.max_input_bytes} (max_input_bytes)"
            )
        return data

    def _start(self) -> None:
        self._worker = _spawn()
        self._end_worker = weakref.finalize(self, _end, self._worker)
        for pipe in (self._worker.stdin, self._worker.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        start = {"templates": self._templates, "limits": asdict(self._limits)}
        reply = self._asked(json.dumps(start).encode("ascii"), START_TIMEOUT_S)
        if reply:
            self._stop()
            raise ConfigError(f"the chat template cannot be used: {reply.get('why')!s:.300}")

    def _stop(self) -> None:
        if self._end_worker is not None:
            self._end_worker()
        self._worker = self._end_worker = None

    def _asked(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """Send one frame and return the answer. If there is none, end the worker and raise ConfigError."""
        worker = self._worker
        if worker is None or worker.stdin is None or worker.stdout is None:
            raise ConfigError("the chat template's process could not be started")
        deadline = time.monotonic() + timeout_s
        try:
            _send(worker.stdin.fileno(), len(request).to_bytes(HEADER_BYTES, "little") + request, deadline)
            size = int.from_bytes(_receive(worker.stdout.fileno(), HEADER_BYTES, deadline), "little")
            if size > 6 * self._limits.max_characters + 4096:  # 6: an escaped character
                raise _WorkerGone("its process answered nonsense")
            reply = json.loads(_receive(worker.stdout.fileno(), size, deadline))
            if not isinstance(reply, dict):
                raise _WorkerGone("its process answered nonsense")
            return reply
        except (_WorkerGone, ValueError, OSError) as error:
            self._stop()
            why = str(error) if isinstance(error, _WorkerGone) else "its process ended"
            if worker.returncode == -signal.SIGPROF:
                why = f"it takes more than {self._limits.max_cpu_s} s of processor time"
            raise ConfigError(f"the chat template cannot be used: {why}") from error
        except BaseException:
            self._stop()  # interrupted within a frame: the next request would read this one's answer
            raise


def _spawn() -> "subprocess.Popen[bytes]":
    """Start the worker's interpreter, isolated and with a minimal environment."""
    inherited = ("LD_LIBRARY_PATH", "TZ", "TZDIR")
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", str(Path(__file__).with_name("chat_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in inherited if name in os.environ},
            start_new_session=True,  # only the parent handles Ctrl-C
        )
    except OSError as error:
        raise ConfigError(f"the chat template's process could not be started: {error.strerror}") from error


def _send(descriptor: int, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view:
        _wait(descriptor, select.POLLOUT, deadline)
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            continue


def _receive(descriptor: int, size: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        _wait(descriptor, select.POLLIN, deadline)
        try:
            piece = os.read(descriptor, min(size - len(received), 1 << 20))
        except BlockingIOError:
            continue
        if not piece:
            raise _WorkerGone("its process ended")
        received += piece
    return bytes(received)


def _wait(descriptor: int, event: int, deadline: float) -> None:
    remaining = deadline - time.monotonic()
    poll = select.poll()
    poll.register(descriptor, event)
    if remaining <= 0 or not poll.poll(remaining * 1000):
        raise _WorkerGone("it did not end in time")


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """End a worker and wait for it, so that neither process nor pipe remains."""
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            pipe.close()
    end_child(worker)
