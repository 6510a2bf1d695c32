"""One request's answer, step by step: text with its stop strings, and what its model's format makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from lowlat.options.request import Parse, ToolCallDelta
from lowlat.text.answers.base import AnswerFormat, Parts
from lowlat.text.answers.harmony import HarmonyAnswer
from lowlat.text.answers.llama3 import PYTHON_TAG, Llama3Answer
from lowlat.text.answers.tagged import CALL, END_CALL, END_THOUGHT, THOUGHT, TaggedAnswer
from lowlat.text.codec import TextCodec
from lowlat.text.detokenizer import IncrementalDetokenizer
from lowlat.text.harmony import HarmonyParser, harmony_markers

__all__ = ["AnswerDelta", "AnswerStream"]

TAGS = (THOUGHT, END_THOUGHT, CALL, END_CALL)
MAX_OPENING_TOKENS = 16  # of a prompt's end, to see whether it opens a thought


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The part of an answer that one push made certain.

    text             the content; all of the text where the answer is not parsed
    stopped          the stop string that ended the text, or None
    num_tokens_used  of the ids pushed: all, or up to and with the one that completed the stop string
    """

    text: str
    stopped: str | None
    num_tokens_used: int
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class AnswerStream:
    """Decodes a request's token ids and, where `parse` asks for it, takes the answer apart.

    Stop strings are looked for in the whole text, reasoning and calls included: parsing changes no token. The other
    options are those of IncrementalDetokenizer.
    """

    def __init__(
        self,
        codec: TextCodec,
        parse: Parse,
        *,
        stop: Sequence[str] = (),
        prefix_ids: Sequence[int] = (),
        stop_enabled_after: int = 0,
    ) -> None:
        self._format = None if parse == "none" else _format(codec, prefix_ids, tools=parse == "tools")
        markers = {}
        if isinstance(self._format, HarmonyAnswer):
            markers = harmony_markers(codec)
        elif isinstance(self._format, TaggedAnswer):  # where they are special tokens, which are no text
            markers = {number: text for number, text in codec.added_tokens().items() if text in TAGS}
        self._text = IncrementalDetokenizer(
            codec, stop=stop, prefix_ids=prefix_ids, stop_enabled_after=stop_enabled_after, markers=markers
        )

    def push(self, token_ids: Sequence[int]) -> AnswerDelta:
        """Take new tokens; after a stop string they are ignored. Raises RuntimeError after `finish`."""
        delta = self._text.push(token_ids)
        if self._format is None:
            return AnswerDelta(delta.text, delta.stopped, delta.num_tokens_used)
        parts = Parts()
        self._format.push(self._text.take_pieces(delta.text), parts)
        if delta.stopped is not None:
            self._format.finish(parts)
        return _delta(parts, delta.stopped, delta.num_tokens_used)

    def finish(self) -> AnswerDelta:
        """Return what was held back; no token follows. `stopped` names a stop string found only here."""
        ended = self._text.stopped is not None
        text = self._text.finish()
        if self._format is None:
            return AnswerDelta(text, self._text.stopped, 0)
        parts = Parts()
        if not ended:
            self._format.push(self._text.take_pieces(text), parts)
            self._format.finish(parts)
        return _delta(parts, self._text.stopped, 0)


def _delta(parts: Parts, stopped: str | None, num_tokens_used: int) -> AnswerDelta:
    return AnswerDelta(parts.content, stopped, num_tokens_used, parts.reasoning, tuple(parts.tool_calls))


def _format(codec: TextCodec, prompt: Sequence[int], *, tools: bool) -> AnswerFormat | None:
    """The format in which a model answers, by its tokenizer and its chat template; None for one that marks nothing."""
    if HarmonyParser.speaks(codec):
        return HarmonyAnswer(tools=tools)
    opens = codec.decode(prompt[-MAX_OPENING_TOKENS:], skip_special_tokens=False).rstrip().endswith(THOUGHT)
    if tools and codec.spells(PYTHON_TAG) and not codec.spells(CALL):
        return Llama3Answer()
    calls = tools and codec.spells(CALL)
    if opens or calls or codec.spells(END_THOUGHT):
        return TaggedAnswer(thinking=opens, tools=calls)
    return None
