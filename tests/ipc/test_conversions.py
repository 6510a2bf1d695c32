"""Conversions through a server: text and chats to token ids, ids to text, without a step of the engine."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_engine import FakeCodec, FakeEngine
from served import Served, eventually, serve_in
from text_tokenizers import codec as text_codec

from lowlat.errors import Busy, RequestError
from lowlat.ipc import AsyncClient, Client
from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.convert import MAX_CONVERTED
from lowlat.ipc.wire import Submit, WireError, check_submit, decode_client, encode
from lowlat.serving.codec import ServingCodec

TEXT = "naïve 日本語 😀 the dog"


class GatedCodec(FakeCodec):
    """A codec of any length; the text "wait" keeps its thread until a test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def encode(self, text: str, **how: object) -> list[int]:
        if text == "wait":
            self.begun.set()
            assert self.go_on.wait(20)
        return list(text.encode())


@dataclass
class Gated:
    served: Served
    codec: GatedCodec

    @property
    def endpoint(self) -> str:
        return self.served.server.endpoint


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    tmp_path.chmod(0o700)
    codec, engine = GatedCodec(), FakeEngine(max_context=64, max_running=1)
    with serve_in(tmp_path, engine, codec, Limits(max_queue=1), {}) as served:
        yield Gated(served, codec)


def test_texts_and_ids_are_converted_without_a_step(gated: Gated) -> None:
    with Client(gated.endpoint) as client:
        for text in ("a", "x" * 300, "long " * 10_000):  # more than the context, and more than a message
            ids = client.tokenize(text)
            assert ids == tuple(text.encode())
            assert client.detokenize(ids) == text and client.token_texts(ids) == list(text)
        assert client.tokenize([{"role": "user", "content": "Hi"}]) == tuple(b"<user>Hi")
        assert client.tokenize("") == () and client.detokenize([]) == "" and client.token_texts([]) == []
        stats = client.stats()
        assert stats["conversions"] == {"stop": 11} and stats["ends"] == {}
        assert stats["num_tokens"] == 0 == stats["num_running"]
        assert stats["duration_ms"]["count"] == 0 == gated.served.engine.num_steps


def test_a_small_window_is_kept(gated: Gated) -> None:
    with Client(gated.endpoint, window=1) as client:
        text = "long " * 5000
        assert client.tokenize(text) == tuple(text.encode())


def test_an_async_client_converts_too(gated: Gated) -> None:
    async def main() -> None:
        async with AsyncClient(gated.endpoint) as client:
            ids = await client.tokenize(TEXT)
            assert ids == tuple(TEXT.encode()) and await client.detokenize(ids) == TEXT
            assert await client.token_texts([72, 105]) == ["H", "i"]
            assert await client.detokenize([]) == ""

    asyncio.run(main())


def test_conversions_have_the_limits_of_prompts_and_hold_up_no_step(gated: Gated) -> None:
    with Client(gated.endpoint) as client:
        with pytest.raises(RequestError, match=f"at most {MAX_CONVERTED} are converted"):
            client.detokenize([1] * (MAX_CONVERTED + 1))
        with pytest.raises(RequestError, match="the request is too long"):
            client.tokenize("x" * (1 << 21))
        found: list[tuple[int, ...]] = []
        waiting = threading.Thread(target=lambda: found.append(client.tokenize("wait")))
        waiting.start()
        try:
            assert gated.codec.begun.wait(20)
            assert len(list(client.generate([1], max_tokens=2))) > 1
            second = client.generate("wait", max_tokens=1)
            with pytest.raises(Busy, match="max_queue"):
                client.tokenize("x")
        finally:
            gated.codec.go_on.set()
            waiting.join(20)
        assert found == [tuple(b"wait")] and list(second)
        eventually(lambda: client.tokenize("x") == (120,))


def test_what_is_converted_fits_its_prompt() -> None:
    ids = b"\x01\x00\x00\x00"
    for wrong, body in (("token_ids", ids), ("text", None), ("token_texts", None)):
        with pytest.raises(WireError, match="token_ids are made of") as caught:
            check_submit(Submit(1, 1, text=None if body else "x", result=wrong), body)  # type: ignore[arg-type]
        assert caught.value.field == "$.result"
    asked = Submit(1, 1, result="text")
    assert decode_client([encode(asked), ids]) == (asked, ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "word_piece"])
def test_a_models_tokenizer_converts(tmp_path: Path, kind: str) -> None:
    tmp_path.chmod(0o700)
    codec = text_codec(kind)
    with (
        serve_in(tmp_path, FakeEngine(), ServingCodec(codec), Limits(), {}) as served,
        Client(served.server.endpoint) as client,
    ):
        ids = client.tokenize("a dog", add_special_tokens=False)
        assert list(ids) == codec.encode("a dog", add_special_tokens=False)
        assert client.tokenize("a</s>", allow_special=True)[-1] == codec.token_id("</s>")
        end = codec.token_id("</s>")
        assert end is not None and client.detokenize([*ids, end]) == codec.decode(
            [*ids, end], skip_special_tokens=False
        )
        assert client.token_texts([*ids, end]) == [
            codec.token_bytes(token).decode("utf-8", "replace") for token in [*ids, end]
        ]


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with (
        serve_in(tmp_path, FakeEngine(), None, Limits(), {}) as served,
        Client(served.server.endpoint) as client,
        pytest.raises(RequestError, match="no tokenizer"),
    ):
        client.detokenize([1])
