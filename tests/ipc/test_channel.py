"""A channel over a pair of Unix sockets, and against libzmq's: greetings, full buffers, heartbeats, ends."""

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from lowlat.ipc.channel import READ_BYTES, Channel
from lowlat.ipc.zmtp import GREETING, encode_command, encode_message, encode_ping, encode_pong, encode_ready

LARGE = 3 << 20  # of many times what the kernel takes


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


class Maker:
    """Makes connected ends, which are closed at the test's end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def channel(
        self,
        connection: socket.socket,
        kind: bytes = b"ROUTER",
        peer_kind: bytes = b"DEALER",
        *,
        max_frame_bytes: int = 8 << 20,
        max_frames: int = 3,
        max_unsent: int = 4,
    ) -> Channel:
        made = Channel(
            connection,
            kind,
            peer_kind,
            max_frame_bytes=max_frame_bytes,
            max_frames=max_frames,
            max_unsent=max_unsent,
        )
        self._stack.callback(made.close)
        return made

    def pair(self, *, sndbuf: int | None = None) -> tuple[Channel, Channel]:
        """A ROUTER's end and a DEALER's."""
        ends = socket.socketpair(socket.AF_UNIX)
        for end in ends:
            if sndbuf is not None:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
        return self.channel(ends[0]), self.channel(ends[1], b"DEALER", b"ROUTER")

    def bare(self, *, greeted: bool = True, max_unsent: int = 4) -> tuple[Channel, socket.socket]:
        """A ROUTER's end, and the other's bare socket, which never waits and may have said READY."""
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        self._stack.callback(theirs.close)
        theirs.setblocking(False)
        made = self.channel(ours, max_unsent=max_unsent)
        if greeted:
            theirs.sendall(GREETING + encode_ready(b"DEALER"))
            assert settle(made) == [[]]
            assert received(theirs) == GREETING + encode_ready(b"ROUTER")
        return made, theirs


@pytest.fixture
def make(stack: ExitStack) -> Maker:
    return Maker(stack)


def settle(*channels: Channel) -> list[list[list[bytes]]]:
    """Let each send what waits and read what has come, until nothing moves any more; the messages of each."""
    found: list[list[list[bytes]]] = [[] for _ in channels]
    moved = True
    while moved:
        moved = False
        for channel, messages in zip(channels, found, strict=True):
            channel.flush()
            while channel.fill():
                moved = True
                messages += [item for item in iter(channel.next, None) if item]
    return found


def settled_when(condition: Callable[[list[list[bytes]]], bool], channel: Channel) -> list[list[bytes]]:
    """The same with a peer that has threads: until what came fulfils a condition."""
    messages: list[list[bytes]] = []
    end = time.monotonic() + 10.0
    while not condition(messages):
        assert time.monotonic() < end and channel.lost is None, (messages, channel.lost)
        messages += settle(channel)[0]
        time.sleep(0.001)
    return messages


def received(connection: socket.socket) -> bytes:
    """What lies in a bare socket."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except BlockingIOError:
        pass
    return found


def test_two_channels_greet_and_talk(make: Maker) -> None:
    router, dealer = make.pair()
    assert router.pending and dealer.pending and not router.ready and not dealer.ready
    assert settle(router, dealer) == [[], []]
    assert router.ready and dealer.ready and not router.pending and not dealer.pending
    for sender, hearer in ((router, dealer), (dealer, router)):
        hearer.heard = False
        for frames in ([b""], [b"a", b"b" * 300, b""], [b"c" * READ_BYTES]):
            assert sender.send(frames)
        assert settle(hearer) == [[[b""], [b"a", b"b" * 300, b""], [b"c" * READ_BYTES]]]
        assert hearer.heard
    assert router.lost is dealer.lost is None


def test_what_is_sent_before_ready_waits_for_it(make: Maker) -> None:
    router, dealer = make.pair()
    assert dealer.send([b"first"]) and dealer.send([b"second"])
    assert settle(router, dealer) == [[[b"first"], [b"second"]], []]
    channel, bare = make.bare(greeted=False, max_unsent=2)
    assert [channel.send([b"%d" % number]) for number in range(3)] == [True, True, False]
    assert channel.flush()
    bare.sendall(GREETING)
    assert settle(channel) == [[]]
    assert received(bare) == GREETING + encode_ready(b"ROUTER")
    bare.sendall(encode_ready(b"DEALER"))
    assert settle(channel) == [[]]
    assert received(bare) == encode_message([b"0"]) + encode_message([b"1"])


@pytest.mark.parametrize("kind", [b"ROUTER", b"REQ", b"PUB"])
def test_a_peer_of_another_type_is_refused(make: Maker, kind: bytes) -> None:
    channel, bare = make.bare(greeted=False)
    bare.sendall(GREETING + encode_ready(kind) + encode_message([b"a"]))
    assert settle(channel) == [[]]
    assert channel.lost == f"the peer is a {kind!r} and must be a DEALER"
    assert not channel.pending


def dealer_of_libzmq(stack: ExitStack, make: Maker, folder: Path) -> tuple[Channel, "zmq.Socket[bytes]"]:
    """A ROUTER's end to which libzmq has connected."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, linger=0)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/s.sock")
        listening.listen()
        dealer = stack.enter_context(context.socket(zmq.DEALER))
        dealer.routing_id = b"somebody"
        dealer.connect(f"ipc://{folder}/s.sock")
        listening.settimeout(10.0)
        return make.channel(listening.accept()[0]), dealer


def router_of_libzmq(stack: ExitStack, make: Maker, folder: Path) -> tuple[Channel, "zmq.Socket[bytes]"]:
    """A DEALER's end that is connected to libzmq."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.destroy, linger=0)
    router = stack.enter_context(context.socket(zmq.ROUTER))
    router.bind(f"ipc://{folder}/s.sock")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{folder}/s.sock")
    return make.channel(connection, b"DEALER", b"ROUTER"), router


MESSAGES = [[b""], [b"a", b"", b"b" * 255], [b"c" * 256], [b"d" * LARGE, b"e"], *([b"%d" % n] for n in range(100))]


def test_libzmqs_dealer(make: Maker, stack: ExitStack, tmp_path: Path) -> None:
    channel, dealer = dealer_of_libzmq(stack, make, tmp_path)
    for message in MESSAGES:
        dealer.send_multipart(message)
    assert settled_when(lambda found: len(found) == len(MESSAGES), channel) == MESSAGES
    channel.heard = False
    channel.ping()
    settled_when(lambda _: channel.heard, channel)  # it has answered
    talk_to(channel, lambda: [dealer.recv_multipart(zmq.NOBLOCK)], MESSAGES)
    dealer.send(b"last")
    dealer.close(linger=5000)
    assert settled_when(lambda found: found == [[b"last"]], channel)
    deadline = time.monotonic() + 10.0
    while channel.lost is None and time.monotonic() < deadline:
        assert settle(channel) == [[]]
    assert channel.lost == "the connection was closed"


def test_libzmqs_router(make: Maker, stack: ExitStack, tmp_path: Path) -> None:
    """It refuses messages that come before it has said READY, and is sent none."""
    channel, router = router_of_libzmq(stack, make, tmp_path)
    talk_to(channel, lambda: [router.recv_multipart(zmq.NOBLOCK)[1:]], MESSAGES)
    assert channel.send([b"who"])
    settled_when(lambda _: bool(router.poll(1)), channel)
    name, _ = router.recv_multipart()
    for message in MESSAGES:
        router.send_multipart([name, *message])
    assert settled_when(lambda found: len(found) == len(MESSAGES), channel) == MESSAGES
    channel.heard = False
    channel.ping()
    settled_when(lambda _: channel.heard, channel)


def talk_to(channel: Channel, hear: Callable[[], list[list[bytes]]], messages: list[list[bytes]]) -> None:
    """Send all messages, as there is room, to a libzmq socket that hears them."""
    heard: list[list[bytes]] = []
    waiting = list(messages)
    deadline = time.monotonic() + 10.0
    while len(heard) < len(messages):
        assert time.monotonic() < deadline and channel.lost is None, channel.lost
        while waiting and channel.send(waiting[0]):
            del waiting[0]
        settle(channel)
        try:
            heard += hear()
        except zmq.Again:
            time.sleep(0.001)
    assert heard == messages


def test_what_the_kernel_has_no_room_for_waits(make: Maker) -> None:
    router, dealer = make.pair()
    settle(router, dealer)
    sent = [[bytes((65 + place,)) * LARGE, b"%d" % place] for place in range(4)]
    for place, message in enumerate(sent):
        assert router.has_room
        assert router.send(message)
        assert router.pending
        assert not router.flush()
        assert router.has_room is (place < 3)
    assert not router.send([b"one too many"])
    got: list[list[bytes]] = []
    while len(got) < len(sent):
        assert dealer.fill()
        got += filter(None, iter(dealer.next, None))
        if router.pending:
            router.flush()
    assert got == sent
    assert not router.pending
    assert router.flush()
    assert router.send([b"more"])
    assert settle(dealer) == [[[b"more"]]]


def test_room_is_there_again_when_a_message_has_left(make: Maker) -> None:
    router, bare = make.bare(max_unsent=2)
    assert router.send([b"a" * LARGE]) and router.send([b"b" * 10])
    assert not router.has_room and not router.send([b"c"])
    said = b""
    while not router.has_room:
        said += received(bare)
        router.flush()
    assert router.send([b"c"])
    while router.pending:
        said += received(bare)
        router.flush()
    assert said + received(bare) == encode_message([b"a" * LARGE]) + encode_message([b"b" * 10]) + encode_message(
        [b"c"]
    )


def test_both_ways_at_once_nothing_is_lost_or_reordered(make: Maker) -> None:
    chooser = random.Random(7)
    ends = make.pair(sndbuf=4608)
    sent: tuple[list[list[bytes]], ...] = ([], [])
    got: tuple[list[list[bytes]], ...] = ([], [])
    for _ in range(5000):
        place = chooser.randrange(2)
        end = ends[place]
        match chooser.randrange(6):
            case 0:
                sizes = [int(chooser.expovariate(1.0) * chooser.choice([10, 300, 20_000])) for _ in range(2)]
                message = [chooser.randbytes(size) for size in sizes]
                if end.send(message):
                    sent[place].append(message)
                else:
                    assert not end.has_room
            case 1:
                end.flush()
            case 2:
                end.ping()
            case _:
                end.fill()
                got[1 - place].extend(filter(None, iter(end.next, None)))
    for place, messages in enumerate(settle(*ends)):
        got[1 - place].extend(messages)
    assert got == sent
    assert all(len(messages) > 100 for messages in sent)
    assert not ends[0].pending and not ends[1].pending


def test_a_ping_is_answered_and_is_no_message(make: Maker) -> None:
    channel, bare = make.bare()
    bare.sendall(encode_ping(b"who") + encode_message([b"a"]) + encode_command(b"OTHER", b"x") + encode_ping())
    assert channel.fill()
    assert [channel.next() for _ in range(5)] == [[], [b"a"], [], [], None]
    assert received(bare) == encode_pong(b"\0\0who") + encode_pong(b"\0\0")
    assert channel.lost is None


def test_a_ping_is_not_answered_while_more_waits(make: Maker) -> None:
    channel, bare = make.bare()
    message = [b"x" * LARGE]
    assert channel.send(message)
    bare.sendall(encode_ping(b"1"))
    channel.ping()
    assert settle(channel) == [[]]
    said = b""
    while channel.pending:
        said += received(bare)
        channel.flush()
    assert said + received(bare) == encode_message(message)  # a sign of life by itself
    bare.sendall(encode_ping(b"2"))
    assert settle(channel) == [[]]
    assert received(bare) == encode_pong(b"\0\0002")


def test_answers_that_the_kernel_has_no_room_for_are_whole_or_left_out(make: Maker) -> None:
    channel, bare = make.bare()
    for number in range(2000):
        bare.sendall(encode_ping(b"%08d" % number))
        settle(channel)
    said = received(bare)
    channel.flush()
    said += received(bare)
    size = len(encode_pong(b"\0\0%08d" % 0))
    answered = [said[place : place + size] for place in range(0, len(said), size)]
    assert answered == [encode_pong(b"\0\0%08d" % number) for number in range(len(answered))]
    assert 100 < len(answered) < 2000
    bare.sendall(encode_ping(b"again"))
    settle(channel)
    assert received(bare) == encode_pong(b"\0\0again")


def test_what_a_peer_said_before_it_closed_is_received(make: Maker) -> None:
    channel, bare = make.bare()
    bare.sendall(encode_message([b"a"]) + encode_message([b"b" * LARGE])[:100_000])
    bare.close()
    assert channel.send([b"goes nowhere"])
    assert not channel.pending
    assert channel.lost is None
    assert settle(channel) == [[[b"a"]]]
    assert channel.lost == "the connection was closed"
    assert channel.next() is None
    assert not channel.fill()
    assert channel.send([b"goes nowhere"]) and channel.flush() and not channel.pending


def test_a_peer_that_closes_with_something_unread(make: Maker) -> None:
    channel, bare = make.bare()
    assert channel.send([b"never read"])
    bare.sendall(encode_message([b"a"]))
    bare.close()
    assert settle(channel) == [[[b"a"]]]
    assert channel.lost == "the connection broke: Connection reset by peer"


def test_a_peer_that_closes_while_more_waits_for_it(make: Maker) -> None:
    for unread, reason in ((False, "was closed"), (True, "broke: Connection reset by peer")):
        channel, bare = make.bare()
        assert channel.send([b"a" * LARGE]) and channel.send([b"b"])
        bare.sendall(encode_message([b"last"]))
        if not unread:
            received(bare)
        bare.close()
        assert channel.pending
        assert channel.flush()
        assert not channel.pending
        assert channel.lost is None  # what it said comes first
        assert settle(channel) == [[[b"last"]]]
        assert channel.lost == f"the connection {reason}"


def test_a_peer_that_says_no_more_has_closed(make: Maker) -> None:
    channel, bare = make.bare()
    bare.shutdown(socket.SHUT_WR)
    assert settle(channel) == [[]]
    assert channel.lost == "the connection was closed"


def test_what_came_before_bytes_that_are_not_zmtp_is_received(make: Maker) -> None:
    channel, bare = make.bare()
    assert channel.send([b"x" * LARGE])
    bare.sendall(encode_message([b"a"]) + b"\x08\x00" + encode_message([b"b"]))
    assert settle(channel) == [[[b"a"]]]
    assert channel.lost == "flags 0x08 do not exist"
    assert not channel.pending
    bare.close()
    assert settle(channel) == [[]]
    assert channel.lost == "flags 0x08 do not exist"  # the first of reasons


@pytest.mark.parametrize("how", ["shut", "close"])
def test_it_ends_although_a_fork_holds_the_descriptor(make: Maker, how: str) -> None:
    channel, bare = make.bare()
    assert channel.send([b"last"])
    held = os.dup(channel.descriptor)
    try:
        getattr(channel, how)()
        assert received(bare) == encode_message([b"last"])
        with pytest.raises(BrokenPipeError):
            bare.send(b"x")
    finally:
        os.close(held)
    getattr(channel, how)()  # harmless when repeated
    assert channel.send([b"goes nowhere"])
    assert not channel.pending


def test_what_waits_is_dropped_by_its_end(make: Maker) -> None:
    channel, bare = make.bare()
    assert channel.send([b"x" * LARGE])
    channel.shut()
    assert not channel.pending
    assert len(received(bare)) < LARGE
