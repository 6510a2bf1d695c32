"""Errors are the same as an answer and as a stream's last event: {message, type, param, code}, naming the prompt."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway import KEY, RunningGateway, ScriptedEngine, running_gateway

from lowlat.serving.http.choices import MAX_AT_ONCE
from lowlat.serving.http.openai import completions

LONG, NAN, REFUSED = [1] * 40, [5], [6]
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway to an engine of a narrow context, which fails on some prompts."""
    engine = ScriptedEngine(max_context=32, faults={5: "nan", 6: "refuse"}, step_s=0.001)
    with running_gateway(tmp_path_factory.mktemp("gateway"), engine) as gateway:
        yield gateway


def both(gateway: RunningGateway, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The error that is the answer to a request, and the one that ends its stream, be it an answer or an event."""
    status, answer, _ = gateway.ask(f"/v1/{path}", {"model": "fake", **body})
    assert status >= 400, answer
    _, streamed, _ = gateway.ask(f"/v1/{path}", {"model": "fake", **body, "stream": True})
    if isinstance(streamed, str):
        streamed = json.loads(streamed.strip().rpartition("data: ")[2])
    for told in (answer, streamed):
        told["error"]["message"] = re.sub(r"request \d+", "request N", told["error"]["message"])
    return answer["error"], streamed["error"]


@pytest.mark.parametrize("place", [3, 4 + MAX_AT_ONCE], ids=["at once", "in its turn"])
@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        (LONG, "context_length_exceeded", "This model's maximum context length is 32 tokens: prompt of 40 tokens"),
        ("x" * 40, "context_length_exceeded", "This model's maximum context length is 32 tokens: 40 bytes"),
        ("", "invalid_value", "the text is empty"),
        ([1, -2], "invalid_value", "token -2; ids are 0 to 999"),
        ([1000], "invalid_value", "token 1000; ids are 0 to 999"),
        ([], "invalid_value", "is neither text nor token ids"),
        (REFUSED, "invalid_value", ""),
        (NAN, "not_finite", ""),
    ],
)
def test_the_prompt_that_fails_is_named(
    failing: RunningGateway, place: int, prompt: str | list[int], code: str, words: str
) -> None:
    prompts: list[Any] = [[7], "Hi", [8, 9], [4]] * 6
    prompts[place] = prompt
    whole, streamed = both(failing, "completions", {"prompt": prompts, "max_tokens": 5})
    assert whole == streamed
    name = f"prompt[{place}]"
    assert (whole["param"], whole["code"]) == (name, code) and whole["message"].startswith(f"{name}: {words}"), whole


def test_a_prompt_of_several_answers_is_named_by_its_own_place(failing: RunningGateway) -> None:
    asked = {"prompt": [[7], [8], LONG, [9]], "n": 5, "max_tokens": 5}
    whole, streamed = both(failing, "completions", asked)
    assert whole == streamed and whole["param"] == "prompt[2]"
    asked = {"prompt": [[7], "x" * 40], "max_tokens": 5, "return_token_ids": True}
    whole, streamed = both(failing, "completions", asked)
    assert whole == streamed and whole["param"] == "prompt[1]"


def test_what_is_wrong_with_all_prompts_is_no_prompts_fault(failing: RunningGateway) -> None:
    whole, streamed = both(failing, "completions", {"prompt": [[7], [8]], "temperature": 101})
    assert whole == streamed and whole["param"] == "temperature" and "prompt" not in whole["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": LONG}, "prompt"),
        ("completions", {"prompt": [LONG]}, "prompt"),
        ("completions", {"prompt": NAN, "max_tokens": 9}, None),
        ("completions", {"prompt": [1], "max_tokens": -1}, "max_tokens"),
        ("completions", {"prompt": [1], "echo": True, "logprobs": 99}, "logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 40}]}, "messages"),
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"fail": True}}, None),
        ("responses", {"input": "x" * 40}, "input"),
        ("responses", {"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_a_stream_tells_what_an_answer_tells(
    failing: RunningGateway, path: str, body: dict[str, Any], param: str | None
) -> None:
    whole, streamed = both(failing, path, body)
    assert whole == streamed and set(whole) == {"message", "type", "param", "code"}
    assert whole["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("chat/completions", {"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "{}: Expected `str`"),
        (
            "chat/completions",
            {"messages": [MESSAGES[0], {"role": "user", "content": [{"type": "text"}]}]},
            "messages[1].content[0].text",
            "Missing required parameter: {}",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "x"}]}]},
            "messages[0].content[0].refusal",
            "Missing required parameter: {}",
        ),
        ("chat/completions", {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens", "{}: Exp"),
        (
            "chat/completions",
            {"messages": MESSAGES, "chat_template_kwargs": {"a": [[1]]}, "stop": [""]},
            "stop",
            "{}[0]",
        ),
        ("completions", {"prompt": "x", "logit_bias": {"1": "a"}}, "logit_bias", "{}: Expected `float`, got `str`"),
        ("completions", {"prompt": "x", "echo": True, "logprobs": -1}, "logprobs", "{}: Expected `int`"),
        (
            "completions",
            {"prompt": "x", "structured_outputs": {"choice": [""]}},
            "structured_outputs.choice",
            "{}[0]: Expected `str`",
        ),
        ("responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens", "{}: Expected `int`"),
        ("responses", {"input": [{"role": "", "content": "x"}]}, "input", "{}: Expected `str`"),
    ],
)
def test_an_error_has_the_names_of_the_body(
    failing: RunningGateway, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    whole, streamed = both(failing, path, body)
    assert whole == streamed and whole["param"] == param
    assert whole["message"].startswith(message.format(param)), whole


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "go", "parameters": parameters}}


LARGE = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 1 << 70}}}
BYTES = r"{}: the request is too long: the header has 3145\d\d\d bytes, more than 2097152"
INTEGER = (
    r"{}: the integer 1180591620717411303424 is not of 64 bits, from -9223372036854775808 to 18446744073709551615$"
)
NAMED: dict[str, Any] = {"type": "function", "name": "go", "parameters": LARGE}


@pytest.mark.parametrize(
    ("path", "body", "name", "message"),
    [
        ("completions", {"prompt": "x" * (3 << 20)}, "prompt", BYTES + "; send a longer prompt as token ids$"),
        ("completions", {"prompt": ["x", "x" * (3 << 20)]}, "prompt[1]", BYTES),
        ("chat/completions", {"messages": [*MESSAGES, {"role": "tool", "content": "x" * (3 << 20)}]}, "messages",
         BYTES + "; send a longer prompt as token ids$"),
        ("chat/completions", {"messages": [{**MESSAGES[0], "name": "a"}] * 4000}, "messages", "{}: .* 16384 values"),
        ("chat/completions", {"messages": MESSAGES, "tools": [tool({"description": "x" * (3 << 20)})]}, "tools",
         BYTES + "$"),
        ("chat/completions", {"messages": MESSAGES, "tools": [tool({"enum": [1] * 10_000})]}, "tools",
         "{}: more than 10000 values"),
        ("chat/completions", {"messages": MESSAGES, "tools": [tool({}), tool(LARGE)]}, "tools", INTEGER),
        ("chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"a": -(1 << 999)}}, "chat_template_kwargs",
         r"{}\.a: the integer of 1000 bits is not of 64 bits"),
        ("responses", {"input": "x" * (3 << 20)}, "input", BYTES),
        ("responses", {"input": "Hi", "tools": [NAMED]}, "tools", INTEGER),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)  # fmt: skip
def test_what_cannot_be_sent_to_the_server_is_named(
    gateway: RunningGateway, path: str, body: dict[str, Any], name: str, message: str
) -> None:
    whole, streamed = both(gateway, path, body)
    assert whole == streamed and whole["param"] == name
    assert re.match(message.format(re.escape(name)), whole["message"]), whole


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_what_cannot_be_tokenized_is_named(failing: RunningGateway, path: str) -> None:
    for body, param in [
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ({"messages": MESSAGES, "chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ]:
        status, answer, _ = failing.ask(path, body)
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"hello\r\n\r\n", 400, "illegal request line"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 70_000, 431, "too long"),
        (
            b"POST /x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
            400,
            "Content-Length",
        ),
        (b"POST /x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n", 501, "Transfer-Encoding"),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer " + KEY.encode() + b"\r\n"
            b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n",
            400,
            "chunk",
        ),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + bytes(300), 400, ""),  # TLS
    ],
)
def test_what_is_no_request_is_told_in_the_same_shape(
    failing: RunningGateway, sent: bytes, status: int, words: str
) -> None:
    address = failing.address
    with socket.create_connection((address.host, address.port), timeout=30) as caller:
        caller.sendall(sent)
        answer = http.client.HTTPResponse(caller)
        answer.begin()
        error = json.loads(answer.read())["error"]
        assert caller.recv(1) == b""
    assert answer.status == status and answer.headers["content-type"] == "application/json"
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "http")
    assert error["message"].startswith("the request is not HTTP/1.1: ") and words in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_the_gateways_is_told_once_a_stream_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def take_part(answer: Any, choice: Any, chunk: Any) -> dict[str, Any]:
        if chunk.finish_reason is not None:
            raise ValueError("a secret")
        return {"text": chunk.text}

    monkeypatch.setattr(completions._Completion, "part", take_part)
    monkeypatch.setattr(completions._Completion, "take_part", take_part)
    with running_gateway(tmp_path) as gateway:
        body = {"model": "fake", "prompt": "Hi", "max_tokens": 3, "stream": stream}
        status, answer, _ = gateway.ask("/v1/completions", body)
    told = json.loads(answer.strip().rpartition("data: ")[2]) if stream else answer
    assert status == (200 if stream else 500)
    error = {"message": "the gateway failed on this request", "type": "server_error", "param": None, "code": "internal"}
    assert told == {"error": error}
