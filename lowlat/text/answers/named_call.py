"""Newer models of Mistral write tool calls as `name[ARGS]{...}`, or with an id `name[CALL_ID]id[ARGS]{...}`."""

from lowlat.text.answers.base import CallBody, Calls, Parts
from lowlat.text.answers.json_call import MAX_NAME, ObjectText
from lowlat.text.templates.tags import ARGUMENTS_MARK, ID_MARK

__all__ = ["NamedCall"]

MAX_ID = 64


class NamedCall(CallBody):
    """One call: all before the object of its arguments is held, which is short.

    raw  text before it that belongs to it
    """

    def __init__(self, raw: str) -> None:
        super().__init__(raw)
        self._head = ""
        self._object = ObjectText()

    def push(self, text: str, calls: Calls, parts: Parts) -> str:
        """See CallBody."""
        if not self.begun:
            before, brace, after = text.partition("{")
            self._head += before
            self.raw += before
            if not brace:
                self.failed = len(self._head) > MAX_NAME + MAX_ID + len(ID_MARK + ARGUMENTS_MARK)
                return ""
            text = brace + after
            name = self._head.partition(ARGUMENTS_MARK)[0].partition(ID_MARK)[0].strip()
            if not name or len(name) > MAX_NAME or any(character.isspace() for character in name):
                self.failed = True
                return text
            self.begin(name, calls, parts)
        taken = self._object.push(text)
        calls.arguments(text[:taken], parts)
        self.done = self._object.done
        return text[taken:]
