"""This module makes chat messages of the input of /v1/responses: items of one answer become one message."""

from typing import Any

from lowlat.serving.http.errors import missing
from lowlat.serving.http.openai.chat import call_of, text_of
from lowlat.serving.http.openai.responses_schema import InputItem, ResponsesRequest
from lowlat.serving.http.openai.schema import ContentPart, FunctionCall

__all__ = ["input_messages"]


def input_messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    """The messages of a request. Raises ApiError for an item that lacks a field, or holds what is no text."""
    messages: list[dict[str, Any]] = []
    if asked.instructions is not None:
        messages.append({"role": "developer", "content": asked.instructions})
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
        return messages
    answer: dict[str, Any] | None = None  # the assistant's message to which further items belong
    for place, item in enumerate(asked.input):
        param = f"input[{place}]"
        if item.type == "function_call_output":
            answer = None
            call_id = _needed(item.call_id, f"{param}.call_id")
            content = _text(item.output, f"{param}.output")
            messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        elif item.type in (None, "message") and item.role != "assistant":
            answer = None
            role = _needed(item.role, f"{param}.role")
            messages.append({"role": role, "content": _text(item.content, f"{param}.content")})
        else:
            if answer is None or not _continues(answer, item):
                answer = {"role": "assistant"}
                messages.append(answer)
            _add(answer, item, param)
    return messages


def _continues(answer: dict[str, Any], item: InputItem) -> bool:
    """Whether an item belongs to the same message: its parts come in the order of reasoning, text and calls."""
    if item.type == "function_call":
        return True
    return "tool_calls" not in answer and (item.type != "reasoning" or "content" not in answer)


def _add(answer: dict[str, Any], item: InputItem, param: str) -> None:
    """Add an item of the assistant's to its message."""
    if item.type == "function_call":
        call_id = _needed(item.call_id, f"{param}.call_id")
        function = FunctionCall(_needed(item.name, f"{param}.name"), item.arguments)
        answer.setdefault("tool_calls", []).append(call_of(call_id, function))
        return
    if item.type == "reasoning":
        name, text = "thinking", "" if item.content is None else text_of(item.content, f"{param}.content")
        if not text and item.summary:
            text = text_of(item.summary, f"{param}.summary")
    else:
        name, text = "content", _text(item.content, f"{param}.content")
    if text:
        answer[name] = f"{answer[name]}\n{text}" if name in answer else text


def _text(content: str | list[ContentPart] | None, param: str) -> str:
    if content is None:
        raise missing(param)
    return text_of(content, param)


def _needed(value: str | None, param: str) -> str:
    if value is None:
        raise missing(param)
    return value
