"""This module joins the chunks of a request into one answer, for clients and for calls in process."""

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from lowlat.errors import LowlatError, RequestError, StreamError
from lowlat.ipc.chunk import Chunk
from lowlat.ipc.messages import FinishReason, TokenLogprob
from lowlat.ipc.prompt_logprobs import PromptLogprobs

__all__ = ["Answer", "AnswerParts", "Received", "ToolCall"]

SHOWN = 40  # characters of a text in a repr


class ToolCall(Struct, frozen=True):
    """ToolCall is a call that the model asks for.

    id         identifies the call in the message that answers it
    name       the name of the function
    arguments  JSON text, as the model wrote it
    """

    id: str
    name: str
    arguments: str = ""

    def values(self) -> dict[str, Any]:
        """Return the arguments by name. Raises RequestError for text that is no JSON object, as when it was cut off."""
        try:
            values = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"tool call {self.name!r:.80}: its arguments are no JSON: {error!s:.200}") from error
        if not isinstance(values, dict):
            raise RequestError(f"tool call {self.name!r:.80}: its arguments are no JSON object: {self.arguments!r:.80}")
        return values

    def result(self, content: object) -> dict[str, Any]:
        """Make the chat message that answers the call; a result that is no text becomes JSON. Raises RequestError."""
        if not isinstance(content, str):
            try:
                content = json.dumps(content, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(f"the result of tool call {self.name!r:.80} is no JSON: {error!s:.200}") from error
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content}


class Answer(Struct, frozen=True):
    """The complete answer to a request.

    text             the completion; with parsing (`SamplingParams.parse`) only its content
    token_ids        all tokens, those of reasoning and calls included
    finish_reason    "stop", "length" or "cancelled"
    stop_reason      the stop string or token id that ended the answer
    reasoning        with parsing, the model's reasoning
    tool_calls       with parsing, the calls that the model asks for
    logprobs         one for each token, if requested
    prompt_logprobs  those of the prompt, if requested
    metrics          timings, counts and, if speculation ran, `eagle_speculation`
    accepted         for each token whether it was an accepted draft
    simulated        acceptance was imposed on the model: the tokens mean nothing
    code             why a server cancelled the request: "deadline"
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    metrics: dict[str, Any] = {}
    accepted: tuple[bool, ...] = ()
    simulated: bool = False
    code: str | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message with this answer, for the next turn of a chat."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["thinking"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[:SHOWN]}..."
        calls = f", calls {', '.join(call.name for call in self.tool_calls)}" if self.tool_calls else ""
        return f"Answer({text!r}, {len(self.token_ids)} tokens{calls}, finish_reason={self.finish_reason!r})"


class Received:
    """The token ids and the text of an answer that were received so far."""

    __slots__ = ("_texts", "_token_ids")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._texts: list[str] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, token_ids: Sequence[int], text: str) -> None:
        """Add the next tokens and their text."""
        self._token_ids.extend(token_ids)
        if text:
            self._texts.append(text)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens."""
        return tuple(self._token_ids)

    @property
    def text(self) -> str:
        """All text."""
        return "".join(self._texts)

    def broken(self, message: str, code: str, error: type[StreamError] = StreamError) -> StreamError:
        """Return the error of a request that broke off; it has the tokens and the text received so far."""
        return error(message, token_ids=self.token_ids, text=self.text, code=code)


class AnswerParts:
    """Collects the chunks of an answer.

    received  the tokens and text so far
    last      the last chunk; None until it comes
    """

    def __init__(self) -> None:
        self.received = Received()
        self.last: Chunk | None = None
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str, str, list[str]]] = {}
        self._logprobs: list[TokenLogprob] | None = None
        self._prompt: PromptLogprobs | None = None
        self._accepted: list[bool] = []
        self._simulated = False

    def add(self, chunk: Chunk) -> None:
        """Add the next chunk."""
        self.received.add(chunk.token_ids, chunk.text)
        self._accepted.extend(chunk.accepted or (False,) * len(chunk.token_ids))
        if chunk.reasoning_content:
            self._reasoning.append(chunk.reasoning_content)
        for part in chunk.tool_calls:
            if part.id is not None:
                self._calls[part.index] = (part.id, part.name or "", [part.arguments])
            else:
                self._calls[part.index][2].append(part.arguments)
        if chunk.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs.extend(chunk.logprobs)
        self._prompt = chunk.prompt_logprobs or self._prompt
        self._simulated = self._simulated or chunk.simulated
        if chunk.finish_reason is not None:
            self.last = chunk

    def answer(self) -> Answer:
        """Return the whole answer. Raises LowlatError before the last chunk."""
        last = self.last
        if last is None or last.finish_reason is None:
            raise LowlatError("the answer has not ended yet; read its chunks to the last one")
        return Answer(
            text=self.received.text,
            token_ids=self.received.token_ids,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            reasoning="".join(self._reasoning),
            tool_calls=tuple(ToolCall(id, name, "".join(parts)) for id, name, parts in self._calls.values()),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            prompt_logprobs=self._prompt,
            metrics=last.metrics or {},
            accepted=tuple(self._accepted),
            simulated=self._simulated,
            code=last.code,
        )
