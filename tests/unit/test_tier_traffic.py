"""Prompts at random through small tiers: each is admitted or given up in the end, and nothing is left held."""

import random
import time
from pathlib import Path

import pytest
import torch
from tier_cases import Pages, host_tier

from lowlat.sequence import window_book
from lowlat.sequence.kvcache import KVCache
from lowlat.sequence.tiers.arena import ALIGNMENT
from lowlat.sequence.tiers.disk import DiskTier
from lowlat.sequence.tiers.tiers import CacheTiers
from lowlat.sequence.window_book import WindowBook
from lowlat.sequence.window_pool import WindowPool

CHUNK, PART = 16, 4 * 16


def prompts_of(chooser: random.Random) -> list[list[int]]:
    """Four prompts, which share beginnings."""
    common = [chooser.randrange(100) for _ in range(20)]
    chains = (common[: chooser.randrange(5, 20)] + [100 + k] * chooser.randrange(15) for k in range(4))
    return [[*(value for value in chain for _ in range(CHUNK)), 0] for chain in chains]


def clear(cache: KVCache) -> None:
    cache.take_blocks_to_clear()
    cache.take_pool_blocks_to_clear()


def admit(cache: KVCache, tiers: CacheTiers, pages: Pages, name: str, prompt: list[int], most: int) -> int | None:
    """Try until a prompt is admitted, or as often as its caller waits; the positions that were found."""
    deadline = time.monotonic() + 20.0
    for _ in range(most):
        allocation = cache.admit(name, prompt, len(prompt) + 1, 1)
        tiers.copy_in([load for load in cache.take_loads() if load.holder is not None], pages.mark())
        if allocation is not None:
            return allocation.num_cached_tokens
        assert time.monotonic() < deadline, "it waits for ever"
        clear(cache)  # what copies held of a failed request's
        tiers.wait(0.05)
    return None


def prefill(cache: KVCache, tiers: CacheTiers, pages: Pages, name: str, prompt: list[int], start: int) -> None:
    for begin in range(start, len(prompt), PART):
        stop = min(begin + PART, len(prompt))
        cache.append(name, begin, stop)
        cache.mark_prefilled(name, stop)
        for save in cache.take_saves():
            if save.holder is None:
                tiers.put(save.key, lambda: torch.zeros(2, dtype=torch.uint8), spare=save.spare)
            else:
                tiers.copy_out([save], pages.mark())


@pytest.mark.parametrize("window", [32, 60, 100, 130])
def test_prompts_that_come_at_random_are_admitted_and_leave_nothing(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chunks found to be wrong in between, and of prompts that are given up amid their reads, too."""
    monkeypatch.setattr(window_book, "KEPT_EVERY", 8 * CHUNK)
    found, pages = 0, Pages(300)
    for seed in range(24):
        chooser = random.Random(seed)
        prompts, size = prompts_of(chooser), chooser.choice([8, 9, 12, 16, 24])
        for turn in range(2):  # the second as another process
            disk = DiskTier(tmp_path / str(seed), chooser.choice([1 << 20, 60 * 210]), "f" * 16)
            tiers = CacheTiers(host_tier(size * ALIGNMENT), disk, pages)
            book = WindowBook(WindowPool(window, 201, 8, num_at_once=PART, num_behind=0, num_ahead=1), CHUNK)
            num_blocks = chooser.choice([90, 130, 250])
            cache = KVCache(num_blocks, 8, CHUNK, reuse=True, share_decoded=False, tiers=tiers, books=[book])
            for number in range(10):
                prompt, name = chooser.choice(prompts), f"{turn}.{number}"
                start = admit(cache, tiers, pages, name, prompt, chooser.choice([1, 3, 1 << 30]))
                if start is None:
                    continue
                found += start // CHUNK
                prefill(cache, tiers, pages, name, prompt, start)
                cache.release(name, poisoned=chooser.random() < 0.1)
                clear(cache)
            tiers.flush()
            cache.invariants()
            clear(cache)
            assert cache.stats().num_used == 0 and not cache._moves.moving and not cache._moves.arriving
            tiers.close()
    assert found > 1000
