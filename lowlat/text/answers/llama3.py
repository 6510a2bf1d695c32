"""The tool calls of Llama 3: an answer that is a JSON object, or several with `;` between.

`<|python_tag|>`, with which some answers begin, is a special token, and so no part of the text. Any other answer, and
what follows the calls, is content.
"""

from collections.abc import Sequence

from lowlat.text.answers.base import Calls, Parts, TrimmedText
from lowlat.text.answers.json_call import CallReader

__all__ = ["PYTHON_TAG", "Llama3Answer"]

PYTHON_TAG = "<|python_tag|>"  # by which a tokenizer of this family is known


class Llama3Answer:
    """One answer to a request with tools."""

    def __init__(self) -> None:
        self._held = ""
        self._calls = Calls()
        self._content = TrimmedText(leading=True)
        self._called = False
        self._raw = ""  # before and of a call that is not certain to be one
        self._reader: CallReader | None = None
        self._step = self._between

    def push(self, pieces: Sequence[str], parts: Parts) -> None:
        """See `AnswerFormat`."""
        self._held += "".join(pieces)
        while self._held and self._step(parts):
            pass

    def finish(self, parts: Parts) -> None:
        """See `AnswerFormat`."""
        parts.content += self._content.push(self._raw + self._held)
        if not self._called:
            parts.content += self._content.finish()
        self._raw = self._held = ""

    def _between(self, parts: Parts) -> bool:
        """Before a call; returns whether there is more to do."""
        text = self._held.lstrip(" \t\r\n;" if self._called else None)
        if text.startswith("{"):
            self._raw += self._held[: len(self._held) - len(text)]
            self._held = text
            self._reader = CallReader(arguments_needed=True)
            self._step = self._in_call
        elif not text:
            return False
        else:
            self._step = self._in_content
        return True

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
                self._content, self._called, self._raw = TrimmedText(), True, ""
                self._calls.begin(reader.name or "", parts)
            self._calls.arguments(reader.take_arguments(), parts)
        if reader.failed:
            self._step = self._in_content
            self._held, self._raw = self._raw + self._held, ""
        elif reader.done:
            self._step = self._between
        return True

    def _in_content(self, parts: Parts) -> bool:
        parts.content += self._content.push(self._held)
        self._held = ""
        return False
