"""GEMMs of prefill for a second each, beside torch's: time, the multiprocessors' clock, the card's power.

    python -m bench.sustained --out /tmp/sustained.json
    python -m bench.sustained --matrices "llama gate_up" --rows 2048 --seconds 2

At its power limit a card lowers its clock, so that cycles tell how well a kernel fills the tensor cores, and time how
much power it takes for that. `cycles_a_step` are those of a step of 64 columns by one tile of 128 weight rows and 256
rows of x, of which the tensor cores alone need 1,024. Gates and ups are multiplied with their epilogue; torch's GEMM
leaves float32, and bf16 of gates and ups.
"""

import argparse
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.clock import own_stream
from bench.conditions import stamps_of, write_json
from bench.micro import Entry, capture, capture_torch
from bench.wide import COPIES, MATRICES, Weights, label_of
from lowlat.errors import ConfigError
from lowlat.executors.launcher import Launcher
from lowlat.kernels.gemm.prefill.activation_layout import arranged_shape
from lowlat.kernels.gemm.prefill.gemm import arranged_prefill_gemm, gated_prefill_gemm
from lowlat.kernels.gemm.prefill.plan import choose_prefill_plan, partials_shape
from lowlat.kernels.toolchain.kernel import KernelCall

__all__ = ["main", "read_sample", "reckoned"]

WARM_UP, AT_ONCE = 30, 5  # graphs; before a clock is looked at
STEP, TILE = 64, 128 * 256
QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant,temperature.gpu", "--format=csv,noheader,nounits")


def read_sample(line: str) -> tuple[float, float, float]:
    """MHz, W and degrees of a line of nvidia-smi's. Raises ValueError for another line."""
    clock, power, heat = (float(part) for part in line.split(","))
    return clock, power, heat


class _Watch:
    """Asks the card's clock and power until it is left."""

    def __init__(self, device: torch.device) -> None:
        self._command = (*QUERY, f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
        self._thread, self._over = threading.Thread(target=self._ask), threading.Event()
        self.samples: list[tuple[float, float, float]] = []
        self.problem = ""

    def _ask(self) -> None:
        while not self._over.is_set():
            asked = subprocess.run(self._command, capture_output=True, text=True)
            if asked.returncode:
                self.problem = asked.stdout + asked.stderr
                return
            self.samples.append(read_sample(asked.stdout.strip()))

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every GEMM for so long, print its row, and write the rows where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in MATRICES if name.startswith("llama")]
    parser.add_argument("--matrices", nargs="+", choices=list(MATRICES), default=names)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    device, rows = torch.device(options.device), []
    with own_stream(device):
        launcher = Launcher(device)
        for name in options.matrices:
            weights = Weights(*MATRICES[name], device)
            for count in options.rows:
                for kind, replay in _cases(launcher, name, weights, count):
                    row = {"matrix": name, "rows": count, "gemm": kind, **_measured(replay, options.seconds, device)}
                    row |= reckoned(row, *MATRICES[name], launcher.card.num_multiprocessors)
                    print(row, flush=True)
                    rows.append(row)
            del weights
            torch.cuda.empty_cache()
    if options.out is not None:
        write_json(options.out, {**stamps_of(device, options.commit), "weights": "random", "rows": rows})


def _measured(replay: Callable[[], None], seconds: float, device: torch.device) -> dict[str, Any]:
    """Microseconds of a GEMM and what the card said meanwhile, but for its first and last word."""
    for _ in range(WARM_UP):
        replay()
    torch.cuda.synchronize(device)
    with _Watch(device) as watch:
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            for _ in range(AT_ONCE):
                replay()
            torch.cuda.synchronize(device)
            count += AT_ONCE
        spent = time.perf_counter() - begin
    if watch.problem or not watch.samples:
        raise ConfigError(f"nvidia-smi tells no clock of {device}: {watch.problem.strip() or 'nothing was asked'}")
    samples = watch.samples[1:-1] or watch.samples
    clock, power, heat = (round(fmean(each)) for each in zip(*samples, strict=True))
    us = round(1e6 * spent / count / COPIES, 2)
    return {"us": us, "sm_mhz": clock, "watts": power, "celsius": heat, "samples": len(samples)}


def reckoned(row: dict[str, Any], width: int, depth: int, multiprocessors: int) -> dict[str, Any]:
    """TFLOP/s, and cycles of a step on each multiprocessor, of as many turns as the tiles take."""
    turns = -(-row["rows"] * width // (TILE * multiprocessors))
    cycles = row["us"] * row["sm_mhz"] / (turns * -(-depth // STEP))
    return {
        "tflop_per_s": round(2 * row["rows"] * width * depth / row["us"] / 1e6, 1),
        "cycles_a_step": round(cycles),
    }


def _cases(launcher: Launcher, name: str, weights: Weights, rows: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """The GEMM by its plan in the card's table, and torch's."""
    (width, depth), device = MATRICES[name], launcher.device
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    plan, _ = choose_prefill_plan(rows, width, depth, launcher.card)
    arranged = torch.randn(arranged_shape(rows, depth), device=device).bfloat16()
    partials = torch.empty(partials_shape(plan, rows, width, depth), device=device)
    gated = name.endswith("gate_up")
    out = torch.empty(arranged_shape(rows, width // 2), **bf16) if gated else torch.empty(rows, width, device=device)

    def calls(copy: int) -> list[KernelCall]:
        weight = weights.packed[copy % len(weights.packed)]
        given: dict[str, Any] = {"arranged": arranged, "weight": weight, "out": out, "card": launcher.card}
        if gated:
            return gated_prefill_gemm(**given, plan=plan)
        return arranged_prefill_gemm(**given, partials=partials, plan=plan)

    yield label_of(plan), capture(launcher, Entry(name, calls, COPIES))
    x = torch.randn(rows, depth, device=device).bfloat16()
    result = torch.empty(rows, width, **bf16) if gated else out

    def multiply() -> None:
        for copy in range(COPIES):
            other = weights.plain(copy).t()
            if gated:
                torch.mm(x, other, out=result)
            else:
                torch.mm(x, other, out_dtype=torch.float32, out=result)

    yield "torch", capture_torch(multiply, device)


if __name__ == "__main__":
    main()
