"""This module finds the JSON value that a text stands for, by the types of a function's schema."""

import json
from collections.abc import Mapping
from typing import Any

from lowlat.text.schemas import referred

__all__ = ["constants_of", "is_string", "kinds_of", "takes_nothing", "typed_value", "value_of_kinds"]

MAX_DEPTH = 8
ALL = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def kinds_of(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a function's schema lets an argument have; all where it says nothing."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    if schema is None and isinstance(parameters.get("additionalProperties"), Mapping):
        schema = parameters["additionalProperties"]
    return _kinds(schema, parameters, MAX_DEPTH)


def constants_of(schema: Any) -> list[Any] | None:
    """The values that a schema names by enum or const, those of its types; None where it names none."""
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return None
    kinds = _kinds(schema, schema, MAX_DEPTH)
    return [value for value in values if _of_value(value) & kinds]


def is_string(parameters: Mapping[str, Any], key: str) -> bool:
    """Whether an argument can be nothing but a string."""
    return kinds_of(parameters, key) == {"string"}


def typed_value(text: str, parameters: Mapping[str, Any], key: str) -> str:
    """The JSON of an argument: of another type than a string where its text is one that the schema allows."""
    return value_of_kinds(text, kinds_of(parameters, key))


def value_of_kinds(text: str, kinds: frozenset[str]) -> str:
    """The same by the types that the argument may have."""
    stripped = text.strip()
    written = WORDS.get(stripped, stripped)
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        value = text
    if not isinstance(value, str) and _kind(value) & kinds:
        return written
    if isinstance(value, float) and stripped[-1].isdigit() and "number" in kinds and "string" not in kinds:
        return written  # too large for a float, and a number all the same
    if "string" not in kinds and isinstance(value, str) and stripped.startswith('"') and len(kinds) < len(ALL):
        return written  # the model's own mistake, as it wrote it
    return json.dumps(text, ensure_ascii=False)


def takes_nothing(schema: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a schema is false, or a choice of such alone."""
    if not isinstance(schema, Mapping):
        return schema is False
    choices = (schema.get(name) for name in ("anyOf", "oneOf") if depth)
    return any(isinstance(c, list) and c and all(takes_nothing(each, depth - 1) for each in c) for c in choices)


def _kind(value: Any) -> frozenset[str]:
    """The types of a JSON value that is no string; NaN and infinity have none."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"}) if value - value == 0 else frozenset()
    return frozenset({"array" if isinstance(value, list) else "object"})


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return ALL
    if isinstance(schema.get("$ref"), str):
        return _kinds(referred(schema["$ref"], root), root, depth - 1)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named}) & ALL or ALL
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str)) & ALL or ALL
    if "const" in schema:
        return _of_value(schema["const"])
    if isinstance(schema.get("enum"), list):
        return frozenset().union(*map(_of_value, schema["enum"])) or ALL
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return frozenset().union(*(_kinds(part, root, depth - 1) for part in schema[name])) or ALL
    if isinstance(schema.get("allOf"), list):
        return ALL.intersection(*(_kinds(part, root, depth - 1) for part in schema["allOf"])) or ALL
    return frozenset({"object"}) if "properties" in schema else ALL


def _of_value(value: Any) -> frozenset[str]:
    return frozenset({"string"}) if isinstance(value, str) else _kind(value)
