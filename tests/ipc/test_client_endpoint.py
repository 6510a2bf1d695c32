"""Where a client is to connect, and how: nobody there yet, keys, options that cannot be."""

import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq
from scripted_server import ScriptedServer, ipc_url

from lowlat.errors import ConfigError, LowlatError, ServerGone
from lowlat.ipc import Client, ClientCurve


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
    ],
)
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Client(**options)
