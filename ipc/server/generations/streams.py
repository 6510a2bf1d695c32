"""A stream is a request under way: its options, its credit, and its outputs that wait to be sent."""

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
    """How far a request has come."""

    PREPARING = "preparing"  # the text thread makes token ids of it and checks it
    WAITING = "waiting"  # for a slot
    RUNNING = "running"  # inside the engine
    DECODED = "decoded"  # the engine is done with it; tokens may wait for credit


class Opening(Struct, eq=False):
    """The part of a request that an open prompt needs.

    text         gives token ids of its pieces, in a text thread; None: there is no tokenizer
    max_asked    tokens of the prompt at most, as its client said
    max_prompt   and as the context has room for, too
    balance      bytes of pieces that may still come
    deadline_ms  of the request, from its end on
    num_certain  token ids that stay, whatever comes
    token_ids    those of them that the engine does not have: it has them all once the request is inside
    tried        the token ids with which it seems to end
    ended        it has ended, and `token_ids` are all of it
    pieces       that are no token ids yet
    num_pending  their bytes
    num_untold   bytes that are, of which the client was not told
    on_trial     its client has ended it on trial, and nothing has come since
    finished     its client has ended it
    idle         ends it when it has waited for more for too long
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
    """A request of a peer; a struct, because making one costs next to nothing, and nobody compares two.

    balance    tokens that may be sent; negative by less than a step
    waiting    outputs that were not sent, in order
    cache_salt  its user and the request's own salt: only requests with the same share cached prefixes
    session    its session's name, within the salt
    grammar    the engine's compiled grammar, which stays compiled while it is held here
    job        its job in a text thread, while that prepares it
    deadline   ends it when its time has passed
    starving   ends it when it has been without credit for too long; None while it has credit
    paused     its client wants it to wait
    asked      of each pause or resume that the engine was told of, how many the client waits to hear of
    over       END or ERROR went out, or nobody is there to read it
    final      the output that ended it in the engine
    converts   it asks for no completion, and never enters the engine
    parts      of the prompt's logprobs, yet to be sent; they go before the output that has them
    opening    of one whose prompt came, or comes, in pieces
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
        """Outputs that wait and may be sent, as one message, and its number of tokens; None without credit or outputs.

        Text without tokens needs no credit, so that an end is never held up by it.
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
        """The next part of the prompt's logprobs that an output has; they need no credit."""
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
        """The END, with the engine's figures and the server's own times, in seconds from `arrived`."""
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
