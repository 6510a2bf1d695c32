"""This module has the methods of a runtime that only its owning thread calls: submit, step, pause, cancel and others.

Prefill gives a prompt's first token, which the caller gets at once. Then every active slot gets a decode step before
the next prefill. `lowlat.engine.requests` has the requests, `lowlat.engine.scheduling` the queue and the slots, and
`lowlat.engine.steps` runs the steps.
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
    """Decodes requests that one thread, its owner, submits and steps; `Runtime` adds the methods for any thread.

    `driver` is the runtime's own thread, which owns it after the first call from any thread; None: the program's does.
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
        allow_special  whether special tokens spelled in the text become these tokens; otherwise they stay text
        cache_salt     only requests with the same salt share cached prefixes; so others cannot learn earlier prompts
                       from the time to the first token
        session        its session, or the session's id: its prefix stays while the session lives; see `Runtime.session`
        Raises RequestError for a prompt or parameter that cannot be served, CapacityError when the queue is full;
        LowlatError if the driver's thread steps the runtime, after calls such as `generate`.
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
        """Queue a request whose prompt is still being written: `append` adds text, `finish` starts the answer.

        max_prompt_tokens  the most tokens of the prompt, for which KV is reserved; None: all that max_context allows
        The other arguments and errors are those of `submit`. The answer has the same tokens as for the whole prompt.
        A request that gets nothing for pause_deadline_s is ended.
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
        """Add token ids to an open prompt; later text must not change them. See `OpenPrompt.append`."""
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

        If the chunk is a prompt's last one, its first token is returned at once, and the next call begins with the
        step.
        num_speculative_tokens  draft length S of this step; None: the configured one, 0 without a speculator. Only
                                steps of the configured draft length are launched ahead of the caller
        Returns the new tokens and the ends of requests. Steps that were launched ahead are included, so a request may
        be there several times, in order. If only such steps are returned, this call has admitted no request.
        Raises ConfigError for a draft length without a bucket, DeviceError when the device has failed.
        Ctrl-C, or another exception, is harmless while the call waits for a device: the next call goes on. Elsewhere
        tokens may be lost, as always with the reference executor: later calls then raise DeviceError.
        Raises LowlatError if the driver's thread steps the runtime, after calls such as `generate`.
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
        """Whether there is any work for `step`, also after a step that an exception ended.

        Paused requests are no work, nor are open prompts whose known tokens were all read, nor requests that wait for
        memory that these hold (`summary()["held_up"]`). A request that becomes ready by itself does so at `deadline`.
        """
        return self._owes_outputs or (not self._closed and self.scheduler.busy)

    @property
    def ready(self) -> bool:
        """Whether a step would do anything now; a busy runtime may only wait for a copy, or a file."""
        return self._owes_outputs or (not self._closed and self.scheduler.ready)

    @property
    def _owes_outputs(self) -> bool:
        """Whether there are outputs, or a request has waited for its caller for too long."""
        if self._closed:
            return False
        deadline = self._requests.deadlines.first
        return bool(self._requests.outputs) or (deadline is not None and time.monotonic() >= deadline)

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake`, in any thread, when the runtime may have become ready by itself; `wake` must not block."""
        if self._tiers is not None:
            self._tiers.on_read = wake

    @property
    def deadline(self) -> float | None:
        """The time of the monotonic clock at which `step` has work without a new call; None: never.

        At that time a request that waits for its caller is ended, or memory that the host refused is requested again.
        """
        times = (self._requests.deadlines.first, self.scheduler.retry_at)
        return min((each for each in times if each is not None), default=None)

    @owned
    def speculate(self, num_speculative_tokens: int) -> None:
        """Set the draft length S of later steps, 0 to the loaded one, while there are no requests.

        Raises ConfigError for a draft length without a bucket, while there are requests, and in strict mode for 0 with
        a speculator.
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
        """Take a request out of its slot until `resume`; its tokens stay the same.

        deadline_s  seconds after which it is ended with an error of the code "deadline"; None: pause_deadline_s
        Its slot's state goes to host memory (pause_gib). Its KV stays in its blocks until another request needs them,
        and then goes to host memory, too. A request without a token frees its blocks, and later goes on from the shared
        part of its prompt. Returns False if it ended before it could be paused: the next step returns its last output.
        Raises RequestError for a request that is unknown, paused already or whose prompt is open; CapacityError if host
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
        """Queue a paused request again, before requests of its priority that came after it.

        Raises RequestError for a request that is not paused, or has ended.
        """
        self._check_usable()
        request = self._requests.find(request_id)
        with self._guard.unless_refused():
            self._between.resume(request)

    @owned
    def set_draft_limit(self, request_id: str, max_draft_tokens: int | None) -> None:
        """Limit the draft tokens of a live request that a step verifies, from the next launched step on.

        max_draft_tokens  as in SamplingParams; None: as many as the bucket has; 0: none
        It changes no token. Raises RequestError for an unknown or ended request, or a limit out of range.
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
        """Return totals since the load, as JSON; blocks such as `eagle_speculation` are there only if it has run."""
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
        """List the requests in slots as JSON, by slot: phase, tokens of prompt and completion, the limit on both."""
        return self._requests.describe()

    @property
    def asleep(self) -> bool:
        """Whether `sleep` has given the device's memory back."""
        return not self._closed and self._sleep.asleep

    @property
    def sessions(self) -> SessionBook:
        """The live sessions; for the owning thread."""
        return self._requests.sessions

    def fill_blocks(self) -> None:
        """Write found contents of blocks to the device; for the owning thread."""
        self._steps.moves.fill()

    @owned
    def owned_call(self, what: Callable[[SteppedRuntime], T]) -> T:
        """Have the runtime's owner call a function between two steps."""
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
        """Make the calling thread the owner, and the device current in it; the old owner must not use the runtime."""
        self._check_by_hand("adopt_thread")
        make_current(self.device_choice.device)

    def _check_by_hand(self, name: str) -> None:
        """Raise LowlatError for a call that only the driver's thread may make."""
        self._check_open()
        if self.driver is not None and not self.driver.is_current and not self.driver.has_ended:
            raise LowlatError(
                f"{name}() is refused: since generate, stream or chat was called a thread of the runtime's own steps "
                "it; go on with these, or load a runtime that is stepped by hand"
            )

    def _check_takes(self, name: str) -> None:
        """Raise LowlatError for a call that adds a request, if no request may be added."""
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
        """Raise LowlatError for a closed runtime, DeviceError after a step or another change that was interrupted."""
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
