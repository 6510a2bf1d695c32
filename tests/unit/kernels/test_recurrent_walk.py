"""Kernels of gated delta nets, walked thread by thread: their meaning, and the bits of rows in any company."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from kernel_walk import Walker
from recurrent_cases import (
    CHUNK,
    MODULES,
    Layer,
    Run,
    assert_near,
    by_kernels,
    by_reference,
    by_single_steps,
    grown,
)
from stages import wide
from walked_unrolled import walkable_unrolled

from lowlat.errors import ShapeError
from lowlat.kernels.recurrent.delta_norm import delta_norm
from lowlat.kernels.recurrent.delta_rule import check_heads, snapshot_pairs
from lowlat.kernels.recurrent.delta_step import HeadSizes

pytestmark = pytest.mark.second

CPU = torch.device("cpu")
HEADS = [
    HeadSizes(1, 2, 32, 16),
    pytest.param(HeadSizes(1, 3, 64, 16), marks=pytest.mark.wide),
]


@contextmanager
def walked() -> Iterator[Run]:
    """Operations by walked kernels."""
    walker = Walker()
    with walkable_unrolled(walker, *(f"recurrent.{name}" for name in MODULES)) as modules:
        found = dict(zip(MODULES, modules, strict=True))
        yield by_kernels(found, walker.run, CPU)


@pytest.mark.parametrize("fused", [True, wide(False)])
@pytest.mark.parametrize("heads", HEADS)
def test_drafted_rows_mean_what_the_reference_says_and_have_the_bits_of_single_steps(
    heads: HeadSizes, fused: bool
) -> None:
    torch.manual_seed(1)
    reference = Layer(heads, 3, by_reference)
    texts, prompts = {0: reference.drawn(9), 2: reference.drawn(7)}, {0: 5, 2: 1}
    with walked() as run:
        layer = Layer(heads, 3, run, fused=fused, early=fused)
        found = grown(layer, texts, prompts, 3)
        layer.check_untouched()
        alone = by_single_steps(Layer(heads, 3, run, fused=not fused), 2, texts[2], prompts[2])
    assert torch.equal(found[2], alone)
    for slot, wanted in grown(reference, texts, prompts, 3).items():
        assert_near(found[slot], wanted)


def test_chunks_have_the_bits_of_the_whole_prompt_and_begin_with_snapshots() -> None:
    """A prompt in one chunk, in two, and from snapshots that another slot's chunk left in its midst; then steps."""
    heads = HeadSizes(1, 1, 32, 8)
    torch.manual_seed(4)
    reference = Layer(heads, 2, by_reference)
    text = reference.drawn(3 * CHUNK + 9)
    with walked() as run:
        layer = Layer(heads, 2, run)
        whole = layer.prefill(0, 0, text[: 2 * CHUNK + 7], padding=3, kept=[(3, 2 * CHUNK), (4, CHUNK)])
        parts = [layer.prefill(2, 0, text[:CHUNK]), layer.prefill(2, CHUNK, text[CHUNK : CHUNK + 20], padding=1)]
        state = layer.states["state"][2].clone()
        layer.check_untouched()
        rest = layer.prefill(2, 2 * CHUNK, text[2 * CHUNK : 2 * CHUNK + 7], padding=1, begin=3)
        ends = [
            layer.step({slot: (place, text[place : place + 1])}, 2)[slot]
            for slot in (0, 2)
            for place in range(2 * CHUNK + 7, 2 * CHUNK + 10)
        ]
        early = layer.prefill(2, CHUNK, text[CHUNK : CHUNK + 3], padding=2, begin=4)
    assert torch.equal(torch.cat(parts), whole[: CHUNK + 20])
    assert torch.equal(rest, whole[2 * CHUNK :])
    assert torch.equal(torch.cat(ends[:3]), torch.cat(ends[3:]))
    assert torch.equal(early, whole[CHUNK : CHUNK + 3])
    assert_near(whole, reference.prefill(0, 0, text[: 2 * CHUNK + 7], padding=3))
    reference.prefill(2, 0, text[: CHUNK + 20])
    torch.testing.assert_close(state, reference.states["state"][2], rtol=1e-4, atol=1e-5)


def test_a_broken_state_ends_its_slot_alone() -> None:
    """A slot whose state is not that before its rows, and one with NaN in it: the others' rows have the same bits."""
    heads = HeadSizes(1, 1, 32, 8)
    torch.manual_seed(6)
    with walked() as run:
        layer = Layer(heads, 2, run, fused=True)
        texts = {slot: layer.drawn(6) for slot in range(3)}
        for slot, text in texts.items():
            layer.prefill(slot, 0, text[:3])
        layer.states["state"][1, 0, 5, 7] = float("nan")
        states = [each.clone() for each in (layer.conv, layer.state_lens, *layer.states.values())]
        alone = layer.step({0: (3, texts[0][3:5])}, 2)[0]
        for each, was in zip((layer.conv, layer.state_lens, *layer.states.values()), states, strict=True):
            each.copy_(was)
        layer.state_lens[2] = 0  # three rows behind, where two are kept
        found = layer.step({slot: (3, text[3:5]) for slot, text in texts.items()}, 2)
    assert torch.equal(found[0], alone)
    assert bool(found[1].isnan().any()) and bool(found[2].isnan().all())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="Dk must be a multiple of 32, at most 128, got 48"):
        check_heads(HeadSizes(1, 2, 48, 32))
    with pytest.raises(ShapeError, match="Dv must be a multiple of 8"):
        check_heads(HeadSizes(1, 2, 32, 20))
    with pytest.raises(ShapeError, match="3 value heads are no multiple of 2 key heads"):
        check_heads(HeadSizes(2, 3, 32, 32))
    with pytest.raises(ShapeError, match="snapshots must be a row and pairs, got 4 numbers"):
        snapshot_pairs(torch.zeros(1, 4, dtype=torch.int32))
    x = torch.empty(2, 32, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match="columns of a head must be a multiple of 8"):
        delta_norm(x=x, gates=torch.empty(2, 32), weight=torch.ones(4), out=x, eps=1e-6)
