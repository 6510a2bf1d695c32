"""This module follows a schema's references to its own definitions, for formats whose values are no JSON."""

from collections.abc import Mapping
from typing import Any

from lowlat.text.answers.values import takes_nothing
from lowlat.text.grammar.exact import NotHeld
from lowlat.text.schemas import DEFINITIONS, NAMED, VALUES, DeadReferenceError, followed, properties_of, walk

__all__ = ["LABELS", "declared", "merged", "resolved", "standing_alone"]

LABELS = frozenset({"$id", "$anchor", "x-guidance"})  # keywords that say nothing of a value
MAX_MERGED = 32  # references one after the other, of which one may lead back
OUTER = "arguments"  # the root's name among definitions
LEAST, MOST = frozenset({"minimum", "minItems", "minLength"}), frozenset({"maximum", "maxItems", "maxLength"})


def resolved(key: str, schema: Any, root: Mapping[str, Any], *, strict: bool) -> Any:
    """The schema to which a mere reference leads, as pydantic writes an enum; the schema itself, if it is none.

    key  of the argument, for errors; "" for none
    Raises NotHeld, where strict, for a reference that leads to nothing or back to itself.
    """
    try:
        return followed(schema, root)[0]
    except DeadReferenceError as error:
        if not strict:
            return schema
        where = "back to itself" if error.is_back else "to nothing in the schema"
        raise NotHeld(f"{f'{key}: ' if key else ''}$ref {error.reference!r:.80} leads {where}") from None


def merged(schema: Mapping[str, Any], root: Mapping[str, Any], *, strict: bool) -> Mapping[str, Any]:
    """A schema with what its `$ref` and the schemas of its `allOf` say in their place.

    Raises NotHeld for two that cannot be one.
    """
    found = schema
    for _ in range(MAX_MERGED):
        if "$ref" not in found and "allOf" not in found:
            return found
        parts: list[Any] = [{name: value for name, value in found.items() if name not in ("$ref", "allOf")}]
        if isinstance(found.get("$ref"), str):
            parts.append(resolved("", {"$ref": found["$ref"]}, root, strict=strict))
        whole = found.get("allOf")
        parts += [resolved("", each, root, strict=strict) for each in whole] if isinstance(whole, list) else []
        made: dict[str, Any] = {}
        for part in parts:
            if part is True:
                continue
            if not isinstance(part, Mapping) or part == {"$ref": found.get("$ref")}:
                raise NotHeld("$ref or allOf of schemas that cannot be one")
            for name, value in part.items():
                made[name] = _both(name, made[name], value) if name in made else value
        found = made
    raise NotHeld(f"$ref or allOf of others, more than {MAX_MERGED} deep")


def declared(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The properties of an object's schema, those that only `required` names among them; and the required ones.

    Raises NotHeld for a required one that the schema does not let be.
    """
    properties, required, others = (
        dict(properties_of(schema)),
        schema.get("required"),
        schema.get("additionalProperties"),
    )
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    for name in names:
        if name not in properties and takes_nothing(others):
            raise NotHeld(f"required names {name!r:.80}, which properties and additionalProperties do not let be")
        properties.setdefault(name, {} if others is None else others)
    return properties, names


def standing_alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A schema out of a root, with definitions to which its references lead."""
    definitions = {name: root[name] for name in DEFINITIONS if name in root}
    alone = {**definitions, **schema}
    references = (each["$ref"] for _, each in walk(alone) if isinstance(each.get("$ref"), str))
    if all(reference.startswith(("#/$defs/", "#/definitions/")) for reference in references):
        return alone
    moved: dict[str, Any] = _moved(schema)
    return {**moved, "$defs": {OUTER: _moved(root)}}


def _both(name: str, one: Any, other: Any) -> Any:
    """The value of a keyword that two schemas have."""
    if one == other or name in LABELS:
        return one
    if name == "required" and isinstance(one, list) and isinstance(other, list):
        return list(dict.fromkeys([*one, *other]))
    if name == "properties" and isinstance(one, Mapping) and isinstance(other, Mapping):
        common = one.keys() & other.keys()
        return {**one, **other, **{key: {"allOf": [one[key], other[key]]} for key in common if one[key] != other[key]}}
    if name == "pattern":  # of a text, which the rules for texts take several of
        return [*(one if isinstance(one, list) else [one]), *(other if isinstance(other, list) else [other])]
    if name in LEAST | MOST and isinstance(one, int | float) and isinstance(other, int | float):
        return max(one, other) if name in LEAST else min(one, other)
    raise NotHeld(f"{name} of several schemas for one value")


def _moved(schema: Any) -> Any:
    """A schema whose references lead to the same places in a root that is a definition."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name in NAMED and isinstance(value, Mapping):
            made[name] = {key: _moved(each) for key, each in value.items()}
        elif name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            made[name] = f"#/$defs/{OUTER}{value[1:]}"
        else:
            made[name] = value if name in VALUES else _moved(value)
    return made
