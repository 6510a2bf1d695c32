"""A ladder lists the buckets of a runtime's steps, and chooses the bucket of each step."""

from collections.abc import Iterable, Iterator

from lowlat.errors import ConfigError
from lowlat.graphs import Bucket, BucketLadder
from lowlat.step.variants import CHOICE, PLAIN, PROPOSED, WIDE, bodies_of, choice_bucket, first_token_bucket

__all__ = ["MAX_WIDE_ROWS", "StepLadder"]

MAX_WIDE_ROWS = 64  # rows of all slots in a wide step, unless `must_fit`


class StepLadder:
    """All buckets of one runtime, largest first.

    batches   batch sizes, each at least 1
    rows_of   the rows T that a slot verifies, by draft length S (1 for S = 0)
    adaptive  whether the device chooses each step's S, for chains: from 0 to the largest
    wide      the rows T of wide steps that verify the host's proposals, and the S of all of them
    must_fit  whether there are such steps for every batch size; else only for batches of at most MAX_WIDE_ROWS rows
    proposed  the rows T of wide steps that verify the speculator's proposals, for batches of at most MAX_WIDE_ROWS rows
    longer    a draft length above those of `rows_of`, for plain steps of at most MAX_WIDE_ROWS rows; 0: none

    `buckets` has the decode steps, `first_tokens` the steps that choose first tokens, one for each S, and
    `wide_buckets` the wide steps and the steps of the longer draft length. If the device chooses S, there is one
    first token's step.
    """

    def __init__(
        self,
        batches: Iterable[int],
        rows_of: dict[int, int],
        *,
        adaptive: bool = False,
        wide: tuple[Iterable[int], int] = ((), 0),
        must_fit: bool = False,
        proposed: Iterable[int] = (),
        longer: int = 0,
    ) -> None:
        self.batches = tuple(sorted(set(batches)))
        if not self.batches or self.batches[0] < 1:
            raise ConfigError(f"bucket batches must be at least 1, got {list(self.batches)}")
        if 0 not in rows_of or rows_of[0] != 1:
            raise ConfigError("the ladder needs the baseline: S = 0 with one row")
        self.rows_of = dict(sorted(rows_of.items()))
        self.adaptive = adaptive
        self._longest = max(self.rows_of)
        if adaptive and (not self._longest or self.rows_of != {s: s + 1 for s in range(self._longest + 1)}):
            raise ConfigError(f"draft lengths are chosen among chains of every length, the ladder has {self.rows_of}")
        wanted = [Bucket(b, t, s) for b in self.batches for s, t in self.rows_of.items()]
        if adaptive:
            wanted = [choice_bucket(batch, self._longest) for batch in self.batches]
        self._steps = BucketLadder(wanted)
        self.buckets = tuple(self._steps)
        most = None if must_fit else MAX_WIDE_ROWS
        self._wide = {
            WIDE: self._wide_steps(*wide, WIDE, most),
            PROPOSED: self._wide_steps(proposed, 0, PROPOSED),
            PLAIN: self._wide_steps((longer + 1,) if longer else (), longer, PLAIN),
        }
        steps = [each for ladders in self._wide.values() for each in reversed(ladders.values())]
        self.wide_buckets = tuple(bucket for each in steps for bucket in each)
        lengths = (0,) if adaptive else tuple(reversed(self.rows_of))
        self.first_tokens = tuple(first_token_bucket(length) for length in lengths)

    def choose(self, num_active: int, num_speculative_tokens: int) -> Bucket:
        """The smallest bucket for `num_active` slots at a draft length; if the device chooses, for all draft lengths.

        Raises ConfigError when no batch is large enough or the draft length has no bucket.
        """
        if num_speculative_tokens not in self.rows_of:
            raise ConfigError(
                f"num_speculative_tokens {num_speculative_tokens} has no bucket; the ladder has {sorted(self.rows_of)}"
            )
        if self.adaptive:
            return self._steps.choose(num_active, self._longest, CHOICE)
        return self._steps.choose(num_active, num_speculative_tokens)

    def _wide_steps(
        self, sizes: Iterable[int], num_speculative_tokens: int, variant: str, most: int | None = MAX_WIDE_ROWS
    ) -> dict[int, BucketLadder]:
        """Wide steps of a variant by rows a slot, ascending. most: the limit on rows of all slots; None: no limit."""
        return {
            rows: BucketLadder(
                Bucket(batch, rows, num_speculative_tokens, variant)
                for batch in self.batches
                if most is None or batch * rows <= most
            )
            for rows in sorted(set(sizes))
        }

    def wide_steps(self, num_active: int, variant: str) -> list[Bucket]:
        """The wide steps of a variant for `num_active` slots: for each T, ascending, the smallest batch that fits.

        PLAIN gives the steps of the longer draft length.
        """
        fitting = [[step for step in each if step.batch >= num_active] for each in self._wide[variant].values()]
        return [steps[-1] for steps in fitting if steps]

    def choose_wide(self, num_active: int) -> Bucket:
        """The smallest bucket that verifies the host's proposals for `num_active` slots. Raises ConfigError if none."""
        steps = self.wide_steps(num_active, WIDE)
        if not steps:
            raise ConfigError(f"no bucket verifies what the host proposes to {num_active} slots")
        return steps[0]

    def choose_proposed(self, num_active: int, most_rows: int) -> Bucket | None:
        """The bucket that verifies the speculator's proposals for `num_active` slots with the most rows a slot.

        most_rows  the largest T
        Returns None if no bucket fits.
        """
        steps = [step for step in self.wide_steps(num_active, PROPOSED) if step.rows <= most_rows]
        return steps[-1] if steps else None

    def first_token(self, num_speculative_tokens: int) -> Bucket:
        """The bucket that chooses a first token and makes this many drafts; if the device chooses S, it makes none."""
        return first_token_bucket(0 if self.adaptive else num_speculative_tokens)

    @property
    def programs(self) -> Iterator[Bucket]:
        """The buckets of all programs, the largest first; the bodies of a choice come before its opening."""
        yield from self.wide_buckets
        for bucket in self.buckets:
            yield from reversed(bodies_of(bucket))
            yield bucket
        yield from self.first_tokens
