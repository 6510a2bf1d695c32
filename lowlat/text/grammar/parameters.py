"""This module writes the grammar of a function's arguments as tags: `<parameter=key>`, value, `</parameter>`.

A string is any text up to its closing tag; other values are JSON. Parameters come in the order of the schema.
"""

import json
from collections.abc import Mapping
from typing import Any

from lowlat.text.answers.values import constants_of, kinds_of, takes_nothing, value_of_kinds
from lowlat.text.grammar.exact import NotHeld
from lowlat.text.grammar.free_text import NUMBERS, TEXT_KEYWORDS, expressions_of, spelled, without
from lowlat.text.grammar.one_of import first_overlap, refusal
from lowlat.text.grammar.references import LABELS, declared, merged, resolved, standing_alone
from lowlat.text.schemas import DEFINITIONS, arguments_schema
from lowlat.text.templates.tags import END_PARAMETER, PARAMETER

__all__ = ["parameter_rules"]

CHOICES = ("anyOf", "oneOf")
BARE = frozenset({"type"}) | LABELS
CONSTANT = frozenset({"enum", "const"}) | BARE
EMPTY = '""'
EXTRA = "additionalProperties"
ANY_TEXT = r"/[\s\S]*/"
SCALARS = {  # without quotes
    **NUMBERS,
    "boolean": "/true|false/",
    "null": "/null/",
}
NUMBER = r"\s*-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?\s*"
READ = {  # texts that are read as values of other types
    "integer": NUMBER,
    "number": NUMBER,
    "boolean": r"\s*([tT]rue|[fF]alse)\s*",
    "null": r"\s*(null|None)\s*",
}
WORDS_OF = {  # keywords that say something of some types alone
    ("string",): TEXT_KEYWORDS,
    ("array",): frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"}),
    ("object",): frozenset({"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}),
    ("integer", "number"): frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
HELD = frozenset({"type", "properties", "required", "additionalProperties", *DEFINITIONS}) | LABELS


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
    schema = arguments_schema(schema)
    properties, required = declared(schema)
    others = schema.get("additionalProperties")
    schema = {**schema, "properties": properties}
    if strict:
        _check(schema, properties)
    extra = others is True or isinstance(others, Mapping)
    if not properties and not extra:
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
    if extra:
        value = {**schema, "properties": {EXTRA: others}}
        named = "".join(f" & ~/{spelled(key)}/" for key in properties)
        rules += [
            f"{name}_other: {_literal(PARAMETER)} {name.upper()}_KEY {name}_other_value",
            f"{name.upper()}_KEY: (/[^>\\n]+/{named}) {_literal('>' + line)}",
            *_value(f"{name}_other_value", EXTRA, value, options, end, strict=strict),
        ]
        places.append(f"{name}_other*")
    return [f"{name}: {' '.join(places) or EMPTY}", *rules]


def _value(
    rule: str, key: str, schema: Mapping[str, Any], options: Mapping[str, Any], end: str, *, strict: bool
) -> list[str]:
    own = schema["properties"][key]
    own = own if isinstance(own, Mapping) else {}
    found = resolved(key, own, schema, strict=strict)
    found = _one(found, schema) if isinstance(found, Mapping) else {}
    choice = next((name for name in CHOICES if isinstance(found.get(name), list)), None)
    written: list[Any] = [found] if choice is None else [each for each in found[choice] if not takes_nothing(each)]
    branches = [resolved(key, branch, schema, strict=strict) for branch in written]
    besides = {name: value for name, value in found.items() if name != choice and name not in LABELS}
    if choice is not None and besides:
        branches = [{"allOf": [besides, branch]} for branch in branches]
    pieces = [piece for branch in branches for piece in _by_kind(_one(branch, schema))]
    kinds = [kinds_of({**schema, "properties": {key: piece}}, key) for piece in pieces]
    if not any("string" in each for each in kinds):
        return [
            f"{rule}: {rule}_json {_literal(end)}",
            f"{rule}_json: %json {json.dumps({**standing_alone(own, schema), **options})}",
        ]
    constants = [_constants(piece) for piece in pieces]
    is_free = [values is None and "string" in each for values, each in zip(constants, kinds, strict=True)]
    if strict:
        own = {**found, choice: branches} if choice is not None else found
        _check_text(key, {**schema, "properties": {key: own}}, pieces, constants, kinds, is_free=any(is_free))
    if any(is_free) and not (strict and any(_is_bound(*each) for each in zip(pieces, constants, strict=True))):
        return [f"{rule}[lazy]: TEXT {_literal(end)}"]
    ways = [_literal(_text(key, value) + end) for values in constants for value in values or ()]
    documents, rules = list[Any](), list[str]()
    tag = end.removesuffix("\n")
    not_read = _not_read(frozenset().union(*kinds), tag)
    for place, (piece, values, text) in enumerate(zip(pieces, constants, is_free, strict=True)):
        part = f"{rule}_{place}"
        if text:
            whole = [*(expressions_of(piece, strict=strict) or [ANY_TEXT]), *not_read, *_not_ended(piece, tag)]
            rules.append(f"{part}[lazy]: ({' & '.join(whole)}) {_literal(end)}")
            ways.append(part)
        elif values is None and any(is_free) and kinds[place] <= SCALARS.keys():
            scalars = " | ".join(SCALARS[kind] for kind in sorted(kinds[place]))
            rules.append(f"{part.upper()}: ({scalars}) {_literal(end)}")
            ways.append(part.upper())
        elif values is None:
            documents.append(piece)
    if documents:
        value = standing_alone({"anyOf": documents}, schema)  # where strict, no value fits two
        rules.append(f"{rule}_json: %json {json.dumps({**value, **options})}")
        ways.append(f"{rule}_json {_literal(end)}")
    return [f"{rule}: {' | '.join(ways)}", *rules]


def _one(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema that says itself what its `$ref` and `allOf` do; the schema where these cannot be one."""
    if not isinstance(schema, Mapping):
        return schema
    try:
        return merged(schema, root, strict=True)
    except NotHeld:
        return schema


def _by_kind(schema: Any) -> list[Any]:
    """A schema of several types as one for each, with the keywords that say something of it."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if not isinstance(kinds, list) or _constants(schema) is not None:
        return [schema]
    made = []
    for kind in kinds:
        others = frozenset().union(*(words for name, words in WORDS_OF.items() if kind not in name))
        made.append({**{name: value for name, value in schema.items() if name not in others}, "type": kind})
    return made


def _is_bound(schema: Any, values: list[Any] | None) -> bool:
    """Whether not every text fits a schema that names no values."""
    return values is None and isinstance(schema, Mapping) and bool(schema.keys() - BARE)


def _not_read(kinds: frozenset[str], tag: str) -> list[str]:
    """Expressions to exclude, so that a string is read back as it was written, where values of these types may stand.

    tag  what ends the value: a text does not go on after it, either
    """
    barred = [] if tag.startswith("\n") else [r"/\n[\s\S]*/", r"/[\s\S]*\n/"]  # which the reader takes for the format's
    if kinds & {"object", "array"}:
        barred.append(r"/\s*[{\[][\s\S]*/")
    end = rf"({spelled(tag)}[\s\S]*)?"
    barred += [f"/{texts}{end}/" for kind, texts in READ.items() if kind in kinds]
    return [f"~{each}" for each in barred]


def _not_ended(schema: Mapping[str, Any], tag: str) -> list[str]:
    """Expressions to exclude, so that a string cannot go on after an end that its schema does not take."""
    least = schema.get("minLength", 0)
    if "pattern" in schema:
        return [f"~{without(END_PARAMETER)}"]
    return [f"~{without(tag, least - 1)}"] if isinstance(least, int) and least > 0 else []


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
    key: str,
    schema: Mapping[str, Any],
    pieces: list[Any],
    constants: list[list[Any] | None],
    kinds: list[frozenset[str]],
    *,
    is_free: bool,
) -> None:
    """Refuse what would not be held of a value that may be a string.

    is_free  it may be any text, or any that keywords let be, which may also read as a value of another type
    """
    path = first_overlap(schema["properties"][key], schema)
    if path is not None:
        raise NotHeld(refusal(("properties", key, *path)))
    for piece, values, own in zip(pieces, constants, kinds, strict=True):
        if not isinstance(piece, Mapping) or (values is None and (not is_free or own <= {"object", "array"})):
            continue
        if values is None:
            held = BARE | TEXT_KEYWORDS if own == {"string"} else BARE
        else:
            held = CONSTANT if not is_free or all(isinstance(value, str) for value in values) else BARE
        others = ", ".join(sorted(piece.keys() - held))
        if others:
            raise NotHeld(f"{key}: {others} of a string, which this model's format writes as free text")
        if values is None and own == {"string"}:
            try:
                expressions_of(piece, strict=True)
            except NotHeld as error:
                raise NotHeld(f"{key}: {error}") from None
    every = kinds_of(schema, key)
    for text in (value for values in constants for value in values or () if isinstance(value, str)):
        if value_of_kinds(text, every) != _literal(text):
            raise NotHeld(f"{key}: the string {text!r:.80}, which reads as a value of another type")


def _check(schema: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
    others = schema.keys() - HELD - {"x-guidance"}
    if others:
        raise NotHeld(f"{', '.join(sorted(others))} next to properties is not held in this model's format")
    if any(">" in key or "\n" in key for key in properties):
        raise NotHeld("a property's name holds > or a line break")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
