"""The format of Hermes, Qwen and the models that think in tags: `<think>...</think>`, `<tool_call>{...}</tool_call>`.

A tag is text, whether the tokenizer has a token for it or not. White space beside tags belongs to no part.
"""

from collections.abc import Sequence

from lowlat.text.answers.base import Calls, Parts, TrimmedText, held_suffix
from lowlat.text.answers.json_call import CallReader

__all__ = ["CALL", "END_CALL", "END_THOUGHT", "THOUGHT", "TaggedAnswer"]

THOUGHT, END_THOUGHT = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


class TaggedAnswer:
    """One answer.

    thinking  whether the prompt's end opened a thought, with which the answer goes on
    tools     whether calls are looked for
    """

    def __init__(self, *, thinking: bool, tools: bool) -> None:
        self._tools = tools
        self._held = ""
        self._calls = Calls()
        self._thought = TrimmedText()
        self._content = TrimmedText(leading=True)
        self._called = False
        self._reader: CallReader | None = None
        self._raw = ""  # of a call that is not certain to be one
        self._step = self._in_thought if thinking else self._at_begin

    def push(self, pieces: Sequence[str], parts: Parts) -> None:
        """See `AnswerFormat`."""
        self._held += "".join(pieces)
        while self._held and self._step(parts):
            pass

    def finish(self, parts: Parts) -> None:
        """See `AnswerFormat`."""
        if self._step == self._in_thought:
            parts.reasoning += self._thought.push(self._held)
        elif self._step == self._in_call:
            self._give_up(parts)
            parts.content += self._content.push(self._held)
        elif self._step != self._after_call:
            parts.content += self._content.push(self._held)
        self._held = ""
        if not self._called:
            parts.content += self._content.finish()

    def _at_begin(self, parts: Parts) -> bool:
        """A thought opens the answer, or there is none; returns whether there is more to do."""
        text = self._held.lstrip()
        if text.startswith(THOUGHT):
            self._held = text[len(THOUGHT) :]
            self._step = self._in_thought
        elif THOUGHT.startswith(text):
            return False
        else:
            self._step = self._in_content
        return True

    def _in_thought(self, parts: Parts) -> bool:
        text, tag, rest = self._held.partition(END_THOUGHT)
        if tag:
            parts.reasoning += self._thought.push(text)
            self._held = rest
            self._content = TrimmedText()
            self._step = self._in_content
            return True
        keep = held_suffix(text, END_THOUGHT)
        parts.reasoning += self._thought.push(text[: len(text) - keep])
        self._held = text[len(text) - keep :]
        return False

    def _in_content(self, parts: Parts) -> bool:
        if not self._tools:
            parts.content += self._content.push(self._held)
            self._held = ""
            return False
        text, tag, rest = self._held.partition(CALL)
        keep = 0 if tag else held_suffix(text, CALL)
        parts.content += self._content.push(text[: len(text) - keep])
        self._held = rest if tag else text[len(text) - keep :]
        if tag:
            self._reader = CallReader(arguments_needed=False)
            self._raw = CALL
            self._step = self._in_call
        return bool(tag)

    def _in_call(self, parts: Parts) -> bool:
        reader = self._reader
        if reader is None:
            return False
        was_begun = reader.begun
        taken = reader.push(self._held)
        if not was_begun:
            self._raw += self._held[:taken]
        self._held = self._held[taken:]
        if reader.begun and not reader.failed:
            if not was_begun:
                self._content, self._called = TrimmedText(), True
                self._calls.begin(reader.name or "", parts)
                self._raw = ""
            self._calls.arguments(reader.take_arguments(), parts)
        if reader.failed and not was_begun:
            self._give_up(parts)
            self._step = self._in_content
        elif reader.done or reader.failed:
            self._step = self._after_call
        return True

    def _after_call(self, parts: Parts) -> bool:
        """The closing tag; where another text comes first, the call ends without."""
        text = self._held.lstrip()
        if text.startswith(END_CALL):
            self._held = text[len(END_CALL) :]
        elif END_CALL.startswith(text):
            return False
        self._step = self._in_content
        return True

    def _give_up(self, parts: Parts) -> None:
        """A call that is none is content, its tag included."""
        parts.content += self._content.push(self._raw)
        self._raw = ""
