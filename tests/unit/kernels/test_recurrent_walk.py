"""Kernels of gated delta nets, walked thread by thread: their meaning, and the bits of rows in any company."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from kernel_walk import Walker
from recurrent_cases import MODULES, Layer, Run, assert_near, by_kernels, by_reference, by_single_steps, grown
from walked_state import walkable_states

from lowlat.kernels.recurrent.delta_step import HeadSizes

COMMON = ("common.activation", "common.memory", "common.norm_math", "common.norm_row")
CPU = torch.device("cpu")
HEADS = [
    HeadSizes(1, 2, 32, 16),
    pytest.param(HeadSizes(2, 2, 32, 8), marks=pytest.mark.second),
    pytest.param(HeadSizes(1, 3, 64, 64), marks=pytest.mark.second),
]


@contextmanager
def walked(*, late: bool = True) -> Iterator[Run]:
    """Operations by walked kernels."""
    walker = Walker(late)
    with walkable_states(walker, *COMMON, *(f"recurrent.{name}" for name in MODULES)) as modules:
        found = dict(zip(MODULES, modules[len(COMMON) :], strict=True))
        yield by_kernels(found, walker.run, CPU)


@pytest.mark.parametrize("fused", [True, False])
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
        alone = by_single_steps(Layer(heads, 3, run, fused=not fused), 2, texts[2])
    assert torch.equal(found[2], alone)
    for slot, wanted in grown(reference, texts, prompts, 3).items():
        assert_near(found[slot], wanted)
