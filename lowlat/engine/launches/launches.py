"""This module launches steps, loops and prefill, and waits for their publications.

`lowlat.engine.launches.in_flight` decides what may be launched, and counts the launches. A launch in flight may still
end, or publish for, a slot that the host has given up; the caller drops such publications.
"""

import time
from collections.abc import Callable, Sequence

from lowlat.engine.change_guard import ChangeGuard
from lowlat.engine.launches.in_flight import InFlight
from lowlat.engine.launches.pace import Pace
from lowlat.engine.mailbox.mailbox import Mailbox
from lowlat.engine.mailbox.publications import Entry
from lowlat.errors import ConfigError
from lowlat.executors import Executor, LoopingExecutor
from lowlat.graphs import Bucket

__all__ = ["Launches", "loop_of"]


def loop_of(executor: Executor, *, wanted: bool) -> LoopingExecutor | None:
    """The executor as one with device loops, or None if they are not wanted. Raises ConfigError if it has none."""
    if not wanted:
        return None
    if not isinstance(executor, LoopingExecutor):
        raise ConfigError(f"device_loop needs executor 'graph', and this runtime has {executor.name!r}")
    return executor


class Launches:
    """Launches steps and waits for their entries in the ring; `in_flight` has the state of the launches.

    loop   the same executor, if it has device loops; None: every step is launched
    guard  knows whether an interrupted wait may be repeated
    """

    def __init__(
        self, executor: Executor, mailbox: Mailbox, loop: LoopingExecutor | None = None, *, guard: ChangeGuard
    ) -> None:
        self._executor, self._mailbox, self._loop, self._guard = executor, mailbox, loop, guard
        self._pace = Pace() if executor.device.type == "cuda" else None  # on a CPU the host itself runs the steps
        self.in_flight = InFlight[Bucket](mailbox.num_entries)

    def start(
        self,
        bucket: Bucket,
        *,
        may_loop: bool,
        meanwhile: Callable[[], None] | None = None,
        max_steps: int | None = None,
    ) -> None:
        """Launch a step; or a loop, if the executor has loops and the next steps may be like this one.

        With launches in flight `InFlight.may_launch` must allow it, and only a loop may follow a loop. A loop gets at
        most `max_steps` steps. `meanwhile` is the host's part of a step, see `Executor.step`.
        Raises DeviceError when the device has failed.
        """
        budget = 0
        if self._loop is not None and may_loop:
            budget = self.in_flight.loop_budget(self._mailbox.num_unread, max_steps)
        if self._loop is not None and budget:
            self._loop.start_loop(bucket, budget)
        else:
            self._executor.step(bucket, meanwhile)
        self.in_flight.launched(bucket, budget)

    def prefill(self, size: int, first: Bucket | None, passes: int = 0) -> Sequence[Entry]:
        """Run chunks of prefill; with `first`, a first token's bucket, returns the first token's entry.

        No launch may be in flight.
        passes  the number of passes after them, see `Executor.prefill`
        Raises DeviceError when the device has failed.
        """
        self._executor.prefill(size, first, passes)
        if first is None:
            return ()
        self.in_flight.launched(first)
        return self._wait(every=True)

    def stop(self) -> None:
        """Ask loops in flight to end soon. A queued loop still runs a step."""
        if self.in_flight.stop() and self._loop is not None:
            self._loop.stop_loop()

    def close(self) -> None:
        """Ask loops to end, and refuse later launches."""
        if self.in_flight.close() and self._loop is not None:
            self._loop.stop_loop()

    def clear_blocks(self, blocks: Sequence[int], pool: str = "") -> None:
        """Zero KV blocks of a pool, if there are any; a loop ends first.

        No launch in flight may wait for the host.
        """
        if blocks:
            self.stop()
            self._executor.clear_blocks(blocks, pool)

    def wait(self) -> Sequence[Entry]:
        """The next entries, at least one; none if all loops have ended without more. Raises DeviceError."""
        bucket = self.in_flight.bucket
        if self._pace is None:
            return self._wait(every=False)
        with self._guard.repeatable_wait():
            self._pace.nap(bucket)
        entries = self._wait(every=False)
        self._pace.saw(bucket, time.monotonic())
        return entries

    def drain(self) -> Sequence[Entry]:
        """All outstanding entries; a loop is stopped. Raises DeviceError."""
        self.stop()
        return self._wait(every=True)

    def _wait(self, *, every: bool) -> Sequence[Entry]:
        in_flight, count = self.in_flight, self.in_flight.awaited(every=every)
        with self._guard.repeatable_wait():
            if self._loop is not None and in_flight.in_loop:
                ended = not self._loop.wait_loop(count)
            else:
                self._executor.wait_published(count)
                ended = False
        entries = self._mailbox.poll()
        in_flight.saw(self._mailbox.num_seen, ended=ended)
        return entries
