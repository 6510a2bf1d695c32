"""A server's end, by every way there is: drained, terminated, killed, failed, hung, robbed."""

import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth
from fake_engine import FakeCodec, FakeEngine, FakeOutput, expected_tokens
from fake_process import fake_process
from raw_client import raw_client
from served import Serve, eventually

from lowlat.errors import ConfigError, LowlatError
from lowlat.ipc.limits import Limits
from lowlat.ipc.server import Curve, Server
from lowlat.ipc.server.threads import io_thread
from lowlat.ipc.wire import Bye, Drain, Error, Hello


def test_an_unread_log_stalls_nobody(tmp_path: Path) -> None:
    options = {"engine": {"step_s": 0.001}, "limits": {"max_bad_messages": 60_000}, "log": "json"}
    endpoint = f"ipc://{tmp_path}/s.sock"
    with (
        fake_process(tmp_path, subprocess.PIPE, **options) as server,
        raw_client(endpoint) as bad,
        raw_client(endpoint) as good,
    ):
        for _ in range(1500):
            bad.say_raw(b"\xff")
            bad.hear(Error)
        done = good.submit(1, max_tokens=300)
        good.finish(done)
        assert done.token_ids == expected_tokens([1, 2, 3], 300)
        server.send_signal(signal.SIGTERM)
        assert server.wait(5) == 0


@pytest.mark.parametrize("is_ignored", [False, True])
def test_the_terminals_end_drains_unless_it_is_ignored(tmp_path: Path, is_ignored: bool) -> None:
    with ExitStack() as stack:
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)  # as nohup leaves it
        try:
            server = stack.enter_context(fake_process(tmp_path, subprocess.PIPE))
        finally:
            signal.signal(signal.SIGHUP, before)
        client = stack.enter_context(raw_client(f"ipc://{tmp_path}/s.sock"))
        done = client.submit(1, max_tokens=100)
        client.wait_tokens(done, 1)
        server.send_signal(signal.SIGHUP)
        client.finish(done)
        assert done.token_ids == expected_tokens([1, 2, 3], 100)
        if is_ignored:
            assert server.poll() is None
        else:
            assert server.wait(5) == 0


def test_a_client_of_the_same_user_can_drain(serve: Serve) -> None:
    served = serve(FakeEngine(0.01))
    client, other = served.client(), served.client()
    done = other.submit(1, max_tokens=20)
    other.wait_tokens(done, 1)
    client.say(Drain(5.0))
    assert served.server.run() == 0
    assert client.hear(Bye).reason == "shutdown"
    other.finish(done)
    assert done.token_ids == expected_tokens([1, 2, 3], 20)
    assert served.engine.closed


def test_a_signal_that_another_thread_got_drains_too(serve: Serve) -> None:
    """The kernel may give it to any thread, and Python's handler runs in the main one, which waits."""
    served = serve(FakeEngine(0.01))
    client, before = served.client(), signal.getsignal(signal.SIGTERM)
    done = client.submit(1, max_tokens=20)
    client.wait_tokens(done, 1)

    def signal_itself() -> None:
        eventually(lambda: signal.getsignal(signal.SIGTERM) != before)
        time.sleep(0.1)  # the main thread waits by now
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    thread = threading.Thread(target=signal_itself)
    thread.start()
    assert served.server.run() == 0
    thread.join()
    client.finish(done)
    assert done.token_ids == expected_tokens([1, 2, 3], 20)
    assert signal.getsignal(signal.SIGTERM) == before and signal.set_wakeup_fd(-1) == -1
    assert served.server.run() == 0  # it has ended: there is nothing to wait for


def test_a_failure_returns_a_code_where_the_process_is_not_the_servers(serve: Serve) -> None:
    served = serve(FakeEngine(0.001, faults={9: "device"}, close_error=RuntimeError("the context is lost")))
    client = served.client()
    done = client.submit(1, [9])
    codes: list[int] = []
    runner = threading.Thread(target=lambda: codes.append(served.server.run()))
    runner.start()
    client.finish(done)
    runner.join(10)
    assert codes == [1]


def test_a_live_endpoint_cannot_be_taken(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s.sock"
    with fake_process(tmp_path) as server:
        second = Server(FakeEngine(), None, endpoint)
        with pytest.raises(ConfigError, match=f"process {server.pid}, holds"):
            second.start()
        with raw_client(endpoint) as client:
            client.finish(client.submit(1, max_tokens=3))


@pytest.mark.parametrize("robbed", ["missing", "stolen"])
def test_a_server_that_nobody_can_reach_any_more_ends(
    serve: Serve, tmp_path: Path, robbed: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_thread, "WATCH_EVERY_S", 0.1)
    served = serve(FakeEngine(0.001))
    client = served.client()
    path = tmp_path / "s.sock"
    path.unlink()
    thief = socket.socket(socket.AF_UNIX)
    with thief:
        if robbed == "stolen":
            thief.bind(str(path))
        assert served.server.run() == 1
    assert client.hear(Bye).reason == "internal"
    assert robbed in caplog.text
    assert path.exists() is (robbed == "stolen")


class Ending(BaseException):
    """An error that is no `Exception`, as a thread's end by force is none."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_text_thread_that_ends_ends_the_server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests would wait for it for ever, and health would say that all is well."""
    monkeypatch.setattr(io_thread, "WATCH_EVERY_S", 0.1)
    served = serve(codec=FakeCodec(fails=Ending()))
    client = served.client()
    client.submit_text(1, "hello")
    assert client.hear(Bye).reason == "internal"
    assert served.server.run() == 1


def test_a_decode_thread_that_ends_ends_the_server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve()
    client = served.client()

    def step() -> list[FakeOutput]:
        raise Ending

    monkeypatch.setattr(served.engine, "step", step)
    codes: list[int] = []
    runner = threading.Thread(target=lambda: codes.append(served.server.run()))
    runner.start()
    client.submit(1, max_tokens=3)
    assert client.hear(Bye).reason == "internal"
    runner.join(10)
    assert codes == [1]


def test_what_the_engines_maker_raises_is_raised(tmp_path: Path) -> None:
    def fail() -> FakeEngine:
        raise ConfigError("no such model")

    server = Server(fail, None, f"ipc://{tmp_path}/s.sock")
    with pytest.raises(ConfigError, match="no such model"):
        server.start()
    with pytest.raises(LowlatError, match="once"):
        server.start()
    Server(FakeEngine, None, f"ipc://{tmp_path}/s.sock").close()  # never started
    with Server(FakeEngine, None, f"ipc://{tmp_path}/s.sock") as again:
        assert again.exit_code is None
    assert again.exit_code == 0
    again.close()


def test_a_busy_port_is_refused(tmp_path: Path) -> None:
    engine = FakeEngine()
    with Server(FakeEngine(), None, "tcp://127.0.0.1:*") as server:
        with pytest.raises(ConfigError, match="cannot listen"):
            Server(engine, None, server.endpoint).start()
        with raw_client(server.endpoint) as client:
            client.finish(client.submit(1, max_tokens=3))
            client.say(Drain())
            assert client.hear(Error).code == "forbidden"  # over tcp nobody knows who it is
    assert engine.closed


def test_beyond_loopback_only_with_curve(tmp_path: Path) -> None:
    curve = Curve(tmp_path / "server.key_secret", tmp_path)
    for endpoint in ("tcp://0.0.0.0:*", "tcp://*:5555", "tcp://[::]:5555"):
        with pytest.raises(ConfigError, match="CURVE"):
            Server(FakeEngine(), None, endpoint)
        Server(FakeEngine(), None, endpoint, curve=curve).close()
    with pytest.raises(ConfigError, match="ipc://"):
        Server(FakeEngine(), None, f"ipc://{tmp_path}/s.sock", curve=curve)


def test_curve_admits_known_keys_alone(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.mkdir()
    public_file, secret_file = zmq.auth.create_certificates(tmp_path, "server")
    _, known_file = zmq.auth.create_certificates(clients, "known")
    _, stranger_file = zmq.auth.create_certificates(tmp_path, "stranger")
    server_key, _ = zmq.auth.load_certificate(public_file)
    curve = Curve(Path(secret_file), clients)
    with Server(FakeEngine(), None, "tcp://0.0.0.0:*", curve=curve) as server:
        endpoint = server.endpoint.replace("0.0.0.0", "127.0.0.1")
        keys: list[dict[str, Any]] = []
        for file in (known_file, stranger_file):
            public, secret = zmq.auth.load_certificate(file)
            keys.append({"curve_publickey": public, "curve_secretkey": secret, "curve_serverkey": server_key})
        with raw_client(endpoint, **keys[0]) as client:
            client.finish(client.submit(1, max_tokens=3))
        for refused in (keys[1], {}):
            with raw_client(endpoint, greet=False, **refused) as client:
                client.say(Hello())
                with pytest.raises(TimeoutError):
                    client.receive(0.3)


@pytest.mark.parametrize("wrong", ["certificate", "secret", "clients"])
def test_curve_keys_that_cannot_be_used(tmp_path: Path, wrong: str) -> None:
    public_file, secret_file = zmq.auth.create_certificates(tmp_path, "server")
    curve = {
        "certificate": Curve(tmp_path / "none", tmp_path),
        "secret": Curve(Path(public_file), tmp_path),
        "clients": Curve(Path(secret_file), tmp_path / "none"),
    }[wrong]
    with pytest.raises(ConfigError):
        Server(FakeEngine(), None, "tcp://127.0.0.1:*", curve=curve).start()


def test_many_starts_and_ends_leave_nothing(tmp_path: Path) -> None:
    limits = Limits(linger_s=0.0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        with Server(FakeEngine, None, f"ipc://{tmp_path}/s.sock", limits):
            pass
    assert len(os.listdir("/proc/self/fd")) <= before
