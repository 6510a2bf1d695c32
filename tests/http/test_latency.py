"""Events leave when they are made, to readers that acknowledge late, read late, or ask through another server."""

import asyncio
import json
import socket
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway import KEY, RunningGateway, ScriptedEngine, running_gateway

from lowlat.ipc.client import AsyncClient
from lowlat.serving.http import streaming
from lowlat.serving.http.app import make_app
from lowlat.serving.http.gateway import OneModel
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


def streamed(gateway: RunningGateway, version: str = "1.1", wait_s: float = 0.0, **options: object) -> bytes:
    """The whole answer to a stream, with its headers, read after a while."""
    body = json.dumps({"model": "fake", "prompt": "Hi", "max_tokens": TOKENS, "stream": True, **options}).encode()
    with socket.create_connection((gateway.address.host, gateway.address.port), timeout=30) as caller:
        caller.sendall(
            f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        time.sleep(wait_s)
        answer = b""
        while piece := caller.recv(1 << 20):
            answer += piece
    return answer


def texts_of(events: bytes) -> list[str]:
    """The texts of a stream's events."""
    lines = [line for line in events.split(b"\n") if line.startswith(b"data: {")]
    return [choice["text"] for line in lines for choice in json.loads(line[6:])["choices"]]


def unchunked(answer: bytes) -> bytes:
    """A body without the frames of its chunks."""
    start, pieces = answer.index(b"\r\n\r\n") + 4, list[bytes]()
    while size := int(answer[start : (end := answer.index(b"\r\n", start))], 16):
        pieces.append(answer[end + 2 : end + 2 + size])
        start = end + size + 4
    return b"".join(pieces)


def test_a_reader_that_reads_late_misses_nothing(tmp_path: Path) -> None:
    texts = [f"{number} " + "x" * (1 << 16) for number in range(200)]
    with running_gateway(tmp_path, ScriptedEngine(*({"text": text} for text in texts))) as gateway:
        answer = unchunked(streamed(gateway, wait_s=0.3, max_tokens=1000))
        assert "".join(texts_of(answer)) == "".join(texts) and answer.endswith(b"data: [DONE]\n\n")


def test_a_caller_of_http_1_0_gets_no_chunks(tmp_path: Path) -> None:
    with running_gateway(tmp_path) as gateway:
        head, _, body = streamed(gateway, "1.0").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"chunked" not in head
        assert len("".join(texts_of(body)).split()) == TOKENS and body.endswith(b"data: [DONE]\n\n")


def test_another_server_gets_the_same_events(tmp_path: Path) -> None:
    body = json.dumps({"model": "fake", "prompt": [1], "max_tokens": TOKENS, "stream": True, "n": 3}).encode()
    sent: list[dict[str, Any]] = []

    async def main(endpoint: str) -> None:
        received = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not received:
                await asyncio.sleep(60)
            return received.pop()

        async def send(message: MutableMapping[str, Any]) -> None:
            await asyncio.sleep(0)
            sent.append(dict(message))

        client = AsyncClient(endpoint)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await make_app(OneModel(client), key=None, host=None)(scope, receive, send)
        await client.close()

    with running_gateway(tmp_path) as gateway:
        assert gateway.served is not None
        asyncio.run(asyncio.wait_for(main(gateway.served.server.endpoint), 20))
    events = b"".join(message.get("body", b"") for message in sent)
    assert len("".join(texts_of(events)).split()) == 3 * TOKENS and events.endswith(b"data: [DONE]\n\n")
    assert sent[0]["status"] == 200 and not sent[-1]["more_body"]


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
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)  # each read turns it on again
                piece = caller.recv(1 << 16)
                assert piece, answer
                counts.append(piece.count(b"data: "))
                answer += piece
    assert len("".join(texts_of(unchunked(answer))).split()) == TOKENS
    assert sorted(counts)[len(counts) // 2] == 1 and len(counts) > TOKENS // 2, counts


def test_silence_is_broken_by_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first event, which a proxy may not wait for, and among later ones; what fails then is an event."""
    monkeypatch.setattr(streaming, "SILENCE_S", 0.02)
    with running_gateway(tmp_path, ScriptedEngine(step_s=0.1, faults={5: "nan"})) as gateway:
        for version, num in (("1.1", 4), ("1.0", 0)):
            answer = streamed(gateway, version, max_tokens=2)
            assert answer.count(b": waiting\n\n") >= num and bool(num) == (b": waiting" in answer)
            assert len("".join(texts_of(answer)).split()) == 2
        with gateway.openai() as client:
            asked: Any = {"model": "fake", "max_tokens": 4, "stream": True}
            chunks = list(client.completions.create(prompt="Hi", **asked))
            assert len(chunks) == 5
            with pytest.raises(openai.APIError, match="not finite"):
                list(client.completions.create(prompt=[5], **asked))
