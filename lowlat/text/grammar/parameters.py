"""This module writes the grammar of a function's arguments as tags: `<parameter=key>`, value, `</parameter>`.

A string is any text up to its closing tag; other values are JSON. Parameters come in the order of the schema.
"""

import json
from collections.abc import Mapping
from typing import Any

from lowlat.text.answers.values import kinds_of
from lowlat.text.grammar.exact import NotHeld
from lowlat.text.templates.tags import END_PARAMETER, PARAMETER

__all__ = ["parameter_rules"]

PLAIN = frozenset({"type", "description", "title", "default", "examples", "enum", "const", "anyOf", "oneOf"})
DEFINITIONS = ("$defs", "definitions")
NAMING = ("description", "title", "$schema")
HELD = frozenset({"type", "properties", "required", "additionalProperties", *DEFINITIONS, *NAMING})


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
            return [f'{name}: ""']
        key = f"{_literal(PARAMETER)} /[^>\\n]+/ {_literal('>' + line)}"
        return [f"{name}: ({key} {name}_value)*", f"{name}_value[lazy]: TEXT {_literal(end)}"]
    places, rules = [], []
    for place, key in enumerate(properties):
        if not strict and (">" in key or "\n" in key):
            continue
        rule = f"{name}_{place}"
        places.append(rule if key in required else f"{rule}?")
        begin = _literal(f"{PARAMETER}{key}>{line}")
        rules += [f"{rule}: {begin} {rule}_value", *_value(f"{rule}_value", key, schema, options, end, strict=strict)]
    return [f"{name}: {' '.join(places)}", *rules]


def _value(
    rule: str, key: str, schema: Mapping[str, Any], options: Mapping[str, Any], end: str, *, strict: bool
) -> list[str]:
    kinds = kinds_of(schema, key)
    own = schema["properties"][key]
    own = own if isinstance(own, Mapping) else {}
    texts = own.get("enum", [own["const"]] if "const" in own else None)
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        if any(END_PARAMETER in text for text in texts):
            raise NotHeld(f"{key}: a value that holds {END_PARAMETER!r}")
        return [f"{rule}: ({' | '.join(map(_literal, texts))}) {_literal(end)}"]
    if "string" in kinds:
        if strict and not own.keys() <= PLAIN:
            others = ", ".join(sorted(own.keys() - PLAIN))
            raise NotHeld(f"{key}: {others} of a string, which this model's format writes as free text")
        return [f"{rule}[lazy]: TEXT {_literal(end)}"]
    defined = {name: schema[name] for name in DEFINITIONS if name in schema}
    value = json.dumps({**defined, **own, **options})
    return [f"{rule}: {rule}_json {_literal(end)}", f"{rule}_json: %json {value}"]


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
