"""ZMTP 3.1 with the NULL mechanism: the bytes that ZeroMQ's sockets say to each other. It knows no socket.

libzmq has a thread of its own between every program and its sockets, which must be woken twice for each message: in a
process that has just slept that takes longer than all else about a message. So over Unix sockets both sides of lowlat
speak the protocol themselves; peers in other languages use their ZeroMQ, and notice nothing.

A connection begins with a greeting of 64 bytes and a READY command each way, which need not wait for the other's. Then
frames follow: flags, a size of 1 or 8 bytes, the body. Frames of a message all have MORE but the last; a command is a
frame with its name in front. PING is answered by PONG with the same context.
Source: https://rfc.zeromq.org/spec/37/.
"""

import struct
from collections.abc import Mapping, Sequence

from msgspec import Struct

__all__ = [
    "GREETING",
    "MAX_COMMAND_BYTES",
    "Command",
    "Decoder",
    "ZmtpError",
    "encode_command",
    "encode_message",
    "encode_ping",
    "encode_pong",
    "encode_ready",
]

MAX_COMMAND_BYTES = 8192  # READY holds whatever a peer's program says of itself
MAX_CONTEXT_BYTES = 16  # of a PING
_MORE, _LONG, _COMMAND = 1, 2, 4
_MAX_SHORT = 255
_LONG_SIZE = struct.Struct(">BQ")
_SHORT = [bytes((0, size)) for size in range(_MAX_SHORT + 1)]
_SHORT_MORE = [bytes((_MORE, size)) for size in range(_MAX_SHORT + 1)]
_PROPERTY_SIZE = struct.Struct(">I")
_TTL = struct.Struct(">H")
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_VERSION_AT, _MECHANISM_AT, _GREETING_BYTES = 10, 12, 64
_MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = (_SIGNATURE + b"\x03\x01" + _MECHANISM).ljust(_GREETING_BYTES, b"\0")


class ZmtpError(Exception):
    """Bytes that are not of this protocol, or beyond the limits: the connection must end."""


class Command(Struct, frozen=True):
    """A command that came: its name, and what follows it."""

    name: bytes
    data: bytes


def encode_message(frames: Sequence[bytes]) -> bytes:
    """A message of at least one frame."""
    data, num_more = b"", len(frames)
    for frame in frames:
        num_more -= 1
        size = len(frame)
        if size > _MAX_SHORT:
            data += _LONG_SIZE.pack(_LONG | _MORE if num_more else _LONG, size)
        else:
            data += _SHORT_MORE[size] if num_more else _SHORT[size]
        data += frame
    return data


def encode_command(name: bytes, data: bytes) -> bytes:
    """A command of at most 255 bytes, its name's size included."""
    body = bytes((len(name),)) + name + data
    return bytes((_COMMAND, len(body))) + body


def encode_ready(socket_type: bytes, identity: bytes = b"") -> bytes:
    """The READY command of each side after its greeting."""
    properties = ((b"Socket-Type", socket_type), (b"Identity", identity))
    data = b"".join(bytes((len(name),)) + name + _PROPERTY_SIZE.pack(len(value)) + value for name, value in properties)
    return encode_command(b"READY", data)


def encode_ping(context: bytes = b"") -> bytes:
    """Asks for a sign of life, without a time after which the peer should give this side up."""
    return encode_command(b"PING", _TTL.pack(0) + context)


def encode_pong(ping: bytes) -> bytes:
    """The answer to a PING with these data."""
    return encode_command(b"PONG", ping[_TTL.size :][:MAX_CONTEXT_BYTES])


class Decoder:
    """Makes messages of the bytes that come, in whatever pieces; what lies in it is bounded by its limits.

    peer_type        the Socket-Type that the other side must have
    max_frame_bytes  a longer frame ends the connection before it has come
    max_frames       frames of a message that are kept; the rest of a longer one is read and forgotten
    """

    __slots__ = ("_at", "_data", "_frames", "_greeted", "_max_frame_bytes", "_max_frames", "_peer_type", "ready")

    def __init__(self, peer_type: bytes, *, max_frame_bytes: int, max_frames: int) -> None:
        self.ready = False
        self._peer_type = peer_type
        self._max_frame_bytes = max_frame_bytes
        self._max_frames = max_frames
        self._data: bytes | bytearray = b""
        self._at = 0
        self._greeted = False
        self._frames: list[bytes] = []

    @property
    def drained(self) -> bool:
        """Whether no byte lies here that `next` has not taken."""
        return self._at == len(self._data)

    def feed(self, data: bytes) -> None:
        """Take what has come."""
        if self._at == len(self._data):
            self._data, self._at = data, 0
            return
        rest = self._data if isinstance(self._data, bytearray) else bytearray(self._data)
        del rest[: self._at]
        rest += data
        self._data, self._at = rest, 0

    def next(self) -> list[bytes] | Command | None:
        """The next message or command, [] for a frame that is forgotten, None until more has come. Raises ZmtpError.

        So it looks at a few frames at a time, also of a message that does not end.
        """
        if not self._greeted and not self._greeting():
            return None
        while True:
            data, at = self._data, self._at
            end = len(data)
            if end - at < 2:
                return None
            flags, size, begin = data[at], data[at + 1], at + 2
            if flags & _LONG:
                begin = at + _LONG_SIZE.size
                if begin > end:
                    return None
                size = _LONG_SIZE.unpack_from(data, at)[1]
            if flags > _MORE or size > self._max_frame_bytes or not self.ready:
                self._check(flags, size)
            if size > end - begin:
                return None
            self._at = begin + size
            frame = data[begin : self._at] if isinstance(data, bytes) else bytes(memoryview(data)[begin : self._at])
            if flags & _COMMAND:
                return self._command(frame)
            if len(self._frames) < self._max_frames:
                self._frames.append(frame)
            elif flags & _MORE:
                return []
            if not flags & _MORE:
                frames, self._frames = self._frames, []
                return frames

    def _greeting(self) -> bool:
        """Check the greeting, as far as it has come; whether it is there."""
        said = bytes(self._data[:_GREETING_BYTES])
        if said and said[0] != _SIGNATURE[0]:
            raise ZmtpError("the first byte is not ZMTP's")
        if len(said) >= len(_SIGNATURE) and not said[len(_SIGNATURE) - 1] & 1:
            raise ZmtpError("the signature is not ZMTP's")
        if len(said) > _VERSION_AT and said[_VERSION_AT] < 3:
            raise ZmtpError(f"ZMTP {said[_VERSION_AT]} is not spoken, version 3 is")
        if len(said) < _GREETING_BYTES:
            return False
        mechanism = said[_MECHANISM_AT : _MECHANISM_AT + len(_MECHANISM)]
        if mechanism != _MECHANISM:
            raise ZmtpError(f"the mechanism is {mechanism.rstrip(bytes(1))!r:.40}, not NULL")
        self._at = _GREETING_BYTES
        self._greeted = True
        return True

    def _check(self, flags: int, size: int) -> None:
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & _MORE):
            raise ZmtpError(f"flags {flags:#04x} do not exist")
        if not flags & _COMMAND and not self.ready:
            raise ZmtpError("a message came before READY")
        limit = MAX_COMMAND_BYTES if flags & _COMMAND else self._max_frame_bytes
        if size > limit:
            raise ZmtpError(f"a frame has {size} bytes and may have {limit}")

    def _command(self, body: bytes) -> Command:
        size = body[0] if body else 0
        if not 0 < size < len(body):
            raise ZmtpError("a command has no name")
        command = Command(body[1 : size + 1], body[size + 1 :])
        if not self.ready:
            self._ready(command)
        return command

    def _ready(self, command: Command) -> None:
        if command.name == b"ERROR":
            raise ZmtpError(f"the peer refuses: {command.data[1:]!r:.100}")
        if command.name != b"READY":
            raise ZmtpError(f"READY comes first, and not {command.name!r:.40}")
        socket_type = _properties(command.data).get(b"socket-type")
        if socket_type != self._peer_type:
            raise ZmtpError(f"the peer is a {socket_type!r:.40} and must be a {self._peer_type.decode()}")
        self.ready = True


def _properties(data: bytes) -> Mapping[bytes, bytes]:
    """Of READY, by their names in small letters. Raises ZmtpError."""
    found, at = {}, 0
    while at < len(data):
        value_at = at + 1 + data[at] + _PROPERTY_SIZE.size
        if value_at > len(data):
            raise ZmtpError("READY ends amid a property")
        name = data[at + 1 : at + 1 + data[at]].lower()
        size = _PROPERTY_SIZE.unpack_from(data, value_at - _PROPERTY_SIZE.size)[0]
        at = value_at + size
        if at > len(data):
            raise ZmtpError("READY ends amid a property")
        found[name] = data[value_at:at]
    return found
