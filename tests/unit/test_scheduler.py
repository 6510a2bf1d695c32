"""Admission, prefill order and slots, against what every request must be given."""

import itertools
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lowlat.engine.memory.host_space import REFUSED_S, HostSpace
from lowlat.engine.scheduling.pace import PrefillPace
from lowlat.engine.scheduling.prefill_order import MAX_PASSED_OVER
from lowlat.engine.scheduling.records import Phase, PrefillChunk, ScheduledRequest, StepPlan
from lowlat.engine.scheduling.scheduler import Scheduler
from lowlat.errors import CapacityError, ConfigError, RequestError
from lowlat.graphs import Bucket
from lowlat.sequence.book import InvariantError
from lowlat.sequence.kvcache import KVCache
from lowlat.step.chunks import chunk_counts, chunks_at_once
from lowlat.step.ladder import StepLadder

BLOCK, CHUNK = 2, 4
LADDER = StepLadder([1, 2, 4], {0: 1, 3: 4})


def make(
    *,
    num_blocks: int = 257,
    max_batch: int = 4,
    max_queue: int = 8,
    reuse: bool = True,
    at_once: int = 1,
    space: HostSpace | None = None,
) -> Scheduler:
    cache = KVCache(num_blocks, BLOCK, CHUNK, reuse=reuse, share_decoded=False)
    return Scheduler(LADDER, cache, max_batch, max_queue, CHUNK, max_prefill_chunks=at_once, space=space)


def request(name: str, prompt: int | tuple[int, ...], extra: int = 4) -> ScheduledRequest:
    tokens = tuple(range(prompt)) if isinstance(prompt, int) else prompt
    return ScheduledRequest(name, tokens, len(tokens) + extra)


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    if plan.prefill is not None:
        scheduler.prefill_done(plan.prefill)
    scheduler.invariants()
    return plan


def chunks(scheduler: Scheduler, name: str) -> list[tuple[int, int, bool]]:
    """Run until the request has its first token; its chunks."""
    found = []
    for _ in range(100):
        chunk = step(scheduler).prefill
        if chunk is not None and chunk.request_id == name:
            found.append((chunk.start, chunk.num_tokens, chunk.last))
            if chunk.last:
                return found
    raise TimeoutError(name)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (1, [(0, 1, True)]),
        (4, [(0, 4, True)]),
        (5, [(0, 4, False), (4, 1, True)]),
        (8, [(0, 4, False), (4, 4, True)]),
        (9, [(0, 4, False), (4, 4, False), (8, 1, True)]),
    ],
)
def test_chunks_cover_the_prompt(num_tokens: int, expected: list[tuple[int, int, bool]]) -> None:
    scheduler = make()
    scheduler.enqueue(request("a", num_tokens))
    assert chunks(scheduler, "a") == expected
    assert scheduler.phase("a") is Phase.DECODING


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (4, [(0, 4, 4)]),
        (9, [(0, 12, 9)]),
        (12, [(0, 12, 12)]),
        (13, [(0, 12, 12), (12, 4, 1)]),
        (30, [(0, 12, 12), (12, 12, 12), (24, 8, 6)]),
    ],
)
def test_chunks_of_a_prompt_run_together(num_tokens: int, expected: list[tuple[int, int, int]]) -> None:
    """At most three of them; what is cached of a prompt ends with a chunk, not with those that ran together."""
    scheduler = make(at_once=3)
    scheduler.enqueue(request("a", num_tokens))
    found: list[tuple[int, int, int]] = []
    while not found or scheduler.phase("a") is not Phase.DECODING:
        chunk = step(scheduler).prefill
        assert chunk is not None
        found.append((chunk.start, chunk.size, chunk.num_tokens))
    assert found == expected
    scheduler.cancel("a")
    scheduler.enqueue(request("b", num_tokens + 1))
    assert scheduler.plan().admitted[0].num_cached_tokens == num_tokens // CHUNK * CHUNK


def test_fewer_chunks_run_together_while_others_decode() -> None:
    """As many as are allowed next to, by programs that there are; and all again when nobody decodes."""
    scheduler = make(at_once=16)
    scheduler.pace.num_chunks = 5
    for name, num_tokens, token in (("a", 3 * CHUNK, 1), ("b", 30 * CHUNK, 2)):
        scheduler.enqueue(request(name, (token,) * num_tokens))
    sizes = [chunk.size // CHUNK for chunk in (step(scheduler).prefill for _ in range(3)) if chunk is not None]
    scheduler.cancel("a")
    sizes += [chunk.size // CHUNK for chunk in (step(scheduler).prefill for _ in range(2)) if chunk is not None]
    assert sizes == [3, 4, 4, 16, 6]


@pytest.mark.parametrize(
    ("left", "most", "count"),
    [
        *((1, 16, 1), (5, 16, 5), (7, 16, 7), (9, 16, 8), (10, 16, 8), (11, 16, 11), (13, 16, 12), (15, 16, 15)),
        *((40, 16, 16), (5, 5, 4), (4, 5, 4), (40, 1, 1)),
    ],
)
def test_chunks_run_in_programs_that_they_nearly_fill(left: int, most: int, count: int) -> None:
    assert chunks_at_once(left, most, chunk_counts(16)) == count


def test_the_pace_of_prefill_says_how_many_chunks_are_no_stall() -> None:
    pace = PrefillPace(25.0)
    found = [pace.num_chunks]
    for num_chunks, seconds in ((1, 0.006), (0.5, 1.0), (4, 0.016), (6, 0.024), (6, 0.2), (1, 0.03)):
        pace.saw(num_chunks, seconds)
        found.append(pace.num_chunks)
    assert found == [4, 4, 4, 6, 6, 1, 1]


@pytest.mark.parametrize(("num_tokens", "cached"), [(9, 8), (8, 4)])
def test_a_cached_prefix_is_skipped_but_for_the_last_token(num_tokens: int, cached: int) -> None:
    """Its row is what the first token comes out of: where all chunks are cached the last one runs again."""
    scheduler = make()
    scheduler.enqueue(request("a", num_tokens))
    chunks(scheduler, "a")
    scheduler.cancel("a")
    scheduler.enqueue(request("b", num_tokens))
    plan = scheduler.plan()
    assert plan.admitted[0].num_cached_tokens == cached
    assert plan.prefill == PrefillChunk("b", 0, cached, 4, num_tokens - cached, last=True)
    assert scheduler.phase("b") is Phase.PREFILLING
    scheduler.prefill_done(plan.prefill)
    assert scheduler.phase("b") is Phase.DECODING


def test_one_chunk_a_step_fewest_left_first() -> None:
    scheduler = make(reuse=False)
    for name, size in (("long", 40), ("short", 6), ("one", 1), ("also", 6), ("waits", 2)):
        scheduler.enqueue(request(name, size))
    plans = [step(scheduler) for _ in range(5)]
    assert [admission.slot for admission in plans[0].admitted] == [0, 1, 2, 3] and scheduler.num_queued == 1
    ran = [(plan.prefill.request_id, plan.prefill.last) for plan in plans if plan.prefill]
    assert ran == [("one", True), ("short", False), ("short", True), ("also", False), ("also", True)]
    scheduler.cancel("short")
    plan = step(scheduler)
    assert [(a.request_id, a.slot) for a in plan.admitted] == [("waits", 1)]
    assert plan.prefill is not None and plan.prefill.request_id == "waits"


def test_a_long_prompt_is_passed_over_a_bounded_number_of_times() -> None:
    scheduler = make(max_batch=2, reuse=False)
    scheduler.enqueue(request("long", 40))
    starts = []
    for number in range(3 * MAX_PASSED_OVER + 3):
        scheduler.enqueue(request(f"s{number}", 2))
        plan = step(scheduler)
        assert plan.prefill is not None
        if plan.prefill.request_id == "long":
            starts.append(number)
        if plan.prefill.last:
            scheduler.cancel(plan.prefill.request_id)
    assert starts and starts[0] <= MAX_PASSED_OVER
    assert max(b - a for a, b in pairwise(starts)) <= MAX_PASSED_OVER + 1


def test_first_come_first_served_even_past_a_large_head() -> None:
    scheduler = make(num_blocks=21)
    scheduler.enqueue(request("a", 2, extra=20))
    step(scheduler)
    scheduler.enqueue(request("large", 2, extra=20))
    scheduler.enqueue(request("small", 1))
    assert not step(scheduler).admitted
    scheduler.cancel("a")
    assert [admission.request_id for admission in step(scheduler).admitted] == ["large", "small"]


def test_a_full_queue_names_the_limit_and_the_knob() -> None:
    scheduler = make(max_batch=1, max_queue=1)
    scheduler.enqueue(request("a", 1))
    scheduler.enqueue(request("b", 1))
    with pytest.raises(CapacityError, match=r"2 requests wait.*limit is 1 \(max_queue\)"):
        scheduler.enqueue(request("c", 1))
    step(scheduler)
    with pytest.raises(CapacityError):
        scheduler.enqueue(request("c", 1))
    scheduler.cancel("a")
    scheduler.enqueue(request("c", 1))


def test_no_queue_still_takes_what_a_free_slot_can() -> None:
    scheduler = make(max_batch=1, max_queue=0)
    scheduler.enqueue(request("a", 1))
    with pytest.raises(CapacityError):
        scheduler.enqueue(request("b", 1))


def test_refuses_what_cannot_be_served_by_name() -> None:
    scheduler = make(num_blocks=9)
    with pytest.raises(RequestError, match="empty prompt"):
        scheduler.enqueue(request("a", 0))
    with pytest.raises(RequestError, match="leaves no token"):
        scheduler.enqueue(request("a", 3, extra=0))
    with pytest.raises(RequestError, match=r"needs 9 KV blocks.*pool has 8 \(kv_blocks\)"):
        scheduler.enqueue(request("a", 2, extra=11))
    scheduler.enqueue(request("a", 1))
    with pytest.raises(RequestError, match="exists already"):
        scheduler.enqueue(request("a", 1))
    for call in (scheduler.cancel, scheduler.phase, scheduler.slot):
        with pytest.raises(RequestError, match="unknown or has ended"):
            call("nobody")
    with pytest.raises(ConfigError, match="max_batch"):
        make(max_batch=5)
    with pytest.raises(ConfigError, match="prefill_chunk"):
        Scheduler(LADDER, scheduler.kvcache, 1, 1, 8)


def test_cancel_tells_the_phase_and_frees_everything() -> None:
    scheduler = make(max_batch=1, reuse=False)
    scheduler.enqueue(request("a", 9))
    assert scheduler.cancel("a") is Phase.QUEUED
    scheduler.enqueue(request("a", 9))
    plan = scheduler.plan()
    assert plan.prefill is not None
    assert scheduler.cancel("a") is Phase.PREFILLING  # before its chunk was reported
    with pytest.raises(InvariantError, match="not planned"):
        scheduler.prefill_done(plan.prefill)
    scheduler.enqueue(request("a", 1))
    step(scheduler)
    assert scheduler.slot("a") == 0
    assert scheduler.cancel("a", poisoned=True) is Phase.DECODING
    with pytest.raises(RequestError):
        scheduler.cancel("a")
    assert not scheduler.busy and not scheduler.plan()
    assert scheduler.kvcache.stats().num_used == 0 and scheduler.kvcache.stats().num_to_clear > 0


def test_a_chunk_must_be_reported_before_the_next_plan() -> None:
    scheduler = make()
    scheduler.enqueue(request("a", 9))
    plan = scheduler.plan()
    with pytest.raises(InvariantError, match="not reported"):
        scheduler.plan()
    assert plan.prefill is not None
    scheduler.prefill_done(plan.prefill)
    with pytest.raises(InvariantError, match="not planned"):
        scheduler.prefill_done(plan.prefill)


def test_a_refused_head_asks_again_only_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(num_blocks=21)
    scheduler.enqueue(request("a", 1, extra=20))
    step(scheduler)
    scheduler.enqueue(request("b", 1, extra=20))
    asked = []
    admit = scheduler.kvcache.admit

    def counted(name: str, *arguments: Any, **options: Any) -> object:
        asked.append(name)
        return admit(name, *arguments, **options)

    monkeypatch.setattr(scheduler.kvcache, "admit", counted)
    for _ in range(5):
        step(scheduler)
    assert asked == ["b"]
    scheduler.cancel("a")
    step(scheduler)
    assert asked == ["b", "b"] and scheduler.phase("b") is Phase.DECODING


def test_the_smallest_bucket_for_what_decodes() -> None:
    scheduler = make()
    found = []
    for number in range(4):
        scheduler.enqueue(request(f"r{number}", 1))
        step(scheduler)
        found.append((scheduler.choose_bucket(3), scheduler.choose_bucket(0)))
    assert found == [(Bucket(b, 4, 3), Bucket(b, 1, 0)) for b in (1, 2, 4, 4)]
    with pytest.raises(ConfigError, match="no bucket"):
        scheduler.choose_bucket(5)


def test_a_prompt_waits_for_what_is_prefilled_for_another_and_others_do_not() -> None:
    """As those of several answers to one prompt: each chunk of it is prefilled once."""
    scheduler = make()
    for name, tokens in (("a", (1,) * 2 * CHUNK + (7,)), ("b", (1,) * 2 * CHUNK + (8,)), ("c", (2, 3))):
        scheduler.enqueue(request(name, tokens))
    plans = [step(scheduler) for _ in range(5)]
    assert [[each.request_id for each in plan.admitted] for plan in plans[:1]] == [["a", "c"]]
    b = next(each for plan in plans for each in plan.admitted if each.request_id == "b")
    assert b.num_cached_tokens == 2 * CHUNK and scheduler.num_active == 3


def decoding(scheduler: Scheduler, *names: str) -> None:
    """Queue requests of eleven blocks each, and have them decode."""
    for number, name in enumerate(names):
        scheduler.enqueue(request(name, (number,) * 4, 14))
        chunks(scheduler, name)


@pytest.mark.parametrize("max_batch", [1, 2])
def test_nobody_gives_way_whose_blocks_host_memory_has_no_space_for(max_batch: int) -> None:
    """It would be of no use: the higher one would find no blocks, and nobody would run."""
    scheduler = make(num_blocks=13, max_batch=max_batch, space=HostSpace(30, slot_bytes=1, block_bytes={"": 10}))
    decoding(scheduler, "a")
    scheduler.enqueue(replace(request("b", (1,) * 4, 14), priority=1))
    assert not step(scheduler) and scheduler.phase("a") is Phase.DECODING
    scheduler.cancel("a")
    assert [each.request_id for each in step(scheduler).admitted] == ["b"]


def test_who_comes_back_and_has_its_blocks_goes_before_a_head_that_finds_none() -> None:
    scheduler = make(num_blocks=24, space=HostSpace(150, slot_bytes=1, block_bytes={"": 10}))
    decoding(scheduler, "a", "b")
    for name in ("a", "b"):
        scheduler.pause(name)
    scheduler.enqueue(request("c", (2,) * 4, 14))
    assert [name for name, _ in step(scheduler).moved_out] == ["b"]  # host memory has space for one
    scheduler.pause("c")
    scheduler.resume("b")
    scheduler.resume("c")
    assert [each.request_id for each in step(scheduler).admitted] == ["c"]
    for name in ("c", "b"):
        assert scheduler.phase(name) is Phase.DECODING
        scheduler.cancel(name)
        step(scheduler)
    scheduler.cancel("a")
    assert not scheduler.busy and not scheduler.space.held


def test_a_head_that_waits_for_what_a_paused_request_holds_is_nothing_to_step_for() -> None:
    scheduler = make(num_blocks=13, space=HostSpace(5, slot_bytes=1, block_bytes={"": 10}))
    decoding(scheduler, "a")
    scheduler.enqueue(request("b", (1,) * 4, 14))
    step(scheduler)
    assert scheduler.busy and scheduler.held_up() is None  # "a" decodes
    scheduler.pause("a")
    assert scheduler.busy  # host memory might have taken its blocks
    assert not step(scheduler) and not scheduler.busy
    found = scheduler.held_up()
    assert found is not None and (found.request_id, found.num_needed, found.num_available) == ("b", 11, 1)
    assert (found.paused, found.num_paused_blocks, found.open_prompts, found.has_slot) == (("a",), 11, (), True)
    assert "needs 11 KV blocks, and 1 are free or reusable (kv_blocks); paused requests hold 11 (a)" in str(found)
    scheduler.enqueue(request("c", 1))  # behind the head
    assert not step(scheduler) and not scheduler.busy
    scheduler.resume("a")
    assert scheduler.busy and [each.request_id for each in step(scheduler).admitted] == ["a"]
    scheduler.pause("a")
    step(scheduler)
    assert not scheduler.busy
    scheduler.cancel("a")
    assert scheduler.busy and [each.request_id for each in step(scheduler).admitted] == ["b"]


def test_a_pause_lets_the_head_have_the_blocks_that_host_memory_has_space_for() -> None:
    scheduler = make(num_blocks=24, space=HostSpace(150, slot_bytes=1, block_bytes={"": 10}))
    decoding(scheduler, "a", "b")
    scheduler.enqueue(request("c", (2,) * 4, 14))
    assert not step(scheduler) and not scheduler.has_work
    scheduler.pause("a")
    assert scheduler.has_work  # although "b" decodes, and no block has come free
    assert [each.request_id for each in step(scheduler).admitted] == ["c"]


@pytest.mark.parametrize("max_batch", [1, 2])
def test_a_head_that_waits_for_open_prompts_is_nothing_to_step_for(max_batch: int) -> None:
    scheduler, tokens = make(num_blocks=13, max_batch=max_batch), [0] * (CHUNK + 1)
    scheduler.enqueue(ScheduledRequest("a", tokens, 18), is_open=True)
    while scheduler.busy:
        step(scheduler)
    scheduler.enqueue(request("b", (1,) * 4, 14))
    step(scheduler)
    assert not scheduler.busy
    found = scheduler.held_up()
    assert found is not None and (found.open_prompts, found.num_open_blocks) == (("a",), 11)
    assert found.has_slot == (max_batch > 1) and ("no slot is free (max_batch)" in str(found)) == (max_batch == 1)
    tokens += [0] * CHUNK
    scheduler.grow("a")
    assert scheduler.busy and [step(scheduler).prefill is not None for _ in range(2)] == [True, False]
    assert not scheduler.busy
    scheduler.complete("a", 18)
    assert scheduler.busy and step(scheduler).prefill is not None and scheduler.phase("a") is Phase.DECODING


def test_a_head_that_waits_for_memory_which_the_host_refused_asks_again_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, asked = 100.0, list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def refuse(counts: Any) -> None:
        if counts is not None and len(asked) < 2:
            asked.append(now)
            raise CapacityError("none")

    space = HostSpace(1000, slot_bytes=1, block_bytes={"": 10}, obtain=refuse)
    scheduler = make(num_blocks=13, space=space)
    decoding(scheduler, "a")
    scheduler.pause("a")
    scheduler.enqueue(request("b", (1,) * 4, 14))
    for _ in range(2):
        assert scheduler.busy and not step(scheduler) and not scheduler.busy
        assert scheduler.retry_at == now + REFUSED_S
        now += REFUSED_S
    assert asked == [100.0, 100.0 + REFUSED_S]
    assert scheduler.busy and [each.request_id for each in step(scheduler).admitted] == ["b"]
    assert scheduler.retry_at is None


HELD = st.lists(
    st.tuples(
        st.sampled_from(["enqueue", "open", "grow", "complete", "pause", "resume", "cancel", "step", "step"]),
        st.integers(0, 11),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(
    moves=HELD, num_blocks=st.integers(12, 30), max_batch=st.integers(1, 3), max_bytes=st.sampled_from([3, 130, 999])
)
def test_there_is_something_to_step_for_exactly_while_a_step_does_anything(
    moves: list[tuple[str, int]], num_blocks: int, max_batch: int, max_bytes: int
) -> None:
    space = HostSpace(max_bytes, slot_bytes=1, block_bytes={"": 10})
    scheduler = make(num_blocks=num_blocks, max_batch=max_batch, space=space)
    live: dict[str, list[int] | None] = {}  # the tokens of open prompts
    names = map("r{}".format, itertools.count())

    def obey(move: str, number: int) -> None:
        name = list(live)[number % len(live)] if live else ""
        tokens = live.get(name)
        if move in ("enqueue", "open") and not scheduler.is_full:
            new, is_open = next(names), move == "open"
            own = [number % 2] * (number + (0 if is_open else 1))
            made = ScheduledRequest(new, own if is_open else tuple(own), 18, priority=number % 3)
            scheduler.enqueue(made, is_open=is_open)
            live[new] = own if is_open else None
        elif move == "grow" and tokens is not None and len(tokens) + 3 < 17:
            tokens += [number % 2] * 3
            scheduler.grow(name)
        elif move == "complete" and tokens:
            live[name] = None
            scheduler.complete(name, 18)
        elif move == "pause" and name and tokens is None and scheduler.phase(name) is not Phase.PAUSED:
            with suppress(CapacityError):
                scheduler.pause(name)
        elif move == "resume" and name and scheduler.phase(name) is Phase.PAUSED:
            scheduler.resume(name)
        elif move == "cancel" and name:
            scheduler.cancel(name, poisoned=number == 3)
            scheduler.kvcache.take_blocks_to_clear()
            del live[name]

    for move, number in moves:
        obey(move, number)
        busy = scheduler.busy
        decodes = scheduler.num_active > 0
        plan = step(scheduler)
        assert busy or not (plan or decodes), move
        if not plan and not decodes:
            assert not scheduler.busy, move


PROMPTS = st.builds(  # prefixes collide often
    lambda base, length, tail: [*base[:length], *tail],
    st.sampled_from([[0] * 13, [0] * 4 + [1] * 9, [1] * 13]),
    st.integers(0, 13),
    st.lists(st.integers(0, 1), min_size=1, max_size=2),
)


@dataclass
class Expected:
    tokens: tuple[int, ...]
    covered: list[int] | None = None  # positions; None while queued
    joined: bool = False


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(max_batch=st.integers(1, 4), max_queue=st.integers(0, 5), num_blocks=st.integers(14, 60))
    def start(self, max_batch: int, max_queue: int, num_blocks: int) -> None:
        self.scheduler = make(num_blocks=num_blocks, max_batch=max_batch, max_queue=max_queue)
        self.requests: dict[str, Expected] = {}  # in order of arrival
        self.count = 0

    @rule(tokens=PROMPTS, extra=st.integers(1, 6))
    def enqueue(self, tokens: list[int], extra: int) -> None:
        waiting = sum(e.covered is None for e in self.requests.values())
        free = self.scheduler.max_batch - (len(self.requests) - waiting)
        name, self.count = f"r{self.count}", self.count + 1
        if -(-(len(tokens) + extra + 4) // BLOCK) > self.scheduler.kvcache.capacity:
            with pytest.raises(RequestError):
                self.scheduler.enqueue(request(name, tuple(tokens), extra))
        elif waiting >= self.scheduler.max_queue + free:
            with pytest.raises(CapacityError):
                self.scheduler.enqueue(request(name, tuple(tokens), extra))
        else:
            self.scheduler.enqueue(request(name, tuple(tokens), extra))
            self.requests[name] = Expected(tuple(tokens))

    @rule()
    def step(self) -> None:
        waiting = [name for name, e in self.requests.items() if e.covered is None]
        num_left = sum(e.covered is not None and not e.joined for e in self.requests.values())
        plan = self.scheduler.plan()
        names = [admission.request_id for admission in plan.admitted]
        last = max((waiting.index(name) for name in names), default=-1)
        assert names == [name for name in waiting[: last + 1] if name in names]
        for name in set(waiting[: last + 1]).difference(names):  # it can share what is being prefilled for another
            first = self.requests[name].tokens[:CHUNK]
            others = [e for n, e in self.requests.items() if n in names or (e.covered is not None and not e.joined)]
            assert any(each.tokens[:CHUNK] == first for each in others)
        for admission in plan.admitted:
            expected, cached = self.requests[admission.request_id], admission.num_cached_tokens
            assert cached < len(expected.tokens)
            expected.covered = list(range(cached))
        chunk = plan.prefill
        assert chunk is not None or num_left == 0
        if chunk is not None:
            expected = self.requests[chunk.request_id]
            assert expected.covered is not None and not expected.joined
            assert chunk.start % CHUNK == 0 and chunk.num_tokens > 0
            expected.covered += range(chunk.start, chunk.start + chunk.num_tokens)
            expected.joined = chunk.last
            assert not chunk.last or expected.covered == list(range(len(expected.tokens)))
            self.scheduler.prefill_done(chunk)

    @precondition(lambda self: any(e.joined for e in self.requests.values()))
    @rule(data=st.data(), poisoned=st.booleans())
    def finish(self, data: st.DataObject, poisoned: bool) -> None:
        name = data.draw(st.sampled_from([n for n, e in self.requests.items() if e.joined]))
        self.scheduler.cancel(name, poisoned=poisoned)
        del self.requests[name]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.requests)))
        expected = self.requests.pop(name)
        phase = Phase.DECODING if expected.joined else Phase.PREFILLING
        assert self.scheduler.cancel(name) is (Phase.QUEUED if expected.covered is None else phase)

    @rule()
    def clear(self) -> None:
        self.scheduler.kvcache.take_blocks_to_clear()

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.invariants()
        joined = sum(expected.joined for expected in self.requests.values())
        assert self.scheduler.num_active == joined
        assert self.scheduler.num_queued == sum(e.covered is None for e in self.requests.values())
        assert self.scheduler.choose_bucket(0).batch == next(b for b in LADDER.batches if b >= joined)

    def teardown(self) -> None:
        """Whatever was accepted is served in bounded time."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(200):
            for name in [n for n, e in self.requests.items() if e.joined]:
                self.scheduler.cancel(name)
                del self.requests[name]
            self.scheduler.kvcache.take_blocks_to_clear()
            if not self.requests:
                break
            self.step()
        assert not self.scheduler.busy
        self.scheduler.invariants()
        assert self.scheduler.kvcache.stats().num_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=50)


def test_32_slots_fill_in_order_and_one_gives_way() -> None:
    """All decode at once in the bucket of fewest slots that holds them; a higher priority takes the newest slot."""
    ladder = StepLadder([1, 2, 4, 8, 16, 32], {0: 1, 3: 4})
    cache = KVCache(2049, BLOCK, CHUNK, reuse=False, share_decoded=False)
    scheduler = Scheduler(ladder, cache, 32, 9, CHUNK, space=HostSpace(1 << 20))
    for number in range(41):
        scheduler.enqueue(request(f"r{number}", 5))
    assert scheduler.is_full
    buckets, ended = [], []
    while scheduler.num_active < 32:
        chunk = step(scheduler).prefill
        ended += [chunk.request_id] if chunk is not None and chunk.last else []
        buckets += [scheduler.choose_bucket(3).batch] if scheduler.num_active else []
    assert ended == [f"r{number}" for number in range(32)]
    assert list(dict.fromkeys(buckets)) == [1, 2, 4, 8, 16, 32] and scheduler.num_queued == 9
    for name in ("r3", "r40"):
        scheduler.cancel(name)
    scheduler.enqueue(replace(request("urgent", 5), priority=1))
    assert step(scheduler).admitted[0].request_id == "urgent" and scheduler.slot("urgent") == 3
    scheduler.enqueue(replace(request("second", 5), priority=1))
    (departed,) = step(scheduler).departed
    assert departed.request_id == "r31" and scheduler.slot("second") == 31


def test_a_short_prompt_has_its_turn_among_31_long_ones() -> None:
    cache = KVCache(2049, BLOCK, CHUNK, reuse=False, share_decoded=False)
    scheduler = Scheduler(StepLadder([32], {0: 1}), cache, 32, 8, CHUNK)
    for number in range(31):
        scheduler.enqueue(request(f"long{number}", 40))
    for _ in range(70):  # all of them have been passed over for long
        step(scheduler)
    scheduler.enqueue(request("short", 3))
    served = [chunk.request_id for _ in range(33) if (chunk := step(scheduler).prefill) is not None]
    assert "short" in served
