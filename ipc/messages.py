"""This module defines each message of wire format 1 as a struct; wire.py explains how they are sent.

Structs of a client's messages have the limits of their fields, so that decoding checks them.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

__all__ = [
    "HEADERS",
    "MAX_MESSAGES",
    "MAX_SALT",
    "MAX_SESSION",
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
    "Parse",
    "Pause",
    "Paused",
    "Pong",
    "PromptPart",
    "Residence",
    "Resident",
    "Result",
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
]

VERSION = 1
MAX_MESSAGES = 4096  # of a chat
MAX_SALT = 256
MAX_SESSION = 128
MAX_GRAMMAR = 256 << 10
MAX_DRAFT_TEXT = 1 << 20
DEFAULT_TOKENS = 256  # lowlat.SamplingParams.max_tokens

Int32 = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Number = Annotated[int, Meta(ge=0, le=(1 << 62))]
TokenId = Int32
FinishReason = Literal["stop", "length", "cancelled", "error"]
Parse = Literal["none", "reasoning", "tools"]
Result = Literal["completion", "token_ids", "text", "token_texts"]
Code = Literal[
    "malformed",  # not a message of this format: kind, header or body
    "version",  # no version in common
    "unexpected",  # a correct message at a wrong time: before HELLO, or with a number used before
    "invalid",  # the request cannot be served
    "busy",  # the queue is full, or this client's share of it; see retry_after_ms
    "draining",  # the server takes no new requests
    "forbidden",  # this peer may not send this message
    "not_finite",  # the model's logits had NaN or infinity for this request
    "grammar",  # the request's grammar reached a limit, or a state that allows no token
    "check",  # a check on the device failed for this request
    "text",  # the model's tokenizer failed to decode the answer
    "deadline",  # deadline_ms passed
    "slow_consumer",  # no credit for too long
    "shutdown",  # the server ends
    "device",  # the device failed; the server ends
    "stalled",  # a step hangs; the server ends
    "internal",  # the server's fault; its log says more
]


class Kind:
    """The first byte of a message."""

    HELLO = 0x01
    SUBMIT = 0x02
    CANCEL = 0x03
    CREDIT = 0x04
    STATS = 0x05
    HEALTH = 0x06
    DRAIN = 0x07
    PAUSE = 0x08
    RESUME = 0x09
    APPEND = 0x0A
    FINISH = 0x0B
    RESIDENCE = 0x10
    WELCOME = 0x81
    TOKENS = 0x82
    END = 0x83
    ERROR = 0x84
    STATS_REPLY = 0x85
    PONG = 0x86
    BYE = 0x87
    TAKEN = 0x88
    PAUSED = 0x89
    RESIDENT = 0x90


class Hello(Struct, forbid_unknown_fields=True):
    """The first message of a client: the versions that it speaks, and a name for logs and statistics."""

    min_version: Number = VERSION
    max_version: Number = VERSION
    name: Annotated[str, Meta(max_length=64)] = ""


class ServerLimits(Struct):
    """The limits of the server that a client must know.

    append_credit is the number of bytes of an open prompt's pieces that may be in flight; it is absent if the server
    takes no open prompts. max_messages_per_s may be absent.
    """

    max_message_bytes: int
    max_prompt_tokens: int
    max_context: int
    max_requests_per_client: int
    max_credit: int
    slow_consumer_s: float
    heartbeat_interval_s: float
    append_credit: int | UnsetType = UNSET
    max_messages_per_s: int | UnsetType = UNSET


class Welcome(Struct):
    """The server's answer to HELLO.

    tokenizer is the SHA-256 of tokenizer.json, hexadecimal, or "" for a model without one: such a server takes only
    token ids and gives no text. numerics is a digest of all that decides the bits of results: servers with one model
    and equal digests give equal tokens for equal seeds; it is absent if the engine has none. sampling_defaults has
    values of sampling fields, as the model's authors advise, for requests that leave them out; it is absent if lowlat's
    own defaults apply.
    """

    version: int
    epoch: str
    server: str
    model: str
    tokenizer: str
    vocab_size: int
    has_chat_template: bool
    num_speculative_tokens: int
    limits: ServerLimits
    numerics: str | UnsetType = UNSET
    sampling_defaults: dict[str, int | float] | UnsetType = UNSET

    @property
    def advice(self) -> dict[str, int | float]:
        """The sampling defaults that are not lowlat's own; empty without any."""
        return {} if self.sampling_defaults is UNSET else self.sampling_defaults


GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR)]
DraftText = (
    Annotated[str, Meta(min_length=1, max_length=MAX_DRAFT_TEXT)]
    | Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_DRAFT_TEXT)]
)


class Sampling(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are chosen and when the request ends; meanings and ranges are those of lowlat.SamplingParams.

    UNSET fields are left to the server, whose defaults may be those that the model's authors advise. At most one of
    json_schema, tool_calls, json_object, regex, grammar and choice may be given. json_schema, tool_calls and tools are
    JSON as text. Without tools, parsed calls use `template_options["tools"]`.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | UnsetType = UNSET
    top_k: Int32 | UnsetType = UNSET
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | UnsetType = UNSET
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | UnsetType = UNSET
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=300)] | None = (
        None
    )
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=16)] = ()
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=1024)], ...], Meta(max_length=16)] = ()
    max_tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | UnsetType = UNSET
    min_tokens: Int32 = 0
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_draft_tokens: Annotated[int, Meta(ge=0, le=63)] | None = None
    json_schema: GrammarText | None = None
    json_object: bool = False
    regex: GrammarText | None = None
    grammar: GrammarText | None = None
    choice: Annotated[tuple[GrammarText, ...], Meta(max_length=1024)] = ()
    tool_calls: GrammarText | None = None
    parse: Parse = "none"
    tools: GrammarText | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    draft_texts: Annotated[tuple[DraftText, ...], Meta(max_length=16)] = ()

    @property
    def token_limit(self) -> int:
        """max_tokens, or lowlat's own default if the client left it out."""
        return DEFAULT_TOKENS if self.max_tokens is UNSET else self.max_tokens

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar constrains the answer; it takes a while to compile."""
        given = (self.json_schema, self.regex, self.grammar, self.tool_calls)
        return self.json_object or bool(self.choice) or any(text is not None for text in given)


class Message(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a chat; the template decides which fields besides role and content it uses."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None


class Submit(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A request. It has exactly one of text, messages and the body; template_options may stand only with messages.

    If `open` is true, the prompt is still being written. Text or body may then be its beginning, or the content of the
    last message; APPEND adds more, up to max_prompt_tokens (None: all that the context can hold next to max_tokens).

    fit_context lowers max_tokens to the space that the prompt leaves in the context; without max_tokens the answer may
    fill that space, up to the server's default_max_tokens, for which KV is reserved. With allow_special, special tokens
    that text or messages spell become these tokens; otherwise they stay text. Requests share a cached prefix only if
    user and cache_salt are the same. A session has a name within these two, and keeps the prefix of its last request
    while others are evicted. With add_special_tokens a text gets the tokens that its tokenizer puts around texts.

    A result other than "completion" is a conversion of the prompt: text or messages to token_ids; token ids to their
    text, special tokens included; or token ids to token_texts, a JSON list with the text of each token.
    """

    number: Number
    credit: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
    sampling: Sampling = Sampling()
    text: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    template_options: dict[str, Any] | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=(1 << 40))] | None = None
    fit_context: bool = False
    allow_special: bool = False
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] = ""
    result: Result = "completion"
    add_special_tokens: bool = True
    session: Annotated[str, Meta(max_length=MAX_SESSION)] = ""
    open: bool = False
    max_prompt_tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None = None


class Append(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Add a piece to an open prompt: text, or token ids as the body. Pieces of text are tokenized as one text."""

    number: Number
    text: str | None = None


class Finish(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """End an open prompt: the answer begins.

    speculative  the prompt may continue: TOKENS are kept back until a FINISH without it; APPEND withdraws the answer
    """

    number: Number
    speculative: bool = False


class Cancel(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """End a request of this connection."""

    number: Number


class Pause(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Take a request of this connection off its slot, for others, as soon as possible."""

    number: Number


class Resume(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Let a paused request continue."""

    number: Number


class Credit(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Allow the server to send `tokens` more tokens of a request."""

    number: Number
    tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class Stats(Struct, forbid_unknown_fields=True):
    """Ask for figures."""


class Health(Struct, forbid_unknown_fields=True):
    """Ask for a PONG."""

    nonce: Number = 0


class Drain(Struct, forbid_unknown_fields=True):
    """Ask the server to take no more requests, to finish running ones within deadline_s, and to end."""

    deadline_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 10.0


class Residence(Struct, forbid_unknown_fields=True):
    """Ask the server to give its model's memory back after its running requests, or to take it again; see RESIDENT."""

    nonce: Number
    asleep: bool


class TokenLogprob(Struct, array_like=True, gc=False):
    """A token's logarithmic probability and its likeliest alternatives, likeliest first.

    texts  bytes of the token, then of each alternative; None without a tokenizer
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    texts: list[bytes] | None = None


class ToolCallDelta(Struct, array_like=True, gc=False):
    """The beginning of a tool call, with id and name, or more of its arguments.

    index      number of the call in its answer, from 0
    arguments  JSON text; all parts of a call joined are the text that the model wrote
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class PromptPart(Struct, array_like=True, gc=False):
    """The logarithmic probabilities of a prompt's tokens at the positions from `start` on, of `total`.

    Numbers are packed little-endian int32 and float32. Each position has a token, its logprob and its rank (0: unknown,
    as for the first token), and the num_top likeliest tokens with their logprobs (-1: there are no more). texts has the
    bytes of tokens that no earlier part had, joined, with their ids and lengths in text_ids and text_lengths; None
    without a tokenizer.
    """

    start: int
    total: int
    num_top: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    text_ids: bytes = b""
    text_lengths: bytes = b""
    texts: bytes | None = None


class Tokens(Struct, array_like=True, gc=False):
    """The output of one step or more for a request: token ids as packed int32, and the text that is final now.

    text is None without a tokenizer. A message may have text without tokens (text that was held back), or tokens
    without text. simulated marks imposed acceptance: the text means nothing. If the answer is parsed
    (`Sampling.parse`), text is only the content, next to reasoning and tool_calls. accepted has a byte for each token:
    1 for an accepted draft, 0 for the target's own choice; None if no token was an accepted draft. prompt_logprobs is a
    part of the prompt's logprobs (`Sampling.prompt_logprobs`); all parts come before the first token, in messages
    without tokens.
    """

    number: int
    sequence: int
    token_ids: bytes
    text: str | None = None
    logprobs: list[TokenLogprob] | None = None
    simulated: bool = False
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    accepted: bytes | None = None
    prompt_logprobs: PromptPart | None = None


class End(Struct, array_like=True):
    """The end of a request. metrics has its timings and, if speculation ran, `eagle_speculation`."""

    number: int
    sequence: int
    num_tokens: int
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    code: str | None = None
    message: str | None = None
    metrics: dict[str, Any] = {}


class Error(Struct, omit_defaults=True):
    """An error: it ends the request that it names, or is about the connection."""

    code: str
    message: str
    number: int | None = None
    field: str | None = None
    retry_after_ms: int | None = None


class StatsReply(Struct):
    """A snapshot of figures; the server's version defines the keys of `stats`."""

    stats: dict[str, Any]


class Resident(Struct, omit_defaults=True):
    """The answer to RESIDENCE, sent when it is done or refused; problem says why it was refused. state is PONG's."""

    nonce: int
    state: str
    problem: str | None = None


class Taken(Struct, array_like=True, gc=False):
    """num_bytes of an open prompt's pieces have been tokenized, and the client may send as many more."""

    number: int
    num_bytes: int


class Paused(Struct, array_like=True, gc=False):
    """The answer to PAUSE or RESUME, sent when it is done or refused: whether the request is paused now.

    A request that is not paused ended first, was resumed, or was refused: then code and problem say why.
    """

    number: int
    paused: bool
    code: str | None = None
    problem: str | None = None


class Pong(Struct):
    """The answer to HEALTH.

    state is "serving" or "draining"; for a model that sleeps "falling asleep", "asleep" or "waking". Such a model takes
    requests, and a request wakes it. last_step_age_s is 0.0 while nothing runs.
    """

    nonce: int
    state: str
    last_step_age_s: float
    num_running: int
    num_waiting: int


class Bye(Struct):
    """The server ends, or drops this peer; reason is one of the codes, or "dropped"."""

    reason: str
    message: str = ""


HEADERS: dict[int, type[Struct]] = {
    Kind.HELLO: Hello,
    Kind.SUBMIT: Submit,
    Kind.CANCEL: Cancel,
    Kind.CREDIT: Credit,
    Kind.STATS: Stats,
    Kind.HEALTH: Health,
    Kind.DRAIN: Drain,
    Kind.PAUSE: Pause,
    Kind.RESUME: Resume,
    Kind.APPEND: Append,
    Kind.FINISH: Finish,
    Kind.RESIDENCE: Residence,
    Kind.WELCOME: Welcome,
    Kind.TOKENS: Tokens,
    Kind.END: End,
    Kind.ERROR: Error,
    Kind.STATS_REPLY: StatsReply,
    Kind.PONG: Pong,
    Kind.BYE: Bye,
    Kind.TAKEN: Taken,
    Kind.PAUSED: Paused,
    Kind.RESIDENT: Resident,
}
