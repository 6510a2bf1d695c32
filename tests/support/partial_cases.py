"""Slots with paged keys and values for tests of SpecPV, on any device, and what its authors' code makes of them."""

from typing import Any

import torch

from lowlat.kernels import reference
from lowlat.kernels.reference.attention.kv_codes import quantised_kv

SIZES = {"num_sinks": 1, "num_retrieved": 3}


class PartialCase:
    """One slot of two, of `length` tokens before its rows, whose keys lie in shuffled blocks; the rest is random, too.

    The window begins 4 parts before the last whole one.
    """

    def __init__(
        self,
        length: int,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 64,
        size: int = 32,
        part: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        rows: int = 3,
        sizes: dict[str, int] | None = None,
        window: int = 4,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(length)
        self.length, self.part, self.parts, self.sizes = length, part, size // part, sizes or SIZES
        width = -(-(length + 64) // size)
        pool = (2 * width + 1, kv_heads, size, dim)
        self.k_cache, self.v_cache = (torch.randn(pool, generator=generator).to(dtype).to(device) for _ in range(2))
        self.table = (torch.randperm(2 * width, generator=generator)[:width] + 1).int()[None].to(device)
        self.summary = torch.zeros(pool[0], kv_heads, self.parts, 2, dim, dtype=dtype, device=device)
        self.lists = torch.full((2, kv_heads, width * self.parts), -1, dtype=torch.int32, device=device)
        self.q = torch.randn(8, heads, dim, generator=generator).to(dtype).to(device)
        self.chunk = torch.tensor([length - 4, 5], dtype=torch.int32, device=device)  # rows 5 to 7 are dead
        self.slot = torch.tensor([1], dtype=torch.int32, device=device)
        fixed = self.sizes["num_sinks"] + self.sizes["num_retrieved"]
        self.left_out = max(0, length // part - window - fixed)
        shifts = [7 * part, self.left_out * part]
        self.shifts = torch.tensor(shifts, dtype=torch.int32, device=device)
        self.rows = rows
        self.kv_scales: torch.Tensor | None = None

    def encode(self, scales: torch.Tensor) -> None:
        """Keys and values as codes, by scales [2, G]."""
        self.kv_scales = scales.to(self.k_cache.device)
        caches = (self.k_cache, self.v_cache)
        self.k_cache, self.v_cache = (
            quantised_kv(cache.transpose(1, 2), own).transpose(1, 2).contiguous()
            for cache, own in zip(caches, self.kv_scales, strict=True)
        )

    def span(self, first: int = 0) -> dict[str, Any]:
        """The arguments of `summarise_blocks` for keys that are new from `first` on."""
        span = torch.tensor([first, self.length], dtype=torch.int32, device=self.table.device)
        made = {"k_cache": self.k_cache, "block_table": self.table, "span": span, "key_summary": self.summary}
        return made | {"kv_scales": self.kv_scales}

    def choice(self, num_queries: int = 3) -> dict[str, Any]:
        """The arguments of `choose_blocks`."""
        return {
            "q": self.q, "key_summary": self.summary, "block_table": self.table, "chunk": self.chunk,
            "slot": self.slot, "shifts": self.shifts, "block_lists": self.lists, "block": self.part,
            "num_queries": num_queries, **self.sizes,
        }  # fmt: skip

    def choose(self) -> None:
        """Summaries and lists by the reference."""
        reference.partial.summarise_blocks(**self.span())
        reference.partial.choose_blocks(**self.choice())

    def attended(self, masks: list[int], sinks: torch.Tensor | None = None) -> dict[str, Any]:
        """The arguments of `partial_attention` for rows of these masks; of the two entries the second is empty."""
        device, count = self.table.device, len(masks)
        generator = torch.Generator().manual_seed(count)
        q = torch.randn(2 * count, *self.q.shape[1:], generator=generator).to(self.q.dtype).to(device)
        ints = {"slots": [1, -1], "dense_lens": [self.length - self.left_out * self.part, 0]}
        return {
            "q": q, "k_cache": self.k_cache, "v_cache": self.v_cache, "block_lists": self.lists,
            **{name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in ints.items()},
            "row_live": torch.ones(2 * count, dtype=torch.uint8, device=device),
            "row_masks": torch.tensor([masks, masks], device=device), "sinks": sinks, "kv_scales": self.kv_scales,
            "scale": self.q.shape[-1] ** -0.5, "block": self.part,
            "out": torch.full((2 * count, self.q.shape[1] * self.q.shape[2]), 7.0, device=device).to(self.q.dtype),
        }  # fmt: skip

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values side by side, float32 [G, n, D], rows of the step included."""
        table = self.table[0].long()
        keys, values = (cache[table].transpose(0, 1).flatten(1, 2).float() for cache in (self.k_cache, self.v_cache))
        return keys, values

    def positions(self, num_queries: int = 3) -> torch.Tensor:
        """The positions before the window that each head attends to, [G, n], by the text of the authors' code."""
        keys, size = self.dense()[0], self.part
        sink = self.sizes["num_sinks"] * size
        end = sink + (self.left_out + self.sizes["num_retrieved"]) * size
        blocks = keys[:, sink:end].unflatten(1, (-1, size))
        largest, smallest = blocks.amax(2), blocks.amin(2)
        live = int(self.chunk[1])
        queries = self.q[live - num_queries : live].float().transpose(0, 1)  # [H, R, D]
        repeat = queries.shape[0] // keys.shape[0]
        above = torch.einsum("hqd,hnd->hqn", queries, largest.repeat_interleave(repeat, 0))
        below = torch.einsum("hqd,hnd->hqn", queries, smallest.repeat_interleave(repeat, 0))
        scores = torch.maximum(above, below).mean(1).unflatten(0, (-1, repeat)).mean(1)
        chosen = scores.topk(self.sizes["num_retrieved"]).indices.sort().values
        tokens = sink + chosen[..., None] * size + torch.arange(size, device=keys.device)
        sinks = torch.arange(sink, device=keys.device).expand(keys.shape[0], -1)
        return torch.cat((sinks, tokens.flatten(1)), 1)

    def listed(self) -> torch.Tensor:
        """The positions of the lists before the window, [G, n]."""
        count = self.sizes["num_sinks"] + self.sizes["num_retrieved"]
        entries = self.lists[1, :, :count]
        of_entry = torch.zeros(int(self.table.max()) * self.parts + self.parts, dtype=torch.long, device=entries.device)
        own = self.table[0].long()[:, None] * self.parts + torch.arange(self.parts, device=entries.device)
        of_entry[own.flatten()] = torch.arange(own.numel(), device=entries.device)
        places = of_entry[entries.long()] * self.part
        return (places[..., None] + torch.arange(self.part, device=entries.device)).flatten(1)
