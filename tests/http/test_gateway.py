"""The gateway itself: refusals by name, key and Host, health, metrics, who goes away, a server that is gone."""

from __future__ import annotations  # OpenAI's package is imported at its first use

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
from fake_engine import NUMERICS
from gateway import KEY, RunningGateway, ScriptedEngine, gateway_at, running_gateway
from prometheus_client.parser import text_string_to_metric_families
from served import eventually

import lowlat
from lowlat.errors import ConfigError, ServerGone
from lowlat.ipc.client import AsyncClient
from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.statistics import Statistics
from lowlat.serving.http.auth import key_of
from lowlat.serving.http.gateway import STATS_S, Gateway
from lowlat.serving.http.metrics import exposition
from lowlat.serving.http.server import Address, parse_address
from lowlat.serving.http.streaming import MAX_BODY_BYTES

CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "fake", "prompt": "Hi"}
RESPONSE: dict[str, Any] = {"model": "fake", "input": "x"}
MESSAGES_JSON = json.dumps(CHAT["messages"]).encode()


def nested(depth: int) -> bytes:
    """A chat with a template's variable nested so deep."""
    value = b"[" * depth + b"]" * depth
    return b'{"model":"fake","messages":' + MESSAGES_JSON + b',"chat_template_kwargs":{"a":' + value + b"}}"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("chat/completions", CHAT | {"response_format": {"type": "xml"}}, 400, "response_format.type", ""),
        ("chat/completions", CHAT | {"tool_choice": "required"}, 400, "tool_choice", "no tools"),
        ("chat/completions", CHAT | {"n": 129}, 400, "n", "<= 128"),
        ("chat/completions", CHAT | {"temperature": 101}, 400, "temperature", "101"),
        ("chat/completions", CHAT | {"logit_bias": {"x": 1}}, 400, "logit_bias", "'x' is no token id"),
        ("chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs", "logprobs: true"),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "20"),
        ("chat/completions", CHAT | {"stop": [""]}, 400, "stop", ""),
        ("chat/completions", CHAT | {"stream_options": {}}, 400, "stream_options", "stream: true"),
        ("chat/completions", {"model": "fake"}, 400, "messages", "Missing required parameter"),
        ("chat/completions", CHAT | {"model": "gpt-4"}, 404, "model", "'fake' does"),
        (
            "chat/completions",
            CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages[0].content[0].type",
            "'image_url'; content is text",
        ),
        ("completions", COMPLETION | {"prompt": []}, 400, "prompt", "1 to 4096"),
        ("completions", COMPLETION | {"prompt": [[1], {}]}, 400, "prompt[1]", "prompt[1]: is neither"),
        ("completions", COMPLETION | {"prompt": [1, 5000]}, 400, "prompt", "prompt: token 5000"),
        ("completions", COMPLETION | {"prompt": [1, True]}, 400, "prompt", "token true; ids are 0 to"),
        ("completions", COMPLETION | {"prompt": [[1], [False, 1]]}, 400, "prompt[1]", "prompt[1]: token false"),
        (
            "completions",
            COMPLETION | {"stop_token_ids": [True]},
            400,
            "stop_token_ids[0]",
            "Expected `int`, got `bool`",
        ),
        ("completions", COMPLETION | {"logit_bias": {"true": 1}}, 400, "logit_bias", "'true' is no token id"),
        ("completions", COMPLETION | {"draft_texts": [[1, True]]}, 400, "draft_texts[0][1]", "got `bool`"),
        (
            "responses",
            {"model": "fake", "input": "x", "tools": [{"type": "web_search"}]},
            400,
            "tools[0].type",
            "Unsupported",
        ),
        ("completions", b'{"model": ', 400, None, "no JSON"),
        ("chat/completions", nested(100_000), 400, None, "nested too deep"),
        ("chat/completions", nested(40), 400, "chat_template_kwargs", "nested deeper than 32"),
        ("completions", b" " * (MAX_BODY_BYTES + 1), 413, None, "bytes"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    gateway: RunningGateway, path: str, body: Any, status: int, param: str | None, words: str
) -> None:
    found, answer, _ = gateway.ask(f"/v1/{path}", body)
    assert (found, answer["error"]["param"]) == (status, param), answer
    assert words in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"


def test_what_is_refused_often_hurts_nobody_else(tmp_path: Path) -> None:
    with (
        running_gateway(tmp_path, ScriptedEngine(step_s=0.005)) as gateway,
        stream(gateway, COMPLETION | {"max_tokens": 100}) as one,
    ):
        bodies = [("chat/completions", nested(40)), ("completions", json.dumps(COMPLETION | {"top_p": 2}).encode())]
        for path, body in bodies * 10:
            assert gateway.ask(f"/v1/{path}", body)[0] == 400
        rest = b""
        while piece := one.recv(1 << 16):
            rest += piece
            if b"[DONE]" in rest:
                break
        assert b'"length"' in rest


def test_a_path_that_is_none_is_not_found(gateway: RunningGateway) -> None:
    status, answer, _ = gateway.ask("/v1/messages", {"model": "fake"})  # another maker's interface
    assert status == 404 and "served are /v1/chat/completions" in answer["error"]["message"]
    status, answer, _ = gateway.ask("/chat/completions", {"model": "fake"})  # a base URL without /v1
    assert status == 404 and "/v1/chat/completions" in answer["error"]["message"]
    status, answer, _ = gateway.ask("/v1/chat/completions")
    assert status == 405 and "GET /v1/chat/completions" in answer["error"]["message"]
    assert answer["error"]["code"] == "method_not_allowed"
    for path in ("/v1/models", "/v1/models/fake"):
        status, answer, headers = gateway.ask(path, method="HEAD")
        assert (status, answer) == (200, "") and headers["content-type"] == "application/json"
        status, _, headers = gateway.ask(path, method="OPTIONS")
        assert status == 405 and sorted(headers["allow"].split(", ")) == ["GET", "HEAD"]


@pytest.mark.parametrize(
    "path", ["//v1/completions", "/v1/completions/", "/v1//completions//", "http://localhost/v1/completions"]
)
def test_base_urls_are_put_before_paths_in_any_way(gateway: RunningGateway, path: str) -> None:
    assert gateway.ask(path, COMPLETION | {"max_tokens": 1})[0] == 200
    assert gateway.ask(path, COMPLETION, headers={"authorization": ""})[0] == 401
    assert gateway.ask("/v1/models/")[1]["object"] == "list"


def test_bodies_are_read_as_other_servers_read_them(gateway: RunningGateway) -> None:
    """Marks of an encoding, and numbers and truths as some languages write them; what cannot be read is named."""
    body = COMPLETION | {"max_tokens": 2.0, "seed": "7", "stream": 0, "temperature": "0.5"}
    for mark in (b"", b"\xef\xbb\xbf"):
        assert gateway.ask("/v1/completions", mark + json.dumps(body).encode())[1]["usage"]["completion_tokens"] == 2
    for data, headers, status, words in (
        (b'{"model": "fake", "prompt": "\xe9"}', {}, 400, "not in UTF-8"),
        (json.dumps(body).encode("utf-16"), {}, 400, "no JSON"),
        (b"x", {"content-encoding": "gzip"}, 415, "uncompressed"),
        (b"x", {"content-encoding": "br", "content-type": "application/x-ndjson"}, 415, "uncompressed"),
        (json.dumps(COMPLETION | {"max_tokens": 2.5}).encode(), {}, 400, "max_tokens"),
        (json.dumps(COMPLETION | {"max_tokens": True}).encode(), {}, 400, "max_tokens"),
    ):
        found, answer, _ = gateway.ask("/v1/completions", data, headers=headers)
        assert found == status and words in answer["error"]["message"], answer


@pytest.mark.parametrize(("given", "kept"), [("abc-1.2:3", True), ("", False), ("a b", False), ("x" * 129, False)])
def test_every_answer_has_a_request_id(gateway: RunningGateway, given: str, kept: bool) -> None:
    made = set()
    for path, headers in (("/version", {}), ("/nothing", {}), ("/version", {"authorization": "Bearer wrong"})):
        _, _, found = gateway.ask(path, headers={"x-request-id": given, **headers})
        own = found["x-request-id"]
        assert own == given if kept else re.fullmatch("req_[0-9a-f]{32}", own)
        made.add(own)
    assert len(made) == (1 if kept else 3)


def test_answers_tell_what_made_them(gateway: RunningGateway, client: openai.OpenAI) -> None:
    assert gateway.ask("/version")[1] == {"version": lowlat.__version__}
    first = client.chat.completions.create(**CHAT, max_tokens=1)
    second = client.completions.create(**COMPLETION, max_tokens=1, extra_headers={"x-request-id": "mine"})
    assert first.system_fingerprint == second.system_fingerprint and second._request_id == "mine"
    assert first.system_fingerprint == f"fp_{NUMERICS}"


def test_a_model_without_a_template_says_what_to_use(tmp_path: Path) -> None:
    with running_gateway(tmp_path, ScriptedEngine(tokenizer="")) as gateway:
        status, answer, _ = gateway.ask("/v1/chat/completions", CHAT)
        assert status == 400 and "/v1/completions" in answer["error"]["message"]


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer é"])
def test_a_key_is_needed(gateway: RunningGateway, given: str) -> None:
    for path in ("/v1/models", "/metrics", "/lowlat/stats", "/v1/nothing", "/page"):
        status, answer, headers = gateway.ask(path, headers={"authorization": given})
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert headers["www-authenticate"] == "Bearer"
    for path in ("/", "/health", "/ready", "/page.js"):
        assert gateway.ask(path, headers={"authorization": given})[0] == 200


def test_a_host_must_name_this_gateway(tmp_path: Path) -> None:
    well = ("localhost", "LOCALHOST:80", "[::1]:1", "localhost.:80", "a.localhost", "0.0.0.0:80", "127.9.9.9", "[::]")
    not_well = ("evil.example", "", "notlocalhost", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1")
    with gateway_at(f"ipc://{tmp_path}/none.sock", hosts=["named.example"]) as address:
        for host in (*well, "named.example:1", *not_well):
            status, answer, headers = RunningGateway(address).ask("/", headers={"host": host})
            assert status == (403 if host in not_well else 200), host
            assert status == 200 or "--http-host" in answer["error"]["message"]
            assert "access-control-allow-origin" not in headers


def test_who_sends_no_host_is_no_browser(gateway: RunningGateway) -> None:
    with socket.create_connection((gateway.address.host, gateway.address.port), timeout=10) as caller:
        caller.sendall(b"GET /health HTTP/1.0\r\n\r\n")  # as a proxy's check may
        assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_any_address_names_a_gateway_that_is_bound_to_all(tmp_path: Path) -> None:
    with gateway_at(f"ipc://{tmp_path}/none.sock", host="0.0.0.0") as bound:
        gateway = RunningGateway(Address("127.0.0.1", bound.port))
        assert gateway.ask("/", headers={"host": "10.0.0.1:80"})[0] == 200
        assert gateway.ask("/", headers={"host": "evil.example"})[0] == 403


def test_keys_are_the_environments_or_new() -> None:
    assert key_of({"LOWLAT_API_KEY": KEY}) == (KEY, False)
    made, new = key_of({})
    assert new and len(made) >= 32 and made != key_of({})[0]
    for wrong, why in (("short", "have 16"), ("with blanks in it, long", "without spaces.* 5 is"), ("é" * 20, "ASCII")):
        with pytest.raises(ConfigError, match=f"LOWLAT_API_KEY must .*{why}"):
            key_of({"LOWLAT_API_KEY": wrong})


@pytest.mark.parametrize(
    ("text", "address"),
    [
        *[("8000", ("127.0.0.1", 8000)), ("0.0.0.0:80", ("0.0.0.0", 80)), ("[::1]:8000", ("::1", 8000))],
        *[("box:1", ("box", 1)), ("x", None), ("1:2:3", None), ("h:70000", None), ("", None)],
    ],
)
def test_addresses_are_read(text: str, address: tuple[str, int] | None) -> None:
    if address is None:
        with pytest.raises(ConfigError):
            parse_address(text)
    else:
        assert parse_address(text) == Address(*address)


def test_a_full_queue_says_when_to_come_again(tmp_path: Path) -> None:
    with running_gateway(tmp_path, ScriptedEngine(max_running=1, step_s=0.01), Limits(max_queue=0)) as gateway:
        with stream(gateway, COMPLETION | {"max_tokens": 3000}):
            status, answer, headers = gateway.ask("/v1/completions", COMPLETION)
            assert status == 429 and answer["error"]["code"] == "rate_limit_exceeded"
            assert int(headers["retry-after"]) >= 1 and int(headers["retry-after-ms"]) >= 1
        assert gateway.served is not None and isinstance(gateway.served.engine, ScriptedEngine)


@contextmanager
def stream(
    gateway: RunningGateway, body: dict[str, Any], path: str = "completions", whole: bool = False
) -> Iterator[socket.socket]:
    """A request on a bare socket, of whose answer the beginning has come, unless it comes as a whole."""
    data = json.dumps(body if whole else body | {"stream": True}).encode()
    with socket.create_connection((gateway.address.host, gateway.address.port), timeout=30) as caller:
        caller.sendall(
            f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"
            f"content-length: {len(data)}\r\n\r\n".encode()
            + data
        )
        if not whole:
            assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200")
        yield caller


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_who_goes_away_cancels_what_was_asked(tmp_path: Path, whole: bool, n: int) -> None:
    with running_gateway(tmp_path, ScriptedEngine(step_s=0.005)) as gateway:
        assert gateway.served is not None
        engine = gateway.served.engine
        with stream(gateway, CHAT | {"max_tokens": 3000, "n": n}, "chat/completions", whole):
            eventually(lambda: len(engine.order) == n)
        eventually(lambda: len(engine.cancelled_at) == n)


def test_an_answer_that_breaks_off_says_why(tmp_path: Path) -> None:
    with running_gateway(tmp_path, ScriptedEngine(faults={5: "nan", 6: "refuse"})) as gateway:
        body = COMPLETION | {"prompt": [5], "max_tokens": 9}
        _, text, _ = gateway.ask("/v1/completions", body | {"stream": True})
        *_, last = [line for line in text.splitlines() if line]
        assert json.loads(last[6:])["error"]["code"] == "not_finite" and "[DONE]" not in text
        status, answer, _ = gateway.ask("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (500, "not_finite")
        with gateway.openai() as client, pytest.raises(openai.APIError):
            list(client.completions.create(model="fake", prompt=[5], stream=True))
        assert gateway.ask("/v1/completions", body | {"prompt": [6]})[0] == 400


def test_a_server_that_is_gone_is_unavailable_until_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    with gateway_at(f"ipc://{folder}/s.sock", connect_timeout_s=0.05) as address:
        gateway = RunningGateway(address)
        for path in ("/health", "/ready", "/v1/models", "/metrics"):
            assert gateway.ask(path)[0] == 503
        status, answer, headers = gateway.ask("/v1/completions", COMPLETION)
        assert status == 503 and answer["error"]["type"] == "server_error" and headers["retry-after"] == "1"
        assert gateway.ask("/")[0] == 200
        with running_gateway(folder) as other:
            assert other.served is not None and other.served.server.endpoint == f"ipc://{folder}/s.sock"
            eventually(lambda: gateway.ask("/v1/completions", COMPLETION)[0] == 200)  # it waits 0.05 s for the server
            assert gateway.ask("/ready")[1]["state"] == "serving"


def test_a_server_that_drains_is_not_ready(tmp_path: Path) -> None:
    with (
        running_gateway(tmp_path, ScriptedEngine(step_s=0.005)) as gateway,
        stream(gateway, COMPLETION | {"max_tokens": 3000}),
    ):
        assert gateway.ask("/ready")[0] == gateway.ask("/health")[0] == 200
        assert gateway.served is not None
        gateway.served.server.drain()
        eventually(lambda: gateway.ask("/ready")[0] == 503)


def metrics_of(text: str) -> dict[tuple[str, ...], float]:
    """Samples by name and the values of their labels but the model's, as Prometheus' own parser reads them."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake"
            own = [value for name, value in sample.labels.items() if name != "model_name"]
            found[sample.name, *own] = sample.value
    return found


def test_metrics_are_the_servers_figures(tmp_path: Path) -> None:
    with running_gateway(tmp_path) as gateway:
        gateway.ask("/v1/completions", COMPLETION | {"max_tokens": 7})
        gateway.ask("/v1/completions", COMPLETION | {"max_tokens": 1 << 20})
        gateway.ask("/tokenize", {"prompt": "Hi", "return_token_strs": True})
        time.sleep(0.15)  # longer than figures are kept
        status, text, headers = gateway.ask("/metrics")
        assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
        found = metrics_of(text)
        assert found["lowlat:generation_tokens_total",] == 7
        assert found["lowlat:request_success_total", "length"] == found["lowlat:request_refused_total", "invalid"] == 1
        assert [name for name in found if name[0] == "lowlat:request_success_total"] == [
            ("lowlat:request_success_total", "length")
        ]
        assert found["lowlat:conversions_total", "stop"] == 2
        assert found["lowlat:time_to_first_token_seconds_count",] == 1
        assert found["lowlat:time_to_first_token_seconds_bucket", "+Inf"] == 1
        assert found["lowlat:inter_token_latency_seconds_count",] == 6
        assert found["lowlat:num_requests_running",] == 0
        assert gateway.ask("/lowlat/stats")[1]["stats"]["num_tokens"] == 7


def test_histograms_and_speculation_are_exposed() -> None:
    statistics = Statistics()
    for seconds, times in ((0.5e-6, 1), (1.5e-3, 2), (1000.0, 1)):
        statistics.duration.record(seconds, times)
    speculation = {"num_drafts": 3, "drafted_by_position": [3, 2], "accepted_by_position": [2, 1]}
    speculation["by_source"] = {"suffix": {"steps": 3, "draft_tokens": 5, "accepted_tokens": 2}}
    structured = {"num_requests": 2, "mask_s": 0.25}
    kv = {"num_blocks": 10, "num_used": 5, "query_tokens": 20, "hit_tokens": 5, "capacity_tokens": 320}
    checks = {"failed": {"masks": 2, "lengths": 0}, "ended_requests": 2, "single_token_requests": 0}
    stats = {
        "model": "fake",
        "engine": {"kv": kv, "eagle_speculation": speculation, "structured_output": structured, "checks": checks},
    } | statistics.to_dict(0.0)
    found = metrics_of(exposition([stats]).decode())
    name = "lowlat:e2e_request_latency_seconds"
    assert found[f"{name}_sum",] == pytest.approx(1000.0030005)
    assert found[f"{name}_bucket", "0.001024"] == 1 and found[f"{name}_bucket", "0.002048"] == 3
    assert found[f"{name}_bucket", "+Inf"] == found[f"{name}_count",] == 4
    assert found["lowlat:kv_cache_usage_perc",] == 0.5 and found["lowlat:kv_cache_capacity_tokens",] == 320
    assert found["lowlat:queue_held_up",] == found["lowlat:queue_held_up_blocks_needed",] == 0
    held_up = {"request_id": "a", "num_needed": 7, "num_available": 2, "num_paused_blocks": 8, "num_open_blocks": 0}
    waits = metrics_of(exposition([{"model": "fake", "engine": {"kv": kv, "held_up": held_up}}]).decode())
    names = ("", "_blocks_needed", "_blocks_available", "_blocks_paused", "_blocks_open")
    assert [waits[f"lowlat:queue_held_up{name}",] for name in names] == [1, 7, 2, 8, 0]
    assert found["lowlat:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 1
    assert found["lowlat:spec_decode_num_drafts_total",] == 3
    assert (found["lowlat:failed_checks_total", "masks"], found["lowlat:failed_checks_total", "lengths"]) == (2, 0)
    assert found["lowlat:spec_decode_num_accepted_tokens_per_source_total", "suffix"] == 2
    assert found["lowlat:structured_output_mask_seconds_total",] == 0.25


def test_callers_who_ask_for_figures_at_once_share_an_answer() -> None:
    """To the server they are one client, which it drops when it asks too often, and everybody's answers with it."""
    asked: list[str] = []
    failing: list[bool] = [True]

    async def stats() -> dict[str, Any]:
        asked.append("stats")
        await asyncio.sleep(0.02)
        if failing:
            failing.clear()
            raise ServerGone("it ends", code="gone")
        return {"steps": len(asked)}

    async def ask() -> None:
        gateway = Gateway(cast("AsyncClient", SimpleNamespace(stats=stats, health=stats)))
        told = await asyncio.gather(*(gateway.stats() for _ in range(50)), return_exceptions=True)
        assert asked == ["stats"] and all(type(each) is ServerGone for each in told)
        first, *others = [asyncio.ensure_future(gateway.stats()) for _ in range(50)]
        await asyncio.sleep(0.01)
        first.cancel()  # a caller who leaves takes nobody else's answer along
        assert await asyncio.gather(*others) == [{"steps": 2}] * 49 and len(asked) == 2
        assert await gateway.stats() == {"steps": 2}
        await asyncio.sleep(STATS_S)
        assert await gateway.stats() == {"steps": 3}

    asyncio.run(ask())
