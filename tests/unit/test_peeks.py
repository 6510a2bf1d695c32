"""Copies to the host that nothing waits for: what they hold, and whose memory they take."""

import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from lowlat.executors.peeks import Peeks, SentValues


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether the device has passed the copies that were started, in order."""
    passed: list[bool] = []

    def event() -> SimpleNamespace:
        passed.append(False)
        number = len(passed) - 1
        return SimpleNamespace(record=lambda: None, query=lambda: passed[number])

    monkeypatch.setattr(torch.cuda, "Event", event)
    yield passed


def test_memory_of_copies_that_were_seen_is_used_again(reached: list[bool]) -> None:
    """What was given stays; all memory is known, so that it can be kept where the device has failed."""
    peeks, buffers = Peeks(on_gpu=False), [torch.arange(3, dtype=torch.int32), torch.arange(4.0).view(2, 2)]
    first = peeks.start(buffers)
    buffers[0] += 5
    second = peeks.start(buffers)
    assert first() is None and second() is None and len(peeks.memory) == 2
    reached[0] = True
    found = first()
    third = peeks.start(buffers[1:])
    buffers[1].zero_()
    reached[2] = True
    assert found is not None and found[0].tolist() == [0, 1, 2] and found[1].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert second() is None and first() is found and len(peeks.memory) == 2
    (last,) = third() or ()
    assert last.tolist() == [[0.0, 1.0], [2.0, 3.0]] and last.dtype == torch.float32
    assert peeks.start([torch.zeros(64)])() is None and len(peeks.memory) == 3


def test_memory_of_copies_to_the_device_stays_until_they_have_ended(reached: list[bool]) -> None:
    """Whoever made it may let go of it at once; it goes with the first copies after those that it was of."""
    sent, tables = SentValues(), [torch.zeros(4) for _ in range(3)]
    alive = [weakref.ref(table) for table in tables]
    sent.keep(tables[:2])
    sent.keep(tables[2:])
    del tables
    assert all(each() is not None for each in alive) and len(sent.held) == 2
    reached[1] = True  # copies of one stream end in order: nothing is looked for after the first that has not
    sent.keep([torch.zeros(1)])
    assert all(each() is not None for each in alive)
    reached[0] = True
    sent.keep([torch.zeros(1)])
    assert all(each() is None for each in alive) and len(sent.held) == 2
