"""Gated delta nets on a GPU: the reference's values, and the bits of rows in any company, of chunks and of fusions."""

import importlib
from typing import Any

import pytest
import torch
from recurrent_cases import (
    MODULES,
    OUTPUT_ERROR,
    STATE_ERROR,
    Layer,
    Prompt,
    Run,
    assert_near,
    by_kernels,
    by_reference,
    by_single_steps,
    grown,
    largest_error,
)

from lowlat.executors.launcher import Launcher
from lowlat.kernels.recurrent.delta_step import HeadSizes

HEADS = [
    HeadSizes(1, 2, 32, 16), HeadSizes(2, 6, 64, 64), HeadSizes(4, 4, 96, 128), HeadSizes(16, 32, 128, 128),
    HeadSizes(16, 48, 128, 128), HeadSizes(2, 4, 128, 256),
]  # fmt: skip
WIDE = HEADS[3:5]
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def run(launcher: Launcher) -> Run:
    """Operations by their kernels."""
    modules = {name: importlib.import_module(f"lowlat.kernels.recurrent.{name}") for name in MODULES}
    return by_kernels(modules, launcher.run, DEVICE)


def on_gpu(heads: HeadSizes, most: int, run: Run, **options: Any) -> Layer:
    return Layer(heads, most, run, device="cuda", **options)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_drafted_rows_mean_what_the_reference_says(heads: HeadSizes, fused: bool, run: Run) -> None:
    torch.manual_seed(1)
    reference = Layer(heads, 4, by_reference)
    texts, prompts = {0: reference.drawn(40), 2: reference.drawn(23)}, {0: 19, 2: 1}
    layer = on_gpu(heads, 4, run, fused=fused)
    found = grown(layer, texts, prompts, 4)
    layer.check_untouched()
    for slot, wanted in grown(reference, texts, prompts, 4).items():
        assert_near(found[slot], wanted)


@pytest.mark.parametrize("heads", HEADS)
def test_drafted_rows_have_the_bits_of_single_steps(heads: HeadSizes, run: Run) -> None:
    """With fusions, without them, and where states are read before the kernel before has ended; up to eight rows."""
    torch.manual_seed(2)
    layer = on_gpu(heads, 8, run)
    texts, prompts = {0: layer.drawn(90), 2: layer.drawn(60)}, {0: 33, 2: 1}
    found = grown(layer, texts, prompts, 8)
    for options in ({"fused": True}, {"fused": True, "early": True}):
        again = grown(on_gpu(heads, 8, run, **options), texts, prompts, 8)
        assert all(torch.equal(again[slot], found[slot]) for slot in texts)
    for slot, text in texts.items():
        alone = by_single_steps(on_gpu(heads, 1, run, fused=True), slot, text, prompts[slot])
        assert torch.equal(found[slot], alone)


@pytest.mark.parametrize("heads", WIDE)
def test_chunks_begin_with_snapshots_and_leave_some(heads: HeadSizes, run: Run) -> None:
    torch.manual_seed(3)
    layer = on_gpu(heads, 2, run)
    text = layer.drawn(700)
    whole = layer.prefill(0, 0, text[:690], padding=68, kept=[(3, 384), (4, 32)])
    parts = torch.cat((layer.prefill(2, 0, text[:288]), layer.prefill(2, 288, text[288:303], padding=1)))
    layer.check_untouched()
    rest = layer.prefill(2, 384, text[384:690], padding=1, begin=3)
    steps = [
        torch.cat([layer.step({slot: (place, text[place : place + 1])}, 2)[slot] for place in range(690, 700)])
        for slot in (0, 2)
    ]
    assert torch.equal(parts, whole[:303])
    assert torch.equal(rest, whole[384:]) and torch.equal(*steps)
    assert torch.equal(layer.prefill(2, 32, text[32:39], padding=3, begin=4), whole[32:39])


@pytest.mark.parametrize("heads", [*HEADS, HeadSizes(2, 4, 64, 24)])
def test_prompts_are_near_the_rule_by_rows_and_have_the_same_bits_in_any_chunks(heads: HeadSizes, run: Run) -> None:
    """2,048 rows at once, 16 times 128, from a snapshot, and with tiles of 16 positions, near the rule in float64."""
    torch.manual_seed(5)
    rows, values = 2048, (heads.value_heads, heads.value_dim, heads.key_dim)
    prompt = Prompt.drawn(heads, rows, "cuda")
    states = torch.full((5, *values), torch.nan, device="cuda")
    whole = prompt.run(run, states, 0, 0, rows, padding=70, kept=[(3, 1024), (4, 128)])
    parts = [prompt.run(run, states, 1, place, 128, first=place) for place in range(0, rows, 128)]
    rest = prompt.run(run, states, 2, 1024, 1024, first=1024, begin=3, kept=[(-1, 0)])
    assert torch.equal(torch.cat(parts), whole) and torch.equal(rest, whole[1024:])
    assert torch.equal(states[1], states[0]) and torch.equal(states[2], states[0])
    wanted, after = prompt.by_rows()
    short = prompt.run(run, states, 2, 0, rows, chunk_size=16)
    for outputs, state in ((whole, states[0]), (short, states[2])):
        assert largest_error(state, after, 0) < STATE_ERROR
        assert largest_error(outputs, wanted, 1) < OUTPUT_ERROR


@pytest.mark.parametrize("heads", WIDE)
def test_a_broken_state_ends_its_slot_alone(heads: HeadSizes, run: Run) -> None:
    torch.manual_seed(4)
    layer = on_gpu(heads, 4, run, fused=True)
    texts = {slot: layer.drawn(20) for slot in range(3)}
    for slot, text in texts.items():
        layer.prefill(slot, 0, text[:13])
    layer.states["state"][1, 3, 5, 7] = float("nan")
    held = (layer.conv, layer.state_lens, *layer.states.values())
    states = [each.clone() for each in held]
    alone = layer.step({0: (13, texts[0][13:17])}, 4)[0]
    for each, was in zip(held, states, strict=True):
        each.copy_(was)
    layer.state_lens[2] = 0
    found = layer.step({slot: (13, text[13:17]) for slot, text in texts.items()}, 4)
    assert torch.equal(found[0], alone)
    heads_of_1 = found[1].view(4, heads.value_heads, -1).isnan()
    assert bool(heads_of_1[:, 3].any()) and not bool(heads_of_1[:, [0, 1, 2, 4]].any())
    assert bool(found[2].isnan().all())
