"""Wide products beside torch's: of Llama-3.1-8B's and gpt-oss's matrices, in one CUDA graph each, weights from memory.

Torch is timed with a matrix that is stored unpacked, and with one that it unpacks first. `--plans` times every plan.

    python -m bench.wide --out /tmp/wide.json
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.clock import Timed, own_stream, round_robin
from bench.micro import TURN, Entry, capture, capture_torch, describe, write_rows
from bench.wall import measure_wall
from lowlat.executors.launcher import Launcher
from lowlat.kernels.gemm.packing import PackedMatrix, unpack_rows
from lowlat.kernels.gemm.prefill.activation_layout import arranged_shape
from lowlat.kernels.gemm.prefill.gemm import prefill_gemm
from lowlat.kernels.gemm.prefill.plan import PrefillGemmPlan, choose_prefill_plan, partials_shape, plans_of
from lowlat.kernels.toolchain.kernel import KernelCall

__all__ = ["COPIES", "MATRICES", "Weights", "label_of", "main", "measure"]

MATRICES = {
    "llama qkv": (6144, 4096),
    "llama o": (4096, 4096),
    "llama gate_up": (28672, 4096),
    "llama down": (4096, 14336),
    "gpt-oss qkv": (5120, 2880),
    "gpt-oss o": (2880, 4096),
}
ROWS = (64, 128, 256, 512, 1024)
LEAST_BYTES = 400_000_000  # of all copies of a weight: several times the L2
COPIES = 16


@dataclass
class Weights:
    """Packed copies of one matrix; `plain` takes the same memory for an unpacked matrix, of other values."""

    packed: list[PackedMatrix]

    def __init__(self, width: int, depth: int, device: torch.device) -> None:
        height, steps = -(-width // 16), -(-depth // 64)
        count = min(COPIES, -(-LEAST_BYTES // (2 * width * depth)))
        tiles = torch.randn(count, height, steps, 1024, device=device).mul_(depth**-0.5).bfloat16()
        self.packed = [PackedMatrix(each, width, depth) for each in tiles]

    def plain(self, copy: int) -> torch.Tensor:
        packed = self.packed[copy % len(self.packed)]
        return packed.tiles.view(-1)[: packed.rows * packed.columns].view(packed.rows, packed.columns)


@dataclass(frozen=True)
class _Case:
    """One product to time: its name, shape and what replays it."""

    name: str
    rows: int
    shape: tuple[int, int]
    replay: Callable[[], None]

    @property
    def entry(self) -> Entry:
        width, depth = self.shape
        moved = 2 * width * depth + 2 * self.rows * depth + 4 * self.rows * width
        return Entry(self.name, lambda _: [], COPIES, moved)


def measure(
    launcher: Launcher, names: Sequence[str], rows: Sequence[int], *, all_plans: bool, replays: int, wall: float
) -> list[dict[str, Any]]:
    """A row a product: us, TFLOP/s, and the share of the memory's wall. Runs on torch's current stream."""
    launcher.compile_ahead(_all_calls(launcher, names, rows, all_plans))
    found = []
    for name in names:
        weights = Weights(*MATRICES[name], launcher.device)
        for count in rows:
            cases = list(_cases(launcher, name, weights, count, all_plans))
            timed = [Timed(case.name, case.replay) for case in cases]
            round_robin(timed, replays, TURN, launcher.device)
            for case, each in zip(cases, timed, strict=True):
                row = describe(case.entry, each.ms, wall)
                operations = 2 * case.rows * case.shape[0] * case.shape[1]
                found.append({**row, "tflop_per_s": round(operations / row["us_p50"] / 1e6, 1)})
        del weights, cases, timed
        torch.cuda.empty_cache()
    return found


def _all_calls(launcher: Launcher, names: Sequence[str], rows: Sequence[int], all_plans: bool) -> Iterator[KernelCall]:
    """The calls over tensors without memory, to compile their kernels."""
    for name in names:
        weights = Weights(*MATRICES[name], torch.device("meta"))
        for count in rows:
            x, out = (torch.empty(count, size, device="meta") for size in reversed(MATRICES[name]))
            for plan in _plans(launcher, name, count, all_plans):
                yield from _wide(launcher, weights, x.bfloat16(), out, plan)(0)


def _plans(launcher: Launcher, name: str, rows: int, all_plans: bool) -> list[PrefillGemmPlan]:
    shape = MATRICES[name]
    best, _ = choose_prefill_plan(rows, *shape, launcher.card)
    return [best, *(plan for plan in plans_of(rows, *shape, launcher.card) if all_plans and plan != best)]


def label_of(plan: PrefillGemmPlan) -> str:
    """Rows, depth and stages, whether blocks are paired, and where segments of K are added up."""
    cut = f"{plan.rows}x{plan.depth}x{plan.stages} {'pairs ' if plan.cluster > 1 else ''}"
    return cut + ("apart" if plan.apart else "whole")


def _cases(launcher: Launcher, name: str, weights: Weights, rows: int, all_plans: bool) -> Iterator[_Case]:
    width, depth = MATRICES[name]
    device, shape = launcher.device, MATRICES[name]
    x, out = torch.randn(rows, depth, device=device).bfloat16(), torch.empty(rows, width, device=device)
    plans = _plans(launcher, name, rows, all_plans)
    for plan in plans:
        calls = _wide(launcher, weights, x, out, plan)
        label = f"{name}, {rows} rows, wide, {label_of(plan)}{', the plan' if plan == plans[0] else ''}"
        yield _Case(label, rows, shape, capture(launcher, Entry(label, calls, COPIES)))
    yield _Case(f"{name}, {rows} rows, torch", rows, shape, _torch(weights, x, out, unpacking=False))
    yield _Case(f"{name}, {rows} rows, torch and unpacking", rows, shape, _torch(weights, x, out, unpacking=True))


def _wide(
    launcher: Launcher, weights: Weights, x: torch.Tensor, out: torch.Tensor, plan: PrefillGemmPlan
) -> Callable[[int], list[KernelCall]]:
    arranged = torch.empty(arranged_shape(*x.shape), device=x.device, dtype=torch.bfloat16)
    first = weights.packed[0]
    partials = torch.empty(partials_shape(plan, x.shape[0], first.rows, first.columns), device=x.device)

    def calls(copy: int) -> list[KernelCall]:
        weight = weights.packed[copy % len(weights.packed)]
        return prefill_gemm(
            x=x, weight=weight, arranged=arranged, partials=partials, out=out, card=launcher.card, plan=plan
        )

    return calls


def _torch(weights: Weights, x: torch.Tensor, out: torch.Tensor, *, unpacking: bool) -> Callable[[], None]:
    def run() -> None:
        for copy in range(COPIES):
            packed = weights.packed[copy % len(weights.packed)]
            matrix = unpack_rows(packed) if unpacking else weights.plain(copy)
            torch.mm(x, matrix.t(), out_dtype=torch.float32, out=out)

    return capture_torch(run, x.device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Time the products, print the rows, and write them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", nargs="+", choices=list(MATRICES), default=list(MATRICES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--plans", action="store_true", help="every plan, not only the one that is taken")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    with own_stream(device):
        launcher, wall = Launcher(device), measure_wall(device).gb_per_s
        rows = measure(
            launcher, options.matrices, options.rows, all_plans=options.plans, replays=options.replays, wall=wall
        )
    write_rows(rows, options.out, device, wall)


if __name__ == "__main__":
    main()
