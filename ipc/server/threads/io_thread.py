"""The I/O thread owns the sockets: it waits only for its router, and no thread waits for it.

Waking it takes long. So while it sleeps, other threads do the work that a first token waits for, under a lock that the
I/O thread holds unless it sleeps. A text thread submits a request; the decode thread sends a request's first tokens
(45 us sooner on two cores of a virtual machine; no sooner where cores wake fast). Later tokens are posted: if the
decode thread sent them, it would begin its next step later, and so all that follow.
"""

import logging
import threading
from collections.abc import Callable

from lowlat.ipc.server.generations.requests import Requests
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.logs import describe
from lowlat.ipc.server.peers import Peers
from lowlat.ipc.server.router import Handlers, Router
from lowlat.ipc.server.service import Service
from lowlat.ipc.server.threads.events import (
    DrainAsked,
    EngineFigures,
    Event,
    Failed,
    Grown,
    PauseDone,
    Prepared,
    Refused,
    ResidenceAsked,
    ResidenceDone,
    Step,
)
from lowlat.ipc.server.threads.spin import Spin
from lowlat.ipc.wake import Inbox
from lowlat.ipc.wire import Bye

__all__ = ["IoThread"]

WATCH_EVERY_S = 1.0


class IoThread(threading.Thread):
    """Receives messages of clients, sends outputs of the engine, and ends the server.

    check      called once a second; returns why the server must end, or None
    spin       says when to poll without sleeping
    on_end     called when the last messages were sent, or their time is over
    exit_code  0 after a drain, 1 after a failure; read it when the thread has ended
    """

    def __init__(
        self,
        router: Router,
        inbox: Inbox[Event],
        timers: Timers,
        peers: Peers,
        requests: Requests,
        service: Service,
        log: logging.Logger,
        spin: Spin,
        *,
        check: Callable[[], str | None],
        on_end: Callable[[], None],
        linger_s: float,
    ) -> None:
        super().__init__(name="lowlat-io", daemon=True)
        self._router = router
        self._inbox = inbox
        self._timers = timers
        self._peers = peers
        self._requests = requests
        self._service = service
        self._log = log
        self._check = check
        self._on_end = on_end
        self._linger_s = linger_s
        self._spin = spin
        self._awake = threading.Lock()  # not released at the end, so that no thread sends after it
        self._awake.acquire()
        self._sleeps_until = 0.0
        self._ended = False
        self._reason = "shutdown"
        self._words = "the server ends"
        self.exit_code = 0
        self._handlers: dict[type[object], Callable[..., None]] = {
            Step: requests.step,
            Prepared: requests.prepared,
            Grown: requests.open_prompts.grown,
            Refused: requests.refused,
            EngineFigures: self._figures,
            Failed: self._failed,
            DrainAsked: self._drain,
            ResidenceAsked: requests.residence.ordered,
            PauseDone: requests.paused,
            ResidenceDone: requests.residence.done,
        }

    def run(self) -> None:
        try:
            self._timers.after(WATCH_EVERY_S, self._watch)
            self._loop()
        except BaseException as error:  # no thread sends after any exception
            self._log.critical("the I/O thread failed: %s", describe(error))
            self._fail("internal", "the server failed; its log says more")
        finally:
            self._say_bye()
            self._router.close(self._linger_s)
            self._on_end()

    def do_now(self, event: Event) -> bool:
        """Handle an event in the calling thread if the I/O thread sleeps; False if the caller must post it."""
        if not self._awake.acquire(blocking=False):
            return False
        try:
            if self._inbox.any() or (isinstance(event, Step) and not self._requests.is_first(event)):
                return False
            self._handlers[type(event)](event)
            self._requests.flush()
            self._spin.note(self._requests.idle)
            is_due = self._timers.due < self._sleeps_until or self._requests.draining or self._spin.due
            if is_due or self._router.unread:
                self._inbox.wake()
        except Exception as error:
            self._log.critical("handling %s failed: %s", type(event).__name__, describe(error))
            self._inbox.put(Failed("internal", "the server failed; its log says more"))
        finally:
            self._awake.release()
        return True

    def _loop(self) -> None:
        router, inbox, timers, requests, spin = self._router, self._inbox, self._timers, self._requests, self._spin
        router.serve(
            inbox.descriptor,
            Handlers(message=self._service.receive, ended=self._peers.ended, unblocked=self._peers.unblocked),
        )
        while not self._ended:
            if inbox.any():
                while (event := inbox.take()) is not None:
                    self._handlers[type(event)](event)
                requests.flush()
            timeout_ms = timers.run()
            requests.residence.tell(idle=requests.idle)
            if self._ended or (requests.draining and requests.idle):
                return
            spin.note(requests.idle)
            if router.unread or spin.goes_on():
                router.wait(0)
            elif inbox.sleep():
                inbox.awake(self._sleep(timeout_ms))
            else:
                continue
            router.receive(inbox.any)  # stop receiving when a step's tokens can be sent

    def _sleep(self, timeout_ms: int) -> bool:
        self._sleeps_until = self._timers.due
        self._awake.release()
        try:
            return self._router.wait(timeout_ms)
        finally:
            self._awake.acquire()

    def _watch(self) -> None:
        problem = self._check()
        if problem is not None:
            self._log.critical("%s", problem)
            self._fail("internal", "the server ends")
        self._timers.after(WATCH_EVERY_S, self._watch)

    def _figures(self, event: EngineFigures) -> None:
        self._requests.engine_figures = event.figures

    def _failed(self, event: Failed) -> None:
        self._fail(event.code, event.message)

    def _fail(self, code: str, words: str) -> None:
        self.exit_code = 1
        self._reason, self._words = code, words
        self._ended = True

    def _drain(self, event: DrainAsked) -> None:
        if not self._requests.draining:
            self._log.info(
                "draining", extra={"deadline_s": event.deadline_s, "num_running": self._requests.num_running}
            )
        self._requests.draining = True
        self._timers.after(event.deadline_s, self._drained)

    def _drained(self) -> None:
        self._ended = True

    def _say_bye(self) -> None:
        try:
            self._requests.end_all(self._reason, self._words)
            for peer in self._peers:
                if peer.greeted:
                    self._peers.send(peer, Bye(self._reason, self._words))
        except Exception as error:
            self._log.error("the last messages failed: %s", describe(error))
