"""This module says in lowlat's words what the library says of schemas that it does not take.

Of tool calls the library tells a line of rules that no caller has seen: in its place stands the function's name.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from lowlat.errors import RequestError
from lowlat.text.grammar.one_of import one_ofs, refusal, unheld
from lowlat.text.grammar.spec import GrammarSpec
from lowlat.text.grammar.tool_calls import place_of
from lowlat.text.grammar.trial import ONE_OF
from lowlat.text.schemas import DEFINITIONS, Steps

__all__ = ["reworded"]

_IN_RULES = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ")
_SHOWN_RULES = re.compile(r" \d+ \| [a-zA-Z_0-9]+(\[\w+\])?:")  # from here on the library shows them
_RULE = re.compile(r"([a-zA-Z_0-9]+): %json (\{.*\})")
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[.*\])$")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (.+)$")
_INTO = re.compile(r'"\$ref": *"#[^"]*/oneOf/')


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
    words, name, schema = why, asked.kind, tried.text
    within: tuple[str, ...] = ()
    if line is not None and asked.kind == "tool_calls":
        words = _SHOWN_RULES.split(why[line.end() :])[0].strip()
        rule = _RULE.fullmatch(tried.text.splitlines()[int(line[1]) - 1])
        if rule is not None:
            (name, within), schema = place_of(rule[1], asked.text), rule[2]
    elif line is not None:
        words, name, schema = why[line.end() :], f"{asked.kind}: %json in line {line[1]}", ""
    elif asked.kind != "json_schema":
        return RequestError(f"{asked.kind}: {why}")
    if words.startswith(ONE_OF):
        return RequestError(f"{name}: {refusal(_path(schema, within, find))}")
    for unknown, of in ((_UNKNOWN_KEYS, None), (_UNKNOWN_FORMAT, "format")):
        found = unknown.match(words)
        if found is not None and schema:
            keys, value = (json.loads(found[1]), None) if of is None else ([of], found[1])
            return RequestError(f"{name}: {unheld(_placed(json.loads(schema), within), keys, value)}")
    return RequestError(f"{name}: {words}" if asked.kind == "tool_calls" else f"{asked.kind}: {why}")


def _placed(schema: Any, within: Steps) -> Any:
    """A schema at its place in the tool's parameters, next to its definitions, which are the tool's own."""
    definitions = {key: schema.pop(key) for key in DEFINITIONS if isinstance(schema, dict) and key in schema}
    for step in reversed(within):
        schema = {step: schema}
    return {**schema, **definitions}


def _path(text: str, within: Steps, find: Callable[[str, Sequence[Steps]], Steps | None]) -> Steps | None:
    """The path of the `oneOf` that is not taken; None where that is not known."""
    paths = list(one_ofs(json.loads(text))) if text else []
    if len(paths) > 1:  # to try them one by one is to take others away, to which references may lead
        found = None if _INTO.search(text) else find(text, paths)
    else:
        found = next(iter(paths), None)
    if found is None:
        return None
    return found if found[:1] in (("$defs",), ("definitions",)) else (*within, *found)
