"""Settings of `lowlat serve`: one name everywhere, one order of precedence, nothing unknown let through."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from lowlat.cli.commands.serve import command as serve_command
from lowlat.errors import ConfigError
from lowlat.ipc.limits import Limits
from lowlat.options.declaration import KINDS, options_of
from lowlat.options.request import SamplingParams
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.serving.config import SETTINGS, ServeConfig, unknown_variables

ENDPOINT = {"XDG_RUNTIME_DIR": "/run/user/7"}


def gather(file: Path | None = None, environment: dict[str, str] | None = None, **options: object) -> ServeConfig:
    return ServeConfig.gather(options, {**ENDPOINT, **(environment or {})}, file)


def test_defaults_are_the_records_own() -> None:
    config = gather()
    assert config.limits() == Limits()
    assert RuntimeConfig(**config.runtime_options()) == RuntimeConfig()
    assert config.speculation(Path("/h")) == SpeculativeConfig(model=Path("/h"))
    assert config["endpoint"] == "ipc:///run/user/7/lowlat/default.sock"
    assert set(config.sources.values()) == {"default"}


def test_every_limit_and_option_of_a_runtime_and_of_speculation_can_be_set() -> None:
    assert {field.name for field in dataclasses.fields(Limits)} <= set(SETTINGS)
    assert all(setting.help for setting in SETTINGS.values())
    # the server has a queue of its own, traces would log tokens, and it gives no logits of prompts
    own = {"max_queue", "traces", "prompt_logits"}
    assert {f.name for f in dataclasses.fields(RuntimeConfig)} - set(SETTINGS) - own == set()
    # --draft-model names the model of SpeculativeConfig, and -S 0 is how to switch it off
    unset = {f.name for f in dataclasses.fields(SpeculativeConfig)} - set(SETTINGS)
    assert unset == {"enabled"}


def test_ngram_drafts_need_no_head() -> None:
    """With the bundled model, too, which has one."""
    config = gather(method="ngram", environment={"LOWLAT_PROMPT_LOOKUP_MAX": "3"}, num_speculative_tokens=5)
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=5, prompt_lookup_max=3)
    assert config.speculation(Path("/h")) == expected
    with pytest.raises(ConfigError, match="model is an option of method 'eagle3', and method is 'ngram'"):
        gather(method="ngram", environment={"LOWLAT_HEAD": "/h"})
    with pytest.raises(ConfigError, match="prompt_lookup_min is an option of method 'ngram'"):
        gather(prompt_lookup_min=1)


def test_options_win_over_the_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('max_queue = 1\nmax_clients = 2\nmax_batch = 3\nmodel = "here"\nprefix_reuse = false\n')
    config = gather(file, {"LOWLAT_MAX_QUEUE": "10", "LOWLAT_MAX_CLIENTS": "20", "LOWLAT_DRAIN_S": ""}, max_queue=100)
    assert config.limits() == Limits(max_queue=100, max_clients=20)
    assert config["max_batch"] == 3 and config["prefix_reuse"] is False
    assert config["model"] == tmp_path / "here"  # next to the file, wherever the server is started
    assert [config.sources[name] for name in ("max_queue", "max_clients", "max_batch", "drain_s")] == [
        "option",
        "environment",
        str(file),
        "default",
    ]


def test_the_environment_speaks_every_kind() -> None:
    config = gather(
        environment={
            "LOWLAT_ENDPOINT": "ipc:///x/y.sock",
            "LOWLAT_ALLOW_UID": "1000, 1001",
            "LOWLAT_STRICT": "Yes",
            "LOWLAT_DRAIN_S": "3",
            "LOWLAT_CAPTURE_LAYERS": "2,18,33",
        }
    )
    assert config["endpoint"] == "ipc:///x/y.sock" and config["allow_uid"] == (1000, 1001)
    assert config.limits().drain_s == 3.0
    speculative = config.speculation(Path("/h"))
    assert speculative is not None and speculative.strict and speculative.capture_layers == (2, 18, 33)


def test_a_number_or_a_word_is_read_from_every_place(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    for text, value in (("40", 40.0), ('"free"', "free")):
        file.write_text(f"kv_cache_gib = {text}\n")
        assert gather(file)["kv_cache_gib"] == value
        environment = {"LOWLAT_KV_CACHE_GIB": text.strip('"')}
        assert gather(environment=environment).runtime_options()["kv_cache_gib"] == value
    with pytest.raises(ConfigError, match=r"^LOWLAT_KV_CACHE_GIB must be a number or 'free', got 'all'$"):
        gather(environment={"LOWLAT_KV_CACHE_GIB": "all"})
    with pytest.raises(ConfigError, match=r"^kv_cache_gib 'free' and kv_blocks 9 both size the KV cache"):
        gather(file, kv_blocks=9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_quue = 1", "unknown setting 'max_quue'"),
        ("[limits]\nmax_queue = 1", "[limits] is a table; settings stand without one: name = value"),
        ("http = 8000", "http must be a string, got 8000; in quotes: '8000'"),
        ("http_socket_mode = 660", "http_socket_mode must be one of '600', '660', '666', got 660"),
        ("max_queue = 1.5", "max_queue must be an integer, got 1.5"),
        ("max_queue = true", "max_queue must be an integer, got True"),
        ('kv_cache_gib = "all"', "kv_cache_gib must be a number or 'free', got 'all'"),
        ("strict = 1", "strict must be true or false, got 1"),
        ("endpoint = 1", "endpoint must be a string, got 1"),
        ('log_format = "xml"', "log_format must be one of text, json, got 'xml'"),
        ("method = []", "'dspark', 'draft_model', 'auto', got []"),
        ('allow_uid = ["root"]', "allow_uid must be a list of integers"),
        ("max_queue = ", "is no TOML"),
    ],
)
def test_a_file_is_refused_by_its_name_and_the_settings(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        gather(file)
    assert message in str(refused.value) and str(file) in str(refused.value)


def test_values_out_of_range_name_themselves() -> None:
    with pytest.raises(ConfigError, match="max_queue must be from 0"):
        gather(max_queue=-1)
    with pytest.raises(ConfigError, match="max_batch must be from 1 to 32"):
        gather(max_batch=33)
    with pytest.raises(ConfigError, match="num_speculative_tokens must be from 0 to 7"):
        gather(num_speculative_tokens=8)
    with pytest.raises(ConfigError, match="LOWLAT_MAX_QUEUE must be an integer, got 'many'"):
        gather(environment={"LOWLAT_MAX_QUEUE": "many"})
    with pytest.raises(ConfigError, match=r"must be ipc:///a/path\.sock or tcp://host:port"):
        gather(endpoint="udp://x")
    with pytest.raises(ConfigError, match=r"draft_window \(option\) needs a draft model"):
        gather(model=Path("/m"), draft_window=64)


def test_without_a_draft_model_a_depth_of_zero_is_plain_decoding() -> None:
    assert gather(model=Path("/m")).speculation(Path("/h")) is None
    assert gather(model=Path("/m"), num_speculative_tokens=0).speculation(Path("/h")) is None
    bundled = gather(num_speculative_tokens=0).speculation(Path("/h"))
    assert bundled == SpeculativeConfig(Path("/h"), num_speculative_tokens=0)
    with pytest.raises(ConfigError, match=r"strict \(option\) needs a draft model \(--draft-model DIR\)"):
        gather(model=Path("/m"), num_speculative_tokens=0, strict=True)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens \(environment\) needs a draft model"):
        gather(model=Path("/m"), environment={"LOWLAT_NUM_SPECULATIVE_TOKENS": "1"})


def test_a_draft_model_has_two_names(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    for name in ("head", "draft_model"):
        file.write_text(f'{name} = "mine"\n')
        assert gather(file)["head"] == tmp_path / "mine"
        assert gather(file, {f"LOWLAT_{name.upper()}": "/other"})["head"] == Path("/other")
        assert unknown_variables({f"LOWLAT_{name.upper()}": "/other"}) == {}
    file.write_text('head = "mine"\ndraft_model = "mine"\n')
    with pytest.raises(ConfigError, match=r"draft_model and .*head are the same setting"):
        gather(file)
    with pytest.raises(ConfigError, match="LOWLAT_DRAFT_MODEL and LOWLAT_HEAD are the same setting"):
        gather(environment={"LOWLAT_HEAD": "/a", "LOWLAT_DRAFT_MODEL": "/b"})


def test_every_option_is_declared_once_and_found_everywhere() -> None:
    parameters = {parameter.name: parameter for parameter in serve_command.params}
    for name, option in SETTINGS.items():
        assert option.kind in KINDS and option.help.endswith(".")
        found = parameters[f"refused_{name}" if option.rare else name]
        assert isinstance(found, click.Option) and found.hidden == option.rare
        spellings = {*found.opts, *found.secondary_opts}
        assert {option.flag, *option.flags} <= spellings
        assert f"--{name.replace('_', '-')}" in spellings
    for record in (SamplingParams, SpeculativeConfig, RuntimeConfig):
        assert all(f"{option.name}  {option.help}" in str(record.__doc__) for option in options_of(record))


def test_a_peer_has_an_interval_to_answer_a_heartbeat() -> None:
    Limits(heartbeat_interval_s=2.0, heartbeat_timeout_s=4.0)
    with pytest.raises(
        ConfigError, match=r"heartbeat_timeout_s \(3.9\) must be at least twice heartbeat_interval_s \(2\)"
    ):
        Limits(heartbeat_interval_s=2.0, heartbeat_timeout_s=3.9)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        gather(tmp_path / "absent")
    with pytest.raises(ConfigError, match="is not a regular file"):
        gather(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        gather(tmp_path / "pipe")


def test_what_is_shown_can_be_read_back(tmp_path: Path) -> None:
    config = gather(model=Path('/a "b"\\c\n'), head=Path("/h"), allow_uid=(5, 6), drain_s=2.5, strict=True)
    file = tmp_path / "shown.toml"
    file.write_text(config.to_toml())
    assert gather(file).values == config.values


def test_slips_in_the_environment_are_found() -> None:
    others = dict.fromkeys(("LOWLAT_MODEL", "PATH", "LOWLAT_KERNEL_CACHE", "LOWLAT_SERVER_UID"), "x")
    assert unknown_variables({"LOWLAT_MAX_QUUE": "1", "LOWLAT_XYZ": "2", **others}) == {
        "LOWLAT_MAX_QUUE": "; did you mean 'LOWLAT_MAX_QUEUE'?",
        "LOWLAT_XYZ": "",
    }


def test_a_value_out_of_its_range_is_told_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("max_queue = -1\n")
    with pytest.raises(ConfigError, match=re.escape(f"{file}: max_queue must be from 0")):
        gather(file)
    with pytest.raises(ConfigError, match=r"^LOWLAT_MAX_QUEUE: max_queue must be from 0"):
        gather(None, {"LOWLAT_MAX_QUEUE": "-1"})
    with pytest.raises(ConfigError, match=r"^max_queue must be from 0"):
        gather(max_queue=-1)


def test_configuration_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from lowlat.serving.config import ServeConfig; import lowlat.serving.logs\n"
        "ServeConfig.gather({}, {}); print(sorted({'torch', 'numpy', 'numba'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout == "[]\n"
