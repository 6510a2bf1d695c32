"""`lowlat serve` as a process: ready lines, refusals before anything is loaded, restarts, signals, keys."""

import json
import re
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cli_calls import answer, lowlat, refusal
from serving_process import Serving, serving, serving_environment

from lowlat.errors import ConfigError
from lowlat.ipc import Client
from lowlat.serving.config import SETTINGS, ServeConfig
from lowlat.serving.curve_keys import client_curve, make_curve_keys, server_curve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def ask(server: Serving, prompt: str = "a") -> str:
    with Client(server.endpoint) as client:
        return "".join(chunk.text for chunk in client.generate(prompt, max_tokens=4))


def run(folder: Path, *arguments: object, code: int | None = None) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, "-P", "-m", "lowlat.cli", *map(str, arguments)],
        env=serving_environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert code is None or done.returncode == code, done.stderr
    return done


@pytest.mark.second
def test_a_server_has_its_endpoint_until_it_is_killed_and_the_next_takes_it_over(folder: Path, talker: Path) -> None:
    """Without arguments the bundled model is served, on the default endpoint."""
    with serving(folder, ["--log-format", "json"]) as server:
        path = Path(server.endpoint.removeprefix("ipc://"))
        assert path == folder / "lowlat" / "default.sock" and path.stat().st_mode & 0o077 == 0
        assert server.ready["model"] == "lowlat-demo" and server.ready["num_speculative_tokens"] == 3
        assert server.ready["kv_cache_tokens"] >= 4 * server.ready["max_context"] and server.ready["kv_cache_bytes"] > 0
        assert server.ready["pid"] == server.process.pid and server.ready["speculation_error"] is None
        refused = run(folder, "serve", "--model", talker, code=2)
        assert f"another server, process {server.process.pid}, holds" in refused.stderr and not refused.stdout
        assert ask(server, "The President shall secretly")  # the live one goes on
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(30)
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert any(line["message"] == "serving" for line in lines) and "secretly" not in server.log.read_text()
    assert path.exists()
    with serving(folder, ("--model", talker, "--max-context", 64, "-S", 0)) as server:
        assert server.ready["num_speculative_tokens"] == 0 and server.ready["speculation_error"] is None
        assert ask(server)
    assert not path.exists()


@pytest.mark.wide
def test_two_ranks_answer_as_one_does(folder: Path) -> None:
    """Requests side by side, sampled and greedy, one bound to a choice; and the figures of all ranks."""
    asked: list[dict[str, Any]] = [
        {"prompt": "The President shall", "max_tokens": 24, "temperature": 0.8, "seed": 3},
        {"prompt": "Congress shall make no law", "max_tokens": 24},
        {"prompt": "The vote:", "max_tokens": 24, "choice": ["aye, with one amendment", "nay, with none"]},
    ]
    found = []
    for size in (1, 2):
        own = folder / str(size)
        own.mkdir()
        options = ("--tensor-parallel", size, "--set", "tp_invariant=yes", "--device", "cpu", "--max-batch", 2)
        with serving(own, options) as server, Client(server.endpoint) as client:
            with ThreadPoolExecutor(len(asked)) as pool:
                texts = list(pool.map(lambda each: "".join(chunk.text for chunk in client.generate(**each)), asked))
            found.append(texts)
            (held,) = client.stats()["engine"]["memory"]
            assert (held["device"], held["ranks"]) == ("cpu", list(range(size)))
            assert held["weights_bytes"] > 0 < held["kv_bytes"]
    assert found[0] == found[1] and all(found[0]) and found[0][2] in asked[2]["choice"]


@pytest.mark.wide
def test_a_cache_that_others_may_read_is_no_obstacle(folder: Path, talker: Path) -> None:
    (folder / "lowlat").mkdir(mode=0o755)
    environment = serving_environment(folder)
    del environment["XDG_RUNTIME_DIR"]
    command = [
        sys.executable,
        "-P",
        "-m",
        "lowlat.cli",
        "serve",
        "--json",
        "--model",
        str(talker),
        "--max-context",
        "64",
    ]
    with subprocess.Popen(
        command, env={**environment, "XDG_CACHE_HOME": str(folder)}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["endpoint"] == f"ipc://{folder}/lowlat/run/default.sock"
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.wide
def test_ready_lines_can_be_copied(folder: Path, talker: Path) -> None:
    endpoint = f"ipc://{folder}/it's.sock"
    command = [sys.executable, "-P", "-m", "lowlat.cli", "serve", "--model", str(talker), "--max-context", "512"]
    with subprocess.Popen(
        [*command, "--endpoint", endpoint],
        env=serving_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline().strip() for _ in range(6)]
            assert any(re.fullmatch(r"KV cache  2,176 tokens in .* \(--kv-cache-gib\)", line) for line in lines)
            python, shell = (line.partition(" ")[2].strip() for line in lines[2:4])
            done = subprocess.run(
                [sys.executable, "-c", python], capture_output=True, text=True, timeout=60, check=True
            )
            assert done.stdout and not done.stderr
            runnable = shell.replace("lowlat", f"{sys.executable} -m lowlat.cli", 1).replace("The President shall", "a")
            done = subprocess.run(["sh", "-c", runnable], capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0 and done.stdout, done.stderr
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-queue", -1), "max_queue must be from 0"),
        (("--endpoint", "udp://x"), "must be ipc://"),
        (("--endpoint", "tcp://0.0.0.0:5577"), "needs CURVE keys"),
        (("--allow-uid", "root"), "'root' is not an integer"),
        (("--spin-s", 1), "--spin-s is a rare option: say --set spin_s=VALUE"),
        (("--set", "spin_s=x"), "--set spin_s: 'x' is not a valid float"),
        (("--set", "spin=1"), "no option is called 'spin'; did you mean '--set spin_s=VALUE'?"),
        (("--set", "max_queue=1"), "max_queue has a flag: --max-queue"),
        (("--set", "spin-s=1", "--set", "spin_s=2"), "--set gives spin_s twice"),
        (("--set", "max_credit=0"), "max_credit must be from 1"),
        (("--demo", "--model", "x"), "give --demo or a model, not both; x is one"),
        (("--model", "x", "-S", 2), "num_speculative_tokens (option) needs a draft model"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(
    folder: Path, arguments: tuple[object, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert message in refusal("serve", *arguments)


def test_show_config_is_a_file_that_says_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("LOWLAT_DRAIN_S", "3")
    monkeypatch.setenv("LOWLAT_DRIAN_S", "4")
    shown = lowlat("serve", "--show-config", "--max-queue", 7, "--set", "prefix_reuse=no")
    values = tomllib.loads(shown.stdout)
    assert (values["max_queue"], values["drain_s"], values["prefix_reuse"]) == (7, 3.0, False)
    assert "LOWLAT_DRIAN_S in the environment is no setting" in shown.stderr
    (folder / "f.toml").write_text(shown.stdout)
    monkeypatch.delenv("LOWLAT_DRAIN_S")
    again = answer("serve", "--show-config", "--config", folder / "f.toml", "--json")
    assert again["settings"]["max_queue"] == 7 and again["sources"]["drain_s"] == str(folder / "f.toml")
    assert ServeConfig.gather({}, {}, folder / "f.toml")["drain_s"] == 3.0


def test_help_lists_the_settings_by_group() -> None:
    shown = lowlat("serve", "--help").stdout
    places = [shown.index(title) for title in ("Server:", "Model:", "Speculation:", "Runtime:", "Limits:")]
    assert places == sorted(places)
    whole = lowlat("serve", "--help-all").stdout
    rare = [option for option in SETTINGS.values() if option.rare]
    assert rare and all(f"{option.key}=" in whole and f"{option.flag} " not in whole for option in rare)


def test_keys_are_the_owners_alone_and_are_not_overwritten(folder: Path) -> None:
    found = answer("serve", "--make-curve-keys", folder / "keys", "--json")["files"]
    assert [oct(Path(file).stat().st_mode & 0o777) for file in found] == ["0o600"] * 4
    before = [Path(file).read_bytes() for file in found]
    assert "exists already" in refusal("serve", "--make-curve-keys", folder / "keys")
    assert [Path(file).read_bytes() for file in found] == before
    curve = server_curve(folder / "keys")
    assert curve.clients == folder / "keys" / "clients"
    keys = client_curve(folder / "keys")
    assert str(keys.public_key) in (folder / "keys" / "clients" / "client.key").read_text()
    curve.certificate.chmod(0o644)
    with pytest.raises(ConfigError, match="is open to others"):
        server_curve(folder / "keys")
    with pytest.raises(ConfigError, match="cannot read the CURVE key"):
        client_curve(folder)
    with pytest.raises(ConfigError):
        make_curve_keys(Path("/proc/keys"))
