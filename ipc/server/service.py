"""This module answers the messages of clients, with one method for each kind; `Requests` handles their requests."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET, Struct

from lowlat.ipc.engine import EngineInfo
from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.requests import Requests
from lowlat.ipc.server.generations.statistics import Statistics
from lowlat.ipc.server.generations.streams import Stream
from lowlat.ipc.server.generations.user_shares import FREE_SHARE
from lowlat.ipc.server.logs import describe
from lowlat.ipc.server.peer import Peer
from lowlat.ipc.server.peers import Peers
from lowlat.ipc.wire import (
    VERSION,
    Append,
    Cancel,
    Credit,
    Drain,
    Error,
    Finish,
    Health,
    Hello,
    Pause,
    Paused,
    Pong,
    Residence,
    Resident,
    Resume,
    ServerLimits,
    Stats,
    StatsReply,
    Submit,
    Welcome,
    WireError,
    decode_client,
    encode,
)

__all__ = ["Service"]

BUSY_RETRY_MS = 1000
FIGURES_S = 0.1  # the greatest age of an answer to STATS
STATS_COST = 10  # in messages


class Service:
    """Reads the messages of peers and answers them, in the I/O thread.

    own_uid     the server's own user; only it may end the server
    step_age    returns the seconds since the last completed step while requests run, else 0.0
    drain       asks the server to end
    shared      several users are admitted, so none may take all connections
    """

    def __init__(
        self,
        info: EngineInfo,
        limits: Limits,
        peers: Peers,
        requests: Requests,
        statistics: Statistics,
        log: logging.Logger,
        *,
        epoch: str,
        name: str,
        own_uid: int,
        step_age: Callable[[], float],
        drain: Callable[[float], None],
        shared: bool,
    ) -> None:
        self._limits = limits
        self._peers = peers
        self._requests = requests
        self._statistics = statistics
        self._log = log
        self._own_uid = own_uid
        self._step_age = step_age
        self._drain = drain
        self._shared = shared
        self._figures, self._figures_until = b"", 0.0
        self._welcome = _welcome(info, limits, epoch, name)
        self._can_sleep = info.can_sleep
        self._handlers: dict[type[Struct], Callable[[Peer, Any], None]] = {
            Hello: self._hello,
            Cancel: self._cancel,
            Credit: self._credit,
            Pause: self._pause,
            Resume: self._pause,
            Finish: self._finish,
            Stats: self._stats,
            Health: self._health,
            Drain: self._drain_asked,
            Residence: self._residence_asked,
        }

    def receive(self, peer: Peer, frames: Sequence[bytes]) -> None:
        """Handle one message; a wrong message is answered with an ERROR."""
        if peer.dropped:
            return
        if not self._affords(peer, 1):
            return
        try:
            header, body = decode_client(frames)
        except WireError as error:
            self._malformed(peer, error)
            return
        try:
            if type(header) is Submit and peer.greeted:
                self._submit(peer, header, body, sum(map(len, frames)))
            elif type(header) is Append and peer.greeted:
                self._append(peer, header, body)
            else:
                self._dispatch(peer, header)
        except Exception as error:
            self._log.error("a message was not handled: %s", describe(error), extra={"kind": type(header).__name__})
            self._wrong(peer, "internal", "the server failed on this message; its log says more")

    def _affords(self, peer: Peer, cost: int) -> bool:
        """Add a message's cost to the peer's rate; drop the peer and return False if it exceeds the limit."""
        limit = self._limits.max_messages_per_s
        if not peer.messages.exceeds(limit, cost):
            return True
        words = f"more than {limit} messages in a second, STATS counted as {STATS_COST} (max_messages_per_s)"
        self._drop(peer, words)
        return False

    def _dispatch(self, peer: Peer, header: Struct) -> None:
        if peer.greeted or type(header) is Hello:
            self._handlers[type(header)](peer, header)
        else:
            self._wrong(peer, "unexpected", "HELLO comes first")

    def _hello(self, peer: Peer, hello: Hello) -> None:
        if peer.greeted:
            self._wrong(peer, "unexpected", "HELLO comes once")
            return
        if not hello.min_version <= VERSION <= hello.max_version:
            message = f"versions {hello.min_version} to {hello.max_version} and the server's {VERSION} do not meet"
            self._wrong(peer, "version", message)
            return
        num_free = self._limits.max_clients - self._peers.num_greeted
        num_own = self._peers.num_greeted_of(peer.user.account) if self._shared else 0
        if num_free <= 0 or num_own >= FREE_SHARE * num_free:
            message = f"{self._limits.max_clients - num_free} clients are connected (max_clients "
            message += f"{self._limits.max_clients})" + (f", {num_own} of them this user's" if num_own else "")
            self._peers.send(peer, Error("busy", message, retry_after_ms=BUSY_RETRY_MS))
            self._peers.drop(peer, "busy", message)
            return
        peer.greeted, peer.name = True, hello.name
        self._peers.send(peer, self._welcome)

    def _submit(self, peer: Peer, submit: Submit, body: bytes, size: int) -> None:
        if submit.number <= peer.last_number:
            # the ERROR has no number: with it, it would seem to end the request that has that number
            message = f"number {submit.number} is not above {peer.last_number}, the last of this connection"
            self._wrong(peer, "unexpected", message, field="$.number")
            return
        peer.last_number = submit.number
        self._requests.submit(peer, submit, body, size)

    def _cancel(self, peer: Peer, cancel: Cancel) -> None:
        if cancel.number > peer.last_number:
            self._wrong(peer, "unexpected", f"number {cancel.number} was not used in this connection")
        elif (stream := peer.streams.get(cancel.number)) is not None:
            self._requests.cancel(stream)

    def _pause(self, peer: Peer, asked: Pause | Resume) -> None:
        if asked.number > peer.last_number:
            self._wrong(peer, "unexpected", f"number {asked.number} was not used in this connection")
        elif (stream := peer.streams.get(asked.number)) is not None:
            self._requests.pause(stream, resumes=isinstance(asked, Resume))
        else:
            self._peers.send(peer, Paused(asked.number, paused=False))  # it has ended

    def _append(self, peer: Peer, append: Append, body: bytes) -> None:
        if (stream := self._open_stream(peer, append.number)) is not None:
            self._requests.open_prompts.append(stream, body or append.text or "")

    def _finish(self, peer: Peer, finish: Finish) -> None:
        if (stream := self._open_stream(peer, finish.number)) is not None:
            self._requests.open_prompts.finish(stream, speculative=finish.speculative)

    def _open_stream(self, peer: Peer, number: int) -> Stream | None:
        """Return the request of an open prompt; None if it has ended, or if the message is wrong."""
        stream = peer.streams.get(number)
        if number > peer.last_number:
            self._wrong(peer, "unexpected", f"number {number} was not used in this connection")
        elif stream is not None and not stream.is_open:
            self._wrong(peer, "unexpected", f"request {number} has no open prompt: it was finished")
        else:
            return stream
        return None

    def _credit(self, peer: Peer, credit: Credit) -> None:
        if credit.number > peer.last_number:
            self._wrong(peer, "unexpected", f"number {credit.number} was not used in this connection")
            return
        stream = peer.streams.get(credit.number)
        if stream is None:
            return
        if stream.balance + credit.tokens > self._limits.max_credit:
            message = (
                f"a grant of {credit.tokens} tokens next to {stream.balance} that are left "
                f"exceeds {self._limits.max_credit} (max_credit)"
            )
            self._wrong(peer, "invalid", message)
            return
        self._requests.credit(stream, credit.tokens)

    def _health(self, peer: Peer, health: Health) -> None:
        requests = self._requests
        counts = requests.num_running, requests.num_waiting
        self._peers.send(peer, Pong(health.nonce, requests.state, self._step_age(), *counts))

    def _stats(self, peer: Peer, stats: Stats) -> None:
        if not self._affords(peer, STATS_COST - 1):
            return
        now = time.monotonic()
        if now >= self._figures_until:
            self._figures, self._figures_until = encode(StatsReply(self._requests.figures(now))), now + FIGURES_S
        self._peers.send_frame(peer, self._figures)

    def _drain_asked(self, peer: Peer, drain: Drain) -> None:
        if peer.user.uid != self._own_uid:
            self._wrong(peer, "forbidden", "only clients of the server's own user, over ipc://, may end it")
            return
        self._log.info("a client asks to drain", extra={"peer_pid": peer.user.pid})
        self._drain(drain.deadline_s)

    def _residence_asked(self, peer: Peer, asked: Residence) -> None:
        requests = self._requests

        def answer(problem: str | None = None) -> None:
            if not peer.gone:
                self._peers.send(peer, Resident(asked.nonce, requests.state, problem))

        if peer.user.uid != self._own_uid:
            answer("only clients of the server's own user, over ipc://, may let its model sleep, or wake it")
        elif not self._can_sleep:
            answer("this server's model cannot sleep: start it with can_sleep")
        else:
            self._log.info("a client asks for a sleep or a wake", extra={"asleep": asked.asleep})
            requests.residence.asked(asked.asleep, answer)

    def _malformed(self, peer: Peer, error: WireError) -> None:
        number = error.number
        if number is not None and number > peer.last_number and peer.greeted:
            # only this request is wrong; the client may have others under way
            peer.last_number = number
            self._statistics.num_bad_messages += 1
            self._requests.refuse(peer, number, "malformed", str(error), field=error.field)
            return
        self._wrong(peer, "malformed", str(error), field=error.field)

    def _wrong(self, peer: Peer, code: str, message: str, *, field: str | None = None) -> None:
        """Answer a wrong message, and drop the peer after too many in a minute."""
        self._statistics.num_bad_messages += 1
        self._log.warning("a wrong message", extra={"code": code, "field": field, "peer_pid": peer.user.pid})
        self._peers.send(peer, Error(code, message, field=field))
        if peer.bad_messages.exceeds(self._limits.max_bad_messages - 1):
            self._drop(peer, f"{self._limits.max_bad_messages} wrong messages in a minute (max_bad_messages)")

    def _drop(self, peer: Peer, message: str) -> None:
        self._statistics.num_dropped_peers += 1
        self._log.warning("dropped a client", extra={"reason": message, "peer_pid": peer.user.pid})
        self._peers.drop(peer, "dropped", message)


def _welcome(info: EngineInfo, limits: Limits, epoch: str, name: str) -> Welcome:
    return Welcome(
        version=VERSION,
        epoch=epoch,
        server=name,
        model=info.model,
        tokenizer=info.tokenizer,
        vocab_size=info.vocab_size,
        has_chat_template=info.has_chat_template,
        num_speculative_tokens=info.num_speculative_tokens,
        limits=ServerLimits(
            max_message_bytes=limits.max_message_bytes,
            max_prompt_tokens=info.max_context - 1,
            max_context=info.max_context,
            max_requests_per_client=limits.max_requests_per_client,
            max_credit=limits.max_credit,
            slow_consumer_s=limits.slow_consumer_s,
            heartbeat_interval_s=limits.heartbeat_interval_s,
            append_credit=limits.append_credit,
            max_messages_per_s=limits.max_messages_per_s,
        ),
        numerics=info.numerics or UNSET,
        sampling_defaults=dict(info.sampling_defaults) or UNSET,
    )
