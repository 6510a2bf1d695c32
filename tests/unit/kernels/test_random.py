"""Philox against its published vectors, and the noise made of it against its law."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from lowlat.kernels.reference.sampling.random import gumbel, philox, uniforms

CPU = torch.device("cpu")

# Random123, kat_vectors, "philox4x32 10": counter, key, result
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_words(counter: str, key: str, expected: str, device: str) -> None:
    first, second = words(key)
    counters = torch.tensor([words(counter)] * 3, device=device)
    assert philox(counters, (first, second)).tolist() == [words(expected)] * 3


def test_uniforms_are_the_documented_lanes_rounded_once() -> None:
    seed, position, stream = 0xFEDCBA9876543210, 4_000_000_007, 3
    got = uniforms(seed, position, 37, CPU, stream=stream)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    for token in range(37):
        r = int(philox(torch.tensor([[position, token // 4, stream, 0]]), key)[0, token % 4])
        exact = Fraction(2 * r + 1, 2**33)
        expected = np.float32(2 * r + 1) * np.float32(2.0**-33)  # numpy rounds an integer to nearest even too
        assert float(got[token]) == min(float(expected), 1 - 2.0**-24)
        assert abs(Fraction(float(got[token])) - exact) <= Fraction(1, 2**24)


def test_uniforms_do_not_depend_on_the_count_and_do_on_all_else() -> None:
    base = uniforms(7, 11, 101, CPU)
    for count in (1, 2, 3, 4, 5, 64, 100):
        assert torch.equal(uniforms(7, 11, count, CPU), base[:count])
    others = [uniforms(8, 11, 101, CPU), uniforms(7 + (1 << 32), 11, 101, CPU), uniforms(7, 12, 101, CPU)]
    others.append(uniforms(7, 11, 101, CPU, stream=1))
    for other in others:
        assert int((other == base).sum()) == 0


def test_uniforms_accept_any_python_integer_as_seed() -> None:
    assert torch.equal(uniforms((1 << 64) + 5, 1, 9, CPU), uniforms(5, 1, 9, CPU))
    assert torch.equal(uniforms(-1, 1, 9, CPU), uniforms((1 << 64) - 1, 1, 9, CPU))
    assert uniforms(1, 1, 0, CPU).shape == (0,)


def test_noise_follows_its_law() -> None:
    noise = gumbel(3, 5, 200_000, CPU).double()
    assert bool(noise.isfinite().all())
    order = noise.sort().values
    law = torch.exp(-torch.exp(-order))
    steps = torch.arange(1, noise.numel() + 1, dtype=torch.float64) / noise.numel()
    assert float((law - steps).abs().max()) < 1.95 / noise.numel() ** 0.5  # Kolmogorov-Smirnov, p = 0.001


@pytest.mark.gpu
def test_uniforms_have_the_same_bits_on_the_gpu() -> None:
    for position in range(20):
        here = uniforms(position * 977, position, 4099, CPU)
        assert torch.equal(uniforms(position * 977, position, 4099, torch.device("cuda")).cpu(), here)
