"""The place in an answer where its document begins, for models that reason first: after the thought's closing tag, or
in Harmony's first message that is content.

A place is an immutable value, so that each path of a draft tree has its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from lowlat.text.answers.formats import open_thought, thought_tags
from lowlat.text.codec import TextCodec
from lowlat.text.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, HarmonyParser, harmony_markers

__all__ = ["AT_ONCE", "Gate", "Phase", "Place", "gate_of"]

MAX_OPENING_TOKENS = 64  # of a prompt's end, to see whether it opens a thought or a message
MAX_HEADER_BYTES = 64  # with the longest token still fewer than those from which a reader takes a header for text
ANALYSIS = "analysis"
LONG = b"\xfe"  # before a header that must come to its end
MARK = b"\xff"  # before a marker's spelling: no text has it, so that text that spells a marker is none


class Phase(Enum):
    """The part of an answer that comes next."""

    BOUND = auto()  # one of the gate's tokens, and nothing else
    MAY_THINK = auto()  # the document, or a thought before it
    THINKING = auto()
    BEHIND = auto()  # the document, or the line breaks that part it from the thought
    DOCUMENT = auto()
    ENDED = auto()


class Place(NamedTuple):
    """The phase that an answer is in; in a thought also its last bytes, which may begin its closing tag."""

    phase: Phase
    tail: bytes = b""


AT_ONCE = Place(Phase.DOCUMENT)


class Gate(ABC):
    """Follows an answer to the place where its document begins.

    begin    the place after the prompt
    extra    tokens that may stand in place of the document's first, by phase, and the place after each
    """

    def __init__(self, codec: TextCodec, begin: Place, extra: Mapping[Phase, Mapping[int, Place]]) -> None:
        self._codec = codec
        self.begin = begin
        self._extra = extra

    def instead(self, place: Place) -> Mapping[int, Place]:
        """The tokens that may stand at a place next to the document's, or that must where it is bound."""
        return self._extra.get(place.phase, {})

    @abstractmethod
    def step(self, place: Place, token: int) -> tuple[Place, bytes]:
        """The place after one more token of a thought, and the bytes of the token that are the document's."""


class TaggedGate(Gate):
    """The gate of models that close their thought by a tag, whether that is one token or several."""

    def __init__(
        self, codec: TextCodec, begin: Place, extra: Mapping[Phase, Mapping[int, Place]], closing: str
    ) -> None:
        super().__init__(codec, begin, extra)
        self._closing = closing.encode()

    def step(self, place: Place, token: int) -> tuple[Place, bytes]:
        """See Gate."""
        tag = self._closing
        before, found, behind = (place.tail + self._codec.token_bytes(token)).partition(tag)
        if not found:
            return Place(Phase.THINKING, before[-(len(tag) - 1) :]), b""
        document = behind.lstrip()
        if document:
            return AT_ONCE, document
        return (AT_ONCE if behind else Place(Phase.BEHIND)), b""


class HarmonyGate(Gate):
    """The gate of Harmony: the document is the answer's first content, in whatever channel it comes.

    Content is what is no analysis and goes to nobody's function. So that none comes without the grammar, a message
    begins as the format has it: its first tokens are bound.

    begun  the prompt's tokens after its last message began
    """

    def __init__(self, codec: TextCodec, begun: Sequence[int]) -> None:
        super().__init__(codec, AT_ONCE, {})
        self._markers = harmony_markers(codec)
        ids = {text: number for number, text in self._markers.items()}
        role = codec.encode("assistant", add_special_tokens=False)
        order = [ids[START], *role, ids[CHANNEL]]
        header = Place(Phase.THINKING, MARK + CHANNEL.encode())
        stages = [Place(Phase.BOUND, f"{place}".encode()) for place in range(len(order))]
        self._bound = {
            stage: {token: behind} for stage, token, behind in zip(stages, order, [*stages[1:], header], strict=True)
        }
        self._message = ids[MESSAGE]
        self._between, self._role, self._channel = stages[0], stages[1], stages[-1]
        self.begin = self._channel
        if any(token in self._markers for token in begun):
            self.begin = Place(Phase.THINKING, MARK)
            for token in begun:
                if self.begin.phase is Phase.THINKING:
                    self.begin, _ = self.step(self.begin, token)

    def instead(self, place: Place) -> Mapping[int, Place]:
        """See Gate."""
        if place.phase is not Phase.BOUND:
            return {}
        if place.tail.startswith(LONG):
            header = place.tail.removeprefix(LONG)
            return {self._message: AT_ONCE if _is_content(header) else Place(Phase.THINKING)}
        return self._bound.get(place, {})

    def step(self, place: Place, token: int) -> tuple[Place, bytes]:
        """See Gate. The tail is that of a header, from its marker on; empty in a message's text."""
        marker, tail = self._markers.get(token), place.tail
        if marker is None:
            if not tail:
                return place, b""
            tail += self._codec.token_bytes(token)
            is_short = len(tail) <= MAX_HEADER_BYTES
            return (Place(Phase.THINKING, tail) if is_short else Place(Phase.BOUND, LONG + tail)), b""
        if marker == START:
            return self._role, b""
        if marker in ENDS:
            return self._between, b""
        if marker == MESSAGE:
            return (AT_ONCE if _is_content(tail) else Place(Phase.THINKING)), b""
        if marker == CONSTRAIN and not tail:
            return place, b""
        return Place(Phase.THINKING, tail + MARK + marker.encode()), b""


def _is_content(header: bytes) -> bool:
    """Whether the text of a message with this header is content."""
    words = header.decode("utf-8", "replace").replace("\ufffd", " ")
    channel = ""
    for part in words.split(CHANNEL)[1:]:
        named = [word for word in part.split(CONSTRAIN)[0].split() if not word.startswith("to=")]
        channel = named[0] if named else channel
    return channel != ANALYSIS and not any(word.startswith("to=") and len(word) > 3 for word in words.split())


def gate_of(codec: TextCodec, prompt: Sequence[int], *, parsed: bool) -> Gate | None:
    """The gate of an answer; None where its document begins at once.

    prompt  token ids; its end says whether a thought or a message is open
    parsed  reasoning is taken out of the answer's text, so that the model may choose to think first
    """
    opening = prompt[-MAX_OPENING_TOKENS:]
    if HarmonyParser.speaks(codec):
        ids = {text: number for number, text in harmony_markers(codec).items()}
        if ids[START] not in opening:
            return None
        gate = HarmonyGate(codec, opening[len(opening) - list(reversed(opening)).index(ids[START]) :])
        return None if gate.begin == AT_ONCE else gate
    text = codec.decode(opening, skip_special_tokens=False).rstrip()
    opened = open_thought(codec, prompt)
    tags = thought_tags(codec) if opened is None else opened[0]
    if tags is None:
        return None
    thought = codec.token_id(tags.opening)
    line_breaks = (codec.encode(breaks, add_special_tokens=False) for breaks in ("\n", "\n\n"))
    behind = {ids[0]: AT_ONCE for ids in line_breaks if len(ids) == 1}
    extra: dict[Phase, Mapping[int, Place]] = {Phase.BEHIND: behind}
    if opened is not None:
        return TaggedGate(codec, Place(Phase.THINKING), extra, tags.closing)
    if thought is None or not parsed or text.endswith(tags.closing):
        return None
    extra[Phase.MAY_THINK] = {thought: Place(Phase.THINKING)}
    return TaggedGate(codec, Place(Phase.MAY_THINK), extra, tags.closing)
