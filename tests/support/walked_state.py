"""A stand-in for `ptx_state` where a kernel is walked: tiles are arrays, a cluster's blocks write to each other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from kernel_walk import Walker, standing_in, walkable

from lowlat.kernels.toolchain import ptx_state as known

COLUMNS = known.COLUMNS


class _States:
    def __init__(self, walker: Walker) -> None:
        self._walker = walker

    def load_tile(self, pieces: int, stride: int) -> Callable[[int], Any]:
        def load(address: int) -> Any:
            read = [self._walker.at(place, 16).view(np.float32) for place in _places(address, pieces, stride)]
            return np.concatenate(read).reshape(COLUMNS, -1)

        return load

    def store_tile(self, pieces: int, stride: int) -> Callable[[int, Any], None]:
        def store(address: int, tile: Any) -> None:
            numbers = np.asarray(tile, np.float32).reshape(-1, 4)
            for place, four in zip(_places(address, pieces, stride), numbers, strict=True):
                self._walker.at(place, 16)[:] = four.view(np.uint8)

        return store

    def store_of_peer(self, address: int, rank: int, value: Any) -> None:
        home = self._walker.cluster()[int(rank)]
        assert address % 4 == 0 and 0 <= address <= home.num_bytes - 4
        home.shared[address : address + 4] = np.array([value], np.float32).view(np.uint8)

    def sync_cluster(self) -> None:
        homes = self._walker.cluster()
        self._walker.meet(("cluster", homes[0].key), len(homes) * homes[0].launch.threads, None, None)

    def module(self) -> Any:
        made: Any = ModuleType(known.__name__)
        made.COLUMNS, made.load_tile, made.store_tile = COLUMNS, self.load_tile, self.store_tile
        made.tile_sums, made.update_tile = lambda rows: _sums, lambda rows: _updated
        made.store_shared_of_peer, made.sync_cluster_memory = self.store_of_peer, self.sync_cluster
        return made


def _places(address: int, pieces: int, stride: int) -> list[int]:
    return [int(address) + column * stride + 128 * piece for column in range(COLUMNS) for piece in range(pieces)]


def _numbers(words: Any) -> Any:
    return np.array(words, np.uint32).view(np.float32)


def _fma(a: Any, b: Any, c: Any) -> Any:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _sums(tile: Any, first: Any, second: Any) -> tuple[Any, ...]:
    columns = np.asarray(tile, np.float32).reshape(COLUMNS, -1)
    vectors = np.stack([_numbers(first), _numbers(second)]).astype(np.float64)
    totals = np.zeros((2, COLUMNS), np.float32)
    for row in range(columns.shape[1]):
        totals = _fma(columns[None, :, row], vectors[:, row, None], totals)
    return tuple(totals.reshape(-1))


def _updated(tile: Any, k: Any, decay: Any, first: Any, second: Any) -> Any:
    decayed = np.asarray(tile, np.float32).reshape(COLUMNS, -1) * np.float32(decay)
    return _fma(_numbers(k)[None], np.array([[first], [second]], np.float64), decayed)


@contextmanager
def walkable_states(walker: Walker, *names: str) -> Iterator[list[ModuleType]]:
    """As `walkable`, with what stands for `ptx_state` too."""
    with standing_in(known, _States(walker).module()), walkable(walker, *names) as modules:
        yield modules
