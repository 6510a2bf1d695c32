"""Fragments of bf16 weights, which are the words that mma reads."""

from typing import Any

from lowlat.kernels.formats.bf16 import BF16
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = [
    "as_multiplied",
    "first_half",
    "hold_step",
    "load_half",
    "make_multiply_tiles",
    "multiply_step",
    "second_half",
]

TILE_BYTES = BF16.tile_bytes


@device_function
def as_multiplied(words: Any) -> Any:
    """A lane's inputs of a step, as they are."""
    return words


@device_function
def load_half(weights: Any, half: Any, _words: Any) -> Any:
    """A lane's numbers of half a step: four words of a row, and four of the row 8 below."""
    a0, a1, a2, a3 = ptx.load_shared_128(uint32(weights + uint32(half * 512)))
    b0, b1, b2, b3 = ptx.load_shared_128(uint32(weights + uint32(half * 512 + 1024)))
    return a0, a1, a2, a3, b0, b1, b2, b3


@device_function
def multiply_step(sums: Any, words: Any, _scales: Any, x: Any) -> Any:
    """A step of a tile: see `WeightFormat.decode_fragment`."""
    c0, c1, c2, c3 = sums
    for part in range(2):
        a0, a1, a2, a3 = ptx.load_shared_128(words + uint32(part * 512))
        b0, b1, b2, b3 = ptx.load_shared_128(words + uint32(part * 512 + 1024))
        if part == 0:
            c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a0, b0, a1, b1, x[0], x[1])
            c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a2, b2, a3, b3, x[2], x[3])
        else:
            c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a0, b0, a1, b1, x[4], x[5])
            c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a2, b2, a3, b3, x[6], x[7])
    return c0, c1, c2, c3


@device_function
def hold_step(step: Any, lane: Any) -> Any:
    """Where a lane's words of a step are, which are loaded when they are wanted: see `WeightFormat.prefill_halves`."""
    return uint32(step + uint32(lane * uint32(16)))


@device_function
def first_half(held: Any) -> Any:
    """A lane's words of the first half of a step."""
    return load_half(held, 0, held)


@device_function
def second_half(held: Any) -> Any:
    """A lane's words of the second half of a step."""
    return load_half(held, 1, held)


def make_multiply_tiles(multiply: Any) -> Any:
    """A function: see `WeightFormat.prefill_fragment`."""

    @device_function
    def multiply_numbers(sums: Any, words: Any, _scales: Any, rows: Any, later_rows: Any, live: Any) -> Any:
        a, b = ptx.load_shared_128(words), ptx.load_shared_128(uint32(words + uint32(1024)))
        second = uint32(words + uint32(TILE_BYTES))
        c, d = ptx.load_shared_128(second), ptx.load_shared_128(uint32(second + uint32(1024)))
        sums = multiply(sums, a, b, c, d, rows, live)
        a, b = ptx.load_shared_128(uint32(words + uint32(512))), ptx.load_shared_128(uint32(words + uint32(1536)))
        c, d = ptx.load_shared_128(uint32(second + uint32(512))), ptx.load_shared_128(uint32(second + uint32(1536)))
        return multiply(sums, a, b, c, d, later_rows, live)

    return multiply_numbers
