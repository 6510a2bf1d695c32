"""This module adapts a model's text codec to the server, which converts prompts and chats to token ids with it."""

from collections.abc import Mapping, Sequence
from typing import Any

from lowlat.errors import RequestError
from lowlat.ipc.wire import Message
from lowlat.text import TextCodec
from lowlat.text.growing import GrowingPrompt
from lowlat.text.growing_chat import GrowingChat
from lowlat.text.templates.messages import encode_messages, grow_messages

__all__ = ["ServingCodec"]


class ServingCodec:
    """Implements `lowlat.ipc.engine.Codec` with a TextCodec, which its owner closes.

    A server gets it before the model is loaded. `bind` later sets the TextCodec, or None for a model without one.
    """

    def __init__(self, codec: TextCodec | None = None) -> None:
        self._bound = codec

    def bind(self, codec: TextCodec | None) -> None:
        """Set the TextCodec to use; None: the model has none."""
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
        """Return the token ids of a plain prompt; see `Codec.encode`. Raises RequestError."""
        return self._codec.encode(
            text,
            allow_special=allow_special,
            add_special_tokens=add_special_tokens,
            max_context=max_context,
            max_tokens=max_tokens,
        )

    def grow(
        self, *, allow_special: bool, add_special_tokens: bool, max_context: int, max_tokens: int
    ) -> GrowingPrompt:
        """Begin a plain prompt that is still being written; without a tokenizer it takes only token ids."""
        return GrowingPrompt(
            self._bound,
            max_context=max_context,
            max_tokens=max_tokens,
            allow_special=allow_special,
            add_special_tokens=add_special_tokens,
        )

    def grow_chat(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        *,
        allow_special: bool,
        max_context: int,
        max_tokens: int,
    ) -> GrowingChat | GrowingPrompt:
        """Begin a chat; the content of its last message is still being written. Pieces may be refused."""
        limits: dict[str, Any] = {"allow_special": allow_special, "max_context": max_context, "max_tokens": max_tokens}
        if self._bound is None:
            return self.grow(add_special_tokens=False, **limits)
        return grow_messages(self._bound, messages, options, **limits)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; ids outside the vocabulary have no text."""
        return self._codec.decode(token_ids, skip_special_tokens=False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone; bytes of incomplete characters are replaced."""
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
        """Return the token ids of a chat in the model's template.

        options   further variables of the template: tools, documents, enable_thinking, add_generation_prompt, ...
        Raises RequestError without a template, if it fails on these messages, and for too many tokens.
        """
        return encode_messages(
            self._codec,
            messages,
            options,
            allow_special=allow_special,
            max_context=max_context,
            max_tokens=max_tokens,
        )
