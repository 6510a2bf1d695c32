"""Chi-squared: draws over positions and seeds follow the processed distribution, whatever processes it."""

from collections.abc import Callable

import pytest
import torch
from sampling_cases import World
from stages import later, wide

from lowlat.kernels.reference.sampling.random import philox
from lowlat.kernels.reference.sampling.sample import keep

VOCABULARY, ROWS = 64, 63


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-squared upper tail; cells that expect fewer than five draws are taken together."""
    expected = probabilities.double() * counts.sum()
    small = expected < 5
    observed = torch.cat((counts[~small].double(), counts[small].sum().double()[None]))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected).square() / expected).sum()
    freedom = torch.tensor(max(observed.numel() - 1, 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize(
    "options",
    [
        wide({"temperature": 1.0}),
        wide({"temperature": 0.6, "top_k": 11}),
        later({"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.03}),
    ],
)
def test_draws_follow_the_processed_distribution(options: dict[str, float]) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)) * 1.5
    world, counts = World(VOCABULARY, 1), torch.zeros(VOCABULARY, dtype=torch.int64)
    for start in range(0, 2_000, ROWS):
        world.set(0, seed=start % (5 * ROWS) + 1, length=start, **options)  # five seeds, every position new
        tokens = torch.tensor(world.draw(logits.repeat(ROWS, 1), [0])[0])
        counts += torch.bincount(tokens, minlength=VOCABULARY)
    scaled = (logits - logits.max()) / options["temperature"]
    kept = keep(scaled, int(options.get("top_k", 0)), options.get("top_p", 1.0), options.get("min_p", 0.0))
    probabilities = torch.softmax(torch.where(kept, scaled, -float("inf")).double(), 0)
    assert int(counts[~kept].sum()) == 0
    assert p_value(counts, probabilities) > 1e-3


def check_draws_under_a_mask(draw: Callable[[World, torch.Tensor], torch.Tensor], seed: int) -> None:
    """Draws of a chain of rows, by a grammar that allows half of the tokens, follow what it leaves of their logits."""
    generator = torch.Generator().manual_seed(seed)
    logits, allowed = torch.randn(VOCABULARY, generator=generator), torch.randperm(VOCABULARY, generator=generator) < 32
    world, counts = World(VOCABULARY, 1), torch.zeros(VOCABULARY, dtype=torch.int64)
    for start in range(0, 4_000, ROWS):
        world.set(0, seed=start % (5 * ROWS) + 1, length=start, temperature=0.9)
        world.mask(0, allowed.expand(ROWS, -1))
        counts += torch.bincount(draw(world, logits.repeat(ROWS, 1)), minlength=VOCABULARY)
    left = torch.where(allowed, logits / 0.9, -float("inf"))
    assert int(counts[~allowed].sum()) == 0
    assert p_value(counts, torch.softmax(left.double(), 0)) > 1e-3


@pytest.mark.wide
def test_draws_under_a_mask_follow_what_it_leaves() -> None:
    check_draws_under_a_mask(lambda world, logits: torch.tensor(world.draw(logits, [0])[0]), seed=11)


def test_many_noise_vectors_draw_a_steep_softmax() -> None:
    draws, logits = 400_000, torch.tensor([0.0, -1.0, -4.0, -7.0, -9.0, -0.5, -0.5, -20.0])
    counter = torch.zeros(draws * 2, 4, dtype=torch.int64)
    counter[:, 0] = torch.arange(draws * 2) // 2
    counter[:, 1] = torch.arange(draws * 2) % 2
    words = philox(counter, (17, 4)).reshape(draws, 8)
    uniform = ((2 * words + 1).float() * 2.0**-33).clamp(max=1 - 2.0**-24)
    tokens = (logits - torch.log(-torch.log1p(-uniform))).argmax(-1)
    assert p_value(torch.bincount(tokens, minlength=8), torch.softmax(logits.double(), 0)) > 1e-3


@pytest.mark.wide
def test_neighbouring_positions_and_seeds_draw_independently() -> None:
    world, logits = World(4, 1), torch.zeros(ROWS, 4)
    pairs = torch.zeros(2, 16, dtype=torch.int64)
    for seed in range(30):
        world.set(0, temperature=1.0, seed=seed, length=0)
        here = torch.tensor(world.draw(logits, [0])[0])
        world.set(0, seed=seed + 1)
        there = torch.tensor(world.draw(logits, [0])[0])
        pairs[0] += torch.bincount(here[:-1] * 4 + here[1:], minlength=16)
        pairs[1] += torch.bincount(here * 4 + there, minlength=16)
    for counts in pairs:
        assert p_value(counts, torch.full((16,), 1 / 16)) > 1e-3
