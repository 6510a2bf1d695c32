"""Requests with grammars of every kind, at any width, in trees, next to others that come and are cancelled at any time:
each has the tokens that it has alone without drafts, and what is complete is a document of its grammar.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate
from recording import check_invariants, prompt_of
from stages import staged
from text_tokenizers import byte_level, write_directory
from tiny_dflash import dflash_draft_model
from tiny_models import copying_draft_model, make_target
from unit.test_lossless import MODES, OPTIONS, TREES

from lowlat import Runtime, SamplingParams, SpeculativeConfig

NUM_GRAMMARS = 24
DEPTH = 5
WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "adaptive": {"adaptive_width": True},
    "tree": {"tree": TREES["bushy"]},
    "dynamic tree": {"dynamic_tree_max_topk": 3, "max_draft_len": 3, "max_total_draft_tokens": 9},
    "text": {"method": "suffix"},
    "text next to": {"text_drafts": "suffix"},
    "peagle": {"method": "peagle"},
    "dflash": {"method": "dflash"},
    "dspark": {"method": "dspark"},
}
TREE_DEPTH = 3


def by_chance(seed: int) -> dict[str, Any]:
    """The option of a grammar: a few choices, an expression, rules that nest, or a schema of short documents."""
    chance = random.Random(seed)
    words = [chance.choice(["", "a", "no ", "the "]) + chance.choice(["fox", "for", "dog", 'q"\\', "日本", "é"])]
    words += [words[0] + " and more", *chance.sample(["x", "xx", "the quick brown fox", "the quick brown dog"], 2)]
    kind = ("choice", "regex", "grammar", "json_schema", "json_schema", "dead end")[seed % 6]
    if kind == "choice":
        return {"choice": words}
    if kind == "regex":
        parts = ["[^#]{8,20}", "[a-f]{2,9}", "(ab|abc|b)+", "the quick (brown )*fox"]  # the first: as good as free
        part = parts[seed // 6 % len(parts)]
        return {"regex": f"{part}(-|[0-9]{{1,3}}|yes|yesterday)"}
    if kind == "grammar":
        item = chance.choice(['"x"', "[a-c]+", '"the" | "then"'])
        return {"grammar": f'root ::= "(" root ")" root | item | ""\nitem ::= {item}'}
    if kind == "dead end":
        return {"grammar": 'start: ("b" | "c")+ ("a" A)?\nA: /x/ & /y/'}
    scalars: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "integer", "minimum": chance.randrange(-9, 9), "maximum": 99},
        {"type": "string", "maxLength": 5},
        {"enum": words},
        {"const": words[1]},
        {"type": "array", "items": {"enum": [1, "a", None]}, "maxItems": 3},
    ]
    names = chance.sample(["id", "a", "日", 'k"', "the name"], 3)
    properties = {name: chance.choice(scalars) for name in names}
    required = names[: chance.randrange(4)]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"json_schema": json.dumps(schema)}


def check_document(options: dict[str, Any], text: str) -> None:
    """It is one of the grammar's; of rules, where the end of the text is: what is drawn after them was forbidden."""
    if "choice" in options:
        assert text in options["choice"]
    elif "regex" in options:
        assert re.fullmatch(options["regex"], text)
    elif "json_schema" in options:
        validate(json.loads(text), json.loads(options["json_schema"]))
    elif text.startswith("("):
        assert text.count("(") == text.count(")")


class Played:
    """Runtimes of one target, by the way that they draft, and what each request has alone without drafts."""

    def __init__(self, directory: Path) -> None:
        size = byte_level().get_vocab_size() + 13
        target = make_target(
            directory / "target", "llama", gain=0.45, num_hidden_layers=2, vocab_size=size, eos_token_id=[1]
        )
        copying_draft_model(directory / "eagle3", target)
        copying_draft_model(directory / "peagle", target, mask_token=5)
        dflash_draft_model(directory / "dflash", target, copies=True)
        dflash_draft_model(directory / "dspark", target, layout="deepspec", copies=True, markov_rank=4)
        self.model, self.heads = write_directory(directory / "target", byte_level()), directory
        self.options = {**OPTIONS, "max_batch": 3, "max_queue": 8, "max_context": 80}
        self.plain = Runtime.load(self.model, **self.options)
        self.runtimes: dict[str, Runtime] = {}
        self.expected: dict[int, tuple[list[int], str]] = {}

    def runtime(self, way: str) -> Runtime:
        if way not in self.runtimes:
            given = {"method": "eagle3", "num_speculative_tokens": TREE_DEPTH if "tree" in way else DEPTH, **WAYS[way]}
            model = None if given["method"] == "suffix" else self.heads / given["method"]
            speculative = SpeculativeConfig(model=model, strict=True, **given)
            self.runtimes[way] = Runtime.load(self.model, speculative, **self.options)
        return self.runtimes[way]

    def close(self) -> None:
        for runtime in (self.plain, *self.runtimes.values()):
            runtime.close()

    def submit(self, runtime: Runtime, seed: int) -> str:
        """A request: every fifth is free, others have a grammar; modes of sampling take turns."""
        mode = list(MODES.values())[seed // 6 % len(MODES)]
        own = {} if seed % 5 == 4 else by_chance(seed)
        params = SamplingParams(seed=seed, max_tokens=26, **mode, **own)
        name: str = runtime.submit(prompt_of(3 + seed % 9, seed=seed), params)
        return name

    def alone(self, seed: int) -> tuple[list[int], str]:
        """Tokens and end of a request, alone, without drafts; what is complete is of its grammar."""
        if seed not in self.expected:
            self.submit(self.plain, seed)
            outputs = [output for _ in iter(lambda: self.plain.busy, False) for output in self.plain.step()]
            tokens, reason = [token for output in outputs for token in output.token_ids], outputs[-1].finish_reason
            if reason == "stop" and seed % 5 != 4:
                check_document(by_chance(seed), "".join(output.text or "" for output in outputs))
            self.expected[seed] = tokens, str(reason)
        return self.expected[seed]

    def play(self, way: str, moves: list[tuple[str, int]]) -> dict[str, Any]:
        """Make moves, then step to the end; returns the figures."""
        runtime = self.runtime(way)
        seeds: dict[str, int] = {}
        tokens: dict[str, list[int]] = defaultdict(list)
        ends: dict[str, str | None] = {}
        for move, number in [*moves, *[("step", 9)] * 200]:
            live = sorted(runtime._requests)
            if move == "submit" and runtime.scheduler.num_queued < 8:
                seeds[self.submit(runtime, number % NUM_GRAMMARS)] = number % NUM_GRAMMARS
            elif move == "cancel" and live:
                runtime.cancel(live[number % len(live)])
            elif move == "limit" and live:
                runtime.set_draft_limit(live[number % len(live)], number % (DEPTH + 1))
            elif move == "step":
                widths = (0, TREE_DEPTH) if "tree" in way else range(DEPTH + 1)
                for output in runtime.step(widths[number] if number < len(widths) else None):
                    tokens[output.request_id] += output.token_ids
                    ends[output.request_id] = output.finish_reason
        assert not runtime.busy and not runtime._steps.masks
        check_invariants(runtime)
        for name, seed in seeds.items():
            expected, reason = self.alone(seed)
            if ends[name] == "cancelled":
                assert tokens[name] == expected[: len(tokens[name])], (name, seed)
            else:
                assert (tokens[name], ends[name]) == (expected, reason), (name, seed, by_chance(seed))
        figures: dict[str, Any] = runtime.summary()
        return figures


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """Runtimes, each loaded when it is first wanted."""
    made = Played(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()


STEPS = st.tuples(st.just("step"), st.integers(0, 9))
OTHERS = st.tuples(st.sampled_from(("submit", "submit", "cancel", "limit")), st.integers(0, 119))
MOVES = st.lists(st.one_of(STEPS, STEPS, OTHERS), max_size=40)


@pytest.mark.second
@given(way=st.sampled_from(list(WAYS)), first=st.integers(0, NUM_GRAMMARS - 1), moves=MOVES)
@settings(max_examples=5)
def test_no_width_or_neighbour_changes_a_document(
    way: str, first: int, moves: list[tuple[str, int]], played: Played
) -> None:
    played.play(way, [("submit", first), *moves])


@pytest.mark.wide
@given(way=st.sampled_from(list(WAYS)), first=st.integers(0, NUM_GRAMMARS - 1), moves=MOVES)
@settings(max_examples=8)
def test_no_width_or_neighbour_changes_many_documents(
    way: str, first: int, moves: list[tuple[str, int]], played: Played
) -> None:
    played.play(way, [("submit", first), *moves])


@pytest.mark.parametrize("way", staged(WAYS, first=["text next to"], second=[]))
@pytest.mark.second
def test_every_kind_of_grammar_meets_every_way_of_drafting(way: str, played: Played) -> None:
    """Three at a time, with some cancelled; drafts are accepted, and so is what is forced."""
    chance = random.Random(4)
    moves = [("submit", seed) for seed in (1, *chance.sample(range(NUM_GRAMMARS), 12))]
    for place in range(0, 40, 4):
        moves.insert(place, ("step", chance.randrange(10)))
        moves.append((chance.choice(("cancel", "limit", "limit", "step")), chance.randrange(120)))
        moves += [("step", chance.randrange(10)) for _ in range(3)]
    figures = played.play(way, moves)
    own = figures["structured_output"]
    assert own["num_forced_accepted"] > 0
    assert way == "dspark" or own["num_accepted_tokens"] > own["num_forced_accepted"]  # one that drafts badly
