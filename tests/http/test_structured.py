"""Structured output through OpenAI's own client: formats, tools, vLLM's field; refusals in OpenAI's shape."""

from __future__ import annotations  # OpenAI's package is imported at its first use

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from gateway import RunningGateway, running_gateway
from grammar_engine import GrammarEngine
from jsonschema import validate

from lowlat.errors import RequestError
from lowlat.ipc.client import Client

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
FORM = "response_format.json_schema.schema"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "items": {"type": "integer"}, "maxItems": 2, "uniqueItems": True}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "maxProperties": 1}}}


def schema_format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture(scope="module")
def walking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), GrammarEngine()) as gateway:
        yield gateway


@pytest.fixture
def chat(walking: RunningGateway) -> Iterator[Any]:
    with walking.openai() as client:

        def ask(**fields: Any) -> Any:
            return client.chat.completions.create(model="fake", messages=MESSAGES, **fields).choices[0]

        ask.client = client  # type: ignore[attr-defined]
        yield ask


@pytest.mark.parametrize("strict", [True, False, None])
def test_an_answer_is_json_of_the_schema(chat: Any, strict: bool | None) -> None:
    choice = chat(response_format=schema_format(SCHEMA, strict=strict))
    validate(json.loads(choice.message.content), SCHEMA)
    assert choice.finish_reason == "stop"


def test_the_other_formats_hold_too(chat: Any) -> None:
    assert isinstance(json.loads(chat(response_format={"type": "json_object"}).message.content), dict)
    assert chat(response_format={"type": "text"}, max_tokens=3).finish_reason == "length"
    for fields, wanted in [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[a-c]{4}"}, "[a-c]{4}"),
        ({"grammar": 'root ::= "x" "y"'}, "xy"),
        ({"json": SCHEMA}, r"\{.*\}"),
        ({"json": json.dumps({"const": 7})}, "7"),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ]:
        assert re.fullmatch(wanted, chat(extra_body={"structured_outputs": fields}).message.content)
    text = chat.client.completions.create(
        model="fake", prompt="Hi", extra_body={"structured_outputs": {"choice": ["maybe"]}}
    )
    assert text.choices[0].text == "maybe"
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
    answer = chat.client.responses.create(model="fake", input="Hi", text={"format": form})
    validate(json.loads(answer.output_text), SCHEMA)
    assert answer.text.format.type == "json_schema"


@pytest.mark.parametrize("choice", ["required", named("weather")])
def test_calls_that_are_forced_fit_their_function(chat: Any, choice: Any) -> None:
    answer = chat(tools=[WEATHER, TIME], tool_choice=choice)
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
    for call in answer.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "weather" or choice == "required"
        validate(arguments, {"weather": SCHEMA, "time": {"type": "object"}}[call.function.name])


def test_calls_of_strict_tools_alone_are_bound(walking: RunningGateway, chat: Any) -> None:
    assert walking.served is not None
    engine: Any = walking.served.engine
    chat(tools=[WEATHER])
    assert json.loads(engine.asked[-1].tool_calls) == {
        "functions": [{"name": "weather", "parameters": SCHEMA, "strict": True}],
        "required": False,
        "parallel": True,
    }
    chat(tools=[TIME], max_tokens=2)
    assert engine.asked[-1].tool_calls is None
    chat(tools=[WEATHER], tool_choice="none", response_format=schema_format(SCHEMA))
    assert engine.asked[-1].tool_calls is None and engine.asked[-1].json_schema


@pytest.mark.parametrize("form", [schema_format(SCHEMA), {"type": "json_object"}])
def test_an_answer_of_a_format_may_be_a_call_instead(walking: RunningGateway, chat: Any, form: Any) -> None:
    assert walking.served is not None
    engine: Any = walking.served.engine
    for seed in range(4):
        answer = chat(tools=[WEATHER, TIME], response_format=form, seed=seed)
        if answer.finish_reason == "stop":
            document = json.loads(answer.message.content)
            validate(document, SCHEMA if form["type"] == "json_schema" else {"type": "object"})
        else:
            assert answer.finish_reason in ("tool_calls", "length") and answer.message.tool_calls
    asked = json.loads(engine.asked[-1].tool_calls)
    assert not asked["required"] and asked["document"]["schema"]["type"] == "object"
    assert engine.asked[-1].json_schema is None and not engine.asked[-1].json_object
    chat(tools=[WEATHER], tool_choice="required", response_format=form)
    assert "document" not in json.loads(engine.asked[-1].tool_calls)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": schema_format(UNIQUE, strict=True)}, FORM, "uniqueItems"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing required parameter"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema", "alone"),
        ({"structured_outputs": {"regex": "a"}, "tools": [TIME]}, "structured_outputs", "bound to JSON alone"),
        ({"structured_outputs": {}}, "structured_outputs", "give one of json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "give one of json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "Unsupported"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "one of the two",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "often", "tools": [TIME]}, "tool_choice", "'often'"),
        ({"tool_choice": named("news"), "tools": [TIME]}, "tool_choice", "none of the tools"),
    ],
)
def test_misfits_are_refused_by_name(chat: Any, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(extra_body=fields)
    body: Any = caught.value.body
    assert (body["param"], body["type"]) == (param, "invalid_request_error") and words in body["message"]


def test_a_schema_that_would_bind_nothing_is_refused(chat: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="'json_schema' alone") as caught:
        chat.client.responses.create(model="fake", input="Hi", text={"format": {"type": "text", "schema": SCHEMA}})
    body: Any = caught.value.body
    assert body["param"] == "text.format.schema"


def test_a_schema_that_is_not_strict_holds_as_far_as_it_can(chat: Any) -> None:
    value = json.loads(chat(response_format=schema_format(UNIQUE)).message.content)
    validate(value, UNIQUE | {"uniqueItems": False})
    ahead = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=.*[0-9])x"}}, "required": ["a"]}
    assert isinstance(json.loads(chat(response_format=schema_format(ahead)).message.content)["a"], str)
    with pytest.raises(openai.BadRequestError, match="look-around"):
        chat(response_format=schema_format(ahead, strict=True))


def test_a_one_of_that_is_not_held_is_told_in_our_words(walking: RunningGateway, chat: Any) -> None:
    either = {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "string"}]}}}
    told = "is not held, for its branches overlap or cannot be told apart; use anyOf"
    strict: dict[str, Any] = {"type": "json_schema", "name": "answer", "schema": either, "strict": True}
    tool = {"type": "function", "function": {"name": "go", "parameters": either, "strict": True}}
    called = {"type": "function", "function": {"name": "the document", "parameters": either, "strict": True}}
    bound = {"response_format": schema_format(either, strict=True)}
    structured = {"structured_outputs": {"json": either}}
    message: Any = {"model": "fake", "messages": MESSAGES}
    for path, body, param, of in [
        ("chat/completions", message | bound, FORM, FORM),
        ("chat/completions", message | bound | {"tools": [WEATHER]}, FORM, FORM),
        ("chat/completions", message | {"tools": [WEATHER, tool]}, "tools", ": go"),
        ("chat/completions", message | bound | {"tools": [called]}, "tools", ": the document"),
        ("chat/completions", message | structured, "structured_outputs.json", ""),
        ("completions", {"model": "fake", "prompt": "x"} | structured, "structured_outputs.json", ""),
        ("responses", {"model": "fake", "input": "Hi", "text": {"format": strict}}, "text.format.schema", ""),
    ]:
        for stream in (False, True):
            status, answer, _ = walking.ask(f"/v1/{path}", body | {"stream": stream})
            error = answer["error"]
            assert (status, error["param"]) == (400, param), error
            assert f"{of}: oneOf at #/properties/a {told}" in error["message"]
    assert walking.served is not None
    with Client(walking.served.server.endpoint) as client, pytest.raises(RequestError) as caught:
        list(client.generate("x", json_schema=either))
    assert str(caught.value).startswith(f"json_schema: oneOf at #/properties/a {told}")


@pytest.mark.alone  # the schema is refused after a second, by when others have their answers
def test_a_hostile_schema_holds_up_no_other_caller(chat: Any) -> None:
    hostile = {"type": "object", "properties": {f"p{number}": {} for number in range(8000)}}
    refused: list[openai.BadRequestError] = []

    def ask() -> None:
        try:
            chat(response_format=schema_format(hostile, strict=True))
        except openai.BadRequestError as error:
            refused.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert chat(max_tokens=2).finish_reason == "length"
        validate(json.loads(chat(response_format=schema_format(SCHEMA | {"title": "new"})).message.content), SCHEMA)
        assert thread.is_alive()
    finally:
        thread.join()
    assert refused and "to compile" in str(refused[0])
