"""The answer of a gpt-oss, taken apart into channels as it comes: analysis, commentary, final.

The format is Harmony's: `<|start|>role<|channel|>name<|message|>text`, then `<|end|>`, `<|return|>` or `<|call|>`. It
is read from token ids: the markers are tokens of their own, so text that merely spells one changes nothing. Any stream
of tokens is taken, for a model may write anything: what is not in the format is handed on as text without a channel. No
package is used: openai_harmony brings a vocabulary of its own, which it fetches from the network, and refuses what is
ill-formed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowlat.text.codec import TextCodec
from lowlat.text.detokenizer import IncrementalDetokenizer

__all__ = ["ChannelDelta", "ChannelText", "HarmonyParser", "parse_channels"]

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
NEEDED = (START, CHANNEL, MESSAGE, ENDS[0])
MAX_HEADER_TOKENS = 64  # a longer one is none: what follows is text, and can be shown as it comes
MAX_TOKEN_ID = (1 << 32) - 1


@dataclass(frozen=True)
class ChannelText:
    """One message, or text in no message.

    channel       "analysis", "commentary", "final" or another; None for text that is in no channel
    recipient     to whom it is, such as "functions.weather", or None
    content_type  what `<|constrain|>` names, such as "json", or None
    complete      whether its end marker came
    token_ids     all of its tokens, markers included: those of all messages together are the stream's
    """

    channel: str | None
    text: str
    role: str | None
    recipient: str | None
    content_type: str | None
    complete: bool
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ChannelDelta:
    """Text that some tokens added to a message; `message` counts the messages that have text, from 0."""

    message: int
    channel: str | None
    text: str


@dataclass
class _Open:
    """A message that is still being written; its header, by the marker before each part, until `stream` is there."""

    tokens: list[int] = field(default_factory=list)
    header: dict[str, list[int]] = field(default_factory=dict)
    part: str = START
    role: str | None = None
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    text: list[str] = field(default_factory=list)
    stream: IncrementalDetokenizer | None = None


class HarmonyParser:
    """Takes one answer's tokens apart. Nothing that a model writes raises; a token is not held back needlessly.

    role  the role that the prompt's end has named already, with whose channel or text the answer goes on
    """

    def __init__(self, codec: TextCodec, *, role: str | None = "assistant") -> None:
        self._codec = codec
        added = {text: number for number, text in codec.added_tokens().items()}
        self._markers = {added[text]: text for text in (*NEEDED, CONSTRAIN, *ENDS) if text in added}
        self._messages: list[ChannelText] = []
        self._shown = -1
        self._open = _Open(role=role)
        self._finished = False

    @staticmethod
    def speaks(codec: TextCodec | None) -> bool:
        """Whether a model's tokenizer has the format's markers."""
        return codec is not None and set(NEEDED) <= set(codec.added_tokens().values())

    @property
    def messages(self) -> list[ChannelText]:
        """The messages that have ended; all of them after `finish`."""
        return list(self._messages)

    def push(self, token_ids: Sequence[int]) -> list[ChannelDelta]:
        """Take new tokens; those after `finish` are ignored. Returns what they made certain."""
        deltas: list[ChannelDelta] = []
        if self._finished:
            return deltas
        for token in token_ids:
            marker = self._markers.get(token)
            if marker is None:
                self._plain(token, deltas)
            elif marker in ENDS:
                self._open.tokens.append(token)
                self._close(deltas, complete=self._open.stream is not None)
            else:
                self._mark(marker, token, deltas)
        return deltas

    def finish(self) -> list[ChannelDelta]:
        """Return what was held back; no token follows."""
        deltas: list[ChannelDelta] = []
        if not self._finished:
            self._close(deltas, complete=False)
            self._finished = True
        return deltas

    def _plain(self, token: int, deltas: list[ChannelDelta]) -> None:
        message = self._open
        message.tokens.append(token)
        if message.stream is not None:
            self._show(message.stream.push(_known([token])).text, deltas)
            return
        message.header.setdefault(message.part, []).append(token)
        if sum(map(len, message.header.values())) > MAX_HEADER_TOKENS:
            self._as_text(deltas)

    def _mark(self, marker: str, token: int, deltas: list[ChannelDelta]) -> None:
        """A marker of a header; in a message's text, or out of its order, it begins another message."""
        message = self._open
        order = (START, CHANNEL, CONSTRAIN, MESSAGE)
        in_header = message.stream is None and order.index(marker) > order.index(message.part)
        if marker == CONSTRAIN and message.stream is not None:
            message.tokens.append(token)  # no text, and no header without a channel before it
            return
        if not in_header and message.tokens:
            self._close(deltas, complete=False)
        self._open.tokens.append(token)
        self._open.part = marker
        if marker == MESSAGE:
            self._read_header(self._open)
            self._open.stream = IncrementalDetokenizer(self._codec)

    def _read_header(self, message: _Open) -> None:
        words = {part: self._decode(ids).split() for part, ids in message.header.items()}
        for part, found in words.items():
            plain = [word for word in found if not word.startswith("to=")]
            for word in found:
                if word.startswith("to=") and len(word) > 3:
                    message.recipient = word[3:]
            if part == START and plain:
                message.role = plain[0]
            elif part == CHANNEL and plain:
                message.channel = plain[0]
            elif part == CONSTRAIN and plain:
                message.content_type = plain[0]

    def _as_text(self, deltas: list[ChannelDelta]) -> None:
        """A header that was none becomes text in no channel."""
        message = self._open
        message.stream = IncrementalDetokenizer(self._codec)
        message.channel = None
        pieces = message.stream.push(_known([token for ids in message.header.values() for token in ids]))
        self._show(pieces.text, deltas)

    def _close(self, deltas: list[ChannelDelta], *, complete: bool) -> None:
        if self._open.stream is None and self._open.header:
            self._as_text(deltas)
        message = self._open
        if message.stream is not None:
            self._show(message.stream.finish(), deltas)
        if message.tokens:
            self._messages.append(
                ChannelText(
                    message.channel,
                    "".join(message.text),
                    message.role,
                    message.recipient,
                    message.content_type,
                    complete,
                    tuple(message.tokens),
                )
            )
        self._open = _Open()

    def _show(self, text: str, deltas: list[ChannelDelta]) -> None:
        if not text:
            return
        message = self._open
        if not message.text:
            self._shown += 1
        message.text.append(text)
        deltas.append(ChannelDelta(self._shown, message.channel, text))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._codec.decode(_known(ids))


def _known(ids: Sequence[int]) -> list[int]:
    """Ids that a tokenizer can be asked about."""
    return [token for token in ids if 0 <= token <= MAX_TOKEN_ID]


def parse_channels(
    codec: TextCodec | None, answer: Sequence[int] | str, *, role: str | None = "assistant"
) -> list[ChannelText] | None:
    """An answer's messages in order; None where the model does not speak Harmony.

    answer  token ids, or text in which the markers are spelled out
    Raises RequestError for text that cannot be encoded.
    """
    if codec is None or not HarmonyParser.speaks(codec):
        return None
    parser = HarmonyParser(codec, role=role)
    if isinstance(answer, str):
        answer = codec.encode(answer, add_special_tokens=False, allow_special=True)
    parser.push(answer)
    parser.finish()
    return parser.messages
