"""This module implements the client's side of one connection, without input or output.

A driver sends the messages in `outgoing`, passes every received frame to `receive`, calls `tick` in time while a caller
waits, and `fail` when the connection breaks.

The server sends a request's tokens as fast as its reader takes them. The first grant is the window; tokens that were
taken are granted again, half a window at a time. So at most the tokens of a window and of one step wait unread in a
client. Pieces of an open prompt are sent only within the bytes that the server grants.
"""

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Generic, TypeVar

from msgspec import UNSET

from lowlat.errors import Busy, CapacityError, ConfigError, LowlatError, RequestError, ServerGone, StreamError
from lowlat.ipc.answer import Received
from lowlat.ipc.chunk import Chunk
from lowlat.ipc.client.pace import Pace
from lowlat.ipc.client.request import Request
from lowlat.ipc.messages import (
    VERSION,
    Append,
    Bye,
    Cancel,
    Credit,
    Drain,
    End,
    Error,
    Finish,
    Health,
    Hello,
    Pause,
    Paused,
    Pong,
    PromptPart,
    Residence,
    Resident,
    Resume,
    Stats,
    StatsReply,
    Taken,
    Tokens,
    Welcome,
)
from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.ipc.wire import WireError, decode_server, encode, unpack_tokens

__all__ = ["DEFAULT_WINDOW", "HEARTBEAT_INTERVAL_S", "SILENCE_S", "ClientProtocol", "Reply", "Stream", "Waiter"]

DEFAULT_WINDOW = 1024
HEARTBEAT_INTERVAL_S = 1.0
SILENCE_S = 4.0  # with the interval, a silent server is detected within 5 s
_ENDING = frozenset({"draining", "shutdown", "device", "stalled"})  # codes that say that the server ends
_REFUSED = frozenset({"malformed", "unexpected", "invalid", "forbidden"})

Value = TypeVar("Value")


class Waiter(ABC):
    """A result that a caller can wait for; `failure` is the error that comes in its place."""

    __slots__ = ("failure",)

    failure: LowlatError | None

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether there is something to take, or a failure."""

    @property
    def goes_on(self) -> bool:
        """Whether more may come after it."""
        return False


class Reply(Waiter, Generic[Value]):
    """The answer to a question."""

    __slots__ = ("value",)

    def __init__(self, failure: LowlatError | None = None) -> None:
        self.failure = failure
        self.value: Value | None = None

    @property
    def ready(self) -> bool:
        return self.value is not None or self.failure is not None

    def take(self) -> Value:
        """Return the answer, or raise the failure."""
        if self.failure is not None:
            raise self.failure
        if self.value is None:
            raise LowlatError("the answer has not come yet")
        return self.value


class Stream(Waiter):
    """A request under way: its chunks that were not taken yet, and all tokens and text received.

    is_open   its prompt is still being written: the server sends only grants, or an error
    balance   bytes of its prompt that may still be sent
    """

    __slots__ = (
        *("_prompt", "_received", "_sequence", "_untold"),
        *("balance", "chunks", "ended", "is_open", "number", "window"),
    )

    def __init__(self, number: int, window: int, *, is_open: bool = False, balance: int = 0) -> None:
        self.is_open, self.balance = is_open, balance
        self.failure = None
        self.number = number
        self.window = window
        self.chunks: list[Chunk] = []  # at most a window
        self.ended = False
        self._sequence = 0
        self._untold = 0  # tokens taken and not yet granted again
        self._prompt: list[PromptPart] = []
        self._received = Received()

    @property
    def ready(self) -> bool:
        return bool(self.chunks) or self.ended or (self.is_open and self.balance > 0)

    @property
    def goes_on(self) -> bool:
        return not self.ended

    def check_open(self) -> None:
        """Raise the error that ended the request, or RequestError if its prompt was finished."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        if self.ended:
            raise RequestError(f"request {self.number} has ended: its prompt takes no more")
        if not self.is_open:
            raise RequestError(f"request {self.number} has no open prompt: it was finished")

    def take(self) -> Chunk | None:
        """Return the next chunk, or None after the last. Raises the failure after all chunks before it."""
        if self.chunks:
            chunk = self.chunks.pop(0)
            self._untold += len(chunk.token_ids)
            return chunk
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        if not self.ended:
            raise LowlatError(f"request {self.number} has nothing to take yet")
        return None

    def grant(self) -> int:
        """Return the number of tokens to grant now; 0 until half the window was taken."""
        if self.ended or self._untold * 2 < self.window:
            return 0
        granted, self._untold = self._untold, 0
        return granted

    def tokens(self, message: Tokens) -> None:
        """Handle a TOKENS. Raises WireError, or StreamError for a gap."""
        token_ids = unpack_tokens(message.token_ids)
        self._follows(message.sequence)
        if message.prompt_logprobs is not None:
            self._prompt_part(message.prompt_logprobs)
            if not token_ids and message.text is None:
                return
        text = message.text or ""
        self._received.add(token_ids, text)
        logprobs = None if message.logprobs is None else tuple(message.logprobs)
        self.chunks.append(
            Chunk(
                token_ids,
                text,
                logprobs=logprobs,
                simulated=message.simulated,
                reasoning_content=message.reasoning or "",
                tool_calls=tuple(message.tool_calls or ()),
                accepted=() if message.accepted is None else tuple(map(bool, message.accepted)),
            )
        )

    def _prompt_part(self, part: PromptPart) -> None:
        """Add a part of the prompt's logprobs, and make a chunk after the last one. Raises WireError."""
        self._prompt.append(part)
        if part.start + len(part.token_ids) // 4 < part.total:
            return
        try:
            self.chunks.append(Chunk(prompt_logprobs=PromptLogprobs.of_parts(self._prompt)))
        except ValueError as error:
            raise WireError(str(error)) from None
        self._prompt.clear()

    def end(self, message: End) -> None:
        """Handle an END. Raises StreamError if a message before it is missing."""
        self._follows(message.sequence)
        if message.num_tokens != len(self._received):
            raise self.broken(
                f"the server sent {message.num_tokens} tokens and {len(self._received)} came", code="lost"
            )
        if message.finish_reason == "error" or message.code not in (None, "deadline"):
            code = message.code or "internal"
            raise self.broken(message.message or f"the server ended it: {code}", code=code)
        last = Chunk(
            finish_reason=message.finish_reason,
            stop_reason=message.stop_reason,
            metrics=message.metrics,
            code=message.code,
        )
        self.chunks.append(last)
        self.ended = True

    def broken(self, reason: str, code: str, kind: type[StreamError] | None = None) -> StreamError:
        """Make an error that has the tokens and text received so far."""
        if kind is None:
            kind = ServerGone if code in _ENDING else StreamError
        return self._received.broken(f"request {self.number}, after {len(self._received)} tokens: {reason}", code, kind)

    def fail(self, error: LowlatError) -> None:
        """End the request with an error."""
        self.failure = error
        self.ended = True

    def _follows(self, sequence: int) -> None:
        if sequence != self._sequence:
            raise self.broken(
                f"message {self._sequence} should have come and message {sequence} did; what lies between is lost",
                code="lost",
            )
        self._sequence += 1


class ClientProtocol:
    """The state of a connection, from HELLO to its end.

    outgoing   messages to send, in order, each a tuple of frames
    pace       delays small messages of which there may be many
    welcome    the server's answer to HELLO, None before it
    failure    why the connection failed, else None; a connection never recovers
    """

    def __init__(self, endpoint: str, name: str, window: int, now: float) -> None:
        self.endpoint = endpoint
        self.outgoing: deque[tuple[bytes, ...]] = deque()
        self.pace = Pace()
        self.welcome: Welcome | None = None
        self.failure: LowlatError | None = None
        self.greeting: Reply[Welcome] = Reply()
        self._window = window
        self._streams: dict[int, Stream] = {}
        self._num_submitted = 0
        self._num_asked = 0
        self._healths: dict[int, Reply[Pong]] = {}
        self._stats: deque[Reply[dict[str, Any]]] = deque()
        self._residences: dict[int, Reply[Resident]] = {}
        self._pauses: dict[int, deque[Reply[Paused]]] = {}
        self._draining: Reply[Pong] | None = None
        self._heard = self._attended = self._probed = now
        self._send(Hello(min_version=VERSION, max_version=VERSION, name=name))

    @property
    def num_streams(self) -> int:
        """The number of requests that have not ended."""
        return len(self._streams)

    def submit(self, request: Request) -> Stream:
        """Send a request. Raises RequestError if it is too long, or the failure of a broken connection."""
        if self.failure is not None:
            raise self.failure
        if self.welcome is None:
            raise LowlatError("the server has not answered HELLO yet")
        limits = self.welcome.limits
        window = min(self._window, limits.max_credit)
        frames = request.frames(self._num_submitted, window, limits.max_message_bytes)
        is_open = request.submit.open
        if is_open and limits.append_credit is UNSET:
            raise RequestError(f"the server at {self.endpoint} ({self.welcome.server}) takes no open prompts")
        balance = 0 if limits.append_credit is UNSET else limits.append_credit
        stream = Stream(self._num_submitted, window, is_open=is_open, balance=balance)
        self._num_submitted += 1
        self._streams[stream.number] = stream
        self.outgoing.append(frames)
        return stream

    def take(self, stream: Stream) -> Chunk | None:
        """Return the stream's next chunk, and grant its tokens to the server again; see Stream.take."""
        chunk = stream.take()
        granted = stream.grant()
        if granted:
            self._send(Credit(stream.number, granted))
        return chunk

    def cancel(self, number: int) -> None:
        """Ask the server to end a request; END ends the stream."""
        if number in self._streams:
            self._send(Cancel(number))

    def pause(self, number: int, *, resumes: bool) -> Reply[Paused]:
        """Ask the server to pause or resume a request; the reply comes when it is done, or refused."""
        reply: Reply[Paused] = Reply(self.failure)
        if number not in self._streams:
            reply.value = Paused(number, paused=False)
        elif reply.failure is None:
            self._pauses.setdefault(number, deque()).append(reply)
            self._send(Resume(number) if resumes else Pause(number))
        return reply

    def append(self, stream: Stream, piece: str | bytes) -> None:
        """Send a piece of an open prompt that has credit (`Stream.ready`). Raises what Stream.check_open does."""
        stream.check_open()
        if isinstance(piece, str):
            stream.balance -= len(piece.encode())
            self._send(Append(stream.number, piece))
        else:
            stream.balance -= len(piece)
            self.outgoing.append((encode(Append(stream.number)), piece))

    def finish(self, stream: Stream, *, speculative: bool) -> None:
        """End an open prompt, or begin its answer on trial. Raises what Stream.check_open does."""
        stream.check_open()
        stream.is_open = speculative
        self._send(Finish(stream.number, speculative))

    def abandon(self, number: int) -> Stream | None:
        """Cancel a request that has no reader, and drop its later messages. Returns its stream."""
        self.cancel(number)
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.ended = True
        return stream

    def health(self) -> Reply[Pong]:
        """Ask for a PONG."""
        reply: Reply[Pong] = Reply(self.failure)
        if reply.failure is None:
            self._num_asked += 1
            self._healths[self._num_asked] = reply
            self._send(Health(self._num_asked))
        return reply

    def stats(self) -> Reply[dict[str, Any]]:
        """Ask for figures."""
        reply: Reply[dict[str, Any]] = Reply(self.failure)
        if reply.failure is None:
            self._stats.append(reply)
            self._send(Stats())
        return reply

    def drain(self, deadline_s: float) -> Reply[Pong]:
        """Ask the server to finish and end; the PONG that follows confirms it."""
        if self.failure is None:
            self._send(Drain(deadline_s))
        self._draining = self.health()
        return self._draining

    def reside(self, *, asleep: bool) -> Reply[Resident]:
        """Ask the server to let its model sleep, or to wake it; the reply comes when that is done, or refused."""
        reply: Reply[Resident] = Reply(self.failure)
        if reply.failure is None:
            self._num_asked += 1
            self._residences[self._num_asked] = reply
            self._send(Residence(self._num_asked, asleep))
        return reply

    def attend(self, now: float) -> None:
        """Note that a caller begins to wait; silence before that does not count, as nobody received."""
        if now - self._attended > HEARTBEAT_INTERVAL_S:
            self._heard = self._probed = now
        self._attended = now

    def tick(self, now: float) -> float:
        """Send HEALTH to a silent server, or fail after SILENCE_S; returns the seconds until the next tick is due."""
        self._attended = now
        if self.failure is not None or self.welcome is None:
            return HEARTBEAT_INTERVAL_S
        silence = now - self._heard
        if silence >= SILENCE_S:
            self.fail(f"nothing came from the server for {silence:.1f} s")
        elif now - max(self._heard, self._probed) >= HEARTBEAT_INTERVAL_S:
            self._probed = now
            self._send(Health(0))
        return max(0.0, max(self._heard, self._probed) + HEARTBEAT_INTERVAL_S - now)

    def receive(self, frame: bytes, now: float) -> Waiter | None:
        """Handle a message of the server; returns the waiter that it is for. After a failure every waiter is ready."""
        self._heard = now
        try:
            message = decode_server(frame)
            if isinstance(message, (Tokens, End)):
                return self._stream_message(message)
            return self._control(message)
        except WireError as error:
            self.fail(f"the server sent what is not of the wire's format: {error}")
            return None

    def fail(self, reason: str, error: LowlatError | None = None) -> None:
        """End all requests and questions, because the connection is lost, or was refused with this error."""
        if self.failure is not None:
            return
        self.failure = error or ServerGone(f"{self.endpoint}: {reason}", code="gone")
        for stream in self._streams.values():
            stream.fail(stream.broken(reason, "gone", ServerGone))
        replies: list[Reply[Any]] = [self.greeting, *self._healths.values(), *self._stats, *self._residences.values()]
        replies += [reply for waiting in self._pauses.values() for reply in waiting]
        for reply in replies:
            if not reply.ready:
                reply.failure = self.failure
        self._streams.clear()
        self._healths.clear()
        self._stats.clear()
        self._residences.clear()
        self._pauses.clear()
        self.outgoing.clear()

    def _send(self, header: Any) -> None:
        self.outgoing.append((encode(header),))

    def _stream_message(self, message: Tokens | End) -> Stream | None:
        stream = self._streams.get(message.number)
        if stream is None:
            return None  # it was abandoned; the two crossed
        try:
            if isinstance(message, Tokens):
                stream.tokens(message)
                return stream
            stream.end(message)
        except StreamError as error:
            stream.fail(error)
            if isinstance(message, Tokens):
                self.cancel(stream.number)
        del self._streams[stream.number]
        return stream

    def _control(self, message: object) -> Waiter | None:
        if isinstance(message, Welcome):
            return self._welcomed(message)
        if isinstance(message, Pong):
            reply = self._healths.pop(message.nonce, None)
            if reply is not None:
                reply.value = message
            return reply
        if isinstance(message, Resident):
            resident = self._residences.pop(message.nonce, None)
            if resident is not None and message.problem is not None:
                resident.failure = CapacityError(message.problem)
            elif resident is not None:
                resident.value = message
            return resident
        if isinstance(message, Paused):
            return self._paused(message)
        if isinstance(message, Taken):
            stream = self._streams.get(message.number)
            if stream is not None:
                stream.balance += message.num_bytes
            return stream
        if isinstance(message, StatsReply):
            if not self._stats:
                return None
            answered = self._stats.popleft()
            answered.value = message.stats
            return answered
        if isinstance(message, Error):
            return self._error(message)
        if isinstance(message, Bye):
            if self._draining is not None and not self._draining.ready and message.reason == "shutdown":
                self._draining.value = Pong(0, "draining", 0.0, 0, 0)  # it had nothing to finish
            said = f": {message.message}" if message.message else ""
            self.fail(f"the server said goodbye ({message.reason}){said}")
        return None  # a kind that this version does not know

    def _paused(self, message: Paused) -> Waiter | None:
        waiting = self._pauses.get(message.number)
        if not waiting:
            return None
        reply = waiting.popleft()
        if not waiting:
            del self._pauses[message.number]
        if message.problem is None:
            reply.value = message
        else:
            text = f"request {message.number} runs on: {message.problem}"
            reply.failure = CapacityError(text) if message.code == "busy" else RequestError(text)
        return reply

    def _welcomed(self, message: Welcome) -> Waiter | None:
        if self.welcome is not None:
            self.fail("the server was replaced by another")
        elif message.version != VERSION:
            text = f"the server at {self.endpoint} speaks version {message.version} and this client {VERSION}"
            self.fail(text, ConfigError(text))
        else:
            self.welcome = self.greeting.value = message
            if message.limits.max_messages_per_s is not UNSET:
                self.pace = Pace(message.limits.max_messages_per_s)
        return self.greeting

    def _error(self, message: Error) -> Waiter | None:
        if message.number is not None:
            stream = self._streams.pop(message.number, None)
            if stream is not None:
                stream.fail(_exception(message, stream))
            return stream
        if message.code == "forbidden" and self._draining is not None and not self._draining.ready:
            self._draining.failure = _exception(message, None)
            return self._draining
        error = _exception(message, None)
        self.fail(f"the server refused a message: {error}", error)
        return None


def _exception(message: Error, stream: Stream | None) -> LowlatError:
    where = f" (at {message.field})" if message.field else ""
    text = f"{message.message}{where}"
    if message.code == "busy":
        retry_after_s = None if message.retry_after_ms is None else message.retry_after_ms / 1000.0
        return Busy(text, retry_after_s)
    if message.code == "version":
        return ConfigError(text)
    if message.code in _REFUSED:
        return RequestError(text)
    if stream is not None:
        return stream.broken(text, message.code)
    return (ServerGone if message.code in _ENDING else StreamError)(text, code=message.code)
