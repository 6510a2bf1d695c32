"""This module handles prompts that come in pieces: their credit, their order, and what the engine has of them."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from lowlat.ipc.engine import Codec, Growing
from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.prepare import TextThreads
from lowlat.ipc.server.generations.streams import Opening, Phase, Stream
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.peers import Peers
from lowlat.ipc.server.threads.events import (
    Command,
    DecodeFinish,
    DecodeGrow,
    DecodeOpen,
    DecodeSubmit,
    Grown,
    OpenCommand,
)
from lowlat.ipc.wire import Submit, Taken

__all__ = ["OpenPrompts", "Owner"]


class Owner(Protocol):
    """The requests of the server."""

    def hold_bytes(self, stream: Stream, num_bytes: int) -> bool:
        """Count bytes of a waiting prompt; False if there is no space for them."""

    def release_bytes(self, stream: Stream, num_bytes: int) -> None:
        """Stop counting bytes of a waiting prompt."""

    def break_off(self, stream: Stream, code: str, message: str) -> None:
        """End a request that has given no output yet with an ERROR."""

    def end_idle(self, stream: Stream, message: str) -> None:
        """End a request whose prompt got no piece for too long."""

    def start_deadline(self, stream: Stream, deadline_ms: int | None) -> None:
        """Start the timer of a request's deadline, if it has one."""


class OpenPrompts:
    """The requests whose prompts are still being written; used only under the I/O thread's lock.

    A text thread tokenizes pieces, and joins those that wait together. The token ids go to the engine if it has the
    request, else they wait in the stream. A prompt that ends before its request is submitted is submitted whole.
    """

    def __init__(
        self,
        owner: Owner,
        codec: Codec | None,
        limits: Limits,
        max_context: int,
        timers: Timers,
        peers: Peers,
        decode: Callable[[Command], None],
        text_threads: TextThreads,
    ) -> None:
        self._owner, self._codec, self._limits, self._max_context = owner, codec, limits, max_context
        self._timers, self._peers, self._decode, self._text_threads = timers, peers, decode, text_threads

    def open(self, stream: Stream, submit: Submit) -> None:
        """Give a stream the state of an open prompt."""
        text = None if self._codec is None else self._grow(self._codec, submit)
        most = self._max_context - submit.sampling.token_limit
        asked = submit.max_prompt_tokens
        opening = Opening(text, asked, most if asked is None else min(most, asked), self._limits.append_credit)
        opening.deadline_ms = submit.deadline_ms
        stream.opening = opening
        self._wait_for_more(stream, opening)

    def _grow(self, codec: Codec, submit: Submit) -> Growing:
        how: dict[str, Any] = {
            "allow_special": submit.allow_special,
            "max_context": self._max_context,
            "max_tokens": submit.sampling.token_limit,
        }
        if submit.messages is None:
            return codec.grow(add_special_tokens=submit.add_special_tokens, **how)
        return codec.grow_chat(submit.messages, submit.template_options or {}, **how)

    def begin(self, stream: Stream, submit: Submit, body: bytes) -> None:
        """Add the piece that came with a SUBMIT, if there is one."""
        text = submit.text if submit.messages is None else submit.messages[-1].content
        if (text or body) and stream.opening is not None:
            self._add(stream, stream.opening, body or text or "", is_counted=False)

    def _add(self, stream: Stream, opening: Opening, piece: str | bytes, *, is_counted: bool = True) -> None:
        if opening.pieces.add(piece, is_counted=is_counted):
            self._text_threads.grow(stream)

    def append(self, stream: Stream, piece: str | bytes) -> None:
        """Add a piece to an open prompt; an empty piece is ignored."""
        opening = stream.opening
        if not piece or opening is None or stream.cancelled or stream.phase is Phase.DECODED:
            return
        num_bytes = len(piece) if isinstance(piece, bytes) else len(piece.encode())
        if opening.balance <= 0:
            message = (
                f"a piece came without credit; {self._limits.append_credit} bytes may be under way (append_credit)"
            )
            self._owner.break_off(stream, "invalid", message)
            return
        if not self._owner.hold_bytes(stream, num_bytes):
            self._owner.break_off(stream, "busy", "the prompts that wait leave no space for this piece")
            return
        opening.balance -= num_bytes
        opening.num_pending += num_bytes
        opening.on_trial = False
        self._wait_for_more(stream, opening)
        self._add(stream, opening, piece)

    def finish(self, stream: Stream, *, speculative: bool) -> None:
        """End an open prompt, or begin its answer on trial."""
        opening = stream.opening
        if opening is None or stream.cancelled or stream.phase is Phase.DECODED:
            return
        if speculative:
            if opening.on_trial:
                return  # a repeated FINISH needs no credit, so it may cause no work and prolong no timer
            opening.on_trial = True
            self._wait_for_more(stream, opening)
        else:
            opening.finished = True
            self._timers.cancel(opening.idle)
            stream.arrived = time.monotonic()
            if stream.handed:
                stream.handed = stream.arrived
            self._owner.start_deadline(stream, opening.deadline_ms)
        if opening.pieces.end(speculative=speculative):
            self._text_threads.grow(stream)

    def grown(self, event: Grown) -> None:
        """Pass the token ids of a piece, or of an end, on to the engine or the stream."""
        stream, opening = event.stream, event.stream.opening
        if stream.over or opening is None:
            return
        self._owner.release_bytes(stream, event.num_bytes)
        opening.num_pending -= event.num_bytes
        if event.code is not None:
            self._owner.break_off(stream, event.code, event.message)
            return
        count = opening.num_certain + len(event.token_ids)
        if count > opening.max_prompt:
            message = (
                f"prompt of {count} tokens and max_tokens {stream.sampling.token_limit} exceed {self._max_context} "
            )
            message += "(max_context)"
            if opening.max_asked == opening.max_prompt:
                message = f"max_prompt_tokens: a prompt of {count} tokens exceeds {opening.max_asked}"
            self._owner.break_off(stream, "invalid", message)
            return
        if not event.ends:
            opening.num_certain = count
        if stream.phase is Phase.RUNNING:
            self._decode(
                DecodeFinish(stream.request_id, event.token_ids, event.speculative)
                if event.ends
                else DecodeGrow(stream.request_id, event.token_ids)
            )
        elif event.ends and event.speculative:
            opening.tried = event.token_ids
        else:
            opening.token_ids.extend(event.token_ids)
            opening.tried, opening.ended = None, event.ends
        self._tell(stream, opening, event.num_bytes)

    def commands(self, stream: Stream, opening: Opening) -> Iterator[OpenCommand]:
        """Yield the commands that submit a request to the engine, with the known part of its prompt."""
        name, sampling, token_ids = stream.request_id, stream.sampling, opening.token_ids
        if opening.ended:
            yield DecodeSubmit(name, token_ids, sampling, stream.cache_salt, stream.session)
        else:
            yield DecodeOpen(name, sampling, stream.cache_salt, stream.session, opening.max_asked)
            if token_ids:
                yield DecodeGrow(name, token_ids)
            if opening.tried is not None:
                yield DecodeFinish(name, opening.tried, speculative=True)
        opening.token_ids, opening.tried = [], None

    def leave(self, stream: Stream, opening: Opening) -> None:
        """Drop what waits for a request that is over."""
        self._timers.cancel(opening.idle)
        self._owner.release_bytes(stream, opening.num_pending)
        opening.num_pending = 0
        opening.pieces.clear()
        opening.token_ids, opening.tried = [], None

    def _tell(self, stream: Stream, opening: Opening, num_bytes: int) -> None:
        """Grant tokenized bytes to the client again, half the credit at a time."""
        opening.num_untold += num_bytes
        if opening.num_untold * 2 >= self._limits.append_credit and not opening.finished:
            opening.balance += opening.num_untold
            self._peers.send(stream.peer, Taken(stream.number, opening.num_untold))
            opening.num_untold = 0

    def _wait_for_more(self, stream: Stream, opening: Opening) -> None:
        self._timers.cancel(opening.idle)
        opening.idle = self._timers.after(self._limits.prompt_idle_s, self._idle, stream)

    def _idle(self, stream: Stream) -> None:
        message = f"nothing came of the open prompt for {self._limits.prompt_idle_s:g} s (prompt_idle_s)"
        self._owner.end_idle(stream, message)
