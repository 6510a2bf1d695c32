"""This module has the blocking client, which is safe for several threads and has no thread of its own."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import msgspec

from lowlat.errors import LowlatError, ServerGone
from lowlat.ipc.chunk import Chunk
from lowlat.ipc.client.base import CLOSED, BaseClient
from lowlat.ipc.client.connection import Connection
from lowlat.ipc.client.generation import BaseGeneration, Submission
from lowlat.ipc.client.open_prompt import OpenPrompt
from lowlat.ipc.client.protocol import ClientProtocol, Reply
from lowlat.ipc.client.request import Request, make_request
from lowlat.ipc.client.settings import RETRY_S, deadline_of
from lowlat.ipc.messages import Pong, Result, Welcome
from lowlat.ipc.options import SamplingOptions
from lowlat.ipc.prompts import Prompt

__all__ = ["Client", "Generation"]

Value = TypeVar("Value")


class Generation(BaseGeneration[Connection]):
    """Generation yields the chunks of one request, in order; see BaseGeneration."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if not self._begin():
            raise StopIteration
        try:
            chunk = self._next()
        except BaseException:
            self._leave()
            raise
        self._end(chunk)
        if chunk is None:
            raise StopIteration
        return chunk

    def cancel(self) -> None:
        """Ask the server to end the request; chunks until then still come, and the last one says "cancelled"."""
        self._client.check_process()
        connection, stream = self._submitted()
        with connection as protocol:
            protocol.cancel(stream.number)
            connection.pump()

    def pause(self) -> bool:
        """Take the request off its slot, for others, until `resume`; its tokens stay the same.

        Returns when the server has done so, or False if the request ended first. Raises CapacityError if the server has
        no space for the request's state (pause_gib), and RequestError while its prompt is open; it then keeps running.
        """
        return self._pause(resumes=False)

    def resume(self) -> None:
        """Let a paused request continue."""
        self._pause(resumes=True)

    def _pause(self, *, resumes: bool) -> bool:
        self._client.check_process()
        connection, stream = self._submitted()
        with connection as protocol:
            reply = protocol.pause(stream.number, resumes=resumes)
            if not connection.wait(reply, self._deadline):
                raise stream.broken("timeout_s has passed", "timeout")
            return reply.take().paused

    def _append(self, pieces: Iterable[str | bytes], deadline: float | None) -> None:
        """Send pieces of an open prompt, each when the server takes it."""
        self._client.check_process()
        connection, stream = self._submitted()
        self._keep_pace(connection)
        with connection as protocol:
            connection.check()  # receive grants, or the error that ended the request
            stream.check_open()
            try:
                for piece in pieces:
                    if not stream.ready and not connection.wait(stream, deadline):
                        raise stream.broken(
                            "the server took no more of the prompt (append_credit) in timeout_s", "timeout"
                        )
                    protocol.append(stream, piece)
                    connection.pump()
            except BaseException:  # the prompt may be incomplete
                self._leave()
                raise

    @staticmethod
    def _keep_pace(connection: Connection) -> None:
        """Wait if many small messages were sent recently; other threads can run meanwhile."""
        with connection as protocol:
            delay = protocol.pace.delay(time.monotonic())
        if delay:
            time.sleep(delay)

    def _finish(self, *, speculative: bool, deadline: float | None) -> None:
        self._client.check_process()
        connection, stream = self._submitted()
        self._keep_pace(connection)
        with connection as protocol:
            connection.check()
            protocol.finish(stream, speculative=speculative)
            connection.pump()
        self._deadline = deadline

    def close(self) -> None:
        """Cancel the request if it has not ended, and stop reading it."""
        self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _next(self) -> Chunk | None:
        connection, stream = self._submitted()
        with connection as protocol:
            if not stream.ready and not connection.wait(stream, self._deadline):
                raise stream.broken("timeout_s has passed", "timeout")
            chunk = protocol.take(stream)
            if protocol.outgoing:
                connection.pump()
            return chunk


class Client(BaseClient[Connection, "threading.Lock"]):
    """Client is the blocking client of a lowlat server; several threads may use it at once.

    endpoint           ipc:///a/path.sock or tcp://host:port; None: LOWLAT_ENDPOINT, or the user's own default
    name               shown in the server's logs and statistics, at most 64 characters
    connect_timeout_s  how long the first call may wait for the server to answer
    window             tokens of a request that may wait unread here; the server then stops sending that request's
    curve              CURVE keys, for tcp:// to other machines
    server_uid         a user, besides this one and root, whose server is trusted over ipc://; None: LOWLAT_SERVER_UID
    The client connects on first use; after a lost connection, the next call makes a new one. Use it as a context
    manager, or close it. Raises ConfigError for an invalid endpoint or option. Calls raise ServerGone if no server
    answers, and Busy if it takes no more clients.
    """

    @property
    def server(self) -> Welcome:
        """The server's description: version, epoch, model, tokenizer, limits. Connects if necessary."""
        return self._connected().protocol.greeting.take()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        template_options: Mapping[str, Any] | None = None,
        fit_context: bool = False,
        allow_special: bool = False,
        cache_salt: str = "",
        session: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> Generation:
        """Send a request, and return an iterator over its chunks.

        prompt            text, token ids, or chat messages: mappings with role and content
        timeout_s         time in the client after which StreamError with the code "timeout" is raised
        deadline_s        time in the server after which it cancels: the last chunk has the code "deadline"
        template_options  variables of the model's chat template: tools, enable_thinking, ...
        fit_context       lower max_tokens to the space that the prompt leaves in the context
        allow_special     special tokens that text or messages spell become these tokens; otherwise they stay text
        cache_salt        cached prefixes are shared only with this user's requests of the same salt
        session           a name of your choice, within the salt: the prefix of its last request stays while others are
                          evicted. To fork, continue a prompt under another name
        sampling          max_tokens, temperature, stop, seed, logprobs, ...: the fields of lowlat.SamplingParams
        Raises RequestError for a prompt or option that cannot be served, if possible before anything is sent; Busy when
        the queue is full; StreamError or ServerGone, with the tokens so far, when the request breaks off.
        """
        deadline = deadline_of(timeout_s)
        request = make_request(
            prompt,
            sampling,
            deadline_s=deadline_s,
            template_options=template_options,
            fit_context=fit_context,
            allow_special=allow_special,
            cache_salt=cache_salt,
            session=session,
        )
        return self._send(request, deadline)

    def open_prompt(
        self,
        prompt: Prompt | None = None,
        *,
        deadline_s: float | None = None,
        template_options: Mapping[str, Any] | None = None,
        allow_special: bool = False,
        cache_salt: str = "",
        session: str = "",
        add_special_tokens: bool = True,
        max_prompt_tokens: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> OpenPrompt:
        """Send a request whose prompt is still being written: `append` its pieces, then read the answer from `finish`.

        The server reads the prompt as it comes, so that at most a chunk is left to read after its last word.
        prompt              its beginning: text, token ids, or chat messages; pieces continue the last one's content
        deadline_s          time from the prompt's end after which the server cancels
        add_special_tokens  add the tokens that the tokenizer puts around a text
        max_prompt_tokens   the most tokens of the prompt, for which memory is reserved; None: all that the context can
                            hold next to max_tokens
        Other options and errors are those of `generate`. The server ends a prompt that gets no piece for its
        prompt_idle_s. Until then the prompt holds a slot, which a request of higher priority may take.
        """
        request = make_request(
            prompt,
            sampling,
            deadline_s=deadline_s,
            template_options=template_options,
            allow_special=allow_special,
            cache_salt=cache_salt,
            session=session,
            add_special_tokens=add_special_tokens,
            is_open=True,
            max_prompt_tokens=max_prompt_tokens,
        )
        return OpenPrompt(self._send(request, None))

    def tokenize(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        template_options: Mapping[str, Any] | None = None,
        allow_special: bool = False,
        add_special_tokens: bool = True,
    ) -> tuple[int, ...]:
        """Return the token ids of a text or of chat messages, as `generate` would use them.

        add_special_tokens  add the tokens that the tokenizer puts around a text; chats have those of their template
        Other options and errors are those of `generate`. The result may have at least 131,072 tokens.
        """
        request = make_request(
            prompt,
            {},
            template_options=template_options,
            allow_special=allow_special,
            result="token_ids",
            add_special_tokens=add_special_tokens,
        )
        chunks = self._send(request, deadline_of(timeout_s))
        return tuple(token for chunk in chunks for token in chunk.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """Return the text of token ids, special tokens included. Raises what `generate` does."""
        return self._text(token_ids, "text", timeout_s)

    def token_texts(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> list[str]:
        """Return the text of each token; bytes of incomplete characters are replaced. Raises what `generate` does."""
        return msgspec.json.decode(self._text(token_ids, "token_texts", timeout_s), type=list[str])

    def _text(self, token_ids: Sequence[int], result: Result, timeout_s: float | None) -> str:
        if not token_ids:
            return "" if result == "text" else "[]"
        request = make_request(list(token_ids), {}, result=result)
        return "".join(chunk.text for chunk in self._send(request, deadline_of(timeout_s)))

    def _send(self, request: Request, deadline: float | None) -> Generation:
        submission: Submission[Connection] = Submission()
        connection = self._connected()
        with connection:
            submission.submit(connection, request)
            connection.send()
        return Generation(self, submission, deadline)

    def health(self, timeout_s: float = 5.0) -> Pong:
        """Return the server's state, and the age of its last step while requests run."""
        return self._ask(ClientProtocol.health, timeout_s)

    def stats(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """Return a snapshot of the server's figures."""
        return self._ask(ClientProtocol.stats, timeout_s)

    def drain(self, deadline_s: float = 10.0, timeout_s: float = 5.0) -> Pong:
        """Ask the server to take no more requests, finish running ones within deadline_s, and end.

        Returns when the server has confirmed. Raises RequestError if this user may not ask for it.
        """
        return self._ask(lambda protocol: protocol.drain(deadline_s), timeout_s)

    def sleep(self, timeout_s: float = 60.0) -> str:
        """Ask the server to give its model's device memory back after its running requests; returns its state.

        Requests that come meanwhile wait, and wake it. Raises CapacityError if the server refuses: the model cannot
        sleep (can_sleep), the host has no memory for it, or this user may not ask for it.
        """
        return self._ask(lambda protocol: protocol.reside(asleep=True), timeout_s).state

    def wake(self, timeout_s: float = 60.0) -> str:
        """Ask the server to take the memory again; returns its state. Raises CapacityError if it cannot now."""
        return self._ask(lambda protocol: protocol.reside(asleep=False), timeout_s).state

    def connect(self) -> Welcome:
        """Connect now instead of on first use."""
        return self.server

    def close(self) -> None:
        """End all requests and the connection; harmless when repeated."""
        self._end(CLOSED)

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_lock(self) -> "threading.Lock":
        return threading.Lock()

    def _ask(self, question: Callable[[ClientProtocol], Reply[Value]], timeout_s: float) -> Value:
        deadline = deadline_of(timeout_s)
        connection = self._connected()
        with connection as protocol:
            reply = question(protocol)
            if not connection.wait(reply, deadline):
                raise self._no_answer(timeout_s)
            return reply.take()

    def _connected(self) -> Connection:
        self.check_process()
        with self._connecting:
            if self._connections:
                connection = self._connections[0]
                if connection.has_news:
                    with connection:
                        connection.check()
                if connection.protocol.failure is None:
                    return connection
                self._connections.clear()
            self._check_open()
            connection = self._connect()
            self._connections.append(connection)
            return connection

    def _connect(self) -> Connection:
        """Try until a server answers HELLO: it may be starting, and a socket file may be left from a dead server."""
        deadline = time.monotonic() + self._settings.connect_timeout_s
        failure: LowlatError | None = None
        while True:
            try:
                connection = Connection(*self._settings.open(time.monotonic()))
            except ServerGone as error:
                failure = error
            else:
                try:
                    with connection as protocol:
                        connection.wait(protocol.greeting, deadline)
                    if protocol.welcome is not None and protocol.failure is None:
                        return connection
                except BaseException:
                    connection.close("interrupted")
                    raise
                failure = protocol.failure or failure  # the last attempt may have no time left to learn why
                connection.close("no answer")
            if failure is not None and not isinstance(failure, ServerGone):
                raise failure
            if time.monotonic() >= deadline:
                raise self._settings.unreachable(failure)
            time.sleep(RETRY_S)
