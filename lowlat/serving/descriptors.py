"""This module raises this process's limit of open files, as every connection is one."""

import resource

__all__ = ["raise_descriptor_limit"]

UNLIMITED = 1 << 20


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # some systems report a hard limit that they refuse to set
            pass
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft
