"""Real acceptance of chains, static and dynamic trees at equal rows, greedy and sampled: the bundled pair's, or yours.

    python -m bench.trees --out bench/results/cpu/trees.json
    python -m bench.trees --acceptance bench/results/cpu/trees.json --out bench/results/h200/trees.json
    python -m bench.trees --geometry llama-8b --context 8192 --acceptance bench/results/h200/trees.json \
        --temperature 0 --out bench/results/h200/trees_llama_8b.json

First a probe decodes prompts that are not measured, with a tree that has the eight likeliest tokens behind each draft
of the likeliest chain: how often the target draws the draft of each rank. From that the planner makes the best static
tree for each number of rows, one for each temperature. Then every shape decodes the same prompts; tokens are compared
with those without drafts. Nothing is simulated. `--acceptance` takes the probe's figures from a file of this program,
as on a card it must: graphs cannot be looked into. There rows have tokens/s, too, and those of S = 0 in the first load;
the reference executor's speed tells nothing of what rows cost a card.

With `--geometry` the shapes of such a file, and S = 0, are timed at that geometry's size, random weights, one request
behind `--context` tokens. A shape's accept length is imposed, and is what the file's pair had with it; tokens/s are
what that length and the time make, for a dynamic tree over random weights seldom has a path so long.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.acceptance import DEMO, Baselines, Sum, conditions_of, decode, read_prompts, runs_on, write_result
from bench.conditions import stamps_of
from bench.subjects import open_subject
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.graphs.program import Op
from lowlat.speculators.methods import draft_method
from lowlat.speculators.tree.topology import TreeTopology, what_if
from lowlat.tools.bench.scenarios import Case

SHAPES = ("chain", "static", "dynamic")
DEPTH, RANKS = 7, 8
SPINE = tuple((0,) * depth + (rank,) for depth in range(DEPTH) for rank in range(RANKS))
SIZES: dict[str, Any] = {"max_batch": 1, "max_context": 512, "prefix_reuse": False}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write one JSON file."""
    options = _options(arguments)
    if options.geometry is not None:
        write_result(options.out, _timed(options))
        return
    domains = read_prompts(options.prompts)
    measured = [prompt for prompts in domains.values() for prompt in prompts[: options.limit]]
    others = [prompt for prompts in domains.values() for prompt in prompts[options.limit :][: options.probes]]
    rows, baselines = [], Baselines(options.max_tokens)
    if options.acceptance is None:
        probed = options.temperature if "static" in options.shapes else ()
        tables = {temperature: _acceptance_by_rank(options, others, temperature) for temperature in probed}
    else:
        tables = _tables(options, json.loads(options.acceptance.read_text(encoding="utf-8")))
    for shape in _shapes(options, tables):
        with _load(options, shape.depth, **shape.options) as runtime:
            for temperature in shape.temperatures:
                total = Sum()
                for prompt in measured:
                    total.add(baselines.both(runtime, prompt, temperature, shape.depth)[0])
                row = {**shape.labels(), **total.row("all", temperature)}
                on_card = runtime.device_choice.device.type == "cuda"
                kept = [name for name in row if on_card or not name.endswith("tokens_per_s")]
                rows.append({name: row[name] for name in kept})
                print(json.dumps(rows[-1]), file=sys.stderr)
            where = runs_on(runtime)
    result = {
        "conditions": {
            **conditions_of(options),
            "runs_on": where,
            "head": options.head.name,
            "prompts": len(measured),
            "probed_prompts": len(others) if options.acceptance is None else options.acceptance.name,
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
    parser.add_argument("--geometry", help="time shapes at its size, with random weights")
    parser.add_argument("--context", type=int, default=8192, help="tokens of a geometry's prompt")
    parser.add_argument(
        "--acceptance", type=Path, help="a file of this program, in place of a probe; a geometry's accept lengths"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.geometry is not None and options.acceptance is None:
        parser.error("--geometry needs --acceptance, a file of this program about a pair that was trained")
    return options


@dataclass(frozen=True)
class _Shape:
    """A shape of drafts.

    temperatures  at which it is measured: a static tree at the one that it was planned for
    options       fields of SpeculativeConfig beside the depth
    """

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
        yield _Shape("chain", depth + 1, depth, temperatures)
    for rows in options.rows:
        for temperature in tables:
            choices = what_if(tables[temperature], [rows]).recommended.choices
            if len(choices) != rows - 1:
                raise SystemExit(
                    f"the probe saw no {rows - 1} drafts that may be accepted: raise --probes or --max-tokens"
                )
            depth = max(map(len, choices))
            yield _Shape("static", rows, depth, [temperature], {"tree": choices})
        for text in options.dynamic if "dynamic" in options.shapes else ():
            top_k, depth = map(int, text.split("x"))
            if rows > depth:
                own = {"dynamic_tree_max_topk": top_k, "max_total_draft_tokens": rows - 1}
                yield _Shape("dynamic", rows, depth, temperatures, own)


def _timed(options: argparse.Namespace) -> dict[str, Any]:
    """Rows of a geometry: what a step of each shape takes, beside S = 0, with the accept length of a trained pair."""
    known = json.loads(options.acceptance.read_text(encoding="utf-8"))
    sizes = {"max_batch": 1, "max_context": options.context + 8 * options.max_tokens + 64, "prefix_reuse": False}
    rows: list[dict[str, Any]] = []
    with open_subject({"device": options.device}, geometry=options.geometry) as subject:
        (prompt,) = subject.prompts.of(Case(options.context, 1, 0))
        with subject.load(0, **sizes) as runtime:
            none_ms = _time(runtime, prompt, options.max_tokens, 0)
            stamps = {**stamps_of(runtime.device_choice.device, options.commit), "runs_on": runs_on(runtime)}
        for shape in _shapes(options, _tables(options, known)):
            for temperature in shape.temperatures:
                labels = {**shape.labels(), "temperature": temperature}
                for length in _lengths(known, labels):
                    part = subject.drafting(**shape.options, simulated_accept_length=length)
                    with part.load(shape.depth, **sizes) as runtime:
                        time_ms = _time(runtime, prompt, options.max_tokens, shape.depth)
                    rows.append({**labels, **_speeds(length, time_ms, none_ms)})
                    print(json.dumps(rows[-1]), file=sys.stderr)
    simulated = f"random weights and tokens; accept lengths imposed, those that {options.acceptance.name} measured"
    conditions = {"geometry": options.geometry, "context": options.context, "batch": 1, **stamps}
    return {"conditions": {**conditions, "max_tokens": options.max_tokens, "simulated": simulated}, "rows": rows}


def _speeds(length: float, time_ms: float, none_ms: float) -> dict[str, float]:
    return {
        "imposed_accept_length": length,
        "ms_a_step": time_ms,
        "tokens_per_s": round(1000 * length / time_ms, 1),
        "baseline_ms_a_step": none_ms,
        "baseline_tokens_per_s": round(1000 / none_ms, 1),
    }


def _tables(options: argparse.Namespace, known: dict[str, Any]) -> dict[float, list[list[float]]]:
    """A file's acceptance by rank at the temperatures that are asked for; none where no static tree is."""
    probed = options.temperature if "static" in options.shapes else ()
    return {temperature: known["conditions"]["acceptance_by_rank"][str(temperature)] for temperature in probed}


def _lengths(known: dict[str, Any], labels: dict[str, Any]) -> list[float]:
    """The accept length that a file has for a shape at a temperature, if it has one."""
    rows = (row for row in known["rows"] if all(row.get(name) == value for name, value in labels.items()))
    return [row["mean_acceptance_length"] for row in rows]


def _time(runtime: Runtime, prompt: Sequence[int], max_tokens: int, depth: int) -> float:
    """Milliseconds a step, of the better of two requests."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    found = (decode(runtime, list(prompt), params, depth)[2] for _ in range(2))
    times: list[float] = [1000 * (each.decode_s or 0.0) / each.num_steps for each in found]
    return round(min(times), 4)


def _load(options: argparse.Namespace, depth: int, **shape: Any) -> Runtime:
    own = {"model": options.head, "method": draft_method(options.head), "strict": True, **shape}
    config = SpeculativeConfig(num_speculative_tokens=depth, **own)
    return Runtime.load(options.target, config, device=options.device, **SIZES)


def _acceptance_by_rank(options: argparse.Namespace, prompts: Sequence[str], temperature: float) -> list[list[float]]:
    """[S][ranks] how often the target draws a rank's draft, where it went along with the likeliest chain so far."""
    tree, tried, drawn = TreeTopology.from_choices(SPINE), [0] * DEPTH, [[0] * RANKS for _ in range(DEPTH)]

    def look(op: Op, arguments: Mapping[str, torch.Tensor]) -> None:
        if op.kind != "accept" or not bool(arguments["draft_tokens"][0, 1:].ge(0).all()):
            return
        nodes = [node for node in arguments["accepted_nodes"][0].tolist() if node >= 0]
        for depth, node in enumerate([*nodes[1:], -1][:DEPTH]):
            tried[depth] += 1
            if node >= 0:
                drawn[depth][tree.ranks[node]] += 1

    with _load(options, DEPTH, tree=SPINE) as runtime:
        runtime.executor.set_hook(look)
        for prompt in prompts:
            decode(runtime, prompt, Baselines(options.max_tokens).params(temperature), DEPTH)
    return [[round(count / max(1, all_), 4) for count in row] for all_, row in zip(tried, drawn, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
