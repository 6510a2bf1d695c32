"""An endpoint is the address of a server: this module parses and checks endpoints, and locks socket files.

A socket file outlives its server, and another process may remove it and bind its path. So a server first takes a lock
file, and then watches that the socket file stays its own. The modes of the folder and of the file limit who may
connect; the server also checks the peer's uid.
"""

import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs

from lowlat.errors import ConfigError

__all__ = ["Endpoint", "EndpointLock", "check_owner", "default_endpoint", "make_folder", "parse_endpoint"]

MAX_PATH_BYTES = 107  # of sockaddr_un, without its final zero
LOCK_SUFFIX = ".lock"
BACKLOG = 256  # connections that wait to be accepted; the kernel refuses further ones, and clients try again


@dataclass(frozen=True)
class Endpoint:
    """A checked endpoint: `path` for ipc://, `host` and `port` for tcp://; `loopback`: no other machine reaches it."""

    url: str
    scheme: Literal["ipc", "tcp"]
    path: Path | None = None
    host: str = ""
    port: str = ""
    loopback: bool = True

    def __str__(self) -> str:
        return self.url


def default_endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """Return LOWLAT_ENDPOINT, else lowlat/default.sock in XDG_RUNTIME_DIR, else lowlat/run/default.sock in the cache.

    The user's cache has other files of lowlat, too, and may be open to others, so the socket has its own folder there.
    platformdirs' runtime directory is not used: it falls back to a temporary directory that all users share. The
    place of the cache follows from this process's own environment, whatever `environ` is.
    """
    chosen = environ.get("LOWLAT_ENDPOINT")
    if chosen:
        return chosen
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_absolute():
        folder = Path(runtime) / "lowlat"
    else:
        folder = platformdirs.user_cache_path("lowlat", appauthor=False) / "run"
    return f"ipc://{folder / 'default.sock'}"


def make_folder(folder: Path) -> None:
    """Make the folder of a socket and its missing parents, for their owner alone (mode 700). Raises ConfigError."""
    try:
        for missing in reversed([part for part in (folder, *folder.parents) if not part.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} of the endpoint's socket cannot be made: {error.strerror} ({error.filename}); choose "
            "another endpoint (--endpoint), or set XDG_RUNTIME_DIR to a folder of your own"
        ) from error


def parse_endpoint(url: str) -> Endpoint:
    """Parse an endpoint. Raises ConfigError for a transport, a path or an address that cannot be served."""
    scheme, separator, address = str(url).partition("://")  # callers without a type checker give anything
    if separator and scheme == "ipc":
        return _parse_ipc(url, address)
    if separator and scheme == "tcp":
        return _parse_tcp(url, address)
    raise ConfigError(f"endpoint {url!r:.200} must be ipc:///a/path.sock or tcp://host:port")


def _parse_ipc(url: str, address: str) -> Endpoint:
    if address.startswith("@"):
        raise ConfigError(f"endpoint {url!r:.200} is an abstract name, which has no permissions; give a path")
    path = Path(address)
    if not path.is_absolute() or address.endswith("/") or "\0" in address:
        raise ConfigError(f"endpoint {url!r:.200} needs an absolute path of a file")
    size = len(os.fsencode(address))
    if size > MAX_PATH_BYTES:
        raise ConfigError(
            f"the path of {url!r:.200} has {size} bytes and a socket's may have {MAX_PATH_BYTES}; choose a shorter one"
        )
    return Endpoint(url, "ipc", path=path)


def _parse_tcp(url: str, address: str) -> Endpoint:
    host, separator, port = address.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else -1
    if not separator or not host or not (port == "*" or 1 <= number <= 65535):
        raise ConfigError(f"endpoint {url!r:.200} must be tcp://host:port with a port from 1 to 65535")
    name = host.strip("[]")
    try:
        loopback = ipaddress.ip_address(name).is_loopback
    except ValueError:
        loopback = name == "localhost"  # any other name may mean any other machine
    return Endpoint(url, "tcp", host=name, port=port, loopback=loopback)


def check_owner(path: Path, trusted: Collection[int]) -> None:
    """Refuse, for a client, a socket file that no trusted user owns, or that another user could replace.

    Raises ConfigError; OSError if the file's status cannot be read, as when it is missing.
    """
    for place in (path, path.parent):
        found = place.stat()
        if found.st_uid not in trusted:
            raise ConfigError(
                f"{place} belongs to uid {found.st_uid}, which is neither yours nor root's: another may listen "
                "there than you think; server_uid=... (or LOWLAT_SERVER_UID) says that you mean that user"
            )
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"{path.parent} has mode {stat.S_IMODE(found.st_mode):04o}: other users may replace the socket in it; a "
            "server's folder is writable by its owner alone"
        )


class EndpointLock:
    """Locks the path of an ipc:// endpoint for one server: checks the folder, takes the lock file, makes the socket.

    shared   users other than this one are admitted: the folder may be readable to them
    mode     mode of the socket file; None: 600, or 666 if `shared`, as the server checks every connection
    Raises ConfigError when another server holds the path (with its pid), the folder is not this user's or has too
    open a mode, or the path is not a socket.
    """

    def __init__(self, path: Path, *, shared: bool = False, mode: int | None = None) -> None:
        self.path = path
        self.shared = shared
        self._mode = mode if mode is not None else 0o666 if shared else 0o600
        self._inode: tuple[int, int] | None = None
        self._prepare_folder()
        self._descriptor = self._take()
        try:
            self._remove_stale()
        except BaseException:
            self.release()
            raise

    def listen(self) -> socket.socket:
        """Make a socket that listens on the path, set the file's mode, and remember the file's inode.

        Raises ConfigError when the path cannot be bound.
        """
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)  # nobody else can connect before the mode is set
        try:
            listening.bind(os.fspath(self.path))
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise ConfigError(f"cannot listen on {self.path}: {error.strerror}") from error
        finally:
            os.umask(before)
        self.path.chmod(self._mode)
        found = self.path.lstat()
        self._inode = (found.st_dev, found.st_ino)
        return listening

    def state(self) -> Literal["own", "missing", "stolen"]:
        """Return whether the socket file is still the one that was bound."""
        try:
            found = self.path.lstat()
        except OSError:
            return "missing"
        return "own" if (found.st_dev, found.st_ino) == self._inode else "stolen"

    def release(self) -> None:
        """Remove the socket file if it is still this server's, and release the lock; harmless when repeated."""
        if self._descriptor < 0:
            return
        if self._inode is not None and self.state() == "own":
            self.path.unlink(missing_ok=True)
        # The lock file stays: if it were removed, two servers could lock two files of the same name.
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = -1

    def _prepare_folder(self) -> None:
        folder = self.path.parent
        make_folder(folder)
        found = folder.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{folder} is not a directory; the endpoint's socket file lies in one")
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"{folder} belongs to uid {found.st_uid}, and the server runs as {os.geteuid()}; "
                "choose an endpoint in a directory of your own"
            )
        forbidden = 0o022 if self.shared else 0o077
        if found.st_mode & forbidden:
            allowed = "not be writable by others" if self.shared else "be open to its owner alone (mode 0700)"
            raise ConfigError(f"{folder} has mode {stat.S_IMODE(found.st_mode):04o} and must {allowed}")

    def _take(self) -> int:
        lock = self.path.with_name(self.path.name + LOCK_SUFFIX)
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot open the lock file {lock}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(descriptor, 32, 0).strip().decode("ascii", "replace") or "unknown"
            os.close(descriptor)
            raise ConfigError(
                f"another server, process {owner}, holds {self.path}; end it or choose another endpoint"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        return descriptor

    def _remove_stale(self) -> None:
        """Remove a socket file that a dead server left. Raises ConfigError for anything else in its place."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise ConfigError(f"{self.path} exists and is not a socket; choose another endpoint")
        self.path.unlink()
