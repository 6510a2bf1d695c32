"""`lowlat serve` with [[models]]: real processes, asked over HTTP; one sleeps for the other, dies, is started again."""

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recording import prompt_of, run_all
from served import eventually
from serving_process import Serving, serving
from tiny_models import make_target

from lowlat import Runtime, SamplingParams
from lowlat.ipc import Client
from lowlat.serving.models.roster import Roster, roster_path

SETTINGS = """
device = "cpu"
dtype = "float32"
max_batch = 2
max_context = 4000
block_size = 8
prefill_chunk = 16
max_prefill_chunks = 4
kv_blocks = 4000
host_cache_gib = 0.01
"""
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch": 2, "max_context": 4000} | {
    "block_size": 8,
    "prefill_chunk": 16,
    "max_prefill_chunks": 4,
}
RANKS: dict[str, dict[str, Any]] = {"one": {}, "two": {"tensor_parallel_size": 2}}
PROMPT, WAIT_S = prompt_of(40), 240.0


class Models:
    """A running server of several models."""

    def __init__(self, server: Serving) -> None:
        self.server = server
        self._address = server.ready["http"]["url"].removeprefix("http://")
        self._key = server.ready["http"]["key"]

    def connect(self) -> http.client.HTTPConnection:
        """A connection to the gateway."""
        return http.client.HTTPConnection(self._address, timeout=WAIT_S)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any, http.client.HTTPMessage]:
        """One request: status, JSON, headers."""
        connection = self.connect()
        try:
            headers = {"authorization": f"Bearer {self._key}"}
            connection.request(
                "GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers
            )
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), answer.headers
        finally:
            connection.close()

    def complete(self, model: str, count: int = 8) -> tuple[int, Any, http.client.HTTPMessage]:
        """A completion whose tokens come back."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": count, "seed": 3, "temperature": 0.8}
        return self.ask("/v1/completions", {**body, "return_token_ids": True, "ignore_eos": True})

    def tokens(self, model: str, count: int = 8) -> list[int]:
        """The tokens of a completion."""
        status, body, _ = self.complete(model, count)
        assert status == 200, body
        found: list[int] = body["choices"][0]["token_ids"]
        return found

    def states(self) -> dict[str, str]:
        """The states of /v1/models, by model."""
        return {each["id"]: each["state"] for each in self.ask("/v1/models")[1]["data"]}

    def roster(self) -> Roster:
        """The roster that the supervisor has written."""
        path = roster_path(self.server.endpoint)
        assert path is not None
        return Roster.read(path)

    def pid(self, model: str) -> int:
        """A model's process."""
        found = self.roster().find(model)
        assert found is not None and found.pid is not None
        return found.pid

    def client(self, model: str) -> Client:
        """A client of a model's own endpoint."""
        found = self.roster().find(model)
        assert found is not None
        return Client(found.endpoint)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for number, name in enumerate(("one", "two")):
        make_target(folder / name, "llama", max_position_embeddings=4096, vocab_size=160 + 16 * number)
    return folder


@pytest.fixture(scope="module")
def expected(targets: Path) -> dict[str, list[int]]:
    """The tokens of each model alone."""
    found = {}
    for name in ("one", "two"):
        with Runtime.load(targets / name, **OPTIONS, **RANKS[name]) as runtime:
            params = SamplingParams(max_tokens=300, seed=3, temperature=0.8, ignore_eos=True)
            request = runtime.submit(PROMPT, params)
            found[name] = run_all(runtime)[request]
    return found


def served(folder: Path, targets: Path, settings: str, tables: str | None = None) -> Any:
    """A server of the two models, or of these tables."""
    settings_of = {name: "".join(f"{key} = {value}\n" for key, value in own.items()) for name, own in RANKS.items()}
    both = "".join(f'[[models]]\nmodel = "{targets / name}"\n{own}' for name, own in settings_of.items())
    (folder / "serve.toml").write_text(SETTINGS + settings + (both if tables is None else tables))
    return serving(folder, ["--config", folder / "serve.toml", "--http", "0"])


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory, targets: Path) -> Iterator[Models]:
    """Two models in the memory of one and a half; one of them has several ranks."""
    folder = tmp_path_factory.mktemp("sharing")
    with Runtime.load(targets / "two", **OPTIONS, **RANKS["two"], kv_blocks=4000, can_sleep=True) as runtime:
        awake, own = runtime.memory[0].need.total_bytes, runtime.summary()["sleep"]
        budget = 2 * awake - own["device_bytes"] // 2
    settings = f"models_gib = {budget / (1 << 30):.9f}\nmax_wake_s = 6.0\nbusy_s = 0.2\n"
    with served(folder, targets, settings) as server:
        models = Models(server)
        eventually(lambda: all(each.answers for each in models.roster().models), WAIT_S)
        yield models


@pytest.mark.second
def test_a_request_wakes_its_model_and_the_one_used_longest_ago_sleeps(
    sharing: Models, expected: dict[str, list[int]]
) -> None:
    for name in ("one", "two", "one"):
        other = {"one": "two", "two": "one"}[name]
        assert sharing.tokens(name) == expected[name][:8]
        eventually(lambda: sharing.states() == {name: "awake", other: "asleep"})  # noqa: B023
    with sharing.client("two") as client:  # the other door
        chunks = client.generate(PROMPT, max_tokens=8, seed=3, temperature=0.8, ignore_eos=True)
        assert [token for chunk in chunks for token in chunk.token_ids] == expected["two"][:8]
    eventually(lambda: sharing.states() == {"one": "asleep", "two": "awake"})
    status, body, _ = sharing.ask("/v1/models/one")
    assert status == 200 and body["state"] == "asleep" and body["max_model_len"] == 4000
    status, body, _ = sharing.complete("three")
    assert status == 404 and "'one', 'two' do" in body["error"]["message"]


@pytest.mark.second
def test_what_runs_ends_before_its_model_sleeps(sharing: Models, expected: dict[str, list[int]]) -> None:
    found: dict[str, list[int]] = {}
    sharing.tokens("one")
    running = threading.Thread(target=lambda: found.update(one=sharing.tokens("one", 120)))
    with sharing.client("one") as client:
        client.health()  # it is connected
        running.start()
        eventually(lambda: client.health().num_running == 1)
        found["two"] = sharing.tokens("two")
    running.join(WAIT_S)
    assert found == {"one": expected["one"][:120], "two": expected["two"][:8]}


@pytest.mark.second
def test_who_cannot_be_woken_in_time_is_told_when_to_come_again(
    sharing: Models, expected: dict[str, list[int]]
) -> None:
    sharing.tokens("one")
    with sharing.client("one") as client:
        long = client.generate(PROMPT, max_tokens=3900, seed=3, temperature=0.8, ignore_eos=True)
        first = next(iter(long)).token_ids
        assert first[:1] == tuple(expected["one"][:1])
        status, body, headers = sharing.complete("two")
        assert status == 429 and "max_wake_s" in body["error"]["message"], body
        assert int(headers["retry-after"]) >= 2
        long.close()
    assert sharing.tokens("two") == expected["two"][:8]


@pytest.mark.second
def test_a_supervisor_that_is_killed_leaves_no_process(sharing: Models) -> None:
    """The last test of this server."""
    pids = [sharing.pid("one"), sharing.pid("two")]
    sharing.server.process.kill()
    sharing.server.process.wait()
    for pid in pids:
        eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists(), WAIT_S)  # type: ignore[misc]


@pytest.mark.wide
def test_the_first_streams_while_the_second_dies_and_loads_again(
    tmp_path: Path, targets: Path, expected: dict[str, list[int]]
) -> None:
    with served(tmp_path, targets, "") as server:
        models = Models(server)
        eventually(lambda: models.states() == {"one": "awake", "two": "awake"}, WAIT_S)
        before, other = models.pid("two"), models.pid("one")
        with models.client("one") as client:
            stream = client.generate(PROMPT, max_tokens=300, seed=3, temperature=0.8, ignore_eos=True)
            chunks = iter(stream)
            tokens = list(next(chunks).token_ids)
            os.kill(before, signal.SIGKILL)
            eventually(lambda: models.states()["two"] != "awake")
            status, body, headers = models.complete("two")
            assert status == 503 and int(headers["retry-after"]) > 0, body
            tokens += [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == expected["one"]
        eventually(lambda: models.states()["two"] == "awake", WAIT_S)
        assert models.tokens("two") == expected["two"][:8]
        assert models.pid("two") != before and models.pid("one") == other
        assert "its process ended with code -9" in server.log.read_text()


@pytest.mark.wide
def test_a_model_that_cannot_be_loaded_leaves_the_other_alone(
    tmp_path: Path, targets: Path, expected: dict[str, list[int]]
) -> None:
    (targets / "broken").mkdir(exist_ok=True)
    (targets / "broken" / "config.json").write_text("{}")
    tables = f'[[models]]\nmodel = "{targets / "broken"}"\n[[models]]\nmodel = "{targets / "two"}"\nname = "second"\n'
    with served(tmp_path, targets, "", tables) as server:
        models = Models(server)
        eventually(lambda: models.states() == {"broken": "failed", "second": "awake"}, WAIT_S)
        assert models.tokens("second") == expected["two"][:8]
        status, body, headers = models.complete("broken")
        assert status == 503 and body["error"]["code"] == "model_failed" and "retry-after" not in headers
        assert "config.json" in body["error"]["message"]
