"""The launches that are under way: the step that runs and the one queued behind it, or loops. It knows no request.

Everything is launched on one stream, so whatever is launched later runs later. What is under way may still end, or
publish for, a slot that the host has given up meanwhile: the caller drops such publications.
"""

import time
from collections.abc import Callable, Sequence

from lowlat.engine.mailbox import Entry, Mailbox
from lowlat.engine.pace import Pace
from lowlat.engine.request_checks import Unbroken
from lowlat.errors import ConfigError, DeviceError
from lowlat.executors import Executor, LoopingExecutor
from lowlat.graphs import Bucket

__all__ = ["Launches", "loop_of"]

MAX_STEPS = 2  # under way: with one more behind the step that runs, the device never waits for the host


def loop_of(executor: Executor, *, wanted: bool) -> LoopingExecutor | None:
    """The same executor as one that repeats steps by itself, where wanted. Raises ConfigError where it cannot."""
    if not wanted:
        return None
    if not isinstance(executor, LoopingExecutor):
        raise ConfigError(f"device_loop needs executor 'graph', and this runtime has {executor.name!r}")
    return executor


class Launches:
    """Launches steps and waits for their entries of the ring.

    loop   the same executor, if it repeats steps by itself; None: every step is launched
    whole  what is told that a wait may be broken off, and be waited again

    `under_way` says whether entries are still to come, `looping` whether a loop brings them, `bucket` is the bucket of
    the last launch. At most two steps or two loops are under way, the second queued behind the first, or a loop behind
    a step.
    """

    def __init__(
        self, executor: Executor, mailbox: Mailbox, loop: LoopingExecutor | None = None, *, whole: Unbroken
    ) -> None:
        self._executor, self._mailbox, self._loop, self._whole = executor, mailbox, loop, whole
        self._expected = 0  # entries published when all that was launched has ended; loops may end with fewer
        self._first = 0  # entries seen at the last launch
        self._in_loop = False
        self._stopping = False
        self._pace = Pace() if executor.device.type == "cuda" else None  # others work in the host's time
        self.bucket: Bucket | None = None

    @property
    def num_under_way(self) -> int:
        """Steps that were launched and whose entries were not seen; of loops, the most that there can be."""
        return max(0, self._expected - self._mailbox.num_seen)

    @property
    def under_way(self) -> bool:
        """Whether a step, or a loop, was launched whose entries have not all been seen."""
        return self._mailbox.num_seen < self._expected

    @property
    def looping(self) -> bool:
        """Whether a loop is under way that was not told to stop."""
        return self.in_loop and not self._stopping

    @property
    def in_loop(self) -> bool:
        """Whether a loop is under way, told to stop or not."""
        return self._in_loop and self.under_way

    def has_room(self, bucket: Bucket) -> bool:
        """Whether a launch in this bucket may be queued behind what is under way.

        A loop is followed in its own bucket only, in the second half of its steps, and not when it was told to stop.
        """
        if not self._in_loop:
            return self.num_under_way < MAX_STEPS
        return self.looping and bucket == self.bucket and self.num_under_way <= self._budget // 2

    def start(
        self,
        bucket: Bucket,
        *,
        may_loop: bool,
        meanwhile: Callable[[], None] | None = None,
        most: int | None = None,
    ) -> None:
        """Launch a step; or a loop, where there is one and the caller's next steps may be like this one.

        Where something is under way `has_room` must say so, and a loop is followed by a loop. A loop gets at most half
        of the ring, so that the next can be queued before the host has read all of the last, and at most `most` steps.
        `meanwhile` is the host's part of a step, see `Executor.step`.
        Raises DeviceError when the device has failed.
        """
        mailbox, ahead = self._mailbox, self.num_under_way
        budget = min(self._budget, mailbox.num_entries - mailbox.num_unread - ahead)
        budget = budget if most is None else min(budget, most)
        self._in_loop = self._loop is not None and may_loop and budget > 0
        self._stopping = False
        self._first, self.bucket = mailbox.num_seen, bucket
        if self._loop is not None and self._in_loop:
            self._loop.start_loop(bucket, budget)
            self._expected = self._first + ahead + budget
        else:
            self._executor.step(bucket, meanwhile)
            self._expected = self._first + ahead + 1

    def prefill(self, size: int, first: Bucket | None, passes: int = 0) -> Sequence[Entry]:
        """Run chunks of prefill; the entry of the first token where `first` is its bucket. Nothing may be under way.

        passes  over what they leave, see `Executor.prefill`
        Raises DeviceError when the device has failed.
        """
        self._executor.prefill(size, first, passes)
        if first is None:
            return ()
        self._first, self.bucket, self._in_loop = self._mailbox.num_seen, first, False
        self._expected = self._first + 1
        return self._wait(self._expected)

    def stop(self) -> None:
        """Ask loops to end soon; nothing where none is under way. One that is queued still runs a step."""
        if self._loop is not None and self.looping:
            self._loop.stop_loop()
            self._stopping = True

    def clear_blocks(self, blocks: Sequence[int], pool: str = "") -> None:
        """Zero KV blocks of a pool, if there are any; a loop ends first.

        What is under way may wait for nothing of the host's.
        """
        if blocks:
            self.stop()
            self._executor.clear_blocks(blocks, pool)

    def wait(self) -> Sequence[Entry]:
        """The next entries, at least one; none where all loops have ended without more. Raises DeviceError."""
        if self._pace is None:
            return self._wait(self._mailbox.num_seen + 1)
        with self._whole.waiting():
            self._pace.nap(self.bucket)
        entries = self._wait(self._mailbox.num_seen + 1)
        self._pace.saw(self.bucket, time.monotonic())
        return entries

    def drain(self) -> Sequence[Entry]:
        """All entries that are still to come, however many; a loop is stopped. Raises DeviceError."""
        self.stop()
        return self._wait(self._expected)

    @property
    def _budget(self) -> int:
        """Steps of a loop, at most."""
        return self._mailbox.num_entries // 2

    def _wait(self, count: int) -> Sequence[Entry]:
        mailbox = self._mailbox
        with self._whole.waiting():
            if self._loop is not None and self._in_loop:
                ended = not self._loop.wait_loop(count)
            else:
                self._executor.wait_published(count)
                ended = False
        entries = mailbox.poll()
        if ended:
            if mailbox.num_seen == self._first:
                raise DeviceError(f"a loop on the device has ended without a step ({self.bucket})")
            self._expected = mailbox.num_seen
        return entries
