"""A driver is the thread that owns a runtime once it answers calls: it takes requests, steps, and delivers outputs.

Callers put jobs in the driver's inbox without waiting for a step; it runs them between two steps. After a step it puts
each request's output into that request's mailbox. It wakes an event loop once a step, however many of its tasks wait.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

from lowlat.engine.calls.mailboxes import Brought, LoopMailbox, LoopWaker, ThreadMailbox
from lowlat.engine.calls.prompts import Prepared
from lowlat.errors import CapacityError, DeviceError, LowlatError, RequestError, StreamError
from lowlat.ipc.wake import Inbox
from lowlat.options.request import StepOutput

if TYPE_CHECKING:
    from lowlat.engine.stepped import SteppedRuntime

__all__ = ["Driver", "Ticket", "owned"]

JOIN_S = 5.0  # how long the end of the process, or of the runtime, waits for a running step

T = TypeVar("T")
Arguments = ParamSpec("Arguments")
OwnedRuntime = TypeVar("OwnedRuntime", bound="SteppedRuntime")


def owned(
    method: "Callable[Concatenate[OwnedRuntime, Arguments], T]",
) -> "Callable[Concatenate[OwnedRuntime, Arguments], T]":
    """Decorate a runtime's method: if the runtime has a driver, the driver runs the method between two steps."""

    @wraps(method)
    def by_owner(runtime: OwnedRuntime, *args: Arguments.args, **kwargs: Arguments.kwargs) -> T:
        driver = runtime.driver
        if driver is None:
            return method(runtime, *args, **kwargs)
        return driver.call(partial(method, runtime, *args, **kwargs))

    return cast("Callable[Concatenate[OwnedRuntime, Arguments], T]", by_owner)


class Ticket:
    """One caller's request, from the call to its end.

    prepared    the request to submit; its grammar stays compiled while it is held here
    mailbox     where the caller waits for outputs
    request_id  its id in the runtime; "" before it was submitted
    over        whether it has ended, or its caller has left
    """

    __slots__ = ("mailbox", "over", "prepared", "request_id")

    def __init__(self, prepared: Prepared, mailbox: ThreadMailbox | LoopMailbox) -> None:
        self.prepared, self.mailbox = prepared, mailbox
        self.request_id = ""
        self.over = False


@dataclass(frozen=True)
class _Job:
    """A job for the driver's thread, between two steps.

    abandon  called with the reason if the thread ends before it has run the job; None: nobody waits for the job
    """

    run: Callable[["SteppedRuntime"], object]
    abandon: Callable[[Callable[[], LowlatError]], object] | None = None


class Driver:
    """Steps a runtime in a thread of its own, from construction to `stop` or the runtime's end.

    An idle thread holds the runtime only weakly: when the program drops the runtime, the thread ends.
    """

    def __init__(self, runtime: "SteppedRuntime") -> None:
        self._runtime = weakref.ref(runtime)
        self._inbox: Inbox[_Job] = Inbox()
        self._lock = threading.RLock()  # re-entered if garbage collection runs a finalizer during a put
        self._ended: Callable[[], LowlatError] | None = None
        self._stopping = False
        self._tickets: dict[str, Ticket] = {}
        self._waiting: deque[Ticket] = deque()  # while the runtime's queue is full
        self._thread = threading.Thread(target=self._run, name="lowlat-runtime", daemon=True)
        self._thread.start()
        weakref.finalize(runtime, self._stop, JOIN_S)  # when the runtime is collected, or the process ends

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is the driver's."""
        return threading.current_thread() is self._thread

    @property
    def has_ended(self) -> bool:
        """Whether the thread has stopped stepping; any thread may use the runtime then."""
        return self._ended is not None

    def submit(self, ticket: Ticket) -> None:
        """Queue a request. Raises LowlatError after the thread's end, and in a forked process."""
        if not self._put(_Job(partial(self._open, ticket), partial(self._abandon, ticket))):
            raise LowlatError("the runtime is closed") if self._ended is None else self._ended()

    def cancel(self, ticket: Ticket, *, drop: bool) -> None:
        """Cancel a request; drop: its caller reads no more outputs, otherwise the last output still comes."""
        self._put(_Job(partial(self._cancel, ticket, drop)))

    def call(self, what: Callable[[], T]) -> T:
        """Run a function in the driver's thread, between two steps, and return its result.

        Once the thread has ended, the calling thread runs it.
        """
        done: Future[T] = Future()

        def run(_: "SteppedRuntime") -> None:
            try:
                done.set_result(what())
            except Exception as error:  # the caller gets it
                done.set_exception(error)
                if isinstance(error, DeviceError):
                    raise

        if not self.is_current and self._put(_Job(run, lambda _: done.cancel())):
            try:
                return done.result()
            except CancelledError:
                pass  # the thread ended before it ran the job
        return what()

    def stop(self) -> None:
        """End the thread after the running step; waiting callers get an error."""
        self._stop(None)

    def _stop(self, patience_s: float | None) -> None:
        def run(_: "SteppedRuntime") -> None:
            self._stopping = True

        self._put(_Job(run))
        if not self.is_current:
            self._thread.join(patience_s)

    def _put(self, job: _Job) -> bool:
        """Queue a job; returns False if no thread is left to run it."""
        if not self._thread.is_alive():  # it has ended, or this is a forked process
            return False
        with self._lock:
            if self._ended is not None:
                return False
            self._inbox.put(job)
            return True

    def _run(self) -> None:
        why: Callable[[], LowlatError] = _closed
        try:
            runtime = self._runtime()
            if runtime is not None:
                runtime.adopt_thread()
                runtime.watch(self._inbox.rouse)
            del runtime
            while not self._stopping:
                self._run_jobs(self._inbox.take() if self._is_ready() else self._inbox.wait(self._patience_s()))
                self._step()
        except BaseException as error:  # whatever it is, the thread steps no more
            failure = error
            why = lambda: _failed(failure)  # noqa: E731
        self._finish(why)

    def _is_ready(self) -> bool:
        runtime = self._runtime()
        if runtime is None:
            return False
        return runtime.ready or (bool(self._waiting) and not runtime.scheduler.is_full)

    def _patience_s(self) -> float | None:
        """Seconds until the runtime has work without a new job (`SteppedRuntime.deadline`); None: never."""
        runtime = self._runtime()
        deadline = None if runtime is None else runtime.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _run_jobs(self, job: _Job | None) -> None:
        runtime = self._runtime()
        while job is not None:
            if runtime is None:
                self._stopping = True
                return
            job.run(runtime)
            job = self._inbox.take()

    def _step(self) -> None:
        runtime = self._runtime()
        if runtime is None or self._stopping:
            return
        while self._waiting and not runtime.scheduler.is_full:
            self._open(self._waiting.popleft(), runtime)
        if runtime.ready:
            self._deliver(runtime, runtime.step())

    def _open(self, ticket: Ticket, runtime: "SteppedRuntime") -> None:
        """Submit a request, or queue it while the runtime is full; an error goes to its caller alone."""
        if ticket.over:
            return
        if runtime.scheduler.is_full:
            self._waiting.append(ticket)
            return
        try:
            asked = ticket.prepared
            ticket.request_id = runtime.submit(
                asked.prompt, asked.params, cache_salt=asked.cache_salt, session=asked.session
            )
        except DeviceError:
            self._tickets[""] = ticket  # so that `_finish` reports the failure to this caller, too
            raise
        except CapacityError:
            self._waiting.append(ticket)
        except Exception as error:
            self._end(ticket, error)
        else:
            self._tickets[ticket.request_id] = ticket

    def _cancel(self, ticket: Ticket, drop: bool, runtime: "SteppedRuntime") -> None:
        """See `cancel`."""
        ticket.over = ticket.over or drop
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            if not drop:
                self._end(ticket, Brought(StepOutput("", (), "cancelled"), None))
            return
        if drop:
            self._tickets.pop(ticket.request_id, None)
        try:
            runtime.cancel(ticket.request_id)
        except RequestError:
            return  # it was refused, or has already ended

    def _deliver(self, runtime: "SteppedRuntime", outputs: Sequence[StepOutput]) -> None:
        wakers: dict[LoopWaker, list[Ticket]] = {}
        for output in outputs:
            ticket = self._tickets.get(output.request_id)
            if ticket is None:
                continue  # its caller has left
            ended = output.finish_reason is not None
            mailbox = ticket.mailbox
            mailbox.put(Brought(output, runtime.metrics(output.request_id) if ended else None), last=ended)
            if ended:
                del self._tickets[output.request_id]
                ticket.over = True
            if isinstance(mailbox, LoopMailbox) and mailbox.due:
                wakers.setdefault(mailbox.waker, []).append(ticket)
        for waker, tickets in wakers.items():
            if not _wake(waker, tickets):
                for ticket in tickets:  # the event loop has ended, so nobody waits for these
                    self._cancel(ticket, True, runtime)

    def _end(self, ticket: Ticket, item: Brought | Exception) -> None:
        """Deliver the last item to a caller."""
        ticket.over = True
        ticket.mailbox.put(item, last=True)
        if isinstance(ticket.mailbox, LoopMailbox):
            _wake(ticket.mailbox.waker, [ticket])

    def _finish(self, why: Callable[[], LowlatError]) -> None:
        """Release all who wait: callers get the reason, and jobs that have not run are abandoned."""
        with self._lock:
            self._ended = why
            left = []
            while (job := self._inbox.take()) is not None:
                left.append(job)
            self._inbox.close()
        for job in left:
            if job.abandon is not None:
                job.abandon(why)
        for ticket in (*self._tickets.values(), *self._waiting):
            if not ticket.over:
                self._end(ticket, why())
        self._tickets.clear()
        self._waiting.clear()

    def _abandon(self, ticket: Ticket, why: Callable[[], LowlatError]) -> None:
        """Give the reason to the caller of a request that was never submitted."""
        if not ticket.over:
            self._end(ticket, why())


def _wake(waker: LoopWaker, tickets: Sequence[Ticket]) -> bool:
    """Wake the tasks that wait for these tickets; returns False if their event loop has ended."""
    mailboxes = [ticket.mailbox for ticket in tickets if isinstance(ticket.mailbox, LoopMailbox)]
    for mailbox in mailboxes:
        mailbox.due = False
    return waker.wake(mailboxes)


def _closed() -> LowlatError:
    return StreamError("the runtime was closed while the request ran (Runtime.close)", code="closed")


def _failed(error: BaseException) -> LowlatError:
    """Make a step's failure as a new exception for each caller, since threads must not share a traceback."""
    words = (
        str(error) if isinstance(error, LowlatError) else f"a step was broken off by {type(error).__name__}: {error}"
    )
    failure = DeviceError(words)
    failure.__cause__ = error
    return failure
