"""This module is wire format 1: what lowlat's server and its clients say to each other over ZeroMQ.

A client is a DEALER, the server a ROUTER. A message is one frame, or two where the second is named here as its body:

    frame 1   a byte that names the kind, then a msgpack value: the header
    frame 2   SUBMIT and APPEND alone, and only for token ids: these as little-endian int32, packed

Below it is ZMTP 3.1, which libzmq speaks since 4.2: over ipc:// and on the loopback with the NULL mechanism, over other
tcp:// with CURVE.

Headers of control messages are msgpack maps by field name; fields left out have their defaults. Those of TOKENS, END,
CANCEL, CREDIT, PAUSE, RESUME, APPEND, FINISH, TAKEN and PAUSED are msgpack arrays, fields in order. Integers are signed
64-bit, strings UTF-8, times in the unit of their suffix. The server refuses unknown fields; a client must ignore them,
and ignore kinds that it does not know.

Headers of a client's messages have at most 4096 bytes; either frame of APPEND has 256 KiB; SUBMIT's has 2 MiB, a text
or a chat included, and at most 16384 values, keys counted: so no frame keeps the server's other threads from running
for more than about 2 ms. Longer prompts are sent as token ids. Where any values may stand (template_options,
tool_calls) they are JSON's, at most 10,000, nested 32 deep, and integers have 64 bits, signed or unsigned.

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

HELLO carries the versions that the client speaks; WELCOME answers with the one in use, the limits, the model, the
hash of its tokenizer.json, the digest of its numerics, and the server's epoch, which no other start of any server
has. A client that sees another epoch than before talks to another process: whatever it had under way is lost.

SUBMIT carries a number, unique and growing within the connection, by which all later messages name the request, and
the prompt in one of three forms: `text`, `messages` for the model's chat template, or token ids as the body. It is
answered by TOKENS, as often as there is something to say, and one END; or by one ERROR that names it, and nothing
else. A field that its `sampling` leaves out is the server's to choose: WELCOME's sampling_defaults, else lowlat's.
TOKENS and END of a request are numbered by `sequence` from 0 without a gap; END repeats how many tokens were sent: so
a client can prove that nothing was lost, doubled or reordered. Texts of all TOKENS, joined, are the completion's;
where `sampling.parse` asks for it, its content, apart from reasoning and tool calls. A SUBMIT whose `result` is no
completion is never decoded: its TOKENS hold the prompt's token ids, or the text of its ids. With
`sampling.prompt_logprobs` the first TOKENS have no token, need no credit, and hold the logprobs of the prompt, in parts
of at most 65536 numbers and the texts of their tokens, in order of position.

A server sends as many tokens as it was granted: `credit` of SUBMIT, and what CREDIT adds to it. It sends a chunk while
the balance is positive, so a step's tokens may overdraw it by less than a step. Without credit the tokens wait in the
server; a stream that stays without credit for `slow_consumer_s` while tokens wait ends with the code `slow_consumer`.

CANCEL ends a request: END follows with finish_reason "cancelled". It is ignored for one that has ended, for the two
may cross. `deadline_ms` counts from the arrival of SUBMIT; a request past it ends as "cancelled" with the code
`deadline`.

PAUSE lets a request give its slot to others as soon as that can be, and RESUME lets it go on, with the tokens that it
would have had. Each is answered by one PAUSED, in order: when it is done, when the request has ended first, or with
code and problem when it is refused, and then the request runs on: `busy` where the server has no space for what it
holds, `invalid` for an open prompt. One that is paused for too long ends with an error of the code `deadline`.

A SUBMIT that is `open` begins a prompt that is still being written; it is read while it grows. APPEND adds text (of
`messages` to the last one's content) or token ids, and FINISH ends it: from then on it is a request like any other.
FINISH with `speculative` begins the answer on trial: TOKENS are kept back until FINISH comes again without it, and an
APPEND before that withdraws the answer. A client may send pieces while its balance of bytes (UTF-8, or 4 a token) is
positive: `append_credit` of WELCOME, and what TAKEN adds to it; those that wait are joined, and take memory by their
bytes. A piece without credit ends the request; so does a prompt that is too long, with ERROR and the code `invalid`,
and one of which nothing comes for `prompt_idle_s`, with END and `deadline`. CANCEL abandons it. APPEND and FINISH are
ignored for a request that has ended, and wrong after its FINISH. `deadline_ms` and times of END count from there.

HEALTH asks for PONG; its nonce comes back. PONG says how old the last completed step is while requests run: a server
that answers and does not step is not well. STATS asks for a snapshot of figures. DRAIN asks the server to finish what
runs and to end; only clients of the server's own user may. A server that ends says BYE.

RESIDENCE asks the server to give its model's memory on the device back as soon as nothing runs, or to take it again;
only clients of the server's own user may. RESIDENT answers when that is done, or says the problem; its nonce comes
back. A model that sleeps takes requests all the same: the first one wakes it, and they wait meanwhile.

An ERROR without a number is about the connection. Its `code` is stable, `field` is the path of the field that is
wrong ("$.sampling.top_p"), `retry_after_ms` stands with `busy`. A SUBMIT that is wrong ends by its own ERROR where its
number can be read. After `Limits.max_bad_messages` other wrong messages in a minute the server says BYE with the reason
`dropped` and forgets the peer; so it does after WELCOME's `max_messages_per_s` in a second, a STATS counted as 10.
A STATS reply may be 100 ms old.
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
MAX_SUBMIT_BYTES = 1 << 21  # of whatever characters, msgspec makes a string of them in 2 ms, with the GIL; 8 MiB in 20
MAX_VALUES = 1 << 14  # msgspec builds them in 1 ms; a header of as many bytes cannot hold more
MAX_FREE_VALUES = 10_000
MAX_DEPTH = 32
_MAX_REASON = 300
_PLAIN = (str, bool, int, float, type(None))
_PLAIN_NAME = re.compile("[a-z][a-z_]{0,63}")
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # of an integer in msgpack
_MAX_SHOWN_BITS = 256


class _Numbered(Struct):
    """A broken SUBMIT of which only the number is wanted."""

    number: Annotated[int, Meta(ge=0, le=(1 << 62))]


_PREFIXES = {header: bytes((kind,)) for kind, header in HEADERS.items()}
_FROM_CLIENT = {kind: Decoder(header) for kind, header in HEADERS.items() if kind < 0x80}
_FROM_SERVER = {kind: Decoder(header) for kind, header in HEADERS.items() if kind >= 0x80}
_NUMBERED = Decoder(_Numbered)
_NUMBER: Decoder[int] = Decoder(Annotated[int, Meta(ge=0, le=(1 << 62))])
_NUMBER_BYTES = 9  # the longest integer
_NUMBER_KEY = msgspec.msgpack.encode("number")
_ENCODER = Encoder()
# msgspec lets the errors of text and of nesting through as they are
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class WireError(Exception):
    """A message that is not of this format.

    field    the path of what is wrong, where there is one: "$.sampling.top_p", "$.body"
    number   of the SUBMIT that is wrong, where it can still be read
    """

    def __init__(self, message: str, field: str | None = None, number: int | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.number = number


def encode(header: Struct) -> bytes:
    """The first frame of a message. Raises TypeError, OverflowError, RecursionError for values without an encoding."""
    return _PREFIXES[type(header)] + _ENCODER.encode(header)


def decode_client(frames: Sequence[bytes]) -> tuple[Struct, bytes]:
    """A client's message, checked, and its body (b"" without one): the server's side.

    The decoder keeps the GIL, for 2 ms at most: a frame that would take longer is refused before. Raises WireError, and
    nothing else, for any bytes.
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
    """A server's message, for clients; None for a kind that this version does not know. Raises WireError."""
    if not frame:
        raise WireError("the frame is empty")
    decoder = _FROM_SERVER.get(frame[0])
    return None if decoder is None else _decode(decoder, frame[1:])


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32. Raises TypeError for what is no integer, OverflowError for one out of range."""
    if len(token_ids) == 1 and type(token_ids[0]) is int:  # most messages: an array takes longer than its content
        return token_ids[0].to_bytes(4, "little", signed=True)
    packed = array("i", token_ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Token ids of little-endian int32. Raises WireError for a length that is no multiple of 4."""
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
    """The decoder's own words, bounded, and the path in them: it can hold names that the peer chose."""
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
    """Of a SUBMIT whose size was checked."""
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
    """Refuse what the types cannot say: one prompt, whole tokens, plain values where any may stand. Raises WireError.

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
    """The path of one of a SUBMIT's template_options; where its name is not plain, of all of them."""
    return f"template_options.{name}" if _PLAIN_NAME.fullmatch(name) else "template_options"


def _check_options(options: dict[str, Any]) -> None:
    """Refuse as `_check_plain` does."""
    if not all(isinstance(name, str) for name in options):
        raise WireError("keys must be strings", "$.template_options")
    num_values = 1
    for name, value in options.items():
        num_values = _check_plain(value, f"$.{option_path(name)}", num_values, depth=1)


def _check_plain(value: object, field: str, num_values: int = 0, depth: int = 0) -> int:
    """Refuse what JSON cannot say (bytes, times, keys that are no strings), what is too much or too deep, and integers
    that msgpack has not.

    num_values, depth  of what the value stands in. Returns the values with those inside it.
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
