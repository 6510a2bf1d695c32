"""The book of sessions: who ends when, and that many sessions make no request and no count of pins slower."""

import gc
import random
import sys
from collections.abc import Callable, Hashable, Sequence
from types import FrameType
from typing import Any

import pytest

from lowlat.engine.sessions import book as book_module
from lowlat.engine.sessions.book import SessionBook, SessionKey, SessionRecord
from lowlat.errors import RequestError
from lowlat.sequence.prefix_index import CachedChunk, PrefixIndex

TTL_S = 10.0


class Pins:
    """The part of a KV cache that the book uses: what each owner pins."""

    def __init__(self) -> None:
        self.held: dict[Hashable, list[bytes]] = {}

    def pin(self, owner: Hashable, digests: Sequence[bytes]) -> None:
        self.held[owner] = list(digests)

    def unpin(self, owner: Hashable) -> None:
        self.held.pop(owner, None)

    def pinned(self, owner: Hashable) -> list[bytes]:
        return self.held.get(owner, [])


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[SessionBook, Pins, Clock]:
    pins, clock = Pins(), Clock()
    held: Any = pins
    return SessionBook(held, TTL_S, clock), pins, clock


def key(number: int) -> SessionKey:
    return SessionKey("", f"s{number}")


def work(call: Callable[[], object]) -> int:
    """The bytecodes of Python that a call takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_sessions_end_as_their_deadlines_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book_module, "MAX_SESSIONS", 8)
    chooser = random.Random(5)
    book, pins, clock = made()
    expected: dict[SessionKey, SessionRecord] = {}  # those that live, by the plain rule
    known: list[SessionRecord] = []  # all there ever were: some are opened again
    running: list[SessionRecord] = []

    def expire() -> None:
        for name in [name for name, each in expected.items() if not each.num_running and each.deadline <= clock.now]:
            del expected[name]

    def enter(record: SessionRecord) -> None:
        expire()
        if record.key not in expected and len(expected) >= 8:
            idle = [each for each in expected.values() if not each.num_running]
            del expected[min(idle, key=lambda each: each.deadline).key]
        expected[record.key] = record

    num_full = 0
    for _ in range(6000):
        clock.now += chooser.choice((0.0, 0.1, 1.0, 4.0)) + 1e-6 * chooser.random()
        kind = chooser.randrange(6)
        is_full = len(expected) >= 8 and all(each.num_running for each in expected.values())
        book.expire()
        expire()
        if kind == 0 and not is_full:
            record = book.open(key(chooser.randrange(20)), chooser.choice((None, None, 1.0, 60.0)))
            enter(record)
            known = [*known, record][-30:]
            pins.pin(record.key, [b"x"])
        elif kind in (1, 2) and known:
            record = chooser.choice(known)  # it may have ended, and another may have its name
            if record.key not in expected and is_full:
                num_full += 1
                with pytest.raises(RequestError, match="8 sessions have requests under way"):
                    book.begin(record)
            elif len(running) < 12:
                book.begin(record)
                enter(record)
                running.append(record)
        elif kind in (3, 4) and running:
            record = running.pop(chooser.randrange(len(running)))
            book.finish(record, (1, 2), 3, 1)
            assert record.key in expected or record.key not in pins.held
        elif kind == 5 and known:
            record = chooser.choice(known)
            book.end(record)
            if expected.get(record.key) is record:
                del expected[record.key]
        assert dict(book) == expected
        assert set(pins.held) <= set(expected)
    assert num_full


def test_a_session_ends_no_sooner_than_its_last_request_says() -> None:
    book, _, clock = made()
    record = book.open(key(1))
    for _ in range(5):
        clock.now += TTL_S - 1
        book.begin(record)
        book.finish(record, (1,), 1)
    clock.now += TTL_S - 0.5
    assert book.stats()["num_sessions"] == 1
    book.open(key(1), 0.25)  # a shorter life counts at once
    clock.now += 0.5
    assert book.stats() == {"num_sessions": 0, "num_running": 0, "num_ended": 1}


def test_many_sessions_make_a_request_no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_request(num_live: int) -> int:
        monkeypatch.setattr(book_module, "MAX_SESSIONS", num_live)
        book, _, clock = made()
        for number in range(num_live):
            clock.now += TTL_S / (2 * num_live)
            book.open(key(number))

        def requests() -> None:
            for number in range(num_live, num_live + 20):  # each takes the place of the oldest
                clock.now += TTL_S / (2 * num_live)
                record = book.open(key(number))
                book.begin(record)
                book.finish(record, (1, 2, 3), 1)
            clock.now += TTL_S / 2  # a few end by themselves, one at a time
            for _ in range(20):
                clock.now += TTL_S / (2 * num_live)
                book.expire()

        return work(requests)

    assert of_a_request(2000) < 2 * of_a_request(100)


def test_sessions_that_were_closed_are_let_go_of() -> None:
    book, pins, _ = made()
    for number in range(3000):
        book.end(book.open(key(number), 1e9))
    gc.collect()
    assert sum(isinstance(each, SessionRecord) for each in gc.get_objects()) < 200
    assert not book and not pins.held


def test_pinned_chunks_are_counted_as_they_come_and_go() -> None:
    chooser = random.Random(7)
    index = PrefixIndex()
    digests = [bytes([number]) * 32 for number in range(12)]
    pinned: list[list[bytes]] = []
    for _ in range(4000):
        kind = chooser.randrange(4)
        if kind == 0:
            pinned.append(chooser.sample(digests, 3))
            index.pin(pinned[-1])
        elif kind == 1 and pinned:
            index.unpin(pinned.pop(chooser.randrange(len(pinned))))
        elif kind == 2 and (new := [each for each in digests if index.get(each) is None]):
            index.retire(index.add(chooser.choice(new), None, (1,)))
        elif kind == 3 and len(index):
            index.drop(chooser.choice(list(index)))
        wanted = {each for chain in pinned for each in chain}
        assert index.num_pinned == sum(chunk.digest in wanted for chunk in index)
        assert list(index.problems()) == []


def test_a_chunk_that_left_the_index_makes_no_other_of_its_digest_newer_than_what_leads_there() -> None:
    """A copy held it until then; meanwhile it was dropped, and the same text was read again."""
    index, (above, below) = PrefixIndex(), [bytes([number]) * 32 for number in range(2)]
    root = index.add(above, None, (1,))
    before = index.add(below, root, (2,))
    assert index.drop(before) == [before] and before.num_users
    now = index.add(below, root, (3,))
    for chunk in (now, root):
        index.retire(chunk)
    assert index.retire(before) == (2,)
    index.touch_chain(before)
    assert list(index.problems()) == [] and index.oldest_first() == [now, root]
    index.touch_chain(now)
    assert index.oldest_first() == [now, root]


def test_many_pins_make_their_count_no_slower() -> None:
    def of_a_count(num_chains: int) -> int:
        index = PrefixIndex()
        for number in range(num_chains):
            above: CachedChunk | None = None
            chain = [index.digest(index.root(""), (number, k)) for k in range(4)]
            for digest in chain:
                above = index.add(digest, above, (1,))
            index.pin(chain)
        assert index.num_pinned == 4 * num_chains
        return work(lambda: index.num_pinned)

    assert of_a_count(500) == of_a_count(5)
