"""Events leave when they are made, to readers that acknowledge late too."""

import json
import socket
from pathlib import Path

import pytest
from gateway import KEY, ScriptedEngine, running_gateway

from lowlat.serving.http.server import Address, bind

TOKENS = 40


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_accepted_sockets_do_not_wait_for_acknowledgements(host: str) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    with bind(Address(host, 0)) as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_reader_that_acknowledges_late_gets_each_event_by_itself(tmp_path: Path) -> None:
    with running_gateway(tmp_path, ScriptedEngine(step_s=0.005)) as gateway:
        body = json.dumps({"model": "fake", "prompt": "Hi", "max_tokens": TOKENS, "stream": True}).encode()
        with socket.create_connection((gateway.address.host, gateway.address.port), timeout=30) as caller:
            caller.sendall(
                f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
                f"content-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            counts, answer = list[int](), b""
            while b"[DONE]" not in answer:
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)  # each read turns it on again
                piece = caller.recv(1 << 16)
                assert piece, answer
                counts.append(piece.count(b"data: "))
                answer += piece
    assert sum(counts) == TOKENS + 2  # the end, and [DONE]
    assert sorted(counts)[len(counts) // 2] == 1 and len(counts) > TOKENS // 2, counts
