"""The asyncio client against a scripted server: streams at once, cancellation, ends, loops."""

import asyncio
import gc
import time
from functools import partial
from pathlib import Path

import pytest
from scripted_server import ScriptedServer, expected_text, expected_tokens, ids_of, ipc_url, quiet
from socket_fixtures import OVER_EACH

from lowlat.errors import LowlatError, ServerGone, StreamError
from lowlat.ipc import AsyncClient, Chunk
from lowlat.ipc.client.asynchronous import AsyncGeneration
from lowlat.ipc.wire import Cancel, Credit, Health, Hello, Submit


async def all_of(generation: AsyncGeneration) -> list[Chunk]:
    return [chunk async for chunk in generation]


@OVER_EACH
def test_several_streams_at_once(server: ScriptedServer) -> None:
    async def main() -> None:
        async with AsyncClient(server.url, name="a", window=64) as client:
            assert client.server.server == "scripted"
            results = await asyncio.gather(*(all_of(client.generate([n], max_tokens=500)) for n in range(16)))
            for number, chunks in enumerate(results):
                assert ids_of(chunks) == expected_tokens((number,), 500)
                assert "".join(chunk.text for chunk in chunks) == expected_text(ids_of(chunks))
                assert chunks[-1].finish_reason == "length"
            assert (await client.health()).state == "serving"
            assert await client.stats() == {"slots": 4}

    asyncio.run(main())
    assert len(server.wait_for(Hello)) == 1


def taken(generation: AsyncGeneration, chunks: list[Chunk], ended: "asyncio.Future[None]") -> None:
    """Take what has come, as `watch` calls for it."""
    try:
        while (chunk := generation.take()) is not None:
            chunks.append(chunk)
            if chunk.finish_reason is not None:
                ended.set_result(None)
    except LowlatError as error:
        if not ended.done():
            ended.set_exception(error)


@pytest.mark.parametrize("connected", [True, False])
def test_chunks_are_taken_in_the_call_that_receives_them(server: ScriptedServer, connected: bool) -> None:
    async def main() -> None:
        client = AsyncClient(server.url, window=16)
        if connected:
            await client.connect()
        loop = asyncio.get_running_loop()
        watched: list[tuple[list[Chunk], asyncio.Future[None]]] = [([], loop.create_future()) for _ in range(4)]
        for number, (chunks, ended) in enumerate(watched):
            generation = client.generate([number], max_tokens=200)
            generation.watch(partial(taken, generation, chunks, ended))
        for number, (chunks, ended) in enumerate(watched):
            await ended
            assert ids_of(chunks) == expected_tokens((number,), 200)
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 10.0))


@pytest.mark.parametrize("why", ["deadline", "closed", "gone"])
def test_whoever_takes_chunks_is_told_why_none_comes(server: ScriptedServer, why: str) -> None:
    async def main() -> None:
        client = AsyncClient(server.url if why != "gone" else server.url + "none", connect_timeout_s=0.2)
        if why != "gone":
            await client.connect()
        chunks, ended = list[Chunk](), asyncio.get_running_loop().create_future()
        generation = client.generate([1], max_tokens=10**6, timeout_s=0.2 if why == "deadline" else None)
        generation.watch(partial(taken, generation, chunks, ended))
        if why == "closed":
            await client.close()
        with pytest.raises({"deadline": StreamError, "closed": LowlatError, "gone": ServerGone}[why]):
            await ended
        assert generation.take() is None
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 10.0))


@pytest.mark.parametrize("connected", [True, False])
def test_requests_are_sent_by_the_call_and_cancelled_when_dropped(server: ScriptedServer, connected: bool) -> None:
    async def main() -> None:
        client = AsyncClient(server.url, window=4)
        if connected:
            await client.connect()
        generations = [client.generate([number], max_tokens=100) for number in range(4)]
        while len(server.running) < 4:
            await asyncio.sleep(0.005)
        kept = generations.pop(0)
        del generations
        while sum(isinstance(message, Cancel) for message in server.received) < 3:
            await asyncio.sleep(0.005)
        assert ids_of(await all_of(kept)) == expected_tokens((0,), 100)
        dropped = client.generate([9], max_tokens=100)
        await dropped.aclose()
        assert await all_of(dropped) == []
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 10.0))


def test_what_hinders_a_request_is_raised_to_its_reader(tmp_path: Path) -> None:
    async def main() -> None:
        client = AsyncClient(ipc_url(tmp_path, "nobody"), connect_timeout_s=0.2)
        with pytest.raises(StreamError, match="has not connected yet"):
            await all_of(client.generate("a", timeout_s=0.05))
        generation = client.generate("a")
        with pytest.raises(ServerGone, match="no lowlat server answers"):
            await all_of(generation)
        assert await all_of(generation) == []

    asyncio.run(main())
    with pytest.raises(LowlatError, match="needs a running event loop"):
        AsyncClient(ipc_url(tmp_path)).generate("a")


@OVER_EACH
def test_a_tasks_cancellation_cancels_its_request(server: ScriptedServer) -> None:
    server.handlers[Submit] = lambda s, i, message, b: [] if message.text == "wait" else None

    async def main() -> None:
        async with AsyncClient(server.url) as client:
            task = asyncio.ensure_future(all_of(client.generate("wait")))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(all_of(client.generate("wait")), 0.05)
            assert len(await all_of(client.generate("go", max_tokens=5))) == 6

    asyncio.run(main())
    assert len(server.wait_for(Cancel, 2)) == 2


@pytest.mark.parametrize("how", ["break", "aclose", "with", "collect"])
def test_leaving_early_cancels(server: ScriptedServer, how: str) -> None:
    async def main() -> None:
        async with AsyncClient(server.url, window=16) as client:
            if how == "break":
                async for _ in client.generate("a", max_tokens=100):
                    break
            elif how == "with":
                async with client.generate("a", max_tokens=100) as generation:
                    await anext(generation)
            else:
                generation = client.generate("a", max_tokens=100)
                await anext(generation)
                if how == "aclose":
                    await generation.aclose()
                    assert await all_of(generation) == []
                del generation
                gc.collect()
            await asyncio.sleep(0.01)
            await client.health()

    asyncio.run(main())
    server.wait_for(Cancel)


@OVER_EACH
def test_cancel_ends_by_a_chunk_and_unread_tokens_stay_at_the_server(server: ScriptedServer) -> None:
    async def main() -> None:
        async with AsyncClient(server.url, window=16) as client:
            generation = client.generate("a", max_tokens=1000)
            await anext(generation)
            await client.health()
            assert [running.sent for running in server.running.values()] == [16]
            assert not [message for message in server.received if isinstance(message, Credit)]
            await generation.cancel()
            assert (await all_of(generation))[-1].finish_reason == "cancelled"

    asyncio.run(main())


def test_a_killed_server_is_noticed_and_the_next_call_connects_anew(tmp_path: Path) -> None:
    async def main() -> None:
        with ScriptedServer(ipc_url(tmp_path)) as first:
            client = AsyncClient(first.url, window=4)
            generation = client.generate("a", max_tokens=100)
            got = [await anext(generation)]
            first.handlers[Credit] = quiet
            first.stop()
            begin = time.perf_counter()
            with pytest.raises(ServerGone) as caught:
                async for chunk in generation:
                    got.append(chunk)
            assert time.perf_counter() - begin < 1.0  # by the connection's end, before any heartbeat
            assert caught.value.token_ids == ids_of(got)
            with ScriptedServer(first.url):
                assert len(await all_of(client.generate("b", max_tokens=5))) == 6
                await client.close()
                with pytest.raises(LowlatError, match="closed"):
                    await client.health()

    asyncio.run(main())


@OVER_EACH
def test_a_silent_server_is_gone_and_a_timeout_is_ones_own(server: ScriptedServer, soon: None) -> None:
    async def main() -> None:
        async with AsyncClient(server.url) as client:
            server.handlers = {Submit: quiet}
            with pytest.raises(StreamError, match="timeout_s") as caught:
                await all_of(client.generate("a", timeout_s=0.1))
            assert caught.value.code == "timeout"
            server.handlers = {Submit: quiet, Health: quiet}
            begin = time.perf_counter()
            with pytest.raises(ServerGone, match="nothing came"):
                await all_of(client.generate("a"))
            # 0.4 s after what came last, a heartbeat of up to 0.1 s before, and what a busy machine adds to each
            assert 0.2 < time.perf_counter() - begin < 0.5 + 0.5
            with pytest.raises(ServerGone, match="no answer within"):
                await client.health(timeout_s=0.05)

    asyncio.run(main())


def test_two_tasks_may_not_read_one_stream(server: ScriptedServer) -> None:
    server.handlers[Submit] = quiet

    async def main() -> None:
        async with AsyncClient(server.url) as client:
            generation = client.generate("a")
            task = asyncio.ensure_future(anext(generation))
            await asyncio.sleep(0.05)
            with pytest.raises(LowlatError, match="another thread or task reads"):
                await anext(generation)
            await asyncio.sleep(0.01)
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_a_client_outlives_its_loop_but_serves_one_at_a_time(server: ScriptedServer) -> None:
    client = AsyncClient(server.url)

    async def main() -> int:
        return len(await all_of(client.generate("a", max_tokens=3)))

    assert asyncio.run(main()) == 4
    assert asyncio.run(main()) == 4
    other = asyncio.new_event_loop()
    try:
        assert other.run_until_complete(main()) == 4
        with pytest.raises(LowlatError, match="another event loop"):
            asyncio.run(main())
        other.run_until_complete(client.close())
    finally:
        other.close()


@OVER_EACH
def test_an_unclosed_client_is_collected(server: ScriptedServer) -> None:
    async def main() -> None:
        client = AsyncClient(server.url)
        await client.health()
        del client
        gc.collect()

    asyncio.run(main())
    gc.collect()
