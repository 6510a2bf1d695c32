"""generation_config.json: what a model's authors advise, who takes it, and how it is turned off."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from cli_calls import answer, lowlat
from text_tokenizers import byte_level, write_directory
from tiny_models import make_target

from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError
from lowlat.models.advice import read_advice, sampling_defaults
from lowlat.options.request import SamplingParams
from lowlat.serving.config import ServeConfig

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}> "


@pytest.mark.parametrize(
    ("written", "advice"),
    [
        (QWEN, {key: value for key, value in QWEN.items() if key != "do_sample"}),
        ({"do_sample": True, "top_p": 0.95, "top_k": 64}, {"top_p": 0.95, "top_k": 64, "temperature": 1.0}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({**QWEN, "do_sample": False}, {"temperature": 0.0, "repetition_penalty": 1.05}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}, {}),
        ({"top_k": -1, "temperature": None, "min_p": 0.05}, {"min_p": 0.05}),
        ({"bos_token_id": 0, "eos_token_id": 0, "max_new_tokens": 2048}, {}),
    ],
)
def test_what_is_advised(written: dict[str, Any], advice: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert read_advice(tmp_path) == advice
    assert sampling_defaults(tmp_path, None) == sampling_defaults(tmp_path, "model") == advice
    assert sampling_defaults(tmp_path, "lowlat") == sampling_defaults(tmp_path, "model", strict=True) == {}


def test_advice_that_cannot_be_taken_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_advice(tmp_path) == {}
    written = {"temperature": -1.0, "top_p": "much", "top_k": True, "min_p": 1e400, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(written).replace("Infinity", "7"))
    with caplog.at_level(logging.WARNING, "lowlat"):
        assert read_advice(tmp_path) == {"repetition_penalty": 1.1}
    for name in ("temperature = -1.0", "top_p = 'much'", "top_k = True", "min_p = 7"):
        assert name in caplog.text
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_advice(tmp_path)


def test_the_server_has_a_setting(tmp_path: Path) -> None:
    assert ServeConfig.gather({}, {})["sampling_defaults"] == "model"
    assert ServeConfig.gather({}, {"LOWLAT_SAMPLING_DEFAULTS": "lowlat"})["sampling_defaults"] == "lowlat"
    assert ServeConfig.gather({"default_max_tokens": 100}, {}).limits().default_max_tokens == 100
    with pytest.raises(ConfigError, match="sampling-defaults must be one of model, lowlat"):
        ServeConfig.gather({"sampling_defaults": "vllm"}, {})


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose authors advise a temperature at which nothing is greedy."""
    directory = tmp_path_factory.mktemp("talker")
    make_target(directory, "llama", vocab_size=byte_level().get_vocab_size(), num_hidden_layers=2)
    write_directory(directory, byte_level(), chat_template=TEMPLATE)
    path = directory / "generation_config.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**known, "do_sample": True, "temperature": 8.0, "top_k": 200}))
    return directory


def test_generate_takes_the_advice_where_it_is_not_told(talker: Path) -> None:
    def tokens(*options: object) -> list[int]:
        found: list[int] = answer("generate", talker, "Hello", "--json", "--max-tokens", 8, "--ignore-eos", *options)[
            "token_ids"
        ]
        return found

    advised = tokens("--seed", 3)
    own = ("--sampling-defaults", "lowlat")
    assert advised == tokens("--seed", 3, "--temperature", 8, "--top-k", 200, *own)
    assert tokens(*own) == tokens("--temperature", 0) != advised
    with Runtime.load(talker, max_batch=1, max_context=128) as runtime:
        assert read_advice(runtime.directory) == {"temperature": 8.0, "top_k": 200}
        runtime.submit("Hello", SamplingParams(max_tokens=8, ignore_eos=True))  # a program's parameters are its own
        greedy = [token for _ in range(20) if runtime.busy for output in runtime.step() for token in output.token_ids]
    assert greedy == tokens("--temperature", 0)


def test_inspect_shows_the_advice(talker: Path) -> None:
    assert answer("inspect", "model", talker, "--json")["sampling_advice"] == {"temperature": 8.0, "top_k": 200}
    shown = lowlat("inspect", "model", talker).output
    assert "sampling that its authors advise, which --sampling-defaults takes or not: temperature 8, top_k 200" in shown


def test_a_local_chat_has_room_and_reserves_some(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowlat.cli.local import LocalModel
    from lowlat.ipc.limits import Limits

    with Runtime.load(talker, max_batch=1, max_context=128) as runtime:
        model = LocalModel(runtime, {"temperature": 0.5})
        said = [{"role": "user", "content": "Hi"}]
        assert runtime.codec is not None
        length = len(runtime.codec.encode(runtime.codec.apply_chat_template(said), add_special_tokens=False))

        def asked(prompt: Any, options: dict[str, Any]) -> SamplingParams:
            stream: Any = model.ask(prompt, options)._chunks
            stream.close()
            params: SamplingParams = stream._ticket.prepared.params
            return params

        params = [asked(said, {}), asked(said, {"max_tokens": 7, "temperature": 0.0}), asked("Hi", {"max_tokens": 9})]
        assert [each.max_tokens for each in params] == [128 - length, 7, 9]
        assert [each.temperature for each in params] == [0.5, 0.0, 0.5]
        monkeypatch.setattr(Limits, "default_max_tokens", 20)
        assert asked(said, {}).max_tokens == 20
