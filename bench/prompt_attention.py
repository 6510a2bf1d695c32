"""Attention of a prompt's rows beside torch's flash attention, both behind a gather of the paged cache: TFLOP/s.

Rows see the positions before them and their own; what is hidden of a tile counts for nothing. Each entry is copies of
its calls in one CUDA graph, in turns with the others. `difference` is that of ours and torch's results, over the norm.

    python -m bench.prompt_attention --out /tmp/attention.json
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.clock import Timed, own_stream, round_robin
from bench.conditions import stamps_of, write_json
from bench.micro import TURN, Entry, capture, describe
from lowlat.executors.launcher import Launcher
from lowlat.kernels.attention.prefill.flash import GROUPS, prefill_flash
from lowlat.kernels.attention.prefill.gather_kv import gather_kv
from lowlat.kernels.attention.prefill.gathered_rows import gathered_rows, tiles_shape
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.lowering.prefill_attention import flash_attention

__all__ = ["HEADS", "main", "measure"]

HEADS = {"llama": (32, 8, 128), "gpt-oss": (64, 8, 64)}  # of queries, of keys, their size
BLOCK = 32
COPIES = 4


@dataclass(frozen=True)
class _Case:
    """Rows of a prompt behind so many positions: tensors of one layer, and the calls over them."""

    heads: str
    rows: int
    context: int
    window: int | None
    device: torch.device

    @property
    def label(self) -> str:
        """A part of a row's name."""
        window = f", window {self.window}" if self.window else ""
        return f"{self.heads}, {self.rows} rows, {self.context} positions{window}"

    @property
    def seen(self) -> int:
        """Pairs of a row and a position that it sees."""
        before = self.context - self.rows
        each = range(before + 1, self.context + 1)
        return sum(min(count, self.window or count) for count in each)

    def tensors(self) -> dict[str, Any]:
        heads, groups, dim = HEADS[self.heads]
        pages = -(-self.context // BLOCK)
        made = torch.randn(2, pages + 1, groups, BLOCK, dim, device=self.device).bfloat16()
        start = torch.tensor([self.context - self.rows, self.rows], device=self.device)
        return {
            "q": torch.randn(self.rows, heads, dim, device=self.device).bfloat16(),
            "k_cache": made[0],
            "v_cache": made[1],
            "block_table": (1 + torch.randperm(pages, device=self.device)).int()[None],
            "chunk": start.int(),
        }

    def gather(self, launcher: Launcher, tensors: dict[str, Any], *, tiled: bool) -> tuple[dict[str, Any], Any]:
        """The gathered keys and values, the lengths, and the calls that fill them."""
        _, groups, dim = HEADS[self.heads]
        count = -(-gathered_rows(self.rows, self.context, self.window) // 128) * 128
        shape = tiles_shape(count, groups, dim) if tiled else (count, groups, dim)
        made: dict[str, Any] = {name: torch.zeros(shape, device=self.device).bfloat16() for name in ("keys", "values")}
        lengths = torch.zeros(2, 2, dtype=torch.int32, device=self.device)
        given = {name: tensors[name] for name in ("k_cache", "v_cache", "block_table", "chunk")}
        calls = gather_kv(**given, **made, lengths=lengths, size=self.rows, window=self.window, card=launcher.card)
        return {**made, "lengths": lengths}, calls


def measure(launcher: Launcher, cases: Sequence[_Case], groups: Sequence[int], replays: int) -> list[dict[str, Any]]:
    """A row for each case and way. Runs on torch's current stream."""
    found = []
    for case in cases:
        tensors, (_, _, dim), label = case.tensors(), HEADS[case.heads], case.label
        out, scale = torch.empty_like(tensors["q"]), dim**-0.5
        tiles, gathering = case.gather(launcher, tensors, tiled=True)
        del tiles["lengths"]
        given = {"q": tensors["q"], **tiles, "chunk": tensors["chunk"], "window": case.window, "out": out}
        ways = {
            f"{label}, {name}": prefill_flash(**given, scale=scale, card=launcher.card, groups=count)
            for name, count in [("ours", None), *((f"ours, {each} warpgroups", each) for each in groups)]
        }
        rows, gathering_rows = case.gather(launcher, tensors, tiled=False)
        launcher.run(*gathering_rows)

        def attend(case: _Case = case, q: torch.Tensor = tensors["q"], rows: Any = rows, s: float = scale) -> Any:
            return flash_attention(q, **rows, longest=case.context + case.rows, window=case.window, scale=s)[0]

        timed = [
            *(_timed(launcher, name, [*gathering, *calls]) for name, calls in ways.items()),
            _timed(launcher, f"{label}, gathering tiles", gathering),
            Timed(f"{label}, torch, gathered before", _torch_graph(attend)),
        ]
        expected = attend().float()
        difference = float((out.float() - expected).norm() / expected.norm())
        round_robin(timed, replays, TURN, launcher.device)
        heads = HEADS[case.heads][0]
        for each in timed:
            row = describe(Entry(each.name, lambda _: [], COPIES), each.ms, None)
            rate = round(4 * heads * dim * case.seen / row["us_p50"] / 1e6, 1)
            kept = {name: row[name] for name in ("name", "us_p50")}
            found.append({**kept, "tflop_per_s": rate, "difference": round(difference, 5)})
        torch.cuda.empty_cache()
    return found


def _timed(launcher: Launcher, name: str, calls: Sequence[KernelCall]) -> Timed:
    return Timed(name, capture(launcher, Entry(name, lambda _: calls, COPIES)))


def _torch_graph(attend: Callable[[], Any]) -> Callable[[], None]:
    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COPIES):
            attend()
    return graph.replay


def main(arguments: Sequence[str] | None = None) -> None:
    """Time attention, print the rows, and write them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--rows", nargs="+", type=int, default=[2048])
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--groups", nargs="*", type=int, choices=GROUPS, default=[], help="also such blocks")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    cases = [
        _Case(heads, rows, context, options.window, device)
        for heads in options.heads
        for rows in options.rows
        for context in options.contexts
        if rows <= context
    ]
    with own_stream(device):
        rows = measure(Launcher(device), cases, options.groups, options.replays)
    stamps = {"weights": "none: random queries, keys and values", **stamps_of(device, options.commit)}
    for row in rows:
        print(json.dumps(row))
    if options.out is not None:
        write_json(options.out, [{**row, **stamps} for row in rows])


if __name__ == "__main__":
    main()
