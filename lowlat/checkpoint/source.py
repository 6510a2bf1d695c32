"""A weight source is a mapping whose tensors need not be in memory yet, and are streamed one at a time.

The code that places weights asks `streamed` for them and keeps copies of its own; the original is then freed, so a
model larger than the host's memory reaches a device.
"""

import mmap
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress

import torch

__all__ = ["JoinedWeights", "Named", "PlacedWeights", "WeightSource", "shapes_of", "streamed"]

Named = tuple[tuple[str, ...], torch.Tensor]  # one tensor under all its names


class WeightSource(Mapping[str, torch.Tensor]):
    """Canonical weights, any of which may be made again at each look-up: tensors cannot be compared by `is`."""

    @abstractmethod
    def stream(self, arena: torch.Tensor | None = None) -> Generator[Named, None, None]:
        """Every tensor once, on the CPU, under all its names, in a fixed order.

        arena  uint8, `arena_bytes` long at least: tensors lie in it, and one is good until the next is asked for;
               None: they have memory of their own, and are the caller's to keep
        Parts of a quantised weight come one after the other, and all are good until the tensor after them.
        """

    @abstractmethod
    def shapes(self) -> dict[str, torch.Tensor]:
        """Tensors of every name's shape and dtype without content; names of one tensor have the same."""

    @property
    @abstractmethod
    def arena_bytes(self) -> int:
        """Size of the arena in which a stream reads ahead while its caller still uses the last tensor handed out."""

    @property
    def made_bytes(self) -> int:
        """The most host memory next to the arena that a stream takes to make tensors; 0 where all are read."""
        return 0


class JoinedWeights(WeightSource):
    """Several mappings as one, streamed one after the other; no name may be in two of them."""

    def __init__(self, *parts: Mapping[str, torch.Tensor]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> torch.Tensor:
        for part in self._parts:
            if name in part:
                return part[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        for part in self._parts:
            yield from part

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __contains__(self, name: object) -> bool:
        return any(name in part for part in self._parts)

    def stream(self, arena: torch.Tensor | None = None) -> Generator[Named, None, None]:
        """See `WeightSource.stream`; tensors of an ordinary mapping are its own."""
        for part in self._parts:
            yield from part.stream(arena) if isinstance(part, WeightSource) else _by_tensor(part)

    def shapes(self) -> dict[str, torch.Tensor]:
        """See `WeightSource.shapes`."""
        return {name: tensor for part in self._parts for name, tensor in shapes_of(part).items()}

    @property
    def arena_bytes(self) -> int:
        """The most that a part needs."""
        return max((part.arena_bytes for part in self._parts if isinstance(part, WeightSource)), default=0)

    @property
    def made_bytes(self) -> int:
        """The most that a part takes."""
        return max((part.made_bytes for part in self._parts if isinstance(part, WeightSource)), default=0)


class PlacedWeights(WeightSource):
    """Weights that are already on their device, and are dropped as they are streamed: they can be streamed once."""

    def __init__(self) -> None:
        self._waiting: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, torch.Tensor] = {}

    def add(self, names: tuple[str, ...], tensor: torch.Tensor) -> None:
        """Keep one tensor under all its names."""
        self._waiting.update(dict.fromkeys(names, tensor))
        self._shapes.update(dict.fromkeys(names, torch.empty_like(tensor, device="meta")))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._waiting[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._shapes

    def __len__(self) -> int:
        return len(self._shapes)

    def stream(self, arena: torch.Tensor | None = None) -> Generator[Named, None, None]:
        """See `WeightSource.stream`; each tensor is the caller's alone."""
        together: dict[int, list[str]] = {}
        for name, tensor in self._waiting.items():
            together.setdefault(id(tensor), []).append(name)
        for names in together.values():
            yield tuple(names), self._take(names)

    def _take(self, names: list[str]) -> torch.Tensor:
        (first, *others) = [self._waiting.pop(name) for name in names]
        del others
        return first

    def shapes(self) -> dict[str, torch.Tensor]:
        """See `WeightSource.shapes`."""
        return dict(self._shapes)

    @property
    def arena_bytes(self) -> int:
        """None is needed: nothing is read."""
        return 0


@contextmanager
def streamed(source: Mapping[str, torch.Tensor], device: torch.device) -> Iterator[Iterator[Named]]:
    """Every tensor of a mapping once, under all its names, to be placed on `device`; the context ends the reading.

    On the CPU a tensor may be kept. For another device it must be copied before the next is asked for: a stream's own
    memory is used again and, for a CUDA device, pinned.
    """
    if not isinstance(source, WeightSource):
        yield _by_tensor(source)
    elif device.type == "cpu" or not source.arena_bytes:
        with closing(source.stream()) as stream:
            yield stream
    else:
        with _arena(source.arena_bytes, device) as arena, closing(source.stream(arena)) as stream:
            yield stream


def shapes_of(source: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Shapes and dtypes by name; no weight is read for it."""
    return source.shapes() if isinstance(source, WeightSource) else source


def _by_tensor(source: Mapping[str, torch.Tensor]) -> Iterator[Named]:
    names: dict[int, list[str]] = {}
    for name, tensor in source.items():
        names.setdefault(id(tensor), []).append(name)
    for together in names.values():
        yield tuple(together), source[together[0]]


@contextmanager
def _arena(size: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Host memory for a stream: of huge pages where there are some, pinned where the device is a CUDA one.

    A pinned copy is several times as fast as one that the driver stages. Where the system refuses, it is pageable.
    """
    memory = mmap.mmap(-1, size)  # given back to the system at the end, which torch's pinned allocator does not do
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    arena = torch.frombuffer(memory, dtype=torch.uint8)
    pinned = device.type == "cuda" and _pin(arena, device)
    try:
        yield arena
    finally:
        if pinned:
            torch.cuda.synchronize(device)
            torch.cuda.cudart().cudaHostUnregister(arena.data_ptr())


def _pin(arena: torch.Tensor, device: torch.device) -> bool:
    if int(torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), arena.numel(), 0)) == 0:
        return True
    with suppress(RuntimeError):  # the next launch reports the refusal as if it were its own: this one takes it
        torch.zeros(1, device=device)
    return False
