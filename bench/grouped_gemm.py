"""Times of grouped GEMMs alone: a mixture's launches one by one and together, and a dense GEMM by the same kernel.

    python -m bench.grouped_gemm --chunk 512 2048 --pairs 32 64 96 --warps 4 8 --out /tmp/grouped.json

Rows choose their experts at random. The dense GEMM takes a plain packed matrix as one expert, all rows its pairs;
prefill does not use it. `--pairs`, `--warps` and `--skip` ask for other tiles, larger blocks, and other numbers of
tiles of 8 pairs that are left out together, beside prefill's own. Whole prompts are measured by `bench.prompts`.
"""

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.clock import own_stream
from bench.conditions import stamps_of, write_json
from bench.gpt_oss_cases import MODELS
from bench.micro import Entry, time_entries
from bench.targets import target_weights
from bench.wall import measure_wall
from lowlat.executors.launcher import Launcher
from lowlat.kernels.formats import BF16
from lowlat.kernels.gemm.packing import PackedMatrix
from lowlat.kernels.moe.packing import PackedExperts
from lowlat.kernels.moe.plan import DOWN, GATE_UP, ExpertShape
from lowlat.kernels.moe.prefill.grouped_gemm import grouped_down, grouped_gate_up
from lowlat.kernels.moe.prefill.grouping import group_pairs
from lowlat.kernels.moe.prefill.pair_tiles import TILE_WORDS, most_tiles, tile_pairs_of
from lowlat.kernels.moe.prefill.plan import WARPS, GroupedPlan, plan_grouped
from lowlat.kernels.moe.topk_sum import add_topk
from lowlat.kernels.toolchain.kernel import KernelCall

__all__ = ["Choices", "main", "measure", "product_entries"]

COPIES = 4
TOP_K, LIMIT, ALPHA = 4, 7.0, 1.702


@dataclass(frozen=True)
class Choices:
    """Plans that are tried beside prefill's: pairs of a tile, warps of a block, tiles of 8 pairs left out together."""

    pairs: Sequence[int] = ()
    warps: Sequence[int] = ()
    skip: Sequence[int] = ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the experts of one layer, print a row an entry, and write them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="120b")
    parser.add_argument("--chunk", type=int, nargs="+", default=[128, 512, 2048], help="rows")
    for name in ("pairs", "warps", "skip"):
        parser.add_argument(f"--{name}", type=int, nargs="*", default=[], help="see above")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if min((*options.pairs, *options.warps, *options.skip, *options.chunk, options.replays)) < 1:
        parser.error("--chunk, --pairs, --warps, --skip and --replays want at least 1")
    device = torch.device(options.device)
    stamps = stamps_of(device, options.commit)
    with own_stream(device):
        launcher = Launcher(device)
        weights = target_weights(replace(MODELS[options.model], num_layers=1), device)
        choices = Choices(options.pairs, options.warps, options.skip)
        rows = [{**row, **stamps} for row in measure(launcher, weights, options.chunk, choices, options.replays)]
    for row in rows:
        print(json.dumps(row))
    if options.out is not None:
        write_json(options.out, rows)
    return 0


def measure(
    launcher: Launcher, weights: Mapping[str, Any], chunks: Iterable[int], choices: Choices, replays: int
) -> list[dict[str, Any]]:
    """A row an entry, beside the memory's wall and with the arithmetic's rate."""
    made = list(product_entries(launcher, weights, chunks, choices))
    rows = time_entries(launcher, [entry for entry, _ in made], replays, measure_wall(launcher.device).gb_per_s)
    for row, (_, count) in zip(rows, made, strict=True):
        if count and "us_p50" in row:
            row["tflop_per_s"] = round(count / row["us_p50"] / 1e6, 1)
    return rows


def product_entries(
    launcher: Launcher, weights: Mapping[str, Any], chunks: Iterable[int], choices: Choices
) -> Iterator[tuple[Entry, int]]:
    """Entries of every chunk, and the arithmetic of each."""
    packed = {
        part: [each for name, each in weights.items() if name.endswith(part) and isinstance(each, PackedExperts)]
        for part in (GATE_UP, DOWN)
    }
    for chunk in chunks:
        mixture = _Mixture(launcher, packed, chunk)
        yield from mixture.entries(choices)
        yield from _dense(launcher, packed[DOWN][0].rows, chunk)


class _Mixture:
    """One layer's experts and the rows of a chunk."""

    def __init__(self, launcher: Launcher, packed: Mapping[str, list[PackedExperts]], chunk: int) -> None:
        self._launcher, self._packed, self._chunk = launcher, packed, chunk
        up, down = packed[GATE_UP][0], packed[DOWN][0]
        self._experts, device, bf16 = up.num_experts, launcher.device, torch.bfloat16
        self._ids = torch.rand(chunk, self._experts, device=device).argsort(1)[:, :TOP_K].int().contiguous()
        self._x = torch.randn(chunk, up.columns, device=device).to(bf16)
        self._activated = torch.randn(*self._ids.shape, down.columns, device=device).to(bf16)
        self._partials = torch.empty(*self._ids.shape, down.rows, device=device)
        self._out = torch.empty(chunk, down.rows, device=device)
        self._shares = torch.rand(self._ids.shape, device=device)
        kinds = {GATE_UP: up, DOWN: down}
        self._bias = {
            part: torch.zeros(self._experts, each.rows, device=device).to(bf16) for part, each in kinds.items()
        }

    def entries(self, choices: Choices) -> Iterator[tuple[Entry, int]]:
        """Each launch alone and all four together, in prefill's own tiles and in others."""
        up, down, pairs = self._packed[GATE_UP][0], self._packed[DOWN][0], self._ids.numel()
        chosen = len(self._ids.unique()) / self._experts
        up_bytes = int(chosen * up.num_bytes) + 2 * (self._x.numel() + self._activated.numel())
        down_bytes = int(chosen * down.num_bytes) + 2 * self._activated.numel() + 4 * self._partials.numel()
        sum_bytes = 4 * (self._partials.numel() + self._out.numel())
        up_count, down_count = (2 * pairs * each.rows * each.columns for each in (up, down))
        usual = tile_pairs_of(pairs, self._experts)
        for width in sorted({usual, *choices.pairs}):
            lists = self._lists(width)
            group = group_pairs(expert_ids=self._ids, num_experts=self._experts, tile_pairs=width, **lists)
            self._launcher.run(*group)
            add = add_topk(partials=self._partials, expert_ids=self._ids, out=self._out)
            skips = [None, *(each for each in choices.skip if width % (8 * each) == 0)]
            for warps, skip in itertools.product(sorted({WARPS, *choices.warps}), skips):
                name = f"{self._chunk} rows, tiles of {width}, {warps} warps" + (f", skip {skip}" if skip else "")
                plans = {part: self._plan(part, width, warps, skip) for part in (GATE_UP, DOWN)}
                product = _Product(self, lists, plans)
                yield Entry(f"gate_up, {name}", product.gate_up, COPIES, up_bytes), up_count
                yield Entry(f"down, {name}", product.down, COPIES, down_bytes), down_count
                together = _Together(group, product, add)
                both = up_bytes + down_bytes + sum_bytes
                yield Entry(f"mixture, {name}", together.calls, COPIES, both), up_count + down_count
        yield Entry(f"grouping, {self._chunk} rows", lambda _: group, COPIES), 0
        yield Entry(f"sum of experts, {self._chunk} rows", lambda _: add, COPIES, sum_bytes), 0

    def gate_up(self, copy: int, lists: Mapping[str, torch.Tensor], plan: GroupedPlan) -> list[KernelCall]:
        """The first product, by the weights of a layer."""
        weight = self._packed[GATE_UP][copy % len(self._packed[GATE_UP])]
        return grouped_gate_up(
            x=self._x, **lists, weight=weight, bias=self._bias[GATE_UP], out=self._activated, limit=LIMIT, alpha=ALPHA,
            plan=plan,
        )  # fmt: skip

    def down(self, copy: int, lists: Mapping[str, Any], plan: GroupedPlan) -> list[KernelCall]:
        """The second product, by the weights of a layer."""
        weight = self._packed[DOWN][copy % len(self._packed[DOWN])]
        return grouped_down(
            activated=self._activated, **lists, expert_weights=self._shares, weight=weight, bias=self._bias[DOWN],
            out=self._partials, plan=plan,
        )  # fmt: skip

    def _lists(self, width: int) -> dict[str, torch.Tensor]:
        pairs, kinds = self._ids.numel(), {"dtype": torch.int32, "device": self._launcher.device}
        tiles = torch.empty(most_tiles(pairs, self._experts, width), TILE_WORDS, **kinds)  # type: ignore[call-overload]
        return {"order": torch.empty(pairs, **kinds), "tiles": tiles}  # type: ignore[call-overload]

    def _plan(self, part: str, width: int, warps: int, skip: int | None) -> GroupedPlan:
        each = self._packed[part][0]
        shape = ExpertShape(part, each.rows, each.columns, TOP_K, each.format)
        plan = plan_grouped(width, shape, self._launcher.card, warps=warps)
        return plan if skip is None else replace(plan, skip=skip)


@dataclass(frozen=True)
class _Product:
    """A mixture's products in tiles of one size."""

    mixture: _Mixture
    lists: Mapping[str, torch.Tensor]
    plans: Mapping[str, GroupedPlan]

    def gate_up(self, copy: int) -> list[KernelCall]:
        return self.mixture.gate_up(copy, self.lists, self.plans[GATE_UP])

    def down(self, copy: int) -> list[KernelCall]:
        return self.mixture.down(copy, self.lists, self.plans[DOWN])


@dataclass(frozen=True)
class _Together:
    """All launches of a mixture."""

    group: list[KernelCall]
    product: _Product
    add: list[KernelCall]

    def calls(self, copy: int) -> list[KernelCall]:
        return [*self.group, *self.product.gate_up(copy), *self.product.down(copy), *self.add]


def _dense(launcher: Launcher, width: int, chunk: int) -> Iterator[tuple[Entry, int]]:
    """A plain matrix [4096, N] as one expert of all rows, its sums weighed by ones."""
    rows, device, pairs = 4096, launcher.device, 96 if chunk > 64 else 64 if chunk > 32 else 32
    shape = ExpertShape(DOWN, rows, width, 1, BF16)
    tiles = torch.randn(COPIES, shape.tiles, shape.steps, 1024, device=device).bfloat16()
    matrices = [PackedMatrix(each, rows, width) for each in tiles]
    order = torch.arange(chunk, dtype=torch.int32, device=device)
    starts = range(0, chunk, pairs)
    known = [[0, start, min(pairs, chunk - start), 0] for start in starts]
    known += [[0, 0, 0, 0]] * (most_tiles(chunk, 1, pairs) - len(known))
    listed = torch.tensor(known, dtype=torch.int32, device=device)
    x = torch.randn(chunk, 1, width, device=device).bfloat16()
    out, ones = torch.empty(chunk, 1, rows, device=device), torch.ones(chunk, 1, device=device)
    bias, plan = torch.zeros(1, rows, device=device).bfloat16(), plan_grouped(pairs, shape, launcher.card)

    def calls(copy: int) -> list[KernelCall]:
        matrix = matrices[copy % COPIES]
        weight = PackedExperts(BF16, matrix.tiles[None], None, 1, matrix.rows, matrix.columns)
        return grouped_down(
            activated=x, order=order, tiles=listed, expert_weights=ones, weight=weight, bias=bias, out=out, plan=plan
        )

    moved = matrices[0].num_bytes + 2 * x.numel() + 4 * out.numel()
    yield Entry(f"dense {rows} x {width}, {chunk} rows", calls, COPIES, moved), 2 * chunk * rows * width


if __name__ == "__main__":
    raise SystemExit(main())
