"""This module defines the protocols that a server uses: an engine that decodes, and a codec from text to token ids.

The decode thread alone calls an engine, except `validate` and `compile`, which any thread may call. The text threads
call a codec.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.ipc.wire import Message, Sampling

__all__ = ["Codec", "Engine", "EngineInfo", "EngineOutput", "Growing"]


@dataclass(frozen=True)
class EngineInfo:
    """The model's description, for clients and for the server's planning.

    max_running   the most requests that decode together; the server submits no more at once
    max_context   the most tokens of prompt and completion together
    tokenizer     SHA-256 of tokenizer.json, hexadecimal; "" without one
    on_device     steps run on a device, so the host has a free core for a thread that polls
    numerics      digest of all that decides the bits of results: servers with one model and equal digests give equal
                  tokens; "" if the engine has none
    sampling_defaults  values of sampling fields that a request leaves out
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
    """The output of a step for one request; a step may have several outputs of one request, in order.

    num_accepted           number of accepted drafts; they are the first of token_ids
    reasoning, tool_calls  with parsing, the parts of the answer that are not in text
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
        """Refuse a request that can never be served. Any thread. Raises RequestError naming value, limit and knob."""

    def compile(self, sampling: Sampling, patience_s: float | None) -> object:
        """Compile the grammar of a request. `submit` finds it while the caller keeps the returned object.

        patience_s  return None or False if compiling takes longer; None: wait as long as the engine allows, 2 s
        Any thread. Raises RequestError for a grammar that cannot be served.
        """

    def submit(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, cache_salt: str = "", session: str = ""
    ) -> None:
        """Take a request. It shares cached prefixes only with requests of the same salt.

        session  the name of its session, within the salt; "" for none

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
        """Take a request whose prompt is still being written; it has no output before `finish_prompt`.

        max_prompt_tokens  the most tokens of its prompt, for which KV is reserved; None: all that the context can hold
        Raises RequestError, CapacityError.
        """

    def grow_prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add token ids to an open prompt, and withdraw an answer that was begun on trial. Raises RequestError."""

    def finish_prompt(self, request_id: str, token_ids: Sequence[int], *, speculative: bool = False) -> None:
        """End an open prompt with these token ids.

        speculative  begin the answer on trial, and keep its outputs back
        Raises RequestError for a prompt that is not open, is empty, or becomes too long.
        """

    def cancel(self, request_id: str) -> None:
        """End a request; its output in the next step says "cancelled". Raises RequestError for an unknown request."""

    def pause(self, request_id: str) -> bool:
        """Take a request off its slot, for others; returns False if it ended first.

        Raises RequestError; CapacityError if host memory has no space for its state.
        """

    def resume(self, request_id: str) -> None:
        """Let a paused request continue. Raises RequestError for a request that is not paused."""

    @property
    def deadline(self) -> float | None:
        """The monotonic time at which the engine must step even if no call is made before; None: never."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything now. A call, `deadline`, or the event behind `watch` makes it true."""

    def watch(self, wake: Callable[[], None]) -> None:
        """Set a function to call, in any thread, when `busy` may have become true by itself; `wake` does not block."""

    def step(self) -> Sequence[EngineOutput]:
        """Run one decode step for all running requests. Raises DeviceError when the device has failed."""

    def metrics(self, request_id: str) -> Mapping[str, Any]:
        """Return the figures of a running request, or of one that ended recently, as JSON values."""

    def stats(self) -> Mapping[str, Any]:
        """Return totals, slots and KV use, as JSON values; the decode thread calls it about once a second."""

    def sleep(self) -> None:
        """Give the device's memory back. The engine has no request then, and gets none before `wake`.

        Raises CapacityError or ConfigError if it stays awake; DeviceError when the device has failed.
        """

    def wake(self) -> None:
        """Take the device's memory again. Raises CapacityError if it stays asleep, DeviceError."""

    def close(self) -> None:
        """Release everything."""


class Growing(Protocol):
    """Tokenizes a prompt that is still being written, in one thread. Methods raise RequestError."""

    def append(self, piece: Sequence[int] | str) -> Sequence[int]:
        """Add text or token ids; returns the next token ids that no later piece can change."""

    def rest(self) -> Sequence[int]:
        """Return the token ids of the text held back, as if the prompt ended here; more pieces may follow."""


class Codec(Protocol):
    """Converts text to token ids and back; the engine itself gives the text of what it decodes.

    allow_special   special tokens that the caller's text spells become those tokens; otherwise they stay text
    max_context     the limit of prompt and max_tokens together; a prompt whose length alone exceeds it is refused
                    before it is tokenized
    Methods raise RequestError for input that cannot be converted.
    """

    def encode(
        self, text: str, *, allow_special: bool, add_special_tokens: bool, max_context: int, max_tokens: int
    ) -> Sequence[int]:
        """Return the token ids of a plain prompt; add_special_tokens: with those that the tokenizer puts around it."""

    def encode_chat(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        *,
        allow_special: bool,
        max_context: int,
        max_tokens: int,
    ) -> Sequence[int]:
        """Return the token ids of a chat in the model's template."""

    def grow(self, *, allow_special: bool, add_special_tokens: bool, max_context: int, max_tokens: int) -> Growing:
        """Begin a plain prompt that is still being written; it gets the token ids of its whole text."""

    def grow_chat(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        *,
        allow_special: bool,
        max_context: int,
        max_tokens: int,
    ) -> Growing:
        """Begin a chat; the content of its last message is still being written, and comes in pieces of text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""

    def token_texts(self, token_ids: Sequence[int]) -> Sequence[str]:
        """Return the text of each token alone; bytes of incomplete characters are replaced."""
