"""This module names the directories where lowlat keeps what it fetched, compiled and measured. It creates none."""

import os
from pathlib import Path

import platformdirs

__all__ = ["cache_directory", "tuning_directory", "uses_tuning_tables"]

NO_TABLES = "off"


def cache_directory() -> Path:
    """The user's cache of lowlat: below XDG_CACHE_HOME, where that is an absolute path, else the system's own place."""
    return platformdirs.user_cache_path("lowlat", appauthor=False)


def tuning_directory() -> Path:
    """The folder of the user's own tuning tables: LOWLAT_TUNING, else below the user's data directory."""
    own = os.environ.get("LOWLAT_TUNING", "")
    return Path(own) if own and own != NO_TABLES else platformdirs.user_data_path("lowlat", appauthor=False) / "tuning"


def uses_tuning_tables() -> bool:
    """Whether plans are looked up in tables; with LOWLAT_TUNING=off all are derived, to be compared with those."""
    return os.environ.get("LOWLAT_TUNING", "") != NO_TABLES
