"""Documents by schema: what walks through masks make validates, what a schema forbids is never allowed."""

import json
from typing import Any

import pytest
from grammar_schemas import CASES, UNSUPPORTED, WRITTEN, schema_by_chance
from grammars import END, allowed, codec_with, dumped, mask_of, state_of, text_of, walk
from jsonschema import Draft202012Validator

from lowlat.errors import GrammarError, RequestError
from lowlat.text.grammar.exact import exact_text

CODEC = codec_with()
NUM_BY_CHANCE = 60


pytestmark = pytest.mark.usefixtures("untimed")


def takes(schema: object, value: object) -> bool:
    """Whether a document is allowed to its end."""
    return takes_text(schema, dumped(value))


def takes_text(schema: object, text: str) -> bool:
    """Whether a document is allowed to its end, as it is spelled."""
    state = state_of(CODEC, json_schema=json.dumps(schema))
    try:
        state.advance(CODEC.encode(text, add_special_tokens=False))
        return END in allowed(mask_of(state, CODEC)[0])
    except GrammarError:
        return False


def check_walks(schema: dict[str, Any], seeds: range) -> None:
    """Every document that comes to its end validates, and one does."""
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    ended = 0
    for seed in seeds:
        tokens = walk(state_of(CODEC, json_schema=schema), CODEC, seed)
        if tokens is not None:
            ended += 1
            text = text_of(CODEC, tokens)
            problems = list(validator.iter_errors(json.loads(text)))
            assert not problems, (text, problems)
    assert ended, schema


@pytest.mark.parametrize("name", WRITTEN)
def test_walks_make_documents_of_the_schema(name: str) -> None:
    check_walks(WRITTEN[name], range(2))


@pytest.mark.parametrize("seed", range(10))
def test_walks_make_documents_of_schemas_by_chance(seed: int) -> None:
    check_walks(schema_by_chance(seed), range(2))


@pytest.mark.second
@pytest.mark.parametrize("start", range(10, NUM_BY_CHANCE, 25))
def test_walks_make_documents_of_many_schemas_by_chance(start: int) -> None:
    for seed in range(start, min(start + 25, NUM_BY_CHANCE)):
        check_walks(schema_by_chance(seed), range(2))


@pytest.mark.filterwarnings("ignore:Possible (nested set|set):FutureWarning")  # which other languages have
@pytest.mark.parametrize("place", range(len(CASES)))
def test_documents_are_allowed_exactly_where_the_schema_says_so(place: int) -> None:
    schema, valid, invalid = CASES[place]
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for value in (*valid, *invalid):
        assert validator.is_valid(value) == (value in valid and not any(value is one for one in invalid)), value
        taken = takes(schema, value)
        assert taken == validator.is_valid(value), value


def test_formats_are_exact_wherever_they_stand() -> None:
    """Those that the validator does not check, too; and what only looks like one is none."""
    schema = {
        "properties": {"format": {"type": ["string", "null"], "format": "hostname", "allOf": [{"minLength": 3}]}},
        "additionalProperties": {"anyOf": [{"type": "string", "format": "date-time"}, {"const": {"format": "date"}}]},
    }
    for value in ({"format": "a.b"}, {"format": None}, {"x": "2024-02-29T22:59:59Z"}, {"x": {"format": "date"}}):
        assert takes(schema, value)
    for name in ("a", "xn--a", "b.xn--a", "a." * 127 + "a"):
        assert not takes(schema, {"format": name})
    for moment in ("2023-02-29T22:59:59Z", "2024-02-29T22:59:60Z", "2100-02-29T00:00:00Z"):
        assert not takes(schema, {"x": moment})
    deep = '{"items":' * 3000 + '{"format":"date"}' + "}" * 3000
    assert exact_text(deep) == deep and exact_text('{"format":') == '{"format":'


@pytest.mark.parametrize("schema", UNSUPPORTED, ids=lambda schema: json.dumps(schema)[:40])
def test_what_cannot_be_held_is_refused_and_never_ignored(schema: dict[str, Any] | bool) -> None:
    with pytest.raises(RequestError, match=r"json_schema: .{8}"):
        state_of(CODEC, json_schema=json.dumps(schema))


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null", " false"])
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"json_schema: (a schema is an object, true or false|nothing matches it)$"):
        state_of(CODEC, json_schema=text)


def test_no_spelling_of_a_key_goes_round_its_rule() -> None:
    """A parser reads an escape as the letter, and takes the last of two values."""
    integers = {"type": "object", "properties": {"a": {"type": "integer"}, 'b"': {"type": "integer"}}}
    for schema in (
        integers | {"additionalProperties": {"type": "string"}},
        {
            "type": "object",
            "patternProperties": {"^a|^b": {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        },
    ):
        assert takes(schema, {"a": 1, "c": "x"})
        for key in (r"\u0061", r"b\u0022", r"\u0062\""):
            assert not takes_text(schema, f'{{"{key}": "x"}}') and not takes_text(schema, f'{{"a": 1, "{key}": "x"}}')
    assert not takes_text({"type": "string"}, r'"\ud83d"')  # nor half a character


def test_keys_of_an_expression_that_is_left_out_may_be_any() -> None:
    keys = {
        "patternProperties": {"^(?!a)b": {"type": "null"}, "^z$": {"type": "integer"}},
        "additionalProperties": False,
    }
    schema = {"type": "object", **keys, "x-guidance": {"lenient": True}}
    assert takes(schema, {"q": "any"}) and takes(schema, {"z": 1}) and not takes(schema, {"z": "any"})


def test_a_lenient_schema_leaves_out_what_is_not_held() -> None:
    """As do tools that are not strict; those that are, are refused by the function's name."""
    wide = {"properties": {"id": {"const": 2**60 + 1}, "n": {"type": "integer", "maximum": 5}}, "minProperties": 2}
    schema = {"type": "object", **wide, "x-guidance": {"lenient": True}}
    assert takes(schema, {"id": 7}) and not takes(schema, {"n": 6})
    caller = codec_with("<tool_call>", "</tool_call>")
    calls: dict[str, Any] = {"functions": [{"name": "go", "parameters": {"type": "object", **wide}}]}
    assert not state_of(caller, tool_calls=calls).terminated
    calls["functions"][0]["strict"] = True
    with pytest.raises(RequestError, match="tool_calls: go: const: 1152921504606846977 has more digits"):
        state_of(caller, tool_calls=calls)


UNKNOWN = [
    r"^(?=.*a)b+$",
    r"(?!a)b",
    r"(?<=a)b",
    r"(?<!a)b",
    r"(a)\1",
    r"(?>a)b",
    r"\bfoo\b",
    r"\cA",
    "a^b",
    r"a$\n",
    "a{,3}",
]


@pytest.mark.parametrize("pattern", UNKNOWN)
def test_expressions_that_are_not_known_are_left_out_where_not_all_must_hold(pattern: str) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "string", "pattern": pattern}},
        "patternProperties": {pattern: {"type": "integer"}},
        "required": ["x"],
    }
    with pytest.raises(RequestError, match="json_schema: "):
        state_of(CODEC, json_schema=schema)
    state = state_of(CODEC, json_schema={**schema, "x-guidance": {"lenient": True}})
    state.advance(CODEC.encode('{"x": "c"}', add_special_tokens=False))
    caller = codec_with("<tool_call>", "</tool_call>")
    functions = [{"name": "f", "parameters": schema}]
    assert state.terminated or state_of(caller, tool_calls={"functions": functions}) is not None
    with pytest.raises(RequestError, match="tool_calls: "):
        state_of(caller, tool_calls={"functions": [{**functions[0], "strict": True}]})


@pytest.mark.parametrize("pattern", ["^[a-z]+$", r"(?:a|b)?\d{2,}", "^a$|^b$", r"[^\]a]\/", "(?i)a", r"\p{L}+"])
def test_expressions_that_are_known_hold_in_any_case(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    for options in ({}, {"x-guidance": {"lenient": True}}):
        state = state_of(CODEC, json_schema={**schema, **options})
        with pytest.raises(GrammarError):
            state.advance([*CODEC.encode('"!!', add_special_tokens=False)])
            state.advance([*CODEC.encode('"', add_special_tokens=False), 0])


OVERLAPPING: dict[str, Any] = {"oneOf": [{"type": "string"}, {"type": "string", "pattern": "a"}]}
DISTINCT: dict[str, Any] = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
NOT_HELD = "is not held, for its branches overlap or cannot be told apart; use anyOf, or give each branch a type"


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        (OVERLAPPING, "#"),
        ({"properties": {"a/b c": OVERLAPPING}}, "#/properties/a~1b c"),
        ({"properties": {"a": DISTINCT, "b": OVERLAPPING, "c": OVERLAPPING}}, "#/properties/b"),
        ({"items": {"anyOf": [{"oneOf": [DISTINCT, {"type": "null"}]}, OVERLAPPING, DISTINCT]}}, "#/items/anyOf/1"),
        ({"oneOf": [OVERLAPPING, {"type": "null"}]}, "#/oneOf/0"),
        ({"oneOf": [{"type": "object"}, {"properties": {"a": DISTINCT}}]}, "#"),
        (
            {"properties": {"a": {"$ref": "#/$defs/x"}, "oneOf": DISTINCT}, "$defs": {"y": DISTINCT, "x": OVERLAPPING}},
            "#/$defs/x",
        ),
        (
            {"properties": {"a": DISTINCT, "b": {**OVERLAPPING, "anyOf": [{"minLength": 1}]}, "c": DISTINCT}},
            "#/properties/b",
        ),
    ],
)
def test_a_one_of_that_is_not_held_is_named_by_its_place(schema: dict[str, Any], at: str) -> None:
    with pytest.raises(RequestError) as caught:
        state_of(CODEC, json_schema=schema)
    assert str(caught.value).startswith(f"json_schema: oneOf at {at} {NOT_HELD}")


def test_a_one_of_that_is_not_held_is_refused_also_where_its_place_is_not_known() -> None:
    schema = {"properties": {"a": OVERLAPPING, "b": DISTINCT, "c": {"$ref": "#/properties/b/oneOf/0"}}}
    with pytest.raises(RequestError, match=f"^json_schema: oneOf {NOT_HELD}"):
        state_of(CODEC, json_schema=schema)
    with pytest.raises(RequestError, match=f"^grammar: %json in line 2: oneOf {NOT_HELD}"):
        state_of(CODEC, grammar=f"start: a\na: %json {json.dumps(OVERLAPPING)}")


@pytest.mark.parametrize("tags", [False, True], ids=["JSON", "tags"])
def test_a_schema_of_calls_that_is_not_held_is_named_by_its_function(tags: bool) -> None:
    caller = codec_with("<tool_call>", "</tool_call>", templates="{# <function=  <parameter= #}" if tags else "")
    free = {"name": "free", "parameters": {"properties": {"a": OVERLAPPING}}}

    def refused(parameters: dict[str, Any], **more: Any) -> str:
        functions = [free, {"name": "go on", "strict": True, "parameters": {"type": "object", **parameters}}]
        with pytest.raises(RequestError) as caught:
            state_of(caller, tool_calls={"functions": functions, **more})
        return str(caught.value)

    lists = {"type": "array", "items": OVERLAPPING}
    parameters = {"properties": {"n": {"type": "array", "items": DISTINCT}, "a/": lists}}
    assert refused(parameters).startswith(f"tool_calls: go on: oneOf at #/properties/a~1/items {NOT_HELD}")
    defined = {"properties": {"n": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "array", "items": OVERLAPPING}}}
    assert refused(defined).startswith(f"tool_calls: go on: oneOf at #/$defs/x/items {NOT_HELD}")
    unique = {"properties": {"n": {"type": "array", "uniqueItems": True}}}
    assert refused(unique).startswith("tool_calls: go on: uniqueItems at #/properties/n is not held; leave it out")
    document = {"schema": {"properties": {"a": OVERLAPPING}}, "strict": True}
    said = refused({"properties": {}}, document=document)
    assert said.startswith(f"tool_calls.document: oneOf at #/properties/a {NOT_HELD}")
