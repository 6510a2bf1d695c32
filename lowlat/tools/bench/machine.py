"""This module describes the machine and the code that a measurement stands for: processor, driver, commit."""

import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path

from lowlat.checkpoint.files import find_text

__all__ = ["changed_commit", "commit_at", "driver", "processor"]


def commit_at(folder: Path) -> str:
    """The short commit of the checkout that a folder lies in; empty where there is none."""
    return _output("git", "rev-parse", "--short", "HEAD", folder=folder)


def changed_commit() -> str:
    """The commit of lowlat's own checkout, with a mark where the packages differ from it; empty where it is none."""
    folder = Path(__file__).parent
    if not _output("git", "ls-files", Path(__file__).name, folder=folder):
        return ""
    folders = [f":/{name}" for name in ("lowlat", "graphs", "kernels", "ipc")]
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", "--", *folders, folder=folder)
    return commit_at(folder) + (", changed" if changed else "")


def driver() -> str:
    """The version of NVIDIA's driver; empty where there is none."""
    text = find_text(Path("/proc/driver/nvidia/version"), 1 << 12)
    if text is None:  # as in a container
        text = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else ""


def processor() -> str:
    """The processor's name, or its architecture where it has none."""
    text = find_text(Path("/proc/cpuinfo"), 1 << 22) or ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def _output(*command: str, folder: Path | None = None) -> str:
    """The text that a command prints; empty where it fails or is not there."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""
