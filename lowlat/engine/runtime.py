"""The runtime: load once, submit requests, step until they end. Owns the weights, the buffers, the KV pool.

A prompt's first token comes out of prefill and is given to the caller at once; then every active slot gets a decode
step before anything else is prefilled. While nobody joins or leaves, a step is launched before the one ahead of it has
ended, or the device repeats steps by itself; that changes no token: what a step does to a slot depends on nothing that
the host does in between, and what is published for a slot that the host has given up is dropped. Not safe for use by
several threads: one thread owns a runtime.
"""

import itertools
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from lowlat.engine.grammar_masks import GrammarMasks
from lowlat.engine.loading import Loaded, load, make_scheduler
from lowlat.engine.mailbox import Entry, Mailbox, SlotPublication
from lowlat.engine.memory.refreshes import Refreshes
from lowlat.engine.metrics import MetricsBook, RequestMetrics
from lowlat.engine.perf import PerfCounters, PublishedSteps, StepChecks, steps_by_width
from lowlat.engine.request_checks import RequestChecks, Unbroken, check_call, check_depth, check_name, encode_prompt
from lowlat.engine.run_ahead import Launches, loop_of
from lowlat.engine.scheduler import Phase, PrefillChunk, ScheduledRequest
from lowlat.engine.session import Session
from lowlat.engine.trace import Tracer
from lowlat.errors import ConfigError, LowlatError, RequestError
from lowlat.executors.devices import make_current
from lowlat.graphs import Bucket
from lowlat.kernels.reference.step.slot_record import MAX_STOPS
from lowlat.models.target import OpenedTarget
from lowlat.options.config import RuntimeConfig, SpeculativeConfig, options_from
from lowlat.options.declaration import plain
from lowlat.options.request import ErrorCode, SamplingParams, StepOutput
from lowlat.text.grammar.compiler import GrammarCompiler

__all__ = ["Runtime"]

logger = logging.getLogger("lowlat.engine.runtime")


class Runtime:
    """Decodes requests against one target, with speculation where a speculator is loaded.

    Use `Runtime.load`; as a context manager it closes itself. `codec` is the tokenizer (None without one),
    `device_choice` says where it runs and why, `memory` what it holds there, `speculation_error` why a draft model is
    not used, `speculation_limits` the sizes of speculation that were loaded, by option (`SpeculativeConfig.check`
    reads them); `checks` refuses requests and may be asked by any thread, as may `grammars`, which compiles theirs.
    """

    def __init__(self, loaded: Loaded, config: RuntimeConfig, speculative: SpeculativeConfig | None) -> None:
        self.config = config
        self.directory = loaded.target.directory
        self.model_config, self.rank_config = loaded.target.config, loaded.rank_config
        self.ladder = loaded.ladder
        self.executor = loaded.executor
        self.device_choice, self.memory = loaded.choice, loaded.memory
        self.speculation_error = loaded.speculation_error
        self.speculator = loaded.geometry.speculator
        self.draft_config = None if self.speculator is None else self.speculator.draft_config
        self.codec = loaded.codec
        self.geometry = geometry = loaded.geometry
        used = None if self.speculator is None else speculative
        self.num_speculative_tokens = 0 if used is None else used.num_speculative_tokens
        self.simulated = geometry.simulated_acceptance is not None
        self.speculation_limits = _speculation_limits(loaded, used)
        self.scheduler = make_scheduler(self.ladder, geometry, config)
        self.kvcache = self.scheduler.kvcache
        self.checks = RequestChecks(
            max_context=config.max_context,
            vocab_size=loaded.target.config.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            has_text=self.codec is not None,
            max_stop_ids=MAX_STOPS,
            max_total_tokens=self.kvcache.max_total_tokens(geometry.overhang),
            block_size=geometry.block_size,
            greedy_only=config.is_strict,
            must_draft=config.is_strict and self.num_speculative_tokens > 0,
            has_prompts=geometry.prompt_logprobs,
            has_masks=loaded.takes_grammars,
        )
        self.grammars = GrammarCompiler(self.codec, self.checks.vocab_size, self.checks.eos_token_ids)
        self._mailbox = Mailbox(self.executor.state, geometry.max_rows - 1)
        self._masks = GrammarMasks(self._mailbox, self.executor, self.model_config.vocab_size)
        self._whole = Unbroken()
        loop = loop_of(self.executor, wanted=config.device_loop)
        self._launches = Launches(self.executor, self._mailbox, loop, whole=self._whole)
        self._tracer = Tracer.from_config(config.traces)
        self._book = MetricsBook()
        must_draft = self.num_speculative_tokens > 0 and self.draft_config is not None and not self.ladder.adaptive
        checks = StepChecks(geometry.max_rows - 1, self.model_config.vocab_size, must_draft=must_draft)
        self._published = PublishedSteps(checks if config.is_strict else None, adaptive=self.ladder.adaptive)
        self._sessions: dict[str, Session] = {}
        self._slots: dict[int, Session] = {}
        self._refreshes = Refreshes(geometry, self.scheduler, self._mailbox, self._launches, self._slots)
        self._pending: list[StepOutput] = []
        self._owes_step = False  # a first token was returned, and no step followed it yet
        self._limited: set[str] = set()  # requests whose limit of drafts was changed since the last launch
        self._ids = itertools.count()
        self._closed = False

    @classmethod
    def load(
        cls,
        model: str | Path | OpenedTarget,
        speculative: SpeculativeConfig | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        captured: Callable[[int, int], None] | None = None,
        downloaded: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Self:
        """Load a model and, where asked for, a speculator.

        model       a Hugging Face directory, or `ORG/NAME[@REVISION]` of a repository, fetched into the hub's
                    cache; or a target that was opened otherwise
        progress    called with bytes read and bytes in all
        captured    called with graphs captured and graphs in all, where the executor captures
        downloaded  called with bytes fetched and bytes in all, for each repository; None: huggingface_hub's own bars
        options     fields of RuntimeConfig: max_batch, max_context, dtype, device, ...
        Raises ConfigError for anything wrong with the directory, the draft model (under strict) or an option.
        """
        config = options_from(options)
        loaded = load(model, speculative, config, progress, captured, downloaded)
        try:
            return cls(loaded, config, speculative)
        except BaseException:
            loaded.close()
            raise

    def submit(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        allow_special: bool = False,
        cache_salt: str = "",
    ) -> str:
        """Queue a request and return its id.

        prompt         token ids [n], n >= 1, or text (needs a tokenizer)
        allow_special  special tokens that a text spells become these tokens; otherwise they stay text
        cache_salt     only requests of the same salt share cached prefixes: others cannot learn, by the time to the
                       first token, what was asked before
        Raises RequestError for a prompt or parameter that cannot be served, CapacityError when the queue is full.
        """
        self._check_usable()
        params = SamplingParams() if params is None else params
        check_call(params, request_id, allow_special, cache_salt)
        room = self.config.max_context, params.max_tokens
        prompt_ids = self.checks.check(encode_prompt(self.codec, prompt, allow_special, *room), params)
        name = self._new_id() if request_id is None else request_id
        if name in self._book:
            raise RequestError(f"request id {name!r:.80} was used by a request that has ended")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stop_ids = self.checks.stop_ids(params)
        session = Session(name, prompt_ids, params, seed, stop_ids, self.codec, self.speculator, self.simulated)
        session.grammar = self.grammars.open(params, prompt_ids, stop_ids)
        total, reads = len(prompt_ids) + params.max_tokens, params.prompt_logprobs is None
        scheduled = ScheduledRequest(name, prompt_ids, total, cache_salt, reads)
        self.scheduler.check(scheduled)
        with self._whole:
            self.scheduler.enqueue(scheduled)
            self._sessions[name] = session
            self._stop_outdated()
        return name

    @property
    def busy(self) -> bool:
        """Whether there is anything left to step for; where a step was broken off, requests that it left unfinished."""
        return not self._closed and (bool(self._pending) or self.scheduler.busy)

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
        """
        self._check_usable()
        depth = self._depth(num_speculative_tokens)
        with self._whole:
            if self.scheduler.busy:
                self._step(num_speculative_tokens, depth)
            outputs, self._pending = self._pending, []
            return outputs

    def _step(self, num_speculative_tokens: int | None, depth: int) -> None:
        """`step` of a depth that has a bucket; its outputs are pending."""
        ahead = num_speculative_tokens is None and self.executor.asynchronous and self._tracer is None
        num_ended = len(self._pending)
        while self._launches.under_way:
            self._go_on(depth, ahead)
            if ahead and len(self._pending) > num_ended:
                return
        # Nothing is under way from here on: whoever joins now is in no step that was launched before.
        self._mailbox.bound_widths(0 if num_speculative_tokens is None else depth, depth)
        if not (self._owes_step and self.scheduler.num_active):
            entries = self._admit(depth)
            if entries:
                self._take(entries, depth, ahead)
                self._owes_step = not self._launches.under_way
                return
        self._owes_step = False
        if self.scheduler.num_active:
            self._launch(*self._refreshes.next_step(depth), ahead)
            self._go_on(depth, ahead)

    def speculate(self, num_speculative_tokens: int) -> None:
        """Set the depth S of the steps from here on, 0 to the depth that was loaded, while there is no request.

        Raises ConfigError for a depth without a bucket, while requests are there, and in strict mode for no drafts
        where there is a speculator.
        """
        self._check_usable()
        check_depth(num_speculative_tokens, self.ladder)
        if self.scheduler.busy:
            raise ConfigError(f"the depth can become {num_speculative_tokens} between requests, and there are some")
        if self.config.is_strict and self.speculator is not None and num_speculative_tokens == 0:
            raise ConfigError("perf_mode 'strict' speculates in every step: num_speculative_tokens must be 1 or more")
        self.num_speculative_tokens = num_speculative_tokens

    def cancel(self, request_id: str) -> None:
        """End a request; its last output says "cancelled". Raises RequestError for an unknown or ended one."""
        self._check_usable()
        session = self._live(request_id)
        with self._whole:
            phase = self._leave(session)
            if phase is Phase.DECODING:
                self._mailbox.cancel(session.slot)
            self._pending.append(session.output((), "cancelled"))
            self._end(session)
            self._stop_outdated()

    def set_draft_limit(self, request_id: str, max_draft_tokens: int | None) -> None:
        """Change how many draft tokens of a live request are verified in one step, from the next launched step on.

        max_draft_tokens   as in SamplingParams: None is as many as the bucket has, 0 none at all
        No token depends on it. Raises RequestError for an unknown or ended request, or a limit out of range.
        """
        self._check_usable()
        session = self._live(request_id)
        self.checks.check_drafts(max_draft_tokens)
        session.params = replace(session.params, max_draft_tokens=max_draft_tokens)
        self._limited.add(request_id)

    def metrics(self, request_id: str) -> RequestMetrics:
        """Figures of a live request or of one of the last thousand ended. Raises RequestError for others."""
        session = self._sessions.get(check_name(request_id))
        if session is None:
            return self._book.get(request_id)
        found = session.metrics()
        return replace(found, finish_reason="error") if self._whole.failure else found

    def perf(self) -> PerfCounters:
        """Return the launches of its programs, and its waits, copies and steps without drafts since the load."""
        self._check_open()
        return PerfCounters.of(self.executor.counts, self._mailbox.num_copies, self._published.undrafted)

    def summary(self) -> dict[str, Any]:
        """Totals since the load, as JSON: blocks such as `eagle_speculation` and `specpv` only of what has run."""
        self._check_open()
        for session in self._sessions.values():
            self._book.update(session.metrics())
        return {
            **self._book.totals().to_dict(),
            "kv": self._kv_summary(),
            "perf": self.perf().to_dict(),
            "device": str(self.device_choice.device),
            "memory": [each.to_dict() for each in self.memory],
            **({} if self.speculator is None else {"speculator": self.speculator.report()}),
            **(self._refreshes.report() | self._masks.report()),
            **self._published.report(speculating=self.num_speculative_tokens > 0),
            **steps_by_width(self.ladder, self._published.undrafted, self._book.totals().speculation),
        }

    def _kv_summary(self) -> dict[str, Any]:
        """Blocks of the KV cache by state; those of layers of windows apart, where there are any."""
        windows = self.kvcache.pool_stats()
        found = {**asdict(self.kvcache.stats()), "cache_dtype": self.model_config.cache_dtype}
        return {**found, "windows": windows} if windows else found

    def slots(self) -> list[dict[str, Any]]:
        """The requests that have a slot, by slot, as JSON: phase, tokens of prompt and completion, and their bound."""
        phase = self.scheduler.phase
        return [session.describe(str(phase(session.request_id))) for _, session in sorted(self._slots.items())]

    def adopt_thread(self) -> None:
        """Hand the runtime to the calling thread; the one before must be done with it. Makes its device current."""
        make_current(self.device_choice.device)

    def close(self) -> None:
        """Drop requests, buffers, KV and weights, and give their memory back; harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        if self._published.active.num_steps:
            logger.info("%s", self._published.told())
        self._sessions.clear()
        self._slots.clear()
        self._launches.stop()
        self._masks.release()
        del self._refreshes, self._launches, self._masks, self._mailbox  # their views of the executor's buffers go, too
        self.grammars.close()
        if self.codec is not None:
            self.codec.close()
        self.executor.close()  # the last: a device that has failed says so

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise LowlatError("the runtime is closed")

    def _check_usable(self) -> None:
        """Raise LowlatError for a closed runtime, DeviceError for one whose step, or other change, was broken off."""
        self._check_open()
        self._whole.check()

    def _live(self, request_id: str) -> Session:
        session = self._sessions.get(check_name(request_id))
        if session is None:
            raise RequestError(f"request {request_id!r} is unknown or has ended")
        return session

    def _new_id(self) -> str:
        known = (self._book, self._sessions)
        return next(name for n in self._ids if not any((name := f"request-{n}") in each for each in known))

    def _depth(self, asked: int | None) -> int:
        depth = self.num_speculative_tokens if asked is None else plain(asked)
        if asked is None and self.speculator is None:
            return 0
        if self.config.is_strict and depth != self.num_speculative_tokens:
            raise ConfigError(f"perf_mode 'strict' decodes at S = {self.num_speculative_tokens} alone, got {depth}")
        check_depth(depth, self.ladder)
        return depth

    def _admit(self, depth: int) -> Sequence[Entry]:
        """Give free slots to who waits and run a chunk of prefill; returns the entry of a first token, if one came."""
        plan = self.scheduler.plan()
        for admission in plan.admitted:
            session = self._sessions[admission.request_id]
            session.place(admission.slot, admission.table, admission.num_cached_tokens)
            self._slots[admission.slot] = session
        return () if plan.prefill is None else self._prefill(plan.prefill, depth)

    def _prefill(self, chunk: PrefillChunk, depth: int) -> Sequence[Entry]:
        session = self._sessions[chunk.request_id]
        tokens = session.prompt[chunk.start : chunk.start + chunk.num_tokens]
        problem = self._masks.join(session) if chunk.last else None
        if problem is not None:
            self._fail(session, problem)
            return ()
        session.window_tables = self.kvcache.tables(session.request_id)
        self._clear_blocks()  # some of its own may have been a failed request's
        self._refreshes.prefill(session, tokens, chunk.start)
        if chunk.last:
            self._join(session)
        self.scheduler.prefill_done(chunk)
        first = self.ladder.first_token(depth) if chunk.last else None
        size = self.geometry.prefill_size(chunk.num_tokens)
        own = (session.prompt, chunk.start, chunk.num_tokens, session.params.prompt_logprobs)
        passes = self._mailbox.ask_prompt(*own)
        with self.scheduler.pace.timed(size / self.geometry.prefill_chunk):
            entries = self._launches.prefill(size, first, passes)
        if passes and (problem := session.add_prompt(self._mailbox.read_prompt(*own), chunk.start)) is not None:
            self._fail(session, problem, "not_finite")
        return entries

    def _join(self, session: Session) -> None:
        max_length = len(session.prompt) + session.params.max_tokens
        own = (session.table, max_length, session.params, session.seed, session.stop_ids)
        self._mailbox.join(session.slot, session.prompt, *own, has_grammar=session.grammar is not None)
        session.joined(self._mailbox.num_seen)

    def _launch(self, bucket: Bucket, most: int | None, ahead: bool) -> None:
        for name in self._limited & self._sessions.keys():
            if self.scheduler.phase(name) is Phase.DECODING:  # others bring their limit along when they join
                session = self._sessions[name]
                self._mailbox.set_draft_limit(session.slot, session.params.max_draft_tokens)
        self._limited.clear()
        meanwhile = partial(self._fill_masks, amid=True) if self._masks and not self.executor.asynchronous else None
        may_loop = ahead and not self.scheduler.has_work and not self._masks and not bucket.verifies
        self._launches.start(bucket, may_loop=may_loop, meanwhile=meanwhile, most=most)

    def _fill_masks(self, *, amid: bool = False) -> None:
        """The host's part of the step that runs, or that it is amid: the masks that its slots' draws wait for."""
        if self._masks and self._launches.bucket is not None:
            with nullcontext() if amid else self._whole.waiting():
                failures = self._masks.fill(self._launches.bucket.rows)
            for session, problem in failures:
                self._fail(session, problem)

    def _fail(self, session: Session, problem: str, code: ErrorCode = "grammar") -> None:
        """End a request with an error; its last output comes with the next step's."""
        if self._leave(session, poisoned=code == "not_finite") is Phase.DECODING:
            self._mailbox.cancel(session.slot)
        self._pending.append(session.output((), "error", error=problem, error_code=code))
        self._end(session)

    def _go_on(self, depth: int, ahead: bool) -> None:
        """Take the outputs of what is under way: of the next step, or of all where others are wanted from now on.

        What follows is queued first, where it is certain: then the device does not wait while the host waits, makes
        outputs, or stands still. The masks of what runs come first: nothing ends without them.
        """
        launches = self._launches
        self._fill_masks()
        last = not ahead or (launches.in_loop and not self._fits(depth))
        if not last and self._is_certain(depth) and (most := self._refreshes.num_certain(depth)) != 0:
            self._launch(self.scheduler.choose_bucket(depth), most, ahead)
        self._take(launches.drain() if last and not self._masks else launches.wait(), depth, ahead)

    def _is_certain(self, depth: int) -> bool:
        """Whether a step is wanted behind all that is under way, whatever that brings.

        It is not where all requests may have ended by their length then, or one has and somebody waits for its slot. A
        stop id or string cannot be foreseen: where it ends the last request, one step is run for nobody.
        """
        scheduler, launches = self.scheduler, self._launches
        if scheduler.has_work or not scheduler.num_active or not launches.has_room(scheduler.choose_bucket(depth)):
            return False
        rooms = [session.room_after(launches.num_under_way, depth) for session in self._slots.values()]
        return max(rooms) > 0 and (min(rooms) > 0 or not scheduler.num_queued)

    def _take(self, entries: Sequence[Entry], depth: int, ahead: bool) -> None:
        """Make the outputs of entries; where the step after them is certain, it is launched first."""
        published: Iterable[list[SlotPublication]] = map(self._mailbox.read, entries)
        if self._masks:  # a launch waits for grammars, or a step that was launched: outputs are made behind it
            published = list(published)
            self._masks.advance(publication for each in published for publication in each)
        if ahead and not self._launches.under_way:
            self._launch_ahead(entries, depth)
        bucket = self._launches.bucket
        for entry, read in zip(entries, published, strict=True):
            publications = [p for p in read if self._is_live(p.slot, entry.number)]
            if active := sum(self._slots[p.slot].has_begun for p in publications):
                self._published.active.count(active)
            if self._tracer is not None and bucket is not None:
                self._tracer.step(bucket, publications, self.executor, self.kvcache)
            self._pending.extend(filter(None, map(self._apply, publications)))
        if self._launches.under_way:
            self._fill_masks()
        self._clear_blocks()
        self._stop_outdated()

    def _launch_ahead(self, entries: Sequence[Entry], depth: int) -> None:
        """Launch the next step if its plan is known before the entries' outputs are made.

        A stop string that they hold is not known yet: the step then runs for that slot, too, and its share is dropped.
        """
        scheduler = self.scheduler
        num_ended = sum(self._is_live(slot, entry.number) for entry in entries for slot in entry.ended)
        num_left = scheduler.num_active - num_ended
        most = self._refreshes.num_certain(depth, len(entries))
        if num_left and most != 0 and not scheduler.has_work and not (num_ended and scheduler.num_queued):
            self._launch(self.ladder.choose(num_left, depth), most, ahead=True)

    def _is_live(self, slot: int, entry: int) -> bool:
        """Whether an entry is about the session in a slot: not about one before it, nor about one that has ended."""
        session = self._slots.get(slot)
        return session is not None and entry >= session.first_entry

    def _fits(self, depth: int) -> bool:
        """Whether one more step like the last is what is wanted now."""
        scheduler = self.scheduler
        decodes = scheduler.num_active > 0 and not scheduler.has_work
        return decodes and scheduler.choose_bucket(depth) == self._launches.bucket

    def _stop_outdated(self) -> None:
        """Ask a loop to end where something else is wanted now; the next `step` takes what it published."""
        launches = self._launches
        if launches.looping and launches.bucket and not self._fits(launches.bucket.num_speculative_tokens):
            launches.stop()

    def _apply(self, published: SlotPublication) -> StepOutput | None:
        session = self._slots[published.slot]
        if (publication := self._refreshes.judge(session, published)) is None:
            return None
        self._published.see(session, publication, speculating=self.num_speculative_tokens > 0)
        self._refreshes.count_step(session)
        output = session.take(*self._masks.judge(publication))
        if output.finish_reason is not None:
            if publication.finish_reason is None:
                self._mailbox.cancel(session.slot)  # a stop string: the device does not know yet
            self._leave(session, poisoned=output.finish_reason == "error" and output.error_code == "not_finite")
            self._end(session)
        return output

    def _leave(self, session: Session, *, poisoned: bool = False) -> Phase:
        # Steps under way may still write to its blocks. Others get them only in a later prefill or step, and all of
        # these run on one stream, one after the other; what is shared lies before the positions that are written.
        committed, written = session.committed, session.num_written
        phase = self.scheduler.cancel(session.request_id, committed, num_written=written, poisoned=poisoned)
        if phase is not Phase.QUEUED:
            del self._slots[session.slot]
            self._masks.leave(session.slot)
        if not (self._masks and self._launches.under_way):  # else `_take` does, when what is under way has its masks
            self._clear_blocks()
        return phase

    def _clear_blocks(self) -> None:
        """Zero the blocks of failed requests."""
        self._launches.clear_blocks(self.kvcache.take_blocks_to_clear())
        for pool, blocks in self.kvcache.take_pool_blocks_to_clear().items():
            self._launches.clear_blocks(blocks, pool)

    def _end(self, session: Session) -> None:
        del self._sessions[session.request_id]
        self._book.update(session.metrics())


def _speculation_limits(loaded: Loaded, used: SpeculativeConfig | None) -> dict[str, Any]:
    """The sizes of speculation, by option; empty where there is none."""
    if used is None:
        return {}
    draft = None if loaded.geometry.speculator is None else loaded.geometry.speculator.draft_config
    boundaries = None if draft is None else draft.capture_boundaries
    return {"method": used.method, **loaded.topologies[max(loaded.topologies)].limits, "capture_layers": boundaries}
