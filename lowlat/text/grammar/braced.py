"""This module writes the grammar of a function's arguments as Gemma 4 has them: `{key:value,...}`.

A string is any text up to its mark; numbers, lists and objects are as in JSON, without spaces. Keys come sorted, as the
family's template writes them.
"""

import json
from collections.abc import Mapping
from typing import Any

from lowlat.text.answers.values import constants_of, kinds_of, takes_nothing
from lowlat.text.grammar.exact import NotHeld
from lowlat.text.grammar.references import NAMING

__all__ = ["BracedRules"]

HELD = {  # keywords that rules hold, by the kind of value
    "string": frozenset({"type", "enum", "const"}),
    "array": frozenset({"type", "items", "minItems", "maxItems"}),
    "object": frozenset({"type", "properties", "required", "additionalProperties"}),
    "integer": frozenset({"type", "enum", "const"}),
    "number": frozenset({"type", "enum", "const"}),
    "boolean": frozenset({"type", "enum", "const"}),
    "null": frozenset({"type", "enum", "const"}),
}
PLAIN = {
    "integer": r"/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/",
    "boolean": '("true" | "false")',
    "null": '"null"',
}
ANY_KEY = r"/[^:{},\[\]<>\s\"]+/"
MAX_DEPTH, MAX_ITEMS = 16, 64


class BracedRules:
    """Rules of the library's language for values of schemas.

    mark    the string's mark, as the library takes it
    strict  what would not be held is an error
    Needs the rule TEXT. `lines` are the rules made; `any` is one that every value fits.
    """

    def __init__(self, mark: str, *, strict: bool, prefix: str) -> None:
        self._mark, self._strict, self._prefix = mark, strict, prefix
        self._num = 0
        lazy = "[lazy]" if mark.startswith('"') else ""
        self._text, self._any = f"{prefix}_text", f"{prefix}_any"
        members = f'"{{" ({ANY_KEY} ":" {self._any} ("," {ANY_KEY} ":" {self._any})*)? "}}"'
        self.lines = [
            f"{prefix}_end{lazy}: TEXT {mark}",
            f"{self._text}: {mark} {prefix}_end",
            f"{self._any}: {self._text} | {PLAIN['number']} | {PLAIN['boolean']} | {PLAIN['null']}"
            f' | "[" ({self._any} ("," {self._any})*)? "]" | {members}',
        ]

    def value(self, schema: Any, depth: int = MAX_DEPTH) -> str:
        """The expression of a value that fits a schema. Raises NotHeld, where strict, for what would not be held."""
        if takes_nothing(schema):
            raise NotHeld("a schema that takes no value: false, or of such alone")
        if not isinstance(schema, Mapping) or not schema.keys() - NAMING:
            return self._any
        for name in ("anyOf", "oneOf"):  # where strict, no value fits two branches of a oneOf: `one_of.py`
            if isinstance(schema.get(name), list) and schema.keys() - NAMING == {name} and depth:
                if not schema[name]:
                    raise NotHeld(f"{name} is empty")
                branches = [each for each in schema[name] if not takes_nothing(each)]
                return "(" + " | ".join(self.value(each, depth - 1) for each in branches) + ")"
        kinds = kinds_of({"properties": {"x": schema}}, "x")
        held = frozenset().union(*(HELD[kind] for kind in kinds)) | NAMING
        if self._strict and (not schema.keys() <= held or not depth):
            others = ", ".join(sorted(schema.keys() - held)) or "objects so deep"
            raise NotHeld(f"{others}: not held in this model's format")
        constants = constants_of(schema)
        if constants is not None:
            if not constants:
                raise NotHeld("enum, or const, has no value of the schema's type")
            return "(" + " | ".join(map(self._constant, constants)) + ")"
        is_open = "type" not in schema and kinds != {"object"}  # which properties say, too
        if is_open and self._strict:
            raise NotHeld(f"{', '.join(sorted(schema.keys() - NAMING))} without a type; give one")
        if is_open or not depth:
            return self._any
        return "(" + " | ".join(self._of_kind(kind, schema, depth) for kind in sorted(kinds)) + ")"

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return self._text
        if kind == "array":
            return self._array(schema, depth)
        return self.arguments(schema, depth) if kind == "object" else PLAIN[kind]

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._mark} {_literal(value)} {self._mark}" if value else f"{self._mark} {self._mark}"
        if isinstance(value, list | dict):
            raise NotHeld("a constant that is a list or an object")
        return _literal(json.dumps(value))

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        is_empty = takes_nothing(schema.get("items")) or schema.get("maxItems") == 0
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or (most is not None and not isinstance(most, int)) or least > MAX_ITEMS:
            raise NotHeld(f"minItems and maxItems must be integers, minItems at most {MAX_ITEMS}")
        if is_empty and least > 0:
            raise NotHeld(f"minItems {least} of a list that takes no value")
        if is_empty:
            return '"[" "]"'
        item = self.value(schema.get("items"), depth - 1)
        end = "" if most is None else most - 1
        some = f'{item} ("," {item}){{{max(least - 1, 0)},{end}}}'
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'

    def arguments(self, schema: Mapping[str, Any], depth: int = MAX_DEPTH) -> str:
        """The expression of an object. Raises NotHeld as `value` does."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        if self._strict:
            self._check(schema, properties, required)
        barred = {key for key, each in properties.items() if takes_nothing(each)}
        if not barred.isdisjoint(required):
            raise NotHeld(f"{min(barred.intersection(required))}: is required, and its schema takes no value")
        if not properties:
            if schema.get("additionalProperties") is False:
                return '"{" "}"'
            return f'"{{" ({ANY_KEY} ":" {self._any} ("," {ANY_KEY} ":" {self._any})*)? "}}"'
        name = f"{self._prefix}_object_{self._num}"
        self._num += 1
        keys = sorted((key for key in properties if key not in barred and _is_plain(key)), key=str.lower)
        for place, key in enumerate(keys):
            pair = f"{_literal(key + ':')} {self.value(properties[key], depth - 1)}"
            self.lines.append(f"{name}_pair_{place}: {pair}")
        for kind, comma in (("first", ""), ("more", '"," ')):
            for place, key in enumerate(keys):
                taken = f"{comma}{name}_pair_{place} {name}_more_{place + 1}"
                passed = "" if key in required else f" | {name}_{kind}_{place + 1}"
                self.lines.append(f"{name}_{kind}_{place}: {taken}{passed}")
            self.lines.append(f'{name}_{kind}_{len(keys)}: ""')
        return f'"{{" {name}_first_0 "}}"'

    def _check(self, schema: Mapping[str, Any], properties: Mapping[str, Any], required: list[str]) -> None:
        others = schema.keys() - HELD["object"] - NAMING - {"x-guidance"}
        if others:
            raise NotHeld(f"{', '.join(sorted(others))} of an object is not held in this model's format")
        if not set(required) <= properties.keys():
            raise NotHeld("required names what is not in properties")
        if not all(map(_is_plain, properties)):
            raise NotHeld("a property's name holds a brace, a colon, a comma or white space")


def _is_plain(key: str) -> bool:
    return bool(key) and not any(character in ':{},[]<>"' or character.isspace() for character in key)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
