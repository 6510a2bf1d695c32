"""Every field of OpenAI's requests is decided: served, taken without effect, or refused by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway import RecordingCodec, RunningGateway, ScriptedEngine, running_gateway
from msgspec import UNSET

from lowlat.options.request import ToolCallDelta

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FUNCTION: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "fake", "messages": MESSAGES, "max_tokens": 1},
    "completions": {"model": "fake", "prompt": "Hi", "max_tokens": 1},
    "responses": {"model": "fake", "input": "Hi", "max_output_tokens": 1},
}
LABELS: dict[str, Any] = {
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "user": "u",
}
SAMPLING: dict[str, Any] = {"temperature": 0.5, "top_p": 0.5, "service_tier": "priority", "store": False}
CHOOSING: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "n": 2,
    "presence_penalty": 0.5,
    "seed": -1,
    "stop": "x",
}
TAKEN: dict[str, dict[str, Any]] = {
    "chat/completions": LABELS
    | SAMPLING
    | CHOOSING
    | {
        "logprobs": True,
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "modalities": ["text"],
        "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "x"},
        "reasoning_effort": "low",
        "response_format": {"type": "text"},
        "stream_options": {"include_usage": True, "include_obfuscation": True, "continuous_usage_stats": True},
        "tool_choice": "auto",
        "tools": [TOOL],
        "top_logprobs": 0,
        "verbosity": "low",
    },
    "completions": CHOOSING
    | {
        "best_of": 1,
        "echo": False,
        "logprobs": 0,
        "max_tokens": 1,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.5,
        "user": "u",
    },
    "responses": LABELS
    | SAMPLING
    | {
        "background": False,
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "instructions": "be kind",
        "max_output_tokens": 1,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto", "generate_summary": None},
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "auto",
        "tools": [FUNCTION],
        "top_logprobs": 0,
        "truncation": "disabled",
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "audio": {"voice": "x", "format": "wav"},
        "function_call": "auto",
        "functions": [{"name": "f"}],
        "moderation": {"model": "x"},
        "store": True,
        "web_search_options": {},
    },
    "completions": {"suffix": "x"},
    "responses": {
        "access_programs": {"cyber": "standard"},
        "background": True,
        "background_options": {},
        "context_management": [],
        "conversation": "conv_1",
        "image": {"context_compression": "enabled"},
        "moderation": {"model": "x"},
        "previous_response_id": "resp_1",
        "prompt": {"id": "p"},
        "store": True,
        "truncation": "auto",
    },
}
NEEDED = {"model", "messages", "prompt", "input"}


def cases(table: dict[str, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(path, name, value, id=f"{path}-{name}")
        for path, fields in table.items()
        for name, value in fields.items()
    ]


def parameters_of(path: str) -> Any:
    """OpenAI's type of the requests of a path."""
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.responses import response_create_params

    return {
        "chat/completions": chat_create_params.CompletionCreateParamsBase,
        "completions": completion_create_params.CompletionCreateParamsBase,
        "responses": response_create_params.ResponseCreateParamsBase,
    }[path]


@pytest.mark.parametrize("path", BODIES)
def test_no_field_is_left_undecided(gateway: RunningGateway, path: str) -> None:
    """A new version of OpenAI's package may bring some: each must be put into a table here."""
    needed = NEEDED - {"prompt"} if path == "responses" else NEEDED
    names = set(parameters_of(path).__annotations__) - needed
    assert names == set(TAKEN[path]) | set(REFUSED[path])
    status, answer, _ = gateway.ask(f"/v1/{path}", dict.fromkeys(names | {"stream"}) | BODIES[path])
    assert status == 200, answer


@pytest.mark.parametrize(("path", "name", "value"), cases(TAKEN))
def test_a_field_is_taken(gateway: RunningGateway, path: str, name: str, value: Any) -> None:
    others = {"stream": True} if name == "stream_options" else {}
    others |= {"tools": TAKEN[path]["tools"]} if name in ("tool_choice", "parallel_tool_calls") else {}
    status, answer, _ = gateway.ask(f"/v1/{path}", BODIES[path] | others | {name: value})
    assert status == 200, answer


@pytest.mark.parametrize(("path", "name", "value"), cases(REFUSED))
def test_a_field_is_refused_by_name(gateway: RunningGateway, path: str, name: str, value: Any) -> None:
    status, answer, _ = gateway.ask(f"/v1/{path}", BODIES[path] | {name: value})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", name)
    assert error["message"].startswith(f"Unsupported parameter: {name}")
    assert name not in ("store", "previous_response_id") or "nothing is stored" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat/completions", {"temprature": 1}, "temprature: did you mean 'temperature'?"),
        ("chat/completions", {"repeat_penalty": 1}, "repeat_penalty: give repetition_penalty"),
        ("chat/completions", {"guided_json": {}}, "guided_json: give structured_outputs.json"),
        ("chat/completions", {"prompt": "x"}, "prompt: give the prompt to /v1/completions"),
        ("chat/completions", {"beams": 2}, "Unsupported parameter: beams"),
        ("chat/completions", {"response_format": {"type": "yaml"}}, "served: 'json_object', 'json_schema', 'text'"),
        ("chat/completions", {"tools": [{"type": "custom"}]}, "tools[0].type: Invalid enum value 'custom'; served: 'f"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs: Expected `int` <= 20, got 21"),
        ("chat/completions", {"n": 0}, "n: Expected `int` >= 1, got 0"),
        ("chat/completions", {"n": "200"}, "n: Expected `int` <= 128, got '200'"),
        ("chat/completions", {"messages": []}, "messages: Expected `array` of length >= 1, got 0"),
        ("chat/completions", {"stop": ["a", "b" * 1025]}, "stop[1]: Expected `str` of length <= 1024, got 1025"),
        ("completions", {"logit_bias": {"5": 101}}, "logit_bias[...]: Expected `float` <= 100.0, got {5: 101.0}"),
        ("completions", {"logit_bias": dict.fromkeys(map(str, range(301)), 1)}, "of length <= 300, got 301"),
        ("completions", {"temperature": -1}, "temperature: Expected `float` >= 0.0, got -1.0"),
        ("completions", {"suffix": "x"}, "Unsupported parameter: suffix: write the model's own tokens"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content: a message of the role 'user'"),
        ("chat/completions", {"gone": None, "messages": "x"}, "messages: Expected `array`"),
        ("completions", {"max_completion_tokens": 1}, "max_completion_tokens: give max_tokens"),
        ("responses", {"input": []}, "the prompt is empty"),
        ("responses", {"max_tokens": 1}, "max_tokens: give max_output_tokens"),
        ("responses", {"stop": "x"}, "Unsupported parameter: stop"),
    ],
)
def test_a_refusal_says_what_is_served(
    gateway: RunningGateway, path: str, fields: dict[str, Any], message: str
) -> None:
    status, answer, _ = gateway.ask(f"/v1/{path}", BODIES[path] | fields)
    error = answer["error"]
    assert status == 400 and error["message"].endswith(message) | error["message"].startswith(message), error
    assert error["param"].split("[")[0].split(".")[0] in fields


def test_an_empty_suffix_says_nothing(gateway: RunningGateway) -> None:
    assert gateway.ask("/v1/completions", BODIES["completions"] | {"suffix": ""})[0] == 200


@pytest.mark.parametrize("path", BODIES)
def test_null_and_what_is_so_here_anyway_say_nothing(gateway: RunningGateway, path: str) -> None:
    idle = {"user": None, "mm_kwargs": None, "skip_special_tokens": True, "length_penalty": 1}
    assert gateway.ask(f"/v1/{path}", {"gone": None} | BODIES[path] | idle)[0] == 200
    status, answer, _ = gateway.ask(f"/v1/{path}", BODIES[path] | {"skip_special_tokens": False})
    assert status == 400 and answer["error"]["param"] == "skip_special_tokens"


def test_a_top_k_of_minus_one_takes_all_tokens(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    with running_gateway(tmp_path, engine) as gateway:
        assert gateway.ask("/v1/completions", BODIES["completions"] | {"top_k": -1})[0] == 200
    assert engine.asked[0].top_k == 0


def test_any_seed_wraps(tmp_path: Path) -> None:
    most = (1 << 63) - 1
    engine = ScriptedEngine()
    with running_gateway(tmp_path, engine) as gateway:
        for seed in (-1, most, 1 << 63, -(1 << 63), 1 << 70):
            engine.asked.clear()
            status, answer, _ = gateway.ask("/v1/completions", BODIES["completions"] | {"seed": seed, "n": 3})
            assert status == 200, answer
            seeds = [most, 0, 1] if seed in (-1, most) else [0, 1, 2]
            assert sorted(sampling.seed for sampling in engine.asked) == sorted(seeds), seed


def test_a_top_p_of_zero_takes_the_likeliest_token(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    with running_gateway(tmp_path, engine) as gateway:
        assert gateway.ask("/v1/completions", BODIES["completions"] | {"top_p": 0})[0] == 200
    assert (engine.asked[0].top_p, engine.asked[0].top_k) == (UNSET, 1)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), ScriptedEngine(max_context=32)) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 40}]}, "messages"),
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 40}, "messages"),
        ("completions", {"prompt": "x" * 40}, "prompt"),
        ("completions", {"prompt": [1] * 40}, "prompt"),
        ("completions", {"prompt": "x" * 40, "stream": True}, "prompt"),
        ("responses", {"input": "x" * 40}, "input"),
    ],
)
def test_what_exceeds_the_context_has_openais_code(
    narrow: RunningGateway, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer, _ = narrow.ask(f"/v1/{path}", {"model": "fake", **body})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param), answer
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("This model's maximum context length is 32 tokens")


def test_many_prompts_are_answered_in_turn(tmp_path: Path) -> None:
    engine = ScriptedEngine(step_s=0.0)
    with (
        running_gateway(tmp_path, engine) as gateway,
        gateway.openai() as client,
    ):
        prompts = [[1 + place] for place in range(100)]
        answer = client.completions.create(model="fake", prompt=prompts, max_tokens=2)
        alone = client.completions.create(model="fake", prompt=prompts[77], max_tokens=2)
        streamed = [""] * 100
        for chunk in client.completions.create(model="fake", prompt=prompts, max_tokens=2, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        with pytest.raises(openai.BadRequestError, match="more than 4096"):
            client.completions.create(model="fake", prompt=prompts, n=64)
    assert [choice.index for choice in answer.choices] == list(range(100))
    assert answer.choices[77].text == alone.choices[0].text
    assert streamed == [choice.text for choice in answer.choices]
    assert answer.usage is not None and answer.usage.completion_tokens == 200


ECHOED: dict[str, Any] = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "Let me see.",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
}


TAKEN_BACK: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (ECHOED, {"content": "I look.", "thinking": "Let me see.", "arguments": {"a": 1}}),
    (ECHOED | {"content": None}, {"content": None, "thinking": "Let me see.", "arguments": {"a": 1}}),
    ({"role": "assistant", "tool_calls": ECHOED["tool_calls"]}, {"content": None, "arguments": {"a": 1}}),
    ({"role": "assistant", "content": "x", "reasoning": "why"}, {"content": "x", "thinking": "why"}),
    ({"role": "assistant", "content": None, "refusal": "No."}, {"content": "No."}),
    (
        {"role": "assistant", "content": "x", "refusal": None, "audio": None, "function_call": None}
        | {"annotations": [{"type": "url_citation"}], "tool_calls": None, "reasoning_details": [{}], "name": None},
        {"content": "x"},
    ),
]


def test_answers_are_taken_back(tmp_path: Path) -> None:
    codec = RecordingCodec()
    with running_gateway(tmp_path, codec=codec) as gateway:
        for message, given in TAKEN_BACK:
            body = BODIES["chat/completions"] | {"messages": [*MESSAGES, message], "tools": [TOOL]}
            status, answer, _ = gateway.ask("/v1/chat/completions", body)
            assert status == 200, answer
            ((_, taken), _) = codec.chats[-1]
            assert (taken.get("content"), taken.get("thinking")) == (given["content"], given.get("thinking")), message
            if "arguments" in given:
                assert taken["tool_calls"][0]["function"] == {"name": "f", "arguments": given["arguments"]}


ARGUMENTS: list[tuple[str | None, Any]] = [
    ("", {}),
    (" \n", {}),
    (None, {}),
    ('{"a": [1]}', {"a": [1]}),
    ("[1]", "[1]"),
    ('{"a": "b', '"{\\"a\\": \\"b"'),
    ('{"a": NaN}', '"{\\"a\\": NaN}"'),
    ("[" * 100_000, '"' + "[" * 100_000 + '"'),
]


def test_arguments_never_break_a_prompt(tmp_path: Path) -> None:
    codec = RecordingCodec()
    with running_gateway(tmp_path, codec=codec) as gateway:
        for arguments, given in ARGUMENTS:
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
            messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
            item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
            asked = (("chat/completions", {"messages": messages}), ("responses", {"input": [*MESSAGES, item]}))
            for path, fields in asked:
                status, answer, _ = gateway.ask(f"/v1/{path}", BODIES[path] | fields)
                assert status == 200, answer
                assert codec.chats[-1][0][1]["tool_calls"][0]["function"]["arguments"] == given


@pytest.mark.parametrize("stream", [True, False])
def test_a_forced_call_that_is_cut_has_no_content(tmp_path: Path, stream: bool) -> None:
    engine = ScriptedEngine({"reasoning": "Hm."}, {"text": '<tool_call>{"na'}, reason="length")
    tools: Any = {"tools": [TOOL], "tool_choice": "required"}
    with (
        running_gateway(tmp_path, engine) as gateway,
        gateway.openai() as client,
    ):
        if stream:
            chunks = list(client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, **tools))
            assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert chunks[-1].choices[0].finish_reason == "length"
        else:
            choice = client.chat.completions.create(model="fake", messages=MESSAGES, **tools).choices[0]
            assert not choice.message.content and choice.finish_reason == "length"
        answer = client.responses.create(model="fake", input="Hi", tools=[FUNCTION], tool_choice="required")
        assert answer.status == "incomplete" and [item.type for item in answer.output] == ["reasoning"]


def test_some_of_the_tools_may_be_allowed(tmp_path: Path) -> None:
    codec, engine = RecordingCodec(), ScriptedEngine({"tool_calls": (ToolCallDelta(0, "{}", "c", "g"),)})
    other = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
    allowed: dict[str, Any] = {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    with running_gateway(tmp_path, engine, codec=codec) as gateway:
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        body = BODIES["chat/completions"] | {"tools": [TOOL, other], "tool_choice": choice}
        assert gateway.ask("/v1/chat/completions", body)[0] == 200
        body = BODIES["responses"] | {"tools": [FUNCTION, FUNCTION | {"name": "g"}], "tool_choice": flat}
        assert gateway.ask("/v1/responses", body)[0] == 200
    for _, options in codec.chats:
        assert [tool["function"]["name"] for tool in options["tools"]] == ["g"]
    assert all('"required":true' in sampling.tool_calls.replace(" ", "") for sampling in engine.asked)
