"""The model's own advice holds where a client is silent, field by field; chats without a limit leave KV to others."""

from collections.abc import Iterator
from typing import Any

import pytest
from gateway import RunningGateway, ScriptedEngine, running_gateway

from lowlat.ipc.client import Client
from lowlat.ipc.limits import Limits
from lowlat.ipc.wire import Sampling

ADVICE = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def advised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningGateway, ScriptedEngine]]:
    """A gateway to a model with advice, whose server reserves 100 tokens for a chat without a limit."""
    engine = ScriptedEngine({"text": "x"}, sampling_defaults=ADVICE, max_context=256)
    with running_gateway(tmp_path_factory.mktemp("advised"), engine, Limits(default_max_tokens=100)) as gateway:
        yield gateway, engine


def sampled(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in ADVICE}


@pytest.mark.parametrize(
    ("path", "body", "changes"),
    [
        ("chat/completions", CHAT, {}),
        ("chat/completions", CHAT, {"temperature": 0.0}),  # a default that is given is no silence
        ("chat/completions", CHAT, {"top_k": 0, "top_p": 1.0}),
        ("completions", {"model": "fake", "prompt": "Hi"}, {"repetition_penalty": 1.0}),
        ("responses", {"model": "fake", "input": "Hi"}, {"temperature": 1.0}),
    ],
)
def test_advice_holds_field_by_field(
    advised: tuple[RunningGateway, ScriptedEngine], path: str, body: dict[str, Any], changes: dict[str, Any]
) -> None:
    gateway, engine = advised
    status, answer, _ = gateway.ask(f"/v1/{path}", {**body, **changes})
    assert status == 200, answer
    assert sampled(engine.asked[-1]) == {**ADVICE, **changes}
    if path == "responses":
        assert (answer["temperature"], answer["top_p"]) == (1.0, 0.8)


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        ("chat/completions", CHAT, 100),
        ("chat/completions", {**CHAT, "max_tokens": 200}, 200),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x" * 200}]}, 256 - len("<user>") - 200),
        ("chat/completions", {**CHAT, "min_tokens": 150}, 150),
        ("responses", {"model": "fake", "input": "Hi"}, 100),
        ("responses", {"model": "fake", "input": "Hi", "max_output_tokens": 150}, 150),
        ("completions", {"model": "fake", "prompt": "Hi"}, 16),
    ],
)
def test_a_chat_without_a_limit_reserves_some(
    advised: tuple[RunningGateway, ScriptedEngine], path: str, body: dict[str, Any], most: int
) -> None:
    gateway, engine = advised
    status, answer, _ = gateway.ask(f"/v1/{path}", body)
    assert status == 200, answer
    assert engine.asked[-1].max_tokens == most


def test_clients_of_the_socket_see_the_advice_and_take_it(advised: tuple[RunningGateway, ScriptedEngine]) -> None:
    gateway, engine = advised
    assert gateway.served is not None
    with Client(gateway.served.server.endpoint) as client:
        client.connect()
        assert client.server.advice == ADVICE
        list(client.generate("Hi", max_tokens=2, temperature=0.0))
        assert sampled(engine.asked[-1]) == {**ADVICE, "temperature": 0.0}
        list(client.generate("Hi", fit_context=True))
        assert engine.asked[-1].max_tokens == 100
