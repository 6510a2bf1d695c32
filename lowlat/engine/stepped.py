"""This is the part of a runtime that its owner alone runs: requests are submitted, stepped, paused and cancelled.

A prompt's first token comes out of prefill and is given to the caller at once; then every active slot gets a decode
step before anything else is prefilled. `lowlat.engine.requests` has the requests, `lowlat.engine.scheduling` the queue
and the slots, `lowlat.engine.steps` runs the steps.
"""

from __future__ import annotations  # help() shows signatures as they are written here

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from lowlat.engine.calls.driver import Driver, owned
from lowlat.engine.change_guard import ChangeGuard
from lowlat.engine.figures.perf import PerfCounters
from lowlat.engine.figures.summary import held_up_summary, kv_summary, paused_summary
from lowlat.engine.loading.loaded import Loaded
from lowlat.engine.memory.kept_states import host_space
from lowlat.engine.metrics import RequestMetrics
from lowlat.engine.numerics import digest_of, numerics_of
from lowlat.engine.requests.checks import check_depth
from lowlat.engine.requests.open_prompts import OpenPrompt
from lowlat.engine.requests.requests import Requests
from lowlat.engine.scheduling.make import make_scheduler
from lowlat.engine.scheduling.tiers import ContentFacts, content_facts, file_stamps, make_tiers
from lowlat.engine.sessions.book import SessionBook
from lowlat.engine.sessions.session import record_of
from lowlat.engine.sleep import Sleep
from lowlat.engine.steps.between_steps import BetweenSteps
from lowlat.engine.steps.steps import Steps
from lowlat.errors import ConfigError, LowlatError, RequestError, SessionError
from lowlat.executors.devices import make_current
from lowlat.options.declaration import check_number, plain
from lowlat.options.keywords import NamedSession
from lowlat.options.request import SamplingParams, StepOutput
from lowlat.options.runtime import RuntimeConfig

__all__ = ["SteppedRuntime"]

T = TypeVar("T")


class SteppedRuntime:
    """Decodes requests that are submitted and stepped by one thread, which owns it; `Runtime` has what users call.

    `driver` is the thread of its own that owns it once calls from any thread are answered; None: its program's does.
    """

    def __init__(self, loaded: Loaded, config: RuntimeConfig) -> None:
        self.config = config
        self.directory = loaded.target.directory
        self.model_config, self.rank_config = loaded.target.config, loaded.rank_config
        self.ladder, self.executor, self.geometry = loaded.ladder, loaded.executor, loaded.geometry
        self.device_choice, self.memory = loaded.choice, loaded.memory
        self.speculation_error = loaded.speculation.error
        self.numerics = digest_of(numerics_of(loaded, config))
        self.speculator = loaded.geometry.speculator
        self.draft_config = None if self.speculator is None else self.speculator.draft_config
        self.codec = loaded.codec
        used = loaded.speculation.used
        self.num_speculative_tokens = depth = 0 if used is None else used.num_speculative_tokens
        self.simulated = self.geometry.simulated_acceptance is not None
        self.speculation_limits = loaded.speculation_limits
        self._tiers = make_tiers(loaded, config, self.numerics)
        space = host_space(self.executor, config.pause_gib, self.geometry.prefill_chunk // self.geometry.block_size)
        self.scheduler = make_scheduler(self.ladder, self.geometry, config, self._tiers, space)
        self.kvcache = self.scheduler.kvcache
        self._requests = Requests(loaded, config, self.scheduler, speculates=depth > 0)
        self.checks, self.grammars = self._requests.checks, self._requests.grammars
        self._guard = ChangeGuard()
        self._steps = Steps(loaded, config, self.scheduler, self._requests, self._guard, num_speculative_tokens=depth)
        self._between = BetweenSteps(self._steps, self.scheduler, self._requests, config.pause_deadline_s)
        self._sleep = Sleep(self.executor, self.kvcache, self._steps, self._guard)
        drafts = loaded.speculation.loaded
        self._draft_directory = None if drafts is None else drafts.directory
        self._content_facts: ContentFacts | None = None
        self._file_stamps = file_stamps(self.directory, self._draft_directory)
        self._closed = False
        self.driver: Driver | None = None  # the thread that owns it, from the first call that has one
        self._process = os.getpid()
        self._starting, self._closing = threading.Lock(), threading.RLock()

    def submit(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        allow_special: bool = False,
        cache_salt: str = "",
        session: NamedSession | str | None = None,
    ) -> str:
        """Queue a request and return its id.

        prompt         token ids [n], n >= 1, or text (needs a tokenizer)
        allow_special  special tokens that a text spells become these tokens; otherwise they stay text
        cache_salt     only requests of the same salt share cached prefixes: others cannot learn, by the time to the
                       first token, what was asked before
        session        that it belongs to, or its id: its prefix stays while that lives; see `Runtime.session`
        Raises RequestError for a prompt or parameter that cannot be served, CapacityError when the queue is full;
        LowlatError where calls such as `generate` have a thread step the runtime.
        """
        self._check_takes("submit")
        record, salt = record_of(self, session, cache_salt)
        request, scheduled = self._requests.open(prompt, params, request_id, allow_special, salt, record)
        with self._guard:
            self._between.submit(request, scheduled)
        return request.request_id

    def open_prompt(
        self,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        allow_special: bool = False,
        cache_salt: str = "",
        session: NamedSession | str | None = None,
        max_prompt_tokens: int | None = None,
    ) -> OpenPrompt:
        """Queue a request whose prompt is still being written: `append` reads what comes, `finish` begins the answer.

        max_prompt_tokens   tokens of the prompt at most, for which KV is reserved; None: all that max_context allows
        The other arguments and errors are those of `submit`; the answer's tokens are those of the whole prompt.
        One that gets nothing for pause_deadline_s is ended.
        """
        self._check_takes("open_prompt")
        record, salt = record_of(self, session, cache_salt)
        request, scheduled = self._requests.open_prompt(
            params, request_id, allow_special, salt, max_prompt_tokens, record
        )
        with self._guard:
            self._between.submit(request, scheduled)
        return OpenPrompt(self, request.request_id, max_tokens=request.params.max_tokens, allow_special=allow_special)

    @owned
    def grow_prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add token ids, which no later text can change, to an open prompt: see `OpenPrompt.append`."""
        self._check_usable()
        request = self._requests.find(request_id)
        with self._guard.unless_refused():
            self._between.grow(request, token_ids)

    @owned
    def finish_prompt(self, request_id: str, token_ids: Sequence[int], *, speculative: bool = False) -> None:
        """End an open prompt with these token ids: see `OpenPrompt.finish`."""
        self._check_usable()
        request = self._requests.find(request_id)
        with self._guard.unless_refused():
            self._between.finish(request, token_ids, speculative=speculative)

    def step(self, num_speculative_tokens: int | None = None) -> list[StepOutput]:
        """Admit, run at most one prefill chunk, and one decode step for every active slot.

        Where the chunk is a prompt's last its first token is returned at once, and the next call begins with the step.
        num_speculative_tokens   depth S of this step; None: the configured one, 0 without a speculator. Only steps of
                                 the configured depth are run ahead of the caller
        Returns what each request gained, ends included; steps that ran meanwhile are in it, too, so a request may be
        there several times, in order. Where it returns such steps alone, this call has admitted no request.
        Raises ConfigError for a depth without a bucket, DeviceError when the device has failed.
        Ctrl-C, or another exception that breaks it off, is harmless while it waits for a device: the next call goes on.
        Elsewhere tokens may be lost, as always with the reference executor: then later calls raise DeviceError.
        LowlatError is raised where calls such as `generate` have a thread step the runtime.
        """
        self._check_by_hand("step")
        self._check_usable()
        depth = self._depth(num_speculative_tokens)
        with self._guard:
            self._between.end_overdue()
            if self.scheduler.busy and not self._requests.has_confirmed:
                self._steps.step(num_speculative_tokens, depth)
            return self._requests.take_outputs()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to step for; where a step was broken off, requests that it left unfinished.

        Paused requests are not, nor is a prompt of which all that is known was read, nor one that waits for what these
        hold (`summary()["held_up"]`). What becomes ready by itself does so at `deadline`.
        """
        return self._owes_outputs or (not self._closed and self.scheduler.busy)

    @property
    def ready(self) -> bool:
        """Whether a step would do anything now; a runtime that is busy may only wait for a copy, or a file."""
        return self._owes_outputs or (not self._closed and self.scheduler.ready)

    @property
    def _owes_outputs(self) -> bool:
        """Whether there are outputs, or a request has waited for its caller for too long."""
        if self._closed:
            return False
        deadline = self._requests.deadlines.first
        return bool(self._requests.outputs) or (deadline is not None and time.monotonic() >= deadline)

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, in any thread, when the runtime may have become ready by itself; it may not block."""
        if self._tiers is not None:
            self._tiers.on_read = wake

    @property
    def deadline(self) -> float | None:
        """The time of the monotonic clock at which there is something to step for, whatever is asked; None: never.

        A request that waits for its caller is ended then, or the host is asked again for memory that it has refused.
        """
        times = (self._requests.deadlines.first, self.scheduler.retry_at)
        return min((each for each in times if each is not None), default=None)

    @owned
    def speculate(self, num_speculative_tokens: int) -> None:
        """Set the depth S of the steps from here on, 0 to the depth that was loaded, while there is no request.

        Raises ConfigError for a depth without a bucket, while requests are there, and in strict mode for no drafts
        where there is a speculator.
        """
        self._check_usable()
        check_depth(num_speculative_tokens, self.ladder)
        if self._requests:
            raise ConfigError(f"the depth can become {num_speculative_tokens} between requests, and there are some")
        if self.config.is_strict and self.speculator is not None and num_speculative_tokens == 0:
            raise ConfigError("perf_mode 'strict' speculates in every step: num_speculative_tokens must be 1 or more")
        self.num_speculative_tokens = num_speculative_tokens
        self._steps.published.speculating = num_speculative_tokens > 0

    @owned
    def cancel(self, request_id: str) -> None:
        """End a request; its last output says "cancelled". Raises RequestError for an unknown or ended one."""
        self._check_usable()
        request = self._requests.find(request_id)
        with self._guard:
            self._between.cancel(request)

    @owned
    def pause(self, request_id: str, *, deadline_s: float | None = None) -> bool:
        """Let a request give its slot to others until `resume`; it then goes on with the tokens that it would have had.

        deadline_s  seconds after which it is ended with an error of the code "deadline"; None: pause_deadline_s
        What its slot holds goes to host memory (pause_gib); its KV stays in its blocks while nobody needs them, and
        goes there, too, then. A request that has no token yet gives its blocks back, and goes on from what is shared of
        its prompt. Returns False where it ended before it could be paused: its last output comes with the next step's.
        Raises RequestError for one that is unknown, paused already or whose prompt is open; CapacityError where host
        memory has no space for it; DeviceError when the device has failed.
        """
        self._check_usable()
        if deadline_s is not None:
            check_number("deadline_s", deadline_s, 0.0, 1e9, RequestError, above=True)
        if self._requests.has_last_output(request_id):
            return False
        request = self._requests.find(request_id)
        with self._guard.unless_refused():
            return self._between.pause(request, deadline_s)

    @owned
    def resume(self, request_id: str) -> None:
        """Let a paused request have a slot again, before those of its priority that came after it.

        Raises RequestError for one that is not paused, or has ended.
        """
        self._check_usable()
        request = self._requests.find(request_id)
        with self._guard.unless_refused():
            self._between.resume(request)

    @owned
    def set_draft_limit(self, request_id: str, max_draft_tokens: int | None) -> None:
        """Change how many draft tokens of a live request are verified in one step, from the next launched step on.

        max_draft_tokens   as in SamplingParams: None is as many as the bucket has, 0 none at all
        No token depends on it. Raises RequestError for an unknown or ended request, or a limit out of range.
        """
        self._check_usable()
        self._steps.changes.limit_drafts(self._requests.limit_drafts(request_id, max_draft_tokens))

    @owned
    def metrics(self, request_id: str) -> RequestMetrics:
        """Return the figures of a live request or of one of the last thousand ended. Raises RequestError for others."""
        found = self._requests.metrics(request_id)
        is_live = request_id in self._requests
        return replace(found, finish_reason="error") if is_live and self._guard.failure else found

    @owned
    def perf(self) -> PerfCounters:
        """Return the launches of its programs, and its waits, copies and steps without drafts since the load."""
        self._check_open()
        return PerfCounters.of(self.executor.counts, self._steps.mailbox.num_copies, self._steps.published.undrafted)

    @owned
    def summary(self) -> dict[str, Any]:
        """Return totals since the load, as JSON: blocks such as `eagle_speculation` only of what has run."""
        self._check_open()
        totals = self._requests.totals()
        return {
            **totals.to_dict(),
            "kv": kv_summary(self.scheduler, self.sessions, self._tiers, self.geometry),
            "perf": self.perf().to_dict(),
            "device": str(self.device_choice.device),
            "numerics": self.numerics,
            "paused": paused_summary(self.scheduler),
            **held_up_summary(self.scheduler),
            "max_prefill_chunks": self.geometry.max_prefill_chunks,
            "memory": [each.to_dict() for each in self.memory],
            **({"activations": "fp8"} if self.model_config.coded_rows else {}),
            **({} if self.speculator is None else {"speculator": self.speculator.report()}),
            **self._steps.report(totals.speculation),
            **self._sleep.report(),
        }

    @owned
    def slots(self) -> list[dict[str, Any]]:
        """List the requests that have a slot, by slot, as JSON: phase, tokens of prompt and completion, their bound."""
        return self._requests.describe()

    @property
    def asleep(self) -> bool:
        """Whether `sleep` has given the device's memory back."""
        return not self._closed and self._sleep.asleep

    @property
    def sessions(self) -> SessionBook:
        """The sessions that live; of the thread that steps."""
        return self._requests.sessions

    def fill_blocks(self) -> None:
        """Write to the device what was found for its blocks; for the thread that steps."""
        self._steps.moves.fill()

    @owned
    def owned_call(self, what: Callable[[SteppedRuntime], T]) -> T:
        """Have something done by the runtime's owner, between two steps."""
        self._check_usable()
        return what(self)

    def content_facts(self) -> ContentFacts:
        """Return the facts that decide what the contents of chunks are, next to `numerics`.

        Raises SessionError where the model's files are not those that were loaded.
        """
        if self._content_facts is None:
            try:
                is_same = file_stamps(self.directory, self._draft_directory) == self._file_stamps
            except OSError:
                is_same = False
            if not is_same:
                raise SessionError(
                    f"the files of the model in {self.directory}, or of its draft model, were changed since they were "
                    "loaded: which model a session is of cannot be told; load the runtime again"
                )
            self._content_facts = content_facts(self.directory, self._draft_directory, self.executor.mover.states)
        return self._content_facts

    def adopt_thread(self) -> None:
        """Hand the runtime to the calling thread; the one before must be done with it. Makes its device current."""
        self._check_by_hand("adopt_thread")
        make_current(self.device_choice.device)

    def _check_by_hand(self, name: str) -> None:
        """Raise LowlatError for a call that the driver's thread alone may make."""
        self._check_open()
        if self.driver is not None and not self.driver.is_current and not self.driver.has_ended:
            raise LowlatError(
                f"{name}() is refused: since generate, stream or chat was called a thread of the runtime's own steps "
                "it; go on with these, or load a runtime that is stepped by hand"
            )

    def _check_takes(self, name: str) -> None:
        """Raise LowlatError for a call by which a request comes, where none may."""
        self._check_by_hand(name)
        self._check_usable()
        if self.asleep:
            raise RequestError("the runtime sleeps (Runtime.sleep), and takes no request before Runtime.wake")

    def _check_open(self) -> None:
        if self._closed:
            raise LowlatError("the runtime is closed")
        if os.getpid() != self._process:
            raise LowlatError(
                f"the runtime was loaded by process {self._process}, and this is a fork of it, {os.getpid()}: load one "
                "here (multiprocessing's start method 'spawn'), or serve it (lowlat serve) and ask it with "
                "lowlat.ipc.Client"
            )

    def _check_usable(self) -> None:
        """Raise LowlatError for a closed runtime, DeviceError for one whose step, or other change, was broken off."""
        self._check_open()
        self._guard.check()

    def _depth(self, asked: int | None) -> int:
        depth = self.num_speculative_tokens if asked is None else plain(asked)
        if asked is None and self.speculator is None:
            return 0
        if self.config.is_strict and depth != self.num_speculative_tokens:
            raise ConfigError(f"perf_mode 'strict' decodes at S = {self.num_speculative_tokens} alone, got {depth}")
        check_depth(depth, self.ladder)
        return depth
