"""The gateway as new users open it: `lowlat serve --http` and `lowlat http`, asked with curl; how each process ends."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from served import eventually
from serving_process import serving

from lowlat.errors import ConfigError
from lowlat.serving import gateway

MODEL = "lowlat-demo"
KEY = "sk-of-the-environment"


def curl(url: str, key: str, body: Mapping[str, Any] | None = None) -> str:
    """Run curl and return its output."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    data = [] if body is None else ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    command = ["curl", "-sSN", "--max-time", "60", url, "-H", f"Authorization: Bearer {key}", *data]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def gateway_of(server: int) -> int:
    """The process of a server's gateway."""
    children = Path(f"/proc/{server}/task").glob("*/children")
    for pid in (int(pid) for file in children for pid in file.read_text().split()):
        if b"--parent" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no gateway")


@pytest.mark.second
def test_a_server_opens_a_gateway_and_outlives_it(tmp_path: Path, repository: Path) -> None:
    with serving(tmp_path, ["--http", "0"]) as server:
        facts = server.ready["http"]
        assert facts["page"] == f"{facts['url']}/#key={facts['key']}"
        text = curl(
            f"{facts['url']}/v1/completions",
            facts["key"],
            {"model": MODEL, "prompt": "The President shall", "max_tokens": 12, "temperature": 0, "stream": True},
        )
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert text.endswith("data: [DONE]\n\n") and events[-1]["choices"][0]["finish_reason"] == "length"
        assert len(events) > 2 and "".join(event["choices"][0]["text"] for event in events).strip()
        assert f'generation_tokens_total{{model_name="{MODEL}"}} 12.0' in curl(f"{facts['url']}/metrics", facts["key"])
        section = (repository / "lowlat" / "USING.md").read_text().split("## Over HTTP")[1].split("\n## ")[0]
        (asked,) = re.findall(r"^curl .*?\'$", section, re.MULTILINE | re.DOTALL)
        (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        environment = {**server.environment, "LOWLAT_API_KEY": facts["key"]}
        said = []
        for command in (["sh", "-c", asked], [sys.executable, "-c", example]):
            command[-1] = command[-1].replace("http://127.0.0.1:8000", facts["url"])
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
            said.append(done.stdout)
        assert said[0].endswith("data: [DONE]\n\n")
        greedy = {"model": MODEL, "prompt": "The President shall", "max_tokens": 32, "temperature": 0}
        answer = json.loads(curl(f"{facts['url']}/v1/completions", facts["key"], greedy))
        assert said[1] == answer["choices"][0]["text"] + "\n" and answer["usage"]["completion_tokens"] > 2
        alone = [sys.executable, "-P", "-m", "lowlat.cli", "http", "0", "--json"]
        environment = {**server.environment, "LOWLAT_API_KEY": KEY}
        with subprocess.Popen(alone, stdout=subprocess.PIPE, env=environment, text=True) as other:
            assert other.stdout is not None and select.select([other.stdout], [], [], 60)[0]
            alone_at = json.loads(other.stdout.readline())
            assert alone_at["key"] is None and KEY not in alone_at["page"]
            assert json.loads(curl(f"{alone_at['url']}/v1/models", KEY))["data"][0]["id"] == MODEL
            other.terminate()
            assert other.wait(30) == 0
        os.kill(gateway_of(server.process.pid), signal.SIGKILL)
        eventually(lambda: "the HTTP gateway ended with exit code -9" in server.log.read_text())
        assert server.process.poll() is None


def test_a_gateway_ends_with_its_server_however_that_ends(tmp_path: Path) -> None:
    opens = f"""
import json, time
from lowlat.serving.gateway import http_gateway
with http_gateway("0", "ipc://{tmp_path}/none.sock", None, None) as facts:
    print(json.dumps(facts), flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", opens], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and json.loads(process.stdout.readline())["event"] == "http"
        pid = gateway_of(process.pid)
        process.kill()
        eventually(lambda: not alive(pid), 20.0)


def test_a_gateway_that_cannot_open_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name))
    with pytest.raises(ConfigError, match=r"needs uvicorn: pip install 'lowlat\[http\]'"):
        gateway.check_gateway("8000")
    with (
        pytest.raises(ConfigError, match="did not open"),
        gateway.http_gateway("1:2:3", "ipc:///none.sock", None, None),
    ):
        pass
