"""Decode GEMMs of Llama-3.1-8B's shapes in every format of weights, against their bytes, and under several plans.

    python -m bench.decode_gemms --out /tmp/decode_gemms.json
    python -m bench.decode_gemms --formats fp8 int4_128 --rows 1 4 --cuts 1x1x2 2x2x1

An entry is one shape's GEMM, as a step has it, or a layer's four behind each other, in a graph whose copies read other
layers' weights. A cut is the k steps that a warp takes at once, the blocks on a multiprocessor and the weight tiles of
a warp; `derived` is the plan that a runtime takes without a table. Floors are bytes over the wall of the same run.
`--compile-to DIR` compiles what the entries need into a folder of kernels for 9.0, and measures nothing.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.micro import Entry, time_entries, write_rows
from lowlat.kernels.formats.fp8 import FP8_BLOCK
from lowlat.kernels.formats.int4 import int4_format
from lowlat.kernels.gemm.decode.gemm import NormPrologue, PartialArgmax, Rotation, decode_gemm, steps_to_hold
from lowlat.kernels.gemm.decode.plan import DecodeGemmPlan, candidate_plans
from lowlat.kernels.gemm.packing import PackedMatrix
from lowlat.kernels.gemm.tiles import BF16_TILES, FP8_TILES, NVFP4_TILES, TileFormat
from lowlat.kernels.sampling.select import FINITE
from lowlat.kernels.toolchain.kernel import H200, Card, KernelCall

__all__ = ["FORMATS", "SHAPES", "entries", "main"]

HEADS, GROUPS, HEAD_DIM = 32, 8, 128
LAYERS, COPIES = 16, 16  # the smallest shape's weights of 4 bits outlive the L2
DERIVED = "derived"
FORMATS = {
    "bf16": BF16_TILES,
    "fp8": FP8_TILES,
    FP8_BLOCK.name: TileFormat("fp8", 1024, groups=1),
    int4_format(128, has_zeros=False).name: TileFormat("int4", 512, groups=1),
    int4_format(128, has_zeros=True).name: TileFormat("int4", 512, groups=1, zeros=True),
    "nvfp4": NVFP4_TILES,
}
SHAPES = {  # rows and columns of the weight, and whether its rows are normed first
    "qkv": ((HEADS + 2 * GROUPS) * HEAD_DIM, 4096, True),
    "o": (4096, HEADS * HEAD_DIM, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "lm_head": (128256, 4096, True),
}
LAYER = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Operands:
    """Tensors that the GEMMs of one number of rows read and write beside weights."""

    device: torch.device
    card: Card
    rows: int

    def new(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A tensor of ones; uninitialised on a CPU, where nothing is launched."""
        empty = torch.empty(shape, dtype=dtype, device=self.device)
        return empty if self.device.type == "cpu" else empty.fill_(1)

    def weight(self, shape: str, tiles: TileFormat) -> PackedMatrix:
        """A weight of random bits: a time depends on none of them."""
        rows, columns, _ = SHAPES[shape]
        height, width = -(-rows // 16), -(-columns // 64)
        size = height * width * tiles.step_bytes
        held = torch.empty(size + 64 * height * tiles.row_scales, dtype=torch.uint8, device=self.device)
        if self.device.type != "cpu":
            held.random_(0, 64)
        if tiles == BF16_TILES:
            return PackedMatrix(held.view(torch.bfloat16).view(height, width, -1), rows, columns)
        return PackedMatrix(held[:size].view(height, width, -1), rows, columns, None, held, tiles)

    def calls(self, shape: str, weight: PackedMatrix, cut: str) -> list[KernelCall] | None:
        """The launch of a shape's GEMM under a cut; None where it has no such plan."""
        width, depth, normed = SHAPES[shape]
        count, keeps = self.rows, shape == "lm_head"
        held = steps_to_hold(count, depth, self.card) if normed else 0
        plan = _plan_of(count, shape, self.card, held, weight.tile_format, cut)
        if plan is None:
            return None
        options: dict[str, Any] = {"x": self.new(count, depth), "weight": weight, "card": self.card, "plan": plan}
        if normed:
            options["norm"] = NormPrologue(self.new(depth), 1e-5)
        if shape == "qkv":
            options |= {"out": self.new(count, HEADS, HEAD_DIM), "rotation": self._rotation(), "head_dim": HEAD_DIM}
        elif shape == "gate_up":
            options |= {"out": self.new(count, width // 2), "silu": True}
        elif keeps:
            pairs = self.new(count, self.card.num_multiprocessors, 2, dtype=torch.int32)
            options |= {"out": self.new(count, width, dtype=torch.float32), "best": PartialArgmax(pairs, FINITE)}
        else:
            options |= {"out": self.new(count, width), "residual": self.new(count, width)}
        return decode_gemm(**options)

    def _rotation(self) -> Rotation:
        count, blocks, block = self.rows, 2, 32
        cache = (self.new(blocks, GROUPS, block, HEAD_DIM), self.new(blocks, GROUPS, block, HEAD_DIM))
        angles = [self.new(block, HEAD_DIM // 2, dtype=torch.float32) for _ in range(2)]
        numbers = [self.new(count, dtype=torch.int32) for _ in range(3)]
        offsets = torch.arange(1, dtype=torch.int32, device=self.device)
        alive = self.new(count, dtype=torch.uint8)
        blocks_of = self.new(count + 1, 1, dtype=torch.int32)
        return Rotation(numbers[0], angles[0], angles[1], alive, *cache, blocks_of, numbers[1], numbers[2], offsets)


def _plan_of(rows: int, shape: str, card: Card, held: int, tiles: TileFormat, cut: str) -> DecodeGemmPlan | None:
    width, depth, _ = SHAPES[shape]
    keeps = shape == "lm_head"
    plans = candidate_plans(rows, width, card, held, keeps_argmax=keeps, weights=tiles, depth=depth)
    if cut == DERIVED:
        return plans[0]
    wanted = tuple(int(each) for each in cut.split("x"))
    return next((plan for plan in plans if (plan.span, plan.density, plan.weight_tiles) == wanted), None)


def entries(
    device: torch.device, card: Card, formats: Sequence[str], rows: Sequence[int], cuts: Sequence[str]
) -> Iterator[list[Entry]]:
    """For each format the entries of all shapes, rows and cuts, and of a layer where a cut has all of its plans."""
    for name in formats:
        tiles, first = FORMATS[name], Operands(device, card, 1)
        weights = {shape: [first.weight(shape, tiles) for _ in range(LAYERS)] for shape in LAYER}
        weights["lm_head"] = [first.weight("lm_head", tiles)]
        made = []
        for count in rows:
            operands = Operands(device, card, count)
            for cut in cuts:
                label, layer = f"{name}, {count} rows, {cut}", []
                for shape, own in weights.items():
                    calls = [found for each in own if (found := operands.calls(shape, each, cut)) is not None]
                    if not calls:
                        continue
                    made.append(Entry(f"{label}: {shape}", _by_copy(calls), COPIES, own[0].num_bytes))
                    if shape in LAYER:
                        layer.append((calls, own[0].num_bytes))
                if len(layer) == len(LAYER):
                    joined = [[call for calls, _ in layer for call in calls[place]] for place in range(LAYERS)]
                    made.append(Entry(f"{label}: layer", _by_copy(joined), COPIES, sum(moved for _, moved in layer)))
        yield made


def _by_copy(calls: Sequence[list[KernelCall]]) -> Callable[[int], list[KernelCall]]:
    def of(copy: int) -> list[KernelCall]:
        return calls[copy % len(calls)]

    return of


def main(arguments: Sequence[str] | None = None) -> None:
    """Time all entries, or compile what they need."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["bf16", "fp8", "int4_128", "nvfp4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--cuts", nargs="+", default=[DERIVED], help="as 2x1x2: steps at once, blocks, tiles")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--compile-to", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.compile_to is not None:
        _compile(options)
        return
    from bench.clock import own_stream
    from bench.wall import measure_wall
    from lowlat.executors.launcher import Launcher

    device = torch.device(options.device)
    with own_stream(device):
        wall, launcher, rows = measure_wall(device).gb_per_s, Launcher(device), []
        for made in entries(device, launcher.card, options.formats, options.rows, options.cuts):
            for row in time_entries(launcher, made, options.replays, wall):
                rows.append({**row, "floor_us": round(row.get("moved_bytes", 0) / wall / 1e3, 3)})
        write_rows(rows, options.out, device, wall)


def _compile(options: argparse.Namespace) -> None:
    from lowlat.kernels.toolchain.compiler import compile_ahead

    made = entries(torch.device("cpu"), H200, options.formats, options.rows, options.cuts)
    calls = [call for some in made for entry in some for copy in range(LAYERS) for call in entry.calls(copy)]
    kernels = {call.kernel.name: call.kernel for call in calls}
    lacking = compile_ahead(kernels.values(), H200.capability, options.compile_to)
    print(f"{len(kernels)} kernels, {lacking} of them compiled")


if __name__ == "__main__":
    main()
