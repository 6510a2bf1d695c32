"""State that the threads of a walked kernel share: its launch, its blocks, barriers of arrivals."""

from typing import Any

import numpy as np

STATIC_BYTES = 48 << 10


class Arrivals:
    """A barrier of arrivals in shared memory: phases end when all have arrived."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.phase = count, 0, 0

    def arrive(self) -> bool:
        """One more; whether a phase ends with it."""
        self.arrived += 1
        if self.arrived < self.count:
            return False
        self.arrived, self.phase = 0, self.phase + 1
        return True


class Launch:
    """A kernel's run: its place among those that are run together, and how far it is.

    width     blocks in x; a block's number counts these first
    grid      blocks in all
    cluster   neighbouring blocks that reach each other's shared memory
    homes     what each block has, by its number
    early     blocks that let the next kernel start, or have ended
    num_left  threads that have not ended
    """

    def __init__(self, number: int, call: Any, previous: "Launch | None") -> None:
        self.number, self.previous = number, previous
        self.width: int = call.grid[0]
        self.grid: int = call.grid[0] * call.grid[1]
        self.threads: int = call.kernel.threads
        self.cluster: int = call.kernel.cluster
        self.homes: list[Home] = []
        self.dependent: bool = call.dependent
        self.early: set[int] = set()
        self.num_left = self.grid * self.threads

    @property
    def lets_next_start(self) -> bool:
        return len(self.early) == self.grid

    @property
    def ended(self) -> bool:
        return not self.num_left


class Home:
    """A block holds what threads share: their launch, the place in it, shared memory, barriers and static arrays."""

    def __init__(self, launch: Launch, block: int, shared_bytes: int, rest: int) -> None:
        self.launch, self.block = launch, block
        self.key = launch.number, block
        self.num_left = launch.threads
        self.shared = np.full(shared_bytes + STATIC_BYTES, rest, np.uint8)
        self.memory = self.shared.data
        self.num_bytes = shared_bytes
        self.arrivals: dict[int, Arrivals] = {}
        self.arrays: list[Any] = []

    def words(self, count: int, dtype: Any) -> "Words":
        """A static array of one of Numba's types after all that is there."""
        start = -(-self.num_bytes // 16) * 16
        self.num_bytes = start + count * dtype.bitwidth // 8
        assert self.num_bytes <= self.shared.size, "static arrays of more than 48 KiB"
        return Words(self, start, count, dtype.name)


class Words:
    """A static array of a block's shared memory, by index: integers as Python has them, or float32.

    start  its address
    """

    def __init__(self, home: Home, start: int, count: int, kind: str) -> None:
        self.home, self.start, self.count = home, start, count
        self._kind = np.dtype(kind)
        self._numbers = home.shared[start : start + count * self._kind.itemsize].view(self._kind)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            first = place.start or 0
            assert place.stop is None and place.step is None and 0 <= first < self.count
            return Words(self.home, self.start + first * self._kind.itemsize, self.count - first, self._kind.name)
        assert 0 <= place < self.count, f"place {place} of {self.count}"
        value = self._numbers[place]
        return value if self._kind.kind == "f" else int(value)

    def __setitem__(self, place: int, value: Any) -> None:
        assert 0 <= place < self.count, f"place {place} of {self.count}"
        self._numbers[place] = value if self._kind.kind == "f" else np.int64(int(value)).astype(self._kind)


class Matrix:
    """A tensor that a kernel takes by index, not by address: integers as Python has them, or float32."""

    def __init__(self, tensor: Any) -> None:
        self._numbers = tensor.numpy()

    def _checked(self, place: Any) -> tuple[int, ...]:
        at = place if isinstance(place, tuple) else (place,)
        assert len(at) == self._numbers.ndim, f"{at} of an array {self._numbers.shape}"
        assert all(0 <= k < size for k, size in zip(at, self._numbers.shape, strict=True)), f"{at} is out of range"
        return at

    def __getitem__(self, place: Any) -> Any:
        value = self._numbers[self._checked(place)]
        return value if self._numbers.dtype.kind == "f" else int(value)

    def __setitem__(self, place: Any, value: Any) -> None:
        self._numbers[self._checked(place)] = value
