"""A peer of a server that speaks ZMTP by hand: says any bytes, and decodes what comes."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

from msgspec import Struct
from raw_client import TIMEOUT_S, bare_socket, zmtp_bytes

from lowlat.ipc.wire import decode_server, encode
from lowlat.ipc.zmtp import Command, Decoder

__all__ = ["BarePeer", "message_bytes"]

Wanted = TypeVar("Wanted", bound=Struct)


class BarePeer:
    """Connected; it has said greeting and READY, unless it is to say something else.

    heard   the messages and commands that came and were not asked for yet
    """

    def __init__(self, endpoint: str, said: bytes | None = None) -> None:
        self.socket = bare_socket(endpoint)
        self.heard: list[list[bytes] | Command] = []
        self._decoder = Decoder(b"ROUTER", max_frame_bytes=1 << 26, max_frames=3)
        self.say_bytes(zmtp_bytes([]) if said is None else said)

    def say_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def say(self, header: Struct, *body: bytes) -> None:
        self.say_bytes(message_bytes([encode(header), *body]))

    def read(self) -> bool:
        """Read once, and decode; False at the connection's end."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            return False
        self._decoder.feed(data)
        self.heard += iter(self._decoder.next, None)
        return bool(data)

    def hear_command(self, name: bytes) -> bytes:
        """The data of the next command of this name; what came before it is forgotten."""
        while True:
            while self.heard:
                item = self.heard.pop(0)
                if isinstance(item, Command) and item.name == name:
                    return item.data
            assert self.read(), f"the connection ended, and no {name!r} came"

    def hear(self, wanted: type[Wanted]) -> Wanted:
        """The next message, which must be of this type; commands before it are forgotten."""
        while True:
            while self.heard:
                item = self.heard.pop(0)
                if not isinstance(item, Command):
                    message = decode_server(item[0])
                    assert isinstance(message, wanted), message
                    return message
            assert self.read(), f"the connection ended, and no {wanted.__name__} came"

    def ends(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Whether the other side ends the connection in this time; what comes before that is kept."""
        end = time.monotonic() + timeout_s
        try:
            while (left := end - time.monotonic()) > 0:
                self.socket.settimeout(left)
                if not self.read():
                    return True
        except TimeoutError:
            pass
        finally:
            self.socket.settimeout(TIMEOUT_S)
        return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def message_bytes(frames: Sequence[bytes]) -> bytes:
    """A message by itself."""
    return zmtp_bytes([frames])[len(zmtp_bytes([])) :]
