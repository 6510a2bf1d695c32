"""KV bookkeeping against a naive model that knows the content of every block."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lowlat.errors import ConfigError, LowlatError, RequestError
from lowlat.sequence.admitted import Admitted
from lowlat.sequence.book import Allocation, InvariantError
from lowlat.sequence.kvcache import KVCache
from lowlat.sequence.prefix_index import CachedChunk

BLOCK, CHUNK, OVERPROVISION = 2, 4, 3


def make(num_blocks: int = 33, *, reuse: bool = True, share_decoded: bool = False) -> KVCache:
    return KVCache(num_blocks, BLOCK, CHUNK, reuse=reuse, share_decoded=share_decoded)


def admit(cache: KVCache, name: str, prompt: list[int], extra: int = 4) -> Allocation:
    allocation = cache.admit(name, prompt, len(prompt) + extra, OVERPROVISION)
    assert allocation is not None
    return allocation


def run(cache: KVCache, name: str, prompt: list[int], extra: int = 4) -> Allocation:
    allocation = admit(cache, name, prompt, extra)
    cache.mark_prefilled(name, len(prompt))
    cache.release(name)
    cache.invariants()
    return allocation


PROMPT = list(range(100, 110))


def test_reserves_the_worst_case_and_never_the_null_block() -> None:
    cache = make()
    allocation = admit(cache, "a", [1], extra=6)
    assert len(allocation.table) == 5  # 1 + 6 + 3 positions in blocks of 2
    assert 0 not in allocation.table and len(set(allocation.table)) == 5
    assert (cache.stats().num_used, cache.stats().num_free) == (5, 27)
    cache.release("a")
    assert cache.stats().num_free == 32


def test_blocks_that_were_given_back_are_neighbours_again() -> None:
    """A chunk's neighbouring blocks are copied as one run, whether blocks were taken once before, or twice."""
    cache = make()
    for turn in range(4):
        table = run(cache, "a", [turn] * 20).table
        cache.forget_all()
        assert list(table) == list(range(table[0], table[0] + len(table)))


def test_shares_complete_chunks_only_after_they_were_written() -> None:
    cache = make()
    first = admit(cache, "a", PROMPT)
    assert admit(cache, "early", PROMPT).num_cached_tokens == 0
    cache.mark_prefilled("a", 4)
    second = admit(cache, "b", PROMPT)
    assert second.num_cached_tokens == 4 and second.table[:2] == first.table[:2]
    cache.mark_prefilled("a", 10)  # chunk [8, 12) is incomplete
    third = admit(cache, "c", PROMPT)
    assert third.num_cached_tokens == 8 and third.table[:4] == first.table[:4]
    assert not set(third.table[4:]) & set(first.table)
    cache.invariants()
    stats = cache.stats()
    assert (stats.queries, stats.query_tokens, stats.hit_tokens) == (4, 40, 12)


@pytest.mark.parametrize(("num_tokens", "cached"), [(8, 4), (9, 8), (4, 0), (5, 4), (1, 0)])
def test_the_last_prompt_token_is_never_cached(num_tokens: int, cached: int) -> None:
    cache = make()
    run(cache, "a", PROMPT)
    assert admit(cache, "b", PROMPT[:num_tokens]).num_cached_tokens == cached


def test_an_equal_chunk_after_another_prefix_is_not_shared() -> None:
    cache = make()
    run(cache, "a", [1, 1, 1, 1, 7, 7, 7, 7, 0])
    assert admit(cache, "b", [2, 2, 2, 2, 7, 7, 7, 7, 0]).num_cached_tokens == 0


def test_nothing_is_shared_with_reuse_off() -> None:
    cache = make(reuse=False, share_decoded=True)
    run(cache, "a", PROMPT)
    assert admit(cache, "b", PROMPT).num_cached_tokens == 0


def test_equal_prompts_at_once_keep_their_own_blocks() -> None:
    cache = make()
    first, second = admit(cache, "a", PROMPT), admit(cache, "b", PROMPT)
    for done in (4, 8, 10):
        cache.mark_prefilled("b", done)
        cache.mark_prefilled("a", done)
        cache.invariants()
    cache.release("a")
    cache.release("b")
    cache.invariants()
    assert cache.stats().num_evictable == 4
    assert admit(cache, "c", PROMPT).table[:4] == second.table[:4] != first.table[:4]


def test_evicts_the_oldest_and_leaves_before_parents() -> None:
    cache = make(num_blocks=17)
    run(cache, "old", PROMPT)  # 2 chunks stay
    run(cache, "new", [5] * 9)  # 2 chunks stay
    assert cache.stats().num_evictable == 8
    big = admit(cache, "big", [9], extra=14)  # 9 of 16 blocks: one chunk must go
    assert len(big.table) == 9
    cache.invariants()
    assert cache.stats().num_evictable == 6
    assert cache.admit("old", PROMPT, 10, 0) == Allocation(
        [*cache._entries["old"].table], 4
    )  # the leaf went, its parent is still of use
    assert cache._chunks.lookup([5] * 9, cache._chunks.index.root(""))[1] != []


def test_a_parent_dropped_under_a_user_takes_the_chain_with_it() -> None:
    cache = make(num_blocks=22)
    admit(cache, "a", [1] * 9)
    admit(cache, "b", [1] * 9)
    cache.mark_prefilled("a", 4)  # the first chunk is a's
    cache.mark_prefilled("b", 8)  # the second is b's, after its own copy of the first
    cache.release("a")
    assert cache.stats().num_evictable == 2
    admit(cache, "c", [2], extra=cache.stats().num_free * BLOCK - OVERPROVISION)  # evicts the first chunk
    cache.invariants()
    assert cache.stats().num_evictable == 0
    cache.release("b")
    cache.release("c")
    cache.invariants()
    assert cache.stats().num_free == 21  # nothing unreachable stays


def test_a_chunk_never_outlives_what_leads_to_it() -> None:
    cache = make(num_blocks=25)
    admit(cache, "a", [1] * 9)
    admit(cache, "b", [1] * 9)
    cache.mark_prefilled("a", 4)  # the first chunk is a's
    cache.mark_prefilled("b", 8)  # the second is b's
    cache.release("a")
    cache.release("b")  # the first, unused for longer, must yet go after the second
    cache.invariants()
    admit(cache, "c", [2], extra=2 * (cache.stats().num_free + 1) - OVERPROVISION)
    cache.invariants()
    assert cache.stats().num_evictable == 2
    assert cache._chunks.lookup([1] * 9, cache._chunks.index.root(""))[1] != []


def test_a_chunk_whose_parent_went_is_not_listed() -> None:
    cache = make(num_blocks=22)
    admit(cache, "a", [1] * 9)
    admit(cache, "b", [1] * 9)
    cache.mark_prefilled("a", 4)
    cache.mark_prefilled("b", 4)
    cache.release("a")
    admit(cache, "c", [2], extra=cache.stats().num_free * BLOCK - OVERPROVISION)  # evicts the first chunk
    cache.mark_prefilled("b", 8)
    assert len(cache._chunks.index) == 0


def test_who_read_poisoned_kv_never_lists_what_it_made_of_it() -> None:
    cache = make()
    admit(cache, "a", PROMPT)
    cache.mark_prefilled("a", 4)
    admit(cache, "b", PROMPT)
    cache.release("a", poisoned=True)
    admit(cache, "c", PROMPT)
    cache.mark_prefilled("c", 4)  # sound, and again the parent of b's next chunk
    cache.mark_prefilled("b", 8)
    cache.invariants()
    assert admit(cache, "d", PROMPT).num_cached_tokens == 4


def test_none_when_it_does_not_fit_and_a_refusal_changes_nothing() -> None:
    cache = make(num_blocks=11)
    run(cache, "a", [1] * 9, extra=0)
    before = cache.stats()
    admit(cache, "b", [2] * 5)
    refused = cache.stats()
    assert cache.admit("c", [1] * 9, 14, 0) is None
    assert cache.stats() == refused
    generation = cache.generation
    cache.release("b")
    assert cache.generation > generation
    assert before.num_used == cache.stats().num_used == 0
    assert admit(cache, "c", [1] * 9).num_cached_tokens == 8


def test_decoded_chunks_are_shared_only_when_asked() -> None:
    committed = [*PROMPT, 1, 2, 3, 4, 5, 6, 7]  # 17: positions 0..15 are written
    for share, written, cached in ((False, None, 8), (True, None, 16), (True, 15, 12), (True, 99, 16)):
        cache = make(share_decoded=share)
        admit(cache, "a", PROMPT, extra=8)
        cache.mark_prefilled("a", 10)
        cache.release("a", committed, num_written=written)
        cache.invariants()
        assert admit(cache, "b", [*committed, 0]).num_cached_tokens == cached


def test_decoded_chunks_are_not_shared_before_prefill_ended() -> None:
    cache = make(share_decoded=True)
    admit(cache, "a", PROMPT)
    cache.mark_prefilled("a", 4)
    cache.release("a", PROMPT)  # cancelled while it was prefilling
    assert admit(cache, "b", PROMPT).num_cached_tokens == 4


def test_a_poisoned_request_shares_nothing_and_its_blocks_are_cleared_first() -> None:
    cache = make()
    run(cache, "a", PROMPT[:5])
    table = admit(cache, "b", PROMPT).table
    cache.mark_prefilled("b", 10)
    cache.release("b", poisoned=True)
    cache.invariants()
    assert cache.stats().num_to_clear == len(table)
    assert not set(admit(cache, "c", PROMPT).table) & set(table)
    assert sorted(cache.take_blocks_to_clear()) == sorted(table)
    assert cache.take_blocks_to_clear() == []
    cache.invariants()
    assert cache.stats().num_to_clear == 0


def test_who_shares_with_a_poisoned_request_lives_but_shares_no_more() -> None:
    cache = make()
    table = admit(cache, "a", PROMPT).table
    cache.mark_prefilled("a", 8)
    admit(cache, "b", PROMPT)
    cache.release("a", poisoned=True)
    assert sorted(cache.take_blocks_to_clear()) == sorted(table[4:])  # b still reads the first four
    cache.mark_prefilled("b", 10)
    cache.release("b")
    cache.invariants()
    assert sorted(cache.take_blocks_to_clear()) == sorted(table[:4])
    assert admit(cache, "c", PROMPT).num_cached_tokens == 0


def test_refuses_what_cannot_work_by_name() -> None:
    with pytest.raises(ConfigError, match="kv_blocks"):
        make(num_blocks=1)
    with pytest.raises(ConfigError, match="multiple of block_size 4"):
        KVCache(8, 4, 6, reuse=True, share_decoded=False)
    cache = make(num_blocks=5)
    with pytest.raises(RequestError, match=r"needs 5 KV blocks.*pool has 4 \(kv_blocks\)"):
        cache.admit("a", [1], 7, OVERPROVISION)
    with pytest.raises(RequestError, match="empty prompt"):
        cache.admit("a", [], 2, 0)
    with pytest.raises(RequestError, match="below"):
        cache.admit("a", [1, 2, 3], 2, 0)
    admit(cache, "a", [1], extra=0)
    with pytest.raises(RequestError, match="already"):
        cache.admit("a", [1], 2, 0)
    for call in (cache.release, lambda name: cache.mark_prefilled(name, 0)):
        with pytest.raises(RequestError, match="unknown or has ended"):
            call("nobody")
    assert issubclass(InvariantError, LowlatError)


def test_refuses_a_broken_protocol() -> None:
    cache = make(share_decoded=True)
    admit(cache, "a", PROMPT)
    cache.mark_prefilled("a", 8)
    for num_tokens in (4, 11):
        with pytest.raises(InvariantError, match="cannot be prefilled"):
            cache.mark_prefilled("a", num_tokens)
    cache.mark_prefilled("a", 10)
    with pytest.raises(InvariantError, match="does not start with its prompt"):
        cache.release("a", [0, *PROMPT])
    with pytest.raises(InvariantError, match="exceed"):
        cache.release("a", PROMPT + [0] * 90)


def _swap(table: list[int]) -> None:
    table[0], table[1] = table[1], table[0]


@pytest.mark.parametrize(
    ("message", "breakage"),
    [
        ("has 0 states", lambda cache, entry, chunk: cache._chunks.pool.free.pop()),
        ("has 2 states", lambda cache, entry, chunk: cache._chunks.pool.free.append(cache._chunks.pool.free[0])),
        ("null block", lambda cache, entry, chunk: entry.table.__setitem__(-1, 0)),
        ("reserved 9 blocks", lambda cache, entry, chunk: entry.table.pop()),
        ("2 users, 1 tables", lambda cache, entry, chunk: setattr(chunk, "num_users", 2)),
        ("not at its place", lambda cache, entry, chunk: _swap(entry.table)),
        ("digest that is not its own", lambda cache, entry, chunk: setattr(chunk, "digest", b"x")),
        ("free but not cleared", lambda cache, entry, chunk: cache._chunks.pool.dirty.add(cache._chunks.pool.free[0])),
    ],
)
def test_invariants_name_what_is_wrong(
    message: str, breakage: Callable[[KVCache, Admitted, CachedChunk], object]
) -> None:
    cache = make(num_blocks=17)
    run(cache, "a", PROMPT)
    admit(cache, "b", PROMPT)
    cache.invariants()
    breakage(cache, cache._entries["b"], next(iter(cache._chunks.index)))
    with pytest.raises(InvariantError, match=message):
        cache.invariants()


PROMPTS = st.builds(  # prefixes collide often
    lambda base, length, tail: [*base[:length], *tail],
    st.sampled_from([[0] * 13, [0] * 4 + [1] * 9, [1] * 13]),
    st.integers(0, 13),
    st.lists(st.integers(0, 1), min_size=1, max_size=2),
)


@dataclass
class Live:
    tokens: list[int]
    num_prompt: int
    table: list[int]
    num_written: int
    salt: str
    wrote: set[int] = field(default_factory=set)


class KVCacheMachine(RuleBasedStateMachine):
    """Each written position holds its salt and the prefix that its KV depends on; a cached one holds exactly that."""

    @initialize(share=st.booleans(), num_blocks=st.integers(9, 40))
    def start(self, share: bool, num_blocks: int) -> None:
        self.cache = make(num_blocks, share_decoded=share)
        self.content: dict[tuple[int, int], object] = {}
        self.live: dict[str, Live] = {}
        self.pending: set[int] = set()
        self.count = 0

    def write(self, request: Live, position: int) -> None:
        block = request.table[position // BLOCK]
        others = [other for other in self.live.values() if other is not request and block in other.table]
        assert not others, "a shared block was written"
        request.wrote.add(block)
        self.content[block, position % BLOCK] = (request.salt, *request.tokens[: position + 1])

    @rule(prompt=PROMPTS, extra=st.integers(1, 8), salt=st.sampled_from(["", "", "a"]))
    def admit(self, prompt: list[int], extra: int, salt: str) -> None:
        total = -(-(len(prompt) + extra + OVERPROVISION) // BLOCK)
        used = {block for request in self.live.values() for block in request.table}
        available = self.cache.capacity - len(used) - len(self.pending)
        name, self.count = f"r{self.count}", self.count + 1
        if total > self.cache.capacity:
            with pytest.raises(RequestError):
                self.cache.admit(name, prompt, len(prompt) + extra, OVERPROVISION)
            return
        allocation = self.cache.admit(name, prompt, len(prompt) + extra, OVERPROVISION, salt)
        if allocation is None:
            assert total > available
            return
        num_cached, table = allocation.num_cached_tokens, allocation.table
        assert len(table) == total and num_cached % CHUNK == 0 and num_cached <= len(prompt) - 1
        for position in range(num_cached):
            held = self.content.get((table[position // BLOCK], position % BLOCK))
            assert held == (salt, *prompt[: position + 1])
        fresh = set(table[num_cached // BLOCK :])
        assert not fresh & (used | self.pending | {0})
        for block in fresh:
            assert "nan" not in (self.content.get((block, 0)), self.content.get((block, 1)))
        self.live[name] = Live(list(prompt), len(prompt), table, num_cached, salt)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        """Prefill one chunk, or decode some tokens with a tail that is retracted."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live[name]
        if request.num_written < request.num_prompt:
            end = min(request.num_written + CHUNK, request.num_prompt)
            for position in range(request.num_written, end):
                self.write(request, position)
            request.num_written = end
            self.cache.mark_prefilled(name, end)
            return
        room = len(request.table) * BLOCK - OVERPROVISION - 1 - len(request.tokens)
        request.tokens += data.draw(st.lists(st.integers(0, 1), max_size=max(0, min(3, room))))
        for position in range(request.num_written, len(request.tokens) - 1):
            self.write(request, position)
        request.num_written = max(request.num_prompt, len(request.tokens) - 1)
        for position in range(request.num_written, request.num_written + OVERPROVISION):
            block = request.table[position // BLOCK]
            request.wrote.add(block)
            self.content[block, position % BLOCK] = "rejected"

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tell=st.booleans())
    def release(self, data: st.DataObject, tell: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live.pop(name)
        self.cache.release(name, request.tokens if tell else None)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        request = self.live.pop(name)
        for block in request.wrote:
            self.content[block, 0] = self.content[block, 1] = "nan"
        before = self.cache.stats().num_to_clear
        self.cache.release(name, request.tokens, poisoned=True)
        self.pending.update(self.cache._chunks.pool.to_clear)
        assert self.cache.stats().num_to_clear >= before

    @rule()
    def clear(self) -> None:
        blocks = self.cache.take_blocks_to_clear()
        assert not {block for request in self.live.values() for block in request.table} & set(blocks)
        for block in blocks:
            self.content[block, 0] = self.content[block, 1] = None
        self.pending.clear()

    @invariant()
    def balanced(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.invariants()
        self.pending = set(self.cache._chunks.pool.to_clear)
        used = {block for request in self.live.values() for block in request.table}
        assert self.cache.stats().num_used == len(used)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for name in list(self.live):
            self.cache.release(name)
        self.cache.take_blocks_to_clear()
        self.cache.invariants()
        assert self.cache.stats().num_used == 0


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(stateful_step_count=50)
