"""This module writes the grammar of an answer whose tool calls fit their functions' schemas, in the model's format.

Written in the library's own language. Formats are those that `lowlat.text.answers` takes apart.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from lowlat.errors import RequestError
from lowlat.text.answers.formats import format_of
from lowlat.text.codec import TextCodec
from lowlat.text.grammar.braced import BracedRules
from lowlat.text.grammar.exact import ESCAPES, NotHeld, exact_schema
from lowlat.text.grammar.one_of import first_overlap, refusal
from lowlat.text.grammar.parameters import parameter_rules
from lowlat.text.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START
from lowlat.text.schemas import arguments_schema, plain_schema
from lowlat.text.templates.tags import (
    ARGUMENTS_MARK,
    CALL,
    CALL_HEAD,
    CALLS,
    CHANNEL_CALL,
    END_CALL,
    END_CHANNEL_CALL,
    END_FUNCTION,
    END_LISTED,
    FUNCTION,
    ID_MARK,
    LISTED,
    SEED_CALL,
    SEED_END_CALL,
    STRING_MARK,
)

__all__ = ["place_of", "tool_grammar"]

ANYTHING = {"type": "object"}
DOCUMENT = "tool_calls.document"
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


class Document(Struct, forbid_unknown_fields=True):
    """JSON that an answer without calls is; strict as a function's."""

    schema: dict[str, Any]
    strict: bool = False


class ToolCalls(Struct, forbid_unknown_fields=True):
    """The calls that an answer may have, or must have where required; several, where parallel.

    document  what the answer is where it is not calls; None: any text, with calls in it
    """

    functions: Annotated[list[Function], Meta(min_length=1, max_length=128)]
    required: bool = False
    parallel: bool = True
    document: Document | None = None


Grammar = Callable[[TextCodec, ToolCalls], list[str]]
SHORT_ID = "[a-zA-Z0-9]{9}"
CALL_ID = f'(", \\"id\\": \\"" /{SHORT_ID}/ "\\"")?'
OF_FUNCTION = re.compile(r"(?:arguments|parameters)_(\d+)(?:_(\d+)_value_json)?")  # rules of one, and of a parameter
NAMED_TOKEN = re.compile("<[A-Za-z0-9_|/:.-]+>")  # special tokens that rules may name by their text

_DECODER = msgspec.json.Decoder(ToolCalls)


def tool_grammar(codec: TextCodec, text: str) -> str:
    """The grammar of calls, from their JSON text. Raises RequestError for another text, or a family without calls."""
    try:
        calls = _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"tool_calls: {error!s:.200}") from error
    kind = format_of(codec)
    if kind is None:
        raise RequestError("tool_calls: neither the model's tokenizer nor its chat template names a format of calls")
    grammar = GRAMMARS[kind.name]
    try:
        if calls.document is None or calls.required:
            return "\n".join(grammar(codec, calls))
        start, *lines = grammar(codec, replace(calls, required=True))
    except RecursionError:
        raise RequestError("tool_calls: a function's schema is nested too deep") from None
    begin = f'{CHANNEL} "final" {MESSAGE} ' if kind.name == "Harmony" else ""
    made = _json("document", DOCUMENT, calls.document.schema, strict=calls.document.strict)
    return "\n".join([f"start: called | {begin}document", start.replace("start:", "called:", 1), *lines, made])


def place_of(rule: str, text: str) -> tuple[str, tuple[str, ...]]:
    """The tool whose schema a rule of `tool_grammar` holds, as errors name it, and the steps to it in its parameters.

    text  of the calls
    """
    found = OF_FUNCTION.fullmatch(rule)
    if found is None:
        return DOCUMENT, ()
    function = _DECODER.decode(text).functions[int(found[1])]
    if found[2] is None:
        return _named(function), ()
    key = list(arguments_schema(plain_schema(function.parameters or ANYTHING))["properties"])[int(found[2])]
    return _named(function), ("properties", key)


def _tagged(codec: TextCodec, calls: ToolCalls) -> list[str]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in text, each call on lines of its own."""
    opening, closing = _tag(codec, CALL), _tag(codec, END_CALL)
    body = f'"\\n" ({_names("object", calls)}) "\\n" {closing}'
    return [*_in_text(calls, opening, body, between='"\\n"'), *_objects(calls, "arguments")]


def _functions(
    codec: TextCodec, calls: ToolCalls, tags: tuple[str, str] = (CALL, END_CALL), line: str = "\n"
) -> list[str]:
    """`<tool_call><function=...><parameter=...>...</parameter></function></tool_call>`, on lines.

    line  what stands around a value
    """
    opening, closing = (_tag(codec, tag) for tag in tags)
    body = f'"\\n" ({_names("function", calls)}) {_literal(END_FUNCTION)} "\\n" {closing}'
    rules = []
    for place, function in enumerate(calls.functions):
        if ">" in function.name or "\n" in function.name:
            raise RequestError(f"tool_calls: the name {function.name!r:.80} holds > or a line break")
        schema, options = _exact(_named(function), function.parameters or ANYTHING, strict=function.strict)
        try:
            rules += parameter_rules(f"parameters_{place}", schema, options, line=line, strict=function.strict)
        except NotHeld as error:
            raise RequestError(f"{_named(function)}: {error}") from None
        begin = _literal(f"{FUNCTION}{function.name}>\n")
        rules.append(f"function_{place}: {begin} parameters_{place}")
    lines = _in_text(calls, opening, body, between='"\\n"')
    return [*lines, *([] if TEXT in lines else [TEXT]), *rules]


def _seed(codec: TextCodec, calls: ToolCalls) -> list[str]:
    """The same in Seed's tags, values without lines of their own."""
    return _functions(codec, calls, (SEED_CALL, SEED_END_CALL), "")


def _braced(codec: TextCodec, calls: ToolCalls) -> list[str]:
    """`<|tool_call>call:name{key:value,...}<tool_call|>`, one call after the other."""
    opening, closing, mark = (_tag(codec, tag) for tag in (CHANNEL_CALL, END_CHANNEL_CALL, STRING_MARK))
    rules = []
    for place, function in enumerate(calls.functions):
        if not function.name or any(character in "{}:<>" or character.isspace() for character in function.name):
            raise RequestError(f"tool_calls: the name {function.name!r:.80} holds a brace, a colon or white space")
        schema, options = _exact(_named(function), function.parameters or ANYTHING, strict=function.strict)
        made = BracedRules(mark, schema, options, strict=function.strict, prefix=f"of_{place}")
        try:
            if function.strict and (path := first_overlap(schema)) is not None:
                raise NotHeld(refusal(path))
            arguments = made.arguments()
        except NotHeld as error:
            raise RequestError(f"{_named(function)}: {error}") from None
        rules += [f"head_{place}: {_literal(CALL_HEAD + function.name)} {arguments}", *made.lines]
    lines = _in_text(calls, opening, f"({_names('head', calls)}) {closing}")
    return [*lines, *([] if TEXT in lines else [TEXT]), *rules]


def _mistral(codec: TextCodec, calls: ToolCalls) -> list[str]:
    """`[TOOL_CALLS]name[ARGS]{...}`, also with an id between name and arguments where the template has one."""
    call_id = f"({_tag(codec, ID_MARK)} /{SHORT_ID}/)? " if codec.template_has(ID_MARK) else ""
    heads = [
        f"head_{place}: {_literal(function.name)} {call_id}{_tag(codec, ARGUMENTS_MARK)} arguments_{place}"
        for place, function in enumerate(calls.functions)
    ]
    lines = _in_text(calls, _tag(codec, CALLS), f"({_names('head', calls)})")
    return [*lines, *heads, *_arguments(calls.functions)]


def _listed_in(*tags: str) -> Grammar:
    """`[{"name": ..., "arguments": {...}}]` after one tag and before another, if there are two."""

    def listed(codec: TextCodec, calls: ToolCalls) -> list[str]:
        opening, *closing = (_tag(codec, tag) for tag in tags)
        more = ' (", " listed)*' if calls.parallel else ""
        body = " ".join(['" "?', f'"[" listed{more} "]"', *closing])
        lines = _in_text(replace(calls, parallel=False), opening, body)
        return [*lines, f"listed: {_names('object', calls)}", *_objects(calls, "arguments", CALL_ID)]

    return listed


def _in_text(calls: ToolCalls, opening: str, body: str, between: str = "") -> list[str]:
    """Rules of an answer that is calls, where they are required, or text with calls in it.

    opening, body  of a call: the tag by which it begins, and what follows
    between        two calls, where nothing but calls may come
    """
    if calls.required:
        more = f" ({between} call)*" if calls.parallel else ""
        return [f"start: call{more}", f"call: {opening} {body}"]
    begun = f"begun[lazy]: TEXT {opening}" if opening.startswith('"') else f"begun: TEXT {opening}"
    return [f"start: (begun {body}){'*' if calls.parallel else '?'} TEXT", begun, TEXT]


def _tag(codec: TextCodec, text: str) -> str:
    """A tag as the library takes it: a special token by its number, or text."""
    number = codec.token_id(text)
    if number is None or text not in codec.added_tokens().values():
        return _literal(text)
    return text if NAMED_TOKEN.fullmatch(text) else f"<[{number}]>"


def _llama3(codec: TextCodec, calls: ToolCalls) -> list[str]:
    """`{"name": ..., "parameters": {...}}` as the whole answer, or text that begins otherwise."""
    more = f' ("; " ({_names("object", calls)}))*' if calls.parallel else ""
    answer = f"({_names('object', calls)}){more}"
    lines = _objects(calls, "parameters")
    if calls.required:
        return [f"start: {answer}", *lines]
    return [f"start: {answer} | OTHER", r"OTHER: /(\s*[^\s{](.|\n)*)?/", *lines]


def _harmony(codec: TextCodec, calls: ToolCalls) -> list[str]:
    """A message to a function in the commentary channel, after any number of messages to nobody."""
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


def _objects(calls: ToolCalls, key: str, more: str = "") -> list[str]:
    """Rules of the objects that call a function, by name and arguments; more: what may follow these."""
    objects = []
    for place, function in enumerate(calls.functions):
        name = json.dumps(function.name, ensure_ascii=False)
        # in the pieces that a schema's rules have, so that another object may begin the same way
        begin = " ".join(map(_literal, ("{", '"name"', ": ", name, ", ", f'"{key}"', ": ")))
        objects.append(f'object_{place}: {begin} arguments_{place} {more} "}}"')
    return objects + _arguments(calls.functions)


def _arguments(functions: Sequence[Function]) -> list[str]:
    rules = []
    for place, function in enumerate(functions):
        rules.append(
            _json(f"arguments_{place}", _named(function), function.parameters or ANYTHING, strict=function.strict)
        )
    return rules


def _json(rule: str, name: str, schema: dict[str, Any], *, strict: bool) -> str:
    """The rule of JSON that a schema describes."""
    exact, options = _exact(name, schema, strict=strict)
    return f"{rule}: %json {json.dumps({**exact, **options})}"


def _named(function: Function) -> str:
    return f"tool_calls: {function.name}"


def _exact(name: str, schema: dict[str, Any], *, strict: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema made exact, and the library's options for it. Raises RequestError that says whose it is."""
    try:
        exact = dict(exact_schema(schema, lenient=not strict))
    except NotHeld as error:
        raise RequestError(f"{name}: {error}") from None
    own = exact.get("x-guidance")
    escapes = own.get("json_allowed_escapes", ESCAPES) if isinstance(own, dict) else ESCAPES
    return exact, {"x-guidance": {**HOW, "json_allowed_escapes": escapes, "lenient": not strict}}


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


GRAMMARS: Mapping[str, Grammar] = {
    "Harmony": _harmony,
    "Mistral": _mistral,
    "Mistral, listed": _listed_in(CALLS),
    "Gemma 4": _braced,
    "Seed": _seed,
    "Qwen3-Coder": _functions,
    "Hermes": _tagged,
    "listed, closed": _listed_in(LISTED, END_LISTED),
    "listed": _listed_in(LISTED),
    "Llama 3": _llama3,
    "generic": _tagged,
}
