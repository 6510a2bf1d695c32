"""This module compares a speculation's configuration with a loaded runtime's, option by option."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LimitCheck", "compare_limits"]


@dataclass(frozen=True)
class LimitCheck:
    """One option of a configuration, compared with the runtime's value.

    asked    the configuration's value; None if it leaves the value open
    loaded   the runtime's value; None if it has none
    fits     whether the loaded runtime can run the configuration's value
    verdict  the same in words
    """

    name: str
    asked: Any
    loaded: Any
    fits: bool
    verdict: str


def compare_limits(asked: Mapping[str, Any], loaded: Mapping[str, Any], bounded: frozenset[str]) -> list[LimitCheck]:
    """Compare option by option, in the order of `asked`.

    bounded  options whose loaded value is a size that must not be exceeded; others must be equal
    """
    return [_compare(name, value, loaded.get(name), name in bounded) for name, value in asked.items()]


def _compare(name: str, asked: Any, loaded: Any, bounded: bool) -> LimitCheck:
    if asked is None:
        return LimitCheck(name, asked, loaded, True, "left open")
    if loaded is None:
        return LimitCheck(name, asked, loaded, False, "it does not speculate" if bounded else "not loaded")
    if asked == loaded:
        return LimitCheck(name, asked, loaded, True, "the same")
    if not bounded:
        return LimitCheck(name, asked, loaded, False, "another; load again")
    if asked < loaded:
        return LimitCheck(name, asked, loaded, True, "within what is loaded")
    return LimitCheck(name, asked, loaded, False, "above what is loaded; load again")
