"""Prefill on a GPU by torch: arithmetic, not bandwidth, so the matrix libraries do it.

It runs the prefill program's operations by their references, with some of its own: products unpack one matrix at a
time, embeddings are gathered from a packed table where that is the only copy, attention is torch's fused one, and a
mixture's rows go to its experts together, by grouped products over packed matrices.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from lowlat.executors.device_weights import DeviceWeights
from lowlat.executors.experts_room import room_of
from lowlat.executors.launcher import Launcher
from lowlat.executors.orders import EXPERT_PRODUCTS, experts_name
from lowlat.executors.prefill_experts import (
    GroupedExperts,
    choose_experts,
    down_by_torch,
    gate_up_by_torch,
    product,
)
from lowlat.executors.reference import arguments_of, meaning_of
from lowlat.kernels.packing import PackedMatrix, gather_rows
from lowlat.program import Op, Program

__all__ = ["TorchPrefill"]


class TorchPrefill:
    """Runs one chunk over buffers that the host has filled; matrices are unpacked as they are needed.

    room      uint8, at least as many bytes as `room_of` the program says: for experts; None: made here
    launcher  for experts' kernels; None: torch multiplies
    """

    def __init__(
        self,
        program: Program,
        buffers: Mapping[str, torch.Tensor],
        weights: DeviceWeights,
        *,
        room: torch.Tensor | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._weights = weights
        self._grouped = None if launcher is None else self._make_grouped(program, room, launcher)
        self._bound: list[tuple[Callable[..., None], dict[str, object]]] = []
        for op in program.ops:
            arguments = arguments_of(op, buffers)
            own = self._own(op, arguments)
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
        self._grouped = None

    def _make_grouped(self, program: Program, room: torch.Tensor | None, launcher: Launcher) -> GroupedExperts:
        size = room_of(program, self._weights.vector)
        if room is None:
            room = torch.empty(size.num_bytes, dtype=torch.uint8, device=self._weights.device)
        return GroupedExperts(launcher, size, room)

    def _own(self, op: Op, arguments: Mapping[str, object]) -> Callable[..., None] | None:
        if op.kind == "linear":
            return lambda x, out, row_block: self._linear(op, x, out)
        if op.kind == "embed":
            return lambda tokens, out: self._embed(op, tokens, out)
        if op.kind == "prefill_attention":
            sinks = self._weights.vector(op.weights["sinks"]) if "sinks" in op.weights else None
            return partial(prefill_attention, sinks=sinks)
        if op.kind == "router":
            weights = {name: self._weights.vector(weight) for name, weight in op.weights.items()}
            return partial(choose_experts, **weights)
        if op.kind in EXPERT_PRODUCTS:
            return self._own_product(op, arguments)
        return None

    def _own_product(self, op: Op, arguments: Mapping[str, object]) -> Callable[..., None]:
        name, gated = experts_name(op), op.kind == "experts_gate_up"
        experts, bias = self._weights.experts(name), self._weights.vector(op.weights["bias"])
        if self._grouped is None:
            return partial(gate_up_by_torch if gated else down_by_torch, experts=experts, bias=bias)
        make: Callable[..., Callable[..., None]] = self._grouped.gate_up if gated else self._grouped.down
        return make(**arguments, experts=experts, bias=self._weights.experts_bias(name) if gated else bias)

    def _linear(self, op: Op, x: torch.Tensor, out: torch.Tensor) -> None:
        weight = self._weights.restored(op.weights["weight"])
        product(x, weight, out)
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
    sinks: torch.Tensor | None = None,
    out: torch.Tensor,
    scale: float,
    first: int = 0,
    window: int | None = None,
    keep_first: int = 0,
) -> None:
    """What `lowlat.kernels.reference.attention.prefill_attention` means, by torch's fused attention.

    q     [c, H, D]  bf16; chunk [2] and block_table [1, C / block] lie in host memory
    out   [c, H * D]  out; rows past the live ones are rubbish that nobody reads
    Keys are taken for the whole of [0, start + c), or of what the chunk's windows reach: the shape depends on the
    chunk's start alone.
    """
    size, block = q.shape[0], k_cache.shape[2]
    start, count = chunk.tolist()
    end, low = start + size, 0
    if window is not None and not keep_first:
        low = max(0, start + 1 - window) // block * block
    at = torch.arange(low, end, device=q.device)
    mine = torch.arange(start, end, device=q.device)
    visible = (at[None] <= mine[:, None]) & (at[None] >= first)
    if window is not None:
        visible &= (at[None] > mine[:, None] - window) | (at[None] < first + keep_first)
    visible |= at[None] == mine[:, None]  # a row that sees nothing would be NaN; it is a row that nobody reads
    written = ((at < start + count) & (at >= first))[:, None]
    blocks = torch.zeros(-(-end // block), dtype=torch.long)  # of a missing one nothing was written
    known = min(blocks.numel(), block_table.shape[1])
    blocks[:known] = block_table[0, :known]
    blocks = blocks[low // block :].to(q.device)
    keys, values = (_gather(cache, blocks, end - low, written) for cache in (k_cache, v_cache))
    queries = q.transpose(0, 1)
    if sinks is not None:
        queries, keys, values, visible = _with_sinks(queries, keys, values, visible, sinks, scale)
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=visible[None, None], scale=scale, enable_gqa=True
    )
    out.copy_(attended[0, :, :, : q.shape[2]].transpose(0, 1).reshape(size, -1))


SINK_PAD = 8  # dimensions that sinks take of every head: what fused attention takes is a multiple of 8


def _with_sinks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One position more, of value zero, whose score is each head's sink, by dimensions more that only it has.

    queries [H, c, D], keys and values [G, n, D], visible [c, n], sinks [H]: D becomes D + SINK_PAD, n becomes n + 8.
    A sink is the sum of two bf16, and so is as exact as a score.
    """
    heads, size, _ = queries.shape
    asked = sinks.float()[:, None] / scale
    coarse = asked.to(queries.dtype)
    fine = (asked - coarse.float()).to(queries.dtype)
    more = torch.nn.functional.pad(torch.cat((coarse, fine), 1), (0, SINK_PAD - 2))
    queries = torch.cat((queries, more[:, None].expand(heads, size, SINK_PAD)), 2)
    keys = torch.nn.functional.pad(keys, (0, SINK_PAD, 0, SINK_PAD))  # positions in eights: masks want them aligned
    keys[:, -SINK_PAD, -SINK_PAD : 2 - SINK_PAD] = 1
    values = torch.nn.functional.pad(values, (0, SINK_PAD, 0, SINK_PAD))
    visible = torch.nn.functional.pad(visible, (0, SINK_PAD))
    visible[:, -SINK_PAD] = True
    return queries, keys, values, visible


def _gather(cache: torch.Tensor, blocks: torch.Tensor, count: int, written: torch.Tensor) -> torch.Tensor:
    """The first `count` positions of blocks of a slot, [G, count, D], zero where nothing was written."""
    rows = cache[blocks].transpose(0, 1).reshape(cache.shape[1], -1, cache.shape[3])[:, :count]
    return torch.where(written, rows, 0)
