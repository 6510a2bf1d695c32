"""The parts that rows of all benchmarks share: their machine and commit, the summary of their times, their file."""

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch

from bench.lib.clock import Timed, percentile, time_waited
from lowlat.tools.bench.machine import commit_at, driver, processor

__all__ = ["release", "stamps_of", "summary_of", "timing_parser", "write_json"]

WAITED_REPLAYS = 100
SUMMARY = ("ms_p50", "ms_p99", "ms_least", "host_ms_p50", "host_ms_p99")


def timing_parser(
    description: str | None, *, replays: int, turn: int = 20, must_write: bool = True
) -> argparse.ArgumentParser:
    """A parser with the options that all timings of whole steps have; replays, turn: the defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=must_write, help="JSON file to write")
    parser.add_argument("--replays", type=int, default=replays)
    parser.add_argument("--turn", type=int, default=turn, help="replays between resets, and of a turn")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--device", default="cuda:0")
    return parser


def summary_of(entry: Timed, replays: int, turn: int, device: torch.device) -> dict[str, float]:
    """An entry's times by the names of SUMMARY, ms; the host's are measured here, in turns of `turn` replays."""
    waited = time_waited(entry, min(WAITED_REPLAYS, replays), turn, device)
    values = (entry.median, percentile(entry.ms, 99), min(entry.ms), percentile(waited, 50), percentile(waited, 99))
    return {name: round(value, 4) for name, value in zip(SUMMARY, values, strict=True)}


def stamps_of(device: torch.device, commit: str = "") -> dict[str, Any]:
    """Commit, GPU and versions; `commit` where there is no git checkout to ask."""
    cuda = device.type == "cuda"
    return {
        "commit": commit or commit_at(Path(__file__).parent) or "unknown",
        "card": torch.cuda.get_device_name(device) if cuda else processor(),
        "driver": driver() if cuda else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
    }


def write_json(path: Path, content: Any) -> None:
    """Write a result, and the folder that it lies in where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def release(device: torch.device) -> None:
    """Give unused memory back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
