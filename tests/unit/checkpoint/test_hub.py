"""Models by name: fetched once, whole or not at all, refused before their weights are, and explained."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, DEMO, Hub, hub_here

from lowlat.checkpoint import hub as hub_module
from lowlat.checkpoint.hub import fetch, outline
from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError
from lowlat.models.target import fetch_target, open_target
from lowlat.options.model_names import Repository, find_repository
from lowlat.options.speculative import SpeculativeConfig
from lowlat.serving.engine import RuntimeEngine
from lowlat.text import TextCodec


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_here(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Qwen/Qwen3-0.6B", Repository("Qwen/Qwen3-0.6B")),
        ("a/b@v1", Repository("a/b", "v1")),
        ("a/b@refs/pr/3", Repository("a/b", "refs/pr/3")),
        *(
            (text, None)
            for text in (
                "demo",
                "/a/b",
                "./a/b",
                "../b",
                "~/b",
                "a/b/c",
                "a/b@",
                "a/b@/tmp/x",
                "a/b@../x",
                "a b/c",
                "Hello",
                "",
            )
        ),
    ],
)
def test_names_of_repositories(text: str, found: Repository | None) -> None:
    assert find_repository(text) == found == find_repository(Path(text) if found else text)


def test_a_directory_wins_over_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some/target").mkdir(parents=True)
    assert find_repository("some/target") is None and fetch("some/target") == Path("some/target")


@pytest.mark.second
def test_a_pair_is_fetched_once_and_then_needs_no_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    told: list[tuple[int, int]] = []
    head = SpeculativeConfig(model="some/head", num_speculative_tokens=2, strict=True)

    def run() -> Any:
        with Runtime.load("some/target", head, downloaded=lambda *b: told.append(b), max_context=512) as runtime:
            runtime.submit([1, 2, 3])
            tokens = [token for _ in range(4) for output in runtime.step() for token in output.token_ids]
            return tokens, RuntimeEngine(runtime).info.model

    first = run()
    assert first[1] == "some/target"
    sizes = [sum(file.stat().st_size for file in (DEMO / part).glob("*.safetensors")) for part in ("target", "head")]
    assert [pair for pair in told if pair[0] == pair[1]] == [(size, size) for size in sizes]
    assert len(hub.fetched(".safetensors")) == 4  # the head's header before it
    assert not hub.fetched(".bin") and not hub.fetched(".md") and hub.fetched("tokenizer.json")
    hub.asked.clear()
    assert run() == first
    assert hub.asked == [f"GET /api/models/some/{name}/revision/main" for name in ("target", "head")]
    hub.asked.clear()
    fetch(f"some/target@{COMMIT}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run() == first and not hub.asked
    with pytest.raises(ConfigError, match=r"some/other is neither a directory nor whole in the cache.*HF_HUB_OFFLINE"):
        fetch("some/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, "lowlat"):
        assert run() == first
    assert "some/target: taken from the cache as it is" in caplog.text


def test_additional_chat_templates_are_fetched_and_no_other_folder_is(hub: Hub) -> None:
    folder = hub.add("some/talker", DEMO / "target")
    for name in ("additional_chat_templates/tool_use.jinja", "additional_chat_templates/a/b.jinja", "other/x.jinja"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{{ tools|length }}")
    directory = fetch("some/talker")
    assert [path.name for path in directory.rglob("*.jinja")] == ["tool_use.jinja"]
    codec = TextCodec.load(directory)
    assert codec is not None and codec.takes_tools
    codec.close()


def test_a_broken_transfer_goes_on_where_it_broke(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.cut = 1_000_000
    directory = fetch("some/head@v1")
    assert (directory / "model.safetensors").read_bytes() == (DEMO / "head" / "model.safetensors").read_bytes()
    first, second = hub.fetched("model.safetensors")
    assert "bytes=" not in first and 0 < int(second.partition("bytes=")[2].rstrip("-")) <= 1_000_000


def test_a_download_that_ended_midway_goes_on_with_the_file_that_is_missing(hub: Hub) -> None:
    class EndError(Exception):
        pass

    def end(done: int, total: int) -> None:
        if len(hub.fetched("00002-of-00002.safetensors")):
            raise EndError

    with pytest.raises(EndError):
        fetch("some/target", progress=end)
    hub.asked.clear()
    directory = fetch("some/target")
    assert not hub.fetched("00001-of-00002.safetensors") and hub.fetched("00002-of-00002.safetensors")
    assert open_target(directory).weights.loaded().keys() == open_target(DEMO / "target").weights.loaded().keys()


def test_what_does_not_run_is_refused_before_its_weights_are_fetched(hub: Hub) -> None:
    config = json.loads((DEMO / "target" / "config.json").read_text())
    hub.add("other/family", DEMO / "target", config_json=json.dumps({**config, "model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="model_type 'gpt2' is not implemented; implemented: llama"):
        Runtime.load("other/family")
    half = config | {"dtype": "float16", "torch_dtype": "float16"}
    hub.add("other/half", DEMO / "target", config_json=json.dumps(half))
    with pytest.raises(ConfigError, match="stored in 'float16'"):
        fetch_target("other/half")
    quantised = json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}})
    (hub.add("other/quantised", DEMO / "target") / "hf_quant_config.json").write_text(quantised)
    with pytest.raises(ConfigError, match="quant_algo 'W4A8_AWQ' is not implemented"):
        fetch_target("other/quantised")
    draft = json.loads((DEMO / "head" / "config.json").read_text())
    hub.add("other/head", DEMO / "head", config_json=json.dumps({**draft, "hidden_size": draft["hidden_size"] * 2}))
    with pytest.raises(ConfigError, match="other/head"):
        Runtime.load(DEMO / "target", SpeculativeConfig(model="other/head", strict=True))
    assert [line.split()[-1][:8] for line in hub.fetched(".safetensors")] == ["bytes=0-"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("some/tarrget", {}, "some/tarrget: there is no such directory, and no such repository on http://127"),
        ("some/target@v2", {}, "some/target on .* has no revision 'v2'; give a branch, a tag or a commit after the @"),
        ("some/target", {"gated": True}, "some/target is gated: accept its terms at http://127.* and set HF_TOKEN"),
        ("some/target", {"token": "secret"}, "without a token that may .status 401.: set HF_TOKEN"),
        ("some/target", {"page": b"<html>Sign in"}, "could not be fetched from http://127.*JSONDecodeError"),
        ("some/target", {"page": b"{}"}, "could not be fetched from http://127.*KeyError"),
        ("some/pickle", {}, r"found neither: found 'model.bin': pickles are never read"),
        ("some/target", {"page": b"[]"}, "could not be fetched from http://127.*describes no repository"),
        ("some/target", {"page": b'{"id": 5, "sha": 7}'}, "commit is 7, which is no commit"),
        ("some/target", {"page": json.dumps({"id": "x", "sha": "../up"}).encode()}, "commit is '../up'"),
        ("some/target", {"page": json.dumps({"id": "x", "sha": COMMIT, "siblings": 5}).encode()}, "could not be"),
        ("some/target", {"page": b'{"id": "x", "siblings": [5]}'}, "describes no repository"),
        ("some/target", {"page": b"[" * 100_000}, "describes no repository: RecursionError"),
        ("some/target", {"listed": [{"rfilename": 7}]}, "a file with the name 7, which is no name"),
        ("some/target", {"listed": [{"rfilename": "x", "size": -1}]}, "'x' with the size -1, which is no number"),
        ("some/target", {"listed": [{"rfilename": "x", "size": "9"}]}, "'x' with the size '9'"),
        ("some/target", {"listed": [{"rfilename": "x", "size": 1 << 60}]}, "'x' with the size 1152921504606846976"),
        ("some/adapter", {}, r"has no config.json: it is an adapter \(LoRA\)"),
        ("some/gguf", {}, "has no config.json: found 'x-Q4_K_M.gguf': GGUF is not read"),
        ("some/mistral", {}, "found neither: found 'consolidated.safetensors', Mistral's own layout"),
        ("some/nothing", {}, "has no config.json"),
    ],
)
def test_refusals_say_what_to_do(hub: Hub, name: str, change: dict[str, Any], message: str) -> None:
    hub.add("some/pickle", config_json="{}", model_bin="x")
    hub.add("some/nothing", README_md="empty")
    hub.add("some/mistral", config_json="{}", consolidated_safetensors="x")
    (hub.add("some/adapter") / "adapter_config.json").write_text("{}")
    (hub.add("some/gguf") / "x-Q4_K_M.gguf").write_text("x")
    for key, value in change.items():
        setattr(hub, key, value)
    with pytest.raises(ConfigError, match=message):
        fetch(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"etag": '"../../../../../stolen"'}, r"config.json: .*ETag '../../../../../stolen'; expected 40 or 64 hex"),
        ({"etag": "/tmp/lowlat-stolen"}, "ETag 'tmp/lowlat-stolen'"),
        ({"etag": '"c0ffee"'}, "ETag 'c0ffee'"),
        ({"headers": {"X-Linked-Etag": '"../../stolen"'}}, "ETag '../../stolen'"),
        ({"commit": "../../../stolen"}, "X-Repo-Commit '../../../stolen'"),
        ({"headers": {"X-Xet-Hash": "../stolen", "X-Xet-Refresh-Route": "/x"}}, "X-Xet-Hash '../stolen'"),
        ({"headers": {"Location": "file:///etc/passwd"}}, "sends to 'file:///etc/passwd'"),
        ({"num_added": 1}, r"config.json: the hub lists \d+ bytes, and answers that it has \d+"),
    ],
)
def test_what_a_hub_answers_becomes_no_path(
    hub: Hub, change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in change.items():
        setattr(hub, key, value)
    with pytest.raises(ConfigError, match=message):
        fetch("some/head")
    assert not [path for path in tmp_path.parent.rglob("*stolen*") if path != tmp_path]
    assert not list((tmp_path / "cache").rglob("config.json")) and not Path("/tmp/lowlat-stolen").exists()


def test_a_file_that_is_missing_names_no_folder_either(hub: Hub, tmp_path: Path) -> None:
    hub.listed = [{"rfilename": "generation_config.json", "size": 5}]
    fetched = [path for path in (hub.repositories["some/head"] / "generation_config.json",) if path.exists()]
    assert not fetched
    with pytest.raises(ConfigError):
        fetch("some/head")
    hub.commit = "../../stolen"
    with pytest.raises(ConfigError, match="X-Repo-Commit"):
        fetch("some/head")
    assert not list(tmp_path.rglob("*stolen*"))


def test_names_that_lead_out_are_left_out_and_hashes_of_both_kinds_taken(hub: Hub) -> None:
    names = (
        "../up.jinja",
        "/tmp/up",
        "additional_chat_templates/../x.jinja",
        "a\\b",
        "additional_chat_templates/t.jinja",
    )
    hub.listed = [{"rfilename": name, "size": 1} for name in names]
    folder = hub.repositories["some/head"] / "additional_chat_templates"
    folder.mkdir()
    (folder / "t.jinja").write_text("x")
    for hash_ in ('"' + "A0" * 20 + '"', 'W/"' + "b1" * 32 + '"'):
        hub.etag = hash_
        with outline("some/head") as found:
            assert found.download is not None
    hub.etag = None
    directory = fetch("some/head")
    assert (directory / "additional_chat_templates" / "t.jinja").read_text() == "x"


def test_a_hub_that_hangs_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    hub.silent.clear()
    with pytest.raises(ConfigError, match=r"could not be fetched from .*ReadTimeout"):
        fetch("some/target")


def test_a_full_disk_is_told_before(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "SPARE_BYTES", 1 << 62)
    with pytest.raises(ConfigError, match=r"some/target takes 0\.0\d GB, and .* are free in .*cache; .*HF_HOME"):
        fetch("some/target")
    assert not hub.fetched("model.safetensors")


def test_an_outline_has_headers_and_no_weights(hub: Hub) -> None:
    whole = open_target(DEMO / "target")
    files = list((DEMO / "target").glob("*.safetensors"))
    with outline("some/target") as found:
        target = open_target(found.directory)
        assert target.config == whole.config and target.weights.shapes().keys() == whole.weights.shapes().keys()
        assert found.download is not None and found.download.files == len(files) + 2
        assert found.download.bytes > sum(file.stat().st_size for file in files)
        assert all((found.directory / file.name).stat().st_size == file.stat().st_size for file in files)
    assert not found.directory.exists()
    assert all("bytes=0-" in line for line in hub.fetched(".safetensors"))
    fetch("some/target")
    with outline("some/target") as found:
        assert found.download is None and open_target(found.directory).weights.loaded()


@pytest.mark.second
def test_the_variables_of_huggingface_hub_hold(hub: Hub, tmp_path: Path) -> None:
    hub.token = "secret"
    program = "from lowlat.checkpoint.hub import fetch; print(fetch('some/head'))"
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_TOKEN": "secret"}
    environment["HF_HOME"] = str(tmp_path / "home")
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    expected = tmp_path / "home" / "hub" / "models--some--head" / "snapshots" / COMMIT
    assert done.stdout.strip() == str(expected), done.stderr
    assert re.search("secret", done.stderr) is None


def test_a_file_that_goes_on_and_on_is_broken_off() -> None:
    """An answer without a length ends at what was listed, whichever bar counts its bytes."""
    from lowlat.checkpoint.hub import _bar_class, _library_bar
    from lowlat.checkpoint.hub_answers import checked

    bars = [_library_bar(), _bar_class(lambda done, total: None, 0)]
    for bar in bars:
        with checked("x.safetensors", 100):
            file = bar(disable=True)
            file.update(60)
            file.update(-60)  # what is fetched again
            file.update(100)
            with pytest.raises(ConfigError, match=r"x\.safetensors: the hub sends more bytes than it listed"):
                file.update(1)
    with checked("x.safetensors", 100):
        bars[0](disable=True, name="huggingface_hub.xet_get.transfer").update(1000)
