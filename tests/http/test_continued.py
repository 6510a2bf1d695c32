"""Chats whose last message a client has begun: over HTTP at once, with a session, as a stream, while they grow."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from fake_engine import FakeEngine, expected_tokens
from gateway import KEY, RunningGateway, running_gateway
from unit.test_text_continued import begun, codec_of

from lowlat.ipc import Client
from lowlat.serving.codec import ServingCodec

CONTINUED: dict[str, Any] = {"model": "fake", "max_tokens": 8, "seed": 3, "continue_final_message": True}
TEMPLATES = ("smollm2", "gemma3", "mistral3")


@pytest.fixture(scope="module", params=TEMPLATES)
def named(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningGateway, str]]:
    """A gateway before an engine whose codec has this template."""
    engine = FakeEngine(text=True, tokenizer="a hash", tokens_per_step=8)
    codec: Any = ServingCodec(codec_of(request.param))
    with running_gateway(tmp_path_factory.mktemp("continued"), engine, codec=codec) as gateway:
        yield gateway, request.param


def ids_of(name: str, content: str, **options: Any) -> list[int]:
    return codec_of(name).encode_chat(begun(content), **options)


def test_an_answer_goes_on_where_the_last_message_ends(named: tuple[RunningGateway, str]) -> None:
    gateway, name = named
    text = "Once upon a time,"
    prompt = ids_of(name, text, continue_final_message=True)
    expected = list(expected_tokens(prompt, 8, 3))
    assert codec_of(name).decode(prompt, skip_special_tokens=False).endswith(text)
    body = CONTINUED | {"messages": begun(text), "return_token_ids": True}
    for more, headers in (
        ({}, {}),
        ({"add_generation_prompt": False}, {"x-session-id": "story"}),
        ({"messages": begun([{"type": "text", "text": text}])}, {}),  # type: ignore[arg-type]
    ):
        status, answer, _ = gateway.ask("/v1/chat/completions", body | more, headers=headers)
        assert status == 200 and answer["prompt_token_ids"] == prompt, answer
        assert answer["choices"][0]["token_ids"] == expected
    _, streamed, _ = gateway.ask("/v1/chat/completions", body | {"stream": True})
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == expected
    asked = {"messages": begun(text), "continue_final_message": True}
    assert gateway.ask("/tokenize", asked)[1]["tokens"] == prompt
    kwargs = {"messages": begun(text), "chat_template_kwargs": {"continue_final_message": True}}
    assert gateway.ask("/tokenize", kwargs)[1]["tokens"] == prompt
    assert gateway.served is not None
    with Client(gateway.served.server.endpoint) as client:
        options = {"continue_final_message": True}
        chunks = client.generate(begun(text), template_options=options, max_tokens=8, seed=3)
        assert [token for chunk in chunks for token in chunk.token_ids] == expected


def test_a_chat_may_end_without_the_beginning_of_an_answer(named: tuple[RunningGateway, str]) -> None:
    gateway, name = named
    for wanted in (True, False):
        body = {"messages": begun("Yes."), "add_generation_prompt": wanted}
        prompt = ids_of(name, "Yes.", add_generation_prompt=wanted)
        assert gateway.ask("/tokenize", body)[1]["tokens"] == prompt
        whole = {"model": "fake", "max_tokens": 1, "return_token_ids": True, **body}
        assert gateway.ask("/v1/chat/completions", whole)[1]["prompt_token_ids"] == prompt


def test_the_message_may_come_in_lines(named: tuple[RunningGateway, str]) -> None:
    gateway, name = named
    pieces = ["Once ", "upon a ", "time, ", "said the dragon"]
    expected = expected_tokens(ids_of(name, "".join(pieces), continue_final_message=True), 8, 3)
    for beginning in ("", pieces[0]):
        first = CONTINUED | {"messages": begun(beginning), "lowlat": True}
        lines = [first, *(pieces[1:] if beginning else pieces)]
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/x-ndjson"}
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        answer = httpx2.post(
            f"{gateway.url}/chat/completions", headers=headers, content=content, timeout=30.0, verify=False
        )
        assert answer.status_code == 200, answer.text
        assert tuple(answer.json()["choices"][0]["lowlat"]["token_ids"]) == expected


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"add_generation_prompt": True}, "continue_final_message: add_generation_prompt is true, too"),
        ({"messages": begun("x")[:1]}, "the last message must be the assistant's, got the role 'user'"),
        ({"messages": begun(None)}, "must have text as its content"),
        ({"continue_final_message": "content"}, "continue_final_message: Expected `bool"),
        ({"echo": True}, "Unsupported parameter: echo"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    named: tuple[RunningGateway, str], more: dict[str, Any], words: str
) -> None:
    gateway, _ = named
    for path in ("/v1/chat/completions", "/tokenize")[: 1 + ("echo" not in more)]:
        body = (CONTINUED if "chat" in path else {"continue_final_message": True}) | {"messages": begun("x")} | more
        status, answer, _ = gateway.ask(path, body)
        assert status == 400 and words in answer["error"]["message"], answer
        assert answer["error"]["param"] == ("echo" if "echo" in more else "continue_final_message")


def test_other_paths_name_the_one_that_continues(named: tuple[RunningGateway, str]) -> None:
    gateway, _ = named
    for path, body in (("completions", {"prompt": "x"}), ("responses", {"input": "x"})):
        asked = {"model": "fake", **body, "continue_final_message": True}
        status, answer, _ = gateway.ask(f"/v1/{path}", asked)
        assert status == 400 and "give the chat to /v1/chat/completions" in answer["error"]["message"]
