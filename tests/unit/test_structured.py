"""Requests with a grammar through a Runtime: documents of the schema, the same with drafts, refusals by name."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate
from text_tokenizers import byte_level, write_directory
from tiny_models import make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import CapacityError, RequestError
from lowlat.ipc.wire import Sampling
from lowlat.serving.engine import RuntimeEngine
from lowlat.text.grammar import compiler

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["circle", "square"]},
        "name": {"type": "string", "pattern": "^[a-z]{1,3}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "name", "size"],
    "additionalProperties": False,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": SCHEMA, "temperature": 1.0, "seed": 5},
    "greedy": {"json_schema": SCHEMA},
    "choice": {"choice": ["yes", "no"], "temperature": 2.0, "seed": 1},
    "regex": {"regex": "[0-9]{3}-[a-f]{2}", "temperature": 1.0, "seed": 2},
    "free": {"temperature": 1.0, "seed": 3, "max_tokens": 12},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("structured")
    size = byte_level().get_vocab_size() + 13
    make_target(directory, "llama", vocab_size=size, num_hidden_layers=2, eos_token_id=[1])
    return write_directory(directory, byte_level())


@pytest.fixture(scope="module", params=[None, SpeculativeConfig(method="ngram", num_speculative_tokens=3)])
def runtime(request: pytest.FixtureRequest, target: Path) -> Iterator[Runtime]:
    with Runtime.load(target, request.param, max_batch=4, max_context=128) as made:
        yield made


_SEEN: dict[str, Any] = {}  # what the first of the runtimes answered


def test_answers_are_of_their_grammars_and_the_same_with_drafts(runtime: Runtime) -> None:
    names = {}
    for name, options in REQUESTS.items():
        names[runtime.submit("a", SamplingParams(**{"max_tokens": 100, **options}))] = name
    texts = dict.fromkeys(REQUESTS, "")
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(REQUESTS, ())
    reasons: dict[str, str | None] = {}
    while runtime.busy:
        for output in runtime.step():
            name = names[output.request_id]
            texts[name] += output.text or ""
            tokens[name] += output.token_ids
            reasons[name] = output.finish_reason
    for name in ("schema", "greedy"):
        validate(json.loads(texts[name]), SCHEMA)
    assert texts["choice"] in ("yes", "no") and re.fullmatch("[0-9]{3}-[a-f]{2}", texts["regex"])
    assert {name: reason for name, reason in reasons.items() if name != "free"} == dict.fromkeys(
        ("schema", "greedy", "choice", "regex"), "stop"
    )
    assert _SEEN.setdefault("tokens", tokens) == tokens


def test_a_grammar_that_comes_to_its_limit_fails_its_request_alone(runtime: Runtime) -> None:
    options: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "stop": "aab"}  # "aa" may begin it: held back
    limited = runtime.submit("a", SamplingParams(regex="(a{1,1000}){1,1000}", **options))
    other = runtime.submit("a", SamplingParams(choice=("yes",), max_tokens=100))
    outputs = [output for _ in iter(lambda: runtime.busy, False) for output in runtime.step()]
    ends = {output.request_id: output for output in outputs}
    assert (ends[limited].finish_reason, ends[limited].error_code) == ("error", "grammar")
    assert "the grammar cannot go on: lexer error" in str(ends[limited].error)
    own = [output for output in outputs if output.request_id == limited]
    tokens = [token for output in own for token in output.token_ids]
    assert runtime.codec is not None
    assert "".join(output.text or "" for output in own) == runtime.codec.decode(tokens) != ""
    assert ends[other].finish_reason == "stop"


def test_a_one_of_that_is_not_held_is_told_in_our_words(runtime: Runtime) -> None:
    either = {"oneOf": [{"type": "string"}, {"maxLength": 1}]}
    with pytest.raises(RequestError, match=r"^json_schema: oneOf at #/items is not held, .*; use anyOf"):
        runtime.submit("a", SamplingParams(json_schema={"type": "array", "items": either}, max_tokens=9))


def test_a_server_compiles_before_it_submits(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RuntimeEngine(Runtime.load(target, max_batch=1, max_context=64))
    try:
        sampling = Sampling(max_tokens=8, choice=("yes", "no"))
        with pytest.raises(CapacityError, match="choice: its compiled grammar was let go of"):
            engine.submit("early", [5], sampling)
        held = engine.compile(sampling, 5.0)
        assert held and engine.compile(Sampling(), 0.0)
        engine.submit("one", [5], sampling)
        outputs = []
        while engine.busy:
            outputs += engine.step()
        assert "".join(output.text or "" for output in outputs) in ("yes", "no")
        monkeypatch.setattr(compiler, "MAX_GRAMMARS", 1)
        assert engine.compile(Sampling(regex="a"), None)
        engine.submit("held", [5], sampling)
        engine.cancel("held")
        engine.step()
        assert engine.compile(Sampling(regex="a"), None)
        del held
        with pytest.raises(CapacityError):
            engine.submit("two", [5], sampling)
        with pytest.raises(RequestError, match="uniqueItems"):
            engine.compile(Sampling(json_schema='{"uniqueItems": true}'), None)
    finally:
        engine.close()


def test_a_stop_token_that_is_text_stands_behind_no_document(runtime: Runtime) -> None:
    """It ends an answer where the grammar has it, and is nothing that may follow."""
    assert runtime.codec is not None
    (first, *_), (other,) = (runtime.codec.encode(text, add_special_tokens=False) for text in ("yes", "q"))
    for token, expected in ((other, "yes"), (first, runtime.codec.decode([first]))):
        params = SamplingParams(choice=("yes",), stop_token_ids=(token,), max_tokens=20)
        name = runtime.submit("a", params)
        outputs = [output for _ in iter(lambda: runtime.busy, False) for output in runtime.step()]
        assert {output.request_id for output in outputs} == {name} and outputs[-1].finish_reason == "stop"
        assert "".join(output.text or "" for output in outputs) == expected


def test_keys_of_a_schema_are_verified_many_at_a_time(target: Path) -> None:
    """Without a draft model, too: the same document in a fraction of the steps."""
    names = ("customer_identifier", "delivery_address", "is_business_customer")
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in names},
        "required": [*names],
        "additionalProperties": False,
    }
    sampling = SamplingParams(json_schema=schema, temperature=1.0, seed=5, max_tokens=100)
    found = []
    for rows in (0, 32):
        with Runtime.load(target, max_batch=1, max_context=128, forced_rows=rows) as made:
            name, tokens = made.submit([5, 6], sampling), []
            while made.busy:
                tokens += [token for output in made.step() for token in output.token_ids]
            found.append((tokens, made.metrics(name).num_steps))
    assert found[0][0] == found[1][0] and 4 * found[1][1] < found[0][1]
