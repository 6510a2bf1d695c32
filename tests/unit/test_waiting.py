"""A thread that owns a runtime takes no turn while nothing can go on, and goes on with what it waited for."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from served import eventually
from served_model import alone, load_small

from lowlat import Runtime
from lowlat.engine.calls.driver import Driver
from lowlat.ipc import Client
from lowlat.ipc.server.server import Server
from lowlat.sequence.tiers.disk import DiskTier
from lowlat.serving.engine import RuntimeEngine

WATCHED_S = 0.3  # a loop that does not wait takes thousands of turns meanwhile
BLOCKS: dict[str, Any] = {"max_context": 96, "block_size": 8, "prefill_chunk": 16, "kv_blocks": 15}
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "seed": 3, "temperature": 0.8}
PROMPTS = [5, 6, 7], [8, 9], [4, 4, 4]


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts steps, and how often an owner's loop asks whether there is something to do."""
    counted = Counter[str]()

    def count(owner: type, name: str, *, is_property: bool = False) -> None:
        before = owner.__dict__[name]

        def call(self: Any, *args: Any) -> Any:
            counted["all"] += 1
            return before.__get__(self)(*args) if not is_property else before.fget(self)

        monkeypatch.setattr(owner, name, property(call) if is_property else call)

    count(Driver, "_is_ready")
    count(RuntimeEngine, "busy", is_property=True)
    count(Runtime.__mro__[1], "step")
    return counted


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """Its blocks hold one long request, and host memory has space for the slot of a paused one, not for blocks."""
    with load_small(**BLOCKS) as loaded:
        loaded.scheduler.space.max_bytes = loaded.scheduler.space.slot_bytes
        yield loaded


def rests(turns: Counter[str]) -> bool:
    """Whether few turns are taken over a time in which a loop would take many."""
    time.sleep(WATCHED_S)
    before = turns["all"]
    time.sleep(WATCHED_S)
    return turns["all"] - before < 5


def held_up(runtime: Runtime) -> Callable[[], bool]:
    return lambda: "held_up" in runtime.summary()


def test_a_driver_rests_while_the_head_waits_for_what_a_paused_request_holds(
    runtime: Runtime, turns: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = [alone(runtime, prompt, **LONG) for prompt in PROMPTS]
    first = runtime.stream(PROMPTS[0], **LONG)
    tokens = list(next(first).token_ids)
    assert runtime.pause(first.request_id)
    with caplog.at_level(logging.WARNING):
        others = [runtime.stream(prompt, **LONG) for prompt in PROMPTS[1:]]
        eventually(held_up(runtime))
        assert rests(turns)
    (record,) = caplog.records
    assert "needs 9 KV blocks, and 5 are free or reusable (kv_blocks); paused requests hold 9" in record.message
    assert first.request_id in record.message
    found = runtime.summary()["held_up"]
    assert (found["num_needed"], found["num_paused_blocks"], found["paused"]) == (9, 9, (first.request_id,))
    runtime.resume(first.request_id)
    tokens += [token for chunk in first for token in chunk.token_ids]
    assert tuple(tokens) == expected[0]
    assert [other.answer().token_ids for other in others] == expected[1:]
    assert "held_up" not in runtime.summary()


def test_a_driver_rests_while_calls_wait_for_the_queue(turns: Counter[str]) -> None:
    with load_small(**BLOCKS, max_queue=0, max_batch=1) as runtime:
        runtime.scheduler.space.max_bytes = runtime.scheduler.space.slot_bytes
        expected = [alone(runtime, prompt, **LONG) for prompt in PROMPTS]
        first = runtime.stream(PROMPTS[0], **LONG)
        tokens = list(next(first).token_ids)
        assert runtime.pause(first.request_id)
        others = [runtime.stream(prompt, **LONG) for prompt in PROMPTS[1:]]
        eventually(held_up(runtime))
        assert rests(turns)
        runtime.resume(first.request_id)
        tokens += [token for chunk in first for token in chunk.token_ids]
        assert [tuple(tokens), *(other.answer().token_ids for other in others)] == expected


def test_what_the_head_waits_for_may_be_cancelled_or_end_at_its_deadline(runtime: Runtime, turns: Counter[str]) -> None:
    expected = alone(runtime, PROMPTS[1], **LONG)
    for deadline_s in (None, 2.5 * WATCHED_S):
        first = runtime.stream(PROMPTS[0], **LONG)
        next(first)
        assert runtime.pause(first.request_id, deadline_s=deadline_s)
        other = runtime.stream(PROMPTS[1], **LONG)
        eventually(held_up(runtime))
        assert rests(turns)
        if deadline_s is None:
            runtime.cancel(first.request_id)
        assert other.answer().token_ids == expected
        first.close()


@pytest.mark.parametrize("way", ["paused", "open"])
def test_a_server_rests_while_the_head_waits_for_what_others_hold(
    runtime: Runtime, turns: Counter[str], way: str, tmp_path: Path
) -> None:
    expected = [alone(runtime, prompt, **LONG) for prompt in PROMPTS]
    path = f"ipc://{tmp_path}/s.sock"
    with Server(lambda: RuntimeEngine(runtime), None, path) as server, Client(server.endpoint) as client:
        if way == "paused":
            first: Any = client.generate(PROMPTS[0], **LONG)
            tokens = list(next(first).token_ids)
            assert first.pause()
        else:
            opened = client.open_prompt(**LONG)
            tokens = []
            opened.append([*PROMPTS[1], *[3] * 30])
            eventually(lambda: any(slot["phase"] == "open" for slot in client.stats()["engine"]["slots"]))
        other = client.generate(PROMPTS[1], **LONG)
        eventually(lambda: "held_up" in client.stats()["engine"])
        assert rests(turns)
        if way == "paused":
            first.resume()
            assert tuple(tokens + [token for chunk in first for token in chunk.token_ids]) == expected[0]
        else:
            assert len([token for chunk in opened.finish() for token in chunk.token_ids]) == 60
        assert tuple(token for chunk in other for token in chunk.token_ids) == expected[1]
        eventually(lambda: "held_up" not in client.stats()["engine"])


def test_a_driver_rests_while_files_are_read_and_goes_on_when_they_came(
    turns: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {**BLOCKS, "cache_dir": tmp_path / "cache"}
    prompt, short = list(range(3, 40)), {**LONG, "max_tokens": 6}
    with load_small(**options) as runtime:
        expected = alone(runtime, prompt, **short)
    may_read, read = Event(), DiskTier.read

    def waits(self: DiskTier, *args: Any) -> Any:
        assert may_read.wait(20.0)
        return read(self, *args)

    monkeypatch.setattr(DiskTier, "read", waits)
    with load_small(**options) as runtime:
        stream = runtime.stream(prompt, **short)
        eventually(lambda: runtime.busy and runtime.scheduler.num_queued == 1)
        assert rests(turns) and runtime.busy and not runtime.ready
        assert "held_up" not in runtime.summary()  # it comes by itself
        other = runtime.stream(prompt, **short)
        other.close()  # what is asked meanwhile is done at once
        eventually(lambda: runtime.scheduler.num_queued == 1)
        may_read.set()
        assert stream.answer().token_ids == expected
        assert runtime.summary()["kv"]["hit_tokens"] == 32
