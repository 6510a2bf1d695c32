"""Schemas as clients write them: in each format of calls they are taken, held where strict, and read back.

`support/client_schemas.json` has what pydantic, OpenAI's package, LangChain, pydantic-ai, zod and MCP's servers make of
tools, and what others are known to send. Beside each schema stand arguments that fit it and others that do not, as
jsonschema says; `as` is the schema in plain words where it is of another dialect; `refused` has the words by which the
strict tool is refused, by the format: one whose values are JSON ("Hermes"), or another.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from call_formats import codec_of, read
from grammars import END, compiler_of
from jsonschema import Draft202012Validator

from lowlat.errors import GrammarError, RequestError
from lowlat.options.request import SamplingParams
from lowlat.text.schemas import plain_schema

FILE = Path(__file__).parents[1] / "support" / "client_schemas.json"
CASES: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
MARK = '<|"|>'

pytestmark = pytest.mark.usefixtures("untimed")


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def braced(value: Any) -> str:
    """A value as Gemma 4 writes it."""
    if isinstance(value, str):
        return f"{MARK}{value}{MARK}"
    if isinstance(value, list):
        return f"[{','.join(map(braced, value))}]"
    if not isinstance(value, dict):
        return json.dumps(value)
    pairs = (f"{key}:{braced(value[key])}" for key in sorted(value, key=str.lower))
    return f"{{{','.join(pairs)}}}"


def written(name: str, arguments: dict[str, Any]) -> str:
    """A call with these arguments as the format has it."""
    if name == "Hermes":
        return f'<tool_call>\n{{"name": "f", "arguments": {dumped(arguments)}}}\n</tool_call>'
    if name == "Gemma 4":
        return f"<|tool_call>call:f{braced(arguments)}<tool_call|>"
    line, tag = ("\n", "tool_call") if name == "Qwen3-Coder" else ("", "seed:tool_call")
    texts = {key: each if isinstance(each, str) else dumped(each) for key, each in arguments.items()}
    pairs = "".join(f"<parameter={key}>{line}{text}{line}</parameter>\n" for key, text in texts.items())
    return f"<{tag}>\n<function=f>\n{pairs}</function>\n</{tag}>"


@cache
def params_of(number: int, strict: bool) -> SamplingParams:
    function = {"name": "f", "parameters": CASES[number]["schema"], "strict": strict}
    return SamplingParams(tool_calls={"functions": [function], "required": True}, parse="tools")


def taken(name: str, number: int, strict: bool, arguments: dict[str, Any]) -> list[int] | None:
    """The tokens of a call, None where the grammar cuts it."""
    codec = codec_of(name)
    state = compiler_of(codec).open(params_of(number, strict), codec.encode("x"), (END,))
    assert state is not None
    tokens = codec.encode(written(name, arguments), add_special_tokens=False, allow_special=True)
    try:
        state.advance([*tokens, END])
    except GrammarError:
        return None
    return tokens


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(number, name, id=f"{name}-{case['from']}: {case['name']}")
        for number, case in enumerate(CASES)
        for name in ("Hermes", "Gemma 4", "Qwen3-Coder", "Seed")
        if name != "Seed" or number % 3 == 0  # it has Qwen3-Coder's grammar but for line breaks
    ],
)
def test_a_client_s_schema_is_held_and_read(number: int, name: str) -> None:
    case = CASES[number]
    schema, refused = case.get("as", case["schema"]), case.get("refused", {})
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    words = refused.get("Qwen3-Coder" if name == "Seed" else name)
    for strict in (True, False):
        if strict and words is not None:
            with pytest.raises(RequestError) as caught:
                taken(name, number, strict, {})
            assert str(caught.value) == f"tool_calls: f: {words}"
            continue
        for arguments in case["valid"]:
            assert validator.is_valid(arguments)
            tokens = taken(name, number, strict, arguments)
            assert tokens is not None, arguments
            ((function, text),) = read(codec_of(name), tokens, params_of(number, strict))[1]
            assert function == "f" and json.loads(text) == arguments
        for arguments in case["invalid"] if strict else []:
            assert not validator.is_valid(arguments)
            tokens = taken(name, number, strict, arguments)
            if tokens is not None:  # it may read as another value, which fits
                assert name != "Hermes", arguments
                ((_, text),) = read(codec_of(name), tokens, params_of(number, strict))[1]
                assert json.loads(text) != arguments and validator.is_valid(json.loads(text)), text


def test_most_schemas_of_clients_are_taken_and_held() -> None:
    kinds = {case["from"] for case in CASES}
    assert len(CASES) > 60 and {"by hand", "zod 4.6", "pydantic 2.14", "openai 1.109"} < kinds
    for name in ("Hermes", "Gemma 4", "Qwen3-Coder"):
        assert sum(name in case.get("refused", {}) for case in CASES) <= 8
    assert sum(bool(case["valid"] and case["invalid"]) for case in CASES) > 80


def test_plain_schemas_change_nothing_but_what_they_say_otherwise() -> None:
    for case in CASES:
        plain = plain_schema(case["schema"])
        assert plain_schema(plain) == plain
        validator = Draft202012Validator(plain, format_checker=Draft202012Validator.FORMAT_CHECKER)
        if not any(old in dumped(plain) for old in ('"items": [', '"exclusiveMinimum": true')):  # of older drafts
            assert all(map(validator.is_valid, case["valid"])), case["name"]


@pytest.mark.parametrize(
    ("schema", "plain"),
    [
        ({"type": "string", "nullable": True, "enum": ["a"]}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"$ref": "#/$defs/a", "nullable": True}, {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}),
        ({"properties": {"nullable": {"title": "x"}}, "nullable": True}, {"properties": {"nullable": {}}}),
        ({"const": "a", "nullable": True}, {"anyOf": [{"const": "a"}, {"type": "null"}]}),
        ({"type": "STRING", "enum": None, "x-a": 1, "const": None}, {"type": "string", "const": None}),
        ({"propertyNames": {"type": "string", "title": "T"}}, {}),
        (
            {"propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "null"}},
            {"properties": {"a": {"type": "null"}}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"minLength": 1}},
            {"patternProperties": {r"^[\s\S]{1,}$": {}}, "additionalProperties": False},
        ),
        ({"propertyNames": {"not": {}}}, {"propertyNames": {"not": {}}}),
        ({"type": "string", "format": "password"}, {"type": "string"}),
        ({"type": "integer", "format": "int64"}, {"type": "integer"}),
        ({"type": "string", "format": "cuid", "pattern": "^c"}, {"type": "string", "pattern": "^c"}),
        ({"type": "string", "format": "cuid"}, {"type": "string", "format": "cuid"}),
        ({"format": "uuid4"}, {"format": "uuid", "pattern": "^.{14}4"}),
        ({"uniqueItems": False, "required": True}, {}),
        ({"enum": [{"title": "a"}], "default": {"title": "a"}}, {"enum": [{"title": "a"}]}),
    ],
)
def test_a_dialect_becomes_plain(schema: dict[str, Any], plain: dict[str, Any]) -> None:
    assert plain_schema({"items": schema}) == {"items": plain}


def test_branches_with_a_constant_of_their_own_are_told_apart_by_it() -> None:
    def branch(value: str, *required: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"k": {"const": value}}, "required": [*required]}

    for rule, required, is_told in (
        ({}, ["k"], True),
        ({}, [], False),
        ({"discriminator": {"propertyName": "k"}}, [], True),
        ({"discriminator": {"propertyName": "other"}}, ["k"], False),
    ):
        branches = [branch("a", *required), {"$ref": "#/$defs/b"}]
        schema = {"items": {"oneOf": branches, **rule}, "$defs": {"b": branch("b", *required)}}
        plain = plain_schema(schema)
        assert ("anyOf" in plain["items"]) == is_told
        if is_told:
            assert plain["items"]["anyOf"][0]["required"] == plain["$defs"]["b"]["required"] == ["k"]
    same = {"oneOf": [branch("a", "k"), branch("a", "k")]}
    assert plain_schema(same) == same
