"""Requests of other people's clients, recorded once by `bench.clients`, are answered in the shapes that they read.

A file of `clients/` has the requests of a client in its version. They go to a small random chat model on the reference
executor, and answers are checked by the types of OpenAI's package, which forbid what is missing or of another type.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from benches import bench
from gateway import RunningGateway, gateway_at
from served_model import served_model
from tiny_chat import make_chat_model

from lowlat import Runtime
from lowlat.serving.codec import ServingCodec

CLIENTS = Path(__file__).parent / "clients"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
ENDS = ("stop", "length", "tool_calls")
MAX_TOKENS = 24  # of answers that may be calls or documents: what is cut there ends as what is cut later
MAX_TEXT = 6  # of others
BOUND = {"tools", "response_format", "text"}


def recorded() -> Iterator[Any]:
    """Every request, with its client's headers; those of which the client says that they fail are expected to.

    One with the fields and kinds of messages of an earlier one, of any client, comes in wide runs.
    """
    seen: set[str] = set()
    for file in sorted(CLIENTS.glob("*.json")):
        client = json.loads(file.read_text(encoding="utf-8"))
        for number, request in enumerate(client["requests"]):
            request["headers"] = client["headers"] | request["headers"]
            body = request.get("body", {})
            why = request.get("fails")
            marks = [pytest.mark.xfail(reason=why, strict=True)] if why else []
            shape = json.dumps([request["path"], _shape(body)])
            if shape in seen:
                marks.append(pytest.mark.wide)
            seen.add(shape)
            yield pytest.param(request, id=f"{client['client']}-{number}-{request['case']}", marks=marks)


def _shape(value: Any) -> Any:
    """The names in a body, and the kinds of its values: schemas and arguments of functions are not looked into."""
    if isinstance(value, dict):
        kind = [value[name] for name in ("type", "role") if isinstance(value.get(name), str)]
        inner = {name: _shape(value[name]) for name in value if name not in ("parameters", "schema", "metadata")}
        return [kind, dict(sorted(inner.items()))]
    if isinstance(value, list):
        shapes = [_shape(each) for each in value]
        return [shape for place, shape in enumerate(shapes) if shape not in shapes[:place]]
    return type(value).__name__


@pytest.fixture(scope="module")
def chat_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway to the small chat model."""
    folder = tmp_path_factory.mktemp("clients")
    folder.chmod(0o700)
    texts = [file.read_text(encoding="utf-8") for file in sorted(CLIENTS.glob("*.json"))]
    runtime = Runtime.load(make_chat_model(folder / "model", texts), max_batch=2, max_context=4096, device="cpu")
    with (
        served_model(folder, runtime, ServingCodec(runtime.codec)) as (server, _),
        gateway_at(server.endpoint) as address,
    ):
        yield RunningGateway(address)


@pytest.mark.parametrize("request_", list(recorded()))
def test_a_recorded_request_is_answered(chat_gateway: RunningGateway, request_: dict[str, Any]) -> None:
    _, listed, _ = chat_gateway.ask("/v1/models")
    name = listed["data"][0]["id"]
    path, body = request_["path"], request_.get("body")
    if body is None:
        path = path.replace("smollm2", name)
    elif request_["status"] != 404:
        body = {"temperature": 0, **body, "model": name}
        limits = [name for name in LIMITS if body.get(name) is not None]
        for limit in limits or ["max_output_tokens" if "responses" in path else "max_tokens"]:
            most = MAX_TOKENS if BOUND & body.keys() else MAX_TEXT
            body[limit] = min(body.get(limit, most), most)
    status, answer, headers = chat_gateway.ask(path, body, headers=request_["headers"], method=request_["method"])
    assert status == request_["status"], answer
    if status != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"} and name in answer["error"]["message"]
    elif body is not None:
        kind = "text/event-stream" if body.get("stream") else "application/json"
        assert headers["content-type"].startswith(kind)
        CHECKS[path, bool(body.get("stream"))](body, answer)


def check_chat(body: dict[str, Any], answer: Any) -> None:
    """Content or calls, a reason, and usage."""
    from openai.types.chat import ChatCompletion

    whole = ChatCompletion.model_validate(answer)
    assert whole.usage is not None and whole.usage.completion_tokens > 0 and len(whole.choices) == body.get("n", 1)
    for choice in whole.choices:
        assert choice.finish_reason in ENDS and choice.message.role == "assistant"
        calls: list[Any] = list(choice.message.tool_calls or ())
        assert calls or choice.message.content is not None
        if body.get("logprobs"):
            assert choice.logprobs is not None and choice.logprobs.content
        found = [(call.id, call.function.name, call.function.arguments) for call in calls]
        check_calls(body, found, choice.finish_reason)
        check_format(body.get("response_format") or {}, choice.message.content, choice.finish_reason)


def check_chat_stream(body: dict[str, Any], answer: str) -> None:
    """A role first, parts, one reason, usage where it was asked for, and the end."""
    from openai.types.chat import ChatCompletionChunk

    chunks = [ChatCompletionChunk.model_validate(data) for data in events_of(answer, done=True)]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant" and {choice.index for choice in choices} == {0}
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason in ENDS
    calls: dict[int, list[str]] = {}
    for choice in choices:
        deltas = choice.delta.tool_calls or []
        assert len({delta.index for delta in deltas}) == len(deltas)  # some clients read a chunk's first alone
        for delta in deltas:
            call = calls.setdefault(delta.index, ["", "", ""])
            assert delta.function is not None
            parts = (delta.id, delta.function.name, delta.function.arguments)
            calls[delta.index] = [known + (part or "") for known, part in zip(call, parts, strict=True)]
    found = [(call[0], call[1], call[2]) for call in calls.values()]
    check_calls(body, found, choices[-1].finish_reason)
    text = "".join(choice.delta.content or "" for choice in choices)
    check_format(body.get("response_format") or {}, text, choices[-1].finish_reason)
    if (body.get("stream_options") or {}).get("include_usage"):
        assert not chunks[-1].choices and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0


def check_completion(body: dict[str, Any], answer: Any) -> None:
    """A text a prompt, its logprobs, and usage."""
    from openai.types import Completion

    if body.get("echo"):
        for choice in answer[
            "choices"
        ]:  # the package's type has no null, which OpenAI sends for a prompt's first token
            lists = choice["logprobs"]
            assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)
            lists["token_logprobs"][0], lists["top_logprobs"][0] = 0.0, {}
    whole = Completion.model_validate(answer)
    assert whole.usage is not None and whole.usage.prompt_tokens > 0
    prompts = body["prompt"] if isinstance(body["prompt"], list) and not isinstance(body["prompt"][0], int) else [""]
    assert [choice.index for choice in whole.choices] == list(range(len(prompts)))
    for choice, prompt in zip(whole.choices, prompts, strict=True):
        assert choice.finish_reason in ENDS
        if body.get("logprobs") is not None:
            lists = choice.logprobs
            assert lists is not None and lists.tokens and lists.token_logprobs and lists.top_logprobs
            assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs)
            if body.get("echo"):
                given = body["prompt"] if prompt == "" else prompt
                assert len(lists.tokens) == len(given) + body["max_tokens"]
                assert all(value <= 0 for value in lists.token_logprobs) and all(lists.top_logprobs[1:])


def check_completion_stream(body: dict[str, Any], answer: str) -> None:
    """Parts of every choice, and a reason for each."""
    from openai.types import Completion

    parts = events_of(answer, done=True)
    usage = [part for part in parts if not part["choices"]]
    chunks = [Completion.model_validate(_with_reason(part)) for part in parts if part["choices"]]
    ended = [part["choices"][0]["index"] for part in parts if part["choices"] and part["choices"][0]["finish_reason"]]
    num = len(body["prompt"]) if isinstance(body["prompt"], list) and isinstance(body["prompt"][0], str) else 1
    assert sorted(ended) == list(range(num)) and any(chunk.choices[0].text for chunk in chunks)
    assert bool(usage) == bool((body.get("stream_options") or {}).get("include_usage"))


def _with_reason(part: dict[str, Any]) -> dict[str, Any]:
    """A chunk as the package's type has it: it is a whole answer's, whose reason is never null."""
    return {
        **part,
        "choices": [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in part["choices"]],
    }


def check_response(body: dict[str, Any], answer: Any) -> None:
    """Items of calls or text, a status that says whether all is there, and usage in all its parts."""
    from openai.types.responses import Response

    whole = Response.model_validate(answer)
    assert whole.status == ("incomplete" if whole.incomplete_details else "completed") and whole.output
    assert whole.usage is not None and whole.usage.output_tokens > 0
    calls = [(item.call_id, item.name, item.arguments) for item in whole.output if item.type == "function_call"]
    reason = "stop" if whole.status == "completed" else "length"
    check_calls(body, calls, reason)
    check_format((body.get("text") or {}).get("format") or {}, whole.output_text, reason, called=bool(calls))


def check_response_stream(body: dict[str, Any], answer: str) -> None:
    """Events in their order, of their types, and a last one that holds the whole."""
    sent = events_of(answer, done=False)
    events = [event_types().validate_python(data) for data in sent]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created", "response.in_progress", "response.output_item.added",
    ]  # fmt: skip
    assert events[-1].type in ("response.completed", "response.incomplete")
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in events[-1].response.output]
    check_response(body, sent[-1]["response"])


@cache
def event_types() -> Any:
    """The validator of a stream's events, which costs a second to make."""
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    return TypeAdapter(ResponseStreamEvent)


def check_calls(body: dict[str, Any], calls: list[tuple[str, str, str]], reason: str | None) -> None:
    """Calls of functions that were offered, with JSON unless they were cut; one at least where it was forced."""
    offered = {tool.get("function", tool)["name"] for tool in body.get("tools") or ()}
    for call_id, name, arguments in calls:
        assert call_id and name in offered
        assert reason == "length" or isinstance(json.loads(arguments), dict)
    assert calls or body.get("tool_choice") in (None, "auto", "none")


def check_format(form: dict[str, Any], text: str | None, reason: str | None, *, called: bool = False) -> None:
    """Text of a format is JSON where it ended by itself."""
    if form.get("type", "text") != "text" and reason == "stop" and not called:
        assert isinstance(json.loads(text or ""), dict)


def events_of(answer: str, *, done: bool) -> list[Any]:
    """The data of a stream's events."""
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    assert (lines[-1] == "[DONE]") == done
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_the_readme_has_the_table_of_clients(repository: Path) -> None:
    rows = json.loads((repository / "bench/results/cpu/clients.json").read_text(encoding="utf-8"))["rows"]
    text = (repository / "lowlat/serving/http/README.md").read_text(encoding="utf-8")
    assert text.partition("<!-- clients -->\n")[2].partition("\n<!-- /clients -->")[0] == bench("clients").table(rows)
    files = [json.loads(file.read_text(encoding="utf-8")) for file in CLIENTS.glob("*.json")]
    assert {(file["client"], file["version"]) for file in files} == {(row["client"], row["version"]) for row in rows}


CHECKS = {
    ("/v1/chat/completions", False): check_chat,
    ("/v1/chat/completions", True): check_chat_stream,
    ("/v1/completions", False): check_completion,
    ("/v1/completions", True): check_completion_stream,
    ("/v1/responses", False): check_response,
    ("/v1/responses", True): check_response_stream,
}
