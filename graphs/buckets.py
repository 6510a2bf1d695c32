"""Buckets: the (batch, rows, speculative tokens) sizes for which a step is made, and how one is chosen.

A bucket fixes every shape of a step. The ladder holds them all, largest first, the order in which graphs are
captured into one pool. It knows nothing about what a step computes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from lowlat.errors import ConfigError

__all__ = ["Bucket", "BucketLadder"]


@dataclass(frozen=True, order=True)
class Bucket:
    """B slots of T rows, drafting S levels deep.

    prefilled  the step behind a prompt's last chunk, which chooses its first token: one slot, one row, and that row
               comes out of prefill
    chooses    the step chooses among `bodies`, on the device; S is the most that it may choose
    extends    the body of S = 0 in which the draft model runs over what waits for it
    verifies   the step of more rows that verifies, over all of the cache, the proposals of steps over a part of it
    """

    batch: int
    rows: int
    num_speculative_tokens: int
    prefilled: bool = False
    chooses: bool = False
    extends: bool = False
    verifies: bool = False

    @cached_property
    def bodies(self) -> "tuple[Bucket, ...]":
        """The buckets among which the step chooses, by the number of the choice; chains of S = 0 and on."""
        if not self.chooses:
            return ()
        widths = (Bucket(self.batch, depth + 1, depth) for depth in range(self.num_speculative_tokens + 1))
        return (*widths, Bucket(self.batch, 1, 0, extends=True))

    @classmethod
    def first_token(cls, num_speculative_tokens: int) -> "Bucket":
        """The bucket of a prompt's first token, drafting so deep."""
        return cls(1, 1, num_speculative_tokens, prefilled=True)

    def __str__(self) -> str:
        if self.prefilled:
            return f"first token, S = {self.num_speculative_tokens}"
        if self.chooses:
            return f"batch {self.batch}, S up to {self.num_speculative_tokens}"
        if self.extends:
            return f"batch {self.batch}, S = 0, draft model runs"
        name = f"batch {self.batch}, {self.rows} rows, S = {self.num_speculative_tokens}"
        return f"{name}, verifies" if self.verifies else name


class BucketLadder:
    """All buckets of one runtime, largest first.

    batches   batch sizes, each at least 1
    rows_of   for each S that may be chosen, the rows T that a slot verifies (1 for S = 0)
    adaptive  the device chooses each step's S: of chains, from 0 to the largest
    verifier  the rows T of a step that verifies what steps over a part of the cache propose, and its S; None: none does

    `buckets` holds those of decode steps, `first_tokens` those that choose first tokens, one for each S. Where the
    device chooses, each of `buckets` has bodies, and one first token's is for all.
    """

    def __init__(
        self,
        batches: Iterable[int],
        rows_of: dict[int, int],
        *,
        adaptive: bool = False,
        verifier: tuple[int, int] | None = None,
    ) -> None:
        self.batches = tuple(sorted(set(batches)))
        if not self.batches or self.batches[0] < 1:
            raise ConfigError(f"bucket batches must be at least 1, got {list(self.batches)}")
        if 0 not in rows_of or rows_of[0] != 1:
            raise ConfigError("the ladder needs the baseline: S = 0 with one row")
        self.rows_of = dict(sorted(rows_of.items()))
        self.buckets = tuple(
            sorted(
                (Bucket(b, t, s) for b in self.batches for s, t in self.rows_of.items()),
                key=lambda bucket: (bucket.batch * bucket.rows, bucket.batch, bucket.rows),
                reverse=True,
            )
        )
        self.adaptive = adaptive
        wide = () if verifier is None else tuple(reversed(self.batches))
        self.verifiers = tuple(Bucket(b, *(verifier or (1, 0)), verifies=True) for b in wide)
        most = max(self.rows_of)
        if adaptive:
            if not most or self.rows_of != {depth: depth + 1 for depth in range(most + 1)}:
                raise ConfigError(f"widths are chosen among chains of every depth, and the ladder has {self.rows_of}")
            self.buckets = tuple(self._chooser(b) for b in reversed(self.batches))
            self.first_tokens: tuple[Bucket, ...] = (Bucket.first_token(0),)
            return
        self.first_tokens = tuple(Bucket.first_token(depth) for depth in reversed(self.rows_of))

    def _chooser(self, batch: int) -> Bucket:
        most = max(self.rows_of)
        return Bucket(batch, most + 1, most, chooses=True)

    def choose(self, num_active: int, num_speculative_tokens: int) -> Bucket:
        """The smallest bucket for `num_active` slots at the depth asked for; where the device chooses, at any.

        Raises ConfigError when no batch is large enough or the depth has no bucket.
        """
        if num_speculative_tokens not in self.rows_of:
            raise ConfigError(
                f"num_speculative_tokens {num_speculative_tokens} has no bucket; the ladder has {sorted(self.rows_of)}"
            )
        for batch in self.batches:
            if batch >= num_active and self.adaptive:
                return self._chooser(batch)
            if batch >= num_active:
                return Bucket(batch, self.rows_of[num_speculative_tokens], num_speculative_tokens)
        raise ConfigError(f"{num_active} active slots exceed the largest bucket, {self.batches[-1]} (max_batch)")

    def verifier(self, num_active: int) -> Bucket:
        """The smallest bucket that verifies `num_active` slots. Raises ConfigError where there is none."""
        for bucket in reversed(self.verifiers):
            if bucket.batch >= num_active:
                return bucket
        raise ConfigError(f"no bucket verifies {num_active} slots; the ladder has {len(self.verifiers)} that verify")

    def first_token(self, num_speculative_tokens: int) -> Bucket:
        """The bucket that chooses a first token and drafts so deep; where the device chooses, it drafts nothing."""
        return Bucket.first_token(0 if self.adaptive else num_speculative_tokens)

    @property
    def programs(self) -> Iterator[Bucket]:
        """All that programs are made for, the largest first: bodies of steps before what chooses them."""
        yield from self.verifiers
        for bucket in self.buckets:
            yield from reversed(bucket.bodies)
            yield bucket
        yield from self.first_tokens
