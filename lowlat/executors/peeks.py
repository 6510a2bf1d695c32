"""This module makes small asynchronous copies between a device's buffers and the host; no step waits for them."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

__all__ = ["Peeks", "SentValues"]

UNIT = 16  # bytes, at multiples of which copies begin


class Peeks:
    """Copies buffers on the current stream, to host memory that is reused after the copies were read.

    on_gpu  the memory is pinned: copies then run while the host goes on
    memory  all of it, [n] uint8 each: it must stay where the device has failed
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._free: list[torch.Tensor] = []
        self.memory: list[torch.Tensor] = []

    def start(self, buffers: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor] | None]:
        """Start copies; see `lowlat.executors.Executor.peek`. Raises RuntimeError if the device has failed."""
        ends = list(accumulate((-(-each.nbytes // UNIT) * UNIT for each in buffers), initial=0))
        held, found = self._take(ends[-1]), list[torch.Tensor]()

        def parts(memory: torch.Tensor) -> list[torch.Tensor]:
            pairs = zip(buffers, ends, strict=False)
            return [memory[start : start + each.nbytes].view(each.dtype).view(each.shape) for each, start in pairs]

        for part, each in zip(parts(held), buffers, strict=True):
            part.copy_(each, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def look() -> Sequence[torch.Tensor] | None:
            if not found and done.query():
                found.extend(parts(held[: ends[-1]].clone()))
                self._free.append(held)
            return found or None

        return look

    def _take(self, num_bytes: int) -> torch.Tensor:
        """Memory of so many bytes or more, the smallest that is free."""
        fitting = [place for place, each in enumerate(self._free) if len(each) >= num_bytes]
        if fitting:
            return self._free.pop(min(fitting, key=lambda place: len(self._free[place])))
        self.memory.append(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu))
        return self.memory[-1]


class SentValues:
    """Keeps host memory until the copies from it to the device have ended.

    held  copies that may still run, each with its memory, in order; the memory must stay if the device has failed
    """

    def __init__(self) -> None:
        self.held: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = deque()

    def keep(self, values: Sequence[torch.Tensor]) -> None:
        """Keep the memory of copies that were just started on the current stream.

        First it drops the memory of copies that have ended. Raises RuntimeError if the device has failed.
        """
        self.let_go()
        done = torch.cuda.Event()
        done.record()
        self.held.append((done, list(values)))

    def let_go(self) -> None:
        """Drop the memory of copies that have ended. Raises RuntimeError if the device has failed."""
        while self.held and self.held[0][0].query():
            self.held.popleft()
