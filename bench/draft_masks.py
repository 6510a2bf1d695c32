"""Acceptance under grammars: the draft model's own choice as it is, masked by the grammar, and mended afterwards.

    python -m bench.draft_masks --out bench/results/cpu/draft_masks.json
    python -m bench.draft_masks --target DIR --head lowlat/demo/chat_head --chat \\
        --out bench/results/cpu/draft_masks.json

A step draws under the grammar's masks, and verifies what the grammar forces in place of drafts that begin otherwise.
The drafts themselves are the draft model's likeliest ids, whether the grammar allows them or not: `plain`. Here hooks
of the reference executor change them between the operations of a step.

masked   each draft is the likeliest id that the grammar allows behind the path, and the next is drafted behind that;
         on a card the device would wait for the host after acceptance and before each draft
mended   when all are drafted, what the grammar forces stands in place of drafts on the path, too

Tokens must not change. Rows of another target that the file holds stay.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.acceptance import DEMO, conditions_of, decode, runs_on, wrap, write_result
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.models.program import Op


def closed(**properties: Any) -> dict[str, Any]:
    """An object of just these properties, all required."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
SHORT = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 4}
ASKED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "city": ("Describe the city of Paris as JSON.", closed(name=TEXT, country=TEXT, population=WHOLE, sights=SHORT)),
    "recipe": (
        "Give a recipe for pancakes as JSON.",
        closed(title=TEXT, minutes=WHOLE, steps={"type": "array", "items": TEXT, "minItems": 2, "maxItems": 5}),
    ),
    "person": ("Who was Marie Curie? Answer as JSON.", closed(name=TEXT, born=WHOLE, known_for=TEXT)),
    "book": ("Name a famous novel as JSON.", closed(title=TEXT, author=TEXT, year=WHOLE, genres=SHORT)),
    "call": (
        "What is the weather in Oslo tomorrow? Call the function as JSON.",
        closed(name={"const": "get_weather"}, arguments=closed(city=TEXT, unit={"enum": ["celsius", "fahrenheit"]})),
    ),
    "list": (
        "List three animals with the number of their legs as JSON.",
        {"type": "array", "items": closed(animal=TEXT, legs=WHOLE), "minItems": 3, "maxItems": 3},
    ),
    "any": ("Describe a computer as a JSON object.", {"type": "object"}),
    "verdict": ("Is the sky blue? Answer as JSON.", closed(answer={"enum": ["yes", "no"]}, reason=TEXT)),
}


class Masking:
    """The hook that chooses each draft of a chain anew, among the ids that the only request's grammar allows there."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._words = -(-runtime.model_config.vocab_size // 32)
        self._path: list[int] = []
        self.num_changed = 0

    def __call__(self, op: Op, arguments: Mapping[str, torch.Tensor]) -> None:
        if op.kind == "commit":
            count = int(arguments["commit_lens"][0])
            self._path = arguments["accepted_tokens"][0, :count].tolist()
        elif op.kind == "draft_topk" and self._path:
            self._choose(arguments)

    def _choose(self, arguments: Mapping[str, torch.Tensor]) -> None:
        grammars = [session.grammar for session in self._runtime._sessions.values() if session.grammar is not None]
        drafted = arguments["out"]
        if grammars and int(drafted[0, 0]) >= 0:
            ids = arguments["draft_to_target"].long()
            tokens, parents = [0, *self._path], list(range(-1, len(self._path)))
            masks = np.zeros((len(tokens), self._words), np.int32)
            grammars[0].fill(tokens, parents, masks)
            bits = np.unpackbits(masks[-1].view(np.uint8), bitorder="little")
            allowed = torch.from_numpy(bits)[ids].bool()
            if allowed.any() and not bits[int(drafted[0, 0])]:
                logits = torch.where(allowed, arguments["logits"][0], -torch.inf)
                drafted[0, 0] = ids[int(logits.argmax())]
                self.num_changed += 1
        self._path.append(int(drafted[0, 0]))


class Mending:
    """The hook that puts what the grammar forces in place of drafts of a chain, wherever on their path, at the end."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._committed: list[int] = []
        self._level = 0
        self.num_changed = 0

    def __call__(self, op: Op, arguments: Mapping[str, torch.Tensor]) -> None:
        if op.kind == "commit":
            count = int(arguments["commit_lens"][0])
            self._committed, self._level = arguments["accepted_tokens"][0, :count].tolist(), 0
        elif op.kind == "assign_drafts":
            nodes = arguments["draft_nodes"]
            self._level += 1
            if self._level == nodes.shape[1] - 1 and self._committed:
                self._mend(nodes[0])

    def _mend(self, nodes: torch.Tensor) -> None:
        grammars = [session.grammar for session in self._runtime._sessions.values() if session.grammar is not None]
        drafts = nodes[1:].tolist()
        if not grammars or drafts[0] < 0:
            return
        matcher: Any = grammars[0]._matcher.deep_copy()
        if matcher.try_consume_tokens(self._committed) != len(self._committed):
            return
        made: list[int] = []
        while len(made) < len(drafts):
            forced = matcher.compute_ff_tokens()[: len(drafts) - len(made)]
            forced = forced[: matcher.validate_tokens(forced)]
            following = forced or drafts[len(made) : len(made) + 1]
            if matcher.is_stopped() or matcher.try_consume_tokens(following) != len(following):
                break
            made += following
        made += drafts[len(made) :]
        self.num_changed += made != drafts
        nodes[1:] = torch.tensor(made)


KINDS = {"plain": None, "masked": Masking, "mended": Mending}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write one JSON file."""
    options = _options(arguments)
    depth = options.num_speculative_tokens
    config = SpeculativeConfig(model=options.head, num_speculative_tokens=depth, strict=True)
    sizes: dict[str, Any] = {"max_batch": 1, "max_context": 512, "prefix_reuse": False}
    known = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    conditions, rows = known.get("conditions", {}), known.get("rows", [])
    rows = [row for row in rows if row["target"] != options.target.name]
    with Runtime.load(options.target, config, device="cpu", **sizes) as runtime:
        for name in [*ASKED, "all"]:
            asked = list(ASKED.values()) if name == "all" else [ASKED[name]]
            if name == "all":
                rows.append(_totals(rows, options.target.name))
            else:
                rows.append({"target": options.target.name, "schema": name, **_row(runtime, options, *asked[0])})
            print(json.dumps(rows[-1]), file=sys.stderr)
        conditions[options.target.name] = {
            **conditions_of(options),
            "runs_on": runs_on(runtime),
            "head": options.head.name,
            "num_speculative_tokens": depth,
            "temperature": options.temperature,
            "chat": options.chat,
        }
    write_result(options.out, {"conditions": conditions, "rows": rows})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--head", type=Path, default=DEMO / "head")
    parser.add_argument("--chat", action="store_true", help="wrap each prompt with the model's chat template")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def _row(runtime: Runtime, options: argparse.Namespace, prompt: str, schema: dict[str, Any]) -> dict[str, Any]:
    """One schema, at all temperatures: steps, tokens, drafts verified and accepted, of each kind."""
    given = wrap(runtime, prompt) if options.chat else prompt
    found: dict[str, dict[str, int]] = {}
    answers: dict[str, list[list[int]]] = {}
    for kind, make in KINDS.items():
        hook = None if make is None else make(runtime)
        runtime.executor.set_hook(hook)
        counts = dict.fromkeys(("steps", "tokens", "drafts", "accepted"), 0)
        for temperature in options.temperature:
            params = SamplingParams(
                max_tokens=options.max_tokens, temperature=temperature, seed=1, json_schema=json.dumps(schema)
            )
            answer, _, after = decode(runtime, given, params, options.num_speculative_tokens)
            answers.setdefault(kind, []).append(answer)
            counts["steps"] += after.num_steps
            counts["tokens"] += len(answer) - 1  # the first comes out of prefill
            if after.speculation is not None:
                counts["drafts"] += after.speculation.total_draft_tokens
                counts["accepted"] += after.speculation.total_accepted_tokens
        found[kind] = {**counts, "changed": 0 if hook is None else hook.num_changed}
    runtime.executor.set_hook(None)
    same = all(each == answers["plain"] for each in answers.values())
    return {"identical": same, **found, **_gains(found)}


def _totals(rows: list[dict[str, Any]], target: str) -> dict[str, Any]:
    own = [row for row in rows if row["target"] == target]
    found = {kind: {name: sum(row[kind][name] for row in own) for name in own[0][kind]} for kind in KINDS}
    same = all(row["identical"] for row in own)
    return {"target": target, "schema": "all", "identical": same, **found, **_gains(found)}


def _gains(found: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Tokens a step of plain drafts, and what the others add to them, as shares."""
    rates = {kind: counts["tokens"] / max(counts["steps"], 1) for kind, counts in found.items()}
    plain = rates.pop("plain")
    gains = {f"{kind}_gain": round(rate / plain - 1, 4) if plain else 0.0 for kind, rate in rates.items()}
    return {"plain_tokens_per_step": round(plain, 3), **gains}


if __name__ == "__main__":
    main()
