"""Requests that cannot be served are refused before they queue, by value, limit and knob; at once without capacity."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from fake_engine import expected_tokens
from fake_process import fake_process
from raw_client import RawClient, raw_client
from served_model import load_small, served_model

from lowlat.errors import Busy
from lowlat.ipc import Client
from lowlat.ipc.wire import Error

# what SUBMIT says, the code, the field's path where the wire knows it, and words that must stand in the message
REFUSALS: list[tuple[dict[str, Any], list[int], str, str | None, tuple[str, ...]]] = [
    ({"max_tokens": 250}, [1] * 10, "invalid", None, ("10", "250", "256", "max_context")),
    ({"max_tokens": 1}, [1] * 256, "invalid", None, ("256 tokens", "max_context")),
    ({"max_tokens": 4}, [1, 10**6], "invalid", None, ("token 1", "1000000", "ids are integers from 0 to")),
    ({"max_tokens": 4, "min_tokens": 9}, [1], "invalid", None, ("min_tokens", "max_tokens 4", "9")),
    ({"max_tokens": 0}, [1], "malformed", "$.sampling.max_tokens", (">= 1",)),
    ({"temperature": float("nan")}, [1], "malformed", "$.sampling.temperature", ()),
    ({"top_p": 1.5}, [1], "malformed", "$.sampling.top_p", ("<= 1.0",)),
    ({"stop": ("x",) * 17}, [1], "malformed", "$.sampling.stop", ("<= 16",)),
]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A small model with one slot, which a long request holds all the time."""
    folder = tmp_path_factory.mktemp("limits")
    with (
        served_model(folder, load_small(max_batch=1), max_queue=1, max_credit=1000) as (server, engine),
        raw_client(server.endpoint) as holder,
    ):
        holding = holder.submit(1, [5, 6], credit=1, max_tokens=200, ignore_eos=True)
        engine.before_step = lambda _: time.sleep(0.05)  # so that it lasts, and a step takes its time
        holder.wait_tokens(holding, 1)
        yield server.endpoint
        engine.before_step = None
        assert len(engine.order) == 1  # nothing that was refused came that far


@pytest.mark.parametrize(("sampling", "prompt", "code", "field", "words"), REFUSALS)
def test_refused_before_it_queues_by_name(
    endpoint: str, sampling: dict[str, Any], prompt: list[int], code: str, field: str | None, words: tuple[str, ...]
) -> None:
    with raw_client(endpoint) as client:
        refused = client.submit(1, prompt, credit=100, **sampling)
        client.finish(refused)
        assert refused.error is not None
        assert (refused.error.code, refused.error.field) == (code, field)
        for word in words:
            assert word in refused.error.message
        assert client.stats()["num_waiting"] == 0


def busy_times(client: RawClient, first: int, count: int) -> list[float]:
    times = []
    for number in range(first, first + count):
        started = time.perf_counter()
        refused = client.submit(number, [1], max_tokens=4)
        client.finish(refused)
        times.append(time.perf_counter() - started)
        assert isinstance(refused.error, Error)
        assert refused.error.code == "busy"
        assert refused.error.retry_after_ms is not None and 50 <= refused.error.retry_after_ms <= 30_000
        assert "max_queue" in refused.error.message
    return times


def test_beyond_capacity_it_is_busy_within_ten_milliseconds(tmp_path: Path) -> None:
    """Of three tries one, for other processes may be busy."""
    options = {"engine": {"step_s": 0.5, "max_running": 2}, "limits": {"max_queue": 3}}
    with fake_process(tmp_path, **options), raw_client(f"ipc://{tmp_path}/s.sock") as client:
        taken = [client.submit(number, [number + 1], max_tokens=1) for number in range(5)]
        assert any(median(busy_times(client, first, 30)) < 0.010 for first in (5, 35, 65))
        pong = client.pong()
        assert (pong.num_running, pong.num_waiting) == (2, 3)  # the bound is the bound
        client.finish(*taken)
        assert [one.token_ids for one in taken] == [expected_tokens([number + 1], 1) for number in range(5)]


def test_busy_ends_and_who_tries_again_is_served(tmp_path: Path) -> None:
    options = {"engine": {"step_s": 0.005, "max_running": 2}, "limits": {"max_queue": 2}}
    num_busy = 0

    def keep_asking(client: Client, number: int) -> None:
        nonlocal num_busy
        while True:
            try:
                found = [token for chunk in client.generate([number], max_tokens=5) for token in chunk.token_ids]
            except Busy as busy:
                num_busy += 1
                assert busy.retry_after_s is not None
                time.sleep(min(0.05, busy.retry_after_s))
                continue
            assert tuple(found) == expected_tokens([number], 5)
            served.append(number)
            return

    served: list[int] = []
    with fake_process(tmp_path, **options), Client(f"ipc://{tmp_path}/s.sock") as client:
        threads = [threading.Thread(target=keep_asking, args=(client, number)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(served) == list(range(16))
    assert num_busy
