"""A spec is the grammar that a request asks for; equal specs share a compiled grammar."""

from dataclasses import dataclass

import msgspec

from lowlat.options.request import SamplingParams

__all__ = ["GrammarSpec", "spec_of"]


@dataclass(frozen=True)
class GrammarSpec:
    """One grammar as it was written.

    kind  the option of SamplingParams, or "lark" for the library's own language
    text  of the schema, the expression or the rules; for `choice` a JSON list of strings
    """

    kind: str
    text: str


def spec_of(params: SamplingParams) -> GrammarSpec | None:
    """The grammar of a request; None without one."""
    name = params.grammar_option
    if name is None:
        return None
    if name == "json_object":
        return GrammarSpec("json_schema", '{"type": "object"}')
    value = getattr(params, name)
    return GrammarSpec(name, msgspec.json.encode(value).decode() if name == "choice" else value)
