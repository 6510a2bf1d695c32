"""The requests of one runtime: what may be submitted, which requests are live, their outputs and their figures."""

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lowlat.engine.loading import Loaded
from lowlat.engine.metrics import MetricsBook, RequestMetrics, RuntimeMetrics
from lowlat.engine.request import Request
from lowlat.engine.request_checks import RequestChecks, check_call, check_name, encode_prompt
from lowlat.engine.scheduler import Admission, ScheduledRequest, Scheduler
from lowlat.errors import RequestError
from lowlat.kernels.reference.step.slot_record import MAX_STOPS
from lowlat.options.config import RuntimeConfig
from lowlat.options.request import SamplingParams, StepOutput
from lowlat.text.grammar.compiler import GrammarCompiler

__all__ = ["Requests"]


class Requests(Mapping[str, Request]):
    """The live requests by id; those that have ended leave their figures.

    slots     the live requests that have a slot, by slot, those that prefill among them
    outputs   what the next step returns first: ends that came between steps
    checks    refuses requests, and may be asked by any thread
    grammars  compiles those of requests, for any thread
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
        )
        self.grammars = GrammarCompiler(loaded.codec, self.checks.vocab_size, self.checks.eos_token_ids)
        self.slots: dict[int, Request] = {}
        self.outputs: list[StepOutput] = []
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
        """A live request. Raises RequestError for one that is unknown or has ended."""
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
    ) -> tuple[Request, ScheduledRequest]:
        """Make a request and its record for the scheduler; it is not live yet. See `Runtime.submit`.

        Raises RequestError for a prompt or parameter that cannot be served, CapacityError when the queue is full.
        """
        params = SamplingParams() if params is None else params
        check_call(params, request_id, allow_special, cache_salt)
        limits = self._max_context, params.max_tokens
        prompt_ids = self.checks.check(encode_prompt(self._codec, prompt, allow_special, *limits), params)
        name = self._new_id() if request_id is None else request_id
        if name in self._book:
            raise RequestError(f"request id {name!r:.80} was used by a request that has ended")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stop_ids = self.checks.stop_ids(params)
        request = Request(name, prompt_ids, params, seed, stop_ids, self._codec, self._speculator, self._simulated)
        request.grammar = self.grammars.open(params, prompt_ids, stop_ids)
        total, reads = len(prompt_ids) + params.max_tokens, params.prompt_logprobs is None
        scheduled = ScheduledRequest(name, prompt_ids, total, cache_salt, reads, params.priority)
        self._scheduler.check(scheduled)
        return request, scheduled

    def add(self, request: Request, scheduled: ScheduledRequest) -> None:
        """Queue a request that `open` has made."""
        self._scheduler.enqueue(scheduled)
        self._live[request.request_id] = request

    def place(self, admission: Admission) -> None:
        """Record that the scheduler gave a request a slot."""
        request = self._live[admission.request_id]
        if admission.resumes:
            request.slot, request.table = admission.slot, admission.table
        else:
            request.place(admission.slot, admission.table, admission.num_cached_tokens)
        self.slots[admission.slot] = request

    def displace(self, request: Request, *, decoded: bool) -> None:
        """Record that a request has left its slot, and will come back."""
        del self.slots[request.slot]
        request.displace(decoded=decoded)

    def is_live(self, slot: int, entry: int) -> bool:
        """Whether an entry is about the request in a slot: not about one before it, nor about one that has ended."""
        request = self.slots.get(slot)
        return request is not None and entry >= request.first_entry

    def rooms(self, num_steps: int, depth: int) -> list[int]:
        """Tokens that each request in a slot may still get, after so many steps that bring it the most they can."""
        return [request.room_after(num_steps, depth) for request in self.slots.values()]

    def end(self, request: Request) -> None:
        """Let a request that has left its slot be live no more; its figures stay."""
        del self._live[request.request_id]
        self._book.update(request.metrics())

    def metrics(self, request_id: str) -> RequestMetrics:
        """Figures of a live request or of one of the last thousand ended. Raises RequestError for others."""
        request = self._live.get(check_name(request_id))
        return self._book.get(request_id) if request is None else request.metrics()

    def totals(self) -> RuntimeMetrics:
        """Figures of all requests since the load."""
        for request in self._live.values():
            self._book.update(request.metrics())
        return self._book.totals()

    def limit_drafts(self, request_id: str, max_draft_tokens: int | None) -> Request:
        """Set a live request's limit of draft tokens. Raises RequestError for one that is not live, or a bad limit."""
        request = self.find(request_id)
        self.checks.check_drafts(max_draft_tokens)
        request.params = replace(request.params, max_draft_tokens=max_draft_tokens)
        return request

    def take_outputs(self) -> list[StepOutput]:
        """The outputs that requests have gained since this was called last."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def describe(self) -> list[dict[str, Any]]:
        """The requests that have a slot, by slot, as JSON."""
        phase = self._scheduler.phase
        return [request.describe(str(phase(request.request_id))) for _, request in sorted(self.slots.items())]

    def close(self) -> None:
        """Drop every live request; figures of those that have ended stay."""
        self._live.clear()
        self.slots.clear()
        self.grammars.close()

    def _new_id(self) -> str:
        known = (self._book, self._live)
        return next(name for n in self._ids if not any((name := f"request-{n}") in each for each in known))
