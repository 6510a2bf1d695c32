"""Slots, rows and a paged cache for tests of attention, on any device."""

import math
import random
from typing import Any

import torch

from lowlat.kernels.reference.attention.attention import attention as reference
from lowlat.kernels.reference.attention.kv_codes import quantised_kv

TOLERANCE = 5e-3  # weights and results are rounded to bf16


class Case:
    """Slots of random lengths in a pool that is NaN but for what they have written."""

    def __init__(
        self,
        lengths: list[int],
        masks: list[list[int]],
        *,
        head_dim: int,
        group: int,
        kv_heads: int = 2,
        block: int = 32,
        slots: list[int] | None = None,
        live: list[int] | None = None,
        device: str = "cuda",
        kv_scales: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        self.device = device
        self.kv_scales = None if kv_scales is None else kv_scales.to(device)
        batch, rows = len(lengths), len(masks[0])
        self.options: dict[str, Any] = {"scale": head_dim**-0.5, **options}
        count = max(2, batch)
        width = -(-(max(lengths) + 64) // block)
        order = torch.randperm(count * width, device=self.device) + 1
        self.table = order.reshape(count, width).int()
        shape = (count * width + 1, kv_heads, block, head_dim)
        dtype, poison = (torch.bfloat16, math.nan) if kv_scales is None else (torch.uint8, 127)
        self.caches = [torch.full(shape, poison, device=self.device, dtype=dtype) for _ in range(2)]
        self.slots = list(range(batch)) if slots is None else slots
        self.lengths, self.masks = lengths, masks
        first = options.get("first", 0)
        for slot, length, row_masks in zip(self.slots, lengths, masks, strict=True):
            end = length + max(mask.bit_length() for mask in row_masks)
            if slot >= 0 and end > first:
                self.store(slot, torch.arange(first, end, device=self.device))
        self.q = random_bf16(batch * rows, kv_heads * group, head_dim, device=device)
        self.live = torch.tensor([1] * (batch * rows) if live is None else live, dtype=torch.uint8, device=self.device)

    def store(self, slot: int, positions: torch.Tensor, scale: float = 1.0) -> None:
        """Write random keys and values at positions of a slot."""
        block = self.caches[0].shape[2]
        blocks = self.table[slot, positions // block].long()
        for part, cache in enumerate(self.caches):
            rows = self._random(len(positions), cache) * scale
            stored = rows if self.kv_scales is None else quantised_kv(rows, self.kv_scales[part])
            cache[blocks, :, positions % block] = stored

    def _random(self, count: int, cache: torch.Tensor) -> torch.Tensor:
        return random_bf16(count, cache.shape[1], cache.shape[3], device=self.device)

    def move(self, slot: int, sources: list[int], targets: list[int]) -> None:
        """Copy keys and values between positions of a slot, all read before any is written."""
        block = self.caches[0].shape[2]
        old, new = (torch.tensor(part, device=self.device) for part in (sources, targets))
        for cache in self.caches:
            kept = cache[self.table[slot, old // block].long(), :, old % block].clone()
            cache[self.table[slot, new // block].long(), :, new % block] = kept

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that reference and kernel share."""
        signed = [[mask - (1 << 64) if mask >> 63 else mask for mask in row] for row in self.masks]
        return {
            "q": self.q,
            "k_cache": self.caches[0],
            "v_cache": self.caches[1],
            "block_table": self.table,
            "slots": torch.tensor(self.slots, dtype=torch.int32, device=self.device),
            "dense_lens": torch.tensor(self.lengths, dtype=torch.int32, device=self.device),
            "row_live": self.live,
            "row_masks": torch.tensor(signed, dtype=torch.int64, device=self.device),
            "kv_scales": self.kv_scales,
        }

    def expected(self) -> torch.Tensor:
        """The reference's result."""
        out = torch.full_like(self.q.reshape(self.q.shape[0], -1), math.nan)
        reference(**self.arguments(), **self.options, out=out)
        return out


def random_bf16(*shape: int, device: str = "cuda") -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16()


def chain(rows: int) -> list[int]:
    return [(1 << row + 1) - 1 for row in range(rows)]


def tree(rows: int, seed: int) -> list[int]:
    """Node r hangs from a random earlier node."""
    generator = random.Random(seed)
    masks = [1]
    for node in range(1, rows):
        masks.append(masks[generator.randrange(node)] | 1 << node)
    return masks


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    difference = (got.float() - want.float()).norm()
    assert difference <= TOLERANCE * want.float().norm(), (difference / want.float().norm()).item()
