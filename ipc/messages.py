"""Each message of wire format 1 is a struct of this module; wire.py says how they are sent.

Structs of a client's messages carry their bounds, so that decoding is checking.
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
    "unexpected",  # a right message at a wrong time: before HELLO, a number used before
    "invalid",  # the request asks for what cannot be served
    "busy",  # the queue is full, or this client's share of it; see retry_after_ms
    "draining",  # the server takes no new requests
    "forbidden",  # this peer may not ask for that
    "not_finite",  # the model's logits had NaN or infinity for this request
    "grammar",  # the request's grammar came to a limit, or to a place where nothing may follow
    "check",  # a check of a step, made on the device, failed for this request
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
    """The first message of a client: versions it speaks, and a name for logs and statistics."""

    min_version: Number = VERSION
    max_version: Number = VERSION
    name: Annotated[str, Meta(max_length=64)] = ""


class ServerLimits(Struct):
    """The server's limits that a client must know; the rest stays the server's own business.

    append_credit has the bytes of an open prompt's pieces that may be under way; it is absent where the server takes
    no open prompts. max_messages_per_s is absent where the server does not say.
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

    tokenizer is the SHA-256 of tokenizer.json, hexadecimal, or "" for a model that has none: then only token ids are
    taken and no text is given. numerics is a digest of all that decides results' bits: servers of one model and equal
    digests give equal tokens for equal seeds; it is absent where the engine tells none. sampling_defaults has the
    fields of a request's sampling that hold where it leaves them out, as the model's authors advise; it is absent where
    lowlat's own defaults hold.
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

    UNSET fields are those that the client left to the server: its defaults may be the model's own. At most one of
    json_schema and tool_calls (JSON as text), json_object, regex, grammar and choice. tools is JSON as text, too; where
    it is absent it is `template_options["tools"]`, if calls are parsed.
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
        """max_tokens; lowlat's own default where the client left it out."""
        return DEFAULT_TOKENS if self.max_tokens is UNSET else self.max_tokens

    @property
    def has_grammar(self) -> bool:
        """Whether the answer is bound to a grammar, which takes a while to compile."""
        given = (self.json_schema, self.regex, self.grammar, self.tool_calls)
        return self.json_object or bool(self.choice) or any(text is not None for text in given)


class Message(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a chat; which fields beyond role and content matter is the template's business."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None


class Submit(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A request. Exactly one of text, messages and the body is there; template_options go with messages alone.

    Of one that is open the prompt is still being written: text or body are its beginning, of messages the last one's
    content is, none need be there, and APPEND brings more, to max_prompt_tokens at most (None: all that the context has
    room for next to max_tokens).

    fit_context lowers max_tokens to what the context has room for next to the prompt; without max_tokens it is as much,
    and the server's default_max_tokens at most, for which KV is reserved. allow_special takes special tokens
    that text or messages spell as these tokens; otherwise they stay text. A cached prefix is shared only among requests
    of the same user and the same cache_salt. A session, by a name within these two, keeps the prefix of its last
    request while others can go. add_special_tokens puts around a text what its tokenizer does.

    A result other than a completion is a conversion, of the prompt as it is: text or messages to token_ids; or token
    ids to their text, special tokens included, or to token_texts, whose text is a JSON list of each token's own.
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
    """Add a piece to an open prompt: text, or token ids as the body. Pieces of text have the tokens of their whole."""

    number: Number
    text: str | None = None


class Finish(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """End an open prompt: the answer begins.

    speculative  it may go on: TOKENS are kept back until FINISH comes without it, and APPEND withdraws the answer
    """

    number: Number
    speculative: bool = False


class Cancel(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """End a request of this connection."""

    number: Number


class Pause(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Let a request of this connection give its slot to others, as soon as that can be."""

    number: Number


class Resume(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Let a paused request go on."""

    number: Number


class Credit(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Grant a request so many more tokens."""

    number: Number
    tokens: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class Stats(Struct, forbid_unknown_fields=True):
    """Ask for figures."""


class Health(Struct, forbid_unknown_fields=True):
    """Ask for a PONG."""

    nonce: Number = 0


class Drain(Struct, forbid_unknown_fields=True):
    """Ask the server to take no more requests, to finish for at most so long, and to end."""

    deadline_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 10.0


class Residence(Struct, forbid_unknown_fields=True):
    """Ask the server to give its model's memory back when what runs is over, or to take it again; see RESIDENT."""

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
    """A tool call's beginning, with id and name, or more of its arguments; calls of an answer count from 0.

    arguments  JSON text; joined over all parts of a call it is what the model wrote
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class PromptPart(Struct, array_like=True, gc=False):
    """The logarithmic probabilities of a prompt's tokens at the positions from `start` on, of `total`.

    Packed little-endian int32 and float32: a token, its logprob and its rank at each position (rank 0: nothing is known
    of it, as of the first), and its num_top likeliest tokens with theirs (-1: there are no more). texts are the bytes
    of tokens that no part before had, end to end, of the ids and lengths next to them; None without a tokenizer.
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
    """The output of a step, or several, for a request: token ids as packed int32, and the text that is certain now.

    text is None without a tokenizer; a chunk may have text and no token (what was held back), or tokens and no text.
    simulated marks imposed acceptance: the text means nothing. Of an answer that is parsed (`Sampling.parse`), text is
    the content alone, next to reasoning and tool_calls. accepted has a byte for each token, 1 for an accepted draft and
    0 for the target's own choice; None where none of them was drafted. prompt_logprobs is a part of what
    `Sampling.prompt_logprobs` asks for: all come before the first token, in messages without any.
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
    """The end of a request. metrics holds its timings and, where speculation ran, `eagle_speculation`."""

    number: int
    sequence: int
    num_tokens: int
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    code: str | None = None
    message: str | None = None
    metrics: dict[str, Any] = {}


class Error(Struct, omit_defaults=True):
    """An error of a request that it ends, or of the connection."""

    code: str
    message: str
    number: int | None = None
    field: str | None = None
    retry_after_ms: int | None = None


class StatsReply(Struct):
    """A snapshot of figures; `stats` is a map whose keys the server's version defines."""

    stats: dict[str, Any]


class Resident(Struct, omit_defaults=True):
    """The answer to RESIDENCE, when it is done or refused; problem says why it was refused, and state is as in PONG."""

    nonce: int
    state: str
    problem: str | None = None


class Taken(Struct, array_like=True, gc=False):
    """So many bytes of an open prompt's pieces are tokens now, and as many more may be sent."""

    number: int
    num_bytes: int


class Paused(Struct, array_like=True, gc=False):
    """The answer to PAUSE or RESUME, when it is done or refused: whether the request waits now.

    One that is not paused has ended first, or code and problem say why it runs on.
    """

    number: int
    paused: bool
    code: str | None = None
    problem: str | None = None


class Pong(Struct):
    """state is "serving" or "draining", or of a model that sleeps "falling asleep", "asleep" or "waking".

    A model that sleeps takes requests, and is woken by one. last_step_age_s is 0.0 while nothing runs.
    """

    nonce: int
    state: str
    last_step_age_s: float
    num_running: int
    num_waiting: int


class Bye(Struct):
    """The server ends, or drops this peer: the reason is one of the codes, or "dropped"."""

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
