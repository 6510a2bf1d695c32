"""A chunk is the output of one step for a request, as a client or a call in process returns it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from lowlat.ipc.messages import FinishReason, TokenLogprob, ToolCallDelta
from lowlat.ipc.prompt_logprobs import PromptLogprobs

if TYPE_CHECKING:
    from lowlat.ipc.engine import EngineOutput

__all__ = ["Chunk", "accepted_of", "call_parts", "logprobs_of"]


class Chunk(Struct, frozen=True, gc=False, repr_omit_defaults=True):
    """New tokens of a request with the text that is final now, or the end of the request.

    token_ids          new tokens; () in the last chunk
    text               new text; all chunks joined are the completion; "" if the model has no tokenizer
    finish_reason      in the last chunk "stop", "length" or "cancelled", else None
    stop_reason        the stop string or token id that ended the request
    logprobs           one for each token, if requested: token_id, logprob, top [(token id, logprob), ...], texts
    metrics            in the last chunk: timings, counts and, if speculation ran, `eagle_speculation`
    simulated          acceptance was imposed on the model: the tokens mean nothing
    code               why the server cancelled the request: "deadline"
    reasoning_content  with parse="reasoning" or "tools", the model's reasoning, which text then leaves out
    tool_calls         with parse="tools", calls that begin (id, name) or continue (arguments), by index
    prompt_logprobs    in one chunk before all tokens, if requested: see PromptLogprobs
    accepted           for each token whether it was an accepted draft; () if none was
    In process the last chunk may also have tokens and text: those of the step that ended the request.
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
        """Make the chunk of an engine's output of a step; metrics are those of a request that ended, else None."""
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
    """Return a byte for each token of an output: 1 for an accepted draft, else 0."""
    num_accepted = output.num_accepted
    return b"\x01" * num_accepted + bytes(len(output.token_ids) - num_accepted)


def logprobs_of(output: "EngineOutput") -> tuple[TokenLogprob, ...]:
    """Return the logprobs of an output's tokens in the form of messages and chunks."""
    return tuple(
        TokenLogprob(one.token_id, one.logprob, list(one.top), None if one.texts is None else list(one.texts))
        for one in output.logprobs or ()
    )


def call_parts(output: "EngineOutput") -> tuple[ToolCallDelta, ...]:
    """Return the parts of an output's tool calls in the form of messages and chunks."""
    return tuple(ToolCallDelta(one.index, one.arguments, one.id, one.name) for one in output.tool_calls)
