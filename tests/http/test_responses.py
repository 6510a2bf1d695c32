"""/v1/responses as OpenAI's client uses it: events and their accumulator, calls of functions, parsing, round trips."""

from __future__ import annotations  # OpenAI's package is imported at its first use

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway import RecordingCodec, ScriptedEngine, running_gateway
from pydantic import BaseModel

from lowlat.options.request import ToolCallDelta

FUNCTION: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PARTS: list[dict[str, Any]] = [
    {"reasoning": "Let me "},
    {"reasoning": "see."},
    {"text": "I "},
    {"text": "look."},
    {"tool_calls": (ToolCallDelta(0, "", "call_a", "weather"), ToolCallDelta(0, '{"city"'))},
    {"tool_calls": (ToolCallDelta(0, ': "Bonn"}'), ToolCallDelta(1, "{}", "call_b", "time"))},
]


@contextmanager
def serving(
    folder: Path, *parts: dict[str, Any], codec: RecordingCodec | None = None, **options: Any
) -> Iterator[openai.OpenAI]:
    with (
        running_gateway(folder, ScriptedEngine(*parts, **options), codec=codec) as gateway,
        gateway.openai() as client,
    ):
        yield client


def told(response: Any) -> list[tuple[str, ...]]:
    """The items of an answer, without their ids."""
    found: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.status, item.call_id, item.name, item.arguments))
        else:
            found.append((item.type, item.status, item.content[0].text))
    return found


ITEMS = [
    ("reasoning", "completed", "Let me see."),
    ("message", "completed", "I look."),
    ("function_call", "completed", "call_a", "weather", '{"city": "Bonn"}'),
    ("function_call", "completed", "call_b", "time", "{}"),
]


def test_functions_are_called(tmp_path: Path) -> None:
    with serving(tmp_path, *PARTS) as client:
        answer = client.responses.create(model="fake", input="Hi", tools=[FUNCTION])
        assert told(answer) == ITEMS and answer.status == "completed" and answer.output_text == "I look."
        assert answer.usage is not None
        assert answer.usage.output_tokens == 6 and answer.usage.output_tokens_details.reasoning_tokens == 2
        assert answer.usage.input_tokens_details.cached_tokens == 0
        assert answer.tools[0].type == "function" and answer.tools[0].name == "weather"
        single = client.responses.create(model="fake", input="Hi", tools=[FUNCTION], parallel_tool_calls=False)
        assert told(single) == ITEMS[:3]


def test_events_satisfy_the_accumulator(tmp_path: Path) -> None:
    with (
        serving(tmp_path, *PARTS) as client,
        client.responses.stream(model="fake", input="Hi", tools=[FUNCTION]) as stream,
    ):
        events = list(stream)
        final = stream.get_final_response()
    assert told(final) == ITEMS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(ITEMS)
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert [event.delta for event in deltas] == ['{"city"', ': "Bonn"}', "{}"]
    assert [event.snapshot for event in deltas] == ['{"city"', '{"city": "Bonn"}', "{}"]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == ['{"city": "Bonn"}', "{}"]
    places = [event.output_index for event in events if event.type == "response.output_item.done"]
    assert places == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("parts", "items"),
    [
        ([{"text": "I lo"}], [("message", "incomplete", "I lo")]),
        ([{"reasoning": "Let"}], [("reasoning", "incomplete", "Let")]),
        (PARTS[:5], [*ITEMS[:2], ("function_call", "incomplete", "call_a", "weather", '{"city"')]),
    ],
)
def test_an_item_that_is_cut_is_incomplete(tmp_path: Path, parts: Any, items: Any) -> None:
    with serving(tmp_path, *parts, reason="length") as client:
        answer = client.responses.create(model="fake", input="Hi", tools=[FUNCTION])
        assert told(answer) == items and answer.status == "incomplete"
        assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
        *_, last = client.responses.create(model="fake", input="Hi", tools=[FUNCTION], stream=True)
        assert last.type == "response.incomplete" and told(last.response) == items


def test_an_answer_and_what_functions_returned_go_back_in(tmp_path: Path) -> None:
    codec = RecordingCodec()
    with serving(tmp_path, *PARTS, codec=codec) as client:
        answer = client.responses.create(model="fake", input="Hi", tools=[FUNCTION], instructions="Be kind.")
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": "call_a", "output": "sun"},
            {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "9"}]},
        ]
        history: list[Any] = [{"role": "user", "content": "Hi"}, *answer.output, *outputs]
        client.responses.create(model="fake", input=history, tools=[FUNCTION])
        items = [item.model_dump() for item in answer.output]  # with nulls, as some clients send them
        client.responses.create(model="fake", input=[*history[:1], *items, *outputs], tools=[FUNCTION])  # type: ignore[list-item]
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in (("call_a", "weather", {"city": "Bonn"}), ("call_b", "time", {}))
    ]
    expected = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "thinking": "Let me see.", "tool_calls": calls},
        {"role": "tool", "content": "sun", "tool_call_id": "call_a"},
        {"role": "tool", "content": "9", "tool_call_id": "call_b"},
    ]
    (first, options), *others = codec.chats
    assert first[0] == {"role": "developer", "content": "Be kind."}
    assert options["tools"][0]["function"]["name"] == "weather" and "strict" not in options["tools"][0]["function"]
    assert [messages for messages, _ in others] == [expected] * 2


def test_a_new_answer_begins_a_new_message(tmp_path: Path) -> None:
    codec = RecordingCodec()
    history: list[Any] = [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "short"}]},
        {"role": "assistant", "content": "a"},
        {"type": "reasoning", "id": "s", "summary": [], "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
    ]
    with serving(tmp_path, {"text": "x"}, codec=codec) as client:
        client.responses.create(model="fake", input=history)
    assert codec.chats[0][0] == [
        {"role": "assistant", "content": "a", "thinking": "short"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]


def test_items_that_say_too_little_are_refused(tmp_path: Path) -> None:
    items: list[tuple[Any, str]] = [
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
        ({"type": "computer_call_output", "call_id": "x"}, "input[0].type"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": "x"}, "input[0].output"),
        ({"type": "function_call", "call_id": "x", "arguments": "{}"}, "input[0].name"),
        ({"content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0].type"),
    ]
    with serving(tmp_path) as client:
        for item, param in items:
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(model="fake", input=[item])
            assert caught.value.param == param


class Place(BaseModel):
    """Answers are parsed to a place."""

    city: str


def test_answers_are_parsed(tmp_path: Path) -> None:
    text = '{"city": "Bonn"}'
    with serving(tmp_path, {"text": text[:5]}, {"text": text[5:]}) as client:
        assert client.responses.parse(model="fake", input="Hi", text_format=Place).output_parsed == Place(city="Bonn")
        with client.responses.stream(model="fake", input="Hi", text_format=Place) as stream:
            stream.until_done()
            assert stream.get_final_response().output_parsed == Place(city="Bonn")
        chat = client.chat.completions.parse(
            model="fake", messages=[{"role": "user", "content": "Hi"}], response_format=Place
        )
        assert chat.choices[0].message.parsed == Place(city="Bonn")


def test_calls_are_parsed(tmp_path: Path) -> None:
    tool: Any = openai.pydantic_function_tool(Place, name="weather")
    with serving(tmp_path, *PARTS[:5], {"tool_calls": (ToolCallDelta(0, ': "Bonn"}'),)}) as client:
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        chat = client.chat.completions.parse(model="fake", messages=messages, tools=[tool])
        (call,) = list(chat.choices[0].message.tool_calls or ())
        assert call.function.parsed_arguments == Place(city="Bonn")
        with client.chat.completions.stream(model="fake", messages=messages, tools=[tool]) as stream:
            stream.until_done()
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls" and final.message.content == "I look."
        (call,) = list(final.message.tool_calls or ())
        assert call.function.parsed_arguments == Place(city="Bonn")
        answer: Any = client.responses.parse(model="fake", input="Hi", tools=[tool])
        assert answer.output[-1].parsed_arguments == Place(city="Bonn")


def test_logprobs_stand_beside_the_text(tmp_path: Path) -> None:
    with serving(tmp_path) as client:
        answer: Any = client.responses.create(
            model="fake", input="Hi", max_output_tokens=3, include=["message.output_text.logprobs"], top_logprobs=1
        )
        part = answer.output[0].content[0]
        assert "".join(entry.token for entry in part.logprobs) == part.text
        assert [entry.top_logprobs[0].logprob for entry in part.logprobs] == [-0.5] * 3
        plain: Any = client.responses.create(model="fake", input="Hi", max_output_tokens=3)
        assert plain.output[0].content[0].logprobs == []
