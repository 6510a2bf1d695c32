"""Connections of one server: strangers, liars, floods, deaths, and that nobody else notices."""

import time
from typing import Any

import pytest
import zmq
from fake_engine import FakeEngine, expected_tokens
from raw_client import RawClient, bare_socket, zmtp_peer
from served import Serve, eventually

import lowlat.ipc.server.peer
from lowlat.ipc.wire import (
    Bye,
    Credit,
    Error,
    Health,
    Hello,
    Pong,
    Sampling,
    Submit,
    Welcome,
    decode_server,
    encode,
    pack_tokens,
)


def num_clients(client: RawClient) -> int:
    return int(client.stats()["num_clients"])


def test_a_message_out_of_turn_is_answered_and_too_many_drop_the_peer(serve: Serve, transport: dict[str, str]) -> None:
    """What is malformed, too: tests/faults/test_frames.py."""
    served = serve(max_bad_messages=3, **transport)
    bad, good = served.client(), served.client()
    running = good.submit(1, max_tokens=50)
    lost = bad.submit(1, [8], max_tokens=4000)
    for message in (Hello(), Credit(99, 1), Hello()):
        bad.say(message)
        error = bad.hear(Error)
        assert (error.code, error.field, error.number) == ("unexpected", None, None)
    assert bad.hear(Bye).reason == "dropped"
    good.finish(running)
    assert running.token_ids == expected_tokens([1, 2, 3], 50)
    eventually(lambda: not served.engine.busy)  # what the dropped one had under way is given up
    assert lost.end is None
    assert num_clients(good) == 1


def test_a_broken_submit_with_a_number_is_an_error_of_that_request(serve: Serve) -> None:
    client = serve().client()
    client.say_raw(b"\x02\x82\xa6number\x07\xa6credit\x00", pack_tokens([1]))
    error = client.hear(Error)
    assert (error.code, error.number, error.field) == ("malformed", 7, "$.credit")
    running = client.submit(8, max_tokens=20)
    client.say_raw(b"\x02\x82\xa6number\x08\xa6credit\x00", pack_tokens([1]))
    error = client.hear(Error)
    assert (error.code, error.number) == ("malformed", None)  # it must not seem to end the running one
    client.finish(running)
    assert running.end is not None


def test_a_dropped_peer_is_disconnected_and_may_come_again(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(max_bad_messages=1, **transport)
    client = served.client()
    monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.say_raw(b"\xff")
    assert client.hear(Error).code == "malformed"
    assert client.hear(Bye).reason == "dropped"
    assert monitor.poll(3000)
    client.socket.disable_monitor()
    monitor.close()
    client.say(Hello())
    client.hear(Welcome)


def test_hello_comes_first(serve: Serve) -> None:
    client = serve().client(greet=False)
    client.say(Submit(1, 10, Sampling()), pack_tokens([1]))
    error = client.hear(Error)
    assert (error.code, error.number) == ("unexpected", None)
    client.say(Hello(min_version=2, max_version=9))
    assert client.hear(Error).code == "version"
    client.say(Hello())
    assert client.hear(Welcome).version == 1


def test_more_clients_than_allowed_are_refused(serve: Serve) -> None:
    served = serve(max_clients=1)
    first = served.client()
    second = served.client(greet=False)
    second.say(Hello())
    assert second.hear(Error).code == "busy"
    assert second.hear(Bye).reason == "busy"
    assert isinstance(first.pong(), Pong)
    first.close()
    time.sleep(0.1)
    assert served.client().pong().state == "serving"


def test_a_message_of_many_frames_is_not_kept(serve: Serve, transport: dict[str, str]) -> None:
    client = serve(max_bad_messages=2, **transport).client()
    client.say_raw(*[b"\x06"] * 10_000)
    assert client.hear(Error).code == "malformed"
    assert client.pong().state == "serving"


def test_a_flood_is_dropped(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(max_messages_per_s=100, **transport)
    flood, good = served.client(), served.client()
    other = good.submit(1, max_tokens=50)
    for _ in range(150):
        flood.say(Health(1))
    for _ in range(200):
        message = flood.receive()
        if isinstance(message, Bye):
            break
        assert isinstance(message, Pong)
    assert isinstance(message, Bye)
    assert "max_messages_per_s" in message.message
    good.finish(other)
    assert other.token_ids == expected_tokens([1, 2, 3], 50)


def test_a_steady_client_below_the_rate_is_no_flood(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowlat.ipc.server.peer, "MESSAGES_WINDOW_S", 0.2)
    client = serve(max_messages_per_s=10).client()
    for _ in range(14):
        client.pong()
        time.sleep(0.025)


def test_connections_that_come_and_go_leave_nothing(serve: Serve, transport: dict[str, str]) -> None:
    served = serve(FakeEngine(0.001), **transport)
    good = served.client()
    for number in range(30):
        with zmtp_peer(served.server.endpoint, {}, [[encode(Hello())]]):
            pass
        with bare_socket(served.server.endpoint) as connection:  # not even ZMTP
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        client = RawClient(served.server.endpoint)
        client.submit(number, max_tokens=4000)
        client.close()
    eventually(lambda: num_clients(good) == 1 and not served.engine.busy)


def test_a_probe_of_the_living_is_ignored_by_a_client(serve: Serve) -> None:
    served = serve(endpoint="tcp://127.0.0.1:*")
    client = served.client()
    client.pong()
    router: Any = served.server._io._router  # type: ignore[union-attr]
    (peer,) = router.peers.values()
    router._timers.after(0.0, router._probe, peer.descriptor)
    client.say(Health(3))
    answers = [client.receive() for _ in range(2)]
    assert {answer.nonce for answer in answers if isinstance(answer, Pong)} == {0, 3}
    assert decode_server(encode(Pong(0, "serving", 0.0, 0, 0))) is not None
