"""A first token does not wait for work that other threads can do while the I/O thread sleeps."""

import threading
import time
from typing import Any

import pytest
from fake_engine import FakeCodec, FakeEngine, expected_tokens
from served import Serve, eventually

from lowlat.ipc.server.generations.requests import Requests
from lowlat.ipc.server.peer import Peer
from lowlat.ipc.server.peers import Peers
from lowlat.ipc.server.threads import decode_thread, io_thread
from lowlat.ipc.server.threads.events import Prepared
from lowlat.ipc.wire import Bye, Drain, End, Tokens

DECODE, IO = "lowlat-decode", "lowlat-io"
Sent = list[tuple[type, str]]


SELDOM = {"heartbeat_interval_s": 30.0, "heartbeat_timeout_s": 60.0}


@pytest.fixture
def sleepy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing wakes the I/O thread now and then."""
    monkeypatch.setattr(io_thread, "WATCH_EVERY_S", 30.0)
    monkeypatch.setattr(decode_thread, "FIGURES_EVERY_S", 30.0)
    monkeypatch.setattr(decode_thread, "FIGURES_AT_REST_S", 30.0)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Record the messages sent for requests, and the threads that sent them."""
    told: Sent = []
    send = Peers.send

    def note(peers: Peers, peer: Peer, message: Any) -> bool:
        if isinstance(message, Tokens | End):
            told.append((type(message), threading.current_thread().name))
        return send(peers, peer, message)

    monkeypatch.setattr(Peers, "send", note)
    return told


def test_the_decode_thread_sends_first_tokens_and_the_io_thread_the_rest(
    serve: Serve, sent: Sent, transport: dict[str, str]
) -> None:
    client = serve(FakeEngine(0.02), **transport).client()
    first: list[str] = []
    for number in range(10):
        request = client.submit(number, [7], max_tokens=3)
        client.finish(request)
        assert request.token_ids == expected_tokens([7], 3)
        assert {thread for _, thread in sent[1:]} == {IO}
        first.append(sent[0][1])
        sent.clear()
    assert first.count(DECODE) >= 5  # the others came while the I/O thread was awake


def test_first_tokens_that_are_also_the_last(serve: Serve, sent: Sent) -> None:
    client = serve(FakeEngine(0.02)).client()
    for number in range(10):
        request = client.submit(number, [7], max_tokens=1)
        client.finish(request)
        assert request.token_ids == expected_tokens([7], 1)
    assert sent.count((Tokens, DECODE)) == sent.count((End, DECODE)) >= 5
    assert client.stats()["time_to_first_token_ms"]["count"] == 10


def test_a_step_of_several_requests_is_the_io_threads(serve: Serve, sent: Sent) -> None:
    client = serve(FakeEngine(0.05)).client()
    first = client.submit(0, [7], max_tokens=8)
    client.wait_tokens(first, 1)
    second = client.submit(1, [8], max_tokens=2)
    client.finish(first, second)
    assert (first.token_ids, second.token_ids) == (expected_tokens([7], 8), expected_tokens([8], 2))
    assert [thread for _, thread in sent].count(DECODE) <= 1


@pytest.mark.usefixtures("sleepy")
def test_what_is_due_after_a_first_token_is_done_in_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The I/O thread sleeps until something is due; what the decode thread adds may be due earlier."""
    done = threading.Event()
    threads: set[str] = set()
    send = Peers.send

    def send_and_add(peers: Peers, peer: Peer, message: Any) -> bool:
        if isinstance(message, Tokens):
            threads.add(threading.current_thread().name)
            peers._timers.after(0.05, done.set)
        return send(peers, peer, message)

    monkeypatch.setattr(Peers, "send", send_and_add)
    client = serve(FakeEngine(0.05), **SELDOM).client()
    for number in range(2):  # after the first one's step the engine's figures are told
        done.clear()
        client.finish(client.submit(number, [7], max_tokens=1))
        assert done.wait(5.0)
    assert DECODE in threads


@pytest.mark.usefixtures("sleepy")
def test_a_drained_server_ends_with_its_last_first_token(serve: Serve, sent: Sent) -> None:
    served = serve(FakeEngine(0.2), **SELDOM)
    client = served.client()
    client.finish(client.submit(0, [7], max_tokens=1))  # after its step the engine's figures are told
    sent.clear()
    request = client.submit(1, [7], max_tokens=1)
    eventually(lambda: served.engine.num_steps == 2)
    client.say(Drain(30.0))
    client.finish(request)
    ended = time.monotonic()
    assert client.hear(Bye).reason == "shutdown"
    assert time.monotonic() - ended < 3.0  # and not when something else was due
    assert request.token_ids == expected_tokens([7], 1)


def test_the_text_thread_hands_over_what_it_prepared(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    prepared = Requests.prepared

    def note(requests: Requests, event: Prepared) -> None:
        threads.append(threading.current_thread().name)
        prepared(requests, event)

    monkeypatch.setattr(Requests, "prepared", note)
    client = serve(FakeEngine(0.005, text=True), FakeCodec(0.02)).client()
    for number in range(10):
        request = client.submit_text(number, "abc", max_tokens=2)
        client.finish(request)
        assert request.token_ids == expected_tokens(b"abc", 2)
    refused = client.submit_text(10, "", max_tokens=2)
    client.finish(refused)
    assert refused.error is not None and refused.error.code == "invalid"
    assert threads.count("lowlat-text") >= 5
    assert set(threads) <= {"lowlat-text", IO}


def test_a_failure_of_what_others_do_ends_the_server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(FakeEngine(0.02))
    client = served.client()

    def fail(requests: Requests) -> None:
        if threading.current_thread().name == DECODE:
            raise ValueError("a secret of the prompt")
        flush(requests)

    flush = Requests.flush
    monkeypatch.setattr(Requests, "flush", fail)
    for number in range(20):
        request = client.submit(number, [7], max_tokens=1)
        try:
            client.finish(request)
        except AssertionError as error:
            assert isinstance(error.args[0], Bye)
            assert error.args[0].reason == "internal"
            return
        if request.end is not None and request.end.code is not None:
            assert request.end.code == "internal"
            return
    raise AssertionError("the decode thread never sent a first token")


def test_cancelled_at_its_first_token(serve: Serve) -> None:
    served = serve(FakeEngine(0.005))
    client = served.client()
    for number in range(50):
        request = client.submit(number, [7], max_tokens=100)
        client.wait_tokens(request, 1)
        client.cancel(number)
        client.finish(request)
        assert request.end is not None and request.end.finish_reason == "cancelled"
        assert request.token_ids == expected_tokens([7], 100)[: len(request.token_ids)]
    assert not served.engine.busy
