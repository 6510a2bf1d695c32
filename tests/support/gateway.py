"""The HTTP gateway in a thread of the tests' process, before a server of a FakeEngine in others."""

import http.client
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fake_engine import FakeCodec, FakeEngine, FakeOutput
from served import Served, serve_in

import lowlat
from lowlat.ipc.client import AsyncClient
from lowlat.ipc.limits import Limits
from lowlat.ipc.wire import Message, Sampling
from lowlat.serving.http.connections import ConnectionLimits
from lowlat.serving.http.gateway import OneModel
from lowlat.serving.http.server import Address, run
from lowlat.text.templates.messages import call_values

if TYPE_CHECKING:
    import openai

__all__ = ["KEY", "RecordingCodec", "RunningGateway", "ScriptedEngine", "gateway_at", "running_gateway"]

SERVER = f"lowlat {lowlat.__version__}"
KEY = "a key for tests only"[:16].replace(" ", "-")


class ScriptedEngine(FakeEngine):
    """A FakeEngine whose answers are given: parts of a StepOutput, one a step, then its end.

    Steps that come within a few ms may be joined on their way.
    asked    the sampling of each request, as it came
    prompts  their texts
    """

    def __init__(self, *parts: Mapping[str, Any], reason: str = "stop", **options: Any) -> None:
        super().__init__(**{"step_s": 0.005, "text": True, "tokenizer": "a hash", **options})
        self.parts = list(parts)
        self.reason = reason
        self.asked: list[Any] = []
        self.prompts: list[str] = []

    def submit(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, cache_salt: str = "", session: str = ""
    ) -> None:
        """Take a request."""
        self.asked.append(sampling)
        self.prompts.append(bytes(token % 256 for token in prompt).decode(errors="replace"))
        super().submit(request_id, prompt, sampling, cache_salt, session)

    def _advance(self, request_id: str, request: Any) -> FakeOutput:
        if not self.parts:
            return super()._advance(request_id, request)
        part = self.parts[request.num_steps - 1]
        last = request.num_steps == len(self.parts)
        request.num_sent += 1
        if last:
            self._end(request_id, self._running.pop(request_id))
        return FakeOutput(request_id, (7,), self.reason if last else None, **{"text": "", **part})

    def metrics(self, request_id: str) -> dict[str, Any]:
        """A request's figures: of its tokens, one of each part with reasoning."""
        return super().metrics(request_id) | {"reasoning_tokens": sum("reasoning" in part for part in self.parts)}


class RecordingCodec(FakeCodec):
    """A FakeCodec that keeps the chats that it was given: messages, and what else the template may use."""

    def __init__(self) -> None:
        super().__init__()
        self.chats: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []

    def encode_chat(self, messages: Sequence[Message], options: Mapping[str, Any], **how: Any) -> list[int]:
        """Encode, and note."""
        self.chats.append(([_for_template(message) for message in messages], dict(options)))
        return super().encode_chat(messages, options, **how)


def _for_template(message: Message) -> dict[str, Any]:
    """A message with the arguments of its calls as templates read them."""
    value: dict[str, Any] = msgspec.to_builtins(message)
    for call in value.get("tool_calls") or ():
        call["function"]["arguments"] = call_values(call["function"]["arguments"])
    return value


@dataclass
class RunningGateway:
    """A gateway: where it is, and the server after it."""

    address: Address
    served: Served | None = None

    @property
    def url(self) -> str:
        """For OpenAI's client."""
        return f"{self.address.url()}/v1"

    def openai(self) -> "openai.OpenAI":
        """OpenAI's client; it does not try again, and loads no certificates, which take 0.1 s."""
        import openai

        http_client = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0, http_client=http_client)

    def ask(
        self, path: str, body: object = None, *, headers: Mapping[str, str] | None = None, method: str | None = None
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """One request with the key: status, JSON or text, headers. Bytes are sent as they are."""
        connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=30)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            sent = {"authorization": f"Bearer {KEY}", **(headers or {})}
            connection.request(method or ("GET" if body is None else "POST"), path, data, sent)
            answer = connection.getresponse()
            text = answer.read().decode()
            kind = answer.headers.get("content-type", "")
            return (
                answer.status,
                json.loads(text) if text and kind.startswith("application/json") else text,
                answer.headers,
            )
        finally:
            connection.close()


@contextmanager
def gateway_at(endpoint: str, **options: Any) -> Iterator[Address]:
    """A gateway to this endpoint, on a port of its choice where none is given."""
    opened = threading.Event()
    addresses: list[Address] = []

    def note(address: Address) -> None:
        addresses.append(address)
        opened.set()

    reading, writing = os.pipe()
    client = AsyncClient(endpoint, name="gateway", connect_timeout_s=options.pop("connect_timeout_s", 5.0))
    bound = Address(options.pop("host", "127.0.0.1"), options.pop("port", 0), options.pop("path", None))
    thread = threading.Thread(
        target=run,
        args=(OneModel(client), bound),
        kwargs={"key": KEY, "opened": note, "parent": reading, **options},
    )
    thread.start()
    try:
        while not opened.wait(0.1):  # as long as a test may take: a busy machine is no fault of the gateway's
            assert thread.is_alive(), "the gateway ended before it took connections"
        yield addresses[0]
    finally:
        os.close(writing)
        thread.join(30)
        os.close(reading)
        assert not thread.is_alive()


@contextmanager
def running_gateway(
    folder: Path,
    engine: FakeEngine | None = None,
    limits: Limits | None = None,
    codec: FakeCodec | None = None,
    connections: ConnectionLimits | None = None,
    **options: Any,
) -> Iterator[RunningGateway]:
    """A gateway and the server of an engine after it, both in this process."""
    folder.chmod(0o700)
    engine = engine or ScriptedEngine()
    with ExitStack() as stack:
        served = stack.enter_context(
            serve_in(folder, engine, codec or FakeCodec(), limits or Limits(), {"name": SERVER})
        )
        address = stack.enter_context(gateway_at(served.server.endpoint, limits=connections, **options))
        yield RunningGateway(address, served)
