"""The tier of files: what is damaged, killed, full or shared with other processes is a miss at most."""

import errno
import logging
import math
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from tier_cases import files_of, key, memory

from lowlat.checkpoint.files import take_out_unfinished
from lowlat.sequence.tiers.disk import DiskTier
from lowlat.sequence.tiers.key import ChunkKey

KEY = ChunkKey(b"k" * 32, "")


@pytest.mark.parametrize("damage", ["torn", "altered", "swapped", "empty"])
def test_a_damaged_file_is_a_miss_and_is_taken_out(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    for number in range(2):
        tier.write(key(number), torch.full((1000,), number, dtype=torch.uint8))
    path, other = files_of(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "altered":
        data[len(data) // 2] ^= 1
    data = bytearray(other.read_bytes()) if damage == "swapped" else data
    path.write_bytes(data[: {"torn": len(data) - 1, "empty": 0}.get(damage, len(data))])
    with caplog.at_level(logging.WARNING):
        assert tier.read(key(0), memory) is None
    assert len(caplog.records) == 1 and "cached prefix" in caplog.text and files_of(tmp_path) == [other]


def test_files_stay_within_the_budget_and_are_shared_by_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowlat.sequence.tiers.file_budget.WALK_SHARE", math.inf)
    first, second = (DiskTier(tmp_path / "cache", 4000, "f" * 16) for _ in range(2))
    for number in range(4):
        first.write(key(number), torch.full((1000,), number, dtype=torch.uint8))
        os.utime(first.root / f"{key(number).digest.hex()}.chunk", (number, number))
    sizes = [path.stat().st_size for path in files_of(tmp_path)]
    assert len(sizes) == 3 and sum(sizes) <= 4000 and key(0) not in first
    found = second.read(key(2), memory)
    assert found is not None and found.tolist() == [2] * 1000
    second.write(key(7), torch.zeros(1000, dtype=torch.uint8))  # counts the other's files
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 4000 and key(7) in first
    assert DiskTier(tmp_path / "cache", 4000, "g" * 16).read(key(7), memory) is None
    assert all(path.stat().st_mode & 0o077 == 0 for path in files_of(tmp_path))


def test_a_full_tier_of_files_forgets_those_that_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowlat.sequence.tiers.disk.MIN_FORGOTTEN", 0)
    tier = DiskTier(tmp_path / "cache", 60 * 300, "f" * 16)
    for number in range(250):
        assert tier.write(key(number), torch.full((40,), number, dtype=torch.uint8))
        assert tier.read(key(0), memory) is not None  # which is the newest then
    there = [number for number in range(250) if key(number) in tier]
    assert [number for number in range(250) if tier.is_whole(key(number))] == there and 0 in there
    assert len(there) <= len(tier._whole) <= 2 * len(there) + 1
    tier.drop(key(0))
    assert not tier.is_whole(key(0)) and key(0) not in tier._whole
    other = DiskTier(tmp_path / "cache", 60 * 300, "f" * 16)
    assert not other.is_whole(key(there[-1])) and key(there[-1]) in other


def test_what_killed_processes_left_unfinished_counts_in_the_budget_until_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowlat.sequence.tiers.file_budget.WALK_SHARE", math.inf)
    tier = DiskTier(tmp_path / "cache", 4000, "f" * 16)
    with subprocess.Popen(["true"]) as ended:
        pass
    left = tier.root / f".writing-{ended.pid}-abc"
    left.write_bytes(bytes(2000))

    def write() -> int:
        """Bytes of all files after several were written."""
        for number in range(6):
            tier.write(key(number), torch.full((1000,), number, dtype=torch.uint8))
        return sum(path.stat().st_size for path in tier.root.iterdir())

    assert write() <= 4000 and left.exists() and len(list(tier.root.iterdir())) == 2
    os.utime(left, (time.time() - 100, time.time() - 100))
    assert write() <= 4000 and not left.exists() and len(list(tier.root.iterdir())) == 3


def test_files_of_a_process_that_had_the_number_of_one_that_runs_are_nobody_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowlat.checkpoint.files.STALE_S", 0.0)
    for number in (1, os.getpid()):
        for name, when in (("own", time.time() - 0.001), ("before", time.time() - 1e9)):
            (tmp_path / f".writing-{number}-{name}").write_bytes(b"abc")
            os.utime(tmp_path / f".writing-{number}-{name}", (when, when))
    assert take_out_unfinished(tmp_path, ".writing-") == 2 * 3
    assert {path.name for path in tmp_path.iterdir()} == {f".writing-{number}-own" for number in (1, os.getpid())}


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    tier.root.chmod(0o500)
    if os.access(tier.root, os.W_OK):  # root writes all the same
        tier.root.rmdir()
        tier.root.touch()
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            tier.write(key(number), torch.zeros(10, dtype=torch.uint8))
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text
    assert tier.read(key(0), memory) is None


def test_a_file_system_that_fails_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that steps asks whether a file is there: what its folder's system says then ends no runtime."""
    tier = DiskTier(tmp_path / "cache", 1 << 20, "f" * 16)
    tier.write(key(0), torch.zeros(10, dtype=torch.uint8))
    assert key(0) in tier

    def stale(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stale)
        assert key(0) not in tier
    assert key(0) in tier


def test_a_reader_of_a_damaged_file_leaves_the_one_that_has_taken_its_place(tmp_path: Path) -> None:
    disk, other = (DiskTier(tmp_path / "cache", 1 << 20, "f" * 16) for _ in range(2))
    disk.write(KEY, torch.zeros(10, dtype=torch.uint8))
    (path,) = files_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    def reserve(size: int) -> torch.Tensor:
        other.write(KEY, torch.ones(10, dtype=torch.uint8))
        return memory(size)

    assert disk.read(KEY, reserve) is None
    found = disk.read(KEY, memory)
    assert found is not None and found.tolist() == [1] * 10
