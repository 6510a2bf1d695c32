"""The header x-session-id, a request's priority, and best_of, as a server gets them over HTTP."""

from collections.abc import Iterator
from typing import Any

import pytest
from gateway import RunningGateway, ScriptedEngine, running_gateway

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]},
    "completions": {"model": "fake", "prompt": "Hi"},
    "responses": {"model": "fake", "input": "Hi"},
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningGateway, ScriptedEngine]]:
    engine = ScriptedEngine({"text": "x"})
    with running_gateway(tmp_path_factory.mktemp("sessions"), engine) as gateway:
        yield gateway, engine


@pytest.mark.parametrize("path", BODIES)
def test_a_session_is_named_by_a_header(path: str, scripted: tuple[RunningGateway, ScriptedEngine]) -> None:
    gateway, engine = scripted
    for headers, name in (({"x-session-id": "agent-7"}, "agent-7"), ({}, "")):
        status, answer, _ = gateway.ask(f"/v1/{path}", BODIES[path], headers=headers)
        assert status == 200, answer
        assert engine.sessions[-1] == name


@pytest.mark.parametrize("name", ["two words", "x" * 200, "caf\xe9"])
def test_a_name_that_is_none_is_refused(name: str, scripted: tuple[RunningGateway, ScriptedEngine]) -> None:
    gateway, engine = scripted
    before = len(engine.sessions)
    status, answer, _ = gateway.ask("/v1/completions", BODIES["completions"], headers={"x-session-id": name})
    assert status == 400 and answer["error"]["param"] == "x-session-id"
    assert len(engine.sessions) == before


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_priority_reaches_the_engine(path: str, scripted: tuple[RunningGateway, ScriptedEngine]) -> None:
    gateway, engine = scripted
    assert gateway.ask(f"/v1/{path}", {**BODIES[path], "priority": 3})[0] == 200
    assert engine.asked[-1].priority == 3
    status, answer, _ = gateway.ask(f"/v1/{path}", {**BODIES[path], "priority": "high"})
    assert status == 400 and "priority" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_texts_to_draft_from_reach_the_engine_as_token_ids(
    path: str, scripted: tuple[RunningGateway, ScriptedEngine]
) -> None:
    gateway, engine = scripted
    assert gateway.ask(f"/v1/{path}", {**BODIES[path], "draft_texts": ["a file", [1, 2]]})[0] == 200
    text, ids = engine.asked[-1].draft_texts
    assert ids == (1, 2) and text and all(isinstance(token, int) for token in text)
    status, answer, _ = gateway.ask(f"/v1/{path}", {**BODIES[path], "draft_texts": [3]})
    assert status == 400 and "draft_texts" in answer["error"]["message"]


def test_best_of_makes_more_answers_than_it_gives(scripted: tuple[RunningGateway, ScriptedEngine]) -> None:
    gateway, engine = scripted
    before = len(engine.asked)
    status, answer, _ = gateway.ask("/v1/completions", {**BODIES["completions"], "n": 2, "best_of": 4, "seed": 5})
    assert status == 200 and [choice["index"] for choice in answer["choices"]] == [0, 1], answer
    assert sorted(sampling.seed for sampling in engine.asked[before:]) == [5, 6, 7, 8]
    for refused in ({"n": 2, "best_of": 1}, {"best_of": 4, "stream": True}):
        status, answer, _ = gateway.ask("/v1/completions", {**BODIES["completions"], **refused})
        assert status == 400 and answer["error"]["param"] == "best_of"
