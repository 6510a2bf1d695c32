"""This module runs the steps of one runtime: it admits, prefills, launches ahead, and makes outputs from publications.

While no request joins or leaves, a step is launched before the step ahead of it has ended, or the device repeats steps
by itself. This changes no token: a step's effect on a slot does not depend on what the host does in between, and
publications for a slot that the host has given up are dropped.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from lowlat.engine.change_guard import ChangeGuard
from lowlat.engine.drafting.make import make_learner, make_proposer
from lowlat.engine.drafting.proposer import StepParts
from lowlat.engine.figures.perf import steps_by_width
from lowlat.engine.figures.published_steps import PublishedSteps, StepChecks
from lowlat.engine.figures.trace import Tracer
from lowlat.engine.launches.in_flight import Action, is_step_certain
from lowlat.engine.launches.launches import Launches, loop_of
from lowlat.engine.loading.loaded import Loaded
from lowlat.engine.mailbox.failed_checks import FailedCheck, FailedChecks
from lowlat.engine.mailbox.mailbox import Mailbox
from lowlat.engine.mailbox.publications import Entry, SlotPublication
from lowlat.engine.memory.kept_states import KeptStates
from lowlat.engine.metrics import SpeculativeDecodingStats
from lowlat.engine.requests.request import Request
from lowlat.engine.requests.requests import Requests
from lowlat.engine.scheduling.records import PrefillChunk
from lowlat.engine.scheduling.scheduler import Scheduler
from lowlat.engine.steps.cache_moves import CacheMoves
from lowlat.engine.steps.grammar_masks import GrammarMasks
from lowlat.engine.steps.slot_changes import SlotChanges
from lowlat.graphs import Bucket
from lowlat.options.runtime import RuntimeConfig
from lowlat.speculators.base import Speculator
from lowlat.step.variants import may_repeat

if TYPE_CHECKING:
    from lowlat.engine.figures.tile_counter import TileCounter

__all__ = ["Steps"]

logger = logging.getLogger("lowlat.engine.steps")

TIERS_WAIT_S = 0.005
TELL_HELD_UP_S = 60.0  # the least time between two log messages about a queue that waits for callers


class Steps:
    """Runs steps for the live requests, and appends their outputs to `requests.outputs`.

    mailbox    commands to the device, and its publications
    masks      the grammars of requests that decode
    launches   the launches in flight
    proposer   chooses the bucket of the next step, and which tokens of a publication are final
    published  counts and checks publications
    """

    def __init__(
        self,
        loaded: Loaded,
        config: RuntimeConfig,
        scheduler: Scheduler,
        requests: Requests,
        guard: ChangeGuard,
        *,
        num_speculative_tokens: int,
    ) -> None:
        geometry, vocab_size = loaded.geometry, loaded.target.config.vocab_size
        self._geometry, self._ladder, self._executor = geometry, loaded.ladder, loaded.executor
        self._scheduler, self._kvcache, self._requests, self._guard = scheduler, scheduler.kvcache, requests, guard
        self.mailbox = Mailbox(loaded.executor.state, geometry.max_rows - 1)
        self.masks = GrammarMasks(self.mailbox, loaded.executor, vocab_size)
        loop = loop_of(loaded.executor, wanted=config.device_loop)
        self.launches = Launches(loaded.executor, self.mailbox, loop, guard=guard)
        self._in_flight = self.launches.in_flight
        parts = StepParts(geometry, scheduler, self.mailbox, self.launches, requests.slots)
        self.proposer = make_proposer(loaded, parts)
        adaptive, speculates = loaded.ladder.adaptive, num_speculative_tokens > 0
        must_draft = speculates and not adaptive and _always_drafts(geometry.speculator)
        checks = StepChecks(geometry.max_rows - 1, vocab_size, must_draft=must_draft)
        self.published = PublishedSteps(checks if config.is_strict else None, adaptive=adaptive, speculating=speculates)
        self._failed_checks = FailedChecks(config.checked_kinds)
        self._tiles = _tile_counter(loaded) if config.count_tiles else None
        self._learner = make_learner(loaded)
        self._tracer = Tracer.from_config(config.traces)
        self.moves = CacheMoves(loaded.executor, geometry, scheduler.kvcache, self.launches)
        self.changes = SlotChanges(
            scheduler=scheduler,
            requests=requests,
            mailbox=self.mailbox,
            masks=self.masks,
            launches=self.launches,
            proposer=self.proposer,
            moves=self.moves,
            kept=KeptStates(loaded.executor, geometry.prefill_chunk // geometry.block_size),
        )
        num_ahead = geometry.overhang + (0 if geometry.partial is None else geometry.partial.buffer)
        scheduler.num_written = lambda request_id: len(requests[request_id].committed) + num_ahead
        self._owes_step = False  # whether a first token was returned, and no step has followed it yet
        self._tells_held_up_at = 0.0

    def step(self, num_speculative_tokens: int | None, depth: int) -> None:
        """Run `Runtime.step`, for a draft length with a bucket. Raises DeviceError when the device has failed."""
        ahead = num_speculative_tokens is None and self._executor.asynchronous and self._tracer is None
        outputs = self._requests.outputs
        num_before = len(outputs)
        while self._in_flight.under_way:
            self._advance(depth, ahead)
            if ahead and len(outputs) > num_before:
                return
        # From here on no launch is in flight: a request that joins now is in no step that was launched before.
        self.mailbox.bound_draft_lengths(0 if num_speculative_tokens is None else depth, depth)
        if not (self._owes_step and self._scheduler.num_active):
            entries = self._admit(depth)
            if entries:
                self._consume(entries, depth, ahead)
                self._owes_step = not self._in_flight.under_way
                return
        self._owes_step = False
        if self._scheduler.num_active:
            self._launch(*self.proposer.next_step(depth), ahead)
            self._advance(depth, ahead)

    def stop_outdated(self) -> None:
        """Ask a device loop to end if other work is wanted; the next `step` takes its publications."""
        bucket = self._in_flight.bucket
        if bucket is not None and self._in_flight.looping and self._wanted(bucket.num_speculative_tokens) != bucket:
            self.launches.stop()

    def settle(self) -> None:
        """Wait for all launches in flight, and take their outputs. Raises DeviceError when the device has failed."""
        while self._in_flight.under_way and (bucket := self._in_flight.bucket) is not None:
            self._advance(bucket.num_speculative_tokens, ahead=False)

    def report(self, speculation: SpeculativeDecodingStats | None) -> dict[str, Any]:
        """Figures of steps since the load, as JSON; a source of proposals has a block only if it has run.

        speculation  figures of all requests' drafts
        """
        return {
            **(self.proposer.report() | self.masks.report() | self._failed_checks.report()),
            **self.published.report(),
            **({} if self._tiles is None else self._tiles.report()),
            **({} if self._learner is None else self._learner.report()),
            **steps_by_width(self._ladder, self.published.undrafted, speculation),
        }

    def close(self) -> None:
        """Release work on the device that waits for the host, launch nothing more, and log the steps' figures."""
        if self.published.active.num_steps:
            logger.info("%s", self.published.describe())
        self.launches.close()
        self.masks.release()
        if self._kvcache.tiers is not None:
            self._kvcache.tiers.close()

    def _admit(self, depth: int) -> Sequence[Entry]:
        """Give free slots to waiting requests and run a chunk of prefill; returns a first token's entry, if any."""
        tiers = self._kvcache.tiers
        if tiers is not None and not (self._requests.outputs or self._scheduler.ready):
            with self._guard.repeatable_wait():
                # wait a moment for a chunk from a file, or for copies of blocks: no request decodes meanwhile
                tiers.wait(TIERS_WAIT_S)
        plan = self._scheduler.plan()
        for departure in plan.departed:
            self.changes.depart(departure)
        for request_id, moved in plan.moved_out:
            self.changes.kept.read_blocks(request_id, moved)
        self.moves.fill()
        for admission in plan.admitted:
            self.changes.arrive(admission)
        if plan.prefill is None:
            self.moves.keep()  # what an admission found is held until it was copied
            self.moves.clear()  # what copies held of a failed request's: the head may wait for it
            self._tell_held_up()
            return ()
        return self._prefill(plan.prefill, depth)

    def _tell_held_up(self) -> None:
        """Log that the head of the queue waits for memory of requests that wait for their callers, if it does."""
        if time.monotonic() >= self._tells_held_up_at and (found := self._scheduler.held_up()) is not None:
            self._tells_held_up_at = time.monotonic() + TELL_HELD_UP_S
            logger.warning("%s; resume, finish or cancel these", found)

    def _prefill(self, chunk: PrefillChunk, depth: int) -> Sequence[Entry]:
        request = self._requests[chunk.request_id]
        tokens = request.prompt[chunk.start : chunk.start + chunk.num_tokens]
        problem = self.masks.join(request) if chunk.last else None
        if problem is not None:
            self.changes.end(request, "error", error=problem, code="grammar")
            self.moves.keep()
            return ()
        request.commands = self._kvcache.commands(request.request_id)
        self.moves.clear()  # some of its own may have been a failed request's
        self.mailbox.prefill.write_chunk(request.slot, tokens, chunk.start, request.commands)
        self.proposer.prefill(request, chunk.start, len(tokens))
        if chunk.last:
            self.changes.join(request)
        self._scheduler.prefill_done(chunk)
        first = self._ladder.first_token(depth) if chunk.last else None
        size = self._geometry.prefill_size(chunk.num_tokens)
        num_top = request.params.prompt_logprobs
        passes = self.mailbox.prefill.ask_prompt(request.prompt, chunk.start, chunk.num_tokens, num_top)
        with self._scheduler.pace.timed(size / self._geometry.prefill_chunk):
            entries = self.launches.prefill(size, first, passes)
        self.moves.keep()
        if passes:
            found = self.mailbox.prefill.read_prompt(request.prompt, chunk.start, chunk.num_tokens, num_top)
            if (problem := request.add_prompt(found, chunk.start)) is not None:
                self.changes.end(request, "error", error=problem, code="not_finite")
        return entries

    def _launch(self, bucket: Bucket, max_steps: int | None, ahead: bool) -> None:
        self.changes.send_limits()
        meanwhile = None
        if self.masks and not self._executor.asynchronous:
            meanwhile = partial(self._fill_masks, bucket, amid=True)
        may_loop = ahead and not self._scheduler.has_work and not self.masks and may_repeat(bucket)
        self.launches.start(bucket, may_loop=may_loop, meanwhile=meanwhile, max_steps=max_steps)
        if self._learner is not None:
            self._learner.launched(bucket, loops=self._in_flight.in_loop)

    def _fill_masks(self, bucket: Bucket | None, *, amid: bool = False) -> None:
        """Do the host's part of a running step: fill the masks for which the draws of slots wait."""
        if self.masks and bucket is not None:
            with nullcontext() if amid else self._guard.repeatable_wait():
                failures = self.masks.fill(bucket.rows)
            for request, problem in failures:
                self.changes.end(request, "error", error=problem, code="grammar")

    def _advance(self, depth: int, ahead: bool) -> None:
        """Take the outputs of the next step in flight, or of all if other steps are wanted after them.

        If the step after them is certain, it is queued first. Then the device does not wait while the host waits, makes
        outputs, or is stopped. Before that the masks of the running step are filled, since it cannot end without them.
        """
        in_flight = self._in_flight
        self._fill_masks(in_flight.bucket)
        wanted = self._wanted(depth)
        action = in_flight.action(wanted, ahead=ahead)
        if action is Action.LAUNCH and wanted is not None and (max_steps := self._num_certain(depth)) != 0:
            self._launch(wanted, max_steps, ahead)
        drains = action is Action.DRAIN and not self.masks  # their masks are needed step by step
        self._consume(self.launches.drain() if drains else self.launches.wait(), depth, ahead)

    def _num_certain(self, depth: int) -> int | None:
        """Steps that are wanted after all launches in flight, whatever their results; None: any number."""
        bucket = self._in_flight.bucket
        longest = depth if bucket is None else max(depth, bucket.num_speculative_tokens)
        num_remaining = self._requests.num_remaining_after(self._in_flight.num_steps, longest)
        if not is_step_certain(num_remaining, queued=self._scheduler.num_queued > 0):
            return 0
        return self.proposer.num_certain(depth)

    def _wanted(self, depth: int) -> Bucket | None:
        """The bucket of the next step; None if no request decodes, or if one must join before."""
        scheduler = self._scheduler
        if not scheduler.num_active or scheduler.has_work:
            return None
        return self.proposer.bucket(depth, scheduler.num_active)

    def _consume(self, entries: Sequence[Entry], depth: int, ahead: bool) -> None:
        """Make the outputs of entries; if the step after them is certain, launch it first."""
        requests, in_flight = self._requests, self._in_flight
        for entry in entries:
            self.proposer.observe(entry)
        published: Iterable[list[SlotPublication]] = map(self.mailbox.read, entries)
        if self.masks:  # a launch waits for grammars, or a step that was launched: outputs are made after it
            published = list(published)
            self.masks.advance(publication for each in published for publication in each if not publication.failed)
        if ahead and not in_flight.under_way:
            self._launch_ahead(entries, depth)
        bucket = in_flight.bucket
        for entry, read in zip(entries, published, strict=True):
            publications = [p for p in read if requests.is_live(p.slot, entry.number)]
            if active := sum(requests.slots[p.slot].has_begun for p in publications):
                self.published.active.count(active)
            if self._tracer is not None and bucket is not None:
                self._tracer.step(bucket, publications, self._executor, self._kvcache)
            if self._tiles is not None:
                self._tiles.record(depth, [(requests.slots[each.slot], each) for each in publications])
            for publication in publications:
                self._apply(publication)
            for failure in entry.failed:
                if failure.slot < 0:
                    self._failed_checks.record(failure, None)
        if in_flight.under_way:
            self._fill_masks(in_flight.bucket)
        self.moves.clear()
        self.stop_outdated()

    def _launch_ahead(self, entries: Sequence[Entry], depth: int) -> None:
        """Launch the next step if its plan is known before the entries' outputs are made.

        The entries may hold a stop string. The step then runs for that slot, too, and its publication is dropped.
        """
        scheduler, is_live = self._scheduler, self._requests.is_live
        num_ended = sum(is_live(slot, entry.number) for entry in entries for slot in entry.ended)
        num_left = scheduler.num_active - num_ended
        max_steps = self.proposer.num_certain(depth, len(entries))
        if num_left and max_steps != 0 and not scheduler.has_work and not (num_ended and scheduler.num_queued):
            self._launch(self.proposer.bucket(depth, num_left), max_steps, ahead=True)

    def _apply(self, published: SlotPublication) -> None:
        request = self._requests.slots[published.slot]
        if published.failed is not None:
            self._drop(request, published.failed)
            return
        if (publication := self.proposer.committed(request, published)) is None:
            return
        self.published.record(request, publication)
        output = request.take(*self.masks.with_grammar_end(publication))
        if output.finish_reason is not None:
            if publication.finish_reason is None:
                self.mailbox.cancel(request.slot)  # a stop string: the device does not know yet
            self.changes.leave(request, poisoned=output.finish_reason == "error" and output.error_code == "not_finite")
            self._requests.end(request)
        self._requests.deliver(request, output)

    def _drop(self, request: Request, failure: FailedCheck) -> None:
        """End a request after a failed check, or let it go on without drafts."""
        text = self._failed_checks.record(failure, request.request_id)
        request.failed_checks += (failure.kind,)
        if not failure.ends:
            request.drafts = False
            self.changes.limit_drafts(request)  # a limit that was sent before the device set its own
            return
        output = request.output((), "error", error=text, error_code="check")
        self.changes.leave(request, poisoned=True)
        self._requests.end(request)
        self._requests.deliver(request, output)


def _always_drafts(speculator: Speculator | None) -> bool:
    """Whether each step makes drafts: with a draft model, except in wide steps. Drafts from text may be missing."""
    return speculator is not None and speculator.draft_config is not None and not speculator.wide_rows


def _tile_counter(loaded: Loaded) -> "TileCounter":
    """The counter of attention's tiles, for the option that needs it: it loads the kernels."""
    from lowlat.engine.figures.tile_counter import TileCounter

    return TileCounter(loaded.geometry, loaded.speculation.topologies, loaded.ladder, loaded.gpu)
