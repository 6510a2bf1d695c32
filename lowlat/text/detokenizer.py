"""A detokenizer makes one request's text step by step: certain text goes out at once, stop strings end it.

It knows the tokenizer only through `TextCodec.open_stream`, and nothing of requests or steps.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowlat.errors import RequestError
from lowlat.text.codec import TextCodec
from lowlat.text.stops import StopMatcher

__all__ = ["IncrementalDetokenizer", "Marker", "TextDelta"]


class Marker(str):
    """The spelling of a token that stands between pieces of text and is no part of it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that one push made certain.

    text             to be output; joined over all pushes and `finish`, the decoding of all ids used
    stopped          the stop string that ended the text, or None
    num_tokens_used  of the ids pushed: all, or up to and with the one that completed the stop string
    """

    text: str
    stopped: str | None
    num_tokens_used: int


class IncrementalDetokenizer:
    """Decodes a request's token ids as they come, however many at a time.

    The joined text equals `codec.decode` of all ids at once. Held back are an incomplete character (U+FFFD
    only at `finish`), a run of byte-fallback tokens until another token ends it, and text that could begin a
    stop string. The stop string completed first wins, the longest of those completed by the same character;
    the text is cut before it.

    prefix_ids          tokens before the first one, such as the prompt: then a leading space that the
                        tokenizer strips at the start of a text is kept. Text that the prefix already made
                        certain is not output; a character that it left incomplete is
    stop_enabled_after  tokens before which no stop string may match: a match lies wholly in the text that
                        later tokens make certain
    markers             token ids to be told of by `take_pieces`, and their spellings
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
        """Return what was held back; no token follows. `stopped` names a stop string found only here."""
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
        """Pass text through the stop strings, if they may match already."""
        if self._matcher is not None and self._num_tokens > self._stop_enabled_after:
            text, self.stopped = self._matcher.feed(text)
        self._num_certain += len(text)
        return text

    def take_pieces(self, text: str) -> list[str]:
        """Cut text, which the last `push` or `finish` returned, where markers stood; they are among the pieces."""
        pieces: list[str] = []
        start = self._num_certain - len(text)
        done = 0
        while self._marks and (self._finished or self._marks[0][0] <= self._num_certain):
            place, marker = self._marks.popleft()
            place = min(place, self._num_certain)  # bytes held before it and others after it can make one character
            if place - start > done:
                pieces.append(text[done : place - start])
                done = place - start
            pieces.append(marker)
        if done < len(text):
            pieces.append(text[done:])
        return pieces
