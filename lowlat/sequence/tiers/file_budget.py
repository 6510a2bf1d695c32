"""This module counts the cached files of all models below a directory, and removes the oldest above a limit.

Each process keeps its own count. It walks a folder at start, and again when the folder's modification time shows that
another process has changed it. Before it removes a file it reads the time of last use again, since any process may have
used the file.
"""

import os
import re
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from heapq import heapify, heappop, heappush
from pathlib import Path

from lowlat.checkpoint.files import take_out_unfinished

__all__ = ["SUFFIX", "WRITING", "FileBudget"]

SUFFIX = ".chunk"
WRITING = ".writing-"  # in names of unfinished files, before the id of the process that writes
FOLDER = re.compile(r"[0-9a-f]{16}")  # the name of a folder: a fingerprint
FILE = re.compile(r"[0-9a-f]{64}.*" + re.escape(SUFFIX))  # the name of a file: the digest of a chunk, and its pool
RECENT_S = 1.0  # after others' change: further ones may go unseen, in one tick of the file system's clock or amid own
WALK_SHARE = 0.05  # of the time, at most, for walks of a folder that others keep changing, and for checks of pins
EMPTY_S = 60.0  # an empty folder is removed if others have not changed it for so long; before, its process may write


class _Watch:
    """Tells whether another process has changed a folder since the last walk. Raises OSError if it is gone."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen = self._others = 0
        self._is_stale = True

    def is_stale(self) -> bool:
        changed = os.stat(self.path).st_mtime_ns
        if changed != self._seen:
            self._is_stale = True
            self._seen = self._others = changed
        return self._is_stale

    def begin(self) -> None:
        """Note that a walk of the folder begins."""
        self.is_stale()
        self._is_stale = self._unchanged_s() < RECENT_S

    def is_left(self) -> bool:
        """Whether others have not changed it for EMPTY_S."""
        return self._unchanged_s() > EMPTY_S

    def end_own_change(self) -> None:
        self._seen = os.stat(self.path).st_mtime_ns

    def _unchanged_s(self) -> float:
        return time.time() - self._others / 1e9


class _Folder:
    """The files of a fingerprint: sizes by name, and a heap of times of use, which may be outdated.

    pinned  entries of files that were pinned when it was their turn, apart, so that not every write looks at them
    """

    def __init__(self, path: str) -> None:
        self.watch = _Watch(path)
        self.path = path
        self.sizes: dict[str, int] = {}
        self.oldest: list[tuple[int, str]] = []
        self.pinned: list[tuple[int, str]] = []
        self.num_bytes = 0  # unfinished files included
        self.has_unfinished = False
        self.next_walk_s = self.next_look_s = 0.0

    def forget(self, name: str) -> None:
        self.num_bytes -= self.sizes.pop(name, 0)


class FileBudget:
    """The cached files of all fingerprints below a directory, at most `max_bytes` together.

    directory  shared by all processes; folders and files with names that are not lowlat's are left alone
    own        the folder of this process's fingerprint
    is_pinned  whether a file of this folder, by its name, must stay
    tell       is called with the path of what cannot be read or removed, and why
    Any thread may call `take_out`, `own_names` and the properties; only one thread calls the others. Raises OSError if
    the own folder cannot be read.
    """

    def __init__(
        self,
        directory: Path,
        own: Path,
        max_bytes: int,
        is_pinned: Callable[[str], bool],
        tell: Callable[[Path, str], None],
    ) -> None:
        self.max_bytes = max_bytes
        self._is_pinned, self._tell = is_pinned, tell
        self._lock = threading.Lock()
        self._watch = _Watch(str(directory))
        self._own = _Folder(str(own))
        self._folders = {self._own.path: self._own}
        self._count()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, as far as this process has counted them."""
        with self._lock:
            return sum(folder.num_bytes for folder in self._folders.values())

    @property
    def num_own(self) -> int:
        """Number of files in the own folder, as far as this process has counted them."""
        return len(self._own.sizes)

    def own_names(self) -> frozenset[str]:
        """Return the names of the files in the own folder."""
        with self._lock:
            return frozenset(self._own.sizes)

    def make_space(self, size: int) -> bool:
        """Remove the least recently used files until `size` bytes fit; returns whether they do. Raises OSError."""
        if size > self.max_bytes:
            return False
        self._count()
        if self.num_bytes + size > self.max_bytes:
            self._count(unfinished=True)
            self._take_out_oldest(size)
        return self.num_bytes + size <= self.max_bytes

    def begin_file(self) -> None:
        """Note that this process has created a file in the own folder. Raises OSError."""
        self._own.watch.end_own_change()

    def end_file(self) -> None:
        """Note others' changes since `begin_file`, before the rename: a write may take long. Raises OSError."""
        self._own.watch.is_stale()

    def add(self, name: str, size: int) -> None:
        """Count a file that was written to the own folder. Raises OSError."""
        try:
            used_ns = os.stat(os.path.join(self._own.path, name)).st_mtime_ns
        except FileNotFoundError:  # another process has removed it
            return
        with self._lock:
            if name not in self._own.sizes:
                heappush(self._own.oldest, (used_ns, name))
            self._own.forget(name)
            self._own.sizes[name] = size
            self._own.num_bytes += size
        self._own.watch.end_own_change()

    def take_out(self, name: str) -> None:
        """Remove a file from the own folder, if it is there."""
        path = os.path.join(self._own.path, name)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
            with self._lock:
                self._own.forget(name)
        except OSError as error:
            self._tell(Path(path), f"it cannot be taken out: {error}")

    def _take_out_oldest(self, size: int) -> None:
        """Remove the oldest files until `size` bytes fit, or none is left that may go."""
        own, begun = self._own, time.monotonic()
        looks = bool(own.pinned) and begun >= own.next_look_s
        if looks:
            own.oldest += own.pinned
            heapify(own.oldest)
            own.pinned = []
        while self.num_bytes + size > self.max_bytes:
            folders = [folder for folder in self._folders.values() if folder.oldest]
            if not folders:
                break
            folder = min(folders, key=lambda each: each.oldest[0])
            used_ns, name = heappop(folder.oldest)
            if folder is own and self._is_pinned(name):
                own.pinned.append((used_ns, name))
            else:
                self._let_go(folder, name, used_ns)
        if looks:
            ended = time.monotonic()
            own.next_look_s = ended + (ended - begun) / WALK_SHARE

    def _let_go(self, folder: _Folder, name: str, used_ns: int) -> None:
        """Remove a file, unless it was used after `used_ns`."""
        path = os.path.join(folder.path, name)
        try:
            used_since_ns = os.stat(path).st_mtime_ns
            if used_since_ns != used_ns:
                heappush(folder.oldest, (used_since_ns, name))
                return
            os.unlink(path)
            folder.watch.end_own_change()
        except FileNotFoundError:  # another process has removed it
            pass
        except OSError as error:
            self._tell(Path(path), f"it cannot be taken out: {error}")
            return
        with self._lock:
            folder.forget(name)
        if not folder.sizes:
            self._take_out_empty(folder)

    def _count(self, *, unfinished: bool = False) -> None:
        """Walk folders that are new, or that others have changed. Raises OSError for the own one.

        unfinished  also walk folders with unfinished files: those of killed processes are removed some time later
        """
        if self._watch.is_stale():
            self._list()
        for folder in list(self._folders.values()):
            try:
                is_due = folder.watch.is_stale() or (unfinished and folder.has_unfinished)
                if is_due and time.monotonic() >= folder.next_walk_s:
                    self._walk(folder)
            except FileNotFoundError:  # another process has removed it, empty
                self._forget(folder)
            except OSError as error:
                if folder is self._own:
                    raise
                self._tell(Path(folder.path), f"it cannot be counted: {error}")

    def _list(self) -> None:
        """List the folders of other fingerprints."""
        self._watch.begin()
        with os.scandir(self._watch.path) as entries:
            found = {
                each.path for each in entries if FOLDER.fullmatch(each.name) and each.is_dir(follow_symlinks=False)
            }
        with self._lock:
            known = self._folders
            self._folders = {path: known.get(path) or _Folder(path) for path in sorted(found - {self._own.path})}
            self._folders[self._own.path] = self._own

    def _walk(self, folder: _Folder) -> None:
        begun = time.monotonic()
        sizes, oldest = dict[str, int](), list[tuple[int, str]]()
        folder.watch.begin()
        unfinished = take_out_unfinished(Path(folder.path), WRITING)
        with os.scandir(folder.path) as entries:
            for each in entries:
                if not FILE.fullmatch(each.name):
                    continue
                with suppress(FileNotFoundError):  # another process has removed it
                    facts = each.stat(follow_symlinks=False)
                    if stat.S_ISREG(facts.st_mode):
                        sizes[each.name] = facts.st_size
                        oldest.append((facts.st_mtime_ns, each.name))
        heapify(oldest)
        with self._lock:
            folder.sizes, folder.num_bytes = sizes, unfinished + sum(sizes.values())
            folder.oldest, folder.pinned = oldest, []
            folder.has_unfinished = unfinished > 0
        if not sizes:
            self._take_out_empty(folder)
        ended = time.monotonic()
        folder.next_walk_s = ended + (ended - begun) / WALK_SHARE

    def _take_out_empty(self, folder: _Folder) -> None:
        """Remove another fingerprint's folder if it is empty; a process that writes to it creates it again."""
        if folder is not self._own and folder.watch.is_left():
            with suppress(OSError):
                os.rmdir(folder.path)
                self._forget(folder)

    def _forget(self, folder: _Folder) -> None:
        """Forget a folder that is gone."""
        with self._lock:
            if folder is self._own:
                self._own = self._folders[folder.path] = _Folder(folder.path)
            else:
                self._folders.pop(folder.path, None)
