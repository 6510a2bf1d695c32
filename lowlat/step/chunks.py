"""This module says how many of a prompt's chunks run at once: the numbers that have a program, and the next one."""

from collections.abc import Sequence

__all__ = ["chunk_counts", "chunks_at_once"]


def chunk_counts(most: int) -> tuple[int, ...]:
    """How many chunks of a prompt may run at once, ascending: 1, 2, 3, 4, 6, 8, 12, ... up to the most."""
    return tuple(sorted({min(odd << shift, most) for odd in (1, 3) for shift in range(most.bit_length())}))


def chunks_at_once(left: int, most: int, counts: Sequence[int]) -> int:
    """How many of the `left` chunks run next: at most `most`, by programs for `counts` chunks, of which one is 1.

    All run by a program with room for at most one chunk more; else as many as fill a program, since reading the weights
    once more takes less than multiplying two empty chunks.
    """
    fitting = [count for count in counts if count <= most]
    least = min((count for count in fitting if count >= left), default=left + 2)
    return left if least - left <= 1 else max(count for count in fitting if count <= left)
