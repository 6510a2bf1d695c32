"""Pools of sliding windows against a naive model that knows the content of every block."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lowlat.errors import RequestError
from lowlat.sequence.kvcache import KVCache
from lowlat.sequence.window_book import WindowBook
from lowlat.sequence.window_pool import WindowPool, kept_windows

BLOCK, CHUNK, AHEAD = 32, 64, 3
MOST = 2 * CHUNK  # positions of a prompt that are written at once


def pool(window: int, num_blocks: int) -> WindowPool:
    return WindowPool(window, num_blocks, BLOCK, num_at_once=MOST, num_behind=5, num_ahead=AHEAD)


def make(num_blocks: int, *pools: WindowPool, share_decoded: bool = False) -> KVCache:
    books = [WindowBook(each, CHUNK) for each in pools]
    return KVCache(num_blocks, BLOCK, CHUNK, reuse=True, share_decoded=share_decoded, books=books)


def prefill(cache: KVCache, name: str, prompt: list[int], start: int = 0) -> None:
    for first in range(start, len(prompt), MOST):
        stop = min(first + MOST, len(prompt))
        cache.append(name, first, stop)
        cache.mark_prefilled(name, stop)
        cache.invariants()


def tables_of(cache: KVCache, name: str) -> dict[str, Sequence[int]]:
    """A request's tables by the ending of the pool's name."""
    return {each.removeprefix("prefill_table"): table for each, table in cache.commands(name).items()}


def text(*chunks: int) -> list[int]:
    """A prompt of whole chunks and a position more."""
    return [value for value in chunks for _ in range(CHUNK)] + [0]


def test_windows_that_hold_the_context_get_no_pool() -> None:
    assert kept_windows((None, 128, 64, 128, 4096), 1000) == (64, 128)
    assert kept_windows((1000, None), 1000) == ()


def test_a_long_request_holds_few_blocks_and_shares_its_prefix() -> None:
    sizes = pool(40, 41)
    cache, prompt = make(301, sizes), text(*range(20))
    assert cache.admit("a", prompt, len(prompt) + 2000, AHEAD) is not None
    prefill(cache, "a", prompt)
    table = cache.commands("a")["prefill_table.w40"]
    held = set(table) - {0}
    assert len(table) == len(cache.commands("a")["prefill_table"]) == -(-(len(prompt) + 2003) // BLOCK)
    assert len(held) <= sizes.most_blocks(2) == 20 and not any(table[: sizes.first_block(len(prompt)) // 2 * 2])
    stats = cache.pool_stats()["windows"][0]
    assert stats["num_used"] == len(held) and stats["num_evictable"] > 0
    cache.release("a")
    again = cache.admit("b", [*prompt, 1, 1], len(prompt) + 2000, AHEAD)
    assert again is not None and again.num_cached_tokens == 20 * CHUNK
    cache.invariants()
    found = cache.commands("b")["prefill_table.w40"]
    first = sizes.first_block(20 * CHUNK) // 2 * 2
    assert found[first : 20 * 2] == table[first : 20 * 2] and not any(found[:first])


@pytest.mark.parametrize("rest", [1, 20, CHUNK])  # positions of a prompt's last chunk
def test_ends_of_prompts_stay_while_longer_ones_pass_through_the_pool(rest: int) -> None:
    prompts = [[value for value in range(number, number + 21) for _ in range(CHUNK)][: 20 * CHUNK + rest]
               for number in range(0, 168, 21)]  # fmt: skip
    cache = make(601, pool(128, 161))  # less than what the prompts pass through, more than their ends
    for number, prompt in enumerate(prompts):
        assert cache.admit(str(number), prompt, len(prompt) + 1, AHEAD) is not None
        prefill(cache, str(number), prompt)
        cache.release(str(number))
    for number, prompt in enumerate(prompts):
        again = cache.admit(f"again {number}", prompt, len(prompt) + 1, AHEAD)
        assert again is not None and again.num_cached_tokens == 20 * CHUNK
        cache.release(f"again {number}")


@pytest.mark.parametrize(
    ("length", "more"),  # a request holds all of its blocks, or few at a time
    [(10 * CHUNK + 1, CHUNK + 5), (21 * CHUNK, 6 * CHUNK + 5), (21 * CHUNK, 5 * CHUNK)],
)
def test_idle_conversations_take_a_window_s_blocks_for_their_last_ends_alone(length: int, more: int) -> None:
    cache, prompts = make(2001, pool(128, 71)), [[number] * length for number in range(6)]
    for turn in range(4):
        for number, prompt in enumerate(prompts):
            name = f"{turn} {number}"
            allocation = cache.admit(name, prompt, len(prompt) + 1, AHEAD)
            before = (len(prompt) - more) // CHUNK * CHUNK if turn else 0
            assert allocation is not None and allocation.num_cached_tokens == before
            prefill(cache, name, prompt, before)
            cache.release(name)
            prompt += [turn + 7] * more


def test_the_end_of_a_system_prompt_stays_once_texts_have_parted_there() -> None:
    cache, system = make(601, pool(128, 37)), [1] * (12 * CHUNK)
    found = []
    for number in range(2, 7):
        prompt = system + [number] * (12 * CHUNK)
        allocation = cache.admit(str(number), prompt, len(prompt) + 1, AHEAD)
        assert allocation is not None
        found.append(allocation.num_cached_tokens)
        prefill(cache, str(number), prompt, found[-1])
        cache.release(str(number))
    assert found[0] == 0 < found[1] < 12 * CHUNK and found[2:] == [12 * CHUNK] * 3  # the second shows where they part


def test_a_session_s_end_stays_pinned_in_a_window_s_pool_where_decoding_went_on() -> None:
    cache, prompt = make(901, pool(128, 45), share_decoded=True), [1] * (20 * CHUNK + 3)
    assert cache.admit("a", prompt, len(prompt) + 10 * CHUNK, AHEAD) is not None
    prefill(cache, "a", prompt)
    whole = prompt + [2] * (8 * CHUNK)
    cache.release("a", whole, owner="session")
    for number in range(5):
        other = [number + 5] * (20 * CHUNK)
        assert cache.admit(str(number), other, len(other) + 1, AHEAD) is not None
        prefill(cache, str(number), other)
        cache.release(str(number))
    again = cache.admit("b", [*whole, 3], len(whole) + 9, AHEAD)
    assert again is not None and again.num_cached_tokens == 20 * CHUNK


def test_pinned_chunks_of_a_window_that_go_are_counted() -> None:
    cache = make(301, pool(40, 21))
    for number in range(12):  # of a chunk each, which is two blocks
        prompt = text(number)
        assert cache.admit(str(number), prompt, len(prompt) + 4, AHEAD) is not None
        prefill(cache, str(number), prompt)
        cache.release(str(number), owner=number)
    stats = cache.pool_stats()["windows"][0]
    assert stats["num_evictable"] + stats["num_broken_pins"] == 12 * 2 and stats["num_broken_pins"] > 0


def test_a_hit_needs_the_window_s_last_chunks_alone() -> None:
    sizes = pool(40, 41)
    cache, prompt = make(401, sizes), text(*range(20))
    cache.admit("a", prompt, len(prompt) + 4, AHEAD)
    prefill(cache, "a", prompt)
    cache.release("a")
    others = text(*range(100, 120))
    cache.admit("b", others, len(others) + 1500, AHEAD)  # it takes the blocks of chunks in prompts' middles
    prefill(cache, "b", others)
    cache.release("b")
    middle = cache.admit("c", prompt[: 15 * CHUNK + 1], 15 * CHUNK + 5, AHEAD)
    end = cache.admit("d", prompt, len(prompt) + 4, AHEAD)
    assert end is not None and end.num_cached_tokens == 20 * CHUNK
    assert middle is not None and middle.num_cached_tokens < 15 * CHUNK
    cache.invariants()


def test_a_request_that_no_pool_holds_is_refused_by_name() -> None:
    sizes = pool(40, 12)
    cache = make(301, sizes)
    with pytest.raises(RequestError, match="window of 40; their pool has 11"):
        cache.admit("a", text(*range(20)), 3000, AHEAD)
    assert cache.admit("b", [1] * 70, 100, AHEAD) is not None


def test_long_requests_wait_for_each_other_s_blocks_only() -> None:
    """As many fit as their windows' blocks do, and what prefill took at once is there again when it is done."""
    sizes = pool(40, 0)
    each = sizes.most_blocks(2)
    cache, prompt = make(2001, pool(40, 2 * each + 1)), text(*range(10))
    for name in ("a", "b"):
        assert cache.admit(name, prompt, 6000, AHEAD) is not None
    assert cache.admit("c", prompt, 6000, AHEAD) is None
    generation = cache.generation
    prefill(cache, "a", prompt)
    prefill(cache, "b", prompt)
    assert cache.generation > generation
    assert cache.admit("short", [1] * 10, 20, AHEAD) is not None
    cache.invariants()


@pytest.mark.parametrize("is_whole", [False, True])  # whether the third request takes all of its blocks at once
def test_a_chunk_that_two_requests_hold_is_promised_to_neither(is_whole: bool) -> None:
    """What one lets go of while the other holds it comes back to nobody: a request waits for as many blocks more."""
    base = [1] * (20 * CHUNK)
    longer, other = [*base, *[2] * (20 * CHUNK)], [*base, *([3, 4] if is_whole else [3] * (20 * CHUNK))]
    num_running = []
    for num_blocks in range(pool(150, 0).most_blocks(2) + 1, 110):
        cache = make(2001, pool(150, num_blocks))
        found: dict[str, int] = {}
        for name, prompt in (("a", base), ("b", longer), ("c", other)):
            allocation = cache.admit(name, prompt, len(prompt) + 600 * (len(prompt) % CHUNK == 0), AHEAD)
            if allocation is not None:
                found[name] = allocation.num_cached_tokens
                assert found[name] == 20 * CHUNK * (name != "a")
            if name in found and name != "b":
                prefill(cache, name, prompt, found[name])
        if "b" in found:
            prefill(cache, "b", longer, found["b"])
        num_running.append(len(found))
        for name in found:
            cache.release(name)
        assert cache.admit("later", longer, len(longer) + 600, AHEAD) is not None
        cache.invariants()
    assert num_running == sorted(num_running) and set(num_running) == ({2, 3} if is_whole else {1, 2, 3})


PROMPTS = st.builds(
    lambda base, count, tail: [*text(*base[:count])[:-1], *[7] * tail],
    st.sampled_from([(0,) * 8, (0, 0, *range(1, 7)), (2,) * 8]),
    st.integers(0, 8),
    st.integers(1, CHUNK + 3),
)


@dataclass
class Live:
    keys: list[int]  # of each position: what its keys and values depend on
    num_prompt: int
    num_total: int
    num_written: int
    num_tokens: int
    wrote: set[tuple[str, int]] = field(default_factory=set)


class WindowMachine(RuleBasedStateMachine):
    """Positions that a row attends to hold its own prefix's values, in every pool; no other request writes there."""

    @initialize(share=st.booleans(), blocks=st.integers(40, 90), first=st.integers(9, 60), second=st.integers(14, 60))
    def start(self, share: bool, blocks: int, first: int, second: int) -> None:
        self.pools = (pool(40, first), pool(150, second))
        self.windows = {"": 1 << 30} | {each.suffix: each.window for each in self.pools}
        self.cache = make(blocks, *self.pools, share_decoded=share)
        self.content: dict[tuple[str, int, int], object] = {}
        self.live: dict[str, Live] = {}
        self.count = 0

    @rule(prompt=PROMPTS, extra=st.integers(1, 700), salt=st.sampled_from(["", "", "a"]))
    def admit(self, prompt: list[int], extra: int, salt: str) -> None:
        name, self.count = f"r{self.count}", self.count + 1
        total = len(prompt) + extra
        try:
            found = self.cache.admit(name, prompt, total, AHEAD, salt)
        except RequestError:
            return
        if found is None:
            return
        keys = [hash(salt)]
        for token in [*prompt, *[extra] * extra]:
            keys.append(hash((keys[-1], token)))
        start = found.num_cached_tokens
        self.live[name] = Live(keys[1:], len(prompt), total, start, len(prompt), set())
        if start:
            self.check(name, start)

    def check(self, name: str, position: int) -> None:
        """Check the contents that a row at a position attends to, in every pool."""
        request, tables = self.live[name], tables_of(self.cache, name)
        for suffix, window in self.windows.items():
            for seen in range(max(0, position - window), position):
                block = tables[suffix][seen // BLOCK]
                assert block and self.content[suffix, block, seen % BLOCK] == request.keys[seen]

    def write(self, name: str, start: int, stop: int, *, rejected: bool = False) -> None:
        request, tables = self.live[name], tables_of(self.cache, name)
        others = {other: tables_of(self.cache, other) for other in self.live if other != name}
        for suffix in self.windows:
            blocks = {tables[suffix][position // BLOCK] for position in range(start, stop)}
            assert 0 not in blocks
            assert not any(blocks.intersection(table[suffix]) for table in others.values()), "it is shared"
            request.wrote.update((suffix, block) for block in blocks)
            for position in range(start, stop):
                value = "rejected" if rejected else request.keys[position]
                self.content[suffix, tables[suffix][position // BLOCK], position % BLOCK] = value

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 2), tokens=st.integers(1, 300))
    def advance(self, data: st.DataObject, count: int, tokens: int) -> None:
        """Prefill some chunks, or decode many tokens, each with a tail that is rejected."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live[name]
        if request.num_written < request.num_prompt:
            start, stop = request.num_written, min(request.num_written + count * CHUNK, request.num_prompt)
            self.cache.append(name, start, stop)
            for suffix, blocks in self.cache.take_pool_blocks_to_clear().items():
                self.clear(suffix, blocks)
            self.check(name, start)
            self.write(name, start, stop)
            self.cache.mark_prefilled(name, stop)
            request.num_written = stop
            return
        stop = min(request.num_tokens + tokens, request.num_total - 1)
        while request.num_tokens < stop:
            end = min(request.num_tokens + 17, stop)
            self.write(name, request.num_tokens, end)
            self.write(name, end, end + AHEAD, rejected=True)
            request.num_tokens = end
            self.check(name, end - 4)  # a row that is run again

    def clear(self, suffix: str, blocks: list[int]) -> None:
        for block in blocks:
            for offset in range(BLOCK):
                self.content[suffix, block, offset] = None

    @precondition(lambda self: self.live)
    @rule(data=st.data(), poisoned=st.sampled_from([False, False, True]), tell=st.booleans())
    def release(self, data: st.DataObject, poisoned: bool, tell: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.cache.release(name, None, poisoned=poisoned)
        request = self.live.pop(name)
        if poisoned:
            for suffix, block in request.wrote:
                used = {each for other in self.live for each in tables_of(self.cache, other)[suffix]}
                if block not in used and not self.is_listed(suffix, block):
                    self.content[suffix, block, 0] = "nan"

    def is_listed(self, suffix: str, block: int) -> bool:
        """Whether others have written to a block since, and prompts may find it."""
        books = [book for book in self.cache._books if isinstance(book, WindowBook) and book.name == suffix]
        parts = {each for book in books for part in book._parts.values() for each in part.blocks}
        return block in parts | {each for chunk in self.cache._chunks.index for each in chunk.blocks if not suffix}

    @rule()
    def clear_all(self) -> None:
        self.clear("", self.cache.take_blocks_to_clear())
        for suffix, blocks in self.cache.take_pool_blocks_to_clear().items():
            self.clear(suffix, blocks)

    @invariant()
    def balanced(self) -> None:
        if hasattr(self, "cache"):
            self.cache.invariants()
            for stats, sizes in zip(self.cache.pool_stats().get("windows", []), self.pools, strict=True):
                tables = [tables_of(self.cache, name)[sizes.suffix] for name in self.live]
                assert stats["num_used"] == len({block for table in tables for block in table} - {0})

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for name in list(self.live):
                self.cache.release(name)
            self.clear_all()
            self.cache.invariants()
            assert all(stats["num_used"] == 0 for stats in self.cache.pool_stats().get("windows", []))


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(stateful_step_count=30)
