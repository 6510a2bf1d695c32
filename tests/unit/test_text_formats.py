"""The formats of families: found by chat templates, forced by grammars, and read back; tools are never dropped."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from call_formats import TALK, TEMPLATES, TOOLS_FIRST, codec_of, read
from grammars import END, compiler_of, walk
from jsonschema import Draft202012Validator
from text_tokenizers import byte_level, write_directory

from lowlat.errors import GrammarError, RequestError
from lowlat.options.request import SamplingParams
from lowlat.serving.http import __file__ as http_folder
from lowlat.text import AnswerStream, TextCodec
from lowlat.text.answers.formats import FORMATS, REASONING, format_of
from lowlat.text.grammar.braced import BracedRules
from lowlat.text.grammar.one_of import first_overlap
from lowlat.text.grammar.tool_calls import GRAMMARS

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "near": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "parameters": PARAMETERS, "strict": True}
TIME = {
    "name": "time",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    "strict": True,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "It rains.", "parameters": PARAMETERS}}
PROMPT = {"Harmony": "<|start|>assistant"}


def test_every_format_has_a_grammar_and_a_template_here() -> None:
    assert {kind.name for kind in FORMATS} == set(GRAMMARS) == set(TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_are_in_the_familys_format_and_are_read_back(name: str, parallel: bool) -> None:
    codec = codec_of(name)
    kind = format_of(codec)
    assert kind is not None and kind.name == name
    forced = {"functions": [WEATHER, TIME], "required": True, "parallel": parallel}
    params = SamplingParams(tool_calls=forced, parse="tools")
    prompt = codec.encode(PROMPT.get(name, "x"), allow_special=True)
    num_read = 0
    for seed in range(8):
        state = compiler_of(codec).open(params, prompt, (END,))
        assert state is not None
        tokens = None if num_read == 2 else walk(state, codec, seed)
        if tokens is None:
            continue
        content, calls = read(codec, tokens, params)
        assert calls and (len(calls) == 1 or parallel)
        assert not content or name == "Harmony"  # whose notes are content
        for function, arguments in calls:
            values = json.loads(arguments)
            assert function in ("weather", "time")
            if function == "weather":
                assert isinstance(values["city"], str) and isinstance(values["days"], int)
                assert values.keys() <= PARAMETERS["properties"].keys()  # type: ignore[attr-defined]
        for place in range(0, len(tokens), max(1, len(tokens) // 12)):  # cut by max_tokens anywhere
            cut, some = read(codec, tokens[:place], params)
            assert content.startswith(cut.rstrip("\ufffd")) and len(some) <= len(calls)
            for (own, text), (whole, entire) in zip(some, calls, strict=False):
                assert own == whole and entire.startswith(text.rstrip("\ufffd"))
        num_read += 1
    assert num_read


@pytest.mark.parametrize("name", TEMPLATES)
def test_free_answers_may_hold_calls(name: str) -> None:
    codec = codec_of(name)
    params = SamplingParams(tool_calls={"functions": [WEATHER]}, parse="tools")
    prompt = codec.encode(PROMPT.get(name, "x"), allow_special=True)
    text = "<|channel|>final<|message|>Hello" if name == "Harmony" else "Hello"
    state = compiler_of(codec).open(params, prompt, (END,))
    assert state is not None
    tokens = codec.encode(text, add_special_tokens=False, allow_special=True)
    state.advance([*tokens, END])
    assert state.terminated and read(codec, tokens, params) == ("Hello", [])


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"pattern": "(?=a)a+"}, r"x: pattern '\(\?=a\)a\+' of a string"),
        ({"format": "iri"}, "x: format 'iri' of a string"),
        ({"maxLength": 5000}, "x: maxLength 5000 of a string written without quotes; at most 4096"),
        ({"minLength": 257}, "x: minLength 257 of a string written without quotes; at most 256"),
    ],
)
def test_what_free_text_cannot_hold_is_refused_where_it_is_strict(own: dict[str, Any], words: str) -> None:
    function = {"name": "f", "parameters": {"properties": {"x": {"type": "string", **own}}}}
    codec = codec_of("Qwen3-Coder")
    with pytest.raises(RequestError, match=words):
        calls: dict[str, Any] = {"functions": [{**function, "strict": True}], "required": True}
        compiler_of(codec).open(SamplingParams(tool_calls=calls), [1], (END,))
    assert compiler_of(codec).open(SamplingParams(tool_calls={"functions": [function]}), [1], (END,)) is not None


def keyed(key: str, value: object, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": {key: value}, "required": [*required]}


TEXT: dict[str, Any] = {"type": "string"}
APART: list[list[Any]] = [
    [TEXT, {"type": "integer"}, {"type": "null"}, {"type": ["boolean", "array"]}],
    [{"const": "a"}, {"enum": ["b", "c", 1]}, {"const": True}, {"const": 0}],
    [keyed("k", {"const": "a"}, "k"), keyed("k", {"const": "b"})],
    [keyed("k", TEXT, "k"), {**keyed("m", TEXT, "m"), "additionalProperties": False}],
    [{"anyOf": [TEXT, {"type": "null"}]}, {"type": "object"}],
    [TEXT],
]
OVERLAPPING: list[list[Any]] = [
    [TEXT, TEXT],
    [TEXT, True],
    [TEXT, {}],
    [{"type": "integer"}, {"type": "number"}],
    [{"const": 1.0}, {"type": "integer"}],
    [{"enum": ["a", "b"]}, {"enum": ["c", "b"]}],
    [keyed("k", {"const": "a"}), keyed("k", {"const": "b"})],
    [{"properties": {"k": {"const": "a"}}, "required": ["k"]}, {"properties": {"k": {"const": "b"}}}],
    [{"anyOf": [TEXT, {"type": "null"}]}, {"type": "object"}, {"type": "null"}],
    [{"const": str(number)} for number in range(200)],  # so many are not compared
]


def open_braced(branches: list[Any], *, strict: bool = True) -> None:
    parameters = {"type": "object", "properties": {"a/b": {"type": "array", "items": {"oneOf": branches}}}}
    calls = {"functions": [{"name": "f", "parameters": parameters, "strict": strict}]}
    compiler_of(codec_of("Gemma 4")).open(SamplingParams(tool_calls=calls), [1], (END,))


@pytest.mark.parametrize("branches", APART)
def test_a_one_of_of_branches_apart_is_held_where_values_are_no_json(branches: list[Any]) -> None:
    open_braced(branches)


@pytest.mark.parametrize("branches", OVERLAPPING)
def test_a_one_of_of_branches_that_overlap_is_refused_where_values_are_no_json(branches: list[Any]) -> None:
    with pytest.raises(RequestError, match=r"^tool_calls: f: oneOf at #/properties/a~1b/items is not held, .*; use an"):
        open_braced(branches)
    open_braced(branches, strict=False)


@pytest.mark.parametrize("branches", [*APART, *OVERLAPPING[:-1]])
def test_branches_that_are_told_apart_here_have_no_value_in_common(branches: list[Any]) -> None:
    values = ["a", "b", "c", "", 0, 1, 1.0, 1.5, True, None, [], {}, {"k": "a"}, {"k": "b"}, {"k": 1}, {"m": "a"}]
    values += [{"k": "a", "m": "a"}, {"k": "b", "m": 1}]
    most = max(sum(Draft202012Validator(each).is_valid(value) for each in branches) for value in values)
    assert most == (1 if first_overlap({"oneOf": branches}) is None else 2)


def takes(name: str, schema: Any, value: str, *, strict: bool = True) -> bool:
    """Whether a call's argument may have a value, as the format writes it. Raises RequestError as the grammar does."""
    codec = codec_of(name)
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}
    if "$ref" in json.dumps(schema):
        parameters |= COLORS
    calls = {"functions": [{"name": "f", "parameters": parameters, "strict": strict}], "required": True}
    state = compiler_of(codec).open(SamplingParams(tool_calls=calls), codec.encode("x"), (END,))
    assert state is not None
    text = f"<|tool_call>call:f{{x:{value}}}<tool_call|>"
    if name == "Seed":
        text = "<seed:tool_call>\n<function=f>\n<parameter=x>{value}</parameter>\n</function>\n</seed:tool_call>"
        text = text.replace("{value}", value)
    elif name == "Qwen3-Coder":
        text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    try:
        state.advance([*codec.encode(text, add_special_tokens=False, allow_special=True), END])
    except GrammarError:
        return False
    return True


MARK = '<|"|>'
COLORS: dict[str, Any] = {
    "$defs": {"Color": {"enum": ["red", "a/b"], "title": "Color", "type": "string"}}
}  # as pydantic writes them
COLORS["$defs"] |= {"Point": {"type": "object", "properties": {"c": {"$ref": "#/$defs/Color"}}, "required": ["c"]}}
COLORS["$defs"] |= {"Alias": {"$ref": "#/$defs/Color"}, "Free": {"type": "string"}, "a/b": {"const": "slash"}}
COLORS["$defs"] |= {"Maybe": {"anyOf": [{"$ref": "#/$defs/Alias"}, {"type": "null"}]}}
COLORS["$defs"] |= {"One": {"$ref": "#/$defs/Other"}, "Other": {"$ref": "#/$defs/One"}}
COLORS["$defs"] |= {"Tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Tree"}}}}


def to(name: str, **more: Any) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}", **more}


NUMBERED = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}  # has no type
TYPED = {"type": "object", **NUMBERED}


@pytest.mark.parametrize(
    ("name", "schema", "fitting", "others"),
    [
        ("Gemma 4", NUMBERED, ["{a:1}"], [f"{{a:{MARK}s{MARK}}}", "{}", "5"]),
        ("Gemma 4", {"type": "integer", "enum": [1, "a"]}, ["1"], [f"{MARK}a{MARK}", "2"]),
        ("Qwen3-Coder", {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, ["a", "b", "null"], ["c", "", "1"]),
        ("Qwen3-Coder", {"type": ["string", "null"], "enum": ["a", None, 1]}, ["a", "null"], ["b", "1"]),
        (
            "Qwen3-Coder",
            {"oneOf": [{"const": "a"}, TYPED]},
            ["a", '{"a": 1}'],
            ["b", '{"a": "s"}', "{}"],
        ),
        ("Qwen3-Coder", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["a", "5"], []),
        ("Qwen3-Coder", {"anyOf": [{"type": "string"}, {"enum": ["a"]}]}, ["a", "b"], []),
        ("Qwen3-Coder", to("Color", description="of it"), ["red", "a/b"], ["blue", '"red"', ""]),
        ("Seed", to("Color"), ["red", "a/b"], ["blue", ""]),
        ("Qwen3-Coder", {"allOf": [to("Color")], "default": "red"}, ["red"], ["blue"]),
        ("Qwen3-Coder", to("Alias"), ["red"], ["blue"]),
        ("Qwen3-Coder", to("a~1b"), ["slash"], ["red"]),
        ("Qwen3-Coder", to("Free"), ["red", "blue"], []),
        ("Qwen3-Coder", {"anyOf": [to("Color"), {"type": "null"}], "default": None}, ["red", "null"], ["blue", "1"]),
        ("Seed", to("Maybe"), ["red", "null"], ["blue", "1"]),
        (
            "Qwen3-Coder",
            {"oneOf": [to("Color"), to("Point")]},
            ["red", '{"c": "red"}'],
            ["blue", '{"c": "blue"}', "{}"],
        ),
        ("Qwen3-Coder", {"type": "array", "items": to("Color")}, ['["red"]'], ['["blue"]', "red"]),
        (
            "Gemma 4",
            to("Color", description="of it"),
            [f"{MARK}red{MARK}", f"{MARK}a/b{MARK}"],
            [f"{MARK}blue{MARK}", "1"],
        ),
        ("Gemma 4", to("Point"), [f"{{c:{MARK}red{MARK}}}"], [f"{{c:{MARK}blue{MARK}}}", "{}", f"{MARK}red{MARK}"]),
        ("Gemma 4", to("Maybe"), [f"{MARK}red{MARK}", "null"], [f"{MARK}blue{MARK}", "1"]),
        ("Gemma 4", {"allOf": [to("Alias")], "default": "red"}, [f"{MARK}red{MARK}"], [f"{MARK}blue{MARK}"]),
        (
            "Gemma 4",
            {"type": "array", "items": to("Color")},
            [f"[{MARK}red{MARK}]", "[]"],
            [f"[{MARK}blue{MARK}]", "[1]"],
        ),
        (
            "Gemma 4",
            {"oneOf": [to("Color"), to("Point")]},
            [f"{MARK}red{MARK}", f"{{c:{MARK}red{MARK}}}"],
            [f"{MARK}blue{MARK}", "{}"],
        ),
        ("Qwen3-Coder", to("Tree"), ['{"next": {}}'], ['{"next": 1}', "text"]),
        ("Qwen3-Coder", {**TEXT, "minLength": 2, "maxLength": 4}, ["ab", "a\nbc"], ["", "a", "abcde"]),
        ("Qwen3-Coder", {**TEXT, "minLength": 2}, ["ab"], ["a\n</parameter>\nb"]),
        ("Seed", {**TEXT, "minLength": 2}, ["ab"], ["a", "\nb", "a\n", "a</parameter>\nb"]),
        ("Qwen3-Coder", {**TEXT, "pattern": "b/"}, ["b/", "ab/c"], ["abc", "a\n</parameter>\nb/"]),
        ("Qwen3-Coder", {"anyOf": [{**TEXT, "pattern": "^a"}, {"type": "null"}]}, ["ab", "null"], ["b", "nul", "None"]),
        ("Qwen3-Coder", {"anyOf": [TEXT, TYPED]}, ["a", '{"a": 1}', "1"], ['{"a": "s"}', "{}", " [", "{"]),
        ("Seed", {"anyOf": [TEXT, TYPED, {"type": "boolean"}]}, ["a", "true", '{"a": 1}'], ["{}", " true"]),
        ("Qwen3-Coder", {**TEXT, "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-04-31", "today", ""]),
        ("Qwen3-Coder", {"type": ["array", "string"], "items": TEXT}, ["a", '["a"]'], ["[1]"]),
        (
            "Gemma 4",
            {**TEXT, "pattern": "b", "maxLength": 3},
            [f"{MARK}abc{MARK}"],
            [f"{MARK}a{MARK}", f"{MARK}abcd{MARK}"],
        ),
        ("Gemma 4", {"type": "integer", "minimum": 2, "maximum": 11}, ["2", "11"], ["1", "12", "2.5"]),
        ("Gemma 4", {"type": "array", "prefixItems": [TYPED, TEXT], "minItems": 1}, ["[{a:1}]"], ["[]", "[1]"]),
        (
            "Gemma 4",
            {"type": "array", "items": [{"type": "integer"}], "additionalItems": TEXT, "maxItems": 2},
            ["[]", "[1]", f"[1,{MARK}a{MARK}]"],
            [f"[{MARK}a{MARK}]", "[1,2]", f"[1,{MARK}a{MARK},{MARK}a{MARK}]"],
        ),
        (
            "Gemma 4",
            {"type": "object", "properties": {"a b": TEXT}, "additionalProperties": {"type": "integer"}},
            ["{}", "{c:1}", f"{{a b:{MARK}s{MARK},c:1,d:2}}"],
            [f"{{c:{MARK}s{MARK}}}", "{a b:1}", f"{{a b:{MARK}s{MARK},a b:1}}"],
        ),
        (
            "Gemma 4",
            {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
            ["{}", "{x:null,xy:null}"],
            ["{y:null}", "{x:1}"],
        ),
        ("Gemma 4", {"const": {"b": [1, "c"], "a": None}}, [f"{{a:null,b:[1,{MARK}c{MARK}]}}"], ["{a:null}", "{}"]),
        ("Gemma 4", {**to("Point"), "required": ["d"]}, [f"{{c:{MARK}red{MARK},d:1}}"], [f"{{c:{MARK}red{MARK}}}"]),
        ("Gemma 4", {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 2}]}, ["5", "2"], ["3", "null"]),
    ],
)
def test_a_strict_argument_is_one_of_its_schema_s(
    name: str, schema: dict[str, Any], fitting: list[str], others: list[str]
) -> None:
    assert [value for value in (*fitting, *others) if takes(name, schema, value)] == fitting
    assert all(takes(name, schema, value, strict=False) for value in fitting)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["Gemma 4", "Qwen3-Coder", "Seed", "Hermes"])
def test_a_schema_of_false_takes_no_value(name: str, strict: bool) -> None:
    """As in JSON: its property does not come, a choice has the other branches, and a list of it is empty."""

    def words_of(**arguments: Any) -> str:
        if name == "Gemma 4":
            written = {key: f"{MARK}{each}{MARK}" if isinstance(each, str) else each for key, each in arguments.items()}
            pairs = ",".join(f"{key}:{each}" for key, each in written.items())
            return f"<|tool_call>call:f{{{pairs}}}<tool_call|>"
        if name == "Hermes":
            return f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        line, tag = ("\n", "tool_call") if name == "Qwen3-Coder" else ("", "seed:tool_call")
        pairs = "".join(f"<parameter={key}>{line}{each}{line}</parameter>\n" for key, each in arguments.items())
        return f"<{tag}>\n<function=f>\n{pairs}</function>\n</{tag}>"

    def fits(properties: dict[str, Any], *required: str, **arguments: Any) -> bool:
        codec = codec_of(name)
        parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        calls = {"functions": [{"name": "f", "parameters": parameters, "strict": strict}], "required": True}
        state = compiler_of(codec).open(SamplingParams(tool_calls=calls), codec.encode("x"), (END,))
        assert state is not None
        try:
            state.advance([*codec.encode(words_of(**arguments), add_special_tokens=False, allow_special=True), END])
        except GrammarError:
            return False
        return True

    barred = {"a": {"type": "integer"}, "x": False}
    assert fits(barred, "a", a=1) and not fits(barred, "a", a=1, x=1) and not fits(barred, "a", a=1, x="s")
    assert fits({"x": False}) and not fits({"x": False}, x=1)
    assert fits({"x": {"anyOf": [False, {"oneOf": [False]}]}}) and not fits({"x": {"anyOf": [False]}}, x=1)
    either = {"x": {"anyOf": [False, {"type": "integer"}]}}
    assert fits(either, "x", x=1) and not fits(either, "x", x="s")
    empty = {"x": {"type": "array", "items": False}}
    assert fits(empty, "x", x=[]) and not fits(empty, "x", x=[1])
    for schema in (False, {"anyOf": [False]}, {"type": "array", "items": False, "minItems": 1}):
        with pytest.raises(RequestError, match=r"^tool_calls: f: .*(unsatisfiable|takes no value)"):
            fits({"x": schema}, "x", x=1)


@pytest.mark.parametrize(
    ("name", "schema", "words"),
    [
        ("Gemma 4", {"items": {"type": "integer"}}, "items without a type; give one"),
        ("Gemma 4", {"type": "integer", "enum": ["a"]}, "enum, or const, has no value of the schema's type"),
        ("Gemma 4", {"anyOf": []}, "anyOf is empty"),
        ("Gemma 4", to("One"), "$ref '#/$defs/One' leads back to itself"),
        ("Gemma 4", {"type": "array", "items": {"not": {}}}, "not at #/properties/x/items is not held; leave it out"),
        ("Gemma 4", to("None"), "$ref '#/$defs/None' leads to nothing in the schema"),
        ("Gemma 4", {"oneOf": [to("Color"), to("Alias")]}, "oneOf at #/properties/x is not held"),
        ("Qwen3-Coder", {"oneOf": [TEXT, TEXT]}, "oneOf at #/properties/x is not held"),
        ("Qwen3-Coder", {"anyOf": [{**TEXT, "contains": "a"}, {"type": "null"}]}, "x: contains of a string"),
        ("Qwen3-Coder", {"anyOf": [TEXT, {"type": "integer", "minimum": 5}]}, "x: minimum of a string"),
        ("Qwen3-Coder", {"anyOf": [TEXT, {"enum": [1]}]}, "x: enum of a string"),
        ("Qwen3-Coder", to("One"), "x: $ref '#/$defs/One' leads back to itself"),
        ("Seed", {"anyOf": [{"type": "null"}, to("None")]}, "x: $ref '#/$defs/None' leads to nothing in the schema"),
        ("Qwen3-Coder", to("Color", pattern="^r"), "x: pattern of a string"),
        ("Qwen3-Coder", {"oneOf": [to("Color"), to("Alias")]}, "oneOf at #/properties/x is not held"),
        ("Qwen3-Coder", {"enum": ["a", "1", 1]}, "x: the string '1', which reads as a value of another type"),
    ],
)
def test_an_argument_that_is_not_held_is_refused_where_it_is_strict(
    name: str, schema: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=f"^tool_calls: f: {re.escape(words)}"):
        takes(name, schema, "x")


@pytest.mark.parametrize("system", [True, False])
def test_a_template_without_tools_gets_a_prompt(system: bool) -> None:
    roles = "" if system else "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    roles += "{% if m.role == 'tool' or m.content is not string %}{{ raise_exception('no tools') }}{% endif %}"
    codec = TextCodec(byte_level(), templates={"default": TALK.replace("[{{", roles + "[{{", 1)})
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    messages: list[dict[str, Any]] = [
        *([{"role": "system", "content": "Be kind."}] if system else []),
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "yes", "tool_call_id": "c"},
        {"role": "tool", "content": "no", "tool_call_id": "c"},
    ]
    text = codec.apply_chat_template(messages, tools=[TOOL])
    parts = re.split(r"\[(system|user|assistant)\]", text)[1:]
    prompt = parts[1]
    assert json.dumps(TOOL) in prompt and prompt.startswith("Be kind." if system else "You can call")
    assert parts[0] == ("system" if system else "user") and text.count("It rains.") == 1
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    assert f"[assistant]{written}\n{written}[user]<tool_response>\nyes\n</tool_response>\n<tool_response>\nno" in text
    assert "[user]Rain?" in text or not system
    params = SamplingParams(parse="tools", tools=[TOOL])
    answer = codec.encode(f"Let me see. {written}", add_special_tokens=False)
    assert read(codec, answer, params) == ("Let me see.", [("weather", '{"city": "Ulm"}')])
    codec.close()


def test_a_format_that_is_not_known_is_refused_by_name() -> None:
    codec = TextCodec(byte_level(), templates={"default": TOOLS_FIRST + "{# <function_calls> #}" + TALK})
    assert format_of(codec) is None
    with pytest.raises(RequestError, match="tool calls in a format that is not known"):
        AnswerStream(codec, "tools")
    AnswerStream(codec, "reasoning")
    codec.close()


def test_ids_are_short_for_mistrals_templates() -> None:
    check = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }},{% endfor %}"
    check += "{{ m.tool_call_id }};{% endfor %}"
    codec = TextCodec(byte_level(), templates={"default": TOOLS_FIRST + check + "{# [TOOL_CALLS] #}"})
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"id": "call_0123456789", **call}, {"id": "abcdefgh9", **call}]},
        {"role": "tool", "content": "1", "tool_call_id": "call_0123456789"},
    ]
    first, second = codec.apply_chat_template(messages).split(";")[:2]
    short, kept, _ = first.split(",")
    assert re.fullmatch("[a-zA-Z0-9]{9}", short) and (kept, second) == ("abcdefgh9", short)
    tokens = codec.encode('[TOOL_CALLS][{"name": "f", "arguments": {}}]', add_special_tokens=False)
    stream = AnswerStream(codec, "tools")
    (begin,) = [part for part in stream.push(tokens).tool_calls if part.id]
    assert re.fullmatch("[a-zA-Z0-9]{9}", begin.id or "")
    codec.close()


# How published templates write an assistant's content: by concatenation, by filters, by tests of several kinds.
CONTENTS = {
    "Qwen3": "{% set c = m.content %}{% if '</think>' in m.content %}x{% endif %}{{ '[' + c + ']' }}",
    "QwQ": "{{ '[' + (m.content.split('</think>')|last).lstrip('\\n') + ']' }}",
    "R1 distills": "{% if m['content'] is none %}[{% else %}{{ '[' + m['content'] }}{% endif %}]",
    "Devstral": "{% if m.content is not none %}{{ '[' + m.content + ']' }}{% else %}[]{% endif %}",
    "Phi-3.5": "{{ '[' + m['content'] + ']' }}",
    "Granite 3.3": "{{ '[' + m['content']|trim + ']' }}",
    "LFM2": "{% set c = m['content'] %}{% if c is not string %}{% set c = c|tojson %}{% endif %}{{ '[' + c + ']' }}",
    "SmolLM2": "{{ '[' + m['content'] + ']' }}",
}


@pytest.mark.parametrize("family", CONTENTS)
def test_an_assistant_may_have_no_content(family: str) -> None:
    codec = TextCodec(
        byte_level(), templates={"default": f"{{% for m in messages %}}{CONTENTS[family]}{{% endfor %}}{{{{ tools }}}}"}
    )
    contents: tuple[dict[str, Any], ...] = ({"content": None}, {"content": ""}, {})
    for content in contents:
        message = {"role": "assistant", **content, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
        assert codec.apply_chat_template([message], tools=[]) == "[][]", content
    codec.close()


def test_content_thinking_and_calls_come_together_as_gpt_oss_answers() -> None:
    template = (
        "{% for m in messages %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "<{{ m.thinking or m.content }}>{% endfor %}{{ tools }}"
    )
    codec = TextCodec(byte_level(), templates={"default": template})
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    message = {"role": "assistant", "content": "I look.", "thinking": "Hm.", "tool_calls": [call]}
    assert codec.apply_chat_template([message], tools=[]).startswith("<Hm.\n\nI look.>")
    with pytest.raises(RequestError, match="both"):
        codec.apply_chat_template([{"role": "user", "content": "a", "thinking": "b"}])
    codec.close()


def test_none_is_dropped_as_transformers_does() -> None:
    codec = TextCodec(byte_level(), templates={"default": "{{ messages[0].content is defined }}{{ tools }}"})
    assert codec.apply_chat_template([{"role": "assistant", "content": None}]).startswith("False")
    with pytest.raises(RequestError):
        TextCodec(byte_level(), templates={"default": "{{ 'a' + messages[0].content }}"}).apply_chat_template(
            [{"role": "user", "content": None}]
        )
    codec.close()


@pytest.mark.parametrize("default", ["file", "config"])
def test_additional_templates_are_read_and_chosen(tmp_path: Path, default: str) -> None:
    config = {"chat_template": "plain"} if default == "config" else {"chat_template": [{"name": "x", "template": "?"}]}
    write_directory(tmp_path, byte_level(), **config)
    if default == "file":
        (tmp_path / "chat_template.jinja").write_text("plain")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("{{ tools[0].function.name }}")
    (folder / "rag.jinja").write_text("{{ documents|length }}")
    codec = TextCodec.load(tmp_path)
    assert codec is not None and codec.takes_tools
    assert codec.apply_chat_template([]) == "plain"
    assert codec.apply_chat_template([], tools=[TOOL]) == "weather"
    assert codec.apply_chat_template([], documents=[1, 2], chat_template="rag") == "2"
    with pytest.raises(RequestError, match="chat_template 'x' is none of the model's: default, rag, tool_use"):
        codec.apply_chat_template([], chat_template="x")
    codec.close()


def test_the_page_s_table_has_every_format() -> None:
    text = (Path(http_folder).parent / "TOOLS.md").read_text(encoding="utf-8")
    rows = [[(kind.name, kind.families, kind.example) for kind in FORMATS], REASONING]
    calls, thoughts = (
        ["| {} | {} | {} |".format(*(cell.replace("|", "\\|") for cell in row)) for row in part] for part in rows
    )
    assert "\n".join(calls) in text and "\n".join(thoughts) in text


ANSWERS = [
    "<|channel|>analysis<|message|>We need weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look. "
    '<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}'
    "<|call|>",
    ' to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Ulm"}<|call|>',
    "<|channel|>analysis to=functions.weather code<|message|>{}<|call|><|start|>assistant to=functions.time"
    "<|channel|>commentary<|constrain|>json<|message|>{}<|call|>",
    "<|channel|>analysis<|message|>2 + 2 = 4.<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"
    '{"sum": 4}<|return|>',
]


@pytest.mark.parametrize("text", ANSWERS)
def test_nothing_leaks_from_a_harmony_answer_cut_anywhere(text: str) -> None:
    codec = codec_of("Harmony")
    tokens = codec.encode(text, add_special_tokens=False, allow_special=True)
    for parse in ("tools", "reasoning"):
        params = SamplingParams(parse=parse)
        content, calls = read(codec, tokens, params)
        assert content in ("I look. ", "", '{"sum": 4}') and (bool(calls) == ("functions" in text and parse == "tools"))
        for place in range(len(tokens)):
            cut, some = read(codec, tokens[:place], params)
            assert content.startswith(cut), text
            assert [name for name, _ in some] == [name for name, _ in calls][: len(some)]


def test_references_without_end_are_held() -> None:
    for strict in (True, False):
        assert takes("Gemma 4", to("Tree"), "{next:{next:{}}}", strict=strict)
        assert not takes("Gemma 4", to("Tree"), "{next:1}", strict=strict)
        assert not takes("Gemma 4", to("Tree"), "1", strict=strict)
    assert takes("Gemma 4", to("None"), "1", strict=False)


def test_schemas_without_end_are_refused_in_time() -> None:
    """A schema next to a reference to itself, properties that multiply, and one that is very deep."""
    loop = {"$ref": "#/$defs/loop", "minLength": 2}
    definitions: dict[str, Any] = {"loop": loop, "of0": {"type": "integer"}}
    for level in range(1, 13):
        own = {"allOf": [to(f"of{level - 1}"), {"maxItems": level}]}
        definitions[f"of{level}"] = {"type": "object", "properties": dict.fromkeys("abcd", own)}
    deep: dict[str, Any] = {"type": "array", "items": {}}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    for schema, words in (({**loop, "minLength": 1}, "more than 32 deep"), (to("of12"), "more than 5000 values")):
        parameters = {"type": "object", "properties": {"x": schema}, "$defs": definitions}
        calls = {"functions": [{"name": "f", "parameters": parameters, "strict": words == "more than 32 deep"}]}
        with pytest.raises(RequestError, match=words):
            compiler_of(codec_of("Gemma 4")).open(SamplingParams(tool_calls=calls), [1], (END,))
    for name in ("Gemma 4", "Qwen3-Coder"):
        calls = {"functions": [{"name": "f", "parameters": {"properties": {"x": deep}}, "strict": True}]}
        with pytest.raises(RequestError, match=r"deep|recursion limit"):
            compiler_of(codec_of(name)).open(SamplingParams(tool_calls=calls), [1], (END,))


def test_references_that_multiply_are_rules_of_their_own() -> None:
    """Each definition has two of the one before: 2 ** 20 in all."""
    definitions: dict[str, Any] = {"of0": {"type": "integer"}}
    for level in range(1, 20):
        definitions[f"of{level}"] = {"type": "object", "properties": {key: to(f"of{level - 1}") for key in "ab"}}
    schema = {"type": "object", "properties": {"x": to("of19")}, "$defs": definitions}
    made = BracedRules('"|"', schema, {}, strict=True, prefix="of")
    made.arguments()
    assert len(made.lines) < 250
