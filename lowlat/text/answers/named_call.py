"""Mistral's newer tool calls: `name[ARGS]{...}`, or with an id `name[CALL_ID]id[ARGS]{...}`."""

from lowlat.text.answers.base import Calls, Parts
from lowlat.text.answers.json_call import MAX_NAME, ObjectText
from lowlat.text.tags import ARGUMENTS_MARK, ID_MARK

__all__ = ["NamedCall"]

MAX_ID = 64


class NamedCall:
    """The CallBody of one call: all before the object of its arguments is held, which is short.

    raw  text before it that belongs to it
    """

    def __init__(self, raw: str) -> None:
        self._raw = raw
        self._head = ""
        self._object = ObjectText()
        self.begun = self.done = self.failed = False

    @property
    def raw(self) -> str:
        """See CallBody."""
        return "" if self.begun else self._raw + self._head

    def push(self, text: str, calls: Calls, parts: Parts) -> str:
        """See CallBody."""
        if not self.begun:
            before, brace, behind = text.partition("{")
            self._head += before
            if not brace:
                self.failed = len(self._head) > MAX_NAME + MAX_ID + len(ID_MARK + ARGUMENTS_MARK)
                return ""
            name = self._head.partition(ARGUMENTS_MARK)[0].partition(ID_MARK)[0].strip()
            if not name or len(name) > MAX_NAME or any(character.isspace() for character in name):
                self.failed = True
                return brace + behind
            self.begun = True
            calls.begin(name, parts)
            text = brace + behind
        taken = self._object.push(text)
        calls.arguments(text[:taken], parts)
        self.done = self._object.done
        return text[taken:]
