"""This module serves /v1/chat/completions: messages in, choices of content, reasoning and tool calls out."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lowlat.ipc.client import AsyncGeneration, Chunk
from lowlat.ipc.messages import Welcome
from lowlat.serving.http.choices import Choices
from lowlat.serving.http.errors import ApiError, invalid, missing, name_fields
from lowlat.serving.http.gateway import gateways_of
from lowlat.serving.http.openai.answers import Choice, ChoicesAnswer, fingerprint, seeded
from lowlat.serving.http.openai.bodies import decode, decoder_of
from lowlat.serving.http.openai.logprobs import chat_logprobs, prompt_logprobs
from lowlat.serving.http.openai.schema import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionCall,
    GrowingChatRequest,
    check_growing,
    unsupported,
)
from lowlat.serving.http.openai.structured import (
    FORMAT_FIELDS,
    STRUCTURED_FIELDS,
    Calling,
    format_options,
    structured_options,
)
from lowlat.serving.http.sessions import session_of
from lowlat.serving.http.streaming import read_body, respond
from lowlat.serving.http.uploads import Lines, feed, is_lines

__all__ = ["call_of", "chat_completions", "chat_messages", "check_template", "text_of"]

SPEAKERS = ("user", "system", "developer")  # their messages have only content
TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")
_DECODER = decoder_of(ChatRequest)
_GROWING = decoder_of(GrowingChatRequest)


async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    session = session_of(request)
    lines = Lines(request) if is_lines(request) else None
    asked = decode(_DECODER, await read_body(request)) if lines is None else decode(_GROWING, await lines.first())
    _name_fields(request, asked)
    gateway = await gateways_of(request).of(asked.model)
    server = await gateway.serving(asked.model)
    check_template(server)
    calling = Calling.of(asked.tools or (), asked.tool_choice, asked.parallel_tool_calls)
    bound = _bound(asked)
    format_field = "response_format" if asked.structured_outputs is None else "structured_outputs"
    sampling = asked.sampling(server.advice) | _lengths(asked) | calling.options(bound, format_field)
    sampling["parse"] = "tools" if calling.tools else "reasoning"
    if asked.logprobs:
        sampling["logprobs"] = asked.top_logprobs or 0
    elif asked.top_logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    messages = chat_messages(asked.messages, growing=lines is not None)
    options = _template_options(asked, calling)
    prompt_ids: list[tuple[int, ...]] = []
    shared: dict[str, Any] = {
        "template_options": options,
        "cache_salt": asked.cache_salt or "",
        "session": session,
    }
    if lines is not None and isinstance(asked, GrowingChatRequest):
        check_growing(asked)
        if "max_tokens" not in sampling:
            message = (
                "max_tokens: a chat that is still being written needs it, for the server keeps space for the answer"
            )
            raise ApiError(400, message, param="max_tokens", code="missing_required_parameter")
        prompt = gateway.client.open_prompt(messages, max_prompt_tokens=asked.max_prompt_tokens, **shared, **sampling)
        generation = await feed(prompt, lines)
        choices = Choices(lambda _: generation)
    else:
        if asked.needs_prompt_ids:
            prompt_ids.append(await gateway.client.tokenize(messages, template_options=options))

        def start(place: int) -> AsyncGeneration:
            fits = "max_tokens" not in sampling
            return gateway.client.generate(messages, fit_context=fits, **shared, **seeded(sampling, place))

        choices = Choices(start, asked.n or 1)
    answer = _Chat(asked, calling, fingerprint(server), prompt_ids)
    return await respond(request, choices, answer, stream=bool(asked.stream))


def _name_fields(request: Request, asked: ChatRequest) -> None:
    form = FORMAT_FIELDS if asked.structured_outputs is None else STRUCTURED_FIELDS
    most = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    name_fields(request, {"prompt": "messages", "max_tokens": most, **form})


def check_template(server: Welcome) -> None:
    """Refuse chats with a model that has no template. Raises ApiError."""
    if not server.has_chat_template:
        raise ApiError(
            400, f"the model {server.model!r} has no chat template; use /v1/completions", code="no_chat_template"
        )


def chat_messages(messages: Sequence[ChatMessage], *, growing: bool = False) -> list[dict[str, Any]]:
    """Messages as the server takes them. Raises ApiError for content that is no text, or a speaker's that is absent.

    growing  whether the last message's content is yet to come
    """
    plain = []
    for place, message in enumerate(messages):
        fields: dict[str, Any] = {"role": message.role}
        content = message.refusal if message.content is None else message.content
        if content is None and message.role in SPEAKERS and not (growing and place == len(messages) - 1):
            param = f"messages[{place}].content"
            raise invalid(param, f"{param}: a message of the role {message.role!r} needs text, got null")
        if content is not None:
            fields["content"] = text_of(content, f"messages[{place}].content")
        if message.tool_calls:
            fields["tool_calls"] = [call_of(call.id, call.function) for call in message.tool_calls]
        named = {
            "name": message.name,
            "tool_call_id": message.tool_call_id,
            "thinking": message.reasoning_content or message.reasoning,
        }
        plain.append(fields | {name: value for name, value in named.items() if value is not None})
    return plain


def text_of(content: str | Sequence[ContentPart], param: str) -> str:
    """The text of a message's content. Raises ApiError for a part of another kind, or without text."""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content):
        if part.type not in TEXT_PARTS:
            raise unsupported(f"{param}[{place}].type", f"{part.type!r:.40}; content is text")
        name = "refusal" if part.type == "refusal" else "text"
        text = getattr(part, name)
        if text is None:
            raise missing(f"{param}[{place}].{name}")
        texts.append(text)
    return "\n".join(texts)


def call_of(id: str, function: FunctionCall) -> dict[str, Any]:
    """A call as the server takes it: its arguments as JSON text, which becomes values for the template."""
    return {"id": id, "type": "function", "function": {"name": function.name, "arguments": function.arguments or ""}}


def _bound(asked: ChatRequest) -> dict[str, Any]:
    """Return the option that constrains the answer's text, if any."""
    bound = format_options(asked.response_format)
    structured = structured_options(asked.structured_outputs)
    if bound and structured:
        raise unsupported("structured_outputs", "response_format binds the answer already; give one of the two")
    return bound or structured


def _template_options(asked: ChatRequest, calling: Calling) -> dict[str, Any]:
    named = {
        "tools": calling.for_template() or None,
        "reasoning_effort": asked.reasoning_effort,
        "verbosity": asked.verbosity,
        "continue_final_message": asked.continue_final_message,
        "add_generation_prompt": asked.add_generation_prompt,
    }
    given = {name: value for name, value in named.items() if value is not None}
    return {**(asked.chat_template_kwargs or {}), **given}


def _lengths(asked: ChatRequest) -> dict[str, int]:
    if asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens):
        raise ApiError(
            400, "max_tokens and max_completion_tokens differ; give one", param="max_tokens", code="invalid_value"
        )
    most = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    return {} if most is None else {"max_tokens": most}


class _Chat(ChoicesAnswer):
    """The answer to a chat. One that must be a call has no content: text in it is a call that was cut off."""

    NOTHING = {"delta": {}}  # noqa: RUF012

    def __init__(
        self, asked: ChatRequest, calling: Calling, fingerprint: str | None, prompt_ids: Sequence[Sequence[int]]
    ) -> None:
        kind = ("chat.completion", "chat.completion.chunk")
        super().__init__("chatcmpl", kind, asked, fingerprint, prompt_ids=prompt_ids)
        self._logprobs = bool(asked.logprobs)
        self._num_prompt = asked.prompt_logprobs
        self._one_call = not calling.parallel
        self._forced = calling.forced

    def part(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        """See ChoicesAnswer."""
        delta: dict[str, Any] = {}
        if chunk.text and not self._forced:
            delta["content"] = chunk.text
        if chunk.reasoning_content:
            delta["reasoning_content"] = chunk.reasoning_content
        if chunk.tool_calls and (calls := self._calls(choice, chunk)):
            delta["tool_calls"] = calls
        if not delta and not chunk.logprobs and chunk.finish_reason is None:
            return {}
        if not choice.named:
            choice.named = True
            delta = {"role": "assistant", "content": "", **delta}
        return {"delta": delta, "logprobs": chat_logprobs(chunk.logprobs) if chunk.logprobs else None}

    def take_part(self, choice: Choice, chunk: Chunk) -> None:
        """See ChoicesAnswer."""
        choice.content.append("" if self._forced else chunk.text)
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
        """See `streaming.Answer`; what all choices share of the prompt stands next to them."""
        prompt = self._choices[0].prompt
        if self._num_prompt is None or prompt is None:
            return super().body()
        return {**super().body(), "prompt_logprobs": prompt_logprobs(prompt, self._num_prompt)}

    def _calls(self, choice: Choice, chunk: Chunk) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for call in chunk.tool_calls:
            if self._one_call and call.index:
                continue
            if (
                call.id is None and calls and calls[-1]["index"] == call.index
            ):  # some clients read only the first one of a chunk
                calls[-1]["function"]["arguments"] += call.arguments
                continue
            shown: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
            if call.id is not None:
                choice.num_calls += 1
                function = {"name": call.name, "arguments": call.arguments}
                shown = {"index": call.index, "id": call.id, "type": "function", "function": function}
            calls.append(shown)
        return calls
