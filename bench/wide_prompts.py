"""Times of a prompt's attention with heads of 256 and 512: keys and values gathered, then attended to.

    python -m bench.wide_prompts --out bench/results/h200/wide_prompts.json

The heads are Qwen3.5-27B's (24 of queries, 4 of keys, of 256) and Gemma 4 31B's: 32 and 4 of 512, and with a window of
1,024 positions 32 and 16 of 256. A prompt of 2,048 or 8,192 rows is one chunk. Each is timed with our kernel, where the
GPU has it, and with torch's operation, which other GPUs have: flash attention, or of heads of 512 memory-efficient
attention. `tflop` counts, in 10**12, the products of what rows see. Inputs are random.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch

from bench.micro import Entry, time_launches
from lowlat.kernels.attention.prefill.flash import has_prefill_flash, prefill_flash
from lowlat.kernels.attention.prefill.gather_kv import gather_kv
from lowlat.kernels.attention.prefill.gathered_rows import ALIGNMENT, gathered_rows, tiles_shape
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Call, LibraryCall
from lowlat.lowering.prefill_attention import FLASH_DIM, efficient_attention, flash_attention

__all__ = ["LAYERS", "entries", "main"]

# heads of queries, of keys and values, their size, the window
LAYERS: dict[str, tuple[int, int, int, int | None]] = {
    "27B": (24, 4, 256, None),
    "Gemma 4 31B, window": (32, 16, 256, 1024),
    "Gemma 4 31B, all": (32, 4, 512, None),
}
ROWS = (2048, 8192)
BLOCK, REPLAYS, COPIES = 32, 20, 4


@dataclass(frozen=True)
class _Case:
    """A chunk's attention, on a device; own: by our kernel."""

    layer: tuple[int, int, int, int | None]
    rows: int
    own: bool
    device: torch.device
    gpu: Gpu

    @property
    def products(self) -> int:
        """Multiplications and additions over the positions that rows see."""
        heads, _, dim, window = self.layer
        seen = min(self.rows, window or self.rows)
        return 4 * heads * dim * (seen * (seen + 1) // 2 + (self.rows - seen) * seen)


@cache
def _calls(case: _Case, copy: int) -> list[Call]:
    (heads, kv_heads, dim, window), device, rows = case.layer, case.device, case.rows
    blocks = -(-rows // BLOCK)
    caches = [torch.randn(blocks + 1, kv_heads, BLOCK, dim, device=device).bfloat16() for _ in range(2)]
    count = -(-gathered_rows(rows, rows, window) // ALIGNMENT) * ALIGNMENT
    shape = tiles_shape(count, kv_heads, dim) if case.own else (count, kv_heads, dim)
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    chunk = torch.tensor([0, rows], dtype=torch.int32, device=device)
    lengths = torch.zeros(2, 2, dtype=torch.int32, device=device)
    q = torch.randn(rows, heads, dim, device=device).bfloat16()
    gather = gather_kv(
        k_cache=caches[0], v_cache=caches[1], block_table=(torch.randperm(blocks, device=device) + 1).int()[None],
        chunk=chunk, keys=keys, values=values, lengths=lengths, size=rows, window=window, gpu=case.gpu,
    )  # fmt: skip
    given: dict[str, Any] = {"q": q, "keys": keys, "values": values, "window": window, "scale": dim**-0.5}
    if case.own:
        return [*gather, *prefill_flash(**given, chunk=chunk, out=torch.empty_like(q), gpu=case.gpu)]
    attend = flash_attention if dim <= FLASH_DIM else efficient_attention

    def attended(**arguments: Any) -> None:
        attend(**arguments)

    return [*gather, LibraryCall("attention", attended, {**given, "lengths": lengths, "longest": rows + 1})]


def entries(device: torch.device, gpu: Gpu) -> list[Entry]:
    """One for each layer, number of rows, and kernel."""
    made = []
    for (name, layer), rows, own in product(LAYERS.items(), ROWS, (True, False)):
        if own and not has_prefill_flash(gpu, layer[2]):
            continue
        case = _Case(layer, rows, own, device, gpu)
        conditions = {"layer": name, "rows": rows, "own": own, "tflop": round(case.products / 1e12, 4)}
        label = f"{name}: {rows} rows, {'our kernel' if own else 'torch'}"
        made.append(Entry(label, partial(_calls, case), COPIES, conditions=conditions))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the launches and write the file. Returns 1 where one could not be timed.

    Raises ConfigError without a GPU.
    """
    return time_launches("bench.wide_prompts", __doc__, entries, REPLAYS, arguments)


if __name__ == "__main__":
    sys.exit(main())
