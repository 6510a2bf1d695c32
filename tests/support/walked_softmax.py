"""A stand-in for `ptx_attention` where a kernel is walked: products over shared memory, and softmax over registers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from kernel_walk import Walker, standing_in, this_thread
from walked_groups import GROUP, walkable_groups
from walked_memory import store

from lowlat.kernels.toolchain import ptx_attention as known

HALF, ROWS = 64, 64


class _Flying:
    """Sums of a product that is under way."""

    def __init__(self, sums: Any) -> None:
        self.sums = sums


class _Softmax:
    def __init__(self, walker: Walker) -> None:
        self._walker = walker

    def _numbers(self, address: int, rows: int, dim: int) -> Any:
        """bf16 in halves of 64 columns, rows of 128 bytes, pieces swizzled by their address: [rows, dim]."""
        size = rows * dim * 2
        places = np.arange(size) + int(address)
        assert address % 1024 == 0
        start = self._walker.near(int(address), size)
        swizzled = start[(places ^ (places >> 7 & 7) << 4) - int(address)].view(np.uint16)
        numbers = (swizzled.astype(np.uint32) << 16).view(np.float32)
        return numbers.reshape(dim // HALF, rows, HALF).transpose(1, 0, 2).reshape(rows, dim).astype(np.float64)

    def _together(self, name: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        thread = this_thread()
        return self._walker.meet((name, thread.home.key, thread.warp // 4), GROUP, value, combine)

    def multiply_scores(self, dim: int, keys: int) -> Any:
        def multiply(queries: int, place: int) -> _Flying:
            def combine(_: list[Any]) -> list[Any]:
                return _lanes(self._numbers(queries, ROWS, dim) @ self._numbers(place, keys, dim).T)

            return _Flying(self._together("scores", None, combine))

        return multiply

    def multiply_values(self, dim: int, keys: int) -> Any:
        def multiply(sums: Any, words: Any, place: int) -> _Flying:
            assert not isinstance(sums, _Flying) and len(sums) == dim // 2 and len(words) == keys // 4

            def combine(given: list[Any]) -> list[Any]:
                weights = _rows(
                    np.array([each for _, each in given], np.uint32).view(np.uint16).astype(np.uint32) << 16
                )
                product = weights.view(np.float32).astype(np.float64) @ self._numbers(place, keys, dim)
                return _lanes(product + _rows(np.array([each for each, _ in given], np.float64)))

            return _Flying(self._together("values", (sums, words), combine))

        return multiply

    def module(self) -> Any:
        made: Any = ModuleType(known.__name__)

        def awaited(flying: Any, *_: Any) -> Any:
            assert isinstance(flying, _Flying), "sums that are not under way"
            return flying.sums

        made.fence_copies = lambda: None
        made.sync_group = lambda number: self._together(f"barrier {number}", None, lambda values: values)
        made.sync_two_groups = lambda number: self._walker.meet(
            (f"barrier {number}", this_thread().home.key), 2 * GROUP, None, lambda values: values
        )
        made.cap_rows = lambda count, limit: lambda scores, factor: _cap(scores, factor, limit)
        made.multiply_scores, made.multiply_values = self.multiply_scores, self.multiply_values
        made.await_scores = lambda keys, pending: awaited
        made.await_products = lambda dim, keys: awaited
        made.hide = lambda count: _hide
        made.largest_of_rows = lambda count: lambda scores, top, low: (
            max(_side(scores, 0).max(), top), max(_side(scores, 1).max(), low)
        )  # fmt: skip
        made.weigh_rows = lambda count: _weigh
        made.add_rows = lambda count: lambda weights: tuple(_side(weights, side).sum() for side in range(2))
        made.scale_rows = lambda count: lambda sums, top, low: (
            _both(sums) * np.array([[top], [low]], np.float32)
        ).reshape(-1)  # fmt: skip
        made.pack_rows = lambda count: _pack
        made.store_row, made.store_pieces = self._store_row, self._store_pieces
        return made

    def _store_row(self, words: int, half: int) -> Any:
        put = store(self._walker.place_at, "I")

        def store_row(address: int, values: Any) -> None:
            for tile in range(words // 2):
                put(int(address) + 16 * tile, values[2 * tile + half])

        return store_row

    def _store_pieces(self, words: int, half: int) -> Any:
        put = store(self._walker.place_at, "4I")

        def store_pieces(addresses: Any, values: Any) -> None:
            assert 8 * len(addresses) == words
            for piece, address in enumerate(addresses):
                pieces = [values[2 * (4 * piece + tile) + half] for tile in range(4)]
                put(address, *pieces)

        return store_pieces


def _both(numbers: Any) -> Any:
    """A lane's numbers by tile, row and column: [n / 4, 2, 2]."""
    assert not isinstance(numbers, _Flying), "sums that were not awaited"
    return np.asarray(numbers, np.float32).reshape(-1, 2, 2)


def _side(numbers: Any, side: int) -> Any:
    return _both(numbers)[:, side]


def _hide(scores: Any, last: int, first: int, last_low: int, first_low: int) -> Any:
    columns = 8 * np.arange(len(scores) // 4)[:, None, None] + np.arange(2)
    seen = columns <= np.array([[last], [last_low]])
    return np.where(seen & (columns >= np.array([[first], [first_low]])), _both(scores), -np.inf).reshape(-1)


def _cap(scores: Any, factor: Any, limit: float) -> Any:
    power = np.exp2(_both(scores).astype(np.float64) * np.float64(factor))
    return (limit - 2 * limit / (power + 1)).astype(np.float32).reshape(-1)


def _weigh(scores: Any, scale: Any, top: Any, low: Any) -> Any:
    scaled = _both(scores).astype(np.float64) * np.float64(scale) + np.array([[top], [low]], np.float64)
    return np.exp2(scaled.astype(np.float32)).reshape(-1)


def _pack(numbers: Any) -> Any:
    bits = np.asarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return rounded[::2] | rounded[1::2] << 16


def _lanes(sums: Any) -> list[Any]:
    """[64, n] as the lanes of a warpgroup hold it."""
    shaped = (
        sums.astype(np.float32).reshape(4, 2, 8, -1, 4, 2).transpose(0, 2, 4, 3, 1, 5)
    )  # warp, g, t, tile, low, part
    return list(np.ascontiguousarray(shaped.reshape(GROUP, -1)))


def _rows(lanes: Any) -> Any:
    """The numbers that lanes hold, as [64, n]."""
    shaped = lanes.reshape(4, 8, 4, -1, 2, 2).transpose(0, 4, 1, 3, 2, 5)  # warp, low, g, tile, t, part
    return np.ascontiguousarray(shaped.reshape(ROWS, -1))


@contextmanager
def walkable_softmax(walker: Walker, *names: str) -> Iterator[list[ModuleType]]:
    """As `walkable_groups`, with what stands for `ptx_attention` too."""
    made = _Softmax(walker).module()
    assert set(known.__all__) <= set(vars(made))
    with standing_in(known, made), walkable_groups(walker, *names) as modules:
        yield modules
