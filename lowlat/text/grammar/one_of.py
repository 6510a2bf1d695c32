"""This module finds each `oneOf` of a schema, tells whether its branches overlap, and words the refusal of one.

The library decides by itself of values that are JSON. Of those that a model's format writes otherwise it sees no
schema: these are decided here, by types, constants and required properties, as it does.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from lowlat.text.grammar.exact import NotHeld
from lowlat.text.grammar.references import resolved
from lowlat.text.schemas import KINDS, Steps, properties_of, walk

__all__ = ["first_overlap", "one_ofs", "refusal", "unheld"]

Values = frozenset[tuple[bool, Any]]
"""Constants, each with whether it is true or false, which Python takes for numbers."""

MAX_PAIRS = 10_000  # of branches that are compared: each takes microseconds
_NOT_HELD = (
    "is not held, for its branches overlap or cannot be told apart; use anyOf, or give each branch a type of its own "
    "or a required property with a const of its own, a string"
)


def refusal(path: Steps | None) -> str:
    """The refusal of a `oneOf`, with its path where that is known: "oneOf at #/properties/a is not held, ..."."""
    return f"oneOf {_NOT_HELD}" if path is None else f"oneOf at {_pointer(path)} {_NOT_HELD}"


def unheld(schema: Any, names: Sequence[str], value: object = None) -> str:
    """The refusal of keywords that a schema has somewhere, with the path of the first: "uniqueItems at # is not held".

    value  of the keyword, which several places may have; None: any
    """
    words = ", ".join(names) if value is None else f"{names[0]} {value!r:.80}"
    found = (path for path, each in walk(schema) if names[0] in each and value in (None, each[names[0]]))
    path = next(found, None)
    return f"{words}{'' if path is None else f' at {_pointer(path)}'} is not held; leave it out, or do without strict"


def one_ofs(schema: Any) -> Iterator[Steps]:
    """The paths of schemas that have a `oneOf`, outer ones first."""
    return (path for path, each in walk(schema) if isinstance(each.get("oneOf"), list))


def _pointer(path: Steps) -> str:
    pointer = "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in path)
    return f"#{pointer:.200}"


def first_overlap(schema: Any, root: Mapping[str, Any] | None = None) -> Steps | None:
    """The path of the first `oneOf` of which a value may fit two branches; None where there is none.

    root  to which references lead; None: the schema itself
    Branches that are too many to be compared count as such. Raises NotHeld for a schema that is nested too deep.
    """
    root = schema if root is None and isinstance(schema, Mapping) else root
    comparison = _Comparison({} if root is None else root)
    try:
        for path in one_ofs(schema):
            holder = schema
            for step in path:
                holder = holder[step]
            if not all(comparison.distinct(one, other) for one, other in combinations(holder["oneOf"], 2)):
                return path
    except RecursionError:
        raise NotHeld("the schema is nested too deep") from None
    return None


class _Comparison:
    """Compares schemas, so many pairs at most."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._left, self._root = MAX_PAIRS, root
        self._read: dict[int, tuple[frozenset[str], Values | None]] = {}  # by the schema's identity

    def distinct(self, one: Any, other: Any) -> bool:
        """Whether it is known that no value fits both of two schemas."""
        self._left -= 1
        if self._left < 0:
            return False
        one, other = (resolved("", each, self._root, strict=False) for each in (one, other))
        if one is False or other is False:
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        (kinds, constants), (other_kinds, others) = self._facts(one), self._facts(other)
        common = kinds & other_kinds
        if not common or (constants is not None and others is not None and constants.isdisjoint(others)):
            return True
        if common == {"object"} and self._keys_differ(one, other):
            return True
        for split, whole in ((one, other), (other, one)):
            for name in ("anyOf", "oneOf"):
                if isinstance(split.get(name), list) and all(self.distinct(each, whole) for each in split[name]):
                    return True
        return False

    def _facts(self, schema: Mapping[str, Any]) -> tuple[frozenset[str], Values | None]:
        """The types that values of a schema may have, and the values where it names them."""
        if id(schema) not in self._read:
            constants = _constants(schema)
            self._read[id(schema)] = _kinds(schema, constants), constants
        return self._read[id(schema)]

    def _keys_differ(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether an object of one schema lacks a key that the other requires, or has another value there."""
        for mine, theirs in ((one, other), (other, one)):
            own, properties = properties_of(mine), properties_of(theirs)
            required = mine.get("required")
            for key in required if isinstance(required, list) else []:
                if key not in properties:
                    if theirs.get("additionalProperties") is False and not theirs.get("patternProperties"):
                        return True
                elif self.distinct(own.get(key), properties[key]):
                    return True
        return False


def _kinds(schema: Mapping[str, Any], constants: Values | None) -> frozenset[str]:
    """The types that values of a schema may have, all where it says nothing; a whole number is a number, too."""
    named = schema.get("type")
    if isinstance(named, str):
        named = [named]
    if isinstance(named, list):
        kinds = frozenset(kind for kind in named if isinstance(kind, str))
        return kinds | {"integer"} if "number" in kinds else kinds
    return KINDS if constants is None else frozenset().union(*(_kinds_of(value) for _, value in constants))


def _kinds_of(value: Any) -> frozenset[str]:
    if isinstance(value, bool) or value is None:
        return frozenset({"null" if value is None else "boolean"})
    return frozenset({"string"} if isinstance(value, str) else {"integer", "number"})


def _constants(schema: Mapping[str, Any]) -> Values | None:
    """The values that a schema names; None where it names none, or a list or an object."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list) or any(isinstance(value, list | dict) for value in values):
        return None
    return frozenset((isinstance(value, bool), value) for value in values)
