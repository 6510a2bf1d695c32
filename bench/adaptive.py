"""Chosen draft lengths next to fixed ones: tokens/s of S = 0, 2, 3, 5, 7 and of those the device chooses, together.

    python -m bench.adaptive --out adaptive.json                       the bundled pair on its prompts, by domain
    python -m bench.adaptive --model DIR --draft-model DIR --prompts FILE --chat --out adaptive.json    another pair
    python -m bench.adaptive --geometry llama-8b --accept-length 1,1.5,2,3,4 --context 4096 --out adaptive.json

A pair has real acceptance, greedy and at temperature 0.7; a geometry has random weights and imposed tokens a
step. S = 0 has no draft model loaded. Rows are added to an existing file as each load ends, and replace its rows of the
same conditions.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.acceptance import given_prompt, read_prompts
from bench.lib.conditions import stamps_of, write_json
from bench.lib.subjects import DEMO, open_subject
from lowlat import Runtime, SamplingParams
from lowlat.options.acceptance import acceptance_for
from lowlat.tools.bench.scenarios import Case
from lowlat.tools.bench.subject import Subject

__all__ = ["main"]

FIXED, MOST = (2, 3, 5, 7), 7
AUTO = "auto"
ACCEPT_LENGTHS = (1.0, 1.5, 2.0, 3.0, 4.0)
Settings = Sequence[tuple[int | str, int | None]]  # S as it is named, and as the runtime is told it


@dataclass(frozen=True)
class Work:
    """Requests that are decoded one after the other: prompts of a domain, or one of a length, at a temperature."""

    domain: str
    prompts: Sequence[str | Sequence[int]]
    temperature: float
    max_tokens: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the rows."""
    options = _options(arguments)
    sizes = {"max_batch": 1, "max_context": options.context + 2 * options.max_tokens + 64, "prefix_reuse": False}
    pair = {"model": options.model, "draft_model": options.draft_model, "prompts": options.prompts}
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    with open_subject({"device": options.device}, geometry=options.geometry, **pair) as subject:
        for made in _rows_by_load(subject, options, sizes):
            rows = [row for row in rows if not any(_same(row, new) for new in made)] + made
            write_json(options.out, {"rows": rows})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", help="its shapes, with random weights; the bundled pair without it")
    parser.add_argument("--model", type=Path, help="a target's directory, in place of the bundled pair's")
    parser.add_argument("--draft-model", type=Path, help="its draft model's")
    parser.add_argument("--prompts", type=Path, help="JSON: domain -> prompts; by default the bundled pair's")
    parser.add_argument("--chat", action="store_true", help="wrap each prompt with the model's chat template")
    lengths = parser.add_argument(
        "--accept-length",
        default=ACCEPT_LENGTHS,
        help=f"imposed acceptance of a geometry, as its tokens a step at S = {MOST}",
    )
    lengths.type = lambda text: tuple(float(part) for part in text.split(","))
    parser.add_argument("--context", type=int, default=1024, help="tokens of a geometry's prompt")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--limit", type=int, default=8, help="prompts a domain")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def _rows_by_load(
    subject: Subject, options: argparse.Namespace, sizes: dict[str, Any]
) -> Iterator[list[dict[str, Any]]]:
    """The rows of a pair: one load for S = 0; for fixed S and for chosen ones one each, of every imposed acceptance."""
    lengths = [None] if options.geometry is None else options.accept_length
    baselines: dict[tuple[str, float], float] = {}
    loads: list[tuple[float | None, str, int, Settings]] = [(None, "", 0, [(0, None)])]
    for length in lengths:
        loads.append((length, "", MOST, [(depth, depth) for depth in FIXED]))
        loads.append((length, AUTO, MOST, [(AUTO, None)]))
    for length, policy, most, settings in loads:
        drafting: dict[str, Any] = {} if length is None else {"simulated_acceptance": acceptance_for(length, MOST)}
        with subject.drafting(**drafting).load(most, adaptive=bool(policy), **sizes) as runtime:
            stamps = stamps_of(runtime.device_choice.device, options.commit)
            rows = list[dict[str, Any]]()
            for work in _works(subject, runtime, options):
                for name, asked in settings:
                    row = _row(runtime, work, name, asked, options.repeats)
                    baselines.setdefault((work.domain, work.temperature), row["tokens_per_s"])
                    row["tokens_per_s_without_drafts"] = baselines[work.domain, work.temperature]
                    for of in [length] if most else lengths:  # without drafts nothing is imposed
                        conditions = {"simulated_accept_length": of, "context": options.context if of else None}
                        rows.append({"pair": _name(options), **conditions, **row, **stamps})
        yield rows


def _name(options: argparse.Namespace) -> str:
    named: str = options.geometry or (options.model.name if options.model else "bundled")
    return named


def _works(subject: Subject, runtime: Runtime, options: argparse.Namespace) -> Iterator[Work]:
    if options.geometry is not None:
        yield Work("random", subject.prompts.of(Case(options.context, 1, 0)), 0.0, options.max_tokens)
        return
    for domain, texts in read_prompts(options.prompts or DEMO / "prompts.json").items():
        prompts = [given_prompt(runtime, text, chat=options.chat) for text in texts[: options.limit]]
        for temperature in (0.0, 0.7):
            yield Work(domain, prompts, temperature, options.max_tokens)


def _row(runtime: Runtime, work: Work, name: int | str, asked: int | None, repeats: int) -> dict[str, Any]:
    """A row: tokens/s over all requests, the median of the repeats after one that is not timed."""
    if asked is not None:
        runtime.speculate(asked)
    speeds, steps_ms, tokens, steps = [], [], 0, 0
    chosen: list[int] = []
    for turn in range(repeats + 1):
        before = runtime.summary().get("steps_by_width")
        seconds, tokens, steps = 0.0, 0, 0
        for prompt in work.prompts:
            params = SamplingParams(
                max_tokens=work.max_tokens, temperature=work.temperature, seed=1, ignore_eos=runtime.simulated
            )
            request = runtime.submit(prompt, params)
            while runtime.busy:
                runtime.step()
            figures = runtime.metrics(request)
            seconds += figures.decode_s or 0.0
            tokens, steps = tokens + figures.decoded_tokens, steps + figures.num_steps
        after = runtime.summary().get("steps_by_width")
        chosen = [] if after is None or before is None else [b - a for a, b in zip(before, after, strict=True)]
        if turn:
            speeds.append(tokens / seconds)
            steps_ms.append(1000 * seconds / steps)
    row = {
        "domain": work.domain,
        "temperature": work.temperature,
        "num_speculative_tokens": name,
        "tokens_a_step": round(tokens / steps, 3),
        "ms_a_step": round(median(steps_ms), 4),
        "tokens_per_s": round(median(speeds), 1),
    }
    if chosen:
        row["share_of_steps_by_width"] = [round(count / max(sum(chosen), 1), 3) for count in chosen]
    return row


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    names = ("pair", "simulated_accept_length", "context", "domain", "temperature", "num_speculative_tokens")
    return all(one[name] == other[name] for name in names)


if __name__ == "__main__":
    main()
