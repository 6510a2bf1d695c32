"""This program times a prompt's narrow GEMMs beside the matrix library's, and the convolution of delta nets.

    python -m bench.narrow --out bench/results/h200/narrow.json

Narrow weights are the gates of Qwen3.5-27B's and 35B-A3B's delta nets and the routers of gpt-oss-120b and of 256
experts. The library multiplies 128 rows a call, as it must where a row's bits may not depend on how many there are.
Copies of a call share their rows, which are in the L2, as after the norm that writes them. The convolution has a chunk
of 2,048 live rows; copies have rows of their own, which come from the memory. Inputs are random.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from bench.micro import Entry, time_launches
from lowlat.kernels.gemm.prefill.narrow_gemm import narrow_gemm, plan_narrow
from lowlat.kernels.recurrent.delta_conv import prefill_delta_conv
from lowlat.kernels.toolchain.kernel import Gpu, KernelCall
from lowlat.lowering.binding import Call, LibraryCall

__all__ = ["entries", "main"]

SIZES = ((96, 5120), (64, 2048), (128, 2880), (256, 2048))  # rows and columns of a weight
ROWS, BLOCK, CHUNK = (128, 512, 2048), 128, 2048
CONVOLUTIONS = {"35B-A3B": (12288, 8192), "27B": (16384, 10240)}  # columns of x, channels
TAPS, RING = 4, 7
COPIES, COLD_COPIES, REPLAYS = 16, 4, 50


@cache
def _operands(device: torch.device, rows: int, width: int, depth: int) -> tuple[torch.Tensor, ...]:
    """Rows, a weight, and where the product goes."""
    x, weight = torch.randn(rows, depth, device=device), torch.randn(width, depth, device=device) / depth**0.5
    return x.bfloat16(), weight.bfloat16(), torch.empty(rows, width, device=device)


def _narrow(device: torch.device, gpu: Gpu, rows: int, width: int, depth: int) -> Sequence[Call]:
    x, weight, out = _operands(device, rows, width, depth)

    def workspace(_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return narrow_gemm(x, weight, out=out, workspace=workspace, gpu=gpu)


def _library(device: torch.device, rows: int, width: int, depth: int) -> Sequence[Call]:
    x, weight, out = _operands(device, rows, width, depth)
    return [LibraryCall("mm", _multiply, {"x": x, "weight": weight, "out": out})]


def _multiply(*, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    for rows, results in zip(x.split(BLOCK), out.split(BLOCK), strict=True):
        torch.mm(rows, weight.t(), out_dtype=torch.float32, out=results)


@cache
def _convolution(device: torch.device, width: int, channels: int, _copy: int) -> list[KernelCall]:
    taps = (torch.randn(channels, TAPS, device=device) / 2).bfloat16()
    return prefill_delta_conv(
        torch.randn(CHUNK, width, device=device), taps, torch.zeros(1, dtype=torch.int32, device=device),
        torch.tensor([CHUNK, CHUNK], dtype=torch.int32, device=device),
        conv_state=torch.randn(1, RING, channels, device=device).bfloat16(),
        out=torch.empty(CHUNK, channels, dtype=torch.bfloat16, device=device),
    )  # fmt: skip


def _again(name: str, calls: Sequence[Call], conditions: Mapping[str, Any]) -> Entry:
    """An entry whose copies are the same calls."""
    return Entry(name, lambda _copy: calls, COPIES, conditions=conditions)


def entries(device: torch.device, gpu: Gpu) -> list[Entry]:
    """Two for each weight and number of rows, and one for each model's convolution."""
    made = []
    for width, depth in SIZES:
        for rows in ROWS:
            size, plan = (rows, width, depth), plan_narrow(rows, width, depth, gpu)
            conditions = {"rows": rows, "width": width, "depth": depth}
            tile = {"tile": [plan.rows, plan.columns, plan.stages]}
            name = f"{rows} x {width} x {depth}"
            ours, theirs = _narrow(device, gpu, *size), _library(device, *size)
            made.append(_again(f"{name}: narrow", ours, conditions | tile))
            made.append(_again(f"{name}: library, {BLOCK} rows a call", theirs, conditions))
    for model, (width, channels) in CONVOLUTIONS.items():
        calls, moved = partial(_convolution, device, width, channels), 6 * CHUNK * channels
        conditions = {"rows": CHUNK, "width": width, "channels": channels}
        made.append(Entry(f"{model}: convolution", calls, COLD_COPIES, moved, conditions=conditions))
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the launches and write the file. Returns 1 where one could not be timed.

    Raises ConfigError without a GPU.
    """
    return time_launches("bench.narrow", __doc__, entries, REPLAYS, arguments)


if __name__ == "__main__":
    sys.exit(main())
