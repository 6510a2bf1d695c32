"""This module writes the expressions of strings that a model's format writes as they are, without quotes.

Each keyword of a string's schema is an expression that a whole text matches; a text matches all of them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lowlat.text.grammar.exact import NotHeld, exact_pattern, is_known, items_of

__all__ = ["NUMBERS", "TEXT_KEYWORDS", "expressions_of", "spelled", "whole_expression", "without"]

TEXT_KEYWORDS = frozenset({"format", "maxLength", "minLength", "pattern"})
NUMBERS = MappingProxyType(  # of numbers without bounds
    {
        "integer": r"/-?(0|[1-9][0-9]{0,17})/",
        "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+\-]?[0-9]{1,2})?/",
    }
)
ANY = r"[\s\S]"
# Characters that are counted. Each is a state of the library's, and several where what ends the text is looked for too.
MAX_LENGTH, MAX_LENGTH_BESIDE = 4096, 256
_DATE = (  # the 29th of February is held by what `exact.py` adds
    r"[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_N = "[0-9]{1,9}"
_CLOCK = f"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_DAYS = f"({_N}D|{_N}M({_N}D)?|{_N}Y({_N}M({_N}D)?)?)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_CHARACTER = r"(%[0-9A-Fa-f]{2}|[A-Za-z0-9._~!$&'()*+,;=:@\-])"
_HOST = rf"([A-Za-z0-9._~\-]+@)?({_LABEL}(\.{_LABEL}){{0,6}}(:[0-9]{{1,5}})?)?"
_PATH = rf"(\/\/{_HOST}(\/{_CHARACTER}*)*|\/?{_CHARACTER}+(\/{_CHARACTER}*)*)"
FORMATS = MappingProxyType(  # some of each format's texts: none that is not one
    {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": f"P({_DAYS}({_CLOCK})?|{_CLOCK}|{_N}W)",
        "email": rf"[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@{_LABEL}(\.{_LABEL}){{1,6}}",
        "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
        "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
        "uri": rf"[A-Za-z][A-Za-z0-9+.\-]{{1,30}}:{_PATH}(\?({_CHARACTER}|[\/?])*)?(#({_CHARACTER}|[\/?])*)?",
    }
)
OUTSIDE = MappingProxyType({r"\d": "[0-9]", r"\w": "[A-Za-z0-9_]", "/": r"\/", "\n": r"\n"})
INSIDE = MappingProxyType({r"\d": "0-9", r"\w": "A-Za-z0-9_", "/": r"\/", "\n": r"\n"})


def expressions_of(schema: Mapping[str, Any], *, strict: bool, is_marked: bool = False) -> list[str]:
    """Expressions in slashes of a string's schema, all of which its text matches; none where any text does.

    schema     may have several patterns, as `references.merged` makes them
    is_marked  a token ends the text, so that nobody looks for its end in it
    Raises NotHeld, where strict, for one that would not be held.
    """
    made = []
    name = schema.get("format")
    if isinstance(name, str):
        if name in FORMATS:
            made.append(FORMATS[name])
        elif strict:
            raise NotHeld(f"format {name!r:.80} of a string written without quotes; give a pattern")
    patterns = schema.get("pattern", [])
    for pattern in patterns if isinstance(patterns, list) else [patterns]:
        whole = whole_expression(pattern) if isinstance(pattern, str) else None
        if whole is not None:
            made.append(whole)
        elif strict:
            raise NotHeld(f"pattern {pattern!r:.80} of a string written without quotes")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    for name in ("minLength", "maxLength"):
        is_beside = not is_marked and (name == "minLength" or "pattern" in schema)
        limit = MAX_LENGTH_BESIDE if is_beside else MAX_LENGTH
        if isinstance(schema.get(name), int) and schema[name] > limit:
            if strict:
                raise NotHeld(f"{name} {schema[name]} of a string written without quotes; at most {limit}")
            return [f"/{each}/" for each in made]
    if isinstance(least, int) and (least > 0 or isinstance(most, int)):
        made.append(f"{ANY}{{{least},{most if isinstance(most, int) else ''}}}")
    return [f"/{each}/" for each in made]


def whole_expression(pattern: str) -> str | None:
    """An expression of the whole texts in which a pattern is found; None for one that is not known."""
    pattern = exact_pattern(pattern)
    if not is_known(pattern):
        return None
    alternatives, depth = [""], 0
    in_class, anchors = False, list[tuple[int, int]]()  # of each, its alternative and the place in it
    for item, within in items_of(pattern):
        in_class = within
        if item in (r"\A", r"\z", r"\Z"):
            return None
        if not in_class and item == "|" and not depth:
            alternatives.append("")
            continue
        depth += 0 if in_class else (item == "(") - (item == ")")
        if not in_class and item in ("^", "$"):
            if depth:
                return None
            anchors.append((len(alternatives) - 1, len(alternatives[-1])))
        alternatives[-1] += (INSIDE if in_class else OUTSIDE).get(item, item)
    whole = []
    for number, text in enumerate(alternatives):
        places = [place for alternative, place in anchors if alternative == number]
        begins, ends = 0 in places and text.startswith("^"), bool(text) and len(text) - 1 in places and text[-1] == "$"
        if len(places) != begins + ends:
            return None
        body = text[begins : len(text) - ends]
        whole.append(f"{'' if begins else f'{ANY}*'}({body}){'' if ends else f'{ANY}*'}")
    return "|".join(f"({each})" for each in whole)


def without(text: str, after: int | None = None) -> str:
    """The expression, in slashes, of texts that hold another one; to be excluded.

    after  so many characters at most; None: any number
    """
    return f"/{ANY}{'*' if after is None else f'{{0,{after}}}'}{spelled(text)}{ANY}*/"


def spelled(text: str) -> str:
    """The expression of one text."""
    return "".join(each if each.isalnum() or each == "_" else f"\\u{{{ord(each):x}}}" for each in text)
