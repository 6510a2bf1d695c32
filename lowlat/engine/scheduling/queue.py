"""This module has a scheduler's requests without a slot: queued by priority and arrival, paused, or open."""

from bisect import insort

from lowlat.engine.scheduling.records import ScheduledRequest

__all__ = ["RequestQueue"]


class RequestQueue:
    """Keeps the order of waiting requests, arrivals of live requests, and the set of open prompts.

    queued         requests that wait for a slot, the head first
    aside          requests that wait for `resume`, or for more than a chunk of their prompt, by id
    open           ids of requests with open prompts, with a slot or without
    arrivals       the arrival number of each live request
    prefill_chunk  tokens of a chunk; an open prompt is queued when more are known
    """

    def __init__(self, prefill_chunk: int) -> None:
        self.queued: list[ScheduledRequest] = []
        self.aside: dict[str, ScheduledRequest] = {}
        self.open: set[str] = set()
        self.arrivals: dict[str, int] = {}
        self._prefill_chunk, self._num_arrived = prefill_chunk, 0

    @property
    def num_paused(self) -> int:
        """The number of requests that wait for `resume`."""
        return sum(name not in self.open for name in self.aside)

    def is_paused(self, request_id: str) -> bool:
        """Whether a request waits for `resume`."""
        return request_id in self.aside and request_id not in self.open

    def arrive(self, request: ScheduledRequest, *, is_open: bool, arrival: int | None) -> None:
        """Add a request, which is new or has an arrival number already."""
        if arrival is None:
            self._num_arrived += 1
        self.arrivals[request.request_id] = self._num_arrived if arrival is None else arrival
        if is_open:
            self.open.add(request.request_id)
        self.put(request)

    def put(self, request: ScheduledRequest) -> None:
        """Queue a request in order, or put it aside while too little of its prompt is known."""
        if request.request_id in self.open and len(request.prompt_token_ids) <= self._prefill_chunk:
            self.aside[request.request_id] = request
        else:
            insort(self.queued, request, key=self.place)

    def place(self, request: ScheduledRequest) -> tuple[int, int]:
        """The sort key of requests: highest priority first, then by arrival."""
        return -request.priority, self.arrivals[request.request_id]

    def unqueue(self, request_id: str) -> ScheduledRequest:
        """Remove a request from the queue."""
        place = next(place for place, each in enumerate(self.queued) if each.request_id == request_id)
        return self.queued.pop(place)

    def take(self, request_id: str) -> ScheduledRequest:
        """Remove a request that is queued or aside."""
        return self.aside.pop(request_id) if request_id in self.aside else self.unqueue(request_id)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended and is neither queued nor aside."""
        del self.arrivals[request_id]
        self.open.discard(request_id)
