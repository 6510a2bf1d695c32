"""How a gateway is reached and left: addresses, Unix sockets, other sites' pages, signals amid answers."""

import http.client
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, expected_text, expected_tokens
from gateway import KEY, RunningGateway, gateway_at, running_gateway
from served import eventually, serve_in
from serving_process import gateway_of

from lowlat.errors import ConfigError
from lowlat.ipc.limits import Limits
from lowlat.serving import gateway as gateway_process
from lowlat.serving.gateway import http_gateway
from lowlat.serving.http.auth import origins_of
from lowlat.serving.http.paths import plain_path
from lowlat.serving.http.server import Address, check_free, listening, parse_address

ORIGIN = "http://localhost:3000"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
    "authorization": "",
}


class OverUnix(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        """See HTTPConnection."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def test_a_unix_socket_serves_whoever_reaches_it_with_the_key(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    address = parse_address(f"unix:{path}")
    assert address.local and address.url() == f"http+unix://{str(path).replace('/', '%2F')}"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # of a process that was killed
    with gateway_at(f"ipc://{tmp_path}/none.sock", connect_timeout_s=0.05, host=address.host, path=path):
        with pytest.raises(ConfigError, match=f"process {os.getpid()}, holds"):
            check_free(address)
        for key, status in ((KEY, 503), ("wrong", 401)):
            connection = OverUnix(path)
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
            assert connection.getresponse().status == status
            connection.close()
    assert not path.exists()
    check_free(address)


@pytest.mark.parametrize("mode", [None, "600", "660", "666"])
def test_a_unix_socket_s_file_is_its_owner_s_alone_unless_asked(mode: str | None, tmp_path: Path) -> None:
    """Whatever the folder lets in, and whatever the process's umask is."""
    tmp_path.chmod(0o755)
    path = tmp_path / "http.sock"
    before = os.umask(0)
    try:
        with listening(parse_address(f"unix:{path}") if mode is None else parse_address(f"unix:{path}", mode)):
            assert stat.S_IMODE(path.stat().st_mode) == int(mode or "600", 8)
    finally:
        os.umask(before)
    tmp_path.chmod(0o775)
    with pytest.raises(ConfigError, match="must not be writable by others"):
        check_free(parse_address(f"unix:{path}", "666"))


def test_any_address_is_any_of_both_families(tmp_path: Path) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    with gateway_at(f"ipc://{tmp_path}/none.sock", connect_timeout_s=0.05, host="::") as bound:
        for host in ("127.0.0.1", "::1"):
            assert RunningGateway(Address(host, bound.port)).ask("/health")[0] == 503


def test_pages_of_named_origins_may_ask(tmp_path: Path) -> None:
    with running_gateway(tmp_path, origins=origins_of(f" {ORIGIN}, null")) as gateway:
        for origin, allowed in ((ORIGIN, True), ("null", True), ("http://evil.example", False)):
            own = {"origin": origin}
            status, _, headers = gateway.ask("/v1/chat/completions", method="OPTIONS", headers=own | PREFLIGHT)
            assert status == (200 if allowed else 400)
            assert headers["access-control-allow-origin"] == (origin if allowed else None)
            body = {"model": "fake", "prompt": "Hi", "max_tokens": 2, "stream": True}
            for key, expected in ((KEY, 200), ("wrong", 401)):
                status, _, headers = gateway.ask(
                    "/v1/completions", body, headers=own | {"authorization": f"Bearer {key}"}
                )
                assert (status, headers["access-control-allow-origin"]) == (expected, origin if allowed else None)


def test_pages_of_no_other_origin_may_ask_unless_named(gateway: RunningGateway) -> None:
    status, _, headers = gateway.ask("/v1/models", method="OPTIONS", headers={"origin": ORIGIN} | PREFLIGHT)
    assert status == 401 and headers["access-control-allow-origin"] is None
    assert origins_of(None) == [] and origins_of("*") == ["*"]
    for wrong in ("localhost:3000", "http://a/", "http://a.b/c", "a b", "http://A.b", "https://a.b:443"):
        with pytest.raises(ConfigError, match="http_origins"):
            origins_of(wrong)


def test_only_what_stands_before_a_path_is_passed_over() -> None:
    plain = {
        "http://a.b//v1//models/": "/v1/models",
        "HTTPS://a.b": "/",
        "//": "/",
        "/v1/xhttp://a.b/y": "/v1/xhttp:/a.b/y",
    }
    assert {path: plain_path(path) for path in plain} == plain


@contextmanager
def process(*arguments: object) -> Iterator[tuple["subprocess.Popen[str]", Address]]:
    """A gateway in a process of its own."""
    command = [sys.executable, "-P", "-m", "lowlat.cli", "http", "0", "--json", *map(str, arguments)]
    with subprocess.Popen(
        command, env=os.environ | {"LOWLAT_API_KEY": KEY}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout is not None and select.select([running.stdout], [], [], 60)[0]
            yield running, Address("127.0.0.1", int(json.loads(running.stdout.readline())["url"].rpartition(":")[2]))
        finally:
            running.kill()


def asked(address: Address, prompt: int, max_tokens: int, **options: Any) -> http.client.HTTPConnection:
    """A connection on which an answer of tokens is under way."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=20)
    body = {"model": "fake", "prompt": [prompt], "max_tokens": max_tokens, **options}
    connection.request("POST", "/v1/completions", json.dumps(body), {"authorization": f"Bearer {KEY}"})
    return connection


def takes_connections(address: Address) -> bool:
    """Whether somebody listens; who is in the listener's queue as it closes is reset, and knows no more than before."""
    try:
        socket.create_connection((address.host, address.port)).close()
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:
        pass
    return True


def test_sigterm_lets_answers_end_and_tells_those_that_take_too_long(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    steps = threading.Semaphore(5)  # that the engine may take: the short answer has more, and the long ones far more
    engine = FakeEngine(0.001, text=True, on_step=lambda: steps.acquire(timeout=10))
    with (
        serve_in(tmp_path, engine, None, Limits(), {}) as served,
        process(f"--endpoint={served.server.endpoint}", "--drain-s=0.6") as (running, address),
    ):
        short, long = asked(address, 1, 40, stream=True), asked(address, 2, 4000, stream=True)
        whole, idle = asked(address, 3, 4000), http.client.HTTPConnection(address.host, address.port, timeout=20)
        idle.request("GET", "/health")
        idle.getresponse().read()
        answers = [short.getresponse(), long.getresponse()]
        running.terminate()
        eventually(lambda: not takes_connections(address))
        steps.release(45)
        texts = [answer.read().decode() for answer in answers]
        answer = whole.getresponse()
        error = json.loads(answer.read())["error"]
        assert running.wait(5) == 0
        assert running.stderr is not None and running.stderr.read() == ""
        steps.release(10_000)
    said = [json.loads(line[6:]) for line in texts[0].splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in said) == expected_text(expected_tokens([1], 40))
    assert texts[0].endswith("data: [DONE]\n\n")
    last = json.loads(texts[1].rstrip().rpartition("\n")[2].removeprefix("data: "))
    assert last["error"]["code"] == "gone" and "the gateway ends" in last["error"]["message"]
    assert answer.status == 503 and "the gateway ends" in error["message"]
    for connection in (short, long, whole, idle):
        connection.close()


def test_a_gateway_before_its_server_says_so(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/none.sock"
    with process(f"--endpoint={endpoint}") as (running, _):
        running.terminate()
        assert running.wait(10) == 0 and running.stderr is not None
        assert running.stderr.read() == f"no server is at {endpoint} yet: requests are answered with 503 until one is\n"


def test_a_gateway_leaves_sigterm_to_its_server_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service manager sends SIGTERM to all processes: answers are finished nevertheless."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("LOWLAT_API_KEY", KEY)
    with serve_in(tmp_path, FakeEngine(0.01, text=True), None, Limits(), {}) as served:
        with http_gateway("0", served.server.endpoint, None, None) as facts:
            address, pid = Address("127.0.0.1", int(facts["url"].rpartition(":")[2])), gateway_of(os.getpid())
            connection = asked(address, 1, 60, stream=True)
            answer = connection.getresponse()
            os.kill(pid, signal.SIGTERM)
            served.server.drain()
            assert answer.read().endswith(b"data: [DONE]\n\n")
            connection.close()
            assert Path(f"/proc/{pid}").exists()
            begin = time.monotonic()
        assert time.monotonic() - begin < gateway_process.END_S and not Path(f"/proc/{pid}").exists()


def test_a_gateway_that_cannot_open_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_process, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name))
    with pytest.raises(ConfigError, match=r"needs uvicorn: pip install 'lowlat\[http\]'"):
        gateway_process.check_gateway("8000")
    with pytest.raises(ConfigError, match="did not open"), http_gateway("1:2:3", "ipc:///none.sock", None, None):
        pass
