"""Real acceptance of chains, static and dynamic trees at equal rows, greedy and sampled: the bundled pair's, or yours.

    python -m bench.trees --out bench/results/cpu/trees.json

First a probe decodes prompts that are not measured, with a tree that has the eight likeliest tokens behind each draft
of the likeliest chain: how often the target draws the draft of each rank. From that the planner makes the best static
tree for each number of rows, one for each temperature. Then every shape decodes the same prompts; tokens are compared
with those without drafts. Nothing is simulated. What a shape costs is not measured here: a level of a draft model is a
pass, and a dynamic tree's takes K rows.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.acceptance import DEMO, Baselines, Sum, conditions_of, decode, listed, runs_on, write_result
from lowlat import Runtime, SpeculativeConfig
from lowlat.models.program import Op
from lowlat.speculators.methods import draft_method
from lowlat.speculators.tree.topology import TreeTopology, what_if

SHAPES = ("chain", "static", "dynamic")
DEPTH, RANKS = 7, 8
SPINE = tuple((0,) * depth + (rank,) for depth in range(DEPTH) for rank in range(RANKS))
SIZES: dict[str, Any] = {"max_batch": 1, "max_context": 512, "prefix_reuse": False}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write one JSON file."""
    options = _options(arguments)
    domains = listed(json.loads(options.prompts.read_text(encoding="utf-8")))
    measured = [prompt for prompts in domains.values() for prompt in prompts[: options.limit]]
    others = [prompt for prompts in domains.values() for prompt in prompts[options.limit :][: options.probes]]
    rows, baselines = [], Baselines(options.max_tokens)
    probed = options.temperature if "static" in options.shapes else ()
    tables = {temperature: _acceptance_by_rank(options, others, temperature) for temperature in probed}
    for shape in _shapes(options, tables):
        with _load(options, shape.options) as runtime:
            for temperature in shape.temperatures:
                total = Sum()
                for prompt in measured:
                    total.add(_both(runtime, baselines, prompt, temperature, shape.depth))
                row = {**shape.labels(), **total.row("all", temperature)}
                rows.append({name: value for name, value in row.items() if not name.endswith("tokens_per_s")})
                print(json.dumps(rows[-1]), file=sys.stderr)
            where = runs_on(runtime)
    result = {
        "conditions": {
            **conditions_of(options),
            "runs_on": where,
            "head": options.head.name,
            "prompts": len(measured),
            "probed_prompts": len(others),
            "acceptance_by_rank": {str(temperature): table for temperature, table in tables.items()},
        },
        "rows": rows,
    }
    write_result(options.out, result)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--head", type=Path, default=DEMO / "head")
    parser.add_argument("--prompts", type=Path, default=DEMO / "prompts.json", help="JSON: domain -> prompts")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--limit", type=int, default=3, help="prompts a domain")
    parser.add_argument("--probes", type=int, default=4, help="prompts a domain of the probe")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--chains", type=int, nargs="*", default=[3, 5, 7], help="depths")
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 16, 32], help="of trees")
    parser.add_argument("--dynamic", nargs="*", default=["4x5", "4x7", "8x7"], help="K x depth of dynamic trees")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class _Shape:
    """A shape of drafts. temperatures  at which it is measured: a static tree at the one that it was planned for."""

    name: str
    rows: int
    depth: int
    temperatures: Sequence[float]
    options: dict[str, Any] = field(default_factory=dict)

    def labels(self) -> dict[str, Any]:
        top_k = self.options.get("dynamic_tree_max_topk")
        more = {} if top_k is None else {"dynamic_tree_max_topk": top_k}
        return {"shape": self.name, "rows": self.rows, "num_speculative_tokens": self.depth, **more}


def _shapes(options: argparse.Namespace, tables: dict[float, list[list[float]]]) -> Iterator[_Shape]:
    temperatures = options.temperature
    for depth in options.chains if "chain" in options.shapes else ():
        yield _Shape("chain", depth + 1, depth, temperatures, {"num_speculative_tokens": depth})
    for rows in options.rows:
        for temperature in tables:
            choices = what_if(tables[temperature], [rows]).recommended.choices
            if len(choices) != rows - 1:
                raise SystemExit(
                    f"the probe saw no {rows - 1} drafts that may be accepted: raise --probes or --max-tokens"
                )
            depth = max(map(len, choices))
            yield _Shape("static", rows, depth, [temperature], {"num_speculative_tokens": depth, "tree": choices})
        for text in options.dynamic if "dynamic" in options.shapes else ():
            top_k, depth = map(int, text.split("x"))
            if rows > depth:
                own = {"dynamic_tree_max_topk": top_k, "max_total_draft_tokens": rows - 1}
                yield _Shape("dynamic", rows, depth, temperatures, {"num_speculative_tokens": depth, **own})


def _load(options: argparse.Namespace, shape: dict[str, Any]) -> Runtime:
    config = SpeculativeConfig(model=options.head, method=draft_method(options.head), strict=True, **shape)
    return Runtime.load(options.target, config, device=options.device, **SIZES)


def _acceptance_by_rank(options: argparse.Namespace, prompts: Sequence[str], temperature: float) -> list[list[float]]:
    """[S][ranks] how often the target draws a rank's draft, where it went along with the likeliest chain so far."""
    tree, tried, drawn = TreeTopology.from_choices(SPINE), [0] * DEPTH, [[0] * RANKS for _ in range(DEPTH)]

    def look(op: Op, arguments: dict[str, torch.Tensor]) -> None:
        if op.kind != "accept" or not bool(arguments["draft_tokens"][0, 1:].ge(0).all()):
            return
        nodes = [node for node in arguments["accepted_nodes"][0].tolist() if node >= 0]
        for depth, node in enumerate([*nodes[1:], -1][:DEPTH]):
            tried[depth] += 1
            if node >= 0:
                drawn[depth][tree.ranks[node]] += 1

    with _load(options, {"num_speculative_tokens": DEPTH, "tree": SPINE}) as runtime:
        runtime.executor.set_hook(look)
        for prompt in prompts:
            decode(runtime, prompt, Baselines(options.max_tokens).params(temperature), DEPTH)
    return [[round(count / max(1, all_), 4) for count in row] for all_, row in zip(tried, drawn, strict=True)]


def _both(runtime: Runtime, baselines: Baselines, prompt: str, temperature: float, depth: int) -> Sum:
    """A prompt decoded with drafts, its tokens compared with those without."""
    one = Sum()
    expected, one.baseline_seconds, before = baselines.of(runtime, prompt, temperature)
    tokens, one.seconds, after = decode(runtime, prompt, baselines.params(temperature), depth)
    one.baseline_decode_seconds, one.decode_seconds = before.decode_s or 0.0, after.decode_s or 0.0
    one.prompts, one.tokens, one.steps, one.identical = 1, len(tokens), after.num_steps, tokens == expected
    if after.speculation is not None:
        one.stats.merge(after.speculation)
    return one


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
