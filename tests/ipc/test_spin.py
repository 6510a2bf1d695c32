"""The I/O thread polls on for a moment after a request, where the next one is likely to follow at once."""

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, expected_tokens
from served import Serve, eventually

from lowlat.ipc.server.router import Router
from lowlat.ipc.server.threads import spin as spin_module
from lowlat.ipc.server.threads.spin import Spin

LONG_S = 0.6


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spin_module, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the router looked without waiting, and how often it waited."""
    counts = [0, 0]
    wait = Router.wait

    def count(router: Router, timeout_ms: int) -> bool:
        counts[timeout_ms != 0] += 1
        return wait(router, timeout_ms)

    monkeypatch.setattr(Router, "wait", count)
    return counts


def _request(spin: Spin, clock: Clock, *, after_s: float) -> None:
    """A request that comes so long after the last one's end, and ends."""
    clock.now += after_s
    spin.note(False)
    assert not spin.due and not spin.goes_on()
    clock.now += 1.0
    spin.note(True)


def test_it_spins_where_the_last_request_came_at_once(clock: Clock) -> None:
    spin = Spin(0.001)
    assert not spin.goes_on()
    _request(spin, clock, after_s=0.0)
    assert not spin.due and not spin.goes_on()  # nothing had ended before that one
    _request(spin, clock, after_s=0.0005)
    for _ in range(3):
        assert spin.due and spin.goes_on()
    _request(spin, clock, after_s=0.0009)
    assert spin.goes_on()
    clock.now += 0.0011
    assert spin.due and not spin.goes_on() and not spin.due
    _request(spin, clock, after_s=0.0)  # too late: the next one is not awaited
    assert not spin.goes_on()


def test_a_request_ends_it(clock: Clock) -> None:
    spin = Spin(0.001)
    for _ in range(2):
        _request(spin, clock, after_s=0.0005)
    assert spin.goes_on()
    spin.note(False)
    assert not spin.goes_on()


@pytest.mark.parametrize(("seconds", "cores"), [(0.0, {0, 1}), (0.001, {3})])
def test_it_never_spins(clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, cores: set[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    spin = Spin(seconds)
    for _ in range(4):
        _request(spin, clock, after_s=0.0)
        assert not spin.due and not spin.goes_on()


def _in_a_row(serve: Serve, engine: FakeEngine, max_tokens: int, **options: Any) -> Callable[[], None]:
    client = serve(engine, **options).client()
    numbers = iter(range(100))

    def ask() -> None:
        request = client.submit(next(numbers), [7], max_tokens=max_tokens)
        client.finish(request)
        assert request.token_ids == expected_tokens([7], max_tokens)

    return ask


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_the_io_thread_stays_awake_between_requests_in_a_row(serve: Serve, turns: list[int], max_tokens: int) -> None:
    """With one token the decode thread ends the request; with three, the I/O thread."""
    ask = _in_a_row(serve, FakeEngine(0.005), max_tokens, spin_s=LONG_S)
    for _ in range(2):
        ask()
    looked = turns[0]
    eventually(lambda: turns[0] > looked + 100)
    ask()
    time.sleep(LONG_S + 0.2)
    looked = turns[0]
    time.sleep(0.2)
    assert turns[0] == looked  # it sleeps again
    ask()


@pytest.mark.parametrize(("on_device", "limits"), [(False, {"spin_s": LONG_S}), (True, {"spin_s": 0.0})])
def test_the_io_thread_sleeps(serve: Serve, turns: list[int], on_device: bool, limits: dict[str, float]) -> None:
    ask = _in_a_row(serve, FakeEngine(0.005, on_device=on_device), 3, **limits)
    for _ in range(4):
        ask()
    time.sleep(0.05)
    assert turns[0] < 20 < 4 * turns[1]
