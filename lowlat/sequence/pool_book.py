"""This is the interface of the book of a further pool: of a kind of state with blocks or rows of its own.

`lowlat.sequence.kvcache` finds a prompt's cached chunks in the first pool. It asks each of these books after how many
of them its state can go on, and tells it when chunks are listed and dropped. Layers with a sliding window have such a
book (`WindowBook`), and so have recurrent states with snapshots after chunks (`SnapshotBook`).
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from lowlat.sequence.prefix_index import PrefixIndex
from lowlat.sequence.tiers.key import Presence

__all__ = ["IsKept", "PoolBook"]

IsKept = Callable[[bytes], bool | Presence]


class PoolBook(ABC):
    """The book of one pool. A request is admitted if it fits in every book.

    name             the pool's name
    kind             the kind of pool, in reports
    num_places       blocks or rows of a chunk's content
    num_broken_pins  pinned chunks that were evicted all the same, because there was no other space
    If requests reserve nothing in a pool, its book need not override `fits`, `fits_moved`, `num_to_move` and
    `take_blocks_to_clear`.
    """

    name: str
    kind: str
    num_places: int

    def __init__(self) -> None:
        self._pins: Counter[bytes] = Counter()
        self.num_broken_pins = 0

    def pin(self, digests: Sequence[bytes]) -> None:
        """Pin the chunks here that are needed to go on after a chain: they are evicted after others."""
        self._pins.update(self.needed(digests))

    def unpin(self, digests: Sequence[bytes]) -> None:
        """Undo one `pin` of a chain."""
        self._pins.subtract(self.needed(digests))
        self._pins = +self._pins

    @abstractmethod
    def needed(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Return the chunks of a chain whose state here is needed to go on after it."""

    def check(self, request_id: str, num_blocks: int) -> None:
        """Raise RequestError if a request whose table has `num_blocks` blocks needs more than the pool has."""
        return

    @abstractmethod
    def num_hits(self, digests: Sequence[bytes], most: int) -> int:
        """Return after how many of a chain's chunks, at most `most`, a prompt can go on with what is listed here."""

    def goes_on(self, digests: Sequence[bytes], is_kept: IsKept) -> bool:
        """Whether a prompt can go on after a chain with the contents of this pool that are kept."""
        return all(map(is_kept, self.needed(digests)))

    @abstractmethod
    def restore(self, digests: Sequence[bytes], is_kept: IsKept) -> Mapping[bytes, tuple[int, ...]]:
        """List contents that lie in a tier, so that a prompt can go on after as many chunks as possible.

        digests  a chain's first chunks, all listed in the first pool
        is_kept  whether this pool's content of a chunk is in the tier; COMING: it is on its way, and the caller will
                 call `restore` again
        Returns the places of the contents that were listed, by digest; the caller fills them before it launches
        anything else.
        """

    @abstractmethod
    def places(self, digest: bytes) -> tuple[int, ...] | None:
        """Return the blocks or rows of a chunk; None if it is not listed here."""

    def fits(self, num_blocks: int, digests: Sequence[bytes]) -> bool:
        """Whether a request with a table of `num_blocks` blocks, which goes on after these chunks, fits now."""
        return True

    @abstractmethod
    def admit(
        self, request_id: str, num_blocks: int, num_prompt: int, digests: Sequence[bytes], num_common: int
    ) -> None:
        """Reserve the places of a request with a prompt of `num_prompt` positions; `fits` must have returned True.

        digests     the chunks after which it goes on
        num_common  chunks after which it diverges from another text, all listed in the first pool; 0: it does not
        """

    @abstractmethod
    def append(self, request_id: str, start: int, stop: int) -> None:
        """Prepare for the prefill of the prompt's positions [start, stop), which comes next."""

    def mark_prefilled(self, request_id: str) -> None:
        """Record that the prompt's last positions were launched."""
        return

    @abstractmethod
    def commands(self, request_id: str) -> Mapping[str, Sequence[int]]:
        """Return the commands for the next part of a request's prompt: contents [1, n] of command buffers, by name."""

    @abstractmethod
    def attach(self, request_id: str, k: int, digest: bytes) -> None:
        """List a request's state of chunk k under its digest, if it has one and none is listed yet."""

    def worth_keeping(self, request_id: str, digests: Sequence[bytes], num_before: int) -> Iterable[bytes]:
        """Return the chunks whose state here is worth space in the tiers, after a part of the prompt was launched.

        digests     the prompt's chunks so far
        num_before  the number of them that were there before this part
        """
        return digests[num_before:]

    def spare(self, digests: Sequence[bytes], num_before: int) -> Iterable[bytes]:
        """Return the chunks whose state may take memory of the tiers that is free; arguments as above."""
        return ()

    @abstractmethod
    def drop(self, digest: bytes, *, poisoned: bool = False) -> None:
        """Unlist a chunk; poisoned: its blocks are cleared before reuse."""

    @abstractmethod
    def distrust(self, request_id: str) -> None:
        """Unlist the chunks of a request that failed with NaN, and have all of its blocks cleared."""

    @abstractmethod
    def release(self, request_id: str) -> None:
        """Take back a request's places; its listed chunks stay listed."""

    def num_to_move(self, request_id: str) -> int:
        """Return the number of places whose contents `move_out` would have the caller read."""
        return 0

    @abstractmethod
    def grow(self, request_id: str, num_prompt: int) -> None:
        """Record that a request's prompt has grown to `num_prompt` positions, more than are prefilled."""

    @abstractmethod
    def move_out(self, request_id: str) -> tuple[tuple[int, ...], object]:
        """Take back a request's places; returns those whose contents the caller reads, and what `move_in` needs."""

    def fits_moved(self, moved: object) -> bool:
        """Whether a request that was moved out fits again now; `moved` is what `move_out` returned."""
        return True

    @abstractmethod
    def move_in(self, request_id: str, moved: object) -> tuple[int, ...]:
        """Give a request as many places as it had, in the same order; `fits_moved` must have returned True."""

    def take_blocks_to_clear(self) -> list[int]:
        """Take the blocks that the caller zeroes before it launches anything else."""
        return []

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Return counts of blocks by state, as JSON."""

    @abstractmethod
    def problems(self, requests: Collection[str], index: PrefixIndex) -> Iterator[str]:
        """Describe the book's faults; yields nothing if it is sound.

        requests  the ids of requests that hold blocks of the first pool
        index     the chunks that prompts find
        """
