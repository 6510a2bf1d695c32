"""This module keeps the requests of one runtime: the live ones, their outputs and their metrics."""

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lowlat.engine.loading.loaded import Loaded
from lowlat.engine.metrics import MetricsBook, RequestMetrics, RuntimeMetrics
from lowlat.engine.requests.checks import RequestChecks, check_call, check_name, encode_prompt, encode_texts
from lowlat.engine.requests.deadlines import Deadlines
from lowlat.engine.requests.request import Opening, Request
from lowlat.engine.scheduling.records import Admission, ScheduledRequest
from lowlat.engine.scheduling.scheduler import Scheduler
from lowlat.engine.sessions.book import SessionBook, SessionRecord
from lowlat.errors import RequestError
from lowlat.kernels.reference.step.slot_record import MAX_STOPS
from lowlat.options.declaration import check_integer
from lowlat.options.request import SamplingParams, StepOutput
from lowlat.options.runtime import RuntimeConfig
from lowlat.text.grammar.compiler import GrammarCompiler

__all__ = ["Requests"]


class Requests(Mapping[str, Request]):
    """Maps ids to live requests; the metrics of ended ones are kept.

    slots          the live requests that have a slot, by slot, prefilling ones included
    outputs        what the next step returns first, such as ends between steps
    has_confirmed  whether outputs that were held back have been released: the next step returns at once
    checks         refuses requests; any thread may use it
    grammars       compiles requests' grammars; any thread may use it
    sessions       the live sessions
    deadlines      of requests that wait for their caller
    """

    def __init__(self, loaded: Loaded, config: RuntimeConfig, scheduler: Scheduler, *, speculates: bool) -> None:
        geometry = loaded.geometry
        self._codec, self._speculator = loaded.codec, geometry.speculator
        self._simulated = geometry.simulated_acceptance is not None
        self._max_context, self._scheduler = config.max_context, scheduler
        self.checks = RequestChecks(
            max_context=config.max_context,
            vocab_size=loaded.target.config.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            has_text=loaded.codec is not None,
            max_stop_ids=MAX_STOPS,
            max_total_tokens=scheduler.kvcache.max_total_tokens(geometry.overhang),
            block_size=geometry.block_size,
            greedy_only=config.is_strict,
            must_draft=config.is_strict and speculates,
            has_prompts=geometry.prompt_logprobs,
            has_masks=loaded.takes_grammars,
            num_text_tokens=geometry.num_text_tokens,
        )
        self.sessions = SessionBook(scheduler.kvcache, config.session_ttl_s)
        self.grammars = GrammarCompiler(loaded.codec, self.checks.vocab_size, self.checks.eos_token_ids)
        self.slots: dict[int, Request] = {}
        self.outputs: list[StepOutput] = []
        self.has_confirmed = False
        self.deadlines = Deadlines()
        self._live: dict[str, Request] = {}
        self._book = MetricsBook()
        self._ids = itertools.count()

    def __getitem__(self, request_id: str) -> Request:
        return self._live[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def find(self, request_id: str) -> Request:
        """Find a live request. Raises RequestError for one that is unknown or has ended."""
        request = self._live.get(check_name(request_id))
        if request is None:
            raise RequestError(f"request {request_id!r} is unknown or has ended")
        return request

    def open(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams | None,
        request_id: str | None,
        allow_special: bool,
        cache_salt: str,
        session: SessionRecord | None = None,
    ) -> tuple[Request, ScheduledRequest]:
        """Make a request and its record for the scheduler; it is not live yet. See `Runtime.submit`.

        Raises RequestError for a prompt or parameter that cannot be served, CapacityError when the queue is full.
        """
        params = self._settled(params, request_id, allow_special, cache_salt)
        limits = self._max_context, params.max_tokens
        prompt_ids = self.checks.check(encode_prompt(self._codec, prompt, allow_special, *limits), params)
        request = self._made(self._named(request_id), prompt_ids, params, session)
        request.grammar = self.grammars.open(params, prompt_ids, request.stop_ids)
        scheduled = _scheduled(request, len(prompt_ids), cache_salt)
        request.draft_texts = self._joined(params, prompt_ids, session)
        self._scheduler.check(scheduled)
        return request, scheduled

    def _settled(
        self, params: SamplingParams | None, request_id: str | None, allow_special: bool, cache_salt: str
    ) -> SamplingParams:
        """Check a call; returns its parameters, with texts to draft from as token ids. Raises RequestError."""
        params = SamplingParams() if params is None else params
        check_call(params, request_id, allow_special, cache_salt)
        self.checks.check_texts(params)
        return encode_texts(self._codec, params)

    def _joined(self, params: SamplingParams, prompt: Sequence[int], session: SessionRecord | None) -> tuple[int, ...]:
        """Join the texts that a request drafts from besides its own, with -1 after each.

        They are the texts that it names, then earlier answers of its session. A text that exceeds the remaining
        capacity keeps its end.
        """
        found: list[int] = []
        answers = () if session is None or not self.checks.num_text_tokens else session.answers_beside(prompt)
        for text in (*params.draft_texts, *answers):
            most = self.checks.num_text_tokens - len(found) - 1
            if most > 0 and not isinstance(text, str):
                found += (*text[-most:], -1)
        return tuple(found)

    def open_prompt(
        self,
        params: SamplingParams | None,
        request_id: str | None,
        allow_special: bool,
        cache_salt: str,
        max_prompt_tokens: int | None,
        session: SessionRecord | None = None,
    ) -> tuple[Request, ScheduledRequest]:
        """Do as `open` for a request whose prompt is still to come. See `Runtime.open_prompt`."""
        params = self._settled(params, request_id, allow_special, cache_salt)
        most = min(self._max_context, self.checks.max_total_tokens) - params.max_tokens
        if max_prompt_tokens is not None:
            check_integer("max_prompt_tokens", max_prompt_tokens, 1, max(1, most), RequestError)
            most = max_prompt_tokens
        self.checks.check((0,), params)
        ids: list[int] = []
        request = self._made(self._named(request_id), ids, params, session)
        scheduled = _scheduled(request, most, cache_salt)
        self._scheduler.check(scheduled, is_open=True)
        request.opening, request.committed = Opening(-1, scheduled, most), ids
        return request, scheduled

    def _made(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        session: SessionRecord | None,
        seed: int | None = None,
    ) -> Request:
        """Make a request; its seed is the given one, or its parameters', or a new one."""
        seed = params.seed if seed is None else seed
        seed = secrets.randbits(63) if seed is None else seed
        stop_ids = self.checks.stop_ids(params)
        made = Request(name, prompt, params, seed, stop_ids, self._codec, self._speculator, self._simulated)
        made.session = session
        return made

    def begin(self, request: Request, *, speculative: bool) -> Request:
        """Replace an open request by one with its complete prompt, whose metrics begin here.

        Raises RequestError for a grammar that cannot begin.
        """
        begun = self._made(request.request_id, request.prompt, request.params, request.session, request.seed)
        begun.grammar = self.grammars.open(begun.params, tuple(begun.prompt), begun.stop_ids)
        begun.opening = request.opening if speculative else None
        begun.draft_texts = self._joined(begun.params, begun.prompt, begun.session)
        begun.take_over_from(request)
        self._replace(begun)
        return begun

    def reopen(self, request: Request, opening: Opening, ids: list[int]) -> ScheduledRequest:
        """Reopen a prompt that was finished speculatively; nothing of the answer is left."""
        again = self._made(request.request_id, ids, request.params, request.session, request.seed)
        scheduled = replace(opening.scheduled, prompt_token_ids=ids)
        again.opening, again.committed = Opening(opening.arrival, scheduled, opening.max_prompt, len(ids)), ids
        again.undo_trial(request)
        self._live[again.request_id] = again
        return scheduled

    def _replace(self, request: Request) -> None:
        self._live[request.request_id] = request
        if request.slot >= 0:
            self.slots[request.slot] = request

    def deliver(self, request: Request, output: StepOutput) -> None:
        """Add an output, or hold it back while the request's prompt may still go on."""
        if request.opening is not None and request.opening.is_speculative:
            request.withheld.append(output)
        else:
            self.outputs.append(output)

    def confirm(self, request: Request) -> None:
        """Release the outputs of a request that was finished speculatively: its prompt is complete."""
        request.opening = None
        self.has_confirmed = bool(request.withheld)
        self.outputs.extend(request.withheld)
        request.withheld.clear()
        if request.has_left:
            self.end(request)

    def add(self, request: Request, scheduled: ScheduledRequest) -> None:
        """Queue a request that `open` has made."""
        opening = request.opening
        self._scheduler.enqueue(scheduled, is_open=opening is not None)
        if opening is not None:
            opening.arrival = self._scheduler.arrival(request.request_id)
        self._live[request.request_id] = request
        if request.session is not None:
            self.sessions.begin(request.session)

    def place(self, admission: Admission) -> None:
        """Record that the scheduler gave a request a slot."""
        request = self._live[admission.request_id]
        if admission.resumes:
            request.slot, request.table = admission.slot, admission.table
        else:
            request.place(admission.slot, admission.table, admission.num_cached_tokens)
        self.slots[admission.slot] = request

    def displace(self, request: Request, *, decoded: bool) -> None:
        """Record that a request has left its slot, and will get one again."""
        del self.slots[request.slot]
        request.displace(decoded=decoded)

    def is_live(self, slot: int, entry: int) -> bool:
        """Whether an entry is about the live request in a slot, not about an earlier or ended one."""
        request = self.slots.get(slot)
        return request is not None and entry >= request.first_entry

    def num_remaining_after(self, num_steps: int, depth: int) -> list[int]:
        """Tokens that each request in a slot may still get after `num_steps` steps that bring the most they can."""
        return [request.num_remaining_after(num_steps, depth) for request in self.slots.values()]

    def end(self, request: Request) -> None:
        """Remove a request that has left its slot from the live ones; its metrics stay.

        A request whose prompt may still go on stays live until the prompt is confirmed or grows.
        """
        request.has_left = True
        if request.opening is not None and request.opening.is_speculative:
            return
        del self._live[request.request_id]
        self.deadlines.drop(request.request_id)
        self._book.update(request.metrics())
        if request.session is not None:
            tokens = tuple(request.committed) if request.finish_reason in ("stop", "length") else None
            self.sessions.finish(request.session, tokens, request.seed, len(request.prompt))

    def metrics(self, request_id: str) -> RequestMetrics:
        """Metrics of a live request or of one of the last thousand ended. Raises RequestError for others."""
        request = self._live.get(check_name(request_id))
        return self._book.get(request_id) if request is None else request.metrics()

    def totals(self) -> RuntimeMetrics:
        """Metrics of all requests since the load."""
        for request in self._live.values():
            self._book.update(request.metrics())
        return self._book.totals()

    def limit_drafts(self, request_id: str, max_draft_tokens: int | None) -> Request:
        """Set a live request's limit of draft tokens. Raises RequestError for one that is not live, or a bad limit."""
        request = self.find(request_id)
        self.checks.check_drafts(max_draft_tokens)
        request.params = replace(request.params, max_draft_tokens=max_draft_tokens)
        return request

    def has_last_output(self, request_id: str) -> bool:
        """Whether the output that ends a request has not been taken yet."""
        return any(each.request_id == request_id and each.finish_reason is not None for each in self.outputs)

    def take_outputs(self) -> list[StepOutput]:
        """Take the outputs added since the last call."""
        outputs, self.outputs = self.outputs, []
        self.has_confirmed = False
        return outputs

    def describe(self) -> list[dict[str, Any]]:
        """The requests that have a slot, by slot, as JSON; the phase of one whose prompt is still to come is "open"."""
        scheduler, names = self._scheduler, [(each, each.request_id) for _, each in sorted(self.slots.items())]
        phases = ["open" if scheduler.is_open(name) else str(scheduler.phase(name)) for _, name in names]
        return [request.describe(phase) for (request, _), phase in zip(names, phases, strict=True)]

    def close(self) -> None:
        """Drop all live requests; the metrics of ended ones stay."""
        self._live.clear()
        self.slots.clear()
        self.grammars.close()

    def _named(self, request_id: str | None) -> str:
        name = self._new_id() if request_id is None else request_id
        if name in self._book:
            raise RequestError(f"request id {name!r:.80} was used by a request that has ended")
        return name

    def _new_id(self) -> str:
        known = (self._book, self._live)
        return next(name for n in self._ids if not any((name := f"request-{n}") in each for each in known))


def _scheduled(request: Request, num_prompt: int, cache_salt: str) -> ScheduledRequest:
    """Make the scheduler's record of a request; its prompt has at most `num_prompt` tokens."""
    params, session = request.params, request.session
    return ScheduledRequest(
        request.request_id, request.prompt, num_prompt + params.max_tokens, cache_salt,
        reads_cache=params.prompt_logprobs is None, owner=None if session is None else session.key,
        priority=params.priority,
    )  # fmt: skip
