"""Prefill on a GPU by torch: arithmetic, not bandwidth, so the matrix libraries do it.

It runs the prefill program's operations by their references, with three of its own: products unpack one matrix at a
time, embeddings are gathered from a packed table where that is the only copy, and attention is torch's fused one.
"""

from collections.abc import Callable, Mapping

import torch

from lowlat.executors.device_weights import DeviceWeights
from lowlat.executors.reference import arguments_of, meaning_of
from lowlat.kernels.packing import PackedMatrix, gather_rows
from lowlat.program import Op, Program

__all__ = ["TorchPrefill"]


class TorchPrefill:
    """Runs one chunk over buffers that the host has filled; matrices are unpacked as they are needed."""

    def __init__(self, program: Program, buffers: Mapping[str, torch.Tensor], weights: DeviceWeights) -> None:
        self._weights = weights
        self._bound: list[tuple[Callable[..., None], dict[str, object]]] = []
        for op in program.ops:
            own, arguments = self._own(op), arguments_of(op, buffers)
            if own is None:
                own = meaning_of(program, op)
                arguments.update((name, weights.vector(weight)) for name, weight in op.weights.items())
            self._bound.append((own, arguments))

    @torch.inference_mode()
    def run(self) -> None:
        """One chunk, on torch's current stream."""
        for function, arguments in self._bound:
            function(**arguments)

    def clear(self) -> None:
        """Drop every reference to buffers and weights."""
        self._bound.clear()

    def _own(self, op: Op) -> Callable[..., None] | None:
        if op.kind == "linear":
            return lambda x, out, row_block: self._linear(op, x, out)
        if op.kind == "embed":
            return lambda tokens, out: self._embed(op, tokens, out)
        if op.kind == "prefill_attention" and not op.weights:
            return prefill_attention
        return None

    def _linear(self, op: Op, x: torch.Tensor, out: torch.Tensor) -> None:
        weight = self._weights.restored(op.weights["weight"])
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        if "bias" in op.weights:
            out += self._weights.vector(op.weights["bias"]).float()

    def _embed(self, op: Op, tokens: torch.Tensor, out: torch.Tensor) -> None:
        table = self._weights.table(op.weights["weight"])
        flat = tokens.reshape(-1).long()
        known = flat.clamp(min=0)
        rows = gather_rows(table, known) if isinstance(table, PackedMatrix) else table[known]
        out.copy_(torch.where((flat >= 0)[:, None], rows, 0))


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    chunk: torch.Tensor,
    *,
    out: torch.Tensor,
    scale: float,
    first: int = 0,
    window: int | None = None,
    keep_first: int = 0,
) -> None:
    """What `lowlat.kernels.reference.attention.prefill_attention` means, without sinks, by torch's fused attention.

    q     [c, H, D]  bf16; chunk [2] and block_table [1, C / block] lie in host memory
    out   [c, H * D]  out; rows past the live ones are rubbish that nobody reads
    Keys are taken for the whole of [0, start + c): the shape depends on the chunk's start alone.
    """
    size = q.shape[0]
    start, count = chunk.tolist()
    end = start + size
    at = torch.arange(end, device=q.device)
    mine = torch.arange(start, end, device=q.device)
    visible = (at[None] <= mine[:, None]) & (at[None] >= first)
    if window is not None:
        visible &= (at[None] > mine[:, None] - window) | (at[None] < first + keep_first)
    visible |= at[None] == mine[:, None]  # a row that sees nothing would be NaN; it is a row that nobody reads
    written = ((at < start + count) & (at >= first))[:, None]
    blocks = torch.zeros(-(-end // k_cache.shape[2]), dtype=torch.long)  # of a missing one nothing was written
    known = min(blocks.numel(), block_table.shape[1])
    blocks[:known] = block_table[0, :known]
    blocks = blocks.to(q.device)
    keys, values = (_gather(cache, blocks, end, written) for cache in (k_cache, v_cache))
    attended = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=visible[None, None], scale=scale, enable_gqa=True
    )
    out.copy_(attended[0].transpose(0, 1).reshape(size, -1))


def _gather(cache: torch.Tensor, blocks: torch.Tensor, end: int, written: torch.Tensor) -> torch.Tensor:
    """Positions [0, end) of the blocks of a slot, [G, end, D], zero where nothing was written."""
    rows = cache[blocks].transpose(0, 1).reshape(cache.shape[1], -1, cache.shape[3])[:, :end]
    return torch.where(written, rows, 0)
