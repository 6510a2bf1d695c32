"""Both clients over ipc:// with a whole server: streams that nobody reads, long prompts, forks; and with libzmq's."""

import asyncio
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, expected_tokens
from scripted_server import LIMITS, ScriptedServer, ipc_url, welcome
from served import Serve, eventually

from lowlat.errors import ServerGone
from lowlat.ipc import AsyncClient, Chunk, Client
from lowlat.ipc.channel import Channel
from lowlat.ipc.client import link, protocol
from lowlat.ipc.client.settings import Settings
from lowlat.ipc.wire import encode
from lowlat.ipc.zmtp import GREETING, encode_ready

HEARTBEATS = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 0.4}
SILENT_S = 1.2  # several times as long as a silent client is borne with
LONG_PROMPT = [7] * 2_000_000  # nearly 8 MiB
LONG_CONTEXT = 3_000_000


def ids_of(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def test_a_stream_that_nobody_reads_for_long_loses_nothing(serve: Serve) -> None:
    served = serve(FakeEngine(0.001), **HEARTBEATS)
    with Client(served.server.endpoint) as client, Client(served.server.endpoint) as idle:
        stream, paused = client.generate([5], max_tokens=600), client.generate([6], max_tokens=1500)
        got = [next(stream)]
        time.sleep(SILENT_S)
        assert served.client().stats()["num_clients"] == 3
        assert ids_of([*got, *stream]) == expected_tokens([5], 600)
        assert ids_of(list(paused)) == expected_tokens([6], 1500)
        assert idle.health().num_running == 0
    assert served.engine.cancelled_at == {}


def test_an_asyncio_stream_that_nobody_reads_for_long_loses_nothing(serve: Serve) -> None:
    served = serve(FakeEngine(0.001), **HEARTBEATS)

    async def main() -> None:
        async with AsyncClient(served.server.endpoint) as client, AsyncClient(served.server.endpoint) as idle:
            stream, paused = client.generate([5], max_tokens=600), client.generate([6], max_tokens=1500)
            got = [await anext(stream), await anext(paused)]
            await asyncio.sleep(SILENT_S)
            assert served.client().stats()["num_clients"] == 3
            assert ids_of([got[0], *[chunk async for chunk in stream]]) == expected_tokens([5], 600)
            assert ids_of([got[1], *[chunk async for chunk in paused]]) == expected_tokens([6], 1500)
            assert (await idle.health()).num_running == 0

    asyncio.run(main())
    assert served.engine.cancelled_at == {}


def test_a_prompt_of_many_megabytes_goes_through_beside_another_stream(serve: Serve) -> None:
    served = serve(FakeEngine(0.002, max_context=LONG_CONTEXT))
    got: list[Chunk] = []
    with Client(served.server.endpoint) as client:
        other = client.generate([5], max_tokens=4000)
        got.append(next(other))
        reader = threading.Thread(target=lambda: got.extend(other))
        reader.start()
        before = len(got)
        assert ids_of(list(client.generate(LONG_PROMPT, max_tokens=3))) == expected_tokens(LONG_PROMPT, 3)
        eventually(lambda: len(got) > before + 20)
        other.cancel()
        reader.join()
    assert got[-1].finish_reason == "cancelled"
    assert ids_of(got) == expected_tokens([5], 4000)[: len(ids_of(got))]


def test_an_asyncio_prompt_of_many_megabytes_goes_through_beside_another_stream(serve: Serve) -> None:
    served = serve(FakeEngine(0.002, max_context=LONG_CONTEXT))

    async def main() -> None:
        async with AsyncClient(served.server.endpoint) as client:
            other = client.generate([5], max_tokens=4000)
            got = [await anext(other)]

            async def read() -> None:
                async for chunk in other:
                    got.append(chunk)

            reader = asyncio.ensure_future(read())
            long = [chunk async for chunk in client.generate(LONG_PROMPT, max_tokens=3)]
            assert ids_of(long) == expected_tokens(LONG_PROMPT, 3)
            before = len(got)
            while len(got) < before + 20:
                await asyncio.sleep(0.01)
            await other.cancel()
            await reader
            assert got[-1].finish_reason == "cancelled"
            assert ids_of(got) == expected_tokens([5], 4000)[: len(ids_of(got))]

    asyncio.run(main())


FORK = """
import os, sys, time
from lowlat.ipc import Client

with Client(sys.argv[1]) as client:
    stream = client.generate([1], max_tokens=4000)
    next(stream)
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    sys.stdin.readline()
print("closed", flush=True)
sys.stdin.readline()
os.kill(child, 9)
os.waitpid(child, 0)
"""


def test_a_client_that_closes_is_gone_although_its_fork_lives(serve: Serve) -> None:
    served = serve(FakeEngine(0.01), heartbeat_interval_s=30.0, heartbeat_timeout_s=60.0)
    good = served.client()
    command = [sys.executable, "-c", FORK, served.server.endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        child = int(process.stdout.readline())
        assert good.stats()["num_clients"] == 2
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "closed\n"
        eventually(lambda: good.stats()["num_clients"] == 1 and not served.engine.busy)
        assert len(served.engine.cancelled_at) == 1
        assert Path(f"/proc/{child}").exists()
        print(file=process.stdin, flush=True)
        assert process.wait(10.0) == 0


@contextmanager
def deaf_server(folder: Path, goes: bool) -> Iterator[str]:
    """Welcomes a client, and reads no more; or goes when a request has begun to come."""
    over = threading.Event()

    def serve() -> None:
        connection, _ = listening.accept()
        channel = Channel(connection, b"ROUTER", b"DEALER", max_frame_bytes=1 << 20, max_frames=1, max_unsent=1)
        readable = select.poll()
        readable.register(connection, select.POLLIN)
        with closing(channel):
            channel.flush()
            while channel.lost is None and not any(iter(channel.next, None)):
                readable.poll()
                channel.fill()
            channel.send([encode(welcome(limits=msgspec.structs.replace(LIMITS, max_message_bytes=8 << 20)))])
            readable.poll()
            over.wait(0.1 if goes else None)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/s.sock")
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"ipc://{folder}/s.sock"
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("goes", [False, True])
@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_server_that_takes_only_part_of_a_prompt_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, goes: bool
) -> None:
    for module in (link, protocol):
        monkeypatch.setattr(module, "HEARTBEAT_INTERVAL_S", 0.1)
        monkeypatch.setattr(module, "SILENCE_S", 20.0 if goes else 0.4)

    def generate(endpoint: str) -> None:
        with Client(endpoint) as client:
            list(client.generate(LONG_PROMPT))

    async def generate_async(endpoint: str) -> None:
        async with AsyncClient(endpoint) as client:
            async for _ in client.generate(LONG_PROMPT):
                pass

    expected = "the connection (was closed|broke)" if goes else "took nothing for|nothing came"
    with deaf_server(tmp_path, goes) as endpoint, pytest.raises(ServerGone, match=expected):
        if kind == "blocking":
            generate(endpoint)
        else:
            asyncio.run(generate_async(endpoint))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "first byte is not ZMTP's"),
        (b"\xff" + bytes(8) + b"\x7f\3\0" + b"CURVE".ljust(52, b"\0"), "mechanism is b'CURVE', not NULL"),
        (GREETING + encode_ready(b"REP"), "is a b'REP' and must be a ROUTER"),
        (b"", "was closed"),
        (None, "Resource temporarily unavailable"),  # nobody accepts, and no more may wait for it
    ],
    ids=["http", "curve", "rep", "nothing", "full"],
)
def test_what_answers_and_is_no_server_is_named(tmp_path: Path, said: bytes | None, words: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as first:
        listening.bind(f"{tmp_path}/s.sock")
        listening.listen(0)
        listening.settimeout(0.02)
        done = threading.Event()

        def answer() -> None:
            while not done.is_set():
                with suppress(OSError), listening.accept()[0] as connection:  # or nobody came, or is gone
                    connection.recv(4096)
                    connection.sendall(said or b"")

        thread = threading.Thread(target=answer)
        if said is None:
            first.connect(f"{tmp_path}/s.sock")
        else:
            thread.start()
        try:
            for connect in (
                Client(f"ipc://{tmp_path}/s.sock", connect_timeout_s=0.1).connect,
                lambda: asyncio.run(AsyncClient(f"ipc://{tmp_path}/s.sock", connect_timeout_s=0.1).connect()),
            ):
                with pytest.raises(ServerGone, match=f"no lowlat server answers .*{words}"):
                    connect()
        finally:
            done.set()
            if said is not None:
                thread.join()


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """When clients tried to connect."""
    made: list[float] = []
    whole = Settings.open

    def counted(settings: Settings, now: float) -> Any:
        made.append(now)
        return whole(settings, now)

    monkeypatch.setattr(Settings, "open", counted)
    yield made


def test_a_router_of_libzmq_lets_clients_in_at_their_first_attempt(tmp_path: Path, attempts: list[float]) -> None:
    """It refuses who sends messages before it has said READY itself."""

    async def main() -> None:
        async with AsyncClient(server.url) as client:
            assert (await client.health()).state == "serving"

    with ScriptedServer(ipc_url(tmp_path)) as server:
        for _ in range(20):
            with Client(server.url) as client:
                assert client.health().state == "serving"
            asyncio.run(main())
    assert len(attempts) == 40
