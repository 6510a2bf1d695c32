"""This module makes a SUBMIT from a caller's prompt and options, and checks what can be checked without a server."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec
from msgspec import UNSET, Struct

from lowlat.errors import RequestError, meant, not_unicode, shown_at
from lowlat.ipc.messages import MAX_SALT, MAX_SESSION, Message, Parse, Result, Sampling, Submit
from lowlat.ipc.prompts import Prompt, chat_messages
from lowlat.ipc.structure import count_values
from lowlat.ipc.wire import (
    MAX_SUBMIT_BYTES,
    MAX_VALUES,
    WireError,
    check_submit,
    check_submit_size,
    encode,
    option_path,
    pack_tokens,
)

__all__ = ["Request", "make_request", "pieces_of"]

_OPTIONS = frozenset(field.name for field in msgspec.structs.fields(Sampling))
_IN_SEVERAL_FORMS = frozenset(
    {"stop", "stop_token_ids", "logit_bias", "json_schema", "choice", "tool_calls", "tools", "draft_texts"}
)
_MAX_DEADLINE_S = (1 << 40) / 1000.0
_PIECE = 1 << 15  # characters or tokens of an APPEND: with 4 bytes each, half of the limit


class Request(Struct, frozen=True):
    """A checked request with its prompt's packed token ids, if it has any; a connection sets its number and credit."""

    submit: Submit
    body: bytes | None

    def frames(self, number: int, credit: int, max_message_bytes: int) -> tuple[bytes, ...]:
        """Make the frames of SUBMIT. Raises RequestError if they are longer than the server allows."""
        self.submit.number, self.submit.credit = number, credit
        try:
            header = encode(self.submit)
            check_submit_size(header)
        except WireError as error:
            name = _largest(self.submit, len if len(header) > MAX_SUBMIT_BYTES else _num_values)
            reason = str(error) if name in ("prompt", "messages") else str(error).partition(";")[0]
            raise RequestError(f"{name}: the request is too long: {reason}") from error
        except UnicodeEncodeError as error:
            raise not_unicode(error) from error
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(f"the request has no encoding: {error}") from error
        frames = (header,) if self.body is None else (header, self.body)
        size = max(len(header), len(frames[-1]))
        if size > max_message_bytes:
            name = _largest(self.submit, len) if size == len(header) else "prompt"
            raise RequestError(
                f"{name}: the request has {size} bytes and the server takes {max_message_bytes} (max_message_bytes)"
            )
        return frames


def _largest(submit: Submit, measure: Callable[[bytes], int]) -> str:
    """Return the name of a request's largest field, by a measure of its encoding; a template option by its path."""
    options = {option_path(name): value for name, value in (submit.template_options or {}).items()}
    fields = {"prompt": submit.text, "messages": submit.messages, **options, **msgspec.structs.asdict(submit.sampling)}
    sizes = {name: measure(msgspec.msgpack.encode(value)) for name, value in fields.items() if value is not UNSET}
    return max(sizes, key=lambda name: sizes[name])


def _num_values(encoded: bytes) -> int:
    return count_values(memoryview(encoded), MAX_VALUES, b"")[0]


def make_request(
    prompt: Prompt | None,
    sampling: Mapping[str, Any],
    *,
    deadline_s: float | None = None,
    template_options: Mapping[str, Any] | None = None,
    fit_context: bool = False,
    allow_special: bool = False,
    cache_salt: str = "",
    session: str = "",
    result: Result = "completion",
    add_special_tokens: bool = True,
    is_open: bool = False,
    max_prompt_tokens: int | None = None,
) -> Request:
    """Check a prompt and options, and make a Request of them. Raises RequestError.

    prompt  text, token ids, or chat messages; None: an open prompt without a beginning
    """
    text, messages, body = (None, None, None) if prompt is None and is_open else _parts_of(prompt)
    _check_flags(fit_context=fit_context, allow_special=allow_special, add_special_tokens=add_special_tokens)
    _check_name("cache_salt", cache_salt, MAX_SALT)
    _check_name("session", session, MAX_SESSION)
    submit = Submit(
        0,
        1,
        _sampling(sampling),
        text,
        messages,
        _template_options(template_options, messages),
        None if deadline_s is None else _deadline_ms(deadline_s),
        fit_context=fit_context,
        allow_special=allow_special,
        cache_salt=cache_salt,
        result=result,
        add_special_tokens=add_special_tokens,
        session=session,
        open=is_open,
        max_prompt_tokens=_max_prompt(max_prompt_tokens),
    )
    try:
        check_submit(submit, body)
    except WireError as error:
        raise RequestError(f"{(error.field or '$.request')[2:]}: {error}") from error
    return Request(submit, body)


def _parts_of(prompt: object) -> tuple[str | None, list[Message] | None, bytes | None]:
    """Return a prompt's text, messages and packed token ids; two of them are None."""
    if isinstance(prompt, str):
        return prompt, None, None
    if isinstance(prompt, (list, tuple)) and prompt and type(prompt[0]) is int:
        return None, None, _pack(prompt)
    entries = _entries(prompt)
    if isinstance(entries[0], Mapping):
        return None, chat_messages(entries), None
    return None, None, _pack(entries)


def _template_options(given: object, messages: list[Message] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if messages is None:
        raise RequestError("template_options are for chat messages; this prompt has no template")
    if not isinstance(given, Mapping):
        raise RequestError(f"template_options must be a mapping, got {type(given).__name__}")
    return dict(given)


def _check_flags(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise RequestError(f"{name} must be true or false, got {value!r:.80}")


def _check_name(option: str, value: object, most: int) -> None:
    if not isinstance(value, str) or len(value) > most:
        raise RequestError(f"{option} must be a string of at most {most} characters, got {value!r:.80}")


def pieces_of(piece: str | Sequence[int]) -> Iterator[str | bytes]:
    """Split a piece of an open prompt for messages, as text or packed token ids.

    Raises RequestError for a piece that is neither, before it returns anything.
    """
    if isinstance(piece, str):
        try:
            piece.encode()
        except UnicodeEncodeError as error:
            raise not_unicode(error) from error
        whole: str | bytes = piece
        step = _PIECE
    else:
        if isinstance(piece, (bytes, bytearray, Mapping)) or not isinstance(piece, Iterable):
            raise RequestError(f"a piece of a prompt is text or token ids, got {type(piece).__name__}")
        whole, step = _pack(_plain_ids(piece)), 4 * _PIECE
    return (whole[start : start + step] for start in range(0, len(whole), step))


def _max_prompt(given: int | None) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given < 1 << 31:
        raise RequestError(f"max_prompt_tokens must be from 1 to {(1 << 31) - 1}, got {given!r:.80}")
    return given


def _entries(prompt: object) -> Sequence[Any]:
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is text, token ids or chat messages, got {type(prompt).__name__}")
    entries = _plain_ids(prompt)
    if not isinstance(entries, (list, tuple)):
        raise RequestError(f"a prompt is text, token ids or chat messages, got {prompt!r:.80}")
    if not entries:
        raise RequestError("the prompt is empty; it needs at least one token or message")
    return entries


def _plain_ids(given: Iterable[Any]) -> Any:
    """Return token ids as a list; arrays of NumPy or torch are converted."""
    return given.tolist() if hasattr(given, "tolist") else list(given)


def _pack(token_ids: Sequence[Any]) -> bytes:
    try:
        if bool in set(map(type, token_ids)):  # all at once: a prompt may be long
            raise TypeError("a bool is no token id")
        packed = pack_tokens(token_ids)
    except (TypeError, OverflowError) as error:
        place = next((i for i, token in enumerate(token_ids) if not _is_int32(token)), 0)
        raise RequestError(f"prompt token {place} is {token_ids[place]!r:.80}; ids are 32-bit integers") from error
    if not packed[3::4].isascii():  # the highest byte of one is 128 or more
        lowest = min(token_ids)
        raise RequestError(f"prompt token {token_ids.index(lowest)} is {lowest}; ids are not negative")
    return packed


def _is_int32(token: object) -> bool:
    if isinstance(token, bool):
        return False
    try:
        pack_tokens([token])  # type: ignore[list-item]
    except (TypeError, OverflowError):
        return False
    return True


def _sampling(given: Mapping[str, Any]) -> Sampling:
    options = given if _IN_SEVERAL_FORMS.isdisjoint(given) else _plain(given)
    try:
        return msgspec.convert(options, Sampling)
    except (msgspec.ValidationError, TypeError):
        options = {name: _plain_numbers(value) for name, value in options.items()}
    try:
        return msgspec.convert(options, Sampling)
    except (msgspec.ValidationError, TypeError) as error:
        for name in given:
            if name not in _OPTIONS:
                raise RequestError(
                    f"unknown option {name!r:.80}{meant(name, _OPTIONS)}; known: {', '.join(sorted(_OPTIONS))}"
                ) from None
        reason, _, path = str(error).partition(" - at ")
        name = path.strip("`").rpartition("$.")[2] or "sampling"
        if name == "parse":
            reason += f"; it is one of {', '.join(map(repr, get_args(Parse)))}"
        raise RequestError(f"{name}: {reason}, got {shown_at(options, name, reason)}") from error


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options that callers may give in several forms to the form that is sent."""
    options = dict(given)
    for name in ("stop", "choice", "draft_texts"):
        if isinstance(options.get(name), str):
            options[name] = (options[name],)
    for name in ("json_schema", "tool_calls"):
        if isinstance(options.get(name), Mapping):
            options[name] = _as_text(name, options[name])
    if isinstance(options.get("tools"), (list, tuple)):
        options["tools"] = _as_text("tools", options["tools"])
    if isinstance(options.get("logit_bias"), Mapping):
        options["logit_bias"] = dict(options["logit_bias"])
    for name in ("stop", "stop_token_ids"):
        if isinstance(options.get(name), (set, frozenset)):
            options[name] = sorted(options[name])
    return options


def _plain_numbers(value: Any) -> Any:
    """Replace NumPy's and torch's numbers in a value by Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {_plain_numbers(key): _plain_numbers(item) for key, item in value.items()}
    return [*map(_plain_numbers, value)] if isinstance(value, (list, tuple)) else value


def _as_text(name: str, value: Mapping[str, Any] | Sequence[Any]) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} must be of JSON values: {error!s:.200}") from error


def _deadline_ms(deadline_s: float) -> int:
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float)) or not math.isfinite(deadline_s):
        raise RequestError(f"deadline_s must be a number of seconds, got {deadline_s!r:.80}")
    if not 0.0 < deadline_s <= _MAX_DEADLINE_S:
        raise RequestError(f"deadline_s must be above 0 and at most {_MAX_DEADLINE_S:g}, got {deadline_s!r:.80}")
    return max(1, round(deadline_s * 1000.0))
