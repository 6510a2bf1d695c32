"""Many copies between device and host memory in one call of the driver, on streams of their own.

A content lies in as many places as a model has layers: torch's copies, one by one, would take the host longer than the
bus. The driver's batch goes to the copy engines, and leaves the SMs alone. Where a driver has no batches the copies are
started one after the other.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lowlat.errors import DeviceError

__all__ = ["BusCopies", "Move"]

BATCH = "cuMemcpyBatchAsync"  # of CUDA 12.8 on
ONE_WAY = {True: "cuMemcpyHtoDAsync_v2", False: "cuMemcpyDtoHAsync_v2"}
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
BESIDE_KERNELS = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
NOT_SUPPORTED = 801
MAX_BATCH = 4096


class Move(NamedTuple):
    """The addresses of one copy, and its bytes."""

    device: int
    host: int
    num_bytes: int


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
    """

    def __init__(self, device: torch.device, num_streams: int) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(num_streams)]
        self._driver: Any = ctypes.CDLL("libcuda.so.1") if num_streams else None
        self._has_batches = self._driver is not None and hasattr(self._driver, BATCH)

    def wait_event(self, event: "torch.cuda.Event") -> None:
        """Have copies that are started later come after an event."""
        for stream in self._streams:
            stream.wait_event(event)

    def start(
        self, stream: int, moves: Sequence[Move], after: Callable[[], None], *, to_device: bool
    ) -> Callable[[], None]:
        """Start copies on a stream; returns a function that waits for them. Raises DeviceError.

        after  has the streams wait for what must come before
        """
        if not self._streams:
            for move in moves:
                pair = (move.device, move.host) if to_device else (move.host, move.device)
                ctypes.memmove(*pair, move.num_bytes)
            return lambda: None
        with torch.cuda.device(self._device):
            after()
            for first in range(0, len(moves), MAX_BATCH):
                self._launch(self._streams[stream], moves[first : first + MAX_BATCH], to_device)
            done = torch.cuda.Event(blocking=True)
            done.record(self._streams[stream])
        return done.synchronize

    def _launch(self, stream: "torch.cuda.Stream", moves: Sequence[Move], to_device: bool) -> None:
        handle = ctypes.c_void_p(stream.cuda_stream)
        if self._has_batches:
            code = self._launch_batch(handle, moves, to_device)
            if code != NOT_SUPPORTED:
                self._check(code, BATCH)
                return
            self._has_batches = False
        copy = getattr(self._driver, ONE_WAY[to_device])
        for move in moves:
            pair = (move.device, move.host) if to_device else (move.host, move.device)
            code = copy(*map(ctypes.c_uint64, pair), ctypes.c_size_t(move.num_bytes), handle)
            self._check(code, ONE_WAY[to_device])

    def _launch_batch(self, handle: ctypes.c_void_p, moves: Sequence[Move], to_device: bool) -> int:
        count = len(moves)
        addresses, sizes = ctypes.c_uint64 * count, ctypes.c_size_t * count
        on_device, on_host, num_bytes = zip(*moves, strict=True)
        device, host = addresses(*on_device), addresses(*on_host)
        targets, sources = (device, host) if to_device else (host, device)
        attributes = _Attributes(order=IN_STREAM_ORDER, flags=BESIDE_KERNELS)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code: int = self._driver.cuMemcpyBatchAsync(
            targets, sources, sizes(*num_bytes), ctypes.c_size_t(count),
            ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(failed), handle,
        )  # fmt: skip
        return code

    def _check(self, code: int, name: str) -> None:
        if code:
            raise DeviceError(f"{self._device}: {name} of the prefix cache's copies failed with code {code}")
