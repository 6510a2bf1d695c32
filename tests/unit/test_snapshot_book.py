"""Snapshots of recurrent states: which row a prompt begins with, which rows it leaves, and what becomes of them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lowlat.sequence.kvcache import KVCache
from lowlat.sequence.snapshot_book import MAX_KEPT, OWN_ROW, PREFILL_STATES, SnapshotBook

BLOCK, CHUNK, FIRST_ROW = 8, 16, 2
MOST = 4 * CHUNK  # positions of a prompt that are written at once


def make(num_snapshots: int, *, interval: int = 0, num_blocks: int = 400) -> KVCache:
    book = SnapshotBook(FIRST_ROW, num_snapshots, CHUNK, interval)
    return KVCache(num_blocks, BLOCK, CHUNK, reuse=True, share_decoded=False, books=[book])


def text(*chunks: int, more: int = 1) -> list[int]:
    """A prompt of whole chunks and some positions more."""
    return [value for value in chunks for _ in range(CHUNK)] + [0] * more


class Device:
    """The device's rows of state hold the tokens that they have seen."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, ...]] = {}
        self.own: dict[str, tuple[int, ...]] = {}

    def prefill(self, cache: KVCache, name: str, prompt: list[int], start: int, stop: int) -> None:
        """Run a part as the programs do: begin with a row or the slot's own, leave rows on the way."""
        cache.append(name, start, stop)
        begin, *pairs = cache.commands(name)[PREFILL_STATES]
        seen = () if not start else self.own[name] if begin == OWN_ROW else self.rows[begin]
        assert seen == tuple(prompt[:start])
        assert len(pairs) == 2 * MAX_KEPT
        for row, count in zip(pairs[::2], pairs[1::2], strict=True):
            if row != OWN_ROW:
                assert 0 < count <= stop - start and (start + count) % CHUNK == 0
                self.rows[row] = tuple(prompt[: start + count])
        self.own[name] = tuple(prompt[:stop])
        cache.mark_prefilled(name, stop)

    def run(self, cache: KVCache, name: str, prompt: list[int]) -> int:
        """Admit and prefill a prompt whole; returns its cached tokens."""
        allocation = cache.admit(name, prompt, len(prompt) + 8, 1)
        assert allocation is not None
        for start in range(allocation.num_cached_tokens, len(prompt), MOST):
            self.prefill(cache, name, prompt, start, min(start + MOST, len(prompt)))
            cache.invariants()
        return allocation.num_cached_tokens


def test_a_turn_goes_on_where_the_last_one_s_prompt_ended() -> None:
    cache, device, prompt = make(4), Device(), text(*range(10), more=5)
    assert device.run(cache, "0", prompt) == 0
    cache.release("0")
    for turn in range(1, 6):
        longer = [*prompt, *range(50)]
        assert device.run(cache, str(turn), longer) == len(prompt) // CHUNK * CHUNK
        cache.release(str(turn))
        prompt = longer


def test_idle_conversations_take_a_row_each_and_one_more() -> None:
    cache, device, prompts = make(6), Device(), [[number] * (4 * CHUNK + 3) for number in range(5)]
    for turn in range(4):
        for number, prompt in enumerate(prompts):
            before = (len(prompt) - 20) // CHUNK * CHUNK if turn else 0
            assert device.run(cache, f"{turn} {number}", prompt) == before
            cache.release(f"{turn} {number}")
            prompt += [turn] * 20


def test_the_snapshot_of_a_system_prompt_stays_while_conversations_go_on() -> None:
    cache, device, system = make(4), Device(), [9] * (6 * CHUNK)
    for number in range(3):
        device.run(cache, str(number), system + [number] * 40)
        cache.release(str(number))
    talk = [[number] * (5 * CHUNK + 3) for number in (7, 8)]
    for turn in range(4):
        for number, prompt in enumerate(talk):
            device.run(cache, f"{turn} {number}", prompt)
            cache.release(f"{turn} {number}")
            prompt += [turn] * 20
        assert device.run(cache, f"{turn} short", [*system, *[20 + turn] * 5]) == 6 * CHUNK
        cache.release(f"{turn} short")


def read_others(cache: KVCache, device: Device, count: int) -> list[list[int]]:
    """Read so many other prompts, each of which leaves a snapshot; returns them."""
    others = [[number + 50] * (2 * CHUNK + 3) for number in range(count)]
    for number, other in enumerate(others):
        device.run(cache, f"other {number}", other)
        cache.release(f"other {number}")
    return others


def broken_off(cache: KVCache, device: Device, name: str, prompt: list[int], num_parts: int) -> int:
    """Read some parts of a prompt and break it off; returns its cached tokens."""
    allocation = cache.admit(name, prompt, len(prompt) + 1, 1)
    assert allocation is not None
    for part in range(num_parts):
        start = allocation.num_cached_tokens + part * MOST
        device.prefill(cache, name, prompt, start, start + MOST)
    cache.release(name, completed=False)
    cache.invariants()
    return allocation.num_cached_tokens


def test_a_prompt_that_is_broken_off_again_and_again_goes_on_where_it_was() -> None:
    cache, device, prompt = make(4), Device(), text(*range(40), more=5)
    others = read_others(cache, device, 2)
    found = [broken_off(cache, device, str(attempt), prompt, 1) for attempt in range(10)]
    assert found == [attempt * MOST for attempt in range(10)]
    for number, other in enumerate(others):  # it took free rows, and no more of them than it began with and left
        assert device.run(cache, f"again {number}", other) == 2 * CHUNK
        cache.release(f"again {number}")
    assert device.run(cache, "whole", prompt) == 10 * MOST == 40 * CHUNK


def test_a_prompt_that_is_broken_off_goes_on_where_it_was_the_time_before_where_no_row_is_free() -> None:
    cache, device, prompt = make(3), Device(), text(*range(40), more=5)
    read_others(cache, device, 3)
    found = [broken_off(cache, device, str(attempt), prompt, 1 + attempt) for attempt in range(4)]
    assert found == [0, 0, MOST, 2 * MOST]


def test_prompts_part_at_a_snapshot_from_the_third_on() -> None:
    cache, device = make(8), Device()
    system = [1] * (6 * CHUNK)
    found = [device.run(cache, str(n), [*system, *[10 + n] * 40]) for n in range(4)]
    assert found == [0, 0, 6 * CHUNK, 6 * CHUNK]  # the second shows where they part


@pytest.mark.parametrize("more", [0, 1])
def test_the_same_prompt_goes_on_at_its_last_chunk(more: int) -> None:
    cache, device, prompt = make(4), Device(), text(*range(9), more=more)
    device.run(cache, "a", prompt)
    assert device.run(cache, "b", prompt) == (len(prompt) - 1) // CHUNK * CHUNK


def test_intervals_go_first_and_without_rows_nothing_is_found() -> None:
    cache, device = make(3, interval=2 * CHUNK), Device()
    device.run(cache, "a", text(*range(20)))
    cache.release("a")
    counts = {"num_snapshots": 3, "num_free": 0, "num_listed": 3, "num_found": 0, "num_broken_pins": 0}
    assert cache.pool_stats()["snapshots"] == [counts]
    assert device.run(cache, "b", text(*range(21))) == 20 * CHUNK
    none = make(0)
    device.run(none, "a", text(*range(5)))
    assert device.run(none, "b", text(*range(5))) == 0


def test_a_pinned_snapshot_that_goes_is_counted() -> None:
    cache, device = make(2), Device()
    for number in range(3):
        device.run(cache, str(number), text(number, more=2))
        cache.release(str(number), owner=number)  # each pins its own; there are rows for two
    assert cache.pool_stats()["snapshots"][0]["num_broken_pins"] == 1


def test_a_session_s_snapshot_stays_pinned_when_its_next_turn_is_broken_off() -> None:
    cache, device, prompt = make(3), Device(), [1] * (5 * CHUNK + 2)
    device.run(cache, "a", prompt)
    cache.release("a", owner="session")
    longer = [*prompt, *[2] * (6 * CHUNK)]
    assert cache.admit("b", longer, len(longer) + 1, 1) is not None
    device.prefill(cache, "b", longer, 5 * CHUNK, 5 * CHUNK + MOST)
    cache.release("b", owner="session", completed=False)
    for number in range(5):
        device.run(cache, str(number), text(number + 10, more=2))
        cache.release(str(number))
    another = cache.admit("another", [*prompt, *[3] * CHUNK], len(longer), 1)
    assert another is not None and another.num_cached_tokens == 5 * CHUNK
    cache.release("another", owner="session", completed=False)
    assert device.run(cache, "c", longer) == 9 * CHUNK
    cache.release("c", owner="session")
    cache.unpin("session")
    for number in range(3):
        device.run(cache, f"{number} later", text(number + 20, more=2))
        cache.release(f"{number} later")
    assert cache.pool_stats()["snapshots"][0]["num_broken_pins"] == 0


def test_snapshots_of_intervals_break_no_pin() -> None:
    cache, device = make(2, interval=CHUNK), Device()
    for number in range(2):
        device.run(cache, str(number), text(number, more=2))
        cache.release(str(number), owner=number)
    device.run(cache, "long", text(*range(10, 30), more=2))  # of its last chunk alone it keeps a snapshot
    cache.release("long")
    assert cache.pool_stats()["snapshots"][0]["num_broken_pins"] == 1


def test_a_failed_request_leaves_no_snapshot() -> None:
    cache, device, prompt = make(4), Device(), text(*range(9))
    device.run(cache, "a", prompt)
    cache.release("a", poisoned=True)
    cache.take_blocks_to_clear()
    cache.invariants()
    assert device.run(cache, "b", prompt) == 0


class Machine(RuleBasedStateMachine):
    """Prompts of a few words that come, are read a part at a time, end and fail, over few rows and blocks."""

    @initialize(num=st.integers(0, 4), interval=st.sampled_from([0, 2 * CHUNK]), blocks=st.integers(60, 150))
    def begin(self, num: int, interval: int, blocks: int) -> None:
        self.cache, self.device = make(num, interval=interval, num_blocks=blocks), Device()
        self.live: dict[str, tuple[list[int], int]] = {}
        self.count = 0

    @rule(words=st.lists(st.integers(0, 1), min_size=1, max_size=9), more=st.integers(0, CHUNK - 1))
    def admit(self, words: list[int], more: int) -> None:
        prompt, name = text(*words, more=more), str(self.count)
        self.count += 1
        if (found := self.cache.admit(name, prompt, len(prompt) + 8, 1)) is not None:
            self.live[name] = prompt, found.num_cached_tokens

    @precondition(lambda self: self.live)
    @rule(data=st.data(), chunks=st.integers(1, 4))
    def prefill(self, data: st.DataObject, chunks: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        prompt, start = self.live[name]
        if start < len(prompt):
            stop = min(len(prompt), start + chunks * CHUNK)
            self.device.prefill(self.cache, name, prompt, start, stop)
            self.live[name] = prompt, stop

    @precondition(lambda self: self.live)
    @rule(data=st.data(), poisoned=st.sampled_from([False, False, True]))
    def release(self, data: st.DataObject, poisoned: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.cache.release(name, poisoned=poisoned)
        self.cache.take_blocks_to_clear()
        del self.live[name]

    @invariant()
    def balanced(self) -> None:
        if hasattr(self, "cache"):
            self.cache.invariants()


Machine.TestCase.settings = settings(stateful_step_count=30)
TestSnapshots = Machine.TestCase
