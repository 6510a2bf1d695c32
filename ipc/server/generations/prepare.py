"""This module tokenizes and checks requests: in a text thread, or at once if that is quick."""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from lowlat.errors import RequestError, is_panic
from lowlat.ipc.engine import Codec, Engine, Growing
from lowlat.ipc.messages import MAX_GRAMMAR
from lowlat.ipc.server.generations.convert import convert, encode_prompt
from lowlat.ipc.server.generations.fair_queue import FairQueue
from lowlat.ipc.server.generations.pieces import Waiting
from lowlat.ipc.server.generations.streams import Stream
from lowlat.ipc.server.logs import describe
from lowlat.ipc.server.threads.events import Grown, Post, Prepare, Prepared
from lowlat.ipc.wake import Inbox
from lowlat.ipc.wire import Sampling, Submit, unpack_tokens

__all__ = ["MAX_INLINE_BYTES", "TextThreads", "grow", "prepare"]

MAX_INLINE_BYTES = 4 * 256  # ids up to this size are checked in microseconds, less than two changes of thread cost
MAX_SHORT_BYTES = 32 << 10  # a request up to this size is tokenized in about 10 ms
MOST_TOKENS = 1 << 30  # no limit here: the engine limits these texts
GRAMMAR_PATIENCE_S = 0.1  # a grammar that takes longer to compile moves to the thread of slow ones


def prepare(
    stream: Stream,
    submit: Submit,
    body: bytes,
    engine: Engine,
    codec: Codec | None,
    log: logging.Logger,
    default_max_tokens: int,
    patience_s: float | None = None,
) -> Prepared | None:
    """Tokenize and check a request; returns the result, or the reason why it cannot be served. It never raises.

    default_max_tokens  max_tokens of a request with fit_context that names no limit
    patience_s  time for compiling its grammar, as in `Engine.compile`; returns None if that takes longer
    """
    try:
        max_context = engine.info.max_context
        if submit.result != "completion":
            return Prepared(stream, converted=convert(submit, body, codec, max_context))
        # an open prompt is checked with one token; its pieces are tokenized later
        prompt = (0,) if submit.open else _encode(submit, body, codec, max_context)
        room = max(1, max_context - len(prompt)) if submit.fit_context else None
        stream.sampling = _settled(submit.sampling, engine.info.sampling_defaults, room, default_max_tokens)
        offered = (submit.template_options or {}).get("tools")
        if offered and stream.sampling.parse == "tools" and stream.sampling.tools is None:
            tools = msgspec.json.encode(offered).decode()
            if len(tools) <= MAX_GRAMMAR:  # otherwise types of arguments are guessed from their text
                stream.sampling = msgspec.structs.replace(stream.sampling, tools=tools)
        stream.sampling = _with_texts(stream.sampling, engine, codec)
        engine.validate(prompt, stream.sampling)
        if stream.sampling.has_grammar:
            stream.grammar = engine.compile(stream.sampling, patience_s)
            if not stream.grammar:
                return None
    except RequestError as error:
        return Prepared(stream, code="invalid", message=str(error))
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        log.error("preparing a request failed: %s", describe(error), extra={"event": "prepare_failed"})
        return Prepared(stream, code="internal", message="the server failed on this request; its log says more")
    return Prepared(stream, () if submit.open else prompt)


def grow(stream: Stream, text: Growing | None, waiting: Waiting, engine: Engine, log: logging.Logger) -> Grown:
    """Tokenize pieces of an open prompt; returns the ids, or the reason why it cannot be served. It never raises.

    text  the prompt's tokenizer; None: the model has none
    """
    piece, size = waiting.content, waiting.num_bytes
    try:
        if piece is None:
            return Grown(stream, () if text is None else text.rest(), 0, ends=True, speculative=waiting.speculative)
        if isinstance(piece, str):
            if text is None:
                raise RequestError("this server's model has no tokenizer; send token ids")
            return Grown(stream, text.append(piece), size)
        token_ids = unpack_tokens(piece)
        engine.validate(token_ids, stream.sampling)
        return Grown(stream, token_ids if text is None else text.append(token_ids), size)
    except RequestError as error:
        return Grown(stream, num_bytes=size, code="invalid", message=str(error))
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        log.error("a piece of a prompt failed: %s", describe(error), extra={"event": "grow_failed"})
        return Grown(stream, num_bytes=size, code="internal", message="the server failed on a piece; its log says more")


def _settled(sampling: Sampling, defaults: Mapping[str, float], room: int | None, default_max_tokens: int) -> Sampling:
    """Fill fields that the client left out with the server's defaults, and set max_tokens.

    room  tokens that the context has left, for a request with fit_context; else None
    """
    settled: dict[str, Any] = {name: value for name, value in defaults.items() if getattr(sampling, name) is UNSET}
    most = sampling.token_limit
    if room is not None and sampling.max_tokens is UNSET:
        most = max(default_max_tokens, sampling.min_tokens)
    settled["max_tokens"] = most if room is None else min(most, room)
    return msgspec.structs.replace(sampling, **settled)


def _with_texts(sampling: Sampling, engine: Engine, codec: Codec | None) -> Sampling:
    """Tokenize the texts from which a request drafts (draft_texts). Raises RequestError."""
    if not any(isinstance(text, str) for text in sampling.draft_texts):
        return sampling
    engine.validate((0,), Sampling(draft_texts=sampling.draft_texts, max_tokens=1))  # before they are encoded
    if codec is None:
        raise RequestError("draft_texts: this server's model has no tokenizer; send token ids")
    ids = tuple(
        tuple(codec.encode(text, allow_special=False, add_special_tokens=False, max_context=MOST_TOKENS, max_tokens=1))
        if isinstance(text, str)
        else text
        for text in sampling.draft_texts
    )
    return msgspec.structs.replace(sampling, draft_texts=tuple(text for text in ids if text))


def _encode(submit: Submit, body: bytes, codec: Codec | None, max_context: int) -> Sequence[int]:
    max_tokens = submit.sampling.token_limit
    if submit.text is None and submit.messages is None:
        if len(body) // 4 >= max_context:  # checked before unpacking, which keeps the GIL for long
            raise RequestError(
                f"prompt of {len(body) // 4} tokens and max_tokens {max_tokens} exceed {max_context} (max_context)"
            )
        return unpack_tokens(body)
    if codec is None:
        raise RequestError("this server's model has no tokenizer; send token ids")
    return encode_prompt(submit, codec, max_context, 1 if submit.fit_context else max_tokens)


class _Stop(Struct, frozen=True):
    """End a text thread."""


class _TextThread(threading.Thread):
    """Prepares requests one after the other, with users and their clients by turns.

    slower  the thread that takes over requests with slow grammars; None: this thread compiles them
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        codec: Codec | None,
        offer: Post,
        log: logging.Logger,
        default_max_tokens: int,
        slower: "_TextThread | None" = None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._slower = slower
        self._engine = engine
        self._codec = codec
        self._offer = offer
        self._log = log
        self._default_max_tokens = default_max_tokens
        self._queue: FairQueue[Prepare | Stream] = FairQueue()
        self.jobs: Inbox[Prepare | Stream | _Stop] = Inbox()

    def run(self) -> None:
        jobs, queue = self.jobs, self._queue
        while True:
            job = jobs.take() if queue.num_items else jobs.wait()
            while isinstance(job, Prepare | Stream):
                self._push(job)
                job = jobs.take()
            if job is not None:
                return
            job = queue.pop()
            if isinstance(job, Stream):
                self._grow(job)
                continue
            stream, submit, body = job.take()
            if submit is None:
                continue
            patience_s = None if self._slower is None else GRAMMAR_PATIENCE_S
            prepared = prepare(
                stream, submit, body, self._engine, self._codec, self._log, self._default_max_tokens, patience_s
            )
            if prepared is not None:
                self._offer(prepared)
            elif self._slower is not None and job.put_back(submit, body):
                self._slower.jobs.put(job)

    def _push(self, job: Prepare | Stream) -> None:
        peer = job.peer if isinstance(job, Stream) else job.stream.peer
        self._queue.push(peer.user.account, peer, job)

    def _grow(self, stream: Stream) -> None:
        """Tokenize an open prompt's waiting pieces of one kind; further ones come after the turns of others."""
        opening = stream.opening
        if stream.over or opening is None:
            return
        waiting, has_more = opening.pieces.take()
        if waiting is not None:
            self._offer(grow(stream, opening.text, waiting, self._engine, self._log))
        if has_more:
            self._push(stream)


class TextThreads:
    """Runs templates and tokenizers in threads, so that neither sockets nor steps wait for them.

    Short requests have a thread of their own, so that none waits for a long one; long ones have a second. Requests with
    grammars have a third, and a fourth takes those that are long or compile slowly. Pieces of open prompts have a
    fifth, in order. The I/O thread limits what is queued here.
    """

    def __init__(
        self, engine: Engine, codec: Codec | None, offer: Post, log: logging.Logger, default_max_tokens: int
    ) -> None:
        def thread(name: str, slower: _TextThread | None = None) -> _TextThread:
            return _TextThread(name, engine, codec, offer, log, default_max_tokens, slower)

        self._short = thread("lowlat-text")
        self._long = thread("lowlat-long-text")
        self._slow_grammars = thread("lowlat-slow-grammars")
        self._grammars = thread("lowlat-grammars", self._slow_grammars)
        self._pieces = thread("lowlat-pieces")
        self._stopping = False
        self.threads = (self._short, self._long, self._grammars, self._slow_grammars, self._pieces)

    def put(self, job: Prepare) -> None:
        """Queue a request; its Prepared is offered to the I/O thread, unless the job was dropped before."""
        is_short = job.stream.num_bytes <= MAX_SHORT_BYTES
        if job.stream.sampling.has_grammar:
            (self._grammars if is_short else self._slow_grammars).jobs.put(job)
        else:
            (self._short if is_short else self._long).jobs.put(job)

    def grow(self, stream: Stream) -> None:
        """Queue an open prompt that has waiting pieces; its Grown events are offered to the I/O thread."""
        self._pieces.jobs.put(stream)

    def start(self) -> None:
        """Start the threads."""
        for thread in self.threads:
            thread.start()

    @property
    def ended(self) -> str | None:
        """The name of a thread that has ended before `stop`, if there is one."""
        if self._stopping:
            return None
        return next((thread.name for thread in self.threads if thread.ident and not thread.is_alive()), None)

    def stop(self) -> None:
        """End each thread after its current job; queued jobs are not done."""
        self._stopping = True
        for thread in self.threads:
            thread.jobs.put(_Stop())

    def close(self) -> None:
        """Close the inboxes of the threads that have ended."""
        for thread in self.threads:
            if not thread.is_alive():
                thread.jobs.close()
