"""This module puts a runtime to sleep: its memory leaves the device, and its prefixes go to the tiers, until it wakes.

Only little stays on the device: captured graphs, the libraries' memory, counters and command buffers.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowlat.engine.change_guard import ChangeGuard
from lowlat.engine.memory.plan import available_bytes
from lowlat.engine.steps.steps import Steps
from lowlat.errors import CapacityError, ConfigError, DeviceError
from lowlat.executors import Executor
from lowlat.sequence.kvcache import KVCache

__all__ = ["Sleep"]

logger = logging.getLogger("lowlat.engine.sleep")


class Sleep:
    """Puts a runtime to sleep and wakes it; `asleep` says whether it sleeps."""

    def __init__(self, executor: Executor, kvcache: KVCache, steps: Steps, guard: ChangeGuard) -> None:
        self._executor, self._kvcache, self._steps, self._guard = executor, kvcache, steps, guard
        self.asleep = False
        self._num_sleeps = 0
        self._times = {"sleep_s": 0.0, "wake_s": 0.0}

    def sleep(self) -> None:
        """See `Runtime.sleep`; no request may be live."""
        residence = self._executor.residence
        if residence is None:
            raise ConfigError("this runtime cannot sleep: load it with can_sleep=True")
        if self.asleep:
            return
        begin = time.monotonic()
        needed, free = residence.needed_host_bytes, available_bytes(torch.device("cpu"))
        if free is not None and needed > free:
            raise CapacityError(
                f"sleep needs {needed / 2**30:.2f} GiB of host memory for weights, and {free / 2**30:.2f} GiB are "
                "free; the runtime stays awake"
            )
        with self._change():
            self._steps.settle()
            self._executor.synchronize()
            self._steps.moves.keep_all()
            residence.leave()
            self._kvcache.forget_all()
            self.asleep = True
        self._num_sleeps += 1
        self._times["sleep_s"] = time.monotonic() - begin
        logger.info("asleep: %.2f GiB left %s in %.3f s", residence.report().device_bytes / 2**30,
                    self._executor.device, self._times["sleep_s"])  # fmt: skip

    def wake(self) -> None:
        """See `Runtime.wake`."""
        residence = self._executor.residence
        if residence is None or not self.asleep:
            return
        begin = time.monotonic()
        with self._change():
            residence.come_back()
            self.asleep = False
        self._times["wake_s"] = time.monotonic() - begin
        logger.info("awake: %.2f GiB came back to %s in %.3f s", residence.report().device_bytes / 2**30,
                    self._executor.device, self._times["wake_s"])  # fmt: skip

    def report(self) -> dict[str, Any]:
        """Bytes, and the seconds of the last sleep and wake, as JSON; empty if the runtime cannot sleep."""
        residence = self._executor.residence
        if residence is None:
            return {}
        own = {"asleep": self.asleep, "num_sleeps": self._num_sleeps, **residence.report().to_dict(), **self._times}
        return {"sleep": own}

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A change that may be refused, by CapacityError, before it has changed anything.

        Turns torch's report of a failed device into a DeviceError.
        """
        with self._guard.unless_refused():
            try:
                yield
            except RuntimeError as error:
                raise DeviceError(f"the device {self._executor.device} failed: {error}") from error
