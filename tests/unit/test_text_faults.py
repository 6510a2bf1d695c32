"""A tokenizer that panics on one text or one token: that request fails by name, and whatever runs goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
from grammars import codec_with, mask_of, state_of
from text_tokenizers import byte_level, sentencepiece, write_directory
from tiny_models import make_target
from tokenizers import Regex, Tokenizer, decoders, normalizers

from lowlat import Runtime, SamplingParams
from lowlat.errors import GrammarError, RequestError, is_panic
from lowlat.ipc import Client, Server, StreamError
from lowlat.serving.codec import ServingCodec
from lowlat.serving.engine import RuntimeEngine
from lowlat.text import IncrementalDetokenizer, TextCodec

PANICS = Regex(r"\b(?=Q)")  # matches a place, and the library counts past the text's end


def panicking() -> Tokenizer:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.normalizer = normalizers.Replace(PANICS, "x")
    return tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("panics")
    make_target(path, "llama", vocab_size=panicking().get_vocab_size(), num_hidden_layers=1, eos_token_id=[0])
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return write_directory(path, panicking(), chat_template=template, eos_token="</s>")


def test_the_library_panics_and_no_exception_says_so() -> None:
    with pytest.raises(BaseException) as caught:
        panicking().encode("Q")
    assert is_panic(caught.value) and not isinstance(caught.value, Exception)


@pytest.mark.parametrize("allow_special", [False, True])
def test_a_text_that_it_fails_on_is_refused(directory: Path, allow_special: bool) -> None:
    codec = TextCodec.load(directory)
    assert codec is not None
    with pytest.raises(RequestError, match=r"tokenizer failed to encode this text \(PanicException\)"):
        codec.encode("Q", allow_special=allow_special)
    with pytest.raises(RequestError, match="failed to encode"):
        codec.encode_chat([{"role": "user", "content": "Q"}], allow_special=allow_special)
    assert codec.decode(codec.encode("a q", allow_special=allow_special)) == "a q"
    codec.close()


def test_a_special_token_that_it_fails_on_cannot_be_text() -> None:
    tokenizer = panicking()
    tokenizer.add_special_tokens(["Q:"])
    with pytest.raises(RequestError, match="which this tokenizer cannot write as text"):
        TextCodec(tokenizer).encode("a Q:")


def test_an_answer_that_it_fails_on_ends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own decoders panic on no text that is known; one that raises stands for it."""
    tokenizer = Tokenizer.from_str(sentencepiece().to_str())
    codec = TextCodec(tokenizer)
    tokenizer.decoder = decoders.Sequence([decoders.CTC(pad_token="a")])

    class PanicException(BaseException):
        pass

    class Failing:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def decode(self, *_: object, **__: object) -> str:
            raise PanicException("secret")

    monkeypatch.setattr(codec._streams, "tokenizer", Failing())
    stream = IncrementalDetokenizer(codec)
    with pytest.raises(RequestError, match=r"failed to decode an answer \(PanicException\)") as caught:
        stream.push([codec.token_id("a") or 0])
    assert "secret" not in str(caught.value)
    assert codec.token_bytes(codec.token_id("ab") or 0) == b"ab"


def test_a_server_and_its_neighbours_go_on(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path / 's'}"
    codec = ServingCodec()

    def engine() -> RuntimeEngine:
        runtime = Runtime.load(directory, max_batch=2, max_context=64)
        assert runtime.codec is not None
        assert runtime.checks.eos_token_ids == (0, runtime.codec.token_id("</s>"))  # the configs', then its own
        codec.bind(runtime.codec)
        return RuntimeEngine(runtime)

    with Server(engine, codec, endpoint), Client(endpoint) as client:
        for text in ("Q", "QQ"):
            with pytest.raises((StreamError, RequestError), match="failed to encode this text"):
                list(client.generate(text, max_tokens=4))
            with pytest.raises((StreamError, RequestError), match="failed to encode this text"):
                list(client.generate([{"role": "user", "content": text}], max_tokens=4))
            assert list(client.generate("the dog", max_tokens=4, ignore_eos=True))
        assert client.health().state == "serving"


def test_a_request_whose_answer_fails_ends_and_others_do_not(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime.load(directory, max_batch=2, max_context=64) as runtime:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        failing, fine = runtime.submit([5, 6], params), runtime.submit([7, 8], params)
        text = runtime._requests[failing]._text
        assert text is not None
        pushed = text.push

        def push(tokens: Any) -> Any:
            if len(runtime._requests[failing].committed) > 3:
                raise RequestError("the model's tokenizer failed to decode an answer (PanicException)")
            return pushed(tokens)

        monkeypatch.setattr(text, "push", push)
        ends = {}
        while runtime.busy:
            for output in runtime.step():
                if output.finish_reason is not None:
                    ends[output.request_id] = output
        assert (ends[failing].finish_reason, ends[failing].error_code) == ("error", "text")
        assert "failed to decode" in str(ends[failing].error)
        assert ends[fine].finish_reason == "length" and ends[fine].error is None
        runtime.kvcache.invariants()


def test_a_grammar_whose_library_panics_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    class Failing:
        def __getattr__(self, name: str) -> object:
            raise PanicException(name)

    state = state_of(codec_with(), regex="a+")
    monkeypatch.setattr(state, "_matcher", Failing())
    for call in (lambda: mask_of(state, codec_with()), lambda: state.advance([5]), lambda: state.forced(3)):
        with pytest.raises(GrammarError, match="its library failed"):
            call()


def test_eos_of_the_tokenizer_ends_an_answer(tmp_path: Path) -> None:
    tokenizer = byte_level()
    make_target(tmp_path, "llama", vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=1, eos_token_id=[0])
    end = 7
    write_directory(tmp_path, tokenizer, eos_token={"content": tokenizer.id_to_token(end)})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9]}))
    with Runtime.load(tmp_path, max_batch=1, max_context=64) as runtime:
        assert runtime.checks.eos_token_ids == (9, end)
        for token in (9, end):
            runtime.submit([5, 6], SamplingParams(max_tokens=6, logit_bias={token: 100.0}))
            outputs = [output for _ in iter(lambda: runtime.busy, False) for output in runtime.step()]
            assert [(output.finish_reason, output.stop_reason) for output in outputs] == [("stop", token)]
