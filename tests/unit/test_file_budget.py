"""Cached files of all models below one directory: their limit together, who goes first, and processes that share it."""

import math
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lowlat.engine.numerics import digest_of
from lowlat.sequence.tiers import disk, file_budget
from lowlat.sequence.tiers.disk import DiskTier
from lowlat.sequence.tiers.file_budget import FOLDER, FileBudget
from lowlat.sequence.tiers.key import ChunkKey

FINGERPRINTS = [digest_of({"model": number}) for number in range(4)]
FILE_BYTES = 1000 + 300  # of a content of 1000 bytes, at most: so many times that hold as many files, up to six


@pytest.fixture(autouse=True)
def _counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_budget, "WALK_SHARE", math.inf)


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"), "window_8" if number % 2 else "")


def write(tier: DiskTier, number: int, *, used_s: float | None = None) -> bool:
    """Write a content that its number tells, as if it had been used last at a time."""
    kept = tier.write(key(number), torch.full((1000,), number % 251, dtype=torch.uint8))
    if used_s is not None:
        os.utime(tier._path(key(number)), (used_s, used_s))
    return kept


def held(tier: DiskTier, numbers: range) -> list[int]:
    return [number for number in numbers if key(number) in tier]


def total(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def walks(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> "Counter[str]":
    """Counts a tier's walks from here on by the names of folders."""
    counts, walk = Counter[str](), FileBudget._walk

    def counted(budget: FileBudget, folder: file_budget._Folder) -> None:
        counts[Path(folder.path).name] += budget is tier._budget
        walk(budget, folder)

    monkeypatch.setattr(FileBudget, "_walk", counted)
    return counts


def test_the_limit_is_of_all_models_together_and_the_oldest_of_any_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_budget, "EMPTY_S", 0.0)
    directory, begun = tmp_path / "cache", time.time() - 1000
    old, other = (DiskTier(directory, 1 << 20, each) for each in FINGERPRINTS[:2])
    for number in range(4):
        write(old, number, used_s=begun + 10 * number)
        write(other, number, used_s=begun + 10 * number + 5)
    assert all(map(FOLDER.fullmatch, FINGERPRINTS)) and total(directory) > 8 * 1000
    tier = DiskTier(directory, 6 * FILE_BYTES, FINGERPRINTS[2])
    assert tier.num_bytes == total(directory)
    assert write(tier, 0) and total(directory) <= 6 * FILE_BYTES and tier.num_bytes == total(directory)
    assert held(old, range(4)) == [2, 3] and held(other, range(4)) == [1, 2, 3]
    old.read(key(2), lambda size: torch.empty(size, dtype=torch.uint8))  # is the newest then, of which no count knows
    for number in range(1, 4):
        assert write(tier, number)
    assert held(old, range(4)) == [2] and held(tier, range(4)) == [0, 1, 2, 3]
    for number in range(4, 9):
        assert write(tier, number) and total(directory) <= 6 * FILE_BYTES
    assert not old.root.exists() and not other.root.exists() and held(tier, range(9)) == list(range(3, 9))
    assert write(old, 7)  # its folder was taken out by another process
    assert held(old, range(9)) == [7] and old.root.stat().st_mode & 0o077 == 0
    assert write(tier, 9) and total(directory) <= 6 * FILE_BYTES and tier.num_bytes == total(directory)


def test_what_a_user_keeps_in_the_directory_stays(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    old = DiskTier(directory, 1 << 20, FINGERPRINTS[0])
    write(old, 0, used_s=1.0)
    name = old._path(key(0)).name
    (directory / "sessions").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (directory / FINGERPRINTS[3]).symlink_to(tmp_path / "elsewhere")
    own = [directory / "chat.session", directory / name, directory / "sessions" / name, old.root / "chat.chunk"]
    own += [old.root / "chat.session", tmp_path / "elsewhere" / name]
    for path in own:
        path.write_bytes(bytes(5000))
        os.utime(path, (0, 0))
    tier = DiskTier(directory, 2 * FILE_BYTES, FINGERPRINTS[1])
    for number in range(4):
        assert write(tier, number)
    assert all(path.stat().st_size == 5000 for path in own) and key(0) not in old and old.root.exists()
    assert 2000 <= tier.num_bytes <= 2 * FILE_BYTES


def test_empty_folders_of_others_go_when_nobody_has_used_them_of_late(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    empty, young, used = (DiskTier(directory, 1 << 20, each) for each in FINGERPRINTS[:3])
    write(used, 0)
    os.utime(empty.root, (1, 1))
    os.utime(used.root, (1, 1))
    DiskTier(directory, 1 << 20, FINGERPRINTS[3])
    assert not empty.root.exists() and young.root.exists() and key(0) in used
    assert write(empty, 0) and empty.num_bytes == total(directory)


def test_pinned_contents_are_those_of_the_own_model(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    other = DiskTier(directory, 1 << 20, FINGERPRINTS[0])
    tier = DiskTier(directory, 3 * FILE_BYTES, FINGERPRINTS[1], lambda name: name == key(0))
    write(tier, 0, used_s=1.0)
    write(other, 0, used_s=2.0)
    for number in range(1, 6):
        assert write(tier, number) and total(directory) <= 3 * FILE_BYTES
    assert key(0) in tier and key(0) not in other


def test_pinned_files_are_not_gone_through_at_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are older than the others; one whose pin was taken back goes first as soon as they are looked at."""
    count, pins, asked = 40, {key(number) for number in range(40)}, list[ChunkKey]()

    def is_pinned(name: ChunkKey) -> bool:
        asked.append(name)
        return name in pins

    monkeypatch.setattr(file_budget, "RECENT_S", 0.0)
    tier = DiskTier(tmp_path / "cache", (count + 4) * 1200, FINGERPRINTS[0], is_pinned)
    for number in range(count):
        assert write(tier, number, used_s=1.0 + number)
    monkeypatch.setattr(file_budget, "WALK_SHARE", 1e-9)
    for number in range(count, count + 30):
        assert write(tier, number)
    assert held(tier, range(count)) == list(range(count)) and key(count) not in tier
    assert len(asked) <= 3 * count  # in all, not at each of 30 saves
    pins.remove(key(7))
    monkeypatch.setattr(file_budget, "WALK_SHARE", math.inf)
    tier._budget._own.next_look_s = 0.0
    before = held(tier, range(count, count + 30))
    assert write(tier, 100) and key(7) not in tier
    assert held(tier, range(count, count + 30)) == before and tier.num_bytes == total(tmp_path / "cache")


def test_processes_that_write_all_the_time_see_each_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes while the other does, and longer than a folder counts as just changed."""
    monkeypatch.setattr(file_budget, "RECENT_S", 0.0)
    directory, most, count = tmp_path / "cache", 6 * FILE_BYTES, 20
    tiers = [DiskTier(directory, most, FINGERPRINTS[0]) for _ in range(2)]
    turns, ended, mine = [threading.Semaphore(0) for _ in tiers], [False, False], threading.local()
    digest_after, faults = disk._digest_after, list[object]()

    def slowly(*arguments: Any) -> bytes:
        """The other one goes on until it writes a file itself."""
        turns[1 - mine.place].release()
        if not ended[1 - mine.place]:
            assert turns[mine.place].acquire(timeout=20.0)
        return digest_after(*arguments)

    def run(place: int) -> None:
        mine.place = place
        try:
            assert turns[place].acquire(timeout=20.0)
            for number in range(count):
                assert write(tiers[place], count * place + number)
        except AssertionError as error:
            faults.append(error)
        finally:
            ended[place] = True
            turns[1 - place].release()

    monkeypatch.setattr(disk, "_digest_after", slowly)
    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join()
    assert faults == [] and total(directory) <= most + 2 * FILE_BYTES


def test_a_save_walks_only_folders_that_others_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "cache"
    other = DiskTier(directory, 1 << 20, FINGERPRINTS[0])
    for number in range(8):
        write(other, number, used_s=1.0 + number)
    monkeypatch.setattr(file_budget, "RECENT_S", 0.02)
    time.sleep(0.05)
    tier = DiskTier(directory, 10 * FILE_BYTES, FINGERPRINTS[1])
    time.sleep(0.05)
    assert write(tier, 0)
    counts = walks(tier, monkeypatch)
    for number in range(1, 20):
        assert write(tier, number) and total(directory) <= 10 * FILE_BYTES
    assert not counts.total() and key(0) not in other  # though the other's files went
    time.sleep(0.05)
    assert write(other, 20)
    time.sleep(0.05)
    assert write(tier, 20) and total(directory) <= 10 * FILE_BYTES
    assert +counts == {FINGERPRINTS[0]: 1}


def test_a_folder_that_others_change_without_end_is_walked_for_a_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "cache"
    tier, other = (DiskTier(directory, 1 << 20, each) for each in FINGERPRINTS[:2])
    counts = walks(tier, monkeypatch)
    monkeypatch.setattr(file_budget, "WALK_SHARE", 1e-9)
    for number in range(10):
        write(other, number)
        write(tier, number)
    assert counts[FINGERPRINTS[1]] == 1


def test_models_that_write_at_once_stay_within_the_limit(tmp_path: Path) -> None:
    """Each tier here has the state of a process of its own: two of one model, and one each of two others."""
    directory, most = tmp_path / "cache", 40 * FILE_BYTES
    tiers = [DiskTier(directory, most, FINGERPRINTS[place]) for place in (0, 0, 1, 2)]
    faults, bytes_held, ended = list[object](), list[int](), threading.Event()

    def run(tier: DiskTier, seed: int) -> None:
        choose = random.Random(seed)
        try:
            for number in (choose.randrange(100) for _ in range(200)):
                if choose.random() < 0.4:
                    found = tier.read(key(number), lambda size: torch.empty(size, dtype=torch.uint8))
                    if found is not None and found.tolist() != [number] * 1000:
                        faults.append(number)
                elif not write(tier, number):
                    faults.append(f"{number} is not written")
        except Exception as error:
            faults.append(error)

    def measure() -> None:
        while not ended.is_set():
            bytes_held.append(sum(size_of(path) for path in directory.rglob("*.chunk")))

    threads = [threading.Thread(target=run, args=each) for each in zip(tiers, range(4), strict=True)]
    watching = threading.Thread(target=measure)
    for thread in [watching, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    watching.join()
    assert faults == [] and max(bytes_held) <= most + 2 * len(tiers) * FILE_BYTES
    time.sleep(0.05)
    for tier in tiers:
        assert write(tier, 101)
    assert total(directory) <= most
    assert write(tiers[0], 102) and tiers[0].num_bytes == total(directory)


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
