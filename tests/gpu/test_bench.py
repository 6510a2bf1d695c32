"""`lowlat bench` on a card: the wall, the floor, memory and stages; the same by a loop on the device."""

from pathlib import Path

import pytest
from cli_calls import lowlat

from lowlat.tools.bench.report import read_profiles
from lowlat.tools.bench.results import read_result

# two drafts: what a loop on the device may run ahead fits the bundled pair's positions
SMALL = ("--context", 200, "--batch", "1,2", "-S", "0,2", "--steps", 20, "--warm-up", 3, "--repeats", 2)


@pytest.mark.parametrize("extra", ["--profile", "--device-loop"])
def test_rows_stand_beside_the_wall(tmp_path: Path, extra: str) -> None:
    shown = lowlat("bench", "run", "batch", *SMALL, extra, "--out", tmp_path)
    assert shown.exit_code == 0, shown.output
    found = read_result(tmp_path / "batch.json")
    assert found.environment.executor == "graph" and found.environment.card and found.environment.driver
    assert len(found.rows) == 4
    for row in found.rows:
        assert row.num_steps >= 40 and row.wall_gb_per_s is not None and 500 < row.wall_gb_per_s < 20_000
        assert row.share_of_wall is not None and 0 < row.share_of_wall < 3  # such small weights stay in the L2
        assert row.memory.device_bytes is not None and row.memory.device_bytes > 10**7
        assert row.active_slots.min == row.active_slots.max == row.case.batch
    profiles = read_profiles(tmp_path)
    assert len(profiles) == (4 if extra == "--profile" else 0)
    assert all(stage.stage for profile in profiles for stage in profile.stages)
