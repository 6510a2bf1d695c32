"""The device loop and steps launched ahead on a GPU: the tokens of steps launched in turn, and loops that end."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import check_invariants, run_all
from tiny_models import make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import ConfigError
from lowlat.executors.graph import GraphExecutor
from lowlat.step.state import RING_ENTRIES

OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 2048, "block_size": 16, "prefill_chunk": 32} | {
    "device": "cuda",
    "dtype": "bfloat16",
    "executor": "graph",
}
DEPTH = 3
MODES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.8, "repetition_penalty": 1.3, "stop_token_ids": (5, 7, 11)},
]


@pytest.fixture(scope="module")
def runtimes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runtime, Runtime]]:
    """Steps in turn or ahead, and loops."""
    directory: Path = tmp_path_factory.mktemp("pair")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "max_position_embeddings": 4096}
    pair = make_pair(directory, "llama", **sizes)
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=DEPTH, strict=True)
    with (
        Runtime.load(pair.target, config, **OPTIONS) as plain,
        Runtime.load(pair.target, config, device_loop=True, **OPTIONS) as looping,
    ):
        yield plain, looping


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    rng = random.Random(1000 * length + seed)
    return [rng.randrange(97) for _ in range(length)]


def params(number: int, max_tokens: int) -> SamplingParams:
    """One of the modes; the model's own stop tokens are ignored."""
    return SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True, **MODES[number % len(MODES)])


def executor_of(runtime: Runtime) -> GraphExecutor:
    """The executor, by its type."""
    assert isinstance(runtime.executor, GraphExecutor)
    return runtime.executor


def head_of(runtime: Runtime) -> int:
    """Steps published."""
    return int(runtime.executor.state["ring_head"])


def drained(runtime: Runtime) -> None:
    """Pass over what was published, also by steps that the test launched itself, and end every request."""
    runtime.executor.synchronize()
    mailbox, in_flight = runtime._steps.mailbox, runtime._steps.launches.in_flight
    mailbox.poll()
    in_flight.saw(in_flight.num_seen + in_flight.num_steps)
    in_flight.num_seen = mailbox.num_seen
    for name in list(runtime._requests):
        runtime.cancel(name)
    runtime.submit([1], params(0, 1))
    run_all(runtime)


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_ahead_and_in_a_loop_tokens_are_those_of_steps_in_turn(count: int, runtimes: tuple[Runtime, Runtime]) -> None:
    def run(runtime: Runtime, depth: int | None) -> list[list[int]]:
        names = [
            runtime.submit(prompt_of(1 + 17 * number, number), params(number, 150 + 40 * number))
            for number in range(count)
        ]
        tokens = run_all(runtime, depth)
        return [tokens[name] for name in names]

    plain, looping = runtimes
    expected = run(plain, DEPTH)  # a depth of the caller's own: each step is launched when the last was read
    assert run(plain, None) == expected
    assert run(looping, None) == expected


def test_budgets_are_kept_exactly(runtimes: tuple[Runtime, Runtime]) -> None:
    runtime = runtimes[1]
    executor = executor_of(runtime)
    runtime.submit(prompt_of(5), params(0, 1500))
    while not runtime.step(DEPTH):
        pass
    bucket = runtime.scheduler.choose_bucket(DEPTH)
    for budget in (1, 2, 3, 32, 1):
        head = head_of(runtime)
        executor.start_loop(bucket, budget)
        assert executor.wait_loop(head + budget)
        assert not executor.wait_loop(head + budget + 1)
        executor.synchronize()
        assert head_of(runtime) == head + budget
    head = head_of(runtime)
    for budget in (30, 20):  # the second is queued after the first
        executor.start_loop(bucket, budget)
    assert executor.wait_loop(head + 50)
    executor.synchronize()
    assert head_of(runtime) == head + 50
    with pytest.raises(ConfigError, match="loop of 0 steps"):
        executor.start_loop(bucket, 0)
    drained(runtime)


@pytest.mark.parametrize("num_loops", [1, 2])
def test_the_flag_ends_a_loop_within_two_steps_and_one_behind_it_after_one(
    num_loops: int, runtimes: tuple[Runtime, Runtime]
) -> None:
    runtime = runtimes[1]
    executor = executor_of(runtime)
    late = []
    for _ in range(60):
        runtime.submit(prompt_of(5), params(0, 1500))
        while not runtime.step(DEPTH):
            pass
        bucket, head = runtime.scheduler.choose_bucket(DEPTH), head_of(runtime)
        for _ in range(num_loops):
            executor.start_loop(bucket, RING_ENTRIES // num_loops)
        assert executor.wait_loop(head + 5)
        executor.stop_loop()
        seen = head_of(runtime)
        whole = executor.wait_loop(head + RING_ENTRIES)
        assert whole or executor.idle()
        if seen < head + RING_ENTRIES - 8:  # on a busy machine the host may come when the loop is all but done
            assert not whole
            late.append(head_of(runtime) - seen)
        drained(runtime)
    assert len(late) >= 5
    assert max(late) <= 1 + num_loops, late


def test_a_loop_ends_with_its_last_slot(runtimes: tuple[Runtime, Runtime]) -> None:
    runtime = runtimes[1]
    executor = executor_of(runtime)
    runtime.submit(prompt_of(5), SamplingParams(max_tokens=10, ignore_eos=True, max_draft_tokens=0))
    while not runtime.step(DEPTH):
        pass
    head = head_of(runtime)
    for _ in range(2):
        executor.start_loop(runtime.scheduler.choose_bucket(DEPTH), 32)
    assert not executor.wait_loop(head + 32)
    assert head_of(runtime) == head + 9 + 1  # the loop after it runs one step for nobody
    drained(runtime)


def test_a_request_joins_soon_and_a_cancelled_one_is_heard_no_more(runtimes: tuple[Runtime, Runtime]) -> None:
    runtime = runtimes[1]
    first = runtime.submit(prompt_of(5), params(0, 1800))
    for _ in range(10):
        runtime.step()
    second = runtime.submit(prompt_of(5, 1), params(1, 1800))
    before = head_of(runtime)
    while not any(output.request_id == second for output in runtime.step()):
        pass
    assert head_of(runtime) <= before + 5 + RING_ENTRIES  # a host that looks late lets the ring fill, and no more
    time.sleep(0.05)  # the loop has done all it may
    runtime.cancel(first)
    outputs = [output for _ in range(20) for output in runtime.step()]
    assert [output.finish_reason for output in outputs if output.request_id == first] == ["cancelled"]
    assert any(output.request_id == second for output in outputs)
    runtime.cancel(second)
    assert [output.finish_reason for output in runtime.step()] == ["cancelled"]
    assert not runtime.busy
    check_invariants(runtime)


@pytest.mark.parametrize("which", [0, 1], ids=["ahead", "loop"])
def test_random_orders(which: int, runtimes: tuple[Runtime, Runtime]) -> None:
    """Submit, step and cancel in any order: every request ends once, with the tokens that it has alone."""
    plain, runtime, rng = runtimes[0], runtimes[which], random.Random(which)
    tokens: dict[str, list[int]] = {}
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    ended: dict[str, str] = {}
    cancelled: set[str] = set()  # they end with the next step's outputs
    for number in range(3000):
        action = rng.random()
        if action < 0.1 and len(asked) - len(ended) < 8:
            request = prompt_of(rng.randrange(1, 80), number), params(number, rng.randrange(1, 120))
            name = runtime.submit(*request)
            asked[name], tokens[name] = request, []
        elif action < 0.12 and set(asked) - set(ended) - cancelled:
            name = rng.choice(sorted(set(asked) - set(ended) - cancelled))
            runtime.cancel(name)
            cancelled.add(name)
        else:
            for output in runtime.step(DEPTH if action > 0.98 else None):
                assert output.request_id not in ended
                tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    ended[output.request_id] = output.finish_reason
        if number % 50 == 0:
            check_invariants(runtime)
            time.sleep(rng.choice((0.0, 0.0, 0.01)))
    for name, found in run_all(runtime).items():
        tokens[name] += found
    assert len(asked) > 50
    assert "error" not in ended.values()
    names = {plain.submit(*asked[name]): name for name in rng.sample(sorted(asked), 4)}
    for again, found in run_all(plain, DEPTH).items():
        name = names[again]
        whole = name not in cancelled
        assert tokens[name] == found[: None if whole else len(tokens[name])]


def test_loops_hold_the_step_s_kernels(runtimes: tuple[Runtime, Runtime]) -> None:
    executor = executor_of(runtimes[1])
    for bucket in runtimes[1].ladder.buckets:
        assert executor.loop(bucket).num_kernels == executor.num_kernels(bucket)
    with pytest.raises(ConfigError, match="see device_loop"):
        executor_of(runtimes[0]).start_loop(runtimes[0].ladder.buckets[0], 1)


def test_steps_in_a_loop_do_not_wait_for_the_host(runtimes: tuple[Runtime, Runtime]) -> None:
    """A host that sleeps finds half a ring of steps done."""
    runtime = runtimes[1]
    runtime.submit(prompt_of(1), params(0, 1800))
    runtime.step()
    time.sleep(0.2)
    torch.cuda.synchronize()
    outputs = runtime.step()
    assert len(outputs) >= RING_ENTRIES // 2 - 2
    drained(runtime)
