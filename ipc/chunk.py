"""A chunk is what a caller gets of each step of a request, from a client and in process."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from lowlat.ipc.messages import FinishReason, TokenLogprob, ToolCallDelta
from lowlat.ipc.prompt_logprobs import PromptLogprobs

if TYPE_CHECKING:
    from lowlat.ipc.engine import EngineOutput

__all__ = ["Chunk", "accepted_of", "call_parts", "logprobs_of"]


class Chunk(Struct, frozen=True, gc=False, repr_omit_defaults=True):
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
    In process the last chunk may have tokens and text, too: those of the step that ended the request.
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

    @classmethod
    def of(
        cls, output: "EngineOutput", finish_reason: FinishReason | None, metrics: Mapping[str, Any] | None
    ) -> "Chunk":
        """An engine's output of a step as the caller's chunk; metrics are the request's where it ended."""
        num_accepted, tokens = output.num_accepted, tuple(output.token_ids)
        return cls(
            token_ids=tokens,
            text=output.text or "",
            finish_reason=finish_reason,
            stop_reason=output.stop_reason,
            logprobs=logprobs_of(output) if output.logprobs else None,
            metrics=None if metrics is None else dict(metrics),
            simulated=output.simulated,
            reasoning_content=output.reasoning,
            tool_calls=call_parts(output) if output.tool_calls else (),
            accepted=tuple(map(bool, accepted_of(output))) if num_accepted else (),
            prompt_logprobs=output.prompt_logprobs,
        )


def accepted_of(output: "EngineOutput") -> bytes:
    """A byte for each token of an output: 1 for an accepted draft."""
    num_accepted = output.num_accepted
    return b"\x01" * num_accepted + bytes(len(output.token_ids) - num_accepted)


def logprobs_of(output: "EngineOutput") -> tuple[TokenLogprob, ...]:
    """The logprobs of an output's tokens, as messages and chunks have them."""
    return tuple(
        TokenLogprob(one.token_id, one.logprob, list(one.top), None if one.texts is None else list(one.texts))
        for one in output.logprobs or ()
    )


def call_parts(output: "EngineOutput") -> tuple[ToolCallDelta, ...]:
    """The parts of tool calls of an output, as messages and chunks have them."""
    return tuple(ToolCallDelta(one.index, one.arguments, one.id, one.name) for one in output.tool_calls)
