"""Stop strings: find the first one in a text that arrives in pieces, and hold back what could begin one.

An Aho-Corasick automaton, so that a character costs the same however many stop strings there are and however
long they are. It knows no tokens.
"""

from collections import deque
from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Searches one stream of text for stop strings.

    The match that is completed first, reading character by character, wins; of several that end at the same
    character the longest. So the answer does not depend on how the text was cut into pieces, and a complete
    match never waits for a longer one. Aho and Corasick, "Efficient string matching", CACM 18(6), 1975.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]  # the longest proper suffix of a node's text that is a node too
        self._match: list[str | None] = [None]  # the longest stop string that ends a node's text
        for stop in stops:
            self._insert(stop)
        self._link()
        self._node = 0
        self._held = ""

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self._children[node].get(character)
            if child is None:
                child = len(self._children)
                self._children[node][character] = child
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._fallback.append(0)
                self._match.append(None)
            node = child
        self._match[node] = stop

    def _link(self) -> None:
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._children[node].items():
                self._fallback[child] = self._next(self._fallback[node], character)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fallback[child]]
                queue.append(child)

    def _next(self, node: int, character: str) -> int:
        while node:
            child = self._children[node].get(character)
            if child is not None:
                return child
            node = self._fallback[node]
        return self._children[0].get(character, 0)

    @property
    def num_held(self) -> int:
        """Characters taken that are not certain yet."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take more text; return what of it is certain to be output, and the stop string found in it.

        After a match the text returned ends before the stop string, and what follows is dropped.
        Time: amortised O(1) a character.
        """
        node = self._node
        start = len(self._held)
        whole = self._held + text
        for index, character in enumerate(text, start):
            node = self._next(node, character)
            stop = self._match[node]
            if stop is not None:
                self._node, self._held = 0, ""
                return whole[: index + 1 - len(stop)], stop
        certain = len(whole) - self._depth[node]
        self._node, self._held = node, whole[certain:]
        return whole[:certain], None

    def finish(self) -> str:
        """Give back what was held: no more text follows, so it begins no stop string."""
        held, self._held, self._node = self._held, "", 0
        return held
