"""A buffer has a name, a shape, a dtype and a role; it is allocated once, and keeps its address.

Apart from weights a step reads and writes only buffers. So every address in a captured graph has an owner.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from lowlat.errors import ConfigError

__all__ = ["BufferSet", "BufferSpec", "Paging", "Role", "aligned_bytes"]

ALIGNMENT = 256


class Role(StrEnum):
    """The owner and lifetime of a buffer's content."""

    STATE = "state"  # outlives a step; one address and the largest strides for all buckets
    SCRATCH = "scratch"  # written before it is read within one step; belongs to one bucket
    CONSTANT = "constant"  # written once, when it is allocated
    COMMAND = "command"  # written by the host, read by the step
    PUBLICATION = "publication"  # written by the step, read by the host


class Paging(StrEnum):
    """The unit of a paged buffer's first dimension, and the content for each index."""

    POSITIONS = "positions"  # a value for every position of a block: a cache of keys or values, [P, G, block, D]
    BLOCKS = "blocks"  # one value for a whole block, [P, ..]
    ROWS = "rows"  # a value for each slot, and after them for each snapshot, [R, ..]


@dataclass(frozen=True)
class BufferSpec:
    """One buffer: its name, shape, dtype and role, and how it is paged.

    paging   how the blocks of a KV pool, or rows, index it; None: it is not paged
    pool     the KV pool, by the suffix of its block tables' names; "": the first pool
    parts    0, or parts that it has of each block of the first pool: its values are indices block * parts + part
    by_slot  whether its first rows belong to slots: row b then is part of the state of the request in slot b
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Role
    paging: Paging | None = None
    pool: str = ""
    by_slot: bool = False
    parts: int = 0

    @property
    def num_bytes(self) -> int:
        """The buffer's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def without_memory(self) -> torch.Tensor:
        """A tensor of its shape and dtype that has no memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class BufferSet(Mapping[str, torch.Tensor]):
    """Buffers allocated from their specs, by name; addresses never change.

    initial   contents of constants; all other buffers start at zero
    pinned    names of buffers in pinned host memory, which the device reads and writes at the same address
    arena     bytes in which the buffers of role `in_arena` lie; several sets may share one for their scratch, since
              scratch does not outlive a step; None: each buffer is allocated by itself
    offsets   the buffers' offsets in the arena; None: they lie one after the other
    given     a set whose buffers are taken, and stay its own, if their specs are the same
    paged     allocates a paged buffer of a shape and dtype, zeroed; None: it is allocated as the others
    Raises ConfigError when two specs of one name differ, when a constant has no content, when its content has another
    shape or dtype, or when the arena is too small.
    """

    def __init__(
        self,
        specs: Iterable[BufferSpec],
        device: torch.device,
        initial: Mapping[str, torch.Tensor] | None = None,
        *,
        pinned: Collection[str] = (),
        arena: torch.Tensor | None = None,
        in_arena: Role = Role.SCRATCH,
        offsets: Mapping[str, int] | None = None,
        given: "BufferSet | None" = None,
        paged: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        self.specs: dict[str, BufferSpec] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._used = 0
        contents = initial or {}
        for spec in specs:
            known = self.specs.get(spec.name)
            if known is None:
                self.specs[spec.name] = spec
                if given is not None and given.specs.get(spec.name) == spec:
                    self._tensors[spec.name] = given[spec.name]
                elif arena is not None and spec.role is in_arena:
                    self._tensors[spec.name] = self._carve(spec, arena, None if offsets is None else offsets[spec.name])
                elif paged is not None and spec.paging is not None and spec.name not in pinned:
                    self._tensors[spec.name] = paged(spec.shape, spec.dtype)
                else:
                    self._tensors[spec.name] = _allocate(spec, device, contents.get(spec.name), spec.name in pinned)
            elif known != spec:
                raise ConfigError(f"buffer {spec.name}: declared as {known} and as {spec}")

    def _carve(self, spec: BufferSpec, arena: torch.Tensor, offset: int | None) -> torch.Tensor:
        start = self._used if offset is None else offset
        self._used = start + aligned_bytes(spec)
        if self._used > arena.numel():
            raise ConfigError(f"buffer {spec.name}: the arena of {arena.numel()} bytes is too small")
        return arena[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def of_role(self, role: Role) -> "BufferSet":
        """The buffers of one role, at their addresses."""
        found = BufferSet((), torch.device("cpu"))
        found.specs = {name: spec for name, spec in self.specs.items() if spec.role is role}
        found._tensors = {name: self._tensors[name] for name in found.specs}
        return found

    def clear(self) -> None:
        """Drop every buffer; the set is then empty."""
        self.specs.clear()
        self._tensors.clear()

    def num_bytes(self, role: Role | None = None) -> int:
        """Bytes of all buffers, or of the buffers with one role."""
        return sum(spec.num_bytes for spec in self.specs.values() if role in (None, spec.role))


def aligned_bytes(spec: BufferSpec) -> int:
    """The buffer's size in an arena, in bytes: a multiple of ALIGNMENT."""
    return -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT


def _allocate(spec: BufferSpec, device: torch.device, content: torch.Tensor | None, pinned: bool) -> torch.Tensor:
    if spec.role is not Role.CONSTANT:
        if pinned:
            return torch.zeros(spec.shape, dtype=spec.dtype, pin_memory=True)
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    if content is None:
        raise ConfigError(f"buffer {spec.name}: a constant needs its content")
    if tuple(content.shape) != spec.shape or content.dtype != spec.dtype:
        raise ConfigError(
            f"buffer {spec.name}: expected {spec.dtype} {list(spec.shape)}, found {content.dtype} {list(content.shape)}"
        )
    return content.to(device).contiguous()
