"""This module lists the kinds of checks that a step can run on the device, and parses their names."""

from lowlat.errors import ConfigError

__all__ = ["CHECK_KINDS", "parse_checks"]

CHECK_KINDS = ("masks", "spans", "lengths")


def parse_checks(text: object) -> frozenset[str]:
    """Return the kinds that a text lists, separated by commas or blanks; "all" means every kind, None no kind.

    Raises ConfigError for anything else.
    """
    if text is None:
        return frozenset()
    if not isinstance(text, str):
        raise ConfigError(f"check must be kinds of checks, {', '.join(CHECK_KINDS)}, got {text!r:.80}")
    named = text.replace(",", " ").split()
    for name in named:
        if name not in (*CHECK_KINDS, "all"):
            raise ConfigError(f"check names {name!r:.40}; the kinds are {', '.join(CHECK_KINDS)}, or all")
    return frozenset(CHECK_KINDS if "all" in named else named)
