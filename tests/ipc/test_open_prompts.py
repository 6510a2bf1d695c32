"""Prompts that are sent while they are being written: the answer of the whole, whatever the cuts, and every refusal."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeCodec, FakeEngine, expected_tokens
from scripted_server import ScriptedServer, ipc_url
from served import Serve, eventually
from text_tokenizers import KINDS
from unit.test_open_prompts import PIECES, codec_of, cut
from unit.test_text_special import TEMPLATES

from lowlat.errors import Busy, RequestError, ServerGone, StreamError
from lowlat.ipc import AsyncClient, Client
from lowlat.ipc.client import OpenPrompt
from lowlat.ipc.client.pace import Pace
from lowlat.ipc.wire import Append, Error, Finish, Pause, pack_tokens
from lowlat.serving.codec import ServingCodec

TOKENIZERS = [*TEMPLATES, *KINDS]


def tokens_of(chunks: Any) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def written(source: random.Random) -> str:
    words = (source.choice(PIECES) + (" " if source.random() < 0.4 else "") for _ in range(source.randint(1, 40)))
    return "".join(words)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_text_in_pieces_has_the_answer_of_the_whole(kind: str, serve: Serve) -> None:
    codec, source = codec_of(kind), random.Random(kind)
    served = serve(FakeEngine(max_running=2, tokens_per_step=8), codec=ServingCodec(codec))
    with Client(served.server.endpoint) as client:
        for number in range(12):
            text = written(source)
            try:
                whole = codec.encode(text)
            except RequestError:
                continue
            prompt = client.open_prompt(max_tokens=8, seed=number)
            for piece in cut(text, source, 9):
                prompt.append(piece)
                if source.random() < 0.2:
                    prompt.finish(speculative=True)
            assert tokens_of(prompt.finish()) == expected_tokens(whole, 8, number), text
    assert not served.engine.opened and not served.engine.tried


@pytest.mark.parametrize("asynchronous", [False, True])
def test_both_clients(asynchronous: bool, serve: Serve) -> None:
    """Pieces of text and ids, on trial and not; an answer can be read once its prompt is whole."""
    served = serve(FakeEngine(max_running=2), codec=FakeCodec())
    expected = expected_tokens([*b"abc", 7, 8, *b"def"], 5, 1)

    def blocking() -> None:
        with Client(served.server.endpoint) as client:
            prompt = client.open_prompt(max_tokens=5, seed=1)
            for piece in ("ab", "", "c", [7], (8,), []):
                prompt.append(piece)
            trial = prompt.finish(speculative=True)
            with pytest.raises(RequestError, match="open still"):
                next(trial)
            prompt.append("def")
            answer = prompt.finish()
            for refused in (lambda: prompt.append("g"), prompt.finish):
                with pytest.raises(RequestError, match="it was finished"):
                    refused()
            assert tokens_of(answer) == expected
            with pytest.raises(RequestError, match="has ended"):
                prompt.append("g")
            for wrong in (5, b"x", [-1], [1 << 31], {"a": 1}, "\ud800"):
                with pytest.raises(RequestError):
                    client.open_prompt().append(wrong)  # type: ignore[arg-type]

    async def tasks() -> None:
        async with AsyncClient(served.server.endpoint) as client, client.open_prompt(max_tokens=5, seed=1) as prompt:
            for piece in ("ab", "", "c", [7], (8,)):
                await prompt.append(piece)
            trial = await prompt.finish(speculative=True)
            assert trial.take() is None
            with pytest.raises(RequestError, match="open still"):
                await anext(trial)
            await prompt.append("def")
            answer = await prompt.finish()
            with pytest.raises(RequestError, match="it was finished"):
                await prompt.append("g")
            assert tokens_of([chunk async for chunk in answer]) == expected

    asyncio.run(tasks()) if asynchronous else blocking()
    eventually(lambda: not served.engine.opened)


def test_refusals_name_value_limit_and_knob(serve: Serve) -> None:
    served = serve(FakeEngine(max_running=1, max_context=50), codec=FakeCodec(), prompt_idle_s=0.3, max_queue=0)
    too_long: list[tuple[dict[str, Any], str]] = [
        ({}, r"prompt of \d+ tokens and max_tokens 10 exceed 50 \(max_context\)"),
        ({"max_prompt_tokens": 12}, r"max_prompt_tokens: a prompt of \d+ tokens exceeds 12"),
    ]
    with Client(served.server.endpoint) as client:
        for own, match in too_long:
            prompt = client.open_prompt(max_tokens=10, **own)
            with pytest.raises(RequestError, match=match):
                for _ in range(100):
                    prompt.append("x")
                    time.sleep(0.002)
        with pytest.raises(RequestError, match="a prompt of 0 tokens; it needs 1"):
            list(client.open_prompt(max_tokens=10).finish())
        with pytest.raises(RequestError, match="prompt token 0 is 5000"):
            prompt = client.open_prompt(max_tokens=10)
            prompt.append([5000])
            list(prompt.finish())
        with pytest.raises(RequestError, match="max_prompt_tokens must be from 1"):
            client.open_prompt(max_prompt_tokens=0)
        eventually(lambda: client.health().num_running == 0)
        idle = client.open_prompt(max_tokens=10)
        idle.append("x")
        with pytest.raises(Busy), client.open_prompt(max_tokens=10) as second:
            list(second.finish())
        with pytest.raises(StreamError, match=r"nothing came of the open prompt for 0.3 s \(prompt_idle_s\)") as caught:
            for _ in range(100):
                time.sleep(0.05)
                idle.append([])
        assert caught.value.code == "deadline"
        eventually(lambda: client.health().num_running == 0)
        late = client.open_prompt(max_tokens=40, deadline_s=0.001)
        late.append("x")
        assert [chunk.code for chunk in late.finish()][-1] in (None, "deadline")
    eventually(lambda: not served.engine.opened and not served.engine.busy)


def test_without_a_tokenizer_token_ids_are_taken(serve: Serve) -> None:
    with Client(serve(FakeEngine()).server.endpoint) as client:
        prompt = client.open_prompt(max_tokens=3)
        prompt.append([5])
        prompt.append([6])
        assert tokens_of(prompt.finish()) == expected_tokens([5, 6], 3)
        prompt = client.open_prompt()
        prompt.append("text")
        with pytest.raises(RequestError, match="no tokenizer; send token ids"):
            list(prompt.finish())


def test_messages_at_a_wrong_time(serve: Serve) -> None:
    served = serve(FakeEngine(max_running=1), codec=FakeCodec(delay_s=0.05), append_credit=1024)
    client = served.client()
    client.say(Append(0, "x"))
    assert "number 0 was not used" in client.hear(Error).message
    first = client.completions[0] = type(client.submit(0, [1], max_tokens=3))()
    client.finish(first)
    client.say(Append(0, "x"))  # it has ended: the two may cross
    second = client.open(1, max_tokens=4000)
    client.say(Pause(1))
    client.pong()
    assert [answer.code for answer in client.paused] == ["invalid"]  # an open prompt goes on
    client.say(Append(1), pack_tokens([5]))
    client.say(Finish(1))
    client.say(Finish(1))
    client.say(Append(1, "more"))
    for _ in range(2):
        error = client.hear(Error)
        assert error.code == "unexpected" and "no open prompt: it was finished" in error.message
    client.cancel(1)
    client.finish(second)
    assert second.end is not None and second.token_ids == expected_tokens([5], 4000)[: len(second.token_ids)]
    greedy = client.open(2, max_tokens=4)
    for _ in range(3):
        client.say(Append(2, "x" * 1000))
    client.finish(greedy)
    assert greedy.error is not None and "append_credit" in greedy.error.message
    eventually(lambda: not served.engine.opened)


def test_nothing_new_brings_no_work_and_no_time(serve: Serve) -> None:
    """Ends on trial and empty pieces need no credit: repeated, they hold no slot for longer than silence does."""
    client = serve(FakeEngine(max_running=1), codec=FakeCodec(), prompt_idle_s=0.3).client()
    idle, began = client.open(0, max_tokens=3), time.monotonic()
    client.say(Append(0, "x"))
    while idle.end is None:
        for message in (Finish(0, speculative=True), Append(0, "")):
            client.say(message)
        client.pong()
        assert time.monotonic() - began < 10
        time.sleep(0.02)
    assert idle.end.code == "deadline" and "prompt_idle_s" in (idle.end.message or "")


def test_a_server_that_reads_slowly_holds_its_client_back(serve: Serve) -> None:
    served = serve(FakeEngine(max_context=10_000), codec=FakeCodec(delay_s=0.05), append_credit=1024)
    with Client(served.server.endpoint) as client:
        prompt, begun = client.open_prompt(max_tokens=3), time.monotonic()
        for _ in range(6):
            prompt.append("x" * 1000)
        assert time.monotonic() - begun > 0.1
        assert tokens_of(prompt.finish()) == expected_tokens(b"x" * 6000, 3)
        held = client.open_prompt(max_tokens=3)
        with pytest.raises(StreamError, match="append_credit") as caught:
            for _ in range(4):
                held.append("x" * 1000, timeout_s=0.001)
        assert caught.value.code == "timeout"
    eventually(lambda: not served.engine.opened)


def test_pieces_that_wait_are_joined(serve: Serve) -> None:
    """Whatever they are cut into, they wait as few; ends on trial that more follows are none."""
    source, encoded = random.Random(3), list[str]()

    class Codec(FakeCodec):
        def encode(self, text: str, **how: Any) -> list[int]:
            encoded.append(text)
            return super().encode(text, **how)

    client = serve(FakeEngine(max_running=1, max_context=10_000), codec=Codec(delay_s=0.2)).client()
    expected = [*b"first"]
    answer = client.open(0, max_tokens=5)
    client.say(Append(0, "first"))
    for kind in ("text", "ids", "text"):
        for _ in range(300):
            own = source.randrange(1, 128)
            expected.append(own)
            client.say(*((Append(0, chr(own)),) if kind == "text" else (Append(0), pack_tokens([own]))))
            if own > 100:
                client.say(Finish(0, speculative=True))
    client.say(Finish(0))
    begun = time.monotonic()
    client.finish(answer)
    assert answer.token_ids == expected_tokens(expected, 5) and time.monotonic() - begun < 10
    assert len(encoded) < 20


def test_many_small_pieces_keep_to_what_the_server_takes() -> None:
    pace, now, sent = Pace(1000), 50.0, list[float]()
    for number in range(4000):
        now += pace.delay(now) + (3.0 if number == 2000 else 0.0)
        sent.append(now)
    assert all(later - earlier > 1.0 for earlier, later in zip(sent, sent[1000:], strict=False))
    assert sent[0] == 50.0 and sent[-1] - sent[0] < 12.0 and sent[100] == 50.0


def test_a_client_that_dies_abandons_its_prompts(serve: Serve) -> None:
    served = serve(FakeEngine(max_running=2), codec=FakeCodec())
    client = Client(served.server.endpoint)
    opened: list[OpenPrompt] = [client.open_prompt() for _ in range(3)]
    for prompt in opened:
        prompt.append("abc")
    opened[0].finish(speculative=True)
    eventually(lambda: len(served.engine.opened) == 2 and len(served.engine.tried) == 1)
    client.close()
    eventually(lambda: not served.engine.opened and not served.engine.busy)
    with Client(served.server.endpoint) as other:
        assert len(tokens_of(other.generate([1], max_tokens=3))) == 3
        kept = other.open_prompt()
        kept.append("abc")
        eventually(lambda: len(served.engine.opened) == 1)
        del kept
        eventually(lambda: not served.engine.opened)
        lost = other.open_prompt()
        lost.append("abc")
        served.server.close()
        with pytest.raises(ServerGone):
            for _ in range(100):
                lost.append("abc")
                time.sleep(0.01)


def test_a_server_that_takes_none_is_told_from_one_that_does(tmp_path: Path) -> None:
    with ScriptedServer(ipc_url(tmp_path)) as server, Client(server.url) as client:
        with pytest.raises(RequestError, match="takes no open prompts"):
            client.open_prompt()
        assert len(tokens_of(client.generate([1], max_tokens=1))) == 1
