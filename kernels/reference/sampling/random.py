"""This module computes random numbers as a pure function of (seed, position, stream, token); no state is kept.

So a token's draw is the same in any bucket, with or without speculation, on any device: integers are exact everywhere.
Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011: Philox 4x32 with 10 rounds.
"""

from functools import lru_cache

import torch

__all__ = ["gumbel", "philox", "uniforms"]

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LANES = 4
LARGEST = 1.0 - 2.0**-24  # the largest float32 below one


def philox(counter: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Compute Philox4x32-10: four 32-bit words for each counter.

    counter  [n, 4]  int64  words 0..2**32 - 1
    key      two words
    Returns [n, 4] int64, words 0..2**32 - 1. Products are taken modulo 2**64, as int64 does.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & WORD) ^ c1 ^ k0,
            second & WORD,
            ((first >> 32) & WORD) ^ c3 ^ k1,
            first & WORD,
        )
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return torch.stack((c0, c1, c2, c3), -1)


def uniforms(seed: int, position: int, count: int, device: torch.device, *, stream: int = 0) -> torch.Tensor:
    """Return a number in (0, 1) for each token at an absolute position.

    seed      its low 64 bits are the key
    position  counter word 0; word 1 is token // 4, word 2 the stream, word 3 zero; the lane is token % 4
    Returns [count] float32 on `device`: (2 r + 1) rounded to float32, times 2**-33, at most 1 - 2**-24.
    The rounding is to nearest even, once, so every device has the same bits.
    """
    groups = -(-count // LANES)
    counter = torch.zeros(groups, LANES, dtype=torch.int64, device=device)
    counter[:, 0] = position & WORD
    counter[:, 1] = torch.arange(groups, device=device)
    counter[:, 2] = stream & WORD
    words = philox(counter, (seed & WORD, (seed >> 32) & WORD)).reshape(-1)[:count]
    return ((2 * words + 1).float() * 2.0**-33).clamp(max=LARGEST)


@lru_cache(maxsize=64)  # nodes of a tree at the same position draw with the same noise
def gumbel(seed: int, position: int, count: int, device: torch.device, *, stream: int = 0) -> torch.Tensor:
    """Return standard Gumbel noise for each token at an absolute position: [count] float32 on `device`, read-only.

    The largest of logits + noise is a draw from softmax. Noise is -log(-log1p(-u)): the large values, which decide
    draws, come from small u, where float32 is finest. So the noise lies between -2.9 and 22.9.
    """
    return -torch.log(-torch.log1p(-uniforms(seed, position, count, device, stream=stream)))
