"""This module converts between an imposed acceptance probability of drafts and the mean tokens a step."""

from lowlat.errors import ConfigError

__all__ = ["acceptance_for", "expected_accept_length"]

BISECTIONS = 60  # enough for the last bit of a probability


def expected_accept_length(acceptance: float, num_speculative_tokens: int) -> float:
    """Return the mean tokens a step, bonus included, if each draft is accepted with probability p = `acceptance`.

    A draft counts only if all before it were accepted: 1 + p + p^2 + ... + p^S.
    """
    return sum(acceptance**place for place in range(num_speculative_tokens + 1))


def acceptance_for(accept_length: float, num_speculative_tokens: int) -> float:
    """Return the acceptance probability that gives `accept_length` tokens a step.

    Raises ConfigError for a length outside 1 to num_speculative_tokens + 1.
    """
    if not 1.0 <= accept_length <= num_speculative_tokens + 1:
        raise ConfigError(
            f"simulated_accept_length must be from 1 to num_speculative_tokens + 1 = {num_speculative_tokens + 1}, "
            f"got {accept_length}"
        )
    if accept_length == num_speculative_tokens + 1:
        return 1.0 if num_speculative_tokens else 0.0
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = expected_accept_length(middle, num_speculative_tokens) <= accept_length
        low, high = (middle, high) if below else (low, middle)
    return low
