"""Runs blocks in Numba's simulator without its manager, which asks all threads in turn whether they wait, with the GIL.

Here a thread that meets a barrier sleeps until the last one comes: so a block of 512 threads takes a quarter of the
time. Blocks still run one after the other.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numba.cuda.simulator import kernel

__all__ = ["BrokenMeeting", "Meeting", "meet_at_barriers"]

SWITCH_S = 1.0  # a thread runs until it waits: to change between them in the midst only costs time


class BrokenMeeting(RuntimeError):
    """Another thread of the block has failed."""


class Meeting:
    """A barrier for threads of which some may end; made of bare locks, since the library's is slow."""

    def __init__(self, num_threads: int) -> None:
        self._num_left = num_threads
        self._sleeping: list[Any] = []
        self._lock = threading.Lock()
        self.broken = False

    def wait(self) -> None:
        """Sleep until all others have come or ended. Raises BrokenMeeting when one of them has failed."""
        with self._lock:
            last = len(self._sleeping) + 1 >= self._num_left
            if last:
                self._wake()
            else:
                own = threading.Lock()
                own.acquire()
                self._sleeping.append(own)
        if not last:
            own.acquire()
        if self.broken:
            raise BrokenMeeting("another thread of the block has failed")

    def leave(self, *, failed: bool = False) -> None:
        """A thread has ended, and nobody need wait for it."""
        with self._lock:
            self._num_left -= 1
            self.broken |= failed
            if self.broken or len(self._sleeping) >= self._num_left:
                self._wake()

    def _wake(self) -> None:
        sleeping, self._sleeping = self._sleeping, []
        for own in sleeping:
            own.release()


class _Thread(kernel.BlockThread):  # type: ignore[misc]
    """A thread that lives on between blocks: to start one takes longer than most do in a block."""

    def __init__(self) -> None:
        threading.Thread.__init__(self, daemon=True)
        self._turn = threading.Lock()
        self._turn.acquire()
        self.exception: tuple[Exception, Any] | None = None

    def begin(self, manager: "_Blocks", block: Any, place: Any, target: Callable[[], None]) -> None:
        """Run as the thread of a place in a block."""
        self._manager, self._work, self.exception = manager, target, None
        self.blockIdx, self.threadIdx, shape = (kernel.Dim3(*each) for each in (block, place, manager._block_dim))
        self.thread_id = self.threadIdx.x + shape.x * (self.threadIdx.y + shape.y * self.threadIdx.z)
        self._turn.release()

    def run(self) -> None:
        while True:
            self._turn.acquire()
            try:
                self._work()
            except Exception as error:
                self.exception = error, error.__traceback__
            manager = self._manager
            manager.meeting.leave(failed=self.exception is not None)
            manager.ended(self)

    def syncthreads(self) -> None:
        self._manager.meeting.wait()


class _Blocks(kernel.BlockManager):  # type: ignore[misc]
    idle: ClassVar[list[_Thread]] = []

    def run(self, grid_point: Any, *arguments: Any) -> None:
        places = list(np.ndindex(*self._block_dim))
        self.meeting = Meeting(len(places))
        self._lock, self._done, self._num_running = threading.Lock(), threading.Lock(), len(places)
        self._done.acquire()
        while len(self.idle) < len(places):
            thread = _Thread()
            thread.start()
            self.idle.append(thread)
        threads = [self.idle.pop() for _ in places]
        for thread, place in zip(threads, places, strict=True):
            thread.begin(self, grid_point, place, lambda: self._f(*arguments))
        self._done.acquire()
        self.idle.extend(reversed(threads))
        failures = [(thread.threadIdx, thread.exception) for thread in threads if thread.exception]
        for place, (error, trace) in sorted(failures, key=lambda failure: isinstance(failure[1][0], BrokenMeeting)):
            raise type(error)(f"thread {tuple(place)} of block {tuple(grid_point)}: {error}").with_traceback(trace)

    def ended(self, thread: _Thread) -> None:
        """A thread has done its part."""
        with self._lock:
            self._num_running -= 1
            if not self._num_running:
                self._done.release()


def meet_at_barriers() -> Callable[[], None]:
    """Let the simulator run blocks this way from now on; returns what gives its own way back."""
    before, seconds = kernel.BlockManager, sys.getswitchinterval()
    kernel.BlockManager = _Blocks
    sys.setswitchinterval(SWITCH_S)

    def undo() -> None:
        kernel.BlockManager = before
        sys.setswitchinterval(seconds)

    return undo
