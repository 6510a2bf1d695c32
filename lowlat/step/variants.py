"""This module names the variants of a step's buckets, which tell steps of the same sizes apart.

The plain step verifies drafts that an earlier step made and makes the next ones.

    PLAIN        no variant: the plain step
    FIRST_TOKEN  the step after a prompt's last chunk: one slot, one row, which comes out of prefill
    WIDE         the step of many rows that verifies what the host has proposed, over all of the KV cache
    PROPOSED     the step of many rows that verifies what its speculator proposes when it opens, and drafts nothing
    CHOICE       the step whose draft length the device chooses, S at most: an opening, then one of its bodies
    EXTENDED     the body of S = 0 in which the draft model runs over what waits for it
"""

from lowlat.graphs import Bucket

__all__ = [
    "CHOICE",
    "EXTENDED",
    "FIRST_TOKEN",
    "PASS",
    "PLAIN",
    "PROPOSED",
    "REFRESH",
    "WIDE",
    "bodies_of",
    "choice_bucket",
    "first_token_bucket",
    "is_choice",
    "may_repeat",
]

# keys among programs of prefill, next to the positions that these take
PASS = 0  # a pass over what they leave
REFRESH = -1  # of a slot that decodes, with SpecPV
PLAIN = ""
FIRST_TOKEN = "first token"
WIDE = "wide"
PROPOSED = "wide, proposed on the device"
CHOICE = "chosen draft length"
EXTENDED = "draft model runs"


def first_token_bucket(num_speculative_tokens: int) -> Bucket:
    """The bucket of a prompt's first token, which makes so many drafts."""
    return Bucket(1, 1, num_speculative_tokens, FIRST_TOKEN)


def choice_bucket(batch: int, num_speculative_tokens: int) -> Bucket:
    """The bucket of steps that choose a draft length up to this one."""
    return Bucket(batch, num_speculative_tokens + 1, num_speculative_tokens, CHOICE)


def is_choice(bucket: Bucket) -> bool:
    """Whether the step chooses its draft length, and so is an opening and bodies."""
    return bucket.variant == CHOICE


def bodies_of(bucket: Bucket) -> tuple[Bucket, ...]:
    """The buckets among which a step chooses, by the number of the choice: chains of S = 0 and on, then EXTENDED.

    () for a step that chooses nothing.
    """
    if not is_choice(bucket):
        return ()
    chains = (Bucket(bucket.batch, length + 1, length) for length in range(bucket.num_speculative_tokens + 1))
    return (*chains, Bucket(bucket.batch, 1, 0, EXTENDED))


def may_repeat(bucket: Bucket) -> bool:
    """Whether the device may repeat the step by itself: the host has no part in it, nor in what follows it."""
    return bucket.variant not in (FIRST_TOKEN, WIDE, PROPOSED)
