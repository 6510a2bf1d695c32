"""A slot whose cache holds a chunk's prefix and nothing else, and the chunk's attention: its calls, and its meaning."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowlat.graphs import BufferSpec, Role
from lowlat.graphs.program import Op, Program, Stage, named
from lowlat.kernels.reference import OPERATIONS
from lowlat.kernels.reference.attention import attention
from lowlat.lowering.binding import Binding
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.lowering.prefill_attention import prefill_attention

BF16 = torch.bfloat16
SIZE, HEADS, GROUPS, DIM, BLOCK, LONGEST = 32, 8, 2, 64, 16, 300
SPARE = 4  # positions that a table has beyond the longest context


@dataclass(frozen=True)
class Shape:
    """Rows of a chunk, heads of queries, of keys, their size, positions of a block and of the longest context."""

    size: int
    heads: int
    groups: int
    dim: int
    block: int
    longest: int


SMALL = Shape(SIZE, HEADS, GROUPS, DIM, BLOCK, LONGEST)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by at most that part of the second's norm."""
    difference = (found.double() - expected.double()).norm()
    return bool(difference <= tolerance * expected.double().norm())


class Slot:
    """A slot's cache of random keys and values up to a chunk's last live row; all the rest of the pool is NaN."""

    def __init__(self, start: int, count: int, *, shape: Shape = SMALL, device: str = "cpu", seed: int = 6) -> None:
        torch.manual_seed(seed)
        self.shape, self._device = shape, torch.device(device)
        self._workspaces: list[torch.Tensor] = []
        width = -(-(shape.longest + SPARE) // shape.block)
        pages = 2 * width
        self.start, self.count = start, min(count, shape.longest - start)
        end = start + self.count
        self.table = (1 + torch.randperm(pages)[:width]).int()[None].to(device)
        self.chunk = torch.tensor([start, self.count], dtype=torch.int32, device=device)
        pool = (pages + 1, shape.groups, shape.block, shape.dim)
        self.caches = [torch.full(pool, torch.nan, dtype=BF16, device=device) for _ in range(2)]
        at = torch.arange(end, device=device)
        for cache in self.caches:
            rows = torch.randn(end, shape.groups, shape.dim, device=device).to(BF16)
            cache[self.table[0, at // shape.block].long(), :, at % shape.block] = rows
        self.q = torch.randn(shape.size, shape.heads, shape.dim, device=device).to(BF16)

    @property
    def scale(self) -> float:
        """Scores are multiplied by 1 / sqrt(D)."""
        return float(self.shape.dim**-0.5)

    def prepare(
        self,
        launcher: Any,
        sinks: torch.Tensor | None,
        part: tuple[int, int] | None = None,
        lower: Any = prefill_attention,
        **mask: Any,
    ) -> tuple[Callable[[], None], torch.Tensor]:
        """A function that runs the chunk's attention, and its result; of a part, (first row, rows), as a chunk alone.

        Workspaces and result are NaN before. Every run of the whole chunk reads `chunk` again.
        """
        offset, size = part or (0, self.shape.size)
        chunk = self.chunk
        if part is not None:
            live = max(0, min(self.count - offset, size))
            chunk = torch.tensor([self.start + offset, live], dtype=torch.int32, device=self._device)
        out, names = self._out(size), ("q", "k_cache", "v_cache", "block_table", "chunk")
        tensors = (self.q[offset : offset + size], *self.caches, self.table, chunk)
        held = {"sinks": sinks} if sinks is not None else {}
        op = Op(
            lower.__name__, Stage.PREFILL, named(*names), named("out"),
            {name: name for name in held}, {"scale": self.scale, "chunk_size": size, **mask},
        )  # fmt: skip
        tokens = BufferSpec("tokens", (1, self.shape.longest), torch.int32, Role.STATE)
        cache = BufferSpec("k_cache", tuple(self.caches[0].shape), self.caches[0].dtype, Role.STATE)
        program = Program("attention", (op,), {"tokens": tokens, "k_cache": cache}, {}, OPERATIONS)
        buffers = {**dict(zip(names, tensors, strict=True)), "out": out}
        weights = DeviceWeights(held, set(), self._device)
        binding = Binding(program, buffers, weights, launcher.gpu, self._poisoned)
        launches = launcher.load(lower(binding, op))
        return lambda: launcher.issue(launches), out

    def _poisoned(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        value = torch.nan if dtype.is_floating_point else -1
        self._workspaces.append(torch.full(shape, value, dtype=dtype, device=self._device))  # launches hold addresses
        return self._workspaces[-1]

    def flash(
        self, launcher: Any, sinks: torch.Tensor | None, part: tuple[int, int] | None = None, **mask: Any
    ) -> torch.Tensor:
        """All rows as they come of flash attention, the dead ones too."""
        run, out = self.prepare(launcher, sinks, part, **mask)
        run()
        return out

    def expected(self, sinks: torch.Tensor | None, **mask: Any) -> torch.Tensor:
        """Return the reference's result for the live rows, in float32."""
        out = torch.empty(self.shape.size, self.shape.heads * self.shape.dim, device=self._device)
        keys, values = (cache.float() for cache in self.caches)
        chunk, options = (self.table, self.chunk, sinks), {"out": out, "scale": self.scale, **mask}
        attention.prefill_attention(self.q.float(), keys, values, *chunk, **options)
        return out[: self.count]

    def _out(self, size: int) -> torch.Tensor:
        return torch.full((size, self.shape.heads * self.shape.dim), torch.nan, dtype=BF16, device=self._device)
