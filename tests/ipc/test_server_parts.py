"""Parts of the server by themselves: percentiles, turns, timers, the step's clock, waking."""

import os
import select
import sys
import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.fair_queue import FairQueue
from lowlat.ipc.server.generations.statistics import Histogram, Statistics
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.threads.watchdog import COLD_FACTOR, StepClock
from lowlat.ipc.wake import Inbox


@given(st.lists(st.floats(2e-6, 100.0), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_percentiles_are_within_a_tenth(seconds: list[float], fraction: float) -> None:
    histogram = Histogram()
    for value in seconds:
        histogram.record(value)
    exact = sorted(seconds)[max(0, -(-int(fraction * 100) * len(seconds) // 100) - 1)]
    assert exact * 0.9999 <= histogram.percentile(fraction) <= exact * 1.0906
    assert histogram.count == len(seconds)
    assert histogram.max_s == max(seconds)


def test_a_histogram_takes_any_time() -> None:
    histogram = Histogram()
    assert histogram.percentile(0.5) == 0.0
    histogram.record(0.0, 3)
    histogram.record(1e9)
    assert histogram.percentile(0.5) <= 1e-6
    assert histogram.to_dict()["count"] == 4
    assert histogram.to_dict()["max"] == 1e12


def test_tokens_a_second_are_of_the_last_whole_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    counted = Statistics()
    for second in range(100, 110):
        counted.tokens(50, second + 0.5)
    assert counted.to_dict(110.1)["tokens_per_s"] == 50.0
    assert counted.to_dict(112.1)["tokens_per_s"] == 30.0
    assert counted.to_dict(10_000.0)["tokens_per_s"] == 0.0


@given(st.lists(st.tuples(st.sampled_from(["a1", "a2", "b1"]), st.sampled_from(["push", "pop", "remove"]))))
def test_turns(operations: list[tuple[str, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    model: dict[str, list[int]] = {}
    for item, (owner, operation) in enumerate(operations):
        if operation == "push":
            queue.push(owner[0], owner, item)
            model.setdefault(owner, []).append(item)
        elif operation == "pop" and any(model.values()):
            popped = queue.pop()
            assert popped in [items[0] for items in model.values() if items]  # an owner's own order
            next(items for items in model.values() if popped in items).remove(popped)
        elif operation == "remove" and model.get(owner):
            assert queue.remove(owner[0], owner, model[owner].pop())
            assert not queue.remove(owner[0], owner, -1)
        assert queue.num_items == sum(map(len, model.values()))


def test_who_has_least_is_first_and_a_users_clients_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for client, item in (("a", "a1"), ("a", "a2"), ("b", "b1"), ("a", "a3")):
        queue.push("many", client, item)
    queue.push("few", "c", "c1")
    queue.push("few", "c", "c2")
    served = Counter({"many": 2, "few": 1})
    order = []
    while queue.num_items:
        order.append(queue.pop(served))
        served["few" if order[-1][0] == "c" else "many"] += 1
    assert order == ["c1", "a1", "c2", "b1", "a2", "a3"]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_between_two_turns_of_one_everybody_has_one(counts: list[int]) -> None:
    queue: FairQueue[int] = FairQueue()
    for owner, count in enumerate(counts):
        for _ in range(count):
            queue.push(owner, "", owner)
    served: Counter[int] = Counter()
    while queue.num_items:
        served[queue.pop()] += 1
        waiting = [owner for owner, count in enumerate(counts) if served[owner] < count]
        assert not waiting or max(served.values()) - min(served[owner] for owner in waiting) <= 1


def test_timers_run_in_order_and_when_due() -> None:
    timers = Timers()
    ran: list[str] = []
    assert timers.run() == -1
    timers.after(0.02, ran.append, "second")
    timers.after(0.0, ran.append, "first")
    timers.after(60.0, ran.append, "never")
    assert 0 < timers.run() <= 21
    assert ran == ["first"]
    time.sleep(0.03)
    timers.run()
    assert ran == ["first", "second"]


def test_a_cancelled_timer_holds_nothing_and_many_of_them_leave() -> None:
    timers = Timers()
    ran: list[int] = []
    payload = [bytes(1 << 20)]
    kept = timers.after(0.01, ran.append, 1)
    timer = timers.after(1e6, ran.extend, payload)
    timers.cancel(timer)
    timers.cancel(timer)
    timers.cancel(None)
    assert sys.getrefcount(payload) == 2
    for _ in range(10_000):
        timers.cancel(timers.after(1e6, ran.append, 0))
    assert len(timers) < 200
    time.sleep(0.02)
    timers.run()
    timers.cancel(kept)  # after the call
    assert ran == [1]


def test_a_steps_allowance_follows_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = StepClock(Limits(watchdog_factor=10.0, watchdog_min_s=0.2))

    def step(kind: tuple[int, bool], seconds: float) -> None:
        nonlocal now
        clock.begin()
        clock.step(*kind)
        now += seconds
        clock.end(now)

    assert clock.age_s() == 0.0
    clock.begin()
    clock.step(1, False)
    assert clock.allowed_s() == 0.2 * COLD_FACTOR
    for _ in range(20):
        step((1, False), 0.01)
    assert clock.allowed_s() == 0.2  # not below the least
    step((8, True), 0.5)
    assert clock.allowed_s() == pytest.approx(5.0)  # seldom seen: by the slowest
    for _ in range(100):
        step((8, False), 0.1)
    assert clock.allowed_s() == pytest.approx(1.0, rel=0.1)
    now += 3.0
    assert clock.age_s() == pytest.approx(3.0)
    clock.rest()
    assert clock.age_s() == 0.0


def test_what_is_put_while_the_reader_sleeps_wakes_it() -> None:
    inbox: Inbox[int] = Inbox()
    try:
        assert inbox.take() is None
        inbox.put(1)
        assert not inbox.sleep()  # there is something already
        assert inbox.take() == 1
        assert inbox.sleep()
        threading.Timer(0.05, inbox.put, (2,)).start()
        readable, _, _ = select.select([inbox.descriptor], [], [], 5.0)
        inbox.awake(bool(readable))
        assert inbox.take() == 2
        inbox.put(3)  # awake: costs no system call
        assert os.eventfd_read(inbox.descriptor) == 1  # what woke the reader, and nothing since
    finally:
        inbox.close()
    inbox.put(4)
    assert inbox.any()


def test_a_reader_is_roused_without_an_item() -> None:
    inbox: Inbox[int] = Inbox()
    try:
        inbox.rouse()  # before it waits
        assert inbox.wait() is None
        threading.Timer(0.05, inbox.rouse).start()
        assert inbox.wait() is None
        inbox.rouse()
        inbox.put(1)
        assert inbox.wait() == 1 and inbox.wait() is None  # the item first
        threading.Timer(0.05, inbox.put, (2,)).start()
        assert inbox.wait() == 2
        assert inbox.wait(0.001) is None
    finally:
        inbox.close()


def test_no_item_is_lost_between_many_putters_and_a_reader_that_sleeps() -> None:
    inbox: Inbox[int] = Inbox()

    def put_all() -> None:
        for item in range(5000):
            inbox.put(item)

    putters = [threading.Thread(target=put_all) for _ in range(3)]
    taken: Counter[int] = Counter()
    try:
        for putter in putters:
            putter.start()
        while taken.total() < 15_000:
            while (item := inbox.take()) is not None:
                taken[item] += 1
            if taken.total() < 15_000 and inbox.sleep():
                readable, _, _ = select.select([inbox.descriptor], [], [], 5.0)
                assert readable
                inbox.awake(bool(readable))
    finally:
        for putter in putters:
            putter.join()
        inbox.close()
    assert set(taken.values()) == {3}
