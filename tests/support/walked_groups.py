"""A stand-in for `ptx_hopper` where a kernel is walked: bulk copies that count at a barrier, products of a warpgroup.

Products are done at once, but their sums are hidden until they are awaited: an earlier use gets no numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from gpu_arithmetic import add_rn, e4m3_numbers, mul_rn
from kernel_walk import Walker, standing_in, this_thread, walkable
from walked_memory import load_number, store_number

from lowlat.kernels.toolchain import ptx_hopper as known

GROUP, ROW_BYTES = 128, 128  # threads of a warpgroup; bytes of a row of a step
SLICES = known.SLICES  # of a step
SLICE_BYTES = ROW_BYTES // SLICES


class _Flying(tuple[Any, ...]):
    """Sums of a product that is under way."""


class _Groups:
    def __init__(self, walker: Walker) -> None:
        self._walker = walker
        self._awaited: dict[Any, tuple[int, int]] = {}  # of a barrier: bytes on their way, arrivals that wait for them

    def expect(self, barrier: int, count: int) -> None:
        """An arrival that holds when the bytes are there."""
        self._add(this_thread().home, int(barrier), int(count), 1)

    def copy(self, place: int, source: int, count: int, barrier: int, policy: int = known.KEPT_AS_USUAL) -> None:
        assert policy in (known.KEPT_AS_USUAL, known.READ_ONCE)
        assert not (int(place) | int(source) | int(count)) % 16
        for piece in range(0, int(count), 16):
            self._walker.near(int(place) + piece, 16)[:] = self._walker.at(int(source) + piece, 16)
        self._add(this_thread().home, int(barrier), -int(count), 0)

    def copy_to_pair(self, place: int, source: int, count: int, barrier: int) -> None:
        """To both blocks of a cluster; the other's bytes may come before it expects them."""
        assert not (int(place) | int(source) | int(count)) % 16
        pieces = np.concatenate([self._walker.at(int(source) + piece, 16) for piece in range(0, int(count), 16)])
        for home in self._walker.cluster():
            assert home.num_bytes >= int(place) + int(count)
            home.shared[int(place) : int(place) + int(count)] = pieces
            self._add(home, int(barrier), -int(count), 0)

    def arrive_at(self, barrier: int, rank: int) -> None:
        self._walker.arrive(barrier, self._walker.cluster()[int(rank)])

    def rank(self) -> int:
        """The block's place in its cluster."""
        return self._walker.cluster().index(this_thread().home)

    def sync_cluster(self) -> None:
        homes = self._walker.cluster()
        self._walker.meet(("cluster", homes[0].key), len(homes) * homes[0].launch.threads, None, None)

    def _add(self, home: Any, barrier: int, count: int, arrivals: int) -> None:
        waiting, held = self._awaited.get((home.key, barrier), (0, 0))
        waiting, held = waiting + count, held + arrivals
        assert waiting >= 0 or home.launch.cluster > 1, "more bytes than were expected"
        self._awaited[home.key, barrier] = (waiting, 0 if waiting == 0 else held)
        for _ in range(held if waiting == 0 else 0):
            self._walker.arrive(barrier, home)

    def multiply_group(self, rows: int, slices: int = SLICES, *, by_codes: bool = False) -> Callable[..., Any]:
        product = _multiplied_codes if by_codes else _multiplied

        def multiply(every: Any, words: Any, address: int, go_on: int) -> Any:
            assert go_on or not isinstance(every, _Flying), "sums that were not awaited"
            step, first = int(address) // 1024 * 1024, int(address) % 1024 // SLICE_BYTES
            assert len(every) == rows // 2 and len(words) == 4 * slices and first + slices <= SLICES
            thread = this_thread()

            def combine(values: list[Any]) -> list[Any]:
                return product(values, self._walker.near(step, rows * ROW_BYTES), rows, first, bool(go_on))

            place = (f"product at {address}", thread.home.key, thread.warp // 4)
            return _Flying(self._walker.meet(place, GROUP, (tuple(every), words), combine))

        return multiply

    def await_group(self, rows: int, words: int = 4 * SLICES, under_way: int = 0) -> Callable[..., Any]:
        def wait(sums: Any, used: Any) -> Any:
            assert isinstance(sums, _Flying) and len(sums) == rows // 2 and len(used) == words
            return sums if under_way else tuple(sums)

        return wait

    def store_group_half(self, rows: int, half: int, pitch: int, *, is_scaled: bool) -> Callable[..., None]:
        put = store_number(self._walker.place_at)

        def store(address: int, scale: Any, extra: Any, sums: Any) -> None:
            assert not isinstance(sums, _Flying), "sums that were not awaited"
            for tile in range(rows // 8):
                for part in range(2):
                    value = sums[4 * tile + 2 * half + part]
                    value = mul_rn(value, scale) if is_scaled else value
                    put(int(address) + (8 * tile + part) * pitch, add_rn(value, extra))

        return store

    def load_row_numbers(self, rows: int) -> Callable[..., Any]:
        take = load_number(self._walker.place_at)

        def load(address: int) -> Any:
            return tuple(take(int(address) + 32 * tile + 4 * part) for tile in range(rows // 8) for part in range(2))

        return load

    def store_scaled_half(self, rows: int, half: int, pitch: int) -> Callable[..., None]:
        put = store_number(self._walker.place_at)

        def store(address: int, scale: Any, extra: Any, sums: Any, numbers: Any) -> None:
            assert not isinstance(sums, _Flying), "sums that were not awaited"
            for tile in range(rows // 8):
                for part in range(2):
                    value = mul_rn(mul_rn(sums[4 * tile + 2 * half + part], scale), numbers[2 * tile + part])
                    put(int(address) + (8 * tile + part) * pitch, add_rn(value, extra))

        return store

    def _fours(self, address: int, count: int, pitch: int) -> list[Any]:
        """Where so many float32 of a thread stand, four by four."""
        return [self._walker.near(int(address) + four * pitch, 16).view(np.float32) for four in range(count // 4)]

    def store_sums(self, count: int, pitch: int) -> Callable[..., None]:
        def store(address: int, sums: Any) -> None:
            assert not isinstance(sums, _Flying) and len(sums) == count, "sums that were not awaited"
            for four, place in enumerate(self._fours(address, count, pitch)):
                place[:] = sums[4 * four : 4 * four + 4]

        return store

    def load_sums(self, count: int, pitch: int) -> Callable[..., Any]:
        def load(address: int) -> Any:
            return tuple(np.concatenate(self._fours(address, count, pitch)))

        return load

    def module(self) -> Any:
        made: Any = ModuleType(known.__name__)
        made.KEPT_AS_USUAL, made.READ_ONCE, made.SLICES = known.KEPT_AS_USUAL, known.READ_ONCE, SLICES
        made.fence_barriers, made.barrier_expect = lambda: None, self.expect
        made.copy_bulk = made.copy_bulk_hinted = self.copy
        made.copy_bulk_to_pair, made.barrier_arrive_at = self.copy_to_pair, self.arrive_at
        made.give_registers = made.take_registers = lambda count: lambda: None
        made.cluster_rank, made.sync_cluster = self.rank, self.sync_cluster
        made.multiply_group, made.await_group = self.multiply_group, self.await_group
        made.store_group_half, made.store_scaled_half = self.store_group_half, self.store_scaled_half
        made.load_row_numbers = self.load_row_numbers
        made.replace_words = lambda count: lambda words, others, number: others if number else words
        made.use_words = lambda slices: lambda words, never: None
        made.take_sums = lambda _, first, count: lambda sums: sums[first : first + count]
        made.store_sums, made.load_sums = self.store_sums, self.load_sums
        made.add_tiles = lambda count: lambda one, other: tuple(add_rn(a, b) for a, b in zip(one, other, strict=True))
        return made


def _multiplied(values: list[Any], second: Any, rows: int, first: int, go_on: bool) -> list[Any]:
    """m64nNk16 for each slice from the first on, for all lanes of a warpgroup, whose fragments the PTX manual has."""
    held = np.array([words for _, words in values], np.uint32)
    words = held.reshape(4, 8, 4, 2, -1, 4)  # warp, g, t, low, half, word
    left = np.zeros((64, 4, 16), np.float32)  # row, slice, column
    for low in range(2):
        for word in range(4):
            pair = words[:, :, :, low, :, word]  # warp, g, t, half
            for side in range(2):
                numbers = (pair >> 16 * side << 16).astype(np.uint32).view(np.float32)
                for half in range(words.shape[4]):
                    for t in range(4):
                        into = left.reshape(4, 16, 4, 16)[:, 8 * low : 8 * low + 8, first + 2 * half + word // 2]
                        into[:, :, 2 * t + side + 8 * (word % 2)] = numbers[:, :, t, half]
    right = (_unswizzled(second.view(np.uint16), rows).astype(np.uint32) << 16).view(np.float32)
    return _added(values, left.reshape(64, 64), right.reshape(rows, 64), rows, go_on)


def _multiplied_codes(values: list[Any], second: Any, rows: int, first: int, go_on: bool) -> list[Any]:
    """The same by m64nNk32 of e4m3 codes, four a word; sums as float32 has them."""
    words = np.array([words for _, words in values], np.uint32).reshape(4, 8, 4, 2, -1, 4)
    left = np.zeros((64, 4, 32), np.float32)  # row, slice, column
    for low in range(2):
        for word in range(4):
            for byte in range(4):
                numbers = e4m3_numbers(words[:, :, :, low, :, word] >> 8 * byte & 0xFF)  # warp, g, t, half
                for half in range(words.shape[4]):
                    for t in range(4):
                        into = left.reshape(4, 16, 4, 32)[:, 8 * low : 8 * low + 8, first + 2 * half + word // 2]
                        into[:, :, 4 * t + byte + 16 * (word % 2)] = numbers[:, :, t, half]
    right = e4m3_numbers(_unswizzled(second, rows)).reshape(rows, 128)
    return _added(values, left.reshape(64, 128), right, rows, go_on)


def _unswizzled(second: Any, rows: int) -> Any:
    """The pieces of 16 bytes of each row, in order."""
    swizzle = np.arange(8)[None, :] ^ (np.arange(rows) % 8)[:, None]
    return second.reshape(rows, 8, -1)[np.arange(rows)[:, None], swizzle]


def _added(values: list[Any], left: Any, right: Any, rows: int, go_on: bool) -> list[Any]:
    """The sums of all lanes after a product of two matrices, by rows of either."""
    found = left.astype(np.float64) @ right.astype(np.float64).T  # weight row, row
    before = np.array([sums for sums, _ in values], np.float64).reshape(4, 8, 4, rows // 8, 2, 2)
    shaped = found.reshape(4, 2, 8, rows // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5)  # warp, g, t, tile, low, part
    total = (shaped + before if go_on else shaped).astype(np.float32)
    return [tuple(lane) for lane in total.reshape(GROUP, rows // 2)]


@contextmanager
def walkable_groups(walker: Walker, *names: str) -> Iterator[list[ModuleType]]:
    """As `walkable`, with what stands for `ptx_hopper` too."""
    with standing_in(known, _Groups(walker).module()), walkable(walker, *names) as modules:
        yield modules
