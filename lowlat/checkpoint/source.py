"""A weight source is a mapping whose tensors need not be in memory yet; they are streamed one at a time.

Executors take the tensors from `streamed` and keep copies of their own. Each original is then freed, so that a model
larger than the host's memory can reach a device.
"""

import mmap
from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress

import torch

__all__ = ["JoinedWeights", "Named", "PlacedWeights", "WeightSource", "shapes_of", "streamed"]

Named = tuple[tuple[str, ...], torch.Tensor]  # one tensor under all its names


class WeightSource(Mapping[str, torch.Tensor]):
    """Canonical weights; a look-up may make a tensor anew each time, so do not compare tensors by `is`."""

    @abstractmethod
    def stream(self, arena: torch.Tensor | None = None) -> Generator[Named, None, None]:
        """Yield each tensor once, on the CPU, with all its names, in a fixed order.

        arena  [n] uint8, n >= `arena_bytes`: tensors lie in it, and each is valid until the next is asked for;
               None: they have memory of their own, and the caller may keep them
        Parts of a quantised weight come one after the other, and all are valid until the tensor after them.
        """

    @abstractmethod
    def shapes(self) -> dict[str, torch.Tensor]:
        """Return tensors without content with the shape and dtype of each name; names of one tensor share one."""

    @property
    @abstractmethod
    def arena_bytes(self) -> int:
        """Bytes of the arena that a stream needs to read ahead while its caller still uses the last tensor."""

    @property
    def made_bytes(self) -> int:
        """Most bytes of host memory beside the arena that a stream uses to make tensors; 0 if it only reads."""
        return 0


class JoinedWeights(WeightSource):
    """Several mappings joined, and streamed one after the other; no name may be in two of them."""

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
        """See `WeightSource.stream`; tensors of a plain mapping are yielded as they are."""
        for part in self._parts:
            yield from part.stream(arena) if isinstance(part, WeightSource) else _by_tensor(part)

    def shapes(self) -> dict[str, torch.Tensor]:
        """See `WeightSource.shapes`."""
        return {name: tensor for part in self._parts for name, tensor in shapes_of(part).items()}

    @property
    def arena_bytes(self) -> int:
        """The largest arena of a part."""
        return max((part.arena_bytes for part in self._parts if isinstance(part, WeightSource)), default=0)

    @property
    def made_bytes(self) -> int:
        """The largest number of a part."""
        return max((part.made_bytes for part in self._parts if isinstance(part, WeightSource)), default=0)


class PlacedWeights(WeightSource):
    """Weights that are already on their device; the stream gives each tensor away, so it can run only once."""

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
        """See `WeightSource.stream`; only the caller holds the tensor."""
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
        """0: nothing is read."""
        return 0


@contextmanager
def streamed(source: Mapping[str, torch.Tensor], device: torch.device) -> Iterator[Iterator[Named]]:
    """Give each tensor of a mapping once, with all its names, to be placed on `device`; the context ends the reading.

    On the CPU the caller may keep a tensor. For another device it must copy it before it asks for the next: the stream
    reuses its memory, which is pinned for a CUDA device.
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
    """Return tensors of shapes and dtypes by name, without reading a weight."""
    return source.shapes() if isinstance(source, WeightSource) else source


def _by_tensor(source: Mapping[str, torch.Tensor]) -> Iterator[Named]:
    names: dict[int, list[str]] = {}
    for name, tensor in source.items():
        names.setdefault(id(tensor), []).append(name)
    for together in names.values():
        yield tuple(together), source[together[0]]


@contextmanager
def _arena(size: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Allocate host memory for a stream, in huge pages if there are any, and pinned for a CUDA device.

    Copies from pinned memory are several times as fast as staged ones. If the system refuses to pin, it is pageable.
    """
    memory = mmap.mmap(-1, size)  # the system gets it back at the end; torch's pinned allocator would keep it
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
    with suppress(RuntimeError):  # the next launch would report the refusal as its own error: this one absorbs it
        torch.zeros(1, device=device)
    return False
