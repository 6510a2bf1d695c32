"""JSON schemas of the kinds that people send: by hand, by chance, and cases of single keywords with their documents."""

import random
from typing import Any

__all__ = ["CASES", "UNSUPPORTED", "WRITTEN", "schema_by_chance"]


def _closed(**properties: Any) -> dict[str, Any]:
    """An object of just these properties, all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT, WHOLE, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
SHORT = {"type": "string", "maxLength": 12}

WRITTEN: dict[str, dict[str, Any]] = {
    "weather call": _closed(
        city=SHORT, unit={"enum": ["celsius", "fahrenheit"]}, days={"type": "integer", "minimum": 1}
    ),
    "search call": {"type": "object", "properties": {"query": SHORT, "limit": WHOLE}, "required": ["query"]},
    "invoice": _closed(
        number={"type": "string", "pattern": "^INV-[0-9]{4}$"},
        lines={"type": "array", "items": _closed(item=SHORT, price=NUMBER), "minItems": 1, "maxItems": 3},
        paid=FLAG,
    ),
    "address": _closed(street=SHORT, zip={"type": "string", "pattern": "^\\d{5}(-\\d{4})?$"}, country={"const": "US"}),
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": _closed(value=WHOLE, children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2})
        },
    },
    "linked list": {
        "$ref": "#/$defs/cell",
        "$defs": {"cell": _closed(head=WHOLE, tail={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/cell"}]})},
    },
    "package": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z][a-z0-9-]{0,20}$"},
            "version": {"type": "string", "pattern": "^\\d+\\.\\d+\\.\\d+$"},
            "dependencies": {"type": "object", "additionalProperties": SHORT, "maxProperties": 2},
            "private": FLAG,
        },
        "required": ["name", "version"],
        "additionalProperties": False,
    },
    "deployment": _closed(
        apiVersion={"const": "apps/v1"},
        kind={"const": "Deployment"},
        metadata=_closed(name=SHORT, labels={"type": "object", "additionalProperties": SHORT, "maxProperties": 2}),
        spec=_closed(replicas={"type": "integer", "minimum": 0, "maximum": 9}),
    ),
    "point": {"type": "array", "prefixItems": [NUMBER, NUMBER], "items": False, "minItems": 2},
    "bounds": _closed(low={"type": "number", "minimum": -1, "maximum": 1}, high={"type": "integer", "maximum": 100}),
    "event": _closed(at={"type": "string", "format": "date-time"}, id={"type": "string", "format": "uuid"}),
    "contact": _closed(mail={"type": "string", "format": "email"}, born={"type": "string", "format": "date"}),
    "union by tag": {
        "oneOf": [
            _closed(kind={"const": "circle"}, radius=NUMBER),
            _closed(kind={"const": "square"}, side=NUMBER),
        ]
    },
    "nullable": _closed(note={"type": ["string", "null"], "maxLength": 9}, size={"type": ["integer", "null"]}),
    "merged": {
        "allOf": [
            {"type": "object", "properties": {"a": WHOLE}, "required": ["a"]},
            {"type": "object", "properties": {"b": SHORT}, "required": ["b"]},
        ]
    },
    "by pattern": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,4}$": WHOLE},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "mixed enum": {"enum": ["a", 1, None, True, [1, 2], {"k": "v"}]},
    "matrix": {
        "type": "array",
        "items": {"type": "array", "items": WHOLE, "minItems": 2, "maxItems": 2},
        "maxItems": 2,
    },
    "lengths": _closed(code={"type": "string", "minLength": 3, "maxLength": 5}),
    "quotes in keys": _closed(**{'a"b\\c': WHOLE, "é": FLAG}),
    "plain value": {"type": ["integer", "boolean"]},
    "definitions": {
        "definitions": {"id": {"type": "string", "pattern": "^[A-F0-9]{4}$"}},
        **_closed(first={"$ref": "#/definitions/id"}, second={"$ref": "#/definitions/id"}),
    },
    "settings": {
        "type": "object",
        "properties": {
            "theme": {"enum": ["dark", "light"], "default": "dark", "description": "Colours"},
            "zoom": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 5},
        },
        "additionalProperties": False,
        "minProperties": 1,
        "title": "Settings",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    },
    "steps": _closed(
        steps={"type": "array", "items": _closed(thought=SHORT, done=FLAG), "minItems": 1, "maxItems": 2},
        answer={"anyOf": [WHOLE, SHORT]},
    ),
    "multiples": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
}


def schema_by_chance(seed: int) -> dict[str, Any]:
    """A schema of nested objects, lists, unions, references, bounds and patterns."""
    chance = random.Random(seed)
    names = ["id", "name", "kind", "value", "tags", "meta", "created at", "x-ray", "ünï", "count", "ok", "url"]

    def scalar() -> dict[str, Any]:
        low = chance.randrange(-50, 50)
        short = chance.randrange(0, 4)
        return chance.choice(
            [
                FLAG,
                {"type": "null"},
                WHOLE,
                {"type": "integer", "minimum": low, "maximum": low + chance.randrange(0, 2000)},
                {"type": "number", "exclusiveMinimum": low, "maximum": low + chance.randrange(1, 9)},
                {"type": "string", "minLength": short, "maxLength": short + chance.randrange(0, 9)},
                {
                    "type": "string",
                    "pattern": chance.choice(["^[a-z]+$", "^v\\d{1,3}$", "^(GET|PUT) /\\w{0,6}$"]),
                },
                {"type": "string", "format": chance.choice(["date", "time", "ipv4", "uuid", "date-time"])},
                {"enum": chance.sample(["red", "green", 'q"', 7, None, 2.5, "blue sky"], 3)},
                {"const": chance.choice(["fixed", 42, True])},
            ]
        )

    def schema(depth: int) -> dict[str, Any]:
        kind = chance.choice(["object", "object", "array", "union", "ref"]) if depth else "scalar"
        if kind == "object":
            chosen = chance.sample(names, chance.randrange(1, 5))
            made: dict[str, Any] = {"type": "object", "properties": {name: schema(depth - 1) for name in chosen}}
            made["required"] = chosen[: chance.randrange(0, len(chosen) + 1)]
            made["additionalProperties"] = chance.choice([False, False, {"type": "integer"}])
            return made
        if kind == "array":
            least = chance.randrange(0, 3)
            return {"type": "array", "items": schema(depth - 1), "minItems": least, "maxItems": least + 2}
        if kind == "union":
            return {"anyOf": [schema(depth - 1), scalar()]}
        return {"$ref": f"#/$defs/{chance.choice('ab')}"} if kind == "ref" else scalar()

    defs = {"a": schema(0), "b": {"type": "array", "items": schema(0), "maxItems": 2}}
    return {**schema(3), "$defs": defs}


# a schema, documents that it describes, documents that it does not
CASES: list[tuple[dict[str, Any] | bool, list[Any], list[Any]]] = [
    ({"type": "integer"}, [0, -7, 12345], ["1", 1.5, True, None]),
    ({"type": "number"}, [0, -1.5, 1e20], ["1", True]),
    ({"type": "string"}, ["", 'q"\\', "日本\n"], [1, None, ["a"]]),
    ({"type": "boolean"}, [True, False], [0, "true"]),
    ({"type": "null"}, [None], [0, False, ""]),
    ({"type": ["integer", "string"]}, [1, "a"], [None, 1.5]),
    ({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, {}]),
    ({"enum": ["a", 2, None]}, ["a", 2, None], ["b", 3, True]),
    ({"type": "integer", "minimum": 5, "maximum": 12}, [5, 9, 12], [4, 13, -9]),
    ({"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 8}, [6, 7], [5, 8]),
    ({"type": "number", "minimum": 0.5, "maximum": 2.25}, [0.5, 1, 2.25], [0.4, 2.3, -1]),
    ({"type": "integer", "multipleOf": 3, "minimum": 0}, [0, 3, 12], [1, 5]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "日本語"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^a+b$"}, ["ab", "aaab"], ["b", "abc"]),
    ({"type": "string", "pattern": "b"}, ["b", "abc"], ["", "ac"]),
    # classes as ECMA and Python read them, not as sets of sets; letters that are none to one of the two
    ({"type": "string", "pattern": "^[[:alpha:]]+$"}, ["[]", "h]]"], ["b]", "abc", ":h]"]),
    ({"type": "string", "pattern": "^[a-z&&[^b]$"}, ["&", "q", "["], ["]", "A"]),
    ({"type": "string", "pattern": "^[!--][~~][\\w-]$"}, ["-~-", "%~a"], ["a~a", ".~-"]),
    ({"type": "string", "pattern": "^[^\\w\\d]\\W\\D[\\W_]$"}, ["-- _"], ["é---", "-日--", "--٣-", "---é"]),
    ({"type": "string", "pattern": "^[\\w\\W]\\[[\\d\\D]$"}, ["é[٣", "\n[a"], ["éa", "[["]),
    ({"type": "object", "patternProperties": {"^[[]": WHOLE}, "additionalProperties": FLAG}, [{"[": 1}], [{"[": True}]),
    ({"type": "string", "format": "date"}, ["2024-02-29", "2000-02-29"], ["2024-13-01", "today", "2100-02-29"]),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256", "1.2.3"]),
    ({"type": "string", "format": "uuid"}, ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08"]),
    ({"type": "array", "items": {"type": "integer"}}, [[], [1], [1, 2, 3]], [["a"], [1, None], {}]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"type": "null"}},
        [[], [1], [1, "a"], [1, "a", None]],
        [["a"], [1, 2], [1, "a", 3]],
    ),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [[], [1]], [[1, 2]]),
    (_closed(a=WHOLE), [{"a": 1}], [{}, {"a": "1"}, {"a": 1, "b": 2}]),
    ({"type": "object", "properties": {"a": WHOLE}}, [{}, {"a": 1}, {"a": 1, "b": [None]}], [{"a": "x"}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "y": 2}], [{"x": "1"}]),
    ({"type": "object", "properties": {}, "additionalProperties": False}, [{}], [{"a": 1}]),
    ({"type": "object", "required": ["foo"]}, [{"foo": 1}, {"foo": None, "bar": 1}], [{}, {"bar": 1}]),
    ({"type": "object", "patternProperties": {"^f": WHOLE}, "additionalProperties": False}, [{"fo": 1}], [{"go": 1}]),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{"a": 1}, {"a": 1, "b": 2}], [{}]),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, [1, "a"], ["ab", None]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None, 1.5]),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6]),
    (
        {"allOf": [_closed(a=WHOLE) | {"additionalProperties": True}, {"properties": {"a": {"minimum": 2}}}]},
        [{"a": 2}],
        [{"a": 1}, {}],
    ),
    (
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "integer"}}},
        [1],
        ["a"],
    ),
    (
        {"properties": {"child": {"$ref": "#"}}, "type": "object", "additionalProperties": False},
        [{}, {"child": {}}, {"child": {"child": {}}}],
        [{"other": 1}, {"child": 1}],
    ),
    ({"$defs": {"x": {"type": "null"}}, "items": {"$ref": "#/$defs/x"}, "type": "array"}, [[None]], [[1]]),
    (True, [1, "a", {"b": []}], []),
    ({"description": "any", "x-unknown": 1, "type": "boolean"}, [True], [1]),
    # whole numbers that floats skip
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, 2**62 + 1, 1 - 2**62], [2**63, -(2**63) - 1]),
    ({"type": "integer", "exclusiveMinimum": 2**53, "maximum": 2**53 + 9}, [2**53 + 2, 2**53 + 7], [2**53, 2**53 + 10]),
    ({"type": "integer", "minimum": -(2**55) - 3, "exclusiveMaximum": -(2**54)}, [-(2**55)], [-(2**54), -(2**55) - 4]),
    ({"type": "number", "maximum": 1e20, "minimum": 2**53 + 1}, [2**53 + 2, 9 * 10**18], [5, 2**53]),
    ({"enum": ["a\x00b", "\x7f"]}, ["a\x00b"], ["ab", "a", "", "a\x01b"]),
    ({"const": [1e16, 2**53, 1e22]}, [[10**16, 2**53, 10**22]], [[10**16 + 1, 2**53, 10**22]]),
    ({"type": "object", "minProperties": 2, "required": ["a", "b"]}, [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "c": 2}]),
]

# schemas whose keywords cannot be held: they are refused, never ignored
UNSUPPORTED: list[dict[str, Any] | bool] = [
    {"type": "array", "uniqueItems": True},
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "propertyNames": {"not": {"const": "a"}}},
    {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "a"}},
    {"dependentRequired": {"a": ["b"]}},
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    {"type": "string", "format": "no such format"},
    {"type": "string", "pattern": "(?=a)b"},
    {"$ref": "https://example.com/schema.json"},
    {"$ref": "#/$defs/missing"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"const": 12345678901234567},
    {"items": {"enum": [{"id": 2**64}, 1]}},
    {"const": 1e100},
    {"type": "integer", "multipleOf": 2**53 + 1},
    {"type": "integer", "minimum": 2**63},
    {"type": "integer", "maximum": 2**60 + 5, "minimum": 2**60 + 1},
    {"type": "object", "properties": {"a": {}}, "minProperties": 2},
    {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": False, "minProperties": 2},
    {"properties": {"a": {"enum": ["b", {"\x7f": 1}]}}},
    False,
]
