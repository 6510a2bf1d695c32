"""This module reads chat messages as a model's template does, and gives their token ids."""

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
    """Token ids of a chat as the model's template writes it.

    options   what else the template may use: tools, documents, enable_thinking, ...; and how the chat ends, by
              continue_final_message and add_generation_prompt, see `TextCodec.apply_chat_template`
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
    """A chat of whose last message the content is still to come; the arguments are those of `encode_messages`.

    Nothing is refused before its first piece.
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
    """Messages as the template reads them. Raises RequestError for options that it may not have."""
    for name in TAKEN:
        if name in options:
            raise RequestError(f"template_options may not hold {name!r}")
    return [_for_template(message, codec) for message in messages]


@contextmanager
def _as_refusal() -> Iterator[None]:
    """A template that uses too much is about this request: others go on."""
    try:
        yield
    except ConfigError as error:
        raise RequestError(str(error)) from error


def _for_template(message: Message, codec: TextCodec) -> dict[str, Any]:
    """A message as the model's template reads it: templates differ in what they call its parts.

    Fields that are left out stay absent: None would be written as a word.
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
    """A call's arguments as templates read them: a JSON object, unless the caller sent another value.

    What is no JSON, such as arguments that were cut off, becomes a string of JSON, so that a prompt stays well-formed.
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
