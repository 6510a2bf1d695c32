"""This module makes many copies between device and host memory in few calls of the driver, on their own streams.

A block has a part in the cache of every layer. Torch's copies, one by one, would take the host longer than the bus. The
driver's batch uses the copy engines, not the SMs. If a driver has no batches, the copies are started one by one.

The thread that starts copies shares Python's lock and the driver's lock with the thread that steps, and must not hold
them for long. So the addresses of copies are computed with arrays, a call of the driver has few copies, and few calls
are in flight: a call that finds a stream's queue full waits in the driver, and a launch of a step waits for it.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from lowlat.errors import DeviceError

__all__ = ["CALL_MOVES", "BusCopies", "Moves", "Starting", "start_together", "wait_for"]

BATCH = "cuMemcpyBatchAsync"  # of CUDA 12.8 on
ONE_WAY = {True: "cuMemcpyHtoDAsync_v2", False: "cuMemcpyDtoHAsync_v2"}
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
BESIDE_KERNELS = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
NOT_SUPPORTED = 801
CALL_MOVES = 128  # of 256 KiB, as of Llama-8B's chunks, take the bus 0.6 ms
MAX_CALLS = 2  # of one `start` under way: the bus has no pause between them
Starting = Generator[None, None, Callable[[], None]]  # a call of the driver each time; returns what waits for all


class Moves(NamedTuple):
    """The addresses of some copies, and their bytes: [n] uint64 each."""

    device: npt.NDArray[np.uint64]
    host: npt.NDArray[np.uint64]
    num_bytes: npt.NDArray[np.uint64]

    @classmethod
    def joined(cls, several: "Sequence[Moves]") -> Self:
        """All copies of several, in order."""
        return cls(*(np.concatenate(each) for each in zip(*several, strict=True)))

    def part(self, start: int, stop: int) -> "Moves":
        """The copies from `start` on, before `stop`."""
        return Moves(*(each[start:stop] for each in self))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: when a source is read, hints about managed memory, which there is none of, and flags."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class BusCopies:
    """Starts copies on one of a few streams.

    num_streams  0: the state is on the CPU, and copies are done when `start` returns

    `call_moves` is how many copies one call of the driver starts, at most.
    """

    def __init__(self, device: torch.device, num_streams: int) -> None:
        self.call_moves = CALL_MOVES
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(num_streams)]
        self._driver: Any = ctypes.CDLL("libcuda.so.1") if num_streams else None
        self._has_batches = self._driver is not None and hasattr(self._driver, BATCH)

    def wait_event(self, event: "torch.cuda.Event") -> None:
        """Have copies that are started later come after an event."""
        for stream in self._streams:
            stream.wait_event(event)

    def start(self, number: int, moves: Moves, after: Callable[[], None], *, to_device: bool) -> Starting:
        """Start copies on a stream, some each time it is asked; returns a function that waits for the last of them.

        after  has the streams wait for what must come before
        Where they are many it waits for the first of them, so that few are under way. Raises DeviceError.
        """
        if not self._streams:
            for device, host, num_bytes in zip(*(each.tolist() for each in moves), strict=True):
                ctypes.memmove(*((device, host) if to_device else (host, device)), num_bytes)
            return _nothing
        stream, calls = self._streams[number], deque[torch.cuda.Event]()
        with torch.cuda.device(self._device):
            after()
        for first in range(0, len(moves.device), self.call_moves):
            if len(calls) == MAX_CALLS:
                wait_for(calls.popleft(), self._device)
            with torch.cuda.device(self._device):
                self._launch(stream, moves.part(first, first + self.call_moves), to_device)
                calls.append(torch.cuda.Event(blocking=True))
                calls[-1].record(stream)
            yield
        return partial(wait_for, calls[-1], self._device) if calls else _nothing

    def _launch(self, stream: "torch.cuda.Stream", moves: Moves, to_device: bool) -> None:
        handle = ctypes.c_void_p(stream.cuda_stream)
        targets, sources = (moves.device, moves.host) if to_device else (moves.host, moves.device)
        if self._has_batches:
            code = self._launch_batch(handle, targets, sources, moves.num_bytes)
            if code != NOT_SUPPORTED:
                self._check(code, BATCH)
                return
            self._has_batches = False
        copy = getattr(self._driver, ONE_WAY[to_device])
        for target, source, num_bytes in zip(*(e.tolist() for e in (targets, sources, moves.num_bytes)), strict=True):
            code = copy(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes), handle)
            self._check(code, ONE_WAY[to_device])

    def _launch_batch(self, handle: ctypes.c_void_p, *arrays: npt.NDArray[np.uint64]) -> int:
        """Start copies by targets, sources and bytes; returns the driver's code."""
        attributes = _Attributes(order=IN_STREAM_ORDER, flags=BESIDE_KERNELS)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code: int = self._driver.cuMemcpyBatchAsync(
            *(ctypes.c_void_p(each.ctypes.data) for each in arrays), ctypes.c_size_t(len(arrays[0])),
            ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(failed), handle,
        )  # fmt: skip
        return code

    def _check(self, code: int, name: str) -> None:
        if code:
            raise DeviceError(f"{self._device}: {name} of the prefix cache's copies failed with code {code}")


def start_together(several: Iterable[Starting]) -> Callable[[], None]:
    """Start the copies of several, in turns: none waits until all of another's are started.

    Returns a function that waits for them all. Raises DeviceError.
    """
    waits, starting = list[Callable[[], None]](), deque(several)
    while starting:
        each = starting.popleft()
        try:
            next(each)
        except StopIteration as ended:
            waits.append(ended.value)
        else:
            starting.append(each)

    def wait() -> None:
        for own in waits:
            own()

    return wait


def wait_for(event: "torch.cuda.Event", device: torch.device) -> None:
    """Wait for copies. Raises DeviceError, which names the device, where it has failed."""
    try:
        event.synchronize()
    except RuntimeError as error:
        raise DeviceError(f"the device {device} failed amid copies to or from host memory: {error!s:.300}") from error


def _nothing() -> None:
    return
