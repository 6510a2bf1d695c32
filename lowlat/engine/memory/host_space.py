"""This module bounds the host memory of requests that have left their slot."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lowlat.errors import CapacityError
from lowlat.sequence.book import MovedOut

__all__ = ["REFUSED_S", "HostSpace"]

logger = logging.getLogger("lowlat.engine.host_space")

REFUSED_S = 10.0  # after a refusal the host is not asked for memory for this long


@dataclass
class HostSpace:
    """Counts one runtime's host memory for requests that have left their slot, in bytes of all ranks together.

    max_bytes    the limit for all requests
    slot_bytes   of a slot's rows: each request without a slot takes as many
    block_bytes  of a block, or row, by pool: a request takes as many for each of its blocks that has left the device
    obtain       allocates host memory for a slot's rows (None), or for numbers of blocks by pool. Raises CapacityError
    """

    max_bytes: int
    slot_bytes: int = 0
    block_bytes: Mapping[str, int] = field(default_factory=dict)
    obtain: Callable[[Mapping[str, int] | None], None] = lambda counts: None
    held: dict[str, int] = field(default_factory=dict)
    _refusal: str = ""
    _refused_until: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes that requests take."""
        return sum(self.held.values())

    def has_slot(self) -> bool:
        """Whether a slot's rows fit; the host may still refuse the memory."""
        return self.slot_bytes <= self.num_free

    @property
    def num_free(self) -> int:
        """Bytes that requests may still take: 0 for a while after the host has refused memory."""
        return 0 if time.monotonic() < self._refused_until else self.max_bytes - self.num_bytes

    @property
    def refused_until(self) -> float | None:
        """The monotonic time until which a host that has refused memory is not asked; None: it may be asked."""
        return self._refused_until if time.monotonic() < self._refused_until else None

    def bytes_of(self, counts: Mapping[str, int]) -> int:
        """The bytes of these numbers of blocks, by pool."""
        return sum(count * self.block_bytes.get(pool, 0) for pool, count in counts.items())

    def take_slot(self, request_id: str) -> None:
        """Take the bytes of a slot's rows for a request.

        Raises CapacityError if they do not fit, or the host refuses memory.
        """
        if self.num_bytes + self.slot_bytes > self.max_bytes:
            raise CapacityError(
                f"request {request_id} takes {self.slot_bytes} bytes of host memory while it is paused; "
                f"{self.num_bytes} of {self.max_bytes} are taken (pause_gib)"
            )
        if not self._obtains(None):
            raise CapacityError(f"request {request_id} takes host memory while it is paused, and {self._refusal}")
        self.held[request_id] = self.held.get(request_id, 0) + self.slot_bytes

    def has_blocks(self, counts: Mapping[str, int]) -> bool:
        """Whether these numbers of further blocks, by pool, fit, and the host has given their memory."""
        return self.bytes_of(counts) <= self.num_free and self._obtains(counts)

    def take_blocks(self, request_id: str, moved: MovedOut) -> None:
        """Take the bytes of a request's blocks; call it after `has_blocks` for the same numbers of blocks."""
        num_bytes = self.bytes_of({pool: len(places) for pool, places in moved.places.items()})
        self.held[request_id] = self.held.get(request_id, 0) + num_bytes

    def release(self, request_id: str) -> None:
        """Give back what a request takes, if it takes any."""
        self.held.pop(request_id, None)

    def _obtains(self, counts: Mapping[str, int] | None) -> bool:
        """Whether the host gives memory; after a refusal it is not asked for a while."""
        if time.monotonic() < self._refused_until:
            return False
        try:
            self.obtain(counts)
        except CapacityError as error:
            if not self._refusal:
                logger.warning("requests keep their slots where they would leave them: %s", error)
            self._refusal, self._refused_until = str(error), time.monotonic() + REFUSED_S
            return False
        self._refusal = ""
        return True
