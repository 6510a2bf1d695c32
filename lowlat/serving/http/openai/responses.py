"""/v1/responses: text in, text out, as a whole or as typed events; all else of it is refused by name."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lowlat.ipc.client import Chunk
from lowlat.serving.http.choices import Choices
from lowlat.serving.http.errors import ApiError
from lowlat.serving.http.gateway import Gateway
from lowlat.serving.http.openai.answers import finish_reason, usage_of
from lowlat.serving.http.openai.chat import check_template, text_of
from lowlat.serving.http.openai.schema import JsonSchema, ResponseFormat, ResponsesRequest, decode, unsupported
from lowlat.serving.http.openai.structured import format_options, structured_options
from lowlat.serving.http.streaming import event, read_body, respond

__all__ = ["responses"]

_DECODER = msgspec.json.Decoder(ResponsesRequest)


async def responses(request: Request) -> Response:
    """Answer an input."""
    gateway: Gateway = request.app.state.gateway
    asked = decode(_DECODER, await read_body(request))
    server = await gateway.serving(asked.model)
    check_template(server)
    messages: list[dict[str, Any]] = []
    if asked.instructions is not None:
        messages.append({"role": "developer", "content": asked.instructions})
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        for place, item in enumerate(asked.input):
            messages.append({"role": item.role, "content": text_of(item.content, f"input[{place}].content")})
    options = {}
    if asked.reasoning is not None and asked.reasoning.effort is not None:
        options["reasoning_effort"] = asked.reasoning.effort
    most = asked.max_output_tokens
    bound = _bound(asked) | ({} if most is None else {"max_tokens": most})
    generation = gateway.client.generate(
        messages,
        template_options=options,
        fit_context=most is None,
        parse="reasoning",
        **asked.sampling(server.advice),
        **bound,
    )
    return await respond(request, Choices([generation]), _Response(asked, server.advice), stream=bool(asked.stream))


def _bound(asked: ResponsesRequest) -> dict[str, Any]:
    """The option that binds the answer's text, where one does. Raises ApiError for two, or a schema that binds none."""
    form = None if asked.text is None else asked.text.format
    schema = None
    if form is not None and form.type == "json_schema":
        schema = JsonSchema(form.name, form.schema, form.strict)
    elif form is not None and form.schema:
        message, param = "text.format.schema stands with type 'json_schema' alone", "text.format.schema"
        raise ApiError(400, message, param=param, code="invalid_value")
    bound = format_options(None if form is None else ResponseFormat(form.type, schema), "text.format")
    structured = structured_options(asked.structured_outputs)
    if bound and structured:
        raise unsupported("structured_outputs", "text.format binds the answer already; give one of the two")
    return bound or structured


class _Response:
    """The answer: a reasoning item where the model reasons, then a message."""

    def __init__(self, asked: ResponsesRequest, advice: Mapping[str, float]) -> None:
        self._asked = asked
        self._advice = advice
        form = None if asked.text is None else asked.text.format
        self._format = {"type": "text"} if form is None or form.type == "text" else msgspec.to_builtins(form)
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_events = 0
        self._num_tokens = 0
        self._metrics: dict[str, Any] = {}
        self._end = ""
        self._items: list[dict[str, Any]] = []  # those that ended
        self._kind = ""  # of the item that is being written, "" for none
        self._item_id = ""
        self._text: list[str] = []

    def events(self, place: int, chunk: Chunk) -> bytes:
        """See `streaming.Answer`."""
        events: list[bytes] = []
        if not self._num_events:
            events += [
                self._event("response.created", response=self._shown("in_progress")),
                self._event("response.in_progress", response=self._shown("in_progress")),
            ]
        self._num_tokens += len(chunk.token_ids)
        for kind, text in (("reasoning", chunk.reasoning_content), ("message", chunk.text)):
            if text:
                if kind != self._kind:
                    events += self._close()
                    events += self._open(kind)
                self._text.append(text)
                name = "output_text" if kind == "message" else "reasoning_text"
                logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
                events.append(self._event(f"response.{name}.delta", **self._place(), delta=text, **logprobs))
        if chunk.finish_reason is not None:
            self._finish(chunk)
            if not self._kind and not any(item["type"] == "message" for item in self._items):
                events += self._open("message")
            events += self._close()
            status = self._status()
            events.append(self._event(f"response.{status}", response=self._shown(status)))
        return b"".join(events)

    def last_events(self) -> bytes:
        """See `streaming.Answer`."""
        return b""

    def take(self, place: int, chunk: Chunk) -> None:
        """See `streaming.Answer`."""
        self.events(place, chunk)

    def body(self) -> dict[str, Any]:
        """See `streaming.Answer`."""
        return self._shown(self._status())

    def _finish(self, chunk: Chunk) -> None:
        self._end = finish_reason(chunk)
        self._metrics = chunk.metrics or {}

    def _status(self) -> str:
        return "incomplete" if self._end == "length" else "completed"

    def _open(self, kind: str) -> list[bytes]:
        self._kind, self._text = kind, []
        self._item_id = f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}"
        item = self._item("in_progress")
        if kind == "message":
            item["content"] = []
        return [
            self._event("response.output_item.added", output_index=len(self._items), item=item),
            self._event("response.content_part.added", **self._place(), part=self._part("")),
        ]

    def _close(self) -> list[bytes]:
        if not self._kind:
            return []
        text = "".join(self._text)
        name = "output_text" if self._kind == "message" else "reasoning_text"
        logprobs: dict[str, Any] = {"logprobs": []} if self._kind == "message" else {}
        item = self._item("completed")
        events = [
            self._event(f"response.{name}.done", **self._place(), text=text, **logprobs),
            self._event("response.content_part.done", **self._place(), part=self._part(text)),
            self._event("response.output_item.done", output_index=len(self._items), item=item),
        ]
        self._items.append(item)
        self._kind = ""
        return events

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": len(self._items), "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": text}

    def _item(self, status: str) -> dict[str, Any]:
        content = [self._part("".join(self._text))]
        if self._kind == "message":
            return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}
        return {"id": self._item_id, "type": "reasoning", "summary": [], "status": status, "content": content}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _shown(self, status: str) -> dict[str, Any]:
        asked = self._asked
        usage = None
        if status != "in_progress":
            used = usage_of([self._metrics], self._num_tokens)
            usage = {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "total_tokens": used["total_tokens"],
            }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": asked.model,
            "output": list(self._items),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._advice.get("temperature", 1.0) if asked.temperature is None else asked.temperature,
            "text": {"format": self._format},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [],
            "top_p": self._advice.get("top_p", 1.0) if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "metadata": asked.metadata or {},
            "usage": usage,
        }
