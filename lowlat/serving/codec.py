"""A model's text codec as the server's Codec: prompts and chats to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lowlat.errors import ConfigError, RequestError
from lowlat.ipc.wire import Message
from lowlat.text import TextCodec

__all__ = ["ServingCodec"]


class ServingCodec:
    """Encodes for `lowlat.ipc.engine.Codec`; the TextCodec stays its owner's to close.

    A server has it before the model is loaded: `bind` then says which codec, or that the model has none.
    """

    def __init__(self, codec: TextCodec | None = None) -> None:
        self._bound = codec

    def bind(self, codec: TextCodec | None) -> None:
        """Encode by this codec from now on."""
        self._bound = codec

    @property
    def _codec(self) -> TextCodec:
        if self._bound is None:
            raise RequestError("this server's model has no tokenizer; send token ids")
        return self._bound

    def encode(
        self,
        text: str,
        *,
        allow_special: bool,
        add_special_tokens: bool = True,
        max_context: int,
        max_tokens: int,
    ) -> list[int]:
        """Token ids of a plain prompt, with what the tokenizer puts around a text. Raises RequestError."""
        return self._codec.encode(
            text,
            allow_special=allow_special,
            add_special_tokens=add_special_tokens,
            max_context=max_context,
            max_tokens=max_tokens,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included; ids outside the vocabulary have none."""
        return self._codec.decode(token_ids, skip_special_tokens=False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token alone; what is no whole character is replaced."""
        codec = self._codec
        return [codec.token_bytes(token).decode("utf-8", "replace") for token in token_ids]

    def encode_chat(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        *,
        allow_special: bool,
        max_context: int,
        max_tokens: int,
    ) -> list[int]:
        """Token ids of a chat as the model's template writes it.

        options   what else the template may use: tools, documents, enable_thinking, add_generation_prompt, ...
        Raises RequestError without a template, when it fails on these messages, and for too many tokens.
        """
        codec = self._codec
        values = [_for_template(message, codec) for message in messages]
        for name in ("self", "messages", "allow_special", "max_context", "max_tokens"):
            if name in options:
                raise RequestError(f"template_options may not hold {name!r}")
        if not isinstance(options.get("add_generation_prompt", True), bool):
            raise RequestError("template_options: add_generation_prompt must be true or false")
        how = {"allow_special": allow_special, "max_context": max_context, "max_tokens": max_tokens, **options}
        try:
            return codec.encode_chat(values, **how)
        except ConfigError as error:  # the template uses too much, which is about this request: others go on
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
    return value
