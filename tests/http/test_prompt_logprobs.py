"""The logprobs of prompts over HTTP: vLLM's field, and echo as OpenAI's completions have it."""

from __future__ import annotations  # OpenAI's package is imported at its first use

from typing import Any

import openai
import pytest
from fake_engine import FakeCodec, expected_text, expected_tokens, prompt_logprobs

from lowlat.errors import RequestError
from lowlat.ipc.messages import Message, Sampling
from lowlat.serving.http.openai.logprobs import prompt_logprobs as shown

PROMPT = [5, 1, 9, 0]
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


def echoed(prompt: list[int], num_top: int) -> tuple[list[float | None], list[dict[str, float] | None]]:
    """Logprobs and top logprobs of a prompt by the fake engine."""
    top = [{f"t{token} ": -token / 8} | {f"t{other} ": -other / 8 for other in range(num_top)} for token in prompt]
    return [None, *(-token / 8 for token in prompt[1:])], [None, *top[1:]]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_a_prompt_of_ids_is_scored(client: openai.OpenAI, max_tokens: int) -> None:
    """The server answers lm-eval's requests: echo with logprobs, for batches of token ids, with a new token or none."""
    prompts = [PROMPT, [7, 2]]
    answer = client.completions.create(
        model="fake", prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0.0, seed=1234
    )
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 2 * max_tokens)
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        behind = list(expected_tokens(prompt, max_tokens, 1234))
        logprobs, top = echoed(prompt, 1)
        lists = choice.logprobs
        assert lists is not None and choice.finish_reason == "length"
        assert choice.text == expected_text([*prompt, *behind])
        assert lists.tokens == [f"t{token} " for token in (*prompt, *behind)]
        assert lists.token_logprobs == [*logprobs, *[-0.5] * max_tokens]
        assert lists.top_logprobs == [*top, *({f"t{token} ": -0.5} for token in behind)]
        assert lists.text_offset is not None and lists.tokens is not None
        assert lists.text_offset == [sum(map(len, lists.tokens[:place])) for place in range(len(lists.tokens))]


@pytest.mark.parametrize("prompt", ["Hi", [72, 105]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_logprobs_gives_the_text_back(client: openai.OpenAI, prompt: Any, stream: bool) -> None:
    ids = list(b"Hi")
    expected = ("Hi" if prompt == "Hi" else expected_text(ids)) + expected_text(expected_tokens(ids, 3, 1))
    asked: dict[str, Any] = {"model": "fake", "prompt": prompt, "echo": True, "max_tokens": 3, "seed": 1}
    if not stream:
        choice = client.completions.create(**asked).choices[0]
        assert choice.text == expected and choice.logprobs is None
        return
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_echo_with_logprobs_streams(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": PROMPT, "echo": True, "max_tokens": 3, "logprobs": 2}
    chunks = list(client.completions.create(**asked, seed=1, stream=True))
    found = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    logprobs, top = echoed(PROMPT, 2)
    assert found[0].token_logprobs == logprobs and found[0].top_logprobs == top
    joined = [offset for each in found for offset in each.text_offset or ()]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert len(joined) == 7 and joined == sorted(joined)
    assert text == expected_text([*PROMPT, *expected_tokens(PROMPT, 3, 1)])


def test_vllms_field(client: openai.OpenAI) -> None:
    extra = {"prompt_logprobs": 1}
    answer = client.completions.create(model="fake", prompt=PROMPT, max_tokens=2, n=2, extra_body=extra)
    expected: list[Any] = [None]
    for token in PROMPT[1:]:
        entry = {str(token): {"logprob": -token / 8, "rank": token + 1, "decoded_token": f"t{token} "}}
        expected.append({"0": {"logprob": 0.0, "rank": 1, "decoded_token": "t0 "}, **entry})
    for choice in answer.choices:
        assert choice.text and choice.model_extra is not None
        assert choice.model_extra["prompt_logprobs"] == expected
    chat = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2, extra_body=extra)
    prompt = FakeCodec().encode_chat([Message("user", "Hi")], {})
    assert chat.model_extra is not None
    of_chat = chat.model_extra["prompt_logprobs"]
    assert len(of_chat) == len(prompt) and of_chat[0] is None and str(prompt[1]) in of_chat[1]
    plain = client.completions.create(model="fake", prompt=PROMPT, max_tokens=2).choices[0].model_extra or {}
    assert "prompt_logprobs" not in plain


def test_what_is_not_served_is_refused(client: openai.OpenAI) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(openai.BadRequestError, match=match):
            list(client.completions.create(**{"model": "fake", "prompt": PROMPT, "max_tokens": 2, **options}))

    refused("Unsupported parameter: prompt_logprobs", stream=True, extra_body={"prompt_logprobs": 1})
    refused("prompt_logprobs", extra_body={"prompt_logprobs": 21})
    refused("prompt_logprobs", extra_body={"prompt_logprobs": -1})
    refused("logprobs", echo=True, logprobs=21)
    refused("max_tokens", max_tokens=-1)
    long = prompt_logprobs([1] * 13000, Sampling(prompt_logprobs=20))
    assert long is not None and len(shown(long, 19)) == 13000
    with pytest.raises(RequestError, match=r"13000 tokens .* 20 likeliest .* 262144 over HTTP"):
        shown(long, 20)
