"""This module says in lowlat's words what the library says of schemas that it does not take.

Of tool calls the library tells a line of rules that no caller has seen: in its place stands the function's name.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lowlat.errors import RequestError
from lowlat.text.grammar.exact import NAMED, VALUES
from lowlat.text.grammar.spec import GrammarSpec
from lowlat.text.grammar.tool_calls import place_of
from lowlat.text.grammar.trial import ONE_OF, Steps

__all__ = ["reworded"]

_IN_RULES = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ")
_SHOWN_RULES = re.compile(r" \d+ \| [a-zA-Z_0-9]+(\[\w+\])?:")  # from here on the library shows them
_RULE = re.compile(r"([a-zA-Z_0-9]+): %json (\{.*\})")
_INTO = re.compile(r'"\$ref": *"#[^"]*/oneOf/')
_NOT_HELD = (
    "is not held, for its branches overlap or cannot be told apart; use anyOf, or give each branch a type of its own "
    "or a required property with a const of its own, a string"
)


def reworded(
    why: str, asked: GrammarSpec, tried: GrammarSpec, find: Callable[[str, Sequence[Steps]], Steps | None]
) -> RequestError:
    """The refusal of a grammar.

    why    the library's words
    asked  the grammar as the caller wrote it
    tried  as the library had it
    find   gives the first of several `oneOf` of a schema's text that is not taken, None where that is not known
    """
    line = _IN_RULES.match(why)
    words, name, schema = why, "", tried.text
    within: tuple[str, ...] = ()
    if line is not None and asked.kind == "tool_calls":
        words = _SHOWN_RULES.split(why[line.end() :])[0].strip()
        rule = _RULE.fullmatch(tried.text.splitlines()[int(line[1]) - 1])
        if rule is not None:
            (function, within), schema = place_of(rule[1], asked.text), rule[2]
            name = f"{function}: "
    elif line is not None:
        words, name, schema = why[line.end() :], f"%json in line {line[1]}: ", ""
    elif asked.kind != "json_schema":
        return RequestError(f"{asked.kind}: {why}")
    if words.startswith(ONE_OF):
        at = _at(schema, within, find)
        return RequestError(f"{asked.kind}: {name}oneOf{at} {_NOT_HELD}")
    return RequestError(f"{asked.kind}: {name}{words}" if asked.kind == "tool_calls" else f"{asked.kind}: {why}")


def _at(text: str, within: Steps, find: Callable[[str, Sequence[Steps]], Steps | None]) -> str:
    """Where the `oneOf` stands that is not taken, " at #/properties/a"; "" where that is not known."""
    paths = list(_one_ofs(json.loads(text), ())) if text else []
    if len(paths) > 1:  # to try them one by one is to take others away, to which references may lead
        found = None if _INTO.search(text) else find(text, paths)
    else:
        found = next(iter(paths), None)
    if found is None:
        return ""
    steps = found if found[:1] in (("$defs",), ("definitions",)) else (*within, *found)
    pointer = "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in steps)
    return f" at #{pointer:.200}"


def _one_ofs(schema: Any, path: tuple[str | int, ...]) -> Iterator[Steps]:
    """The paths of schemas that have a `oneOf`, outer ones first."""
    if isinstance(schema, list):
        for place, each in enumerate(schema):
            yield from _one_ofs(each, (*path, place))
    elif isinstance(schema, dict):
        if isinstance(schema.get("oneOf"), list):
            yield path
        for name, value in schema.items():
            if name in NAMED and isinstance(value, dict):
                for key, each in value.items():
                    yield from _one_ofs(each, (*path, name, key))
            elif name not in VALUES:
                yield from _one_ofs(value, (*path, name))
