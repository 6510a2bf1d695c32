"""This module answers conversions, such as text to token ids, without the engine."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from lowlat.errors import RequestError
from lowlat.ipc.engine import Codec, EngineOutput, TokenLogprobs, ToolCallPart
from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.ipc.server.generations.streams import MAX_TOKENS_PER_MESSAGE
from lowlat.ipc.wire import Submit, unpack_tokens

__all__ = ["MAX_CONVERTED", "convert", "encode_prompt"]

MAX_CONVERTED = 1 << 17  # tokens, if the context has fewer; unpacking them keeps the GIL for some milliseconds


class _Converted(Struct, frozen=True):
    """A part of a conversion, in the shape of a step's output."""

    token_ids: Sequence[int] = ()
    text: str | None = None
    request_id: str = ""
    finish_reason: str | None = "stop"
    stop_reason: str | int | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    error: str | None = None
    error_code: Literal["not_finite", "grammar", "text", "check"] | None = None
    simulated: bool = False
    num_accepted: int = 0
    reasoning: str = ""
    tool_calls: Sequence[ToolCallPart] = ()
    prompt_logprobs: PromptLogprobs | None = None


def convert(submit: Submit, body: bytes, codec: Codec | None, max_context: int) -> Sequence[EngineOutput]:
    """Return the outputs of a conversion; the last one ends the request. Raises RequestError."""
    if codec is None:
        raise RequestError("this server's model has no tokenizer")
    most = max(max_context, MAX_CONVERTED)
    if submit.result == "token_ids":
        ids = encode_prompt(submit, codec, most, 0)
        size = MAX_TOKENS_PER_MESSAGE
        return [_Converted(ids[place : place + size]) for place in range(0, len(ids), size)] or [_Converted()]
    if len(body) // 4 > most:
        raise RequestError(f"{len(body) // 4} token ids; at most {most} are converted")
    token_ids = unpack_tokens(body)
    if submit.result == "text":
        return [_Converted(text=codec.decode(token_ids))]
    return [_Converted(text=msgspec.json.encode(codec.token_texts(token_ids)).decode())]


def encode_prompt(submit: Submit, codec: Codec, max_context: int, max_tokens: int) -> Sequence[int]:
    """Return the token ids of a prompt of text or messages. Raises RequestError."""
    how: dict[str, Any] = {
        "allow_special": submit.allow_special,
        "max_context": max_context,
        "max_tokens": max_tokens,
    }
    if submit.text is not None:
        return codec.encode(submit.text, add_special_tokens=submit.add_special_tokens, **how)
    return codec.encode_chat(submit.messages or (), submit.template_options or {}, **how)
