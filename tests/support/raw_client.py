"""This module has a client of raw frames, for tests of the server: it sends unchecked frames, and decodes replies."""

import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, TypeVar

import zmq
from msgspec import Struct

from lowlat.ipc.wire import (
    Cancel,
    Credit,
    End,
    Error,
    Health,
    Hello,
    Paused,
    Pong,
    Sampling,
    StatsReply,
    Submit,
    Taken,
    Tokens,
    Welcome,
    decode_server,
    encode,
    pack_tokens,
    unpack_tokens,
)
from lowlat.ipc.wire import Stats as AskStats

__all__ = ["TIMEOUT_S", "Completion", "RawClient", "bare_socket", "raw_client", "zmtp_bytes", "zmtp_peer"]

Wanted = TypeVar("Wanted", bound=Struct)
TIMEOUT_S = 10.0


class Completion:
    """Collects the messages of one request, and checks their sequence."""

    def __init__(self) -> None:
        self.token_ids: tuple[int, ...] = ()
        self.text = ""
        self.chunks: list[Tokens] = []
        self.end: End | None = None
        self.error: Error | None = None

    def take(self, message: Struct) -> bool:
        """Add a message; returns whether it was the last."""
        if isinstance(message, Error):
            self.error = message
            return True
        assert isinstance(message, Tokens | End)
        assert message.sequence == len(self.chunks)
        if isinstance(message, End):
            assert message.num_tokens == len(self.token_ids)
            self.end = message
            return True
        self.chunks.append(message)
        self.token_ids += unpack_tokens(message.token_ids)
        self.text += message.text or ""
        return False


class RawClient:
    """A DEALER socket; messages for several requests may come in any order, and are kept until asked for."""

    def __init__(self, endpoint: str, *, greet: bool = True, **options: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)
        self.completions: dict[int, Completion] = {}
        self.paused: list[Paused] = []  # answers to PAUSE and RESUME
        if greet:
            self.say(Hello())
            self.welcome = self.hear(Welcome)

    def say(self, header: Struct, *body: bytes) -> None:
        self.socket.send_multipart([encode(header), *body])

    def say_raw(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self, timeout_s: float = TIMEOUT_S) -> Struct:
        if not self.socket.poll(int(timeout_s * 1000)):
            raise TimeoutError(f"nothing came in {timeout_s} s")
        message = decode_server(self.socket.recv())
        assert message is not None
        return message

    def hear(self, wanted: type[Wanted], timeout_s: float = TIMEOUT_S) -> Wanted:
        """Receive the next message that is of no request in `completions`; it must be of this type."""
        message = self._next_control(timeout_s)
        assert isinstance(message, wanted), message
        return message

    def is_quiet(self, seconds: float = 0.1) -> bool:
        """Whether nothing comes for so long; what belongs to requests is taken and does not count."""
        end = time.monotonic() + seconds
        try:
            while (left := end - time.monotonic()) > 0:
                if not self._note(self.receive(left)):
                    return False
        except TimeoutError:
            pass
        return True

    def submit(
        self, number: int, prompt: Sequence[int] = (1, 2, 3), *, credit: int = 1 << 20, **sampling: Any
    ) -> Completion:
        completion = self.completions[number] = Completion()
        deadline_ms = sampling.pop("deadline_ms", None)
        header = Submit(number, credit, Sampling(**sampling), deadline_ms=deadline_ms)
        self.say(header, pack_tokens(prompt))
        return completion

    def submit_text(self, number: int, text: str, *, credit: int = 1 << 20, **sampling: Any) -> Completion:
        completion = self.completions[number] = Completion()
        self.say(Submit(number, credit, Sampling(**sampling), text=text))
        return completion

    def open(self, number: int, *, credit: int = 1 << 20, **sampling: Any) -> Completion:
        """Open a request whose prompt follows."""
        completion = self.completions[number] = Completion()
        self.say(Submit(number, credit, Sampling(**sampling), open=True))
        return completion

    def cancel(self, number: int) -> None:
        self.say(Cancel(number))

    def grant(self, number: int, tokens: int) -> None:
        self.say(Credit(number, tokens))

    def finish(self, *completions: Completion, timeout_s: float = TIMEOUT_S) -> None:
        """Receive until all of these have ended; other messages are an error."""
        end = time.monotonic() + timeout_s
        while any(one.end is None and one.error is None for one in completions):
            message = self.receive(end - time.monotonic())
            assert self._note(message), message

    def wait_tokens(self, completion: Completion, count: int) -> None:
        while len(completion.token_ids) < count:
            message = self.receive()
            assert self._note(message), message

    def pong(self) -> Pong:
        self.say(Health(77))
        return self.hear(Pong)

    def stats(self) -> dict[str, Any]:
        """The server's figures."""
        self.say(AskStats())
        return self.hear(StatsReply).stats

    def close(self) -> None:
        self.socket.close()
        self.context.term()

    def _note(self, message: Struct) -> bool:
        if isinstance(message, Pong) and message.nonce == 0:
            return True  # the server asks whether somebody is there
        if isinstance(message, Taken):
            return True
        if isinstance(message, Paused):
            self.paused.append(message)
            return True
        number = getattr(message, "number", None)
        if isinstance(message, Tokens | End | Error) and number in self.completions:
            self.completions[number].take(message)
            return True
        return False

    def _next_control(self, timeout_s: float) -> Struct:
        end = time.monotonic() + timeout_s
        while True:
            message = self.receive(max(0.0, end - time.monotonic()))
            if not self._note(message):
                return message


@contextmanager
def raw_client(endpoint: str, *, greet: bool = True, **options: Any) -> Iterator[RawClient]:
    client = RawClient(endpoint, greet=greet, **options)
    try:
        yield client
    finally:
        client.close()


GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32


def bare_socket(endpoint: str) -> socket.socket:
    """A socket that is connected to an endpoint and has said nothing."""
    scheme, _, address = endpoint.partition("://")
    connection = socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET)
    connection.settimeout(TIMEOUT_S)
    host, _, port = address.rpartition(":")
    try:
        connection.connect(address if scheme == "ipc" else (host, int(port)))
    except OSError:
        connection.close()
        raise
    return connection


def zmtp_peer(
    endpoint: str, properties: dict[bytes, bytes], messages: Sequence[Sequence[bytes]], until: bytes = b"READY"
) -> socket.socket:
    """A peer that speaks ZMTP by hand, and so can say of itself what libzmq would not."""
    connection = bare_socket(endpoint)
    said, ready = zmtp_bytes(messages, properties), len(zmtp_bytes([], properties))
    connection.sendall(said[:ready])
    heard = b""
    while until not in heard and (part := connection.recv(4096)):
        heard += part
    with suppress(ConnectionError):
        connection.sendall(said[ready:])  # libzmq refuses who sends messages before it has said READY itself
    return connection


def zmtp_bytes(messages: Sequence[Sequence[bytes]], properties: Mapping[bytes, bytes] = MappingProxyType({})) -> bytes:
    """All that such a peer says: greeting, READY, messages."""
    ready = b"\x05READY"
    for name, value in {b"Socket-Type": b"DEALER", **properties}.items():
        ready += bytes((len(name),)) + name + struct.pack(">I", len(value)) + value
    said = GREETING + bytes((4, len(ready))) + ready
    for frames in messages:
        for place, frame in enumerate(frames):
            more = place < len(frames) - 1
            said += bytes((2 | more,)) + struct.pack(">Q", len(frame)) + frame
    return said
