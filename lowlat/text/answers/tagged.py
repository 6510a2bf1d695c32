"""The format of Hermes, Qwen and the models that think in tags: `<think>...</think>`, `<tool_call>{...}</tool_call>`.

A tag is text, whether the tokenizer has a token for it or not. White space beside tags belongs to no part.
"""

from collections.abc import Sequence

from lowlat.text.answers.base import Calls, Parts, TrimmedText, held_suffix
from lowlat.text.answers.json_call import PendingCall

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
        self._call: PendingCall | None = None
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
            raw = "" if self._call is None else self._call.raw
            parts.content += self._content.push(raw + self._held)
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
            self._call = PendingCall(CALL, arguments_needed=False)
            self._step = self._in_call
        return bool(tag)

    def _in_call(self, parts: Parts) -> bool:
        call = self._call
        if call is None:
            return False
        self._held = call.push(self._held, self._calls, parts)
        if call.failed and call.raw:  # what is no call is content, its tag included
            parts.content += self._content.push(call.raw)
            self._step = self._in_content
        elif call.failed or call.done:
            self._step = self._after_call
        if call.begun and not call.failed:
            self._content, self._called = TrimmedText(), True
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
