"""The requests that wait for a slot: each client's in order, the clients by turns."""

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """First in, first out for each owner; round robin between owners, so that nobody's many delay another's one.

    num_items   those that wait, of all owners
    """

    def __init__(self) -> None:
        self._owners: OrderedDict[Hashable, deque[Item]] = OrderedDict()
        self.num_items = 0

    def push(self, owner: Hashable, item: Item) -> None:
        """Append to the owner's; an owner who had none comes last in turn."""
        self._owners.setdefault(owner, deque()).append(item)
        self.num_items += 1

    def pop(self) -> Item:
        """The oldest of the owner whose turn it is. Raises KeyError when nobody waits."""
        owner, items = self._owners.popitem(last=False)
        item = items.popleft()
        self.num_items -= 1
        if items:
            self._owners[owner] = items
        return item

    def remove(self, owner: Hashable, item: Item) -> bool:
        """Take one out of the middle; False if it does not wait here."""
        items = self._owners.get(owner)
        if items is None or item not in items:
            return False
        items.remove(item)
        self.num_items -= 1
        if not items:
            del self._owners[owner]
        return True
