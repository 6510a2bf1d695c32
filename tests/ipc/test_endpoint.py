"""Endpoints: the default one, what is refused, and who may hold a path."""

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lowlat.errors import ConfigError
from lowlat.ipc.endpoint import EndpointLock, default_endpoint, parse_endpoint


def test_the_default_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_endpoint({"LOWLAT_ENDPOINT": "tcp://127.0.0.1:9"}) == "tcp://127.0.0.1:9"
    assert default_endpoint({"XDG_RUNTIME_DIR": "/run/user/7"}) == "ipc:///run/user/7/lowlat/default.sock"
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert default_endpoint({}) == "ipc:///c/lowlat/run/default.sock"
    monkeypatch.setenv("HOME", "/home/somebody")
    for cache in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        for environment in ({}, {"XDG_RUNTIME_DIR": "relative", "LOWLAT_ENDPOINT": ""}):
            assert default_endpoint(environment) == "ipc:///home/somebody/.cache/lowlat/run/default.sock"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "must be"),
        ("/a/path", "must be"),
        ("inproc://a", "must be"),
        ("http://a:1", "must be"),
        ("ipc://@abstract", "permissions"),
        ("ipc://relative/x.sock", "absolute"),
        ("ipc://", "absolute"),
        ("ipc:///a/folder/", "absolute"),
        ("ipc:///" + "a" * 107, "107"),
        ("ipc:///" + "ä" * 54, "107"),
        ("tcp://127.0.0.1", "port"),
        ("tcp://:80", "port"),
        ("tcp://127.0.0.1:0", "port"),
        ("tcp://127.0.0.1:65536", "port"),
        ("tcp://127.0.0.1:-1", "port"),
    ],
)
def test_what_is_no_endpoint(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_endpoint(url)


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("tcp://127.0.0.1:80", True),
        ("tcp://127.8.8.8:*", True),
        ("tcp://[::1]:80", True),
        ("tcp://localhost:80", True),
        ("tcp://0.0.0.0:80", False),
        ("tcp://*:80", False),
        ("tcp://192.168.0.1:80", False),
        ("tcp://[::]:80", False),
        ("tcp://localhost.example.com:80", False),
        ("tcp://eth0:80", False),
    ],
)
def test_what_other_machines_can_reach(url: str, loopback: bool) -> None:
    assert parse_endpoint(url).loopback is loopback


def test_a_path_of_exactly_the_limit_is_taken() -> None:
    url = "ipc:///" + "a" * 106
    assert parse_endpoint(url).path == Path("/" + "a" * 106)


def test_folder_and_socket_are_open_to_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "s.sock"
    lock = EndpointLock(path)
    lock.listen().close()
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path, path.parent, path.parent.parent)] == [
        0o600,
        0o700,
        0o700,
    ]
    assert lock.state() == "own"
    lock.release()
    lock.release()
    assert not path.exists()
    assert stat.S_IMODE(path.with_name("s.sock.lock").stat().st_mode) == 0o600


def test_a_second_holder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    lock = EndpointLock(path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()}, holds"):
        EndpointLock(path)
    lock.release()
    EndpointLock(path).release()


def test_what_a_dead_server_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    code = """
import os, sys
from pathlib import Path
from lowlat.ipc.endpoint import EndpointLock
path = Path(sys.argv[1])
lock = EndpointLock(path)
lock.listen()
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -9
    assert path.exists()
    lock = EndpointLock(path)
    lock.listen().close()
    assert lock.state() == "own"
    lock.release()


def test_a_path_that_another_bound_or_removed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    lock = EndpointLock(path)
    with lock.listen():
        path.unlink()
        assert lock.state() == "missing"
        with socket.socket(socket.AF_UNIX) as thief:
            thief.bind(str(path))
        assert lock.state() == "stolen"
        lock.release()
    assert path.exists()  # not ours to remove


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o750, 0o711])
def test_folders_that_others_can_use_are_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}"):
        EndpointLock(folder / "s.sock")


def test_a_shared_endpoint_lets_others_reach_it_and_not_change_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o755)
    lock = EndpointLock(folder / "s.sock", shared=True)
    lock.listen().close()
    assert stat.S_IMODE((folder / "s.sock").stat().st_mode) == 0o666
    lock.release()
    folder.chmod(0o775)
    with pytest.raises(ConfigError, match="writable"):
        EndpointLock(folder / "s.sock", shared=True)


def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/a of the endpoint's socket cannot be made: Not a directory .*XDG_RUN"):
        EndpointLock(tmp_path / "file" / "a" / "s.sock")


def test_folders_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ConfigError, match=f"belongs to uid {own}"):
        EndpointLock(tmp_path / "s.sock")


def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        EndpointLock(path)
    assert path.read_text() == "precious"
    path.unlink()
    EndpointLock(path).release()  # the lock was let go


def test_a_lock_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.sock.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="lock file"):
        EndpointLock(tmp_path / "s.sock")
    assert not (tmp_path / "elsewhere").exists()


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        EndpointLock(tmp_path / "file" / "s.sock")
