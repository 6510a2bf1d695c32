"""Text over the wire: joined, it is the decoding of all ids, however steps cut it and whoever waits for credit."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fake_engine import FakeEngine, FakeOutput
from text_tokenizers import byte_level

from lowlat.cli.options import bundled
from lowlat.ipc import Chunk, Client, Server
from lowlat.ipc.wire import Sampling
from lowlat.options.speculative import SpeculativeConfig
from lowlat.serving.codec import ServingCodec
from lowlat.text import IncrementalDetokenizer, TextCodec

ECHOED = "naïve crème 日本語の文章 👩‍👩‍👧 x e\u0301; the END of 你好 it"
CODEC = TextCodec(byte_level(), fingerprint="0" * 64)


class EchoEngine(FakeEngine):
    """Answers a prompt by itself, so many tokens a step, with text and stop strings as a Runtime has them."""

    def submit(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, cache_salt: str = "", session: str = ""
    ) -> None:
        super().submit(request_id, prompt, sampling, cache_salt, session)
        request = self._running[request_id]
        request.tokens = tuple(prompt)
        self.detokenizers = getattr(self, "detokenizers", {})
        self.detokenizers[request_id] = IncrementalDetokenizer(CODEC, stop=sampling.stop)

    def _advance(self, request_id: str, request: object) -> FakeOutput:
        running = self._running[request_id]
        detokenizer = self.detokenizers[request_id]
        tokens = running.tokens[running.num_sent : running.num_sent + self.tokens_per_step]
        delta = detokenizer.push(tokens)
        text, reason = delta.text, None
        if delta.stopped is not None:
            tokens, reason = tokens[: delta.num_tokens_used], "stop"
        running.num_sent += len(tokens)
        if reason is None and running.num_sent == len(running.tokens):
            text, reason = text + detokenizer.finish(), "length"
        if reason is not None:
            self._end(request_id, self._running.pop(request_id))
        return FakeOutput(request_id, tokens, reason, text=text, stop_reason=detokenizer.stopped)


def gathered(chunks: Sequence[Chunk]) -> tuple[tuple[int, ...], str]:
    ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    return ids, "".join(chunk.text for chunk in chunks)


@pytest.fixture(params=[1, 3])
def echo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path / 's'}"
    engine = EchoEngine(0.001, tokens_per_step=request.param, text=True, tokenizer="0" * 64)
    with Server(engine, ServingCodec(CODEC), endpoint):
        yield endpoint


@pytest.mark.parametrize("window", [1, 1024])
def test_echoed_text_comes_whole_and_never_half_a_character(echo: str, window: int) -> None:
    with Client(echo, window=window) as client:
        chunks = list(client.generate(ECHOED))
    ids, text = gathered(chunks)
    assert text == ECHOED == CODEC.decode(ids) and list(ids) == CODEC.encode(ECHOED)
    assert "\ufffd" not in text and chunks[-1].finish_reason == "length"


def test_an_incomplete_character_is_replaced_at_the_end_alone(echo: str) -> None:
    ids = CODEC.encode("a €")[:-1]
    assert CODEC.decode(ids) == "a \ufffd"
    with Client(echo, window=1) as client:
        chunks = list(client.generate(ids))
    found, text = gathered(chunks)
    assert found == tuple(ids) and text == CODEC.decode(ids) and text.endswith("\ufffd")
    assert "\ufffd" not in "".join(chunk.text for chunk in chunks)[:-1]


@pytest.mark.parametrize("stop", [("END",), ("ND o", "END"), ("の文",), ("y", "END of 你好 it!", "👧")])
def test_text_is_cut_before_a_stop_string_that_lies_across_chunks(echo: str, stop: tuple[str, ...]) -> None:
    with Client(echo, window=1) as client:
        chunks = list(client.generate(ECHOED, stop=list(stop)))
    ids, text = gathered(chunks)
    last = chunks[-1]
    assert last.finish_reason == "stop" and last.stop_reason in stop
    assert text + str(last.stop_reason) == ECHOED[: len(text) + len(str(last.stop_reason))]
    # the ids end with the token that completed it: without that token it is not there
    assert str(last.stop_reason) in CODEC.decode(ids)
    assert str(last.stop_reason) not in CODEC.decode(ids[:-1])


def test_what_could_begin_a_stop_string_comes_when_it_did_not(echo: str) -> None:
    with Client(echo) as client:
        chunks = list(client.generate(ECHOED, stop=["it is not there", "END!"]))
    assert gathered(chunks)[1] == ECHOED and chunks[-1].finish_reason == "length"


@pytest.fixture(scope="module")
def bundled_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TextCodec]]:
    from lowlat.engine.runtime import Runtime
    from lowlat.serving.engine import RuntimeEngine

    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    codec = ServingCodec()
    own = TextCodec.load(bundled("target"))
    assert own is not None

    def make_engine() -> RuntimeEngine:
        head = SpeculativeConfig(model=bundled("head"), num_speculative_tokens=3, strict=True)
        runtime = Runtime.load(bundled("target"), head, max_batch=4, max_context=512)
        codec.bind(runtime.codec)
        return RuntimeEngine(runtime)

    with Server(make_engine, codec, f"ipc://{folder / 's'}") as server:
        yield server.endpoint, own
    own.close()


def test_the_bundled_models_text_is_the_decoding_of_its_ids(bundled_server: tuple[str, TextCodec]) -> None:
    endpoint, codec = bundled_server
    prompt = "The President shall — naïve 日本"
    with Client(endpoint, window=1) as client:
        chunks = list(client.generate(prompt, temperature=1.0, seed=5, max_tokens=48, ignore_eos=True))
    ids, text = gathered(chunks)
    assert len(ids) == 48 and max(len(chunk.token_ids) for chunk in chunks) > 1
    # with its prompt before it, for a first word's space is the prompt's to keep
    prompt_ids = codec.encode(prompt)
    assert text == codec.decode([*prompt_ids, *ids])[len(codec.decode(prompt_ids)) :]
    assert chunks[-1].metrics is not None and chunks[-1].metrics["eagle_speculation"]["num_drafts"] > 0


def test_a_stop_string_of_the_bundled_model(bundled_server: tuple[str, TextCodec]) -> None:
    endpoint, codec = bundled_server
    with Client(endpoint) as client:
        whole = gathered(list(client.generate("The President shall", max_tokens=14)))[1]
        stop = whole[20:27]
        chunks = list(client.generate("The President shall", max_tokens=14, stop=stop))
    ids, text = gathered(chunks)
    assert text == whole[: whole.index(stop)] and chunks[-1].stop_reason == stop
    assert stop in codec.decode(ids) and stop not in codec.decode(ids[:-1])
