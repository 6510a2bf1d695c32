"""A fair queue gives each client's items in order, and takes turns between a user's clients and between users."""

from collections import deque
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

__all__ = ["FairQueue", "RankedQueue"]

Item = TypeVar("Item")
NOTHING: Mapping[Any, int] = MappingProxyType({})


class FairQueue(Generic[Item]):
    """First in, first out for each client; round robin between a user's clients, and between users.

    So many items of one user do not delay one item of another, over any number of connections.

    num_items   waiting items of all users
    """

    def __init__(self) -> None:
        self._users: dict[Hashable, dict[Hashable, deque[Item]]] = {}  # users, and their clients, in order of turns
        self.num_items = 0

    def push(self, user: Hashable, client: Hashable, item: Item) -> None:
        """Append to a client's items; a user or client that had none gets the last turn."""
        self._users.setdefault(user, {}).setdefault(client, deque()).append(item)
        self.num_items += 1

    def pop(self, served: Mapping[Any, int] = NOTHING) -> Item:
        """Take the oldest item of the client whose turn it is; the queue must not be empty.

        served   how much each user has already; the user with the least is first
        """
        user = min(self._users, key=lambda user: served.get(user, 0))  # the first of equal ones
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

    num_items   waiting items of all priorities
    """

    def __init__(self) -> None:
        self._queues: dict[int, FairQueue[Item]] = {}
        self.num_items = 0

    @property
    def priority(self) -> int:
        """The highest priority of a waiting item; the queue must not be empty."""
        return max(self._queues)

    def push(self, priority: int, user: Hashable, client: Hashable, item: Item) -> None:
        """Append an item to a client's items of this priority."""
        self._queues.setdefault(priority, FairQueue()).push(user, client, item)
        self.num_items += 1

    def pop(self, served: Mapping[Any, int] = NOTHING) -> Item:
        """Take the next item of the highest priority, as `FairQueue.pop` does."""
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
