"""This module reads the version of the installed lowlat."""

from importlib import metadata

__all__ = ["installed_version"]


def installed_version() -> str:
    """Return the version of the installed lowlat; "" if it is only on the path."""
    try:
        return metadata.version("lowlat")
    except metadata.PackageNotFoundError:
        return ""
