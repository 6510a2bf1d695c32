"""These records say what a request was given, and what it takes along when it leaves its blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowlat.errors import LowlatError

if TYPE_CHECKING:
    pass

__all__ = ["Allocation", "BlockStats", "InvariantError", "MovedIn", "MovedOut"]


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
