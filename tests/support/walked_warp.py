"""Operations of a warp's lanes together where a kernel is walked: shuffles, votes, matrix loads, tensor cores."""

from collections.abc import Callable
from typing import Any

import numpy as np
from fibers import Combine, this_fiber
from gpu_arithmetic import f16_halves, multiplied, rounded
from walked_memory import Place, load_words, store_number

WARP = 32
MASK = 0xFFFFFFFF


class Warp:
    """Instructions of whole warps, for the thread that runs.

    meet  (place, threads, value, combine) -> what comes of the values of so many threads that come to a place
    near  of the block's shared memory
    """

    def __init__(self, meet: Callable[[Any, int, Any, Combine | None], Any], near: Place) -> None:
        self._meet, self._near = meet, near
        self._load_halves, self._load_four = load_words(near, "8H"), load_words(near, "4I")

    def sync(self) -> None:
        self._together("syncwarp", None, None)

    def total(self, value: int) -> int:
        added: int = sum(self._all_reduce("sum", int(value)))
        return added & MASK

    def shuffle(self, lanes: int, value: Any, lane: int) -> Any:
        return self._all_reduce("shuffle", value)[int(lane)]

    def shuffle_up(self, lanes: int, value: Any, distance: int) -> Any:
        return self._all_reduce("shuffle up", value)[max(this_fiber().lane - int(distance), 0)]

    def shuffle_xor(self, lanes: int, value: Any, mask: int) -> Any:
        return self._all_reduce("shuffle by xor", value)[this_fiber().lane ^ int(mask)]

    def ballot(self, vote: int) -> int:
        votes = self._all_reduce("ballot", bool(vote))
        return sum(1 << lane for lane, each in enumerate(votes) if each)

    def same(self, value: int) -> int:
        own = int(value) & MASK
        return sum(1 << lane for lane, each in enumerate(self._all_reduce("match", own)) if each == own)

    def largest(self, value: int) -> int:
        largest: int = max(self._all_reduce("max", int(value) & MASK))
        return largest

    def matrix(self, address: int) -> tuple[int, ...]:
        """ldmatrix.x4.trans: lane i has the address of row i % 8 of matrix i / 8."""

        def read(addresses: list[int]) -> list[tuple[int, ...]]:
            rows = np.array([self._load_halves(each) for each in addresses], np.uint16).reshape(4, 4, 2, 8)
            words = rows[:, :, 0].astype(np.uint32) | rows[:, :, 1].astype(np.uint32) << 16  # matrix, pair, column
            return [tuple(lane) for lane in words.transpose(2, 1, 0).reshape(WARP, 4).tolist()]

        found: tuple[int, ...] = self._together("ldmatrix", int(address), read)
        return found

    def plain_matrix(self, address: int) -> tuple[int, ...]:
        """ldmatrix.x4: lane i has the address of row i % 8 of matrix i / 8, and gets a word of row i / 4 of each."""

        def read(addresses: list[int]) -> list[tuple[int, ...]]:
            words = np.array([self._load_four(each) for each in addresses], np.uint32).reshape(4, WARP)
            return [tuple(lane) for lane in words.T.tolist()]

        found: tuple[int, ...] = self._together("ldmatrix, plain", int(address), read)
        return found

    def transposed(self, word: int) -> int:
        """movmatrix.trans: lane i has a word of row i / 4 of a matrix, and gets one of the transposed matrix."""

        def turn(words: list[int]) -> list[int]:
            halves = np.array(words, np.uint32).view(np.uint16).reshape(8, 8).T
            found: list[int] = np.ascontiguousarray(halves).view(np.uint32).reshape(WARP).tolist()
            return found

        turned: int = self._together("movmatrix", int(word), turn)
        return turned

    def mma(self, *operands: Any) -> tuple[Any, ...]:
        """mma.m16n8k16: 4 sums, 4 words of the first matrix, 2 of the second."""
        return self._multiply(1, operands[:4], operands[4:8], operands[8:])

    def mma_f16(self, *operands: Any) -> tuple[Any, ...]:
        """The same of fp16."""
        found: tuple[Any, ...] = self._together(
            "mma of fp16", (operands[:4], operands[4:8], operands[8:]), lambda lanes: multiplied(lanes, f16_halves)
        )
        return found

    def load_tiles(self, count: int, stride: int) -> Callable[[int], tuple[int, ...]]:
        def load(address: int) -> tuple[int, ...]:
            tiles = (self._load_four(int(address) + tile * stride) for tile in range(count))
            return tuple(word for tile in tiles for word in tile)

        return load

    def mma_tiles(self, total: int, first: int, count: int, word: int) -> Callable[..., tuple[Any, ...]]:
        def multiply(sums: tuple[Any, ...], a0: int, a1: int, a2: int, a3: int, words: tuple[int, ...]) -> Any:
            assert len(sums) == 4 * total
            low, high = 4 * first, 4 * (first + count)
            second = [words[4 * tile + word + part] for tile in range(count) for part in range(2)]
            return sums[:low] + self._multiply(count, sums[low:high], (a0, a1, a2, a3), second) + sums[high:]

        return multiply

    def fma_tiles(
        self, total: int, first: int, count: int, wanted: tuple[int, ...] = (0, 1, 2, 3)
    ) -> Callable[..., tuple[Any, ...]]:
        def add(sums: tuple[Any, ...], partial: tuple[Any, ...], top: Any, low: Any) -> Any:
            assert len(sums) == 4 * total and len(partial) == 4 * count
            made = list(sums)
            for place, value in enumerate(partial):
                if place % 4 not in wanted:
                    continue
                scale = float(top if place % 4 < 2 else low)
                made[4 * first + place] = rounded(float(value) * scale + float(made[4 * first + place]))
            return tuple(made)

        return add

    def store_tiles(self, total: int, first: int, count: int, offsets: Any, stride: int) -> Callable[..., None]:
        put = store_number(self._near)

        def store(address: int, sums: tuple[Any, ...]) -> None:
            assert len(sums) == 4 * total
            for tile in range(count):
                for part, offset in enumerate(offsets):
                    put(int(address) + tile * stride + offset, sums[4 * (first + tile) + part])

        return store

    def _multiply(self, count: int, sums: Any, first: Any, second: Any) -> tuple[Any, ...]:
        """So many of mma.m16n8k16 with one first matrix; sums [4 * count], words [4] and [2 * count]."""
        assert len(sums) == 4 * count and len(second) == 2 * count
        found: tuple[Any, ...] = self._together(f"mma {count}", (sums, first, second), multiplied)
        return found

    def _together(self, name: str, value: Any, combine: Combine | None) -> Any:
        """Wait for all lanes of a warp, which must do the same; return what `combine` makes of their values."""
        thread = this_fiber()
        return self._meet((name, thread.home.key, thread.warp), WARP, value, combine)

    def _all_reduce(self, name: str, value: Any) -> list[Any]:
        """The values of all lanes of a warp."""
        values: list[Any] = self._together(name, value, lambda values: [values] * WARP)
        return values
