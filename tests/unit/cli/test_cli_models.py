"""Commands that are given a model by name, and what they say where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_calls import answer, lowlat, refusal
from click.testing import CliRunner
from hub_server import DEMO, Hub, hub_here

from lowlat.cli import cli
from lowlat.cli.commands import chat as chat_module
from lowlat.serving.config import ServeConfig

PAIR = ("some/target", "--head", "some/head")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_here(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.mark.second
def test_a_download_is_inspected_before_it_is_made_and_then_used(hub: Hub, tmp_path: Path) -> None:
    planned = answer("inspect", *PAIR, "--json")
    files = [file for part in ("target", "head") for file in (DEMO / part).glob("*.safetensors")]
    texts = [DEMO / "target" / name for name in ("tokenizer.json", "tokenizer_config.json")]
    assert planned["download"]["bytes"] == sum(file.stat().st_size for file in (*files, *texts))
    assert planned["download"]["cache"] == str(tmp_path / "cache") and planned["directory"] == "some/target"
    assert all("bytes=0-" in line for line in hub.fetched(".safetensors"))
    assert "to fetch: 24." in lowlat("inspect", *PAIR).stdout
    drafted = answer("inspect", "draft-model", "some/head", "--target", "some/target", "--json")
    assert drafted["download"]["files"] == 1 and drafted["directory"] == "some/head"

    bundled = answer("generate", "--prompt", "The President shall", "--max-tokens", 8, "--json")
    named = answer("generate", *PAIR, "The President shall", "--max-tokens", 8, "--json")
    assert named["token_ids"] == bundled["token_ids"] and "eagle_speculation" in named["metrics"]
    here = answer("inspect", "model", *PAIR, "--json")
    same = ("memory", "geometry", "parts", "files", "kv")
    assert here["download"] is None and {key: here[key] for key in same} == {key: planned[key] for key in same}


def test_what_was_pulled_is_not_fetched_again(hub: Hub) -> None:
    pulled = answer("pull", *PAIR, "--json")
    weights = sum(file.stat().st_size for file in (DEMO / "target").glob("*.safetensors"))
    assert pulled["model"]["bytes"] > weights and Path(pulled["draft_model"]["directory"]).is_dir()
    before = len(hub.fetched(".safetensors"))
    assert pulled["model"]["directory"] in lowlat("pull", *PAIR).stdout
    assert len(hub.fetched(".safetensors")) == before
    assert "no such directory; expected a Hugging Face model directory" in refusal("pull", "/no/where")


def test_other_commands_take_names(hub: Hub, tmp_path: Path) -> None:
    hub.gated = True
    ids = tmp_path / "ids"
    ids.write_text("1")
    for arguments in (
        ["generate", "some/target", "Hello"],
        ["chat", "some/target"],
        ["inspect", "some/target"],
        ["compare", "some/target"],
        ["doctor", "--target", "some/target", "--head", "some/head"],
        [
            "draft-model",
            "shrink",
            "some/head",
            "--out",
            tmp_path / "x",
            "--draft-vocab",
            9,
            "--token-ids",
            tmp_path / "ids",
        ],
    ):
        assert "is gated: accept its terms" in refusal(*arguments)
    hub.gated = False
    head = ("generate", DEMO / "target", "--prompt", "x", "--max-tokens", 2, "--head", "some/heed")
    assert "warning: speculation is off" in lowlat(*head).stderr
    assert "some/heed: there is no such directory" in refusal(*head, "--strict")


def test_a_file_of_settings_names_directories_beside_it_and_repositories(tmp_path: Path) -> None:
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "serve.toml").write_text('model = "own/model"\nhead = "some/head@v1"\ntree = "some/tree"\n')
    with pytest.raises(Exception, match=str(tmp_path / "some" / "tree")):
        ServeConfig.gather({}, {}, tmp_path / "serve.toml")
    (tmp_path / "serve.toml").write_text('model = "own/model"\nhead = "some/head@v1"\n')
    found = ServeConfig.gather({}, {}, tmp_path / "serve.toml")
    assert found["model"] == tmp_path / "own" / "model" and found["head"] == Path("some/head@v1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Hello"], "'Hello' stands where MODEL does, and there is no prompt; type: lowlat generate --prompt Hello"),
        (["it's me"], """or: lowlat generate ORG/NAME 'it'"'"'s me'"""),
        (["some/target"], 'in one of --prompt, --prompt-file and --token-ids: lowlat generate some/target "Hello"'),
        (["some/target", "Hello", "--prompt", "x"], "give the prompt as PROMPT after MODEL, or in one of"),
        (["some-target", "Hello"], "expected a Hugging Face model directory, or ORG/NAME of a repository"),
    ],
)
def test_generate_says_what_to_type(arguments: list[str], message: str) -> None:
    assert message in refusal("generate", *arguments)


def test_a_chat_that_finds_nobody_says_whom_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowlat.errors import ServerGone

    def gone(*_: object) -> None:
        raise ServerGone("no lowlat server answers")

    monkeypatch.setattr(chat_module, "connected", gone)
    message = refusal("chat", code=1)
    assert "no lowlat server answers; or name a model (`lowlat chat ORG/NAME`)" in message and "--demo" in message
    assert refusal("chat", "--endpoint", "ipc:///x", code=1) == "error: no lowlat server answers"
    assert "MODEL and --demo run here" in refusal("chat", DEMO / "target", "--endpoint")
    assert "not both" in refusal("chat", DEMO / "target", "--demo")
    assert "--device is settled" in refusal("chat", "--device", "cpu")

    monkeypatch.setattr("lowlat.cli.commands.demo.chat_model", lambda _: DEMO / "target")
    results = [
        CliRunner().invoke(
            cli, ["chat", whom, "--head", str(DEMO / "head"), "--max-tokens", "8"], input="The President\n"
        )
        for whom in ("--demo", str(DEMO / "target"))
    ]
    assert results[0].stdout == results[1].stdout != ""
    assert "target has no chat template: each line is continued" in results[0].stderr
    asked: list[str] = []
    monkeypatch.setattr("click.confirm", lambda text, **_: asked.append(text))
    with pytest.raises(ServerGone, match="nobody to talk with: name a model"), monkeypatch.context() as terminal:
        for stream in ("stdin", "stdout"):
            terminal.setattr(f"sys.{stream}", _Terminal())
        chat_module._offer(ServerGone("none"))
    assert asked == ["Fetch a small chat model instead, once (93 MB), and talk with it?"]


class _Terminal:
    def isatty(self) -> bool:
        return True


def test_help_of_chat_lists_what_may_be_typed_in_it() -> None:
    shown = lowlat("chat", "--help").stdout
    for part in ("/system TEXT", "/retry", "--temperature", "Speculation:", "--draft-model", "--demo"):
        assert part in shown
