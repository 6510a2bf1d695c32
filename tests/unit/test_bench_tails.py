"""The benchmark of tails, tried on a tiny model without a card."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benches import bench

from lowlat.errors import ConfigError, LowlatError
from lowlat.tools.bench.results import read_struct

tails, results, running = bench("tails"), bench("tails_result"), bench("tails_run")
IDLE = results.Case(through="process", device_loop=False, host="idle")


def run(out: Path, *more: str) -> dict[str, Any]:
    given = ["--geometry", "tiny", "--context", "20", "--window", "12", "--steps", "10", "--device", "cpu"]
    tails.main([*given, "--spinners", "1", "--host", "idle", "--out", str(out), *more])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.second
def test_a_row_for_each_case_and_none_is_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "tails.json"
    found = run(out, "--through", "process", "--limit-s", "1000")
    assert [row["case"]["through"] for row in found["rows"]] == ["process", "device"]
    found = run(out, "--limit-s", "1000")
    file = read_struct(out, results.TailsFile)
    assert [row.case.name for row in file.rows] == [
        "process, steps, idle",
        "device, steps, idle",
        "socket, steps, idle",
    ]
    for row in file.rows:
        assert 0 < row.p50_us <= row.p99_us <= row.p999_us <= row.max_us
        assert sum(count for _, count in row.histogram.buckets) == row.num_arrivals
        assert row.histogram.percentile(50) == pytest.approx(row.p50_us, rel=0.002)
        if row.case.through != "device":
            # of 12 tokens the first comes out of prefill
            assert row.num_steps + row.num_left_out == 11 * row.num_requests and row.num_steps >= 10
            assert row.host_share == pytest.approx(row.mean_us / row.own_us - 1, abs=1e-4)
    monkeypatch.setattr(running.Arrivals, "take", None)
    assert run(out, "--limit-s", "999") == found
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cases"] == 3
    with pytest.raises(ConfigError, match=r"holds rows of other conditions .*--fresh"):
        run(out, "--steps", "11")


def test_a_busy_host_is_busy_while_it_is_measured() -> None:
    with running.busy_host(results.Case(through="process", device_loop=False, host="busy"), 1):
        children = Path("/proc/self/task").glob("*/children")
        names = {pid for path in children for pid in path.read_text().split()}
        (name,) = {pid for pid in names if b"while True: pass" in Path(f"/proc/{pid}/cmdline").read_bytes()}
    assert not Path(f"/proc/{name}").exists()


def test_a_limit_leaves_a_request_and_the_row_says_how_far_it_came() -> None:
    def request() -> Iterator[int]:
        yield from [1] * 1000

    row = running.measure(IDLE, request, 10**6, 0.0)
    assert row.num_requests == 1 and row.limit_s == 0.0
    assert row.num_arrivals == running.LOOK_EVERY - running.LEFT_OUT - 1 == row.num_steps
    with pytest.raises(LowlatError, match="--window"):
        running.measure(IDLE, lambda: (step for step in [1, 1]), 1, 0.0)


def test_every_case_has_its_own_time_beside_it() -> None:
    cases = tails.cases_of(["process", "socket"], [False, True], ["idle", "busy", "threads"])
    assert len({*cases}) == len(cases) == 12
    assert [case.name for case in cases if case.through == "device"] == ["device, steps, idle", "device, loops, idle"]
    assert results.Case(through="socket", device_loop=True, host="threads") not in cases
