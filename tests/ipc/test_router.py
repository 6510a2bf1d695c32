"""The server's socket, over each transport: who is let in, what ends a connection, and what it costs the others."""

import ctypes
import os
import re
import resource
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from fake_engine import FakeEngine, expected_tokens
from fake_process import fake_process
from raw_client import TIMEOUT_S, RawClient, bare_socket, raw_client, zmtp_bytes, zmtp_peer
from served import Serve, Served, eventually

from lowlat.errors import ConfigError, RequestError
from lowlat.ipc import Client, libzmq
from lowlat.ipc.server import admission, router, server
from lowlat.ipc.server.admission import User
from lowlat.ipc.server.peer import Peer
from lowlat.ipc.wire import Drain, Error, Health, Hello, Pong, Sampling, Submit, encode, pack_tokens

GREETED = zmtp_bytes([])
HELLO = encode(Hello())


def ends(connection: socket.socket, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the other side ends the connection in this time."""
    connection.settimeout(timeout_s)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def peers_of(served: Served) -> list[Peer]:
    return list(served.server._io._router.peers.values())  # type: ignore[union-attr]


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> int:
    """The server takes itself for another user's: so this one's, who is named, is a stranger to it."""
    own = os.geteuid()
    monkeypatch.setattr(server, "geteuid", lambda: own + 1)
    return own


def test_strangers_are_not_let_in_and_are_told(serve: Serve, stranger: int) -> None:
    served = serve()
    for _ in range(2):
        with (
            pytest.raises(RequestError, match=f"does not let uid {stranger} in; ask for --allow-uid"),
            Client(served.server.endpoint),
        ):
            pass
    zmtp_peer(served.server.endpoint, {}, [[HELLO]], until=b"ERROR").close()
    assert not peers_of(served)


def test_users_may_be_let_in_by_choice_and_are_who_the_kernel_says(serve: Serve, stranger: int) -> None:
    served = serve(allow_uids=[stranger])
    lies = {b"User-Id": b"uid 0 1", b"Peer-Address": b"localhost:0:0:1", b"__fd": b"0"}
    with zmtp_peer(served.server.endpoint, lies, [[HELLO]]) as connection:
        eventually(lambda: bool(peers_of(served)))
        (peer,) = peers_of(served)
        assert peer.user == User(uid=stranger, pid=os.getpid())
        assert not ends(connection, 0.05)
    admitted = served.client()
    assert admitted.pong().state == "serving"
    admitted.say(Drain(0.0))
    assert admitted.hear(Error).code == "forbidden"  # let in, but the server is not theirs to end


def test_without_the_kernels_word_nobody_is_let_in(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a libzmq that was built without it."""
    monkeypatch.setattr(admission, "_ADDRESS", re.compile("never"))
    served = serve()
    zmtp_peer(served.server.endpoint, {}, [[HELLO]], until=b"ERROR").close()
    assert not peers_of(served)


def test_a_routing_id_of_its_own_is_refused(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(**transport)
    with zmtp_peer(served.server.endpoint, {b"Identity": b"mine"}, [[HELLO]]) as connection:
        assert ends(connection)
    assert not peers_of(served)


def test_nobody_can_guess_which_routing_id_is_next(serve: Serve, tmp_path: Path) -> None:
    """libzmq begins at the same in every process, and ends the process where a peer has chosen the next one."""
    first: set[bytes] = set()
    for number in range(3):
        ctypes.CDLL(None).srand(1)
        served = serve(endpoint=f"ipc://{tmp_path}/{number}.sock")
        served.client()
        first |= {peer.routing_id for peer in peers_of(served)}
    assert len(first) == 3


def test_who_never_says_hello_is_ended(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, transport: dict[str, str]
) -> None:
    monkeypatch.setattr(libzmq, "HANDSHAKE_TIMEOUT_MS", 400)
    served = serve(heartbeat_interval_s=0.05, **transport)
    good = served.client()
    monkeypatch.setattr(router, "HELLO_TIMEOUT_S", 0.4)
    running = good.submit(1, max_tokens=100)
    with ExitStack() as stack:
        silent = [stack.enter_context(bare_socket(served.server.endpoint)) for _ in range(5)]
        for connection, said in zip(
            silent, (b"", GREETED[:1], GREETED[:64], GREETED, zmtp_bytes([[b"\x06"]])), strict=True
        ):
            connection.sendall(said)
        assert all(ends(connection) for connection in silent)
    good.finish(running)
    assert running.token_ids == expected_tokens([1, 2, 3], 100)
    assert good.stats()["num_clients"] == 1


def trickle(connection: socket.socket, data: bytes, seconds: float) -> bool:
    """Say a byte now and then; whether the other side ends the connection in this time."""
    end = time.monotonic() + seconds
    try:
        for place in range(len(data)):
            connection.sendall(data[place : place + 1])
            if ends(connection, 0.02):
                return True
            if time.monotonic() > end:
                break
    except ConnectionError:
        return True
    return False


def test_one_byte_at_a_time_is_no_sign_of_life(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libzmq, "HANDSHAKE_TIMEOUT_MS", 400)
    served = serve(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.4)
    with bare_socket(served.server.endpoint) as slow:
        assert trickle(slow, GREETED, 5.0)
    with zmtp_peer(served.server.endpoint, {}, [[HELLO]]) as slow:
        eventually(lambda: len(peers_of(served)) == 1)
        assert trickle(slow, zmtp_bytes([[bytes(4096)]])[len(GREETED) :], 5.0)
    eventually(lambda: not peers_of(served))


def test_what_is_not_of_the_protocol_ends_its_connection(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(max_message_bytes=1024, **transport)
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        zmtp_bytes([], {b"Socket-Type": b"PUB"}),
        zmtp_bytes([[b"x" * 2000]]),
        GREETED + b"\x02\xff\xff\xff\xff\xff\xff\xff\xff",
    ):
        with bare_socket(served.server.endpoint) as connection:
            connection.sendall(said)
            assert ends(connection, 3.0), said
        assert not peers_of(served)


def test_there_are_not_many_more_connections_than_clients(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, transport: dict[str, str]
) -> None:
    monkeypatch.setattr(router, "SPARE_CONNECTIONS", 3)
    served = serve(max_clients=2, **transport)
    endpoint = served.server.endpoint
    good = served.client()
    with ExitStack() as stack:
        held = [stack.enter_context(zmtp_peer(endpoint, {}, [])) for _ in range(4)]
        for _ in range(3):
            assert ends(stack.enter_context(bare_socket(endpoint)), 3.0)
        assert not any(ends(connection, 0.01) for connection in held)
        assert good.pong().state == "serving"
        held[0].close()
        again = stack.enter_context(zmtp_peer(endpoint, {}, [[HELLO]]))
        heard = b""
        while b"epoch" not in heard and (part := again.recv(4096)):
            heard += part
        assert b"epoch" in heard


def test_a_descriptor_that_is_anothers_by_now_is_left_alone(serve: Serve) -> None:
    served = serve()
    client = served.client()
    (peer,) = peers_of(served)
    turned: Any = served.server._io._router  # type: ignore[union-attr]
    known = turned._connections[peer.descriptor]
    inode, known.inode = known.inode, known.inode + 1
    turned.shut(peer)
    assert client.pong().state == "serving"
    known.inode = inode
    turned.shut(peer)
    eventually(lambda: not peers_of(served))


def test_who_comes_in_a_crowd_is_let_in(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(**transport)
    with ExitStack() as stack:
        crowd = [stack.enter_context(zmtp_peer(served.server.endpoint, {}, [[HELLO]])) for _ in range(150)]
        eventually(lambda: len(peers_of(served)) == 150)
        assert len({peer.routing_id for peer in peers_of(served)}) == 150
        assert not ends(crowd[0], 0.01)
    eventually(lambda: not peers_of(served))


def test_many_messages_at_once_come_in_order(serve: Serve, transport: dict[str, str]) -> None:
    client = serve(**transport).client()
    for number in range(1, 500):
        client.say(Health(number))
    assert [client.hear(Pong).nonce for _ in range(1, 500)] == list(range(1, 500))


def test_a_libzmq_client_with_heartbeats_of_its_own_stays_connected(serve: Serve) -> None:
    client = serve(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.6).client(heartbeat_ivl=50, heartbeat_timeout=600)
    monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        assert not monitor.poll(900)
        assert client.pong().state == "serving"
    finally:
        client.socket.disable_monitor()
        monitor.close()


def test_who_submits_and_goes_at_once(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(FakeEngine(0.002), **transport)
    good = served.client()
    submit = [encode(Submit(1, 1 << 20, Sampling(max_tokens=4000))), pack_tokens([1, 2])]
    for number in range(10):
        with zmtp_peer(served.server.endpoint, {}, [[HELLO], submit]):
            eventually(lambda number=number: len(served.engine.order) == number + 1)  # type: ignore[misc]
    client = RawClient(served.server.endpoint)
    for number in range(200):
        client.say(Health(number))
    client.socket.linger = 5000
    client.close()  # says all of it, and hears nothing
    eventually(lambda: not served.engine.busy and good.stats()["num_clients"] == 1)
    done = good.submit(1, max_tokens=5)
    good.finish(done)
    assert done.token_ids == expected_tokens([1, 2, 3], 5)


def test_what_is_sent_last_has_time_to_leave_and_no_more(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(FakeEngine(0.0), linger_s=0.3, **transport)
    deaf = served.client(rcvhwm=1, rcvbuf=4096)
    for number in range(8):
        deaf.submit(number, max_tokens=4000, logprobs=0)
    eventually(lambda: served.engine.num_steps > 4000)
    closing = threading.Thread(target=served.server.close)
    closing.start()
    closing.join(5.0)
    assert not closing.is_alive()


def test_a_storm_of_connections_takes_no_descriptor_that_the_server_needs(tmp_path: Path) -> None:
    """libzmq ends its process where it has none left to accept another by."""
    endpoint = f"ipc://{tmp_path}/s.sock"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        process = fake_process(tmp_path, engine={"step_s": 0.005}, limits={"max_clients": 8})
        with process as server, raw_client(endpoint) as good, ExitStack() as stack:
            running = good.submit(1, max_tokens=100)
            for _ in range(400):
                with suppress(BlockingIOError):  # so many wait already
                    stack.enter_context(bare_socket(endpoint))
            good.finish(running)
            assert running.token_ids == expected_tokens([1, 2, 3], 100)
            assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE)[0] > 1024 or hard <= 1024
            assert len(os.listdir(f"/proc/{server.pid}/fd")) < 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_descriptors_for_any_server_name_the_limit_alone(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(ConfigError, match=r"65 connections .* need 321 .* may have 64; raise `ulimit -Hn`$"):
        serve(max_clients=1)


def test_too_few_descriptors_are_refused_at_the_start(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 512))
    with pytest.raises(ConfigError, match=r"564 connections .* may have 512; raise `ulimit -Hn` or lower max_clients"):
        serve(max_clients=500)
