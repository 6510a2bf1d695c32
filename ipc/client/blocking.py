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
        """Ask the server to end the request; what it brought until then still comes, the last chunk "cancelled"."""
        self._client.check_process()
        connection, stream = self._submitted()
        with connection as protocol:
            protocol.cancel(stream.number)
            connection.pump()

    def pause(self) -> bool:
        """Have the request give its slot to others until `resume`; its tokens stay the same.

        Returns when the server has done so; False where the request has ended first. Raises CapacityError where the
        server has no space for what it holds (pause_gib), RequestError while its prompt is open: it runs on then.
        """
        return self._pause(resumes=False)

    def resume(self) -> None:
        """Let a paused request go on."""
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
            connection.check()  # what has come: grants, or why it has ended
            stream.check_open()
            try:
                for piece in pieces:
                    if not stream.ready and not connection.wait(stream, deadline):
                        raise stream.broken(
                            "the server took no more of the prompt (append_credit) in timeout_s", "timeout"
                        )
                    protocol.append(stream, piece)
                    connection.pump()
            except BaseException:  # the prompt may lack a part
                self._leave()
                raise

    @staticmethod
    def _keep_pace(connection: Connection) -> None:
        """Wait until a small message may be sent, where many were sent of late; other threads go on meanwhile."""
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
        """Cancel the request if it has not ended, and read no more of it."""
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
    """Client asks a lowlat server, for programs that block; it is safe for several threads at once.

    endpoint           ipc:///a/path.sock or tcp://host:port; None: LOWLAT_ENDPOINT, or the user's own default
    name               for the server's logs and statistics, at most 64 characters
    connect_timeout_s  how long the first call may wait for the server to answer
    window             tokens of a request that may wait unread here; beyond them the server pauses that request
    curve              keys, for tcp:// off this machine
    server_uid         a user next to this one and root whose server is trusted over ipc://; None: LOWLAT_SERVER_UID
    Connects on first use; when the connection was lost, the next call makes a new one. Use it as a
    context manager, or close it. Raises ConfigError for an endpoint or an option that cannot be; calls raise
    ServerGone when no server answers, Busy when it takes no more clients.
    """

    @property
    def server(self) -> Welcome:
        """The server's description: version, epoch, model, tokenizer, limits. Connects where needed."""
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
        """Send a request, and iterate over what comes of it.

        prompt            text, token ids, or chat messages: mappings with role and content
        timeout_s         after so long here, StreamError with the code "timeout" is raised
        deadline_s        after so long there, the server cancels: the last chunk has the code "deadline"
        template_options  for the model's chat template: tools, enable_thinking, ...
        fit_context       lower max_tokens to what the context has room for next to the prompt
        allow_special     special tokens that text or messages spell become these tokens; otherwise they stay text
        cache_salt        a cached prefix is shared only with this user's requests of the same salt
        session           a name of the caller's, within the salt: the prefix of its last request stays while others can
                          go. A prompt that goes on under another name forks it
        sampling          max_tokens, temperature, stop, seed, logprobs, ...: as lowlat.SamplingParams has them
        Raises RequestError for a prompt or option that cannot be served, before anything is sent where it can be
        known; Busy when the queue is full; StreamError, ServerGone when the request breaks off, with its tokens.
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
        """Send a request whose prompt is still being written: `append` pieces of it, then read what `finish` gives.

        The server reads the prompt as it comes, so that after its last word a chunk at most is left to read.
        prompt              its beginning: text, token ids, or chat messages, of which the last one's content goes on
        deadline_s          after so long from its end, the server cancels
        add_special_tokens  put around a text what the tokenizer does
        max_prompt_tokens   tokens of the prompt at most, for which memory is reserved; None: all that the context has
                            room for next to max_tokens
        The other options, and what is raised, are those of `generate`. One of which nothing comes for the server's
        prompt_idle_s is ended; it holds a slot meanwhile, which a request of higher priority may take.
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
        """Return the token ids of a text or of chat messages, as `generate` would begin with them.

        add_special_tokens  put around a text what the tokenizer does; a chat's template writes all of its own
        The other options, and what it raises, are those of `generate`; of tokens it takes at least 131,072.
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
        """Return the text of each token alone; what is no whole character is replaced. Raises what `generate` does."""
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
        """Tell whether the server serves, and the age of its last step while requests run."""
        return self._ask(ClientProtocol.health, timeout_s)

    def stats(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """Return a snapshot of the server's figures."""
        return self._ask(ClientProtocol.stats, timeout_s)

    def drain(self, deadline_s: float = 10.0, timeout_s: float = 5.0) -> Pong:
        """Have the server take no more requests, finish those it has for at most so long, and end.

        Returns when the server has understood. Raises RequestError when this user may not ask for it.
        """
        return self._ask(lambda protocol: protocol.drain(deadline_s), timeout_s)

    def sleep(self, timeout_s: float = 60.0) -> str:
        """Have the server give its model's memory on the device back, when what runs is over; returns its state.

        Requests that come meanwhile wait, and wake it. Raises CapacityError where it is refused: for a model that
        cannot sleep (can_sleep), where the host has no memory for it, and when this user may not ask for it.
        """
        return self._ask(lambda protocol: protocol.reside(asleep=True), timeout_s).state

    def wake(self, timeout_s: float = 60.0) -> str:
        """Have the server take the memory again; returns its state. Raises CapacityError where it cannot now."""
        return self._ask(lambda protocol: protocol.reside(asleep=False), timeout_s).state

    def connect(self) -> Welcome:
        """Connect now rather than on first use."""
        return self.server

    def close(self) -> None:
        """End what is under way and the connection; harmless when repeated."""
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
        """Try until a server answers HELLO: it may be about to start, or a socket file may be a dead server's."""
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
