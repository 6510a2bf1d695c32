"""Where a client is to connect, and how: nobody there yet, keys, options that cannot be."""

import asyncio
import os
import pickle
import socket
import stat
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from scripted_server import ScriptedServer, ipc_url

from lowlat.errors import ConfigError, LowlatError, ServerGone
from lowlat.ipc import AsyncClient, Client, ClientCurve, libzmq


def test_no_server_and_what_the_message_says(tmp_path: Path) -> None:
    client = Client(ipc_url(tmp_path), connect_timeout_s=0.2)
    begin = time.perf_counter()
    with pytest.raises(ServerGone, match=r"no lowlat server answers at ipc://.* within 0\.2 s .*`lowlat serve`"):
        client.generate("a")
    assert time.perf_counter() - begin < 2.0
    assert "CURVE" not in no_server_error(client)
    with pytest.raises(LowlatError, match="closed"):
        client.close()
        client.health()


def no_server_error(client: Client) -> str:
    with pytest.raises(ServerGone) as caught:
        client.health()
    return str(caught.value)


def test_who_has_no_keys_is_told_of_them() -> None:
    with closing(Client("tcp://127.0.0.1:9", connect_timeout_s=0.1)) as client:
        assert "curve=ClientCurve" in no_server_error(client)
    curve = ClientCurve(zmq.curve_keypair()[0].decode())
    with closing(Client("tcp://127.0.0.1:9", connect_timeout_s=0.1, curve=curve)) as client:
        assert "curve=ClientCurve" not in no_server_error(client)


def test_a_server_that_starts_a_little_later_is_waited_for(tmp_path: Path) -> None:
    client = Client(ipc_url(tmp_path))
    servers: list[ScriptedServer] = []
    timer = threading.Timer(0.3, lambda: servers.append(ScriptedServer(ipc_url(tmp_path))))
    timer.start()
    try:
        assert len(list(client.generate("a", max_tokens=3))) == 4
    finally:
        client.close()
        timer.join()
        for late in servers:
            late.stop()


def test_curve_and_its_options() -> None:
    with pytest.raises(ConfigError, match="needs CURVE"):
        Client("tcp://192.0.2.1:5555").generate("a")
    with pytest.raises(ConfigError, match="40 characters"):
        ClientCurve("short")
    with pytest.raises(ConfigError, match="both public_key and secret_key"):
        ClientCurve("a" * 40, public_key="b" * 40)
    assert "s" * 40 not in repr(ClientCurve("a" * 40, "p" * 40, "s" * 40))


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A user whose folder it is, and who is neither this one nor root."""
    owner = 12_345 if os.geteuid() == 0 else os.geteuid()
    if os.geteuid() == 0:
        os.chown(tmp_path, owner, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    return owner


def test_another_users_server_is_not_talked_to_unless_it_is_meant(
    tmp_path: Path, foreign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedServer(ipc_url(tmp_path)) as server:
        refused = pytest.raises(ConfigError, match=f"belongs to uid {foreign}, .*server_uid=.*LOWLAT_SERVER_UID")
        with refused, closing(Client(server.url)) as client:
            client.generate("a")
        with refused:
            asyncio.run(AsyncClient(server.url).connect())
        assert not server.received
        with Client(server.url, server_uid=foreign) as client:
            assert client.health().state == "serving"
        monkeypatch.setenv("LOWLAT_SERVER_UID", str(foreign))
        with Client(server.url) as client:
            assert client.health().state == "serving"


def test_a_folder_in_which_others_may_replace_the_socket_is_refused(tmp_path: Path) -> None:
    with ScriptedServer(ipc_url(tmp_path)) as server:
        tmp_path.chmod(0o777)
        with (
            pytest.raises(ConfigError, match="mode 0777: other users"),
            closing(Client(server.url)) as client,
        ):
            client.connect()
        tmp_path.chmod(0o777 | stat.S_ISVTX)
        with Client(server.url) as client:
            assert client.health().state == "serving"


def test_what_answers_and_is_no_server(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/s.sock")
        listening.listen()
        client = Client(f"ipc://{tmp_path}/s.sock", connect_timeout_s=0.3)
        done = threading.Event()

        def answer() -> None:
            listening.settimeout(0.02)
            while not done.is_set():
                with suppress(OSError), listening.accept()[0] as connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ServerGone, match=r"no lowlat server answers .*(handshake failed|connection was lost)"):
            client.connect()
        done.set()
        thread.join()


def test_a_libzmq_that_is_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libzmq, "MIN_VERSION", (99, 0))
    with pytest.raises(ConfigError, match=r"libzmq .* is too old"), closing(Client("tcp://127.0.0.1:9")) as client:
        client.connect()


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint": "http://x"},
        {"endpoint": "ipc://@abstract"},
        {"endpoint": "ipc:///" + "x" * 200},
        {"window": 0},
        {"window": 1.5},
        {"name": "n" * 65},
        {"connect_timeout_s": 0.0},
        {"connect_timeout_s": "soon"},
        {"server_uid": -1},
        {"server_uid": "root"},
    ],
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Client(**options)


def test_a_client_says_what_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"endpoint 5 must be ipc:///a/path\.sock"):
        Client(5).generate("a")  # type: ignore[arg-type]
    for make in (Client, AsyncClient):
        with pytest.raises(TypeError, match=rf"a {make.__name__} cannot be copied or pickled"):
            pickle.dumps(make("ipc:///none.sock"))
