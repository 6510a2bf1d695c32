"""This module changes the request of a slot when one joins, leaves or ends, and informs all parts that depend on it."""

from lowlat.engine.drafting.proposer import Proposer
from lowlat.engine.launches.launches import Launches
from lowlat.engine.mailbox.mailbox import Mailbox
from lowlat.engine.memory.kept_states import KeptStates
from lowlat.engine.requests.request import Request
from lowlat.engine.requests.requests import Requests
from lowlat.engine.scheduling.records import Admission, Departure, Phase
from lowlat.engine.scheduling.scheduler import Scheduler
from lowlat.engine.steps.cache_moves import CacheMoves
from lowlat.engine.steps.grammar_masks import GrammarMasks
from lowlat.errors import LowlatError
from lowlat.options.request import ErrorCode, FinishReason

__all__ = ["SlotChanges"]


class SlotChanges:
    """Makes these changes for the slots of one runtime.

    kept  has the states of requests without a slot
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        requests: Requests,
        mailbox: Mailbox,
        masks: GrammarMasks,
        launches: Launches,
        proposer: Proposer,
        moves: CacheMoves,
        kept: KeptStates,
    ) -> None:
        self._scheduler, self._requests, self._mailbox, self._masks = scheduler, requests, mailbox, masks
        self._in_flight, self._proposer, self._moves = launches.in_flight, proposer, moves
        self.kept = kept
        self._proposed: dict[str, object] = {}  # what the proposer keeps of requests without a slot
        self._limited: set[str] = set()  # requests whose draft limit has changed since the last launch

    def join(self, request: Request) -> None:
        """Let a request decode in its slot; prefill is about to produce its first token."""
        self._mailbox.join(
            request.slot,
            request.prompt,
            request.table,
            len(request.prompt) + request.params.max_tokens,
            request.params,
            request.seed,
            request.stop_ids,
            has_grammar=request.grammar is not None,
        )
        self._mailbox.name_texts(request.slot, request.draft_texts)
        request.first_entry = self._mailbox.num_seen

    def depart(self, departure: Departure) -> None:
        """Keep the state of a request that loses its slot. No launch may be in flight."""
        request = self._requests[departure.request_id]
        if departure.decoded:
            self.kept.read_slot(request.request_id, departure.slot)
            self._mailbox.cancel(departure.slot)
        self._proposed[request.request_id] = self._proposer.leave(request)
        self._masks.leave(departure.slot)
        self._requests.displace(request, decoded=departure.decoded)

    def arrive(self, admission: Admission) -> None:
        """Give a request its slot, and write back the state that was kept from its earlier one."""
        self._requests.place(admission)
        if not admission.resumes:
            self._proposed.pop(admission.request_id, None)
            return
        request, slot = self._requests[admission.request_id], admission.slot
        request.commands = commands = self._scheduler.kvcache.commands(request.request_id)
        tables = {name.replace("prefill", "block"): own for name, own in commands.items() if "prefill_table" in name}
        self._mailbox.take_over(slot, admission.table)
        self._mailbox.name_texts(slot, request.draft_texts)
        self._moves.clear()  # zero failed requests' blocks before some of them are written
        self.kept.write(request.request_id, slot, tables, admission.moved_in)
        self._proposer.enter(request, self._proposed.pop(request.request_id, None))
        request.first_entry = self._mailbox.num_seen
        self.limit_drafts(request)
        try:
            self._masks.enter(request)
        except LowlatError as error:
            self.end(request, "error", error=str(error), code="grammar")

    def limit_drafts(self, request: Request) -> None:
        """Let the next launched step verify as many drafts as the request's limit says."""
        self._limited.add(request.request_id)

    def send_limits(self) -> None:
        """Send the changed draft limits to the device; requests that have not joined yet send theirs when they do."""
        for name in self._limited & self._requests.keys():
            request = self._requests[name]
            if not request.has_left and self._scheduler.phase(name) is Phase.DECODING:
                self._mailbox.set_draft_limit(request.slot, request.draft_limit)
        self._limited.clear()

    def end(
        self, request: Request, reason: FinishReason, *, error: str | None = None, code: ErrorCode | None = None
    ) -> None:
        """End a request by the host's decision; its last output comes with the next step's."""
        if reason == "cancelled" or code == "deadline":
            request.opening = None  # a speculative answer ends, too
        if not request.has_left:  # else it has ended with its outputs held back, and they are dropped
            self.withdraw(request, poisoned=code == "not_finite")
        self._requests.deliver(request, request.output((), reason, error=error, error_code=code))
        self._requests.end(request)

    def withdraw(self, request: Request, *, poisoned: bool = False, shares: bool = True) -> None:
        """Take a request out, and cancel it on the device if it decodes; see `leave`."""
        if self.leave(request, poisoned=poisoned, shares=shares) is Phase.DECODING:
            self._mailbox.cancel(request.slot)

    def leave(self, request: Request, *, poisoned: bool = False, shares: bool = True) -> Phase:
        """Take a request out; returns the phase that it was in.

        poisoned  whether its blocks and its slot's state are zeroed
        shares    whether its decoded tokens' KV may be shared, if the cache's options allow it
        """
        # Launched steps may still write to its blocks. Other requests use them only in a later prefill or step, and
        # all of these run in order on one stream. Shared positions lie before the written ones.
        committed, written = request.committed if shares else None, request.num_written
        completed = request.finish_reason in ("stop", "length")
        phase = self._scheduler.cancel(
            request.request_id, committed, num_written=written, poisoned=poisoned, completed=completed
        )
        if phase in (Phase.PREFILLING, Phase.DECODING):
            del self._requests.slots[request.slot]
            self._proposer.end(request)
            self._masks.leave(request.slot)
            if poisoned:
                self._moves.failed_slots.append(request.slot)
        else:
            self.kept.forget(request.request_id)
            self._proposed.pop(request.request_id, None)
        if not (self._masks and self._in_flight.under_way):  # else `Steps` does, once the launched step has its masks
            self._moves.clear()
        return phase
