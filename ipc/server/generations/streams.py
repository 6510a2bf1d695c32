"""A stream is the server's record of a request: its options, its credit, and outputs that wait to be sent."""

import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from lowlat.ipc.chunk import accepted_of, call_parts, logprobs_of
from lowlat.ipc.engine import EngineOutput, Growing
from lowlat.ipc.server.generations.pieces import Pieces
from lowlat.ipc.server.generations.timers import Timer
from lowlat.ipc.wire import (
    End,
    FinishReason,
    PromptPart,
    Sampling,
    Tokens,
    pack_tokens,
)

if TYPE_CHECKING:
    from lowlat.ipc.server.peer import Peer
    from lowlat.ipc.server.threads.events import Prepare

__all__ = ["Opening", "Phase", "Stream"]

MAX_TOKENS_PER_MESSAGE = 4096


class Phase(Enum):
    """The phase of a request."""

    PREPARING = "preparing"  # a text thread tokenizes and checks it
    WAITING = "waiting"  # it waits for a slot
    RUNNING = "running"  # it is inside the engine
    DECODED = "decoded"  # the engine has finished it; tokens may wait for credit


class Opening(Struct, eq=False):
    """The state of a request's open prompt.

    text         tokenizes its pieces, in a text thread; None: there is no tokenizer
    max_asked    the client's limit of the prompt's tokens
    max_prompt   that limit, or a lower one from the context
    balance      bytes of pieces that the client may still send
    deadline_ms  the request's deadline, from the end of the prompt on
    num_certain  number of token ids that no later piece can change
    token_ids    those of them that the engine does not have yet; [] once the request is inside it
    tried        the last token ids of an end on trial
    ended        the prompt has ended, and `token_ids` are all of it
    pieces       pieces that are not tokenized yet
    num_pending  their bytes
    num_untold   bytes that were tokenized, but not yet granted again to the client
    on_trial     the client has ended the prompt on trial, and has sent nothing since
    finished     the client has ended the prompt
    idle         the timer that ends the request if no piece comes for too long
    """

    text: Growing | None
    max_asked: int | None
    max_prompt: int
    balance: int
    deadline_ms: int | None = None
    num_certain: int = 0
    token_ids: list[int] = []
    tried: Sequence[int] | None = None
    ended: bool = False
    pieces: Pieces = field(default_factory=Pieces)
    num_pending: int = 0
    num_untold: int = 0
    on_trial: bool = False
    finished: bool = False
    idle: Timer | None = None


class Stream(Struct, eq=False):
    """A request of a peer; a struct, as these are cheap to make.

    balance    tokens that may be sent; it may be negative by less than a step
    waiting    outputs that were not sent yet, in order
    cache_salt  its user and the request's own salt; only requests with the same value share cached prefixes
    session    its session's name, within the salt
    grammar    the engine's compiled grammar; the engine keeps it compiled while this reference exists
    job        its job in a text thread, while that prepares it
    deadline   the timer of its deadline
    starving   the timer that ends it without credit; None while it has credit
    paused     its client wants it paused
    asked      for each pause or resume that was sent to the engine, the number of answers that the client expects
    over       END or ERROR was sent, or the peer is gone
    final      the output that ended it in the engine
    converts   it asks for a conversion, and never enters the engine
    parts      parts of the prompt's logprobs still to be sent; they go before the output that has them
    opening    the state of a prompt that comes in pieces, kept after its end; else None
    arrived    when all of its prompt had come
    """

    peer: "Peer"
    number: int
    request_id: str
    sampling: Sampling
    num_bytes: int
    balance: int
    cache_salt: str = ""
    session: str = ""
    grammar: object = None
    prompt: Sequence[int] = ()
    job: "Prepare | None" = None
    phase: Phase = Phase.PREPARING
    over: bool = False
    sequence: int = 0
    num_sent: int = 0
    waiting: list[EngineOutput] = []  # each has its own: msgspec copies it
    deadline: Timer | None = None
    starving: Timer | None = None
    cancelled: bool = False
    paused: bool = False
    asked: list[int] = []
    final: EngineOutput | None = None
    converts: bool = False
    parts: Iterator[PromptPart] | None = None
    opening: Opening | None = None
    metrics: Mapping[str, Any] = {}
    arrived: float = field(default_factory=time.monotonic)
    handed: float = 0.0
    first: float = 0.0
    last: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether its prompt is still being written."""
        return self.opening is not None and not self.opening.finished

    def next_message(self) -> tuple[Tokens, int] | None:
        """Make one message of the waiting outputs that credit allows; returns it and its number of tokens, or None.

        Text without tokens needs no credit, so it never delays an END.
        """
        waiting = self.waiting
        if waiting and (part := self._next_part(waiting[0])) is not None:
            self.sequence += 1
            return Tokens(self.number, self.sequence - 1, b"", prompt_logprobs=part), 0
        if not waiting or (self.balance <= 0 and waiting[0].token_ids):
            return None
        output = waiting[0]
        token_ids, text = output.token_ids, output.text
        logprobs, tool_calls = list(logprobs_of(output)), list(call_parts(output))
        simulated, reasoning = output.simulated, output.reasoning
        accepted = accepted_of(output) if output.num_accepted or len(waiting) > 1 else b""
        self.balance -= len(token_ids)
        num_taken = 1
        if len(waiting) > 1:
            ids, texts = list(token_ids), [text]
            while num_taken < len(waiting) and len(ids) < MAX_TOKENS_PER_MESSAGE:
                output = waiting[num_taken]
                if output.token_ids and self.balance <= 0:
                    break
                num_taken += 1
                self.balance -= len(output.token_ids)
                ids.extend(output.token_ids)
                texts.append(output.text)
                logprobs += logprobs_of(output)
                simulated = simulated or output.simulated
                reasoning += output.reasoning
                tool_calls += call_parts(output)
                accepted += accepted_of(output)
            token_ids = ids
            text = None if all(part is None for part in texts) else "".join(part or "" for part in texts)
        del waiting[:num_taken]
        message = Tokens(
            self.number,
            self.sequence,
            pack_tokens(token_ids),
            text,
            logprobs or None,
            simulated,
            reasoning or None,
            tool_calls or None,
            accepted if any(accepted) else None,
        )
        self.sequence += 1
        num_tokens = len(token_ids)
        self.num_sent += num_tokens
        return message, num_tokens

    def _next_part(self, output: EngineOutput) -> PromptPart | None:
        """Return the next part of the prompt's logprobs in an output, if any is left; parts need no credit."""
        if output.prompt_logprobs is None:
            return None
        if self.parts is None:
            self.parts = output.prompt_logprobs.parts()
        return next(self.parts, None)

    def end_message(
        self,
        finish_reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        code: str | None = None,
        message: str | None = None,
    ) -> End:
        """Make the END, with the engine's figures and the server's own times, in seconds from `arrived`."""
        times = {
            "queued_s": self.handed - self.arrived if self.handed else None,
            "time_to_first_token_s": self.first - self.arrived if self.first else None,
            "total_s": time.monotonic() - self.arrived,
        }
        return End(
            number=self.number,
            sequence=self.sequence,
            num_tokens=self.num_sent,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            code=code,
            message=message,
            metrics={**self.metrics, "server": times},
        )
