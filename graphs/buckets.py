"""A bucket is a size for which a step is built, captured and replayed; a step runs in the smallest that fits."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lowlat.errors import ConfigError

__all__ = ["Bucket", "BucketLadder"]


@dataclass(frozen=True, order=True)
class Bucket:
    """The sizes of a step: B slots, T rows a slot, and the draft length S, the drafts that it makes for each slot.

    variant  tells steps of the same sizes apart, by a name of `lowlat.step.variants`; "": the plain step
    """

    batch: int
    rows: int
    num_speculative_tokens: int
    variant: str = ""

    def __str__(self) -> str:
        name = f"batch {self.batch}, {self.rows} rows, S = {self.num_speculative_tokens}"
        return f"{name}, {self.variant}" if self.variant else name


class BucketLadder:
    """Buckets in the order of capture into one memory pool: the most rows first, then the most slots."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._buckets = tuple(
            sorted(set(buckets), key=lambda each: (each.batch * each.rows, each.batch, each), reverse=True)
        )
        self._like: dict[tuple[int, str], list[Bucket]] = {}  # by draft length and variant, the fewest slots first
        for bucket in sorted(self._buckets):
            self._like.setdefault((bucket.num_speculative_tokens, bucket.variant), []).append(bucket)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def __len__(self) -> int:
        return len(self._buckets)

    def choose(self, num_active: int, num_speculative_tokens: int, variant: str = "") -> Bucket:
        """The bucket of a draft length and a variant with the fewest slots that hold `num_active`.

        Raises ConfigError if there is none.
        """
        like = self._like.get((num_speculative_tokens, variant))
        if like is None:
            lengths = sorted(length for length, other in self._like if other == variant)
            raise ConfigError(
                f"num_speculative_tokens {num_speculative_tokens} has no bucket{f' ({variant})' if variant else ''}; "
                f"the ladder has {lengths}"
            )
        for bucket in like:
            if bucket.batch >= num_active:
                return bucket
        raise ConfigError(f"{num_active} active slots exceed the largest bucket, {like[-1].batch} (max_batch)")
