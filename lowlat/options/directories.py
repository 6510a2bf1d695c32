"""The directories of lowlat on a machine: where it keeps what it fetched and compiled. It creates none of them."""

from pathlib import Path

import platformdirs

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """The user's cache of lowlat: below XDG_CACHE_HOME, where that is an absolute path, else the system's own place."""
    return platformdirs.user_cache_path("lowlat", appauthor=False)
