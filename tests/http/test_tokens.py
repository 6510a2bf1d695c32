"""Token ids over HTTP: /tokenize and /detokenize, ids next to answers, usage while an answer streams."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import expected_tokens
from gateway import RecordingCodec, RunningGateway, ScriptedEngine, running_gateway

CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 1}
PROMPT = list(b"<user>Hi")


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_text_becomes_ids_and_ids_text(gateway: RunningGateway, prefix: str) -> None:
    status, answer, _ = gateway.ask(f"{prefix}/tokenize", {"model": "fake", "prompt": "Hi"})
    assert (status, answer) == (200, {"count": 2, "max_model_len": 4096, "tokens": [72, 105], "token_strs": None})
    asked = {"prompt": "Hi", "return_token_strs": True, "add_special_tokens": False}
    assert gateway.ask(f"{prefix}/tokenize", asked)[1]["token_strs"] == ["H", "i"]
    assert gateway.ask(f"{prefix}/detokenize", {"tokens": [72, 105]})[1] == {"prompt": "Hi"}
    assert gateway.ask(f"{prefix}/detokenize", {"model": "fake", "tokens": []})[1] == {"prompt": ""}


def test_chats_become_the_ids_that_a_request_has(tmp_path: Path) -> None:
    codec = RecordingCodec()
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    more: dict[str, Any] = {
        "tools": [tool],
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with running_gateway(tmp_path, codec=codec) as gateway:
        status, answer, _ = gateway.ask("/tokenize", {"messages": CHAT["messages"], **more})
    assert status == 200 and answer["tokens"] == PROMPT, answer
    ((messages, options),) = codec.chats
    assert messages == CHAT["messages"]
    assert options == {**more["chat_template_kwargs"], "add_generation_prompt": False} | {
        "tools": [{"type": "function", "function": {"name": "f"}}]
    }


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "Hi", "messages": CHAT["messages"]}, "prompt"),
        ("tokenize", {"messages": CHAT["messages"], "add_special_tokens": True}, "add_special_tokens"),
        ("tokenize", {"prompt": "Hi", "chat_template": "x"}, "chat_template"),
        ("detokenize", {"tokens": [1000]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("detokenize", {"tokens": [1, True]}, "tokens[1]"),
        ("detokenize", {"tokens": [1], "model": "other"}, "model"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(
    gateway: RunningGateway, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer, _ = gateway.ask(f"/{path}", body)
    assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param)


def test_ids_stand_beside_answers_where_vllm_has_them(gateway: RunningGateway) -> None:
    ids = list(expected_tokens(PROMPT, 4, 1))
    _, whole, _ = gateway.ask("/v1/chat/completions", CHAT | {"return_token_ids": True})
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (PROMPT, ids)
    _, text, _ = gateway.ask("/v1/chat/completions", CHAT | {"return_token_ids": True, "stream": True})
    first, *others = events(text)
    assert first["prompt_token_ids"] == PROMPT and not any("prompt_token_ids" in event for event in others)
    assert [token for event in (first, *others) for token in event["choices"][0]["token_ids"]] == ids
    assert all("delta" in event["choices"][0] for event in (first, *others))
    asked = {"model": "fake", "prompt": ["Hi", [1, 2]], "max_tokens": 2, "seed": 1, "n": 2, "return_token_ids": True}
    _, whole, _ = gateway.ask("/v1/completions", asked)
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[72, 105]] * 2 + [[1, 2]] * 2
    _, text, _ = gateway.ask("/v1/completions", asked | {"stream": True})
    found: dict[int, list[int]] = {}
    for event in events(text):
        (choice,) = event["choices"]
        found.setdefault(choice["index"], []).extend([*choice.get("prompt_token_ids", []), *choice["token_ids"]])
    assert found == {choice["index"]: choice["prompt_token_ids"] + choice["token_ids"] for choice in whole["choices"]}
    _, plain, _ = gateway.ask("/v1/chat/completions", CHAT)
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


def test_usage_is_told_while_an_answer_streams(gateway: RunningGateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, text, _ = gateway.ask("/v1/chat/completions", CHAT | {"stream": True, "stream_options": options})
    counts = [(event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]) for event in events(text)]
    assert counts[0] == (8, 1) and counts[-1] == (8, 4) and counts == sorted(counts)
    assert all(event["usage"]["total_tokens"] == sum(count) for event, count in zip(events(text), counts, strict=True))


def test_usage_counts_reasoning(tmp_path: Path) -> None:
    """As the server does: steps that come late are joined, and text may stand next to reasoning in one chunk."""
    parts = [{}, {"reasoning": "a"}, {"reasoning": "b", "text": "c"}, {"text": "d"}, {}]
    with running_gateway(tmp_path, ScriptedEngine(*parts)) as gateway:
        for n in (1, 3):
            _, whole, _ = gateway.ask("/v1/chat/completions", CHAT | {"n": n})
            assert whole["usage"]["completion_tokens"] == 5 * n
            assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * n
        asked = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        _, text, _ = gateway.ask("/v1/chat/completions", asked)
        assert events(text)[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
