"""This module raises the number of files that this process may have open, as every connection is one."""

import resource

__all__ = ["raise_descriptor_limit"]

UNLIMITED = 1 << 20


def raise_descriptor_limit() -> int:
    """Let this process open as many files as the hard limit allows, and return how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # some systems offer more than they give
            pass
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft
