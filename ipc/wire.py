"""This module defines wire format 1, the messages between lowlat's server and its clients over ZeroMQ.

A client is a DEALER, the server a ROUTER. A message has one frame, or two; the second is called its body:

    frame 1   a byte that names the kind, then a msgpack value: the header
    frame 2   only of SUBMIT and APPEND with token ids: these as packed little-endian int32

The transport is ZMTP 3.1, which libzmq speaks since 4.2. It uses the NULL mechanism over ipc:// and on the loopback,
and CURVE over other tcp://.

Headers of control messages are msgpack maps by field name; fields left out have their defaults. Headers of TOKENS, END,
CANCEL, CREDIT, PAUSE, RESUME, APPEND, FINISH, TAKEN and PAUSED are msgpack arrays, fields in order. Integers are signed
64-bit, strings UTF-8, times in the unit of their suffix. The server refuses unknown fields. A client must ignore
unknown fields and unknown kinds.

A header of a client's message has at most 4096 bytes. Exceptions are APPEND, with at most 256 KiB in either frame, and
SUBMIT, with at most 2 MiB, its text or chat included, and at most 16384 values, keys counted. So no frame stops the
server's other threads for more than about 2 ms. Longer prompts are sent as token ids. Free values (template_options,
tool_calls) are JSON values: at most 10,000, nested 32 deep, with integers of 64 bits, signed or unsigned.

    client          byte                          server          byte
    HELLO           0x01  first, once             WELCOME         0x81  answers HELLO
    SUBMIT          0x02                          TOKENS          0x82
    CANCEL          0x03                          END             0x83
    CREDIT          0x04                          ERROR           0x84
    STATS           0x05                          STATS           0x85  answers STATS
    HEALTH          0x06                          PONG            0x86  answers HEALTH
    DRAIN           0x07                          BYE             0x87  last; nothing follows it
    PAUSE           0x08                          PAUSED          0x89  answers PAUSE and RESUME
    RESUME          0x09
    APPEND          0x0A                          TAKEN           0x88  grants more APPEND
    FINISH          0x0B
    RESIDENCE       0x10                          RESIDENT        0x90  answers RESIDENCE

HELLO has the versions that the client speaks. WELCOME answers with the version in use, the limits, the model, the hash
of its tokenizer.json, the digest of its numerics, and the server's epoch, which is different at every start of any
server. A client that sees another epoch than before talks to another process, and its requests there are lost.

SUBMIT has a number, unique and growing within the connection, by which all later messages name the request. It has the
prompt in one of three forms: `text`, `messages` for the model's chat template, or token ids as the body. The server
answers with any number of TOKENS and one END, or with one ERROR that names the request, and nothing else. For fields
that `sampling` leaves out the server uses WELCOME's sampling_defaults, else lowlat's. `sequence` numbers the TOKENS and
the END of a request from 0 without a gap, and END repeats how many tokens were sent. So a client can check that nothing
was lost, doubled or reordered. The texts of all TOKENS, joined, are the completion; with `sampling.parse` they are its
content, without reasoning and tool calls. A SUBMIT whose `result` is not "completion" runs no step: its TOKENS have the
prompt's token ids, or the text of its ids. With `sampling.prompt_logprobs` the first TOKENS have no token, need no
credit, and have the logprobs of the prompt, in parts of at most 65536 numbers and the texts of their tokens, in order
of position.

A server sends only as many tokens as the client granted: `credit` of SUBMIT, and what CREDIT adds to it. It sends a
chunk while the balance is positive, so a step's tokens may overdraw it by less than a step. Without credit the tokens
wait in the server. If tokens wait without credit for `slow_consumer_s`, the stream ends with the code `slow_consumer`.

CANCEL ends a request: END follows with finish_reason "cancelled". The server ignores CANCEL for a request that has
ended, as the two messages may cross. `deadline_ms` counts from the arrival of SUBMIT; a request past it ends as
"cancelled" with the code `deadline`.

PAUSE takes a request off its slot, for others, as soon as possible. RESUME lets it continue, with the same tokens as
without the pause. The server answers each with one PAUSED, in order: when it is done, or when the request ended first.
A refused PAUSE has code and problem, and the request continues: `busy` if the server has no space for the request's
state, `invalid` for an open prompt. A request that is paused for too long ends with an error of the code `deadline`.

A SUBMIT that is `open` begins a prompt that is still being written; the server reads it while it grows. APPEND adds
text (for `messages` to the content of the last one) or token ids. FINISH ends the prompt, and then the request is like
any other. FINISH with `speculative` begins the answer on trial: TOKENS are kept back until FINISH comes again without
it, and an APPEND before that withdraws the answer. A client may send pieces while its balance of bytes (UTF-8, or 4 a
token) is positive: `append_credit` of WELCOME, and what TAKEN adds to it. Pieces that wait are joined, and take memory
by their bytes. A piece without credit ends the request. A prompt that becomes too long ends with ERROR and the code
`invalid`; one that gets nothing for `prompt_idle_s` ends with END and `deadline`. CANCEL abandons it. APPEND and FINISH
are ignored for a request that has ended, and wrong after its FINISH, from which `deadline_ms` and times of END count.

HEALTH asks for PONG, which repeats its nonce. While requests run, PONG says how old the last completed step is, which
shows whether a server that answers also steps. STATS asks for a snapshot of figures, which may be 100 ms old. DRAIN
asks the server to finish its running requests and to end; only clients of the server's own user may send it. A server
that ends says BYE.

RESIDENCE asks the server to give its model's memory on the device back as soon as nothing runs, or to take it again;
only clients of the server's own user may send it. RESIDENT answers when that is done, or says the problem, and repeats
the nonce. A model that sleeps takes requests, too: the first one wakes it, and they wait meanwhile.

An ERROR without a number is about the connection. Its `code` is stable, `field` is the path of the wrong field
("$.sampling.top_p"), and `busy` comes with `retry_after_ms`. A wrong SUBMIT gets an ERROR of its own if its number can
be read. After `Limits.max_bad_messages` other wrong messages in a minute the server says BYE with the reason `dropped`
and forgets the peer. It does the same after WELCOME's `max_messages_per_s` in a second, where a STATS counts as 10.
"""

import math
import re
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.msgpack import Decoder, Encoder

from lowlat.ipc.messages import (
    HEADERS,
    VERSION,
    Append,
    Bye,
    Cancel,
    Code,
    Credit,
    Drain,
    End,
    Error,
    Finish,
    FinishReason,
    Health,
    Hello,
    Kind,
    Message,
    Pause,
    Paused,
    Pong,
    PromptPart,
    Residence,
    Resident,
    Resume,
    Sampling,
    ServerLimits,
    Stats,
    StatsReply,
    Submit,
    Taken,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
    Welcome,
)
from lowlat.ipc.structure import count_values

__all__ = [
    "MAX_APPEND_BYTES",
    "MAX_CONTROL_BYTES",
    "MAX_DEPTH",
    "MAX_FREE_VALUES",
    "MAX_SUBMIT_BYTES",
    "MAX_VALUES",
    "VERSION",
    "Append",
    "Bye",
    "Cancel",
    "Code",
    "Credit",
    "Drain",
    "End",
    "Error",
    "Finish",
    "FinishReason",
    "Health",
    "Hello",
    "Kind",
    "Message",
    "Pause",
    "Paused",
    "Pong",
    "PromptPart",
    "Residence",
    "Resident",
    "Resume",
    "Sampling",
    "ServerLimits",
    "Stats",
    "StatsReply",
    "Submit",
    "Taken",
    "TokenLogprob",
    "Tokens",
    "ToolCallDelta",
    "Welcome",
    "WireError",
    "check_submit",
    "check_submit_size",
    "decode_client",
    "decode_server",
    "encode",
    "option_path",
    "pack_tokens",
    "unpack_tokens",
]

MAX_CONTROL_BYTES = 4096
MAX_APPEND_BYTES = 1 << 18  # of an APPEND's text, or of its body
MAX_SUBMIT_BYTES = 1 << 21  # msgspec decodes a string of this size in 2 ms, of any characters, with the GIL; 8 MiB: 20
MAX_VALUES = 1 << 14  # msgspec builds them in 1 ms; a header with this number of bytes cannot have more
MAX_FREE_VALUES = 10_000
MAX_DEPTH = 32
_MAX_REASON = 300
_PLAIN = (str, bool, int, float, type(None))
_PLAIN_NAME = re.compile("[a-z][a-z_]{0,63}")
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # of an integer in msgpack
_MAX_SHOWN_BITS = 256


class _Numbered(Struct):
    """A SUBMIT that failed to decode; only its number is read."""

    number: Annotated[int, Meta(ge=0, le=(1 << 62))]


_PREFIXES = {header: bytes((kind,)) for kind, header in HEADERS.items()}
_FROM_CLIENT = {kind: Decoder(header) for kind, header in HEADERS.items() if kind < 0x80}
_FROM_SERVER = {kind: Decoder(header) for kind, header in HEADERS.items() if kind >= 0x80}
_NUMBERED = Decoder(_Numbered)
_NUMBER: Decoder[int] = Decoder(Annotated[int, Meta(ge=0, le=(1 << 62))])
_NUMBER_BYTES = 9  # the longest integer
_NUMBER_KEY = msgspec.msgpack.encode("number")
_ENCODER = Encoder()
# msgspec does not wrap the errors of UTF-8 and of nesting
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class WireError(Exception):
    """A message does not have this format.

    field    the path of the wrong field, if there is one: "$.sampling.top_p", "$.body"
    number   the number of the wrong SUBMIT, if it can be read
    """

    def __init__(self, message: str, field: str | None = None, number: int | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.number = number


def encode(header: Struct) -> bytes:
    """Encode a message's first frame. Raises TypeError, OverflowError, RecursionError for values that have no form."""
    return _PREFIXES[type(header)] + _ENCODER.encode(header)


def decode_client(frames: Sequence[bytes]) -> tuple[Struct, bytes]:
    """Decode and check a client's message, for the server; returns it with its body (b"" without one).

    The decoder keeps the GIL, for 2 ms at most; frames that would take longer are refused first. Raises only WireError,
    for any bytes.
    """
    if not 1 <= len(frames) <= 2:
        raise WireError(f"a message has 1 frame or 2, got {len(frames)}")
    frame = frames[0]
    kind = frame[0] if frame else 0
    decoder = _FROM_CLIENT.get(kind)
    if decoder is None:
        raise WireError(f"unknown kind {kind:#04x}" if frame else "the first frame is empty")
    if kind == Kind.APPEND:
        return _decode_append(frames)
    if kind != Kind.SUBMIT:
        if len(frames) > 1:
            raise WireError("only SUBMIT and APPEND have a body", "$.body")
        if len(frame) - 1 > MAX_CONTROL_BYTES:
            raise WireError(f"the header has {len(frame) - 1} bytes, more than {MAX_CONTROL_BYTES}")
        return _decode(decoder, frame[1:]), b""
    check_submit_size(frame)
    body = None if len(frames) == 1 else frames[1]
    try:
        submit = _decode(decoder, frame[1:])
        check_submit(submit, body)
    except WireError as error:
        error.number = _number(frame[1:])
        raise
    return submit, body or b""


def _decode_append(frames: Sequence[bytes]) -> tuple[Append, bytes]:
    for place, frame in enumerate(frames):
        if len(frame) > MAX_APPEND_BYTES:
            raise WireError(
                f"a piece has {len(frame)} bytes, more than {MAX_APPEND_BYTES}", ("$.text", "$.body")[place]
            )
    append: Append = _decode(_FROM_CLIENT[Kind.APPEND], frames[0][1:])
    body = None if len(frames) == 1 else frames[1]
    if (append.text is None) == (body is None):
        raise WireError("a piece is a text or a body of token ids", "$")
    _check_ids(body)
    return append, body or b""


def check_submit_size(frame: bytes) -> None:
    """Refuse a SUBMIT whose header would take long to decode, before the decoder sees it. Raises WireError.

    frame  its first frame, with the byte that names the kind
    """
    if len(frame) <= MAX_VALUES:
        return
    header = memoryview(frame)[1:]
    num_values, place = count_values(header, MAX_VALUES, _NUMBER_KEY)
    if len(header) > MAX_SUBMIT_BYTES:
        reason = f"the header has {len(header)} bytes, more than {MAX_SUBMIT_BYTES}; send a longer prompt as token ids"
    elif num_values > MAX_VALUES:
        reason = f"the header holds more than {MAX_VALUES} values, keys counted"
    else:
        return
    raise WireError(reason, number=None if place is None else _plain_number(header[place]))


def decode_server(frame: bytes) -> Struct | None:
    """Decode a server's message, for clients; None for a kind that this version does not know. Raises WireError."""
    if not frame:
        raise WireError("the frame is empty")
    decoder = _FROM_SERVER.get(frame[0])
    return None if decoder is None else _decode(decoder, frame[1:])


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian int32. Raises TypeError for other types, OverflowError for ids out of range."""
    if len(token_ids) == 1 and type(token_ids[0]) is int:  # most messages; making an array takes longer
        return token_ids[0].to_bytes(4, "little", signed=True)
    packed = array("i", token_ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Unpack token ids of little-endian int32. Raises WireError for a length that is no multiple of 4."""
    if len(packed) == 4:
        return (int.from_bytes(packed, "little", signed=True),)
    if len(packed) % 4:
        raise WireError(f"{len(packed)} bytes of token ids are no multiple of 4", "$.body")
    token_ids = array("i", packed)
    if sys.byteorder != "little":
        token_ids.byteswap()
    return tuple(token_ids)


def _decode(decoder: Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except _UNDECODABLE as error:
        raise _wire_error(error) from None


_AT = re.compile(r" - at (`key` in )?`(\$[^`]{0,200})`$")
_NAMED = re.compile(r"(?:unknown field|missing required field) `([^`]{1,64})`")


def _wire_error(error: Exception) -> WireError:
    """Make a WireError from the decoder's message, shortened, and the path in it, which may have the peer's names."""
    if isinstance(error, RecursionError):
        return WireError("values are nested too deep")
    if isinstance(error, UnicodeDecodeError):
        return WireError(f"a string is not UTF-8: {error.reason}")
    reason = str(error)
    at = _AT.search(reason[-300:])
    field = None if at is None else at[2]
    named = _NAMED.search(reason)
    if named is not None:
        field = f"{field or '$'}.{named[1]}"
    return WireError(reason[:_MAX_REASON], field)


def _number(data: bytes) -> int | None:
    """Return the number of a SUBMIT whose size was checked; None if it cannot be read."""
    try:
        return _NUMBERED.decode(data).number
    except _UNDECODABLE:
        return None


def _plain_number(value: memoryview) -> int | None:
    try:
        return _NUMBER.decode(value[:_NUMBER_BYTES])
    except _UNDECODABLE:
        return None


def check_submit(submit: Submit, body: bytes | None) -> None:
    """Check what the types do not: exactly one prompt, whole tokens, JSON's values in free fields. Raises WireError.

    body  token ids, packed
    """
    num_prompts = (submit.text is not None) + (submit.messages is not None) + (body is not None)
    if num_prompts != 1 and not (submit.open and not num_prompts):
        raise WireError("a request has exactly one of text, messages and a body of token ids", "$")
    _check_ids(body)
    _check_open(submit)
    if (submit.result in ("text", "token_texts")) != (body is not None) and submit.result != "completion":
        raise WireError("token_ids are made of text or messages, text and token_texts of token ids", "$.result")
    if submit.messages is None:
        if submit.template_options is not None:
            raise WireError("template_options stand with messages alone", "$.template_options")
        return
    if submit.template_options is not None:
        _check_options(submit.template_options)
    for place, message in enumerate(submit.messages):
        if message.tool_calls is not None:
            _check_plain(message.tool_calls, f"$.messages[{place}].tool_calls")


def _check_ids(body: bytes | None) -> None:
    if body is not None and (not body or len(body) % 4):
        raise WireError(f"the body has {len(body)} bytes; token ids are int32, at least one", "$.body")


def _check_open(submit: Submit) -> None:
    if not submit.open:
        if submit.max_prompt_tokens is not None:
            raise WireError("max_prompt_tokens is for an open prompt; others have the tokens that they have", "$.open")
        return
    refused = {"fit_context": submit.fit_context, "result": submit.result != "completion"}
    for name, is_given in refused.items():
        if is_given:
            raise WireError(f"{name} needs a whole prompt, and this one is open", f"$.{name}")


def option_path(name: str) -> str:
    """Return the path of one of a SUBMIT's template_options; if its name is not plain, the path of all of them."""
    return f"template_options.{name}" if _PLAIN_NAME.fullmatch(name) else "template_options"


def _check_options(options: dict[str, Any]) -> None:
    """Check all template_options as `_check_plain` does."""
    if not all(isinstance(name, str) for name in options):
        raise WireError("keys must be strings", "$.template_options")
    num_values = 1
    for name, value in options.items():
        num_values = _check_plain(value, f"$.{option_path(name)}", num_values, depth=1)


def _check_plain(value: object, field: str, num_values: int = 0, depth: int = 0) -> int:
    """Refuse values that JSON does not have (bytes, times, keys that are no strings), too many or too deep ones, and
    integers beyond msgpack's.

    num_values, depth  number of values counted before, and depth of the value that contains this one
    Returns num_values with this value and those inside it added.
    """
    level: list[object] = [value]
    while level:
        num_values += len(level)
        depth += 1
        if num_values > MAX_FREE_VALUES or depth > MAX_DEPTH:
            raise WireError(f"more than {MAX_FREE_VALUES} values, or nested deeper than {MAX_DEPTH}", field)
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                if not all(isinstance(key, str) for key in item):
                    raise WireError("keys must be strings", field)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif not isinstance(item, _PLAIN) or (isinstance(item, float) and not math.isfinite(item)):
                raise WireError(f"{type(item).__name__} and what is not finite are no JSON values", field)
            elif isinstance(item, int) and not _LEAST <= item <= _MOST:
                shown = f"{item}" if item.bit_length() <= _MAX_SHOWN_BITS else f"of {item.bit_length()} bits"
                raise WireError(f"the integer {shown} is not of 64 bits, from {_LEAST} to {_MOST}", field)
        level = below
    return num_values
