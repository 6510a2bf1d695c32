"""The host's books of what requests hold: who has which blocks, and what of a prompt is there already.

The scheduler calls them as requests come, grow and end.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowlat.errors import LowlatError
from lowlat.sequence.tiers.key import ChunkKey, Load, Save
from lowlat.sequence.tiers.tiers import CacheTiers

if TYPE_CHECKING:
    import torch

__all__ = ["Allocation", "BlockStats", "InvariantError", "MovedIn", "MovedOut", "SequenceBook"]


class InvariantError(LowlatError):
    """The books contradict themselves, or their protocol was broken: a defect of lowlat, never a caller's."""


@dataclass(frozen=True)
class Allocation:
    """One request's blocks, in order of position, and the prompt tokens whose state they hold already."""

    table: list[int]
    num_cached_tokens: int


@dataclass(frozen=True)
class BlockStats:
    """Blocks by state (they add up to num_blocks, the null block left out) and what prefix reuse saved.

    queries, query_tokens and hit_tokens count admitted requests, their prompt tokens, and those found cached.
    num_pinned     of num_used and num_evictable, those that sessions keep
    num_broken_pins  such blocks that went all the same, as a request had no other place
    """

    num_blocks: int
    num_free: int
    num_evictable: int
    num_to_clear: int
    num_used: int
    queries: int
    query_tokens: int
    hit_tokens: int
    num_pinned: int = 0
    num_broken_pins: int = 0


@dataclass(frozen=True)
class MovedOut:
    """A request's places by pool, in order of position in the first, whose contents a caller keeps meanwhile.

    table  all of its blocks of the first pool, those included whose contents nobody needs
    own   what each pool's book remembers of the request, by the pool's name
    """

    places: Mapping[str, tuple[int, ...]]
    table: tuple[int, ...]
    own: Mapping[str, object]


@dataclass(frozen=True)
class MovedIn:
    """The table of a request that came back, and by pool its places, in the order of those that it had.

    A place is None where the content is there already.
    """

    table: list[int]
    places: Mapping[str, tuple[int | None, ...]]


class SequenceBook(ABC):
    """The host's book of what requests hold: of one runtime, for all of its states.

    prefill_chunk  positions of one prefill chunk: the unit of sharing
    tiers          of the cache below the device's memory; None: there are none

    Of a request the scheduler calls `check`, then `admit` until it fits, `append` and `mark_prefilled` for each part of
    its prompt, and `release`. Decode steps call nothing: admission reserves the worst case, so that no step can run
    out, and rows that a step rejects are forgotten on the device.
    """

    prefill_chunk: int
    tiers: CacheTiers | None = None

    @property
    @abstractmethod
    def generation(self) -> int:
        """A number that grows whenever an admission that did not fit might fit now."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Blocks that can be handed out."""

    @abstractmethod
    def __contains__(self, request_id: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def is_coming(self, prompt_token_ids: Sequence[int], salt: str) -> bool:
        """Whether a request that was admitted is about to write more of a prompt than is there yet."""

    @abstractmethod
    def pin(self, owner: Hashable, digests: Sequence[bytes]) -> None:
        """Have a chain of chunks stay while others can go, as long as its owner pins it, in place of those before."""

    @abstractmethod
    def unpin(self, owner: Hashable) -> None:
        """Let the chunks of an owner go as others do."""

    @abstractmethod
    def pinned(self, owner: Hashable) -> list[bytes]:
        """The chain that an owner pins."""

    @abstractmethod
    def pin_tokens(self, owner: Hashable, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Pin the whole chunks of some tokens; returns their digests."""

    @abstractmethod
    def places_by_pool(self) -> dict[str, int]:
        """The blocks or rows that a content has, by pool."""

    @abstractmethod
    def hold(self, token_ids: Sequence[int], salt: str) -> tuple[bool, list[tuple[int, Save]]]:
        """The contents from which tokens go on, by chunk, whose blocks stay until `let_go` of their holders.

        Those of the tiers come to the device first; False: they are on their way, and nothing is held. Contents
        without a holder are to be read before anything else is launched.
        """

    @abstractmethod
    def let_go(self, holders: Sequence[object]) -> None:
        """End what `hold` has begun."""

    @abstractmethod
    def adopt(self, token_ids: Sequence[int], salt: str, contents: "Mapping[ChunkKey, torch.Tensor]") -> None:
        """List contents of some tokens' chunks in blocks that nobody uses; `take_loads` then has them."""

    @abstractmethod
    def check(self, request_id: str, max_total_tokens: int, num_overprovision: int) -> None:
        """Raise RequestError where a worst case is larger than all that there is: it would wait for ever."""

    @abstractmethod
    def admit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_total_tokens: int,
        num_overprovision: int,
        salt: str = "",
        *,
        reads: bool = True,
    ) -> Allocation | None:
        """Reserve a request's worst case, sharing what is kept of its prompt; None when it does not fit now.

        prompt_token_ids    [n] n >= 1; not copied, and must not change while the request lives
        max_total_tokens    prompt and completion at most
        num_overprovision   positions that a step may write past them
        salt                only what requests of the same salt have left is shared
        reads               False: all of the prompt will be prefilled; it is shared with others all the same
        num_cached_tokens of the result is a multiple of prefill_chunk, at most n - 1.
        """

    @abstractmethod
    def append(self, request_id: str, start: int, stop: int) -> None:
        """Say that the prompt's positions [start, stop) are prefilled next; `commands` then has their places."""

    @abstractmethod
    def commands(self, request_id: str) -> Mapping[str, Sequence[int]]:
        """The commands to the next part of a request's prompt: contents of command buffers [1, n], by their names.

        "prefill_table" has its blocks by position; so have the tables of other pools, by which its steps go on.
        """

    @abstractmethod
    def mark_prefilled(self, request_id: str, num_tokens: int) -> None:
        """Say that prefill wrote, or the stream will have written, the state of the prompt's first num_tokens."""

    @abstractmethod
    def release(
        self,
        request_id: str,
        token_ids: Sequence[int] | None = None,
        *,
        num_written: int | None = None,
        poisoned: bool = False,
        owner: Hashable = None,
        whole: bool = True,
    ) -> None:
        """Take back what a request holds; what may be shared stays for others. The device must write to it no more.

        owner  pins the chunks of the sequence from now on, in place of those that it pinned; None: nobody does
        whole  False: it was broken off, and its owner goes on pinning what it did unless these chunks go on from there
        """

    @abstractmethod
    def move_out(
        self, request_id: str, num_written: int, has_space: Callable[[Mapping[str, int]], bool]
    ) -> "MovedOut | None":
        """Take back what a request holds; the caller reads what is in its places before anything else is launched.

        num_written  positions of it that may be written, at most: contents of others are not moved
        has_space    whether contents of so many blocks of each pool fit where they go; None is returned where not
        `move_in` gives it places again. The device must write to it no more. Raises RequestError for an unknown id.
        """

    @abstractmethod
    def grow(self, request_id: str) -> None:
        """Say that a request's prompt, the list that it was admitted with, is longer now than what is prefilled."""

    @abstractmethod
    def move_in(self, request_id: str, moved: "MovedOut") -> "MovedIn | None":
        """Give a request that was moved out places again; None when they do not fit now.

        Its table, and places of each pool: of `moved`'s in the same order, None where the content is there already.
        """

    @abstractmethod
    def num_free_without(self, request_ids: Collection[str]) -> int:
        """Blocks that would be free, at the least, if these requests held none."""

    @abstractmethod
    def num_needed(self, max_total_tokens: int, num_overprovision: int) -> int:
        """Blocks of a request's worst case."""

    @abstractmethod
    def take_loads(self) -> list[Load]:
        """Contents of the tiers that the caller writes to the device before anything else is launched."""

    @abstractmethod
    def take_saves(self) -> list[Save]:
        """Contents that prefill has written, which the caller reads for the tiers before anything else is launched."""

    @abstractmethod
    def note_all(self) -> None:
        """Have `take_saves` name all that may be shared and is in no tier, what was used longest ago first."""

    @abstractmethod
    def forget_all(self) -> None:
        """Share nothing that the device holds any more; what the tiers hold is found there.

        Raises InvariantError while requests hold blocks.
        """

    @abstractmethod
    def take_blocks_to_clear(self) -> list[int]:
        """Blocks of failed requests: they are free, and the caller zeroes them before anything else is launched."""

    @abstractmethod
    def take_pool_blocks_to_clear(self) -> Mapping[str, list[int]]:
        """The same of other pools, by name; those may be in use again, by what is launched next."""

    @abstractmethod
    def pool_stats(self) -> dict[str, list[dict[str, int]]]:
        """Counts of other pools, as JSON, by their kind."""

    @abstractmethod
    def max_total_tokens(self, num_overprovision: int) -> int:
        """Tokens of prompt and completion that one request may have, with nobody next to it."""

    @abstractmethod
    def stats(self) -> BlockStats:
        """Counts of blocks and hits."""

    @abstractmethod
    def invariants(self) -> None:
        """Check that everything balances. Raises InvariantError naming what does not."""
