"""This module has an engine without a model: constant step time, tokens by prompt and seed, faults on demand.

A step computes its outputs and then sleeps, as if a device worked: it releases the GIL meanwhile, and ends a constant
time after its begin. The module imports no torch, so that a server with it starts quickly.
"""

import hashlib
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lowlat.errors import CapacityError, DeviceError, RequestError
from lowlat.ipc.engine import EngineInfo
from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.ipc.wire import Message, Sampling, ToolCallDelta

__all__ = ["FakeCodec", "FakeEngine", "FakeOutput", "expected_text", "expected_tokens"]

NUMERICS = "0123456789abcdef"
VOCAB_SIZE = 1000
MAX_REMEMBERED = 200  # ended requests that are remembered: a server may run for long


@dataclass(frozen=True)
class FakeLogprobs:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    texts: tuple[bytes, ...] | None = None


@dataclass(frozen=True)
class FakeOutput:
    """An output has the fields of lowlat.StepOutput."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    text: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[FakeLogprobs, ...] | None = None
    error: str | None = None
    error_code: Literal["not_finite", "grammar", "text", "check"] | None = None
    simulated: bool = False
    num_accepted: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


@dataclass
class _Request:
    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: tuple[int, ...] = ()  # known from its first step on
    num_sent: int = 0
    num_steps: int = 0
    submitted: float = field(default_factory=time.monotonic)


def prompt_logprobs(prompt: Sequence[int], sampling: Sampling, text: bool = True) -> PromptLogprobs | None:
    """Return a FakeEngine's logprobs of a prompt: token t has -t / 8 and rank t + 1; ids from 0 on are likeliest."""
    num_top = sampling.prompt_logprobs
    if num_top is None:
        return None
    count = len(prompt)
    logprobs = array("f", [0.0, *(-token / 8 for token in prompt[1:])])
    ranks = array("i", [0, *(token + 1 for token in prompt[1:])])
    top_ids = array("i", [-1] * num_top + [*range(num_top)] * (count - 1))
    top = array("f", [0.0] * num_top + [-token / 8 for token in range(num_top)] * (count - 1))
    texts = {token: expected_text([token]).encode() for token in {*prompt, *range(num_top)}} if text else None
    ids = array("i", prompt)
    packed = (ids.tobytes(), logprobs.tobytes(), ranks.tobytes(), top_ids.tobytes(), top.tobytes())
    return PromptLogprobs(num_top, packed, texts)


def expected_tokens(prompt: Sequence[int], max_tokens: int, seed: int | None = None) -> tuple[int, ...]:
    """Return a FakeEngine's tokens for this prompt."""
    key = hashlib.sha256(repr((tuple(prompt), seed)).encode()).digest()
    state = int.from_bytes(key[:8], "little") | 1
    tokens = []
    for _ in range(max_tokens):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        tokens.append((state >> 33) % VOCAB_SIZE)
    return tuple(tokens)


def expected_text(tokens: Sequence[int]) -> str:
    """Return the text of tokens: one word for each."""
    return "".join(f"t{token} " for token in tokens)


class FakeCodec:
    """Bytes as token ids; `delay_s` makes encoding slow, `fails` makes it raise."""

    def __init__(self, delay_s: float = 0.0, fails: BaseException | None = None) -> None:
        self.delay_s = delay_s
        self.fails = fails

    def encode(
        self,
        text: str,
        *,
        allow_special: bool = False,
        add_special_tokens: bool = True,
        max_context: int = 1 << 31,
        max_tokens: int = 1,
    ) -> list[int]:
        if len(text) + max_tokens > max_context:
            raise RequestError(f"{len(text)} bytes and max_tokens {max_tokens} exceed {max_context} (max_context)")
        if self.fails is not None:
            raise self.fails
        if self.delay_s:
            time.sleep(self.delay_s)
        if not text:
            raise RequestError("the text is empty")
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [chr(token) for token in token_ids]

    def grow(
        self, *, allow_special: bool, add_special_tokens: bool, max_context: int, max_tokens: int
    ) -> "FakeGrowing":
        return FakeGrowing(self, max_context=max_context, max_tokens=max_tokens)

    def grow_chat(
        self, messages: Sequence[Message], options: Mapping[str, Any], *, allow_special: bool, **limits: int
    ) -> "FakeGrowing":
        growing = FakeGrowing(self, **limits)
        growing.held = self.encode_chat([*messages[:-1], Message(messages[-1].role)], options)
        return growing

    def encode_chat(self, messages: Sequence[Message], options: Mapping[str, Any], **how: Any) -> list[int]:
        if options.get("fail"):
            raise RequestError("the template does not know the option 'fail'")
        text = "".join(f"<{message.role}>{message.content or ''}" for message in messages)
        return self.encode(text, **how)


class FakeGrowing:
    """A text's last byte may still change."""

    def __init__(self, codec: FakeCodec, **limits: Any) -> None:
        self.codec, self.limits, self.held = codec, limits, list[int]()

    def append(self, piece: Sequence[int] | str) -> list[int]:
        ids = self.codec.encode(piece, **self.limits) if isinstance(piece, str) else list(piece)
        found = [*self.held, *ids]
        self.held = [found.pop()] if isinstance(piece, str) else []
        return found

    def rest(self) -> list[int]:
        return self.held


class FakeEngine:
    """An Engine.

    step_s           a step's constant time, nearly all of it without the GIL
    tokens_per_step  new tokens of each request in a step, as with speculation
    text             outputs have text
    faults           first token of a prompt -> the fault of its request: "nan", "device", "hang", "crash", at step
                     `fault_step` of the request
    on_step          called in each step, before it sleeps
    wake_problems    errors of the first wakes, also of the device; sleep_problem: the error of each sleep
    """

    def __init__(
        self,
        step_s: float = 0.0,
        *,
        tokens_per_step: int = 1,
        max_running: int = 4,
        max_context: int = 4096,
        text: bool = False,
        tokenizer: str = "",
        on_device: bool = True,
        faults: Mapping[int, str] | None = None,
        fault_step: int = 3,
        close_error: Exception | None = None,
        on_step: Callable[[], object] | None = None,
        sampling_defaults: Mapping[str, float] | None = None,
        wake_problems: Sequence[str] = (),
        sleep_problem: str = "",
    ) -> None:
        self.info = EngineInfo(
            model="fake",
            vocab_size=VOCAB_SIZE,
            max_running=max_running,
            max_context=max_context,
            tokenizer=tokenizer,
            has_chat_template=bool(tokenizer),
            numerics=NUMERICS,
            on_device=on_device,
            sampling_defaults=sampling_defaults or {},
            can_sleep=True,
        )
        self.wake_problems, self.sleep_problem = list(wake_problems), sleep_problem
        self.asleep = False
        self.num_wakes = 0
        self.step_s = step_s
        self.tokens_per_step = tokens_per_step
        self.text = text
        self.faults = dict(faults or {})
        self.fault_step = fault_step
        self.close_error = close_error
        self.on_step = on_step
        self.unhang = threading.Event()
        self.closed = False
        self.threads: set[int] = set()  # threads that called anything but validate
        self.num_steps = 0
        self.max_seen_running = 0
        self.cancelled_at: dict[str, int] = {}  # request id -> steps done when cancel came
        self.order: list[str] = []
        self.salts: list[str] = []
        self.sessions: list[str] = []
        self._running: dict[str, _Request] = {}
        self.max_paused = 1 << 30
        self.paused: dict[str, _Request] = {}
        self.opened: dict[str, tuple[list[int], Sampling, tuple[str, str]]] = {}  # prompts that are being written
        self.tried: dict[str, tuple[int, ...]] = {}  # the ends that they were given on trial
        self._ended: dict[str, dict[str, Any]] = {}
        self._pending: list[FakeOutput] = []

    def pause(self, request_id: str) -> bool:
        """Pause a request, which then gets no tokens; beyond `max_paused` there is no space for one."""
        self.threads.add(threading.get_ident())
        if request_id not in self._running or request_id in self.paused:
            raise RequestError(f"request {request_id} cannot be paused")
        if len(self.paused) >= self.max_paused:
            raise CapacityError(f"request {request_id} takes host memory while it is paused (pause_gib)")
        self.paused[request_id] = self._running.pop(request_id)
        return True

    def resume(self, request_id: str) -> None:
        self.threads.add(threading.get_ident())
        if request_id not in self.paused:
            raise RequestError(f"request {request_id} is not paused")
        self._running[request_id] = self.paused.pop(request_id)

    @property
    def deadline(self) -> float | None:
        return None

    def validate(self, prompt: Sequence[int], sampling: Sampling) -> None:
        for place, token in enumerate(prompt):
            if not 0 <= token < VOCAB_SIZE:
                raise RequestError(f"prompt token {place} is {token}; ids are integers from 0 to {VOCAB_SIZE - 1}")
        if len(prompt) + sampling.token_limit > self.info.max_context:
            raise RequestError(
                f"prompt of {len(prompt)} tokens and max_tokens {sampling.token_limit} exceed "
                f"{self.info.max_context} (max_context)"
            )

    def compile(self, sampling: Sampling, patience_s: float | None) -> object:
        return True

    def submit(
        self, request_id: str, prompt: Sequence[int], sampling: Sampling, cache_salt: str = "", session: str = ""
    ) -> None:
        self.salts.append(cache_salt)
        self.sessions.append(session)
        del self.salts[:-MAX_REMEMBERED]
        self.threads.add(threading.get_ident())
        assert not self.asleep
        fault = self.faults.get(prompt[0])
        if fault == "refuse":
            raise RequestError("the fake engine refuses this prompt")
        if fault == "full":
            raise CapacityError("the fake engine is full")
        self._running[request_id] = _Request(tuple(prompt), sampling)
        self.order.append(request_id)
        del self.order[:-MAX_REMEMBERED]
        self.max_seen_running = max(self.max_seen_running, len(self._running))

    def open_prompt(
        self,
        request_id: str,
        sampling: Sampling,
        cache_salt: str = "",
        session: str = "",
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.opened[request_id] = ([], sampling, (cache_salt, session))

    def grow_prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        prompt, _, _ = self._open_one(request_id)
        self.tried.pop(request_id, None)
        prompt.extend(token_ids)

    def finish_prompt(self, request_id: str, token_ids: Sequence[int], *, speculative: bool = False) -> None:
        prompt, sampling, own = self._open_one(request_id)
        if speculative:
            self.tried[request_id] = tuple(token_ids)
            return
        self.tried.pop(request_id, None)
        if not (whole := [*prompt, *token_ids]):
            raise RequestError("a prompt of 0 tokens; it needs 1 at least")
        del self.opened[request_id]
        self.submit(request_id, whole, sampling, *own)

    def _open_one(self, request_id: str) -> tuple[list[int], Sampling, tuple[str, str]]:
        if request_id not in self.opened:
            raise RequestError(f"request {request_id!r} is unknown or has ended")
        return self.opened[request_id]

    def cancel(self, request_id: str) -> None:
        self.threads.add(threading.get_ident())
        if (opened := self.opened.pop(request_id, None)) is not None:
            self.tried.pop(request_id, None)
            self._running[request_id] = _Request(tuple(opened[0]), opened[1])
        request = self._running.pop(request_id, None) or self.paused.pop(request_id, None)
        if request is None:
            raise RequestError(f"request {request_id!r} is unknown or has ended")
        self.cancelled_at[request_id] = request.num_steps
        if len(self.cancelled_at) > MAX_REMEMBERED:
            self.cancelled_at.pop(next(iter(self.cancelled_at)))
        self._end(request_id, request)
        self._pending.append(FakeOutput(request_id, (), "cancelled", text="" if self.text else None))

    def sleep(self) -> None:
        assert not self.busy
        if self.sleep_problem:
            raise CapacityError(self.sleep_problem)
        self.asleep = True

    def wake(self) -> None:
        if self.wake_problems:
            problem = self.wake_problems.pop(0)
            raise DeviceError(problem) if problem.startswith("device:") else CapacityError(problem)
        self.asleep = False
        self.num_wakes += 1

    def watch(self, wake: Callable[[], None]) -> None:
        """Ignore the wake: this engine has no events of its own."""

    @property
    def busy(self) -> bool:
        return bool(self._running or self._pending)

    def step(self) -> list[FakeOutput]:
        end = time.monotonic() + self.step_s
        self.threads.add(threading.get_ident())
        outputs, self._pending = self._pending, []
        if not self._running:
            return outputs
        if self.on_step is not None:
            self.on_step()
        self.num_steps += 1
        for request_id, request in list(self._running.items()):
            request.num_steps += 1
            outputs.append(self._advance(request_id, request))
        if self.step_s:
            time.sleep(max(0.0, end - time.monotonic()))
        return outputs

    def metrics(self, request_id: str) -> dict[str, Any]:
        return self._ended[request_id]

    def stats(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "kv": {"num_blocks": 100, "num_free": 100 - len(self._running)},
            "eagle_speculation": {
                "num_drafts": self.num_steps,
                "fraction_accepted_ge2": 0.5,
                "acceptance_by_position": [0.5],
                "drafted_by_position": [self.num_steps],
            },
        }

    def close(self) -> None:
        self.closed = True
        if self.close_error is not None:
            raise self.close_error

    def _advance(self, request_id: str, request: _Request) -> FakeOutput:
        fault = self.faults.get(request.prompt[0]) if request.num_steps == self.fault_step else None
        if fault == "device":
            raise DeviceError("the fake device failed")
        if fault == "crash":
            raise ValueError("a secret of the prompt")
        if fault == "hang":
            self.unhang.wait()
        if fault == "nan":
            self._end(request_id, self._running.pop(request_id))
            problem = f"logits at position {request.num_sent} are not finite"
            return FakeOutput(request_id, (), "error", error=problem, error_code="not_finite")
        if not request.tokens:
            request.tokens = expected_tokens(request.prompt, request.sampling.token_limit, request.sampling.seed)
        tokens = request.tokens[request.num_sent : request.num_sent + self.tokens_per_step]
        stop = next((place for place, token in enumerate(tokens) if token in request.sampling.stop_token_ids), None)
        reason: str | None = None
        if stop is not None:
            tokens, reason = tokens[: stop + 1], "stop"
        request.num_sent += len(tokens)
        if reason is None and request.num_sent == len(request.tokens):
            reason = "length"
        if reason is not None:
            self._end(request_id, self._running.pop(request_id))
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs = tuple(
                FakeLogprobs(token, -0.5, ((token, -0.5),), texts=(expected_text([token]).encode(),) * 2)
                for token in tokens
            )
        begins = request.num_sent == len(tokens)
        return FakeOutput(
            request_id,
            tokens,
            reason,
            prompt_logprobs=prompt_logprobs(request.prompt, request.sampling, self.text) if begins else None,
            text=expected_text(tokens) if self.text else None,
            stop_reason=tokens[-1] if reason == "stop" else None,
            logprobs=logprobs,
            num_accepted=max(0, len(tokens) - 1),
        )

    def _end(self, request_id: str, request: _Request) -> None:
        if len(self._ended) >= MAX_REMEMBERED:
            self._ended.pop(next(iter(self._ended)))
        self._ended[request_id] = {
            "prompt_tokens": len(request.prompt),
            "completion_tokens": request.num_sent,
            "num_steps": request.num_steps,
        }
