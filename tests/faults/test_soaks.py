"""The long runs against a server: small in every run, whole with `-m soak`, and on record.

`SOAK_RESULTS=bench/results/cpu pytest -m soak tests/faults` writes what was found there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1] / "support"
MAX_GROWTH = 0.01
MAX_P99_CHANGE = 0.05
KINDS = ("without", "elsewhere", "with")


def run(script: str, *arguments: object) -> dict[str, Any]:
    """Run a script and return its results; a whole run with SOAK_RESULTS set also writes them to that folder."""
    folder = os.environ.get("SOAK_RESULTS")
    record = ["--json", str(Path(folder).resolve() / f"{script}.json")] if folder and not arguments else []
    command = [sys.executable, str(TESTS / f"{script}.py"), *map(str, arguments), *record]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def on_record(repository: Path, script: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repository / "bench" / "results" / "cpu" / f"{script}.json").read_text())
    assert {"commit", "machine", "versions"} <= found.keys()
    return found


def check_streams(found: dict[str, Any], num_tokens: int) -> None:
    assert found["num_streams"] == 64
    assert found["processes"] == 8
    assert found["num_tokens"] >= num_tokens
    assert (found["lost"], found["doubled"], found["reordered"]) == (0, 0, 0)
    assert found["tokens_per_s"] > 0


def check_kills(found: dict[str, Any], kills: int, max_growth: float) -> None:
    assert found["kills"] >= kills
    assert found["servers"]["slowest_notice_s"] < 5.0
    assert found["model_clients"]["blocks_used"] == 0
    for books in (found["servers"]["client"], found["clients"]["server"], found["model_clients"]["server"]):
        first, last = books["descriptors"]
        assert last <= first
        assert books["growth_after_warm_up"] <= max_growth


def check_bad_clients(found: dict[str, Any]) -> None:
    assert found["p99_change_in_all"] <= MAX_P99_CHANGE
    assert found["p99_change"] <= MAX_P99_CHANGE


@pytest.mark.wide
def test_streams_of_many_processes_are_whole() -> None:
    check_streams(run("streams_soak", "--tokens", 30_000), 30_000)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_million_tokens_are_whole() -> None:
    check_streams(run("streams_soak"), 1_000_000)


@pytest.mark.wide
def test_a_few_kills_leave_nothing() -> None:
    # a few rounds say nothing of memory: whatever is done for the first time still grows it
    check_kills(run("kill_soak", "--servers", 1, "--clients", 2, "--model-clients", 1), 4, 0.05)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_many_kills_leave_nothing() -> None:
    check_kills(run("kill_soak"), 100, MAX_GROWTH)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_bad_clients_do_not_move_the_others() -> None:
    check_bad_clients(run("bad_clients"))


@pytest.mark.wide
def test_streams_stay_whole_beside_bad_clients() -> None:
    found = run("bad_clients", "--rounds", 1, "--seconds", 1)  # too short, and too few rounds, for a p99
    assert found["server"]["num_bad_messages"] > 0
    assert found["server"]["ends"]["gone"] > 0


def test_the_long_runs_are_on_record(repository: Path) -> None:
    check_streams(on_record(repository, "streams_soak"), 1_000_000)
    check_kills(on_record(repository, "kill_soak"), 100, MAX_GROWTH)
    bad = on_record(repository, "bad_clients")
    assert bad["bad"] == ["slow", "killed", "malicious"]
    assert {kind: len(rounds) for kind, rounds in bad["inter_token_ms"].items()} == dict.fromkeys(KINDS, 5)
    check_bad_clients(bad)
