"""This module decides how many of a prompt's chunks run at once, among the numbers that have a program."""

from collections.abc import Sequence

__all__ = ["chunk_counts", "chunks_at_once"]


def chunk_counts(most: int) -> tuple[int, ...]:
    """The numbers of chunks that have a program, ascending: 1, 2, 3, 4, 6, 8, 12, ... and `most`."""
    return tuple(sorted({min(odd << shift, most) for odd in (1, 3) for shift in range(most.bit_length())}))


def chunks_at_once(left: int, most: int, counts: Sequence[int]) -> int:
    """How many of the `left` chunks run next.

    most    the largest number
    counts  numbers of chunks that have a program, 1 among them
    All of them run if a program has capacity for them and at most one more. Otherwise as many run as fill a program:
    to read the weights once more takes less time than to multiply two empty chunks.
    """
    fitting = [count for count in counts if count <= most]
    least = min((count for count in fitting if count >= left), default=left + 2)
    return left if least - left <= 1 else max(count for count in fitting if count <= left)
