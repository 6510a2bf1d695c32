"""This module has the sampling parameters of a request and the outputs of a step. It knows no model.

Limits that depend on the model (vocabulary, context) are checked by `Runtime.submit`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Unpack

from lowlat.errors import RequestError, meant
from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.options.declaration import (
    check_integer,
    check_number,
    check_options,
    declare,
    documented,
    given_options,
    plain,
    shown,
)

if TYPE_CHECKING:
    from lowlat.ipc.options import SamplingOptions

__all__ = [
    "ADVISED_OPTIONS",
    "GRAMMAR_OPTIONS",
    "MAX_CHOICES",
    "MAX_DRAFT_TEXTS",
    "MAX_DRAFT_TEXT_CHARACTERS",
    "MAX_GRAMMAR_BYTES",
    "MAX_LOGIT_BIASES",
    "MAX_LOGPROBS",
    "MAX_STOP_STRINGS",
    "MAX_STOP_TOKEN_IDS",
    "ErrorCode",
    "FinishReason",
    "Parse",
    "SamplingParams",
    "StepOutput",
    "TokenLogprobs",
    "ToolCallDelta",
]

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 16
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIASES = 300
MAX_GRAMMAR_BYTES = 256 << 10
MAX_CHOICES = 1024
MAX_DRAFT_TEXTS = 16
MAX_DRAFT_TEXT_CHARACTERS = 1 << 20  # characters of a text, or token ids
GRAMMAR_OPTIONS = ("json_schema", "json_object", "regex", "grammar", "choice", "tool_calls")
ADVISED_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # a model's authors may advise these
MAX_INT32 = (1 << 31) - 1  # the range of the device's counters
FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_PRIORITY = 1000
ErrorCode = Literal["not_finite", "grammar", "text", "check", "deadline"]
Parse = Literal["none", "reasoning", "tools"]


@documented
@dataclass(frozen=True, repr=False)
class SamplingParams:
    """SamplingParams says how one request's tokens are chosen and when it ends."""

    temperature: float = declare(0.0, "0 is greedy; otherwise logits are divided by it, at most 100.", 0.0, 100.0)
    top_k: int = declare(0, "Keep the N likeliest tokens; 0 keeps all.", 0, MAX_INT32)
    top_p: float = declare(1.0, "Keep the smallest set of this probability.", 0.0, 1.0, above=True)
    min_p: float = declare(0.0, "Keep tokens at least so likely, relative to the likeliest.", 0.0, 1.0)
    repetition_penalty: float = declare(
        1.0,
        "Divides positive and multiplies negative logits of tokens seen, those of the prompt too.",
        0.0,
        10.0,
        above=True,
    )
    presence_penalty: float = declare(0.0, "Subtracted once from tokens generated.", -2.0, 2.0)
    frequency_penalty: float = declare(0.0, "Subtracted for every time a token was generated.", -2.0, 2.0)
    logit_bias: Mapping[int, float] | None = declare(
        None, f"Add -100 to 100 to a token's logit; at most {MAX_LOGIT_BIASES} tokens.", metavar="ID=BIAS"
    )
    seed: int | None = declare(
        None, "Keys the random numbers, with the absolute position.", 0, (1 << 63) - 1, otherwise="a fresh one"
    )
    stop_token_ids: tuple[int, ...] = declare(
        (),
        f"End with this token, which belongs to the output; at most {MAX_STOP_TOKEN_IDS} of them.",
        aliases=("stop_token_id",),
        metavar="ID",
    )
    stop: tuple[str, ...] = declare((), f"End before this text; at most {MAX_STOP_STRINGS} of them.", metavar="TEXT")
    max_tokens: int = declare(256, "Tokens to generate at most.", 1, MAX_INT32)
    min_tokens: int = declare(
        0, "Before so many tokens no stop token can be chosen and no stop string matches.", 0, MAX_INT32
    )
    ignore_eos: bool = declare(False, "The model's own end tokens do not end it.")
    logprobs: int | None = declare(
        None, f"With every token its N likeliest alternatives, 0 to {MAX_LOGPROBS}.", 0, MAX_LOGPROBS
    )
    max_draft_tokens: int | None = declare(
        None, "Draft tokens verified in one step, at most; 0: no speculation.", 0, 63
    )
    json_schema: str | Mapping[str, Any] | None = declare(
        None, "Answer in JSON that this schema describes.", from_file=True, metavar="FILE"
    )
    json_object: bool = declare(False, "Answer in one JSON object.")
    regex: str | None = declare(None, "Answer in a text that this expression matches as a whole.")
    grammar: str | None = declare(None, "Answer in a text of this EBNF (GBNF, Lark).", from_file=True, metavar="FILE")
    choice: tuple[str, ...] = declare(
        (), f"Answer in this text, or in another choice; at most {MAX_CHOICES}.", metavar="TEXT"
    )
    tool_calls: str | Mapping[str, Any] | None = declare(
        None,
        "Calls that the answer may have: {functions: [{name, parameters, strict}], required, parallel}.",
        python_only=True,
    )
    parse: Parse = declare(
        "none",
        "Take from the text what the model's format marks: its reasoning, or tool calls as well.",
        python_only=True,
    )
    tools: str | Sequence[Mapping[str, Any]] | None = declare(
        None,
        "Functions that may be called, as the chat template gets them: they type arguments that are written as text.",
        python_only=True,
    )
    prompt_logprobs: int | None = declare(
        None,
        f"Of every token of the prompt its logprob and rank, and the N likeliest there, 0 to {MAX_LOGPROBS}; no prefix "
        "is reused for it.",
        0,
        MAX_LOGPROBS,
        python_only=True,
    )
    priority: int = declare(
        0,
        "A request of higher priority goes first, and takes the slot of one of lower priority, which goes on later.",
        -MAX_PRIORITY,
        MAX_PRIORITY,
        python_only=True,
    )

    draft_texts: tuple[str | tuple[int, ...], ...] = declare(
        (),
        "Texts, or token ids, that the answer may copy from, such as a file that is edited: drafts are looked for "
        f"there, too, and no token changes; at most {MAX_DRAFT_TEXTS} of them.",
        python_only=True,
    )

    if TYPE_CHECKING:  # callers may pass more types than a field has

        def __init__(self, **options: Unpack[SamplingOptions]) -> None: ...

    def __post_init__(self) -> None:
        check_options(self, RequestError)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens {self.max_tokens}, got {self.min_tokens}")
        self._check_stops()
        self._check_biases()
        self._check_grammar()
        self._check_tools()
        self._check_draft_texts()

    def __repr__(self) -> str:
        return given_options(self)

    def _check_draft_texts(self) -> None:
        given = (self.draft_texts,) if isinstance(self.draft_texts, str) else self.draft_texts
        texts = _as_tuple("draft_texts", given)
        if len(texts) > MAX_DRAFT_TEXTS:
            raise RequestError(f"draft_texts holds {len(texts)} texts; at most {MAX_DRAFT_TEXTS}")
        checked: list[str | tuple[int, ...]] = []
        for text in texts:
            ids = text if isinstance(text, str) else _as_tuple("draft_texts", text)
            if not 1 <= len(ids) <= MAX_DRAFT_TEXT_CHARACTERS:
                most = MAX_DRAFT_TEXT_CHARACTERS
                raise RequestError(f"draft_texts: a text must have 1 to {most} characters or tokens, got {len(ids)}")
            # all at once first: others wait for their tokens meanwhile
            if not isinstance(ids, str) and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > MAX_INT32):
                for token in ids:
                    check_integer("draft_texts", token, 0, MAX_INT32, RequestError)
            checked.append(ids)
        object.__setattr__(self, "draft_texts", tuple(checked))

    def _check_tools(self) -> None:
        if self.tools is None:
            return
        text = _as_json("tools", self.tools)
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_GRAMMAR_BYTES:
            raise RequestError(f"tools must be a list, of at most {MAX_GRAMMAR_BYTES} characters as JSON")
        object.__setattr__(self, "tools", text)

    def _check_stops(self) -> None:
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _as_tuple("stop", stop))
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"stop_token_ids holds {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}")
        for token in self.stop_token_ids:
            check_integer("stop_token_ids", token, 0, MAX_INT32, RequestError)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= 1024:
                raise RequestError(f"stop strings must have 1 to 1024 characters, got {shown(text)}")

    def _check_biases(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {type(self.logit_bias).__name__}")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise RequestError(f"logit_bias holds {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIASES}")
        biases = {plain(token): plain(bias) for token, bias in self.logit_bias.items()}
        for token, bias in biases.items():
            check_integer("logit_bias token", token, 0, MAX_INT32, RequestError)
            check_number(f"logit_bias[{token}]", bias, -100.0, 100.0, RequestError)
        object.__setattr__(self, "logit_bias", biases)  # a copy, as the caller's may change after the check

    @property
    def grammar_option(self) -> str | None:
        """The option that constrains the answer; None for a free answer."""
        given = (name for name in GRAMMAR_OPTIONS if getattr(self, name) not in (None, False, ()))
        return next(given, None)

    def _check_grammar(self) -> None:
        choice = (self.choice,) if isinstance(self.choice, str) else self.choice
        object.__setattr__(self, "choice", _as_tuple("choice", choice))
        given = [name for name in GRAMMAR_OPTIONS if getattr(self, name) not in (None, False, ())]
        if not given:
            return
        if len(given) > 1:
            raise RequestError(f"{' and '.join(given)} are given; a request has one of {', '.join(GRAMMAR_OPTIONS)}")
        (name,) = given
        for option in ("json_schema", "tool_calls"):
            object.__setattr__(self, option, _as_json(option, getattr(self, option)))
        if len(self.choice) > MAX_CHOICES:
            raise RequestError(f"choice holds {len(self.choice)} texts; at most {MAX_CHOICES}")
        value = getattr(self, name)
        texts = value if isinstance(value, tuple) else ("{}",) if name == "json_object" else (value,)
        for text in texts:
            if not isinstance(text, str) or not text:
                kind = "a dict or JSON text" if name in ("json_schema", "tool_calls") else "text"
                raise RequestError(f"{name} must be {kind}, and not empty, got {shown(text)}{_schema_of(text)}")
        try:
            num_bytes = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            raise RequestError(f"{name} must be Unicode text: {error.reason} at {error.start}") from None
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise RequestError(f"{name} has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES}")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "SamplingParams":
        """Build from keyword options. Raises RequestError that names an unknown option."""
        if not isinstance(options, Mapping):
            raise RequestError(f"sampling parameters must map names to values, got {type(options).__name__}")
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                raise RequestError(
                    f"unknown sampling parameter {name!r:.80}{meant(name, known)}; known: {', '.join(sorted(known))}"
                )
        return cls(**options)


def _schema_of(value: object) -> str:
    """The advice for a class of pydantic's, or a model of one."""
    return "; give its model_json_schema()" if hasattr(value, "model_json_schema") else ""


@dataclass(frozen=True)
class TokenLogprobs:
    """A committed token's logarithmic probability from the raw logits, and its likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first
    texts: tuple[bytes, ...] | None = None  # bytes of the token, then of each alternative; None without a tokenizer


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """ToolCallDelta brings a tool call's beginning, with id and name, or more of its arguments, JSON text.

    Calls count from 0.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class StepOutput:
    """StepOutput holds what one step (or a cancellation) brings one request.

    `token_ids` are new and final. `text` is what they make certain of the text (None without a tokenizer):
    incomplete UTF-8 and what could begin a stop string are held back. `stop_reason` is the stop string or
    token id that ended the request; where it failed `error` says why, and `error_code` whether it was the logits, the
    grammar, the tokenizer, a check of its step or a deadline; both are None otherwise. `simulated` marks imposed
    acceptance. The first `num_accepted` of token_ids were accepted drafts. With `SamplingParams.parse`, `text` is the
    content alone, next to `reasoning` and `tool_calls`. `prompt_logprobs` stands in the first output of a request that
    asked for them.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    text: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    error_code: ErrorCode | None = None
    simulated: bool = False
    num_accepted: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


def _as_json(name: str, value: object) -> object:
    """Return a mapping or a list as JSON text, and other values unchanged."""
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} must be of JSON values: {error!s:.200}") from error


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    value = plain(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(map(plain, value))
    raise RequestError(f"{name} must be a sequence, got {type(value).__name__}")
