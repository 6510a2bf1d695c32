"""The blocking client against a scripted server: threads, forks, signals, ends, and what is left after."""

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq
from scripted_server import ScriptedServer, expected_text, expected_tokens, ids_of, ipc_url, quiet
from served import eventually
from socket_fixtures import OVER_EACH

from lowlat.errors import LowlatError, ServerGone, StreamError
from lowlat.ipc import Client, libzmq
from lowlat.ipc.client import protocol
from lowlat.ipc.client.connection import Connection
from lowlat.ipc.wire import Bye, Cancel, Credit, End, Health, Hello, Submit, Tokens, encode, pack_tokens


def test_text_and_tokens_come_whole_and_the_last_chunk_has_figures(server: ScriptedServer) -> None:
    with Client(server.url, name="test") as client:
        assert client.server.server == "scripted"
        chunks = list(client.generate([1, 2, 3], max_tokens=3000, logprobs=1))
        assert ids_of(chunks) == expected_tokens((1, 2, 3), 3000)
        assert "".join(chunk.text for chunk in chunks) == expected_text(ids_of(chunks))
        assert [chunk.finish_reason for chunk in chunks[-2:]] == [None, "length"]
        assert chunks[-1].metrics == {"completion_tokens": 3000}
        assert chunks[0].logprobs is not None
        assert chunks[0].logprobs[0].top == [(chunks[0].token_ids[0], -0.5)]
        assert ids_of(list(client.generate("abc", max_tokens=2))) == expected_tokens((3,), 2)
        assert client.health().state == "serving"
        assert client.stats() == {"slots": 4}
    assert server.wait_for(Hello)[0].name == "test"


@OVER_EACH
def test_many_threads_share_one_client(server: ScriptedServer) -> None:
    with Client(server.url, window=64) as client:

        def one(number: int) -> tuple[int, ...]:
            return ids_of(list(client.generate([number], max_tokens=400)))

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(one, range(32)))
            healths = list(pool.map(lambda _: client.health().nonce, range(32)))
    assert results == [expected_tokens((number,), 400) for number in range(32)]
    assert len(set(healths)) == 32


@OVER_EACH
def test_a_thread_that_waits_does_not_hold_up_another(server: ScriptedServer) -> None:
    server.handlers[Submit] = lambda s, i, message, b: [] if message.text == "wait" else None
    with Client(server.url) as client:
        waiting = client.generate("wait")
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                next(waiting)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        begin = time.perf_counter()
        assert len(list(client.generate("go", max_tokens=50))) == 51
        assert time.perf_counter() - begin < 1.0
        with pytest.raises(LowlatError, match="another thread or task reads"):
            next(waiting)
        client.close()
        thread.join(5.0)
        assert not thread.is_alive()
    assert isinstance(failures[0], LowlatError)


@pytest.mark.parametrize("how", ["break", "close", "with", "del", "collect"])
def test_leaving_early_cancels(server: ScriptedServer, how: str) -> None:
    with Client(server.url, window=16) as client:
        generation = client.generate("a", max_tokens=1000)
        next(generation)
        if how == "break":
            del generation
            for _ in client.generate("a", max_tokens=1000):
                break
        elif how == "close":
            generation.close()
            generation.close()
            assert list(generation) == []
        elif how == "with":
            with generation:
                pass
        elif how == "del":
            del generation
        else:
            cycle: list[Any] = [generation]
            cycle.append(cycle)
            del generation, cycle
            gc.collect()
        server.wait_for(Cancel)
        assert len(list(client.generate("b", max_tokens=5))) == 6


@OVER_EACH
def test_a_consumer_that_stops_reading_is_sent_no_more_than_its_window(server: ScriptedServer) -> None:
    with Client(server.url, window=100) as client:
        generation = client.generate("a", max_tokens=5000)
        next(generation)
        client.health()  # whatever the server could send has come by now
        (running,) = server.running.values()
        assert running.sent == 100
        assert not [message for message in server.received if isinstance(message, Credit)]
        assert len(ids_of(list(generation))) == 4999


def test_a_server_that_was_replaced_while_nobody_waited(tmp_path: Path) -> None:
    with ScriptedServer(ipc_url(tmp_path)) as first, Client(first.url) as client:
        client.health()
        first.stop()
        eventually(lambda: client._connections[0].has_news)
        with ScriptedServer(first.url):
            assert len(list(client.generate("b", max_tokens=5))) == 6


def is_followed(connection: Connection) -> bool:
    """Whether a message waits after those that were taken, or was taken with them and ended the connection."""
    return connection.protocol.failure is not None or libzmq.has_message(connection._dealer._dealer)


def test_what_came_behind_a_chunk_is_known_to_the_next_call(server: ScriptedServer) -> None:
    """A reader has its chunk as soon as it is there; then no descriptor tells of a message that came with it.

    Asking whether a message waits takes the descriptor's signal, so that only the socket tells the client.
    """

    def answer(server: ScriptedServer, identity: bytes, message: Any, body: bytes) -> list[bytes]:
        time.sleep(0.05)  # until the reader sleeps
        del server.handlers[Submit]
        return [encode(Tokens(message.number, 0, pack_tokens([7]))), encode(Bye("dropped"))]

    with Client(server.url) as client:
        for _ in range(8):
            server.handlers[Submit] = answer
            generation = client.generate("a", max_tokens=100)
            assert next(generation).token_ids == (7,)
            eventually(functools.partial(is_followed, client._connections[0]))
            assert len(list(client.generate("b", max_tokens=5))) == 6  # over a connection that lives
            with pytest.raises(ServerGone, match="dropped"):
                next(generation)
    assert len(server.wait_for(Hello, 9)) == 9


@OVER_EACH
def test_a_request_that_left_by_half_ends_its_connection(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Ctrl-C falls between its frames: what is sent next may not stand after them."""
    whole = libzmq._send

    def first_alone(socket: Any, frame: bytes, flags: int) -> None:
        if not flags & zmq.SNDMORE:
            raise KeyboardInterrupt
        whole(socket, frame, flags)

    with Client(server.url) as client:
        assert len(list(client.generate([1], max_tokens=2))) == 3
        with monkeypatch.context() as patch:
            patch.setattr(libzmq, "_send", first_alone)
            with pytest.raises(KeyboardInterrupt):
                client.generate([1], max_tokens=2)
        assert len(list(client.generate([1], max_tokens=2))) == 3
    assert len(server.wait_for(Hello, 2)) == 2


@OVER_EACH
def test_a_frame_behind_the_first_is_dropped(server: ScriptedServer) -> None:
    def answer(server: ScriptedServer, identity: bytes, message: Any, body: bytes) -> list[bytes]:
        answers = [encode(Tokens(message.number, place, pack_tokens([place]))) for place in range(3)]
        for frame in (*answers, encode(End(message.number, 3, 3, "length"))):
            server._router.send_multipart([identity, frame, b"more", b""])
            time.sleep(0.01)
        return []

    server.handlers[Submit] = answer
    with Client(server.url) as client:
        for _ in range(2):
            assert ids_of(list(client.generate("a", max_tokens=3))) == (0, 1, 2)


def test_a_silent_server_is_gone_within_five_seconds(server: ScriptedServer, soon: None) -> None:
    server.handlers = {Submit: quiet, Health: quiet}
    with Client(server.url) as client:
        begin = time.perf_counter()
        with pytest.raises(ServerGone, match="nothing came from the server"):
            list(client.generate("a"))
        assert protocol.SILENCE_S <= time.perf_counter() - begin < 10 * protocol.SILENCE_S
    assert 10 * (protocol.SILENCE_S + protocol.HEARTBEAT_INTERVAL_S) <= 5.0
    assert len(server.wait_for(Health)) >= 2


def test_a_slow_server_is_not_gone(server: ScriptedServer, soon: None) -> None:
    server.handlers = {Submit: quiet}
    with Client(server.url) as client:
        begin = time.perf_counter()
        with pytest.raises(StreamError, match="timeout_s") as caught:
            list(client.generate("a", timeout_s=0.9))
        assert time.perf_counter() - begin > 0.85 > 2 * protocol.SILENCE_S
        assert caught.value.code == "timeout"
        server.wait_for(Cancel)


FORK = """
import os, sys
from lowlat.errors import LowlatError
from lowlat.ipc import Client

with Client(sys.argv[1], window=16) as client:
    generation = client.generate("a", max_tokens=200)
    first = next(generation)
    child = os.fork()
    if child == 0:
        said = []
        try:
            for call in (client.health, lambda: next(generation), lambda: client.generate("b"), generation.cancel):
                try:
                    call()
                except LowlatError as error:
                    said.append("fork" in str(error))
            client.close()
            generation.close()
        finally:
            os._exit(0 if said == [True] * 4 else 1)
    assert os.waitpid(child, 0)[1] == 0
    print(len([first, *generation]))
"""


@OVER_EACH
def test_a_fork_says_so_and_the_parent_goes_on(server: ScriptedServer) -> None:
    """In a process of its own: this one has threads, and whoever forks it may wait for their locks for ever."""
    # Python 3.12 warns of threads, of which a client has one, and libzmq more
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "201\n", "")
    assert not [message for message in server.received if isinstance(message, Cancel)]


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_leaves_the_client_usable(server: ScriptedServer) -> None:
    server.handlers[Submit] = lambda s, i, message, b: [] if message.text == "wait" else None
    with Client(server.url) as client:
        for _ in range(3):
            timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                next(client.generate("wait"))
            timer.join()
            assert len(list(client.generate("go", max_tokens=20))) == 21
    assert len(server.wait_for(Cancel, 3)) == 3
    assert len(server.wait_for(Hello)) == 1  # the same connection all the time


def test_two_threads_may_close_a_client_at_once(server: ScriptedServer) -> None:
    class Emptied(list[Any]):
        def __bool__(self) -> bool:
            """Look, and let another thread take all before this one does."""
            had_any = len(self) > 0
            self.clear()
            return had_any

    client = Client(server.url)
    client.connect()
    (connection,) = client._connections
    client._connections = Emptied(client._connections)
    client.close()
    client.close()
    assert connection.protocol.failure is not None


def test_an_unclosed_client_does_not_keep_the_interpreter_alive(server: ScriptedServer) -> None:
    """With a stream, and a thread that waits for another."""
    code = f"""
import sys, threading
from lowlat.ipc import Client
client = Client({server.url!r}, window=8)
stream = client.generate("a", max_tokens=1000)
next(stream)
def read():
    for _ in client.generate("wait", max_tokens=10): pass
threading.Thread(target=read, daemon=True).start()
print("done", flush=True)
"""
    server.handlers[Submit] = lambda s, i, message, b: [] if message.text == "wait" else None
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@OVER_EACH
def test_descriptors_are_given_back(server: ScriptedServer) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with Client(server.url) as client:
        client.health()
    gc.collect()
    before = descriptors()
    for _ in range(10):
        with Client(server.url) as client:
            list(client.generate("a", max_tokens=2))
        unclosed = Client(server.url)
        unclosed.health()
        del unclosed
    end = time.monotonic() + 5.0
    while descriptors() > before + 10 and time.monotonic() < end:  # the server gives up its ends a little later
        time.sleep(0.01)
    assert descriptors() <= before + 10
