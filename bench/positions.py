"""Acceptance by the place in a long text: prompts of one text that end further and further on, and what follows them.

    python -m bench.positions --device cpu --positions 128,512,1024,1792 --out positions.json       the bundled pair
    python -m bench.positions --model DIR --draft-model DIR --prompts FILE --positions 512,8192,32768,131072 \\
        --draft-window 0,2048 --out positions.json

A row is a place and a window: acceptance by position of the draft, and tokens a step, over `--requests` texts that
begin at different places of the file. Nothing is imposed. A text that the file does not fill is begun anew, which
flatters acceptance: `distinct_tokens` tells the file's length. The bundled target has 2048 positions.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.conditions import stamps_of, write_json
from bench.subjects import open_subject
from lowlat import Runtime, SamplingParams
from lowlat.engine.metrics import SpeculativeDecodingStats
from lowlat.tools.bench.scenarios import Case
from lowlat.tools.bench.subject import Subject

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every place, print the rows, and write them."""
    options = _options(arguments)
    opened = open_subject(
        {"device": options.device}, model=options.model, draft_model=options.draft_model, prompts=options.prompts
    )
    with opened as subject:
        rows = [row for window in options.draft_window for row in _rows(subject, window, options)]
    write_json(options.out, {"rows": rows})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a target's directory; the bundled pair without it")
    parser.add_argument("--draft-model", type=Path)
    windows = parser.add_argument(
        "--draft-window", default=(0,), help="tokens that the draft model attends to, with commas; 0: its own window"
    )
    parser.add_argument(
        "--prompts", type=Path, help="the text; of the bundled pair its own prompts one after the other"
    )
    numbers = parser.add_argument("--positions", default=(128, 512, 1024, 1792), help="tokens of prompts, with commas")
    windows.type = numbers.type = lambda text: tuple(int(part) for part in text.split(","))
    parser.add_argument("--requests", type=int, default=4, help="texts of each length, of 8 at most")
    parser.add_argument("--tokens", type=int, default=96, help="that follow each")
    parser.add_argument("--depth", type=int, default=3, help="S")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def _rows(subject: Subject, window: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all places, by one runtime."""
    if window:
        subject = subject.drafting(draft_window=window)
    sizes = {"max_batch": 1, "max_context": max(options.positions) + options.tokens + options.depth + 1}
    with subject.load(options.depth, **sizes) as runtime:
        stamps = stamps_of(runtime.device_choice.device, options.commit)
        for position in sorted(options.positions):
            row = {**_row(runtime, subject, position, options), "draft_window": window or None, **stamps}
            print(json.dumps(row), flush=True)
            yield row


def _row(runtime: Runtime, subject: Subject, position: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures behind prompts of one length."""
    stats = SpeculativeDecodingStats()
    for seed, prompt in enumerate(subject.prompts.of(Case(position, options.requests, options.depth))):
        params = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=seed, ignore_eos=True)
        request = runtime.submit(prompt, params)
        while runtime.busy:
            runtime.step()
        found = runtime.metrics(request).speculation
        if found is not None:
            stats.merge(found)
    return {
        "model": subject.name,
        "position": position,
        "requests": options.requests,
        "temperature": options.temperature,
        "num_speculative_tokens": options.depth,
        "distinct_tokens": len(subject.prompts.stream),
        "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
        "acceptance_by_position": [round(share, 3) for share in stats.acceptance_by_position[: options.depth]],
        "num_drafts": stats.num_drafts,
        "simulated": False,
    }


if __name__ == "__main__":
    main()
