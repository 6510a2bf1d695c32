"""A fair queue takes each client's items in order, a user's clients by turns, and the users by turns."""

from collections import deque
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

__all__ = ["FairQueue", "RankedQueue"]

Item = TypeVar("Item")
NOTHING: Mapping[Any, int] = MappingProxyType({})


class FairQueue(Generic[Item]):
    """First in, first out for each client; round robin between a user's clients, and between users.

    So a user's many items do not delay another user's one, over however many connections they come.

    num_items   those that wait, of all users
    """

    def __init__(self) -> None:
        self._users: dict[Hashable, dict[Hashable, deque[Item]]] = {}  # both by turns
        self.num_items = 0

    def push(self, user: Hashable, client: Hashable, item: Item) -> None:
        """Append to a client's items; a user or a client that had none comes last in turn."""
        self._users.setdefault(user, {}).setdefault(client, deque()).append(item)
        self.num_items += 1

    def pop(self, served: Mapping[Any, int] = NOTHING) -> Item:
        """Take the oldest item of the client whose turn it is; the queue must not be empty.

        served   how much each user has already: the user that has least is first
        """
        user = min(self._users, key=lambda user: served.get(user, 0))  # of several the first
        clients = self._users.pop(user)
        client = next(iter(clients))
        items = clients.pop(client)
        item = items.popleft()
        self.num_items -= 1
        if items:
            clients[client] = items
        if clients:
            self._users[user] = clients
        return item

    def remove(self, user: Hashable, client: Hashable, item: Item) -> bool:
        """Take one out of the middle; False if it does not wait here."""
        clients = self._users.get(user, {})
        items = clients.get(client)
        if items is None or item not in items:
            return False
        items.remove(item)
        self.num_items -= 1
        if not items:
            del clients[client]
            if not clients:
                del self._users[user]
        return True


class RankedQueue(Generic[Item]):
    """A fair queue for each priority, the highest first.

    num_items   those that wait, of all priorities
    """

    def __init__(self) -> None:
        self._queues: dict[int, FairQueue[Item]] = {}
        self.num_items = 0

    @property
    def priority(self) -> int:
        """The highest priority of those that wait; the queue must not be empty."""
        return max(self._queues)

    def push(self, priority: int, user: Hashable, client: Hashable, item: Item) -> None:
        """Append to a client's items of a priority."""
        self._queues.setdefault(priority, FairQueue()).push(user, client, item)
        self.num_items += 1

    def pop(self, served: Mapping[Any, int] = NOTHING) -> Item:
        """Take the item whose turn it is, as `FairQueue.pop` does among those of the highest priority."""
        priority = self.priority
        item = self._queues[priority].pop(served)
        self._count_down(priority)
        return item

    def remove(self, priority: int, user: Hashable, client: Hashable, item: Item) -> bool:
        """Take one out of the middle; False if it does not wait here."""
        queue = self._queues.get(priority)
        if queue is None or not queue.remove(user, client, item):
            return False
        self._count_down(priority)
        return True

    def _count_down(self, priority: int) -> None:
        self.num_items -= 1
        if not self._queues[priority].num_items:
            del self._queues[priority]
