"""This module has what all benchmarks share: machine and commit of rows, options of programs, and the result file."""

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch

from lowlat.tools.bench.machine import commit_at, driver, processor

__all__ = ["bench_parser", "release", "stamps_of", "timing_parser", "write_json"]


def bench_parser(
    description: str | None, *, device: str | None = "cuda:0", must_write: bool = True
) -> argparse.ArgumentParser:
    """Make a parser with the options that all programs have.

    device      the default; None: the program has no choice
    must_write  whether a file must be named
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=must_write, help="JSON file to write")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    if device is not None:
        parser.add_argument("--device", default=device)
    return parser


def timing_parser(description: str | None, *, replays: int, turn: int = 20) -> argparse.ArgumentParser:
    """A parser with the options that all timings of whole steps have; replays, turn: the defaults."""
    parser = bench_parser(description)
    parser.add_argument("--replays", type=int, default=replays)
    parser.add_argument("--turn", type=int, default=turn, help="replays between resets, and of a turn")
    return parser


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
    """Write a result, and create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def release(device: torch.device) -> None:
    """Give unused memory back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
