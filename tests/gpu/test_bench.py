"""`lowlat bench` on a GPU: the wall, the floor, memory and stages; the same by a loop on the device; peers."""

import subprocess
import sys
from pathlib import Path

import pytest
from benches import bench
from cli_calls import lowlat

from lowlat.tools.bench.report.pages import read_profiles
from lowlat.tools.bench.results import read_result

# two drafts: what a loop on the device may run ahead fits the bundled pair's positions
SMALL = ("--context", 200, "--batch", "1,2", "-S", "0,2", "--steps", 20, "--warm-up", 3, "--repeats", 2)


@pytest.mark.parametrize("extra", ["--profile", "--device-loop"])
def test_rows_stand_beside_the_wall(tmp_path: Path, extra: str) -> None:
    shown = lowlat("bench", "run", "batch", *SMALL, extra, "--out", tmp_path)
    assert shown.exit_code == 0, shown.output
    found = read_result(tmp_path / "batch.json")
    assert found.environment.executor == "graph" and found.environment.gpu and found.environment.driver
    assert len(found.rows) == 4
    for row in found.rows:
        assert row.num_steps >= 40 and row.wall_gb_per_s is not None and 500 < row.wall_gb_per_s < 20_000
        assert row.share_of_wall is not None and 0 < row.share_of_wall < 3  # such small weights stay in the L2
        assert row.memory.device_bytes is not None and row.memory.device_bytes > 10**7
        assert row.active_slots.min == row.active_slots.max == row.case.batch
    profiles = read_profiles(tmp_path)
    assert len(profiles) == (4 if extra == "--profile" else 0)
    assert all(stage.stage for profile in profiles for stage in profile.stages)


def test_transformers_beside_lowlat_on_a_gpu(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    sizes = ["--context", "128", "-S", "0,3", "--steps", "20", "--warm-up", "4", "--repeats", "1"]
    command = [sys.executable, "-m", "bench.peers", "--engines", "lowlat,transformers", *sizes, "--out", str(out)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result = bench("peers.results").read_peers(out)
    own = [row for row in result.rows if row.engine == "lowlat"]
    assert result.environment.gpu and [row.settings["executor"] for row in own] == ["graph"] * 2
    assert all(row.memory.device_bytes > 10**7 for row in own)
    others = {row.engine for row in result.rows} | {each.engine for each in result.not_compared}
    assert others == {"lowlat", "transformers"}
