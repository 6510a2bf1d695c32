"""Requests become token ids and are checked: in the text thread, or at once where that takes microseconds."""

import logging
import threading
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from lowlat.errors import RequestError
from lowlat.ipc.engine import Codec, Engine
from lowlat.ipc.server.generations.streams import Stream
from lowlat.ipc.server.logs import describe
from lowlat.ipc.server.threads.events import Post, Prepare, Prepared
from lowlat.ipc.server.threads.wake import Inbox
from lowlat.ipc.wire import Submit, unpack_tokens

__all__ = ["MAX_INLINE_BYTES", "TextThread", "prepare"]

MAX_INLINE_BYTES = 4 * 256  # a prompt of ids up to this is checked in microseconds: two changes of thread cost more


def prepare(
    stream: Stream, submit: Submit, body: bytes, engine: Engine, codec: Codec | None, log: logging.Logger
) -> Prepared:
    """Token ids of a request, or the reason why it cannot be served; never an exception."""
    try:
        prompt = _encode(submit, body, codec, engine.info.max_context)
        if submit.fit_context:
            room = max(1, engine.info.max_context - len(prompt))
            if room < submit.sampling.max_tokens:
                stream.sampling = msgspec.structs.replace(submit.sampling, max_tokens=room)
        engine.validate(prompt, stream.sampling)
    except RequestError as error:
        return Prepared(stream, code="invalid", message=str(error))
    except Exception as error:
        log.error("preparing a request failed: %s", describe(error), extra={"event": "prepare_failed"})
        return Prepared(stream, code="internal", message="the server failed on this request; its log says more")
    return Prepared(stream, prompt)


def _encode(submit: Submit, body: bytes, codec: Codec | None, max_context: int) -> Sequence[int]:
    if submit.text is None and submit.messages is None:
        if len(body) // 4 >= max_context:  # before it becomes numbers, which takes the GIL for long
            raise RequestError(
                f"prompt of {len(body) // 4} tokens and max_tokens {submit.sampling.max_tokens} exceed "
                f"{max_context} (max_context)"
            )
        return unpack_tokens(body)
    if codec is None:
        raise RequestError("this server's model has no tokenizer; send token ids")
    if submit.text is not None:
        return codec.encode(submit.text)
    return codec.encode_chat(submit.messages or (), submit.template_options or {})


class _Stop(Struct, frozen=True):
    """End the text thread."""


class TextThread(threading.Thread):
    """Runs templates and tokenizers, so that neither sockets nor steps wait for them.

    Its queue holds what the I/O thread admitted, which bounds it.
    """

    def __init__(self, engine: Engine, codec: Codec | None, offer: Post, log: logging.Logger) -> None:
        super().__init__(name="lowlat-text", daemon=True)
        self._engine = engine
        self._codec = codec
        self._offer = offer
        self._log = log
        self._jobs: Inbox[Prepare | _Stop] = Inbox()

    def put(self, job: Prepare) -> None:
        """Queue a request; its Prepared is offered to the I/O thread."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End after what is queued."""
        self._jobs.put(_Stop())

    def close(self) -> None:
        """Give back what wakes it, once it has ended."""
        self._jobs.close()

    def run(self) -> None:
        while isinstance(job := self._jobs.wait(), Prepare):
            if job.stream.over:
                self._offer(Prepared(job.stream))
            else:
                self._offer(prepare(job.stream, job.submit, job.body, self._engine, self._codec, self._log))
