"""This module rewrites schemas as clients write them into plain JSON Schema, for grammars and for readers of calls.

- Annotations go: they change no value, whatever library added them (`discriminator`, `deprecated`, `x-...`).
- `nullable` of OpenAPI 3.0 becomes the type null, and its types in capitals become small.
- Keywords whose value is null go: some libraries write all that they know.
- `propertyNames` that names keys, or says how they look, becomes properties of these names.
- A `oneOf` whose branches each require a property with constants of their own is an `anyOf`. A property that
  `discriminator` names is required: pydantic does not say so when it has a default, but refuses values without it.
- Formats that only say how to show a value go; those that are an expression become one.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

__all__ = [
    "DEFINITIONS",
    "KINDS",
    "NAMED",
    "VALUES",
    "DeadReferenceError",
    "Steps",
    "arguments_schema",
    "followed",
    "plain_schema",
    "properties_of",
    "referred",
    "walk",
]

Steps = Sequence[str | int]
"""The steps from a schema to one within it."""

VALUES = frozenset({"const", "default", "enum", "examples"})  # keywords that hold documents
NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})  # schemas by name
DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = frozenset(
    {
        "$comment",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "nullable",
        "readOnly",
        "title",
        "writeOnly",
        "xml",
    }
)
MAX_BRANCHES, MAX_TAGS = 256, 64  # of a `oneOf`, and of properties that may tell them apart
KINDS = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
JOINED = frozenset({"$ref", "allOf", "anyOf", "oneOf"})  # keywords that a further type would not widen
SHOWN = frozenset({"binary", "directory-path", "file-path", "password", "path"})  # formats that forbid no text
BASE64 = "([A-Za-z0-9{0}]{{4}})*([A-Za-z0-9{0}]{{2}}==|[A-Za-z0-9{0}]{{3}}=)?"
EXPRESSIONS = MappingProxyType(
    {
        "base64": f"^{BASE64.format('+/')}$",
        "base64url": f"^{BASE64.format('_-')}$",
        "byte": f"^{BASE64.format('+/')}$",
        **{f"uuid{version}": f"^.{{14}}{version}" for version in range(1, 9)},
    }
)
IN_JSON_SCHEMA = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uri-template", "uuid"),
        *("json-pointer", "relative-json-pointer", "regex"),
    }
)


class DeadReferenceError(LookupError):
    """A reference leads to nothing in its root, or back to one before it.

    is_back  the latter
    """

    def __init__(self, reference: str, *, is_back: bool) -> None:
        super().__init__(reference)
        self.reference, self.is_back = reference, is_back


def plain_schema(schema: Any) -> Any:
    """A schema in plain JSON Schema; as it was where it is nested too deep to be looked at."""
    try:
        return _Dialect(schema).plain(schema, is_root=True)
    except RecursionError:
        return schema


def arguments_schema(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments where its root is a mere reference, with the root's definitions.

    It is the schema itself where the root is none, or one that leads to nothing or back to itself.
    """
    definitions = {name: parameters[name] for name in DEFINITIONS if name in parameters}
    own = {name: value for name, value in parameters.items() if name not in definitions}
    try:
        found, references = followed(own, parameters)
    except DeadReferenceError:
        return parameters
    return {**found, **definitions} if references and isinstance(found, Mapping) else parameters


def followed(schema: Any, root: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the schema to which a mere reference leads, as pydantic writes an enum, and the references on the way.

    It is the schema itself if it is no reference. Raises DeadReferenceError.
    """
    found, seen = schema, list[str]()
    while (step := _step_of(found)) is not None:
        if not isinstance(step, str):
            found = step[0]
            continue
        found = None if step in seen else referred(step, root)
        if found is None:
            raise DeadReferenceError(step, is_back=step in seen)
        seen.append(step)
    return found, seen


def walk(schema: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Steps, Mapping[str, Any]]]:
    """Yield a schema and all within it with their paths, outer ones first."""
    if isinstance(schema, list):
        for place, each in enumerate(schema):
            yield from walk(each, (*path, place))
    elif isinstance(schema, Mapping):
        yield path, schema
        for name, value in schema.items():
            if name in NAMED and isinstance(value, Mapping):
                for key, each in value.items():
                    yield from walk(each, (*path, name, key))
            elif name not in VALUES and not _is_annotation(name):
                yield from walk(value, (*path, name))


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema at a reference such as `#/$defs/Color`; None where none is there."""
    found: Any = root
    path = reference.removeprefix("#").strip("/")
    for name in path.split("/") if path else []:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _step_of(schema: Any) -> str | list[Any] | None:
    """The reference that a schema is, or its `allOf` of one, and no more but annotations; None of others."""
    if not isinstance(schema, Mapping):
        return None
    names = {name for name in schema if not _is_annotation(name)}
    if names == {"$ref"} and isinstance(schema["$ref"], str):
        return str(schema["$ref"])
    whole = schema.get("allOf")
    return whole if names == {"allOf"} and isinstance(whole, list) and len(whole) == 1 else None


def _is_annotation(name: str) -> bool:
    return name in ANNOTATIONS or (name.startswith("x-") and name != "x-guidance")


class _Dialect:
    """Rewrites the schemas of one root."""

    def __init__(self, root: Any) -> None:
        self._root: Mapping[str, Any] = root if isinstance(root, Mapping) else {}
        self._tags: dict[int, str] = {}  # the property that tells a branch from others, by the branch's identity
        self._told_apart: set[int] = set()  # the schemas whose `oneOf` has such branches alone
        for _, schema in walk(root):
            self._find_tags(schema)

    def _find_tags(self, schema: Mapping[str, Any]) -> None:
        """Find the property whose constant tells the branches of a `oneOf` apart, if there is one."""
        rule, written = schema.get("discriminator"), schema.get("oneOf")
        if not isinstance(written, list) or not 0 < len(written) <= MAX_BRANCHES or "anyOf" in schema:
            return
        branches = list(map(self._target, written))
        key = rule.get("propertyName") if isinstance(rule, Mapping) else None
        if isinstance(key, str):
            keys = [key]
        else:  # nothing says which
            first = list(properties_of(branches[0]))[:MAX_TAGS]
            keys = [key for key in first if all(key in _required(each) for each in branches)]
        for key in keys:
            named = [_constants(properties_of(branch).get(key)) for branch in branches]
            values = [value for each in named for value in each]
            if all(named) and len(values) == len(set(values)):
                self._tags.update({id(branch): key for branch in branches})
                self._told_apart.add(id(schema))
                return

    def _target(self, schema: Any) -> Any:
        """The schema to which references lead; the first, where they lead nowhere."""
        try:
            return followed(schema, self._root)[0]
        except DeadReferenceError:
            return schema

    def plain(self, schema: Any, *, is_root: bool = False) -> Any:
        """One schema, or a list of them."""
        if isinstance(schema, list):
            return [self.plain(each) for each in schema]
        if not isinstance(schema, Mapping):
            return schema
        made: dict[str, Any] = {}
        for name, value in schema.items():
            if _is_annotation(name) or (value is None and name != "const"):
                continue
            if name in VALUES or name == "x-guidance":
                made[name] = value
            elif name in NAMED and isinstance(value, Mapping):
                made[name] = {key: self.plain(each) for key, each in value.items()}
            else:
                made[name] = self.plain(value)
        if id(schema) in self._tags:
            made["required"] = list(dict.fromkeys([*_required(made), self._tags[id(schema)]]))
        if id(schema) in self._told_apart:
            made["anyOf"] = made.pop("oneOf")
        if isinstance(made.get("required"), bool):  # of a property, as long ago
            del made["required"]
        if made.get("uniqueItems") is False:
            del made["uniqueItems"]
        made.update({name: _small(made[name]) for name in ("type",) if name in made})
        _format(made)
        self._name_properties(made)
        return _nullable(made) if schema.get("nullable") is True and not is_root else made

    def _name_properties(self, made: dict[str, Any]) -> None:
        """Take `propertyNames` away where other keywords say the same."""
        names = self._target(made.get("propertyNames"))
        if names is True or (isinstance(names, Mapping) and _said(names) <= {"type"} and _is_text(names)):
            del made["propertyNames"]
            return
        others = made.get("properties") or made.get("patternProperties")
        value = made.get("additionalProperties", {})
        if not isinstance(names, Mapping) or others or value is False or not _is_text(names):
            return
        said = _said(names) - {"type"}
        keys = names.get("enum", [names.get("const")])
        if said in ({"enum"}, {"const"}) and isinstance(keys, list) and all(isinstance(key, str) for key in keys):
            made["properties"] = dict.fromkeys(keys, value)
        elif said == {"pattern"} and isinstance(names["pattern"], str):
            made["patternProperties"] = {names["pattern"]: value}
        elif said <= {"minLength", "maxLength"} and all(isinstance(names[name], int) for name in said):
            lengths = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
            made["patternProperties"] = {rf"^[\s\S]{{{lengths}}}$": value}
        else:
            return
        made["additionalProperties"] = False
        del made["propertyNames"]


def properties_of(schema: Any) -> Mapping[str, Any]:
    """The properties of a schema, by name."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _required(schema: Any) -> list[Any]:
    required = schema.get("required") if isinstance(schema, Mapping) else None
    return required if isinstance(required, list) else []


def _constants(schema: Any) -> list[str]:
    """The strings that a schema names; none where it names other values, or none."""
    if not isinstance(schema, Mapping):
        return []
    values = schema.get("enum", [schema.get("const")])
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []


def _said(schema: Mapping[str, Any]) -> set[str]:
    """The keywords of a schema that are no annotations."""
    return {name for name in schema if not _is_annotation(name)}


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a schema lets strings be."""
    return bool(schema.get("type", "string") == "string")


def _small(named: Any) -> Any:
    """A type, or several, in small letters where it is one in capitals."""
    if isinstance(named, list):
        return list(map(_small, named))
    return named.lower() if isinstance(named, str) and named.lower() in KINDS else named


def _format(made: dict[str, Any]) -> None:
    """Take a format away that says nothing of a value, or that an expression holds."""
    name, kinds = made.get("format"), made.get("type")
    if not isinstance(name, str):
        return
    if kinds is not None and "string" not in (kinds if isinstance(kinds, list) else [kinds]):
        del made["format"]
    elif name in EXPRESSIONS:
        del made["format"]
        if name.startswith("uuid"):
            made["format"] = "uuid"
        if "pattern" not in made:
            made["pattern"] = EXPRESSIONS[name]
        else:
            parts = made.get("allOf")
            made["allOf"] = [*(parts if isinstance(parts, list) else []), {"pattern": EXPRESSIONS[name]}]
    elif name in SHOWN or ("pattern" in made and name not in IN_JSON_SCHEMA):
        del made["format"]


def _nullable(made: dict[str, Any]) -> dict[str, Any]:
    """A schema that takes null, too."""
    kinds = made.get("type")
    if made.keys() & JOINED or "const" in made or (kinds is None and "enum" not in made):
        is_open = not made.keys() & (JOINED | {"const", "type", "enum"})
        return made if is_open else {"anyOf": [made, {"type": "null"}]}
    if kinds is not None:
        made["type"] = list(dict.fromkeys([*(kinds if isinstance(kinds, list) else [kinds]), "null"]))
    if isinstance(made.get("enum"), list) and None not in made["enum"]:
        made["enum"] = [*made["enum"], None]
    return made
