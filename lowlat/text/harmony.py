"""This module parses an answer of gpt-oss into channels as it comes: analysis, commentary, final.

The format is Harmony's: `<|start|>role<|channel|>name<|message|>text`, then `<|end|>`, `<|return|>` or `<|call|>`. The
markers are separate tokens, so text that merely spells one has no effect. The parser accepts any stream of tokens,
since a model may write anything: text outside of the format is returned without a channel. A header is never text, even
if it is cut off, or has its parts in another order or twice. The package openai_harmony is not used: it fetches its own
vocabulary from the network, and refuses ill-formed answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowlat.text.codec import TextCodec
from lowlat.text.detokenizer import IncrementalDetokenizer, Marker

__all__ = [
    "ChannelDelta",
    "ChannelText",
    "HarmonyParser",
    "HarmonyReader",
    "harmony_markers",
    "open_header",
    "parse_channels",
]

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
NEEDED = (START, CHANNEL, MESSAGE, ENDS[0])
ORDER = (START, CHANNEL, CONSTRAIN, MESSAGE)
MAX_HEADER_CHARACTERS = 256  # anything longer is no header: the rest is text, which can be shown as it comes
MAX_TOKEN_ID = (1 << 32) - 1


@dataclass(frozen=True)
class ChannelText:
    """One message, or text outside of messages.

    channel       "analysis", "commentary", "final" or another; None for text without a channel
    recipient     the receiver, such as "functions.weather", or None
    content_type  the name after `<|constrain|>`, such as "json", or None
    complete      whether its end marker came
    """

    channel: str | None
    text: str
    role: str | None
    recipient: str | None
    content_type: str | None
    complete: bool


@dataclass(frozen=True)
class ChannelDelta:
    """Text that was added to a message; `message` counts, from 0, the messages that have text or a recipient."""

    message: int
    channel: str | None
    text: str
    recipient: str | None = None


@dataclass
class _Open:
    """A message that is still being written.

    header  until `in_text`: its markers, each with the text after it
    marked  whether a marker has shown that the text belongs to a header
    """

    header: list[list[str]] = field(default_factory=lambda: [[START, ""]])
    marked: bool = False
    begun: bool = False
    in_text: bool = False
    shown: bool = False
    role: str | None = None
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    text: list[str] = field(default_factory=list)

    @property
    def is_header(self) -> bool:
        """Whether the text so far is a header: a marker shows it, or it continues the role that the prompt named."""
        words = "".join(text for _, text in self.header).split()
        return self.marked or all(word == "assistant" or "to=".startswith(word[:3]) for word in words)


class HarmonyReader:
    """Parses one answer's text, in which the markers are separate pieces.

    role  the role at the prompt's end; the answer continues with its channel or text
    """

    def __init__(self, *, role: str | None = "assistant") -> None:
        self._messages: list[ChannelText] = []
        self._shown = -1
        self._open = _Open(role=role)

    @property
    def messages(self) -> list[ChannelText]:
        """The messages that have ended; after `finish` all of them."""
        return list(self._messages)

    @property
    def current(self) -> tuple[str | None, str | None]:
        """Channel and recipient of the message whose text comes next; (None, None) between messages' texts."""
        message = self._open
        return (message.channel, message.recipient) if message.in_text else (None, None)

    def push(self, pieces: Sequence[str]) -> list[ChannelDelta]:
        """Take more of the answer; returns the text that became certain."""
        deltas: list[ChannelDelta] = []
        for piece in pieces:
            if not isinstance(piece, Marker):
                self._plain(piece, deltas)
            elif piece in ENDS:
                self._open.begun = True
                self._close(deltas, complete=self._open.in_text)
            else:
                self._mark(piece, deltas)
        return deltas

    def finish(self) -> list[ChannelDelta]:
        """Return the held text; nothing follows."""
        deltas: list[ChannelDelta] = []
        self._close(deltas, complete=False)
        return deltas

    def _plain(self, text: str, deltas: list[ChannelDelta]) -> None:
        message = self._open
        message.begun = True
        if message.in_text:
            self._show(text, deltas)
            return
        message.header[-1][1] += text
        if sum(len(part) for _, part in message.header) > MAX_HEADER_CHARACTERS:
            if message.marked:
                self._read_header(message)
                message.in_text = True
            else:
                self._as_text(deltas)

    def _mark(self, marker: str, deltas: list[ChannelDelta]) -> None:
        """Take a marker of a header; inside a message's text it begins another message, as START always does."""
        message = self._open
        if marker == CONSTRAIN and message.in_text:
            return  # it is no text, and begins no header
        if (message.in_text or marker == START) and message.begun:
            self._close(deltas, complete=False)
        message = self._open
        message.begun = message.marked = True
        message.header.append([marker, ""])
        if marker == MESSAGE:
            self._read_header(message)
            message.in_text = True

    def _read_header(self, message: _Open) -> None:
        for part, text in message.header:
            words = text.split()
            plain = [word for word in words if not word.startswith("to=")]
            for word in words:
                if word.startswith("to=") and len(word) > 3:
                    message.recipient = word[3:]
            if part == START and plain:
                message.role = plain[0]
            elif part == CHANNEL and plain:
                message.channel = plain[0]
            elif part == CONSTRAIN and plain:
                message.content_type = plain[0]

    def _as_text(self, deltas: list[ChannelDelta]) -> None:
        """Show text that turned out to be no header, without a channel."""
        message = self._open
        message.in_text = True
        self._show("".join(text for _, text in message.header), deltas)

    def _close(self, deltas: list[ChannelDelta], *, complete: bool) -> None:
        if not self._open.in_text and not self._open.is_header:
            self._as_text(deltas)
        message = self._open
        if message.recipient is not None:
            self._show("", deltas)
        if message.begun:
            self._messages.append(
                ChannelText(
                    message.channel,
                    "".join(message.text),
                    message.role,
                    message.recipient,
                    message.content_type,
                    complete,
                )
            )
        self._open = _Open()

    def _show(self, text: str, deltas: list[ChannelDelta]) -> None:
        message = self._open
        if not text and (message.shown or message.recipient is None):
            return
        if not message.shown:
            self._shown += 1
            message.shown = True
        message.text.append(text)
        deltas.append(ChannelDelta(self._shown, message.channel, text, message.recipient))


class HarmonyParser:
    """Parses one answer's tokens. No answer raises an error, and no token is held back without need.

    role  see HarmonyReader
    """

    def __init__(self, codec: TextCodec, *, role: str | None = "assistant") -> None:
        self._text = IncrementalDetokenizer(codec, markers=harmony_markers(codec))
        self._reader = HarmonyReader(role=role)
        self._finished = False

    @staticmethod
    def speaks(codec: TextCodec | None) -> bool:
        """Whether a model's tokenizer has the format's markers."""
        return codec is not None and set(NEEDED) <= set(codec.added_tokens().values())

    @property
    def messages(self) -> list[ChannelText]:
        """The messages that have ended; all of them after `finish`."""
        return self._reader.messages

    def push(self, token_ids: Sequence[int]) -> list[ChannelDelta]:
        """Take new tokens; returns the text that became certain. Tokens after `finish` are ignored."""
        if self._finished:
            return []
        known = [token for token in token_ids if 0 <= token <= MAX_TOKEN_ID]
        return self._reader.push(self._text.take_pieces(self._text.push(known).text))

    def finish(self) -> list[ChannelDelta]:
        """Return the held text; no token follows."""
        if self._finished:
            return []
        self._finished = True
        return self._reader.push(self._text.take_pieces(self._text.finish())) + self._reader.finish()


def harmony_markers(codec: TextCodec) -> dict[int, str]:
    """Ids of the format's markers, and their spellings."""
    markers = {*ORDER, *ENDS}
    return {number: text for number, text in codec.added_tokens().items() if text in markers}


def open_header(codec: TextCodec, prompt: Sequence[int]) -> list[str]:
    """Return the header of the message that a prompt leaves open, with its markers as separate pieces.

    It is empty if there is no open message, or only its role. Time: linear in the tokens from the last message on; in a
    prompt that is no chat these are all tokens.
    """
    markers = harmony_markers(codec)
    begun: list[int] = []
    for token in reversed(prompt):
        marker = markers.get(token)
        if marker in ENDS:
            return []
        if marker == START:
            break
        if marker == MESSAGE:  # what came so far is the message's text
            begun.clear()
        begun.append(token)
    else:
        return []
    header = [Marker(markers[token]) if token in markers else _text_of(codec, token) for token in reversed(begun)]
    return header if any(isinstance(piece, Marker) for piece in header) else []


def _text_of(codec: TextCodec, token: int) -> str:
    return codec.token_bytes(token).decode("utf-8", "replace")


def parse_channels(
    codec: TextCodec | None, answer: Sequence[int] | str, *, role: str | None = "assistant"
) -> list[ChannelText] | None:
    """Parse an answer's messages, in order; returns None if the model does not speak Harmony.

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
