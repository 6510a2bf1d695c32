"""This program times a gated delta net's launches: a step's fused one, and those of a prompt, in graphs of copies.

    python -m bench.recurrent --out bench/results/h200/recurrent.json

The heads are Qwen3.6-35B-A3B's and Qwen3.5-27B's. A step has B slots of T rows, all accepted: as many pending rows are
applied first, and every state is read and written once. Copies have states of their own, so that these have left the
L2 by the time they are read again. A prompt's chunk has 2,048 live rows. Inputs are random.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch

from bench.micro import Entry, time_launches
from lowlat.kernels.recurrent.delta_conv import prefill_delta_conv
from lowlat.kernels.recurrent.delta_norm import delta_norm
from lowlat.kernels.recurrent.delta_prefill import prefill_delta_rule
from lowlat.kernels.recurrent.delta_rule import gated_delta, joins_blocks
from lowlat.kernels.recurrent.delta_step import HeadSizes
from lowlat.kernels.toolchain.kernel import Gpu, KernelCall

__all__ = ["HEADS", "entries", "main"]

HEADS = {"35B-A3B": HeadSizes(16, 32, 128, 128), "27B": HeadSizes(16, 48, 128, 128)}
STEPS = ((1, 1), (1, 2), (1, 4), (8, 1), (8, 4))  # slots, rows of each
MAX_ROWS, TAPS, EPS, POSITION, CHUNK = 4, 4, 1e-6, 1000, 2048
COLD_BYTES = 96 << 20  # of the states of all copies together, at least
PREFILL_COPIES, REPLAYS = 4, 50


@dataclass(frozen=True)
class _Layer:
    """Weights and inputs of a layer, on a device."""

    heads: HeadSizes
    device: torch.device
    gpu: Gpu

    @property
    def width(self) -> int:
        """Columns of the GEMM's output: queries, keys, values, gates."""
        return self.heads.channels + self.heads.value_heads * self.heads.value_dim

    def drawn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def ints(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    @cached_property
    def weights(self) -> dict[str, Any]:
        heads = self.heads.value_heads
        return {"a_log": self.drawn(heads), "dt_bias": self.drawn(heads)}

    @cached_property
    def taps(self) -> torch.Tensor:
        return self.drawn(self.heads.channels, TAPS, dtype=torch.bfloat16) / 2

    @cached_property
    def norm_weight(self) -> torch.Tensor:
        return self.drawn(self.heads.value_dim, dtype=torch.bfloat16)

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The GEMMs' outputs, and where the layer's goes."""
        values = self.heads.value_heads * self.heads.value_dim
        out = torch.empty(count, values, dtype=torch.bfloat16, device=self.device)
        return self.drawn(count, self.width), self.drawn(count, 2 * self.heads.value_heads), out


@cache
def _step(layer: _Layer, batch: int, rows: int, fits: bool, copy: int) -> list[KernelCall]:
    heads = layer.heads
    ring = 2 * MAX_ROWS
    states: dict[str, Any] = {
        "state": layer.drawn(batch, heads.value_heads, heads.value_dim, heads.key_dim) / 8,
        "pending_k": layer.drawn(batch, ring, heads.key_heads, heads.key_dim) / 8,
        "pending_d": layer.drawn(batch, ring, heads.value_heads, heads.value_dim) / 8,
        "pending_g": torch.rand(batch, ring, heads.value_heads, device=layer.device),
        "conv_state": layer.drawn(batch, TAPS - 1 + MAX_ROWS, heads.channels, dtype=torch.bfloat16),
    }
    lengths: dict[str, Any] = {
        "slots": layer.ints(*range(batch)),
        "dense_lens": layer.ints(*[POSITION] * batch),
        "state_lens": layer.ints(*[POSITION - rows] * batch),
        "row_live": torch.ones(batch, rows, dtype=torch.uint8, device=layer.device),
    }
    x, ba, out = layer.rows(batch * rows)
    norm: dict[str, Any] = {"norm_weight": layer.norm_weight, "eps": EPS} if fits else {}
    calls = gated_delta(x, layer.taps, ba, **layer.weights, **lengths, **states, **norm, out=out, early=True)
    if not fits:
        calls += delta_norm(out, x, layer.norm_weight, lengths["row_live"], out=torch.empty_like(out), eps=EPS)
    return calls


def _step_bytes(heads: HeadSizes, batch: int, rows: int) -> int:
    """Of the states, read and written; of pending rows, read and written; of inputs and outputs."""
    values, keys = heads.value_heads * heads.value_dim, heads.key_heads * heads.key_dim
    state = 2 * 4 * values * heads.key_dim
    pending = 2 * 4 * rows * (values + keys + heads.value_heads)
    inputs = rows * (4 * (heads.channels + values) + 8 * heads.value_heads + 2 * heads.channels + 2 * values)
    return batch * (state + pending + inputs + 2 * (TAPS - 1) * heads.channels) + 8 * heads.channels


def _prefill(layer: _Layer, part: str, copy: int) -> list[KernelCall]:
    return _prompt(layer, copy)[part]


@cache
def _prompt(layer: _Layer, copy: int) -> dict[str, list[KernelCall]]:
    heads, ints, kept = layer.heads, layer.ints, dict[str, torch.Tensor]()
    x, ba, out = layer.rows(CHUNK)
    mixed = torch.zeros(CHUNK, heads.channels, dtype=torch.bfloat16, device=layer.device)
    conv_state = layer.drawn(1, TAPS - 1 + MAX_ROWS, heads.channels, dtype=torch.bfloat16)
    state = layer.drawn(1, heads.value_heads, heads.value_dim, heads.key_dim) / 8

    def workspace(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return kept.setdefault(name, torch.zeros(shape, dtype=dtype, device=layer.device))

    own = {"slot": ints(0), "chunk": ints(CHUNK, CHUNK)}
    conv = prefill_delta_conv(x, layer.taps, **own, conv_state=conv_state, out=mixed)
    given: dict[str, Any] = {**layer.weights, **own, "state": state, "out": out, "workspace": workspace}
    rule = prefill_delta_rule(mixed=mixed, ba=ba, **given, gpu=layer.gpu)
    norm = delta_norm(out, x, layer.norm_weight, out=torch.empty_like(out), eps=EPS)
    return {"conv": conv, "tiles": rule[:1], "walk": rule[1:], "norm": norm, "layer": [*conv, *rule, *norm]}


def entries(device: torch.device, gpu: Gpu) -> list[Entry]:
    """One for each model, B and T of a step, and for each launch of a prompt's chunk and all of them."""
    made = []
    for name, heads in HEADS.items():
        layer, fits = _Layer(heads, device, gpu), joins_blocks(heads, gpu)
        for batch, rows in STEPS:
            moved = _step_bytes(heads, batch, rows)
            copies = -(-COLD_BYTES // (4 * batch * heads.value_heads * heads.value_dim * heads.key_dim))
            calls = partial(_step, layer, batch, rows, fits)
            conditions = {"model": name, "batch": batch, "rows": rows, "pending_rows": rows}
            made.append(Entry(f"{name}: step, B = {batch}, T = {rows}", calls, copies, moved, conditions=conditions))
        for part in ("conv", "tiles", "walk", "norm", "layer"):
            calls, conditions = partial(_prefill, layer, part), {"model": name, "rows": CHUNK}
            made.append(Entry(f"{name}: prompt, {part}", calls, PREFILL_COPIES, conditions=conditions))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the launches and write the file. Returns 1 where one could not be timed.

    Raises ConfigError without a GPU.
    """
    return time_launches("bench.recurrent", __doc__, entries, REPLAYS, arguments)


if __name__ == "__main__":
    sys.exit(main())
