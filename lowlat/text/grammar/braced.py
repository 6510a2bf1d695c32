"""This module writes the grammar of a function's arguments as Gemma 4 has them: `{key:value,...}`.

A string is any text up to its mark; numbers, lists and objects are as in JSON, without spaces. Keys come sorted, as the
family's template writes them, those that the schema does not name after those that it does.
"""

import json
from collections.abc import Mapping
from typing import Any

from lowlat.text.answers.values import constants_of, kinds_of, takes_nothing
from lowlat.text.grammar.exact import NotHeld
from lowlat.text.grammar.free_text import NUMBERS, TEXT_KEYWORDS, expressions_of, spelled, whole_expression, without
from lowlat.text.grammar.one_of import unheld
from lowlat.text.grammar.references import LABELS, declared, merged, resolved
from lowlat.text.schemas import DEFINITIONS
from lowlat.text.templates.tags import STRING_MARK

__all__ = ["BracedRules"]

COMMON = frozenset({"type", "enum", "const"})
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
HELD = {  # keywords that rules hold, by the kind of value
    "string": COMMON | TEXT_KEYWORDS,
    "array": COMMON | {"items", "prefixItems", "additionalItems", "minItems", "maxItems"},
    "object": COMMON | {"properties", "required", "additionalProperties", "patternProperties"},
    "integer": COMMON | BOUNDS,
    "number": COMMON | BOUNDS,
    "boolean": COMMON,
    "null": COMMON,
}
PLAIN = {
    **NUMBERS,
    "boolean": '("true" | "false")',
    "null": '"null"',
}
ANY_KEY = r"/[^:{},\[\]<>\s\"]+/"
COMMA = ' "," '
MAX_DEPTH, MAX_ITEMS = 16, 64
MAX_VALUES = 5000  # of a schema: what stands next to choices, and in allOf, multiplies


class BracedRules:
    """Rules of the library's language for values of schemas.

    mark     the string's mark, as the library takes it
    root     the schema of all arguments, to which references lead
    options  of the library, for numbers, which are JSON
    strict   what would not be held is an error
    Needs the rule TEXT. `lines` are the rules made; `any` is one that every value fits.
    """

    def __init__(
        self, mark: str, root: Mapping[str, Any], options: Mapping[str, Any], *, strict: bool, prefix: str
    ) -> None:
        self._mark, self._root, self._options = mark, root, options
        self._strict, self._prefix = strict, prefix
        self._num = self._num_values = 0
        self._referred: dict[str, str] = {}  # rules of what references lead to
        self._is_spelled = mark.startswith('"')  # the mark is text, not a token
        lazy = "[lazy]" if self._is_spelled else ""
        self._text, self._any = f"{prefix}_text", f"{prefix}_any"
        self._free = f'"{{" ({ANY_KEY} ":" {self._any} ("," {ANY_KEY} ":" {self._any})*)? "}}"'
        self.lines = [
            f"{prefix}_end{lazy}: TEXT {mark}",
            f"{self._text}: {mark} {prefix}_end",
            f"{self._any}: {self._text} | {PLAIN['number']} | {PLAIN['boolean']} | {PLAIN['null']}"
            f' | "[" ({self._any} ("," {self._any})*)? "]" | {self._free}',
        ]

    def arguments(self) -> str:
        """The expression of an object of all arguments. Raises NotHeld as `value` does."""
        schema = {name: value for name, value in self._root.items() if name not in DEFINITIONS}
        return self.value(schema if schema.keys() & {"type", "$ref"} else {"type": "object", **schema})

    def value(self, schema: Any, depth: int = MAX_DEPTH) -> str:
        """The expression of a value that fits a schema. Raises NotHeld, where strict, for what would not be held."""
        if takes_nothing(schema):
            raise NotHeld("a schema that takes no value: false, or of such alone")
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise NotHeld(f"more than {MAX_VALUES} values, with those of each choice and allOf")
        if not isinstance(schema, Mapping) or not schema.keys() - LABELS:
            return self._any
        if schema.keys() - LABELS == {"$ref"}:
            return self._reference(schema["$ref"])
        try:
            schema = merged(schema, self._root, strict=self._strict)
        except NotHeld:
            if self._strict:
                raise
            return self._any
        for name in ("anyOf", "oneOf"):  # where strict, no value fits two branches of a oneOf: `one_of.py`
            if isinstance(schema.get(name), list) and depth:
                return self._choice(name, schema, depth)
        kinds = kinds_of({"properties": {"x": schema}}, "x")
        held = frozenset().union(*(HELD[kind] for kind in kinds)) | LABELS
        if self._strict and (not schema.keys() <= held or not depth):
            others = sorted(schema.keys() - held)
            raise NotHeld(unheld(self._root, others) if others else f"objects more than {MAX_DEPTH} deep are not held")
        constants = constants_of(schema)
        if constants is not None:
            if not constants:
                raise NotHeld("enum, or const, has no value of the schema's type")
            return "(" + " | ".join(map(self._constant, constants)) + ")"
        is_open = "type" not in schema and kinds != {"object"}  # which properties say, too
        if is_open and self._strict:
            raise NotHeld(f"{', '.join(sorted(schema.keys() - LABELS))} without a type; give one")
        if is_open or not depth:
            return self._any
        return "(" + " | ".join(self._of_kind(kind, schema, depth) for kind in sorted(kinds)) + ")"

    def _choice(self, name: str, schema: Mapping[str, Any], depth: int) -> str:
        """The expression of a value that fits one of several schemas, and what stands next to these."""
        if not schema[name]:
            raise NotHeld(f"{name} is empty")
        others = {key: value for key, value in schema.items() if key != name and key not in LABELS}
        branches = [each for each in schema[name] if not takes_nothing(each)]
        if others:
            branches = [{"allOf": [others, each]} for each in branches]
        return "(" + " | ".join(self.value(each, depth - 1) for each in branches) + ")"

    def _reference(self, reference: str) -> str:
        """The rule of what a reference leads to, which may refer to itself."""
        found = resolved("", {"$ref": reference}, self._root, strict=self._strict)
        if found == {"$ref": reference}:
            return self._any
        if reference not in self._referred:
            self._referred[reference] = rule = self._name("ref")
            self.lines.append(f"{rule}: {self.value(found)}")
        return self._referred[reference]

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "object":
            return self._object(schema, depth)
        bounds = {name: value for name, value in schema.items() if name in BOUNDS}
        if kind in ("boolean", "null") or not bounds:
            return PLAIN[kind]
        rule = self._name("number")
        self.lines.append(f"{rule}: %json {json.dumps({'type': kind, **bounds, **self._options})}")
        return rule

    def _string(self, schema: Mapping[str, Any]) -> str:
        texts = expressions_of(schema, strict=self._strict, is_marked=not self._is_spelled)
        if not texts:
            return self._text
        terminal = self._name("text").upper()
        whole = " & ".join(texts)
        if not self._is_spelled:
            self.lines.append(f"{terminal}: {whole}")
            return f"{self._mark} {terminal} {self._mark}"
        self.lines.append(f"{terminal}: ({whole} & ~{without(STRING_MARK)}) {self._mark}")
        return f"{self._mark} {terminal}"

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._mark} {_literal(value)} {self._mark}" if value else f"{self._mark} {self._mark}"
        if isinstance(value, list):
            return f'"[" {COMMA.join(map(self._constant, value))} "]"'
        if isinstance(value, dict):
            pairs = (f"{_literal(key + ':')} {self._constant(value[key])}" for key in sorted(value, key=str.lower))
            return f'"{{" {COMMA.join(pairs)} "}}"'
        return _literal(json.dumps(value))

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        first, rest = schema.get("prefixItems", []), schema.get("items")
        if isinstance(rest, list):
            first, rest = rest, schema.get("additionalItems")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or (most is not None and not isinstance(most, int)) or least > MAX_ITEMS:
            raise NotHeld(f"minItems and maxItems must be integers, minItems at most {MAX_ITEMS}")
        first = first[:most] if isinstance(first, list) else []
        fits = next((place for place, each in enumerate(first) if takes_nothing(each)), len(first))
        num_rest = None if most is None else most - len(first)
        if fits < len(first) or takes_nothing(rest):
            first, num_rest = first[:fits], 0
        if num_rest == 0 and least > len(first):
            raise NotHeld(f"minItems {least} of a list that takes no value, or not so many")
        after = ""
        if num_rest != 0:
            item, num_least = self.value(rest, depth - 1), max(least - len(first), 0)
            if first:
                after = f'("," {item}){{{num_least},{"" if num_rest is None else num_rest}}}'
            else:
                end = "" if num_rest is None else num_rest - 1
                after = f'{item} ("," {item}){{{max(num_least - 1, 0)},{end}}}'
                after = after if least else f"({after})?"
        for place in reversed(range(len(first))):
            after = f"{COMMA if place else ''}{self.value(first[place], depth - 1)} {after}"
            after = after if place < least else f"({after})?"
        return f'"[" {after} "]"'

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties, required = declared(schema)
        barred = {key for key, each in properties.items() if takes_nothing(each)}
        if not barred.isdisjoint(required):
            raise NotHeld(f"{min(barred.intersection(required))}: is required, and its schema takes no value")
        odd = [key for key in properties if key not in barred and not _is_plain(key)]
        if odd and (self._strict or not set(required).isdisjoint(odd)):
            raise NotHeld(
                f"the property {odd[0]!r:.80} has a colon or a mark in its name, or a space or a quote at an end"
            )
        extra = self._extra(schema, properties, depth)
        keys = sorted((key for key in properties if key not in barred and key not in odd), key=str.lower)
        if not keys:
            return f'"{{" ({extra} ("," {extra})*)? "}}"' if extra else '"{" "}"'
        name = self._name("object")
        for place, key in enumerate(keys):
            pair = f"{_literal(key + ':')} {self.value(properties[key], depth - 1)}"
            self.lines.append(f"{name}_pair_{place}: {pair}")
        for kind, comma in (("first", ""), ("more", '"," ')):
            for place, key in enumerate(keys):
                taken = f"{comma}{name}_pair_{place} {name}_more_{place + 1}"
                passed = "" if key in required else f" | {name}_{kind}_{place + 1}"
                self.lines.append(f"{name}_{kind}_{place}: {taken}{passed}")
        end = f'({extra} ("," {extra})*)?' if extra else '""'
        self.lines.append(f"{name}_first_{len(keys)}: {end}")
        end = f'("," {extra})*' if extra else '""'
        self.lines.append(f"{name}_more_{len(keys)}: {end}")
        return f'"{{" {name}_first_0 "}}"'

    def _extra(self, schema: Mapping[str, Any], properties: Mapping[str, Any], depth: int) -> str:
        """The expression of a pair whose key is none of the properties; "" where none may come.

        Keys that a schema names no property for come where it says what their values are, or names none at all.
        """
        patterns, others = schema.get("patternProperties"), schema.get("additionalProperties")
        named = "".join(f" & ~/{spelled(key)}/" for key in properties)
        if isinstance(patterns, Mapping) and patterns:
            if len(patterns) > 1 and self._strict:
                raise NotHeld("several patternProperties, of which one key may match two; give one")
            (pattern, value), whole = next(iter(patterns.items())), whole_expression(next(iter(patterns)))
            if whole is None and self._strict:
                raise NotHeld(f"patternProperties {pattern!r:.80} is not held in this model's format")
            if takes_nothing(value):
                return ""
            if whole is not None and len(patterns) == 1:
                return self._pair(f" & /{whole}/{named}", self.value(value, depth - 1))
            return self._pair(named, self._any)
        if takes_nothing(others) or (others is None and properties):
            return ""
        return self._pair(named, self._any if others is None else self.value(others, depth - 1))

    def _pair(self, keys: str, value: str) -> str:
        terminal, rule = self._name("key").upper(), self._name("pair")
        self.lines += [
            f'{terminal}: ({ANY_KEY}{keys}) ":"',
            f"{rule}: {terminal} {value}",
        ]
        return rule

    def _name(self, of: str) -> str:
        self._num += 1
        return f"{self._prefix}_{of}_{self._num}"


def _is_plain(key: str) -> bool:
    """Whether a key is read back from where a colon follows it."""
    is_bare = key == key.strip() == key.strip('"') and STRING_MARK not in key
    return bool(key) and is_bare and ":" not in key and not key.startswith("}")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
