"""This module names the directories where lowlat keeps what it fetched, compiled and measured, or makes one private."""

import os
import stat
import tempfile
from pathlib import Path

import platformdirs

from lowlat.errors import ConfigError

__all__ = [
    "cache_directory",
    "kernel_cache_directory",
    "make_private",
    "tuning_directory",
    "uses_tuning_tables",
    "write_problem",
]

NO_TABLES = "off"
PROBE_BYTES = 1 << 16  # about those of a kernel


def cache_directory() -> Path:
    """The user's cache of lowlat: below XDG_CACHE_HOME, where that is an absolute path, else the system's own place."""
    return platformdirs.user_cache_path("lowlat", appauthor=False)


def kernel_cache_directory() -> Path:
    """The folder where compiled kernels are kept: LOWLAT_KERNEL_CACHE, else below the user's cache directory."""
    own = os.environ.get("LOWLAT_KERNEL_CACHE", "")
    return Path(own) if own else cache_directory() / "kernels"


def write_problem(folder: Path) -> str | None:
    """The system's words why no file can be written in a folder, or in one that would be made; None where one can.

    A file without a name is written to the folder, or to the one above it that is there, and is gone at once.
    """
    try:
        above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        with tempfile.TemporaryFile(dir=above) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


def make_private(folder: Path, option: str) -> None:
    """Make a folder of this user's alone, and those above it, where it is missing.

    option  that names it, for messages
    Raises ConfigError for one that cannot be made, that is another user's, or that lets others in.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        raise ConfigError(f"{option} {folder} cannot be used: {error.strerror}; name another") from error
    if facts.st_uid != os.getuid():
        raise ConfigError(f"{option} {folder} belongs to user {facts.st_uid}, and this process is user {os.getuid()}'s")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(
            f"{option} {folder} lets others in (mode {stat.S_IMODE(facts.st_mode):o}), and it keeps what was asked: "
            "chmod 700 it, or name another"
        )


def tuning_directory() -> Path:
    """The folder of the user's own tuning tables: LOWLAT_TUNING, else below the user's data directory."""
    own = os.environ.get("LOWLAT_TUNING", "")
    return Path(own) if own and own != NO_TABLES else platformdirs.user_data_path("lowlat", appauthor=False) / "tuning"


def uses_tuning_tables() -> bool:
    """Whether plans are looked up in tables; with LOWLAT_TUNING=off all are derived, to be compared with those."""
    return os.environ.get("LOWLAT_TUNING", "") != NO_TABLES
