"""A replay of the choice of widths on recorded texts: the widths that it takes, and its speed beside one fixed width.

    python -m bench.width_policy record --limit 8 --max-tokens 192 --out tests/data/right_drafts.json
    python -m bench.width_policy replay --texts tests/data/right_drafts.json \\
        --step-us 137,185,230,272,330,372,396,418,159

A recorded text says of each position how many drafts made there would have been right: it was decoded one token a step,
at S = 7, by the reference executor. A replay runs the operations of the reference over such texts and charges each step
what its width takes; no model runs. `--table-us` has it choose by other times than those that are charged.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.subjects import DEMO
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.graphs import Bucket
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS
from lowlat.kernels.reference.step.width_odds import MAX_WIDTH, NUM_RUNS, join_widths, learn_widths
from lowlat.kernels.reference.step.widths import choose_width
from lowlat.step.width_costs import StepCosts, cost_table

__all__ = ["Replay", "Text", "main", "read_texts", "tokens_per_us"]

Text = Sequence[int]  # of each position, how many drafts would be right
TEMPERATURES = (0.0, 0.7)
CONTEXT = 1024  # positions of a request, at most
WAITING = 64  # positions that wait for the draft model, at most
INTS: dict[str, Any] = {"dtype": torch.int32}


def main(arguments: Sequence[str] | None = None) -> None:
    """Record texts, or replay the choice over them."""
    options = _options(arguments)
    if options.what == "record":
        options.out.write_text(json.dumps(_record(options.limit, options.max_tokens), indent=1) + "\n")
        return
    for row in _replayed(read_texts(options.texts), options.step_us, options.table_us or options.step_us):
        print(json.dumps(row))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    record = parts.add_parser("record", help="decode the bundled pair's prompts and write how many drafts were right")
    record.add_argument("--limit", type=int, default=8, help="prompts a domain")
    record.add_argument("--max-tokens", type=int, default=192)
    record.add_argument("--out", type=Path, required=True)
    replay = parts.add_parser("replay", help="print a row for each domain and temperature")
    replay.add_argument("--texts", type=Path, required=True)
    times = replay.add_argument(
        "--step-us", required=True, help="of a step of width 0 to 7, and zero with the draft model"
    )
    table = replay.add_argument("--table-us", help="by which widths are chosen, if those are others")
    times.type = table.type = lambda text: [float(part) for part in text.split(",")]
    return parser.parse_args(arguments)


def read_texts(path: Path) -> dict[tuple[str, float], list[Text]]:
    """Recorded texts by domain and temperature."""
    rows = json.loads(path.read_text())["rows"]
    return {
        (row["domain"], row["temperature"]): [[int(each) for each in text] for text in row["texts"]] for row in rows
    }


def _record(limit: int, max_tokens: int) -> dict[str, Any]:
    """How many of seven drafts were right at each position of the bundled pair's texts."""
    config = SpeculativeConfig(method="eagle3", model=DEMO / "head", num_speculative_tokens=MAX_WIDTH, strict=True)
    rows = []
    with Runtime.load(DEMO / "target", config, device="cpu", max_batch=1, max_context=CONTEXT) as runtime:
        for domain, prompts in json.loads((DEMO / "prompts.json").read_text(encoding="utf-8")).items():
            for temperature in TEMPERATURES:
                params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
                texts = [_right_drafts(runtime, prompt, params) for prompt in prompts[:limit]]
                rows.append({"domain": domain, "temperature": temperature, "texts": texts})
    return {"pair": "bundled", "max_tokens": max_tokens, "rows": rows}


def _right_drafts(runtime: Runtime, prompt: str, params: SamplingParams) -> str:
    """A digit for each position: how many drafts are right there, of which none is kept."""
    found: list[int] = []

    def commit_one(op: Any, arguments: Mapping[str, torch.Tensor]) -> None:
        if op.kind == "truncate" and int(arguments["accepted_lens"][0]):
            found.append(int(arguments["accepted_lens"][0]) - 1)
            if int(arguments["commit_lens"][0]) > 1:
                arguments["commit_lens"][0], arguments["finish"][0] = 1, 0

    runtime.submit(prompt, params)
    runtime.executor.set_hook(commit_one)
    while runtime.busy:
        runtime.step()
    runtime.executor.set_hook(None)
    return "".join(map(str, found))


@dataclass
class Replay:
    """A slot whose widths the reference chooses, on texts that say where drafts are right.

    step_us   times of a step of each body: width 0 to 7, and zero with the draft model
    table_us  the times of them by which widths are chosen
    """

    step_us: Sequence[float]
    table_us: Sequence[float]

    def __post_init__(self) -> None:
        bucket = Bucket(1, MAX_WIDTH + 1, MAX_WIDTH, chooses=True)
        costs = {bucket: StepCosts(self.table_us, [0.0] * len(self.table_us))}
        table = cost_table((1, 2, MAX_WIDTH + 2), costs, CONTEXT, WAITING)
        ints = torch.zeros(1, NUM_INTS, dtype=torch.int64)
        ints[0, DRAFT_LIMIT] = MAX_WIDTH
        self._record: dict[str, Any] = {
            "extended": torch.zeros(1, **INTS),
            "width_odds": torch.zeros(2, NUM_RUNS, MAX_WIDTH, 2, **INTS),
            "width_runs": torch.zeros(1, **INTS),
            "width_expected": torch.zeros(1, MAX_WIDTH + 1, **INTS),
        }
        self._policy = {name: torch.zeros(1, **INTS) for name in ("width_last", "width_waited", "width_choice")}
        self._given = {"active": torch.ones(1, **INTS), "slot_ints": ints, "width_costs": table}
        self._given["width_bounds"] = torch.tensor([0, MAX_WIDTH], **INTS)
        self.steps = [0] * len(self.step_us)  # of each body

    def run(self, text: Text) -> tuple[int, float]:
        """Tokens and microseconds of a request; what is learnt stays for the next one."""
        place, spent, length = 0, 0.0, torch.tensor([100], **INTS)
        slots, live = torch.zeros(1, **INTS), torch.ones(1, dtype=torch.uint8)
        join_widths(slots, length, live, **self._record, width_waited=self._policy["width_waited"])
        while place < len(text):
            given = {**self._given, **{name: self._record[name] for name in ("extended", "width_expected")}}
            choose_width(lengths=length, **given, **self._policy, row=0, most_waiting=WAITING)
            body = int(self._policy["width_choice"])
            width = min(body if body <= MAX_WIDTH else 0, len(text) - place - 1)
            right = min(text[place], width)
            fate = (torch.tensor([value], **INTS) for value in (right + 1, width, int(width > 0), int(length) - 1))
            learn_widths(slots, *fate, **self._record, extends=body > 0)
            self.steps[body] += 1
            spent, place, length = spent + self.step_us[body], place + right + 1, length + right + 1
        return place, spent


def tokens_per_us(texts: Sequence[Text], step_us: float, width: int) -> float:
    """The speed over texts at one width."""
    tokens, steps = 0, 0
    for text in texts:
        place = 0
        while place < len(text):
            place, steps = place + 1 + min(text[place], width, len(text) - place - 1), steps + 1
        tokens += place
    return tokens / (steps * step_us)


def _replayed(
    texts: Mapping[tuple[str, float], Sequence[Text]], step_us: Sequence[float], table_us: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """A row for each domain and temperature, whose requests come one after the other."""
    replay = Replay(step_us, table_us)
    for (domain, temperature), own in texts.items():
        replay.steps = [0] * len(step_us)
        parts = [replay.run(text) for text in own]
        speed = sum(tokens for tokens, _ in parts) / sum(spent for _, spent in parts)
        fixed = [tokens_per_us(own, step_us[width], width) for width in range(MAX_WIDTH + 1)]
        yield {
            "domain": domain,
            "temperature": temperature,
            "best_width": fixed.index(max(fixed)),
            "against_best": round(speed / max(fixed) - 1, 4),
            "against_none": round(speed / fixed[0] - 1, 4),
            "share_of_steps_by_body": [round(count / sum(replay.steps), 3) for count in replay.steps],
        }


if __name__ == "__main__":
    main()
