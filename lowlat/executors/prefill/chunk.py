"""Prefill programs on a GPU: arithmetic, not bandwidth.

Operations are run by their references, with some of prefill's own: products read packed weights where the card has wide
products, and else unpack one matrix at a time for the matrix library; embeddings are gathered from a packed table where
that is the only copy; attention is torch's flash attention over keys and values gathered by a kernel; a mixture's rows
choose right behind their norm, and go to their experts together, by grouped products over packed matrices. Row-wise
operations are the step's kernels. What differs from chunk to chunk is read on the device.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from lowlat.executors.device_weights import DeviceWeights
from lowlat.executors.launcher import Launcher
from lowlat.executors.lowering.weight_layouts import EXPERT_PRODUCTS, experts_name
from lowlat.executors.prefill.attention import Sight, prefill_attention, sight_of
from lowlat.executors.prefill.experts import (
    GroupedExperts,
    choose_by_torch,
    down_by_torch,
    gate_up_by_torch,
    product,
)
from lowlat.executors.prefill.flash import FlashAttention
from lowlat.executors.prefill.kernels import Launches, row_calls
from lowlat.executors.prefill.products import WideProducts
from lowlat.executors.prefill.room import room_of
from lowlat.executors.prefill.rows import draft_prefill_rows
from lowlat.executors.reference import arguments_of, meaning_of
from lowlat.kernels.gemm.packing import PackedMatrix, gather_rows, unpack_rows
from lowlat.program.program import Op, Program

__all__ = ["BoundPrefill"]


class BoundPrefill:
    """A prefill program over buffers on the device, of one chunk of a prompt, several, or the first part of one.

    buffers   by name, the program's arguments on the device among them: see `ChunkArguments`
    room      uint8, at least as many bytes as `room_of` the program says: for experts and attention; None: made here.
              Nothing in it outlives a chunk: those of several programs that run in turns may share it
    launcher  for kernels; None: torch does all, on a CPU
    A row's bits depend on what it sees, and neither on those that run with it nor on how many there are.
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
        self._size = program.buffers["prefill_tokens"].shape[0]
        self._chunk = _chunk_of(program)
        self._longest = program.buffers["tokens"].shape[1]
        self._sights: dict[int | None, Sight] = {}  # by window, while it runs on a CPU
        self._grouped: GroupedExperts | None = None
        self._flash: FlashAttention | None = None
        self._wide: WideProducts | None = None
        launches = None if launcher is None else Launches(launcher)
        if launches is not None:
            self._grouped, self._flash, self._wide = self._share_room(program, room, launches)
        self._bound: list[tuple[Callable[..., None], dict[str, object]]] = []
        for norm, op in _with_norms(program, apart=launches is None):
            arguments = arguments_of(op, buffers)
            own: Callable[..., None] | None
            if self._grouped is not None and norm is not None:
                own = self._choose(self._grouped, norm, arguments_of(norm, buffers), op, arguments)
            elif launches is not None and (calls := row_calls(op, arguments, weights)):
                own = launches.add(calls)
            else:
                own = self._own(op, arguments)
            if own is None:
                own = meaning_of(program, op)
                arguments.update((name, weights.vector(weight)) for name, weight in op.weights.items())
            self._bound.append((own, arguments))
        if launches is not None:
            launches.load()

    @torch.inference_mode()
    def run(self) -> None:
        """Run it on torch's current stream; where all rows are dead, nothing is kept of it."""
        for function, arguments in self._bound:
            function(**arguments)
        self._sights.clear()

    def clear(self) -> None:
        """Drop every reference to buffers and weights."""
        self._bound.clear()
        self._grouped, self._flash, self._wide = None, None, None

    def _share_room(
        self, program: Program, room: torch.Tensor | None, launches: Launches
    ) -> tuple[GroupedExperts, FlashAttention, WideProducts]:
        size = room_of(program, self._weights.shape)
        if room is None:
            room = torch.empty(size.num_bytes, dtype=torch.uint8, device=self._weights.device)
        experts, attention, products = size.cut(room)
        grouped = GroupedExperts(launches, size.experts, experts)
        flash = FlashAttention(launches, self._longest, size.attention, attention)
        return grouped, flash, WideProducts(launches, size.products, products)

    def _own(self, op: Op, arguments: Mapping[str, object]) -> Callable[..., None] | None:
        if op.kind in EXPERT_PRODUCTS:
            return self._own_product(op, arguments)
        if op.kind == "router":
            weights = {name: self._weights.vector(weight) for name, weight in op.weights.items()}
            return partial(choose_by_torch, **weights, chunk=self._chunk)
        if op.kind == "embed":
            return lambda tokens, out: self._embed(op, tokens, out)
        if op.kind == "linear":
            return self._linear(op, arguments)
        if op.kind == "prefill_attention":
            sinks = self._weights.vector(op.weights["sinks"]) if "sinks" in op.weights else None
            if self._flash is None:
                return partial(self._attend, sinks=sinks)
            make: Callable[..., Callable[..., None]] = self._flash.attend
            return make(**{name: each for name, each in arguments.items() if name != "chunk_size"}, sinks=sinks)
        return draft_prefill_rows if op.kind == "draft_prefill_rows" else None

    def _choose(
        self, grouped: GroupedExperts, norm: Op, given: Mapping[str, Any], router: Op, arguments: Mapping[str, Any]
    ) -> Callable[..., None]:
        """What a router and the norm right before it, of these arguments, do together."""
        return grouped.choose(
            given["x"],
            norm_weight=self._weights.vector(norm.weights["weight"]),
            normed=given["out"],
            eps=given["eps"],
            **{name: each for name, each in arguments.items() if name != "x"},
            **{name: self._weights.vector(weight) for name, weight in router.weights.items()},
        )

    def _own_product(self, op: Op, arguments: Mapping[str, object]) -> Callable[..., None]:
        name, gated = experts_name(op), op.kind == "experts_gate_up"
        experts, bias = self._weights.experts(name), self._weights.vector(op.weights["bias"])
        if self._grouped is None:
            return partial(gate_up_by_torch if gated else down_by_torch, experts=experts, bias=bias)
        make: Callable[..., Callable[..., None]] = self._grouped.gate_up if gated else self._grouped.down
        return make(**arguments, experts=experts, bias=self._weights.experts_bias(name) if gated else bias)

    def _linear(self, op: Op, arguments: Mapping[str, Any]) -> Callable[..., None]:
        name = op.weights["weight"]
        packed = self._weights.matrix(name)
        if self._wide is not None and self._wide.takes(self._chunk, packed):
            own = self._weights.bias(op.weights["bias"]) if "bias" in op.weights else None
            x, out, columns = arguments["x"], arguments["out"], self._weights.runs(name)
            return self._wide.product(x, out, weight=packed, bias=own, columns=columns)
        places = self._weights.places(name)
        bias, chunk = self._weights.vector(op.weights["bias"]) if "bias" in op.weights else None, self._chunk

        def run(x: torch.Tensor, out: torch.Tensor, **_: object) -> None:
            if places is None:
                product(x, unpack_rows(packed), chunk, out)
            else:
                torch.index_select(product(x, unpack_rows(packed), chunk), 1, places, out=out)
            if bias is not None:
                out += bias

        return run

    def _embed(self, op: Op, tokens: torch.Tensor, out: torch.Tensor) -> None:
        table = self._weights.table(op.weights["weight"])
        flat = tokens.reshape(-1).long()
        known = flat.clamp(min=0)
        rows = gather_rows(table, known) if isinstance(table, PackedMatrix) else table[known]
        out.copy_(rows.masked_fill_((flat < 0)[:, None], 0))

    def _attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        chunk: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        scale: float,
        chunk_size: int,
        window: int | None = None,
    ) -> None:
        del chunk_size  # no row knows of those beside it
        if window not in self._sights:
            block = k_cache.shape[2]
            whole = -(-(self._longest + self._size) // block) * block
            self._sights[window] = sight_of(
                block_table, chunk, size=self._size, block=block, whole=whole, window=window, dtype=q.dtype
            )
        prefill_attention(q, k_cache, v_cache, self._sights[window], sinks=sinks, out=out, scale=scale)


def _chunk_of(program: Program) -> int:
    """Positions of a chunk, of which a program may have several, or a part."""
    sizes = (op.params["chunk_size"] for op in program.ops if op.kind == "prefill_attention")
    size = next(sizes, None)
    return size if isinstance(size, int) else program.buffers["prefill_tokens"].shape[0]


def _with_norms(program: Program, *, apart: bool) -> Iterator[tuple[Op | None, Op]]:
    """Operations in order, each router with the norm right before it, which does not come by itself.

    apart   all by themselves
    """
    norm: Op | None = None
    for op, following in zip_longest(program.ops, program.ops[1:]):
        if not apart and _routed(op, following):
            norm = op
        else:
            yield norm, op
            norm = None


def _routed(op: Op, following: Op | None) -> bool:
    """Whether an operation is the norm of the router right behind it."""
    if following is None or (op.kind, following.kind) != ("rms_norm", "router"):
        return False
    return following.reads["x"] == op.writes["out"]
