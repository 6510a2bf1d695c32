"""Slots whose keys and values are gathered for a chunk of prefill, and the expected result."""

from dataclasses import dataclass
from typing import Any

import torch

from lowlat.kernels.attention.prefill.gathered_rows import ALIGNMENT, gathered_rows
from lowlat.kernels.reference.attention.kv_codes import dequantised_kv

POISON = -77.0


def wanted_rows(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    chunk: torch.Tensor,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    size: int,
    window: int | None,
    first: int = 0,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Do what `gather_kv` does in plain torch, on any device, with the same shapes."""
    start, count = chunk.tolist()
    origin = 0 if window is None else max(start - (window - 1), 0) // ALIGNMENT * ALIGNMENT
    seen, block = start + size - origin, k_cache.shape[2]
    lengths.copy_(torch.tensor([[0, size], [0 if origin else first, seen]]))
    for part, (cache, rows) in enumerate(((k_cache, keys), (v_cache, values))):
        rows[:seen] = 0
        at = torch.arange(origin, start + count)
        found = cache[block_table[0, at // block].long(), :, at % block]
        if kv_scales is not None:
            found = dequantised_kv(found.transpose(0, 1), kv_scales[part], rows.dtype).transpose(0, 1)
        rows[: len(at)] = found


@dataclass(frozen=True)
class Gather:
    """A chunk of so many rows in a context of so many positions, of which some are live."""

    size: int
    longest: int
    start: int
    live: int
    window: int | None = None
    first: int = 0
    heads: int = 2
    block: int = 16
    dim: int = 16
    coded: bool = False

    def arrays(self, device: str = "cpu") -> dict[str, Any]:
        """Caches that are NaN but where the slot's live rows lie, a shuffled table, and poisoned rows to write."""
        torch.manual_seed(self.start + self.size)
        pages = -(-self.longest // self.block)
        table = torch.full((1, pages + 1), -1, dtype=torch.int32)
        used = -(-(self.start + self.live) // self.block)
        table[0, :used] = (1 + torch.randperm(pages)[:used]).int()
        at = torch.arange(self.start + self.live)
        caches = [torch.full((pages + 1, self.heads, self.block, self.dim), torch.nan).bfloat16() for _ in range(2)]
        for cache in caches:
            rows = torch.randn(len(at), self.heads, self.dim).bfloat16()
            cache[table[0, at // self.block].long(), :, at % self.block] = rows
        if not used:
            table[0] = 0
        num_rows = gathered_rows(self.size, self.longest, self.window)
        keys, values = (torch.full((num_rows, self.heads, self.dim), POISON).bfloat16() for _ in range(2))
        made = {"k_cache": caches[0], "v_cache": caches[1], "block_table": table}
        made |= {"chunk": torch.tensor([self.start, self.live], dtype=torch.int32), "keys": keys, "values": values}
        if self.coded:
            made |= {name: torch.randint(0, 256, made[name].shape).byte() for name in ("k_cache", "v_cache")}
            made["kv_scales"] = torch.tensor([[0.037109375], [2.0]]).repeat(1, self.heads)
        made["lengths"] = torch.full((2, 2), -9, dtype=torch.int32)
        return {name: tensor.to(device) for name, tensor in made.items()}

    @property
    def options(self) -> dict[str, Any]:
        """Return the kernel's parameters."""
        return {"size": self.size, "window": self.window, "first": self.first}
