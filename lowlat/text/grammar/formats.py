"""Formats of JSON Schema that the library holds too loosely, and the expressions that make them exact.

It allows the 29th of February in every year, the second 60 in every minute, labels of host names that are no Punycode,
and host names of any length. Beside the format stands what forbids these; for leap seconds and Punycode, all of them.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["exact_formats", "exact_text"]

_FOURTHS = "(0[48]|[2468][048]|[13579][26])"  # years of a century that have the day
_LEAP = f"([0-9]{{2}}{_FOURTHS}|{_FOURTHS}00)"
_DATE = rf"([0-9]{{4}}-(0[13-9]|1[0-2])-[0-9]{{2}}|[0-9]{{4}}-02-([01][0-9]|2[0-8])|{_LEAP}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_LABEL = "([^.]{1,3}|[^.]{2}([^-.][^.]|-[^-.])[^.]*)"  # without two hyphens in the third place
EXACT: Mapping[str, Mapping[str, str | int]] = MappingProxyType(
    {
        "date": {"pattern": f"^{_DATE}$"},
        "date-time": {"pattern": f"^{_DATE}[^0-9]{_TIME}"},
        "time": {"pattern": f"^{_TIME}"},
        "hostname": {"pattern": rf"^{_LABEL}(\.{_LABEL})*$", "maxLength": 253},
    }
)
VALUES = frozenset({"const", "default", "enum", "examples"})  # keywords that hold documents
NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})  # schemas by name


def exact_text(text: str) -> str:
    """The text of a schema with its formats made exact; the same text where there is nothing to do, or no JSON."""
    if '"format"' not in text:
        return text
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return text
    exact = exact_formats(schema)
    return text if exact == schema else json.dumps(exact)


def exact_formats(schema: Any) -> Any:
    """A schema with `allOf` beside each format that needs it; as it was where it is too deep to be looked at."""
    try:
        return _exact(schema)
    except RecursionError:
        return schema


def _exact(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_exact(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _exact_value(name, value) for name, value in schema.items()}
    name, parts = made.get("format"), made.get("allOf", [])
    if isinstance(name, str) and name in EXACT and isinstance(parts, list):
        made["allOf"] = [*parts, dict(EXACT[name])]
    return made


def _exact_value(name: str, value: Any) -> Any:
    if name in VALUES:
        return value
    if name in NAMED and isinstance(value, dict):
        return {key: _exact(each) for key, each in value.items()}
    return _exact(value)
