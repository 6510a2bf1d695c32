"""OpenAI's own client against the gateway: chats, completions, responses, models; as streams and as wholes."""

from __future__ import annotations  # OpenAI's package is imported at its first use

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import NUMERICS, FakeCodec, expected_text, expected_tokens
from gateway import KEY, RunningGateway, ScriptedEngine, running_gateway

from lowlat.ipc.messages import Message
from lowlat.options.request import ToolCallDelta

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
PROMPT = FakeCodec().encode_chat([Message("user", "Hi")], {})
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def says(num_tokens: int, seed: int | None = None, prompt: list[int] = PROMPT) -> str:
    """The engine's answer."""
    return expected_text(expected_tokens(prompt, num_tokens, seed))


def test_models_are_listed_and_shown(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "lowlat"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5, seed=3, user="me")
    assert answer.choices[0].message.content == says(5, 3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (8, 5, 13)


def test_a_chat_streams_with_usage(client: openai.OpenAI) -> None:
    parts: list[Any] = [{"type": "text", "text": "Hi"}]
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": parts}],
            max_completion_tokens=6,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *steps, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in steps) == says(6, 3)
    assert steps[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in steps] == [None] * (len(steps) - 1) + ["length"]
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 6
    assert len({chunk.id for chunk in chunks}) == 1 and len(steps) > 2
    assert {chunk.system_fingerprint for chunk in chunks} == {f"fp_{NUMERICS}"}


def test_a_chat_without_a_limit_has_the_rest_of_the_context(tmp_path: Path) -> None:
    engine = ScriptedEngine(max_context=64, step_s=0.0)
    with (
        running_gateway(tmp_path, engine) as gateway,
        gateway.openai() as client,
    ):
        answer = client.chat.completions.create(model="fake", messages=MESSAGES)
        assert answer.usage is not None and answer.usage.total_tokens == 64
        with pytest.raises(openai.BadRequestError, match=r"max_tokens 100 exceed 64 \(max_context\)"):
            client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=100)


@pytest.mark.parametrize("stream", [True, False])
def test_n_choices_have_seeds_of_their_own(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "max_tokens": 4, "seed": 10, "n": 3}
    expected = [says(4, 10 + place) for place in range(3)]
    if not stream:
        answer = client.chat.completions.create(**asked)
        assert [choice.message.content for choice in answer.choices] == expected
        assert answer.usage is not None and answer.usage.completion_tokens == 12
        return
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected


def test_what_is_asked_reaches_the_engine(tmp_path: Path) -> None:
    engine = ScriptedEngine({"text": "x"})
    with (
        running_gateway(tmp_path, engine) as gateway,
        gateway.openai() as client,
    ):
        client.chat.completions.create(
            model="fake", messages=MESSAGES, temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1,
            logit_bias={"5": 2}, stop="\n", seed=1, logprobs=True, top_logprobs=3, max_tokens=9,
            extra_body={"top_k": 4, "min_p": 0.1, "ignore_eos": True},
        )  # fmt: skip
        client.completions.create(model="fake", prompt="Hi", stop=["a", "b"])
    first, second = engine.asked
    assert (first.temperature, first.top_p, first.presence_penalty, first.frequency_penalty) == (0.5, 0.9, 1.0, -1.0)
    assert (first.logit_bias, first.stop, first.seed, first.logprobs, first.max_tokens) == ({5: 2.0}, ("\n",), 1, 3, 9)
    assert (first.top_k, first.min_p, first.ignore_eos, first.parse) == (4, 0.1, True, "reasoning")
    assert (second.temperature, second.stop, second.max_tokens, second.parse) == (1.0, ("a", "b"), 16, "none")


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_and_tool_calls_stand_apart(tmp_path: Path, stream: bool) -> None:
    engine = ScriptedEngine(
        {"reasoning": "Let me "},
        {"reasoning": "see.", "text": "I look."},
        {"tool_calls": (ToolCallDelta(0, "", "call_a", "weather"), ToolCallDelta(0, '{"city"'))},
        {"tool_calls": (ToolCallDelta(0, ': "Bonn"}'), ToolCallDelta(1, "{}", "call_b", "time"))},
    )
    asked: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto"}
    with (
        running_gateway(tmp_path, engine) as gateway,
        gateway.openai() as client,
    ):
        if stream:
            calls: dict[int, list[str]] = {}
            content, reasoning, reason = "", "", None
            for chunk in client.chat.completions.create(**asked, stream=True):
                delta = chunk.choices[0].delta
                content += delta.content or ""
                reasoning += getattr(delta, "reasoning_content", None) or ""
                for call in delta.tool_calls or ():
                    entry = calls.setdefault(call.index, [call.id or "", "", ""])
                    assert call.function is not None
                    entry[1] += call.function.name or ""
                    entry[2] += call.function.arguments or ""
                reason = chunk.choices[0].finish_reason
            seen = [tuple(call) for call in calls.values()]
        else:
            choice = client.chat.completions.create(**asked).choices[0]
            content, reason = choice.message.content or "", choice.finish_reason
            reasoning = choice.message.reasoning_content
            seen = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
        assert (content, reasoning, reason) == ("I look.", "Let me see.", "tool_calls")
        assert seen == [("call_a", "weather", '{"city": "Bonn"}'), ("call_b", "time", "{}")]
        assert engine.asked[0].parse == "tools"
        single = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message
        assert [call.id for call in single.tool_calls or ()] == ["call_a"]
        plain = client.chat.completions.create(**asked | {"tool_choice": "none"})
        assert plain.choices[0].finish_reason == "tool_calls" and engine.asked[-1].parse == "reasoning"


def test_logprobs_have_both_shapes(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=2, seed=1, logprobs=True, top_logprobs=1
    )
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    entries = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == chat.choices[0].message.content
    assert [(entry.logprob, entry.top_logprobs[0].token) for entry in entries] == [(-0.5, e.token) for e in entries]
    assert bytes(entries[0].bytes or ()).decode() == entries[0].token
    lists = client.completions.create(model="fake", prompt="Hi", max_tokens=3, logprobs=1).choices[0].logprobs
    assert lists is not None and lists.tokens is not None and lists.text_offset is not None
    assert lists.token_logprobs == [-0.5] * 3
    assert lists.text_offset == [0, len(lists.tokens[0]), len(lists.tokens[0]) + len(lists.tokens[1])]


def test_completions_take_text_and_ids(client: openai.OpenAI) -> None:
    ids = [5, 6, 7]
    answer = client.completions.create(model="fake", prompt=[ids, ids], max_tokens=3, seed=2, n=2)
    assert [choice.text for choice in answer.choices] == [says(3, seed, ids) for seed in (2, 3, 2, 3)]
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)
    chunks = list(client.completions.create(model="fake", prompt="ab", max_tokens=3, seed=2, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == says(3, 2, list(b"ab"))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_tokens_say_whether_they_were_drafted(tmp_path: Path) -> None:
    with running_gateway(tmp_path, ScriptedEngine(tokens_per_step=3)) as gateway:
        asked = {"model": "fake", "prompt": [1, 2], "max_tokens": 6, "seed": 1, "lowlat": True}
        _, whole, _ = gateway.ask("/v1/completions", asked)
        tokens = list(expected_tokens([1, 2], 6, 1))
        assert whole["choices"][0]["lowlat"]["token_ids"] == tokens
        assert whole["choices"][0]["lowlat"]["accepted"] == [True, True, False] * 2
        _, text, _ = gateway.ask("/v1/completions", asked | {"stream": True})
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert [token for event in events for token in event["lowlat"].get("token_ids", ())] == tokens
        assert events[-1]["lowlat"]["metrics"]["completion_tokens"] == 6


def test_the_asyncio_client_is_served(gateway: RunningGateway) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=gateway.url, api_key=KEY, max_retries=0) as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model="fake", messages=MESSAGES, max_tokens=5, seed=seed, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(one, range(6)))

    assert asyncio.run(ask()) == [says(5, seed) for seed in range(6)]
