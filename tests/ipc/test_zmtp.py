"""ZMTP's bytes without a socket: whatever the pieces, the same messages; whatever the bytes, messages or ZmtpError."""

import random
import struct
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowlat.ipc.zmtp import (
    GREETING,
    MAX_COMMAND_BYTES,
    Command,
    Decoder,
    ZmtpError,
    encode_command,
    encode_message,
    encode_ping,
    encode_pong,
    encode_ready,
)

READY = encode_ready(b"DEALER")
MORE, LONG, COMMAND = 1, 2, 4
Item = list[bytes] | Command


def frame(flags: int, body: bytes = b"", size: int | None = None) -> bytes:
    """A frame with these flags, in the form that they say; `size` is claimed in place of the body's own."""
    size = len(body) if size is None else size
    return struct.pack(">BQ" if flags & LONG else ">BB", flags, size) + body


def properties(**values: bytes) -> bytes:
    """READY's data, with names in which _ stands for -."""
    named = ((name.replace("_", "-").encode(), value) for name, value in values.items())
    return b"".join(bytes((len(name),)) + name + struct.pack(">I", len(value)) + value for name, value in named)


def decoder(*, max_frame_bytes: int = 1000, max_frames: int = 3, said: bytes = GREETING + READY) -> Decoder:
    """One that has been told all this, and made no more of it than READY."""
    made = Decoder(b"DEALER", max_frame_bytes=max_frame_bytes, max_frames=max_frames)
    made.feed(said)
    items = taken(made)
    assert [type(item) for item in items] == [Command] * made.ready
    return made


def taken(made: Decoder) -> list[Item]:
    return list(iter(made.next, None))


def decoded(made: Decoder, data: bytes) -> list[Item]:
    made.feed(data)
    return taken(made)


def pieces(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    """The data cut at these places, where they lie in it."""
    places = [0, *sorted(cut for cut in set(cuts) if 0 < cut < len(data)), len(data)]
    for begin, end in pairwise(places):
        yield data[begin:end]


bodies = st.one_of(
    st.binary(max_size=20), st.sampled_from([0, 1, 2, 9, 254, 255, 256, 257, 999, 1000]).map(lambda size: b"x" * size)
)
messages = st.lists(bodies, min_size=1, max_size=3)
commands = st.builds(Command, st.binary(min_size=1, max_size=12), st.binary(max_size=200))


@given(
    st.lists(st.one_of(messages, commands, st.tuples(messages, commands)), max_size=8),
    st.one_of(st.lists(st.integers(1, 5000), max_size=20), st.integers(1, 30)),
    st.booleans(),
)
def test_messages_and_commands_come_out_as_they_went_in(
    items: list[Item | tuple[list[bytes], Command]], cuts: list[int] | int, long: bool
) -> None:
    data, expected = GREETING + READY, list[Item]()
    for item in items:
        if isinstance(item, Command):
            data += encode_command(item.name, item.data)
            expected.append(item)
        elif isinstance(item, list):
            data += encode_message(item)
            expected.append(item)
        else:  # a command behind a message's first frame, unless it is its last
            message, command = item
            first, rest = message[0], message[1:]
            flags = (LONG if long or len(first) > 255 else 0) | (MORE if rest else 0)
            data += frame(flags, first) + encode_command(command.name, command.data)
            data += encode_message(rest) if rest else b""
            expected += [command, message] if rest else [message, command]
    places = list(range(0, len(data), cuts)) if isinstance(cuts, int) else cuts
    made = Decoder(b"DEALER", max_frame_bytes=1000, max_frames=3)
    found = [item for piece in pieces(data, places) for item in decoded(made, piece)]
    assert found == [Command(b"READY", READY[8:]), *expected]


@given(
    st.booleans(),
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            messages.map(encode_message),
            commands.map(lambda one: encode_command(one.name, one.data)),
            st.builds(frame, st.integers(0, 7), st.binary(max_size=20), st.one_of(st.none(), st.integers(0, 255))),
            st.builds(struct.pack, st.just(">BQ"), st.integers(2, 7), st.integers(0, (1 << 64) - 1)),
        ),
        max_size=8,
    ),
    st.lists(st.integers(1, 500), max_size=8),
)
def test_any_bytes_are_messages_or_a_zmtp_error(greeted: bool, parts: list[bytes], cuts: list[int]) -> None:
    made = decoder() if greeted else Decoder(b"DEALER", max_frame_bytes=1000, max_frames=3)
    try:
        for piece in pieces(b"".join(parts), cuts):
            for item in decoded(made, piece):
                assert made.ready
                if isinstance(item, Command):
                    assert 0 < len(item.name) + len(item.data) < MAX_COMMAND_BYTES
                else:
                    assert 1 <= len(item) <= 3
                    assert all(len(one) <= 1000 for one in item)
    except ZmtpError as error:
        assert len(str(error)) < 300


def test_a_changed_byte_is_still_a_message_or_a_zmtp_error() -> None:
    chooser = random.Random(5)
    said = GREETING + READY + encode_message([b"a" * 300, b"b"]) + encode_ping(b"c") + encode_message([b""])
    for _ in range(3000):
        changed = bytearray(said)
        for _ in range(chooser.randint(1, 3)):
            changed[chooser.randrange(len(changed))] = chooser.randrange(256)
        made = Decoder(b"DEALER", max_frame_bytes=1000, max_frames=3)
        made.feed(bytes(changed))
        try:
            for item in taken(made):
                assert isinstance(item, (Command, list))
        except ZmtpError:
            continue


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([b""], b"\0\0"),
        ([b"ab"], b"\0\2ab"),
        ([b"a", b""], b"\1\1a\0\0"),
        ([b"x" * 255], b"\0\xff" + b"x" * 255),
        ([b"x" * 256], b"\2\0\0\0\0\0\0\1\0" + b"x" * 256),
        ([b"x" * 256, b"y"], b"\3\0\0\0\0\0\0\1\0" + b"x" * 256 + b"\0\1y"),
    ],
)
def test_the_bytes_of_a_message(frames: list[bytes], expected: bytes) -> None:
    assert encode_message(frames) == expected
    assert decoded(decoder(), expected) == [frames]


def test_the_bytes_of_commands() -> None:
    assert len(GREETING) == 64
    assert GREETING[:12] == b"\xff\0\0\0\0\0\0\0\0\x7f\x03\x01"
    assert GREETING[12:] == b"NULL" + bytes(48)
    assert encode_ready(b"ROUTER") == b"\4\x29\5READY\x0bSocket-Type\0\0\0\6ROUTER\x08Identity\0\0\0\0"
    assert encode_ping(b"ab") == b"\4\x09\4PING\0\0ab"
    for ping, pong in (
        (b"\0\0", b""),
        (b"\1\2context", b"context"),
        (b"\0\0" + b"x" * 16, b"x" * 16),
        (b"\0\0" + b"x" * 40, b"x" * 16),  # longer than a context may be
        (b"", b""),  # cut off
        (b"\1", b""),
    ):
        assert encode_pong(ping) == bytes((4, 5 + len(pong))) + b"\4PONG" + pong


@pytest.mark.parametrize("limit", [0, 1, 100, 255, 256, 5000, 100_000])
@pytest.mark.parametrize("form", [0, LONG])
@pytest.mark.parametrize("more", [0, MORE])
def test_a_frame_at_the_limit_and_one_beyond(limit: int, form: int, more: int) -> None:
    made = decoder(max_frame_bytes=limit)
    if form == LONG or limit <= 255:
        said = frame(form | more, b"x" * limit) + (frame(0) if more else b"")
        assert decoded(made, said) == [[b"x" * limit, b""] if more else [b"x" * limit]]
    if form == LONG or limit < 255:
        made.feed(frame(form | more, b"", limit + 1))  # known before the body has come
        with pytest.raises(ZmtpError, match=rf"has {limit + 1} bytes and may have {limit}\b"):
            made.next()


@pytest.mark.parametrize("limit", [100, 100_000])
def test_a_command_has_a_limit_of_its_own(limit: int) -> None:
    made = decoder(max_frame_bytes=limit)
    longest = b"\4NAME" + b"x" * (MAX_COMMAND_BYTES - 5)
    assert decoded(made, frame(COMMAND | LONG, longest)) == [Command(b"NAME", longest[5:])]
    assert decoded(made, frame(COMMAND, b"\4NAME")) == [Command(b"NAME", b"")]
    made.feed(frame(COMMAND | LONG, b"", MAX_COMMAND_BYTES + 1))
    with pytest.raises(ZmtpError, match=f"may have {MAX_COMMAND_BYTES}"):
        made.next()


def test_the_greatest_of_sizes_is_refused_at_once() -> None:
    for flags in (LONG, LONG | MORE, LONG | COMMAND):
        for size in (1 << 31, 1 << 63, (1 << 64) - 1):
            made = decoder(max_frame_bytes=1 << 30)
            made.feed(frame(flags, b"", size))
            with pytest.raises(ZmtpError, match=str(size)):
                made.next()


def test_which_flags_exist() -> None:
    for flags in range(256):
        made = decoder()
        said = frame(flags, b"\4NAME")
        if flags in (0, LONG):
            assert decoded(made, said) == [[b"\4NAME"]]
        elif flags in (MORE, MORE | LONG):
            assert decoded(made, said) == []
            assert decoded(made, frame(0)) == [[b"\4NAME", b""]]
        elif flags in (COMMAND, COMMAND | LONG):
            assert decoded(made, said) == [Command(b"NAME", b"")]
        else:  # reserved, or MORE on a command
            made.feed(said)
            with pytest.raises(ZmtpError, match="do not exist"):
                made.next()


@pytest.mark.parametrize("body", [b"", b"\0", b"\0NAME", b"\5NAME", b"\xffNAME"])
@pytest.mark.parametrize("form", [0, LONG])
def test_a_command_without_a_name(body: bytes, form: int) -> None:
    made = decoder()
    made.feed(frame(COMMAND | form, body))
    with pytest.raises(ZmtpError, match="no name"):
        made.next()


def test_commands_may_stand_amid_a_message() -> None:
    made = decoder()
    said = frame(MORE, b"a") + encode_ping(b"1") + frame(MORE | LONG, b"b") + encode_ping(b"2") + frame(0, b"c")
    assert decoded(made, said) == [Command(b"PING", b"\0\0001"), Command(b"PING", b"\0\0002"), [b"a", b"b", b"c"]]
    assert decoded(made, encode_message([b"d"])) == [[b"d"]]


def test_of_a_message_of_thousands_of_frames_the_first_are_kept() -> None:
    made = decoder(max_frames=2)
    assert decoded(made, frame(MORE, b"a") + frame(MORE, b"b")) == []
    for _ in range(5):
        assert decoded(made, frame(MORE, b"c") * 999 + frame(MORE | LONG, b"d")) == [[]] * 1000  # told one by one
    assert decoded(made, frame(0, b"e") + frame(0, b"f")) == [[b"a", b"b"], [b"f"]]


def test_ready_comes_first_and_again_is_a_command_like_others() -> None:
    for said in (frame(0), frame(MORE, b"a"), frame(LONG, b"a")):
        made = decoder(said=GREETING)
        made.feed(said)
        with pytest.raises(ZmtpError, match="before READY"):
            made.next()
    for command in (encode_ping(), encode_command(b"HELLO", b""), encode_command(b"ready", READY[8:])):
        made = decoder(said=GREETING)
        made.feed(command)
        with pytest.raises(ZmtpError, match="READY comes first"):
            made.next()
    made = decoder()
    assert decoded(made, encode_ready(b"ROUTER")) == [Command(b"READY", encode_ready(b"ROUTER")[8:])]
    assert decoded(made, encode_command(b"ERROR", b"\2no")) == [Command(b"ERROR", b"\2no")]
    assert decoded(made, frame(0, b"a")) == [[b"a"]]


def test_a_refusal_in_place_of_ready_is_told() -> None:
    for data in (b"\x0bnot allowed", b"", b"\xff" + b"x" * 200):
        made = decoder(said=GREETING)
        made.feed(encode_command(b"ERROR", data))
        with pytest.raises(ZmtpError, match=r"^the peer refuses: b['\"](not allowed|x{60,}.*|)") as caught:
            made.next()
        assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    "data",
    [
        properties(Socket_Type=b"DEALER"),
        properties(socket_type=b"DEALER"),
        properties(SOCKET_TYPE=b"DEALER", Identity=b"x" * 200),
        properties(Identity=b"", X_Other=b"\0" * 3000, Socket_Type=b"DEALER", sOCKET=b"ROUTER"),
        properties(Socket_Type=b"ROUTER", socket_TYPE=b"DEALER"),  # the last of them counts
        properties(Socket_Type=b"DEALER") + b"\0" + struct.pack(">I", 0),  # one without a name
    ],
)
def test_what_ready_may_say(data: bytes) -> None:
    made = decoder(said=GREETING)
    body = b"\5READY" + data
    assert decoded(made, frame(COMMAND | LONG, body)) == [Command(b"READY", data)]
    assert made.ready


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the peer is a None and must be a DEALER"),
        (properties(Identity=b"DEALER"), "must be a DEALER"),
        (properties(Socket_Type=b"ROUTER"), "is a b'ROUTER' and must be a DEALER"),
        (properties(Socket_Type=b"dealer"), "must be a DEALER"),
        (properties(Socket_Type=b""), "must be a DEALER"),
        (properties(Socket_Type=b"X" * 5000), "must be a DEALER"),
        (properties(Socket_Type=b"DEALER")[:-1], "amid a property"),
        (properties(Socket_Type=b"DEALER") + b"\x08Ident", "amid a property"),
        (properties(Socket_Type=b"DEALER") + b"\x08Identity\0\0\0", "amid a property"),
        (properties(Socket_Type=b"DEALER") + b"\x08Identity\xff\xff\xff\xff", "amid a property"),
        (properties(Socket_Type=b"DEALER") + b"\x08Identity\x80\0\0\0" + b"x" * 300, "amid a property"),
        (properties(Socket_Type=b"DEALER") + b"\xff", "amid a property"),
    ],
)
def test_what_ready_may_not_say(data: bytes, words: str) -> None:
    made = decoder(said=GREETING)
    made.feed(frame(COMMAND | LONG, b"\5READY" + data))
    with pytest.raises(ZmtpError, match=words) as caught:
        made.next()
    assert not made.ready
    assert len(str(caught.value)) < 150


SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


@pytest.mark.parametrize(
    "greeting",
    [
        GREETING,
        SIGNATURE + b"\3\0" + GREETING[12:],  # ZMTP 3.0
        SIGNATURE + b"\4\7" + GREETING[12:],  # a later one, which speaks this one to us
        b"\xff\0\0\0\0\0\0\0\1\x7f" + GREETING[10:],  # libzmq's own, for peers of version 1
        GREETING[:32] + b"\1" + b"x" * 31,  # as-server, and a filler that is none
    ],
)
def test_greetings_that_are_understood(greeting: bytes) -> None:
    for step in (1, 7, 64):
        made = Decoder(b"DEALER", max_frame_bytes=1000, max_frames=3)
        for begin in range(0, 64, step):
            assert decoded(made, greeting[begin : begin + step]) == []
        assert decoded(made, READY + frame(0, b"a"))[1:] == [[b"a"]]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "first byte"),
        (b"\1", "first byte"),  # ZMTP 1, an empty identity
        (b"\1\0\2\0x", "first byte"),
        (b"\xff" + bytes(9), "signature"),
        (SIGNATURE + b"\0", "ZMTP 0 "),
        (SIGNATURE + b"\1\5\0\0", "ZMTP 1 "),  # as ZMTP 2 calls itself
        (SIGNATURE + b"\2\5", "ZMTP 2 "),
        (SIGNATURE + b"\3\1" + b"PLAIN".ljust(52, b"\0"), "mechanism is b'PLAIN', not NULL"),
        (SIGNATURE + b"\3\1" + b"CURVE".ljust(52, b"\0"), "mechanism is b'CURVE', not NULL"),
        (SIGNATURE + b"\3\1" + b"NULLS".ljust(52, b"\0"), "not NULL"),
        (SIGNATURE + b"\3\1" + b"NULL".ljust(19, b"\0") + b"x" + bytes(32), "not NULL"),
        (SIGNATURE + b"\3\1" + bytes(52), "mechanism is b'', not NULL"),
    ],
)
def test_greetings_that_are_not(said: bytes, words: str) -> None:
    for step in (1, len(said)):
        made = Decoder(b"DEALER", max_frame_bytes=1000, max_frames=3)
        with pytest.raises(ZmtpError, match=words):
            for begin in range(0, len(said), step):
                assert decoded(made, said[begin : begin + step]) == []


def test_what_is_cut_off_is_waited_for() -> None:
    said = GREETING + READY + frame(MORE, b"a") + encode_ping() + frame(LONG, b"b" * 300)
    for end in range(len(said)):
        made = Decoder(b"DEALER", max_frame_bytes=1000, max_frames=3)
        before = decoded(made, said[:end])
        assert made.next() is None
        assert made.ready is (end >= len(GREETING + READY))
        assert before + decoded(made, said[end:]) == [
            Command(b"READY", READY[8:]),
            Command(b"PING", b"\0\0"),
            [b"a", b"b" * 300],
        ]


def test_what_lies_in_it_is_bounded() -> None:
    """A message that never ends, of frames as long as they may be, and one whose last frame never comes whole."""
    size = 1 << 18
    made = decoder(max_frame_bytes=size, max_frames=3)
    endless = frame(MORE | LONG, bytes(size))
    small = frame(MORE, b"x" * 50) * 1000
    tracemalloc.start()
    try:
        for said in [endless] * 20 + [small] * 20 + [endless[:-1]]:
            for begin in range(0, len(said), 1 << 15):
                assert not any(decoded(made, said[begin : begin + (1 << 15)]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # the three frames that are kept, the one that comes, what it lies in, and what that was before it grew
    assert peak < 8 * size


@pytest.mark.parametrize("piece", [1000, 1024, 1 << 15])
@pytest.mark.parametrize("size", [1000, 8 << 20])
def test_the_time_grows_no_faster_than_the_bytes(piece: int, size: int) -> None:
    said = frame(LONG, bytes(size)) * ((8 << 20) // size)
    made = decoder(max_frame_bytes=size)
    begin = time.process_time()
    num_messages = sum(len(decoded(made, said[place : place + piece])) for place in range(0, len(said), piece))
    # linear: some 30 ms; where each piece copies what came before it, ten seconds
    assert time.process_time() - begin < 2.0
    assert num_messages == (8 << 20) // size
