"""Counter-based random numbers: a function of (seed, position, token id, stream), whoever asks and whenever.

Source: Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import torch

__all__ = ["gumbel", "philox4x32", "uniforms"]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
LARGEST = 1.0 - 2.0**-24  # a uniform that rounds to one would have an infinite logarithm


def _multiply(factor: int, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of a 32 by 32 bit product, without leaving int64's positive half."""
    low = factor * (value & 0xFFFF)
    high = factor * (value >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten rounds over counters of four 32-bit words each ([n] int64) with one key; gives four words, [n] int64."""
    a, b, c, d = counter
    first, second = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], a)
        high1, low1 = _multiply(MULTIPLIERS[1], c)
        a, b, c, d = high1 ^ b ^ first, low1, high0 ^ d ^ second, low0
        first, second = (first + WEYL[0]) & WORD, (second + WEYL[1]) & WORD
    return a, b, c, d


def uniforms(seed: int, position: int, count: int, device: torch.device, *, stream: int = 0) -> torch.Tensor:
    """Uniform numbers for token ids 0 to count - 1 at an absolute position, [count] float32 in (0, 1).

    The counter is (id // 4, position, stream, 0), the key the seed's two words; id % 4 picks the word r, and
    u = (r + 0.5) / 2^32. Small values keep their full relative precision.
    """
    index = torch.arange(-(-count // 4), dtype=torch.int64, device=device)
    fill = [torch.full_like(index, word) for word in (position & WORD, stream & WORD, 0)]
    words = philox4x32((index, fill[0], fill[1], fill[2]), (seed & WORD, (seed >> 32) & WORD))
    numbers = torch.stack(words, dim=1).reshape(-1)[:count]
    return ((numbers.double() + 0.5) * 2.0**-32).float().clamp(max=LARGEST)


def gumbel(seed: int, position: int, count: int, device: torch.device) -> torch.Tensor:
    """Gumbel noise for token ids 0 to count - 1 at an absolute position, [count] float32.

    -log(-log(1 - u)): the large values, which decide, come from small u and are precise.
    """
    return -torch.log(-torch.log1p(-uniforms(seed, position, count, device)))
