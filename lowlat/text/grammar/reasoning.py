"""The place in an answer where its document begins, for models that reason first: behind `</think>`, or in Harmony's
final channel.

A place is an immutable value, so that each path of a draft tree has its own. It knows no grammar.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from lowlat.text.answers.tagged import END_THOUGHT, THOUGHT
from lowlat.text.codec import TextCodec
from lowlat.text.harmony import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, HarmonyParser, harmony_markers

__all__ = ["AT_ONCE", "Gate", "Phase", "Place", "gate_of"]

MAX_OPENING_TOKENS = 64  # of a prompt's end, to see whether it opens a thought or a message
MAX_HEADER_BYTES = 256
FINAL = "final"
MARK = b"\xff"  # before a marker's spelling: no text has it, so that text that spells a marker is none


class Phase(Enum):
    """The part of an answer that comes next."""

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

    begin    the place behind the prompt
    extra    tokens that may stand in place of the document's first, by phase, and the place behind each
    """

    def __init__(self, codec: TextCodec, begin: Place, extra: Mapping[Phase, Mapping[int, Place]]) -> None:
        self._codec = codec
        self.begin = begin
        self.extra = extra

    @abstractmethod
    def step(self, place: Place, token: int) -> tuple[Place, bytes]:
        """The place behind one more token of a thought, and the bytes of the token that are the document's."""


class TaggedGate(Gate):
    """The gate of models that close their thought by `</think>`, whether that is one token or several."""

    def step(self, place: Place, token: int) -> tuple[Place, bytes]:
        """See Gate."""
        tag = END_THOUGHT.encode()
        before, found, behind = (place.tail + self._codec.token_bytes(token)).partition(tag)
        if not found:
            return Place(Phase.THINKING, before[-(len(tag) - 1) :]), b""
        document = behind.lstrip()
        if document:
            return AT_ONCE, document
        return (AT_ONCE if behind else Place(Phase.BEHIND)), b""


class HarmonyGate(Gate):
    """The gate of Harmony: the document is the text of a message in the final channel."""

    def __init__(self, codec: TextCodec, begin: Place) -> None:
        super().__init__(codec, begin, {})
        self._markers = harmony_markers(codec)

    def step(self, place: Place, token: int) -> tuple[Place, bytes]:
        """See Gate."""
        marker = self._markers.get(token)
        if marker is None:
            tail = place.tail + self._codec.token_bytes(token) if place.tail else b""
            return Place(Phase.THINKING, tail if len(tail) <= MAX_HEADER_BYTES else b""), b""
        if marker in (START, *ENDS):
            return Place(Phase.THINKING), b""
        if marker == CHANNEL:
            return Place(Phase.THINKING, MARK + CHANNEL.encode()), b""
        if marker == CONSTRAIN and place.tail:
            return Place(Phase.THINKING, place.tail + MARK + CONSTRAIN.encode()), b""
        if marker == MESSAGE and _is_final(place.tail):
            return AT_ONCE, b""
        return Place(Phase.THINKING), b""


def _is_final(header: bytes) -> bool:
    """Whether a header, from its channel marker on, names the final channel."""
    channel = header.removeprefix(MARK + CHANNEL.encode()).partition(MARK)[0].decode("utf-8", "replace")
    words = [word for word in channel.split() if not word.startswith("to=")]
    return bool(header) and words[:1] == [FINAL]


def gate_of(codec: TextCodec, prompt: Sequence[int], *, parsed: bool) -> Gate | None:
    """The gate of an answer; None where its document begins at once.

    prompt  token ids; its end says whether a thought or a message is open
    parsed  reasoning is taken out of the answer's text, so that the model may choose to think first
    """
    opening = prompt[-MAX_OPENING_TOKENS:]
    if HarmonyParser.speaks(codec):
        gate = HarmonyGate(codec, Place(Phase.THINKING))
        ids = {text: number for number, text in harmony_markers(codec).items()}
        if ids[START] not in opening:
            return None
        for token in opening[len(opening) - 1 - list(reversed(opening)).index(ids[START]) :]:
            if gate.begin.phase is Phase.THINKING:
                gate.begin, _ = gate.step(gate.begin, token)
        return gate if gate.begin.phase is Phase.THINKING else None
    text = codec.decode(opening, skip_special_tokens=False).rstrip()
    thought = codec.token_id(THOUGHT)
    line_breaks = (codec.encode(breaks, add_special_tokens=False) for breaks in ("\n", "\n\n"))
    behind = {ids[0]: AT_ONCE for ids in line_breaks if len(ids) == 1}
    extra: dict[Phase, Mapping[int, Place]] = {Phase.BEHIND: behind}
    if text.endswith(THOUGHT):
        return TaggedGate(codec, Place(Phase.THINKING), extra)
    if thought is None or not parsed or text.endswith(END_THOUGHT):
        return None
    return TaggedGate(codec, Place(Phase.MAY_THINK), extra | {Phase.MAY_THINK: {thought: Place(Phase.THINKING)}})
