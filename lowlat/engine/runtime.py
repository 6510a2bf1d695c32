"""The runtime: load once, then ask it for answers, or submit requests and step. Owns weights, buffers, KV pool.

A prompt's first token comes out of prefill and is given to the caller at once; then every active slot gets a decode
step before anything else is prefilled. `lowlat.engine.requests` has the requests, `lowlat.engine.scheduler` the queue
and the slots, `lowlat.engine.steps` runs the steps. One thread owns a runtime: the program's own, which submits and
steps, or `lowlat.engine.calls.driver`'s, which answers calls from any thread and event loop.
"""

from __future__ import annotations  # help() shows signatures as they are written here

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar, Unpack

from lowlat.engine.calls.driver import Driver, owned
from lowlat.engine.calls.prompts import check_timeout, is_chat, is_quick, prepare
from lowlat.engine.calls.streams import AsyncStream, Stream
from lowlat.engine.kept_states import host_space
from lowlat.engine.loading import Loaded, load, make_scheduler
from lowlat.engine.metrics import RequestMetrics
from lowlat.engine.numerics import digest_of, numerics_of
from lowlat.engine.open_prompts import OpenPrompt
from lowlat.engine.perf import PerfCounters
from lowlat.engine.request_checks import Unbroken, check_depth
from lowlat.engine.requests import Requests
from lowlat.engine.sessions.book import SessionBook, SessionKey, SessionRecord
from lowlat.engine.sessions.choices import answer_choices
from lowlat.engine.sessions.session import Session, load_session, open_session
from lowlat.engine.sleep import Sleep
from lowlat.engine.steps import Steps
from lowlat.engine.tiers import ContentFacts, content_facts, make_tiers
from lowlat.errors import CapacityError, ConfigError, LowlatError, RequestError
from lowlat.executors.devices import make_current
from lowlat.ipc.answer import Answer
from lowlat.ipc.prompts import Prompt
from lowlat.models.target import OpenedTarget
from lowlat.options.config import RuntimeConfig, SpeculativeConfig, options_from
from lowlat.options.declaration import check_number, plain, shown
from lowlat.options.keywords import CallOptions, NamedSession, RuntimeOptions
from lowlat.options.model_names import display_name
from lowlat.options.request import SamplingParams, StepOutput

__all__ = ["Runtime"]

logger = logging.getLogger("lowlat.engine.runtime")

T = TypeVar("T")


class Runtime:
    """Decodes requests against one target, with speculation where a speculator is loaded.

    Use `Runtime.load`; as a context manager it closes itself. `generate`, `chat` and `stream`, and `agenerate`, `achat`
    and `astream` for asyncio, answer from any thread or task, several at once: the first such call starts a thread that
    owns the runtime from then on. `submit` and `step` are for a program that wants that loop for its own.
    `codec` is the tokenizer (None without one),
    `device_choice` says where it runs and why, `memory` what it holds there, `speculation_error` why a draft model is
    not used, `numerics` a digest of all that decides results' bits (16 hexadecimal digits, see
    `lowlat.engine.numerics`), `speculation_limits` the sizes of speculation that were loaded, by option
    (`SpeculativeConfig.check` reads them); `checks` refuses requests and may be asked by any thread, as may
    `grammars`, which compiles theirs.
    """

    def __init__(self, loaded: Loaded, config: RuntimeConfig) -> None:
        self.config = config
        self.directory = loaded.target.directory
        self.model_config, self.rank_config = loaded.target.config, loaded.rank_config
        self.ladder, self.executor, self.geometry = loaded.ladder, loaded.executor, loaded.geometry
        self.device_choice, self.memory = loaded.choice, loaded.memory
        self.speculation_error = loaded.speculation_error
        self.numerics = digest_of(numerics_of(loaded, config))
        self.speculator = loaded.geometry.speculator
        self.draft_config = None if self.speculator is None else self.speculator.draft_config
        self.codec = loaded.codec
        used = loaded.speculative
        self.num_speculative_tokens = depth = 0 if used is None else used.num_speculative_tokens
        self.simulated = self.geometry.simulated_acceptance is not None
        self.speculation_limits = loaded.speculation_limits
        self._tiers = make_tiers(loaded, config, self.numerics)
        space = host_space(self.executor, config.pause_gib, self.geometry.prefill_chunk // self.geometry.block_size)
        self.scheduler = make_scheduler(self.ladder, self.geometry, config, self._tiers, space)
        self.kvcache = self.scheduler.kvcache
        self._requests = Requests(loaded, config, self.scheduler, speculates=depth > 0)
        self.checks, self.grammars = self._requests.checks, self._requests.grammars
        self._whole = Unbroken()
        self._steps = Steps(loaded, config, self.scheduler, self._requests, self._whole, num_speculative_tokens=depth)
        self._sleep = Sleep(self.executor, self.kvcache, self._steps, self._whole)
        self._draft_directory = None if loaded.speculator is None else loaded.speculator.directory
        self._content_facts: ContentFacts | None = None
        self._closed = False
        self._process = os.getpid()
        self.driver: Driver | None = None
        self._starting, self._closing = threading.Lock(), threading.RLock()

    @classmethod
    def load(
        cls,
        model: str | Path | OpenedTarget,
        speculative: SpeculativeConfig | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        captured: Callable[[int, int], None] | None = None,
        downloaded: Callable[[int, int], None] | None = None,
        reserve: Callable[[str, int, int | None], None] | None = None,
        **options: Unpack[RuntimeOptions],
    ) -> Self:
        """Load a model and, where asked for, a speculator.

        model       a Hugging Face directory, or `ORG/NAME[@REVISION]` of a repository, fetched into the hub's
                    cache; or a target that was opened otherwise
        progress    called with bytes read and bytes in all
        captured    called with graphs captured and graphs in all, where the executor captures
        downloaded  called with bytes fetched and bytes in all, for each repository; None: huggingface_hub's own bars
        reserve     called before memory is taken, with the device's name and the bytes needed and free there: it may
                    wait until others have made way
        options     fields of RuntimeConfig: max_batch, max_context, dtype, device, ...
        Raises ConfigError for anything wrong with the directory, the draft model (under strict) or an option.
        """
        config = options_from(options)
        loaded = load(model, speculative, config, progress, captured, downloaded, reserve)
        try:
            runtime = cls(loaded, config)
        except BaseException:
            loaded.close()
            raise
        logger.info("numerics %s", runtime.numerics)
        return runtime

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]) -> Answer:
        """Answer a prompt, and return when the answer is whole: `runtime.generate("Once", max_tokens=32).text`.

        prompt   text, token ids, or a chat's messages: [{"role": "user", "content": "..."}, ...]
        params   how tokens are chosen; options given by name go before its fields
        options  the fields of SamplingParams by name (max_tokens, temperature, stop, seed, json_schema, ...), and
                 tool_choice, template_options, allow_special, cache_salt, timeout_s: see CallOptions
        Messages go through the model's chat template, with `tools` where there are any. Their answer is parsed
        (`Answer.reasoning`, `Answer.tool_calls`) unless parse="none" says otherwise, and may be as long as the context
        has room for, up to 4096 tokens, where neither params nor max_tokens is given; that of other prompts up to 256.
        Any thread may call, several at once; more than have a slot wait. Ctrl-C cancels the request.
        Raises RequestError for what cannot be served; StreamError, with the tokens that came, where the request fails,
        timeout_s passes or the runtime is closed meanwhile; DeviceError when the device has failed.
        """
        with self._stream(prompt, params, options, each=False) as stream:
            return stream.answer()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]) -> Stream:
        """Answer a prompt chunk by chunk: `for chunk in runtime.stream("Once"): print(chunk.text, end="")`.

        The request begins at once. Leaving the stream before its end cancels it; `Stream.answer` reads what is left and
        returns the whole. Arguments and errors are those of `generate`.
        """
        return self._stream(prompt, params, options, each=True)

    def chat(self, messages: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]) -> Answer:
        """Answer a chat: `runtime.chat("Who are you?").text`; `messages.append(answer.message)` goes on with it.

        messages  as in `generate`; a text alone is one message of the user
        The other arguments and errors are those of `generate`. `stream` takes messages, too.
        """
        return self.generate(_as_chat(messages), params, **options)

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> Answer:
        """Answer a prompt, in a coroutine; cancelling its task cancels the request. See `generate`."""
        async with self._astream(prompt, params, options, each=False) as stream:
            return await stream.answer()

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> AsyncStream:
        """Answer chunk by chunk, in a coroutine: `async for chunk in runtime.astream("Once")`. See `stream`."""
        return self._astream(prompt, params, options, each=True)

    async def achat(
        self, messages: Prompt, params: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> Answer:
        """Answer a chat, in a coroutine. See `chat`."""
        return await self.agenerate(_as_chat(messages), params, **options)

    def _stream(self, prompt: Prompt, params: SamplingParams | None, options: CallOptions, *, each: bool) -> Stream:
        driver = self._driven()
        return Stream(driver, prepare(self, prompt, params, options), options.get("timeout_s"), each=each)

    def _astream(
        self, prompt: Prompt, params: SamplingParams | None, options: CallOptions, *, each: bool
    ) -> AsyncStream:
        check_timeout(options.get("timeout_s"))
        return AsyncStream(
            self._driven(),
            partial(prepare, self, prompt, params, options),
            options.get("timeout_s"),
            quick=is_quick(prompt, params, options),
            each=each,
        )

    def _driven(self) -> Driver:
        """The thread that owns the runtime, started by the first call."""
        self._check_open()
        with self._starting:
            if self.driver is None:
                self._check_usable()
                if self.busy:
                    raise LowlatError(
                        "requests that were submitted by hand are under way; step until they end before generate, "
                        "stream or chat, or let these do all of it"
                    )
                self.driver = Driver(self)
            return self.driver

    def _check_by_hand(self, name: str) -> None:
        """Raise LowlatError for a call that the driver's thread alone may make."""
        self._check_open()
        if self.driver is not None and not self.driver.is_current and not self.driver.has_ended:
            raise LowlatError(
                f"{name}() is refused: since generate, stream or chat was called a thread of the runtime's own steps "
                "it; go on with these, or load a runtime that is stepped by hand"
            )

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
        self._check_by_hand("submit")
        self._check_usable()
        if self.asleep:
            raise RequestError("the runtime sleeps (Runtime.sleep), and takes no request before Runtime.wake")
        record, salt = self._session_of(session, cache_salt)
        request, scheduled = self._requests.open(prompt, params, request_id, allow_special, salt, record)
        with self._whole:
            self._requests.add(request, scheduled)
            self._steps.stop_outdated()
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
        self._check_by_hand("open_prompt")
        self._check_usable()
        if not isinstance(allow_special, bool):
            raise RequestError(f"allow_special must be true or false, got {shown(allow_special)}")
        if self.asleep:
            raise RequestError("the runtime sleeps (Runtime.sleep), and takes no request before Runtime.wake")
        record, salt = self._session_of(session, cache_salt)
        request, scheduled = self._requests.open_prompt(params, request_id, salt, max_prompt_tokens, record)
        with self._whole:
            self._steps.open(request, scheduled, self.config.pause_deadline_s)
        return OpenPrompt(self, request.request_id, allow_special=allow_special)

    @owned
    def grow_prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add token ids, which no later text can change, to an open prompt: see `OpenPrompt.append`."""
        self._check_usable()
        request = self._requests.find(request_id)
        with self._unless_refused():
            self._steps.grow(request, token_ids, self.config.pause_deadline_s)

    @owned
    def finish_prompt(self, request_id: str, token_ids: Sequence[int], *, speculative: bool = False) -> None:
        """End an open prompt with these token ids: see `OpenPrompt.finish`."""
        self._check_usable()
        request = self._requests.find(request_id)
        with self._unless_refused():
            self._steps.finish(request, token_ids, speculative=speculative)

    def _session_of(self, session: NamedSession | str | None, cache_salt: str) -> tuple[SessionRecord | None, str]:
        """The record of a session that a request names, and the salt that holds. Raises RequestError."""
        if session is None:
            return None, cache_salt
        if isinstance(session, Session):
            if cache_salt not in ("", session.cache_salt):
                raise RequestError(f"session {session.session_id!r} has a cache_salt of its own; leave cache_salt out")
            return session.record_of(self), session.cache_salt
        if not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt must be text, got {shown(cache_salt)}")
        name: Any = session
        return self.sessions.open(SessionKey(cache_salt, name)), cache_salt

    def session(self, session_id: str, *, cache_salt: str = "", ttl_s: float | None = None) -> Session:
        """Open a session, or find the one that lives under its id: `runtime.generate(text, session=session)`.

        session_id  1 to 128 printable characters
        cache_salt  as in `submit`; sessions of two salts are two, whatever their ids
        ttl_s       how long it lives after its last request; None: session_ttl_s. What it has read stays on the device,
                    and in the tiers of the cache, while other prefixes can go
        Any thread may call. Raises RequestError for an id or a time that is none.
        """
        self._check_open()
        return open_session(self, session_id, cache_salt, ttl_s)

    def load_session(
        self,
        path: str | Path,
        *,
        session_id: str | None = None,
        cache_salt: str = "",
        ttl_s: float | None = None,
        force: bool = False,
    ) -> Session:
        """Open a session that `Session.save` has written, here or in another process; it goes on where it ended.

        session_id  its name from here on; None: the one that it had
        force       take its tokens where its state is of no use here: of another model's files or `numerics`; they are
                    read again with the next request
        Raises SessionError, which says what is wrong: no session's file, torn or altered, another model's, or other
        numerics. RequestError for a name in use, or tokens that this model does not have.
        """
        self._check_open()
        return load_session(self, Path(path), session_id, cache_salt, ttl_s, force=force)

    def choices(
        self,
        prompt: Prompt,
        n: int,
        params: SamplingParams | None = None,
        *,
        best_of: int | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Answer]:
        """Answer a prompt n times, which is read once: the answers part where they begin.

        n        answers; each has a seed of its own, the first the one that was given
        best_of  answers that are made; the n likeliest by the mean logprob of their tokens are returned, the best first
        The other arguments and errors are those of `generate`; where one answer fails, the others are cancelled.
        """
        return answer_choices(self, prompt, n, best_of, params, options)

    @property
    def sessions(self) -> SessionBook:
        """The sessions that live; of the thread that steps."""
        return self._requests.sessions

    def fill_blocks(self) -> None:
        """Write to the device what was found for its blocks; for the thread that steps."""
        self._steps.fill_blocks()

    @owned
    def owned_call(self, what: Callable[[Runtime], T]) -> T:
        """Have something done by the runtime's owner, between two steps."""
        self._check_usable()
        return what(self)

    def content_facts(self) -> ContentFacts:
        """The facts that decide what the contents of chunks are, next to `numerics`."""
        if self._content_facts is None:
            self._content_facts = content_facts(self.directory, self._draft_directory, self.executor.mover.states)
        return self._content_facts

    @property
    def asleep(self) -> bool:
        """Whether `sleep` has given the device's memory back."""
        return not self._closed and self._sleep.asleep

    @owned
    def sleep(self) -> None:
        """Give the device's memory of weights, KV and scratch back, until `wake`; harmless when repeated.

        Weights go to pinned host memory, which they keep from then on: later sleeps copy nothing. Shared prefixes go to
        the tiers of the cache (host_cache_gib, cache_dir), and are found there after `wake`; without tiers they are
        lost. Graphs and their addresses stay. Requests are refused meanwhile.
        Raises ConfigError for a runtime without can_sleep; CapacityError while there are requests, or where the host
        has no memory for the weights: it stays awake then; DeviceError when the device has failed.
        """
        self._check_usable()
        if self._requests:
            raise CapacityError(f"{len(self._requests)} requests are not over: a runtime sleeps between requests")
        if self.sessions.num_files:
            raise CapacityError(f"{self.sessions.num_files} sessions are being saved: a runtime sleeps after that")
        self._sleep.sleep()

    @owned
    def wake(self) -> None:
        """Take the device's memory again, at the same addresses, with the weights; harmless when repeated.

        Raises CapacityError where others hold the device's memory: it stays asleep, and `wake` may be called again.
        DeviceError when the device has failed.
        """
        self._check_usable()
        self._sleep.wake()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to step for; where a step was broken off, requests that it left unfinished.

        Paused requests are not, nor is a prompt of which all that is known was read.
        """
        if self._closed:
            return False
        deadline = self._steps.deadline
        overdue = deadline is not None and time.monotonic() >= deadline
        return overdue or bool(self._requests.outputs) or self.scheduler.busy

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
        with self._whole:
            self._steps.end_overdue()
            if self.scheduler.busy and not self._requests.has_confirmed:
                self._steps.step(num_speculative_tokens, depth)
            return self._requests.take_outputs()

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
        with self._whole:
            self._steps.end(request, "cancelled")
            self._steps.stop_outdated()

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
        with self._unless_refused():
            return self._steps.pause(request, self.config.pause_deadline_s if deadline_s is None else deadline_s)

    @owned
    def resume(self, request_id: str) -> None:
        """Let a paused request have a slot again, before those of its priority that came after it.

        Raises RequestError for one that is not paused, or has ended.
        """
        self._check_usable()
        request = self._requests.find(request_id)
        with self._unless_refused():
            self._steps.resume(request)

    @contextmanager
    def _unless_refused(self) -> Iterator[None]:
        """A change that is made whole, or refused before it begins."""
        refused: LowlatError | None = None
        with self._whole:
            try:
                yield
            except (RequestError, CapacityError) as error:
                refused = error
        if refused is not None:
            raise refused

    @property
    def deadline(self) -> float | None:
        """The time of the monotonic clock at which a paused request is ended by the next step; None: there is none."""
        return self._steps.deadline

    @owned
    def set_draft_limit(self, request_id: str, max_draft_tokens: int | None) -> None:
        """Change how many draft tokens of a live request are verified in one step, from the next launched step on.

        max_draft_tokens   as in SamplingParams: None is as many as the bucket has, 0 none at all
        No token depends on it. Raises RequestError for an unknown or ended request, or a limit out of range.
        """
        self._check_usable()
        self._steps.limit_drafts(self._requests.limit_drafts(request_id, max_draft_tokens))

    @owned
    def metrics(self, request_id: str) -> RequestMetrics:
        """Figures of a live request or of one of the last thousand ended. Raises RequestError for others."""
        found = self._requests.metrics(request_id)
        is_live = request_id in self._requests
        return replace(found, finish_reason="error") if is_live and self._whole.failure else found

    @owned
    def perf(self) -> PerfCounters:
        """Return the launches of its programs, and its waits, copies and steps without drafts since the load."""
        self._check_open()
        return PerfCounters.of(self.executor.counts, self._steps.mailbox.num_copies, self._steps.published.undrafted)

    @owned
    def summary(self) -> dict[str, Any]:
        """Totals since the load, as JSON: blocks such as `eagle_speculation` only of what has run."""
        self._check_open()
        totals = self._requests.totals()
        return {
            **totals.to_dict(),
            "kv": self._kv_summary(),
            "perf": self.perf().to_dict(),
            "device": str(self.device_choice.device),
            "numerics": self.numerics,
            "paused": self._paused_summary(),
            "memory": [each.to_dict() for each in self.memory],
            **({"activations": "fp8"} if self.model_config.coded_rows else {}),
            **({} if self.speculator is None else {"speculator": self.speculator.report()}),
            **self._steps.report(totals.speculation),
            **self._sleep.report(),
        }

    def _paused_summary(self) -> dict[str, int]:
        """Requests that are paused, those that have decoded and have no slot, and the host memory that these take."""
        space = self.scheduler.space
        kept = {"num_without_slot": len(space.held), "host_bytes": space.num_bytes, "max_host_bytes": space.max_bytes}
        return {"num_paused": self.scheduler.num_paused, **kept}

    def _kv_summary(self) -> dict[str, Any]:
        """Blocks of the KV cache by state; those of other pools apart, by kind, where there are any."""
        found = {**asdict(self.kvcache.stats()), "cache_dtype": self.model_config.cache_dtype}
        if sessions := self.sessions.stats():
            found["sessions"] = sessions
        tiers = {} if self._tiers is None else {"tiers": self._tiers.stats()}
        return found | self.kvcache.pool_stats() | tiers

    @owned
    def slots(self) -> list[dict[str, Any]]:
        """The requests that have a slot, by slot, as JSON: phase, tokens of prompt and completion, and their bound."""
        return self._requests.describe()

    def adopt_thread(self) -> None:
        """Hand the runtime to the calling thread; the one before must be done with it. Makes its device current."""
        self._check_by_hand("adopt_thread")
        make_current(self.device_choice.device)

    def close(self) -> None:
        """Drop requests, buffers, KV and weights, and give their memory back; harmless when repeated.

        Calls that wait for an answer get a StreamError of the code "closed".
        """
        if os.getpid() != self._process:
            return  # all of it is the other process's
        with self._closing:  # threads that close at once: all return when it is closed
            if self._closed:
                return
            if self.driver is not None:
                self.driver.stop()
                make_current(self.device_choice.device)
            self._closed = True
            self._requests.close()
            self._steps.close()
            del self._steps, self._sleep  # their views of the executor's buffers go, too
            if self.codec is not None:
                self.codec.close()
            self.executor.close()  # the last: a device that has failed says so

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(
            "a Runtime cannot be copied or pickled: its weights and KV are a device's, and one thread steps it; load "
            "one in each process, or serve it (lowlat serve) and ask it with lowlat.ipc.Client"
        )

    def __repr__(self) -> str:
        name, depth = display_name(self.directory), self.num_speculative_tokens
        drafts = f", {self.speculator.method} S={depth}" if self.speculator is not None and depth else ""
        sizes = f"max_batch={self.config.max_batch}, max_context={self.config.max_context}"
        closed = ", closed" if self._closed else ""
        return f"Runtime({name!r}{drafts}, {sizes}, device={str(self.device_choice.device)!r}{closed})"

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        self._whole.check()

    def _depth(self, asked: int | None) -> int:
        depth = self.num_speculative_tokens if asked is None else plain(asked)
        if asked is None and self.speculator is None:
            return 0
        if self.config.is_strict and depth != self.num_speculative_tokens:
            raise ConfigError(f"perf_mode 'strict' decodes at S = {self.num_speculative_tokens} alone, got {depth}")
        check_depth(depth, self.ladder)
        return depth


def _as_chat(messages: Prompt) -> Prompt:
    """Messages, of which a text alone is the only one. Raises RequestError for a prompt that is no chat."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not is_chat(messages):
        raise RequestError(f"a chat takes messages or a text, got {shown(messages)}; generate takes token ids")
    return messages
