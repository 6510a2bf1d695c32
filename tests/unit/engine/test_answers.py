"""Answers in process: whole and in chunks, from threads and tasks; who owns the runtime; how calls end."""

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny_chat import make_chat_model

from lowlat import (
    Answer,
    AsyncStream,
    DeviceError,
    LowlatError,
    RequestError,
    Runtime,
    RuntimeConfig,
    SamplingParams,
    SpeculativeConfig,
    StepOutput,
    Stream,
    StreamError,
)
from lowlat.engine.calls.driver import Driver
from lowlat.engine.calls.prompts import Prepared
from lowlat.ipc.answer import ToolCall
from lowlat.ipc.options import SamplingOptions
from lowlat.options.keywords import CallOptions, RuntimeOptions, SpeculativeOptions

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"hot": {"type": "boolean"}}, "required": ["hot"]},
    },
}
PROMPT = "The Congress"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("chat"), max_context=512)


def load(directory: Path, **options: Any) -> Runtime:
    return Runtime.load(directory, max_batch=2, max_context=512, device="cpu", **options)


@pytest.fixture(scope="module")
def runtime(directory: Path) -> Iterator[Runtime]:
    with load(directory) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def by_hand(directory: Path) -> Iterator[Callable[..., tuple[int, ...]]]:
    """Tokens of a request that is submitted and stepped in another runtime of the same model."""
    with load(directory) as loaded:

        def run(prompt: str, **options: Any) -> tuple[int, ...]:
            loaded.submit(prompt, SamplingParams(**options))
            tokens: list[int] = []
            while loaded.busy:
                tokens += [token for output in loaded.step() for token in output.token_ids]
            return tuple(tokens)

        yield run


def settled(runtime: Runtime) -> bool:
    """Whether the runtime comes to rest soon: nothing is left of requests that were cancelled."""
    deadline = time.monotonic() + 5.0
    while runtime.busy and time.monotonic() < deadline:
        time.sleep(0.005)
    return not runtime.busy and not runtime.slots()


def test_all_ways_to_ask_give_the_tokens_of_steps(runtime: Runtime, by_hand: Callable[..., tuple[int, ...]]) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "logprobs": 1}
    expected = by_hand(PROMPT, **options)
    answer = runtime.generate(PROMPT, **options)
    assert answer.token_ids == expected and answer.finish_reason == "length"
    assert answer.logprobs is not None and [one.token_id for one in answer.logprobs] == [*expected]
    assert answer.metrics["completion_tokens"] == 12 and len(answer.accepted) == 12
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    assert runtime.generate(PROMPT, params, max_tokens=12).token_ids == expected  # names go before the record
    assert runtime.codec is not None
    with runtime.stream(runtime.codec.encode(PROMPT), params, max_tokens=12) as stream:
        chunks = list(stream)
        assert stream.answer().text == answer.text == "".join(chunk.text for chunk in chunks)
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert runtime.metrics(stream.request_id).completion_tokens == 12

    async def tasks() -> list[Answer]:
        async def streamed() -> Answer:
            stream = runtime.astream(PROMPT, **options)
            return await stream.answer() if [chunk async for chunk in stream] else pytest.fail("no chunks")

        return await asyncio.gather(*(runtime.agenerate(PROMPT, **options) for _ in range(3)), streamed())

    with ThreadPoolExecutor(5) as pool:  # more than have a slot, and tasks next to them
        threads = [pool.submit(runtime.generate, PROMPT, **options) for _ in range(5)]
        assert [answer.token_ids for answer in asyncio.run(tasks())] == [expected] * 4
        assert [each.result().token_ids for each in threads] == [expected] * 5


def test_a_bell_that_nobody_heard_leaves_no_task_waiting(runtime: Runtime) -> None:
    """A task that is cancelled while it waits, and others of its loop that go on within the same ring."""

    async def main() -> list[int]:
        streams = [runtime.astream(PROMPT, max_tokens=20, ignore_eos=True) for _ in range(3)]
        assert "0 tokens, under way" in repr(streams[0])
        tasks = [asyncio.create_task(stream.answer()) for stream in streams]
        while not streams[0].request_id:
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        return [len((await task).token_ids) for task in tasks[1:]]

    assert asyncio.run(main()) == [20, 20]
    assert asyncio.run(main()) == [20, 20]  # another loop has another bell
    assert settled(runtime)


def test_more_requests_than_the_queue_holds_wait(directory: Path) -> None:
    with load(directory, max_queue=1) as runtime, ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda n: runtime.generate(PROMPT, max_tokens=n), range(1, 9))
        assert [len(answer.token_ids) for answer in answers] == list(range(1, 9))


def test_a_chat_is_parsed_and_its_answer_goes_into_the_next_turn(runtime: Runtime) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Is it hot?"}]
    answer = runtime.chat(messages, tools=[WEATHER], tool_choice="weather", max_tokens=200, seed=1)
    (call,) = answer.tool_calls
    assert call.name == "weather" and isinstance(call.values()["hot"], bool)
    assert answer.text == "" and "calls weather" in repr(answer)
    messages += [answer.message, call.result({"degrees": 31})]
    assert messages[-1] == {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": '{"degrees": 31}'}
    answer = asyncio.run(runtime.achat(messages, tools=[WEATHER], tool_choice="none", choice=["yes", "no"]))
    assert answer.text in ("yes", "no") and answer.finish_reason == "stop"
    assert runtime.chat("Hello", min_tokens=5, regex="[a-z]{5,9}").text.isalpha()
    assert runtime.generate(PROMPT, choice=["yes"]).text == "yes"  # of text, too
    with pytest.raises(RequestError, match="no JSON object"):
        ToolCall("1", "weather", "[1]").values()


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        (PROMPT, {"max_tokens": 1000}, "exceed 512 .max_context"),
        (PROMPT, {"beams": 2}, "unknown sampling parameter 'beams'"),
        (PROMPT, {"timeout_s": -1}, "timeout_s must be above 0"),
        (PROMPT, {"tool_choice": "none"}, "tool_choice is for chat messages"),
        (PROMPT, {"params": {"max_tokens": 3}}, "params must be SamplingParams"),
        ([], {}, "the prompt is empty"),
        (5, {}, "the prompt must be text or a sequence of token ids, got int"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            {},
            r"messages\[0\].content\[0\] is of the type 'image_",
        ),
        ([{"content": "x"}], {}, r"messages\[0\]: Object missing required field `role`"),
        ([{"role": "user", "content": "x"}], {"tools": [{}]}, r"tools\[0\] must be"),
        (
            [{"role": "user", "content": "x"}],
            {"tools": [WEATHER], "tool_choice": "rain"},
            "'rain' is none of the tools",
        ),
        ([{"role": "user", "content": "x"}], {"tools": [WEATHER], "regex": "a"}, "bound to JSON alone"),
    ],
)
def test_what_cannot_be_served_is_refused_to_its_caller_alone(
    runtime: Runtime, prompt: Any, options: dict[str, Any], words: str
) -> None:
    with runtime.stream(PROMPT, max_tokens=20) as other:
        with pytest.raises(RequestError, match=words):
            runtime.generate(prompt, **options)
        with pytest.raises(RequestError, match=words):
            asyncio.run(runtime.agenerate(prompt, **options))
        assert len(other.answer().token_ids) == 20


def test_the_usual_length_is_what_the_context_has_room_for(runtime: Runtime) -> None:
    """Where neither max_tokens nor params say it: a prompt near the context's end is answered all the same."""
    room, prompt = 3, [5] * (runtime.config.max_context - 3)
    assert len(runtime.generate(prompt, ignore_eos=True).token_ids) == room
    given: Any = iter(prompt)  # read once, whatever asks for its length
    assert len(asyncio.run(runtime.agenerate(given, max_tokens=room, ignore_eos=True)).token_ids) == room
    with pytest.raises(RequestError, match=r"max_tokens 256 exceed \d+ \(max_context\)"):
        runtime.generate(prompt, SamplingParams())
    with pytest.raises(RequestError, match=rf"and max_tokens 1 exceed {runtime.config.max_context} "):
        runtime.generate([5] * runtime.config.max_context)


def test_leaving_a_stream_cancels_it(runtime: Runtime) -> None:
    long = {"max_tokens": 200, "ignore_eos": True}
    for chunk in runtime.stream(PROMPT, **long):  # type: ignore[arg-type]
        assert chunk.token_ids
        break
    gc.collect()
    assert settled(runtime)
    stream = runtime.stream(PROMPT, **long)  # type: ignore[arg-type]
    next(stream)
    stream.close()
    assert list(stream) == [] and settled(runtime)
    with pytest.raises(StreamError, match="timeout_s") as caught:
        runtime.generate(PROMPT, timeout_s=0.02, **long)  # type: ignore[arg-type]
    assert caught.value.code == "timeout" and settled(runtime)
    stream = runtime.stream(PROMPT, **long)  # type: ignore[arg-type]
    next(stream)
    stream.cancel()
    assert stream.answer().finish_reason == "cancelled"

    async def cancelled() -> None:
        task = asyncio.create_task(runtime.agenerate(PROMPT, **long))  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with runtime.astream(PROMPT, **long) as stream:  # type: ignore[arg-type]
            await anext(stream)
        with pytest.raises(StreamError, match="timeout_s"):
            await runtime.agenerate(PROMPT, timeout_s=0.02, **long)  # type: ignore[arg-type]

    asyncio.run(cancelled())
    assert settled(runtime)


def test_one_thread_owns_a_runtime(directory: Path) -> None:
    with load(directory) as runtime:
        runtime.submit(PROMPT, SamplingParams(max_tokens=2))
        with pytest.raises(LowlatError, match="submitted by hand are under way"):
            runtime.generate(PROMPT)
        while runtime.busy:
            runtime.step()
        with runtime.stream(PROMPT, max_tokens=8) as stream:
            calls: dict[str, Callable[[], object]] = {"step": runtime.step, "submit": lambda: runtime.submit([1])}
            for name, call in calls.items():
                with pytest.raises(LowlatError, match=rf"{name}\(\) is refused"):
                    call()
            assert stream.answer().finish_reason == "length"
        runtime.speculate(0)  # the owner does the rest
        assert runtime.summary()["kv"] and runtime.perf() is not None and runtime.slots() == []
        with pytest.raises(RequestError, match="unknown"):
            runtime.cancel("nobody")
        assert repr(runtime).startswith("Runtime(") and "max_batch=2" in repr(runtime)
    assert repr(runtime).endswith("closed)")
    with pytest.raises(LowlatError, match="the runtime is closed"):
        runtime.generate(PROMPT)


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_the_end_of_a_runtime_reaches_all_who_wait(directory: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load(directory)
    caught: list[LowlatError] = []

    def wait(_: int) -> None:
        with pytest.raises(LowlatError) as error:
            runtime.generate(PROMPT, max_tokens=400, ignore_eos=True)
        caught.append(error.value)

    async def tasks() -> None:
        with pytest.raises(LowlatError) as error:
            await runtime.agenerate(PROMPT, max_tokens=400, ignore_eos=True)
        caught.append(error.value)

    with ThreadPoolExecutor(4) as pool:
        waiting = [*map(pool.submit, [wait] * 3, range(3)), pool.submit(asyncio.run, tasks())]
        while len(runtime.slots()) < 2:
            time.sleep(0.005)
        if how == "closed":
            runtime.close()
        else:
            monkeypatch.setattr(runtime._steps, "step", lambda *_: 1 / 0)
        for each in waiting:
            each.result(10)
    runtime.close()
    assert len(caught) == 4 and len({*map(id, caught)}) == 4
    if how == "closed":
        assert {cast(StreamError, error).code for error in caught} == {"closed"}
    else:
        assert all(isinstance(error, DeviceError) and "ZeroDivisionError" in str(error) for error in caught)


def test_a_runtime_that_is_let_go_of_ends_its_thread(directory: Path) -> None:
    runtime = load(directory)
    runtime.generate(PROMPT, max_tokens=1)
    assert runtime.driver is not None
    thread = runtime.driver._thread
    del runtime
    gc.collect()
    thread.join(5.0)
    assert not thread.is_alive()


class StandIn:
    """A runtime whose step waits for a device, a millisecond, and brings each request a token."""

    STEP_S = 0.001
    deadline = None  # nothing is to be done at a time of its own

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(is_full=False)
        self.live: dict[str, int] = {}
        self.ended: list[float] = []

    ready = property(lambda self: bool(self.live))

    def watch(self, wake: Callable[[], None]) -> None:
        """It waits for nothing that comes by itself."""

    def adopt_thread(self) -> None:
        pass

    def submit(self, prompt: Any, params: SamplingParams, *, cache_salt: str, session: Any) -> str:
        name = f"request-{len(self.ended)}-{len(self.live)}"
        self.live[name] = params.max_tokens
        return name

    def step(self) -> list[StepOutput]:
        time.sleep(self.STEP_S)
        outputs = []
        for name in [*self.live]:
            self.live[name] -= 1
            outputs.append(StepOutput(name, (7,), None if self.live[name] else "length", "x"))
        self.live = {name: left for name, left in self.live.items() if left}
        self.ended.append(time.perf_counter())
        return outputs

    def metrics(self, name: str) -> Any:
        return SimpleNamespace(to_dict=dict)


def times_of(kind: str) -> tuple[float, float]:
    """Medians in us, of chunks of a stream: how late after its step one comes, and what steps are more apart by."""
    made = cast(Any, StandIn())
    driver = Driver(made)
    prepared = Prepared([1], SamplingParams(max_tokens=200), "", None)
    came: list[float] = []
    if kind == "thread":
        for _ in Stream(driver, prepared, None):
            came.append(time.perf_counter())
    else:

        async def main() -> None:
            async for _ in AsyncStream(driver, lambda: prepared, None, quick=True):
                came.append(time.perf_counter())

        asyncio.run(main())
    driver.stop()
    bare: list[float] = []
    for _ in range(200):
        time.sleep(made.STEP_S)
        bare.append(time.perf_counter())
    late_us = statistics.median(1e6 * (one - two) for one, two in zip(came, made.ended, strict=True))
    driven, alone = (
        statistics.median(1e6 * (two - one) for one, two in pairwise(times)) for times in (made.ended, bare)
    )
    return late_us, driven - alone


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["thread", "task"])
def test_a_token_takes_at_most_50_us_more_than_a_step(kind: str) -> None:
    """Of ten tries one, for other processes may be busy. A chunk's way to its reader overlaps with the next step."""
    tries: list[tuple[float, float]] = []
    while not any(late_us < 120.0 and apart_us < 50.0 for late_us, apart_us in tries):
        assert len(tries) < 10, tries
        tries.append(times_of(kind))


def test_options_by_name_are_those_of_the_records() -> None:
    def names(record: Any) -> set[str]:
        return {field.name for field in fields(record)}

    assert {*SamplingOptions.__annotations__} == names(SamplingParams)
    assert {*RuntimeOptions.__annotations__} == names(RuntimeConfig)
    assert {"model", "method", *SpeculativeOptions.__annotations__} == names(SpeculativeConfig)
    assert {*SamplingOptions.__annotations__} < {*CallOptions.__annotations__}
    assert repr(SamplingParams(max_tokens=3, stop=["x"])) == "SamplingParams(stop=('x',), max_tokens=3)"
