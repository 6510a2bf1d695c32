"""Both clients over ipc:// with a whole server: streams that nobody reads, long prompts, forks; and with libzmq's."""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

from fake_engine import FakeEngine, expected_tokens
from scripted_server import ids_of
from served import Serve, eventually

from lowlat.ipc import AsyncClient, Chunk, Client

HEARTBEATS = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 0.4}
SILENT_S = 0.9  # several times as long as a silent client is borne with
LONG_PROMPT = [7] * 1_000_000  # nearly 4 MiB
LONG_CONTEXT = 3_000_000


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
    served = serve(FakeEngine(0.01), **HEARTBEATS)  # libzmq leaves a socket to its fork, which answers nothing
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
