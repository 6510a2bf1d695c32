"""Rows of a chunk of prefill that are to be stored in paged caches."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """A chunk of so many rows, of which some live, in a slot with a shuffled table, but for the `dead` ones."""

    size: int
    start: int
    live: int
    dead: tuple[int, ...] = ()
    heads: int = 2
    block: int = 16
    dim: int = 16
    coded: bool = False

    def arrays(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Draw keys and values, their places, and caches with contents; the end of the block table is invalid."""
        torch.manual_seed(self.start + self.size)
        used = -(-(self.start + self.live) // self.block)
        table = torch.full((1, used + 3), 1 << 20, dtype=torch.int32)
        table[0, :used] = (1 + torch.randperm(2 * used + 1)[:used]).int()
        live = (torch.arange(self.size) < self.live).to(torch.uint8)
        live[list(self.dead)] = 0
        made = {name: torch.randn(self.size, self.heads, self.dim).bfloat16() for name in ("k", "v")}
        made |= {"row_live": live, "block_table": table}
        made["chunk"] = torch.tensor([self.start, self.live], dtype=torch.int32)
        pool = (2 * used + 2, self.heads, self.block, self.dim)
        made |= {name: torch.randn(pool).bfloat16() for name in ("k_cache", "v_cache")}
        if self.coded:
            made |= {
                name: made[name].view(torch.uint8)[..., : self.dim].contiguous() for name in ("k_cache", "v_cache")
            }
            made["kv_scales"] = torch.rand(2, self.heads).bfloat16().float() + 2**-9
            made["k"][::3] *= 1e4
            made["v"][-1, :, 0] = torch.nan
        return {name: tensor.to(device) for name, tensor in made.items()}
