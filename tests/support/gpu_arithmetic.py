"""A GPU's instructions on numbers and bits in NumPy, for kernels that are walked on a CPU."""

from functools import lru_cache
from typing import Any

import numpy as np

WARP = 32
NAN = np.uint32(0x7FFFFFFF).view(np.float32)
# one number and its bits, both ways: NumPy makes a scalar, or a view of one, in five times as long
_NUMBER, _HALF = np.zeros(1, np.float32), np.zeros(1, np.float16)
_WORD, _HALF_WORD = _NUMBER.data.cast("B").cast("I"), _HALF.data.cast("B").cast("H")


def bf16_halves(words: Any) -> Any:
    """The bf16 values in words [..., n]: float64 [..., n, 2]."""
    low = words.astype(np.uint32)
    return np.stack([low << 16, low & 0xFFFF0000], -1).view(np.float32).astype(np.float64)


def f16_halves(words: Any) -> Any:
    """The fp16 values in words."""
    low = words.astype(np.uint32)
    return np.stack([low & 0xFFFF, low >> 16], -1).astype(np.uint16).view(np.float16).astype(np.float64)


def multiplied(lanes: list[Any], halves: Any = bf16_halves) -> list[tuple[Any, ...]]:
    """mma.m16n8k16 for all lanes of a warp, whose fragments are as the PTX manual has them; sums one k after another.

    A lane is a group of 8 and a quad of 4; a word has two values, the lower one first, which `halves` takes apart.
    """
    sums, first, second = (np.array([lane[part] for lane in lanes]) for part in range(3))
    count = sums.shape[1] // 4
    total = sums.astype(np.float64).reshape(8, 4, count, 2, 2).transpose(2, 3, 0, 1, 4).reshape(count, 16, 8)
    left = halves(first).reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)  # row, k
    right = halves(second).reshape(8, 4, count, 2, 2).transpose(2, 0, 3, 1, 4).reshape(count, 8, 16)  # column, k
    for k in range(16):
        total = total + left[None, :, k, None] * right[:, None, :, k]
    results = total.astype(np.float32).reshape(count, 2, 8, 4, 2).transpose(2, 3, 0, 1, 4).reshape(WARP, 4 * count)
    return [tuple(lane) for lane in results]


def number_of(bits: int) -> Any:
    """float32, by its bits."""
    _WORD[0] = bits
    return _NUMBER[0]


def bf16_value(bits: int) -> Any:
    return number_of(bits << 16)


def bits_of(value: Any) -> int:
    _NUMBER[0] = value
    return _WORD[0]


def rounded(value: Any) -> Any:
    """To float32."""
    if type(value) is np.float32:
        return value
    _NUMBER[0] = value
    return _NUMBER[0]


def plain(value: Any) -> Any:
    """A result of arithmetic: of all NaN the GPU gives one."""
    return value if value == value else NAN


def add_rn(a: Any, b: Any) -> Any:
    return plain(rounded(a) + rounded(b))


def mul_rn(a: Any, b: Any) -> Any:
    return plain(rounded(a) * rounded(b))


def div_rn(a: Any, b: Any) -> Any:
    return plain(rounded(a) / rounded(b))


def fma_rn(a: Any, b: Any, c: Any) -> Any:
    """The product of two float32 is exact in float64; the sum is rounded twice."""
    return plain(rounded(float(a) * float(b) + float(c)))


def bf16_bits(value: Any) -> int:
    """To the nearest, and of two equally near ones to the even one."""
    bits = bits_of(value)
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF  # not a number, as the GPU has it
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def f16_bits(value: Any) -> int:
    _HALF[0] = value
    return _HALF_WORD[0]


def picked_bytes(word: int, selector: int) -> int:
    """Bytes of a word by the numbers of a selector, the lowest first; of 4 to 7 they are zeros."""
    numbers = ((int(selector) >> 4 * place) & 15 for place in range(4))
    return sum(
        (int(word) >> 8 * number & 0xFF if number < 4 else 0) << 8 * place for place, number in enumerate(numbers)
    )


def larger_pair(a: int, b: int) -> int:
    """Of bf16 pairs without signs or NaN."""
    return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16


@lru_cache(maxsize=256)
def _f16_of_code(code: int) -> int:
    """An e4m3 number's bits as fp16; of a NaN, those that the GPU makes."""
    if code & 0x7F == 0x7F:
        return 0x7FFF
    return f16_bits(np.uint16((code & 0x80) << 8 | (code & 0x7F) << 7).view(np.float16) * np.float16(256))


def e4m3_pairs(word: int) -> tuple[int, int]:
    """The numbers of bytes 0 and 1, and of bytes 2 and 3."""
    a, b, c, d = (_f16_of_code(int(word) >> 8 * byte & 0xFF) for byte in range(4))
    return a | b << 16, c | d << 16


E4M3 = np.array([_f16_of_code(code) for code in range(256)], np.uint16).view(np.float16).astype(np.float32)
MAGNITUDES = E4M3[:127].astype(np.float64)  # of codes from 0 to 448, ascending


def e4m3_numbers(codes: Any) -> Any:
    """The float32 numbers of an array of codes."""
    return E4M3[codes]


def e4m3_code(value: Any) -> int:
    """The code of the nearest number, ties to even codes, at most 448; of NaN that of NaN."""
    number = float(value)
    if np.isnan(number):
        return 0x7F
    size = min(abs(number), 448.0)
    above = int(np.searchsorted(MAGNITUDES, size))
    below = max(above - 1, 0)
    distances = size - MAGNITUDES[below], MAGNITUDES[above] - size
    code = below if distances[0] < distances[1] or (distances[0] == distances[1] and below % 2 == 0) else above
    return code | (0x80 if np.signbit(number) else 0)


@lru_cache(maxsize=1 << 16)  # of codes and scales, which are few
def fma_pair(a: int, b: int, c: int) -> int:
    low, high = (_fma(a << shift, b << shift, c << shift) for shift in (16, 0))
    return low | high << 16


def _fma(*words: int) -> int:
    """Of the upper halves of words; the product of two bf16 is exact in float64."""
    a, b, c = (float(number_of(word & 0xFFFF0000)) for word in words)
    return bf16_bits(rounded(a * b + c))
