"""`lowlat generate --chat` with a model that answers in channels."""

import sys
from pathlib import Path
from typing import Any

import pytest
from cli_calls import answer, lowlat
from text_tokenizers import byte_level, write_directory
from tiny_models import make_target
from tokenizers import Tokenizer

from lowlat.cli import channels
from lowlat.cli.channels import ChannelWriter, channel_dicts
from lowlat.ipc import Chunk
from lowlat.text import TextCodec
from lowlat.text.harmony import ENDS

MARKERS = ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *ENDS]
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
ANSWER = "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>say<|return|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gpt-oss with Harmony's markers."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens(MARKERS)
    directory = tmp_path_factory.mktemp("harmony")
    make_target(directory, "gpt_oss", vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=2)
    return write_directory(directory, tokenizer, chat_template=TEMPLATE)


def stream(model: Path, text: str) -> bool:
    """Write an answer a token a step, as `generate` does."""
    codec = TextCodec.load(model)
    assert codec is not None
    writer = ChannelWriter(codec)
    tokens = codec.encode(text, add_special_tokens=False, allow_special=True)
    for place, token in enumerate(tokens):
        reason: Any = "stop" if place == len(tokens) - 1 else None
        writer(Chunk(token_ids=(token,), finish_reason=reason))
    codec.close()
    return writer.answered


def test_a_pipe_gets_the_answer_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stream(model, ANSWER) is True
    assert capsys.readouterr().out == "say"
    assert stream(model, "<|channel|>analysis<|message|>think") is False
    assert capsys.readouterr().out == ""
    assert stream(model, "as other models write") is True
    assert capsys.readouterr().out == "as other models write"


def test_a_terminal_shows_the_rest_dim(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, bool]] = []
    monkeypatch.setattr(channels, "stream_text", lambda text, dim=False: written.append((text, dim)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    stream(model, ANSWER)
    dim = "".join(text for text, is_dim in written if is_dim)
    plain = "".join(text for text, is_dim in written if not is_dim)
    assert (dim, plain) == ("think", "\n\nsay")


@pytest.mark.second
def test_json_has_the_channels_beside_the_text(model: Path) -> None:
    common = ("generate", model, "--prompt", "hello", "--max-tokens", 24, "--temperature", 1.5, "--seed", 3)
    found = answer(*common, "--chat", "--json")
    codec = TextCodec.load(model)
    assert codec is not None
    assert found["channels"] == channel_dicts(codec, found["token_ids"])
    assert set(found["channels"][0]) == {"channel", "text", "role", "recipient", "content_type", "complete"}
    codec.close()
    assert "channels" not in answer(*common, "--json")
    assert "channels" not in answer(*common, "--chat", "--stop", "zzz", "--json")
    result = lowlat(*common, "--chat")
    assert result.exit_code == 0 and "24 tokens" in result.stderr
