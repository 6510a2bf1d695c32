"""The gated delta rule of prompts, walked thread by thread: near the rule by rows in float64, the same bits however a
prompt is cut into chunks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from kernel_walk import Walker
from recurrent_cases import (
    MODULES,
    OUTPUT_ERROR,
    STATE_ERROR,
    Prompt,
    Run,
    by_kernels,
    largest_error,
)
from stages import wide
from walked_unrolled import walkable_unrolled

from lowlat.kernels.recurrent.delta_step import HeadSizes
from lowlat.kernels.toolchain.kernel import Gpu

pytestmark = pytest.mark.second

ROWS = 4  # of the states: slots and snapshots
FEW_SMS = Gpu(1, 227 * 1024, (9, 0))  # so few that blocks are wide
CASES = [
    (HeadSizes(1, 2, 32, 16), 0, 70, {}),
    (HeadSizes(1, 1, 128, 8), 64, 33, {}),
    (HeadSizes(2, 2, 32, 24), 48, 37, {"chunk_size": 16}),  # tiles of 16 positions
    (HeadSizes(1, 1, 64, 64), 39, 40, {"gpu": FEW_SMS}),  # from within a tile
    wide(HeadSizes(1, 1, 32, 40), 0, 1, {}),
    wide(HeadSizes(1, 5, 32, 8), 32, 64, {}),  # more value heads than a block has warps
    wide(HeadSizes(1, 3, 96, 32), 31, 66, {}),
    wide(HeadSizes(2, 4, 64, 16), 7, 21, {"chunk_size": 7}),
    wide(HeadSizes(1, 1, 128, 128), 0, 64, {"gpu": FEW_SMS}),
]


@contextmanager
def walked(*, late: bool = True) -> Iterator[Run]:
    """Operations by walked kernels."""
    walker = Walker(late)
    with walkable_unrolled(walker, *(f"recurrent.{name}" for name in MODULES)) as modules:
        yield by_kernels(dict(zip(MODULES, modules, strict=True)), walker.run, torch.device("cpu"))


def poisoned_states(heads: HeadSizes) -> torch.Tensor:
    return torch.full((ROWS, heads.value_heads, heads.value_dim, heads.key_dim), math.nan)


@pytest.mark.parametrize(("heads", "start", "count", "options"), CASES)
def test_a_chunk_is_near_the_rule_by_rows(heads: HeadSizes, start: int, count: int, options: dict[str, Any]) -> None:
    torch.manual_seed(count)
    prompt, states = Prompt.drawn(heads, count), poisoned_states(heads)
    begin = torch.randn(states[2].shape) / 4
    if start:
        states[2] = begin
    with walked(late=count % 2 == 0) as run:
        found = prompt.run(run, states, 2, start, count, padding=count % 5, **options)
    wanted, after = prompt.by_rows(begin if start else None)
    assert largest_error(states[2], after, 0) < STATE_ERROR
    assert largest_error(found, wanted, 1) < OUTPUT_ERROR
    assert bool(states[[0, 1, 3]].isnan().all())


@pytest.mark.parametrize("size", [32, wide(16)])
def test_a_prompt_has_the_same_bits_in_chunks_of_any_size_and_from_a_snapshot(size: int) -> None:
    """In one chunk that leaves snapshots, in parts, in parts of another width of blocks, and from a snapshot on."""
    heads, count = HeadSizes(1, 2, 32, 64), 4 * size + 9
    torch.manual_seed(size)
    prompt, states = Prompt.drawn(heads, count), poisoned_states(heads)
    with walked() as run:
        whole = prompt.run(run, states, 0, 0, count, kept=[(2, 3 * size), (3, size)], chunk_size=size)
        alone = poisoned_states(heads)
        ends = (0, size, 3 * size, count)
        parts = [
            prompt.run(run, alone, 1, first, last - first, first=first, chunk_size=size, gpu=FEW_SMS, padding=3)
            for first, last in pairwise(ends)
        ]
        rest = prompt.run(
            run, states, 1, 3 * size, count - 3 * size, first=3 * size, begin=2, kept=[(-1, 0)], chunk_size=size
        )
    assert torch.equal(torch.cat(parts), whole) and torch.equal(rest, whole[3 * size :])
    assert torch.equal(alone[1], states[0]) and torch.equal(states[1], states[0])
    _, early = Prompt(heads, prompt.mixed[:size], prompt.ba[:size], prompt.a_log, prompt.dt_bias).by_rows()
    assert largest_error(states[3], early, 0) < STATE_ERROR


def test_a_snapshot_that_is_due_within_a_tile_is_nan() -> None:
    """At the chunk's end it is the state, as at a tile's."""
    heads = HeadSizes(1, 1, 32, 8)
    prompt, states = Prompt.drawn(heads, 40), poisoned_states(heads)
    states[3] = 0
    with walked() as run:
        prompt.run(run, states, 0, 0, 40, kept=[(2, 40), (3, 31)])
    assert torch.equal(states[2], states[0]) and bool(states[0].isfinite().all())
    assert bool(states[3].isnan().all())


def test_decays_of_zero_and_one_equal_keys_and_betas_near_one_are_the_rule_s() -> None:
    """Whatever is not a number stays in its head."""
    heads, count = HeadSizes(2, 6, 32, 8), 61
    torch.manual_seed(9)
    prompt = Prompt.drawn(heads, count)
    keys = prompt.mixed[:, 64:128]
    keys[1::2] = keys[:-1:2]  # each twice
    keys[20:40, :32] = keys[20, :32]
    prompt.ba[:, :6] = 5.5  # betas of 0.996
    prompt.a_log[:] = torch.tensor([-20.0, 4.0, -3.0, 30.0, 0.0, -6.0])  # decays of 1, of 0, and between
    prompt.ba[::7, 8] = 60  # in a head that decays little, some rows decay all
    states, broken = poisoned_states(heads), poisoned_states(heads)
    with walked() as run:
        found = prompt.run(run, states, 0, 0, count)
        wanted, after = prompt.by_rows()
        prompt.ba[17, 4] = math.nan
        prompt.mixed[20, 128 + 8] = math.nan
        others = prompt.run(run, broken, 0, 0, count)
    assert largest_error(found, wanted, 1) < OUTPUT_ERROR
    assert largest_error(states[0], after, 0) < STATE_ERROR
    kept = [0, 2, 3, 5]
    assert torch.equal(others[:, kept], found[:, kept]) and torch.equal(broken[0, kept], states[0, kept])
    assert bool(others[20:, 1, 0].isnan().all()) and bool(others[17:, 4].isnan().all())
    assert torch.equal(others[:, 1, 1:], found[:, 1, 1:])  # columns do not know of each other
