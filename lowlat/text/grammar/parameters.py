"""This module writes the grammar of a function's arguments as tags: `<parameter=key>`, value, `</parameter>`.

A string is any text up to its closing tag; other values are JSON. Parameters come in the order of the schema.
"""

import json
from collections.abc import Mapping
from typing import Any

from lowlat.text.answers.values import constants_of, kinds_of, takes_nothing, value_of_kinds
from lowlat.text.grammar.exact import NotHeld
from lowlat.text.grammar.one_of import first_overlap, refusal
from lowlat.text.grammar.references import DEFINITIONS, NAMING, resolved
from lowlat.text.templates.tags import END_PARAMETER, PARAMETER

__all__ = ["parameter_rules"]

CHOICES = ("anyOf", "oneOf")
BARE = frozenset({"type"}) | NAMING
CONSTANT = frozenset({"enum", "const"}) | BARE
EMPTY = '""'
HELD = frozenset({"type", "properties", "required", "additionalProperties", *DEFINITIONS}) | NAMING


def parameter_rules(
    name: str, schema: Mapping[str, Any], options: Mapping[str, Any], *, line: str, strict: bool
) -> list[str]:
    """Rules of the library's language, of which the first, by this name, is all parameters of a call.

    schema   of the arguments' object, made exact
    options  of the library, for values that are JSON
    line     what stands between the tags and the value: a line break, or nothing
    Needs the rule TEXT. Raises NotHeld, where strict, for what would not be held.
    """
    end = f"{line}{END_PARAMETER}\n"
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    if strict:
        _check(schema, properties, required)
    if not properties:
        if schema.get("additionalProperties") is False or strict:
            return [f"{name}: {EMPTY}"]
        key = f"{_literal(PARAMETER)} /[^>\\n]+/ {_literal('>' + line)}"
        return [f"{name}: ({key} {name}_value)*", f"{name}_value[lazy]: TEXT {_literal(end)}"]
    places, rules = [], []
    for place, key in enumerate(properties):
        if not strict and (">" in key or "\n" in key):
            continue
        if takes_nothing(resolved(key, properties[key], schema, strict=strict)):
            if key in required:
                raise NotHeld(f"{key}: is required, and its schema takes no value")
            continue
        rule = f"{name}_{place}"
        places.append(rule if key in required else f"{rule}?")
        begin = _literal(f"{PARAMETER}{key}>{line}")
        rules += [f"{rule}: {begin} {rule}_value", *_value(f"{rule}_value", key, schema, options, end, strict=strict)]
    return [f"{name}: {' '.join(places) or EMPTY}", *rules]


def _value(
    rule: str, key: str, schema: Mapping[str, Any], options: Mapping[str, Any], end: str, *, strict: bool
) -> list[str]:
    own = schema["properties"][key]
    own = own if isinstance(own, Mapping) else {}
    found = resolved(key, own, schema, strict=strict)
    found = found if isinstance(found, Mapping) else {}
    choice = next((name for name in CHOICES if found.keys() - NAMING == {name} and isinstance(found[name], list)), None)
    written: list[Any] = [found] if choice is None else [each for each in found[choice] if not takes_nothing(each)]
    branches = [resolved(key, branch, schema, strict=strict) for branch in written]
    is_text = ["string" in kinds_of({**schema, "properties": {key: branch}}, key) for branch in branches]
    defined = {name: schema[name] for name in DEFINITIONS if name in schema}
    if not any(is_text):
        value = json.dumps({**defined, **own, **options})
        return [f"{rule}: {rule}_json {_literal(end)}", f"{rule}_json: %json {value}"]
    constants = [_constants(branch) for branch in branches]
    is_free = any(each is None and text for each, text in zip(constants, is_text, strict=True))
    if strict:
        own = {**found, choice: branches} if choice is not None else found
        _check_text(key, {**schema, "properties": {key: own}}, branches, constants, is_free=is_free)
    if is_free:
        return [f"{rule}[lazy]: TEXT {_literal(end)}"]
    ways, rules = [_literal(_text(key, value)) for each in constants for value in each or ()], list[str]()
    if choice is not None and None in constants:
        others = [branch if each is None else False for branch, each in zip(written, constants, strict=True)]
        ways.append(f"{rule}_json")
        rules.append(f"{rule}_json: %json {json.dumps({**defined, choice: others, **options})}")
    return [f"{rule}: ({' | '.join(ways)}) {_literal(end)}", *rules]


def _constants(schema: Any) -> list[Any] | None:
    """The values that a schema names, of its types; None where it names none, or a list or an object."""
    values = constants_of(schema)
    return None if not values or any(isinstance(value, list | dict) for value in values) else values


def _text(key: str, value: Any) -> str:
    """A constant as it is written. Raises NotHeld for one that holds the closing tag."""
    if not isinstance(value, str):
        return json.dumps(value)
    if END_PARAMETER in value:
        raise NotHeld(f"{key}: a value that holds {END_PARAMETER!r}")
    return value


def _check_text(
    key: str, schema: Mapping[str, Any], branches: list[Any], constants: list[list[Any] | None], *, is_free: bool
) -> None:
    """Refuse what would not be held of a value that may be a string.

    is_free  it may be any text, which may also read as a value of another type
    """
    path = first_overlap(schema["properties"][key])
    if path is not None:
        raise NotHeld(refusal(("properties", key, *path)))
    for branch, values in zip(branches, constants, strict=True):
        if not isinstance(branch, Mapping) or (values is None and not is_free):
            continue
        is_text = values is not None and all(isinstance(value, str) for value in values)
        others = ", ".join(sorted(branch.keys() - (CONSTANT if is_text or not is_free else BARE)))
        if others:
            raise NotHeld(f"{key}: {others} of a string, which this model's format writes as free text")
    kinds = kinds_of(schema, key)
    for text in (value for values in constants for value in values or () if isinstance(value, str)):
        if value_of_kinds(text, kinds) != _literal(text):
            raise NotHeld(f"{key}: the string {text!r:.80}, which reads as a value of another type")


def _check(schema: Mapping[str, Any], properties: Mapping[str, Any], required: list[Any]) -> None:
    others = schema.keys() - HELD - {"x-guidance"}
    if others:
        raise NotHeld(f"{', '.join(sorted(others))} next to properties is not held in this model's format")
    if not {name for name in required if isinstance(name, str)} <= properties.keys():
        raise NotHeld("required names what is not in properties")
    if any(">" in key or "\n" in key for key in properties):
        raise NotHeld("a property's name holds > or a line break")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
