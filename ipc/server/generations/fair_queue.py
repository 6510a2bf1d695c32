"""The requests that wait for a slot: each client's in order, the clients by turns."""

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """First in, first out for each owner; round robin between owners, so that nobody's many delay another's one.

    num_items   those that wait, of all owners
    """

    def __init__(self) -> None:
        self._owners: dict[Hashable, list[Item]] = {}  # by turns
        self.num_items = 0

    def push(self, owner: Hashable, item: Item) -> None:
        """Append to the owner's; an owner who had none comes last in turn."""
        items = self._owners.get(owner)
        if items is None:
            self._owners[owner] = [item]
        else:
            items.append(item)
        self.num_items += 1

    def pop(self) -> Item:
        """The oldest of the owner whose turn it is; somebody must wait."""
        owner = next(iter(self._owners))
        items = self._owners.pop(owner)
        item = items.pop(0)
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
