"""The latency suites in bench/: what they record of a tiny pair, and that a comparison fails where a step is slower."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benches import bench
from lowered import Pair
from lowering_cases import DEMO

# Runs in one process: the suite, the suite again, and again with steps that take 16 times as long: the shortest of
# twelve differs by no 6 times, however busy the machine.
RUNS = """
import sys, time, pytest
from lowlat.engine.runtime import Runtime
store, codes, step = sys.argv[1], [], Runtime.step
small = ["--geometry", "tiny", "--device", "cpu", "--context", "16", "--batch", "1", "--rounds", "12"]
common = ["-q", "-p", "no:cacheprovider", *small, f"--benchmark-storage={store}", "--benchmark-save-data"]
gate = ["--benchmark-compare=0001", "--benchmark-compare-fail=min:500%"]
def slow(self, *arguments):
    begin = time.perf_counter()
    outputs = step(self, *arguments)
    time.sleep(15 * (time.perf_counter() - begin))
    return outputs
codes.append(int(pytest.main([*common, "bench/test_step.py", "bench/test_cycle.py", "--benchmark-save=first"])))
codes.append(int(pytest.main([*common, "bench/test_step.py", *gate])))
print(codes, flush=True)
Runtime.step = slow
sys.exit(pytest.main([*common, "bench/test_step.py", *gate]))
"""


@pytest.mark.second
def test_a_slower_step_fails_the_comparison(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUNS, str(tmp_path)]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # xdist's are its own
    done = subprocess.run(command, cwd=repository, env=alone, capture_output=True, text=True, timeout=200, check=False)
    assert "\n[0, 0]\n" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1 and "Performance has regressed" in done.stderr, done.stdout
    (saved,) = tmp_path.rglob("0001_first.json")
    result = json.loads(saved.read_text())
    assert result["machine_info"]["lowlat"]["commit"] and result["machine_info"]["processor"]
    found = {each["name"]: each for each in result["benchmarks"]}
    assert set(found) == {"test_step[1 x 16, S=0]", "test_cycle[1 x 16, S=3]"}
    for name, each in found.items():
        info, samples = each["extra_info"], each["stats"]["data"]
        assert len(samples) == info["samples"] == info["num_steps"] >= 12
        assert 0 < info["ms_p50"] <= info["ms_p99"] <= info["ms_p999"] <= 1e3 * max(samples) + 1e-5
        assert info["bytes_per_step"] > 0 and info["share_of_wall"] is None
        assert ("eagle_speculation" in info) == ("S=0" not in name)


def test_kernels_are_named_by_what_they_do_and_read() -> None:
    entries = bench("micro_entries")
    groups = Pair(DEMO / "target", DEMO / "head").lower(3, 4).groups
    named = entries.groups_by_name(groups)
    assert sum(len(same) for same in named.values()) == sum(bool(group.kernel_calls) for group in groups)
    assert len(named) < len(groups) / 2 and all(len(name) < 200 for name in named)
    assert len(named["linear + rope + kv_write (qkv)"]) == len(named["attention"]) == 8  # the target's layers
    assert "attention #2" in named  # the draft model's, of other rows


def test_a_kernel_s_share_of_the_wall() -> None:
    share = bench("samples").share_of_wall
    assert share(4_000_000, 0.002, 4000.0) == 0.5
    assert share(0, 0.002, 4000.0) is None and share(4_000_000, 0.002, None) is None
