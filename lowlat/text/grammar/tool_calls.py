"""The grammar of an answer whose tool calls fit their functions' schemas, in the format that the model's family has.

Written in the library's own language. Formats are those that `lowlat.text.answers` takes apart.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from lowlat.errors import RequestError
from lowlat.text.answers.llama3 import PYTHON_TAG
from lowlat.text.answers.tagged import CALL, END_CALL
from lowlat.text.codec import TextCodec
from lowlat.text.grammar.exact import ESCAPES, NotHeld, exact_schema
from lowlat.text.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, HarmonyParser

__all__ = ["tool_grammar"]

ANYTHING = {"type": "object"}
HOW: dict[str, Any] = {  # as `worker.py` has it
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": ESCAPES,
}
TEXT = r"TEXT: /(.|\n)*/"


class Function(Struct, forbid_unknown_fields=True):
    """A function: without strict its schema holds as far as the library knows its keywords."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolCalls(Struct, forbid_unknown_fields=True):
    """The calls that an answer may have, or must have where required; several, where parallel."""

    functions: Annotated[list[Function], Meta(min_length=1, max_length=128)]
    required: bool = False
    parallel: bool = True


_DECODER = msgspec.json.Decoder(ToolCalls)


def tool_grammar(codec: TextCodec, text: str) -> str:
    """The grammar of calls, from their JSON text. Raises RequestError for another text, or a family without calls."""
    try:
        calls = _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"tool_calls: {error!s:.200}") from error
    if HarmonyParser.speaks(codec):
        lines = _harmony(calls)
    elif codec.spells(PYTHON_TAG) and not codec.spells(CALL):
        lines = _llama3(calls)
    elif codec.spells(CALL):
        lines = _tagged(codec, calls)
    else:
        raise RequestError("tool_calls: neither the model's tokenizer nor its chat template names a format of calls")
    return "\n".join(lines)


def _tagged(codec: TextCodec, calls: ToolCalls) -> list[str]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in text, each call on lines of its own."""
    special = set(codec.added_tokens().values())
    opening = CALL if CALL in special else _literal(CALL)
    closing = END_CALL if END_CALL in special else _literal(END_CALL)
    call = f'{opening} "\\n" ({_names("object", calls)}) "\\n" {closing}'
    lines = _objects(calls, "arguments")
    if calls.required:
        more = ' ("\\n" call)*' if calls.parallel else ""
        return [f"start: call{more}", f"call: {call}", *lines]
    body = call.partition(" ")[2]
    begun = f"begun: TEXT {CALL}" if CALL in special else f"begun[lazy]: TEXT {_literal(CALL)}"
    return [f"start: (begun {body}){'*' if calls.parallel else '?'} TEXT", begun, TEXT, *lines]


def _llama3(calls: ToolCalls) -> list[str]:
    """`{"name": ..., "parameters": {...}}` as the whole answer, or text that begins otherwise."""
    more = f' ("; " ({_names("object", calls)}))*' if calls.parallel else ""
    answer = f"({_names('object', calls)}){more}"
    lines = _objects(calls, "parameters")
    if calls.required:
        return [f"start: {answer}", *lines]
    return [f"start: {answer} | OTHER", r"OTHER: /(\s*[^\s{](.|\n)*)?/", *lines]


def _harmony(calls: ToolCalls) -> list[str]:
    """A message to a function in the commentary channel, behind any number of messages to nobody."""
    between = f'{ENDS[0]} {START} "assistant"'
    last = "call" if calls.required else f'(call | {CHANNEL} "final" {MESSAGE} TEXT)'
    heads = [
        f'head_{place}: {CHANNEL} {_literal(f"commentary to=functions.{function.name} ")} {CONSTRAIN} "json" {MESSAGE} '
        f"arguments_{place}"
        for place, function in enumerate(calls.functions)
    ]
    return [
        f"start: note* {last}",
        f'note: {CHANNEL} ("analysis" | "commentary") {MESSAGE} TEXT {between}',
        f"call: {_names('head', calls)}",
        TEXT,
        *heads,
        *_arguments(calls.functions),
    ]


def _names(rule: str, calls: ToolCalls) -> str:
    return " | ".join(f"{rule}_{place}" for place in range(len(calls.functions)))


def _objects(calls: ToolCalls, key: str) -> list[str]:
    """Rules of the objects that call a function, by name and arguments."""
    objects = []
    for place, function in enumerate(calls.functions):
        begin = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{key}": '
        objects.append(f'object_{place}: {_literal(begin)} arguments_{place} "}}"')
    return objects + _arguments(calls.functions)


def _arguments(functions: Sequence[Function]) -> list[str]:
    rules = []
    for place, function in enumerate(functions):
        try:
            schema = dict(exact_schema(function.parameters or ANYTHING, lenient=not function.strict))
        except NotHeld as error:
            raise RequestError(f"tool_calls: {function.name}: {error}") from None
        own = schema.get("x-guidance")
        escapes = own.get("json_allowed_escapes", ESCAPES) if isinstance(own, dict) else ESCAPES
        schema["x-guidance"] = {**HOW, "json_allowed_escapes": escapes, "lenient": not function.strict}
        rules.append(f"arguments_{place}: %json {json.dumps(schema)}")
    return rules


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
