"""This is the interface of a book next to the first pool's, of a kind of state with blocks of its own.

`lowlat.sequence.kvcache` finds the chunks of a prompt that are there; it asks each of these books whether its state can
go on after them, and tells it what becomes of chunks. Layers of a sliding window have one (`WindowBook`), and states
that are kept as snapshots after chunks (`SnapshotBook`).
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from lowlat.sequence.prefix_index import PrefixIndex
from lowlat.sequence.tiers.key import Presence

__all__ = ["IsKept", "PoolBook"]

IsKept = Callable[[bytes], bool | Presence]


class PoolBook(ABC):
    """Which block of one pool holds what. A request is admitted where every book says that it fits.

    name  the pool's
    kind  of pools, in figures
    num_places  blocks or rows of a chunk's content
    num_broken_pins  pinned chunks that went all the same, as there was no other place
    A kind of which a request reserves nothing need not say whether one fits, nor what is moved and cleared.
    """

    name: str
    kind: str
    num_places: int

    def __init__(self) -> None:
        self._pins: Counter[bytes] = Counter()
        self.num_broken_pins = 0

    def pin(self, digests: Sequence[bytes]) -> None:
        """Have what is listed here of a chain, and needed to go on after it, stay while others can go."""
        self._pins.update(self.needed(digests))

    def unpin(self, digests: Sequence[bytes]) -> None:
        """Take a pin back that `pin` has given."""
        self._pins.subtract(self.needed(digests))
        self._pins = +self._pins

    @abstractmethod
    def needed(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """The chunks of a chain whose state here is needed to go on after it."""

    def check(self, request_id: str, num_blocks: int) -> None:
        """Raise RequestError where a request whose table has so many blocks needs more than the pool has."""
        return

    @abstractmethod
    def num_hits(self, digests: Sequence[bytes], most: int) -> int:
        """The first chunks of a chain, `most` at the most, after which a prompt can go on by what is listed here."""

    def goes_on(self, digests: Sequence[bytes], is_kept: IsKept) -> bool:
        """Whether a prompt can go on after a chain by what is kept of this pool."""
        return all(map(is_kept, self.needed(digests)))

    @abstractmethod
    def restore(self, digests: Sequence[bytes], is_kept: IsKept) -> Mapping[bytes, tuple[int, ...]]:
        """List contents that lie in a tier of the cache, so that a prompt goes on after as many chunks as possible.

        digests  a chain's first chunks, all listed in the first pool
        is_kept  whether this pool's content of a chunk is in the tier; COMING: it will be, and this is asked again then
        Returns the places that the caller fills before anything else is launched, by digest; they are listed already.
        """

    @abstractmethod
    def places(self, digest: bytes) -> tuple[int, ...] | None:
        """The blocks or rows of a listed chunk; None where it is not listed here."""

    def fits(self, num_blocks: int, digests: Sequence[bytes]) -> bool:
        """Whether a request with a table of so many blocks fits now, that goes on after these chunks."""
        return True

    @abstractmethod
    def admit(
        self, request_id: str, num_blocks: int, num_prompt: int, digests: Sequence[bytes], num_common: int
    ) -> None:
        """Reserve what a request with a prompt of so many positions needs; `fits` must have said that it fits.

        digests     chunks after which it goes on
        num_common  chunks after which it parts from another text, all listed in the first pool; 0: there is none
        """

    @abstractmethod
    def append(self, request_id: str, start: int, stop: int) -> None:
        """The prompt's positions [start, stop) are prefilled next."""

    def mark_prefilled(self, request_id: str) -> None:
        """The prompt's last positions are launched."""
        return

    @abstractmethod
    def commands(self, request_id: str) -> Mapping[str, Sequence[int]]:
        """The commands to the next part of a request's prompt: contents of command buffers [1, n], by their names."""

    @abstractmethod
    def attach(self, request_id: str, k: int, digest: bytes) -> None:
        """List a request's state of chunk k under its digest, where it is there and nobody's is listed."""

    def worth_keeping(self, request_id: str, digests: Sequence[bytes], num_before: int) -> Iterable[bytes]:
        """The chunks of a prompt whose state here is worth a place in the tiers, once a part of it is launched.

        digests     its chunks so far
        num_before  those of them that parts before this one had
        """
        return digests[num_before:]

    def spare(self, digests: Sequence[bytes], num_before: int) -> Iterable[bytes]:
        """The chunks of a prompt whose state here may have what memory of the tiers is free; arguments as above."""
        return ()

    @abstractmethod
    def drop(self, digest: bytes, *, poisoned: bool = False) -> None:
        """Unlist the chunk of a digest; poisoned: its blocks are cleared before anybody gets them."""

    @abstractmethod
    def distrust(self, request_id: str) -> None:
        """A request failed with NaN: none of its chunks is listed any more, and all of its blocks are cleared."""

    @abstractmethod
    def release(self, request_id: str) -> None:
        """Take back what a request holds; its chunks that are listed stay."""

    def num_to_move(self, request_id: str) -> int:
        """Places whose contents `move_out` would have read."""
        return 0

    @abstractmethod
    def grow(self, request_id: str, num_prompt: int) -> None:
        """A request's prompt has so many positions now, more than are prefilled."""

    @abstractmethod
    def move_out(self, request_id: str) -> tuple[tuple[int, ...], object]:
        """Take back what a request holds: the places whose contents its caller reads, and what `move_in` needs."""

    def fits_moved(self, moved: object) -> bool:
        """Whether a request that was moved out fits again now; `moved` is what `move_out` said."""
        return True

    @abstractmethod
    def move_in(self, request_id: str, moved: object) -> tuple[int, ...]:
        """Give a request as many places as it had, in the same order; `fits_moved` must have said that it fits."""

    def take_blocks_to_clear(self) -> list[int]:
        """Blocks that the caller zeroes before anything else is launched."""
        return []

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Blocks by state, as JSON."""

    @abstractmethod
    def problems(self, requests: Collection[str], index: PrefixIndex) -> Iterator[str]:
        """Faults of the book, in words; nothing when it is sound.

        requests, index  those that hold blocks of the first pool, and the chunks that prompts find
        """
