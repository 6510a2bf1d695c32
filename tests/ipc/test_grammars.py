"""Requests that are bound to a grammar, over sockets: both clients send them, and a slow one holds up no other."""

import asyncio
import json
import threading
from typing import Any

import pytest
from fake_engine import FakeEngine
from served import Serve, eventually

from lowlat.errors import RequestError
from lowlat.ipc import AsyncClient, Client
from lowlat.ipc.server.threads.events import Prepare
from lowlat.ipc.wire import Sampling

SCHEMA = {"type": "object", "properties": {"é": {"const": 'q"'}}}


class CompilingEngine(FakeEngine):
    """Compiles the expression "slow" until it is told to refuse it, and remembers who asked."""

    def __init__(self) -> None:
        super().__init__(0.001)
        self.refuse = threading.Event()
        self.asked: list[tuple[Sampling, float | None, str]] = []

    def compile(self, sampling: Sampling, patience_s: float | None) -> bool:
        self.asked.append((sampling, patience_s, threading.current_thread().name))
        if sampling.regex == "slow":
            if patience_s is not None:
                return False
            assert self.refuse.wait(30)
            raise RequestError("regex: it takes too long")
        return True


def test_a_slow_grammar_holds_up_neither_grammars_nor_plain_requests(serve: Serve) -> None:
    engine = CompilingEngine()
    served = serve(engine)
    refused: list[str] = []
    with Client(served.server.endpoint) as client:

        def ask() -> None:
            try:
                list(client.generate([1, 2], max_tokens=2, regex="slow"))
            except RequestError as error:
                refused.append(str(error))

        hostile = [threading.Thread(target=ask) for _ in range(3)]
        for thread in hostile:
            thread.start()
        eventually(lambda: sum(patience is None for _, patience, _ in engine.asked) == 1)
        for options in ({}, {"regex": "quick"}, {"choice": ["a", "b"]}):
            chunks = list(client.generate([3, 4], max_tokens=3, timeout_s=20, **options))
            assert chunks[-1].finish_reason == "length"
        assert all(thread.is_alive() for thread in hostile)
        gone = client.generate([5], max_tokens=2, regex="slow")
        gone.close()
        engine.refuse.set()
        for thread in hostile:
            thread.join()
    assert refused == ["regex: it takes too long"] * 3
    names = {name for _, _, name in engine.asked}
    assert names == {"lowlat-grammars", "lowlat-slow-grammars"} and threading.current_thread().name not in names


def test_what_ends_while_it_is_compiled_is_let_go_of() -> None:
    given: Any = object()
    for dropped in (False, True):
        job = Prepare(given, given, b"prompt")
        _, submit, body = job.take()
        assert submit is given and not job.body
        if dropped:
            job.drop()
        assert job.put_back(submit, body) is not dropped
        assert (job.submit, job.body) == ((None, b"") if dropped else (given, b"prompt"))


def test_clients_send_grammars_in_any_of_their_forms(serve: Serve) -> None:
    engine = CompilingEngine()
    served = serve(engine)
    forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}),
        ({"json_schema": json.dumps(SCHEMA)}, {"json_schema": json.dumps(SCHEMA)}),
        ({"choice": "yes"}, {"choice": ("yes",)}),
        ({"choice": ["yes", "no"]}, {"choice": ("yes", "no")}),
        ({"tool_calls": {"functions": []}}, {"tool_calls": '{"functions": []}'}),
        ({"json_object": True}, {"json_object": True}),
        ({"grammar": 'root ::= "x"'}, {"grammar": 'root ::= "x"'}),
    ]

    async def ask(options: dict[str, Any]) -> None:
        async with AsyncClient(served.server.endpoint) as client:
            async for _ in client.generate([1], max_tokens=1, **options):
                pass

    with Client(served.server.endpoint) as client:
        for options, wanted in forms:
            list(client.generate([1], max_tokens=1, **options))
            asyncio.run(ask(options))
            for sampling, _, _ in engine.asked[-2:]:
                assert sampling == Sampling(max_tokens=1, **wanted) and sampling.has_grammar
        refused: list[tuple[dict[str, Any], str]] = [
            ({"json_schema": {"a": object()}}, "json_schema must be of JSON values"),
            ({"json_schema": 1}, "json_schema: "),
            ({"regex": ""}, "regex: "),
            ({"choice": [""]}, "choice"),
        ]
        for options, words in refused:
            with pytest.raises(RequestError, match=words):
                client.generate([1], **options)
