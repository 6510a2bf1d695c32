"""This module provides lock files: one process writes a file that several need, and the others wait for it."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["locked"]

POLL_S = 0.02


@contextlib.contextmanager
def locked(path: Path, patience_s: float) -> Iterator[bool]:
    """Hold the lock of a file that is to be written. Yields whether the caller should write it.

    It yields False if another process held the lock for all of `patience_s`. If no lock is possible, in a folder that
    cannot be written or on a file system without locks, it yields True to every process. The system frees the lock of
    a killed process. A process removes its lock file when it is done; one left by a killed process is taken over.
    """
    lock = path.with_suffix(".lock")
    try:
        held = _acquired(lock, time.monotonic() + patience_s)
    except BlockingIOError:
        yield False
        return
    except OSError:
        yield True
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_UN)  # to close it is not enough: a fork of this process may hold a copy open
        os.close(held)


def _acquired(lock: Path, deadline: float) -> int:
    """Lock a file and return its descriptor. Raises BlockingIOError at the deadline, and OSError without locks."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_the_file(descriptor, lock):
                return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise
            time.sleep(POLL_S)
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_the_file(descriptor: int, lock: Path) -> bool:
    """Whether an opened lock file still has its name: the previous holder may have removed it in the meantime."""
    try:
        return os.path.samestat(os.fstat(descriptor), lock.stat())
    except FileNotFoundError:
        return False
