"""A slot whose cache holds a chunk's prefix and nothing else, and attention of the chunk: by torch, and its meaning."""

from typing import Any

import torch

from lowlat.executors.prefill.attention import prefill_attention, reach_of, sight_of
from lowlat.kernels.reference import attention

__all__ = ["BLOCK", "DIM", "GROUPS", "HEADS", "LONGEST", "REACHES", "SIZE", "Slot", "close"]

BF16 = torch.bfloat16
SIZE, HEADS, GROUPS, DIM, BLOCK, LONGEST = 32, 8, 2, 64, 16, 300
REACHES = (32, 64, 128, 256, 320)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by at most that part of the second's norm."""
    difference = (found.double() - expected.double()).norm()
    return bool(difference <= tolerance * expected.double().norm())


class Slot:
    """A slot's cache of random keys and values up to a chunk's last live row; all the rest of the pool is NaN."""

    def __init__(self, start: int, count: int, *, device: str = "cpu", seed: int = 6) -> None:
        torch.manual_seed(seed)
        width = -(-(LONGEST + 4) // BLOCK)
        self.start, self.count = start, min(count, LONGEST - start)
        count = self.count
        self.table = (1 + torch.randperm(40)[:width]).int()[None]
        self.chunk = torch.tensor([start, count], dtype=torch.int32)
        self.caches = [torch.full((41, GROUPS, BLOCK, DIM), torch.nan, dtype=BF16) for _ in range(2)]
        at = torch.arange(start + count)
        for cache in self.caches:
            cache[self.table[0, at // BLOCK].long(), :, at % BLOCK] = torch.randn(len(at), GROUPS, DIM).to(BF16)
        self.q = torch.randn(SIZE, HEADS, DIM).to(BF16)
        self._device = torch.device(device)

    def attend(self, sinks: torch.Tensor | None, **mask: Any) -> torch.Tensor:
        """The chunk's live rows on the slot's device, as they come back."""
        q, table, chunk, *caches = (x.to(self._device) for x in (self.q, self.table, self.chunk, *self.caches))
        reach = reach_of(REACHES, SIZE, self.start)
        sight = sight_of(table, chunk, size=SIZE, block=BLOCK, reach=reach, **mask)
        out = torch.full((SIZE, HEADS * DIM), torch.nan, dtype=BF16, device=self._device)
        own = None if sinks is None else sinks.to(self._device)
        prefill_attention(q, caches[0], caches[1], sight, sinks=own, out=out, scale=DIM**-0.5)
        return out[: self.count].cpu()

    def expected(self, sinks: torch.Tensor | None, **mask: Any) -> torch.Tensor:
        """What the reference makes of them on the CPU."""
        out = torch.empty(SIZE, HEADS * DIM, dtype=BF16)
        # of keys below `first` the reference sees nothing, but multiplies what they hold by zero
        keys, values = (cache.nan_to_num(0.0) for cache in self.caches)
        chunk, options = (self.table, self.chunk, sinks), {"out": out, "scale": DIM**-0.5, **mask}
        attention.prefill_attention(self.q, keys, values, *chunk, **options)
        return out[: self.count]
