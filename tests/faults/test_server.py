"""A server that is killed, terminated, fails or hangs: every client is told, the process ends, the next one serves."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import expected_tokens
from fake_process import fake_process, hear_bye
from raw_client import raw_client
from served import eventually

from lowlat.errors import LowlatError, ServerGone, StreamError
from lowlat.ipc import AsyncClient, Client
from lowlat.ipc.wire import Bye

NUM_STREAMS = 4
MAX_TOKENS = 4000


class Ends:
    """How the streams of a client ended: tokens that were read, the error, when; `running` when all have tokens."""

    def __init__(self) -> None:
        self.running = threading.Barrier(2)
        self.found: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        self.errors: list[LowlatError] = []
        self.at = 0.0

    def check(self, kind: type[StreamError], code: str) -> None:
        """All of them by this error, with exactly the tokens that were read, which are the engine's."""
        assert len(self.errors) == NUM_STREAMS
        for error in self.errors:
            assert isinstance(error, kind)
            assert error.code == code
            assert error.token_ids
            place = [tuple(found) for found in self.found].index(error.token_ids)
            assert error.token_ids == expected_tokens([1 + place], MAX_TOKENS)[: len(error.token_ids)]


def read_blocking(endpoint: str, ends: Ends) -> None:
    with Client(endpoint) as client:
        streams = [client.generate([1 + place], max_tokens=MAX_TOKENS) for place in range(NUM_STREAMS)]
        for found, stream in zip(ends.found, streams, strict=True):
            found.extend(next(stream).token_ids)
        ends.running.wait(10)
        for found, stream in zip(ends.found, streams, strict=True):
            try:
                for chunk in stream:
                    found.extend(chunk.token_ids)
            except LowlatError as error:
                ends.errors.append(error)
        ends.at = time.monotonic()


def read_async(endpoint: str, ends: Ends) -> None:
    async def read(client: AsyncClient, place: int) -> None:
        try:
            async for chunk in client.generate([1 + place], max_tokens=MAX_TOKENS):
                ends.found[place].extend(chunk.token_ids)
        except LowlatError as error:
            ends.errors.append(error)

    async def run() -> None:
        async with AsyncClient(endpoint) as client:
            tasks = [asyncio.create_task(read(client, place)) for place in range(NUM_STREAMS)]
            while not all(ends.found):
                await asyncio.sleep(0.005)
            ends.running.wait(10)
            await asyncio.gather(*tasks)
            ends.at = time.monotonic()

    asyncio.run(run())


# what is done to the server, the engine and the limits that it needs, the code, the exit code, and within how long
FAULTS: dict[str, tuple[Callable[[Any], None], dict[str, Any], str, int, float]] = {
    "killed": (lambda server: server.kill(), {}, "gone", -signal.SIGKILL, 5.0),
    "stopped": (lambda server: server.send_signal(signal.SIGSTOP), {}, "gone", -signal.SIGKILL, 1.5),
    "terminated": (lambda server: server.terminate(), {"limits": {"drain_s": 0.2}}, "shutdown", 0, 1.5),
    "device": (lambda server: None, {"engine": {"faults": {"1": "device"}, "fault_step": 60}}, "device", 1, 2.0),
    "hung": (
        lambda server: None,
        {"engine": {"faults": {"1": "hang"}, "fault_step": 60}, "limits": {"watchdog_min_s": 0.3}},
        "stalled",
        1,
        3.0,
    ),
}


@pytest.mark.parametrize(
    ("fault", "read"),
    [(fault, (read_async, read_blocking)[number % 2]) for number, fault in enumerate(FAULTS)],
)
def test_every_stream_ends_by_name_with_its_tokens_and_the_next_server_serves(
    tmp_path: Path, fault: str, read: Callable[[str, Ends], None], soon: None
) -> None:
    harm, options, code, exit_code, within_s = FAULTS[fault]
    options = {"limits": {}, **options, "engine": {"step_s": 0.005, "max_running": 4, **options.get("engine", {})}}
    endpoint = f"ipc://{tmp_path}/s.sock"
    ends = Ends()
    with fake_process(tmp_path, **options) as server:
        reader = threading.Thread(target=read, args=(endpoint, ends))
        reader.start()
        ends.running.wait(10)
        harmed = time.monotonic()
        harm(server)
        reader.join(15)
        assert not reader.is_alive()
        assert ends.at - harmed < within_s
        ends.check(ServerGone, code)
        if fault == "stopped":
            server.kill()
        assert server.wait(5) == exit_code
    if fault in ("killed", "hung"):  # what leaves most behind
        with fake_process(tmp_path), Client(endpoint) as client:
            found = [token for chunk in client.generate([5], max_tokens=9) for token in chunk.token_ids]
            assert tuple(found) == expected_tokens([5], 9)
    assert {path.name for path in tmp_path.iterdir()} <= {"s.sock", "s.sock.lock"}


def test_a_client_that_lives_on_uses_the_next_server(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s.sock"
    epochs = set()
    client = Client(endpoint, connect_timeout_s=10.0)
    try:
        for _ in range(2):
            with fake_process(tmp_path, engine={"step_s": 0.005}) as server:
                epochs.add(client.server.epoch)
                stream = client.generate([8], max_tokens=MAX_TOKENS)
                next(stream)
                server.kill()
                with pytest.raises(ServerGone):
                    for _ in stream:
                        pass
                assert list(stream) == []  # a broken stream never resumes
    finally:
        client.close()
    assert len(epochs) == 2


def test_sigterm_lets_running_requests_finish(tmp_path: Path) -> None:
    with fake_process(tmp_path, engine={"step_s": 0.01}) as server, raw_client(f"ipc://{tmp_path}/s.sock") as client:
        done = client.submit(1, max_tokens=40)
        client.wait_tokens(done, 2)
        server.send_signal(signal.SIGTERM)
        eventually(lambda: client.pong().state == "draining")
        refused = client.submit(2)
        client.finish(refused, done)
        assert refused.error is not None
        assert refused.error.code == "draining"
        assert done.token_ids == expected_tokens([1, 2, 3], 40)
        assert hear_bye(client).reason == "shutdown"
        assert server.wait(5) == 0
    assert not (tmp_path / "s.sock").exists()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with fake_process(tmp_path, engine={"step_s": 0.01}) as server, raw_client(f"ipc://{tmp_path}/s.sock") as client:
        done = client.submit(1, max_tokens=4000)
        client.wait_tokens(done, 2)
        server.send_signal(signal.SIGINT)
        eventually(lambda: client.pong().state == "draining")
        server.send_signal(signal.SIGINT)
        client.finish(done)
        assert done.end is not None
        assert done.end.code == "shutdown"
        assert server.wait(5) == 0


def test_a_device_error_tells_everybody_and_ends_the_process_within_a_second(tmp_path: Path) -> None:
    engine = {"step_s": 0.01, "faults": {"9": "device"}, "max_running": 2}
    with (
        fake_process(tmp_path, engine=engine) as server,
        raw_client(f"ipc://{tmp_path}/s.sock") as client,
        raw_client(f"ipc://{tmp_path}/s.sock") as idle,
    ):
        done = [client.submit(number, [token], max_tokens=4000) for number, token in enumerate((8, 9, 7))]
        client.finish(*done)
        failed = time.monotonic()
        for one in done:
            assert one.end is not None
            assert (one.end.finish_reason, one.end.code) == ("error", "device")
        assert hear_bye(client).reason == "device"
        assert idle.hear(Bye).reason == "device"
        assert server.wait(5) == 1
        assert time.monotonic() - failed < 1.3
    with fake_process(tmp_path), raw_client(f"ipc://{tmp_path}/s.sock") as client:  # and the next one can serve
        client.finish(client.submit(1, max_tokens=2))


def test_a_hung_step_is_noticed_told_dumped_and_ends_the_process(tmp_path: Path) -> None:
    options = {
        "engine": {"step_s": 0.002, "faults": {"9": "hang"}, "fault_step": 40},
        "limits": {"watchdog_min_s": 0.4},
    }
    log = tmp_path / "stderr"
    with (
        log.open("w") as stderr,
        fake_process(tmp_path, stderr, **options) as server,
        raw_client(f"ipc://{tmp_path}/s.sock") as client,
    ):
        done = client.submit(1, [9], max_tokens=4000)
        client.wait_tokens(done, 39)
        hung = time.monotonic()
        time.sleep(0.2)
        assert client.pong().last_step_age_s > 0.15  # health is not "it answers"
        client.finish(done)
        assert done.end is not None
        assert (done.end.finish_reason, done.end.code) == ("error", "stalled")
        assert hear_bye(client).reason == "stalled"
        assert server.wait(5) == 1
        assert 0.4 < time.monotonic() - hung < 3.0
    written = log.read_text()
    assert "_advance" in written  # the stack of the thread that hangs
    assert "watchdog_factor" in written


def test_a_bug_of_the_engine_ends_the_server_and_its_text_stays_inside(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with (
        log.open("w") as stderr,
        fake_process(tmp_path, stderr, engine={"faults": {"9": "crash"}}) as server,
        raw_client(f"ipc://{tmp_path}/s.sock") as client,
    ):
        done = client.submit(1, [9], max_tokens=10)
        client.finish(done)
        assert done.end is not None
        assert done.end.code == "internal"
        assert "secret" not in str(done.end.message)
        assert hear_bye(client).reason == "internal"
        assert server.wait(5) == 1
    assert "ValueError at" in log.read_text()
    assert "secret" not in log.read_text()
