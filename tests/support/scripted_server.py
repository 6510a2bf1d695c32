"""This module has a server for clients' tests: a ROUTER in a thread, correct by default, and faulty as a test asks."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from lowlat.ipc import Chunk
from lowlat.ipc.wire import (
    Bye,
    Cancel,
    Credit,
    Drain,
    End,
    Health,
    Hello,
    Pong,
    ServerLimits,
    Stats,
    StatsReply,
    Submit,
    TokenLogprob,
    Tokens,
    Welcome,
    decode_client,
    encode,
    pack_tokens,
    unpack_tokens,
)

LIMITS = ServerLimits(
    max_message_bytes=1 << 20,
    max_prompt_tokens=4096,
    max_context=1 << 20,
    max_requests_per_client=64,
    max_credit=1 << 16,
    slow_consumer_s=30.0,
    heartbeat_interval_s=1.0,
)


def welcome(**changes: Any) -> Welcome:
    """Return the scripted server's welcome."""
    fields: dict[str, Any] = {
        "version": 1,
        "epoch": "e",
        "server": "scripted",
        "model": "none",
        "tokenizer": "",
        "vocab_size": 1000,
        "has_chat_template": False,
        "num_speculative_tokens": 0,
        "limits": LIMITS,
    }
    return Welcome(**{**fields, **changes})


def expected_tokens(prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Return a correct server's answer: tokens that differ by prompt and position."""
    start = sum(prompt)
    return tuple((start + place * 7) % 100_003 for place in range(num_tokens))


def expected_text(token_ids: tuple[int, ...]) -> str:
    """Return their text."""
    return "".join(f"{token} " for token in token_ids)


@dataclass
class Running:
    """A request at an honest server."""

    identity: bytes
    submit: Submit
    token_ids: tuple[int, ...]
    credit: int
    sequence: int = 0
    sent: int = 0
    cancelled: bool = False
    log: list[str] = field(default_factory=list)

    def next_messages(self, per_chunk: int) -> Iterator[bytes]:
        """Tokens while there is credit, and the end."""
        number = self.submit.number
        while not self.cancelled and self.sent < len(self.token_ids) and self.credit > 0:
            ids = self.token_ids[self.sent : self.sent + per_chunk]
            logprobs = None
            if self.submit.sampling.logprobs is not None:
                logprobs = [TokenLogprob(token, -0.5, [(token, -0.5)]) for token in ids]
            yield encode(Tokens(number, self.sequence, pack_tokens(ids), expected_text(ids), logprobs))
            self.sequence += 1
            self.sent += len(ids)
            self.credit -= len(ids)
        if self.cancelled or self.sent == len(self.token_ids):
            reason: Any = "cancelled" if self.cancelled else "length"
            yield encode(End(number, self.sequence, self.sent, reason, metrics={"completion_tokens": self.sent}))

    @property
    def over(self) -> bool:
        return self.cancelled or self.sent == len(self.token_ids)


Handler = Callable[["ScriptedServer", bytes, Any, bytes], list[bytes] | None]


class ScriptedServer:
    """A ROUTER in a thread. A handler given for a kind of message answers it; None leaves it to the honest one.

    received   every message that came, in order
    """

    def __init__(self, url: str, handlers: dict[type, Handler] | None = None, *, per_chunk: int = 1) -> None:
        self.url = url
        self.handlers = handlers or {}
        self.received: list[Any] = []
        self.running: dict[tuple[bytes, int], Running] = {}
        self.identities: list[bytes] = []
        self.per_chunk = per_chunk
        self.paused = False
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.bind(url)
        self.url = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="scripted-server")
        self._thread.start()

    def send(self, *frames: bytes, to: int = -1) -> None:
        """Send messages of one frame each to a client, the last that came if no other is named."""

        def action() -> None:
            for frame in frames:
                self._send(self.identities[to], frame)

        self._todo.put(action)

    def wait_for(self, kind: type, count: int = 1, timeout_s: float = 5.0) -> list[Any]:
        """The messages of a kind, once there are so many."""
        end = time.monotonic() + timeout_s
        while True:
            found = [message for message in self.received if isinstance(message, kind)]
            if len(found) >= count:
                return found
            if time.monotonic() > end:
                raise AssertionError(f"{len(found)} of {count} {kind.__name__} came: {self.received!r:.500}")
            time.sleep(0.002)

    def stop(self) -> None:
        """End at once, as a killed server would."""
        if self._thread.is_alive():
            self._todo.put(None)
            self._thread.join()
            self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    action = self._todo.get_nowait()
                    if action is None:
                        return
                    action()
            if self.paused or not self._router.poll(2):
                time.sleep(0.002 if self.paused else 0.0)
                continue
            identity, *frames = self._router.recv_multipart()
            message, body = decode_client(frames)
            self.received.append(message)
            if identity not in self.identities:
                self.identities.append(identity)
            handler = self.handlers.get(type(message))
            answers = None if handler is None else handler(self, identity, message, body)
            for frame in self._honest(identity, message, body) if answers is None else answers:
                self._send(identity, frame)

    def _send(self, identity: bytes, frame: bytes) -> None:
        self._router.send_multipart([identity, frame])

    def _honest(self, identity: bytes, message: Any, body: bytes) -> list[bytes]:
        if isinstance(message, Hello):
            return [encode(welcome())]
        if isinstance(message, Submit):
            prompt = unpack_tokens(body) if body else (len(message.text or ""),)
            running = Running(identity, message, expected_tokens(prompt, message.sampling.token_limit), message.credit)
            self.running[identity, message.number] = running
            return list(running.next_messages(self.per_chunk))
        if isinstance(message, Cancel | Credit):
            found = self.running.get((identity, message.number))
            if found is None or found.over:
                return []
            if isinstance(message, Credit):
                found.credit += message.tokens
            else:
                found.cancelled = True
            return list(found.next_messages(self.per_chunk))
        if isinstance(message, Stats):
            return [encode(StatsReply({"slots": 4}))]
        if isinstance(message, Health):
            return [encode(Pong(message.nonce, "serving", 0.0, 0, 0))]
        if isinstance(message, Drain):
            return [encode(Bye("shutdown"))]
        raise AssertionError(f"unknown message {message!r}")


def ipc_url(folder: Path, name: str = "s") -> str:
    """An endpoint in a folder."""
    return f"ipc://{folder}/{name}.sock"


def quiet(server: ScriptedServer, identity: bytes, message: Any, body: bytes) -> list[bytes]:
    """Never answer; a handler."""
    return []


def ids_of(chunks: list[Chunk]) -> tuple[int, ...]:
    """Return the tokens of a stream."""
    return tuple(token for chunk in chunks for token in chunk.token_ids)
