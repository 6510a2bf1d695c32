"""This module changes live requests between two steps: pauses, ends, and prompts that grow."""

from collections.abc import Sequence
from typing import cast

from lowlat.engine.requests.request import Opening, Request
from lowlat.engine.requests.requests import Requests
from lowlat.engine.scheduling.records import ScheduledRequest
from lowlat.engine.scheduling.scheduler import Scheduler
from lowlat.engine.steps.steps import Steps
from lowlat.errors import RequestError

__all__ = ["BetweenSteps"]

OVERDUE = "the request waited for its caller for longer than its deadline (deadline_s, pause_deadline_s)"


class BetweenSteps:
    """Changes the requests of one runtime; asks a loop on the device to end if the change may need that.

    deadline_s  seconds after which a request that waits for its caller is ended by default
    """

    def __init__(self, steps: Steps, scheduler: Scheduler, requests: Requests, deadline_s: float) -> None:
        self._steps, self._changes, self._scheduler, self._requests = steps, steps.changes, scheduler, requests
        self._deadlines, self._deadline_s = requests.deadlines, deadline_s

    def submit(self, request: Request, scheduled: ScheduledRequest) -> None:
        """Queue a request; an open one is ended if its prompt does not grow before its deadline."""
        self._requests.add(request, scheduled)
        if request.opening is not None:
            self._deadlines.set(request.request_id, self._deadline_s)
        self._steps.stop_outdated()

    def cancel(self, request: Request) -> None:
        """Cancel a request; its last output comes with the next step's."""
        self._changes.end(request, "cancelled")
        self._steps.stop_outdated()

    def pause(self, request: Request, deadline_s: float | None) -> bool:
        """Take a request out of its slot, with its state there; returns False if it has ended before.

        deadline_s  seconds after which it is ended
        It waits for the launches in flight; their outputs come with the next step's.
        Raises RequestError and CapacityError as `Scheduler.pause` does, DeviceError when the device has failed.
        """
        if request.opening is not None:
            raise RequestError(f"request {request.request_id} has an open prompt: finish it, or cancel it")
        self._steps.settle()
        if request.request_id not in self._requests:
            return False
        departure = self._scheduler.pause(request.request_id)
        if departure is not None:
            self._changes.depart(departure)
        self._deadlines.set(request.request_id, self._deadline_s if deadline_s is None else deadline_s)
        return True

    def resume(self, request: Request) -> None:
        """Queue a paused request again. Raises RequestError as `Scheduler.resume` does."""
        self._scheduler.resume(request.request_id)
        self._deadlines.drop(request.request_id)
        self._steps.stop_outdated()

    def grow(self, request: Request, ids: Sequence[int]) -> None:
        """Add token ids to an open prompt; an answer that was begun speculatively is withdrawn.

        Raises RequestError for a prompt that is not open, or would become too long.
        """
        opening = _opening_of(request)
        _check_length(opening, len(ids))
        if not opening.is_speculative:
            cast(list[int], request.prompt).extend(ids)
            opening.num_certain += len(ids)
            self._scheduler.grow(request.request_id)
        else:
            if not request.has_left:
                self._changes.withdraw(request, shares=False)
            scheduled = self._requests.reopen(request, opening, [*request.prompt[: opening.num_certain], *ids])
            self._scheduler.enqueue(scheduled, is_open=True, arrival=opening.arrival)
        self._deadlines.set(request.request_id, self._deadline_s)
        self._steps.stop_outdated()

    def finish(self, request: Request, ids: Sequence[int], *, speculative: bool) -> None:
        """End an open prompt with these token ids, speculatively or for good.

        Raises RequestError for a prompt that is not open, empty, or too long.
        """
        opening = _opening_of(request)
        if opening.is_speculative:
            if not speculative:
                self._deadlines.drop(request.request_id)
                self._requests.confirm(request)
            return
        count = opening.num_certain + len(ids)
        if not count:
            raise RequestError("a prompt of 0 tokens; it needs 1 at least")
        _check_length(opening, len(ids))
        prompt = cast(list[int], request.prompt)
        prompt.extend(ids)
        try:
            begun = self._requests.begin(request, speculative=speculative)
        except RequestError:
            del prompt[opening.num_certain :]
            raise
        opening.is_speculative = speculative
        if not speculative:
            self._deadlines.drop(request.request_id)
        self._scheduler.complete(request.request_id, count + begun.params.max_tokens)
        self._steps.stop_outdated()

    def end_overdue(self) -> None:
        """End the requests whose deadlines have passed."""
        for name in self._deadlines.passed():
            self._changes.end(self._requests[name], "error", error=OVERDUE, code="deadline")


def _opening_of(request: Request) -> Opening:
    if request.opening is None:
        raise RequestError(f"request {request.request_id} has no open prompt: it was finished")
    return request.opening


def _check_length(opening: Opening, num_more: int) -> None:
    """Raise RequestError for a prompt that would become too long."""
    count = opening.num_certain + num_more
    if count > opening.max_prompt:
        raise RequestError(
            f"prompt of {count} tokens exceeds the {opening.max_prompt} that max_context, kv_blocks and "
            "max_prompt_tokens leave next to max_tokens"
        )
