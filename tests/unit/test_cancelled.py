"""A cancelled request ends with the next step, wherever it was; when all have ended there is nothing to step for."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from fake_device import load_fake
from recording import check_invariants, prompt_of
from stages import later
from tiny_grammars import Automaton, random_edges, submit_with
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.requests.open_prompts import OpenPrompt
from lowlat.errors import CapacityError, RequestError

SIZES: dict[str, Any] = {"max_context": 96, "block_size": 4, "prefill_chunk": 8, "dtype": "float32", "max_queue": 6}
TREE = {"num_speculative_tokens": 3, "dynamic_tree_max_topk": 2, "max_total_draft_tokens": 7}
CHAIN = {"num_speculative_tokens": 3}
WORLDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dynamic tree": ("cpu", TREE, {"max_batch": 2, "kv_blocks": 40}),
    "loops": ("loops", CHAIN, {"max_batch": 2, "kv_blocks": 56}),
    "steps ahead": ("steps", TREE, {"max_batch": 3, "share_decoded": True}),
    "tiers": ("cpu", {}, {"max_batch": 3, "kv_blocks": 40, "host_cache_gib": 0.0001}),
}
PROMPTS = [prompt_of(21), prompt_of(5, seed=1), prompt_of(21) + prompt_of(20, seed=2), prompt_of(60, seed=3)]
EDGES = random_edges(3, 97, num_states=5, most=70, forced=0.3)
MOVES = (
    "submit",
    "submit",
    "guided",
    "open",
    "write",
    "write",
    "pause",
    "resume",
    "cancel",
    "cancel",
    "step",
    "step",
    "step",
)
WHERE = {
    "queued",
    "paused",
    "prefilling",
    "decoding",
    "open",
    "trial",
    "kept",
    "under way",
}  # a cancelled one was there


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


class World:
    """Makes random moves on a runtime; `cancelled` counts where requests were when they were cancelled."""

    def __init__(self, runtime: Runtime, source: random.Random) -> None:
        self.runtime, self.source = runtime, source
        self.cancelled: Counter[str] = Counter()
        self._live: set[str] = set()  # their ends have not come
        self._owed: set[str] = set()  # of these, those that were cancelled
        self._open: dict[str, tuple[OpenPrompt, Iterator[int]]] = {}

    def submit(self) -> None:
        self._live.add(self.runtime.submit(self.source.choice(PROMPTS), self._params()))

    def guided(self) -> None:
        self._live.add(submit_with(self.runtime, Automaton(EDGES, (3,)), self.source.choice(PROMPTS), self._params()))

    def open(self) -> None:
        opened = self.runtime.open_prompt(self._params())
        self._live.add(opened.request_id)
        self._open[opened.request_id] = opened, iter(self.source.choice(PROMPTS))

    def write(self) -> None:
        """Write a piece of an open prompt; its last, or one of four, begins the answer."""
        if self._open:
            opened, ids = self._open[self.source.choice(sorted(self._open))]
            piece = [token for token, _ in zip(ids, range(self.source.randint(1, 20)), strict=False)]
            if piece:
                opened.append(piece)
            if not piece or self.source.random() < 0.25:
                opened.finish(speculative=bool(piece))
            if not piece:
                del self._open[opened.request_id]

    def pause(self) -> None:
        self._with_any(self.runtime.pause)

    def resume(self) -> None:
        self._with_any(self.runtime.resume)

    def cancel(self) -> None:
        self._with_any(self._cancel)

    def step(self) -> None:
        for output in self.runtime.step():
            assert output.request_id in self._live, "an output after the end"
            if output.finish_reason is not None:
                name = output.request_id
                assert name not in self._owed or output.finish_reason == "cancelled"
                self._live.remove(name)
                self._owed.discard(name)
                self._open.pop(name, None)
        assert not self._owed, "cancelled, and not ended by a step"

    def cancel_all(self) -> None:
        """Cancel all; a step ends them, and leaves nothing."""
        for name in sorted(self._live):
            self._cancel(name)
        if self._live:
            assert self.runtime.busy
            self.step()
        assert not self._live
        assert not self.runtime.busy
        assert self.runtime.deadline is None
        check_invariants(self.runtime)

    def _params(self) -> SamplingParams:
        own = self.source.choice
        return SamplingParams(max_tokens=own((1, 6, 24)), temperature=0.9, seed=own(range(9)), priority=own((0, 0, 1)))

    def _with_any(self, what: Callable[[str], object]) -> None:
        if self._live:
            what(self.source.choice(sorted(self._live)))

    def _cancel(self, name: str) -> None:
        runtime = self.runtime
        if name not in runtime._requests:  # its last output waits for the next step
            with pytest.raises(RequestError, match="has ended"):
                runtime.cancel(name)
            return
        opening = runtime._requests[name].opening
        if not runtime._requests[name].has_left:
            self.cancelled[str(runtime.scheduler.phase(name))] += 1
        if opening is not None:
            self.cancelled["trial" if opening.is_speculative else "open"] += 1
        self.cancelled["kept"] += name in runtime.scheduler._kept
        self.cancelled["under way"] += runtime._steps._in_flight.under_way
        runtime.cancel(name)
        self._owed.add(name)


@pytest.mark.parametrize("name", ["dynamic tree", later("loops"), later("steps ahead"), later("tiers")])
def test_a_cancelled_request_ends_with_the_next_step(name: str, pair: PairPaths) -> None:
    device, method, options = WORLDS[name]
    draft = SpeculativeConfig(model=pair.head, strict=True, **method) if method else None
    if device == "cpu":
        runtime = Runtime.load(pair.target, draft, device="cpu", **SIZES, **options)
    else:
        runtime, _ = load_fake(pair.target, draft, device_loop=device == "loops", lead=2, **SIZES, **options)
    with closing(runtime):
        world = World(runtime, random.Random(name))
        for number in range(400):
            try:
                getattr(world, world.source.choice(MOVES))()
            except (CapacityError, RequestError) as error:  # no space for it, or it makes no sense for this request
                assert not runtime._guard.failure, error
            if number % 100 == 99:
                world.cancel_all()
    ahead = set() if device == "cpu" else {"under way"}
    assert {where for where, count in world.cancelled.items() if count} >= WHERE - {"under way"} | ahead
