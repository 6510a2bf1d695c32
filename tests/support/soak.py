"""Helpers of long runs against a server: figures of a process, percentiles, and the record that a run leaves."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = [
    "WORKER",
    "milliseconds",
    "num_descriptors",
    "percentile",
    "record",
    "resident_bytes",
    "start_worker",
    "steady_growth",
]

WORKER = Path(__file__).with_name("stream_worker.py")
MAX_TIMES = 1_000_000


def start_worker(endpoint: str, **options: Any) -> "subprocess.Popen[str]":
    """Start stream_worker.py; it says `ready`, and begins at a line on its stdin."""
    return subprocess.Popen(
        [sys.executable, str(WORKER), endpoint, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which this fraction lies; 0.0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0


def milliseconds(counts: Mapping[str, int]) -> list[float]:
    """Counted microseconds as a list of all, in order, thinned out where they are millions."""
    every = max(1, sum(counts.values()) // MAX_TIMES)
    ordered = sorted((int(value), count) for value, count in counts.items())
    return [value / 1000 for value, count in ordered for _ in range(-(-count // every))]


def resident_bytes(pid: int) -> int:
    """Return the memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(pid: int) -> int:
    """Open files of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def steady_growth(sizes: Sequence[int], warm_up: int) -> float:
    """Growth after the warm-up, as a fraction: medians of its first and its last third."""
    steady = list(sizes[warm_up:])
    third = max(1, len(steady) // 3)
    return percentile(steady[-third:], 0.5) / percentile(steady[:third], 0.5) - 1.0


def record(figures: dict[str, Any], result: str) -> None:
    """Print what a run found, and write it with the commit, the machine and the versions that it stands for."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=WORKER.parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    figures = {
        **figures,
        "commit": commit,
        "machine": {"processor": processor, "cores": len(os.sched_getaffinity(0)), "kernel": platform.release()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("pyzmq", "msgspec")},
        },
    }
    if result != os.devnull:
        Path(result).write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures))
