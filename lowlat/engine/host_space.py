"""The host memory for requests that have left their slot: what one takes there, and whether it fits."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowlat.errors import CapacityError
from lowlat.sequence.book import MovedOut

__all__ = ["HostSpace"]


@dataclass
class HostSpace:
    """The space of one runtime, in bytes of all its ranks together.

    max_bytes    for all requests
    slot_bytes   of a slot's rows, which every request takes that has left its slot
    block_bytes  of a block, or row, by pool: of those that a request takes whose blocks have left the device, too
    """

    max_bytes: int
    slot_bytes: int = 0
    block_bytes: Mapping[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes that requests take."""
        return sum(self.held.values())

    def bytes_of(self, moved: MovedOut) -> int:
        """Bytes that a request's blocks take."""
        return sum(len(places) * self.block_bytes.get(pool, 0) for pool, places in moved.places.items())

    def has_blocks(self, counts: Mapping[str, int]) -> bool:
        """Whether so many more blocks, by pool, fit."""
        return self.has(sum(count * self.block_bytes.get(pool, 0) for pool, count in counts.items()))

    def has(self, num_bytes: int) -> bool:
        """Whether so many more bytes fit."""
        return self.num_bytes + num_bytes <= self.max_bytes

    def take(self, request_id: str, num_bytes: int) -> None:
        """Take bytes for a request. Raises CapacityError where they do not fit."""
        if not self.has(num_bytes):
            raise CapacityError(
                f"request {request_id} takes {num_bytes} bytes of host memory while it is paused; {self.num_bytes} of "
                f"{self.max_bytes} are taken (pause_gib)"
            )
        self.held[request_id] = self.held.get(request_id, 0) + num_bytes

    def release(self, request_id: str) -> None:
        """Give back what a request takes, if it takes any."""
        self.held.pop(request_id, None)
