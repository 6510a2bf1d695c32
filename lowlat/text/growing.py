"""This module finds the tokens of a growing text that no later text can change.

Text is cut only where no token can span the cut, whatever follows: before a space between a word and a letter and, if
a pre-tokenizer separates words from punctuation, before a Chinese or Japanese full stop or comma between letters. The
text after the last cut is held back. A part is encoded after an anchor letter, whose tokens are removed again, so that
the tokenizer treats the part as the middle of a text. Cuts are possible for byte-level BPE, and for BPE of whole texts
in which no token continues after a space. For other tokenizers all text is held back until its end.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from lowlat.errors import RequestError

if TYPE_CHECKING:
    from lowlat.text.codec import TextCodec

__all__ = ["LONG", "Cuts", "GrowingPrompt", "GrowingText"]

ANCHORS = "aeiourst"
SPACE = "\u2581"
AT_SPACE = re.compile(r"(?:(?<=[^\W_])|(?<=[.,;:!?)]))(?= [^\W\d_])")
MARKS = "。，、！？；："
AT_MARKS = re.compile(rf"(?<=[^\W\d_])(?=[{MARKS}][^\W\d_])")
BEFORE = f" {MARKS}"  # characters that may follow a cut
WIDEST = 2  # characters after a cut that decide it
LONG = 1 << 16  # held characters above which the length is checked, since nothing else bounds them
CUTTING = frozenset({"ByteLevel", "Digits", "Split", "Metaspace"})


class Cuts:
    """Finds the places where texts of one tokenizer may be cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        model = tokenizer.model
        kinds = {part["type"] for part in _parts(_state(tokenizer.pre_tokenizer), "pretokenizers")}
        normal = {part["type"] for part in _parts(_state(tokenizer.normalizer), "normalizers")}
        self.patterns: tuple[re.Pattern[str], ...] = ()
        if isinstance(model, BPE) and kinds <= CUTTING:
            if "ByteLevel" in kinds and normal <= {"NFC"}:
                self.patterns = AT_SPACE, AT_MARKS
            elif "ByteLevel" not in kinds and normal <= {"Replace", "Prepend"} and not _joins(_state(model)):
                self.patterns = (AT_SPACE,)
        # no cut may lie within an added token, nor after one that absorbs the space after it
        self._added = []
        for token in tokenizer.get_added_tokens_decoder().values():
            content = token.content
            places = [place for place in range(1, len(content)) if content[place] in BEFORE]
            self._added += [(content[:place], content[place:]) for place in places]
            if token.rstrip:
                self._added.append((content, ""))

    def last(self, text: str, start: int) -> int | None:
        """The last place of a text, from `start` on, at which it may be cut; None without one."""
        places = sorted({match.start() for each in self.patterns for match in each.finditer(text, start)}, reverse=True)
        return next((place for place in places if place > 0 and not self._is_within(text, place)), None)

    def _is_within(self, text: str, place: int) -> bool:
        after = text[place:]
        return any(
            text.endswith(left, 0, place) and (after.startswith(right) or right.startswith(after))
            for left, right in self._added
        )


class GrowingText:
    """Encodes one text as it grows: `append` takes more of it, `rest` returns the ids that its end would add.

    encode    encodes a text, with or without the special tokens that the tokenizer puts around one. Raises RequestError
    is_start  whether the text begins its prompt, so that these special tokens are put around it
    """

    def __init__(self, cuts: Cuts, encode: Callable[[str, bool], Sequence[int]], *, is_start: bool) -> None:
        self._cuts, self._encode, self._is_start = cuts, encode, is_start
        self._held = ""
        self._is_first = True  # nothing was cut off yet
        self._anchor: tuple[str, list[int]] | None = None

    @property
    def held(self) -> str:
        """The text that is held back."""
        return self._held

    @property
    def num_held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def append(self, text: str) -> list[int]:
        """Add text; returns the token ids that became certain, which follow the earlier ones. Raises RequestError."""
        start = max(0, len(self._held) - WIDEST)
        held = self._held + text
        place = self._cuts.last(held, start)
        if place is None:
            self._held = held
            return []
        found = self._part(held[:place], ends=False)
        after = self._after(held[place:])
        if self._is_first and self._bare(held) != self._bare(held[:place]) + after:  # a token spans the cut
            self._held = held
            return []
        self._held, self._is_first = held[place:], False
        return found

    def rest(self) -> list[int]:
        """Return the token ids of the held text, as if the text ended here; more may still be appended."""
        return self.rest_as(self._held)

    def rest_as(self, text: str) -> list[int]:
        """Do as `rest`, with `text` instead of the held text."""
        return self._part(text, ends=True) if text or (self._is_first and self._is_start) else []

    def _part(self, text: str, *, ends: bool) -> list[int]:
        bare = self._bare(text) if self._is_first else self._after(text)
        if not self._is_start:
            return bare
        if self._is_first and ends:
            return list(self._encode(text, True))
        before, after = self._around(text)
        return [*(before if self._is_first else ()), *bare, *(after if ends else ())]

    def _around(self, text: str) -> tuple[list[int], list[int]]:
        """Find the special tokens that the tokenizer puts before and after a text."""
        whole, bare = list(self._encode(text, True)), self._bare(text)
        for place in range(len(whole) - len(bare) + 1):
            if whole[place : place + len(bare)] == bare:
                return whole[:place], whole[place + len(bare) :]
        raise RequestError(f"the tokenizer changes a text that it puts tokens around: {text!r:.80}")

    def _bare(self, text: str) -> list[int]:
        return list(self._encode(text, False))

    def _after(self, text: str) -> list[int]:
        """Encode a text as the continuation of a word."""
        known = [self._anchor] if self._anchor is not None else []
        for anchor, own in [*known, *((each, self._bare(each)) for each in ANCHORS)]:
            ids = self._bare(anchor + text)
            if ids[: len(own)] == own:
                self._anchor = anchor, own
                return ids[len(own) :]
        raise RequestError(f"the tokenizer makes no token border before {text!r:.80}")


class GrowingPrompt:
    """Encodes a prompt's pieces: `append` returns the ids that became certain, `rest` those that the end adds.

    Consecutive pieces of text are encoded as one text. Token ids between them are borders that the caller chooses: text
    before and after them is encoded separately. If the prompt is only text, the tokenizer's special tokens are put
    around it, unless add_special_tokens is false.
    codec  None: there is no tokenizer, and text is refused
    """

    def __init__(
        self,
        codec: "TextCodec | None",
        *,
        max_context: int,
        max_tokens: int,
        allow_special: bool,
        add_special_tokens: bool = True,
    ) -> None:
        self._codec, self._allow_special = codec, allow_special
        self._max_context, self._max_tokens = max_context, max_tokens
        self._text: GrowingText | None = None
        self._is_start = add_special_tokens

    def append(self, piece: Sequence[int] | str) -> list[int]:
        """Take text, or token ids; returns the ids that became certain. Raises RequestError for an invalid text."""
        if isinstance(piece, str):
            if self._text is None:
                self._text = self._open()
            found = self._text.append(piece)
            if self._codec is not None and self._text.num_held > LONG:
                self._codec.check_length(self._text.held, self._max_context, self._max_tokens)
            return found
        found = self.rest() if self._text is not None else []
        self._text, self._is_start = None, False
        return [*found, *piece]

    def rest(self) -> list[int]:
        """Return the token ids of the held text, as if the prompt ended here."""
        return [] if self._text is None else self._text.rest()

    def _open(self) -> GrowingText:
        codec = self._codec
        if codec is None:
            raise RequestError("a text prompt needs tokenizer.json in the model directory; give token ids")

        def encode(text: str, around: bool) -> list[int]:
            return codec.encode(
                text,
                add_special_tokens=around,
                allow_special=self._allow_special,
                max_context=self._max_context,
                max_tokens=self._max_tokens,
            )

        return GrowingText(codec.cuts, encode, is_start=self._is_start)


def _state(component: Any) -> Any:
    """Read a part of a tokenizer as JSON; None if it is missing. Single parts take less time than the whole."""
    return None if component is None else json.loads(component.__getstate__())


def _parts(component: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [part for each in component[name] for part in _parts(each, name)]
    return [component]


def _joins(model: dict[str, Any]) -> bool:
    """Whether a merge makes a token that continues after a space."""
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    return any(re.search(f"[^{SPACE}]{SPACE}", "".join(pair)) for pair in pairs)
