"""This module names the directories where lowlat keeps what it fetched, compiled and measured, or makes one private."""

import os
import stat
from pathlib import Path

import platformdirs

from lowlat.errors import ConfigError

__all__ = ["cache_directory", "make_private", "tuning_directory", "uses_tuning_tables"]

NO_TABLES = "off"


def cache_directory() -> Path:
    """The user's cache of lowlat: below XDG_CACHE_HOME, where that is an absolute path, else the system's own place."""
    return platformdirs.user_cache_path("lowlat", appauthor=False)


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
