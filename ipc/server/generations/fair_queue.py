"""Items that wait for their turn: each client's in order, a user's clients by turns, and the users by turns."""

from collections import deque
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

__all__ = ["FairQueue"]

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
