"""What a caller asks for and what a step answers: sampling parameters and outputs, checked, model-free.

Limits that depend on the model (vocabulary, context) are checked by `Runtime.submit`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from lowlat.errors import RequestError

__all__ = [
    "MAX_LOGIT_BIASES",
    "MAX_LOGPROBS",
    "MAX_STOP_STRINGS",
    "MAX_STOP_TOKEN_IDS",
    "FinishReason",
    "SamplingParams",
    "StepOutput",
    "TokenLogprobs",
]

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 16
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIASES = 300
MAX_INT32 = (1 << 31) - 1  # what the device's counters hold
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    temperature         0.0 is greedy; otherwise logits are divided by it, at most 100
    top_k               keep the k likeliest tokens; 0 keeps all
    top_p               keep the smallest set whose probability reaches p, in (0, 1]
    min_p               keep tokens at least min_p times as likely as the likeliest, in [0, 1]
    repetition_penalty  divides positive and multiplies negative logits of tokens seen (prompt too), (0, 10]
    presence_penalty    subtracted once from tokens already generated, [-2, 2]
    frequency_penalty   subtracted for every time a token was generated, [-2, 2]
    logit_bias          token id -> added to its logit, [-100, 100], at most 300 entries
    seed                keys the random numbers with the absolute position; None draws one
    stop_token_ids      end the request and belong to the output; at most 16
    stop                strings that end the request; the text is cut before them; at most 16
    max_tokens          tokens to generate at most
    min_tokens          before so many, no stop token can be chosen and no stop string matches
    ignore_eos          the model's own end tokens do not end the request
    logprobs            alternatives whose logarithmic probability is given with each token, 0 to 20
    max_draft_tokens    draft tokens verified for this request in one step, at most; 0: no speculation
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, MAX_INT32)
        _check_float("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 10.0, above=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, (1 << 63) - 1)
        _check_int("max_tokens", self.max_tokens, 1, MAX_INT32)
        _check_int("min_tokens", self.min_tokens, 0, MAX_INT32)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens {self.max_tokens}, got {self.min_tokens}")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.max_draft_tokens is not None:
            _check_int("max_draft_tokens", self.max_draft_tokens, 0, 63)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {_shown(self.ignore_eos)}")
        self._check_stops()
        self._check_biases()

    def _check_stops(self) -> None:
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _as_tuple("stop", stop))
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"stop_token_ids holds {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, MAX_INT32)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= 1024:
                raise RequestError(f"stop strings must have 1 to 1024 characters, got {_shown(text)}")

    def _check_biases(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {type(self.logit_bias).__name__}")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise RequestError(f"logit_bias holds {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIASES}")
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias token", token, 0, MAX_INT32)
            _check_float(f"logit_bias[{token}]", bias, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller's may change after the check

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "SamplingParams":
        """Build from keyword options; an unknown one raises RequestError by name."""
        known = {field.name for field in fields(cls)}
        for name in options:
            if name not in known:
                raise RequestError(f"unknown sampling parameter {name!r}; known: {', '.join(sorted(known))}")
        return cls(**options)


@dataclass(frozen=True)
class TokenLogprobs:
    """One committed token's logarithmic probability, from the raw logits, and its likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


@dataclass(frozen=True)
class StepOutput:
    """What one step (or a cancellation) brought to one request.

    `token_ids` are new and final. `text` is what they make certain of the text (None without a tokenizer):
    incomplete UTF-8 and what could begin a stop string are held back. `stop_reason` is the stop string or
    token id that ended the request; `error` says what failed. `simulated` marks imposed acceptance.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    text: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    simulated: bool = False


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(value)
    raise RequestError(f"{name} must be a sequence, got {type(value).__name__}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {_shown(value)}")
    if not low <= value <= high:
        raise RequestError(f"{name} must be from {low} to {high}, got {_shown(value)}")


def _check_float(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    # isfinite would turn a huge integer into a float, and overflow
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise RequestError(f"{name} must be a finite number, got {_shown(value)}")
    if not low <= value <= high or (above and value == low):
        interval = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise RequestError(f"{name} must be {interval}, got {_shown(value)}")


def _shown(value: object) -> str:
    """A value for a message: short, and not the digits of a huge integer, which Python refuses to print."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.80}"
