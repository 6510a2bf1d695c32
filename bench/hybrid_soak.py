"""Many steps of a hybrid with MTP at a long context, with imposed acceptance: recurrent states are rewound each time.

    python -m bench.hybrid_soak --out bench/results/h200/hybrid_soak.json
    python -m bench.hybrid_soak --geometry qwen3.5-27b --weights fp8 --steps 2000 --limit-s 400 --out /tmp/soak.json
    python -m bench.hybrid_soak --small --device cpu --steps 30 --sample 8 --context 64 --out /tmp/soak.json

Weights, keys, values and states are random. A pass begins with the same slots, states and drafts each time and must
give the same text; lengths, flags and logits are checked on the way. Then a sample of a pass is compared with S = 0:
its text, whose drafts acceptance imposed, is given to steps of one row, token by token. Wherever a step of the pass had
its last accepted row, the step of one row must have the same logits to the bit. Rows are written after each pass.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.lib.case import Case
from bench.lib.clock import own_stream
from bench.lib.conditions import stamps_of, write_json
from bench.lib.model import ROOM, Model, bucket_of
from bench.lib.step import Step
from bench.lib.weights import RandomParts
from bench.soak import soak
from lowlat.graphs import Role
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.checks import CheckedKinds

__all__ = ["HybridStep", "compare", "main"]

NOTHING = TreeTopology.chain(0)
LOGITS = "target.logits"


class HybridStep(Step):
    """A step whose reset brings back all that its slots keep but keys and values, and next to it one of one row."""

    def __init__(self, model: Model, case: Case, device: torch.device) -> None:
        every = CheckedKinds(masks=True, spans=True, lengths=True, falls_back=False)
        weights = RandomParts(model.plan(drafts=True), model.config, device)
        super().__init__(model.shapes(case, checks=every), case, weights, device, more=(NOTHING,))
        self.single = bucket_of(case, NOTHING)
        (state,) = self._states()
        names = [name for name, spec in state.specs.items() if spec.role is Role.STATE and not _is_of_blocks(spec)]
        self._kept = {name: state[name].clone() for name in names}

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The buffers that outlive a step."""
        return self._states()[0]

    def reset(self) -> None:
        """Bring the slots back to the case's context, with the states and drafts that they had first."""
        for name, tensor in self._kept.items():
            self.state[name].copy_(tensor)
        super().reset()

    def logits(self, *, single: bool) -> torch.Tensor:
        """Those of the step that ran last, [B, T, V], after it."""
        bucket = self.single if single else self.bucket
        return self.executor.scratch(bucket)[LOGITS].view(self.case.batch, bucket.rows, -1)

    def settle(self) -> None:
        """Wait for what was launched."""
        self.executor.synchronize()
        self._wait()


def _is_of_blocks(spec: Any) -> bool:
    return spec.paging is not None and not spec.pool.startswith(".")


@dataclass
class _Ends:
    """Of each step of a sample and each slot: the length after it, and the logits of its last accepted row."""

    lengths: list[list[int]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def compare(step: HybridStep, num_steps: int) -> dict[str, Any]:
    """Run a sample of a pass, and its text by steps of one row; gives rows compared, and the problems, at most ten."""
    ends, context, slots = _Ends(), step.case.context, range(step.case.batch)
    step.reset()
    before = [context] * step.case.batch
    for _ in range(num_steps):
        step.replay()
        step.settle()
        after, logits = step.state["lengths"].tolist(), step.logits(single=False)
        ends.lengths.append(after)
        ends.logits.append(torch.stack([logits[slot, after[slot] - before[slot] - 1] for slot in slots]).clone())
        before = after
    text = step.state["tokens"].clone()
    due: list[dict[int, torch.Tensor]] = [{} for _ in slots]
    for lengths, found in zip(ends.lengths, ends.logits, strict=True):
        for slot in slots:
            due[slot][lengths[slot]] = found[slot]
    problems, compared = list[str](), 0
    step.reset()
    for length in range(context + 1, max(before) + 1):
        step.replay(step.single)
        step.settle()
        logits = step.logits(single=True)
        for slot in slots:
            expected = due[slot].get(length)
            if expected is not None:
                compared += 1
                if not torch.equal(logits[slot, 0], expected):
                    count = int((logits[slot, 0] != expected).sum())
                    problems.append(f"slot {slot}: {count} logits before token {length - 1} are others at S = 0")
            step.state["tokens"][slot, length - 1] = text[slot, length - 1]
    return {"compared_steps": num_steps, "compared_rows": compared, "sample_problems": problems[:10]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak each format of weights, compare samples, and write rows as they come; returns 1 where one has problems."""
    options = _options(arguments)
    device, rows, start = torch.device(options.device), list[dict[str, Any]](), time.perf_counter()
    stamps = {"weights_are": "random", "sampled": options.sample, **stamps_of(device, options.commit)}
    case = Case(options.batch, options.context, options.drafts)
    with own_stream(device):
        for kind in options.weights:
            model = Model(options.geometry, kind, method="mtp", draft_vocab_size=options.draft_vocab)
            described = {"model": model.name, "weights": kind, **asdict(case), "method": "mtp"}
            described |= {"imposed_accept_length": case.accept_length, "asked_steps": options.steps}
            rows.append({**described, **stamps})

            def told(found: dict[str, Any]) -> None:
                rows[-1] |= found
                print(json.dumps(found), flush=True)
                write_json(options.out, rows)

            left = options.limit_s - (time.perf_counter() - start)
            if left <= 0:
                told({"skipped": f"{options.limit_s:g} s were over"})
                continue
            _soak(model, case, device, options, told, left)
    return int(any(row.get("problems") or row.get("sample_problems") for row in rows))


def _soak(
    model: Model,
    case: Case,
    device: torch.device,
    options: argparse.Namespace,
    told: Callable[[dict[str, Any]], None],
    left_s: float,
) -> None:
    step = HybridStep(model, case, device)
    try:
        soak(lambda: _Lent(step), options.steps, told, limit_s=left_s)
        told(compare(step, options.sample))
    finally:
        step.close()


class _Lent:
    """A step that stays open when a soak closes it."""

    def __init__(self, step: HybridStep) -> None:
        self.case, self.replay, self.reset, self.looks = step.case, step.replay, step.reset, step.looks

    def close(self) -> None:
        """Nothing: a sample follows."""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--geometry", default="qwen3.6-35b-a3b", help="a hybrid's name in geometries.toml")
    parser.add_argument("--weights", nargs="+", default=["bf16"], help="formats, one after the other")
    parser.add_argument("--draft-vocab", type=int, help="ids that are drafted; all by default")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--drafts", type=int, default=3, help="S")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sample", type=int, default=48, help="steps that are compared with S = 0")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no pass after so many seconds")
    parser.add_argument("--small", action="store_true", help="a tiny geometry, to try everything")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    options = parser.parse_args(arguments)
    if options.small:
        options.geometry = "tiny-hybrid"
    most = (ROOM - 2 * (options.drafts + 1)) // (options.drafts + 1)
    if not 1 <= options.sample <= most:
        parser.error(f"--sample {options.sample} must be from 1 to {most}, the steps of a pass")
    return options


if __name__ == "__main__":
    sys.exit(main())
