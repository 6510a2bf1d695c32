"""A stand-in for `ptx_warp` where a kernel is walked: what a function writes out is followed on numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from gpu_arithmetic import bf16_bits, bits_of, fma_rn, mul_rn, number_of, plain, rounded
from kernel_walk import Walker, standing_in
from walked_memory import load_number, load_words, store, store_number
from walked_state import walkable_states
from walked_warp import MASK, Warp

from lowlat.kernels.toolchain import ptx_warp as known


class _Instructions:
    """The instructions of `known.Instructions` for the thread that runs."""

    def __init__(self, walker: Walker) -> None:
        near, at, self._warp = walker.place_near, walker.place_at, Warp(walker.meet, walker.place_near)
        self._two, self._four = load_words(near, "2I"), load_words(near, "4I")
        self._number, self._put_number = load_number(near), store_number(near)
        self._global_two, self._put_global_two = load_words(at, "2I"), store(at, "2I")
        self._put_global_four, self._put_global = store(at, "4I"), store(at, "I")
        self.number, self.mul, self.fma = np.float32, mul_rn, fma_rn

    def sync(self, barrier: int) -> None:
        self._warp.sync()

    def load_64(self, address: int, offset: int) -> tuple[int, ...]:
        return self._two(address + offset)

    def load_128(self, address: int, offset: int) -> tuple[int, ...]:
        return self._four(address + offset)

    def load_float(self, address: int, offset: int) -> Any:
        return self._number(address + offset)

    def store_float(self, address: int, offset: int, value: Any) -> None:
        self._put_number(address + offset, value)

    def load_global_two_if(self, address: int, offset: int, wanted: int) -> list[Any]:
        return [number_of(word) for word in (self._global_two(address + offset) if wanted else (0, 0))]

    def store_global_two(self, address: int, offset: int, first: Any, second: Any) -> None:
        self._put_global_two(address + offset, bits_of(first), bits_of(second))

    def store_global_four(self, address: int, offset: int, words: Sequence[int]) -> None:
        self._put_global_four(address + offset, *words)

    def store_global_below(self, address: int, offset: int, word: int, index: int, limit: int) -> None:
        if index < limit:
            self._put_global(address + offset, word)

    def matrices(self, address: int, offset: int, *, transposed: bool = False) -> tuple[int, ...]:
        return (self._warp.matrix if transposed else self._warp.plain_matrix)(address + offset)

    def transposed(self, word: int) -> int:
        return self._warp.transposed(word)

    def mma(self, sums: Sequence[Any], first: Sequence[int], second: Sequence[int]) -> tuple[Any, ...]:
        return self._warp.mma(*sums, *first, *second)

    def sub(self, a: Any, b: Any) -> Any:
        return plain(rounded(a) - rounded(b))

    def negated(self, value: Any) -> Any:
        return -value

    def pair(self, low: Any, high: Any) -> int:
        return bf16_bits(low) | bf16_bits(high) << 16

    def low(self, word: int) -> Any:
        return number_of(word << 16 & MASK)

    def high(self, word: int) -> Any:
        return number_of(word & 0xFFFF0000)

    def float_of(self, word: int) -> Any:
        return number_of(word)

    def plus(self, word: int, count: int) -> int:
        return word + count & MASK

    def below(self, word: int, limit: int) -> bool:
        return word < limit

    def select(self, condition: bool, value: Any, other: Any) -> Any:
        return value if condition else other


@contextmanager
def walkable_unrolled(walker: Walker, *names: str) -> Iterator[list[ModuleType]]:
    """As `walkable_states`, with what stands for `ptx_warp` too."""
    made: Any = ModuleType(known.__name__)
    given = _Instructions(walker)
    assert {name for name in vars(known.Instructions) if name[0] != "_"} <= set(dir(given))

    def unrolled(written: Callable[..., Any], count: int, *arguments: Any) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            assert len(values) == len(arguments)
            for value, each in zip(values, arguments, strict=True):
                assert not isinstance(each, tuple) or len(value) == each[1]
            found = written(given, *values)
            assert count == 1 or (found is None if count == 0 else len(found) == count)
            return found if count < 2 else tuple(found)

        return run

    made.unrolled = unrolled
    with standing_in(known, made), walkable_states(walker, *names) as modules:
        yield modules
