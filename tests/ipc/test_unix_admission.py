"""Who may be connected to a Unix socket: how many, who is a stranger, what must be said at once, what ends it."""

import errno
import os
import resource
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest
from bare_peer import BarePeer, message_bytes
from fake_engine import expected_tokens
from fake_process import fake_process
from listening import Listen, Listening
from raw_client import raw_client, zmtp_bytes
from served import Serve

from lowlat.ipc.server.transport import unix_listener
from lowlat.ipc.server.transport.security import Credentials, Users
from lowlat.ipc.wire import Hello, Welcome

GREETED = zmtp_bytes([])


@pytest.mark.parametrize(
    "said", [*(GREETED[:size] for size in (0, 1, 30, 64, len(GREETED) - 1, len(GREETED))), zmtp_bytes([[b"\x06"]])]
)
def test_who_never_says_hello_is_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(unix_listener, "HELLO_TIMEOUT_S", 0.15)
    served = serve(heartbeat_interval_s=0.05)
    good = served.client()
    running = good.submit(1, max_tokens=100)
    with BarePeer(served.server.endpoint, said) as peer:
        assert peer.ends()
    good.finish(running)
    assert running.token_ids == expected_tokens([1, 2, 3], 100)
    assert good.stats()["num_clients"] == 1


def test_the_time_to_say_who_one_is_begins_with_the_connection(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_listener, "HELLO_TIMEOUT_S", 0.2)
    listening = listen(heartbeat_interval_s=0.05)
    with BarePeer(listening.endpoint, b"") as slow, BarePeer(listening.endpoint, zmtp_bytes([[b"hello"]])) as known:
        begin = time.monotonic()
        with pytest.raises(BrokenPipeError):
            for place in range(64):  # a byte now and then is no sign of life
                slow.say_bytes(GREETED[place : place + 1])
                listening.turn_until(lambda due=begin + 0.01 * (place + 1): time.monotonic() > due)  # type: ignore[misc]
        assert time.monotonic() - begin > 0.2
        known.say_bytes(message_bytes([b"here"]))
        listening.turn(2)
        assert listening.messages == [[b"hello"], [b"here"]]


def peers_of(stack: ExitStack, listening: Listening, count: int) -> list[BarePeer]:
    peers = [stack.enter_context(BarePeer(listening.endpoint)) for _ in range(count)]
    listening.turn(count)
    return peers


def test_there_are_not_many_more_connections_than_clients(listen: Listen) -> None:
    listening = listen(max_clients=2, max_messages_per_s=100)
    with ExitStack() as stack:
        peers = peers_of(stack, listening, 2 + unix_listener.SPARE_CONNECTIONS)
        late = peers_of(stack, listening, 3)
        assert all(peer.ends() for peer in late)
        peers[0].close()
        listening.turn(2)
        peers_of(stack, listening, 1)[0].say_bytes(message_bytes([b"room again"]))
        peers[-1].say_bytes(message_bytes([b"still there"]))
        listening.turn_until(lambda: len(listening.messages) == 2)


def test_strangers_hold_few_connections_and_say_little(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    listening = listen(users=Users(os.geteuid() + 1, frozenset({os.geteuid() + 2})), max_clients=1)
    with ExitStack() as stack:
        strangers = peers_of(stack, listening, unix_listener.MAX_STRANGERS)
        late = peers_of(stack, listening, 100)
        assert all(peer.ends() for peer in late)
        long = bytes(unix_listener.MAX_STRANGER_FRAME_BYTES)
        strangers[0].say_bytes(message_bytes([long]))
        strangers[1].say_bytes(message_bytes([long + b"x"]))
        listening.turn(4)
        assert listening.messages == [[long]]
        assert strangers[1].ends()
        monkeypatch.setattr(Credentials, "of", lambda connection: Credentials(uid=os.geteuid() + 2, pid=1))
        known = peers_of(stack, listening, 1)[0]
        known.say_bytes(message_bytes([long + b"x"]))
        listening.turn_until(lambda: len(listening.messages) == 2)
        monkeypatch.undo()
        one_more, too_many = peers_of(stack, listening, 2)  # as one has gone
        assert too_many.ends()
        one_more.say_bytes(message_bytes([b"stranger"]))
        listening.turn_until(lambda: len(listening.messages) == 3)


def test_bytes_that_are_not_zmtp_end_their_connection_at_once(listen: Listen) -> None:
    listening = listen(max_message_bytes=1024)
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        zmtp_bytes([], {b"Socket-Type": b"PUB"}),
        zmtp_bytes([[b"x" * 1025]]),
        GREETED + b"\x08\x00",
        GREETED + b"\x02\xff\xff\xff\xff\xff\xff\xff\xff",
    ):
        with BarePeer(listening.endpoint, said) as peer:
            listening.turn(3)
            assert peer.ends()
    assert listening.messages == []


def test_without_descriptors_nobody_new_comes_in_and_nobody_is_lost(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = listen(heartbeat_interval_s=0.05)
    num_accepts = 0

    def accept(listening: socket.socket) -> NoReturn:
        nonlocal num_accepts
        num_accepts += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with BarePeer(listening.endpoint) as old:
        listening.turn(3)
        with monkeypatch.context() as patch, BarePeer(listening.endpoint, zmtp_bytes([[b"new"]])) as new:
            patch.setattr(socket.socket, "accept", accept)
            begin = time.monotonic()
            listening.turn(200)
            listening.turn_until(lambda: time.monotonic() - begin > 0.2)
            old.say_bytes(message_bytes([b"old"]))
            listening.turn(2)
            assert listening.messages == [[b"old"]]
            assert 2 <= num_accepts <= 2 + (time.monotonic() - begin) / 0.05  # once between two heartbeats
            assert not new.ends(0.01)
            patch.undo()
            listening.turn_until(lambda: [b"new"] in listening.messages)


def test_a_server_that_is_out_of_descriptors(tmp_path: Path) -> None:
    options = {"engine": {"step_s": 0.005}, "limits": {"heartbeat_interval_s": 0.1}}
    endpoint = f"ipc://{tmp_path}/s.sock"
    with fake_process(tmp_path, **options) as server, raw_client(endpoint) as good:
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        num_open = 1 + max(int(name) for name in os.listdir(f"/proc/{server.pid}/fd"))
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (num_open, hard))
        with raw_client(endpoint, greet=False) as late:
            late.say(Hello())
            begin, used = time.monotonic(), cpu_seconds(server.pid)
            running = good.submit(1, max_tokens=60)
            good.finish(running)
            assert running.token_ids == expected_tokens([1, 2, 3], 60)
            with pytest.raises(TimeoutError):
                late.receive(0.2)
            assert cpu_seconds(server.pid) - used < 0.8 * (time.monotonic() - begin)  # it waits for heartbeats
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
            late.hear(Welcome)
        assert server.poll() is None


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
