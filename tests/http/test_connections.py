"""Connections that ask nothing, too slowly or too much: they are closed in time and keep no caller out."""

import json
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from gateway import KEY, RunningGateway, ScriptedEngine, running_gateway
from served import eventually

from lowlat.serving.http.connections import ConnectionLimits
from lowlat.serving.http.streaming import MAX_BODY_BYTES

ENDLESS = 1 << 30
BODY = b'{"model": "fake", "prompt": "Hi", "max_tokens": 2}'
SLOW_BODY = b'{"model": "fake", "prompt": "Hi", "max_tokens": 4000, "stream": true}'
LIMITS = ConnectionLimits(
    headers_s=0.4, answer_s=0.5, idle_s=0.4, caller_idle_s=1.2, linger_s=0.4, max_linger_bytes=1 << 20,
    stranger_s=0.02, max_strangers=8, max_callers=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway with short times and few connections."""
    with running_gateway(tmp_path_factory.mktemp("quick"), ScriptedEngine(step_s=0.002), connections=LIMITS) as found:
        yield found


def connected(gateway: RunningGateway) -> socket.socket:
    return socket.create_connection((gateway.address.host, gateway.address.port), timeout=10)


def request(line: str, body: bytes = b"", *headers: str, key: bool = True) -> bytes:
    """A request's bytes."""
    lines = [f"{line} HTTP/1.1", "host: localhost", *headers]
    lines += [f"authorization: Bearer {KEY}"] * key
    if body and not any(header.startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def rest(caller: socket.socket) -> bytes:
    """All that comes until the connection is closed, or broken."""
    answer = b""
    try:
        while piece := caller.recv(1 << 16):
            answer += piece
    except ConnectionResetError:
        pass
    return answer


def answered(caller: socket.socket) -> bytes:
    """One whole answer that says how long it is."""
    answer = b""
    while not (found := re.search(rb"content-length: (\d+)", answer)) or len(answer.partition(b"\r\n\r\n")[2]) < int(
        found[1]
    ):
        piece = caller.recv(1 << 16)
        assert piece, answer
        answer += piece
    return answer


def closed_after(caller: socket.socket) -> float:
    """The seconds until the other side closes."""
    begin = time.monotonic()
    rest(caller)
    return time.monotonic() - begin


@contextmanager
def many(gateway: RunningGateway, number: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that stay open, on each of which these bytes were sent."""
    with ExitStack() as stack:
        callers = [stack.enter_context(connected(gateway)) for _ in range(number)]
        for caller in callers:
            caller.sendall(sent)
        yield callers


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTT", request("POST /v1/completions", b"{", "content-length: 99", key=False)]
)
def test_strangers_keep_no_caller_out(quick: RunningGateway, sent: bytes) -> None:
    with many(quick, 5 * LIMITS.max_strangers, sent):
        for _ in range(3):
            assert quick.ask("/v1/models")[0] == 200


def test_many_who_come_at_once_are_all_answered(tmp_path: Path) -> None:
    """As a program that asks for hundreds of answers together: its connections come before any of its requests."""
    limits = ConnectionLimits(max_strangers=8, stranger_s=5.0)
    with running_gateway(tmp_path, connections=limits) as gateway, many(gateway, 40) as callers:
        for caller in callers:
            caller.sendall(request("GET /v1/models", b"", "connection: close"))
        assert all(rest(caller).startswith(b"HTTP/1.1 200") for caller in callers)


def test_of_callers_one_that_asks_nothing_is_let_go(quick: RunningGateway) -> None:
    with many(quick, LIMITS.max_callers, request("GET /v1/models")) as idle:
        for caller in idle:
            assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert quick.ask("/v1/models")[0] == 200
        assert closed_after(idle[0]) < 0.5


def test_callers_that_are_all_busy_are_bounded_by_name(quick: RunningGateway) -> None:
    with many(quick, LIMITS.max_callers, request("POST /v1/completions", SLOW_BODY)) as busy:
        for caller in busy:
            assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200")
        status, answer, headers = quick.ask("/v1/models")
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "too_many_connections", "1")
        assert quick.ask("/health", headers={"authorization": ""})[0] == 200
    eventually(lambda: quick.ask("/v1/models")[0] == 200)


def test_callers_who_are_gone_take_no_place(quick: RunningGateway) -> None:
    for _ in range(4 * LIMITS.max_callers):
        with connected(quick) as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
            caller.sendall(request("POST /v1/completions", SLOW_BODY))
    eventually(lambda: quick.ask("/v1/models")[0] == 200)


def test_who_asks_nothing_or_slowly_is_closed(quick: RunningGateway) -> None:
    cases = [
        (b"", LIMITS.headers_s),
        (b"GET / HTTP/1.1\r\nhost: loc", LIMITS.headers_s),
        (request("GET /", key=False), LIMITS.idle_s),
        (request("GET /v1/models"), LIMITS.caller_idle_s),
        (request("GET /", key=False) + b"GET / HTTP/1.1\r\nho", LIMITS.headers_s),
    ]
    with many(quick, len(cases)) as callers, ThreadPoolExecutor(len(cases)) as pool:
        for caller, (sent, _) in zip(callers, cases, strict=True):
            caller.sendall(sent)
        times = list(pool.map(closed_after, callers))
    for seconds, (sent, expected_s) in zip(times, cases, strict=True):
        assert 0.5 * expected_s < seconds < expected_s + 1.0, sent


def test_headers_that_trickle_are_cut_off(quick: RunningGateway) -> None:
    with connected(quick) as caller:
        begin = time.monotonic()
        caller.sendall(request("GET /v1/models"))
        assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with pytest.raises(OSError):
            for byte in b"GET / HTTP/1.1\r\nx: " + b"x" * 1000:
                caller.sendall(bytes([byte]))
                time.sleep(0.02)
        assert time.monotonic() - begin < LIMITS.headers_s + 1.5


def test_answers_that_a_stranger_does_not_read_are_cut_off(quick: RunningGateway) -> None:
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # or megabytes count as read
        caller.settimeout(10)
        caller.connect((quick.address.host, quick.address.port))
        caller.sendall(request("GET /vendor/markdown-it.mjs", key=False) * 200)
        time.sleep(LIMITS.answer_s + LIMITS.idle_s + 0.2)
        assert 0 < rest(caller).count(b"HTTP/1.1 200") < 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request("POST /v1/completions", b"", f"content-length: {ENDLESS}", key=False), 401),
        (request("POST /v1/completions", b"", "transfer-encoding: chunked", key=False), 401),
        (request("POST /v1/completions", b"", f"content-length: {ENDLESS}", "expect: 100-continue", key=False), 401),
        (request("POST /v1/nothing", b"", f"content-length: {ENDLESS}"), 404),
        (request("POST /v1/models", b"", f"content-length: {ENDLESS}"), 405),
        (request("POST /health", b"", f"content-length: {ENDLESS}", key=False), 405),
        (request("POST /v1/completions", b"", f"content-length: {ENDLESS}"), 413),
    ],
)
def test_a_body_that_is_not_wanted_is_not_read(quick: RunningGateway, sent: bytes, status: int) -> None:
    with connected(quick) as caller:
        caller.sendall(sent)
        answer = caller.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 %d" % status) and b"connection: close\r\n" in answer.lower()
        assert b"100 Continue" not in answer
        num_sent, begin = 0, time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < begin + 5:
                num_sent += caller.send(b"1\r\nx\r\n" * 10_000 if b"chunked" in sent else bytes(1 << 16))
        assert num_sent < 32 << 20  # what was dropped, and what buffers of the kernel hold
        assert time.monotonic() - begin < LIMITS.linger_s + 2


def test_a_refusal_reaches_who_still_sends(gateway: RunningGateway) -> None:
    for body, key, status in ((bytes(1 << 20), False, 401), (bytes(MAX_BODY_BYTES + 1), True, 413)):
        headers = {} if key else {"authorization": ""}
        assert gateway.ask("/v1/completions", body, headers=headers)[0] == status


def test_a_chunked_body_without_an_end_is_cut_off(quick: RunningGateway) -> None:
    with connected(quick) as caller:
        caller.sendall(request("POST /v1/completions", b"", "transfer-encoding: chunked"))
        chunk = b"%x\r\n%b\r\n" % (1 << 16, bytes(1 << 16))
        for _ in range((MAX_BODY_BYTES >> 16) + 1):
            caller.sendall(chunk)
        assert caller.recv(1 << 16).startswith(b"HTTP/1.1 413")


def test_a_refusal_whose_body_has_come_keeps_the_connection(quick: RunningGateway) -> None:
    with connected(quick) as caller:
        for _ in range(3):
            caller.sendall(request("POST /v1/completions", BODY, key=False))
            answer = answered(caller)
            assert answer.startswith(b"HTTP/1.1 401") and b"connection: close" not in answer
        caller.sendall(request("POST /v1/completions", BODY))
        assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_body_that_waits_to_be_asked_for_is(quick: RunningGateway) -> None:
    with connected(quick) as caller:
        caller.sendall(request("POST /v1/completions", b"", f"content-length: {len(BODY)}", "expect: 100-continue"))
        assert caller.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        caller.sendall(BODY)
        assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_requests_sent_together_are_answered_in_order(quick: RunningGateway) -> None:
    last = request("GET /v1/nothing", b"", "connection: close")
    with connected(quick) as caller:
        caller.sendall(request("GET /v1/models") + request("POST /v1/completions", BODY) + request("HEAD /") + last)
        answer = rest(caller)
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"200", b"200", b"404"]
    assert b'"object":"text_completion"' in answer and b"<html" not in answer.lower()


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        *[("HEAD", "/", False, 200), ("HEAD", "/v1/models", False, 401), ("HEAD", "/v1/models", True, 200)],
        *[("OPTIONS", "/v1/models", False, 401), ("OPTIONS", "/v1/completions", True, 405)],
        ("TRACE", "/", False, 405),
    ],
)
def test_other_methods_have_answers(quick: RunningGateway, method: str, path: str, key: bool, status: int) -> None:
    with connected(quick) as caller:
        caller.sendall(request(f"{method} {path}", b"", "connection: close", key=key))
        head, _, body = rest(caller).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status) and bool(body) == (method != "HEAD")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * (1 << 17) + b"\r\n\r\n",
        b"GET /" + b"x" * (1 << 17),
        b"".join([b"GET / HTTP/1.1\r\n", *[b"x%d: x\r\n" % number for number in range(20_000)]]),
        b"nonsense\r\n\r\n",
        bytes(100),
    ],
)
def test_headers_that_are_huge_or_none_are_refused(quick: RunningGateway, sent: bytes) -> None:
    with connected(quick) as caller:
        with suppress(OSError):
            caller.sendall(sent)
        assert closed_after(caller) < 1.5
    assert quick.ask("/v1/models")[0] == 200


SCARCE = """
import asyncio, logging, resource, socket, sys
from lowlat.serving.descriptors import raise_descriptor_limit
from lowlat.serving.http.acceptor import Acceptor

logging.basicConfig(format="%(message)s")
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))
assert raise_descriptor_limit() == hard
resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))

async def main():
    open_ones = []
    class Protocol(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport
            open_ones.append(self)
            transport.write(b"x")
    asked = []
    listener = socket.create_server(("127.0.0.1", 0), backlog=200)
    acceptor = Acceptor(listener, Protocol, lambda: asked.append(1))
    print(listener.getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    async def line():
        return await loop.run_in_executor(None, sys.stdin.readline)
    await line()
    print(len(open_ones), len(asked), flush=True)
    for one in open_ones:
        one.transport.close()
    await line()
    print(len(open_ones), flush=True)
    acceptor.close()

asyncio.run(main())
"""


def test_a_process_without_descriptors_waits_quietly_and_recovers() -> None:
    command = [sys.executable, "-c", SCARCE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process, ExitStack() as stack:  # type: ignore[call-overload]
        assert process.stdin and process.stdout and process.stderr
        port = int(process.stdout.readline())
        callers = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(45)]
        time.sleep(0.5)
        process.stdin.write("\n")
        process.stdin.flush()
        taken, asked = map(int, process.stdout.readline().split())
        assert taken < 40 and 2 <= asked < 20
        for caller in callers:
            assert caller.recv(1) == b"x"  # those that waited, too
        _, log = process.communicate("\n", timeout=20)
        assert log.count("no connection can be accepted now") == 1 and len(log.splitlines()) == 1


@pytest.mark.second
def test_a_low_soft_limit_of_descriptors_keeps_nobody_out(tmp_path: Path) -> None:
    low = "import resource, sys; _, hard = resource.getrlimit(7); resource.setrlimit(7, (256, hard)); "
    code = low + "from lowlat.cli import main; main()"
    command = [sys.executable, "-c", code, "http", "0", "--json", f"--endpoint=ipc://{tmp_path}/none.sock"]
    with subprocess.Popen(
        command, env={"LOWLAT_API_KEY": KEY, "PATH": ""}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        host, _, port = json.loads(line)["url"].removeprefix("http://").rpartition(":")
        with ExitStack() as stack:
            for _ in range(1100):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            caller = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            caller.sendall(request("GET /"))
            assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200")
        process.terminate()
        assert len(process.communicate(timeout=20)[1]) < 4096
