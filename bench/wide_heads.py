"""Times of a step's attention with heads of 256 and 512, in a graph of copies whose keys and values have left the L2.

    python -m bench.wide_heads --out bench/results/h200/wide_heads.json

The heads of 256 are Qwen3.6-35B-A3B's (16 of queries, 2 of keys) and Qwen3.5-27B's (24 and 4); those of 512 are of
Gemma 4's layers without a window: 31B's (32 and 4) and E4B's (8 and 2). A slot has 8,192 positions, with heads of 512
also 32,768; a chain of one or four rows attends, over bf16 or codes. With bf16 also by other splits: those decide bits.
Inputs are random. `bench.wide_prompts` times prompts.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch

from bench.micro import Entry, time_launches
from lowlat.kernels.attention.attention import attention, attention_bytes
from lowlat.kernels.attention.limits import choose_split
from lowlat.kernels.toolchain.kernel import Gpu, KernelCall

__all__ = ["HEADS", "entries", "main"]

# of queries, of keys and values, and their size
HEADS = {"35B-A3B": (16, 2, 256), "27B": (24, 4, 256), "Gemma 4 31B": (32, 4, 512), "Gemma 4 E4B": (8, 2, 512)}
CONTEXTS = {256: (8192,), 512: (8192, 32768)}  # by their size
BLOCK, REPLAYS = 32, 50
ROWS = (1, 4)
SPLITS = (128, 256, 512)
COLD_BYTES = 192 << 20  # of the caches of all copies together, at least


@dataclass(frozen=True)
class _Case:
    """A launch's shape, on a device."""

    heads: tuple[int, int, int]
    context: int
    rows: int
    coded: bool
    split: int
    device: torch.device
    gpu: Gpu

    @property
    def moved_bytes(self) -> int:
        _, kv_heads, head_dim = self.heads
        return attention_bytes([self.context], kv_heads=kv_heads, head_dim=head_dim, itemsize=1 if self.coded else 2)


@cache
def _calls(case: _Case, copy: int) -> list[KernelCall]:
    (heads, kv_heads, head_dim), device, rows = case.heads, case.device, case.rows
    blocks, kept = (case.context + rows) // BLOCK + 1, dict[str, torch.Tensor]()
    shape = (blocks + 1, kv_heads, BLOCK, head_dim)

    def cache_of() -> torch.Tensor:
        if case.coded:
            return torch.randint(0, 96, shape, dtype=torch.uint8, device=device)
        return torch.randn(shape, device=device).bfloat16()

    def workspace(name: str, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return kept.setdefault(name, torch.zeros(size, dtype=dtype, device=device))

    given: dict[str, Any] = {
        "q": torch.randn(rows, heads, head_dim, device=device).bfloat16(),
        "k_cache": cache_of(),
        "v_cache": cache_of(),
        "kv_scales": torch.full((2, kv_heads), 0.125, device=device) if case.coded else None,
        "block_table": (torch.randperm(blocks, device=device) + 1).int()[None],
        "slots": torch.zeros(1, dtype=torch.int32, device=device),
        "dense_lens": torch.full((1,), case.context, dtype=torch.int32, device=device),
        "row_live": torch.ones(1, rows, dtype=torch.uint8, device=device),
        "row_masks": torch.tensor([[2 ** (row + 1) - 1 for row in range(rows)]], device=device),
        "out": torch.empty(rows, heads * head_dim, dtype=torch.bfloat16, device=device),
    }
    return attention(
        **given, scale=head_dim**-0.5, workspace=workspace, early_metadata=True, split=case.split, gpu=case.gpu
    )


def entries(device: torch.device, gpu: Gpu) -> list[Entry]:
    """One for each model, number of rows, context and kind of cache; and for each split of bf16."""
    made = []
    for (name, heads), rows in product(HEADS.items(), ROWS):
        for context in CONTEXTS[heads[2]]:
            usual = choose_split(1, context + max(ROWS), *heads[1:])
            for coded, split in ((True, usual), *((False, split) for split in SPLITS)):
                case = _Case(heads, context, rows, coded, split, device, gpu)
                copies = -(-COLD_BYTES // case.moved_bytes)
                conditions = {"model": name, "context": context, "rows": rows, "coded": coded, "split": split}
                conditions["usual_split"] = usual
                kind = "codes" if coded else "bf16"
                label = f"{name}, {context}: T = {rows}, {kind}, splits of {split}"
                made.append(Entry(label, partial(_calls, case), copies, case.moved_bytes, conditions=conditions))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the launches and write the file. Returns 1 where one could not be timed.

    Raises ConfigError without a GPU.
    """
    return time_launches("bench.wide_heads", __doc__, entries, REPLAYS, arguments)


if __name__ == "__main__":
    sys.exit(main())
