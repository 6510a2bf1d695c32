"""This module finds the first stop string in a text that arrives in pieces, and holds back text that could begin one.

Nothing is built before the text comes: a request with many long stop strings starts as fast as one without.
"""

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Searches one stream of text for stop strings.

    The match that ends first wins; of several that end at the same character the longest wins. So the answer does not
    depend on the pieces of the text, and a complete match never waits for a longer one. Each string is searched for by
    the algorithm of Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6(2), 1977. The
    failure function is computed only as far as a string has matched.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._beginning: dict[str, list[int]] = {}  # by its first character
        for place, stop in enumerate(self._stops):
            self._beginning.setdefault(stop[0], []).append(place)
        self._borders = [[0, 0] for _ in self._stops]  # by matched length: the longest border, both start and end
        self._matched: dict[int, int] = {}  # by string: how many of its first characters end the text, if any
        self._held = ""

    @property
    def num_held(self) -> int:
        """The number of characters held back."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take more text; return the text that is certain to be output, and the stop string that was found, or None.

        After a match the returned text ends before the stop string, and the text after it is dropped.
        Time a character: amortised O(1) for each string that has begun to match, and O(1) for all others together.
        """
        matched, beginning, stops = self._matched, self._beginning, self._stops
        if not matched and beginning.keys().isdisjoint(text):
            return text, None
        start = len(self._held)
        whole = self._held + text
        for index, character in enumerate(text, start):
            found = -1
            if matched:
                found = self._go_on(character)
            for place in beginning.get(character, ()):
                if place not in matched:
                    matched[place] = 1
                    if found < 0 and len(stops[place]) == 1:
                        found = place
            if found >= 0:
                self._matched, self._held = {}, ""
                return whole[: index + 1 - len(stops[found])], stops[found]
        certain = len(whole) - max(matched.values(), default=0)
        self._held = whole[certain:]
        return whole[:certain], None

    def finish(self) -> str:
        """Return the held text: nothing follows, so it begins no stop string."""
        held, self._held, self._matched = self._held, "", {}
        return held

    def _go_on(self, character: str) -> int:
        """Extend all begun matches by a character; returns the longest string that it completes, -1 for none."""
        found = -1
        for place, length in list(self._matched.items()):
            stop = self._stops[place]
            while length and stop[length] != character:
                length = self._border(place, length)
            if stop[length] == character:
                length += 1
            if not length:
                del self._matched[place]
                continue
            self._matched[place] = length
            if length == len(stop) and (found < 0 or length > len(self._stops[found])):
                found = place
        return found

    def _border(self, place: int, length: int) -> int:
        """The length of the longest proper prefix of a string that also ends its first `length` characters."""
        stop, borders = self._stops[place], self._borders[place]
        while len(borders) <= length:
            border, last = borders[-1], stop[len(borders) - 1]
            while border and stop[border] != last:
                border = borders[border]
            borders.append(border + (stop[border] == last))
        return borders[length]
