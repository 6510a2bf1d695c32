"""This module follows a schema's references to its own definitions, for formats whose values are no JSON."""

from collections.abc import Mapping
from typing import Any

from lowlat.text.answers.values import referred
from lowlat.text.grammar.exact import NAMED, VALUES, NotHeld

__all__ = ["DEFINITIONS", "NAMING", "inlined", "resolved"]

DEFINITIONS = ("$defs", "definitions")
NAMING = frozenset({"description", "title", "$schema", "default", "examples"})
MAX_INLINED = 1000  # references of a schema: each may lead to others


def resolved(key: str, schema: Any, root: Mapping[str, Any], *, strict: bool) -> Any:
    """The schema to which a mere reference leads, as pydantic writes an enum; the schema itself, if it is none.

    key  of the argument, for errors
    Raises NotHeld, where strict, for a reference that leads to nothing or back to itself.
    """
    found, seen = schema, list[str]()
    while (step := _step(found)) is not None:
        if isinstance(step, str):
            found = None if step in seen else referred(step, root)
            if found is None:
                if strict:
                    raise NotHeld(f"{key}: {_refusal(step, is_known=step in seen)}")
                return schema
            seen.append(step)
        else:
            found = step[0]
    return found


def inlined(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """The schema with what each reference leads to in its place, and without definitions.

    Raises NotHeld, where strict, for too many, or one that leads to nothing or back to itself; where not, these lead to
    any value.
    """
    num_inlined = 0

    def of(value: Any, within: tuple[str, ...]) -> Any:
        nonlocal num_inlined
        if isinstance(value, list):
            return [of(each, within) for each in value]
        step = _step(value)
        if isinstance(step, str):
            found = None if step in within else referred(step, schema)
            num_inlined += 1
            if strict and found is None:
                raise NotHeld(_refusal(step, is_known=step in within))
            if strict and num_inlined > MAX_INLINED:
                raise NotHeld(f"more than {MAX_INLINED} references, those of what they lead to included")
            return {} if found is None or num_inlined > MAX_INLINED else of(found, (*within, step))
        if step is not None:
            return of(step[0], within)
        return parts_of(value, within) if isinstance(value, Mapping) else value

    def parts_of(value: Mapping[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
        parts = dict[str, Any]()
        for name, each in value.items():
            if name in DEFINITIONS:
                continue
            if name in NAMED and isinstance(each, Mapping):
                parts[name] = {key: of(one, within) for key, one in each.items()}
            else:
                parts[name] = each if name in VALUES else of(each, within)
        return parts

    try:
        found = of({name: each for name, each in schema.items() if name not in DEFINITIONS}, ())
    except RecursionError:
        raise NotHeld("the schema is nested too deep") from None
    return found if isinstance(found, dict) else {}


def _step(schema: Any) -> str | list[Any] | None:
    """The reference that a schema is, or its `allOf` of one, and no more; None of others."""
    if not isinstance(schema, Mapping):
        return None
    names = schema.keys() - NAMING
    if names == {"$ref"} and isinstance(schema["$ref"], str):
        return str(schema["$ref"])
    whole = schema.get("allOf")
    return whole if names == {"allOf"} and isinstance(whole, list) and len(whole) == 1 else None


def _refusal(reference: str, *, is_known: bool) -> str:
    return f"$ref {reference!r:.80} leads {'back to itself' if is_known else 'to nothing in the schema'}"
