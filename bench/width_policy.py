"""A replay of the choice of widths on recorded texts: the widths that it takes, and its speed beside one fixed width.

    python -m bench.width_policy record --limit 6 --max-tokens 192 --out tests/data/right_drafts.json
    python -m bench.width_policy record --model DIR --draft-model DIR --prompts FILE --chat --limit 4 \\
        --max-tokens 128 --out tests/data/right_drafts_chat.json
    python -m bench.width_policy replay --texts tests/data/right_drafts.json \\
        --step-us 137,185,230,272,330,372,396,418,159
    python -m bench.width_policy tables --texts tests/data/right_drafts.json tests/data/right_drafts_chat.json \\
        --out bench/results/cpu/confidence.json

A recorded text says of each position how many drafts made there would have been right, and how sure the draft model was
of each: it was decoded one token a step, at S = 7, by the reference executor. A replay runs the operations of the
reference over such texts and charges each step what its width takes; no model runs. `--table-us` has it choose by other
times than those that are charged. With `--ends 1,2,4` drafting halts behind these levels and goes on where the draft
model is sure enough; `--level-us` is what a draft takes that is made and not verified, `--decision-us` a halt. `tables`
writes the replays with and without halting at the times of four pairs, and how often drafts of each kind of confidence
were right.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.acceptance import given_prompt, read_prompts
from bench.conditions import stamps_of, write_json
from bench.subjects import DEMO
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.loading import DRAFT_ENDS
from lowlat.graphs import Bucket
from lowlat.kernels.reference.speculation.depths import NUM_SURE, choose_depth, learn_confidence
from lowlat.kernels.reference.speculation.draft_confidence import EDGES, NUM_KINDS, draft_confidence
from lowlat.kernels.reference.speculation.width_odds import MAX_WIDTH, NUM_RUNS, join_widths, learn_widths
from lowlat.kernels.reference.speculation.widths import choose_width
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS
from lowlat.step.width_costs import StepCosts, cost_table, depth_table

__all__ = ["TIMES", "Replay", "Text", "Times", "calibration", "main", "read_texts", "table", "tokens_per_us"]

TEMPERATURES = (0.0, 0.7)
CONTEXT = 1024  # positions of a request, at most
WAITING = 64  # positions that wait for the draft model, at most
INTS: dict[str, Any] = {"dtype": torch.int32}


@dataclass(frozen=True)
class Text:
    """What drafts would have been worth in a text.

    right  of each position, how many of the drafts would be right
    kinds  of each position, the kinds of confidence of all of them; of use where drafting halts
    """

    right: Sequence[int]
    kinds: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Times:
    """Times in us that steps take.

    step      of each body: width 0 to 7, drafted exactly, and zero with the draft model
    level     of a draft that is made and not verified
    decision  of a halt, which chooses whether drafting goes on
    """

    step: Sequence[float]
    level: float = 0.0
    decision: float = 0.0

    def of(self, body: int, drafted: int, halts: int) -> float:
        """Of a step of a body that makes so many drafts and halts so often."""
        return self.step[body] + (self.level * (drafted - body) + self.decision * halts if halts else 0.0)

    def measured(self, ends: Sequence[int]) -> list[float]:
        """Of each body as a measurement sees them, where drafting goes to the end of the width's block."""
        blocks = [next((end for end in (*ends, MAX_WIDTH) if end >= width), 0) for width in range(MAX_WIDTH + 2)]
        halts = [sum(end <= block for end in ends) if width else 0 for width, block in enumerate(blocks)]
        return [self.of(body, blocks[body], halts[body]) for body in range(MAX_WIDTH + 2)]


TIMES = {  # near an H200's: the bundled pair, the chat pair, Llama-8B with EAGLE3, gpt-oss-120b
    "bundled": Times((141, 183, 224, 246, 300, 329, 348, 366, 165), 24, 20),
    "chat": Times((494, 551, 644, 648, 760, 796, 812, 824, 530), 40, 20),
    "llama": Times((3700, 3990, 4260, 4480, 4860, 5150, 5400, 5580, 3760), 175, 20),
    "mixture": Times((1790, 2210, 2570, 2930, 3290, 3650, 4010, 4370, 1850), 150, 20),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Record texts, or replay the choice over them."""
    options = _options(arguments)
    if options.what == "record":
        options.out.write_text(json.dumps(_record(options), indent=1) + "\n")
        return
    if options.what == "tables":
        bundled, chat = (read_texts(path) for path in options.texts)
        write_json(options.out, _tables(bundled, chat, options.commit))
        return
    texts = read_texts(options.texts)
    times = Times(options.step_us, options.level_us, options.decision_us)
    known = replace(times, step=options.table_us) if options.table_us else times
    for row in _replayed(texts, Replay(times, known, options.ends)):
        print(json.dumps(row))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    record = parts.add_parser("record", help="decode a pair's prompts and write how many drafts were right")
    record.add_argument("--model", type=Path, default=DEMO / "target")
    record.add_argument("--draft-model", type=Path, default=DEMO / "head")
    record.add_argument("--prompts", type=Path, default=DEMO / "prompts.json", help="JSON: domain -> prompts")
    record.add_argument("--chat", action="store_true", help="wrap each prompt with the model's chat template")
    record.add_argument("--limit", type=int, default=6, help="prompts a domain")
    record.add_argument("--max-tokens", type=int, default=192)
    record.add_argument("--out", type=Path, required=True)
    tables = parts.add_parser("tables", help="write the replays with and without halting, by the times of four pairs")
    tables.add_argument("--texts", type=Path, nargs=2, required=True, help="of the bundled pair, and of the chat pair")
    tables.add_argument("--out", type=Path, required=True)
    tables.add_argument("--commit", default="", help="what is replayed, where there is no git checkout to ask")
    replay = parts.add_parser("replay", help="print a row for each domain and temperature")
    replay.add_argument("--texts", type=Path, required=True)
    times = replay.add_argument(
        "--step-us", required=True, help="of a step of width 0 to 7, and zero with the draft model"
    )
    table = replay.add_argument("--table-us", help="by which widths are chosen, if those are others")
    times.type = table.type = lambda text: [float(part) for part in text.split(",")]
    ends = replay.add_argument("--ends", default=(), help="levels behind which drafting halts, if it does: 1,2,4")
    ends.type = lambda text: tuple(int(part) for part in text.split(","))
    replay.add_argument("--level-us", type=float, default=0.0, help="of a draft that is made and not verified")
    replay.add_argument("--decision-us", type=float, default=0.0, help="of a halt")
    return parser.parse_args(arguments)


def read_texts(path: Path) -> dict[tuple[str, float], list[Text]]:
    """Recorded texts by domain and temperature."""
    return {
        (row["domain"], row["temperature"]): [
            Text([int(each) for each in right], _by_position(kinds))
            for right, kinds in zip(row["texts"], row["kinds"], strict=True)
        ]
        for row in json.loads(path.read_text())["rows"]
    }


def _by_position(kinds: str) -> list[list[int]]:
    starts = range(0, len(kinds), MAX_WIDTH)
    return [[int(kind) for kind in kinds[start : start + MAX_WIDTH]] for start in starts]


def _record(options: argparse.Namespace) -> dict[str, Any]:
    """How many of seven drafts were right at each position of a pair's texts, and how sure each was."""
    config = SpeculativeConfig(model=options.draft_model, num_speculative_tokens=MAX_WIDTH, strict=True)
    rows = []
    with Runtime.load(options.model, config, device="cpu", max_batch=1, max_context=CONTEXT) as runtime:
        for domain, prompts in read_prompts(options.prompts).items():
            given = [given_prompt(runtime, prompt, chat=options.chat) for prompt in prompts[: options.limit]]
            for temperature in TEMPERATURES:
                params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=1)
                texts, kinds = zip(*(_right_drafts(runtime, prompt, params) for prompt in given), strict=True)
                rows.append({"domain": domain, "temperature": temperature, "texts": texts, "kinds": kinds})
    own = options.model == DEMO / "target"
    conditions = {"prompts": options.limit, "max_tokens": options.max_tokens, "edges": EDGES}
    return {"pair": "bundled" if own else options.model.name, **conditions, "rows": rows}


def _right_drafts(runtime: Runtime, prompt: str | list[int], params: SamplingParams) -> tuple[str, str]:
    """How many drafts are right at each position that has some, and the kinds of all, as digits; none is kept."""
    found: list[str] = []
    kinds: list[str] = []
    drafted: list[str] = []

    def commit_one(op: Any, arguments: Mapping[str, torch.Tensor]) -> None:
        if op.kind == "draft_topk":
            logits, live = arguments["logits"], arguments.get("row_live")
            own = torch.zeros(logits.shape[0], 1, **INTS)
            draft_confidence(logits.float(), live, draft_kinds=own, end=0)
            rows = [index for index in range(logits.shape[0]) if live is None or bool(live.flatten()[index])]
            drafted.extend(str(int(own[index])) for index in rows[-1:])
        if op.kind == "truncate" and int(arguments["accepted_lens"][0]):
            if len(drafted) == MAX_WIDTH:
                found.append(str(int(arguments["accepted_lens"][0]) - 1))
                kinds.extend(drafted)
            drafted.clear()
            if int(arguments["commit_lens"][0]) > 1:
                arguments["commit_lens"][0], arguments["finish"][0] = 1, 0

    runtime.submit(prompt, params)
    runtime.executor.set_hook(commit_one)
    while runtime.busy:
        runtime.step()
    runtime.executor.set_hook(None)
    return "".join(found), "".join(kinds)


@dataclass
class Replay:
    """A slot whose widths the reference chooses, on texts that say where drafts are right.

    times  what steps take
    known  the times by which widths are chosen
    ends   levels behind which drafting halts; none: all drafts of a width are made
    """

    times: Times
    known: Times
    ends: Sequence[int] = ()

    def __post_init__(self) -> None:
        bucket = Bucket(1, MAX_WIDTH + 1, MAX_WIDTH, chooses=True)
        costs = {bucket: StepCosts(self.known.measured(self.ends), [0.0] * len(self.known.step))}
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
        self._chosen_by = {"slot_ints": ints, "width_costs": table}
        self._chosen_by["width_bounds"] = torch.tensor([0, MAX_WIDTH], **INTS)
        self._sure = torch.zeros(NUM_KINDS, MAX_WIDTH, NUM_SURE, **INTS)
        self._drafts = {
            "draft_kinds": torch.zeros(1, len(self.ends), **INTS),
            "draft_expected": torch.zeros(1, MAX_WIDTH + 1, **INTS),
            "draft_rates": torch.zeros(1, MAX_WIDTH, **INTS),
        }
        self._depth_costs = depth_table(table, self.ends)
        self._slots, self._active = torch.zeros(1, **INTS), torch.ones(1, **INTS)
        self.steps = [0] * len(self.times.step)  # of each body

    def run(self, text: Text) -> tuple[int, float]:
        """Tokens and microseconds of a request; what is learnt stays for the next one."""
        place, spent, length = 0, 0.0, torch.tensor([100], **INTS)
        self._join(length)
        while place < len(text.right):
            given = {**self._chosen_by, **{name: self._record[name] for name in ("extended", "width_expected")}}
            choose_width(active=self._active, lengths=length, **given, **self._policy, row=0, most_waiting=WAITING)
            body, drafted, halts = int(self._policy["width_choice"]), 0, 0
            if 1 <= body <= MAX_WIDTH:
                drafted, halts = self._draft(text.kinds[place], length) if self.ends else (body, 0)
                body = int(self._policy["width_choice"])
            width = min(body if body <= MAX_WIDTH else 0, len(text.right) - place - 1)
            right = min(text.right[place], width)
            self._learn(right, width, int(length) - 1, body > 0)
            self.steps[body] += 1
            spent += self.times.of(body, drafted, halts)
            place, length = place + right + 1, length + right + 1
        return place, spent

    def _join(self, length: torch.Tensor) -> None:
        live = torch.ones(1, dtype=torch.uint8)
        join_widths(self._slots, length, live, **self._record, width_waited=self._policy["width_waited"])

    def _draft(self, kinds: Sequence[int], length: torch.Tensor) -> tuple[int, int]:
        """Draft block after block while it pays: how many drafts are made, and how often drafting halts."""
        further = torch.zeros(1, **INTS)
        named = {"width_expected": self._record["width_expected"], "sure_odds": self._sure, "lengths": length}
        named |= {"depth_costs": self._depth_costs, **self._chosen_by, **self._drafts}
        named |= {"width_choice": self._policy["width_choice"], "draft_further": further}
        for end, depth in enumerate(self.ends):
            self._drafts["draft_kinds"][0, end] = kinds[depth - 1]
            choose_depth(self._slots, **named, row=0, end=end, depth=depth)
            if not int(further):
                return depth, end + 1
        return MAX_WIDTH, len(self.ends)

    def _learn(self, right: int, width: int, root: int, extends: bool) -> None:
        """Count how the drafts of a step fared, of which so many were right."""
        accepted, verified, source = (torch.tensor([value], **INTS) for value in (right + 1, width, int(width > 0)))
        before = torch.tensor([root], **INTS)
        learn_widths(self._slots, accepted, verified, source, before, **self._record, extends=extends)
        if self.ends:
            named = {name: self._drafts[name] for name in ("draft_kinds", "draft_rates")}
            named |= {"draft_ends": torch.tensor(self.ends, **INTS), "sure_odds": self._sure}
            learn_confidence(self._slots, accepted, verified, source, **named)


def tokens_per_us(texts: Sequence[Text], step_us: float, width: int) -> float:
    """The speed over texts at one width."""
    tokens, steps = 0, 0
    for text in texts:
        place = 0
        while place < len(text.right):
            place, steps = place + 1 + min(text.right[place], width, len(text.right) - place - 1), steps + 1
        tokens += place
    return tokens / (steps * step_us)


def _replayed(texts: Mapping[tuple[str, float], Sequence[Text]], replay: Replay) -> Iterator[dict[str, Any]]:
    """A row for each domain and temperature, whose requests come one after the other."""
    step_us = replay.times.step
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


def _tables(
    bundled: Mapping[tuple[str, float], Sequence[Text]], chat: Mapping[tuple[str, float], Sequence[Text]], commit: str
) -> dict[str, Any]:
    """The result of `tables`: times, replays with and without halting by them, and how sure drafts fared."""
    rows: list[dict[str, Any]] = []
    for name, times in TIMES.items():
        for halting in (False, True):
            replay = Replay(times, times, DRAFT_ENDS if halting else ())
            texts = chat if name == "chat" else bundled
            rows += [{"times": name, "halting": halting, **row} for row in _replayed(texts, replay)]
    return {
        "what": "replay",
        "simulated": "times of steps are given; acceptance and confidences are the bundled pair's, by the chat pair's "
        "times the chat pair's",
        **stamps_of(torch.device("cpu"), commit),
        "ends": DRAFT_ENDS,
        "times_us": {name: vars(times) for name, times in TIMES.items()},
        "confidence": calibration([text for own in bundled.values() for text in own]),
        "rows": rows,
    }


def calibration(texts: Sequence[Text]) -> list[dict[str, Any]]:
    """How many drafts of each kind of confidence were right, of those whose predecessors all were."""
    tried, right = [0] * NUM_KINDS, [0] * NUM_KINDS
    for text in texts:
        for place, count in enumerate(text.right):
            for position in range(min(count + 1, MAX_WIDTH, len(text.right) - place - 1)):
                kind = text.kinds[place][position]
                tried[kind] += 1
                right[kind] += position < count
    least = (0.0, *EDGES)
    return [
        {"at_least": least[kind], "drafts": tried[kind], "right": round(right[kind] / max(tried[kind], 1), 4)}
        for kind in range(NUM_KINDS)
    ]


def table(result: Mapping[str, Any]) -> str:
    """The rows of the README's table: against the best fixed width, without and with halting, by times."""
    lines = ["| times of | widths chosen without halting, mean (extremes) | halting by confidence |", "|---|---|---|"]
    for name in result["times_us"]:
        cells = []
        for halting in (False, True):
            own = [row for row in result["rows"] if (row["times"], row["halting"]) == (name, halting)]
            gains = [row["against_best"] for row in own]
            cells.append(f"{sum(gains) / len(gains):+.1%} ({min(gains):+.1%} to {max(gains):+.1%})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
