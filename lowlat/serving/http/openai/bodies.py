"""This module reads JSON bodies as the records of `schema.py` and `responses_schema.py`, and words their errors.

The error for an unknown field suggests this API's name for it, if there is one. Null is accepted for any field. A field
of another server is accepted if it has its default there, which is what this server always does.
"""

import codecs
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, inspect

from lowlat.errors import meant, shown_at
from lowlat.serving.http.errors import ApiError, missing
from lowlat.serving.http.openai.schema import unsupported

__all__ = ["decode", "decoder_of"]

WHY_NOT = {
    "background": "an answer comes to who waits for it",
    "conversation": "nothing is stored; send the whole input",
    "function_call": "give tool_choice",
    "functions": "give tools",
    "previous_response_id": "nothing is stored; send the whole input",
    "prompt": "no prompts are stored",
    "store": "nothing is stored; leave it out",
    "suffix": "write the model's own tokens for filling in the middle into the prompt",
    "truncation": "what is longer than the context is refused",
}
_LENGTHS = ("max_tokens", "max_output_tokens")  # names of the limit; a request has one of them
# other fields, of vLLM, llama.cpp, Ollama or another path -> those that say the same here; the first part is the field
ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("max_completion_tokens", "max_new_tokens", "max_tokens", "n_predict", "num_predict"), _LENGTHS),
    **{f"guided_{kind}": (f"structured_outputs.{kind}",) for kind in ("json", "regex", "grammar", "choice")},
    "add_generation_prompt": ("the chat to /v1/chat/completions",),
    "continue_final_message": ("the chat to /v1/chat/completions",),
    "enable_thinking": ("chat_template_kwargs.enable_thinking",),
    "grammar": ("structured_outputs.grammar",),
    "input": ("messages", "prompt"),
    "json_schema": ("response_format", "structured_outputs.json"),
    "messages": ("input", "the chat to /v1/chat/completions"),
    "prompt": ("the prompt to /v1/completions",),
    "reasoning": ("reasoning_effort",),
    "reasoning_effort": ("reasoning.effort",),
    "repeat_penalty": ("repetition_penalty",),
    "response_format": ("text.format", "structured_outputs"),
    "session_id": ("the header x-session-id",),
    "thinking": ("reasoning_effort", "reasoning.effort"),
    "tools": ("the chat to /v1/chat/completions",),
}
# fields of vLLM's and their only value here, which is their default there
ALWAYS: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "echo": False,
    "early_stopping": False,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}
_AT = re.compile(r" - at (?:`key` in )?`\$\.?([^`]{0,200})`$")
_NAMED = re.compile(r"(unknown|required) field `([^`]{1,64})`")
_PLACE = re.compile(r"\[[^]]*\]")
_BOUND = re.compile(r"Expected `\w+` (?:[<>]=? \S+|of length \S+ \S+)$")  # the error of a value of the right type
Body = TypeVar("Body", bound=Struct)


def decoder_of(kind: type[Body]) -> "msgspec.json.Decoder[Body]":
    """A decoder of bodies of this kind; as other servers' do, it takes 8.0 and "8" for a number, and 1 for true."""
    return msgspec.json.Decoder(kind, strict=False)


def decode(decoder: "msgspec.json.Decoder[Body]", data: bytes) -> Body:
    """Read and check a body. Raises ApiError that names the parameter."""
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        try:
            return decoder.decode(data)
        except msgspec.ValidationError as error:
            if (said := _without_idle(decoder.type, data, str(error))) is None:
                raise
            return decoder.decode(said)
    except RecursionError:
        raise ApiError(400, "the body is nested too deep", code="nesting") from None
    except msgspec.ValidationError as error:
        raise _refusal(decoder.type, str(error), data) from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not in UTF-8: {error.reason}", code="json") from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error!s:.200}", code="json") from None


def _without_idle(kind: type[Struct], data: bytes, message: str) -> bytes | None:
    """The body without unknown fields that change nothing; None where there are none, or for another message."""
    if "unknown field" not in message or _AT.search(message) is not None:
        return None
    body: dict[str, Any] = msgspec.json.decode(data)
    known = kind.__struct_encode_fields__
    idle = {name for name, value in body.items() if name not in known and value in (None, ALWAYS.get(name))}
    kept = {name: value for name, value in body.items() if name not in idle}
    return msgspec.json.encode(kept) if len(kept) < len(body) else None


def _refusal(kind: type[Struct], message: str, data: bytes) -> ApiError:
    at = _AT.search(message[-300:])
    path = "" if at is None else at[1]
    named = _NAMED.search(message)
    if named is None:
        reason = message.partition(" - at ")[0][:300]
        if message.startswith("Expected `null`") or (message.startswith("Invalid enum") and path in WHY_NOT):
            return unsupported(path, WHY_NOT.get(path, ""))
        if message.startswith("Invalid value"):  # the field names a kind
            return unsupported(path, reason[len("Invalid value ") :])
        if message.startswith("Invalid enum") and (choices := _choices(inspect.type_info(kind), path)):
            reason += f"; served: {', '.join(choices)}"
        if _BOUND.match(reason):
            reason += f", got {shown_at(msgspec.json.decode(data), path, reason)}"
        param = path.partition("[...]")[0]  # msgspec does not report the key of a table
        return ApiError(400, f"{param or 'the body'}: {reason}", param=param or None, code="invalid_value")
    param = f"{path}.{named[2]}" if path else named[2]
    if named[1] == "required":
        return missing(param)
    return unsupported(param, "" if path else _instead(kind, param))


def _instead(kind: type[Struct], name: str) -> str:
    """Return a text that suggests a field in place of an unknown one; "" if there is none."""
    known = kind.__struct_encode_fields__
    for other in ELSEWHERE.get(name, ()):
        if " " in other or other.partition(".")[0] in known:
            return f"give {other}"
    return meant(name, known).removeprefix("; ")


def _choices(kind: inspect.Type, path: str) -> list[str]:
    """The values that a field of an enumeration may have, by its path; none for one that is no such field."""
    found = [kind]
    for name in [*filter(None, _PLACE.sub("", path).split(".")), ""]:
        plain: list[inspect.Type] = []
        while found:
            each = found.pop()
            if isinstance(each, inspect.Metadata):
                found.append(each.type)
            elif isinstance(each, inspect.UnionType):
                found.extend(each.types)
            elif isinstance(each, inspect.ListType):
                found.append(each.item_type)
            else:
                plain.append(each)
        if not name:
            return [repr(value) for each in plain if isinstance(each, inspect.LiteralType) for value in each.values]
        records = (each for each in plain if isinstance(each, inspect.StructType))
        found = [field.type for each in records for field in each.fields if field.encode_name == name]
    return []
