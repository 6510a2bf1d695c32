"""An answer stream makes one request's answer of its token ids: text, stop strings, and the parts of the answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowlat.errors import RequestError
from lowlat.options.request import Parse, ToolCallDelta
from lowlat.text.answers.base import AnswerFormat, Parts, Tools
from lowlat.text.answers.formats import format_of, open_thought, thought_tags
from lowlat.text.answers.harmony import HarmonyAnswer
from lowlat.text.answers.tagged import TaggedAnswer
from lowlat.text.codec import TextCodec
from lowlat.text.detokenizer import IncrementalDetokenizer
from lowlat.text.harmony import HarmonyParser, harmony_markers, open_header

__all__ = ["AnswerDelta", "AnswerStream"]


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

    tools  the functions that may be called, where calls are parsed
    num_reasoning_tokens  of those pushed so far, tokens of reasoning, those that mark it included
    Raises RequestError for calls in a format that is not known.
    """

    def __init__(
        self,
        codec: TextCodec,
        parse: Parse,
        *,
        stop: Sequence[str] = (),
        prefix_ids: Sequence[int] = (),
        stop_enabled_after: int = 0,
        tools: Tools | None = None,
    ) -> None:
        self.num_reasoning_tokens = 0
        self._num_open = 0  # tokens that have brought nothing yet: reasoning or another part may begin with them
        self._format: AnswerFormat | None = None
        markers: dict[int, str] = {}
        if parse != "none":
            self._format, markers = _format(codec, prefix_ids, (tools or Tools()) if parse == "tools" else None)
        self._text = IncrementalDetokenizer(
            codec, stop=stop, prefix_ids=prefix_ids, stop_enabled_after=stop_enabled_after, markers=markers
        )

    def push(self, token_ids: Sequence[int]) -> AnswerDelta:
        """Take new tokens; after a stop string they are ignored. Raises RuntimeError after `finish`."""
        if self._format is None:
            delta = self._text.push(token_ids)
            return AnswerDelta(delta.text, delta.stopped, delta.num_tokens_used)
        parts, num_used = Parts(), 0
        for token_id in token_ids:  # each by itself: its part is counted, however many come together
            delta = self._text.push((token_id,))
            num_used += delta.num_tokens_used
            self._take(self._format, delta.text, parts)
            if delta.stopped is not None:
                self._format.finish(parts)
                break
        return _delta(parts, self._text.stopped, num_used)

    def _take(self, answer: AnswerFormat, text: str, parts: Parts) -> None:
        """Hand on the text that a token made certain, and count the token with the part that it belongs to."""
        begun = answer.thinking
        shown = len(parts.reasoning), len(parts.content), len(parts.tool_calls)
        answer.push(self._text.take_pieces(text), parts)
        self._num_open += 1
        if begun or answer.thinking or len(parts.reasoning) > shown[0]:
            self.num_reasoning_tokens += self._num_open
            self._num_open = 0
        elif (len(parts.content), len(parts.tool_calls)) != shown[1:]:
            self._num_open = 0

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
    return AnswerDelta(parts.content, stopped, num_tokens_used, parts.reasoning, tuple(_joined(parts.tool_calls)))


def _joined(calls: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """A push's tool calls, the pieces of one call's arguments as one."""
    joined: list[ToolCallDelta] = []
    for call in calls:
        last = joined[-1] if joined else None
        if last is not None and last.name is None and call.name is None and last.index == call.index:
            joined[-1] = replace(last, arguments=last.arguments + call.arguments)
        else:
            joined.append(call)
    return joined


def _format(codec: TextCodec, prompt: Sequence[int], tools: Tools | None) -> tuple[AnswerFormat | None, dict[int, str]]:
    """The format in which a model answers, None for one that marks nothing, and the tokens that are its marks.

    tools  None: calls are not parsed
    """
    if HarmonyParser.speaks(codec):
        return HarmonyAnswer(tools=tools, begun=open_header(codec, prompt)), harmony_markers(codec)
    opened = open_thought(codec, prompt)
    thought = thought_tags(codec) if opened is None else opened[0]
    kind = None if tools is None else format_of(codec)
    if kind is None and tools is not None and codec.has_chat_template:
        raise RequestError(
            "parse: the model's chat template has tool calls in a format that is not known; leave tools away, or read "
            "the text (parse 'reasoning')"
        )
    syntax = None if kind is None else kind.syntax
    if thought is None and syntax is None:
        return None, {}
    tags = {*((thought.opening, thought.closing) if thought else ()), *(() if syntax is None else syntax.tags)}
    markers = {number: text for number, text in codec.added_tokens().items() if text in tags}  # which are no text
    made = TaggedAnswer(
        thought=thought,
        thinking=opened is not None,
        thought_begun=opened is not None and opened[1],
        syntax=syntax,
        tools=tools,
        silent=frozenset(markers.values()),
    )
    return made, markers
