"""Real acceptance of a pair in formats of 8 and 4 bits, beside what each format costs the target on a text.

    python -m bench.formats --out bench/results/cpu/formats.json
    python -m bench.formats --name chat --target DIR --head lowlat/demo/chat_head --chat \\
        --prompts lowlat/demo/chat_prompts.json --limit 3 --max-tokens 48 --out bench/results/cpu/formats.json

Weights are rounded at load. For each format of the target, and of the draft model, prompts are decoded greedily with
drafts and without, and the tokens compared; perplexity and KL divergence from the plain target are those of `lowlat
inspect quality` on the bundled prompts, one after the other. Nothing is simulated. Rows of other pairs that the file
holds stay.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.acceptance import DEMO, Sum, conditions_of, decode, given_prompt, read_prompts, runs_on, write_result
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.tools.quality import OPTIONS, measure_quality

CASES = ("bfloat16/bfloat16", "fp8/bfloat16", "fp8/fp8", "int4/bfloat16", "int4/fp8")  # target / draft model
SIZES: dict[str, Any] = {"max_batch": 1, "max_context": 1024, "prefix_reuse": False}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write one JSON file."""
    options = _options(arguments)
    if options.table:
        print(table(json.loads(options.out.read_text(encoding="utf-8"))))
        return
    domains = read_prompts(options.prompts)
    prompts = [prompt for each in domains.values() for prompt in each[: options.limit]]
    rows: list[dict[str, Any]] = []
    qualities: dict[str, dict[str, Any]] = {}
    for case in options.cases:
        weights, draft_weights = case.split("/")
        if weights not in qualities:
            qualities[weights] = _quality(options, weights)
        row, where = _accepted(options, prompts, weights, draft_weights)
        rows.append({"pair": options.name, "weights": weights, "draft_weights": draft_weights, **row})
        rows[-1] |= qualities[weights]
        print(json.dumps(rows[-1]), file=sys.stderr)
    conditions = {
        **conditions_of(options),
        "runs_on": where,
        "head": options.head.name,
        "num_speculative_tokens": options.num_speculative_tokens,
        "temperature": 0.0,
        "prompts": len(prompts),
        "chat": options.chat,
        "quality_text": "lowlat/demo/prompts.json, all prompts",
        "quality_tokens": options.quality_tokens,
    }
    known = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    kept = [row for row in known.get("rows", []) if row["pair"] != options.name]
    result = {"conditions": {**known.get("conditions", {}), options.name: conditions}, "rows": [*kept, *rows]}
    write_result(options.out, result)


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown: acceptance, and what the target's format costs."""
    lines = [
        "| pair | target | draft model | length, greedy | accepted by position | identical | perplexity "
        "| KL, mean / p99 | same likeliest token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        shares = " ".join(f"{share:.2f}"[1:] for share in row["acceptance_by_position"])
        cells = [
            row["pair"],
            *(row[name].replace("bfloat16", "bf16") for name in ("weights", "draft_weights")),
            f"{row['mean_acceptance_length']:.2f}",
            shares,
            "yes" if row["identical"] else "no",
            f"{row['perplexity']:.2f}",
            f"{row['mean_kl']:.4f} / {row['p99_kl']:.3f}" if "mean_kl" in row else "",
            f"{row['top1_agreement']:.1%}" if "mean_kl" in row else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="bundled", help="of the pair, in the file")
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--head", type=Path, default=DEMO / "head")
    parser.add_argument("--prompts", type=Path, default=DEMO / "prompts.json", help="JSON: domain -> prompts")
    parser.add_argument("--chat", action="store_true", help="wrap each prompt with the model's chat template")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), help="target's / draft model's weights"
    )
    parser.add_argument("--limit", type=int, default=4, help="prompts a domain")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--quality-tokens", type=int, help="of the text of perplexity, at most")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--table", action="store_true", help="print the table of the file, and measure nothing")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def _rounded(weights: str) -> dict[str, Any]:
    return {} if weights == "bfloat16" else {"quantize": weights}


def _quality(options: argparse.Namespace, weights: str) -> dict[str, Any]:
    """Perplexity of a format and, where it is not the plain one, the divergence from that."""
    prompts = read_prompts(DEMO / "prompts.json")
    text = "\n\n".join(prompt for each in prompts.values() for prompt in each)
    sizes = {**SIZES, **OPTIONS, "device": options.device}
    with Runtime.load(options.target, None, **sizes, **_rounded(weights)) as target:
        if weights == "bfloat16":
            found = measure_quality(target, None, text, max_tokens=options.quality_tokens)
        else:
            with Runtime.load(options.target, None, **sizes) as plain:
                found = measure_quality(target, plain, text, max_tokens=options.quality_tokens)
    compared = {} if found.divergence is None else msgspec.to_builtins(found.divergence)
    shown = {"formats": found.target.formats, "predicted": found.num_predicted, "perplexity": found.target.perplexity}
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in (shown | compared).items()}


def _accepted(
    options: argparse.Namespace, prompts: Sequence[str], weights: str, draft_weights: str
) -> tuple[dict[str, Any], str]:
    """Acceptance over all prompts, and whether tokens are those without drafts; and where it ran."""
    draft: Any = None if draft_weights == "bfloat16" else draft_weights
    depth = options.num_speculative_tokens
    config = SpeculativeConfig(model=options.head, num_speculative_tokens=depth, strict=True, draft_quantize=draft)
    params, total = SamplingParams(max_tokens=options.max_tokens, temperature=0.0), Sum()
    with Runtime.load(options.target, config, device=options.device, **SIZES, **_rounded(weights)) as runtime:
        for prompt in prompts:
            given = given_prompt(runtime, prompt, chat=options.chat)
            one = Sum()
            tokens, one.seconds, after = decode(runtime, given, params, depth)
            one.prompts, one.tokens, one.steps = 1, len(tokens), after.num_steps
            one.identical = tokens == decode(runtime, given, params, 0)[0]
            if after.speculation is not None:
                one.stats.merge(after.speculation)
            total.add(one)
        where = runs_on(runtime)
    names = ("prompts", "tokens", "identical", "mean_acceptance_length", "acceptance_by_position")
    row = total.row("all", 0.0)
    return {name: row[name] for name in names}, where


if __name__ == "__main__":
    main()
