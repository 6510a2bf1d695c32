"""Loading a tokenizer from a directory nobody vouches for; encoding and decoding."""

import hashlib
import json
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_tokenizers import byte_level, codec, sentencepiece, write_directory
from tokenizers import Tokenizer, processors

import lowlat.text
from lowlat.errors import ConfigError, RequestError
from lowlat.text import TextCodec
from lowlat.text import codec as codec_module


def load(path: Path) -> TextCodec:
    loaded = TextCodec.load(path)
    assert loaded is not None
    return loaded


def copy_of(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(tokenizer.to_str())


def test_all_names_resolve() -> None:
    assert sorted(lowlat.text.__all__) == lowlat.text.__all__
    assert all(hasattr(lowlat.text, name) for name in lowlat.text.__all__)


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    assert TextCodec.load(tmp_path) is None
    assert TextCodec.load(tmp_path / "absent") is None


def test_load(tmp_path: Path) -> None:
    loaded = load(
        write_directory(tmp_path, byte_level(), bos_token="<s>", eos_token={"content": "</s>"}, pad_token=None)
    )
    data = (tmp_path / "tokenizer.json").read_bytes()
    assert loaded.fingerprint == hashlib.sha256(data).hexdigest()
    assert loaded.vocab_size == byte_level().get_vocab_size()
    assert loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert loaded.token_id("</s>") == 1
    assert loaded.token_id("absent") is None
    assert not loaded.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        loaded.apply_chat_template([{"role": "user", "content": "hi"}])
    loaded.close()


def test_special_tokens_map_is_read_behind_the_config(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level(), bos_token="<s>")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "x", "eos_token": {"content": "</s>"}}')
    assert load(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@given(text=st.text(max_size=60))
def test_round_trip(text: str) -> None:
    text = text.replace("é", "")  # an added token there, which the library decodes as a byte
    ids = codec("byte_level").encode(text, add_special_tokens=False)
    assert codec("byte_level").decode(ids, skip_special_tokens=False) == text


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = copy_of(byte_level())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    ids = load(write_directory(tmp_path, tokenizer)).encode("the quick brown fox")
    assert codec("byte_level").decode(ids) == "the quick brown fox"


@pytest.mark.parametrize("template", [None, "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("add_bos", [None, False, True])
@pytest.mark.parametrize("add_eos", [None, False, True])
def test_bos_and_eos(template: str | None, add_bos: bool | None, add_eos: bool | None, tmp_path: Path) -> None:
    tokenizer = copy_of(sentencepiece())
    if template is not None:
        processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
        tokenizer.post_processor = processor
    config = {"add_bos_token": add_bos, "add_eos_token": add_eos, "bos_token": "<s>", "eos_token": "</s>"}
    loaded = load(write_directory(tmp_path, tokenizer, **config))
    template_bos, template_eos = "<s>" in (template or ""), "</s>" in (template or "")
    for text in ("", "ab", "<s>ab</s>", "<s>"):
        ids = list(loaded.encode(text, add_special_tokens=False))
        if template_bos if add_bos is None else add_bos and (template_bos or ids[:1] != [1]):
            ids = [1, *ids]
        if template_eos if add_eos is None else add_eos and (template_eos or ids[-1:] != [2]):
            ids = [*ids, 2]
        if template_bos and add_bos and ids[:1] != [1]:
            ids = [1, *ids]
        assert loaded.encode(text) == ids, text


def test_a_wanted_bos_must_exist(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level(), add_bos_token=True, bos_token="<nowhere>")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: .*bos_token '<nowhere>' is not in the vocabulary"):
        TextCodec.load(tmp_path)
    write_directory(tmp_path, byte_level(), add_eos_token="yes", eos_token="</s>")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: add_eos_token must be true or false"):
        TextCodec.load(tmp_path)


@pytest.mark.parametrize("text", [5, None, b"bytes", ["a"]])
def test_only_strings_are_encoded(text: str) -> None:
    with pytest.raises(RequestError, match="text must be a string"):
        codec("byte_level").encode(text)


def test_text_must_be_unicode_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        codec("byte_level").encode("ab\ud800")
    monkeypatch.setattr(codec_module, "MAX_TEXT_CHARACTERS", 3)
    with pytest.raises(RequestError, match="text has 4 characters; at most 3"):
        codec("byte_level").encode("abcd")


@pytest.mark.parametrize("ids", [[-1], [1 << 32], ["a"], [1.5], [2, True]])
def test_bad_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(RequestError, match="token ids must be integers"):
        codec("byte_level").decode(ids)


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert codec("byte_level").decode([(1 << 32) - 1, 10**6]) == ""


GOOD = byte_level().to_str()


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b"{}",
        b"[" * 100_000,
        GOOD[: len(GOOD) // 2].encode(),
        GOOD.replace('"ByteLevel"', '"Unheard"').encode(),
        GOOD.replace('"merges":[', '"merges":["zz zz",').encode(),
        json.dumps({**json.loads(GOOD), "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}).encode(),
        json.dumps({**json.loads(GOOD), "decoder": {"type": "CTC"}}).encode(),
    ],
    ids=range(12),
)
def test_a_damaged_tokenizer_is_named(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: "):
        TextCodec.load(tmp_path)


@given(data=st.data())
def test_any_damage_loads_or_is_named(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("damaged")
    raw = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    (path / "tokenizer.json").write_bytes(bytes(raw))
    try:
        TextCodec.load(path)
    except ConfigError as error:
        assert "tokenizer.json" in str(error)


@pytest.mark.parametrize("damage", ["[]", "{", "5", "[" * 100_000, '{"chat_template": 5}'])
def test_a_damaged_config_is_named(damage: str, tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text(damage)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: "):
        TextCodec.load(tmp_path)


def test_too_large_files_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(codec_module.MAX_TOKENIZER_BYTES + 1)  # sparse
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is larger than 268435456 bytes"):
        TextCodec.load(tmp_path)
    write_directory(tmp_path, byte_level())
    (tmp_path / "chat_template.jinja").write_text("x" * (codec_module.MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: is larger than 262144 bytes"):
        TextCodec.load(tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is not a regular file"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is not a regular file"):
        TextCodec.load(tmp_path)


def test_other_threads_run_while_a_long_text_is_encoded(repository: Path) -> None:
    long = load(repository / "lowlat" / "demo" / "target")
    text = "The President shall from time to time give to the Congress information. " * 4000
    longest, stopping = [0.0], threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not stopping.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            longest[0], last = max(longest[0], now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        shares = []
        for _ in range(5):  # a busy machine may hold the watcher up, too, but not every time
            longest[0], begin = 0.0, time.perf_counter()
            long.encode(text, add_special_tokens=False)
            shares.append(longest[0] / (time.perf_counter() - begin))
    finally:
        stopping.set()
        watcher.join()
    assert min(shares) < 0.5, shares
