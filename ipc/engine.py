"""A server uses these protocols: an engine that decodes, and a codec from text to token ids.

An engine is driven by the decode thread alone, but for `validate` and `compile`, which any thread may call. A codec is
called from the text threads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.ipc.wire import Message, Sampling

__all__ = ["Codec", "Engine", "EngineInfo", "EngineOutput", "Growing"]


@dataclass(frozen=True)
class EngineInfo:
    """The model's description for clients and for the server's planning.

    max_running   requests that decode together: the server hands over no more at once
    max_context   tokens of prompt and completion, at most
    tokenizer     SHA-256 of tokenizer.json, hexadecimal; "" without one
    on_device     steps run on a device and leave the host's cores free, for a thread that polls for a moment
    numerics      digest of all that decides results' bits: servers of one model and equal digests give equal tokens; ""
                  where an engine tells none
    sampling_defaults  fields of a request's sampling, where it leaves them out
    can_sleep     the engine can give its device's memory back, and take it again
    """

    model: str
    vocab_size: int
    max_running: int
    max_context: int
    tokenizer: str = ""
    has_chat_template: bool = False
    num_speculative_tokens: int = 0
    on_device: bool = False
    numerics: str = ""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    can_sleep: bool = False


class TokenLogprobs(Protocol):
    """One token's logarithmic probability; the fields are those of `wire.TokenLogprob`."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]: ...
    @property
    def texts(self) -> Sequence[bytes] | None: ...


class ToolCallPart(Protocol):
    """A part of a tool call; the fields are those of `wire.ToolCallDelta`."""

    @property
    def index(self) -> int: ...
    @property
    def arguments(self) -> str: ...
    @property
    def id(self) -> str | None: ...
    @property
    def name(self) -> str | None: ...


class EngineOutput(Protocol):
    """The output of a step for one request; a request may be in a step's outputs several times, in order.

    num_accepted           of token_ids, how many at the front were accepted drafts
    reasoning, tool_calls  of an answer that is parsed, the parts that are not in text
    prompt_logprobs        in the first output of a request that asked for them
    """

    @property
    def request_id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def text(self) -> str | None: ...
    @property
    def stop_reason(self) -> str | int | None: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprobs] | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def error_code(self) -> Literal["not_finite", "grammar", "text", "check", "deadline"] | None: ...
    @property
    def simulated(self) -> bool: ...
    @property
    def num_accepted(self) -> int: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def tool_calls(self) -> Sequence[ToolCallPart]: ...
    @property
    def prompt_logprobs(self) -> PromptLogprobs | None: ...


class Engine(Protocol):
    """Decodes requests, one step at a time."""

    @property
    def info(self) -> EngineInfo:
        """Constant while the engine lives."""

    def validate(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse what can never be served. Any thread. Raises RequestError naming value, limit and knob."""

    def compile(self, sampling: Sampling, patience_s: float | None) -> object:
        """Compile the grammar of a request; `submit` finds it while the caller holds what this returns.

        patience_s  return None or False where it takes longer; None: as long as the engine allows, which is 2 s
        Any thread. Raises RequestError for one that cannot be served.
        """

    def submit(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, cache_salt: str = "", session: str = ""
    ) -> None:
        """Take a request, which shares a cached prefix only with those of the same salt.

        session  its session's name, within the salt; "": it has none

        Raises RequestError, CapacityError.
        """

    def open_prompt(
        self,
        request_id: str,
        sampling: Sampling,
        cache_salt: str = "",
        session: str = "",
        max_prompt_tokens: int | None = None,
    ) -> None:
        """Take a request whose prompt is still being written, and gives nothing before `finish_prompt`.

        max_prompt_tokens  for which it is planned; None: all that the context has room for
        Raises RequestError, CapacityError.
        """

    def grow_prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add token ids to an open prompt; an answer that was begun on trial is withdrawn. Raises RequestError."""

    def finish_prompt(self, request_id: str, token_ids: Sequence[int], *, speculative: bool = False) -> None:
        """End an open prompt with these token ids; speculative: on trial, and its outputs are kept back.

        Raises RequestError for one that is not open, is empty, or becomes too long.
        """

    def cancel(self, request_id: str) -> None:
        """End a request; the next step's output of it says "cancelled". Raises RequestError for an unknown one."""

    def pause(self, request_id: str) -> bool:
        """Let a request give its slot to others; False where it has ended first.

        Raises RequestError; CapacityError where host memory has no space for it.
        """

    def resume(self, request_id: str) -> None:
        """Let a paused request go on. Raises RequestError for one that is not paused."""

    @property
    def deadline(self) -> float | None:
        """The time of the monotonic clock at which there is something to step for, whatever is asked; None: never."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything now. It becomes true by what is asked, at `deadline`, or as `watch` says."""

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, in any thread, when `busy` may have become true by itself; it does not block."""

    def step(self) -> Sequence[EngineOutput]:
        """One decode step for every running request. Raises DeviceError when the device has failed."""

    def metrics(self, request_id: str) -> Mapping[str, Any]:
        """Figures of a live request, or of one that ended lately, as JSON values."""

    def stats(self) -> Mapping[str, Any]:
        """Totals, slots and KV use, as JSON values; the decode thread calls it, about once a second."""

    def sleep(self) -> None:
        """Give the device's memory back; no request is there, and none comes before `wake`.

        Raises CapacityError, ConfigError where it stays awake; DeviceError when the device has failed.
        """

    def wake(self) -> None:
        """Take the device's memory again. Raises CapacityError where it stays asleep, DeviceError."""

    def close(self) -> None:
        """Give everything back."""


class Growing(Protocol):
    """The token ids of a prompt that is still being written; one thread uses it. Raises RequestError."""

    def append(self, piece: Sequence[int] | str) -> Sequence[int]:
        """Take text or token ids; returns the token ids that nothing later can change, after those before."""

    def rest(self) -> Sequence[int]:
        """The token ids of what is held back, if the prompt ends here; it may go on all the same."""


class Codec(Protocol):
    """Text to token ids and back; the engine itself gives the text of what it decodes. Raises RequestError for what
    cannot be converted.

    allow_special   special tokens that the caller's text spells become those tokens; otherwise they stay text
    max_context     a prompt that exceeds it with max_tokens for the answer is refused, and before it is tokenized
                    where its length alone says so
    """

    def encode(
        self, text: str, *, allow_special: bool, add_special_tokens: bool, max_context: int, max_tokens: int
    ) -> Sequence[int]:
        """Token ids of a plain prompt, with what the tokenizer puts around a text where add_special_tokens says so."""

    def encode_chat(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        *,
        allow_special: bool,
        max_context: int,
        max_tokens: int,
    ) -> Sequence[int]:
        """Token ids of a chat through the model's template."""

    def grow(self, *, allow_special: bool, add_special_tokens: bool, max_context: int, max_tokens: int) -> Growing:
        """Begin a plain prompt that is still being written; its pieces have the token ids of their whole."""

    def grow_chat(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        *,
        allow_special: bool,
        max_context: int,
        max_tokens: int,
    ) -> Growing:
        """Begin a chat of whose last message the content is still being written, and comes in pieces of text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""

    def token_texts(self, token_ids: Sequence[int]) -> Sequence[str]:
        """The text of each token alone; what is no whole character is replaced."""
