"""This module finds the first stop string in a text that arrives in pieces, and holds back what could begin one.

Nothing is built before the text comes: a request with many long stop strings starts as soon as
one without.
"""

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Searches one stream of text for stop strings.

    The match that is completed first, reading character by character, wins; of several that end at the same
    character the longest. So the answer does not depend on how the text was cut into pieces, and a complete
    match never waits for a longer one. Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM J.
    Comput. 6(2), 1977, for each string by itself; their failure function is made only as far as a string has matched.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._beginning: dict[str, list[int]] = {}  # by its first character
        for place, stop in enumerate(self._stops):
            self._beginning.setdefault(stop[0], []).append(place)
        self._borders = [[0, 0] for _ in self._stops]  # by length matched: the longest that is both start and end
        self._matched: dict[int, int] = {}  # characters of a string that end the text, where there are any
        self._held = ""

    @property
    def num_held(self) -> int:
        """Characters taken that are not certain yet."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take more text; return what of it is certain to be output, and the stop string found in it.

        After a match the text returned ends before the stop string, and what follows is dropped.
        Time: amortised O(1) a character for each string that has begun to match, and one for all others.
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
        """Give back what was held: no more text follows, so it begins no stop string."""
        held, self._held, self._matched = self._held, "", {}
        return held

    def _go_on(self, character: str) -> int:
        """Take a character to all strings that have begun to match; the longest that it completes, -1 for none."""
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
        """The longest proper start of a string that also ends its first `length` characters."""
        stop, borders = self._stops[place], self._borders[place]
        while len(borders) <= length:
            border, last = borders[-1], stop[len(borders) - 1]
            while border and stop[border] != last:
                border = borders[border]
            borders.append(border + (stop[border] == last))
        return borders[length]
