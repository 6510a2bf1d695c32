"""This module names the directories of lowlat's caches, compiled kernels and tuning tables, and checks directories."""

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
PROBE_BYTES = 1 << 16  # about the size of a kernel


def cache_directory() -> Path:
    """Return the user's cache of lowlat: in XDG_CACHE_HOME if that is an absolute path, else the default."""
    return platformdirs.user_cache_path("lowlat", appauthor=False)


def kernel_cache_directory() -> Path:
    """Return the folder of compiled kernels: LOWLAT_KERNEL_CACHE, else one in the user's cache directory."""
    own = os.environ.get("LOWLAT_KERNEL_CACHE", "")
    return Path(own) if own else cache_directory() / "kernels"


def write_problem(folder: Path) -> str | None:
    """Return the system's message why no file can be written in a folder, which may not exist yet; None if one can.

    To test it, an unnamed temporary file is written to the folder, or to its nearest existing parent.
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
    """Make a folder and its parents if missing, for this user alone (mode 700).

    option  the option that names the folder, for messages
    Raises ConfigError if it cannot be made, belongs to another user, or is open to others.
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
    """Return the folder of the user's own tuning tables: LOWLAT_TUNING, else one in the user's data directory."""
    own = os.environ.get("LOWLAT_TUNING", "")
    return Path(own) if own and own != NO_TABLES else platformdirs.user_data_path("lowlat", appauthor=False) / "tuning"


def uses_tuning_tables() -> bool:
    """Return whether plans come from tables; with LOWLAT_TUNING=off all are derived, for comparison."""
    return os.environ.get("LOWLAT_TUNING", "") != NO_TABLES
