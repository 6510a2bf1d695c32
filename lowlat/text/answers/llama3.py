"""The tool calls of Llama 3: an answer that is a JSON object, or several with `;` between.

`<|python_tag|>`, with which some answers begin, is a special token, and so no part of the text. Any other answer, and
what follows the calls, is content.
"""

from collections.abc import Sequence

from lowlat.text.answers.base import Calls, Parts, TrimmedText
from lowlat.text.answers.json_call import PendingCall

__all__ = ["PYTHON_TAG", "Llama3Answer"]

PYTHON_TAG = "<|python_tag|>"  # by which a tokenizer of this family is known


class Llama3Answer:
    """One answer to a request with tools."""

    def __init__(self) -> None:
        self._held = ""
        self._calls = Calls()
        self._content = TrimmedText(leading=True)
        self._called = False
        self._call: PendingCall | None = None
        self._step = self._between

    def push(self, pieces: Sequence[str], parts: Parts) -> None:
        """See `AnswerFormat`."""
        self._held += "".join(pieces)
        while self._held and self._step(parts):
            pass

    def finish(self, parts: Parts) -> None:
        """See `AnswerFormat`."""
        if self._call is not None:
            self._held = self._call.raw + self._held
        parts.content += self._content.push(self._held)
        if not self._called:
            parts.content += self._content.finish()
        self._held = ""

    def _between(self, parts: Parts) -> bool:
        """Before a call; returns whether there is more to do."""
        text = self._held.lstrip(" \t\r\n;" if self._called else None)
        if text.startswith("{"):
            self._call = PendingCall(self._held[: len(self._held) - len(text)], arguments_needed=True)
            self._held = text
            self._step = self._in_call
        elif not text:
            return False
        else:
            self._step = self._in_content
        return True

    def _in_call(self, parts: Parts) -> bool:
        call = self._call
        if call is None:
            return False
        self._held = call.push(self._held, self._calls, parts)
        if call.failed:
            self._held = call.raw + self._held
            self._call, self._step = None, self._in_content
        elif call.begun:
            self._content, self._called = TrimmedText(), True
            if call.done:
                self._call, self._step = None, self._between
        return True

    def _in_content(self, parts: Parts) -> bool:
        parts.content += self._content.push(self._held)
        self._held = ""
        return False
