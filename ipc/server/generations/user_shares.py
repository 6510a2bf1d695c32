"""This module counts what each user has of a server's places, and says when one has its share."""

from collections import Counter

__all__ = ["FREE_SHARE", "UserShares"]

FREE_SHARE = 3  # a user may take so many times the places that it leaves to others


class UserShares:
    """The requests of users, by account, and the bytes of their prompts that wait.

    max_bytes  of prompts that wait, of all users
    shared     several users are let in: none may take all places
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
        """Whether a user has its share of the places, of which so many are free."""
        return self._shared and self.live[account] >= FREE_SHARE * num_free

    def has_space(self, account: str, num_bytes: int) -> bool:
        """Whether a user's prompt of so many bytes may wait; where no other waits, any may."""
        num_free = self._max_bytes - self.num_prompt_bytes
        if self._shared:
            num_free = min(num_free, FREE_SHARE * num_free - self._bytes[account])
        return not self.num_prompt_bytes or num_bytes <= num_free

    def begin(self, account: str) -> None:
        """Count a request."""
        self.num_live += 1
        self.live[account] += 1

    def end(self, account: str) -> None:
        """Count a request no more."""
        self.num_live -= 1
        _count_down(self.live, account)

    def enter(self, account: str) -> None:
        """Count a request as inside the engine."""
        self.inside[account] += 1

    def come_out(self, account: str) -> None:
        """Count a request as outside."""
        _count_down(self.inside, account)

    def hold_bytes(self, account: str, num_bytes: int) -> None:
        """Count bytes of a prompt that wait."""
        self.num_prompt_bytes += num_bytes
        self._bytes[account] += num_bytes

    def release_bytes(self, account: str, num_bytes: int) -> None:
        """Count bytes of a prompt that waited as free."""
        self.num_prompt_bytes -= num_bytes
        _count_down(self._bytes, account, num_bytes)


def _count_down(counts: Counter[str], account: str, count: int = 1) -> None:
    counts[account] -= count
    if not counts[account]:
        del counts[account]  # else every account that was ever used would stay
