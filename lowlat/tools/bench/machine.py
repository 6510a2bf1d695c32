"""This module describes the machine and the code of a measurement: processor, driver, commit."""

import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from lowlat.checkpoint.files import find_text

__all__ = ["changed_commit", "commit_at", "driver", "processor"]


def commit_at(folder: Path) -> str:
    """Return the short commit of a folder's checkout; empty if it has none."""
    return _output("git", "rev-parse", "--short", "HEAD", folder=folder)


def changed_commit() -> str:
    """Return the commit of lowlat's checkout, with a mark if the packages differ from it; empty without a checkout."""
    folder = Path(__file__).parent
    if not _output("git", "ls-files", Path(__file__).name, folder=folder):
        return ""
    folders = [f":/{name}" for name in ("lowlat", "graphs", "kernels", "ipc")]
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "--", *folders, folder=folder)
    return commit_at(folder) + (", changed" if changed else "")


def driver() -> str:
    """Return the version of NVIDIA's driver; empty if there is none."""
    text = find_text(Path("/proc/driver/nvidia/version"), 1 << 12)
    if text is None:  # as in a container
        text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else ""


def processor() -> str:
    """Return the processor's name, or its architecture if it has none."""
    text = find_text(Path("/proc/cpuinfo"), 1 << 22) or ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def _output(*command: str, folder: Path | None = None) -> str:
    """Return the output of a command; empty if it fails or does not exist."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""
