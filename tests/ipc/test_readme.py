"""Every example of serving in the READMEs runs, against a real server of the bundled model."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import eventually
from serving_process import Serving, gateway_of, serving

from lowlat.cli import COMMANDS
from lowlat.ipc import Client
from lowlat.ipc.wire import (
    Append,
    Cancel,
    Credit,
    End,
    Finish,
    Hello,
    Sampling,
    Submit,
    Taken,
    Tokens,
    encode,
    pack_tokens,
)
from lowlat.serving.config import ServeConfig

README = Path(__file__).resolve().parents[2] / "lowlat" / "USING.md"
SECTION = "## From other processes"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def section() -> str:
    return README.read_text().split(SECTION)[1].split("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in BLOCK.findall(text) if found == language]


PAGE, WIRE = README.parent / "ipc" / "README.md", README.parent / "ipc" / "WIRE.md"
SERVING = section() + PAGE.read_text() + WIRE.read_text()
PYTHON = blocks(SERVING, "python")
SHELL = [line for block in blocks(SERVING, "") for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("run"), ["--http", "0"]) as started:
        yield started


def run(
    command: list[str], environment: dict[str, str], folder: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_there_is_something_to_run() -> None:
    assert len(PYTHON) == 5 and len(SHELL) == 7


@pytest.mark.second
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_examples_run(server: Serving, number: int) -> None:
    done = run([sys.executable, "-W", "error", "-c", PYTHON[number]], server.environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert len(done.stdout) > 20, done.stdout
    if "max_tokens=10**6" in PYTHON[number]:
        assert "refused: prompt of 3 tokens and max_tokens 1000000 exceed 2048 (max_context)" in done.stdout


@pytest.mark.second
@pytest.mark.parametrize("line", [line for line in SHELL if "serve" not in line and "tcp" not in line])
def test_shell_examples_run(server: Serving, line: str) -> None:
    lowlat = f"{shlex.quote(sys.executable)} -m lowlat.cli"
    done = run(["sh", "-c", re.sub(r"\blowlat\b", lowlat, line)], server.environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 20


@pytest.mark.second
def test_serving_over_tcp_with_curve_keys_runs(tmp_path: Path) -> None:
    made, started, asked = [line for line in SHELL if "keys" in line]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    lowlat = [sys.executable, "-P", "-m", "lowlat.cli"]
    done = run([*lowlat, *shlex.split(made)[1:]], environment, tmp_path)
    assert done.returncode == 0, done.stderr
    assert {oct(path.stat().st_mode & 0o077) for path in (tmp_path / "keys").rglob("*")} == {"0o0"}
    arguments = started.replace("0.0.0.0:5577", "0.0.0.0:*")
    with serving(tmp_path, shlex.split(arguments)[2:]) as server:
        port = server.ready["endpoint"].rpartition(":")[2]
        local = asked.replace("192.0.2.7:5577", f"127.0.0.1:{port}")
        client = tmp_path / "client" / "keys"
        client.mkdir(parents=True)
        for name in ("server.key", "client.key_secret"):  # what the client's folder needs, and no more
            (tmp_path / "keys" / name).rename(client / name)
        answered = run([*lowlat, *shlex.split(local)[1:], "--max-tokens", "4"], environment, client.parent)
        assert answered.returncode == 0 and answered.stdout.strip(), answered.stderr
        bare = local.replace("--curve-keys keys", "")
        without = run([*lowlat, *shlex.split(bare)[1:]], environment, client.parent)
        assert without.returncode == 1 and not without.stdout, without.stderr


@pytest.mark.second
def test_examples_over_http_run(server: Serving) -> None:
    text = README.read_text().split("## Over HTTP")[1].split("\n## ")[0]
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    facts = server.ready["http"]
    assert facts["page"] == f"{facts['url']}/#key={facts['key']}"
    environment = {**server.environment, "LOWLAT_API_KEY": facts["key"]}
    (asked,) = re.findall(r"^curl .*?\'$", text, re.MULTILINE | re.DOTALL)
    (example,) = blocks(text, "python")
    metrics = 'curl -sS http://127.0.0.1:8000/metrics -H "Authorization: Bearer $LOWLAT_API_KEY"'
    said = []
    for command in (["sh", "-c", asked], [sys.executable, "-c", example], ["sh", "-c", metrics]):
        command[-1] = command[-1].replace("http://127.0.0.1:8000", facts["url"])
        done = run(command, environment)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0].endswith("data: [DONE]\n\n") and said[0].count("data: {") > 2
    with Client(server.endpoint) as client:
        chunks = list(client.generate("The President shall", max_tokens=32, temperature=0.0))
    assert said[1] == "".join(chunk.text for chunk in chunks) + "\n" and len(said[1]) > 20
    assert 'lowlat:request_success_total{finished_reason="length",model_name="lowlat-demo"}' in said[2]


@pytest.mark.second
def test_a_server_outlives_its_gateway(server: Serving) -> None:
    """The last test of this server."""
    os.kill(gateway_of(server.process.pid), signal.SIGKILL)
    eventually(lambda: "the HTTP gateway ended with exit code -9" in server.log.read_text())
    with Client(server.endpoint) as client:
        assert client.health().state == "serving"


def test_the_settings_shown_exist(tmp_path: Path) -> None:
    (example,) = blocks(PAGE.read_text(), "toml")
    (tmp_path / "serve.toml").write_text(example)
    (tmp_path / "models" / "draft").mkdir(parents=True)  # else it could be a repository's name
    settings = ServeConfig.gather({}, {}, tmp_path / "serve.toml")
    assert settings["head"] == tmp_path / "models" / "draft"
    assert {name for name, source in settings.sources.items() if source != "default"} == {
        "head" if name == "draft_model" else name for name in tomllib.loads(example)
    }
    assert {"serve", "chat", "top", "generate"} <= set(COMMANDS)


def test_the_pages_bytes_are_the_codecs_own() -> None:
    rows = dict(re.findall(r"^\| (.*?) \| `([0-9a-f ]+)` \|$", WIRE.read_text(), re.MULTILINE))
    expected = [
        Hello(name="mine"),
        Submit(number=0, credit=1024, text="Hi", sampling=Sampling(max_tokens=8)),
        Tokens(0, 0, pack_tokens([72, 105]), "Hi"),
        Credit(0, 512),
        Cancel(0),
        End(0, 1, 2, "length"),
        Submit(number=1, credit=1024, open=True),
        Append(1, "Hi"),
        Finish(1, speculative=True),
        Finish(1),
        Taken(1, 131072),
    ]
    assert [bytes.fromhex(row) for row in rows.values()] == [encode(message) for message in expected]
