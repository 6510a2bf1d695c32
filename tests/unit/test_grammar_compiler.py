"""Grammars are compiled where hostile ones harm nobody: bounded in time and memory, refused by name, cached."""

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from grammars import END, PADDING, allowed, codec_with, mask_of, state_of

from lowlat.engine.requests.checks import RequestChecks
from lowlat.errors import ConfigError, GrammarError, RequestError
from lowlat.options.request import GRAMMAR_OPTIONS, MAX_CHOICES, MAX_GRAMMAR_BYTES, SamplingParams
from lowlat.text.grammar import compiler as compiler_module
from lowlat.text.grammar import matching, trial, vocabulary
from lowlat.text.grammar.compiler import GrammarCompiler
from lowlat.text.grammar.trial import Trials

CODEC = codec_with()
AMBIGUOUS = "root ::= " + " | ".join('"a"* "b"* root' for _ in range(200)) + ' | "c"'


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _either(count: int) -> list[dict[str, Any]]:
    return [{"properties": {f"a{place}": {"const": place}}} for place in range(count)]


HOSTILE: dict[str, dict[str, Any]] = {
    "nesting": {"json_schema": _nested(400)},
    "alternatives of alternatives": {"json_schema": {"allOf": [{"anyOf": _either(5)} for _ in range(12)]}},
    "circles": {
        "json_schema": {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}, {}]}},
        }
    },
    "many properties": {"json_schema": {"type": "object", "properties": {f"p{n}": {} for n in range(8000)}}},
    "ambiguous rules": {"grammar": AMBIGUOUS},
    "rules without end": {"grammar": 'root ::= "x" root'},
    "no JSON": {"json_schema": '{"type": '},
    "no expression": {"regex": "(["},
    "no grammar": {"grammar": "root ::= nothing"},
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(CODEC, CODEC.vocab_size + PADDING, (END,), max_compile_s=0.4)
    made.warm()
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_or_broken_is_refused_by_name(compiler: GrammarCompiler, name: str) -> None:
    params = SamplingParams(**HOSTILE[name])
    with pytest.raises(RequestError, match=rf"^{params.grammar_option}: .{{8}}"):
        compiler.compile(params)
    assert compiler.compile(SamplingParams(regex=f"fine after {name}"))


def test_a_schema_that_nothing_matches_is_told_so(compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match=r"^json_schema: nothing matches it$"):
        compiler.compile(SamplingParams(json_schema={"$ref": "#"}))


@pytest.mark.parametrize(
    "options",
    [
        {"json_schema": {"enum": [f"value {number}" for number in range(15_000)]}},
        {"regex": "(a|aa|aaa|b|ab|ba)*" * 30},
        {"json_schema": {"$ref": "#/$defs/20", "$defs": {"0": {}} | {
            str(place): {"allOf": [{"$ref": f"#/$defs/{place - 1}"}] * 2} for place in range(1, 21)
        }}},
    ],
    ids=["enum", "regex", "references"],
)  # fmt: skip
def test_what_only_looks_hostile_is_served(compiler: GrammarCompiler, options: dict[str, Any]) -> None:
    assert compiler.compile(SamplingParams(**options))


def test_a_hostile_grammar_holds_up_no_other(compiler: GrammarCompiler) -> None:
    slow = GrammarCompiler(CODEC, CODEC.vocab_size, (END,))
    slow.warm()
    refused: list[str] = []

    def compile_hostile() -> None:
        try:
            slow.compile(SamplingParams(grammar=AMBIGUOUS))
        except RequestError as error:
            refused.append(str(error))

    hostile = threading.Thread(target=compile_hostile)
    try:
        slow.compile(SamplingParams(regex="ready"))
        hostile.start()
        assert slow.compile(SamplingParams(regex="another"))
        assert hostile.is_alive() and not slow.compile(SamplingParams(grammar=AMBIGUOUS), patience_s=0.02)
    finally:
        hostile.join()
        slow.close()
    assert refused and refused[0].startswith("grammar: ")


def test_to_find_the_place_of_a_refusal_takes_no_more_time_than_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller with patience for a part of that time is told that it is over, and one with all of it is refused."""
    limits: list[float] = []

    def too_long(self: Trials, schema: str, paths: Any, limit_s: float) -> None:
        limits.append(limit_s)
        raise trial.TooLong

    monkeypatch.setattr(Trials, "overlapping", too_long)
    either = {"oneOf": [{"type": "string"}, {"type": "string"}]}
    params = SamplingParams(json_schema={"properties": {"a": either, "b": either}})
    patient = GrammarCompiler(CODEC, CODEC.vocab_size, (END,), max_compile_s=40.0)
    try:
        assert patient.compile(params, patience_s=20.0) is None
        with pytest.raises(RequestError, match=r"^json_schema: oneOf is not held"):
            patient.compile(params)
    finally:
        patient.close()
    assert 0.0 < limits[0] < 20.0 < limits[1] < 40.0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MAX_MEMORY_BYTES", 24 << 20)
    bounded = GrammarCompiler(CODEC, CODEC.vocab_size, (END,), max_compile_s=5.0)
    words = [f"value {number}" for number in range(10_000)]
    try:
        with pytest.raises(RequestError, match="json_schema: it "):
            bounded.compile(SamplingParams(json_schema={"enum": words}))
    finally:
        bounded.close()


def test_the_process_is_started_again_and_ends(compiler: GrammarCompiler) -> None:
    assert compiler.compile(SamplingParams(regex="before"))
    process = compiler._trials._process  # type: ignore[union-attr]
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert compiler.compile(SamplingParams(regex="after"))
    again = compiler._trials._process  # type: ignore[union-attr]
    assert again is not None and again.pid != process.pid
    compiler.close()
    assert again.returncode is not None
    assert compiler.compile(SamplingParams(regex="after the end"))


def test_a_process_that_cannot_start_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    large: Any = SimpleNamespace(tokens=[bytes(1000)] * 4000, special_token_ids=[], end_id=0)
    trials = Trials(large)
    for _ in range(2):
        with pytest.raises(ConfigError, match="the process for grammars ended"):
            trials.start()
    assert trials._process is None


def test_grammars_are_cached_and_the_oldest_leave(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_GRAMMARS", 3)
    first, *others = (SamplingParams(regex=f"cached {number}") for number in range(4))
    assert not compiler.has(first) and compiler.compile(first) and compiler.has(first)
    with monkeypatch.context() as patched:
        patched.setattr(Trials, "run", None)
        assert compiler.compile(first) and compiler.open(first, [1], [END])
    for params in others:
        compiler.compile(params)
        assert compiler.has(params)
    assert not compiler.has(first) and compiler.has(SamplingParams())


def test_a_limit_that_comes_later_ends_the_request_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(CODEC, regex="(a{1,1000}){1,1000}")
    chance = random.Random(1)
    with pytest.raises(GrammarError, match="the grammar cannot go on: lexer error"):
        for _ in range(200):
            may_follow = [token for token in allowed(mask_of(state, CODEC)[0]) if token != END]
            state.advance([chance.choice(may_follow)])
    with pytest.raises(GrammarError, match="cannot go on"):
        state.advance([END])
    state = state_of(CODEC, regex="(a{1,1000}){1,1000}")  # copies of one matcher share what it may use
    state.advance(allowed(mask_of(state, CODEC)[0])[-1:])
    monkeypatch.setattr(matching, "MAX_MASK_S", 0.0)
    with pytest.raises(GrammarError, match=r"masks of 1 rows took .* at most 0 ms each"):
        mask_of(state_of(CODEC, regex="[a-z]*"), CODEC)


def test_a_collection_of_garbage_amid_masks_is_none_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as the process is large, whichever thread it comes upon; no request ends by it."""
    behind, slow = matching.MatchedGrammar._behind, 3 * matching.MAX_MASK_S

    def interrupted(self: Any, *arguments: Any) -> Any:
        until = time.thread_time() + slow
        while time.thread_time() < until:
            pass
        return behind(self, *arguments)

    monkeypatch.setattr(matching.MatchedGrammar, "_behind", interrupted)
    state = state_of(CODEC, regex="[a-z]*")
    draft = CODEC.encode("a", add_special_tokens=False)
    assert mask_of(state, CODEC, [0, *draft], (-1, 0)).any()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(json_object=True)
    with pytest.raises(RequestError, match=r"needs tokenizer\.json"):
        GrammarCompiler(None, 10, (END,)).compile(params)
    with pytest.raises(RequestError, match="needs eos_token_id"):
        GrammarCompiler(CODEC, CODEC.vocab_size, ()).compile(params)
    monkeypatch.setattr(vocabulary, "is_installed", lambda: False)
    with pytest.raises(RequestError, match=r"lowlat\[structured\]"):
        GrammarCompiler(CODEC, CODEC.vocab_size, (END,)).compile(params)
    checks = RequestChecks(64, 10, (END,), True, 4, 64, 16)
    with pytest.raises(RequestError, match="json_object: the steps of this runtime draw under no grammar's masks"):
        checks.check([1], SamplingParams(json_object=True, max_tokens=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": {}, "regex": "a"}, "json_schema and regex are given; a request has one of json_schema, "),
        ({"json_object": True, "choice": "a"}, "json_object and choice are given"),
        ({"regex": ""}, "regex must be text, and not empty"),
        ({"grammar": 3}, "grammar must be text, and not empty, got 3"),
        (
            {"json_schema": type("X", (), {"model_json_schema": 1})},
            r"json_schema must be .* its model_json",
        ),
        ({"choice": ["a", ""]}, "choice must be text"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"choice holds {MAX_CHOICES + 1} texts; at most {MAX_CHOICES}"),
        ({"regex": "é" * MAX_GRAMMAR_BYTES}, f"regex has {2 * MAX_GRAMMAR_BYTES} bytes; at most {MAX_GRAMMAR_BYTES}"),
        ({"json_schema": {"const": float("nan")}}, "json_schema must be of JSON values"),
        ({"json_schema": {"const": object()}}, "json_schema must be of JSON values"),
        ({"json_schema": True}, "json_schema must be a dict or JSON text"),
        ({"choice": ["a", "\ud800"]}, "choice must be Unicode text"),
        ({"json_object": 1}, "json_object must be true or false"),
    ],
)
def test_options_are_checked_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        SamplingParams(**options)


def test_options_in_several_forms_are_one() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert SamplingParams(json_schema=schema) == SamplingParams(json_schema=json.dumps(schema))
    forms: tuple[Any, ...] = ("a", ["a"], ("a",))
    assert {SamplingParams(choice=form).choice for form in forms} == {("a",)}
    assert SamplingParams().grammar_option is None and SamplingParams(json_schema={}).grammar_option == "json_schema"
    assert set(GRAMMAR_OPTIONS) <= set(SamplingParams.__dataclass_fields__)
