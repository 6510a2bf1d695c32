"""What a server must refuse: every entry of the table, in no time, without memory, with the field that is wrong."""

import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lowlat.ipc.wire import WireError, decode_client

FOLDER = Path(__file__).parent / "bad_frames"
TABLE: list[dict[str, Any]] = json.loads((FOLDER / "v1.json").read_text())


def frame(parts: list[Any]) -> bytes:
    """A frame from its parts: hexadecimal, or [hexadecimal, how often]."""
    return b"".join(bytes.fromhex(p) if isinstance(p, str) else bytes.fromhex(p[0]) * p[1] for p in parts)


def test_there_are_enough_and_none_twice() -> None:
    assert len(TABLE) >= 300
    assert len({entry["name"] for entry in TABLE}) == len(TABLE)


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry["name"])
def test_bad_frames_are_refused(entry: dict[str, Any]) -> None:
    frames = [frame(parts) for parts in entry["frames"]]
    with pytest.raises(WireError) as caught:
        decode_client(frames)
    assert entry["field"] in ("any", caught.value.field), str(caught.value)
    assert entry["number"] in ("any", caught.value.number)
    assert len(str(caught.value)) <= 400


def test_refusing_takes_no_memory_and_no_time() -> None:
    longest = 0.0
    for entry in TABLE:
        frames = [frame(parts) for parts in entry["frames"]]
        size = sum(map(len, frames))
        tracemalloc.start()
        with pytest.raises(WireError):
            decode_client(frames)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # values of at most 256 KiB of structure are built before they are counted; beyond that, nothing is
        assert peak < (20 << 20 if size <= 1 << 19 else 1 << 20), f"{entry['name']}: {peak} bytes for {size}"
        begin = time.perf_counter()
        with pytest.raises(WireError):
            decode_client(frames)
        longest = max(longest, time.perf_counter() - begin)
    assert longest < 0.25


def test_the_table_is_what_its_script_writes(tmp_path: Path) -> None:
    before = (FOLDER / "v1.json").read_bytes()
    script = (FOLDER / "generate.py").read_text()
    (tmp_path / "bad_frames").mkdir()
    (tmp_path / "golden").symlink_to(FOLDER.parent / "golden")
    (tmp_path / "bad_frames" / "generate.py").write_text(script)
    subprocess.run([sys.executable, str(tmp_path / "bad_frames" / "generate.py")], check=True, timeout=60)
    assert (tmp_path / "bad_frames" / "v1.json").read_bytes() == before
