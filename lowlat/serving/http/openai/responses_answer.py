"""This module makes the answer of /v1/responses, as typed events and as a whole: reasoning, text and calls."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from lowlat.ipc.client import Chunk
from lowlat.ipc.messages import ToolCallDelta
from lowlat.serving.http.openai.answers import finish_reason, reasoning_tokens, usage_of
from lowlat.serving.http.openai.logprobs import chat_logprobs
from lowlat.serving.http.openai.responses_schema import ResponsesRequest
from lowlat.serving.http.openai.structured import Calling
from lowlat.serving.http.streaming import event

__all__ = ["ResponsesAnswer"]


class ResponsesAnswer:
    """One answer. One that must be a call has no message: text in it is a call that was cut off."""

    def __init__(self, asked: ResponsesRequest, calling: Calling, advice: Mapping[str, float]) -> None:
        self._calling = calling
        self._advice = advice
        self._asked = asked
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_events = 0
        self._num_tokens = 0
        self._metrics: dict[str, Any] = {}
        self._end = ""
        self._items: list[dict[str, Any]] = []  # complete items
        self._item: _Item | None = None  # the item being written

    def events(self, place: int, chunk: Chunk) -> bytes:
        """See `streaming.Answer`."""
        events: list[bytes] = []
        if not self._num_events:
            events += [
                self._event("response.created", response=self._shown("in_progress")),
                self._event("response.in_progress", response=self._shown("in_progress")),
            ]
        self._num_tokens += len(chunk.token_ids)
        if chunk.reasoning_content:
            events += self._text(_Reasoning, chunk.reasoning_content, [])
        if chunk.text and not self._calling.forced:
            logprobs = chat_logprobs(chunk.logprobs)["content"] if chunk.logprobs else []
            events += self._text(_Message, chunk.text, logprobs)
        for call in chunk.tool_calls:
            if self._calling.parallel or not call.index:
                events += self._call(call)
        if chunk.finish_reason is not None:
            events += self._finish(chunk)
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

    def _text(self, kind: "type[_Message | _Reasoning]", text: str, logprobs: list[dict[str, Any]]) -> list[bytes]:
        events: list[bytes] = []
        if not isinstance(self._item, kind):
            events += self._close()
            events += self._open(kind(f"{kind.PREFIX}_{uuid.uuid4().hex}"))
        return [*events, *self._add(text, logprobs)]

    def _call(self, call: ToolCallDelta) -> list[bytes]:
        events: list[bytes] = []
        if call.id is not None:
            events += self._close()
            events += self._open(_Call(f"fc_{uuid.uuid4().hex}", call.id, call.name or ""))
        return [*events, *(self._add(call.arguments, []) if call.arguments else ())]

    def _finish(self, chunk: Chunk) -> list[bytes]:
        self._end = finish_reason(chunk)
        self._metrics = chunk.metrics or {}
        events: list[bytes] = []
        if self._item is None and not self._items and not self._calling.forced:
            events += self._open(_Message(f"{_Message.PREFIX}_{uuid.uuid4().hex}"))
        status = self._status()
        events += self._close(status)
        return [*events, self._event(f"response.{status}", response=self._shown(status))]

    def _status(self) -> str:
        return "incomplete" if self._end == "length" else "completed"

    def _open(self, item: "_Item") -> list[bytes]:
        self._item = item
        events = [self._event("response.output_item.added", output_index=len(self._items), item=item.begun())]
        if isinstance(item, _PartedItem):
            events.append(self._event("response.content_part.added", **self._place(item), part=item.part()))
        return events

    def _add(self, text: str, logprobs: list[dict[str, Any]]) -> list[bytes]:
        item = self._item
        if item is None:
            return []
        item.texts.append(text)
        item.logprobs += logprobs
        more = {"logprobs": logprobs} if item.HAS_LOGPROBS else {}
        return [self._event(f"response.{item.NAME}.delta", **self._place(item), delta=text, **more)]

    def _close(self, status: str = "completed") -> list[bytes]:
        """End the item that is being written, where there is one."""
        item = self._item
        if item is None:
            return []
        shown = item.shown(status)
        more = {"logprobs": item.logprobs} if item.HAS_LOGPROBS else {}
        events = [self._event(f"response.{item.NAME}.done", **self._place(item), **item.whole(), **more)]
        if isinstance(item, _PartedItem):
            events.append(self._event("response.content_part.done", **self._place(item), part=item.part()))
        events.append(self._event("response.output_item.done", output_index=len(self._items), item=shown))
        self._items.append(shown)
        self._item = None
        return events

    def _place(self, item: "_Item") -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self._items)}
        return place | {"content_index": 0} if isinstance(item, _PartedItem) else place

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _shown(self, status: str) -> dict[str, Any]:
        asked = self._asked
        is_over = status != "in_progress"
        used = usage_of([self._metrics], self._num_tokens, reasoning_tokens(self._metrics))
        usage = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used["completion_tokens_details"],
            "total_tokens": used["total_tokens"],
        }
        text = asked.text
        form = None if text is None or text.format is None or text.format.type == "text" else text.format
        verbosity = {} if text is None or text.verbosity is None else {"verbosity": text.verbosity}
        effort = None if asked.reasoning is None else asked.reasoning.effort
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "model": asked.model,
            "output": list(self._items),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": None},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": self._advice.get("temperature", 1.0) if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"} if form is None else msgspec.to_builtins(form), **verbosity},
            "tool_choice": msgspec.to_builtins(asked.tool_choice) or "auto",
            "tools": [_tool(tool) for tool in msgspec.to_builtins(asked.tools or [])],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": self._advice.get("top_p", 1.0) if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "user": asked.user,
            "metadata": asked.metadata or {},
            "usage": usage if is_over else None,
        }


def _tool(fields: dict[str, Any]) -> dict[str, Any]:
    """A function of a request as an answer repeats it."""
    return {"description": None, "parameters": None, "strict": None, **fields}


class _Item(ABC):
    """An item that is being written; its text is that of a call's arguments, where it is one.

    NAME          of its events
    HAS_LOGPROBS  its events have logprobs
    """

    PREFIX = NAME = ""
    HAS_LOGPROBS = False

    def __init__(self, id: str) -> None:
        self.id = id
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def begun(self) -> dict[str, Any]:
        """The item as it is shown before it has any text."""
        return self.shown("in_progress")

    def whole(self) -> dict[str, Any]:
        """The fields of the event that ends its text."""
        return {"text": self.text}

    @abstractmethod
    def shown(self, status: str) -> dict[str, Any]:
        """The item itself."""


class _PartedItem(_Item):
    """An item whose text stands in a part of its content."""

    def begun(self) -> dict[str, Any]:
        return {**self.shown("in_progress"), "content": []}

    @abstractmethod
    def part(self) -> dict[str, Any]:
        """The part of its content."""


class _Message(_PartedItem):
    PREFIX, NAME = "msg", "output_text"
    HAS_LOGPROBS = True

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def shown(self, status: str) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": [self.part()]}


class _Reasoning(_PartedItem):
    PREFIX, NAME = "rs", "reasoning_text"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def shown(self, status: str) -> dict[str, Any]:
        return {"id": self.id, "type": "reasoning", "summary": [], "status": status, "content": [self.part()]}


class _Call(_Item):
    NAME = "function_call_arguments"

    def __init__(self, id: str, call_id: str, name: str) -> None:
        super().__init__(id)
        self._call_id, self._name = call_id, name

    def whole(self) -> dict[str, Any]:
        return {"name": self._name, "arguments": self.text}

    def shown(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
        }
