"""The chunk that a client hands to its caller for every message of a request."""

from typing import Any

from msgspec import Struct

from lowlat.ipc.messages import FinishReason, TokenLogprob, ToolCallDelta
from lowlat.ipc.prompt_logprobs import PromptLogprobs

__all__ = ["Chunk"]


class Chunk(Struct, frozen=True, gc=False):
    """New tokens of a request and the text that they make certain; or its end.

    token_ids          new and final; () in the last chunk
    text               joined over all chunks it is the completion; "" where the model has no tokenizer
    finish_reason      None but in the last chunk: "stop", "length" or "cancelled"
    stop_reason        the stop string or token id that ended the request
    logprobs           one for each token, if asked for: token_id, logprob, top [(token id, logprob), ...], texts
    metrics            timings, counts and, where speculation ran, `eagle_speculation`; in the last chunk alone
    simulated          acceptance was imposed on the model: the tokens mean nothing
    code               why the server cancelled: "deadline"
    reasoning_content  with parse="reasoning" or "tools", the model's reasoning, which is no part of text then
    tool_calls         with parse="tools", calls that begin (id, name) or go on (arguments), by index
    prompt_logprobs    in one chunk, before all tokens, if asked for: see PromptLogprobs
    accepted           for each token whether it was an accepted draft; () where none was
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    metrics: dict[str, Any] | None = None
    simulated: bool = False
    code: str | None = None
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    accepted: tuple[bool, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
