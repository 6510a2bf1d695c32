"""This module starts and ends a server: its endpoint, threads, signals and drain."""

import gc
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from os import geteuid
from types import FrameType, TracebackType
from typing import Self

from lowlat.errors import ConfigError, LowlatError
from lowlat.ipc.endpoint import EndpointLock, parse_endpoint
from lowlat.ipc.engine import Codec, Engine
from lowlat.ipc.limits import Limits
from lowlat.ipc.server.admission import Curve, Users
from lowlat.ipc.server.generations.prepare import TextThreads
from lowlat.ipc.server.generations.requests import Requests
from lowlat.ipc.server.generations.residence import Keeper
from lowlat.ipc.server.generations.statistics import Statistics
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.peers import Peers
from lowlat.ipc.server.router import Router
from lowlat.ipc.server.service import Service
from lowlat.ipc.server.threads.decode_thread import DecodeThread
from lowlat.ipc.server.threads.events import DecodeStop, DrainAsked, Event, Failed, ResidenceAsked
from lowlat.ipc.server.threads.io_thread import IoThread
from lowlat.ipc.server.threads.spin import Spin
from lowlat.ipc.server.threads.wakeable_flag import Attention
from lowlat.ipc.server.threads.watchdog import StepClock, Watchdog
from lowlat.ipc.signals import ending_signals
from lowlat.ipc.wake import Inbox

__all__ = ["Server"]

FATAL_S = 0.9  # the longest time from a failure to the end of the process
JOIN_S = 5.0
EXIT_FATAL = 1


class Server:
    """Serves an engine on an endpoint.

    engine      an Engine, or a function that makes one in the decode thread, where it will be used
    codec       converts text and chats to token ids; None: only token ids are served
    endpoint    ipc:///a/path.sock, or tcp://host:port; after `start`, `endpoint` has the port that `*` became
    allow_uids  users admitted over ipc:// besides the server's own
    curve       keys for tcp://; needed beyond the loopback
    name        program and version, as clients are told
    keeper      shares the device's memory among several servers; None: this server alone uses it
    Raises ConfigError for an endpoint that cannot be served.
    """

    def __init__(
        self,
        engine: Engine | Callable[[], Engine],
        codec: Codec | None,
        endpoint: str,
        limits: Limits | None = None,
        *,
        allow_uids: Iterable[int] = (),
        curve: Curve | None = None,
        name: str = "lowlat",
        log: logging.Logger | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self._where = parse_endpoint(endpoint)
        self.endpoint = endpoint
        self.limits = Limits() if limits is None else limits
        self.epoch = secrets.token_hex(16)
        self._codec = codec
        self._name = name
        self._keeper = keeper
        self._users = Users(geteuid(), frozenset(allow_uids))
        self._curve = curve
        self._log = logging.getLogger("lowlat.server") if log is None else log
        if self._where.scheme == "tcp" and not self._where.loopback and curve is None:
            raise ConfigError(f"endpoint {endpoint!r:.200} can be reached by other machines and needs CURVE keys")
        if self._where.scheme == "ipc" and curve is not None:
            raise ConfigError("CURVE is for tcp:// endpoints; over ipc:// the kernel says who a client is")
        self._clock = StepClock(self.limits)
        self._inbox: Inbox[Event] = Inbox()
        self._decode = DecodeThread(_maker(engine), self._clock, self._log)
        self._decode.post, self._decode.offer = self._post, self._offer
        self._watchdog = Watchdog(self._clock, self.limits, self._stalled)
        self._lock: EndpointLock | None = None
        self._text: TextThreads | None = None
        self._io: IoThread | None = None
        self._attention = Attention()  # raised at the server's end, for the thread in `run`
        self._failed = False
        self._num_signals = 0
        self._runs = False
        self._closed = False
        self.exit_code: int | None = None

    def start(self) -> None:
        """Lock the endpoint, make the engine, and serve. Raises ConfigError, and errors of making the engine."""
        if self._closed or self._decode.ident is not None:
            raise LowlatError("a server starts once")
        try:
            if self._where.path is not None:
                self._lock = EndpointLock(self._where.path, shared=bool(self._users.others))
            self._decode.start()
            self._decode.ready.wait()
            if self._decode.error is not None:
                raise self._decode.error
            self._serve()
        except BaseException:
            self.close()
            raise

    def run(self) -> int:
        """Serve until drained or failed, and return the exit code.

        In the main thread one of `ending_signals` drains the server, and a second one ends it at once. A failure ends
        the process within a second, even if a device's thread hangs.
        """
        if self._closed and self._io is not None:
            return self.exit_code or 0
        is_main = threading.current_thread() is threading.main_thread()
        self._runs = True
        with (
            closing(self._attention),
            self._attention.signals(ending_signals(), self._signalled) if is_main else nullcontext(),
        ):
            if self._io is None:
                self.start()
            if is_main:
                # Objects loaded so far live as long as the server, so garbage collections can skip them.
                gc.collect()
                gc.freeze()
            self._attention.wait()
            if is_main and self._failed:
                self._leave_process()
            self.close()
        return self.exit_code or 0

    def drain(self, deadline_s: float | None = None) -> None:
        """Refuse new requests, let running ones finish within deadline_s (None: drain_s), and end. Any thread."""
        self._inbox.put(DrainAsked(self.limits.drain_s if deadline_s is None else deadline_s))

    def reside(self, *, asleep: bool) -> None:
        """Obey the keeper: let the engine sleep after its running requests, or wake it. Any thread."""
        self._inbox.put(ResidenceAsked(asleep))

    def close(self) -> None:
        """End at once and release everything; harmless when repeated. After a hung step some resources stay."""
        if self._closed:
            return
        self._closed = True
        if self._io is not None:
            self.drain(0.0)
            self._io.join()
            self.exit_code = self._io.exit_code
        self._watchdog.stop()
        if self._text is not None:
            self._text.stop()
        self._decode.put(DecodeStop())
        text_threads = () if self._text is None else self._text.threads
        for thread in (*text_threads, self._decode, self._watchdog):
            if thread.ident is not None:
                thread.join(JOIN_S)
        if self._lock is not None:
            self._lock.release()
        if self._text is not None:
            self._text.close()
        if not self._decode.is_alive():
            self._decode.close()
        self._inbox.close()
        if self._runs:
            self._attention.set()  # `run` closes it
        else:
            self._attention.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        engine, limits, log = self._decode.engine, self.limits, self._log
        timers, statistics = Timers(), Statistics()
        router = Router(self._where, self._lock, limits, timers, log, users=self._users, curve=self._curve)
        self.endpoint = router.endpoint
        peers = Peers(limits, timers, router)
        shared = bool(self._users.others) if self._lock is not None else self._curve is not None
        self._text = TextThreads(engine, self._codec, self._offer, log, limits.default_max_tokens)
        requests = Requests(
            engine,
            self._codec,
            limits,
            timers,
            statistics,
            self._clock,
            peers,
            log,
            epoch=self.epoch,
            decode=self._decode.put,
            text_threads=self._text,
            shared=shared,
            keeper=self._keeper,
        )
        service = Service(
            engine.info,
            limits,
            peers,
            requests,
            statistics,
            log,
            epoch=self.epoch,
            name=self._name,
            own_uid=self._users.own,
            step_age=self._clock.age_s,
            drain=self.drain,
            shared=shared,
        )
        self._io = IoThread(
            router,
            self._inbox,
            timers,
            peers,
            requests,
            service,
            log,
            Spin(limits.spin_s if engine.info.on_device else 0.0),
            check=self._check,
            on_end=self._attention.set,
            linger_s=limits.linger_s,
        )
        for thread in (self._text, self._io, self._watchdog):
            thread.start()
        log.info("serving", extra={"endpoint": self.endpoint, "model": engine.info.model, "server_pid": os.getpid()})

    def _check(self) -> str | None:
        if self._lock is not None and (state := self._lock.state()) != "own":
            return f"the socket file of {self.endpoint} is {state}: nobody can reach this server any more"
        ended = None if self._text is None else self._text.ended
        if ended is not None:
            return f"the thread {ended} has ended: requests would wait for it for ever"
        return None

    def _post(self, event: Event) -> None:
        if isinstance(event, Failed):
            self._failed = True
        self._inbox.put(event)
        if self._failed:
            self._attention.set()  # the I/O thread itself may hang

    def _offer(self, event: Event) -> None:
        if self._io is None or not self._io.do_now(event):
            self._inbox.put(event)

    def _stalled(self, words: str) -> None:
        self._post(Failed("stalled", "a step hangs; the server ends"))
        self._log.critical("%s", words)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._io is None:
            raise SystemExit(128 + number)  # not serving yet: abandon the load
        self.drain(None if self._num_signals == 1 else 0.0)

    def _leave_process(self) -> None:
        """End the process even if threads hang: a device's own clean-up must not keep a dead server alive."""
        last_words = threading.Thread(target=self._last_words, daemon=True)
        last_words.start()
        last_words.join(FATAL_S)
        os._exit(EXIT_FATAL)

    def _last_words(self) -> None:
        if self._io is not None:
            self._io.join()
        if self._lock is not None:
            self._lock.release()
        if self._clock.started:
            self._watchdog.dumped.wait()
        logging.shutdown()


def _maker(engine: Engine | Callable[[], Engine]) -> Callable[[], Engine]:
    if callable(engine):
        return engine
    return lambda: engine
