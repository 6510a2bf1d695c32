"""This module counts the places that each user takes in a server, and limits a user to a share of them."""

from collections import Counter

__all__ = ["FREE_SHARE", "UserShares"]

FREE_SHARE = 3  # a user may take this many times the places that it leaves to others


class UserShares:
    """Counts the requests of users, by account, and the bytes of their waiting prompts.

    max_bytes  the most bytes of waiting prompts, of all users together
    shared     several users are admitted, so none may take all places
    live              requests under way, by account
    inside            those inside the engine, by account
    num_live          requests of all users
    num_prompt_bytes  bytes of prompts that wait, of all users
    """

    def __init__(self, max_bytes: int, *, shared: bool) -> None:
        self._max_bytes, self._shared = max_bytes, shared
        self.live: Counter[str] = Counter()
        self.inside: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self.num_live = self.num_prompt_bytes = 0

    def is_full(self, account: str, num_free: int) -> bool:
        """Return whether a user has used up its share, if `num_free` places are free."""
        return self._shared and self.live[account] >= FREE_SHARE * num_free

    def has_space(self, account: str, num_bytes: int) -> bool:
        """Return whether a prompt of `num_bytes` of a user may wait; if no other prompt waits, any may."""
        num_free = self._max_bytes - self.num_prompt_bytes
        if self._shared:
            num_free = min(num_free, FREE_SHARE * num_free - self._bytes[account])
        return not self.num_prompt_bytes or num_bytes <= num_free

    def begin(self, account: str) -> None:
        """Count a request."""
        self.num_live += 1
        self.live[account] += 1

    def end(self, account: str) -> None:
        """Stop counting a request."""
        self.num_live -= 1
        _count_down(self.live, account)

    def enter(self, account: str) -> None:
        """Count a request as inside the engine."""
        self.inside[account] += 1

    def come_out(self, account: str) -> None:
        """Count a request as outside the engine."""
        _count_down(self.inside, account)

    def hold_bytes(self, account: str, num_bytes: int) -> None:
        """Count bytes of a waiting prompt."""
        self.num_prompt_bytes += num_bytes
        self._bytes[account] += num_bytes

    def release_bytes(self, account: str, num_bytes: int) -> None:
        """Stop counting bytes of a waiting prompt."""
        self.num_prompt_bytes -= num_bytes
        _count_down(self._bytes, account, num_bytes)


def _count_down(counts: Counter[str], account: str, count: int = 1) -> None:
    counts[account] -= count
    if not counts[account]:
        del counts[account]  # otherwise every account ever used would stay
