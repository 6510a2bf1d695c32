"""A detokenizer decodes one request's text step by step: it outputs certain text at once, and ends at stop strings.

It uses the tokenizer only through `TextCodec.open_stream`, and does not depend on requests or steps.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowlat.errors import RequestError
from lowlat.text.codec import TextCodec
from lowlat.text.stops import StopMatcher

__all__ = ["IncrementalDetokenizer", "Marker", "TextDelta"]


class Marker(str):
    """The spelling of a token between pieces of text; it is not part of the text."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that became certain in one push.

    text             to be output; joined over all pushes and `finish`, it is the decoding of all ids used
    stopped          the stop string that ended the text, or None
    num_tokens_used  how many of the pushed ids: all, or up to and including the one that completed the stop string
    """

    text: str
    stopped: str | None
    num_tokens_used: int


class IncrementalDetokenizer:
    """Decodes a request's token ids as they come, however many at a time.

    The joined text equals `codec.decode` of all ids at once. It holds back an incomplete character (U+FFFD only at
    `finish`), a run of byte-fallback tokens until another token ends it, and text that could begin a stop string. The
    stop string completed first wins, and the longest of those completed by the same character; the text is cut before
    it.

    prefix_ids          tokens before the first one, such as the prompt. With them a leading space is kept, which the
                        tokenizer strips at the start of a text. Text that the prefix already made certain is not
                        output; a character that it left incomplete is
    stop_enabled_after  no stop string matches before so many tokens: a match lies wholly in the text that later tokens
                        make certain
    markers             token ids that `take_pieces` reports, and their spellings
    Time: amortised O(1) a token and a character of text. Raises RequestError for an empty stop string.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        prefix_ids: Sequence[int] = (),
        stop_enabled_after: int = 0,
        markers: Mapping[int, str] | None = None,
    ) -> None:
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop must be a sequence of non-empty strings, got {stop!r:.80}")
        self._stream = codec.open_stream(skip_special_tokens=skip_special_tokens)
        if prefix_ids:
            self._stream.prime(prefix_ids)
        self._matcher = StopMatcher(stop) if stop else None
        self._stop_enabled_after = stop_enabled_after
        self._num_tokens = 0
        self._finished = False
        self.stopped: str | None = None
        self._markers = markers or {}
        self._marks: deque[tuple[int, Marker]] = deque()  # characters of the text before each
        self._num_certain = 0

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take new tokens; after a stop string they are ignored. Raises RuntimeError after `finish`."""
        if self._finished:
            raise RuntimeError("push after finish")
        if self.stopped is not None:
            return TextDelta("", self.stopped, 0)
        pieces = []
        for used, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            if token_id in self._markers:
                held = self._stream.num_held + (0 if self._matcher is None else self._matcher.num_held)
                self._marks.append((self._num_certain + held, Marker(self._markers[token_id])))
            text = self._stream.push(token_id)
            if text:
                pieces.append(self._match(text))
                if self.stopped is not None:
                    return TextDelta("".join(pieces), self.stopped, used)
        return TextDelta("".join(pieces), None, len(token_ids))

    def finish(self) -> str:
        """Return the held text; no token follows. `stopped` names a stop string found only here."""
        if self._finished or self.stopped is not None:
            self._finished = True
            return ""
        self._finished = True
        text = self._match(self._stream.finish())
        if self.stopped is None and self._matcher is not None:
            held = self._matcher.finish()
            self._num_certain += len(held)
            text += held
        return text

    def _match(self, text: str) -> str:
        """Search text for stop strings, once they may match."""
        if self._matcher is not None and self._num_tokens > self._stop_enabled_after:
            text, self.stopped = self._matcher.feed(text)
        self._num_certain += len(text)
        return text

    def take_pieces(self, text: str) -> list[str]:
        """Cut the text of the last `push` or `finish` at its markers; these are among the pieces."""
        pieces: list[str] = []
        start = self._num_certain - len(text)
        done = 0
        while self._marks and (self._finished or self._marks[0][0] <= self._num_certain):
            place, marker = self._marks.popleft()
            place = min(place, self._num_certain)  # bytes before and after a marker can form one character
            if place - start > done:
                pieces.append(text[done : place - start])
                done = place - start
            pieces.append(marker)
        if done < len(text):
            pieces.append(text[done:])
        return pieces
