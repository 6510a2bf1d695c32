"""This module has a scheduler's requests without a slot: queued by priority and arrival, paused, or open."""

from bisect import insort

from lowlat.engine.scheduling.records import ScheduledRequest

__all__ = ["RequestQueue"]


class RequestQueue:
    """Keeps the order of requests, live ones' arrivals, and which of their prompts may still grow.

    queued         those that wait for a slot, the head first
    aside          those that wait to be resumed, or for more than a chunk of their prompt, by id
    open           ids of requests whose prompts may grow, with a slot or without
    arrivals       the number of each live request in the order of arrival
    prefill_chunk  tokens of a chunk: an open prompt is queued when more are known
    """

    def __init__(self, prefill_chunk: int) -> None:
        self.queued: list[ScheduledRequest] = []
        self.aside: dict[str, ScheduledRequest] = {}
        self.open: set[str] = set()
        self.arrivals: dict[str, int] = {}
        self._prefill_chunk, self._num_arrived = prefill_chunk, 0

    @property
    def num_paused(self) -> int:
        """Requests that wait to be resumed."""
        return sum(name not in self.open for name in self.aside)

    def is_paused(self, request_id: str) -> bool:
        """Whether a request waits to be resumed."""
        return request_id in self.aside and request_id not in self.open

    def arrive(self, request: ScheduledRequest, *, is_open: bool, arrival: int | None) -> None:
        """Take a request that is new, or that has an arrival of its own."""
        if arrival is None:
            self._num_arrived += 1
        self.arrivals[request.request_id] = self._num_arrived if arrival is None else arrival
        if is_open:
            self.open.add(request.request_id)
        self.put(request)

    def put(self, request: ScheduledRequest) -> None:
        """Queue a request at its place, or leave it aside while too little of its prompt is known."""
        if request.request_id in self.open and len(request.prompt_token_ids) <= self._prefill_chunk:
            self.aside[request.request_id] = request
        else:
            insort(self.queued, request, key=self.place)

    def place(self, request: ScheduledRequest) -> tuple[int, int]:
        """The key by which requests are ordered: the highest priority, and of equals the first that came."""
        return -request.priority, self.arrivals[request.request_id]

    def unqueue(self, request_id: str) -> ScheduledRequest:
        """Take a queued request out."""
        place = next(place for place, each in enumerate(self.queued) if each.request_id == request_id)
        return self.queued.pop(place)

    def take(self, request_id: str) -> ScheduledRequest:
        """Take a request out, queued or aside."""
        return self.aside.pop(request_id) if request_id in self.aside else self.unqueue(request_id)

    def forget(self, request_id: str) -> None:
        """A request without a place here is live no more."""
        del self.arrivals[request_id]
        self.open.discard(request_id)
