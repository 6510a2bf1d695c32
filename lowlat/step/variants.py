"""This module names the variants of a step's buckets, which tell steps of the same sizes apart.

PLAIN        no variant: the step verifies the drafts of an earlier step, and makes the next ones
FIRST_TOKEN  the step after a prompt's last chunk: one slot, and one row that prefill has computed
WIDE         the step of many rows that verifies the host's proposals, over all of the KV cache
PROPOSED     the step of many rows that verifies proposals which its speculator makes first, and drafts nothing
CHOICE       the step whose draft length, at most S, the device chooses: an opening, then one of its bodies
EXTENDED     the body of S = 0 in which the draft model runs over the waiting positions
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

# keys of two further programs among those of prefill, whose keys are their numbers of positions
PASS = 0  # the pass that computes a prompt's logprobs from prefill's residual stream
REFRESH = -1  # SpecPV's refresh of a slot that decodes
PLAIN = ""
FIRST_TOKEN = "first token"
WIDE = "wide"
PROPOSED = "wide, proposed on the device"
CHOICE = "chosen draft length"
EXTENDED = "draft model runs"


def first_token_bucket(num_speculative_tokens: int) -> Bucket:
    """The bucket of a step that chooses a prompt's first token and makes this many drafts."""
    return Bucket(1, 1, num_speculative_tokens, FIRST_TOKEN)


def choice_bucket(batch: int, num_speculative_tokens: int) -> Bucket:
    """The bucket of steps that choose a draft length up to this one."""
    return Bucket(batch, num_speculative_tokens + 1, num_speculative_tokens, CHOICE)


def is_choice(bucket: Bucket) -> bool:
    """Whether the step chooses its draft length, and so is an opening and bodies."""
    return bucket.variant == CHOICE


def bodies_of(bucket: Bucket) -> tuple[Bucket, ...]:
    """The bodies of a step, in the order of the choice's index: chains of S = 0 and on, then EXTENDED.

    () for a step that chooses nothing.
    """
    if not is_choice(bucket):
        return ()
    chains = (Bucket(bucket.batch, length + 1, length) for length in range(bucket.num_speculative_tokens + 1))
    return (*chains, Bucket(bucket.batch, 1, 0, EXTENDED))


def may_repeat(bucket: Bucket) -> bool:
    """Whether a device loop may repeat the step: neither it nor the step after it needs the host."""
    return bucket.variant not in (FIRST_TOKEN, WIDE, PROPOSED)
