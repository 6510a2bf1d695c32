"""Prefill's GEMMs of FP8 weights by codes of rows: times, errors, and a row's bits under plans and in company.

    python -m bench.experiments.coded_rows --out bench/results/h200/coded_rows.json
    python -m bench.experiments.coded_rows --rows 128 512 2048 --only gate_up

For each matrix of Llama-8B: our GEMM by codes under each plan, by bf16 rows as without the option, the launch that
codes rows, and torch's `_scaled_mm` with scales of rows, of fast and of exact sums, and its product of bf16. Errors are
norm-wise against float64 products of the same codes; `bias` is the mean of found over wanted magnitudes, less one, by
which sums that lose bits show. It needs a GPU of capability 9.0.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.lib.clock import Timed, own_stream, round_robin
from bench.lib.conditions import stamps_of, write_json
from bench.micro import Entry, capture, capture_torch
from lowlat.executors.launcher import Launcher
from lowlat.kernels.formats import FP8
from lowlat.kernels.formats.dense import pack_matrix
from lowlat.kernels.gemm.packing import PackedMatrix, gate_up_permutation
from lowlat.kernels.gemm.prefill.activation_layout import arrange, arranged_shape
from lowlat.kernels.gemm.prefill.coded_rows import CodedRows, by_codes, code_arranged, code_rows, coded_shape
from lowlat.kernels.gemm.prefill.gemm import arranged_prefill_gemm, gated_prefill_gemm
from lowlat.kernels.gemm.prefill.plan import PrefillGemmPlan, choose_prefill_plan, partials_shape, plans_of
from lowlat.kernels.reference.gemm import coded_rows as reference

__all__ = ["MATRICES", "main"]

MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
CHECKED_ROWS = 64
REPLAYS, TURN, COPIES = 40, 10, 4
PLANS = 10


class Matrix:
    """A random weight in FP8 by row, rows with a few large channels, and all that their products read and write."""

    def __init__(self, launcher: Launcher, name: str, rows: int) -> None:
        self.launcher, self.name, self.rows = launcher, name, rows
        self.width, self.depth = MATRICES[name]
        device = launcher.device
        self.parts = FP8.quantise(torch.randn(self.width, self.depth, device=device) * self.depth**-0.5)
        order = gate_up_permutation(self.width // 2) if name == "gate_up" else None
        self.packed: PackedMatrix = pack_matrix(FP8, self.parts, order)
        self.x = torch.randn(rows, self.depth, device=device)
        self.x[:, torch.randperm(self.depth, device=device)[:16]] *= 20  # as residual streams have
        self.x = self.x.bfloat16()
        self.arranged = torch.empty(arranged_shape(rows, self.depth), device=device, dtype=torch.bfloat16)
        self.coded = CodedRows(
            torch.empty(coded_shape(rows, self.depth), device=device, dtype=torch.uint8), rows, self.depth
        )
        self.out = torch.empty(rows, self.width, device=device)
        launcher.run(*arrange(x=self.x, out=self.arranged), *code_rows(x=self.x, out=self.coded))

    @property
    def plans(self) -> Sequence[PrefillGemmPlan]:
        """Plans by codes, the derived one first."""
        weight = by_codes(self.packed)
        return plans_of(self.rows, weight.rows, weight.columns, self.launcher.gpu, weight.tile_format)[:PLANS]

    def calls(self, plan: PrefillGemmPlan | None, *, coded: bool = True) -> list[Any]:
        """The launches of a product; of a FFN's first one with its epilogue. plan None: the table's."""
        given: dict[str, Any] = {"weight": self.packed, "gpu": self.launcher.gpu, "plan": plan}
        given["arranged"] = self.coded if coded else self.arranged
        if self.name == "gate_up":
            shape = arranged_shape(self.rows, self.width // 2)
            return gated_prefill_gemm(**given, out=torch.empty(shape, device=self.x.device, dtype=torch.bfloat16))
        return self.plain_calls(plan, coded=coded)

    def plain_calls(self, plan: PrefillGemmPlan | None, *, coded: bool = True) -> list[Any]:
        """The launches of a product, into `out`, rows of the weight as they are packed."""
        weight = by_codes(self.packed) if coded else self.packed
        if plan is None:
            facts = (self.rows, weight.rows, weight.columns, self.launcher.gpu, weight.tile_format)
            plan = choose_prefill_plan(*facts)[0]
        shape = partials_shape(plan, self.rows, weight.rows, weight.columns)
        return arranged_prefill_gemm(
            arranged=self.coded if coded else self.arranged, weight=self.packed, out=self.out, plan=plan,
            partials=torch.empty(shape, device=self.x.device), gpu=self.launcher.gpu,
        )  # fmt: skip

    def coding_calls(self) -> list[Any]:
        """The launch that codes rows as the GEMM's neighbours leave them."""
        if self.name == "down":
            return code_arranged(arranged=self.arranged, out=self.coded)
        return code_rows(x=self.x, out=self.coded)

    def by_torch(self, rows: int, *, fast: bool) -> Callable[[], torch.Tensor]:
        """Torch's product of the same codes, bf16."""
        numbers, scales = reference.code_rows(self.x[:rows])
        codes, weight = numbers.to(torch.float8_e4m3fn), self.parts["fp8"].view(torch.float8_e4m3fn).t()
        by_row = self.parts["fp8_scales"].reshape(1, -1).contiguous()
        return lambda: torch._scaled_mm(
            codes, weight, scale_a=scales, scale_b=by_row, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def want(self, x: torch.Tensor, *, packed: bool = True) -> torch.Tensor:
        """The exact product of codes, float64; in the order of the packed rows."""
        numbers, scales = reference.code_rows(x)
        weight = self.parts["fp8"].view(torch.float8_e4m3fn).double() * self.parts["fp8_scales"].double()
        if packed and self.packed.order is not None:
            weight = weight[self.packed.order.to(weight.device)]
        return (numbers.double() @ weight.t()) * scales.double()


def _errors(found: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    found = found.double()
    error, shrunk = (found - want).norm() / want.norm(), (found * want.sign()).sum() / want.abs().sum() - 1
    return {"error": float(f"{float(error):.3e}"), "bias": float(f"{float(shrunk):.3e}")}


def _checks(matrix: Matrix, launcher: Launcher) -> dict[str, Any]:
    """Errors of the first rows, and whether their bits are the same under all plans, and alone."""
    some = min(CHECKED_ROWS, matrix.rows)
    want = matrix.want(matrix.x[:some])
    scales = reference.code_rows(matrix.x)[1]
    found: dict[str, Any] = {"coding_scales_equal": torch.equal(matrix.coded.scales, scales.flatten())}
    launcher.run(*matrix.plain_calls(None))
    first = matrix.out[:some].clone()
    found["ours"] = _errors(first, want)
    same = []
    for plan in matrix.plans:
        matrix.out.fill_(torch.nan)
        launcher.run(*matrix.plain_calls(plan))
        same.append(torch.equal(matrix.out[:some], first))
    found["plans_equal"] = same
    alone = Matrix(launcher, matrix.name, CHECKED_ROWS)
    alone.packed, alone.x[:some] = matrix.packed, matrix.x[:some]
    launcher.run(*code_rows(x=alone.x, out=alone.coded), *alone.plain_calls(None))
    found["alone_equal"] = torch.equal(alone.out[:some], first)
    launcher.run(*matrix.plain_calls(None, coded=False))
    plain = matrix.parts["fp8"].view(torch.float8_e4m3fn).double() * matrix.parts["fp8_scales"].double()
    if matrix.packed.order is not None:
        plain = plain[matrix.packed.order.to(plain.device)]
    exact = matrix.x[:some].double() @ plain.t()
    found["by bf16 rows"] = _errors(matrix.out[:some], exact)
    found["codes beside bf16 rows"] = _errors(want, exact)
    for fast in (True, False):
        try:
            whole = matrix.by_torch(matrix.rows, fast=fast)()
            few = matrix.by_torch(some, fast=fast)()
        except RuntimeError as error:
            found[f"torch fast={fast}"] = str(error)[:200]
            continue
        found[f"torch fast={fast}"] = {
            **_errors(whole[:some], matrix.want(matrix.x[:some], packed=False)),
            "alone_equal": torch.equal(whole[:some], few),
        }
    return found


def _entries(matrix: Matrix, launcher: Launcher) -> list[tuple[str, int, Callable[[], None]]]:
    made: list[tuple[str, int, Callable[[], None]]] = []

    def add(name: str, calls: Callable[[], list[Any]]) -> None:
        made.append((name, COPIES, capture(launcher, Entry(name, lambda _copy: calls(), copies=COPIES))))

    for number, plan in enumerate(matrix.plans):
        label = f"{plan.rows}x{plan.depth}x{plan.stages} c{plan.cluster}{' apart' if plan.apart else ''}"
        add(f"codes, plan {number} {label}", lambda plan=plan: matrix.calls(plan))  # type: ignore[misc]
    add("bf16 rows", lambda: matrix.calls(None, coded=False))
    add("coding", matrix.coding_calls)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        f"torch _scaled_mm fast={fast}": matrix.by_torch(matrix.rows, fast=fast) for fast in (True, False)
    }
    weight = torch.randn(matrix.width, matrix.depth, device=matrix.x.device).bfloat16()
    runs["torch bf16"] = lambda: matrix.x @ weight.t()
    for name, run in runs.items():
        try:
            made.append((name, 1, capture_torch(run, launcher.device)))
        except RuntimeError as error:
            print(f"  {name}: {str(error)[:200]}")
    return made


def measure(launcher: Launcher, name: str, rows: int) -> dict[str, Any]:
    """One matrix by so many rows: checks, then us of each variant, in turns, and TFLOP/s."""
    matrix = Matrix(launcher, name, rows)
    row: dict[str, Any] = {"matrix": name, "rows": rows, "checks": _checks(matrix, launcher)}
    print(name, rows, row["checks"], flush=True)
    entries = _entries(matrix, launcher)
    timed = [Timed(label, replay) for label, _, replay in entries]
    round_robin(timed, REPLAYS, TURN, launcher.device)
    row["us"] = {}
    for (label, copies, _), each in zip(entries, timed, strict=True):
        took = 1e3 * each.median / copies
        row["us"][label] = round(took, 2)
        rate = 2 * rows * matrix.width * matrix.depth / took / 1e6
        print(f"  {label:40} {took:9.1f} us" + (f" {rate:7.0f} TFLOP/s" if label != "coding" else ""), flush=True)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the rows. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 128])
    parser.add_argument("--only", nargs="+", choices=MATRICES, default=list(MATRICES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0)
    with own_stream(device), torch.no_grad():
        launcher, made = Launcher(device), []
        for rows in options.rows:
            for name in options.only:
                made.append(measure(launcher, name, rows))
                torch.cuda.empty_cache()
    if options.out is not None:
        write_json(options.out, {"stamps": stamps_of(device), "rows": made})
    return 0


if __name__ == "__main__":
    sys.exit(main())
