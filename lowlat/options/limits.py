"""This module compares a configuration of speculation with what an engine was loaded with, option by option."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LimitCheck", "compare_limits"]


@dataclass(frozen=True)
class LimitCheck:
    """One option next to the engine's own value.

    asked    the configuration's; None where it leaves the value open
    engine   the engine's; None where it has no such value
    fits     whether an engine of these sizes runs what is asked for
    verdict  the same in words
    """

    name: str
    asked: Any
    engine: Any
    fits: bool
    verdict: str


def compare_limits(asked: Mapping[str, Any], engine: Mapping[str, Any], bounded: frozenset[str]) -> list[LimitCheck]:
    """Compare option by option, in the order of `asked`.

    bounded  options whose engine's value is a size that must not be exceeded; others must be equal
    """
    return [_compare(name, value, engine.get(name), name in bounded) for name, value in asked.items()]


def _compare(name: str, asked: Any, engine: Any, bounded: bool) -> LimitCheck:
    if asked is None:
        return LimitCheck(name, asked, engine, True, "left open")
    if engine is None:
        return LimitCheck(name, asked, engine, False, "the engine does not speculate" if bounded else "not loaded")
    if asked == engine:
        return LimitCheck(name, asked, engine, True, "the same")
    if not bounded:
        return LimitCheck(name, asked, engine, False, "another; load again")
    if asked < engine:
        return LimitCheck(name, asked, engine, True, "within the engine's")
    return LimitCheck(name, asked, engine, False, "above the engine's; load again")
