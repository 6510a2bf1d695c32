"""/v1/chat/completions: messages in, choices of content, reasoning and tool calls out."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lowlat.ipc.client import Chunk
from lowlat.ipc.messages import Welcome
from lowlat.serving.http.choices import Choices
from lowlat.serving.http.errors import ApiError
from lowlat.serving.http.gateway import Gateway
from lowlat.serving.http.openai.answers import Choice, ChoicesAnswer, seeded
from lowlat.serving.http.openai.logprobs import chat_logprobs, prompt_logprobs
from lowlat.serving.http.openai.schema import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    Tool,
    ToolCall,
    decode,
    unsupported,
)
from lowlat.serving.http.openai.structured import format_options, offered_tools, structured_options, tool_options
from lowlat.serving.http.streaming import read_body, respond

__all__ = ["chat_completions", "chat_messages", "check_template", "text_of"]

_DECODER = msgspec.json.Decoder(ChatRequest)


async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    gateway: Gateway = request.app.state.gateway
    asked = decode(_DECODER, await read_body(request))
    server = await gateway.serving(asked.model)
    check_template(server)
    tools = offered_tools(asked)
    options = _template_options(asked, tools)
    bound = _bound(asked)
    sampling = asked.sampling(server.advice) | _lengths(asked) | bound | tool_options(asked, tools, bound)
    sampling["parse"] = "tools" if "tools" in options else "reasoning"
    if asked.logprobs:
        sampling["logprobs"] = asked.top_logprobs or 0
    elif asked.top_logprobs is not None:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    messages = chat_messages(asked.messages)
    generations = [
        gateway.client.generate(
            messages,
            template_options=options,
            fit_context="max_tokens" not in sampling,
            **seeded(sampling, place),
        )
        for place in range(asked.n or 1)
    ]
    return await respond(request, Choices(generations), _Chat(asked), stream=bool(asked.stream))


def check_template(server: Welcome) -> None:
    """Refuse chats with a model that has no template. Raises ApiError."""
    if not server.has_chat_template:
        raise ApiError(
            400, f"the model {server.model!r} has no chat template; use /v1/completions", code="no_chat_template"
        )


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as the server takes them. Raises ApiError for content that is no text."""
    plain = []
    for place, message in enumerate(messages):
        fields: dict[str, Any] = {"role": message.role}
        if message.content is not None:
            fields["content"] = text_of(message.content, f"messages[{place}].content")
        if message.tool_calls:
            fields["tool_calls"] = [_call(call) for call in message.tool_calls]
        named = {
            "name": message.name,
            "tool_call_id": message.tool_call_id,
            "thinking": message.reasoning_content,
        }
        plain.append(fields | {name: value for name, value in named.items() if value is not None})
    return plain


def text_of(content: str | Sequence[ContentPart], param: str) -> str:
    """The text of a message's content. Raises ApiError for a part of another kind."""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal") or text is None:
            raise unsupported(f"{param}[{place}].type", f"{part.type!r:.40}; content is text")
        texts.append(text)
    return "\n".join(texts)


def _call(call: ToolCall) -> dict[str, Any]:
    """A call as templates expect it: its arguments as an object where they are one."""
    arguments: Any = call.function.arguments
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        decoded = None
    if isinstance(decoded, dict):
        arguments = decoded
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _bound(asked: ChatRequest) -> dict[str, Any]:
    """The option that binds the answer's text, where one does."""
    bound = format_options(asked.response_format)
    structured = structured_options(asked.structured_outputs)
    if bound and structured:
        raise unsupported("structured_outputs", "response_format binds the answer already; give one of the two")
    return bound or structured


def _template_options(asked: ChatRequest, offered: Sequence[Tool]) -> dict[str, Any]:
    options = dict(asked.chat_template_kwargs or {})
    tools: list[dict[str, Any]] = [msgspec.to_builtins(tool) for tool in offered]
    for tool in tools:
        tool["function"].pop("strict", None)  # the server's business, not the model's
    if tools:
        options["tools"] = tools
    if asked.reasoning_effort is not None:
        options["reasoning_effort"] = asked.reasoning_effort
    return options


def _lengths(asked: ChatRequest) -> dict[str, int]:
    if asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one", param="max_tokens")
    most = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    return {} if most is None else {"max_tokens": most}


class _Chat(ChoicesAnswer):
    """The answer to a chat."""

    def __init__(self, asked: ChatRequest) -> None:
        super().__init__("chatcmpl", ("chat.completion", "chat.completion.chunk"), asked)
        self._logprobs = bool(asked.logprobs)
        self._num_prompt = asked.prompt_logprobs
        self._one_call = asked.parallel_tool_calls is False

    def part(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        """See ChoicesAnswer."""
        delta: dict[str, Any] = {}
        if chunk.text:
            delta["content"] = chunk.text
        if chunk.reasoning_content:
            delta["reasoning_content"] = chunk.reasoning_content
        if chunk.tool_calls and (calls := self._calls(choice, chunk)):
            delta["tool_calls"] = calls
        if not delta and not chunk.logprobs and chunk.finish_reason is None:
            return {}
        if not choice.begun:
            choice.begun = True
            delta = {"role": "assistant", "content": "", **delta}
        return {"delta": delta, "logprobs": chat_logprobs(chunk.logprobs) if chunk.logprobs else None}

    def take_part(self, choice: Choice, chunk: Chunk) -> None:
        """See ChoicesAnswer."""
        choice.reasoning.append(chunk.reasoning_content)
        for call in self._calls(choice, chunk):
            index = call.pop("index")
            if "id" in call:
                choice.calls.append(call)
            else:
                choice.calls[index]["function"]["arguments"] += call["function"]["arguments"]

    def whole(self, choice: Choice) -> dict[str, Any]:
        """See ChoicesAnswer."""
        content = "".join(choice.content) or (None if choice.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        reasoning = "".join(choice.reasoning)
        if reasoning:
            message["reasoning_content"] = reasoning
        if choice.calls:
            message["tool_calls"] = choice.calls
        return {"message": message, "logprobs": chat_logprobs(choice.logprobs) if self._logprobs else None}

    def body(self) -> dict[str, Any]:
        """See `streaming.Answer`; what all choices share of the prompt stands beside them."""
        prompt = self._choices[0].prompt
        if self._num_prompt is None or prompt is None:
            return super().body()
        return {**super().body(), "prompt_logprobs": prompt_logprobs(prompt, self._num_prompt)}

    def _calls(self, choice: Choice, chunk: Chunk) -> list[dict[str, Any]]:
        calls = []
        for call in chunk.tool_calls:
            if self._one_call and call.index:
                continue
            shown: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
            if call.id is not None:
                choice.num_calls += 1
                function = {"name": call.name, "arguments": call.arguments}
                shown = {"index": call.index, "id": call.id, "type": "function", "function": function}
            calls.append(shown)
        return calls
