"""Times of a step's attention alone, both launches together or the first, by cases, caches and plans.

    python -m bench.attention --case llama-1x8k llama-4x16k gpt-oss-1x32k --kv bf16 fp8 --drafts 0 3 --plans 4

Layers' caches are read in turn, so that none is in the L2 when it is read again; the floor is their bytes at the rate
of streaming reads. `--plans` is the number of candidates to time, the derived one first; a row's digest is of the first
layer's results, which no plan may change.
"""

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.clock import own_stream
from bench.conditions import stamps_of
from bench.micro import Entry, time_entries
from bench.wall import measure_wall
from lowlat.executors.launcher import Launcher
from lowlat.kernels.attention.attention import attention, attention_bytes, choose_split
from lowlat.kernels.attention.launch_plan import AttentionPlan, AttentionWork, candidate_plans
from lowlat.kernels.toolchain.kernel import Card, KernelCall

__all__ = ["CASES", "Case", "Layers", "main", "plans_of"]

BLOCK = 32  # positions
ENOUGH_BYTES = 400 << 20  # of caches read in turn


@dataclass(frozen=True)
class Case:
    """One layer's attention in a step.

    group   query heads of a key-value head
    window  None: all positions
    sinks   whether heads have them
    """

    name: str
    batch: int
    context: int
    group: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    sinks: bool = False

    @property
    def split(self) -> int:
        """Positions of a split, as a runtime made for this case has them."""
        return choose_split(self.batch, self.context, self.kv_heads)

    def work(self, rows: int, coded: bool) -> AttentionWork:
        """The facts that plans depend on."""
        return AttentionWork(
            self.batch, rows, self.group, self.kv_heads, self.head_dim, self.window, 0, self.split, coded
        )


CASES = {
    case.name: case
    for case in (
        Case("llama-1x8k", 1, 8192, 4, 8, 128),
        Case("llama-1x32k", 1, 32768, 4, 8, 128),
        Case("llama-4x16k", 4, 16384, 4, 8, 128),
        Case("gpt-oss-1x32k", 1, 32768, 8, 8, 64, sinks=True),
        Case("gpt-oss-4x16k", 4, 16384, 8, 8, 64, sinks=True),
        Case("gpt-oss-window-1x32k", 1, 32768, 8, 8, 64, window=128, sinks=True),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a row for each case, cache, number of drafts and plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--kv", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3], help="drafted tokens of a chain")
    parser.add_argument("--plans", type=int, default=1, help="candidate plans of each, the derived one first")
    parser.add_argument("--first", action="store_true", help="the first launch alone, without the sum of splits")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    if min(options.plans, options.replays, *(drafts + 1 for drafts in options.drafts)) < 1:
        parser.error("--plans and --replays want at least 1, --drafts at least 0")
    device = torch.device(options.device)
    stamps = stamps_of(device, options.commit)
    with own_stream(device):
        launcher, wall = Launcher(device), measure_wall(device).gb_per_s
        for name, kv in itertools.product(options.case, options.kv):
            layers = Layers(CASES[name], kv == "fp8", device)
            for drafts in options.drafts:
                launches = 1 if options.first else 2
                for row in measure(launcher, layers, drafts + 1, options.plans, launches, options.replays, wall):
                    print(json.dumps({"case": name, "kv": kv, "drafts": drafts, **row, **stamps}), flush=True)
    return 0


def plans_of(case: Case, rows: int, coded: bool, card: Card, count: int) -> Sequence[AttentionPlan]:
    """The first `count` candidate plans of a case."""
    return candidate_plans(case.work(rows, coded), card)[:count]


def measure(
    launcher: Launcher, layers: "Layers", rows: int, num_plans: int, launches: int, replays: int, wall: float
) -> Iterator[dict[str, Any]]:
    """Time the plans; one row for each."""
    case, entries = layers.case, []
    case_bytes = attention_bytes(
        [case.context] * case.batch, kv_heads=case.kv_heads, head_dim=case.head_dim, window=case.window,
        itemsize=1 if layers.coded else 2,
    )  # fmt: skip
    for plan in plans_of(case, rows, layers.coded, launcher.card, num_plans):
        step = layers.step(rows)
        launcher.run(*step.calls(0, plan, launcher.card))
        calls = partial(step.calls, plan=plan, card=launcher.card, launches=launches)
        digest = hashlib.sha256(step.out.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:8]
        entries.append((plan, digest, Entry(str(plan.knobs), calls, len(layers.caches) * 2, case_bytes)))
    times = time_entries(launcher, [entry for _, _, entry in entries], replays, wall)
    for (plan, digest, _), row in zip(entries, times, strict=True):
        yield {
            **row,
            "name": " ".join(map(str, plan.knobs.values())),
            "floor_us": case_bytes / wall / 1e3,
            "digest": digest,
        }


class Layers:
    """Caches of random numbers or codes, of so many layers that they do not fit the L2.

    context  positions that are kept, of one layer alone; None: the case's own
    """

    def __init__(self, case: Case, coded: bool, device: torch.device, context: int | None = None) -> None:
        self.case, self.coded, self.device = case, coded, device
        self.context = context or case.context
        width = -(-(self.context + 64) // BLOCK)
        shape = (case.batch * width, case.kv_heads, BLOCK, case.head_dim)
        layer_bytes = 2 * (1 if coded else 2) * case.batch * self.context * case.kv_heads * case.head_dim
        count = 1 if context else max(2, min(16, -(-ENOUGH_BYTES // layer_bytes)))
        generator = torch.Generator(device).manual_seed(5)
        self.caches = [(self._random(shape, generator), self._random(shape, generator)) for _ in range(count)]
        order = torch.randperm(case.batch * width, generator=generator, device=device)
        self.table = order.reshape(case.batch, width).int()
        self.scales = torch.full((2, case.kv_heads), 2.0**-6, device=device) if coded else None

    def step(self, rows: int) -> "Step":
        """A step's attention with so many rows a slot."""
        return Step(self, rows)

    def _random(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if not self.coded:
            return torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
        codes = torch.randint(0, 127, shape, generator=generator, device=self.device, dtype=torch.uint8)
        signs = torch.randint(0, 2, shape, generator=generator, device=self.device, dtype=torch.uint8)
        return codes | signs << 7


class Step:
    """Rows of a chain in every slot, and what a launch keeps."""

    def __init__(self, layers: Layers, rows: int) -> None:
        case, device = layers.case, layers.device
        self._layers, self._memory = layers, dict[tuple[str, tuple[int, ...]], torch.Tensor]()
        generator = torch.Generator(device).manual_seed(7)
        shape = (case.batch * rows, case.kv_heads * case.group, case.head_dim)
        self.q = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        self.out = torch.empty(shape[0], shape[1] * shape[2], device=device, dtype=torch.bfloat16)
        self._slots = torch.arange(case.batch, dtype=torch.int32, device=device)
        self._dense = torch.full((case.batch,), layers.context, dtype=torch.int32, device=device)
        self._live = torch.ones(shape[0], dtype=torch.uint8, device=device)
        masks = [(1 << row + 1) - 1 for row in range(rows)]
        self._masks = torch.tensor([masks] * case.batch, dtype=torch.int64, device=device)
        self._sinks = torch.randn(shape[1], generator=generator, device=device) if case.sinks else None

    def calls(self, copy: int, plan: AttentionPlan | None, card: Card, launches: int = 2) -> list[KernelCall]:
        """The launches over one layer, or the first of them."""
        layers = self._layers
        k_cache, v_cache = layers.caches[copy % len(layers.caches)]
        return attention(
            q=self.q, k_cache=k_cache, v_cache=v_cache, block_table=layers.table, slots=self._slots,
            dense_lens=self._dense, row_live=self._live, row_masks=self._masks, sinks=self._sinks,
            kv_scales=layers.scales, out=self.out, scale=layers.case.head_dim**-0.5, window=layers.case.window,
            workspace=self._workspace, early_metadata=True, split=layers.case.split, card=card, plan=plan,
        )[:launches]  # fmt: skip

    def _workspace(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if (name, shape) not in self._memory:
            self._memory[name, shape] = torch.zeros(shape, dtype=dtype, device=self._layers.device)
        return self._memory[name, shape]


if __name__ == "__main__":
    raise SystemExit(main())
