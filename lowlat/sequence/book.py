"""This module has the records of the books: a request's blocks, and what it keeps when it is moved out of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowlat.errors import LowlatError

if TYPE_CHECKING:
    pass

__all__ = ["Allocation", "BlockStats", "InvariantError", "MovedIn", "MovedOut"]


class InvariantError(LowlatError):
    """The books contradict themselves, or a call broke their protocol: a fault of lowlat, never of its user."""


@dataclass(frozen=True)
class Allocation:
    """One request's blocks, in order of position, and the number of prompt tokens whose KV they already hold."""

    table: list[int]
    num_cached_tokens: int


@dataclass(frozen=True)
class BlockStats:
    """Blocks by state (they add up to num_blocks, without the null block), and counts of prefix reuse.

    queries, query_tokens and hit_tokens count admitted requests, their prompt tokens, and the cached ones of these.
    num_pinned       blocks among num_used and num_evictable that sessions pin
    num_broken_pins  pinned blocks that were evicted all the same, because a request had no other space
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
    """A request that was moved out: its former places, whose contents the caller keeps until `move_in`.

    places  blocks or rows by pool; those of the first pool in order of position
    table   all of its blocks of the first pool, also those whose contents are not needed
    own     what each pool's book needs to move the request in again, by the pool's name
    """

    places: Mapping[str, tuple[int, ...]]
    table: tuple[int, ...]
    own: Mapping[str, object]


@dataclass(frozen=True)
class MovedIn:
    """A request that was moved in: its new table, and its new places by pool, in the order of its former ones.

    A place is None if its content is already on the device.
    """

    table: list[int]
    places: Mapping[str, tuple[int | None, ...]]
