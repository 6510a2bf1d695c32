"""This module defines what a prompt is, for clients and in process: text, token ids, or the messages of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lowlat.errors import RequestError
from lowlat.ipc.messages import MAX_MESSAGES, Message

__all__ = ["Prompt", "chat_messages"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def chat_messages(entries: Sequence[Any]) -> list[Message]:
    """Check the messages of a chat and convert them; content that is a list of text parts is joined by newlines.

    Raises RequestError naming the message and field that is wrong.
    """
    if len(entries) > MAX_MESSAGES:
        raise RequestError(f"a chat has at most {MAX_MESSAGES} messages, got {len(entries)}")
    plain = [_plain(place, entry) if isinstance(entry, Mapping) else entry for place, entry in enumerate(entries)]
    try:
        return msgspec.convert(plain, list[Message])
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        raise RequestError(f"messages{path.rstrip('`')}: {reason}") from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"messages: {error}") from error


def _plain(place: int, entry: Mapping[str, Any]) -> dict[str, Any]:
    message = dict(entry)
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        where = f"messages[{place}].content"
        message["content"] = "\n".join(_text_of(part, f"{where}[{number}]") for number, part in enumerate(content))
    return message


def _text_of(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if kind == "text" and isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise RequestError(f"{where} is of the type {kind!r:.40}; content is text, or parts of the type 'text'")
    return text
