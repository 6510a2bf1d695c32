"""This module tells the version of lowlat that is installed."""

from importlib import metadata

__all__ = ["installed_version"]


def installed_version() -> str:
    """Return the version of lowlat that is installed; empty where it is merely on the path."""
    try:
        return metadata.version("lowlat")
    except metadata.PackageNotFoundError:
        return ""
