"""This module makes JSON schemas exact where the library enforces them too loosely, or refuses them.

- Formats: it allows the 29th of February in every year, the second 60 in every minute, labels of host names that are no
  Punycode, and host names of any length. Next to the format stands what forbids these; for leap seconds and Punycode,
  all of them.
- Expressions: it reads brackets and doubled signs within classes as sets of sets, which ECMA and Python take for
  characters; and its digits and letters are ASCII's, as ECMA's are, so that `\\W` has what is a letter to Python.
- Numbers: it reads them as floats of 64 bits. Large bounds are drawn in to the next that it holds.
- Keys: where others are free next to those that have rules, `\\u` would spell one that has a rule. So it is no escape,
  but where a text has control characters, which are written by it alone.
- Expressions that the library does not have, such as look-around: where not all must be held, they are left out.
- `minProperties`: a key that the schema does not name may come twice, which it counts twice.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any, TypeGuard

from lowlat.text.schemas import NAMED, VALUES, plain_schema

__all__ = [
    "ESCAPES",
    "NotHeld",
    "exact_pattern",
    "exact_schema",
    "exact_text",
    "is_known",
    "items_of",
]

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
# a text without these is exact, and plain
LOOSE = re.compile(
    r'"format"|"pattern|"m(in|ax)Properties"|[0-9]{16}|[0-9.][eE]|\\u00|\x7f'
    r'|"(discriminator|nullable|oneOf|propertyNames|uniqueItems)"|:\s*null|"required"\s*:\s*[^\s\[]|"type"\s*:[\s\[]*"[A-Z]'
)
# of Python and of ECMA: what is none of these is none to either
WORD, DIGIT, SPACE = r"\p{L}\p{N}_", r"\p{Nd}", r"\s\uFEFF"
NEGATED = MappingProxyType({r"\W": f"[^{WORD}]", r"\D": f"[^{DIGIT}]", r"\S": f"[^{SPACE}]"})
ANYTHING = (r"\w\W]", r"\W\w]", r"\d\D]", r"\D\d]", r"\s\S]", r"\S\s]")  # classes of all characters
SETS = frozenset({r"\w", r"\d", r"\s", *NEGATED, WORD, DIGIT, SPACE, *NEGATED.values()})
KNOWN_ESCAPES = frozenset("dDwWsSnrtfvaxuUpPAz")  # letters after a backslash; digits would be references
KNOWN_GROUPS = re.compile(r"\?(:|[a-zA-Z-]+[:)]|P?<[A-Za-z_])")
CLASS_BEGINS = re.compile(r"\^?\]?")
ESCAPES = 'nrbtf\\"'  # letters after a backslash, as `worker.py` has them
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # without an escape of its own
WHOLE = 1 << 53  # floats from here on are not all the whole numbers
MOST = (1 << 63) - 1024  # of floats that are whole numbers of 64 bits


class NotHeld(ValueError):
    """A schema asks for something that the library would not enforce."""


def exact_text(text: str) -> str:
    """The text of a schema made exact; the same text where there is nothing to do, or no JSON. Raises NotHeld."""
    if not LOOSE.search(text):
        return text
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return text
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    exact = exact_schema(schema, lenient=isinstance(options, dict) and options.get("lenient") is True)
    return text if exact == schema else json.dumps(exact)


def exact_schema(schema: Any, *, lenient: bool = False) -> Any:
    """A schema in plain words, with what makes it exact; as it was where it is too deep to be looked at.

    lenient  leave out what is not held
    Raises NotHeld.
    """
    found: set[str] = set()
    try:
        made = _exact(plain_schema(schema), lenient, found)
    except RecursionError:
        return schema
    if "control" in found and isinstance(made, dict):
        if "free" in found and not lenient:
            raise NotHeld(
                "a control character in const or enum is not held where other keys are free next to properties"
            )
        options = made.get("x-guidance")
        own = options if isinstance(options, dict) else {}
        made["x-guidance"] = {**own, "json_allowed_escapes": ESCAPES + "u"}
    return made


def _exact(schema: Any, lenient: bool, found: set[str]) -> Any:
    """found: gets "control" and "free" for texts with control characters, and keys that are free next to others."""
    if isinstance(schema, list):
        return [_exact(each, lenient, found) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _exact_value(name, value, lenient, found) for name, value in schema.items()}
    name, parts = made.get("format"), made.get("allOf", [])
    if isinstance(name, str) and name in EXACT and isinstance(parts, list):
        made["allOf"] = [*parts, dict(EXACT[name])]
    if isinstance(made.get("pattern"), str):
        made["pattern"] = exact_pattern(made["pattern"])
        if lenient and not is_known(made["pattern"]):
            del made["pattern"]
    if isinstance(made.get("patternProperties"), dict):
        patterns = {exact_pattern(key): each for key, each in made["patternProperties"].items()}
        made["patternProperties"] = {key: each for key, each in patterns.items() if not lenient or is_known(key)}
    if any(_has_control(made.get(name)) for name in ("const", "enum")):
        found.add("control")
    if (made.get("properties") or made.get("patternProperties")) and made.get("additionalProperties") is not False:
        found.add("free")
    for hold in (_hold_numbers, _hold_bounds, _hold_count):
        hold(made, lenient)
    if lenient and len(made.get("patternProperties") or ()) < len(schema.get("patternProperties") or ()):
        made.pop("additionalProperties", None)  # keys of an expression that was left out may be any
    return made


def _exact_value(name: str, value: Any, lenient: bool, found: set[str]) -> Any:
    if name in VALUES:
        return value
    if name in NAMED and isinstance(value, dict):
        return {key: _exact(each, lenient, found) for key, each in value.items()}
    return _exact(value, lenient, found)


def exact_pattern(pattern: str) -> str:
    """An expression whose matches are those of ECMA and of Python."""
    parts: list[str] = []
    place = 0
    while place < len(pattern):
        item = _item(pattern, place)
        place += len(item)
        if item == "[" and pattern.startswith(ANYTHING, place):
            item, place = r"[\s\S]", place + len(ANYTHING[0])
        elif item == "[":
            item, place = _exact_class(pattern, place)
        parts.append(NEGATED.get(item, item))
    return "".join(parts)


def is_known(pattern: str) -> bool:
    """Whether the library has all that an expression uses: no look-around, no references, no anchors amid it.

    Where a schema is held as far as it can be, other expressions are left out.
    """
    place = 0
    for item, in_class in items_of(pattern):
        before, place = pattern[:place], place + len(item)
        if item[0] == "\\" and item[1:] not in KNOWN_ESCAPES and (item[1:].isalnum() or item == "\\"):
            return False
        if not in_class and any(
            (
                item == "(" and pattern.startswith("?", place) and not KNOWN_GROUPS.match(pattern, place),
                item == "^" and before and not before.endswith(("|", "(", "?:")),
                item == "$" and place < len(pattern) and pattern[place] not in "|)",
                item == "{" and pattern.startswith(",", place),
            )
        ):
            return False
    return True


def items_of(pattern: str) -> Iterator[tuple[str, bool]]:
    """The items of an expression, escapes whole, each with whether it stands within a class, its brackets included."""
    place, in_class = 0, False
    while place < len(pattern):
        item = _item(pattern, place)
        place += len(item)
        yield item, in_class or item == "["
        if in_class:
            in_class = item != "]"
        elif item == "[":
            in_class = True
            begin = CLASS_BEGINS.match(pattern, place)
            end = place if begin is None else begin.end()
            yield from ((character, True) for character in pattern[place:end])
            place = end


def _item(pattern: str, place: int) -> str:
    return pattern[place : place + (2 if pattern[place] == "\\" else 1)]


def _exact_class(pattern: str, place: int) -> tuple[str, int]:
    """A class, from what follows its bracket on, and the place after it."""
    begin = "[^" if pattern.startswith("^", place) else "["
    place += len(begin) - 1
    parts, in_range = [begin], False
    while place < len(pattern):
        item = _item(pattern, place)
        if item == "]" and len(parts) > 1:
            return "".join([*parts, item]), place + 1
        place += len(item)
        if item == "-" and not in_range and len(parts) > 1 and pattern[place : place + 1] not in ("", "]"):
            # between two characters it is a range's, after a set of them one itself
            in_range = parts[-1] not in SETS
            parts.append("-" if in_range else r"\-")
            continue
        parts.append(_exact_item(item, pattern[place : place + 1], negated=begin == "[^"))
        in_range = False
    return "".join(parts), place


def _exact_item(item: str, following: str, *, negated: bool) -> str:
    sets = {r"\w": WORD, r"\d": DIGIT, r"\s": SPACE} if negated else NEGATED
    is_doubled = item in ("&", "~") and item == following
    return f"\\{item}" if is_doubled or item in ("[", "]", "-") else sets.get(item, item)


def _has_control(value: Any) -> bool:
    if isinstance(value, (list, dict)):
        return any(map(_has_control, value if isinstance(value, list) else [*value, *value.values()]))
    return isinstance(value, str) and CONTROL.search(value) is not None


def _hold_numbers(schema: dict[str, Any], lenient: bool) -> None:
    """Numbers that the library would write otherwise."""
    for name in ("const", "enum", "multipleOf"):
        wrong = _inexact(schema.get(name))
        if wrong is not None:
            _leave_out(schema, name, f"{wrong!r:.80} has more digits than are held exactly", lenient)


def _inexact(value: Any) -> int | float | None:
    """A number of a document that the library would write otherwise, if there is one."""
    if isinstance(value, (list, dict)):
        parts = value if isinstance(value, list) else value.values()
        return next((wrong for wrong in map(_inexact, parts) if wrong is not None), None)
    if not _is_large(value):
        return None
    try:
        return None if int(Decimal(repr(float(value)))) == int(value) else value
    except OverflowError:
        return value


def _is_large(value: Any) -> TypeGuard[int | float]:
    return _is_number(value) and abs(value) >= WHOLE


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _hold_bounds(schema: dict[str, Any], lenient: bool) -> None:
    """Draw large bounds in to whole numbers that are held; those past all of them are refused."""
    for inward, bound, exclusive in ((1, "minimum", "exclusiveMinimum"), (-1, "maximum", "exclusiveMaximum")):
        for name in (bound, exclusive):
            value = schema.get(name)
            if not _is_large(value):
                continue
            held = None if math.isinf(value) else _held(int(value) + (inward if name == exclusive else 0), inward)
            if held is None:
                _leave_out(schema, name, f"{value!r:.80} is past what is held exactly", lenient)
                continue
            del schema[name]
            others = [other] if _is_number(other := schema.get(bound)) else []
            schema[bound] = max([held, *others]) if inward > 0 else min([held, *others])


def _held(whole: int, inward: int) -> int | None:
    """The next whole number inwards that is a float, at least as far in as all of them; None for one past these."""
    if whole * inward > MOST:
        return None
    number = float(max(whole * inward, -MOST)) * inward
    if (int(number) - whole) * inward < 0:
        number = math.nextafter(number, math.inf * inward)
    return int(number)


def _hold_count(schema: dict[str, Any], lenient: bool) -> None:
    """Numbers of keys: a least one, where keys that are free may come twice, and any next to keys that may not come."""
    least, required, properties = (schema.get(name) for name in ("minProperties", "required", "properties"))
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set[str]()
    num_required = len(names)
    if isinstance(least, (int, float)) and least <= num_required:
        del schema["minProperties"]
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        return
    for name in ("minProperties", "maxProperties"):
        if name in schema and isinstance(properties, dict) and not properties.keys() <= names:
            why = f"{schema[name]!r:.20} is not held where keys are free next to properties that are not required"
            _leave_out(schema, name, f"{why}; say additionalProperties false, or leave it out", lenient)
    least = schema.get("minProperties")
    if not isinstance(least, (int, float)) or least <= 1:
        return
    if num_required < least:
        why = f"{least} is not held where keys are free, as one may come twice; name as many in required"
        _leave_out(schema, "minProperties", why, lenient)


def _leave_out(schema: dict[str, Any], name: str, why: str, lenient: bool) -> None:
    if not lenient:
        raise NotHeld(f"{name}: {why}")
    del schema[name]
