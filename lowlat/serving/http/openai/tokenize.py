"""This module serves /tokenize and /detokenize in vLLM's shapes: text or messages to token ids, and ids to text."""

from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lowlat.ipc.prompts import Prompt
from lowlat.serving.http.errors import invalid, name_fields
from lowlat.serving.http.gateway import gateways_of
from lowlat.serving.http.openai.bodies import decode, decoder_of
from lowlat.serving.http.openai.chat import chat_messages, check_template
from lowlat.serving.http.openai.schema import ChatMessage, Tool, unsupported
from lowlat.serving.http.openai.structured import Calling
from lowlat.serving.http.streaming import read_body

__all__ = ["detokenize", "tokenize"]

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /tokenize: a prompt, or messages.

    add_special_tokens      put around a prompt what the tokenizer does; a chat's template writes all of its own
    return_token_strs       adds the text of each token
    add_generation_prompt, continue_final_message  end a chat as a request would
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    chat_template: None = None
    mm_processor_kwargs: None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


_TOKENIZE = decoder_of(TokenizeRequest)
_DETOKENIZE = decoder_of(DetokenizeRequest)


async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt, as a request would use them."""
    asked = decode(_TOKENIZE, await read_body(request))
    gateway = await gateways_of(request).of(asked.model)
    server = await (gateway.server() if asked.model is None else gateway.serving(asked.model))
    name_fields(request, {"prompt": "prompt" if asked.messages is None else "messages"})
    prompt: Prompt
    options: dict[str, Any] | None = None
    if asked.messages is not None and asked.prompt is None:
        check_template(server)
        if asked.add_special_tokens:
            raise unsupported("add_special_tokens", "the chat template writes them")
        prompt, options = chat_messages(asked.messages), dict(asked.chat_template_kwargs or {})
        if asked.tools:
            options["tools"] = Calling.of(asked.tools, None, None).for_template()
        endings = {name: getattr(asked, name) for name in ("add_generation_prompt", "continue_final_message")}
        options |= {name: value for name, value in endings.items() if value is not None}
    elif asked.prompt is not None and asked.messages is None:
        prompt = asked.prompt
    else:
        raise invalid("prompt", "give one of prompt and messages")
    tokens = await gateway.client.tokenize(
        prompt, template_options=options, add_special_tokens=asked.add_special_tokens is not False
    )
    texts = await gateway.client.token_texts(tokens) if asked.return_token_strs else None
    return JSONResponse(
        {
            "count": len(tokens),
            "max_model_len": server.limits.max_context,
            "tokens": list(tokens),
            "token_strs": texts,
        }
    )


async def detokenize(request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    asked = decode(_DETOKENIZE, await read_body(request))
    gateway = await gateways_of(request).of(asked.model)
    server = await (gateway.server() if asked.model is None else gateway.serving(asked.model))
    wrong = next((token for token in asked.tokens if token >= server.vocab_size), None)
    if wrong is not None:
        raise invalid("tokens", f"tokens: {wrong}; ids are 0 to {server.vocab_size - 1}")
    return JSONResponse({"prompt": await gateway.client.detokenize(asked.tokens)})
