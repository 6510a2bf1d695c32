"""Attention against the plain formula, and its promise: a row's bits are its own."""

import math
from typing import Any

import pytest
import torch
from kernel_cases import meant

from lowlat.kernels.reference.attention.attention import TILE
from lowlat.kernels.reference.attention.kv import kv_compact, kv_write, prefill_kv_write

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 32


Pool = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend(
    q: torch.Tensor, pool: Pool, slots: list[int], lens: list[int], live: list[int], masks: Any, **options: Any
) -> torch.Tensor:
    """The reference's attention of rows."""
    arrays = dict(zip(("q", "k_cache", "v_cache", "block_table"), (q, *pool), strict=True))
    arrays |= {"slots": torch.tensor(slots).int(), "dense_lens": torch.tensor(lens).int()}
    arrays |= {"row_live": torch.tensor(live, dtype=torch.uint8), "row_masks": torch.tensor(masks)}
    return meant("attention", {**arrays, "scale": DIM**-0.5, **options})["out"]


def make_pool(num_positions: int, seed: int, slots: int = 3) -> Pool:
    """A pool full of NaN but for the blocks of each slot's table."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-num_positions // BLOCK)
    blocks = slots * width + 1
    caches = [torch.full((blocks, KV_HEADS, BLOCK, DIM), math.nan) for _ in range(2)]
    table = (torch.randperm(blocks - 1, generator=generator) + 1)[: slots * width].reshape(slots, width).int()
    for cache in caches:
        for slot in range(slots):
            for p in range(num_positions):
                cache[table[slot, p // BLOCK], :, p % BLOCK] = torch.randn(KV_HEADS, DIM, generator=generator)
    return caches[0], caches[1], table


def naive(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: list[int], sinks: torch.Tensor | None
) -> torch.Tensor:
    """Double precision, one row: q [H, D]; keys, values [n, G, D]."""
    group = HEADS // KV_HEADS
    out = []
    for head in range(HEADS):
        k, v = keys[visible, head // group].double(), values[visible, head // group].double()
        scores = k @ q[head].double() * DIM**-0.5
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].double().reshape(1)))
        weights = torch.softmax(scores, -1)[: len(visible)]
        out.append(weights @ v)
    return torch.cat(out)


def gather(cache: torch.Tensor, table: torch.Tensor, count: int) -> torch.Tensor:
    return torch.stack([cache[table[p // BLOCK], :, p % BLOCK] for p in range(count)])


CASES = [
    # masks of the rows, window, keep_first, first, sinks
    ([1, 3, 7, 15], None, 0, 0, False),
    ([1, 3, 5, 11, 19, 37], None, 0, 0, False),
    ([1, 3, 7], 9, 0, 0, True),
    ([1, 3, 5, 13], 7, 0, 0, True),
    ([0], None, 0, 1, False),
    ([1, 3, 5], 5, 4, 1, False),
    ([1, 3, 7], 300, 0, 0, True),
]


@pytest.mark.parametrize("dense", [1, 5, 31, 32, 33, TILE - 2, TILE + 1, 2 * TILE + 40])
@pytest.mark.parametrize(("masks", "window", "keep_first", "first", "with_sinks"), CASES)
def test_attention_equals_the_formula(
    dense: int, masks: list[int], window: int | None, keep_first: int, first: int, with_sinks: bool
) -> None:
    if dense <= first:
        dense = first + 1
    nodes = max(mask.bit_length() for mask in masks)
    k_cache, v_cache, table = pool = make_pool(dense + nodes, seed=dense)
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(len(masks), HEADS, DIM, generator=generator)
    sinks = torch.randn(HEADS, generator=generator) if with_sinks else None
    options = {"first": first, "window": window, "keep_first": keep_first, "sinks": sinks}
    out = attend(q, pool, [1], [dense], [1] * len(masks), [masks], **options)
    keys, values = (gather(cache, table[1], dense + nodes) for cache in (k_cache, v_cache))
    for row, mask in enumerate(masks):
        order = list(range(dense)) + [dense + a for a in range(nodes) if mask >> a & 1]
        end = len(order)
        seen = [
            order[p]
            for p in range(first, end)
            if window is None or p >= end - window or first <= p < first + keep_first
        ]
        expected = naive(q[row], keys, values, seen, sinks)
        assert torch.allclose(out[row].double(), expected, atol=2e-6, rtol=1e-5)


def test_rows_keep_their_bits_in_any_company() -> None:
    dense = TILE + 17
    k_cache, v_cache, table = pool = make_pool(dense + 8, seed=3)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(8, HEADS, DIM, generator=generator)

    def run(slots: list[int], rows: list[list[int]], masks: list[list[int]]) -> torch.Tensor:
        queries = torch.cat([q[r] for r in rows])
        return attend(queries, pool, slots, [dense] * len(slots), [1] * len(queries), masks)

    alone = run([2], [[0]], [[7]])
    many = run([0, 2, 1], [[3, 4, 5], [6, 7, 0], [1, 2, 3]], [[1, 3, 5]] * 1 + [[1, 5, 7]] + [[1, 3, 7]])
    assert torch.equal(alone[0], many[5])
    for cache in (k_cache, v_cache):  # a branch whose ancestors are the same rows, stored elsewhere, as a tree's are
        cache[table[2, (dense + 5) // BLOCK], :, (dense + 5) % BLOCK] = cache[
            table[2, (dense + 2) // BLOCK], :, (dense + 2) % BLOCK
        ]
    branch = run([2], [[0]], [[0b100011]])
    assert torch.equal(alone[0], branch[0])


def test_dead_rows_and_pads_are_zero() -> None:
    queries, masks = torch.randn(4, HEADS, DIM), [[1, 0], [0, 0]]
    out = attend(queries, make_pool(40, seed=5), [0, -1], [30, 0], [1, 0, 0, 0], masks)
    assert torch.isfinite(out[0]).all()
    assert not out[1:].any()


@pytest.mark.parametrize(("start", "size", "count"), [(0, 32, 32), (32, 32, 20), (576, 64, 1), (512, 64, 64)])
@pytest.mark.parametrize("window", [None, 11, 600])
def test_prefill_equals_the_formula(start: int, size: int, count: int, window: int | None) -> None:
    k_cache, v_cache, table = make_pool(start + count, seed=start + count, slots=1)
    generator = torch.Generator().manual_seed(9)
    q = torch.randn(size, HEADS, DIM, generator=generator)
    sinks = torch.randn(HEADS, generator=generator)
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": table, "sinks": sinks}
    chunk = torch.tensor([start, count], dtype=torch.int32)
    out = meant("prefill_attention", {**arrays, "chunk": chunk, "scale": DIM**-0.5, "window": window})["out"]
    keys, values = (gather(cache, table[0], start + count) for cache in (k_cache, v_cache))
    for row in range(0, count, 7):
        p = start + row
        seen = [j for j in range(p + 1) if window is None or j > p - window]
        expected = naive(q[row], keys, values, seen, sinks)
        assert torch.allclose(out[row].double(), expected, atol=2e-6, rtol=1e-5)


def test_writes_and_compaction_reach_the_right_places() -> None:
    block, kv_heads, dim = 4, 2, 3
    caches = [torch.zeros(8, kv_heads, block, dim) for _ in range(2)]
    table = torch.tensor([[5, 2, 7], [1, 3, 4]], dtype=torch.int32)
    k = torch.randn(6, kv_heads, dim)
    v = torch.randn(6, kv_heads, dim)
    slots = torch.tensor([1, 0], dtype=torch.int32)
    lens = torch.tensor([2, 6], dtype=torch.int32)
    live = torch.tensor([1, 1, 1, 1, 1, 0], dtype=torch.uint8)
    offsets = torch.arange(3, dtype=torch.int32)
    kv_write(k, v, table, slots, live, lens, offsets, k_cache=caches[0], v_cache=caches[1])
    for row in range(3):
        p = 2 + row
        assert torch.equal(caches[0][table[1, p // block], :, p % block], k[row])
    assert torch.equal(caches[1][table[0, 1], :, 2], v[3])
    assert torch.equal(caches[1][table[0, 1], :, 3], v[4])
    assert not caches[0][table[0, 2]].any()  # the dead row wrote nothing
    assert not caches[0][0].any()
    nodes = torch.tensor([[0, 2, -1], [0, -1, -1]], dtype=torch.int32)
    kv_compact(nodes, torch.tensor([2, 1], dtype=torch.int32), lens, table, slots, k_cache=caches[0], v_cache=caches[1])
    assert torch.equal(caches[0][table[1, 0], :, 3], k[2])
    assert torch.equal(caches[0][table[0, 1], :, 2], k[3])


def test_a_chunk_writes_its_live_rows_only() -> None:
    cache = [torch.zeros(4, 1, 4, 2) for _ in range(2)]
    k = torch.randn(4, 1, 2)
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    chunk = torch.tensor([4, 2], dtype=torch.int32)
    live = torch.tensor([0, 1, 1, 0], dtype=torch.uint8)
    prefill_kv_write(k, k, live, table, chunk, k_cache=cache[0], v_cache=cache[1])
    assert not cache[0][1, :, 0].any()
    assert torch.equal(cache[0][1, :, 1], k[1])
    assert torch.equal(cache[1][1, :, 2], k[2])
    assert not cache[0][1, :, 3].any()
