"""A prompt, of a client and in process, is text, token ids, or the messages of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lowlat.errors import RequestError
from lowlat.ipc.messages import MAX_MESSAGES, Message

__all__ = ["Prompt", "chat_messages"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


def chat_messages(entries: Sequence[Any]) -> list[Message]:
    """Checked messages of a chat. Raises RequestError naming the message and field that cannot be."""
    if len(entries) > MAX_MESSAGES:
        raise RequestError(f"a chat has at most {MAX_MESSAGES} messages, got {len(entries)}")
    plain = [dict(entry) if isinstance(entry, Mapping) else entry for entry in entries]
    try:
        return msgspec.convert(plain, list[Message])
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"chat messages: {error}") from error
