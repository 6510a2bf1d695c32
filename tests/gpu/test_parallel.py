"""A runtime of two ranks on one card: control state that stays the same, launches fused or not, loops, a lost rank."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lowlat
from lowlat.errors import DeviceError
from lowlat.executors.cards.parallel import ParallelExecutor
from lowlat.host import loading

CARD = torch.device("cuda", 0)
TARGET, HEAD = "lowlat/demo/target", "lowlat/demo/head"
SAME = ("tokens", "lengths", "active", "drafts", "num_drafts", "block_table", "output_counts")
PROMPTS = ("The President shall", "Congress shall make no law", "No person shall")
SHAPES: dict[str, Any] = {"max_batch": 2, "max_context": 256, "executor": "graph"}


@pytest.fixture(autouse=True)
def one_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All ranks on the first card, in streams of their own."""
    monkeypatch.setattr(loading, "rank_devices", lambda choice, size, named=(): [CARD] * size)
    yield
    torch.cuda.synchronize()


def load(**options: Any) -> lowlat.Runtime:
    """A runtime of the bundled pair."""
    draft = lowlat.SpeculativeConfig(model=HEAD, num_speculative_tokens=3)
    return lowlat.Runtime.load(TARGET, draft, **{**SHAPES, **options})


def decode(**options: Any) -> list[list[int]]:
    """The tokens of three requests, of which the last one waits for a slot."""
    with load(**options) as runtime:
        found: dict[Any, list[int]] = {}
        for number, prompt in enumerate(PROMPTS):
            sampling = lowlat.SamplingParams(max_tokens=40, temperature=0.5 * number, seed=number, ignore_eos=True)
            found[runtime.submit(prompt, sampling)] = []
        while runtime.busy:
            for output in runtime.step():
                found[output.request_id] += output.token_ids
        executor: Any = runtime.executor
        executor.synchronize()
        for rank in getattr(executor, "ranks", []):
            for name in SAME:
                first = 1 if name == "drafts" else 0  # a chain's root is no draft: nothing is written in its place
                assert torch.equal(rank.state[name][..., first:], executor.state[name][..., first:]), name
        return list(found.values())


def test_ranks_agree_fused_or_not_in_steps_and_in_loops() -> None:
    two = decode(tensor_parallel_size=2)
    assert [len(tokens) for tokens in two] == [40] * 3
    assert decode(tensor_parallel_size=2, device_loop=True) == two
    assert decode(tensor_parallel_size=2, fuse=False) == two
    assert decode()[0][:8] == two[0][:8]  # sums of another order: equal until two tokens are nearly alike


def test_a_rank_that_never_comes_is_an_error_within_a_second() -> None:
    with load(tensor_parallel_size=2, watchdog_min_s=0.2) as runtime:
        runtime.submit(PROMPTS[0], lowlat.SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(24):
            runtime.step()
        executor = runtime.executor
        assert isinstance(executor, ParallelExecutor)
        executor.synchronize()
        lone = executor.ranks.pop()
        start = time.monotonic()
        with pytest.raises(DeviceError, match=r"hangs: step|waited in vain"):
            while runtime.busy:
                runtime.step()
        assert time.monotonic() - start < 2.0
        executor.ranks.append(lone)
