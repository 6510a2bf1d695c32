"""Prompts that are uploaded while they are being written, and the model's answers to them over both doors."""

import http.client
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_engine import FakeCodec, FakeEngine, expected_tokens
from gateway import KEY, RunningGateway, gateway_at, running_gateway
from served import Served, eventually
from served_model import alone, load_bundled, served_model
from tiny_chat import make_chat_model
from unit.test_open_prompts import PIECES, codec_of, cut
from unit.test_text_special import BOS, TEMPLATES, like

import lowlat
from lowlat import Runtime, SpeculativeConfig
from lowlat.errors import RequestError
from lowlat.ipc import Client
from lowlat.ipc.limits import Limits
from lowlat.serving.codec import ServingCodec
from lowlat.text import TextCodec

HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/x-ndjson"}
PAGE = Path(lowlat.__file__).parent / "serving" / "http" / "GROWING.md"
TRIAL = {"finish": "speculative"}
TEXT = "The President shall be Commander in Chief of the Army and Navy, when called into the actual Service. " * 2
SAMPLED: dict[str, Any] = {"max_tokens": 8, "temperature": 0.9, "seed": 5, "ignore_eos": True}


def upload(
    url: str, first: dict[str, Any], pieces: Sequence[Any], pause_s: float = 0.0, path: str = "completions"
) -> httpx2.Response:
    """Send a first line and pieces, each by itself."""

    def lines() -> Iterator[bytes]:
        for line in ({"model": "fake", **first}, *pieces):
            yield json.dumps(line).encode() + b"\n"
            time.sleep(pause_s)

    return httpx2.post(f"{url}/{path}", headers=HEADERS, content=lines(), timeout=30.0, verify=False)


def served_of(gateway: RunningGateway) -> Served:
    """The server after a gateway of these tests."""
    assert gateway.served is not None
    return gateway.served


def on_trial(pieces: Sequence[Any], source: random.Random) -> list[Any]:
    """The pieces, after some of which the prompt seems to end."""
    return [line for piece in pieces for line in (piece, TRIAL)[: 1 + (source.random() < 0.25)]]


@pytest.mark.parametrize("kind", ["llama3", "words"])
def test_lines_have_the_answer_of_the_whole(kind: str, tmp_path: Path) -> None:
    codec, source = codec_of(kind), random.Random(kind)
    engine = FakeEngine(text=True, tokenizer="a hash", tokens_per_step=8)
    with running_gateway(tmp_path, engine, codec=ServingCodec(codec)) as gateway:  # type: ignore[arg-type]
        for number in range(8):
            text = "".join(source.choice(PIECES) for _ in range(source.randint(1, 30)))
            try:
                expected = expected_tokens(codec.encode(text), 8, number)
            except RequestError:
                continue
            pieces = cut(text, source, 9)
            first = {"max_tokens": 8, "seed": number, "lowlat": True, "prompt": pieces.pop(0)}
            answer = upload(gateway.url, first, on_trial(pieces, source))
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert tuple(choice["lowlat"]["token_ids"]) == expected, text
        assert not engine.opened and not engine.tried


@pytest.mark.parametrize("kind", ["sentencepiece"])
def test_a_chats_last_message_may_grow(kind: str, tmp_path: Path) -> None:
    """Over both doors, with a message's beginning and without; every template's own borders are kept."""
    source, named = random.Random(kind), {"bos_token": BOS[kind], "eos_token": "</s>"}
    codec = TextCodec(like(kind), special_tokens=named, templates={"default": TEMPLATES[kind]})
    engine = FakeEngine(text=True, tokenizer="a hash", tokens_per_step=8)
    system = {"role": "system", "content": "Be brief."}
    with (
        running_gateway(tmp_path, engine, codec=ServingCodec(codec)) as gateway,  # type: ignore[arg-type]
        Client(served_of(gateway).server.endpoint) as client,
    ):
        for number in range(5):
            pieces = cut("".join(source.choice(PIECES) for _ in range(source.randint(2, 30))), source, 9)
            whole = codec.encode_chat([system, {"role": "user", "content": "".join(pieces)}])
            expected = expected_tokens(whole, 8, number)
            messages = [system, {"role": "user", "content": pieces.pop(0) if number % 2 else ""}]
            first = {"max_tokens": 8, "seed": number, "lowlat": True, "messages": messages}
            answer = upload(gateway.url, first, on_trial(pieces, source), path="chat/completions")
            assert answer.status_code == 200, answer.text
            assert tuple(answer.json()["choices"][0]["lowlat"]["token_ids"]) == expected, pieces
            prompt = client.open_prompt(messages, max_tokens=8, seed=number)
            for piece in pieces:
                prompt.append(piece)
            assert tuple(token for chunk in prompt.finish() for token in chunk.token_ids) == expected
        for own, pieces, words in (
            ({}, [], "max_tokens"),
            ({"max_tokens": 8}, [[5]], "token ids go with a plain prompt"),
        ):
            answer = upload(gateway.url, {"messages": [system], **own}, pieces, path="chat/completions")
            assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    codec.close()


@pytest.mark.second
def test_the_model_answers_as_to_the_whole(tmp_path: Path) -> None:
    """Over both doors: with drafts and prefix reuse, on trial, in sessions and under a grammar; nothing is left."""
    source = random.Random(1)
    options: dict[str, Any] = {
        "max_batch": 3,
        "max_context": 256,
        "device": "cpu",
        "prefill_chunk": 16,
        "block_size": 8,
    }
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    runtime = Runtime.load(make_chat_model(tmp_path / "model", [TEXT]), drafts, **options)
    assert runtime.codec is not None
    texts = [TEXT[start : start + source.randint(1, 100)] for start in (0, 30, 60, 0)]
    variants: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"choice": ("yes", "no", "perhaps")}, {"priority": 2}]
    asked = [(text, SAMPLED | own) for text, own in zip(texts, variants, strict=True)]
    *wanted, long = [
        alone(runtime, runtime.codec.encode(text), **options) for text, options in (*asked, (TEXT, SAMPLED))
    ]
    with (
        served_model(tmp_path, runtime, ServingCodec(runtime.codec)) as (server, engine),
        gateway_at(server.endpoint) as address,
        Client(server.endpoint) as client,
    ):
        for turn in range(2):
            opened = [
                (client.open_prompt(session=f"s{place}", **options), cut(text, source, 40))
                for place, (text, options) in enumerate(asked)
            ]
            other = client.generate(texts[0], **SAMPLED)
            while left := [each for each in opened if each[1]]:
                prompt, pieces = source.choice(left)
                prompt.append(pieces.pop(0))
                if source.random() < 0.3:
                    prompt.finish(speculative=True)
                if source.random() < 0.3:
                    time.sleep(0.02)
            found = [tuple(token for chunk in prompt.finish() for token in chunk.token_ids) for prompt, _ in opened]
            assert found == wanted, turn
            assert tuple(token for chunk in other for token in chunk.token_ids) == wanted[0]
            for place in (0, 3):
                text, options = asked[place]
                first = {**options, "model": client.server.model, "lowlat": True}
                answer = upload(f"{address.url()}/v1", first, on_trial(cut(text, source, 40), source), pause_s=0.02)
                assert answer.status_code == 200, answer.text
                assert tuple(answer.json()["choices"][0]["lowlat"]["token_ids"]) == wanted[place]
        low = [client.open_prompt(priority=-1, **SAMPLED) for _ in range(3)]  # they hold all slots, until others come
        for prompt in low:
            prompt.append(TEXT)
        eventually(
            lambda: [slot["phase"] for slot in client.stats()["engine"]["slots"]] == ["open"] * 3, timeout_s=20.0
        )
        assert (
            tuple(token for chunk in client.generate(texts[3], **asked[3][1]) for token in chunk.token_ids) == wanted[3]
        )
        assert [tuple(t for chunk in prompt.finish() for t in chunk.token_ids) for prompt in low] == [long] * 3
        left_open = client.open_prompt(**SAMPLED)
        left_open.append(TEXT)
        left_open.finish(speculative=True)
        left_open.cancel()
        eventually(lambda: client.health().num_running == 0)
        assert engine.runtime.kvcache.stats().num_used == 0


def test_the_first_token_comes_a_chunk_after_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 30 chunks two at most are left to read at the end, which take less than half of the whole's processor time."""
    runtime = load_bundled(prefill_chunk=16, block_size=8, prefix_reuse=False, max_context=512)
    assert runtime.codec is not None
    sizes: list[int] = []
    times: list[float] = []
    prefill = runtime.executor.prefill

    def counted(size: int, *others: Any) -> None:
        begin = time.thread_time()
        prefill(size, *others)
        sizes.append(size)
        times.append(time.thread_time() - begin)

    monkeypatch.setattr(runtime.executor, "prefill", counted)
    text = "the people of the several states " * 68
    num_tokens = len(runtime.codec.encode(text))

    def num_known() -> int:
        """Tokens of the one prompt that the engine has."""
        return sum(len(request.prompt) for request in list(runtime._requests.values()))

    with (
        served_model(tmp_path, runtime, ServingCodec(runtime.codec)) as (server, _),
        Client(server.endpoint) as client,
    ):
        (*_, end) = client.generate(text, max_tokens=1)
        whole_s = sum(times)
        assert end.finish_reason == "length" and sum(sizes) >= num_tokens
        sizes.clear()
        prompt = client.open_prompt(max_tokens=1)
        for word in text.split(" "):
            prompt.append(word + " ")
        eventually(lambda: num_known() >= num_tokens - 8 and sum(sizes) > num_known() - 16, timeout_s=60.0)
        sizes.clear()
        times.clear()
        (*_, end) = prompt.finish()
        assert end.finish_reason == "length"
        assert 1 <= sum(sizes) <= 32, sizes
        assert sum(times) < whole_s / 2


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningGateway, FakeEngine]]:
    engine = FakeEngine(text=True, max_running=2, max_context=200)
    limits = Limits(prompt_idle_s=1.0)
    with running_gateway(tmp_path_factory.mktemp("growing"), engine, limits, FakeCodec()) as gateway:
        yield gateway, engine


def test_any_client_of_http_can_send_them(growing: tuple[RunningGateway, FakeEngine]) -> None:
    """httpx and http.client piece by piece, curl from its standard input; answers whole and as a stream."""
    gateway, engine = growing
    expected = expected_tokens(b"Hello world", 4)
    text = "".join(f"t{token} " for token in expected)
    first = {"model": "fake", "max_tokens": 4}
    lines = [json.dumps(line).encode() + b"\n" for line in (first, "Hello", TRIAL, " wor", "ld")]
    assert upload(gateway.url, first, ["Hello", " world"]).json()["choices"][0]["text"] == text
    connection = http.client.HTTPConnection(gateway.address.host, gateway.address.port, timeout=30)
    connection.request("POST", "/v1/completions", iter(lines), HEADERS, encode_chunked=True)
    assert json.loads(connection.getresponse().read())["choices"][0]["text"] == text
    whole = b"\n".join(lines).removesuffix(
        b"\n"
    )  # at once, of a known length, with an empty line, and without the last
    assert gateway.ask("/v1/completions", whole, headers=HEADERS)[1]["choices"][0]["text"] == text
    connection.request(
        "POST", "/v1/completions", iter([b'{"model": "fake", "max_tokens": 4, "stream": true}\n', *lines[1:]]), HEADERS
    )
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
    assert "".join(choice["text"] for event in events for choice in json.loads(event)["choices"]) == text
    connection.close()
    if (curl := shutil.which("curl")) is not None:
        headers = [part for name, value in HEADERS.items() for part in ("-H", f"{name}: {value}")]
        command = [curl, "-sN", "-X", "POST", "-T", ".", *headers, f"{gateway.url}/completions"]
        done = subprocess.run(command, input=b"".join(lines), capture_output=True, timeout=30, check=True)
        assert json.loads(done.stdout)["choices"][0]["text"] == text
    assert not engine.opened and not engine.tried


def test_many_short_lines_are_few_messages(tmp_path: Path) -> None:
    """Else the server would drop the gateway, with the requests of everyone, for more than max_messages_per_s."""
    engine, limits = FakeEngine(text=True, max_context=50_000), Limits(max_messages_per_s=200)
    with running_gateway(tmp_path, engine, limits, FakeCodec()) as gateway:
        lines = [{"model": "fake", "max_tokens": 4}, *("x", TRIAL) * 10_000, *([5],) * 10_000]
        body = b"\n".join(json.dumps(line).encode() for line in lines)
        status, answer, *_ = gateway.ask("/v1/completions", body, headers=HEADERS)
    expected = expected_tokens([*b"x" * 10_000, *(5,) * 10_000], 4)
    assert (status, answer["choices"][0]["text"]) == (200, "".join(f"t{token} " for token in expected))


@pytest.mark.second
def test_lines_that_cannot_be_joined_are_sent_at_a_pace(tmp_path: Path) -> None:
    engine, limits = FakeEngine(text=True, max_context=1000), Limits(max_messages_per_s=250)
    with running_gateway(tmp_path, engine, limits, FakeCodec()) as gateway:
        lines = [{"model": "fake", "max_tokens": 4}, *("x", [5]) * 140]
        body = b"\n".join(json.dumps(line).encode() for line in lines)
        status, answer, *_ = gateway.ask("/v1/completions", body, headers=HEADERS)
    expected = expected_tokens([*b"x", 5] * 140, 4)
    assert (status, answer["choices"][0]["text"]) == (200, "".join(f"t{token} " for token in expected))


def test_callers_of_a_gateway_take_turns_at_its_pace(tmp_path: Path) -> None:
    """They are one client to the server, and one who sends much keeps another's few messages up by one of its own."""
    engine, limits = FakeEngine(text=True, max_context=2000), Limits(max_messages_per_s=100)
    lines = [{"model": "fake", "max_tokens": 4}, *("x", [5]) * 140]
    flood = b"\n".join(json.dumps(line).encode() for line in lines)
    with running_gateway(tmp_path, engine, limits, FakeCodec()) as gateway, ThreadPoolExecutor(1) as other:
        sending = other.submit(gateway.ask, "/v1/completions", flood, headers=HEADERS)
        eventually(lambda: bool(engine.opened))
        time.sleep(0.5)  # the messages that may come at once have gone
        few = b"\n".join(json.dumps(line).encode() for line in ({"model": "fake", "max_tokens": 4}, "y", [5], "y"))
        status, answer, _ = gateway.ask("/v1/completions", few, headers=HEADERS)
        assert (status, sending.done()) == (200, False)
        assert answer["choices"][0]["text"] == "".join(f"t{token} " for token in expected_tokens([*b"y", 5, *b"y"], 4))
        assert sending.result(timeout=30)[0] == 200


def test_the_pages_example_runs(growing: tuple[RunningGateway, FakeEngine]) -> None:
    gateway, _ = growing
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    example = example.replace("http://127.0.0.1:8000", gateway.address.url()).replace("lowlat-demo", "fake")
    environment = {**os.environ, "LOWLAT_API_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-c", example], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"t{token} " for token in expected_tokens(b"The President shall", 32)) + "\n"


def test_refusals(growing: tuple[RunningGateway, FakeEngine]) -> None:
    gateway, engine = growing
    for first, pieces, status, param, words in (
        ({"max_tokens": 50}, ["x" * 100, "x" * 100], 400, "prompt", "max_tokens 50 exceed 200 (max_context)"),
        ({"n": 2}, ["x"], 400, "n", "one answer"),
        ({"echo": True}, ["x"], 400, "echo", "still being written"),
        ({"prompt": ["a", "b"]}, [], 400, "prompt", "2 prompts"),
        ({"max_prompt_tokens": 3}, ["xxxx"], 400, "max_prompt_tokens", "exceeds 3"),
        ({"nonsense": 1}, [], 400, "nonsense", "nonsense"),
        ({"model": "other"}, ["x"], 404, "model", "does not exist"),
        ({}, [], 400, None, "a prompt of 0 tokens"),
        ({}, ["x", 5], 400, "prompt", "line 3 of the body"),
        ({}, ["x\ud83d", "\ude00"], 400, "prompt", "line 2 of the body: it ends within a character"),
        ({}, ["x", {"finish": "now"}], 400, "finish", "line 3"),
        ({}, [[5000]], 400, None, "prompt token 0 is 5000"),
    ):
        answer = upload(gateway.url, first, pieces, pause_s=0.005)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), error
        assert words in error["message"], error
    refused = httpx2.post(
        f"{gateway.url}/completions",
        headers=HEADERS | {"authorization": "Bearer no"},
        content=iter([b"{"]),
        verify=False,
    )
    assert refused.status_code == 401
    eventually(lambda: not engine.opened and not engine.busy)


def test_who_leaves_or_falls_silent_cancels(growing: tuple[RunningGateway, FakeEngine]) -> None:
    gateway, engine = growing

    def begin() -> socket.socket:
        made = socket.create_connection((gateway.address.host, gateway.address.port), timeout=20)
        head = ["POST /v1/completions HTTP/1.1", "host: localhost", "transfer-encoding: chunked"]
        head += [f"{name}: {value}" for name, value in HEADERS.items()]
        lines = b'{"model": "fake"}\n"Hello"\n'
        made.sendall("\r\n".join([*head, "", ""]).encode() + b"%x\r\n%b\r\n" % (len(lines), lines))
        return made

    gone, silent = begin(), begin()
    eventually(lambda: len(engine.opened) == 2)
    gone.close()
    eventually(lambda: len(engine.opened) == 1)
    with silent:
        answer = b"".join(iter(lambda: silent.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408") and b"prompt_idle_s" in answer and b"connection: close" in answer.lower()
    eventually(lambda: not engine.opened and not engine.busy)
