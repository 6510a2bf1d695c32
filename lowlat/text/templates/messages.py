"""This module converts chat messages to the form that a model's template reads, and encodes them to token ids."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec

from lowlat.errors import ConfigError, RequestError
from lowlat.ipc.messages import Message
from lowlat.text.codec import TextCodec
from lowlat.text.growing_chat import GrowingChat

__all__ = ["call_values", "encode_messages", "grow_messages"]

TAKEN = ("self", "messages", "allow_special", "max_context", "max_tokens")


def encode_messages(
    codec: TextCodec,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    *,
    allow_special: bool,
    max_context: int,
    max_tokens: int,
) -> list[int]:
    """Encode a chat as the model's template renders it.

    options   further variables of the template: tools, documents, enable_thinking, ...; and continue_final_message and
              add_generation_prompt, which decide how the chat ends, see `TextCodec.apply_chat_template`
    Raises RequestError without a template, when it fails on these messages, and for too many tokens.
    """
    values = _values(codec, messages, options)
    how = {"allow_special": allow_special, "max_context": max_context, "max_tokens": max_tokens, **options}
    with _as_refusal():
        return codec.encode_chat(values, **how)


def grow_messages(
    codec: TextCodec,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    *,
    allow_special: bool,
    max_context: int,
    max_tokens: int,
) -> GrowingChat:
    """Make a chat whose last message's content is still to come; the arguments are those of `encode_messages`.

    Errors come with the first piece.
    """
    limits: dict[str, Any] = {"allow_special": allow_special, "max_context": max_context, "max_tokens": max_tokens}

    def write(content: str) -> str:
        whole = [*messages[:-1], msgspec.structs.replace(messages[-1], content=content)]
        values = _values(codec, whole, options)
        with _as_refusal():
            return codec.chat_text(values, **limits, **options)

    def encode(text: str) -> list[int]:
        return codec.chat_ids(text, **limits)

    return GrowingChat(
        lambda: codec.cuts, write, encode, lambda text: codec.check_length(text, max_context, max_tokens)
    )


def _values(codec: TextCodec, messages: Sequence[Message], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert messages for the template. Raises RequestError for options with reserved names."""
    for name in TAKEN:
        if name in options:
            raise RequestError(f"template_options may not hold {name!r}")
    return [_for_template(message, codec) for message in messages]


@contextmanager
def _as_refusal() -> Iterator[None]:
    """Turn ConfigError into RequestError: a template that exceeds its limits fails only this request."""
    try:
        yield
    except ConfigError as error:
        raise RequestError(str(error)) from error


def _for_template(message: Message, codec: TextCodec) -> dict[str, Any]:
    """Convert a message for the model's template: templates have different names for its parts.

    Absent fields stay absent: templates would render None as a word.
    """
    value: dict[str, Any] = msgspec.to_builtins(message)
    if "thinking" in value:
        value["reasoning_content"] = value["thinking"]
    if value["role"] == "developer" and not codec.template_has("developer"):
        value["role"] = "system"
    for call in value.get("tool_calls") or ():
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = call_values(function["arguments"])
    return value


def call_values(arguments: str) -> Any:
    """Parse a call's arguments for templates, which read a JSON object; other JSON values stay text.

    Invalid JSON, such as truncated arguments, becomes a JSON string, so that the prompt stays well-formed.
    """
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(arguments, ensure_ascii=False)
    return value if isinstance(value, dict) else arguments


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
