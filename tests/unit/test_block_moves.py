"""Copies of blocks to and from host memory: what they move, in how many copies, and how many of these are under way."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from lowlat.errors import DeviceError
from lowlat.executors import block_moves
from lowlat.executors.block_moves import BlockMover
from lowlat.executors.bus_copies import CALL_MOVES, MAX_CALLS, BusCopies, Moves, Starting, start_together, wait_for
from lowlat.executors.distributed.rank_moves import RankMover
from lowlat.graphs import BufferSet, BufferSpec, Paging, Role
from lowlat.sequence.tiers.arena import HostArena
from lowlat.sequence.tiers.key import ChunkKey, Load, Save

PLACES = [(4, 5, 6, 7), (20, 21, 3, 30), (9, 8, 11, 10)]  # 1, 3 and 4 runs
CPU = torch.device("cpu")


def nothing() -> None:
    return


@pytest.fixture
def state() -> BufferSet:
    shapes = {"k_cache": (40, 8, 2, 4), "v_cache": (40, 8, 2, 4), "features": (40, 5)}
    specs = [
        BufferSpec(name, shape, torch.float32, Role.STATE, paging=next(iter(Paging))) for name, shape in shapes.items()
    ]
    buffers = BufferSet(specs, CPU)
    for buffer in buffers.values():
        buffer.copy_(torch.randn(buffer.shape))
    return buffers


def test_contents_of_several_sizes_go_to_their_places_and_back(state: BufferSet) -> None:
    mover, places = BlockMover(state, CPU), [*PLACES, (15, 16), (1,)]
    size = {count: mover.content_bytes("", count) for count in (1, 2, 4)}
    contents = [torch.zeros(size[len(own)], dtype=torch.uint8) for own in places]
    mover.start_out([Save(ChunkKey(b"", ""), own) for own in places], contents, nothing)()
    for own, content in zip(places, contents, strict=True):
        assert torch.equal(content, mover.read("", own)())
    expected = {name: buffer.clone() for name, buffer in state.items()}
    for buffer in state.values():
        buffer[[block for own in places for block in own]] = -1.0
    mover.start_in([Load("", *pair) for pair in zip(places, contents, strict=True)], nothing)()
    assert all(torch.equal(buffer, expected[name]) for name, buffer in state.items())
    with pytest.raises(ValueError, match="for 1 places of"):
        mover.start_in([Load("", (3,), contents[0])], nothing)


def test_places_that_follow_each_other_are_one_copy(state: BufferSet) -> None:
    mover = BlockMover(state, CPU)
    found: list[Moves] = []

    def start(number: int, moves: Moves, after: Callable[[], None], *, to_device: bool) -> Starting:
        found.append(moves)
        return nothing
        yield

    mover.bus.start = start  # type: ignore[method-assign]
    content = torch.zeros(mover.content_bytes("", 4), dtype=torch.uint8)
    mover.start_in([Load("", own, content) for own in PLACES], nothing)
    assert len(found[0].device) == (1 + 3 + 4) * len(state)
    assert sum(found[0].num_bytes.tolist()) == sum(12 * buffer[0].numel() * 4 for buffer in state.values())


class Event:
    """An event that notes when it is waited for."""

    def __init__(self, done: list[str], number: int) -> None:
        self.done, self.number = done, number

    def record(self, stream: object) -> None:
        self.done.append(f"recorded {self.number}")

    def synchronize(self) -> None:
        self.done.append(f"waited {self.number}")


@pytest.fixture
def bus_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[BusCopies, list[str]]]:
    """Buses by name, whose calls of a driver and events are noted in one list."""
    done: list[str] = []
    numbers = count()
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event(done, next(numbers)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def made(name: str) -> tuple[BusCopies, list[str]]:
        bus, stream = BusCopies(CPU, 0), cast(Any, object())
        bus._streams = [stream]
        monkeypatch.setattr(bus, "_launch", lambda stream, moves, to_device: done.append(f"{name}{len(moves.device)}"))
        return bus, done

    return made


def test_a_call_has_few_copies_and_few_calls_are_under_way(
    bus_of: Callable[[str], tuple[BusCopies, list[str]]],
) -> None:
    bus, done = bus_of("a")
    numbers = np.arange(4 * CALL_MOVES + 1, dtype=np.uint64)
    wait = start_together([bus.start(0, Moves(*[numbers] * 3), lambda: done.append("after"), to_device=True)])
    assert [each for each in done if each[0] == "a"] == ["after", *[f"a{CALL_MOVES}"] * 4, "a1"]
    recorded = [f"recorded {number}" for number in range(MAX_CALLS)]
    assert [each for each in done if each[0] != "a"] == [
        *recorded,
        *(f"{what} {k + at}" for k in range(3) for what, at in (("waited", 0), ("recorded", 2))),
    ]
    wait()
    assert done[-1] == "waited 4"


def test_copies_of_several_devices_are_started_in_turns(bus_of: Callable[[str], tuple[BusCopies, list[str]]]) -> None:
    """The second device's bus has work before the first's copies are done, and what waits waits for both."""
    numbers = np.arange(3 * CALL_MOVES, dtype=np.uint64)
    several = [bus_of(name) for name in "abc"]
    moves = [Moves(*[numbers[: CALL_MOVES * calls]] * 3) for calls in (3, 3, 1)]
    starting = [bus.start(0, own, nothing, to_device=False) for (bus, _), own in zip(several, moves, strict=True)]
    done = several[0][1]
    wait = start_together(starting)
    assert [each[0] for each in done if each[0] in "abc"] == list("abcabab")
    assert not any(each.startswith("waited") for each in done[: done.index("recorded 4") + 1])
    del done[:]
    wait()
    assert sorted(done) == ["waited 2", "waited 5", "waited 6"]


def test_a_device_that_fails_amid_a_copy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Event) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(Event, "synchronize", lost)
    with pytest.raises(DeviceError, match=r"the device cpu failed amid copies.*unspecified launch failure"):
        wait_for(Event([], 0), CPU)  # type: ignore[arg-type]


class LaterEvent:
    """An event that has come when all have."""

    come = False

    def record(self) -> None:
        return

    def query(self) -> bool:
        return LaterEvent.come


class LateStream:
    """A stream whose copies read host memory some time later."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.cuda_stream = 0

    def record_event(self) -> LaterEvent:
        return LaterEvent()

    def wait_event(self, event: LaterEvent) -> None:
        return

    def wait_stream(self, stream: "LateStream") -> None:
        return


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tier_s_memory_is_nobody_else_s_until_it_was_copied_to_staging(
    num_ranks: int, state: BufferSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier lets go of a content while its copy waits for the steps before it: another would be written over it."""
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    for name, kind in (("Event", LaterEvent), ("Stream", LateStream), ("current_stream", LateStream)):
        monkeypatch.setattr(torch.cuda, name, kind)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(block_moves, "BusCopies", lambda *_, **__: SimpleNamespace(wait_event=lambda _: None))
    monkeypatch.setattr(LaterEvent, "come", False)
    movers = [BlockMover(state, CPU, cast(Any, LateStream())) for _ in range(num_ranks)]
    mover: BlockMover | RankMover = movers[0] if num_ranks == 1 else RankMover(movers)
    size = mover.content_bytes("", 4)
    arena = HostArena(8 * (4096 * num_ranks), lambda count: torch.zeros(count, dtype=torch.uint8))  # a slab each
    contents = [arena.take(size) for _ in range(8)]
    assert size <= arena.slab_bytes and arena.take(size) is None
    for content in contents[:2]:
        assert content is not None
        mover.write("", PLACES[0], content)
    del contents, content
    for _ in range(6):  # those that were not written are free
        contents = [arena.take(size) for _ in range(8)]
        assert [each is None for each in contents].count(True) == 2
        del contents
        mover.mark()
    LaterEvent.come = True
    mover.mark()
    held = [arena.take(size) for _ in range(8)]
    assert None not in held
